"""Processes that the benchmarks start in the repository's root and end."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
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
    """A loader server on a loopback port that is its own for good, so that it can be started there again.

    Args:
        hosted: What it hosts, as `name=module:factory`, or the option that says it.
        num_workers: Its worker processes.
        options: Further arguments of the command.
        command: What starts it.
    """

    hosted: list[str]
    num_workers: int
    options: tuple[str, ...] = ()
    port: int = field(default_factory=lambda: free_port())
    command: tuple[str, ...] = (str(SERVER),)
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it; it is not ready yet."""
        settings = ["--host", "127.0.0.1", "--port", str(self.port), "--num-workers", str(self.num_workers)]
        command = [*self.command, *self.hosted, *settings, "--log-level", "warning", *self.options]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)

    def stats(self) -> dict[str, Any]:
        """What /stats says now."""
        return stats(self.url)

    def pids(self) -> dict[str, int]:
        """Its processes by name: the server, its template, and the workers that are there."""
        workers = {f"worker {worker['worker']}": worker["pid"] for worker in self.stats()["workers"] if worker["pid"]}
        children = [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]
        others = [pid for pid in children if pid not in workers.values()]
        templates = {f"template{'' if number == 0 else f' {number}'}": pid for number, pid in enumerate(others)}
        return {"server": self.process.pid, **templates, **workers}

    def await_ready(self) -> None:
        """Wait until batches can be had.

        Raises:
            RuntimeError: When it does not become ready; it has said why on stderr.
        """
        deadline = time.monotonic() + START_TIMEOUT
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/readyz", timeout=START_TIMEOUT):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise RuntimeError(f"{SERVER.name} did not become ready (exit status {self.process.poll()})")


@contextmanager
def running(hosted: list[str], num_workers: int, *options: str) -> Iterator[LoaderServer]:
    """A loader server that is ready; whichever process it has at the end is ended."""
    started = LoaderServer(hosted, num_workers, options)
    started.start()
    try:
        started.await_ready()
        yield started
    finally:
        end(started.process)


@contextmanager
def configured(num_workers: int, config: str) -> Iterator[LoaderServer]:
    """A loader server with that configuration, as TOML."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "loader.toml")
        file.write_text(config)
        with running(["--config", str(file)], num_workers) as started:
            yield started


def stats(url: str) -> dict[str, Any]:
    """What /stats of a server says now."""
    found: dict[str, Any] = Server(url, START_TIMEOUT).stats(1)
    return found


def await_idle(url: str) -> None:
    """Wait until no worker of a server has anything to do.

    Raises:
        RuntimeError: When that does not happen: nobody else may use the server.
    """
    deadline = time.monotonic() + START_TIMEOUT
    while any(worker["state"] != "idle" for worker in stats(url)["workers"]):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{url} is used by others too: its workers were busy for {START_TIMEOUT:g} s")
        time.sleep(0.005)


@contextmanager
def consumers(count: int, *shared: Any) -> Iterator[ProcessPoolExecutor]:
    """So many fresh processes, which have imported what loads; each runs one function at a time.

    They are forked from a process that has only imported it, so that they take milliseconds to start and have done
    nothing before.

    Args:
        count: How many.
        shared: What only a new process can be given, such as a lock: `shared_here` returns it there.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.imports"])
    with ProcessPoolExecutor(count, context, initializer=_share, initargs=shared) as executor:
        try:
            yield executor
        except BaseException:
            end_forked()  # else the executor would wait for what they do
            raise


_shared: tuple[Any, ...] = ()


def _share(*shared: Any) -> None:
    global _shared
    _shared = shared
    # a local loader starts its workers as it always would, and not as this process was started
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches these processes too; their end is ours


def shared_here() -> tuple[Any, ...]:
    """What `consumers` was given for the processes that it started, of which this is one."""
    return _shared


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and wait for it."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_forked() -> None:
    """End what multiprocessing started here and is still there: consumers, and torch's workers of a turn cut short."""
    for child in multiprocessing.active_children():
        child.terminate()
        child.join()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
