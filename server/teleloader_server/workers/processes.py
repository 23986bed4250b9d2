"""The pool of worker processes: carries out what `health` decides."""

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
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from teleloader_server.config import ConfigError, Limits
from teleloader_server.loading.pipeline import Report, Task
from teleloader_server.workers import health
from teleloader_server.workers.arena import Mapping as SlotMapping
from teleloader_server.workers.aside import aside
from teleloader_server.workers.channel import Channel
from teleloader_server.workers.forkserver import ForkServer
from teleloader_server.workers.handle import WorkerHandle
from teleloader_server.workers.health import Action, Restarts, Shortages, StopTimer, WorkerExit, exit_reason
from teleloader_server.workers.pool import PoolListener, WorkerState
from teleloader_server.workers.procfs import is_stopped, oom_kills, resident_bytes, shortage
from teleloader_server.workers.worker import WorkerSettings
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.spec import LoaderSpec

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Place:
    """One worker ID with its current process."""

    process: WorkerHandle
    restarts: Restarts = field(default_factory=Restarts)
    recycled: int = 0
    respawn: asyncio.TimerHandle | None = None
    """Pending start of the next process, after the exit of the last one."""
    began: list[Any] | None = None
    """`Began` of the current pass of its shard of an iterable-style dataset: the next process continues there."""
    reached: list[Any] | None = None
    """`Reached` of that pass."""


class ProcessPool:
    """Worker processes, forked from a fork server.

    Args:
        make_forkserver: Starts the fork server: `ForkServer.spawn` or `ForkServer.fork` with its arguments.
        limits: Limits of the pool.
        session: Loader whose private workers these are; None if all loaders share them.
    """

    def __init__(
        self, make_forkserver: Callable[[], ForkServer], limits: Limits, session: LoaderSpec | None = None
    ) -> None:
        self._make_forkserver = make_forkserver
        self._limits = limits
        self._session = None if session is None else session.to_json()
        self._places: dict[int, _Place] = {}
        self._task_ids = itertools.count()
        self._closing = False
        self._restarting: asyncio.Task[None] | None = None
        self._check_interval = health.check_interval(limits)
        self._inspections: set[asyncio.Task[None]] = set()
        self._stop_timer = StopTimer()
        """Of the fork server."""
        self._oom_kills = oom_kills()
        self._shortages = Shortages()

    @property
    def num_workers(self) -> int:
        """Worker processes."""
        return self._limits.num_workers

    async def start(self, listener: PoolListener) -> list[DatasetInfo]:
        """Start the fork server, wait until it has built the datasets, have it fork the workers."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        try:
            self._infos = await self._build()
        except OSError as error:
            raise OSError(error.errno, shortage(error)) from error
        self._checked = time.monotonic()
        self._next_check = self._loop.call_later(self._check_interval, self._check)
        try:
            for number in range(self._limits.num_workers):
                self._places[number] = _Place(self._fork(number))
        except OSError as error:
            await self.close()
            raise OSError(error.errno, shortage(error)) from error
        return self._infos

    def submit(self, worker: int, task: Task) -> None:
        """Send a task to a worker, and before it the task's loader if the worker does not know it."""
        process = self._places[worker].process
        task_id = next(self._task_ids)
        if not process.health.tasks:
            process.health.progress(time.monotonic())
        process.health.tasks[task_id] = task
        process.health.submitted += 1
        address = task.address
        if address.loader not in process.loaders:
            process.loaders.add(address.loader)
            process.send(["loader", address.loader, task.spec.to_json(), task.length])
        process.send(["task", task_id, address.loader, address.epoch, address.batch, task.indices])
        self._recycle_if_due(process, 0)

    def take(self, worker: int, reason: str) -> None:
        """Kill a worker, through no fault of its tasks."""
        process = self._places[worker].process
        if process.pid is not None and process.health.ready:
            self._kill(process, WorkerExit(f"{process} was killed: {reason}", "nobody"))

    def forget(self, loader: str) -> None:
        """Tell the workers to forget a loader; `submit` tells them of it again."""
        for place in self._places.values():
            if loader in place.process.loaders:
                place.process.loaders.remove(loader)
                place.process.send(["forget", loader])

    def workers(self) -> list[WorkerState]:
        """The places and their state."""
        return [
            WorkerState(
                number,
                place.process.pid,
                place.process.health.ready and not self._is_restarting,
                place.restarts.count,
                place.recycled,
                place.restarts.last_exit,
                place.restarts.last_duration,
                place.process.current_task(),
                place.process.working_for,
            )
            for number, place in self._places.items()
        ]

    def pids(self) -> list[int]:
        """The fork server and the workers."""
        pids = [self._forkserver.pid, *(place.process.pid for place in self._places.values())]
        return [pid for pid in pids if pid is not None]

    def split_forkserver(self) -> ForkServer:
        """A fork of the fork server for a pool of its own; it has the datasets as they were built.

        Raises:
            ConfigError: When there is none at the moment.
        """
        if self._forkserver.channel.fileno() == -1:
            raise ConfigError("the process that has built the datasets is being restarted")
        return self._forkserver.split()

    def mapped_bytes(self) -> int:
        """Shared memory of all slots."""
        return sum(slot.size for place in self._places.values() for slot in place.process.slots.values())

    async def close(self) -> None:
        """Close the channels, upon which the processes end, and wait for the fork server."""
        self._closing = True
        self._next_check.cancel()
        for inspection in self._inspections:
            inspection.cancel()
        if self._restarting is not None:
            self._restarting.cancel()
            with suppress(asyncio.CancelledError):
                await self._restarting
        for place in self._places.values():
            self._forget(place.process)
        self._unwatch_forkserver()
        await aside(self._forkserver.reap)
        # the pool is part of reference cycles: it must not keep the datasets until the next garbage collection
        self._make_forkserver = _no_forkserver

    # -- the fork server

    @property
    def _is_restarting(self) -> bool:
        """Whether the fork server has died, and no other one is built yet."""
        return self._restarting is not None and not self._restarting.done()

    def _watch_forkserver(self, receive: Callable[[], object], ended: Callable[[], object]) -> None:
        self._loop.add_reader(self._forkserver.channel, receive)
        if self._forkserver.end != -1:
            self._loop.add_reader(self._forkserver.end, ended)

    def _unwatch_forkserver(self) -> None:
        for end in (self._forkserver.channel.fileno(), self._forkserver.end):
            if end != -1:
                self._loop.remove_reader(end)

    async def _build(self) -> list[DatasetInfo]:
        """Start the fork server. One that is killed meanwhile, as the kernel does when memory is short, is replaced.

        Raises:
            ConfigError: When the datasets cannot be built, or the third fork server in a row is killed.
            OSError: When the machine lacks something for a process.
        """
        for attempt in itertools.count(1):
            try:
                return await self._start_forkserver()
            except ConfigError as error:
                was_killed = self._forkserver.exit_code is not None and self._forkserver.exit_code < 0
                if not was_killed or attempt == health.MAX_FAILED_STARTS:
                    raise
                logger.error("%s; starting another", error)
        raise AssertionError("unreachable")

    async def _start_forkserver(self) -> list[DatasetInfo]:
        forkserver = self._forkserver = self._make_forkserver()
        built: asyncio.Future[list[Any]] = self._loop.create_future()

        def hear(message: list[Any]) -> None:
            if not built.done():
                built.set_result(message)

        def receive() -> None:
            try:
                for message in forkserver.channel.receive():
                    hear(message)
            except EOFError:
                hear(["ended", "", 0])

        def ended() -> None:
            with suppress(BlockingIOError):  # when what it has forked holds its channel open
                while not built.done():
                    receive()
            hear(["ended", "", 0])

        self._watch_forkserver(receive, ended)
        try:
            word, content, pid = await built
        except asyncio.CancelledError:
            self._unwatch_forkserver()
            forkserver.channel.hang_up()
            raise
        self._unwatch_forkserver()
        if word != "built":
            await aside(forkserver.reap)
            raise ConfigError(content or f"the process that builds the datasets {_ending(forkserver)}; see its output")
        forkserver.is_process(pid)
        self._watch_forkserver(self._receive_from_forkserver, self._forkserver_ended)
        return [DatasetInfo(**info) for info in content]

    def _forkserver_ended(self) -> None:
        self._unwatch_forkserver()
        pid = self._forkserver.pid
        logger.error("the fork server (pid %s) died; starting another", pid, extra={"pid": pid})
        self._restarting = self._loop.create_task(self._restart_forkserver())

    def _receive_from_forkserver(self) -> None:
        try:
            messages = self._forkserver.channel.receive()
        except EOFError:
            self._forkserver_ended()
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

    async def _restart_forkserver(self) -> None:
        # the kernel ends the workers with their parent, so all places are lost together
        lost = [place.process for place in self._places.values()]
        await aside(self._forkserver.reap)
        for process in lost:
            # they are ours only where we adopt orphans: as a container's first process
            if process.pid is not None:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
        for attempt in itertools.count(1):
            try:
                infos = await self._start_forkserver()
                if infos == self._infos:
                    break
                self._unwatch_forkserver()
                await aside(self._forkserver.reap)
                reason = f"the datasets changed since the start: start the server anew to host {infos}"
            except (ConfigError, OSError) as error:
                reason = f"the datasets cannot be built again: {error}"
            logger.error("%s", reason)
            if attempt >= health.MAX_FAILED_STARTS:
                self._listener.no_worker_starts(reason)
            await asyncio.sleep(health.backoff(attempt))
        for process in lost:
            self._lose(process, WorkerExit(f"{process} ended with the fork server"))

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
            self._forkserver.channel.send(["fork", dataclasses.astuple(settings)], [theirs.fileno()])
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
            # how it ended is told by the fork server, which is its parent
            self._loop.remove_reader(process.channel)
            return False
        for message in messages:
            self._hear(process, message)
        return True

    def _hear(self, process: WorkerHandle, message: list[Any]) -> None:
        match message:
            case ["done", list(finished)]:
                process.health.completed += len(finished)
                self._progress(process)
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
                self._progress(process)

    def _map(self, process: WorkerHandle, slot: int, size: int) -> None:
        try:
            process.slots[slot] = SlotMapping(process.channel.take_fd(), size)
            self._shortages.ended()
        except OSError as error:
            # the descriptor that came with the message is lost, and with it the batches that will be written there
            loss = WorkerExit(
                f"{process} was replaced, since its batches cannot be mapped: {shortage(error)}", "machine"
            )
            self._kill(process, loss)

    def _ready(self, process: WorkerHandle) -> None:
        now = time.monotonic()
        process.health.ready = True
        process.health.progress(now)
        restarts = self._places[process.number].restarts
        if restarts.record_ready(now):
            logger.warning(
                "worker %d is back as pid %s after %.3f s",
                process.number, process.pid, restarts.last_duration, extra=process.log_fields,
            )  # fmt: skip
        self._listener.worker_ready(process.number)

    def _done(
        self, process: WorkerHandle, task_id: int, frame: bytes | int, nbytes: int, report: Report,
        reached: list[Any] | None,
    ) -> None:  # fmt: skip
        task = process.health.tasks.pop(task_id, None)
        if task is None:  # it was reclaimed when the worker had just started it
            if not isinstance(frame, bytes):
                process.send(["free", [frame]])
            return
        if isinstance(frame, bytes):
            lease = np.frombuffer(frame, np.uint8)
        else:
            lease = process.slots[frame].lease(nbytes, lambda: process.release(frame, self._loop))
        self._places[process.number].reached = reached
        self._listener.task_done(process.number, task, lease, report)

    # -- health

    def _check(self) -> None:
        now = time.monotonic()
        lag = max(0.0, now - self._checked - self._check_interval)
        self._checked = now
        self._next_check = self._loop.call_later(self._check_interval, self._check)
        pid = self._forkserver.pid
        if pid is not None and self._stop_timer.observe(now, is_stopped=is_stopped(pid)) > health.STOP_TIMEOUT:
            # unlike a worker it is not replaced: all workers would end with it, and all datasets be built again
            logger.warning("the fork server (pid %d) was stopped (SIGSTOP); it is continued", pid, extra={"pid": pid})
            _signal(pid, signal.SIGCONT)
        if not self._is_restarting:
            for place in self._places.values():
                place.process.health.excuse(lag, now)
                self._check_worker(place.process)

    def _check_worker(self, process: WorkerHandle) -> None:
        if process.pid is None:
            return
        if self._limits.max_worker_memory:
            self._recycle_if_due(process, resident_bytes(process.pid))
        if process.health.is_overdue(self._check_interval, time.monotonic()):
            self._receive_all(process)
        now = time.monotonic()
        if not process.health.is_overdue(self._check_interval, now):
            return
        queued = process.queued()
        for action in process.health.actions(
            self._limits, now, is_stopped=is_stopped(process.pid), has_queued=bool(queued)
        ):
            match action:
                case Action.RECLAIM:
                    if self._listener.worker_stalled(process.number, queued):
                        process.revoke(queued)
                        process.health.stalled = True
                case Action.KILL_STOPPED:
                    self._kill(process, WorkerExit(f"{process} was stopped (SIGSTOP), and killed"))
                case Action.INSPECT:
                    inspection = self._loop.create_task(self._inspect(process))
                    self._inspections.add(inspection)
                    inspection.add_done_callback(self._inspections.discard)

    def _progress(self, process: WorkerHandle) -> None:
        process.health.progress(time.monotonic())
        if process.health.stalled:
            process.health.stalled = False
            self._listener.worker_resumed(process.number)
        if process.health.recycling:
            self._loop.call_soon(self._recycle, process)

    async def _inspect(self, process: WorkerHandle) -> None:
        """Read the stacks of an unresponsive worker, and kill it."""
        was_ready, stack = process.health.ready, await process.stacks()
        process.health.inspecting = False
        self._receive_all(process)
        is_current = self._places[process.number].process is process
        if not is_current or not process.health.is_unresponsive(self._limits, time.monotonic()):
            return
        task = process.current_task()
        doing, limit = "a batch" if was_ready else "its start", self._limits.batch_timeout
        reason = f"{process} was killed: {doing} took longer than {limit:g} s, the limit (--batch-timeout)"
        self._kill(process, WorkerExit(reason, "nobody" if task is None else task.address, stack))

    def _kill(self, process: WorkerHandle, loss: WorkerExit) -> None:
        """Replace a process, even if the kernel cannot end it yet."""
        if process.pid is not None:
            _signal(process.pid, signal.SIGKILL)
        self._lose(process, loss)

    # -- exits

    def _recycle_if_due(self, process: WorkerHandle, resident: int) -> None:
        reason = process.health.reason_to_recycle(self._limits, resident)
        if reason is None:
            return
        process.health.recycling = True
        logger.info("%s %s; it is recycled after its last batch", process, reason, extra=process.log_fields)
        self._listener.worker_recycling(process.number)
        if not process.health.tasks:
            self._loop.call_soon(self._recycle, process)

    def _recycle(self, process: WorkerHandle) -> None:
        """Replace a process that has completed all of its tasks."""
        place = self._places[process.number]
        if self._closing or self._is_restarting or place.process is not process:
            return
        if not process.health.ready or process.health.has_work:
            return
        self._forget(process)
        place.recycled += 1
        place.process = self._fork(process.number)

    def _exited(self, pid: int, status: int) -> None:
        before, self._oom_kills = self._oom_kills, max(self._oom_kills, oom_kills())
        reason = exit_reason(status, out_of_memory=self._oom_kills > before)
        for place in self._places.values():
            if place.process.pid == pid:
                self._receive_all(place.process)
                self._lose(place.process, WorkerExit(f"{place.process} {reason}"))

    def _receive_all(self, process: WorkerHandle) -> None:
        """Receive pending messages: frames that a process completed before it ended are valid."""
        while process.channel.fileno() != -1 and self._receive(process):
            pass

    def _lose(self, process: WorkerHandle, loss: WorkerExit) -> None:
        place, now = self._places[process.number], time.monotonic()
        tasks, was_ready = list(process.health.tasks.values()), process.health.ready
        is_current = not self._closing and place.process is process and place.respawn is None
        delay = place.restarts.exited(loss, process.health, now) if is_current else 0.0
        self._forget(process)
        if not is_current:
            return
        lacks_resource = loss.attribution == "machine"
        if lacks_resource:
            overdue = self._shortages.overdue([task.address for task in tasks], self._limits, now)
            loss = dataclasses.replace(loss, overdue=overdue)
        stack = f". It was at:\n{loss.stack}" if loss.stack else ""
        logger.warning(
            "%s; %d batches are left to others; replacing it in %.2f s%s",
            loss.reason, len(tasks), delay, stack, extra=process.log_fields,
        )  # fmt: skip
        place.respawn = self._loop.call_later(delay, self._respawn, place)
        self._listener.worker_lost(process.number, tasks, loss)
        self._report_failed_start(place, loss.reason, lacks_resource=lacks_resource and not was_ready)

    def _report_failed_start(self, place: _Place, reason: str, *, lacks_resource: bool) -> None:
        # private workers are no substitutes for each other: each has a shard
        has_substitute = self._session is None and any(other.process.health.ready for other in self._places.values())
        if place.restarts.must_report(
            self._limits, time.monotonic(), lacks_resource=lacks_resource, has_substitute=has_substitute
        ):
            self._listener.no_worker_starts(reason)

    def _respawn(self, place: _Place) -> None:
        place.respawn = None
        if self._closing:
            return
        delay = health.MIN_BACKOFF
        if not self._is_restarting:
            try:
                place.process = self._fork(place.process.number)
                return
            except OSError as error:
                delay = place.restarts.start_failed()
                reason = f"worker {place.process.number} cannot be replaced: {shortage(error)}"
                logger.error("%s; trying again in %.2f s", reason, delay)
                self._report_failed_start(place, reason, lacks_resource=True)
        place.respawn = self._loop.call_later(delay, self._respawn, place)

    def _forget(self, process: WorkerHandle) -> None:
        if process.channel.fileno() != -1:
            self._loop.remove_reader(process.channel)
            self._loop.remove_writer(process.channel)
        process.close()


def _ending(forkserver: ForkServer) -> str:
    """How a fork server ended that has not built its datasets."""
    code = forkserver.exit_code
    if code is None:
        return "ended without a word"
    return f"was {exit_reason(-code)}" if code < 0 else exit_reason(code << 8)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _no_forkserver() -> ForkServer:
    raise RuntimeError("cannot start a fork server: the pool is closed")
