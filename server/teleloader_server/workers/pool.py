"""The pool: places that turn tasks into frames.

A pool decides nothing: it runs each task in the place that it is given, and says what happened. This is its interface;
`inprocess` and `processes` are the implementations.
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
"""A frame's bytes, read-only. Its memory is used again when neither it nor a view of it exists any more."""


class PoolListener(Protocol):
    """What a pool says; called in the event loop."""

    def worker_ready(self, worker: int) -> None:
        """The worker can take tasks."""

    def task_done(self, worker: int, task: Task, lease: Lease, report: Report) -> None:
        """A task that was submitted to the worker is a frame."""

    def no_worker_starts(self, reason: str) -> None:
        """Workers die again and again before they are ready; they are still tried."""

    def worker_recycling(self, worker: int) -> None:
        """The worker must be given nothing more: when all that it has is done, a fresh one will be ready soon."""

    def worker_stalled(self, worker: int, tasks: Sequence[Task]) -> bool:
        """These wait behind a batch that takes long; True when they are taken back, to be made elsewhere."""

    def worker_resumed(self, worker: int) -> None:
        """One from which tasks were taken back can be given some again."""

    def worker_lost(self, worker: int, tasks: Sequence[Task], loss: WorkerExit) -> None:
        """The worker's process ended with these tasks undone, the first of them begun; another will be ready soon."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What the pool knows of one place."""

    worker: int
    pid: int | None
    ready: bool
    restarts: int
    recycled: int
    last_exit: str | None
    last_restart: float | None
    task: Task | None
    """What it makes."""
    working_for: float
    """Seconds for which it has been at that, as far as is known."""


class Pool(Protocol):
    """Places for tasks."""

    @property
    def num_workers(self) -> int:
        """Worker processes; 0 for one place in the server's own process."""

    async def start(self, listener: PoolListener) -> list[DatasetInfo]:
        """Build the datasets, then start the workers in the background.

        Raises:
            ConfigError: When a dataset cannot be built; nothing is left running.
        """

    def submit(self, worker: int, task: Task) -> None:
        """Have a ready worker do a task after those that it has."""

    def take(self, worker: int, reason: str) -> None:
        """End a worker's process, through no fault of its tasks; another will be ready soon, where that can be.

        Args:
            worker: Which.
            reason: Why, as the end of a sentence that begins with the worker.
        """

    def workers(self) -> list[WorkerState]:
        """The places and their state."""

    def forget(self, loader: str) -> None:
        """Release what workers keep of a loader; a task of it can still be submitted."""

    def pids(self) -> list[int]:
        """All processes of the pool."""

    def mapped_bytes(self) -> int:
        """Shared memory that is mapped for frames, used or free."""

    async def close(self) -> None:
        """End all processes and wait for them."""
