"""Processes that the benchmarks start in the repository's root and end."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import ssl
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import psutil

from teleloader.api.control import Server

ROOT: Final = Path(__file__).resolve().parent.parent
SERVER: Final = Path(sysconfig.get_path("scripts"), "teleloader-server")
START_TIMEOUT: Final = 60.0
STOP_TIMEOUT: Final = 10.0


@dataclass(slots=True)
class LoaderServer:
    """Loader server on a loopback port, which stays the same after a restart.

    Args:
        hosted: Datasets as `name=module:factory`, or an option such as `--demo`.
        num_workers: Number of worker processes.
        options: Further arguments of the command.
        command: Command that starts the server.
    """

    hosted: list[str]
    num_workers: int
    options: tuple[str, ...] = ()
    port: int = field(default_factory=lambda: free_port())
    command: tuple[str, ...] = (str(SERVER),)
    ca: str | None = None
    """File with the CA of a server that uses TLS; None without TLS."""
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"{'http' if self.ca is None else 'https'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server without waiting until it is ready."""
        settings = ["--host", "127.0.0.1", "--port", str(self.port), "--num-workers", str(self.num_workers)]
        command = [*self.command, *self.hosted, *settings, "--log-level", "warning", *self.options]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)

    def stats(self) -> dict[str, Any]:
        """Return the current /stats."""
        return stats(self.url)

    def pids(self) -> dict[str, int]:
        """Return PIDs by name: the server, its fork server and its workers."""
        workers = {f"worker {worker['worker']}": worker["pid"] for worker in self.stats()["workers"] if worker["pid"]}
        children = [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
        others = [pid for pid in children if pid not in workers.values()]
        forkservers = {f"forkserver{'' if number == 0 else f' {number}'}": pid for number, pid in enumerate(others)}
        return {"server": self.process.pid, **forkservers, **workers}

    def await_ready(self) -> None:
        """Wait until the server can compute batches.

        Raises:
            RuntimeError: The server does not become ready; its log on stderr has the reason.
        """
        deadline = time.monotonic() + START_TIMEOUT
        tls = None if self.ca is None else ssl.create_default_context(cafile=self.ca)
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=START_TIMEOUT, context=tls):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise RuntimeError(f"{SERVER.name} did not become ready (exit status {self.process.poll()})")


@contextmanager
def running(hosted: list[str], num_workers: int, *options: str, ca: str | None = None) -> Iterator[LoaderServer]:
    """Run a loader server, and yield it when it is ready."""
    started = LoaderServer(hosted, num_workers, options, ca=ca)
    started.start()
    try:
        started.await_ready()
        yield started
    finally:
        end(started.process)


@contextmanager
def configured(num_workers: int, config: str, *options: str, tls: bool = False) -> Iterator[LoaderServer]:
    """Run a loader server with a TOML configuration."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "loader.toml")
        file.write_text(config)
        https, ca = certified(Path(folder)) if tls else ((), None)
        with running(["--config", str(file)], num_workers, *options, *https, ca=ca) as started:
            yield started


def certified(folder: Path) -> tuple[tuple[str, str], str]:
    """Create a certificate of a CA in files; return the server's options and the CA's file."""
    import trustme

    authority, ca, server = trustme.CA(), folder / "ca.pem", folder / "server.pem"
    authority.cert_pem.write_to_path(str(ca))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(server))
    return ("--ssl-certfile", str(server)), str(ca)


@dataclass(frozen=True, slots=True)
class Hosting:
    """Access to a running server."""

    url: str
    pid: int | None = None
    """PID of its main process; None if the server has no process of its own on this machine."""
    ca: str | None = None
    """File with the CA of a server that uses TLS; None without TLS."""


class Servers:
    """Servers of a run; each is started when it is first used, and ends with the run.

    Args:
        stack: Ends the servers.
        config: TOML configuration of all servers.
        url: Running server to use instead; None to start servers on this machine.
    """

    def __init__(self, stack: ExitStack, config: str, url: str | None) -> None:
        self._stack = stack
        self._config = config
        self._url = url
        self._started: dict[tuple[int, bool, bool], Hosting] = {}

    def get(self, num_workers: int, *, tls: bool = False, lends: bool = False) -> Hosting:
        """Return a server with this number of workers, or the running server.

        With `lends`, the server lends batches in shared memory; otherwise, it sends them as to another machine.
        """
        if self._url is not None:
            return Hosting(self._url)
        key = num_workers, tls, lends
        if key not in self._started:
            options = () if lends else ("--limit", "max_lent_slots=0")
            server = self._stack.enter_context(configured(num_workers, self._config, *options, tls=tls))
            self._started[key] = Hosting(server.url, server.process.pid, server.ca)
        return self._started[key]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, of its running threads, with nanosecond resolution.

    Other clocks have steps as long as hundreds of batches.
    """
    found = 0
    for task in Path("/proc", str(pid), "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has exited
            found += int((task / "schedstat").read_text().split()[0])
    return found / 1e9


def stats(url: str) -> dict[str, Any]:
    """Return the current /stats of a server."""
    found: dict[str, Any] = Server(url, START_TIMEOUT).stats(1)
    return found


def await_idle(url: str) -> None:
    """Wait until all workers of a server are idle.

    Raises:
        RuntimeError: The workers do not become idle: another client uses the server.
    """
    deadline = time.monotonic() + START_TIMEOUT
    while any(worker["state"] != "idle" for worker in stats(url)["workers"]):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{url} is used by others too: its workers were busy for {START_TIMEOUT:g} s")
        time.sleep(0.005)


@contextmanager
def consumers(count: int, *shared: Any) -> Iterator[ProcessPoolExecutor]:
    """Start fresh processes that have imported the loaders; each runs one function at a time.

    They are forked from a process that has only done these imports, so they start within milliseconds.

    Args:
        count: Number of processes.
        shared: Object that only a new process can inherit, such as a lock: `shared_here` returns it there.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.imports"])
    with ProcessPoolExecutor(count, context, initializer=_share, initargs=shared) as executor:
        try:
            yield executor
        except BaseException:
            end_forked()  # otherwise the executor would wait for their tasks
            raise


_shared: tuple[Any, ...] = ()


def _share(*shared: Any) -> None:
    global _shared
    _shared = shared
    # local loaders start workers with the default method, not with this process's own
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches these processes, which their parent ends


def shared_here() -> tuple[Any, ...]:
    """Return the argument `shared` of `consumers`, in a process that it started."""
    return _shared


def end(process: subprocess.Popen[Any]) -> None:
    """End a process and wait for it."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_forked() -> None:
    """End the remaining processes of multiprocessing: consumers, and torch's workers of an interrupted turn."""
    for child in multiprocessing.active_children():
        child.terminate()
        child.join()


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
