"""Shutdown of a server: pending requests are completed, new ones rejected, and no client can delay it without limit."""

from __future__ import annotations

import contextlib
import functools
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from teleloader_server.cli.commands import REPEAT_S
from teleloader_shared import codec
from tests.conftest import ServerProcess, StartServer, eventually
from tests.raw import Raw

TARGET = "tests.end_to_end.hosted:"


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a file for which samples of the dataset `slow` wait."""
    path = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(path))
    return path


def register(server: ServerProcess, dataset: str) -> str:
    """Register a loader; return the path of its batches."""
    key = httpx.post(f"{server.url}/v1/loaders", json={"dataset": dataset}).raise_for_status().json()["key"]
    return f"/v1/loaders/{key}/epochs/0/batches"


def asked(server: ServerProcess) -> bool:
    """Return True if a worker has started the requested batch."""
    return any(worker["state"] == "busy" for worker in server.stats()["workers"])


def test_pending_requests_are_completed(start_server: StartServer, gate: Path) -> None:
    """Meanwhile new requests are rejected because the server is stopping; then it exits with code 0."""
    server = start_server(TARGET + "slow", "--num-workers", "1", "--shutdown-grace", "30")
    path = register(server, "slow")
    with Raw(server.url) as waiting, Raw(server.url) as idle:
        assert idle.get("/healthz").status == 200
        waiting.send_get(f"{path}/3")
        eventually(lambda: asked(server))
        server.process.send_signal(signal.SIGTERM)
        assert idle.receive_all() == b"", "nothing was asked there"
        for method, new in (("GET", "/readyz"), ("POST", "/v1/loaders"), ("GET", f"{path}/4")):
            response = httpx.request(method, server.url + new, json={"dataset": "slow"} if method == "POST" else None)
            assert response.status_code == 503, response.text
            assert "stopping" in response.json()["detail"]
            assert int(response.headers["retry-after"]) > 0
            assert response.headers["connection"] == "close"
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        assert server.stats()["server"]["draining"]
        gate.touch()
        answered = waiting.receive()
        assert answered.status == 200
        assert answered.headers["connection"] == "close"
        frame = codec.read(codec.Bits(np.frombuffer(answered.body, np.uint8)))
        assert frame.batch_id.batch == 3
        assert waiting.receive_all() == b""
    assert server.process.wait(10) == 0


def test_requests_that_cannot_be_completed_get_an_error(start_server: StartServer, gate: Path) -> None:
    """Requests that cannot be completed get 503 before the grace period ends, without an error in the log."""
    server = start_server(TARGET + "slow", "--num-workers", "1", "--shutdown-grace", "1")
    path = register(server, "slow")
    with Raw(server.url) as waiting:
        waiting.send_get(f"{path}/3")
        eventually(lambda: asked(server))
        assert server.end() == 0
        response = waiting.receive()
        assert (response.status, response.problem["code"]) == (503, "ServerUnavailable")
    assert not any("ERROR" in line or "Traceback" in line for line in server.log), "".join(server.log)


@pytest.mark.parametrize("query", ["/0", "?ranges=0:8"], ids=["one batch", "a stream"])
def test_clients_that_do_not_read_keep_no_server_alive(start_server: StartServer, query: str) -> None:
    """The server exits within the grace period, without errors in the log and without remaining processes."""
    server = start_server(TARGET + "heavy", "--num-workers", "2", "--shutdown-grace", "1")
    path = register(server, "heavy")
    family = psutil.Process(server.pid).children(recursive=True)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Raw(server.url, buffer=4096)) for _ in range(3)]
        for client in clients:
            client.send_get(path + query)
            assert client.socket.recv(1)
        began = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began < 15
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert not any("ERROR" in line or "Traceback" in line for line in server.log), "".join(server.log)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_now(start_server: StartServer, gate: Path, second: signal.Signals) -> None:
    """The server exits immediately with the same code, if the signal is not a repetition of the first one."""
    server = start_server(TARGET + "slow", "--num-workers", "1", "--shutdown-grace", "600")
    path = register(server, "slow")
    family = psutil.Process(server.pid).children(recursive=True)
    with Raw(server.url) as waiting:
        waiting.send_get(f"{path}/3")
        eventually(lambda: asked(server))
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.stats()["server"]["draining"])
        time.sleep(REPEAT_S)
        began = time.monotonic()
        assert server.end(second) == 0
        assert time.monotonic() - began < 15
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert not any("ERROR" in line or "Traceback" in line for line in server.log), "".join(server.log)


@pytest.mark.parametrize("servers", ["1", "2"])
@pytest.mark.parametrize("first", ["signal", "drain"])
def test_a_stop_that_arrives_twice_completes_pending_requests(
    start_server: StartServer, gate: Path, first: str, servers: str
) -> None:
    """A signal that is sent twice at once, or after the drain of the server, does not abort pending requests."""
    server = start_server(TARGET + "slow", "--num-workers", servers, "--servers", servers, "--shutdown-grace", "60")
    path = register(server, "slow")
    with Raw(server.url) as waiting:
        waiting.send_get(f"{path}/3")
        eventually(lambda: asked(server))
        if first == "drain":
            assert httpx.post(f"{server.url}/v1/drain").status_code == 202
        else:
            server.process.send_signal(signal.SIGINT)  # a second SIGTERM could be merged with the first
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.stats()["server"]["draining"])
        assert not select.select([waiting.socket], [], [], 1)[0], "the request was aborted"
        gate.touch()
        assert waiting.receive().status == 200
    assert server.process.wait(30) == 0


def test_an_idle_server_stops_at_once(start_server: StartServer) -> None:
    """An idle server exits immediately, whatever the grace period and the open connections."""
    server = start_server("--demo", "--num-workers", "1", "--shutdown-grace", "600")
    with contextlib.ExitStack() as stack:
        for n in range(50):
            client = stack.enter_context(Raw(server.url))
            if n % 2:
                assert client.get("/healthz").status == 200
        began = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began < 15


def test_a_limit_of_files_that_is_too_low_is_one_line() -> None:
    """The error at start has the limit's name and value."""
    few = functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, (64, 64))
    command = [sys.executable, "-c", "from teleloader_server.cli import main; main()", "--demo", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=few, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "RLIMIT_NOFILE) is 64" in line
    assert "ulimit -n" in line


def test_the_soft_limit_of_files_is_raised(start_server: StartServer) -> None:
    """The server raises the limit, because each connection is a file and shells have a low limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] - 1, before[1]))
    try:
        server = start_server("--demo", "--num-workers", "1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert psutil.Process(server.pid).rlimit(psutil.RLIMIT_NOFILE) == (before[1], before[1])
