"""A short, reproducible run of each fuzzer; ``python -m tests.fuzz`` runs longer."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from random import Random

import pytest

from tests.conftest import ServerProcess, StartServer
from tests.fuzz import endpoints, frames, states
from tests.fuzz.__main__ import run
from tests.fuzz.watching import CPU_LIMIT, Watch


def watched(read: Callable[[bytes], str], mutate: Callable[[Random], bytes], executions: int) -> Watch:
    """Run a number of executions, none of which may break a rule."""
    watch = Watch(read, frames.REFUSALS if read is frames.read else states.REFUSALS)
    run(watch, mutate, 0, range(executions))
    assert not watch.findings, "\n".join(f"{found.rule}\n{found.details}" for found in watch.findings.values())
    return watch


def test_hostile_frames_are_read_or_refused() -> None:
    """Arbitrary bytes give a value or a ProtocolError, in bounded time and memory, and run no code."""
    watch = watched(frames.read, frames.mutate, 3000)
    assert len(watch.outcomes) > 30
    assert watch.outcomes.total() == 3000


def test_every_frame_of_the_corpus_is_read() -> None:
    """The frames to mutate are valid: mutations of rejected frames would test nothing."""
    for frame in frames.corpus():
        frames.read(frame)


def test_hostile_states_are_read_or_refused() -> None:
    """JSON of a client's spec, of a saved state and of a server's response is read, or rejected with a short error."""
    watch = watched(states.read, states.mutate, 1500)
    assert {"spec: spec", "state: position", "answer: registration"} <= set(watch.outcomes)


@pytest.mark.parametrize("reader", states.READERS, ids=lambda reader: reader.name)
def test_every_state_of_the_corpus_is_read(reader: states.Reader) -> None:
    """The states to mutate are valid."""
    for seed in reader.seeds:
        reader.read(states.text_of(seed) if reader.name == "problem" else seed)


def test_what_breaks_a_rule_is_found() -> None:
    """An unknown exception, a second of work and a gigabyte of memory are findings, each with its input."""

    def target(data: bytes) -> str:
        if data == b"memory":
            bytearray(2**27)
        elif data == b"time":
            enough = time.thread_time() + 1.1 * CPU_LIMIT
            while time.thread_time() < enough:
                pass
        elif data == b"error":
            raise KeyError("x")
        elif data == b"refusal":
            raise ValueError
        return "fine"

    watch = Watch(target, (ValueError,))
    with watch.on():
        for number, data in enumerate((b"fine", b"refusal", b"error", b"memory", b"time")):
            watch.execute(number, data)
    assert {found.data for found in watch.findings.values()} == {b"error", b"memory", b"time"}


@pytest.fixture
def server(start_server: StartServer) -> ServerProcess:
    """Run a server to attack."""
    return start_server("rows=tests.fuzz.hosted:rows", "--num-workers", "1")


def test_a_server_stands_garbage(server: ServerProcess) -> None:
    """Invalid HTTP and index lists cause no 5xx and no traceback, and another client receives correct batches."""
    with endpoints.healthy_client(server.url) as client:
        found = endpoints.attack_raw(server.url, 150, 0)
    assert found + client.findings + endpoints.examine(server) == []
    assert client.outcomes["batches"] > 0


@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis: pip install --group fuzz"
)
def test_a_server_stands_requests_of_its_own_page(server: ServerProcess) -> None:
    """Requests that schemathesis derives from the OpenAPI page get no undocumented 5xx."""
    with endpoints.healthy_client(server.url) as client:
        found = endpoints.attack_documented(server.url, 0, 20)
    assert found + client.findings + endpoints.examine(server) == []
