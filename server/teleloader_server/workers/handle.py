"""Server-side handle of a worker process: channel, tasks and shared memory."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

from teleloader_server.loading.replay import Replayed
from teleloader_server.loading.stages import NO_SAMPLE
from teleloader_server.loading.tasks import Task
from teleloader_server.workers.arena import Mapping
from teleloader_server.workers.channel import Channel
from teleloader_server.workers.health import WorkerHealth
from teleloader_server.workers.messages import (
    CURRENT_SAMPLE,
    CURRENT_TASK,
    REVOKED,
    STACK_READY,
    STACK_SIGNAL,
    STATUS_BYTES,
    FreeSlots,
    Message,
    encode,
)
from teleloader_server.workers.procfs import catches, send_signal
from teleloader_server.workers.worker import Worker
from teleloader_shared.codec import MAX_TEXT

STACK_WAIT: Final = 0.5
"""Timeout in seconds for a worker to write its stacks; a worker that is blocked in the kernel writes none."""
_STACK_POLL: Final = 0.02
_OWN_THREAD: Final = f"in {Worker.report_late.__name__}"
_OWN_FRAME: Final = f'  File "{Path(__file__).parent.parent}/'


class WorkerHandle:
    """Server-side handle of one worker process.

    Args:
        number: Worker ID.
        channel: Channel to the process.
        uid: User ID of the process if it differs from the server's.
    """

    def __init__(self, number: int, channel: Channel, uid: int | None = None) -> None:
        self.number = number
        self.channel = channel
        self.uid = uid
        self.pid: int | None = None
        self.health = WorkerHealth(time.monotonic())
        self.last_replayed: Replayed | None = None
        """Progress that the worker has reported last since its last result; None if it has reported none."""
        self.loaders: set[str] = set()
        """Keys of the loaders whose specs were sent to the worker."""
        self.slots: dict[int, Mapping] = {}
        self._released: deque[int] = deque()
        """Released slots that were not reported to the worker yet."""
        self._free_due = False
        self._flush_due = False
        self._status_file: int | None = None
        self._reading_stacks = asyncio.Lock()

    def __str__(self) -> str:
        return f"worker {self.number} (pid {self.pid})"

    @property
    def log_fields(self) -> dict[str, int | None]:
        """Additional log record fields that describe this worker."""
        return {"worker": self.number, "pid": self.pid}

    @property
    def working_for(self) -> float:
        """Seconds since the last progress; 0 if the worker has no tasks."""
        return time.monotonic() - self.health.last_progress if self.health.tasks else 0.0

    @property
    def replayed(self) -> Replayed | None:
        """Progress of the worker in the batches that it iterates again; None if it has completed them."""
        return self.last_replayed if self.health.tasks else None

    # -- messages

    def send(self, message: Message) -> None:
        """Queue a message to the worker; one system call sends all messages of an event loop iteration."""
        self.channel.put(encode(message))
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self.channel.fileno() == -1:
            return
        loop = asyncio.get_running_loop()
        if self.channel.flush():
            loop.remove_writer(self.channel)
        else:
            self._flush_due = True
            loop.add_writer(self.channel, self._flush)

    def release(self, slot: int, loop: asyncio.AbstractEventLoop) -> None:
        """Return a shared-memory slot to the worker; may be called from any thread."""
        self._released.append(slot)
        if not self._free_due:
            self._free_due = True
            with suppress(RuntimeError):  # the server has stopped, and its event loop is closed
                loop.call_soon_threadsafe(self._free)

    def _free(self) -> None:
        self._free_due = False  # first: a slot released concurrently is either sent below, or schedules another call
        slots = []
        while self._released:
            slot = self._released.popleft()
            if slot in self.slots:  # no slots after `close`
                slots.append(slot)
        self.send(FreeSlots(slots, [self.slots[slot].owner for slot in slots]))

    # -- status file

    def take_status_file(self, file: int) -> None:
        """Take ownership of the descriptor of the worker's status file, a file in shared memory (see `messages`)."""
        self._status_file = file

    def current_task(self) -> Task | None:
        """Return the open task that the worker is computing, or None if the worker is idle.

        This need not be the first open task, because the worker reports results in groups.
        """
        return self.health.tasks.get(self._current_task_id())

    def _current_task_id(self) -> int:
        if self._status_file is None:
            return next(iter(self.health.tasks), -1)
        (current,) = CURRENT_TASK.unpack(os.pread(self._status_file, CURRENT_TASK.size, 0))
        return int(current)

    def current_sample(self) -> int | None:
        """Return the index of the sample that the worker is fetching, or None if it is unknown."""
        if self._status_file is None:
            return None
        place = CURRENT_TASK.size + REVOKED.size + STACK_READY.size
        (found,) = CURRENT_SAMPLE.unpack(os.pread(self._status_file, CURRENT_SAMPLE.size, place))
        return None if found == NO_SAMPLE else int(found)

    def queued(self) -> list[Task]:
        """Return the open tasks other than the task in progress."""
        current = self._current_task_id()
        return [task for task_id, task in self.health.tasks.items() if task_id != current]

    def revoke(self, tasks: list[Task]) -> None:
        """Revoke tasks; the worker skips revoked tasks that it has not started."""
        revoked = [task_id for task_id, task in self.health.tasks.items() if task in tasks]
        if self._status_file is not None:
            os.pwrite(self._status_file, REVOKED.pack(max(revoked)), CURRENT_TASK.size)
        for task_id in revoked:
            del self.health.tasks[task_id]

    async def stacks(self) -> str:
        """Return the stack traces of the worker's threads, or the reason in parentheses if they are unavailable."""
        if self._status_file is None or self.pid is None:
            return "(the worker had not started)"
        try:
            file = os.dup(self._status_file)  # the handle may be closed concurrently
        except OSError as error:
            return f"(cannot read the stacks: {error.strerror})"
        try:
            async with self._reading_stacks:
                return await self._read_stacks(file, self.pid)
        finally:
            os.close(file)

    async def _read_stacks(self, file: int, pid: int) -> str:
        (is_ready,) = STACK_READY.unpack(os.pread(file, STACK_READY.size, CURRENT_TASK.size + REVOKED.size))
        if not is_ready:
            return f"(the dataset handles signal {int(STACK_SIGNAL)}, which writes the stacks of other workers)"
        if not catches(pid, STACK_SIGNAL):  # the default action of the signal would end a process
            return "(the worker has exited)"
        # the worker writes at the offset that both processes share: earlier stacks are removed
        os.ftruncate(file, STATUS_BYTES)
        os.lseek(file, STATUS_BYTES, os.SEEK_SET)
        size = STATUS_BYTES
        send_signal(pid, STACK_SIGNAL, self.uid)
        for _ in range(int(STACK_WAIT / _STACK_POLL)):
            await asyncio.sleep(_STACK_POLL)
            before, size = size, os.fstat(file).st_size
            if STATUS_BYTES < before == size:
                break
        text = os.pread(file, MAX_TEXT // 2, STATUS_BYTES).decode("utf-8", "backslashreplace")
        return _without_own_frames(text) or "(no stack: the worker is blocked in the kernel)"

    # -- end

    def close(self) -> None:
        """Close the channel and the status file; the memory of frames that are still being sent stays mapped."""
        self.health.ready = False
        self.health.tasks.clear()
        self.slots.clear()
        self.channel.hang_up()
        if self._status_file is not None:
            os.close(self._status_file)
            self._status_file = None


def _without_own_frames(stacks: str) -> str:
    """Cut each stack (most recent call first) below the first frame of this package: its callers are always the same.

    The stack of the worker's own reporting thread is removed.
    """
    threads = [thread for thread in stacks.rstrip().split("\n\n") if _OWN_THREAD not in thread]
    kept, below = [], False
    for line in "\n\n".join(threads).splitlines():
        below = below and line.startswith("  ")
        if not below:
            kept.append(line)
        below = below or line.startswith(_OWN_FRAME)
    return "\n".join(kept)
