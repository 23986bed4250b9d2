"""Child process of an actor that runs the command ``teleloader-server``, restarted after failures."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Literal, NamedTuple

from teleloader_server.fleet.supervisor import STABLE_S
from teleloader_server.workers.health import backoff, exit_reason
from teleloader_shared.exit_codes import EXIT_FAILED, EXIT_USAGE

PROGRAM: Final = "from teleloader_server.cli import main; main()"
SERVERS_FILE: Final = "servers"
"""File in which the server announces itself."""
LOG_LINES: Final = 20
"""Last lines of the log that a failure quotes."""
LOG_END_S: Final = 1.0
"""Maximum wait in seconds for the end of the log: other processes may have inherited it."""

State = Literal["pending", "starting", "ready", "restarting", "draining", "failed", "stopped"]


class ServerStatus(NamedTuple):
    """Status of a server."""

    state: State
    """``pending`` until Ray has started the actor; ``failed`` if the configuration is invalid, so that a restart would
    not help."""
    urls: tuple[str, ...] = ()
    """URLs for clients; empty unless the server is ready."""
    restarts: int = 0
    """Restarts by this actor after failures."""
    problem: str = ""
    """Reason of the last failure, with the last lines of the log."""


class ServerProcess:
    """Server in a child process.

    A thread starts the server, and restarts it after failures with increasing delays. The actor's process is never
    forked without an exec: Ray runs threads in it. The server stops as after SIGTERM when the actor exits or is killed.

    Args:
        arguments: Arguments of the command. ``{folder}`` stands for a new folder, which only this user can read: the
            server is expected to announce itself in its file ``servers``. ``{name}`` stands for the path of a file.
        files: Contents of files by name. They have no name in the file system, so that no keys remain if Ray kills the
            actor with its child.
        environment: Variables to add to the environment.
        is_retried: Whether to restart the server also if its configuration is invalid (exit code 2).
    """

    def __init__(
        self, arguments: Sequence[str], files: Mapping[str, str], environment: Mapping[str, str], *, is_retried: bool
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="teleloader-"))
        self._files = {name: _unnamed_file(content) for name, content in files.items()}
        paths = {"{folder}": str(self._folder)}
        paths |= {f"{{{name}}}": f"/dev/fd/{file.fileno()}" for name, file in self._files.items()}
        self._command = [sys.executable, "-c", PROGRAM, *(_replaced(argument, paths) for argument in arguments)]
        self._command += ["--exit-with-parent", str(os.getpid())]
        self._environment = {**os.environ, **environment}
        self._is_retried = is_retried
        self._status = ServerStatus("starting")
        self._stopping = threading.Event()
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        """Held while the child is started or signalled."""
        # all children are started by this thread: the kernel signals the end of a child's parent when the thread exits
        self._thread = threading.Thread(target=self._run, name="teleloader-supervisor", daemon=True)
        self._thread.start()

    @property
    def status(self) -> ServerStatus:
        """Current status."""
        status = self._status
        if self._stopping.is_set() and self._thread.is_alive():
            return ServerStatus("draining", (), status.restarts, status.problem)
        if status.state == "starting" and (urls := self._announced()):
            return status._replace(state="ready", urls=urls)
        return status

    def stop(self) -> None:
        """Complete the pending requests of the server, and wait for its end."""
        with self._lock:
            if self._child is not None and not self._stopping.is_set():  # a second signal would abort the requests
                self._child.send_signal(signal.SIGTERM)
            self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        failures = restarts = 0
        problem = ""
        while not self._stopping.is_set():
            began = time.monotonic()
            self._status = ServerStatus("starting", (), restarts, problem)
            try:
                code, log = self._serve()
            except OSError as error:  # no memory or process for the child
                code, log = EXIT_FAILED, str(error)
            if self._stopping.is_set():
                break
            reason = exit_reason(-code if code < 0 else code << 8)
            problem = f"teleloader-server {reason}:\n{log}".rstrip()
            if code == EXIT_USAGE and not self._is_retried:
                self._end(ServerStatus("failed", (), restarts, problem))
                return
            restarts += 1
            failures = 1 if time.monotonic() - began > STABLE_S else failures + 1
            self._status = ServerStatus("restarting", (), restarts, problem)
            self._stopping.wait(backoff(failures))
        self._end(ServerStatus("stopped", (), restarts, problem))

    def _serve(self) -> tuple[int, str]:
        """Run the server until it exits; return the exit code and the last lines of the log."""
        with self._lock:
            if self._stopping.is_set():
                return 0, ""
            (self._folder / SERVERS_FILE).unlink(missing_ok=True)  # of a server that was killed
            self._child = child = subprocess.Popen(  # noqa: S603 - it is this program
                self._command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
                env=self._environment, pass_fds=[file.fileno() for file in self._files.values()],
            )  # fmt: skip
        lines = deque[str](maxlen=LOG_LINES)
        log = threading.Thread(target=_forward, args=(child.stderr, lines), name="teleloader-log", daemon=True)
        log.start()
        code = child.wait()
        log.join(LOG_END_S)
        return code, "".join(lines)

    def _end(self, status: ServerStatus) -> None:
        self._status = status
        shutil.rmtree(self._folder, ignore_errors=True)
        for file in self._files.values():
            file.close()

    def _announced(self) -> tuple[str, ...]:
        try:
            return tuple((self._folder / SERVERS_FILE).read_text().split())
        except OSError:
            return ()


def _replaced(text: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text


def _unnamed_file(content: str) -> IO[str]:
    file = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when the server has stopped
    file.write(content)
    file.flush()
    return file


def _forward(log: IO[str], lines: deque[str]) -> None:
    """Copy the log to stderr, which Ray collects, and keep the last lines."""
    with log:
        for line in log:
            lines.append(line)
            sys.stderr.write(line)
            sys.stderr.flush()
