"""Sessions that a server lost during an epoch, because it restarted or the client was idle for too long."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset, WorkerDied
from teleloader_server import get_worker_info
from tests.conftest import ROOT, ServerProcess, StartServer, eventually
from tests.server.bench import KeptCursor

LENGTH = 400


def part() -> list[int]:
    """Return the samples of this worker's shard."""
    info = get_worker_info()
    return list(range(LENGTH))[info.id :: info.num_workers] if info else list(range(LENGTH))


class Seeded:
    """Dataset with an order that depends on the worker's seed."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(part()).tolist())


class Own:
    """Dataset with a random order."""

    def __iter__(self) -> Iterator[int]:
        mine = part()
        random.SystemRandom().shuffle(mine)
        return iter(mine)


class Stateful:
    """Dataset with a random order in its state."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        if self.position == len(self.order):
            self.order, self.position = list(Own()), 0
        while self.position < len(self.order):
            self.position += 1
            yield self.order[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return the order and the position."""
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the order and the position."""
        self.order, self.position = state["order"], state["position"]


class Consumed:
    """Dataset whose samples are yielded once, in whichever process."""

    def __iter__(self) -> Iterator[int]:
        for i in part():
            try:
                os.close(os.open(f"{os.environ['CONSUMED']}/{i}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            yield i


class Growing:
    """Dataset of a file's lines, of which there are more each time: the latest come first."""

    def __iter__(self) -> Iterator[int]:
        file = Path(os.environ["CONSUMED"]) / "lines"
        lines = [*range(LENGTH + 4 * (file.stat().st_size if file.exists() else 0))][::-1]
        with file.open("a") as more:
            more.write("+")
        return iter(lines)


class Awaited(Consumed):
    """Dataset like `Consumed`, whose second sample waits for a file."""

    def __iter__(self) -> Iterator[int]:
        for number, sample in enumerate(super().__iter__()):
            while number and not os.path.exists(f"{os.environ['CONSUMED']}/go on"):
                time.sleep(0.01)
            yield sample


seeded, own, stateful, consumed, growing, awaited = Seeded(), Own(), Stateful(), Consumed(), Growing(), Awaited()
cursor = KeptCursor()


class Forgetting:
    """Server that loses its clients' sessions.

    Args:
        start: Starts it.
    """

    def __init__(self, start: Callable[[], ServerProcess]) -> None:
        self._start = start
        self.server = start()

    def restart(self) -> None:
        """Kill the server with SIGKILL and restart it."""
        self.server.kill()
        self.server = self._start()

    def end_session(self) -> None:
        """End the session, as the server does after its idle timeout."""
        (key,) = {worker["loader"] for worker in self.server.stats()["workers"] if worker["loader"]}
        httpx.delete(f"{self.server.url}/v1/loaders/{key}").raise_for_status()


@pytest.fixture
def host(
    start_server: StartServer, free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Forgetting]:
    """Host a dataset of this module."""
    monkeypatch.setenv("CONSUMED", str(tmp_path))
    return lambda name: Forgetting(lambda: start_server(f"{__name__}:{name}", "--num-workers", "1", port=free_port))


def delivered(server: Forgetting, dataset: str, num_workers: int, forget: str) -> tuple[list[int], list[Exception]]:
    """Return the samples and errors of an epoch in which the server loses the session."""
    remote = RemoteDataset(server.server.url, dataset)
    batches = iter(DataLoader(remote, 4, num_workers=num_workers, output="numpy"))
    samples = [sample for batch in islice(batches, 11) for sample in batch.tolist()]
    getattr(server, forget)()
    errors: list[Exception] = []
    while True:
        try:
            samples += next(batches).tolist()
        except StopIteration:
            return samples, errors
        except WorkerDied as error:
            errors.append(error)


@pytest.mark.parametrize(
    ("dataset", "num_workers", "forget"),
    [("seeded", 2, "restart"), ("stateful", 2, "restart"), ("stateful", 1, "end_session")],
)
def test_an_epoch_continues(host: Callable[[str], Forgetting], dataset: str, num_workers: int, forget: str) -> None:
    """The epoch continues from the last received state, or by repeated iteration; each sample arrives once."""
    samples, errors = delivered(host(dataset), dataset, num_workers, forget)
    assert (sorted(samples), errors) == (list(range(LENGTH)), [])


@pytest.mark.parametrize(
    ("dataset", "num_workers", "forget"),
    [("own", 2, "restart"), ("consumed", 1, "restart"), ("consumed", 2, "end_session"), ("growing", 1, "end_session")],
)
def test_an_epoch_that_cannot_continue_is_an_error(
    host: Callable[[str], Forgetting], dataset: str, num_workers: int, forget: str
) -> None:
    """Each shard ends with `WorkerDied`: no sample is repeated, and none is lost silently."""
    samples, errors = delivered(host(dataset), dataset, num_workers, forget)
    assert len(samples) == len(set(samples))
    assert len(errors) == num_workers
    assert all("a second iteration yielded different samples" in str(error) for error in errors)


def test_a_server_that_restarts_before_the_first_batch_is_an_error(
    host: Callable[[str], Forgetting], tmp_path: Path
) -> None:
    """Its workers had fetched samples, but no batch arrived with which a second iteration could be compared."""
    server = host("awaited")
    batches = iter(DataLoader(RemoteDataset(server.server.url, "awaited"), 4, num_workers=1, output="numpy"))
    eventually(lambda: (tmp_path / "0").exists())
    server.restart()
    (tmp_path / "go on").touch()
    with pytest.raises(WorkerDied, match="no delivered batch or state shows its position"):
        next(batches)
    assert list(batches) == []


def test_a_server_that_restarts_between_epochs_continues_an_iterator(host: Callable[[str], Forgetting]) -> None:
    """The next epoch continues from the final state of the previous one, as with a persistent worker."""
    server = host("cursor")
    loader = DataLoader(
        RemoteDataset(server.server.url, "cursor"), 5, num_workers=1, persistent_workers=True, output="numpy"
    )
    assert [batch.tolist() for batch in loader] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    server.restart()
    assert [batch.tolist() for batch in loader] == [[12, 13, 14, 15, 16], [17, 18, 19, 20, 21]]


STOPPED = """
import sys
from teleloader import DataLoader
from teleloader.fetch import fetcher
from teleloader_server.dispatch import service
from tests.end_to_end.test_forgotten_sessions import LENGTH, Own

service.SESSION_IDLE, service.HOUSEKEEPING_INTERVAL, fetcher.TOUCH_EVERY = 2.0, 1.0, 0.2
batches = iter(DataLoader(Own(), 4, num_workers=2))
samples = next(batches).tolist()
print("stop me", flush=True)
sys.stdin.readline()
samples += [sample for batch in batches for sample in batch.tolist()]
assert sorted(samples) == list(range(LENGTH))
"""


def test_a_program_that_is_stopped_with_its_server_continues() -> None:
    """After Ctrl-Z stopped both, the server does not count that time as the client's idle time."""
    program = subprocess.Popen(
        [sys.executable, "-c", STOPPED], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    with program:
        assert program.stdout is not None
        assert program.stdout.readline() == "stop me\n"
        os.killpg(program.pid, signal.SIGSTOP)
        time.sleep(4)  # longer than a session may be idle
        os.killpg(program.pid, signal.SIGCONT)
        program.communicate("go on\n", timeout=60)
    assert program.returncode == 0
