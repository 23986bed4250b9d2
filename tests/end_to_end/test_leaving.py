"""Exit of training programs: immediate and without leftovers, with real programs and a real server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, ServerProcess, StartServer

BEGIN = """
import sys, threading, time
from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
url = sys.argv[1]
dataset = RemoteDataset(url, "many", reconnect_timeout=60)
loader = DataLoader(dataset, 10, output="numpy")
"""

LEAVING = {
    "break": "for batch in loader: break",
    "exit in the loop": "for batch in loader: sys.exit(0)",
    "iterator is kept": "batches = iter(loader); next(batches)",
    "iterator was never used": "batches = iter(loader)",
    "two iterators": "a, b = iter(loader), iter(loader); assert next(a).tolist() == next(b).tolist()",
    "del": "batches = iter(loader); next(batches); del batches, loader",
    "kept in a cycle": "batches = iter(loader); next(batches); cycle = [batches]; cycle.append(cycle); del batches",
    "left in a thread": ("thread = threading.Thread(target=lambda: next(iter(loader))); thread.start(); thread.join()"),
    "in a daemon thread that goes on": (
        "def loop():\n    while True:\n        for batch in loader: pass\n"
        "threading.Thread(target=loop, daemon=True).start()\ntime.sleep(0.3)"
    ),
    "shards": "stream = iter(DataLoader(RemoteDataset(url, 'stream'), 2, num_workers=2, output='numpy')); next(stream)",
    "persistent shards": (
        "stream = DataLoader(RemoteDataset(url, 'stream'), 2, num_workers=2, persistent_workers=True, output='numpy')\n"
        "for _ in range(2): assert len(list(stream)) == 13"
    ),
    "an object of its own": "own = iter(DataLoader(list(range(100)), 3, num_workers=1, output='numpy')); next(own)",
    "served by itself": (
        "context = serve(list(range(100)), num_workers=1)\nown = context.__enter__()\n"
        "batches = iter(DataLoader(RemoteDataset(own), 3, output='numpy')); next(batches)"
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Run a server with a map-style dataset, a stream, and a dataset that hangs."""
    target = "tests.end_to_end.hosted:"
    os.environ["GATE"] = "/nonexistent/gate"
    server = ServerProcess(
        "--port", "0", f"{target}many", f"{target}stream", f"waits={target}slow", "--num-workers", "1"
    )
    del os.environ["GATE"]
    yield server
    server.kill()


def program(server_url: str, text: str) -> subprocess.Popen[str]:
    """Return a program that continues after `BEGIN`."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", BEGIN + textwrap.dedent(text), server_url],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("how", LEAVING)
def test_a_program_that_leaves_says_nothing(server: ServerProcess, how: str) -> None:
    """The program exits with code 0, without output and without remaining processes."""
    running = program(server.url, LEAVING[how])
    out, err = running.communicate(timeout=60)  # until all that hold its output have ended
    assert (running.returncode, out, err) == (0, "", "")


def test_an_exception_in_the_loop_is_the_only_output(server: ServerProcess) -> None:
    """The only output is the user's traceback."""
    running = program(server.url, "for batch in loader: raise ValueError('in the training step')")
    _, err = running.communicate(timeout=60)
    assert running.returncode == 1
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("ValueError: in the training step\n")
    assert err.count("Traceback") == 1


@pytest.mark.parametrize("waiting_for", ["a batch", "a server"])
def test_ctrl_c_ends_a_program_that_waits(
    server: ServerProcess, start_server: StartServer, tmp_path: Path, waiting_for: str
) -> None:
    """Ctrl-C while receiving or retrying raises KeyboardInterrupt, without further output."""
    alive = server
    if waiting_for == "a batch":
        wait = "batches = iter(DataLoader(RemoteDataset(url, 'waits'), 1, output='numpy')); print('now', flush=True)"
    else:
        wait = "batches = iter(loader); next(batches); print('now', flush=True); sys.stdin.readline()"
        alive = start_server("tests.end_to_end.hosted:many", "--num-workers", "1")
    running = subprocess.Popen(
        [sys.executable, "-c", BEGIN + wait + "\nfor batch in batches: pass", alive.url],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert running.stdout is not None
    assert running.stdout.readline() == "now\n"
    if alive is not server:
        alive.kill()
        assert running.stdin is not None
        running.stdin.write("\n")
        running.stdin.flush()
    while psutil.Process(running.pid).status() != psutil.STATUS_SLEEPING:
        pass
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == -signal.SIGINT
    assert err.count("Traceback") == 1
    assert err.endswith("KeyboardInterrupt\n")


def test_a_wait_ends_although_the_signal_did_not_interrupt_it(server: ServerProcess) -> None:
    """Ctrl-C is noticed if another thread handles the signal, as if it had arrived just before the wait began."""
    running = program(
        server.url,
        """
        import os, signal
        waiting = DataLoader(RemoteDataset(url, "waits"), 1, output="numpy")
        batches = iter(waiting)
        def interrupt():
            while waiting.stats().waited == 0:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=interrupt).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            next(batches)
        except KeyboardInterrupt:
            print("interrupted")
        """,
    )
    assert running.communicate(timeout=60) == ("interrupted\n", "")
