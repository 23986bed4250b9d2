"""Supervision of a fork server: start, monitoring and restart."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from teleloader_server.config import ConfigError
from teleloader_server.loading.source_files import UNKNOWN, SourceFiles
from teleloader_server.workers.blocking import run_blocking
from teleloader_server.workers.forkserver import ForkServer
from teleloader_server.workers.health import MAX_FAILED_STARTS, STOP_TIMEOUT, StopTimer, backoff, exit_reason
from teleloader_server.workers.messages import BuildFailed, Built, Message, decode
from teleloader_server.workers.procfs import is_stopped, send_signal
from teleloader_shared.messages import DatasetInfo

logger = logging.getLogger(__name__)


@dataclass
class Supervisor:
    """Supervisor that starts a fork server, and replaces it after an exit."""

    make: Callable[[], ForkServer]
    """Function that starts a fork server: `ForkServer.spawn` or `ForkServer.fork` with its arguments."""
    receive: Callable[[Message], object]
    """Callback, called with each message of a fork server that has constructed the datasets."""
    restarted: Callable[[], object]
    """Callback, called when a new fork server has replaced one that exited with all its workers."""
    failed: Callable[[str], object]
    """Callback, called with the reason when a restart fails for the third time or more in succession."""
    current: ForkServer = field(init=False)
    """Fork server that was started last."""
    _code: SourceFiles = field(default=UNKNOWN, init=False)
    """Files of the code that the first fork server imported."""
    _stop_timer: StopTimer = field(default_factory=StopTimer, init=False)
    _restarting: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def is_restarting(self) -> bool:
        """True from the exit of a fork server until its replacement has constructed the datasets."""
        return self._restarting is not None and not self._restarting.done()

    async def start(self) -> list[DatasetInfo]:
        """Start a fork server, wait until the datasets are constructed, and return the dataset descriptions.

        If the fork server is killed before that (by the OOM killer, for example), another one is started.

        Raises:
            ConfigError: If the datasets cannot be constructed, or three consecutive fork servers were killed.
            OSError: If a resource of the machine is exhausted.
        """
        self._loop = asyncio.get_running_loop()
        for attempt in itertools.count(1):
            forkserver = self.make()
            try:
                self._infos, self._code = await self._start(forkserver)
                break
            except ConfigError as error:
                was_killed = forkserver.exit_code is not None and forkserver.exit_code < 0
                if not was_killed or attempt == MAX_FAILED_STARTS:
                    raise
                logger.error("%s; retrying with a new fork server", error)
        return self._infos

    def check(self, now: float) -> None:
        """Resume the fork server (SIGCONT) if the process has been stopped for more than `STOP_TIMEOUT` seconds."""
        pid = self.current.pid
        if pid is not None and self._stop_timer.observe(now, is_stopped=is_stopped(pid)) > STOP_TIMEOUT:
            # not replaced like a worker: all workers would end with it, and all datasets would be constructed again
            logger.warning("the fork server (pid %d) was stopped (SIGSTOP); sending SIGCONT", pid, extra={"pid": pid})
            send_signal(pid, signal.SIGCONT, self.current.uid)

    async def close(self) -> None:
        """Stop the fork server, which also ends its workers, and wait until the fork server has exited."""
        if self._restarting is not None:
            self._restarting.cancel()
            with suppress(asyncio.CancelledError):
                await self._restarting
        await self._reap()
        # the pool is part of reference cycles, which must not keep the datasets until the next garbage collection
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
        await run_blocking(self.current.reap)

    async def _start(self, forkserver: ForkServer) -> tuple[list[DatasetInfo], SourceFiles]:
        self.current = forkserver
        self._is_built = False
        self._built: asyncio.Future[Message] = self._loop.create_future()
        self._watch()
        try:
            message = await self._built
            if isinstance(message, Built):
                forkserver.set_process(message.pid)
        except (asyncio.CancelledError, OSError):
            self._unwatch()
            forkserver.channel.hang_up()
            raise
        if isinstance(message, Built):
            self._is_built = True
            self._watch()  # again, because the process of a fork server created by `split` is known only now
            return [DatasetInfo(**info) for info in message.datasets], SourceFiles(*message.code)
        await self._reap()
        reason = message.reason if isinstance(message, BuildFailed) else ""
        if not reason and forkserver.pid is None:  # it was split off from another one, which has exited
            raise OSError(errno.ECHILD, "the fork server of the datasets exited: the supervisor restarts it")
        raise ConfigError(
            reason or f"the process that builds the datasets {_ending(forkserver)}: see the log of the server"
        )

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
        with suppress(BlockingIOError):  # a process forked by user code may hold the channel open
            while not self._built.done():
                self._receive_all()
        self._ended()

    def _ended(self) -> None:
        self._unwatch()
        if not self._is_built:
            self._resolve(BuildFailed(""))
            return
        pid = self.current.pid
        logger.error("the fork server (pid %s) exited; starting a new one", pid, extra={"pid": pid})
        self._restarting = self._loop.create_task(self._restart())

    async def _restart(self) -> None:
        await self._reap()
        for attempt in itertools.count(1):
            try:
                await self._check_code()
                infos, _ = await self._start(self.make())
                if infos == self._infos:
                    break
                await self._reap()
                found = ", ".join(f"{info.name!r} (length {info.length})" for info in infos)
                reason = f"the datasets changed after the server started: restart the server to host {found}"
            except (ConfigError, OSError) as error:
                reason = f"cannot rebuild the datasets: {error}"
            logger.error("%s", reason)
            if attempt >= MAX_FAILED_STARTS:
                self.failed(reason)
            await asyncio.sleep(backoff(attempt))
        self.restarted()

    async def _check_code(self) -> None:
        """Raise `ConfigError` if another fork server would import other code than the first one."""
        if await run_blocking(lambda: self._code.changed):
            raise ConfigError(
                "the code of the datasets changed on disk after they were published, and the fork server with the "
                "previous code exited. Restore the files, or publish the changed code as another version"
            )


def _ending(forkserver: ForkServer) -> str:
    """Describe the exit of a fork server that ended before it had constructed the datasets."""
    code = forkserver.exit_code
    if code is None:
        return "exited without an error message"
    return exit_reason(-code if code < 0 else code << 8)


def _closed() -> ForkServer:
    raise RuntimeError("cannot start a fork server: the pool is closed")
