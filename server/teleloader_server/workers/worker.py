"""Worker process that receives tasks, writes frames to shared memory, and reports results, without asyncio."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal.getsignal` takes a microsecond, for each task
import ctypes
import faulthandler
import gc
import mmap
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from teleloader_server.loading.datasets import HostedDataset
from teleloader_server.loading.deferred import DeferredDataset
from teleloader_server.loading.passes import Began
from teleloader_server.loading.pipeline import Loading
from teleloader_server.loading.random_state import seed_all, seed_worker
from teleloader_server.loading.replay import Reached, Replayed
from teleloader_server.loading.stages import NO_SAMPLE
from teleloader_server.loading.tasks import Task
from teleloader_server.loading.worker_info import set_worker_info
from teleloader_server.workers import messages
from teleloader_server.workers.arena import Arena
from teleloader_server.workers.channel import Channel
from teleloader_server.workers.messages import (
    CURRENT_SAMPLE,
    CURRENT_TASK,
    REVOKED,
    STACK_READY,
    STACK_SIGNAL,
    decode,
    encode,
)
from teleloader_server.workers.procfs import CpuWait, anonymous_bytes
from teleloader_server.workers.results import Results
from teleloader_shared.codec import BatchId, Substituted, frame_size
from teleloader_shared.orders.seeding import derive_seed
from teleloader_shared.protocols import accepts
from teleloader_shared.spec import LoaderSpec

REPORT_EVERY: Final = 0.002
"""Minimum seconds between two reports while further tasks are queued."""

REPORT_LATEST: Final = 0.01
"""Maximum delay in seconds of a result while the next task is in progress."""

PROGRESS_EVERY: Final = 0.1
"""Minimum seconds between two `Progress` messages while batches are skipped."""

MEMORY_EVERY: Final = 0.01
"""Minimum seconds between two measurements of the memory while a shuffle buffer is filled."""

_PR_SET_PDEATHSIG: Final = 1
_STDERR: Final = 2


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send a signal to this process when the parent exits (the thread that started this process)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def ignore_stop_signals() -> None:
    """Ignore SIGINT and SIGTERM in this process, because the server handles them.

    Ctrl-C and service managers send these signals to all processes of the server.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        # a handler and not SIG_IGN, which programs that user code starts would inherit
        signal.signal(number, lambda *_: None)
    # an inherited handler may ignore or reap exited children
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def configure_forked_children() -> None:
    """Make processes that user code forks from this worker accept SIGTERM, and exit together with the worker."""
    worker = os.getpid()
    by_main_thread = False

    def before() -> None:
        nonlocal by_main_thread
        by_main_thread = threading.get_native_id() == worker

    def in_child() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # the kernel signals the exit of the thread that forked, and only the main thread lives as long as the process
        if by_main_thread and os.getppid() == worker:
            end_with_parent()

    os.register_at_fork(before=before, after_in_child=in_child)


def run_finalizers() -> None:
    """Run the exit handlers of `multiprocessing`, which `os._exit` skips: its queues send their remaining items."""
    multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]


class Worker:
    """Main loop of a worker process.

    Args:
        channel: Blocking channel to the server.
        hosted: Datasets by name; this process constructs the deferred ones before their first batch.
        settings: Settings of this worker.
    """

    def __init__(
        self,
        channel: Channel,
        hosted: Mapping[str, HostedDataset | DeferredDataset],
        settings: messages.ForkWorker,
    ) -> None:
        self._channel = channel
        self._deferred = {name: found for name, found in hosted.items() if isinstance(found, DeferredDataset)}
        """Datasets that were not constructed yet."""
        self._hosted = {name: _replica(found) for name, found in hosted.items() if isinstance(found, HostedDataset)}
        self._number = settings.worker
        self._num_workers = settings.num_workers
        self._session = None if settings.session is None else LoaderSpec.from_json(settings.session)
        self._loading = Loading(
            self._hosted,
            settings.worker,
            settings.max_batch_bytes,
            self._adopt_torch,
            self._report_progress,
            lambda began: self._send(messages.PassStarted(began)),
            max_replay=settings.max_replay,
        )
        self._loading.passes.replace(
            None if settings.began is None else Began(*settings.began),
            None if settings.reached is None else Reached.from_message(*settings.reached),
        )
        self._arena = Arena(
            settings.free_limit,
            lambda slot, fd, size: self._send(messages.SlotCreated(slot, size), [fd]),
            lambda slot: self._send(messages.SlotRemoved(slot)),
        )
        self._loaders: dict[str, tuple[LoaderSpec, int]] = {}
        self._tasks: deque[tuple[int, Task, int]] = deque()
        """ID of each task, the task, and the number of tasks of the same group after it."""
        self._results = Results(self._arena, CpuWait().seconds)
        self._sending = threading.Lock()
        self._unreported = threading.Event()
        self._current: HostedDataset | None = None
        self._init_failures: dict[str, BaseException] = {}
        self._pid = os.getpid()
        self._last_progress_report = 0.0
        self._max_memory = settings.max_memory
        self._memory_measured = 0.0
        self._reported = 0.0

    def run(self) -> None:
        """Process tasks until the server closes the channel.

        Raises:
            EOFError: If the server closed the channel.
        """
        self._share_status()
        self._initialise()
        self._send(messages.Ready())
        # a result must not wait for the completion of the next task, which may hang
        threading.Thread(target=self.report_late, daemon=True).start()
        while True:
            if not self._tasks:
                while not self._tasks:
                    self._report(at_once=True)
                    self._receive()
                self._results.resume()
            task_id, task, following = self._tasks.popleft()
            if task_id <= REVOKED.unpack_from(self._status, CURRENT_TASK.size)[0]:
                self._send(messages.Progress())
                continue
            CURRENT_TASK.pack_into(self._status, 0, task_id)
            self._results.begin(task_id, following, task.owner)
            self._work(task)
            if self._is_signal_taken():
                self._set_stack_ready(0)
            if time.monotonic() - self._reported > REPORT_EVERY:
                self._report(at_once=False)
            if self._results.are_pending and not self._unreported.is_set():  # set() takes a lock, is_set() does not
                self._unreported.set()

    def _share_status(self) -> None:
        """Share the status file: the server reads the current task and stacks there if the worker is unresponsive."""
        file = os.memfd_create("teleloader-status", os.MFD_CLOEXEC)
        fields = CURRENT_TASK.pack(-1) + REVOKED.pack(-1) + STACK_READY.pack(0) + CURRENT_SAMPLE.pack(NO_SAMPLE)
        os.write(file, fields)
        self._status = mmap.mmap(file, len(fields))
        self._loading.context.sample = memoryview(self._status)[-CURRENT_SAMPLE.size :].cast("q")
        if not self._is_signal_taken():
            faulthandler.register(STACK_SIGNAL, file, all_threads=True)
            self._set_stack_ready(1)
        self._send(messages.Started(self._pid), [file])

    @staticmethod
    def _is_signal_taken() -> bool:
        """Return True if dataset code has set a handler for `STACK_SIGNAL`, of which `faulthandler` sets none."""
        return bool(_signal.getsignal(STACK_SIGNAL) != signal.SIG_DFL)

    def _set_stack_ready(self, ready: int) -> None:
        STACK_READY.pack_into(self._status, CURRENT_TASK.size + REVOKED.size, ready)

    def _initialise(self) -> None:
        self._adopt_torch()
        for name in self._hosted:
            if self._session is None or name in self._session.datasets:
                self._initialise_dataset(name)

    def _initialise_dataset(self, name: str) -> None:
        hosted = self._hosted[name]
        self._set_info(hosted)
        if self._session is None:
            seed_all(self._worker_seed)
        else:
            seed_worker(self._session.seed, self._id)
        worker_init = hosted.worker_init_of(None if self._session is None else self._session.worker_init)
        if worker_init is not None:
            self._call(worker_init, name)

    def _open(self, name: str) -> BaseException | None:
        """Construct a deferred dataset; return the exception with which its batches fail, if any.

        After an exception of the factory, the next batch calls the factory again.
        """
        try:
            self._hosted[name] = _replica(self._deferred[name].open())
        except Exception as error:  # noqa: BLE001 - it is sent to clients in place of the batch
            error.add_note(f'Raised in worker {self._number} while it built dataset {name!r} (start_method = "spawn").')
            print(f"building dataset {name!r} failed in worker {self._number}:", file=sys.stderr)
            traceback.print_exception(error)
            return error
        del self._deferred[name]
        self._adopt_torch()
        self._initialise_dataset(name)
        self._send(messages.Progress())  # the timeout of the batch starts now
        return self._init_failures.get(name)

    def _failure_of(self, name: str) -> BaseException | None:
        """Return the exception with which all batches of a dataset fail, if any; construct the dataset if necessary."""
        return self._open(name) if name in self._deferred else self._init_failures.get(name)

    def _call(self, worker_init: Callable[[int], None], dataset: str) -> None:
        torch = sys.modules.get("torch")
        seed = None if torch is None else torch.initial_seed()
        try:
            worker_init(self._id)
        except Exception as error:  # noqa: BLE001 - it is sent to clients in place of each batch
            self._init_failures[dataset] = error
            print(f"worker_init of dataset {dataset!r} failed in worker {self._number}:", file=sys.stderr)
            traceback.print_exception(error)
        self._loading.context.torch_is_seeded = torch is not None and torch.initial_seed() != seed

    @property
    def _id(self) -> int:
        """Worker ID for user code; for an iterable-style dataset the shard ID, which is unique among all ranks."""
        return self._number + self._num_workers * (self._shards_of_ranks[0])

    @property
    def _shards_of_ranks(self) -> tuple[int, int]:
        """Rank and world size for numbering shards; (0, 1) for a shared worker or a map-style dataset."""
        session = self._session
        if session is None or self._hosted[session.dataset].info.kind == "map":
            return 0, 1
        return session.rank, session.world_size

    @property
    def _worker_seed(self) -> int:
        if self._session is None:
            return derive_seed("worker", self._number)
        return (self._session.seed + self._id) % 2**63  # an int64, as in torch

    def _adopt_torch(self) -> None:
        """Configure torch as in torch's own workers, if torch is imported."""
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)
            if self._current is not None:
                self._set_info(self._current)

    def _set_info(self, hosted: HostedDataset) -> None:
        self._current = hosted
        if self._session is not None and self._session.num_workers == 0 and hosted.info.kind == "iterable":
            return  # no worker information, as with num_workers=0 in torch: one pass over the whole dataset
        count = self._num_workers * self._shards_of_ranks[1]
        set_worker_info(self._id, count, self._worker_seed, hosted.dataset)

    def _receive(self) -> None:
        for message in map(decode, self._channel.receive()):
            match message:
                case messages.Load():
                    self._queue(message)
                case messages.AddLoader(key, spec, length):
                    self._loaders[key] = (LoaderSpec.from_json(spec), length)
                case messages.ForgetLoader(key):
                    del self._loaders[key]
                    self._loading.passes.forget(key)
                case messages.PoolResized(num_workers, free_limit):
                    self._num_workers, self._arena.free_limit = num_workers, free_limit
                    if self._current is not None:
                        self._set_info(self._current)
                case messages.FreeSlots(slots, owners):
                    for slot, owner in zip(slots, owners, strict=True):
                        self._arena.give_back(slot, owner)

    def _queue(self, load: messages.Load) -> None:
        """Add the tasks of a group to the queue."""
        task_id, key, epoch, batch, count, step, owner, pairs, indices = load
        spec, length = self._loaders[key]
        substituted = {place: Substituted.read(fields) for place, fields in pairs}
        for place in range(count):
            listed = indices
            if indices is not None and count > 1:
                size = frame_size(indices)
                listed, indices = indices[:size], indices[size:]
            batch_id = BatchId(key, epoch, batch + place * step)
            task = Task(spec, length, batch_id, listed, owner, substituted.get(place))
            self._tasks.append((task_id + place, task, count - place - 1))

    def _work(self, task: Task) -> None:
        failure = next(filter(None, map(self._failure_of, task.spec.datasets)), None)
        hosted = None if failure is not None else self._loading.hosted(task.spec)
        if hosted is not None and hosted is not self._current:
            self._set_info(hosted)
        if failure is None:
            nbytes, report = self._loading.load(task, self._results.place)
        else:
            nbytes, report = self._loading.fail(task, failure, self._results.place)
        self._results.add(nbytes, report, self._loading.passes.reached)

    def close(self) -> None:
        """Release the resources of user code, as a torch worker does at exit.

        Generators run their ``finally`` blocks, and `multiprocessing` its exit handlers.
        """
        self._loading.passes.close()
        run_finalizers()

    def _end_if_forked(self) -> None:
        """Exit if this process is a fork that user code created and did not end: it would use the worker's channel."""
        if os.getpid() != self._pid:
            print(
                f"the dataset forked process {os.getpid()}, which returned to the code of the worker: end forked "
                "processes with os._exit()",
                file=sys.stderr,
            )
            sys.stderr.flush()
            os._exit(1)

    def _report_progress(self, replayed: Replayed | None) -> None:
        now = time.monotonic()
        if replayed is None and self._max_memory and now - self._memory_measured > MEMORY_EVERY:
            self._memory_measured = now
            self._check_memory()
        if now - self._last_progress_report > PROGRESS_EVERY:
            self._last_progress_report = now
            has_just_begun = replayed is None or replayed.batches == 1  # the server logs only longer replays
            self._send(messages.Progress(None if has_just_begun else replayed))

    def _check_memory(self) -> None:
        used = anonymous_bytes()  # batches in shared memory count towards the memory budget
        if used > self._max_memory:
            raise MemoryError(
                f"worker {self._number} (pid {self._pid}) has {used / 2**20:,.0f} MiB of resident memory, and the "
                f"limit is {self._max_memory / 2**20:,.0f} MiB (--max-worker-memory)"
            )

    def report_late(self) -> None:
        """Send delayed results while the next task is in progress; runs in a separate thread."""
        while True:
            self._unreported.wait()
            self._unreported.clear()
            time.sleep(REPORT_LATEST)
            if time.monotonic() - self._reported > REPORT_EVERY:
                self._report(at_once=True)

    def _report(self, *, at_once: bool) -> None:
        self._end_if_forked()
        with self._sending:
            self._reported = time.monotonic()
            for done in self._results.take(at_once=at_once):
                self._channel.put(encode(done))
            self._channel.send_all()

    def _send(self, message: messages.Message, fds: Sequence[int] = ()) -> None:
        with self._sending:
            self._channel.send(encode(message), fds)


def _replica(hosted: HostedDataset) -> HostedDataset:
    """Return a deep copy of an iterable-style dataset that has ``set_epoch``; return other datasets unchanged.

    Such a dataset may store its epoch in shared memory for persistent workers (Hugging Face datasets do), but here,
    workers of different loaders are in different epochs. Map-style datasets are not copied, because they may contain
    the data themselves.
    """
    if hosted.info.kind == "map" or not accepts(hosted.dataset, "set_epoch", 0):
        return hosted
    return hosted.copied()


def main(channel: Channel, hosted: Mapping[str, HostedDataset | DeferredDataset], settings: messages.ForkWorker) -> int:
    """Run a worker process until the server closes the channel, or user code exits the process.

    Returns:
        Exit code of the process: 0 if the server closed the channel.
    """
    gc.enable()
    if not faulthandler.is_enabled():
        faulthandler.enable(_STDERR)  # a segmentation fault shows its stack in the server's log
    configure_forked_children()
    code = 1
    try:
        worker = Worker(channel, hosted, settings)
        try:
            worker.run()
        finally:
            worker.close()
    except EOFError:
        code = 0
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException:  # noqa: BLE001 - the process exits, and must log the reason
        traceback.print_exc()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code
