"""Completed tasks of a worker, collected into groups: small frames share a buffer and a message to the server."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from teleloader_server.loading.tasks import GROUP_BYTES, GROUP_SECONDS, GroupReport, Report
from teleloader_server.workers.arena import Arena, Slot
from teleloader_server.workers.lendable import NOBODY
from teleloader_server.workers.messages import Done

INLINE_BYTES: Final = 32 * 1024
"""Maximum size of frames that are sent through the channel, because copying them costs less than shared memory."""


@dataclass(slots=True)
class _Group:
    """Buffer with the frames of successive tasks."""

    buffer: Slot | NDArray[np.uint8]
    task_id: int
    """ID of the first task."""
    began: float
    used: int = 0
    """Size of all complete frames, in bytes."""
    sizes: list[int] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    reached: Sequence[Any] | None = None

    @property
    def memory(self) -> NDArray[np.uint8]:
        """Memory of the buffer."""
        return self.buffer.memory if isinstance(self.buffer, Slot) else self.buffer

    def place(self, nbytes: int) -> NDArray[np.uint8]:
        """Return the memory of the next frame."""
        end = self.used + nbytes
        if isinstance(self.buffer, Slot):
            self.buffer.written = max(self.buffer.written, end)
        return self.memory[self.used : end]


class Results:
    """Buffers of the frames that a worker computes, and the results that it has not reported yet.

    One thread computes tasks, and calls `begin`, `place` and `add` for each. Any thread may call `take`.

    Args:
        arena: Shared memory for frames; used by the computing thread only.
        cpu_wait: Function that returns the total time in seconds for which the computing thread had no CPU.
        cpu: Function that returns the total CPU time of the process in seconds.
    """

    def __init__(
        self, arena: Arena, cpu_wait: Callable[[], float], cpu: Callable[[], float] = time.process_time
    ) -> None:
        self._arena = arena
        self._cpu_wait = cpu_wait
        self._cpu = cpu
        self._before = 0.0, 0.0
        """Values of `cpu_wait` and `cpu` when the last group ended, or at the last call of `resume`."""
        self._lock = threading.Lock()
        self._open: _Group | None = None
        """Group to which the next frame is added, if there is room."""
        self._is_writing = False
        """True while the computing thread writes a frame to the open group, which then cannot be reported."""
        self._done: deque[Done] = deque()
        self._task_id = -1
        self._following = 0
        self._owner = NOBODY

    def resume(self) -> None:
        """Start to measure the CPU times, when the worker receives a task after it had none."""
        self._before = self._cpu_wait(), self._cpu()

    def begin(self, task_id: int, following: int, owner: int = NOBODY) -> None:
        """Start a task.

        Args:
            task_id: ID of the task.
            following: Number of tasks of the same group after this one.
            owner: Owner of the batch (`Task.owner`), the same for all tasks of a group.
        """
        self._task_id, self._following, self._owner = task_id, following, owner
        self._began = time.monotonic()
        with self._lock:
            group = self._open
            if group is not None and task_id != group.task_id + len(group.sizes):  # the tasks between were revoked
                self._close()

    def place(self, nbytes: int) -> NDArray[np.uint8]:
        """Return a buffer of `nbytes` bytes for the frame of the current task; a second call replaces the buffer."""
        with self._lock:
            self._is_writing = True
            group = self._open
            if group is not None and group.used + nbytes <= len(group.memory):
                return group.place(nbytes)
            self._close()
        # without the lock, because the arena sends messages, for which another thread may wait that calls `take`
        if group is not None and not group.sizes and isinstance(group.buffer, Slot):  # a frame that is replaced
            self._arena.give_back(group.buffer.number)
        self._open = group = _Group(self._allocate(nbytes), self._task_id, self._began)
        return group.place(nbytes)

    def _allocate(self, nbytes: int) -> Slot | NDArray[np.uint8]:
        size = max(nbytes, min(GROUP_BYTES, nbytes * (1 + self._following)))
        return np.empty(size, np.uint8) if size <= INLINE_BYTES else self._arena.take(size, self._owner)

    def add(self, nbytes: int, report: Report, reached: Sequence[Any] | None) -> None:
        """Complete the current task, whose frame of `nbytes` bytes is in the buffer that `place` returned last."""
        with self._lock:
            group = self._open
            assert group is not None, "`place` has created a group"  # noqa: S101
            self._is_writing = False
            group.used += nbytes
            group.sizes.append(nbytes)
            group.reports.append(report)
            group.reached = reached
            if report.failed or not self._following or time.monotonic() - group.began > GROUP_SECONDS:
                self._close()

    def take(self, *, at_once: bool) -> list[Done]:
        """Remove and return the results that were not reported yet, in order.

        Args:
            at_once: True to include the open group, unless a frame is being written to it.
        """
        with self._lock:
            if at_once and not self._is_writing:
                self._close()
            done = []
            while self._done:
                done.append(self._done.popleft())
            return done

    @property
    def are_pending(self) -> bool:
        """True if a result was not reported yet."""
        return self._open is not None or bool(self._done)

    def _close(self) -> None:
        group, self._open = self._open, None
        if group is None or not group.sizes:
            return
        if isinstance(group.buffer, Slot):
            group.buffer.clear_after(group.used)
        frames = group.buffer.number if isinstance(group.buffer, Slot) else group.buffer[: group.used].tobytes()
        (waited, used), self._before = self._before, (self._cpu_wait(), self._cpu())
        report = GroupReport.of(group.reports, self._before[0] - waited, self._before[1] - used)
        self._done.append(Done(group.task_id, frames, group.sizes, report, group.reached))
