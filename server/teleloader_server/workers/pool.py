"""Interface of worker pools, which compute the frames for tasks.

The dispatcher selects the worker of each task; the pool runs the task in that worker and reports the result.
Implementations: `inprocess` and `processes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from teleloader_server.loading.replay import Replayed
from teleloader_server.loading.tasks import GroupReport, Task
from teleloader_server.workers.health import Restarts, WorkerExit, WorkerHealth
from teleloader_shared.codec import BatchId
from teleloader_shared.messages import DatasetInfo

Lease = NDArray[np.uint8]
"""Read-only bytes of a frame; the memory is reused once the array and all its views are freed."""


class PoolListener(Protocol):
    """Interface for receiving the events of a worker pool; called in the event loop."""

    def worker_ready(self, worker: int, health: WorkerHealth) -> None:
        """Start submitting tasks to a worker; `health` contains the worker's open tasks, and is updated by the pool.

        While `health` has ``recycling`` or ``stalled`` set, no tasks may be submitted to the worker.
        """

    def tasks_done(self, worker: int, tasks: Sequence[Task], frames: Sequence[Lease], report: GroupReport) -> None:
        """Handle completed tasks with their frames; if the report is of a failure, the last frame contains it."""

    def no_worker_starts(self, reason: str) -> None:
        """Raise an error in waiting requests, because no worker starts; the pool continues to retry."""

    def worker_stalled(self, tasks: Sequence[Task]) -> bool:
        """Reassign `tasks`, which are queued behind a slow task, to other workers; return False to leave them queued.

        If True is returned, the pool revokes the tasks, and the worker gets no tasks until `worker_resumed`.
        """

    def worker_resumed(self, worker: int) -> None:
        """Resume submitting tasks to a worker that had stalled."""

    def worker_removed(self, worker: int) -> None:
        """Forget a worker without tasks that was stopped by `Pool.resize`."""

    def worker_lost(self, worker: int, tasks: Sequence[Task], worker_exit: WorkerExit) -> None:
        """Requeue the open tasks of a worker that exited; `worker_ready` reports when its replacement accepts tasks."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Snapshot of the state of one worker, for statistics and scheduling."""

    worker: int
    pid: int | None
    """Process ID; None until the process has started."""
    ready: bool
    restarts: Restarts
    task: Task | None
    """Task in progress; None if the worker is idle."""
    working_for: float
    """Approximate seconds since the start of `task`; 0 if the worker has no tasks."""
    replayed: Replayed | None = None
    """Progress of the worker in the batches that it iterates again; None if it does not."""


class Pool(Protocol):
    """Interface of a worker pool, used in one event loop; methods other than `start` require a started pool."""

    @property
    def num_workers(self) -> int:
        """Number of worker processes; 0 for a thread of the server process."""

    async def start(self, listener: PoolListener) -> list[DatasetInfo]:
        """Construct the datasets, start the workers in the background, and return the dataset descriptions.

        Raises:
            ConfigError: If a dataset cannot be constructed; all processes have then exited.
            OSError: If the machine lacks memory, processes or file descriptors.
        """

    def resize(self, num_workers: int) -> None:
        """Change the number of workers, which must be at least 1; surplus workers complete their tasks first.

        Raises:
            ValueError: If the number cannot change: the pool is a thread, or the order depends on the number.
            OSError: If the machine lacks memory, processes or file descriptors; the pool has as many as could start.
        """

    def submit(self, worker: int, tasks: Sequence[Task]) -> None:
        """Submit a group of tasks to a ready worker, which computes its tasks in the order of submission.

        Args:
            worker: Worker ID.
            tasks: Tasks of one epoch, with evenly spaced batch numbers, whose results may be reported together.
        """

    def take(self, worker: int, reason: str) -> None:
        """Preempt a worker: kill its process, and start a replacement; do nothing in a pool with a thread.

        Args:
            worker: Worker ID.
            reason: Reason for the log, to complete the message "worker 0 (pid 123) was killed: ".
        """

    def reassign_queued(self, worker: int) -> None:
        """Reassign the tasks behind a worker's current batch with `PoolListener.worker_stalled`."""

    def withdraw(self, worker: int, batch_id: BatchId) -> None:
        """Discard the pending result of a worker's current batch, which another worker has computed.

        The worker gets no tasks until it has completed the batch, or was killed as any worker that is overdue. Its
        other tasks are reassigned with `PoolListener.worker_stalled`.
        """

    def workers(self) -> list[WorkerState]:
        """Return the state of each worker."""

    def current_sample(self, worker: int) -> int | None:
        """Return the index of the sample that a worker is fetching; None if it is unknown."""

    async def stacks(self, worker: int) -> str:
        """Return the stacks of a worker's threads, or the reason in parentheses if they are unavailable."""

    def forget(self, loader: str) -> None:
        """Release the state of a loader in all workers; the loader's tasks can still be submitted."""

    def pids(self) -> list[int]:
        """Return the process IDs of all processes in the pool."""

    def mapped_bytes(self) -> int:
        """Return the size of the shared memory for frames in bytes, both used and free."""

    async def close(self) -> None:
        """Stop all processes of the pool, and wait for their exit."""
