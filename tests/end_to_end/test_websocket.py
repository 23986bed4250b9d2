"""Batches over a WebSocket, with a client that does not use teleloader's code."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Response
from websockets.sync.client import ClientConnection, connect

from teleloader_server import serve
from teleloader_shared import codec
from teleloader_shared.codec import BatchId
from tests.conftest import ServerProcess, StartServer, eventually
from tests.end_to_end import hosted
from tests.end_to_end.test_access import TokenTable
from tests.raw import Raw

UNKNOWN = BatchId("0" * 32, 0, 0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Run a server with datasets of 40 to 64 samples; return its URL."""
    datasets = {"dict": hosted.samples["dict"], "failing": hosted.failing(), "heavy": hosted.heavy}
    with serve(datasets, num_workers=2) as url:
        yield url


def register(url: str, **spec: Any) -> str:
    """Return the key of a new loader."""
    answer = httpx.post(f"{url}/v1/loaders", json={"batch_size": 8, **spec}, trust_env=False)
    key: str = answer.raise_for_status().json()["key"]
    return key


@contextmanager
def stream(url: str, key: str, **headers: str) -> Iterator[ClientConnection]:
    """Open a connection for a loader."""
    where = f"{url.replace('http', 'ws')}/v1/loaders/{key}/stream"
    with connect(where, additional_headers=headers, max_size=None, compression=None, proxy=None) as socket:
        yield socket


def send_range(socket: ClientConnection, epoch: int, start: int, stop: int) -> None:
    """Request a range."""
    socket.send(msgpack.packb([epoch, start, stop]))


def frames(socket: ClientConnection, count: int) -> list[codec.Frame]:
    """Receive a number of frames, whatever their distribution over messages."""
    found: list[codec.Frame] = []
    while len(found) < count:
        message = socket.recv(30)
        assert isinstance(message, bytes), message
        found += codec.read_all(codec.Bits(np.frombuffer(message, np.uint8)))
    return found


def refusal(socket: ClientConnection) -> tuple[dict[str, Any], int]:
    """Return the problem that arrives as text, and the connection's close code after it."""
    message = socket.recv(30)
    assert isinstance(message, str), message
    with pytest.raises(ConnectionClosed) as closed:
        socket.recv(30)
    assert closed.value.rcvd is not None
    return json.loads(message), closed.value.rcvd.code


def test_the_batches_are_those_of_http(url: str) -> None:
    """Batches equal those over HTTP byte for byte, in the order of the requests, across epochs."""
    key = register(url, dataset="dict", shuffle=True, seed=3)
    with stream(url, key) as socket:
        for epoch, start, stop in (ranges := [(0, 2, 5), (7, 0, 1), (0, 0, 7)]):
            send_range(socket, epoch, start, stop)
        received = b""
        wanted = b"".join(
            httpx.get(
                f"{url}/v1/loaders/{key}/epochs/{epoch}/batches", params={"ranges": f"{start}:{stop}"}, trust_env=False
            ).content
            for epoch, start, stop in ranges
        )
        while len(received) < len(wanted):
            message = socket.recv(30)
            assert isinstance(message, bytes)
            received += message
    assert received == wanted


def test_a_message_requests_several_ranges(url: str) -> None:
    """A message with several ranges returns exactly their batches, in order."""
    key = register(url, dataset="dict", shuffle=True, seed=4)
    with stream(url, key) as socket:
        socket.send(msgpack.packb([3, 1, 3, 4, 5, 6, 7]))
        send_range(socket, 3, 0, 1)
        assert [frame.batch_id for frame in frames(socket, 5)] == [BatchId(key, 3, k) for k in (1, 2, 4, 6, 0)]


def test_large_batches_arrive_whole(url: str) -> None:
    """Each large batch is one message, sent directly from the workers' memory."""
    with stream(url, register(url, dataset="heavy", batch_size=2)) as socket:
        send_range(socket, 0, 0, 5)
        for k in range(5):
            message = socket.recv(30)
            assert isinstance(message, bytes)
            frame = codec.read(codec.Bits(np.frombuffer(message, np.uint8)))
            assert frame.batch_id.batch == k
            assert frame.content[0].tobytes() == bytes([2 * k]) * 8 * 2**20
            assert frame.content[1][-1] == 2 * k + 1


def records(url: str) -> dict[str, Any]:
    """Return the current /stats."""
    found: dict[str, Any] = httpx.get(f"{url}/stats", trust_env=False).json()
    return found


def made(url: str) -> int:
    """Return the number of computed batches."""
    return sum(worker["batches"] for worker in records(url)["workers"])


def test_only_requested_batches_are_computed(url: str) -> None:
    """Only requested batches are computed, and /stats lists the consumer."""
    key = register(url, dataset="dict", seed=11)
    before = made(url)
    with stream(url, key, **{"Teleloader-Consumer": "frugal"}) as socket:
        for start, stop in ((0, 2), (2, 3), (3, 6)):
            send_range(socket, 5, start, stop)
            frames(socket, stop - start)
            (mine,) = (found for found in records(url)["consumers"] if found["consumer"] == "frugal")
            assert (mine["epoch"], mine["position"]) == (5, stop)
        eventually(lambda: made(url) == before + 6)


def test_index_lists_are_requests_too(url: str) -> None:
    """Frames of a client-side sampler are as in the body of the POST, one or several per message."""
    key = register(url, dataset="dict", order="client", session="mine", batch_size=2)
    lists = [codec.to_bytes(BatchId(key, 0, k), [k, 2 * k], checksum=False) for k in range(5)]
    with stream(url, key) as socket:
        socket.send(lists[0])
        socket.send(b"".join(lists[1:4]))
        socket.send(lists[4])
        socket.send(lists[0] + lists[2] + lists[4])
        labels = [frame.content["label"].tolist() for frame in frames(socket, 8)]
    assert labels == [[k, 2 * k] for k in (0, 1, 2, 3, 4, 0, 2, 4)]


def test_a_failure_takes_the_place_of_its_batch(url: str) -> None:
    """Later batches arrive normally."""
    with stream(url, register(url, dataset="failing", batch_size=10)) as socket:
        send_range(socket, 0, 0, 4)
        contents = [frame.content for frame in frames(socket, 4)]
    assert isinstance(contents[1], codec.Failure)
    assert "sample 17 is damaged" in contents[1].message
    assert [content.tolist() for content in contents[2:]] == [list(range(20, 30)), list(range(30, 40))]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("text", "binary message"),
        (b"", "expected a msgpack array of"),
        (msgpack.packb(5), "expected a msgpack array of"),
        (msgpack.packb([0, 1]), "0.5 ranges in a request"),
        (msgpack.packb([0, True, 2]), "2**62"),
        (msgpack.packb([-1, 0, 1]), "2**62"),
        (msgpack.packb([0, 0, 2**63]), "2**62"),
        (msgpack.packb([0, 3, 3]), "3 after 3"),
        (msgpack.packb([0]), "expected 1 to 128"),
        (msgpack.packb([0, 0, 1, 2]), "1.5 ranges"),
        (msgpack.packb([0, 0, 2, 1, 3]), "1 after 2"),
        (msgpack.packb([0, 0, 2, 2, 3]), "Join adjacent ranges"),
        (msgpack.packb([0, *range(2 * 129)]), "129 ranges in a request: expected 1 to 128"),
        (msgpack.packb([0, 0, 1, 2**61, 2**61 + 1]), "batch 2305843009213693952"),
        (msgpack.packb([0, 0, 4000, 2**61, 2**61 + 97]), "4,096"),
        (msgpack.packb([0, 0, 4097]), "4,096"),
        (msgpack.packb([0, 0, 999]), "batch 998"),
        (b"\x91" * 2000, "expected a msgpack array of"),
        (b"\xdd\xff\xff\xff\xff", "expected a msgpack array of"),
        (codec.to_bytes(UNKNOWN, [1, 2], checksum=False), "expected a msgpack array of"),
    ],
)
def test_an_invalid_request_ends_the_connection(url: str, message: str | bytes, said: str) -> None:
    """The connection is closed with a problem and code 1008; other connections are not affected."""
    key = register(url, dataset="dict")
    with stream(url, key) as other, stream(url, key) as socket:
        socket.send(message)
        problem, code = refusal(socket)
        assert code == 1008
        assert said in problem["detail"]
        assert problem["status"] in (404, 422)
        send_range(other, 0, 0, 1)
        assert frames(other, 1)[0].batch_id.batch == 0


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        (b"nonsense", "invalid body"),
        (b"", "empty body"),
        (msgpack.packb([0, 0, 1]), "invalid body"),
        (codec.to_bytes(UNKNOWN, [1, 2], checksum=False), "this connection is for"),
    ],
)
def test_index_lists_that_cannot_be_are_refused(url: str, lists: bytes, said: str) -> None:
    """Invalid index lists are rejected as in the POST."""
    with stream(url, register(url, dataset="dict", order="client", session="wrong")) as socket:
        socket.send(lists)
        problem, code = refusal(socket)
        assert (problem["code"], code) == ("InvalidSpec", 1008)
        assert said in problem["detail"]


def test_an_unknown_loader_is_reported_at_once(url: str) -> None:
    """The client may then register the loader again."""
    with stream(url, "nobody") as socket:
        problem, code = refusal(socket)
    assert (problem["status"], problem["code"], code) == (404, "UnknownLoader", 1008)


@pytest.mark.parametrize("message", [b"x" * (256 * 1024 + 1), [b"x"] * 100], ids=["large", "in many fragments"])
def test_a_message_has_a_limit(url: str, message: bytes | list[bytes]) -> None:
    """The size of a message, and the number of its fragments, are limited."""

    def converse(socket: ClientConnection) -> None:
        socket.send(message)  # which may be refused before its end
        socket.recv(30)

    with stream(url, register(url, dataset="dict")) as socket, pytest.raises(ConnectionClosed) as closed:
        converse(socket)
    # who still sends when the connection is closed may lose the code
    assert closed.value.rcvd is None or closed.value.rcvd.code == 1009


def test_a_disconnected_client_requests_nothing_more(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Batches that no worker has started are not computed after the client disconnects."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))
    server = start_server("tests.end_to_end.hosted:slow", "--num-workers", "1")
    with stream(server.url, register(server.url, dataset="slow", batch_size=1)) as socket:
        send_range(socket, 0, 0, 8)
        eventually(lambda: any(worker["state"] == "busy" for worker in server.stats()["workers"]))
    eventually(lambda: server.stats()["server"]["connections"] == 1)
    gate.touch()
    eventually(lambda: all(worker["state"] == "idle" for worker in server.stats()["workers"]))
    assert made(server.url) < 8


def test_a_stopping_server_completes_pending_requests(start_server: StartServer) -> None:
    """The server responds to pending requests, accepts no new ones, and closes with code 1012."""
    server = start_server("tests.end_to_end.hosted:unhurried", "--num-workers", "1")
    key = register(server.url, dataset="unhurried", batch_size=100)
    with stream(server.url, key) as socket, stream(server.url, key) as idle:
        send_range(socket, 0, 0, 3)
        frames(socket, 1)
        server.process.send_signal(signal.SIGTERM)
        assert [frame.batch_id.batch for frame in frames(socket, 2)] == [1, 2]
        for connection in (socket, idle):
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv(30)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012
    assert server.process.wait(10) == 0


def test_index_lists_that_are_kept_have_a_limit(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The limit includes the bodies of requests; further lists wait, and are processed in order."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))
    server = start_server(
        "tests.end_to_end.hosted:slow", "--num-workers", "1", "--limit", "max_buffered_request_bytes=5000"
    )
    key = register(server.url, dataset="slow", order="client", session="long", batch_size=2)
    lists = [codec.to_bytes(BatchId(key, 0, k), [k % 8] * 500, checksum=False) for k in range(30)]
    assert 500 < len(lists[0]) < 2500
    body = json.dumps({"dataset": "slow", "batch_size": 8, "version": "x" * (5000 - len(lists[0]))})
    with stream(server.url, key) as socket:
        for frame in lists:
            socket.send(frame)

        def refused() -> bool:
            answer = httpx.post(f"{server.url}/v1/loaders", content=body, trust_env=False)
            return answer.status_code == 503 and "max_buffered_request_bytes" in answer.json()["detail"]

        eventually(refused)
        gate.touch()
        assert [frame.batch_id.batch for frame in frames(socket, 30)] == list(range(30))
        assert not refused()
        socket.send(codec.to_bytes(BatchId(key, 0, 30), np.ones(2000, np.int64), checksum=False))
        problem, code = refusal(socket)
        assert (problem["code"], code) == ("ServerUnavailable", 1012)
        assert "max_buffered_request_bytes" in problem["detail"]


TOKENS = """
[all]
token = "a-token-for-all-datasets"
scopes = ["read", "stats"]

[other]
token = "a-token-for-another-dataset"
scopes = ["read:many"]
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Run a server with tokens; yield it with a loader's key."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    path.touch(0o600)
    path.write_text(TOKENS)
    server = ServerProcess(
        "--port", "0", "tests.end_to_end.hosted:numbers", "--num-workers", "1", "--tokens", str(path)
    )
    authorized = {"Authorization": "Bearer a-token-for-all-datasets"}
    answer = httpx.post(
        f"{server.url}/v1/loaders", json={"dataset": "numbers", "batch_size": 8}, headers=authorized, trust_env=False
    )
    yield server.url, answer.raise_for_status().json()["key"]
    assert server.end() == 0


def denial(url: str, key: str, **headers: str) -> Response:
    """Return the response to a handshake that the server refuses."""
    with pytest.raises(InvalidStatus) as refused, stream(url, key, **headers):
        pass
    return refused.value.response


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 401, "Unauthorized"),
        ({"Authorization": "Bearer nothing-of-this-server"}, 401, "Unauthorized"),
        ({"Authorization": "Bearer a-token-for-another-dataset"}, 403, "Forbidden"),
        ({"Authorization": "Bearer a-token-for-all-datasets", "Origin": "http://evil.example"}, 403, "CrossSite"),
    ],
)
def test_a_handshake_that_is_not_authorized_is_refused(
    guarded: tuple[str, str], headers: dict[str, str], status: int, code: str
) -> None:
    """The response equals that of other requests; cross-site handshakes, which browsers allow, are rejected."""
    response = denial(*guarded, **headers)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["x-content-type-options"] == "nosniff"
    problem = json.loads(response.body)
    assert (problem["status"], problem["code"]) == (status, code)
    assert response.headers["x-request-id"] == problem["request"]


def test_a_handshake_for_another_server_is_refused(guarded: tuple[str, str]) -> None:
    """A handshake with an unknown Host is rejected with 421, with a token too."""
    url, key = guarded
    with Raw(url) as client:
        client.send(
            f"GET /v1/loaders/{key}/stream HTTP/1.1\r\nHost: evil.example\r\n".encode()
            + b"Authorization: Bearer a-token-for-all-datasets\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            + b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        answer = client.receive()
        assert (answer.status, answer.problem["code"]) == (421, "UnknownHost")
        assert client.receive_all() == b""


def test_a_token_opens_the_stream(guarded: tuple[str, str]) -> None:
    """A token for the dataset authorizes the stream."""
    with stream(*guarded, Authorization="Bearer a-token-for-all-datasets") as socket:
        send_range(socket, 0, 0, 1)
        assert frames(socket, 1)[0].batch_id.batch == 0


@pytest.mark.parametrize("instead", [None, ("read:other",)], ids=["removed", "for another dataset"])
def test_a_token_that_is_taken_away_ends_the_stream(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, instead: tuple[str, ...] | None
) -> None:
    """After the revocation nothing is sent, not even for earlier requests."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))
    table = TokenTable(tmp_path / "tokens.toml")
    table.add("other")
    token = table.add("first")
    server = start_server("tests.end_to_end.hosted:slow", "--num-workers", "1", "--tokens", table.write())
    authorized = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=server.url, headers=authorized, trust_env=False) as client:
        answer = client.post("/v1/loaders", json={"dataset": "slow", "batch_size": 1})
        key = answer.raise_for_status().json()["key"]
        with stream(server.url, key, **authorized) as socket:
            send_range(socket, 0, 0, 8)
            eventually(lambda: client.get("/stats").json()["workers"][0]["state"] == "busy")
            table.remove("first")
            if instead is not None:
                table.add("first", *instead, token=f'"{token}"')
            table.write()
            eventually(lambda: client.get(f"/v1/loaders/{key}").status_code == (401 if instead is None else 403))
            gate.touch()
            problem, code = refusal(socket)
    assert (problem["code"], code) == ("Unauthorized" if instead is None else "Forbidden", 1008)


def test_the_log_shows_no_token(start_server: StartServer, tmp_path: Path) -> None:
    """The log contains no token at any level."""
    table = TokenTable(tmp_path / "tokens.toml")
    token = table.add("first")
    server = start_server(
        "tests.end_to_end.hosted:numbers", "--num-workers", "1", "--log-level", "debug", "--tokens", table.write()
    )
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        client.post("/session", json={"token": token}).raise_for_status()
        (cookie,) = client.cookies.items()
        for headers in ({"Authorization": f"Bearer {token}"}, {"Cookie": "=".join(cookie)}):
            with stream(server.url, "nobody", **headers) as socket:
                assert refusal(socket)[0]["code"] == "UnknownLoader"
    assert server.end() == 0
    log = "".join(server.log)
    assert "DEBUG" in log
    assert token not in log
    assert cookie[1] not in log
