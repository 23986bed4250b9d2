"""A worker process as the server sees it: its channel, what it has to do, its slots, and whether it gets on."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

from teleloader_server.loading.pipeline import Task
from teleloader_server.workers.arena import Mapping
from teleloader_server.workers.channel import Channel
from teleloader_server.workers.procfs import StopWatch
from teleloader_server.workers.worker import BEGUN, REVOKED, STACK_SIGNAL, Worker
from teleloader_shared.codec import MAX_TEXT

STACK_WAIT: Final = 0.5
"""Seconds that a worker has to begin to write its stacks; one that the kernel holds writes none."""
_STACK_POLL: Final = 0.02
_OUR_THREAD: Final = f"in {Worker.report_late.__name__}"
_OURS: Final = f'  File "{Path(__file__).parent.parent}/'


class WorkerHandle:
    """One process; whether it hangs is judged from outside, by its progress.

    Args:
        number: Its place in the pool.
        channel: To the process.
    """

    def __init__(self, number: int, channel: Channel) -> None:
        self.number = number
        self.channel = channel
        self.pid: int | None = None
        self.ready = False
        self.tasks: dict[int, Task] = {}
        """What it has to do, in its order."""
        self.given = 0
        """Batches that it was given."""
        self.finished = 0
        self.worn = False
        """It is given nothing more, and replaced when it has nothing to do."""
        self.loaders: set[str] = set()
        """Those that it was told of."""
        self.slots: dict[int, Mapping] = {}
        self.released: deque[int] = deque()
        """Slots that nobody reads any more, of which it was not told yet."""
        self.free_due = False
        self.flush_due = False
        self.held_up = False
        """What it does now takes long: what waited behind it was taken back, and it is given nothing more."""
        self.examined = False
        """It seems to hang, and its stacks are being taken."""
        self.stopped = StopWatch()
        self._since = time.monotonic()
        self._notes: int | None = None

    def __str__(self) -> str:
        return f"worker {self.number} (pid {self.pid})"

    @property
    def log_fields(self) -> dict[str, int | None]:
        """What a line of the log about it is about."""
        return {"worker": self.number, "pid": self.pid}

    # -- progress

    @property
    def has_work(self) -> bool:
        """Whether there is something to wait for."""
        return not self.ready or bool(self.tasks) or self.held_up

    def got_on(self) -> None:
        """It has started, or finished something, or been given something when it had nothing."""
        self._since = time.monotonic()
        self.stopped.reset()

    def forgive(self, seconds: float) -> None:
        """So long the server itself did not run, and perhaps nothing else did."""
        self._since = min(time.monotonic(), self._since + seconds)

    def is_overdue(self, seconds: float) -> bool:
        """Whether what it does now has taken longer."""
        return self.has_work and time.monotonic() - self._since > seconds

    @property
    def working_for(self) -> float:
        """Seconds for which it has been at what it does now; 0 when it has nothing to do."""
        return time.monotonic() - self._since if self.tasks else 0.0

    # -- its notes

    def take_notes(self, file: int) -> None:
        """The file that it shares: see `worker.BEGUN`."""
        self._notes = file

    def task_at_hand(self) -> Task | None:
        """What it is doing: not always the first of its tasks, as those that are finished are reported late."""
        return self.tasks.get(self._begun())

    def _begun(self) -> int:
        if self._notes is None:
            return next(iter(self.tasks), -1)
        (begun,) = BEGUN.unpack(os.pread(self._notes, BEGUN.size, 0))
        return int(begun)

    def waiting(self) -> list[Task]:
        """What it has to do besides that."""
        begun = self._begun()
        return [task for task_id, task in self.tasks.items() if task_id != begun]

    def revoke(self, tasks: list[Task]) -> None:
        """Have it leave out those of these tasks that it has not begun."""
        revoked = [task_id for task_id, task in self.tasks.items() if task in tasks]
        if self._notes is not None:
            os.pwrite(self._notes, REVOKED.pack(max(revoked)), BEGUN.size)
        for task_id in revoked:
            del self.tasks[task_id]

    async def stacks(self) -> str:
        """Where its threads are; says why, when it does not tell."""
        if self._notes is None or self.pid is None:
            return "(it had not started to run)"
        try:
            file = os.dup(self._notes)  # the process may be forgotten meanwhile
        except OSError as error:
            return f"(what it says cannot be read: {error.strerror})"
        try:
            begin = size = os.fstat(file).st_size
            with suppress(ProcessLookupError):
                os.kill(self.pid, STACK_SIGNAL)
            for _ in range(int(STACK_WAIT / _STACK_POLL)):
                await asyncio.sleep(_STACK_POLL)
                before, size = size, os.fstat(file).st_size
                if begin < before == size:
                    break
            text = os.pread(file, MAX_TEXT // 2, begin).decode("utf-8", "backslashreplace")
        finally:
            os.close(file)
        return _without_our_callers(text) or "(it did not say where: it waits in the kernel)"

    # -- its end

    def forget(self) -> None:
        """Close what is held of it; a frame that is still being sent keeps its own memory."""
        self.ready = False
        self.tasks.clear()
        self.slots.clear()
        self.channel.hang_up()
        if self._notes is not None:
            os.close(self._notes)
            self._notes = None


def _without_our_callers(stacks: str) -> str:
    """The stacks, most recent call first, down to the first frame of ours: what is below is always the same."""
    threads = [thread for thread in stacks.rstrip().split("\n\n") if _OUR_THREAD not in thread]
    kept, below = [], False
    for line in "\n\n".join(threads).splitlines():
        below = below and line.startswith("  ")
        if not below:
            kept.append(line)
        below = below or line.startswith(_OURS)
    return "\n".join(kept)
