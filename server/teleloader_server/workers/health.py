"""Worker health: decisions when to kill, recycle, restart or report a worker.

Pure functions, without clocks, processes or an event loop. `ProcessPool` passes its observations with their times, and
executes the decisions. Rejected: heartbeats of workers, because a worker in C code that holds the GIL cannot send them,
and a worker that hangs may continue to send them. A worker is healthy as long as it completes tasks.
"""

from __future__ import annotations

import enum
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from teleloader_server.limits import Limits
from teleloader_server.loading.tasks import Task
from teleloader_shared.codec import BatchId
from teleloader_shared.units import counted

MIN_BACKOFF: Final = 0.05
"""Delay in seconds after the first failure; each further failure doubles the delay, up to `MAX_BACKOFF`."""
MAX_BACKOFF: Final = 5.0
CHECK_INTERVAL: Final = 0.25
"""Seconds between two checks of all workers; shorter with a short `batch_timeout`."""
MIN_CHECK_INTERVAL: Final = 0.02
STOP_TIMEOUT: Final = 3.0
"""Seconds for which a worker that has work may be stopped (SIGSTOP) before it is killed."""
MAX_FAILED_STARTS: Final = 3
"""Number of consecutive failed starts after which waiting requests get an error; the pool continues to retry."""

Attribution = BatchId | Literal["unknown", "nobody", "machine"]
"""Cause of a worker's exit. Attributions with their causes and consequences:

- ``unknown``: killed by a signal, exited, out of memory, ended with its fork server, or stopped for 3 s (SIGSTOP,
  SIGTSTP, SIGTTIN, SIGTTOU). One of its batches may be the cause, so each is recomputed by a worker without other
  batches. When a batch has killed three such workers, `WorkerDied` replaces it.
- ID of a batch: the batch exceeded `batch_timeout`. `LoaderTimeout` replaces it, without a retry.
- ``machine``: no file descriptor, memory or process was available for the worker or for its batches. Its batches are
  retried with backoff; after `batch_timeout`, `WorkerDied` replaces them and names the resource.
- ``nobody``: preempted for another client, or not ready after `batch_timeout`. Its batches are recomputed.
"""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """Exit of a worker process, with its cause."""

    reason: str
    """Description of the exit, such as "worker 0 (pid 123) was killed by signal SIGKILL (Killed)"."""
    attribution: Attribution = "unknown"
    stack: str = ""
    """Stacks of the worker's threads if the worker was unresponsive, else empty."""
    batch_id: BatchId | None = None
    """Batch that the worker was computing; None if it had none."""
    sample: int | None = None
    """Index of the sample that it was fetching; None if it is unknown."""
    overdue: frozenset[BatchId] = frozenset()
    """Batches for which a resource was unavailable for longer than `batch_timeout`; they are not retried."""


class Action(enum.Enum):
    """Pool action for a slow or stopped worker."""

    RECLAIM = enum.auto()
    """Reassign the tasks that are queued behind the current one to other workers."""
    KILL_STOPPED = enum.auto()
    INSPECT = enum.auto()
    """Read the worker's stacks, then kill it if it is still unresponsive."""


def check_interval(limits: Limits) -> float:
    """Return the interval between two checks of all workers, in seconds."""
    if not limits.batch_timeout:
        return CHECK_INTERVAL
    return min(CHECK_INTERVAL, max(MIN_CHECK_INTERVAL, limits.batch_timeout / 10))


def backoff(failures: int) -> float:
    """Return the delay in seconds after `failures` consecutive failures (exponential backoff)."""
    # the exponent is limited as well: 2.0**1024 overflows a float
    return min(MIN_BACKOFF * 2 ** min(failures - 1, 16), MAX_BACKOFF) if failures else 0.0


def exit_reason(status: int, *, out_of_memory: bool = False) -> str:
    """Describe the exit of a process, for example "was killed by signal SIGKILL (Killed)".

    Args:
        status: Exit status in the format of ``os.waitpid``.
        out_of_memory: Whether the kernel's OOM killer has killed a process since the last exit.
    """
    if not os.WIFSIGNALED(status):
        return f"exited with code {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    known = number in set(signal.Signals)
    reason = f"was killed by signal {signal.Signals(number).name if known else number} ({signal.strsignal(number)})"
    if number == signal.SIGKILL and out_of_memory:
        reason += ", probably out of memory (the kernel's oom_kill count increased)"
    return reason


class StopTimer:
    """Timer that measures, by periodic observations, for how long a process has been stopped (SIGSTOP)."""

    def __init__(self) -> None:
        self._since: float | None = None

    def reset(self) -> None:
        """Reset the timer, because the process has run."""
        self._since = None

    def observe(self, now: float, *, is_stopped: bool) -> float:
        """Record an observation; return the time in seconds for which the process has been stopped continuously."""
        if not is_stopped:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        return now - self._since


@dataclass(slots=True)
class WorkerHealth:
    """Health of one worker process: tasks, progress, and the resulting decisions."""

    last_progress: float
    """Time of the process start or of the last progress, from which timeouts are measured."""
    ready: bool = False
    progressed_at: float = field(init=False)
    """Time of the last progress, or of the start; unlike `last_progress`, `excuse` does not change it."""
    tasks: dict[int, Task] = field(default_factory=dict)
    """Submitted tasks that are not completed, by task ID in the order of submission."""
    room: int = sys.maxsize
    """Number of further tasks that may be submitted before the worker is recycled (``max_batches_per_worker``)."""
    completed: int = 0
    recycling: bool = False
    """True if the worker gets no more tasks, and is replaced once its tasks are completed."""
    stalled: bool = False
    """True if the current task is slow: tasks behind it were reassigned, and no further tasks are submitted."""
    inspecting: bool = False
    """True while the worker's stacks are being read."""
    stop_timer: StopTimer = field(default_factory=StopTimer)

    def __post_init__(self) -> None:
        """Set the time of the last progress."""
        self.progressed_at = self.last_progress

    @property
    def has_work(self) -> bool:
        """True while the worker is expected to make progress."""
        return not self.ready or bool(self.tasks) or self.stalled

    def progress(self, now: float) -> None:
        """Record progress: the worker started, completed a task, or was idle when a task was submitted."""
        self.last_progress = self.progressed_at = now
        self.stop_timer.reset()

    def excuse(self, seconds: float, now: float) -> None:
        """Extend the timeouts by `seconds`, during which the server or the worker was not running."""
        self.last_progress = min(now, self.last_progress + seconds)

    def is_overdue(self, seconds: float, now: float) -> bool:
        """Return True if the worker has work, but has made no progress for longer than `seconds`."""
        return self.has_work and now - self.last_progress > seconds

    def is_unresponsive(self, limits: Limits, now: float) -> bool:
        """Return True if the worker's current task, or its start, has exceeded `batch_timeout`."""
        return bool(limits.batch_timeout) and self.is_overdue(limits.batch_timeout, now)

    def actions(self, limits: Limits, now: float, *, is_stopped: bool, has_queued: bool) -> list[Action]:
        """Return the actions for a worker without progress since the last check.

        Args:
            limits: Limits of the worker pool.
            now: Current time.
            is_stopped: Whether the process is stopped (SIGSTOP).
            has_queued: Whether tasks are queued behind the current one.
        """
        actions = [Action.RECLAIM] if self.ready and not self.stalled and has_queued else []
        if self.stop_timer.observe(now, is_stopped=is_stopped) > STOP_TIMEOUT:
            actions.append(Action.KILL_STOPPED)
        elif is_stopped:  # otherwise a batch_timeout below STOP_TIMEOUT would attribute the stop to the batch
            self.excuse(check_interval(limits), now)
        elif self.is_unresponsive(limits, now) and not self.inspecting:
            self.inspecting = True
            actions.append(Action.INSPECT)
        return actions

    def reason_to_recycle(self, limits: Limits, resident_bytes: int) -> str | None:
        """Return the reason to replace the worker's process, or None if no limit is exceeded.

        The reason completes the sentence "worker 0 (pid 123) ...".
        """
        if self.recycling:
            return None
        if not self.room:
            count = counted(limits.max_batches_per_worker, "batch", "batches")
            return f"has reached the limit of {count} (--max-batches-per-worker)"
        # a worker that is too large from the start must complete a task first: otherwise no task would ever complete
        if self.completed and 0 < limits.max_worker_memory < resident_bytes:
            return (
                f"has {resident_bytes / 2**20:,.0f} MiB of resident memory, and the limit is "
                f"{limits.max_worker_memory / 2**20:,.0f} MiB (--max-worker-memory)"
            )
        return None


@dataclass(slots=True)
class Restarts:
    """Exits and restarts of one worker ID, across all processes with this ID."""

    count: int = 0
    """Number of exits, not counting planned replacements."""
    recycled: int = 0
    """Number of planned replacements."""
    last_exit: str | None = None
    """Description of the last exit; None before the first."""
    last_duration: float | None = None
    """Seconds from the last exit until the next process was ready; None before the first restart."""
    failures: int = 0
    """Number of consecutive failures, for the backoff: failed starts, exits before the first completed task, and exits
    for lack of a resource.
    """
    failed_starts: int = 0
    """Number of consecutive processes that exited before they were ready, although no resource was exhausted."""
    exited_at: float | None = None
    """Time of the last exit; None while a process is ready."""
    lacking_since: float | None = None
    """Time at which a resource to start a process became unavailable; None while the resources are available."""

    def exited(self, worker_exit: WorkerExit, health: WorkerHealth, now: float) -> float:
        """Record an exit; return the delay before the next start, in seconds.

        A worker that exits before it has completed a task is likely to do so again: backoff limits the load.
        """
        self.count += 1
        self.last_exit = worker_exit.reason
        self.exited_at = now
        if worker_exit.attribution == "machine":
            return self.start_failed()
        self.failures = 0 if health.completed else self.failures + 1
        self.failed_starts += not health.ready
        return backoff(self.failures)

    def start_failed(self) -> float:
        """Record a failed start, or an exit for lack of a resource; return the retry delay in seconds."""
        self.failures += 1
        return backoff(self.failures)

    def record_ready(self, now: float) -> bool:
        """Record that a process is ready; return True if the process replaces an exited process."""
        self.failed_starts, self.lacking_since = 0, None
        if self.exited_at is None:
            return False
        self.last_duration, self.exited_at = now - self.exited_at, None
        return True

    def must_report(self, limits: Limits, now: float, *, lacks_resource: bool, has_substitute: bool) -> bool:
        """Return True if waiting requests must fail because this worker does not start.

        Args:
            limits: Limits of the worker pool.
            now: Current time.
            lacks_resource: Whether a resource to start the worker was unavailable; starting is then retried for
                `batch_timeout` first.
            has_substitute: Whether another worker can compute the batches of this worker.
        """
        if not lacks_resource:
            return self.failed_starts >= MAX_FAILED_STARTS and not has_substitute
        if self.lacking_since is None:
            self.lacking_since = now
        if has_substitute or not 0 < limits.batch_timeout < now - self.lacking_since:
            return False
        self.lacking_since = now
        return True


class Shortages:
    """Batches that failed because a machine resource (file descriptors, memory) is unavailable."""

    def __init__(self) -> None:
        self._since: dict[BatchId, float] = {}

    def ended(self) -> None:
        """Record that the machine resource is available again."""
        self._since.clear()

    def overdue(self, lost: Iterable[BatchId], limits: Limits, now: float) -> frozenset[BatchId]:
        """Record failed batches; return and forget those that have been failing for longer than `batch_timeout`."""
        overdue = {k for k in lost if 0 < limits.batch_timeout < now - self._since.setdefault(k, now)}
        for batch_id in overdue:
            del self._since[batch_id]
        return frozenset(overdue)
