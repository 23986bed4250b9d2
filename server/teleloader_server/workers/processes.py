"""Pool of worker processes; executes the decisions of `health`."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from teleloader_server.config import ConfigError
from teleloader_server.limits import Limits
from teleloader_server.loading.replay import Replayed
from teleloader_server.loading.tasks import Task
from teleloader_server.workers import messages
from teleloader_server.workers.arena import Mapping as SlotMapping
from teleloader_server.workers.channel import Channel
from teleloader_server.workers.forkserver import ForkServer
from teleloader_server.workers.handle import WorkerHandle
from teleloader_server.workers.health import (
    MIN_BACKOFF,
    STOP_TIMEOUT,
    Action,
    Restarts,
    Shortages,
    WorkerExit,
    check_interval,
    exit_reason,
)  # fmt: skip
from teleloader_server.workers.messages import decode, encode
from teleloader_server.workers.pool import PoolListener, WorkerState
from teleloader_server.workers.procfs import is_stopped, oom_kills, resident_bytes, send_signal, shortage
from teleloader_server.workers.supervisor import Supervisor
from teleloader_shared.codec import BatchId
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.spec import LoaderSpec

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Place:
    """Worker ID with its current process and its history."""

    process: WorkerHandle
    restarts: Restarts = field(default_factory=Restarts)
    respawn: asyncio.TimerHandle | None = None
    """Scheduled start of the next process, after the exit of the previous one."""
    began: Sequence[Any] | None = None
    """`Began` of the last pass over an iterable-style dataset; sent to the next process, which resumes the pass."""
    reached: Sequence[Any] | None = None
    """`Reached` of the most recent result; sent to the next process."""


class ProcessPool:
    """Pool of worker processes, forked from a fork server.

    Args:
        make_forkserver: Function that starts the fork server: `ForkServer.spawn` or `ForkServer.fork` with its
            arguments.
        limits: Limits of the pool.
        session: Spec of the loader to which the workers belong; None for shared workers.
    """

    def __init__(
        self, make_forkserver: Callable[[], ForkServer], limits: Limits, session: LoaderSpec | None = None
    ) -> None:
        self._supervisor = Supervisor(
            make_forkserver,
            self._handle_forkserver_message,
            self._forkserver_restarted,
            lambda reason: self._listener.no_worker_starts(reason),
        )
        self.num_workers = limits.num_workers
        self._limits = limits
        self._session = None if session is None else session.to_json()
        self._in_turn = session is not None and session.num_workers > 0
        self._places: dict[int, _Place] = {}
        self._task_id = 0
        """ID of the next task."""
        self._closing = False
        self._check_interval = check_interval(limits)
        self._inspections: set[asyncio.Task[None]] = set()
        self._oom_kills = oom_kills()
        self._shortages = Shortages()

    async def start(self, listener: PoolListener) -> list[DatasetInfo]:
        """Start the fork server, wait until the datasets are constructed, then fork the workers."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        try:
            infos = await self._supervisor.start()
        except OSError as error:
            raise OSError(error.errno, shortage(error)) from error
        self._checked = time.monotonic()
        self._next_check = self._loop.call_later(self._check_interval, self._check)
        try:
            for number in range(self.num_workers):
                self._places[number] = _Place(self._fork(number))
        except OSError as error:
            await self.close()
            raise OSError(error.errno, shortage(error)) from error
        return infos

    def resize(self, num_workers: int) -> None:
        """Start further workers, or stop the workers with the highest IDs after their pending batches."""
        if self._in_turn:
            raise ValueError("the workers compute batches in turn, so their number is a part of the order")
        if self._supervisor.is_restarting:
            raise OSError(errno.EAGAIN, "the fork server is restarting: retry later")
        logger.info("changing the number of workers from %d to %d", self.num_workers, num_workers)
        self.num_workers = num_workers
        for number, place in self._places.items():
            if number >= num_workers and not place.process.health.recycling:
                self._recycle_after_tasks(place.process)
        try:
            for number in range(num_workers):
                if number not in self._places:
                    self._places[number] = _Place(self._fork(number))
        except OSError as error:
            self.num_workers = number
            raise OSError(error.errno, shortage(error)) from error
        finally:
            for place in self._places.values():
                place.process.send(messages.PoolResized(self.num_workers, self._free_limit))

    def submit(self, worker: int, tasks: Sequence[Task]) -> None:
        """Send a group of tasks to a worker, preceded by the loader definition if the worker does not have it yet."""
        process = self._places[worker].process
        first, health = tasks[0], process.health
        task_id, self._task_id = self._task_id, self._task_id + len(tasks)
        if not health.tasks:
            health.progress(time.monotonic())
        health.tasks.update(enumerate(tasks, task_id))
        health.room -= len(tasks)
        loader, epoch, batch = first.batch_id
        if loader not in process.loaders:
            process.loaders.add(loader)
            process.send(messages.AddLoader(loader, first.spec.to_json(), first.length))
        step = tasks[1].batch_id.batch - batch if len(tasks) > 1 else 1
        lists = [task.indices for task in tasks if task.indices is not None]
        indices = b"".join(lists) if len(lists) > 1 else next(iter(lists), None)
        found = [(place, task.substituted) for place, task in enumerate(tasks) if task.substituted is not None]
        process.send(messages.Load(task_id, loader, epoch, batch, len(tasks), step, first.owner, found, indices))
        if not health.room:
            self._recycle_if_due(process, 0)

    def take(self, worker: int, reason: str) -> None:
        """Preempt a ready worker: kill its process, and requeue its tasks without counting the exit against them."""
        process = self._places[worker].process
        if process.pid is not None and process.health.ready:
            self._kill(process, WorkerExit(f"{process} was killed: {reason}", "nobody"))

    def reassign_queued(self, worker: int) -> None:
        """Reassign the tasks behind a worker's current batch, unless workers compute batches in turn."""
        process = self._places[worker].process
        queued = process.queued()
        if queued and self._listener.worker_stalled(queued):
            process.revoke(queued)
            process.health.stalled = True

    def withdraw(self, worker: int, batch_id: BatchId) -> None:
        """Discard the pending result of a worker's current batch, and reassign its other tasks."""
        process = self._places[worker].process
        tasks = list(process.health.tasks.values())
        if all(task.batch_id != batch_id for task in tasks):
            return
        others = [task for task in tasks if task.batch_id != batch_id]
        if others:
            self._listener.worker_stalled(others)
        process.revoke(tasks)
        process.health.stalled = True

    def forget(self, loader: str) -> None:
        """Release the state of a loader in all workers; `submit` sends the loader again if necessary."""
        for place in self._places.values():
            if loader in place.process.loaders:
                place.process.loaders.remove(loader)
                place.process.send(messages.ForgetLoader(loader))

    def workers(self) -> list[WorkerState]:
        """Return the current state of each worker."""
        return [
            WorkerState(
                number,
                place.process.pid,
                place.process.health.ready and not self._supervisor.is_restarting,
                place.restarts,
                place.process.current_task(),
                place.process.working_for,
                place.process.replayed,
            )
            for number, place in self._places.items()
        ]

    def current_sample(self, worker: int) -> int | None:
        """Return the index of the sample that a worker is fetching; None if it is unknown."""
        return self._places[worker].process.current_sample()

    async def stacks(self, worker: int) -> str:
        """Return the stacks of a worker's threads, or the reason in parentheses if they are unavailable."""
        return await self._places[worker].process.stacks()

    def pids(self) -> list[int]:
        """Return the process IDs of the fork server and all workers."""
        pids = [self._supervisor.current.pid, *(place.process.pid for place in self._places.values())]
        return [pid for pid in pids if pid is not None]

    def split_forkserver(self) -> ForkServer:
        """Fork the fork server for another pool; the new fork server has the datasets in their initial state.

        Raises:
            ConfigError: If the fork server is being restarted.
        """
        if self._supervisor.current.channel.fileno() == -1:
            raise ConfigError("the fork server is restarting: retry later")
        return self._supervisor.current.split()

    def mapped_bytes(self) -> int:
        """Return the total size of all shared-memory slots, in bytes."""
        return sum(slot.size for place in self._places.values() for slot in place.process.slots.values())

    async def close(self) -> None:
        """Stop all processes by closing their channels, and wait for the exit of the fork server."""
        self._closing = True
        self._next_check.cancel()
        for inspection in self._inspections:
            inspection.cancel()
        for place in self._places.values():
            self._forget(place.process)
        await self._supervisor.close()

    # -- the fork server

    def _handle_forkserver_message(self, message: messages.Message) -> None:
        match message:
            case messages.Forked(worker, pid) if worker in self._places:
                self._places[worker].process.pid = pid
            case messages.ForkFailed(worker, reason) if worker in self._places:
                worker_exit = WorkerExit(f"worker {worker} cannot start: {reason}", "machine")
                self._remove_worker(self._places[worker].process, worker_exit)
            case messages.Exited(pid, status):
                self._exited(pid, status)

    def _forkserver_restarted(self) -> None:
        for place in self._places.values():
            process = place.process
            # orphaned workers are children of this process only if it is the init process of a container
            if process.pid is not None:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
            self._remove_worker(process, WorkerExit(f"{process} exited because the fork server exited"))

    # -- the workers

    @property
    def _free_limit(self) -> int:
        """Share of a worker in the memory budget, in bytes."""
        return self._limits.memory_budget // self.num_workers

    def _fork(self, number: int) -> WorkerHandle:
        channel, theirs = Channel.pair()
        limits, before = self._limits, self._places.get(number)
        message = messages.ForkWorker(
            number, self.num_workers, limits.max_batch_bytes, self._free_limit,
            self._session,
            None if before is None else before.began, None if before is None else before.reached,
            limits.max_replay, limits.max_worker_memory,
        )  # fmt: skip
        with theirs:
            self._supervisor.current.channel.send(encode(message), [theirs.fileno()])
        process = WorkerHandle(number, channel, self._supervisor.current.uid)
        process.health.room = limits.max_batches_per_worker or sys.maxsize
        self._loop.add_reader(channel, self._receive, process)
        return process

    def _receive(self, process: WorkerHandle) -> bool:
        """Receive and handle messages of a worker; return False if none is available or the channel has ended."""
        try:
            received = process.channel.receive()
        except BlockingIOError:
            return False
        except EOFError:
            # the fork server, which is the worker's parent, reports the exit status
            self._loop.remove_reader(process.channel)
            return False
        for message in map(decode, received):
            self._handle_message(process, message)
        return True

    def _handle_message(self, process: WorkerHandle, message: messages.Message) -> None:
        match message:
            case messages.Done():
                process.last_replayed = None
                process.health.completed += len(message.sizes)
                self._progress(process)
                self._done(process, message)
            case messages.PassStarted(began):
                self._places[process.number].began = began
            case messages.SlotCreated(slot, nbytes):
                self._map(process, slot, nbytes)
            case messages.SlotRemoved(slot):
                del process.slots[slot]
            case messages.Started(pid):
                process.pid = pid
                with suppress(OSError):  # without a descriptor, the worker cannot report its stacks
                    process.take_status_file(process.channel.take_fd())
            case messages.Ready():
                self._ready(process)
            case messages.Progress(replayed):
                self._progress(process)
                if replayed is not None:
                    self._replays(process, Replayed(*replayed))

    def _map(self, process: WorkerHandle, slot: int, size: int) -> None:
        try:
            mapped = SlotMapping if process.uid is None else SlotMapping.checked
            process.slots[slot] = mapped(process.channel.take_fd(), size)
            self._shortages.ended()
        except OSError as error:
            # the descriptor is lost, and the server could not read the frames that the worker writes to the slot
            worker_exit = WorkerExit(f"{process} was killed: cannot map shared memory: {shortage(error)}", "machine")
            self._kill(process, worker_exit)

    def _ready(self, process: WorkerHandle) -> None:
        now = time.monotonic()
        process.health.ready = True
        process.health.progress(now)
        restarts = self._places[process.number].restarts
        if restarts.record_ready(now):
            logger.warning(
                "worker %d restarted as pid %s after %.3f s",
                process.number, process.pid, restarts.last_duration, extra=process.log_fields,
            )  # fmt: skip
        self._listener.worker_ready(process.number, process.health)
        if process.health.recycling:
            self._loop.call_soon(self._recycle, process)

    def _done(self, process: WorkerHandle, done: messages.Done) -> None:
        task_id, content, sizes, report, reached = done
        if isinstance(content, bytes):
            lease = np.frombuffer(content, np.uint8)
        else:
            lease = process.slots[content].lease(sum(sizes), lambda: process.release(content, self._loop))
        tasks, frames, revoked, end = [], [], [], 0
        for place, size in enumerate(sizes):
            task = process.health.tasks.pop(task_id + place, None)
            if task is None:
                revoked.append(place)
            else:
                tasks.append(task)
                # a slice would lose the slot that a frame can be lent with
                frames.append(lease if len(sizes) == 1 else lease[end : end + size])
            end += size
        if revoked:  # when the worker had just started them
            report = report.without(revoked)
        if tasks:
            self._places[process.number].reached = reached
            self._listener.tasks_done(process.number, tasks, frames, report)

    # -- health

    def _check(self) -> None:
        now = time.monotonic()
        lag = max(0.0, now - self._checked - self._check_interval)
        self._checked = now
        self._next_check = self._loop.call_later(self._check_interval, self._check)
        self._supervisor.check(now)
        if not self._supervisor.is_restarting:
            for place in self._places.values():
                place.process.health.excuse(lag, now)
                self._check_worker(place.process)

    def _check_worker(self, process: WorkerHandle) -> None:
        if process.pid is None:
            return
        if self._limits.max_worker_memory and self._session is None:
            self._recycle_if_due(process, resident_bytes(process.pid))
        if process.health.is_overdue(self._check_interval, time.monotonic()):
            self._receive_all(process)
        now = time.monotonic()
        if not process.health.is_overdue(self._check_interval, now):
            return
        for action in process.health.actions(
            self._limits, now, is_stopped=is_stopped(process.pid), has_queued=bool(process.queued())
        ):
            match action:
                case Action.RECLAIM:
                    self.reassign_queued(process.number)
                case Action.KILL_STOPPED:
                    self._kill(process, WorkerExit(f"{process} was killed: stopped by SIGSTOP for {STOP_TIMEOUT:g} s"))
                case Action.INSPECT:
                    inspection = self._loop.create_task(self._inspect(process))
                    self._inspections.add(inspection)
                    inspection.add_done_callback(self._inspections.discard)

    def _replays(self, process: WorkerHandle, replayed: Replayed) -> None:
        """Record that a worker iterates its shard again, and log it once."""
        if process.last_replayed is None:
            logger.info(
                "%s iterates its shard of loader %s again, %d of %d batches so far, because no state of the dataset at "
                "this position is known. To avoid this, define state_dict() and load_state_dict() (torchdata's "
                "Stateful) in the dataset; --max-replay limits the number of batches",
                process, replayed.loader[:8], replayed.batches, replayed.total, extra=process.log_fields,
            )  # fmt: skip
        process.last_replayed = replayed

    def _progress(self, process: WorkerHandle) -> None:
        process.health.progress(time.monotonic())
        if process.health.stalled:
            process.health.stalled = False
            self._listener.worker_resumed(process.number)
        if process.health.recycling:
            self._loop.call_soon(self._recycle, process)

    async def _inspect(self, process: WorkerHandle) -> None:
        """Read the stacks of an unresponsive worker, then kill it if it is still unresponsive."""
        was_ready, stack = process.health.ready, await process.stacks()
        process.health.inspecting = False
        self._receive_all(process)
        if not self._is_current(process) or not process.health.is_unresponsive(self._limits, time.monotonic()):
            return
        task = process.current_task()
        doing, limit = "a batch" if was_ready else "start-up", self._limits.batch_timeout
        reason = f"{process} was killed: {doing} exceeded the timeout of {limit:g} s (--batch-timeout)"
        self._kill(process, WorkerExit(reason, "nobody" if task is None else task.batch_id, stack))

    def _kill(self, process: WorkerHandle, worker_exit: WorkerExit) -> None:
        """Kill and replace a process, even if it is in uninterruptible sleep."""
        if process.pid is not None:
            send_signal(process.pid, signal.SIGKILL, process.uid)
        self._remove_worker(process, worker_exit)

    # -- exits

    def _recycle_if_due(self, process: WorkerHandle, resident: int) -> None:
        reason = process.health.reason_to_recycle(self._limits, resident)
        if reason is None:
            return
        logger.info("%s %s: replacing the worker after its pending batches", process, reason, extra=process.log_fields)
        self._recycle_after_tasks(process)

    def _recycle_after_tasks(self, process: WorkerHandle) -> None:
        process.health.recycling = True
        if not process.health.tasks:
            self._loop.call_soon(self._recycle, process)

    def _recycle(self, process: WorkerHandle) -> None:
        """Replace a process that is due for recycling and has completed all its tasks, or remove a surplus worker."""
        if self._closing or self._supervisor.is_restarting or not self._is_current(process):
            return
        if not process.health.ready or process.health.has_work:
            return
        place = self._places[process.number]
        if place.respawn is not None:
            return  # the process has exited
        self._forget(process)
        if process.number >= self.num_workers:
            self._remove_place(process.number)
            return
        place.restarts.recycled += 1
        place.process = self._fork(process.number)

    def _remove_place(self, number: int) -> None:
        del self._places[number]
        self._listener.worker_removed(number)

    def _is_current(self, process: WorkerHandle) -> bool:
        place = self._places.get(process.number)
        return place is not None and place.process is process

    def _exited(self, pid: int, status: int) -> None:
        before, self._oom_kills = self._oom_kills, max(self._oom_kills, oom_kills())
        reason = exit_reason(status, out_of_memory=self._oom_kills > before)
        for place in self._places.values():
            if place.process.pid == pid:
                self._receive_all(place.process)
                self._remove_worker(place.process, WorkerExit(f"{place.process} {reason}"))

    def _receive_all(self, process: WorkerHandle) -> None:
        """Receive all pending messages, because frames that a process completed before its exit are valid."""
        while process.channel.fileno() != -1 and self._receive(process):
            pass

    def _remove_worker(self, process: WorkerHandle, worker_exit: WorkerExit) -> None:
        place, now = self._places[process.number], time.monotonic()
        tasks, was_ready = list(process.health.tasks.values()), process.health.ready
        is_current = not self._closing and place.process is process and place.respawn is None
        current, sample = process.current_task(), process.current_sample()
        if current is not None:
            worker_exit = dataclasses.replace(worker_exit, batch_id=current.batch_id, sample=sample)
        delay = place.restarts.exited(worker_exit, process.health, now) if is_current else 0.0
        self._forget(process)
        if not is_current:
            return
        lacks_resource = worker_exit.attribution == "machine"
        if lacks_resource:
            overdue = self._shortages.overdue([task.batch_id for task in tasks], self._limits, now)
            worker_exit = dataclasses.replace(worker_exit, overdue=overdue)
        stack = f". Stack of the worker:\n{worker_exit.stack}" if worker_exit.stack else ""
        doing = "" if worker_exit.sample is None else f" while it fetched sample {worker_exit.sample}"
        logger.warning(
            "%s%s; reassigning %d batches; starting a new worker in %.2f s%s",
            worker_exit.reason, doing, len(tasks), delay, stack, extra=process.log_fields,
        )  # fmt: skip
        place.respawn = self._loop.call_later(delay, self._respawn, place)
        self._listener.worker_lost(process.number, tasks, worker_exit)
        self._report_failed_start(place, worker_exit.reason, lacks_resource=lacks_resource and not was_ready)

    def _report_failed_start(self, place: _Place, reason: str, *, lacks_resource: bool) -> None:
        # if workers compute batches in turn, no worker can replace another one
        has_substitute = not self._in_turn and any(other.process.health.ready for other in self._places.values())
        if place.restarts.must_report(
            self._limits, time.monotonic(), lacks_resource=lacks_resource, has_substitute=has_substitute
        ):
            self._listener.no_worker_starts(reason)

    def _respawn(self, place: _Place) -> None:
        place.respawn = None
        if self._closing:
            return
        if place.process.number >= self.num_workers:
            self._remove_place(place.process.number)
            return
        delay = MIN_BACKOFF
        if not self._supervisor.is_restarting:
            try:
                place.process = self._fork(place.process.number)
                return
            except OSError as error:
                delay = place.restarts.start_failed()
                reason = f"worker {place.process.number} cannot restart: {shortage(error)}"
                logger.error("%s; retrying in %.2f s", reason, delay)
                self._report_failed_start(place, reason, lacks_resource=True)
        place.respawn = self._loop.call_later(delay, self._respawn, place)

    def _forget(self, process: WorkerHandle) -> None:
        if process.channel.fileno() != -1:
            self._loop.remove_reader(process.channel)
            self._loop.remove_writer(process.channel)
        process.close()
