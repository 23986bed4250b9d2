"""Worker pool for ``num_workers=0``: a thread of the server process."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

from teleloader_server.limits import Limits
from teleloader_server.loading.datasets import HostedDataset
from teleloader_server.loading.pipeline import Loading
from teleloader_server.loading.random_state import OwnRandomState
from teleloader_server.loading.tasks import GroupReport, Task
from teleloader_server.workers.blocking import run_blocking
from teleloader_server.workers.health import Restarts, WorkerHealth
from teleloader_server.workers.pool import Lease, PoolListener, WorkerState
from teleloader_server.workers.procfs import CpuWait
from teleloader_shared.codec import BatchId
from teleloader_shared.messages import DatasetInfo

EXIT_GRACE_S: Final = 2.0
"""Grace period in seconds for submitted batches when the server stops."""


class InProcessPool:
    """Worker pool with one thread in the server process, for debugging with breakpoints.

    Args:
        open_datasets: Function that constructs the datasets; called once, in the pool's thread.
        limits: Limits of the pool.
    """

    num_workers: Final = 0

    def __init__(self, open_datasets: Callable[[], Mapping[str, HostedDataset]], limits: Limits) -> None:
        self._open_datasets = open_datasets
        self._limits = limits
        self._random_state = OwnRandomState()
        self._tasks: SimpleQueue[Task | str | None] = SimpleQueue()
        """Input of the thread: tasks, keys of loaders to forget, and finally None, which ends the thread."""
        self._pending: dict[int, Task] = {}
        """Open tasks by ``id(task)``."""
        self._current: tuple[Task | None, float] = None, 0.0
        """Task in progress and the time of its start; (None, 0) while the thread is idle."""
        # a daemon thread, because user code that never returns must not prevent the process from exiting
        self._thread = threading.Thread(target=self._run, name="teleloader-loading", daemon=True)

    async def start(self, listener: PoolListener) -> list[DatasetInfo]:
        """Start the thread, wait until the datasets are constructed, and return the dataset descriptions."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        opened: asyncio.Future[Mapping[str, HostedDataset]] = self._loop.create_future()
        self._opened = opened
        self._thread.start()
        hosted = await opened
        self._loop.call_soon(listener.worker_ready, 0, WorkerHealth(time.monotonic(), tasks=self._pending))
        return [dataset.info for dataset in hosted.values()]

    def resize(self, num_workers: int) -> None:
        """Raise ValueError, because the pool has a single thread."""
        raise ValueError("the server loads in its own process (--num-workers 0)")

    def submit(self, worker: int, tasks: Sequence[Task]) -> None:
        """Queue tasks for the pool's thread."""
        for task in tasks:
            self._pending[id(task)] = task
            self._tasks.put(task)

    def take(self, worker: int, reason: str) -> None:
        """Do nothing, because a thread cannot be killed."""

    def reassign_queued(self, worker: int) -> None:
        """Do nothing, because the pool has no other thread."""

    def withdraw(self, worker: int, batch_id: BatchId) -> None:
        """Do nothing, because a single thread computes no batch twice."""

    def forget(self, loader: str) -> None:
        """Release the state of a loader in the pool's thread, after the queued tasks."""
        self._tasks.put(loader)

    def workers(self) -> list[WorkerState]:
        """Return the state of the pool's thread, reported as worker 0."""
        task, since = self._current
        return [
            WorkerState(
                0, os.getpid(), ready=True, restarts=Restarts(), task=task,
                working_for=0.0 if task is None else time.monotonic() - since,
            )
        ]  # fmt: skip

    def current_sample(self, worker: int) -> int | None:
        """Return None, because the thread does not publish the sample."""
        return None

    async def stacks(self, worker: int) -> str:
        """Return the stack of the pool's thread, most recent call first."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        if frame is None:
            return "(the thread has ended)"
        calls = reversed(traceback.extract_stack(frame))
        return "\n".join(f'  File "{call.filename}", line {call.lineno} in {call.name}' for call in calls)

    def pids(self) -> list[int]:
        """Return an empty list, because the pool has no processes."""
        return []

    def mapped_bytes(self) -> int:
        """Return 0, because the pool uses no shared memory."""
        return 0

    async def close(self) -> None:
        """Let the thread complete the submitted tasks, and wait up to `EXIT_GRACE_S` seconds for its end."""
        self._tasks.put(None)
        await run_blocking(lambda: self._thread.join(EXIT_GRACE_S))

    # -- in the thread

    def _run(self) -> None:
        open_datasets, opened = self._open_datasets, self._opened
        # the pool is part of reference cycles, so only this thread's stack may refer to the datasets
        del self._open_datasets, self._opened
        with suppress(RuntimeError):  # the server has stopped, and its event loop is closed
            try:
                hosted = open_datasets()
            except Exception as error:  # noqa: BLE001 - it is raised in `start`
                self._loop.call_soon_threadsafe(opened.set_exception, error)
                return
            self._loop.call_soon_threadsafe(opened.set_result, hosted)
            loading = Loading(hosted, -1, self._limits.max_batch_bytes)
            cpu_wait = CpuWait()
            while (task := self._tasks.get()) is not None:
                if isinstance(task, str):
                    loading.passes.forget(task)
                else:
                    self._load(loading, task, cpu_wait)
            loading.passes.close()

    def _load(self, loading: Loading, task: Task, cpu_wait: CpuWait) -> None:
        self._current = task, time.monotonic()
        before, used = cpu_wait.seconds(), time.thread_time()
        with self._random_state:
            frame, report = loading.frame(task)
        combined = GroupReport.of([report], cpu_wait.seconds() - before, time.thread_time() - used)
        self._current = None, 0.0
        self._loop.call_soon_threadsafe(self._done, task, frame, combined)

    def _done(self, task: Task, lease: Lease, report: GroupReport) -> None:
        del self._pending[id(task)]
        self._listener.tasks_done(0, [task], [lease], report)
