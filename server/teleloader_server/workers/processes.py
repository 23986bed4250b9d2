"""The pool of worker processes.

It judges its processes from outside, by what they finish: a worker inside C code that holds the interpreter's lock
could run no heartbeat, and one that hangs may well run one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from teleloader_server.config import ConfigError, Limits
from teleloader_server.loading.pipeline import Report, Task
from teleloader_server.workers.arena import Mapping as SlotMapping
from teleloader_server.workers.aside import aside
from teleloader_server.workers.channel import Channel
from teleloader_server.workers.forkserver import Template
from teleloader_server.workers.handle import WorkerHandle
from teleloader_server.workers.pool import PoolListener, WorkerExit, WorkerState
from teleloader_server.workers.procfs import StopWatch, oom_kills, resident_bytes, shortage
from teleloader_server.workers.worker import WorkerSettings, exit_reason
from teleloader_shared.codec import Address
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.units import counted

logger = logging.getLogger(__name__)

FIRST_RESPAWN_DELAY: Final = 0.05
LAST_RESPAWN_DELAY: Final = 5.0
CHECK_EVERY: Final = 0.25
"""Seconds between looks at the processes, if the limit is not so short that it must be more often."""
SHORTEST_CHECK: Final = 0.02
STOPPED_LIMIT: Final = 3.0
"""Seconds for which a process may be stopped (SIGSTOP) while somebody waits for it."""
UNREADY_DEATHS: Final = 3
"""After so many deaths of a place's processes before they were ready, clients are told that no worker starts."""


@dataclass(slots=True)
class _Place:
    """One place of the pool, whichever process fills it."""

    process: WorkerHandle
    restarts: int = 0
    recycled: int = 0
    last_exit: str | None = None
    last_restart: float | None = None
    died: float | None = None
    failures_in_a_row: int = 0
    """Processes that ended before they had finished anything."""
    unready_in_a_row: int = 0
    """Processes that ended before they could take anything."""
    short_since: float | None = None
    """When the machine first lacked something to start a process, and has started none since."""
    respawn: asyncio.TimerHandle | None = None
    """When its process has died and the next one is not forked yet."""
    began: list[Any] | None = None
    """`Began` of the pass of its shard of an iterable-style dataset: the next process continues there."""
    reached: list[Any] | None = None
    """`Reached` of that pass."""


class ProcessPool:
    """Worker processes, forked from a template process.

    Args:
        make_template: Starts the template: `Template.spawn` or `Template.fork` with its arguments.
        limits: What the pool may take.
        session: The loader whose own the workers are; None when all share them.
    """

    def __init__(
        self, make_template: Callable[[], Template], limits: Limits, session: LoaderSpec | None = None
    ) -> None:
        self._make_template = make_template
        self._limits = limits
        self._session = None if session is None else session.to_json()
        self._places: dict[int, _Place] = {}
        self._task_ids = itertools.count()
        self._closing = False
        self._restarting: asyncio.Task[None] | None = None
        self._check_every = CHECK_EVERY
        if limits.batch_timeout:
            self._check_every = min(CHECK_EVERY, max(SHORTEST_CHECK, limits.batch_timeout / 10))
        self._examinations: set[asyncio.Task[None]] = set()
        self._template_stopped = StopWatch()
        self._oom_kills = oom_kills()
        self._short: dict[Address, float] = {}
        """When batches were first lost because the machine lacks something, since it has last provided that."""

    @property
    def num_workers(self) -> int:
        """Worker processes."""
        return self._limits.num_workers

    async def start(self, listener: PoolListener) -> list[DatasetInfo]:
        """Start the template, wait until it has built the datasets, have it fork the workers."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        try:
            self._infos = await self._build()
        except OSError as error:
            raise OSError(error.errno, shortage(error)) from error
        self._checked = time.monotonic()
        self._next_check = self._loop.call_later(self._check_every, self._check)
        try:
            for number in range(self._limits.num_workers):
                self._places[number] = _Place(self._fork(number))
        except OSError as error:
            await self.close()
            raise OSError(error.errno, shortage(error)) from error
        return self._infos

    def submit(self, worker: int, task: Task) -> None:
        """Send the task; what the worker does not know of its loader goes before."""
        process = self._places[worker].process
        task_id = next(self._task_ids)
        if not process.tasks:
            process.got_on()
        process.tasks[task_id] = task
        process.given += 1
        address = task.address
        if address.loader not in process.loaders:
            process.loaders.add(address.loader)
            self._put(process, ["loader", address.loader, task.spec.to_json(), task.length])
        self._put(process, ["task", task_id, address.loader, address.epoch, address.batch, task.indices])
        if process.given == self._limits.max_batches_per_worker:
            self._wear_out(process, f"was given {counted(process.given, 'batch', 'batches')}")

    def take(self, worker: int, reason: str) -> None:
        """End a worker's process; its tasks are left to others."""
        process = self._places[worker].process
        if process.pid is not None and process.ready:
            self._kill(process, WorkerExit(f"{process} was killed: {reason}", "nobody"))

    def forget(self, loader: str) -> None:
        """Tell the workers to forget a loader; `submit` tells them of it again."""
        for place in self._places.values():
            if loader in place.process.loaders:
                place.process.loaders.remove(loader)
                self._put(place.process, ["forget", loader])

    def workers(self) -> list[WorkerState]:
        """The places and their state."""
        return [
            WorkerState(
                number,
                place.process.pid,
                place.process.ready and not self._is_restarting,
                place.restarts,
                place.recycled,
                place.last_exit,
                place.last_restart,
                place.process.task_at_hand(),
                place.process.working_for,
            )
            for number, place in self._places.items()
        ]

    def pids(self) -> list[int]:
        """The template and the workers."""
        pids = [self._template.pid, *(place.process.pid for place in self._places.values())]
        return [pid for pid in pids if pid is not None]

    def split_template(self) -> Template:
        """A fork of the template for a pool of its own; it has the datasets as they were built.

        Raises:
            ConfigError: When there is none at the moment.
        """
        if self._template.channel.fileno() == -1:
            raise ConfigError("the process that has built the datasets is being restarted")
        return self._template.split()

    def mapped_bytes(self) -> int:
        """Shared memory of all slots."""
        return sum(slot.size for place in self._places.values() for slot in place.process.slots.values())

    async def close(self) -> None:
        """Close the channels, upon which the processes end, and wait for the template."""
        self._closing = True
        self._next_check.cancel()
        for examination in self._examinations:
            examination.cancel()
        if self._restarting is not None:
            self._restarting.cancel()
            with suppress(asyncio.CancelledError):
                await self._restarting
        for place in self._places.values():
            self._forget(place.process)
        self._unwatch_template()
        await aside(self._template.reap)
        # the pool is part of reference cycles: it must not keep the datasets until the next garbage collection
        self._make_template = _no_template

    # -- the template

    @property
    def _is_restarting(self) -> bool:
        """Whether the template has died, and no other one is built yet."""
        return self._restarting is not None and not self._restarting.done()

    def _watch_template(self, receive: Callable[[], object], ended: Callable[[], object]) -> None:
        self._loop.add_reader(self._template.channel, receive)
        if self._template.end != -1:
            self._loop.add_reader(self._template.end, ended)

    def _unwatch_template(self) -> None:
        for end in (self._template.channel.fileno(), self._template.end):
            if end != -1:
                self._loop.remove_reader(end)

    async def _build(self) -> list[DatasetInfo]:
        """Start the template. One that is killed meanwhile, as the kernel does when memory is short, is replaced.

        Raises:
            ConfigError: When the datasets cannot be built, or the third template in a row is killed.
            OSError: When the machine lacks something for a process.
        """
        for attempt in itertools.count(1):
            try:
                return await self._start_template()
            except ConfigError as error:
                was_killed = self._template.exit_code is not None and self._template.exit_code < 0
                if not was_killed or attempt == UNREADY_DEATHS:
                    raise
                logger.error("%s; starting another", error)
        raise AssertionError("unreachable")

    async def _start_template(self) -> list[DatasetInfo]:
        template = self._template = self._make_template()
        built: asyncio.Future[list[Any]] = self._loop.create_future()

        def hear(message: list[Any]) -> None:
            if not built.done():
                built.set_result(message)

        def receive() -> None:
            try:
                for message in template.channel.receive():
                    hear(message)
            except EOFError:
                hear(["ended", "", 0])

        def ended() -> None:
            with suppress(BlockingIOError):  # when what it has forked holds its channel open
                while not built.done():
                    receive()
            hear(["ended", "", 0])

        self._watch_template(receive, ended)
        try:
            word, content, pid = await built
        except asyncio.CancelledError:
            self._unwatch_template()
            template.channel.hang_up()
            raise
        self._unwatch_template()
        if word != "built":
            await aside(template.reap)
            raise ConfigError(content or f"the process that builds the datasets {_ending(template)}; see its output")
        template.is_process(pid)
        self._watch_template(self._receive_from_template, self._template_ended)
        return [DatasetInfo(**info) for info in content]

    def _template_ended(self) -> None:
        self._unwatch_template()
        pid = self._template.pid
        logger.error("the template process (pid %s) died; starting another", pid, extra={"pid": pid})
        self._restarting = self._loop.create_task(self._restart_template())

    def _receive_from_template(self) -> None:
        try:
            messages = self._template.channel.receive()
        except EOFError:
            self._template_ended()
            return
        for message in messages:
            match message:
                case ["forked", int(number), int(pid)]:
                    self._places[number].process.pid = pid
                case ["not forked", int(number), str(reason)]:
                    loss = WorkerExit(f"worker {number} cannot be started: {reason}", "machine")
                    self._lose(self._places[number].process, loss)
                case ["exited", int(pid), int(status)]:
                    self._exited(pid, status)

    async def _restart_template(self) -> None:
        # the kernel ends the workers with their parent, so all places are lost together
        lost = [place.process for place in self._places.values()]
        await aside(self._template.reap)
        for process in lost:
            # they are ours only where we adopt orphans: as a container's first process
            if process.pid is not None:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
        delay = FIRST_RESPAWN_DELAY
        for attempt in itertools.count(1):
            try:
                infos = await self._start_template()
                if infos == self._infos:
                    break
                self._unwatch_template()
                await aside(self._template.reap)
                reason = f"the datasets changed since the start: start the server anew to host {infos}"
            except (ConfigError, OSError) as error:
                reason = f"the datasets cannot be built again: {error}"
            logger.error("%s", reason)
            if attempt >= UNREADY_DEATHS:
                self._listener.no_worker_starts(reason)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LAST_RESPAWN_DELAY)
        for process in lost:
            self._lose(process, WorkerExit(f"{process} ended with the template process"))

    # -- the workers

    def _fork(self, number: int) -> WorkerHandle:
        channel, theirs = Channel.pair()
        limits = self._limits
        free_limit = limits.memory_budget // limits.num_workers
        with theirs:
            before = self._places.get(number)
            settings = WorkerSettings(
                number, limits.num_workers, limits.max_batch_bytes, free_limit, self._session,
                began=None if before is None else before.began, reached=None if before is None else before.reached,
            )  # fmt: skip
            self._template.channel.send(["fork", dataclasses.astuple(settings)], [theirs.fileno()])
        process = WorkerHandle(number, channel)
        self._loop.add_reader(channel, self._receive, process)
        return process

    def _receive(self, process: WorkerHandle) -> bool:
        """Take what a worker says; False when it says no more for now."""
        try:
            messages = process.channel.receive()
        except BlockingIOError:
            return False
        except EOFError:
            # how it ended is told by the template, which is its parent
            self._loop.remove_reader(process.channel)
            return False
        for message in messages:
            self._hear(process, message)
        return True

    def _hear(self, process: WorkerHandle, message: list[Any]) -> None:
        match message:
            case ["done", list(finished)]:
                process.finished += len(finished)
                self._got_on(process)
                for task_id, frame, nbytes, *report, reached in finished:
                    self._done(process, task_id, frame, nbytes, Report(*report), reached)
            case ["began", list(began)]:
                self._places[process.number].began = began
            case ["slot", int(slot), int(size)]:
                self._map(process, slot, size)
            case ["retract", int(slot)]:
                del process.slots[slot]
            case ["started", int(pid)]:
                process.pid = pid
                with suppress(OSError):  # there is no descriptor left: then it cannot tell where it hangs
                    process.take_notes(process.channel.take_fd())
            case ["ready"]:
                self._ready(process)
            case ["progress"]:
                self._got_on(process)

    def _map(self, process: WorkerHandle, slot: int, size: int) -> None:
        try:
            process.slots[slot] = SlotMapping(process.channel.take_fd(), size)
            self._short.clear()
        except OSError as error:
            # the descriptor that came with the message is lost, and with it the batches that will be written there
            loss = WorkerExit(
                f"{process} was replaced, since its batches cannot be mapped: {shortage(error)}", "machine"
            )
            self._kill(process, loss)

    def _ready(self, process: WorkerHandle) -> None:
        process.ready = True
        process.got_on()
        place = self._places[process.number]
        place.short_since = None
        if place.died is not None:
            place.last_restart = time.monotonic() - place.died
            place.died = None
            logger.warning(
                "worker %d is back as pid %s after %.3f s",
                process.number, process.pid, place.last_restart, extra=process.log_fields,
            )  # fmt: skip
        self._listener.worker_ready(process.number)

    def _done(
        self, process: WorkerHandle, task_id: int, frame: bytes | int, nbytes: int, report: Report,
        reached: list[Any] | None,
    ) -> None:  # fmt: skip
        if task_id not in process.tasks:  # it was taken back when it had just been begun
            if not isinstance(frame, bytes):
                self._put(process, ["free", [frame]])
            return
        if isinstance(frame, bytes):
            lease = np.frombuffer(frame, np.uint8)
        else:
            lease = process.slots[frame].lease(nbytes, lambda: self._released(process, frame))
        self._places[process.number].reached = reached
        self._listener.task_done(process.number, process.tasks.pop(task_id), lease, report)

    def _released(self, process: WorkerHandle, slot: int) -> None:
        """Nobody reads a slot any more; called in whichever thread let go of it."""
        process.released.append(slot)
        if not process.free_due:
            process.free_due = True
            with suppress(RuntimeError):  # the server has stopped, and its loop is closed
                self._loop.call_soon_threadsafe(self._free, process)

    def _free(self, process: WorkerHandle) -> None:
        """Tell a worker of its slots that nobody reads any more: one message for many."""
        process.free_due = False  # first: what is released meanwhile is either taken below, or comes here again
        slots = []
        while process.released:
            slots.append(process.released.popleft())
        self._put(process, ["free", slots])

    def _put(self, process: WorkerHandle, message: list[Any]) -> None:
        """Send a message soon: one system call carries all that is said to a worker at a time."""
        process.channel.put(message)
        if not process.flush_due:
            process.flush_due = True
            self._loop.call_soon(self._flush, process)

    def _flush(self, process: WorkerHandle) -> None:
        process.flush_due = False
        if process.channel.fileno() == -1:
            return
        if process.channel.flush():
            self._loop.remove_writer(process.channel)
        else:
            process.flush_due = True
            self._loop.add_writer(process.channel, self._flush, process)

    # -- whether they get on

    def _check(self) -> None:
        """Look at the processes: the one that hangs or is stopped while there is work for it must be replaced."""
        now = time.monotonic()
        late = max(0.0, now - self._checked - self._check_every)
        self._checked = now
        self._next_check = self._loop.call_later(self._check_every, self._check)
        pid = self._template.pid
        if pid is not None and self._template_stopped.seconds(pid) > STOPPED_LIMIT:
            # unlike a worker it is not replaced: all workers would end with it, and all datasets be built again
            logger.warning(
                "the template process (pid %d) was stopped (SIGSTOP); it is continued", pid, extra={"pid": pid}
            )
            _signal(pid, signal.SIGCONT)
        if not self._is_restarting:
            for place in self._places.values():
                place.process.forgive(late)
                self._look_at(place.process)

    def _look_at(self, process: WorkerHandle) -> None:
        if process.pid is None:
            return
        most = self._limits.max_worker_memory
        # one that is too large from the start has to finish something, or nothing would ever be done
        if most and process.finished and not process.worn and (taken := resident_bytes(process.pid)) > most:
            self._wear_out(process, f"has {taken / 2**20:,.0f} MiB of resident memory")
        if process.is_overdue(self._check_every):
            self._receive_all(process)
        if not process.is_overdue(self._check_every):
            return
        if process.ready and not process.held_up and (waiting := process.waiting()):
            self._take_back(process, waiting)
        stopped = process.stopped.seconds(process.pid)
        if stopped > STOPPED_LIMIT:
            self._kill(process, WorkerExit(f"{process} was stopped (SIGSTOP), and killed"))
        elif stopped:
            process.forgive(self._check_every)  # the batch must not be charged with a limit that is shorter than this
        elif self._hangs(process) and not process.examined:
            process.examined = True
            examination = self._loop.create_task(self._examine(process))
            self._examinations.add(examination)
            examination.add_done_callback(self._examinations.discard)

    def _take_back(self, process: WorkerHandle, waiting: list[Task]) -> None:
        """Let others do what waits behind a batch that takes long, perhaps for ever."""
        if self._listener.worker_stalled(process.number, waiting):
            process.revoke(waiting)
            process.held_up = True

    def _got_on(self, process: WorkerHandle) -> None:
        process.got_on()
        if process.held_up:
            process.held_up = False
            self._listener.worker_resumed(process.number)
        if process.worn:
            self._loop.call_soon(self._recycle, process)

    def _hangs(self, process: WorkerHandle) -> bool:
        limit = self._limits.batch_timeout
        return bool(limit) and process.is_overdue(limit)

    async def _examine(self, process: WorkerHandle) -> None:
        """Have a process that hangs say where, and kill it."""
        was_ready, stack = process.ready, await process.stacks()
        process.examined = False
        self._receive_all(process)
        if self._places[process.number].process is not process or not self._hangs(process):
            return
        task = process.task_at_hand()
        doing, limit = "a batch" if was_ready else "its start", self._limits.batch_timeout
        reason = f"{process} was killed: {doing} took longer than {limit:g} s, the limit (--batch-timeout)"
        self._kill(process, WorkerExit(reason, "nobody" if task is None else task.address, stack))

    def _kill(self, process: WorkerHandle, loss: WorkerExit) -> None:
        """Do without a process, even if the kernel cannot end it yet."""
        if process.pid is not None:
            _signal(process.pid, signal.SIGKILL)
        self._lose(process, loss)

    # -- their ends

    def _wear_out(self, process: WorkerHandle, reason: str) -> None:
        process.worn = True
        logger.info(
            "%s %s, and is replaced when it has done what it has to do", process, reason, extra=process.log_fields
        )
        self._listener.worker_recycling(process.number)
        if not process.tasks:
            self._loop.call_soon(self._recycle, process)

    def _recycle(self, process: WorkerHandle) -> None:
        """Let a worn process end, and start another in its place."""
        place = self._places[process.number]
        if self._closing or self._is_restarting or place.process is not process:
            return
        if not process.ready or process.has_work:
            return
        self._forget(process)
        place.recycled += 1
        place.process = self._fork(process.number)

    def _exited(self, pid: int, status: int) -> None:
        reason = exit_reason(status)
        before, self._oom_kills = self._oom_kills, max(self._oom_kills, oom_kills())
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and self._oom_kills > before:
            reason += ", out of memory as it seems (the kernel's oom_kill count rose)"
        for place in self._places.values():
            if place.process.pid == pid:
                self._receive_all(place.process)
                self._lose(place.process, WorkerExit(f"{place.process} {reason}"))

    def _receive_all(self, process: WorkerHandle) -> None:
        """Take what a process has said already: frames that it finished before it ended are as good as any."""
        while process.channel.fileno() != -1 and self._receive(process):
            pass

    def _lose(self, process: WorkerHandle, loss: WorkerExit) -> None:
        tasks, was_ready, was_useful = list(process.tasks.values()), process.ready, bool(process.finished)
        self._forget(process)
        place = self._places[process.number]
        if self._closing or place.process is not process or place.respawn is not None:
            return
        place.restarts += 1
        place.last_exit = loss.reason
        place.died = time.monotonic()
        if loss.attribution == "machine":
            loss = dataclasses.replace(loss, overdue=self._overdue(tasks))
            place.failures_in_a_row += 1
        else:
            place.failures_in_a_row = 0 if was_useful else place.failures_in_a_row + 1
            place.unready_in_a_row = 0 if was_ready else place.unready_in_a_row + 1
        # a worker that dies before it finished anything is likely to die again: do not burn the machine on it
        delay = _backoff(place.failures_in_a_row)
        stack = f". It was at:\n{loss.stack}" if loss.stack else ""
        logger.warning(
            "%s; %d batches are left to others; replacing it in %.2f s%s",
            loss.reason, len(tasks), delay, stack, extra=process.log_fields,
        )  # fmt: skip
        place.respawn = self._loop.call_later(delay, self._respawn, place)
        self._listener.worker_lost(process.number, tasks, loss)
        if loss.attribution == "machine" and not was_ready:
            self._cannot_start(place, loss.reason)
        elif place.unready_in_a_row >= UNREADY_DEATHS and not self._any_ready:
            self._listener.no_worker_starts(loss.reason)

    @property
    def _any_ready(self) -> bool:
        return any(place.process.ready for place in self._places.values())

    def _cannot_start(self, place: _Place, reason: str) -> None:
        """The machine lacks something to start a process: after the time of a batch, clients are told what."""
        now, limit = time.monotonic(), self._limits.batch_timeout
        if place.short_since is None:
            place.short_since = now
        # the workers of a session stand for each other as little as its shards do
        is_needed = self._session is not None or not self._any_ready
        if limit and now - place.short_since > limit and is_needed:
            place.short_since = now
            self._listener.no_worker_starts(reason)

    def _overdue(self, tasks: list[Task]) -> frozenset[Address]:
        """Of tasks that are lost because the machine lacks something, those that have been tried for long enough."""
        now, limit = time.monotonic(), self._limits.batch_timeout
        overdue = {t.address for t in tasks if limit and now - self._short.setdefault(t.address, now) > limit}
        for address in overdue:
            del self._short[address]
        return frozenset(overdue)

    def _respawn(self, place: _Place) -> None:
        place.respawn = None
        if self._closing:
            return
        delay = FIRST_RESPAWN_DELAY
        if not self._is_restarting:
            try:
                place.process = self._fork(place.process.number)
                return
            except OSError as error:
                place.failures_in_a_row += 1
                delay = _backoff(place.failures_in_a_row)
                reason = f"worker {place.process.number} cannot be replaced: {shortage(error)}"
                logger.error("%s; trying again in %.2f s", reason, delay)
                self._cannot_start(place, reason)
        place.respawn = self._loop.call_later(delay, self._respawn, place)

    def _forget(self, process: WorkerHandle) -> None:
        if process.channel.fileno() != -1:
            self._loop.remove_reader(process.channel)
            self._loop.remove_writer(process.channel)
        process.forget()


def _ending(template: Template) -> str:
    """How a template ended that has not built its datasets."""
    code = template.exit_code
    if code is None:
        return "ended without a word"
    return f"was {exit_reason(-code)}" if code < 0 else exit_reason(code << 8)


def _backoff(failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    return min(FIRST_RESPAWN_DELAY * 2 ** (failures - 1), LAST_RESPAWN_DELAY) if failures else 0.0


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _no_template() -> Template:
    raise RuntimeError("cannot start a template process: the pool is closed")
