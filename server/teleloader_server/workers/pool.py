"""Interface of pools of workers, which turn tasks into frames.

The dispatcher selects the worker of each task; a pool runs it there and reports the outcome. `inprocess` and
`processes` are the implementations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from teleloader_server.loading.tasks import Report, Task
from teleloader_server.workers.health import WorkerExit
from teleloader_shared.messages import DatasetInfo

Lease = NDArray[np.uint8]
"""Bytes of a frame, read-only. The memory is reused once neither the array nor a view of it exists."""


class PoolListener(Protocol):
    """Receiver of a pool's events, in the event loop."""

    def worker_ready(self, worker: int) -> None:
        """Record that the worker accepts tasks."""

    def task_done(self, worker: int, task: Task, lease: Lease, report: Report) -> None:
        """Receive the frame of a task."""

    def no_worker_starts(self, reason: str) -> None:
        """Report to clients that no worker starts; the pool keeps trying."""

    def worker_recycling(self, worker: int) -> None:
        """Submit nothing more to the worker: once its tasks are completed, another one replaces it."""

    def worker_stalled(self, worker: int, tasks: Sequence[Task]) -> bool:
        """Reclaim tasks that wait behind a slow one, for other workers; return False to leave them there."""

    def worker_resumed(self, worker: int) -> None:
        """Record that a stalled worker accepts tasks again."""

    def worker_lost(self, worker: int, tasks: Sequence[Task], loss: WorkerExit) -> None:
        """Take back the tasks of a worker that ended; another one will be ready soon."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """State of one worker."""

    worker: int
    pid: int | None
    ready: bool
    restarts: int
    recycled: int
    last_exit: str | None
    last_restart: float | None
    task: Task | None
    """Task in progress."""
    working_for: float
    """Seconds since its start, as far as is known."""


class Pool(Protocol):
    """A pool of workers."""

    @property
    def num_workers(self) -> int:
        """Number of worker processes; 0 for a thread of the server's own process."""

    async def start(self, listener: PoolListener) -> list[DatasetInfo]:
        """Build the datasets, then start the workers in the background.

        Raises:
            ConfigError: If a dataset cannot be built; no process remains.
        """

    def submit(self, worker: int, task: Task) -> None:
        """Queue a task at a ready worker."""

    def take(self, worker: int, reason: str) -> None:
        """Kill a worker, through no fault of its tasks; another one will be ready soon. Threads are not killed.

        Args:
            worker: Worker ID.
            reason: End of the sentence "worker 0 was killed: ".
        """

    def workers(self) -> list[WorkerState]:
        """Return the state of each worker."""

    def forget(self, loader: str) -> None:
        """Release the workers' state of a loader; tasks of it can still be submitted."""

    def pids(self) -> list[int]:
        """Return all processes of the pool."""

    def mapped_bytes(self) -> int:
        """Return the bytes of shared memory for frames, used or free."""

    async def close(self) -> None:
        """End all processes and wait for them."""
