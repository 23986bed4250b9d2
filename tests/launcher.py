"""Launcher that starts Python programs as forks of a process that has imported their third-party packages.

Importing FastAPI, uvicorn and NumPy takes most of a server's start, and the tests start hundreds of servers. The
programs are ordinary processes; modules of this project and datasets are imported anew in each.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

PRELOADED: Final = (
    "asyncio", "click", "fastapi", "fastapi.responses", "fastapi.staticfiles", "httptools", "httpx", "logging.config",
    "msgpack", "numpy", "numpy.random", "prometheus_client", "psutil", "rich.console", "rich.logging", "rich.table",
    "ssl", "starlette.middleware", "tomlkit", "uvicorn", "uvicorn.lifespan.off",
    "uvicorn.protocols.http.httptools_impl", "uvicorn.protocols.websockets.websockets_sansio_impl", "uvloop",
    "watchfiles", "websockets", "xxhash",
)  # fmt: skip
ENVIRONMENT: Final = dict(os.environ)
"""Environment of the launcher, copied because tests may change it before the launcher starts."""
MAX_REQUEST: Final = 2**18
STATUS: Final = struct.Struct("i")


class LaunchedProcess:
    """A program that the launcher started, with the methods of `subprocess.Popen` that tests call."""

    def __init__(self, status: int) -> None:
        self._status = status
        self.returncode: int | None = None
        self.pid = self._read()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code when the process has exited: -N for signal N."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("the launched program", timeout or 0)
            self.returncode = self._read()
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _read(self) -> int:
        value: int = STATUS.unpack(os.read(self._status, STATUS.size))[0]
        return value


@functools.cache
def _launcher() -> socket.socket:
    """Start the launcher, not as a child of this process, because tests count its children."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", Path(__file__).read_text() + "\nserve_launches()", str(theirs.fileno())]
    with theirs:
        subprocess.run(command, check=True, pass_fds=[theirs.fileno()], env=ENVIRONMENT, stdin=subprocess.DEVNULL)
    return ours


def start_launcher() -> None:
    """Start the launcher now, for tests that count descriptors from here on."""
    _launcher()


def launch(
    program: str, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], stdout: int, stderr: int
) -> LaunchedProcess:
    """Start `python -c program arguments` as a fork of the launcher.

    Args:
        program: Source text.
        arguments: For ``sys.argv[1:]``.
        folder: Working directory.
        environment: All of the environment.
        stdout: Descriptor that becomes its standard output.
        stderr: Descriptor that becomes its standard error.
    """
    request = json.dumps([program, [*arguments], str(folder), dict(environment)]).encode()
    ours, theirs = os.pipe()
    try:
        socket.send_fds(_launcher(), [request], [stdout, stderr, theirs])
    finally:
        os.close(theirs)
    return LaunchedProcess(ours)


def can_launch(program: str, environment: Mapping[str, str]) -> bool:
    """Return True if the interpreter itself would run the program alike in this environment.

    A program that hides a package finds it loaded in the launcher.
    """
    if "sys.modules" in program:
        return False
    names = {name for name in (*environment, *ENVIRONMENT) if "PYTHON" in name}
    return all(environment.get(name) == ENVIRONMENT.get(name) for name in names)


def serve_launches() -> None:
    """Fork a program for each request; return only in the forks."""
    if os.fork():
        os._exit(0)
    for name in PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the tests' end of the socket
    requests = socket.socket(fileno=int(sys.argv[1]))
    running: dict[int, tuple[int, int]] = {}
    while True:
        watched: list[Any] = [requests, *running]
        ready = select.select(watched, [], [])[0]
        for pidfd in set(ready) & set(running):
            pid, status = running.pop(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):
                os.write(status, STATUS.pack(code))
            os.close(status)
            os.close(pidfd)
        if requests in ready:
            request, descriptors, *_ = socket.recv_fds(requests, MAX_REQUEST, 3)
            if not request:
                os._exit(0)
            stdout, stderr, status = descriptors
            with warnings.catch_warnings(
                action="ignore"
            ):  # NumPy's threads do not survive a fork and are started again
                pid = os.fork()
            if pid == 0:
                break
            os.close(stdout)
            os.close(stderr)
            os.write(status, STATUS.pack(pid))
            running[os.pidfd_open(pid)] = pid, status
    requests.close()
    for pidfd, (_, other) in running.items():
        os.close(pidfd)
        os.close(other)
    _become(json.loads(request), stdout, stderr, status)


def _become(request: Any, stdout: int, stderr: int, status: int) -> None:
    program, arguments, folder, environment = request
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in (stdout, stderr, status):
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[:] = ["-c", *arguments]
    importlib.invalidate_caches()
    namespace = {"__name__": "__main__"}
    exec(program, namespace)
