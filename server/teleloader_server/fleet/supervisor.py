"""Parent process of several servers on one machine: starts them, restarts them after failures, and stops them.

The servers are forks of the parent, which has no threads and no event loop. They share one fork server, and thereby the
memory of the datasets. They ignore SIGINT and SIGTERM, which terminals and service managers send to all processes: the
parent forwards these signals as `STOP_SIGNAL`. The kernel sends it to all servers when the parent exits, also if the
parent is killed.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from teleloader_server.workers.forkserver import fork
from teleloader_server.workers.health import backoff, exit_reason
from teleloader_server.workers.procfs import shortage
from teleloader_server.workers.shared import SharedForkServer
from teleloader_server.workers.worker import end_with_parent
from teleloader_shared.exit_codes import EXIT_FAILED, EXIT_USAGE

STABLE_S: Final = 10.0
"""Seconds after which the exit of a server counts as its first failure again."""
KILL_MARGIN_S: Final = 10.0
"""Seconds after the grace period in which a server withdraws and its workers exit; then it is killed."""
STOP_SIGNAL: Final = signal.SIGUSR1
"""Signal that stops a server, as SIGTERM stops a server without a supervisor."""
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

logger = logging.getLogger("teleloader_server")


@dataclass(slots=True, eq=False)
class _Child:
    """Child process: a server or the fork server, or the time of its next start."""

    name: str
    """Name for messages."""
    launch: Callable[[], int]
    """Function that starts a process, and returns the PID."""
    pid: int = 0
    end: int = -1
    """pidfd of the process; -1 while none runs."""
    started: float = 0.0
    failures: int = 0
    """Consecutive failures, for the backoff."""
    restart_at: float | None = None
    """Time of the next start; None if the process runs, or is not started again."""


class ServerSupervisor:
    """Supervisor of several servers, see the module.

    Args:
        count: Number of servers.
        run: Function that runs a server in a process of its own and returns the exit code, given the number of the
            server, and a function to call when it listens.
        forkserver: Fork server that all servers split; it has constructed the datasets.
        all_listen: Function to call when all servers listen for the first time.
        grace: Seconds for which a server completes pending requests.
    """

    def __init__(
        self,
        count: int,
        run: Callable[[int, Callable[[], object]], int],
        forkserver: SharedForkServer,
        all_listen: Callable[[], None],
        grace: float,
    ) -> None:
        self._run = run
        self._forkserver = forkserver
        self._all_listen = all_listen
        self._grace = grace
        self._servers = [_Child(f"server {number}", partial(self._fork, number)) for number in range(count)]
        self._root = _Child("the fork server", forkserver.restart, forkserver.process.pid or 0)
        self._not_listening = set(range(count))
        """Servers that have not listened yet."""
        self._code = 0
        self._kill_at: float | None = None
        """Time at which servers that still run are killed; None until the servers are stopped."""

    def run(self) -> int:
        """Run the servers until all have exited, and return the exit code.

        A server that exits with code 0 was drained, and is not restarted. If a server exits with code 2 before it has
        listened, all servers are stopped. SIGTERM and SIGINT are forwarded to the servers. The exit code is 1 if a
        server had to be killed.
        """
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._listening, self._report = os.pipe()
        self._selector.register(self._listening, selectors.EVENT_READ, self._read_listening)
        self._signals, wakeup = socket.socketpair()
        self._selector.register(self._signals, selectors.EVENT_READ, self._read_signals)
        self._selector.register(self._forkserver.process.channel, selectors.EVENT_READ, self._forkserver.receive)
        with self._signals, wakeup:
            wakeup.setblocking(False)
            signal.set_wakeup_fd(wakeup.fileno())
            # SIGCHLD wakes the supervisor to reap orphans
            for number in (*_STOP_SIGNALS, signal.SIGCHLD):
                signal.signal(number, lambda *_: None)
            self._watch(self._root)
            for server in self._servers:
                self._start(server)
            while any(server.end != -1 or server.restart_at is not None for server in self._servers):
                self._wait()
            signal.set_wakeup_fd(-1)
        self._forkserver.process.reap()
        return self._code

    def _wait(self) -> None:
        """Wait for the next event, and handle all events that are due."""
        children = [self._root, *self._servers]
        due = min(
            (at for at in (self._kill_at, *(child.restart_at for child in children)) if at is not None), default=None
        )
        for key, _ in self._selector.select(None if due is None else max(0.0, due - time.monotonic())):
            key.data()
        self._reap_orphans({child.pid for child in children if child.end != -1})
        now = time.monotonic()
        for child in children:
            if child.restart_at is not None and child.restart_at <= now:
                self._start(child)
        if self._kill_at is not None and self._kill_at <= now:
            logger.error("servers did not exit in time: killing them")
            self._code = self._code or EXIT_FAILED
            self._kill_at = now + KILL_MARGIN_S
            self._signal(signal.SIGKILL)

    def _reap_orphans(self, watched: set[int]) -> None:
        """Reap exited processes that the supervisor did not start: orphans, if it is the init process of a container.

        A watched process ends the loop, because the same one would be found again. Its pidfd is readable, and the
        supervisor calls this function again afterwards.
        """
        with suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if found.si_pid in watched:
                    return
                os.waitpid(found.si_pid, 0)

    def _start(self, child: _Child) -> None:
        child.restart_at, child.started = None, time.monotonic()
        try:
            child.pid = child.launch()
            try:
                self._watch(child)
            except OSError:
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
                raise
        except OSError as error:
            self._failed(child, f"cannot start: {shortage(error)}")

    def _watch(self, child: _Child) -> None:
        child.end = os.pidfd_open(child.pid)
        self._selector.register(child.end, selectors.EVENT_READ, partial(self._exited, child))

    def _fork(self, number: int) -> int:
        return fork(lambda: self._serve(number))

    def _serve(self, number: int) -> int:
        """Run a server in the forked process."""
        end_with_parent(STOP_SIGNAL)
        if os.getppid() != self._pid:  # the supervisor was killed before the call
            return EXIT_FAILED
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self._run(number, lambda: os.write(self._report, bytes([number])))

    def _read_listening(self) -> None:
        listening = set(os.read(self._listening, 1024))
        if self._not_listening and self._not_listening <= listening:
            self._all_listen()
        self._not_listening -= listening

    def _read_signals(self) -> None:
        for number in self._signals.recv(1024):
            if number in _STOP_SIGNALS:
                self._stop()

    def _stop(self) -> None:
        self._kill_at = self._kill_at or time.monotonic() + self._grace + KILL_MARGIN_S
        for server in self._servers:
            server.restart_at = None
        self._signal(STOP_SIGNAL)

    def _signal(self, number: signal.Signals) -> None:
        for server in self._servers:
            if server.end != -1:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(server.end, number)

    def _exited(self, child: _Child) -> None:
        self._selector.unregister(child.end)
        os.close(child.end)
        child.end = -1
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if child is self._root:
            self._failed(child, exit_reason(status))
        elif self._kill_at is not None:
            self._code = self._code or (EXIT_USAGE if code == EXIT_USAGE else 0)
        elif code == EXIT_USAGE and self._servers.index(child) in self._not_listening:
            self._code = EXIT_USAGE
            self._stop()
        elif code == 0:
            logger.info("%s was drained, and is not started again", child.name)
        else:
            self._failed(child, exit_reason(status))

    def _failed(self, child: _Child, reason: str) -> None:
        now = time.monotonic()
        child.failures = 1 if now - child.started > STABLE_S else child.failures + 1
        delay = backoff(child.failures)
        child.restart_at = now + delay
        logger.error("%s (pid %d) %s; restarting it in %.2f s", child.name, child.pid, reason, delay)
