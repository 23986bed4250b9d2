"""Processes that the benchmark starts: in the repository's root, and ended by it."""

from __future__ import annotations

import multiprocessing
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.workloads import WORKLOADS

ROOT: Final = Path(__file__).resolve().parent.parent
SERVER: Final = Path(sysconfig.get_path("scripts"), "teleloader-server")
START_TIMEOUT: Final = 60.0
STOP_TIMEOUT: Final = 10.0


@contextmanager
def server(num_workers: int, *options: str) -> Iterator[str]:
    """A loader server with all workloads on a free loopback port; gives its URL when it is ready.

    Raises:
        RuntimeError: When it does not become ready; it has said why on stderr.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    hosted = [f"{name}=benchmarks.workloads:{name}" for name in WORKLOADS]
    settings = ["--host", "127.0.0.1", "--port", str(port), "--num-workers", str(num_workers)]
    command = [str(SERVER), *hosted, *settings, "--log-level", "warning", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _await_ready(process, url)
        yield url
    finally:
        end(process)


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


def _await_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=START_TIMEOUT):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise RuntimeError(f"{SERVER.name} did not become ready (exit status {process.poll()})")
