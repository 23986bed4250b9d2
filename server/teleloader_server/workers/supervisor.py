"""Supervision of a fork server: start, watch, restart."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from teleloader_server.config import ConfigError
from teleloader_server.workers.aside import aside
from teleloader_server.workers.forkserver import ForkServer
from teleloader_server.workers.health import MAX_FAILED_STARTS, STOP_TIMEOUT, StopTimer, backoff, exit_reason
from teleloader_server.workers.messages import BuildFailed, Built, Message, decode
from teleloader_server.workers.procfs import is_stopped
from teleloader_shared.messages import DatasetInfo

logger = logging.getLogger(__name__)


@dataclass
class Supervisor:
    """Keeps one fork server running."""

    make: Callable[[], ForkServer]
    """Starts a fork server: `ForkServer.spawn` or `ForkServer.fork` with its arguments."""
    receive: Callable[[Message], object]
    """Called with each message of a fork server that has built the datasets."""
    restarted: Callable[[], object]
    """Called when another fork server has replaced one that ended. The workers of that one ended with it."""
    failed: Callable[[str], object]
    """Called with the reason if the third attempt to restart fails, and each later one."""
    current: ForkServer = field(init=False)
    """The fork server that was started last."""
    _stop_timer: StopTimer = field(default_factory=StopTimer, init=False)
    _restarting: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def is_restarting(self) -> bool:
        """True from the end of a fork server until another one has built the datasets."""
        return self._restarting is not None and not self._restarting.done()

    async def start(self) -> list[DatasetInfo]:
        """Start a fork server. One that is killed meanwhile, as by the kernel when memory is short, is replaced.

        Raises:
            ConfigError: If the datasets cannot be built, or the third fork server in a row is killed.
            OSError: If the machine lacks a resource.
        """
        self._loop = asyncio.get_running_loop()
        for attempt in itertools.count(1):
            forkserver = self.make()
            try:
                self._infos = await self._start(forkserver)
                break
            except ConfigError as error:
                was_killed = forkserver.exit_code is not None and forkserver.exit_code < 0
                if not was_killed or attempt == MAX_FAILED_STARTS:
                    raise
                logger.error("%s; starting another", error)
        return self._infos

    def check(self, now: float) -> None:
        """Continue a fork server that is stopped."""
        pid = self.current.pid
        if pid is not None and self._stop_timer.observe(now, is_stopped=is_stopped(pid)) > STOP_TIMEOUT:
            # unlike a worker it is not replaced: all workers would end with it, and all datasets be built again
            logger.warning("the fork server (pid %d) was stopped (SIGSTOP); it is continued", pid, extra={"pid": pid})
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def close(self) -> None:
        """End the fork server and its workers, and wait for it."""
        if self._restarting is not None:
            self._restarting.cancel()
            with suppress(asyncio.CancelledError):
                await self._restarting
        await self._reap()
        # the pool is part of reference cycles: it must not keep the datasets until the next garbage collection
        self.make = _closed

    def _watch(self) -> None:
        self._loop.add_reader(self.current.channel, self._receive_all)
        if self.current.end != -1:
            self._loop.add_reader(self.current.end, self._exited)

    def _unwatch(self) -> None:
        for end in (self.current.channel.fileno(), self.current.end):
            if end != -1:
                self._loop.remove_reader(end)

    async def _reap(self) -> None:
        self._unwatch()
        await aside(self.current.reap)

    async def _start(self, forkserver: ForkServer) -> list[DatasetInfo]:
        self.current = forkserver
        self._is_built = False
        self._built: asyncio.Future[Message] = self._loop.create_future()
        self._watch()
        try:
            message = await self._built
            if isinstance(message, Built):
                forkserver.is_process(message.pid)
        except (asyncio.CancelledError, OSError):
            self._unwatch()
            forkserver.channel.hang_up()
            raise
        if isinstance(message, Built):
            self._is_built = True
            self._watch()  # its end, too, if it was split off: only now its process is known
            return [DatasetInfo(**info) for info in message.datasets]
        await self._reap()
        reason = message.reason if isinstance(message, BuildFailed) else ""
        raise ConfigError(reason or f"the process that builds the datasets {_ending(forkserver)}; see its output")

    def _receive_all(self) -> None:
        try:
            for message in map(decode, self.current.channel.receive()):
                if self._is_built:
                    self.receive(message)
                else:
                    self._resolve(message)
        except EOFError:
            self._ended()

    def _resolve(self, message: Message) -> None:
        if not self._built.done():
            self._built.set_result(message)

    def _exited(self) -> None:
        with suppress(BlockingIOError):  # a process that it forked holds its channel open
            while not self._built.done():
                self._receive_all()
        self._ended()

    def _ended(self) -> None:
        self._unwatch()
        if not self._is_built:
            self._resolve(BuildFailed(""))
            return
        pid = self.current.pid
        logger.error("the fork server (pid %s) died; starting another", pid, extra={"pid": pid})
        self._restarting = self._loop.create_task(self._restart())

    async def _restart(self) -> None:
        await self._reap()
        for attempt in itertools.count(1):
            try:
                infos = await self._start(self.make())
                if infos == self._infos:
                    break
                await self._reap()
                reason = f"the datasets changed since the start: start the server anew to host {infos}"
            except (ConfigError, OSError) as error:
                reason = f"the datasets cannot be built again: {error}"
            logger.error("%s", reason)
            if attempt >= MAX_FAILED_STARTS:
                self.failed(reason)
            await asyncio.sleep(backoff(attempt))
        self.restarted()


def _ending(forkserver: ForkServer) -> str:
    """Return the predicate of a sentence about a fork server that ended before it had built the datasets."""
    code = forkserver.exit_code
    if code is None:
        return "ended without an error message"
    return f"was {exit_reason(-code)}" if code < 0 else exit_reason(code << 8)


def _closed() -> ForkServer:
    raise RuntimeError("cannot start a fork server: the pool is closed")
