"""Workers that hang, stop, exit, leak and fork: every batch arrives once, and errors have place and reason."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from teleloader import DataLoader, LoaderTimeout, RemoteDataset, RemoteError, WorkerDied
from teleloader_server import serve
from teleloader_server.workers import health
from tests.conftest import ROOT, StartServer, eventually, need
from tests.end_to_end.hosted import Samples, Stream

TARGET = "tests.end_to_end.test_worker_faults:"
CGROUP = Path("/sys/fs/cgroup/memory")


def arrived(batches: Iterable[Any]) -> list[Any]:
    """Return the results of an iteration: batches as lists, and exceptions."""
    found: list[Any] = []
    iterator = iter(batches)
    while True:
        try:
            found.append(next(iterator).tolist())
        except StopIteration:
            return found
        except Exception as error:  # noqa: BLE001 - whatever is raised is what is looked at
            found.append(error)


def loader_of(url: str, batch_size: int | None = 1, **arguments: Any) -> DataLoader:
    """Return a loader of NumPy arrays."""
    return DataLoader(RemoteDataset(url), batch_size, output="numpy", **arguments)


def stats_of(url: str) -> Any:
    """Return the current /stats."""
    return httpx.get(f"{url}/stats").raise_for_status().json()


def computed(url: str) -> int:
    """Return the number of computed batches."""
    return int(stats_of(url)["datasets"][0]["batches_computed"])


def pids_of(url: str) -> list[int]:
    """Return the PIDs of the running workers."""
    return [worker["pid"] for worker in stats_of(url)["workers"] if worker["pid"] and worker["state"] != "starting"]


def shared_counter() -> Any:
    """Return a counter that all workers share."""
    return multiprocessing.get_context("fork").Value("i", 0)


def count(counter: Any) -> int:
    """Increment a counter; return its value."""
    with counter.get_lock():
        counter.value += 1
        return int(counter.value)


class Gate:
    """Gate at which workers wait until the test opens it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._opened = context.Value("b", 0)
        self.reached = context.Event()

    def wait(self) -> None:
        """Wait in a worker until the gate opens."""
        self.reached.set()
        while not self._opened.value:  # an event could not be set after a worker was killed that waits for it
            time.sleep(0.01)

    def open(self) -> None:
        """Open the gate."""
        self._opened.value = 1


# -- unresponsive workers


def _sleep() -> None:
    while True:
        time.sleep(60)


def _deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _hold_the_gil() -> None:
    libc = ctypes.PyDLL(None)
    while True:
        libc.sleep(60)


def _spin() -> None:
    while True:
        pass


@pytest.mark.parametrize("hang", [_sleep, _deadlock, _hold_the_gil, _spin])
@pytest.mark.parametrize("session", [False, True])
def test_a_batch_that_hangs_is_an_error_that_says_where(hang: Callable[[], None], session: bool) -> None:
    """The error comes once, in its place, with indices and stack; all other batches arrive, also queued ones."""
    tries = shared_counter()

    def sample(index: int) -> int:
        if index == 5:
            count(tries)
            hang()
        return index

    with serve(Samples(sample, 20), num_workers=2, batch_timeout=0.5) as url:
        began = time.monotonic()
        found = arrived(loader_of(url, 2, seed=None if session else 1, num_workers=2 if session else 0))
        took = time.monotonic() - began
    error = found[2]
    assert isinstance(error, LoaderTimeout)
    assert [batch for batch in found if batch is not error] == [[i, i + 1] for i in range(0, 20, 2) if i != 4]
    text = str(error)
    assert "was killed: a batch exceeded the timeout of 0.5 s (--batch-timeout). Stack of the worker:" in text
    assert f"in {hang.__name__}" in text
    assert "batch 2 of epoch 0, with the indices [4, 5]" in text
    assert tries.value == 1, "what hangs once hangs again, and each time costs the limit"
    assert took < 0.5 + 10


def test_a_hang_costs_other_consumers_nothing() -> None:
    """Other workers serve all other clients, and compute the batches queued behind the hang."""
    gate = Gate()
    made = shared_counter()

    def sample(index: int) -> int:
        if index == 20:
            gate.wait()  # also in a backup
        else:
            count(made)
        return index

    with serve({"stuck": Samples(sample, 24), "fine": Samples(lambda i: i, 100)}, num_workers=2) as url:
        stuck: list[Any] = []
        loader = DataLoader(RemoteDataset(url, "stuck"), 1, output="numpy", seed=1)
        waiting = threading.Thread(target=lambda: stuck.extend(arrived(loader)))
        waiting.start()
        assert gate.reached.wait(30)
        for epoch in range(3):
            fine = DataLoader(RemoteDataset(url, "fine"), 1, output="numpy", seed=epoch)
            assert arrived(fine) == [[i] for i in range(100)]
        assert len(stuck) <= 20
        gate.open()
        waiting.join(30)
    assert stuck == [[i] for i in range(24)]
    assert made.value == 23, "what was taken back is not made twice"


def test_a_worker_that_takes_its_time_is_left_alone() -> None:
    """The timeout applies to one batch: a worker may be busy for any time, with slow batches."""

    def sample(index: int) -> int:
        time.sleep(0.2)
        return index

    with serve(Samples(sample, 8), num_workers=1, batch_timeout=1) as url:
        assert arrived(loader_of(url, seed=1)) == [[i] for i in range(8)]
        assert stats_of(url)["server"]["worker_restarts"] == 0


def test_without_a_limit_a_batch_may_take_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``batch_timeout=0``, a batch may take any time as long as its worker runs."""
    monkeypatch.setattr(health, "CHECK_INTERVAL", 0.02)
    gate = Gate()

    def sample(index: int) -> int:
        gate.wait()
        return index

    with serve(Samples(sample, 2), num_workers=1, batch_timeout=0) as url:
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.extend(arrived(loader_of(url))))
        waiting.start()
        assert gate.reached.wait(30)
        gate.open()
        waiting.join(30)
    assert found == [[0], [1]]


def test_a_worker_that_never_starts_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """A worker-init function that hangs is killed after the same timeout; clients get an error, the log the stack."""

    def hang(_: int) -> None:
        _sleep()

    with (
        serve(Samples(lambda i: i), num_workers=1, worker_init_fn=hang, batch_timeout=0.2) as url,
        pytest.raises(
            WorkerDied, match=r"the server cannot start a worker: .* start-up exceeded the timeout of 0\.2 s"
        ),
    ):
        next(iter(loader_of(url)))
    assert any("in _sleep" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("num_workers", [None, 0, 2])
def test_a_worker_that_exits_at_each_start_is_an_error_where_no_other_can_compute_its_batches(
    num_workers: int | None,
) -> None:
    """Private workers compute batches in turn, so that the loop gets an error; shared ones replace each other."""

    def end(worker: int) -> None:
        if worker == 1:
            os._exit(3)

    with serve(Samples(lambda i: i, 4), num_workers=2, worker_init_fn=end) as url:
        batches = iter(loader_of(url, seed=1 if num_workers is None else None, num_workers=num_workers or 0))
        if not num_workers:
            assert arrived(batches) == [[0], [1], [2], [3]]
            return
        with pytest.raises(WorkerDied, match=r"the server cannot start a worker: .* exited with code 3"):
            list(batches)


class Replayed:
    """Dataset of 40 slow samples; the worker exits once during the iteration."""

    def __init__(self) -> None:
        self.dies = shared_counter()

    def __iter__(self) -> Iterator[int]:
        for i in range(40):
            time.sleep(0.02)
            if i == 35 and count(self.dies) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield i


def test_a_repeated_iteration_may_exceed_the_timeout_of_a_batch() -> None:
    """A new worker may iterate to its position for longer than the batch timeout."""
    with serve(Replayed(), num_workers=1, batch_timeout=0.4) as url:
        assert arrived(loader_of(url, num_workers=1)) == [[i] for i in range(40)]


# -- stopped processes


@pytest.fixture
def short_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Detect stopped processes soon."""
    monkeypatch.setattr(health, "CHECK_INTERVAL", 0.05)
    monkeypatch.setattr(health, "STOP_TIMEOUT", 0.2)


@pytest.mark.usefixtures("short_stops")
@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_stopped_worker_is_replaced(all_of_them: bool) -> None:
    """After SIGSTOP, other workers compute its batches, whereas torch waits forever."""
    with serve(Samples(lambda i: i, 2000), num_workers=2) as url:
        batches = iter(loader_of(url, seed=1, num_workers=2, prefetch_factor=2))
        seen = [next(batches).tolist() for _ in range(10)]
        stopped = pids_of(url)[: None if all_of_them else 1]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        seen += arrived(batches)
        # an idle worker is not replaced until it gets a batch
        assert seen == [[i] for i in range(2000)]
        if all_of_them:
            last_exits = [worker["last_exit"] for worker in stats_of(url)["workers"]]
            assert any("was killed: stopped by SIGSTOP" in (last or "") for last in last_exits)
        assert psutil.Process().status() != psutil.STATUS_STOPPED


@pytest.mark.usefixtures("short_stops")
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN], ids=lambda number: number.name)
@pytest.mark.parametrize("session", [False, True])
def test_a_batch_that_stops_each_worker_is_an_error(number: signal.Signals, session: bool) -> None:
    """A batch that stops its worker fails after three workers that had only this batch, as for an exit."""
    tries = shared_counter()

    def sample(index: int) -> int:
        if index == 2:
            count(tries)
            os.setpgid(0, 0)  # the kernel ignores SIGTSTP and SIGTTIN in orphaned process groups, as jobs of CI are
            os.kill(os.getpid(), number)
        return index

    with serve(Samples(sample, 4), num_workers=1) as url:
        found = arrived(loader_of(url, seed=None if session else 1, num_workers=int(session)))
    error = found[2]
    assert [batch for batch in found if batch is not error] == [[0], [1], [3]]
    assert isinstance(error, WorkerDied)
    assert "was killed: stopped by SIGSTOP" in str(error)
    assert "every worker that loaded the batch exited" in str(error)
    assert 3 <= tries.value <= 4, "beside other batches a stop is nobody's fault"


@pytest.mark.usefixtures("short_stops")
def test_a_stop_from_outside_costs_no_batch() -> None:
    """A batch survives two stops in a row, because its third attempt may succeed."""
    tries = shared_counter()

    def sample(index: int) -> int:
        if count(tries) <= 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return index

    with serve(Samples(sample, 1), num_workers=1) as url:
        assert arrived(loader_of(url)) == [[0]]
    assert tries.value == 3


@pytest.mark.usefixtures("short_stops")
def test_a_stopped_forkserver_is_continued() -> None:
    """Exited workers are replaced although the fork server was stopped; no other worker is affected."""
    with serve(Samples(lambda i: i, 500), num_workers=2) as url:
        batches = iter(loader_of(url, seed=1, num_workers=2, prefetch_factor=2))
        seen = [next(batches).tolist() for _ in range(10)]
        (victim, survivor) = pids_of(url)
        forkserver = psutil.Process(victim).ppid()
        os.kill(forkserver, signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        seen += arrived(batches)
        assert seen == [[i] for i in range(500)]
        eventually(lambda: len(pids_of(url)) == 2)
        assert survivor in pids_of(url)
        assert psutil.Process(survivor).ppid() == forkserver


# -- deaths


def test_the_death_of_the_forkserver_costs_no_batch() -> None:
    """All workers exit with the fork server; a new one forks new workers, and the epoch continues."""
    with serve(Samples(lambda i: i, 500), num_workers=2) as url:
        batches = iter(loader_of(url, seed=1, num_workers=2, prefetch_factor=2))
        seen = [next(batches).tolist() for _ in range(10)]
        before = pids_of(url)
        os.kill(psutil.Process(before[0]).ppid(), signal.SIGKILL)
        seen += arrived(batches)
        assert seen == [[i] for i in range(500)]
        eventually(lambda: (pids := set(pids_of(url))) and not pids & set(before))


def test_all_workers_may_be_killed_again_and_again() -> None:
    """After ten kills in an epoch, all batches arrive exactly, with one restart per kill."""

    def sample(index: int) -> int:
        time.sleep(0.002)
        return index

    killed = 0
    with serve(Samples(sample, 300), num_workers=2) as url:
        batches = iter(loader_of(url, seed=1, num_workers=2, prefetch_factor=2))
        seen = []
        reached = 0
        for _ in range(10):
            # a batch must not be lost with three workers, or it would be taken for the cause
            while computed(url) < reached + 6:
                seen.append(next(batches).tolist())
            reached = computed(url)
            for pid in eventually(lambda: pids_of(url)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
        seen += arrived(batches)
        assert seen == [[i] for i in range(300)]
        assert 10 <= stats_of(url)["server"]["worker_restarts"] <= killed


def test_useless_workers_are_replaced_ever_more_slowly(caplog: pytest.LogCaptureFixture) -> None:
    """The delay of a restart doubles if the worker completed nothing, to limit the load on the machine."""
    with serve(Samples(lambda i: i), num_workers=1, worker_init_fn=lambda _: os._exit(7)) as url:
        with pytest.raises(WorkerDied):
            next(iter(loader_of(url, seed=1)))
        eventually(lambda: stats_of(url)["workers"][0]["restarts"] >= 4)
    delays = [
        text.partition("starting a new worker in ")[2] for text in caplog.messages if "starting a new worker in" in text
    ]
    assert delays[:4] == ["0.05 s", "0.10 s", "0.20 s", "0.40 s"]


def test_a_batch_that_is_made_again_is_the_same() -> None:
    """Random numbers are the same, too, even if the exited worker had drawn half of them."""

    def epoch(dies: bool) -> list[Any]:
        tries = shared_counter()

        def sample(index: int) -> np.ndarray[Any, Any]:
            drawn = np.array([index, random.random(), np.random.normal()])
            if dies and index == 9 and count(tries) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return drawn

        with serve(Samples(sample, 40), num_workers=2) as url:
            return arrived(loader_of(url, 4, seed=3, shuffle=True))

    assert epoch(dies=True) == epoch(dies=False)


def test_a_segmentation_fault_is_reported_and_its_stack_logged(start_server: StartServer) -> None:
    """The error has torch's text; the server's log has the stack."""
    server = start_server(f"{TARGET}crashing", "--num-workers", "1")
    found = arrived(loader_of(server.url))
    assert [found[0], found[2]] == [[0], [2]]
    assert isinstance(found[1], WorkerDied)
    assert "killed by signal SIGSEGV (Segmentation fault)" in str(found[1])
    server.await_line("Fatal Python error: Segmentation fault")
    server.await_line("in _crash")


@pytest.mark.parametrize(("exits", "code"), [(sys.exit, 0), (sys.exit, 3), (os._exit, 0)])
def test_an_exit_is_a_death(exits: Callable[[int], None], code: int) -> None:
    """An exit with code 0 is not taken for a regular end, either."""

    def sample(index: int) -> int:
        if index == 1:
            exits(code)
        return index

    with serve(Samples(sample, 3), num_workers=1) as url:
        found = arrived(loader_of(url))
    assert [found[0], found[2]] == [[0], [2]]
    assert isinstance(found[1], WorkerDied)
    assert f"exited with code {code}" in str(found[1])


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """Create a control group of 96 MiB."""
    group = CGROUP / f"teleloader-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(96 * 2**20))
    except OSError as error:
        pytest.skip(f"a memory control group (v1) cannot be made here: {error}")
    yield group
    eventually(lambda: not (group / "cgroup.procs").read_text().split())
    group.rmdir()


@pytest.mark.parametrize("deaths", [1, 5])
def test_out_of_memory_is_reported(memory_cgroup: Path, deaths: int) -> None:
    """The kernel kills the worker: one kill has no effect, and repeated ones are an error with the reason."""
    tries = shared_counter()

    def sample(index: int) -> int:
        if index == 1 and count(tries) <= deaths:
            (memory_cgroup / "cgroup.procs").write_text(str(os.getpid()))
            np.ones(2**30, np.uint8)
        return index

    with serve(Samples(sample, 3), num_workers=1) as url:
        found = arrived(loader_of(url, seed=1))
        last_exit = stats_of(url)["workers"][0]["last_exit"]
    assert "killed by signal SIGKILL (Killed), probably out of memory" in last_exit
    assert [found[0], found[2]] == [[0], [2]]
    if deaths == 1:
        assert found[1] == [1]
    else:
        assert isinstance(found[1], WorkerDied)
        assert "probably out of memory (the kernel's oom_kill count increased)" in str(found[1])


def test_a_kill_from_outside_is_not_taken_for_a_lack_of_memory() -> None:
    """The reason is out of memory only if the kernel has counted a kill."""
    with serve(Samples(lambda i: i, 5), num_workers=1) as url:
        arrived(loader_of(url, seed=1))
        os.kill(pids_of(url)[0], signal.SIGKILL)
        last_exit = eventually(lambda: stats_of(url)["workers"][0]["last_exit"])
    assert last_exit.endswith("killed by signal SIGKILL (Killed)")


def test_an_allocation_that_fails_is_an_error_of_its_batch() -> None:
    """With a limit of address space, the worker continues after a MemoryError."""

    def sample(index: int) -> int:
        if index == 1:
            limit = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**28, limit[1]))
            try:
                bytearray(2**30)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, limit)
        return index

    with serve(Samples(sample, 3), num_workers=1) as url:
        found = arrived(loader_of(url, seed=1))
        assert stats_of(url)["server"]["worker_restarts"] == 0
    assert [found[0], found[2]] == [[0], [2]]
    assert isinstance(found[1], MemoryError)


# -- recycling


class Leaking:
    """Dataset that leaks 16 MiB per sample; a sample is its worker's PID and its number there."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        self.kept.append(np.ones(2**24, np.uint8))
        return np.array([index, os.getpid(), len(self.kept)])


def _slowly(index: int) -> int:
    for _ in range(40 if index else 0):  # time in which it is stopped is not taken for its work
        time.sleep(0.01)
    return index


def _crash(index: int) -> int:
    if index == 1:
        ctypes.string_at(0)
    return index


leaking = Leaking()
crashing = Samples(_crash, 3)
slow = Samples(_slowly, 5)
large = Samples(lambda i: np.full(2**18, i), 40)
pids_of_stream = Stream(25)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_worker_is_replaced_after_so_many_batches(start_server: StartServer, num_workers: int) -> None:
    """Recycling bounds leaks; order and content are unchanged, and it counts neither as restart nor as failure."""
    server = start_server(
        f"{TARGET}leaking", "--num-workers", str(num_workers), "--max-batches-per-worker", "5", "--log-level", "info"
    )
    found = [batch[0].tolist() for batch in loader_of(server.url)]
    assert [index for index, _, _ in found] == [*range(60)]
    assert max(made for _, _, made in found) < 5 + 10, "what it has been given already it still does"
    stats = server.stats()
    assert sum(worker["recycled"] for worker in stats["workers"]) >= len({pid for _, pid, _ in found}) - num_workers
    assert len({pid for _, pid, _ in found}) >= 60 / 15
    assert stats["server"]["worker_restarts"] == stats["datasets"][0]["batches_retried"] == 0
    assert not any("starting a new worker" in line for line in server.log)
    server.await_line(
        r"worker 0 \(pid \d+\) has reached the limit of 5 batches \(--max-batches-per-worker\): replacing the worker"
    )


def test_a_worker_is_replaced_when_it_has_much_memory(start_server: StartServer) -> None:
    """A new process replaces a worker whose resident memory exceeds the limit."""
    server = start_server(f"{TARGET}leaking", "--num-workers", "1", "--max-worker-memory", "256MiB")
    loader = loader_of(server.url, seed=1)

    def epoch_and_recycled() -> bool:
        assert [batch[0][0] for batch in loader] == [*range(60)]
        return bool(server.stats()["workers"][0]["recycled"])

    eventually(epoch_and_recycled)
    assert server.stats()["server"]["worker_restarts"] == 0


def test_what_a_replaced_worker_made_stays(start_server: StartServer) -> None:
    """Frames in the memory of an exited process are sent unchanged."""
    server = start_server(f"{TARGET}large", "--num-workers", "2", "--max-batches-per-worker", "1")
    for number, batch in enumerate(loader_of(server.url)):
        assert batch.shape == (1, 2**18)
        assert (batch == number).all()
    assert number == 39


def test_workers_of_a_stream_are_never_replaced(start_server: StartServer) -> None:
    """Their position in the stream would be lost."""
    server = start_server(f"{TARGET}pids_of_stream", "--num-workers", "2", "--max-batches-per-worker", "2")
    assert [i for batch in arrived(loader_of(server.url, num_workers=1)) for i in batch] == [*range(25)]
    assert sum(worker["recycled"] for worker in server.stats()["workers"]) == 0


# -- errors


class Fussy(Exception):
    """Exception that can neither be created from a message nor be pickled."""

    def __init__(self, code: int, lock: Any) -> None:
        super().__init__(f"code {code}")
        self.lock = lock


def _raise_chain() -> None:
    try:
        open("/no/such/disk").close()
    except OSError as error:
        raise ValueError("the sample") from error


def _raise(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("fail", "kind", "texts"),
    [
        (_raise(Fussy(7, threading.Lock())), RuntimeError, ["code 7"]),
        (_raise(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")), RuntimeError, ["can't decode byte 0xff"]),
        (_raise(ValueError("x" * 10 * 2**20)), ValueError, ["Caught ValueError", "xxx\n[...]\nxxx"]),
        (_raise_chain, ValueError, ["/no/such/disk", "was the direct cause of the following exception", "the sample"]),
        (
            _raise(ExceptionGroup("two", [ValueError("one thing"), TypeError("another")])),
            RuntimeError, ["two (2 sub-exceptions)", "ValueError: one thing", "TypeError: another"],
        ),
        (
            _raise(BaseExceptionGroup("two", [KeyboardInterrupt(), TypeError("another")])),
            RemoteError, ["two (2 sub-exceptions)", "KeyboardInterrupt", "TypeError: another"],
        ),
        (_raise(KeyboardInterrupt()), RemoteError, ["Caught KeyboardInterrupt in DataLoader worker process"]),
        (_raise(GeneratorExit()), RemoteError, ["Caught GeneratorExit"]),
        (_raise(StopIteration(5)), RuntimeError, ["the dataset raised StopIteration at index 1"]),
    ],
    ids=["fussy", "unicode", "10 MiB", "chain", "group", "base group", "interrupt", "generator exit", "stop"],
)  # fmt: skip
def test_whatever_is_raised_is_an_error_at_its_batch(fail: Callable[[], None], kind: type, texts: list[str]) -> None:
    """The error comes once, with truncated text and its causes; no worker exits, and other batches arrive."""
    tries = shared_counter()

    def sample(index: int) -> int:
        if index == 1:
            count(tries)
            fail()
        return index

    with serve(Samples(sample, 4), num_workers=1) as url:
        found = arrived(loader_of(url, seed=1))
        assert stats_of(url)["server"]["worker_restarts"] == 0
    assert [found[0], *found[2:]] == [[0], [2], [3]]
    assert type(found[1]) is kind
    text = str(found[1])
    assert all(part in text for part in texts)
    assert "batch 1 of epoch 0, with the indices [1]" in text
    assert len(text) < 70 * 1024
    assert tries.value == 1, "an error of the user's code is not tried again"


def test_a_dataset_that_shrinks_fails_where_samples_are_missing() -> None:
    """A list that shrinks during an epoch raises IndexError at batches with missing samples; others arrive."""

    class Shrinking(list[int]):
        def __getitem__(self, index: Any) -> Any:
            if index == 3:
                del self[6:]
            return super().__getitem__(index)

    with serve(Shrinking(range(8)), num_workers=1) as url:
        found = arrived(loader_of(url, seed=1))
    assert found[:6] == [[i] for i in range(6)]
    assert [type(error) for error in found[6:]] == [IndexError, IndexError]
    assert "batch 6 of epoch 0, with the indices [6]" in str(found[6])


def test_a_length_holds_for_an_epoch() -> None:
    """Samples appended during an epoch are part of the next one."""
    samples = [0, 1, 2, 3]
    with serve(samples, num_workers=1) as url:
        batches = iter(loader_of(url, num_workers=1))
        seen = [next(batches).tolist()]
        samples += [4, 5]
        assert seen + arrived(batches) == [[0], [1], [2], [3]]
        assert arrived(loader_of(url, num_workers=1)) == [[i] for i in range(6)]


def test_files_that_are_deleted_fail_where_they_are_missed(tmp_path: Path) -> None:
    """FileNotFoundError with the path is raised at the batch; other batches arrive, and this one with its file."""
    files = [tmp_path / f"{i}.txt" for i in range(6)]
    for i, file in enumerate(files):
        file.write_text(str(i))

    def sample(index: int) -> int:
        if index == 1:
            files[3].unlink()
        return int(files[index].read_text())

    with serve(Samples(sample, 6), num_workers=1) as url:
        loader = loader_of(url, seed=1)
        found = arrived(loader)
        assert [batch for batch in found if isinstance(batch, list)] == [[0], [1], [2], [4], [5]]
        assert type(found[3]) is FileNotFoundError
        assert str(files[3]) in str(found[3])
        assert "with the indices [3]" in str(found[3])


# -- user code with processes and threads of its own


def _double(number: int) -> int:
    return 2 * number


def _in_a_process(index: int) -> int:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(2 * index), daemon=True)
    child.start()
    doubled: int = queue.get()
    child.join()
    return doubled


def _in_a_pool(index: int) -> int:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return int(pool.apply(_double, (index,)))


def _in_a_thread(index: int) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(2 * index))
    thread.start()
    thread.join()
    return found[0]


def _in_a_fork(index: int) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(2 * index)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _in_a_program(index: int) -> int:
    return int(subprocess.run(["expr", "2", "*", str(index)], check=False, stdout=subprocess.PIPE).stdout)


@pytest.mark.parametrize("work", [_in_a_process, _in_a_pool, _in_a_thread, _in_a_fork, _in_a_program])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_dataset_may_have_processes_and_threads(work: Callable[[int], int]) -> None:
    """Workers are not daemonic, unlike torch's, and exits of their children are ignored."""
    with serve(Samples(work, 6), num_workers=2) as url:
        assert arrived(loader_of(url, seed=1)) == [[2 * i] for i in range(6)]
        assert stats_of(url)["server"]["worker_restarts"] == 0


def test_a_forked_child_that_comes_back_is_no_second_worker(capfd: pytest.CaptureFixture[str]) -> None:
    """The child would send each batch again: it is ended, with a message that states what to do."""
    children = shared_counter()

    def sample(index: int) -> int:
        if index == 1:
            pid = os.fork()
            if pid == 0:
                count(children)
            else:
                os.waitpid(pid, 0)
        return index

    with serve(Samples(sample, 5), num_workers=1) as url:
        assert arrived(loader_of(url, seed=1)) == [[i] for i in range(5)]
        assert stats_of(url)["datasets"][0]["batches_computed"] == 5
    assert children.value == 1
    assert "end forked processes with os._exit()" in capfd.readouterr().err


def test_threads_of_torch_before_the_fork_do_no_harm() -> None:
    """Forked workers of a parent whose OpenMP pool has run can use torch."""
    need("torch")
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        large = torch.ones(512, 512)
        (large @ large).sum()
        with serve(Samples(lambda i: ((large * i) @ large).sum() / 512**3, 4), num_workers=2) as url:
            assert arrived(loader_of(url, seed=1)) == [[i] for i in range(4)]
    finally:
        torch.set_num_threads(before)


# -- the machine


_LITTLE_SHM = """
import os
import numpy as np
from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from tests.end_to_end.hosted import Samples

assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize <= 2**16
open("/dev/shm/full", "wb", buffering=0).write(bytes(2**16))
with serve(Samples(lambda i: np.full(2**18, i), 8), num_workers=2) as url:
    for number, batch in enumerate(DataLoader(RemoteDataset(url), 1, output="numpy", num_workers=2)):
        assert (batch == number).all()
print(number + 1, "batches", os.listdir("/dev/shm"))
"""


def test_a_full_dev_shm_does_not_matter() -> None:
    """Batches of 2 MiB arrive with a full /dev/shm of 64 KiB, which is not used."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("needs the right to mount a file system of its own")
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$0" -c "$1"'
    command = ["unshare", "-m", "sh", "-c", mount, sys.executable, _LITTLE_SHM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "8 batches ['full']\n"


def test_time_in_which_the_server_itself_was_stopped_is_not_counted(start_server: StartServer) -> None:
    """After Ctrl-Z or a suspended container, no worker is taken for hanging."""
    server = start_server(f"{TARGET}slow", "--num-workers", "1", "--batch-timeout", "1")
    batches = iter(DataLoader(RemoteDataset(server.url, "slow"), 1, output="numpy"))
    assert next(batches).tolist() == [0]
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    for process in family:
        process.suspend()
    time.sleep(1.5)  # longer than the limit, as the test requires
    for process in reversed(family):
        process.resume()
    assert arrived(batches) == [[i] for i in range(1, 5)]
    assert server.stats()["server"]["worker_restarts"] == 0


def test_a_log_line_reports_a_hang(caplog: pytest.LogCaptureFixture) -> None:
    """One record has worker, duration, action and stack."""
    caplog.set_level(logging.WARNING)
    with serve(Samples(lambda i: _sleep() if i == 0 else i, 2), num_workers=1, batch_timeout=0.2) as url:
        assert arrived(loader_of(url, seed=1))[1] == [1]
    (text,) = [text for text in caplog.messages if "a batch exceeded" in text]
    assert "exceeded the timeout of 0.2 s (--batch-timeout) while it fetched sample 0; reassigning 1 batches; " in text
    assert "starting a new worker in" in text
    assert "in _sleep" in text
