"""Processes that the benchmark starts: in the repository's root, and ended by it."""

from __future__ import annotations

import json
import multiprocessing
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.workloads import Workload

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
    """

    hosted: list[str]
    num_workers: int
    options: tuple[str, ...] = ()
    port: int = field(default_factory=lambda: free_port())
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it; it is not ready yet."""
        settings = ["--host", "127.0.0.1", "--port", str(self.port), "--num-workers", str(self.num_workers)]
        command = [str(SERVER), *self.hosted, *settings, "--log-level", "warning", *self.options]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)

    def stats(self) -> dict[str, Any]:
        """What /stats says now."""
        with urllib.request.urlopen(f"{self.url}/stats", timeout=START_TIMEOUT) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

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
def server(num_workers: int, workloads: Iterable[Workload], *options: str) -> Iterator[str]:
    """A loader server with those workloads; gives its URL when it is ready."""
    with TemporaryDirectory() as folder:
        config = Path(folder, "loader.toml")
        config.write_text("\n".join(workload.toml for workload in workloads))
        with running(["--config", str(config)], num_workers, *options) as started:
            yield started.url


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and wait for it."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_forked() -> None:
    """End what multiprocessing started here and is still there: torch's workers, when their iterator was cut short."""
    for child in multiprocessing.active_children():
        child.terminate()
        child.join()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port
