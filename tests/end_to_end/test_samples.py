"""torch's own DataLoader and dataset wrappers over a remote dataset, against a real server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader.transport.http import HttpConnection
from tests.conftest import ServerProcess, need

HOSTED = [f"{name}=tests.end_to_end.hosted:{name}" for name in ("numbers", "augmented", "failing")]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Run a server with two workers."""
    need("torch")
    running = ServerProcess(*HOSTED, "--port", "0", "--num-workers", "2")
    yield running
    running.end()


def plain(batches: Any) -> list[Any]:
    """Return batches of numbers as lists."""
    return [[column.tolist() for column in batch] for batch in batches]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_loader_loads_a_remote_dataset(server: ServerProcess, num_workers: int) -> None:
    """A remote dataset and its wrappers work in torch's DataLoader, whose workers are forked."""
    from torch.utils.data import ConcatDataset, Subset, random_split
    from torch.utils.data import DataLoader as TorchLoader

    numbers = [(i, float(i) ** 2) for i in range(100)]
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
    consumers = [consumer["consumer"] for consumer in server.stats()["consumers"]]
    pids = {name.split(":")[-1].split("/")[0] for name in consumers if name.endswith("/samples")} - {str(os.getpid())}
    assert len(pids) >= 2, consumers


def test_random_numbers_are_those_of_single_requests(server: ServerProcess) -> None:
    """A sample with augmentation is the same in any request."""
    remote = RemoteDataset(server.url, "augmented")
    together = remote.__getitems__([9, 3, 39])
    assert str(together) == str([remote[9], remote[3], remote[39]])


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
