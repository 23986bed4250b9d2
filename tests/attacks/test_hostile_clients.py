"""Attacks on a server beside a healthy client, which receives every batch; the server releases all resources."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import psutil
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_shared import codec
from teleloader_shared.messages import PROTOCOL_HEADER
from tests.conftest import ServerProcess, eventually
from tests.end_to_end import hosted
from tests.raw import HOST, Raw

BATCHES = len(hosted.numbers) // 4
MIB = 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Run a server with a small memory budget."""
    names = ("numbers", "heavy")
    targets = [f"tests.end_to_end.hosted:{name}" for name in names]
    running = ServerProcess("--port", "0", *targets, "--num-workers", "2", "--memory-budget", "64MiB")
    yield running
    assert running.end() == 0
    log = "".join(running.log)
    assert "Traceback" not in log
    assert "ERROR" not in log
    assert len(running.log) < 200, "who attacks does not write the log"


class Trainer:
    """Healthy client, which iterates over a dataset repeatedly."""

    def __init__(self, url: str) -> None:
        self.batches = 0
        self.worst = 0.0
        self.error: BaseException | None = None
        self._loader = DataLoader(RemoteDataset(url, "numbers", reconnect_timeout=0), 4, output="numpy")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """Stop iterating."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._iterate()
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            self.error = error

    def _iterate(self) -> None:
        asked = time.monotonic()
        for k, (indices, squares) in enumerate(self._loader):
            self.worst = max(self.worst, time.monotonic() - asked)
            assert indices.tolist() == list(range(4 * k, 4 * k + 4))
            assert squares.tolist() == [float(i) ** 2 for i in range(4 * k, 4 * k + 4)]
            self.batches += 1
            self._stopped.wait(0.005)  # its step
            asked = time.monotonic()
        assert k == BATCHES - 1


@pytest.fixture(scope="module")
def trainer(server: ServerProcess) -> Iterator[Trainer]:
    """Run one training process for all tests."""
    made = Trainer(server.url)
    yield made
    made.stop()


def descriptors(process: psutil.Process) -> int:
    """Return the number of open descriptors besides those of shared memory, which workers keep for further batches."""
    found = 0
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += not os.readlink(entry).startswith("/memfd:teleloader")
    return found


@pytest.fixture(autouse=True)
def undisturbed(server: ServerProcess, trainer: Trainer) -> Iterator[None]:
    """Check that another client receives every batch in time during the test, and that the server has not changed."""
    eventually(lambda: trainer.batches or trainer.error)
    process = psutil.Process(server.pid)
    files = descriptors(process)
    trainer.worst = 0.0
    yield
    before = trainer.batches
    eventually(lambda: trainer.batches > before + 2 or trainer.error)
    assert trainer.error is None, trainer.error
    assert trainer.worst < 20, f"a batch took {trainer.worst:.1f} s"
    assert process.memory_info().rss < 600 * MIB
    eventually(lambda: descriptors(process) <= files + 8)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    """Return an HTTP client for arbitrary requests."""
    with httpx.Client(base_url=server.url, timeout=30) as made:
        yield made


def test_slow_heads_and_silent_connections_do_not_delay_other_clients(server: ServerProcess) -> None:
    """The server closes all 500 connections after `header_timeout`."""
    with contextlib.ExitStack() as stack:
        attackers = [stack.enter_context(Raw(server.url)) for _ in range(500)]
        began = time.monotonic()
        for byte in b"GET /healthz HTTP/1.1"[:9]:
            for attacker in attackers[::2]:
                attacker.send(bytes([byte]))
            time.sleep(1)
        assert all(attacker.is_open() for attacker in attackers)
        eventually(lambda: not any(attacker.is_open() for attacker in attackers))
        assert time.monotonic() - began < 15
        assert all(attacker.receive_all() == b"" for attacker in attackers[1::2])
        for attacker in attackers[::2]:
            assert b"408 Request Timeout" in attacker.receive_all()


def test_a_thousand_idle_connections_do_not_delay_other_clients(server: ServerProcess) -> None:
    """The server still responds on each of them, and they use little memory."""
    before = psutil.Process(server.pid).memory_info().rss
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(Raw(server.url)) for _ in range(1000)]
        for client in idle:
            client.send_get("/healthz")
        assert all(client.receive().status == 200 for client in idle)
        assert psutil.Process(server.pid).memory_info().rss - before < 64 * MIB
        for client in idle[::50]:
            assert client.get("/healthz").status == 200


def test_closed_connections_are_released(server: ServerProcess, client: httpx.Client) -> None:
    """After 3,000 connections, with and without a request, the server counts only the test's own connections."""
    for n in range(3000):
        with Raw(server.url) as raw:
            if n % 3 == 0:
                raw.send_get("/stats")
            elif n % 3 == 1:
                raw.send(b"GET /")
    eventually(lambda: client.get("/stats").json()["server"]["connections"] < 50)


def test_the_memory_of_unread_responses_is_limited(server: ServerProcess, client: httpx.Client) -> None:
    """Connections are closed while other clients need the memory."""
    key = client.post("/v1/loaders", json={"dataset": "heavy", "checksum": False}).json()["key"]
    with contextlib.ExitStack() as stack:
        greedy = [stack.enter_context(Raw(server.url, buffer=4096)) for _ in range(40)]
        for k, each in enumerate(greedy):
            each.send_get(f"/v1/loaders/{key}/epochs/0/batches/{k}", b"Connection: close\r\n")

        def mapped() -> int:
            found: int = client.get("/stats").json()["server"]["memory_mapped"]
            return found

        eventually(lambda: sum(not each.is_open() for each in greedy) > 25)
        eventually(lambda: mapped() < 224 * MIB)


@pytest.mark.parametrize(
    "field",
    [
        ("batch_size", 0), ("batch_size", -1), ("batch_size", 10**12), ("batch_size", 1.5), ("batch_size", 2**63),
        ("batch_size", True), ("batch_size", "8"), ("batch_size", float("nan")), ("batch_size", [1]),
        ("world_size", 10**9), ("world_size", float("inf")), ("rank", 10**9), ("seed", -1), ("seed", 2**64),
        ("num_workers", 10**6), ("resumed_epoch", 2**63), ("session", "x" * 1000), ("session", {"a": 1}),
        ("shard_states", [None] * 10**5), ("tail", None), ("dataset", "../../etc/passwd"), ("dataset", "x" * 500_000),
        ("dataset", "\ud800"), ("dataset", None), ("fingerprint", "\udfff"), ("__class__", "x"), ("checksum", "\r\n"),
    ],
    ids=lambda field: f"{field[0]}={field[1]!r:.12}",
)  # fmt: skip
def test_invalid_specs_are_rejected(client: httpx.Client, field: tuple[str, Any]) -> None:
    """The server responds soon, with a 4xx status and a short message."""
    name, value = field
    spec = {"dataset": "numbers", name: value}
    _is_refused(client.post("/v1/loaders", content=json.dumps(spec)))


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"9" * 100_000, b'"' + b"x" * 10**6 + b'"',
     b'{"dataset":"numbers","batch_size":' + b"9" * 10_000 + b"}", b" " * 10**6, b'{"dataset":"a","dataset":"b"}',
     msgpack.packb({"dataset": "numbers"}), b"x" * 2 * MIB],
    ids=lambda body: f"{body[:12]!r} {len(body)}",
)  # fmt: skip
def test_bodies_other_than_specs_are_rejected(client: httpx.Client, body: bytes) -> None:
    """Registrations whose body is not a valid spec are rejected, whatever its nesting and content."""
    _is_refused(client.post("/v1/loaders", content=body))


@pytest.mark.parametrize(
    "path",
    ["{k}/epochs/0/batches/9223372036854775808", "{k}/epochs/9223372036854775808/batches/0", "{k}/epochs/0/batches/1e3",
     "{k}/epochs/0/batches/" + "9" * 5000, "{k}/epochs/-1/batches/0", "{k}/epochs/0/batches/0?ahead=1000000000",
     "{k}/epochs/0/batches?ranges=0:1000000000000", "{k}/epochs/0/batches?ranges=0:-1",
     "{k}/epochs/0/batches?ranges=0:25&ahead=-1", "{k}/epochs/0/batches?ranges=NaN:1",
     "{k}/epochs/0/batches?ranges=0", "{k}/epochs/0/batches?ranges=1:2,0:1",
     "{k}/epochs/0/batches?ranges=0:1,4611686018427387903:4611686018427387904",
     "{k}/epochs/0/batches?ranges=" + ",".join(f"{k}:{k + 1}" for k in range(0, 258, 2)),
     "..%2F..%2Fetc/epochs/0/batches/0", "x" * 60_000, "%00", "%ff%fe",
     "%0d%0aX-Forged:%201", "{k}/epochs/0/batches?ranges=0:1&ready=perhaps"],
    ids=lambda path: path[-24:],
)  # fmt: skip
def test_invalid_batch_ids_are_rejected(client: httpx.Client, path: str) -> None:
    """Invalid batch IDs are rejected with a 4xx status; the server does not count up to large numbers."""
    key = client.post("/v1/loaders", json={"dataset": "numbers", "batch_size": 4}).json()["key"]
    _is_refused(client.get("/v1/loaders/" + path.replace("{k}", key)))


def test_unsupported_methods_and_versions_are_rejected(client: httpx.Client) -> None:
    """The status is 405 for a method, and 426 for a protocol version."""
    for method in ("PUT", "PATCH", "PROPFIND", "TRACE", "DELETE", "OPTIONS"):
        assert client.request(method, "/v1/datasets").status_code == 405
    response = client.post("/v1/loaders", json={"dataset": "numbers"}, headers={PROTOCOL_HEADER: "99"})
    assert (response.status_code, response.json()["code"]) == (426, "VersionMismatch")
    _is_refused(client.post("/v1/loaders", json={"dataset": "numbers"}, headers={PROTOCOL_HEADER: "1" * 5000}))


def index_lists(key: str, count: int, size: int) -> bytes:
    """Return the index lists of the batches [0, count)."""
    indices = np.arange(size) % len(hosted.numbers)
    return b"".join(codec.to_bytes(codec.BatchId(key, 0, k), indices, checksum=False) for k in range(count))


@pytest.fixture
def own_order(client: httpx.Client) -> Iterator[str]:
    """Return the key of a loader with a client-side sampler."""
    spec = {"dataset": "numbers", "batch_size": 4, "order": "client", "session": "hostile"}
    key: str = client.post("/v1/loaders", json=spec).raise_for_status().json()["key"]
    yield key
    client.delete(f"/v1/loaders/{key}")


def hostile_lists(key: str) -> dict[str, bytes]:
    """Return bodies that are not valid index lists."""
    frame = index_lists(key, 1, 4)
    address = codec.BatchId(key, 0, 0)
    return {
        "nothing": b"",
        "no frame": b"\xc0" * 1000,
        "cut": frame[:-5],
        "twice": frame + frame,
        "another's": index_lists("0" * 32, 1, 4),
        "trailing": frame + b"x",
        "too many": index_lists(key, 4097, 1),
        "forged size": b"\xdd\xff\xff\xff\xff" + b"\xc0" * 10_000,
        "forged map": b"\xdf\xff\xff\xff\xff" + b"\xc0" * 10_000,
        "deep": b"\x91" * 5000,
        "deep frame": frame[:34] + b"\x91" * 5000,
        "extension": msgpack.packb(msgpack.ExtType(42, b"cos\nsystem\n(S'id'\ntR.")),
        "bad text": b"\xa4\xff\xff\xff\xff" * 100,
        "not indices": codec.to_bytes(address, {"a": [1, 2]}),
        "floats": codec.to_bytes(address, np.zeros(4)),
        "beyond": codec.to_bytes(address, np.array([2**62])),
    }


@pytest.mark.parametrize("name", hostile_lists("0" * 32))
def test_invalid_index_lists_are_rejected(client: httpx.Client, own_order: str, name: str) -> None:
    """Invalid index lists are rejected with a 4xx status, or result in a failure of their batch."""
    body = hostile_lists(own_order)[name]
    response = client.post(f"/v1/loaders/{own_order}/epochs/0/batches", content=body)
    if response.status_code == 200:
        frame = codec.read(codec.Bits(np.frombuffer(response.content, np.uint8)))
        assert isinstance(frame.content, codec.Failure), name
        assert name in ("not indices", "floats", "beyond")
        return
    _is_refused(response)


def test_a_list_of_a_hundred_million_indices_is_not_read(server: ServerProcess, own_order: str) -> None:
    """Long lists are rejected with 413: before the body if it declares its size, else at the first large frame."""
    path = f"POST /v1/loaders/{own_order}/epochs/0/batches HTTP/1.1\r\n".encode() + HOST
    with Raw(server.url) as stated, Raw(server.url) as chunked:
        stated.send(path + b"Content-Length: 800000000\r\n\r\n")
        assert stated.receive().status == 413
        chunked.send(path + b"Transfer-Encoding: chunked\r\n\r\n")
        frame = codec.to_bytes(codec.BatchId(own_order, 0, 0), np.zeros(10**8, np.int8), checksum=False)
        for start in range(0, len(frame), MIB):
            piece = frame[start : start + MIB]
            chunked.send(b"%x\r\n" % len(piece) + piece + b"\r\n")
        response = chunked.receive()
        assert (response.status, response.problem["code"]) == (422, "InvalidSpec")
        assert "exceeds the limit" in response.problem["detail"]


def test_the_memory_of_all_bodies_is_limited(server: ServerProcess, own_order: str) -> None:
    """The memory of all request bodies is limited, even if clients never complete them."""
    path = f"POST /v1/loaders/{own_order}/epochs/0/batches HTTP/1.1\r\n".encode() + HOST
    lists = index_lists(own_order, 7, 2**20)
    with contextlib.ExitStack() as stack:
        senders = [stack.enter_context(Raw(server.url)) for _ in range(6)]
        for sender in senders:
            sender.send(path + b"Content-Length: 67108864\r\n\r\n" + lists)
        refused = [sender for sender in senders if sender.is_open() and _has_answer(sender)]
        assert refused
        response = refused[0].receive()
        assert (response.status, response.problem["code"]) == (503, "ServerUnavailable")
        assert response.headers["retry-after"]


def _has_answer(client: Raw) -> bool:
    client.socket.settimeout(0.2)
    try:
        return client.socket.recv(1, 2) != b""
    except TimeoutError:
        return False
    finally:
        client.socket.settimeout(30)


def registration(seed: int) -> bytes:
    """Return the body of another loader's registration."""
    spec = json.dumps({"dataset": "numbers", "seed": seed, "shuffle": True}).encode()
    return b"POST /v1/loaders HTTP/1.1\r\n" + HOST + f"Content-Length: {len(spec)}\r\n\r\n".encode() + spec


def test_the_memory_of_registered_loaders_is_limited(server: ServerProcess) -> None:
    """The server does not keep every spec that was ever registered."""
    before = psutil.Process(server.pid).memory_info().rss
    with Raw(server.url) as client:
        for first in range(0, 10_000, 10):
            client.send(b"".join(registration(seed) for seed in range(first, first + 10)))
            assert all(client.receive().status == 200 for _ in range(10))
    assert psutil.Process(server.pid).memory_info().rss - before < 64 * MIB


def _is_refused(response: httpx.Response) -> None:
    assert 400 <= response.status_code < 500, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert len(response.content) < 14_000
    assert response.json()["detail"]
    assert response.elapsed.total_seconds() < 5
