"""Decisions about workers: when to kill, recycle, restart or report one.

Pure: no clock, no process, no event loop. `ProcessPool` passes in its observations with their time and carries out the
decisions. Workers send no heartbeat of their own for this: one inside C code that holds the interpreter's lock could
send none, and one that hangs might. A worker is alive as long as it completes something.
"""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from teleloader_server.config import Limits
from teleloader_server.loading.tasks import Task
from teleloader_shared.codec import Address
from teleloader_shared.units import counted

MIN_BACKOFF: Final = 0.05
MAX_BACKOFF: Final = 5.0
CHECK_INTERVAL: Final = 0.25
"""Seconds between two checks of all workers; less with a short `batch_timeout`."""
MIN_CHECK_INTERVAL: Final = 0.02
STOP_TIMEOUT: Final = 3.0
"""Seconds for which a process with work may be stopped (SIGSTOP)."""
MAX_FAILED_STARTS: Final = 3
"""Failed starts in a row after which clients are informed. Starting is retried nevertheless."""

Attribution = Address | Literal["unknown", "nobody", "machine"]
"""Cause of a worker's end. All ways in which a worker can be lost, each with its attribution and the consequence:

- Ended by a signal or an exit, out of memory, ended with its fork server, or stopped for 3 s (SIGSTOP, SIGTSTP,
  SIGTTIN, SIGTTOU): ``unknown``. Perhaps one of its batches is the cause, so each is computed again by a worker that
  has no other. The third loss of such a worker is `WorkerDied` in the place of the batch.
- One batch took longer than `batch_timeout`: the batch's address. `LoaderTimeout` in its place, with no other attempt.
- No descriptor, memory or process for the worker or for its batches: ``machine``. Retried with backoff; after
  `batch_timeout`, `WorkerDied` that names the resource.
- Preempted for another client, or not ready after `batch_timeout`: ``nobody``. Its batches are computed again.
"""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """Exit of a worker, with its cause."""

    reason: str
    """A sentence without its full stop; the worker is its subject."""
    attribution: Attribution = "unknown"
    stack: str = ""
    """Stacks of its threads, if it was unresponsive."""
    overdue: frozenset[Address] = frozenset()
    """Batches that the machine has lacked a resource for during `batch_timeout`: they are not retried."""


class Action(enum.Enum):
    """Action on a slow worker."""

    RECLAIM = enum.auto()
    """Have other workers compute the tasks that wait behind the current one."""
    KILL_STOPPED = enum.auto()
    INSPECT = enum.auto()
    """Read its stacks; then kill it if it is still unresponsive."""


def check_interval(limits: Limits) -> float:
    """Return the seconds between two checks of all workers."""
    if not limits.batch_timeout:
        return CHECK_INTERVAL
    return min(CHECK_INTERVAL, max(MIN_CHECK_INTERVAL, limits.batch_timeout / 10))


def backoff(failures: int) -> float:
    """Return the seconds to wait after this many failures in a row."""
    # the exponent is limited too: a float cannot hold 2.0**1024
    return min(MIN_BACKOFF * 2 ** min(failures - 1, 16), MAX_BACKOFF) if failures else 0.0


def exit_reason(status: int, *, out_of_memory: bool = False) -> str:
    """Return the predicate of a sentence about a process that ended with this status of ``os.waitpid``.

    Args:
        status: The status.
        out_of_memory: Whether the kernel has killed a process for lack of memory meanwhile.
    """
    if not os.WIFSIGNALED(status):
        return f"exited with code {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    known = number in set(signal.Signals)
    reason = f"killed by signal {signal.Signals(number).name if known else number} ({signal.strsignal(number)})"
    if number == signal.SIGKILL and out_of_memory:
        reason += ", out of memory as it seems (the kernel's oom_kill count rose)"
    return reason


class StopTimer:
    """Time for which a process has been stopped (SIGSTOP), as far as it was observed."""

    def __init__(self) -> None:
        self._since: float | None = None

    def reset(self) -> None:
        """Record that the process has run."""
        self._since = None

    def observe(self, now: float, *, is_stopped: bool) -> float:
        """Record an observation; return the seconds since the first one of an unbroken stop."""
        if not is_stopped:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
        return now - self._since


@dataclass(slots=True)
class WorkerHealth:
    """State of one worker process that decisions depend on."""

    last_progress: float
    """Time of its start, or since which it can be expected to complete its current task."""
    ready: bool = False
    tasks: dict[int, Task] = field(default_factory=dict)
    """Submitted tasks that are not completed, in the order of their submission."""
    submitted: int = 0
    completed: int = 0
    recycling: bool = False
    """Gets no more tasks, and is replaced once it has completed those that it has."""
    stalled: bool = False
    """The current task is slow: those behind it were reclaimed, and no others are submitted."""
    inspecting: bool = False
    """Its stacks are being read."""
    stop_timer: StopTimer = field(default_factory=StopTimer)

    @property
    def has_work(self) -> bool:
        """True while progress is expected of it."""
        return not self.ready or bool(self.tasks) or self.stalled

    def progress(self, now: float) -> None:
        """Record that it started, completed something, or was given work while it had none."""
        self.last_progress = now
        self.stop_timer.reset()

    def excuse(self, seconds: float, now: float) -> None:
        """Do not count these last seconds: the server itself, or the worker, did not run."""
        self.last_progress = min(now, self.last_progress + seconds)

    def is_overdue(self, seconds: float, now: float) -> bool:
        """Return True if it has made no progress for longer, although it has work."""
        return self.has_work and now - self.last_progress > seconds

    def is_unresponsive(self, limits: Limits, now: float) -> bool:
        """Return True if the worker's current task, or its start, has exceeded `batch_timeout`."""
        return bool(limits.batch_timeout) and self.is_overdue(limits.batch_timeout, now)

    def actions(self, limits: Limits, now: float, *, is_stopped: bool, has_queued: bool) -> list[Action]:
        """Decide about a worker that has made no progress since the last check.

        Args:
            limits: Limits of its pool.
            now: The time.
            is_stopped: Whether the process is stopped (SIGSTOP).
            has_queued: Whether tasks wait behind the current one.
        """
        actions = [Action.RECLAIM] if self.ready and not self.stalled and has_queued else []
        if self.stop_timer.observe(now, is_stopped=is_stopped) > STOP_TIMEOUT:
            actions.append(Action.KILL_STOPPED)
        elif is_stopped:  # a batch_timeout below STOP_TIMEOUT would blame the batch
            self.excuse(check_interval(limits), now)
        elif self.is_unresponsive(limits, now) and not self.inspecting:
            self.inspecting = True
            actions.append(Action.INSPECT)
        return actions

    def reason_to_recycle(self, limits: Limits, resident_bytes: int) -> str | None:
        """Return the predicate of a sentence about a worker that has exceeded a limit of its life."""
        if self.recycling:
            return None
        if self.submitted == limits.max_batches_per_worker != 0:
            return f"was given {counted(self.submitted, 'batch', 'batches')}"
        # a worker that is too large from the start has to complete something, or nothing ever would be
        if self.completed and 0 < limits.max_worker_memory < resident_bytes:
            return f"has {resident_bytes / 2**20:,.0f} MiB of resident memory"
        return None


@dataclass(slots=True)
class Restarts:
    """Exits and restarts of one worker ID, across the processes that have had it."""

    count: int = 0
    last_exit: str | None = None
    last_duration: float | None = None
    """Seconds from the last exit until the next process was ready."""
    failures: int = 0
    """Processes in a row that ended before they had completed anything."""
    failed_starts: int = 0
    """Processes in a row that ended before they were ready, although the machine lacked nothing."""
    exited_at: float | None = None
    """Time of the last exit, until the next process is ready."""
    lacking_since: float | None = None
    """Time since which the machine has lacked a resource to start a process."""

    def exited(self, loss: WorkerExit, health: WorkerHealth, now: float) -> float:
        """Record an exit; return the seconds to wait before the next start.

        A worker that ends before it has completed anything is likely to do so again: backoff saves the machine.
        """
        self.count += 1
        self.last_exit = loss.reason
        self.exited_at = now
        if loss.attribution == "machine":
            return self.start_failed()
        self.failures = 0 if health.completed else self.failures + 1
        self.failed_starts += not health.ready
        return backoff(self.failures)

    def start_failed(self) -> float:
        """Record that the machine lacks a resource; return the seconds to wait before the next start."""
        self.failures += 1
        return backoff(self.failures)

    def record_ready(self, now: float) -> bool:
        """Record that a process is ready; return True if it replaces one that was lost."""
        self.failed_starts, self.lacking_since = 0, None
        if self.exited_at is None:
            return False
        self.last_duration, self.exited_at = now - self.exited_at, None
        return True

    def must_report(self, limits: Limits, now: float, *, lacks_resource: bool, has_substitute: bool) -> bool:
        """Return True if clients must be informed that this worker does not start.

        Args:
            limits: Limits of its pool.
            now: The time.
            lacks_resource: Whether the machine lacked a resource to start it: then it is retried for `batch_timeout`.
            has_substitute: Whether another worker can compute its batches.
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
    """Batches that were lost because the machine lacked a resource, since it last had enough."""

    def __init__(self) -> None:
        self._since: dict[Address, float] = {}

    def ended(self) -> None:
        """Record that the machine has the resource again."""
        self._since.clear()

    def overdue(self, lost: Iterable[Address], limits: Limits, now: float) -> frozenset[Address]:
        """Record lost batches; return those that have been lost for longer than `batch_timeout`."""
        overdue = {k for k in lost if 0 < limits.batch_timeout < now - self._since.setdefault(k, now)}
        for address in overdue:
            del self._since[address]
        return frozenset(overdue)
