"""torch's own DataLoader and dataset wrappers over a remote dataset, against a real server."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader.transport.http import HttpConnection, HttpServer
from teleloader_server import serve
from tests.conftest import ROOT, ServerProcess, StartServer, need

HOSTED = [f"{name}=tests.end_to_end.hosted:{name}" for name in ("numbers", "augmented", "failing")]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Run a server with two workers."""
    need("torch")
    running = ServerProcess(*HOSTED, "--port", "0", "--num-workers", "2")
    yield running
    running.end()


def ports(server: ServerProcess) -> set[int]:
    """Return the local ports of this process's connections to a server."""
    port = urlsplit(server.url).port
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in connections if each.raddr and each.raddr.port == port}


def samplers(server: ServerProcess) -> set[str]:
    """Return the PIDs of the processes that have fetched single samples."""
    consumers = [consumer["consumer"] for consumer in server.stats()["consumers"]]
    return {name.split(":")[-1].split("/")[0] for name in consumers if name.endswith("/samples")}


def squares(indices: Any) -> list[list[float]]:
    """Return samples of the dataset `numbers`."""
    return [[i, float(i) ** 2] for i in indices]


def plain(batches: Any) -> list[Any]:
    """Return batches of numbers as lists."""
    return [[column.tolist() for column in batch] for batch in batches]


def first_columns(samples: list[Any]) -> Any:
    """Collate only the first column of samples."""
    return [sample[0] for sample in samples]


def test_samples_are_not_collated() -> None:
    """A dataset's collate function is for batches: single samples are those of the dataset."""
    default_collate = pytest.importorskip("torch.utils.data").default_collate
    with serve([(i, i**2) for i in range(6)], collate_fn=first_columns) as url:
        remote = RemoteDataset(url)
        assert next(iter(DataLoader(remote, batch_size=2))) == [0, 1]
        assert remote[2] == [2, 4]
        assert remote.__getitems__([3, 1]) == [[3, 9], [1, 1]]
        assert plain([next(iter(DataLoader(remote, batch_size=2, collate_fn=default_collate)))]) == [[[0, 1], [0, 1]]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_loader_loads_a_remote_dataset(server: ServerProcess, num_workers: int) -> None:
    """A remote dataset and its wrappers work in torch's DataLoader, whose workers are forked."""
    from torch.utils.data import ConcatDataset, Subset, random_split
    from torch.utils.data import DataLoader as TorchLoader

    numbers = squares(range(100))
    remote: Any = RemoteDataset(server.url, "numbers")
    indices = [5, 99, 5, 0, *range(30, 60, 3)]
    for wrapped, local in (
        (remote, numbers),
        (Subset(remote, indices), Subset(numbers, indices)),
        (ConcatDataset([remote, remote]), numbers + numbers),
        (random_split(remote, [90, 10])[0], None),
    ):
        found = plain(TorchLoader(wrapped, 8, num_workers=num_workers))
        expected = [numbers[index] for index in wrapped.indices] if local is None else local
        assert found == plain(TorchLoader(expected, 8))


def test_forked_workers_use_connections_of_their_own(server: ServerProcess) -> None:
    """Workers of torch that fork during an iteration of the parent request samples separately from it."""
    from torch.utils.data import DataLoader as TorchLoader

    remote: Any = RemoteDataset(server.url, "numbers")
    ours = iter(DataLoader(remote, 4))
    first = next(ours)
    assert plain(TorchLoader(remote, 4, num_workers=2)) == plain([first, *ours])
    assert len(samplers(server) - {str(os.getpid())}) >= 2


def test_random_numbers_are_those_of_single_requests(server: ServerProcess) -> None:
    """A sample with augmentation is the same in any request."""
    remote = RemoteDataset(server.url, "augmented")
    together = remote.__getitems__([9, 3, 39])
    assert str(together) == str([remote[9], remote[3], remote[39]])


def test_random_numbers_are_the_same_in_each_epoch_of_torchs_loader(server: ServerProcess) -> None:
    """Single samples are always those of epoch 0, unlike those of later epochs of teleloader's own loader."""
    from torch.utils.data import DataLoader as TorchLoader

    remote: Any = RemoteDataset(server.url, "augmented")
    theirs, ours = TorchLoader(remote, None), DataLoader(remote, None)
    epochs = [str(list(theirs)) for _ in range(2)]
    assert epochs[0] == epochs[1] == str(list(ours))
    assert str(list(ours)) != epochs[0]


def test_a_failed_sample_fails_its_batch_of_torchs_loader(server: ServerProcess) -> None:
    """The exception of the sample is raised, with and without workers of torch."""
    from torch.utils.data import DataLoader as TorchLoader

    remote: Any = RemoteDataset(server.url, "failing")
    for num_workers in (0, 1):
        batches = iter(TorchLoader(remote, 10, num_workers=num_workers))
        assert next(batches).tolist() == [*range(10)]
        with pytest.raises(ValueError, match=r"sample 17 is damaged[\s\S]*with the indices \[17\]"):
            next(batches)


def test_ready_samples_are_fetched_with_one_request(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has up to 128 ranges of samples, and returns all of them once they are computed."""
    requests: list[int] = []
    send = HttpConnection.send

    def counting(connection: HttpConnection, wanted: Any, trace: Any = None) -> None:
        requests.append(len(wanted.batches))
        send(connection, wanted, trace)

    monkeypatch.setattr(HttpConnection, "send", counting)
    remote = RemoteDataset(server.url, "numbers")
    indices = [*range(0, 100, 2), 1, 7]
    remote.__getitems__(indices)
    requests.clear()
    remote.__getitems__(indices)
    assert requests == [52]


def test_calls_share_a_registration_and_a_connection(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further calls, also for single samples, neither register nor connect."""
    registered: list[int] = []
    register = HttpServer.register

    def counting(server: HttpServer, spec: Any, epoch: int) -> Any:
        registered.append(epoch)
        return register(server, spec, epoch)

    monkeypatch.setattr(HttpServer, "register", counting)
    before = ports(server)
    remote = RemoteDataset(server.url, "numbers")
    assert remote.__getitems__([3, 1]) == squares([3, 1])
    opened = ports(server) - before
    assert [remote[7], *remote.__getitems__([5, 99])] == squares([7, 5, 99])
    assert ports(server) - before == opened
    assert len(opened) == len(registered) == 1


def test_threads_use_connections_of_their_own(server: ServerProcess) -> None:
    """Concurrent calls return the samples of their own indices, over at most one connection for each thread."""
    before = ports(server)
    remote = RemoteDataset(server.url, "numbers")
    together = Barrier(4)

    def fetch(thread: int) -> bool:
        indices = range(thread, 100, 4)
        together.wait()
        return all(remote.__getitems__(indices) == squares(indices) for _ in range(10))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(fetch, range(4)))
    # each thread that finds no pool opens one; the last one is kept
    assert 1 <= len(ports(server) - before) <= 4


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_connection_in_use_survives_workers_of_torch(server: ServerProcess, method: str) -> None:
    """Workers that start after the first call open connections of their own; the parent keeps its connection."""
    from torch.utils.data import DataLoader as TorchLoader

    before = ports(server)
    remote: Any = RemoteDataset(server.url, "numbers")
    assert remote[1] == [1, 1.0]
    opened, earlier = ports(server) - before, samplers(server)
    batches = iter(TorchLoader(remote, 4, num_workers=2, multiprocessing_context=method))
    assert remote.__getitems__([2, 3]) == squares([2, 3])
    assert plain(batches) == plain(TorchLoader(squares(range(100)), 4))
    assert remote[4] == [4, 16.0]
    assert ports(server) - before == opened
    assert len(samplers(server) - earlier) == 2


def test_connections_close_with_the_dataset(server: ServerProcess) -> None:
    """A dataset closes its connections when it is garbage-collected; its pickle contains none."""
    before = ports(server)
    remote = RemoteDataset(server.url, "numbers")
    assert remote[1] == [1, 1.0]
    copied = pickle.loads(pickle.dumps(remote))
    assert len(ports(server) - before) == 1
    assert copied[2] == [2, 4.0]
    assert len(ports(server) - before) == 2
    del remote, copied
    assert ports(server) <= before


def test_connections_close_at_exit(server: ServerProcess) -> None:
    """A process that exits with a dataset in use prints no warning about open sockets."""
    program = (
        "from teleloader import RemoteDataset\n"
        f"remote = RemoteDataset({server.url!r}, 'numbers')\n"
        "sample = remote[5]\n"
        "print(sample)"
    )
    done = subprocess.run([sys.executable, "-X", "dev", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[5, 25.0]\n", "")


def test_a_server_may_restart_between_calls(start_server: StartServer, free_port: int) -> None:
    """The next call registers with the new server."""
    remote = None
    for how in ("end", "kill", "end"):
        running = start_server(*HOSTED, port=free_port)
        remote = remote or RemoteDataset(running.url, "numbers")
        assert remote.__getitems__([1, 2]) == squares([1, 2])
        getattr(running, how)()


def test_samples_come_from_another_server_after_an_exit(start_server: StartServer) -> None:
    """If the server of earlier calls is unavailable, the next call uses another one."""
    first, second = (start_server(*HOSTED, "--num-workers", "1") for _ in range(2))
    remote = RemoteDataset([first.url, second.url], "numbers", reconnect_timeout=0)
    assert remote[1] == [1, 1.0]
    used = first if ports(first) else second
    used.kill()
    assert remote.__getitems__([2, 3]) == squares([2, 3])
    assert ports(first if used is second else second)
