"""Starts, replacements and ends of workers: guarantees for user code at each of them."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from teleloader import DataLoader, RemoteDataset, ServerUnavailable, WorkerDied
from teleloader.api.credentials import Credentials
from teleloader.transport.selection import server_at
from teleloader_server import get_worker_info, serve
from teleloader_server.dispatch.dispatcher import MAX_ATTEMPTS
from teleloader_server.workers import processes, worker
from teleloader_server.workers.arena import Mapping
from tests.conftest import StartServer, eventually
from tests.end_to_end.hosted import Samples
from tests.end_to_end.test_worker_faults import arrived, count, loader_of, shared_counter, stats_of
from tests.server.bench import KeptCursor

# --- Shards that are replaced --------------------------------------------------------------------------------------


class Unrepeatable:
    """Dataset of forty samples in a random order; its worker exits once, after some of them."""

    def __init__(self, after: int = 13) -> None:
        self.dies = shared_counter()
        self.after = after
        self.order: list[int] = []
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        if not self.order or self.position == len(self.order):
            info = get_worker_info()
            mine = np.arange(40)[info.id :: info.num_workers] if info else np.arange(40)
            self.order, self.position = np.random.default_rng().permutation(mine).tolist(), 0
        while self.position < len(self.order):
            self.position += 1
            if self.position == self.after and count(self.dies) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield self.order[self.position - 1]


class Stateful(Unrepeatable):
    """Dataset like `Unrepeatable`, with order and position as its state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the order as an array, which JSON does not support, and the position."""
        return {"order": np.array(self.order), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state."""
        self.order, self.position = state["order"].tolist(), state["position"]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_replaced_worker_continues_from_the_last_state(num_workers: int) -> None:
    """A dataset with a random order loses and repeats no sample when its worker is killed."""
    with serve(Stateful(), num_workers=2) as url:
        found = arrived(loader_of(url, 2, num_workers=num_workers))
        assert stats_of(url)["server"]["worker_restarts"] == 1
    assert sorted(sample for batch in found for sample in batch) == list(range(40))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_dataset_that_cannot_be_iterated_again_is_an_error(num_workers: int) -> None:
    """Without a state, a replacement yields other samples, so that `WorkerDied` is raised and no sample is repeated."""
    with serve(Unrepeatable(), num_workers=2) as url:
        found = arrived(loader_of(url, 2, num_workers=num_workers))
    errors = [error for error in found if isinstance(error, Exception)]
    assert [type(error) for error in errors] == [WorkerDied]
    assert "a second iteration yielded different samples" in str(errors[0])
    samples = [sample for batch in found if batch not in errors for sample in batch]
    assert len(samples) == len(set(samples))


class Consumed:
    """Dataset of a queue's samples; a worker exits in its first batch."""

    def __init__(self) -> None:
        self.taken = shared_counter()

    def __iter__(self) -> Iterator[int]:
        while (sample := count(self.taken)) <= 40:
            if sample == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield sample


def test_samples_of_a_worker_that_delivered_nothing_are_an_error() -> None:
    """They are lost if the dataset yields each sample once, which cannot be verified: the loop gets an error."""
    with serve(Consumed(), num_workers=1) as url:
        found = arrived(loader_of(url, 4, num_workers=1))
    assert [type(batch) for batch in found] == [WorkerDied]
    assert "no delivered batch or state shows its position" in str(found[0])


def test_persistent_workers_may_change_their_number_between_epochs() -> None:
    """New workers start, which iterate the dataset from its beginning."""
    with serve(KeptCursor(), num_workers=2) as url:
        loader = loader_of(url, 2, num_workers=1, persistent_workers=True)
        assert len(arrived(loader)) == 5
        loader.num_workers = 2
        assert [sample for batch in arrived(loader) for sample in batch].count(1) == 2


def test_a_worker_that_dies_between_epochs_leaves_its_position_to_its_replacement() -> None:
    """The next epoch of persistent workers continues the last one, as without an exit."""
    with serve(KeptCursor(), num_workers=1) as url:
        loader = loader_of(url, 2, num_workers=1, persistent_workers=True)
        assert [sample for batch in arrived(loader) for sample in batch] == list(range(1, 11))
        (pid,) = [worker["pid"] for worker in stats_of(url)["workers"] if worker["loader"]]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: stats_of(url)["server"]["worker_restarts"] == 1)
        assert [sample for batch in arrived(loader) for sample in batch] == list(range(12, 22))


def test_a_persistent_worker_is_replaced_in_the_random_state_of_its_epoch() -> None:
    """A replacement starts with the epoch's first random state, not with that of the worker's start."""

    class Drawn:
        def __init__(self) -> None:
            self.dies = shared_counter()

        def __iter__(self) -> Iterator[float]:
            for i in range(20):
                if i == 13 and count(self.dies) == dies_in:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield random.random()

    def epochs() -> list[Any]:
        with serve(Drawn(), num_workers=1) as url:
            loader = loader_of(url, 2, num_workers=1, persistent_workers=True, generator=generator.manual_seed(3))
            return [arrived(loader) for _ in range(3)]

    torch = pytest.importorskip("torch")
    generator = torch.Generator()
    dies_in = -1
    whole = epochs()
    dies_in = 2
    assert epochs() == whole
    assert len({str(epoch) for epoch in whole}) == 3


def test_workers_of_different_loaders_do_not_share_the_epoch_of_a_dataset() -> None:
    """Datasets such as Hugging Face's keep their epoch in memory that forks share: each worker has its own copy."""
    torch = pytest.importorskip("torch")
    both_are_told = multiprocessing.get_context("fork").Barrier(2)

    class Shared:
        def __init__(self) -> None:
            self.epoch = torch.tensor(-1).share_memory_()

        def set_epoch(self, epoch: int) -> None:
            self.epoch.fill_(epoch)

        def __iter__(self) -> Iterator[int]:
            both_are_told.wait(60)
            yield int(self.epoch)

    with serve(Shared(), num_workers=1) as url:
        loaders = [loader_of(url, num_workers=1) for _ in range(2)]
        loaders[1].set_epoch(2)
        assert [arrived(batches) for batches in [iter(loader) for loader in loaders]] == [[[0]], [[2]]]


# --- The machine has no descriptors left ---------------------------------------------------------------------------


@contextmanager
def no_descriptors(*, but: int = 0) -> Iterator[None]:
    """Use up the file descriptors of this process, which runs the server; leave `but` of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + but, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def large(index: int) -> Any:
    """Return a batch that is too large for a channel, so that its memory needs a descriptor in the server."""
    return np.full(2**20, index, np.uint8)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the pool's reasons for exits of workers."""
    found: list[str] = []
    lose = processes.ProcessPool._remove_worker

    def noted(self: Any, process: Any, loss: Any) -> None:
        found.append(loss.reason)
        lose(self, process, loss)

    monkeypatch.setattr(processes.ProcessPool, "_remove_worker", noted)
    return found


def test_batches_wait_until_there_are_descriptors_again(losses: list[str]) -> None:
    """Batches lost for lack of descriptors, however often, are not the cause, and arrive in the end."""
    gate = multiprocessing.get_context("fork").Event()

    def sample(index: int) -> Any:
        if index > 0:
            gate.wait()
        return large(index)

    with serve(Samples(sample, 3), num_workers=1) as url:
        batches = iter(loader_of(url, None, seed=1))
        assert next(batches)[0] == 0
        with no_descriptors():
            gate.set()
            eventually(lambda: len(losses) > 0)
            assert "RLIMIT_NOFILE" in losses[0]
        assert [int(batch[0]) for batch in batches] == [1, 2]


def test_a_request_that_lacks_descriptors_leaves_no_connection_open() -> None:
    """A request uses a second descriptor; without one, the first one is closed, and the error is that of the system."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = server_at(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.5, Credentials())
        with pytest.raises(ServerUnavailable, match="did not respond"):
            server.datasets()  # imports what requests need
        descriptors = psutil.Process().num_fds()
        with no_descriptors(but=1), pytest.raises(ServerUnavailable, match="Too many open files"):
            server.datasets()
        assert psutil.Process().num_fds() == descriptors


def test_batches_do_not_wait_for_descriptors_for_ever(losses: list[str]) -> None:
    """After the batch timeout, the loop gets an error that names the missing resource."""
    gate = multiprocessing.get_context("fork").Event()

    def sample(index: int) -> Any:
        if index > 0:
            gate.wait()
        return large(index)

    with serve(Samples(sample, 2), num_workers=1, batch_timeout=1) as url:
        batches = iter(loader_of(url, None, seed=1))
        assert next(batches)[0] == 0
        with no_descriptors():
            gate.set()
            with pytest.raises(WorkerDied, match=r"RLIMIT_NOFILE is [0-9,]+, with a hard limit of .*ulimit -n"):
                next(batches)


@pytest.mark.parametrize("session", [False, True])
def test_a_lack_of_descriptors_is_never_the_fault_of_a_batch(monkeypatch: pytest.MonkeyPatch, session: bool) -> None:
    """A batch may be lost for it more often than it may end its workers; it is recomputed, and arrives."""
    tries = []

    def mapped(fd: int, size: int) -> Any:
        tries.append(size)
        if len(tries) <= MAX_ATTEMPTS + 2:
            os.close(fd)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return Mapping(fd, size)

    monkeypatch.setattr(processes, "SlotMapping", mapped)
    with serve(Samples(large, 3), num_workers=1) as url:
        batches = list(loader_of(url, None, seed=None if session else 1, num_workers=int(session)))
    assert [int(batch[0]) for batch in batches] == [0, 1, 2]
    assert len(tries) > MAX_ATTEMPTS + 2


@pytest.mark.parametrize("session", [False, True])
def test_a_batch_that_lacks_descriptors_for_too_long_is_an_error(
    monkeypatch: pytest.MonkeyPatch, session: bool
) -> None:
    """After the batch timeout `WorkerDied` names the resource, although workers can be started."""

    def mapped(fd: int, size: int) -> Any:
        os.close(fd)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(processes, "SlotMapping", mapped)
    with serve(Samples(large, 1), num_workers=1, batch_timeout=0.5) as url:
        (error,) = arrived(loader_of(url, None, seed=None if session else 1, num_workers=int(session)))
    assert isinstance(error, WorkerDied)
    assert "RLIMIT_NOFILE" in str(error)
    assert "Retries of the batch exceeded the timeout" in str(error)


def test_a_loader_of_an_object_names_the_descriptors_that_it_lacks() -> None:
    """The error for a local object states the lack of descriptors, not that it is an invalid dataset."""
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
from teleloader import DataLoader
DataLoader([1, 2, 3], num_workers=1, output="numpy")
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("teleloader.TeleloaderError: cannot host a dataset of type list in this")
    assert "the limit on open files (RLIMIT_NOFILE) is 100" in last


# --- Hooks of multiprocessing --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_queue_that_was_used_before_the_fork_carries_what_workers_put() -> None:
    """Hooks of multiprocessing start a new feeder thread in place of the parent's, which finishes at the end."""
    queue: Any = multiprocessing.get_context("fork").Queue()
    queue.put("before")
    assert queue.get(timeout=30) == "before"

    def sample(index: int) -> int:
        queue.put(index)
        return index

    with serve(Samples(sample, 20), num_workers=2) as url:
        assert arrived(loader_of(url, num_workers=2)) == [[i] for i in range(20)]
    assert sorted(queue.get(timeout=30) for _ in range(20)) == list(range(20))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("hosted", ["served", "object"])
def test_generators_are_closed_when_the_loop_is_left(num_workers: int, hosted: str, tmp_path: Path) -> None:
    """Their ``finally`` blocks run, as in torch's workers: files are flushed, and locks are released."""

    class Lines:
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            try:
                yield from range(1000)
            finally:
                (tmp_path / str(info.id if info else 0)).touch()

    def left(loader: Any) -> None:
        for taken, _ in enumerate(loader):
            if taken == num_workers:
                break

    if hosted == "object":
        left(DataLoader(Lines(), num_workers=num_workers, output="numpy"))
    else:
        with serve(Lines(), num_workers=2) as url:
            left(loader_of(url, num_workers=num_workers))
    expected = [str(i) for i in range(max(1, num_workers))]
    eventually(lambda: sorted(path.name for path in tmp_path.iterdir()) == expected)


# --- Seeds ---------------------------------------------------------------------------------------------------------


def test_the_seeds_of_workers_are_int64() -> None:
    """Seeds are int64 as in torch, since user code converts them to tensors and seeds NumPy's generators."""
    torch = pytest.importorskip("torch")

    def sample(index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return torch.tensor([info.seed, torch.initial_seed()])

    with serve(Samples(sample, 40), num_workers=8) as url:
        batches = [DataLoader(RemoteDataset(url), 8, seed=seed, num_workers=0) for seed in (0, 2**64 - 1)]
        assert all(int(batch.min()) >= 0 for loader in batches for batch in loader)

    class Stream:
        def __iter__(self) -> Iterator[Any]:
            return iter(sample(index) for index in range(4))

    with serve(Stream(), num_workers=2) as url:
        for seed in (5, 2**63 - 1, 2**64 - 1):
            found = list(DataLoader(RemoteDataset(url), None, seed=seed, num_workers=2))
            assert all(int(batch.min()) >= 0 for batch in found)


# --- Memory of workers ---------------------------------------------------------------------------------------------


class Remembered:
    """Dataset in which a sample is the number of loaders that the worker stores."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        (mine,) = [found for found in gc.get_objects() if type(found) is worker.Worker]
        return len(mine._loaders)


remembered = Remembered()


def test_workers_forget_the_loaders_that_the_server_forgets(start_server: StartServer) -> None:
    """Each epoch with a client-side sampler is a loader, which shared workers remove after its DELETE."""
    pytest.importorskip("torch")
    server = start_server("tests.end_to_end.test_worker_lives:remembered", "--num-workers", "1")
    loader = DataLoader(RemoteDataset(server.url), 2, shuffle=True)
    counts = [int(batch.max()) for _ in range(20) for batch in loader]
    assert max(counts) <= 3


def test_workers_forget_the_loaders_that_are_too_many(start_server: StartServer) -> None:
    """Many registered loaders of one client fill neither the server's nor the workers' memory."""
    server = start_server(
        "tests.end_to_end.test_worker_lives:remembered", "--num-workers", "1",
        "--limit", "max_loaders=8", "--limit", "max_consumers=8",
    )  # fmt: skip
    counts = [int(batch.max()) for seed in range(40) for batch in DataLoader(RemoteDataset(server.url), 2, seed=seed)]
    assert max(counts) < 20
