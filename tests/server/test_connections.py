"""Connection limits: timeouts, sizes, rates and counts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import httpx
import msgpack
import numpy as np
import pytest
import uvloop

from teleloader_server import serve
from teleloader_server.auth.authenticator import Authenticator
from teleloader_server.config import ConfigError
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.limits import ClientLimits, Limits
from teleloader_server.loading.datasets import host
from teleloader_server.permissions import ANYONE
from teleloader_server.web.app import Server, bind, create_app, url_of
from teleloader_server.web.guard import Connection
from teleloader_server.web.guard_manager import ConnectionManager, ManagedConnection, connections_for
from teleloader_server.web.lifecycle import Lifecycle
from teleloader_server.web.websocket import PIECE_BYTES, WebSocketConnection
from teleloader_server.workers.factory import ObjectPools
from tests.conftest import eventually
from tests.raw import HOST, Raw

MEGABYTES = 16
"""Size of a batch, larger than the buffers of two kernels."""
QUICK = ClientLimits(
    max_connections=1000,
    header_timeout=0.4,
    body_timeout=0.4,
    max_body_bytes=2**20,
    send_timeout=0.4,
    lingering_time=0.4,
)


class Images:
    """Dataset with large samples."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        return np.full(MEGABYTES * 2**20, index, np.uint8)


class Running:
    """Server in a thread, with the given limits."""

    def __init__(self, limits: ClientLimits) -> None:
        self.limits = limits
        pool = Limits(num_workers=0)
        hosted = host(Images(), name="images", collate=lambda samples: samples[0])
        self.service = LoaderService(ObjectPools(lambda: {"images": hosted}, pool), pool, limits)
        bound = bind("127.0.0.1", 0)
        self.url = url_of(bound)
        self._server = Server(self.service, "127.0.0.1", 0, grace=1)
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(bound,))
        self._thread.start()
        self._listening.wait(30)

    def register(self) -> str:
        """Register a loader, and return the path of its batches."""
        spec = {"dataset": "images", "checksum": False}
        key = httpx.post(f"{self.url}/v1/loaders", json=spec).raise_for_status().json()["key"]
        return f"/v1/loaders/{key}/epochs/0/batches"

    def connections(self) -> list[ManagedConnection]:
        """Return the open connections."""
        return list(self._server._connections.connections)

    def unfinished(self) -> int:
        """Bytes that count as unfinished WebSocket messages."""
        return self._server._connections.unfinished._held.total()

    def stop(self) -> None:
        """Stop the server."""
        self._loop.call_soon_threadsafe(setattr, self._server, "should_exit", True)
        self._thread.join()

    def _run(self, bound: socket.socket) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self.service.start()
            serving = asyncio.create_task(self._server.serve([bound]))
            await self._server.listening.wait()
            self._listening.set()
            await serving
            await self.service.close()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start servers with short limits, except the given ones."""
    with contextlib.ExitStack() as stack:

        def begin(**limits: Any) -> Running:
            running = Running(dataclasses.replace(QUICK, **limits))
            stack.callback(running.stop)
            return running

        yield begin


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """URL of a server with short limits."""
    running = Running(QUICK)
    yield running.url
    running.stop()


def test_a_silent_connection_is_closed_after_header_timeout(url: str) -> None:
    """The connection is closed without a response, and not before the timeout."""
    with Raw(url) as client:
        began = time.monotonic()
        assert client.receive_all() == b""
        assert time.monotonic() - began >= QUICK.header_timeout


def test_a_slow_head_is_rejected_after_header_timeout(url: str) -> None:
    """Further bytes do not extend the deadline."""
    with Raw(url) as client:
        for byte in itertools.cycle(b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 10_000):
            client.send(bytes([byte]))
            time.sleep(0.02)
            if client.socket in _readable([client.socket]):
                break
        response = client.receive()
        assert (response.status, response.problem["code"]) == (408, "RequestTimeout")
        assert response.headers["connection"] == "close"


def _readable(sockets: list[socket.socket]) -> list[socket.socket]:
    import select

    return select.select(sockets, [], [], 0)[0]


def test_each_head_of_a_connection_has_its_own_deadline(url: str) -> None:
    """The deadline is relative to the head's first byte: a connection that waits for a request does not time out."""
    with Raw(url) as client:
        assert client.get("/healthz").status == 200
        time.sleep(3 * QUICK.header_timeout)
        assert client.get("/healthz").status == 200
        client.send(b"GET /hea")
        assert client.receive().status == 408
        assert client.receive_all() == b""


HEADS = {
    "one long header": (b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: " + b"x" * 8 * 2**20, 431),
    "many headers": (b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: y\r\n" * 20_000, 431),
    "a long name": (b"GET /healthz HTTP/1.1\r\n" + HOST + b"x" * 100_000, 431),
    "a long request line": (b"GET /" + b"x" * 2**20, 414),
    "a long URL": (b"GET /" + b"%41" * 3_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", 414),
    "empty lines": (b"\r\n" * 50_000, 431),
}


@pytest.mark.parametrize("piece", [1000, 2**24], ids=["in pieces", "at once"])
@pytest.mark.parametrize("name", HEADS)
def test_the_size_of_a_head_is_limited(start: Start, name: str, piece: int) -> None:
    """However the head arrives, and whether or not the parser reports anything about it."""
    data, status = HEADS[name]
    with Raw(start(header_timeout=30).url) as client:
        for begin in range(0, min(len(data), 200_000 if piece == 1000 else len(data)), piece):
            client.send(data[begin : begin + piece])
        assert client.receive().status == status
        assert client.receive_all() == b""


def test_a_head_below_the_limit_is_accepted(start: Start) -> None:
    """A head of 60 KiB is accepted, at once and in pieces."""
    with Raw(start(header_timeout=30).url) as client:
        for piece in (1000, 2**16):
            head = b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: " + b"x" * 60 * 1024 + b"\r\n\r\n"
            for begin in range(0, len(head), piece):
                client.send(head[begin : begin + piece])
            assert client.receive().status == 200


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
def test_a_body_with_a_content_length_above_the_limit_is_rejected(url: str, method: str) -> None:
    """The status is 413, before the server reads any of the body."""
    with Raw(url) as client:
        client.send(f"{method} /v1/loaders HTTP/1.1\r\n".encode() + HOST + b"Content-Length: 268435456\r\n\r\n")
        response = client.receive()
        assert (response.status, response.problem["code"]) == (413, "BodyTooLarge")
        assert client.receive_all() == b""


@pytest.mark.parametrize("path", ["/v1/loaders", "/nothing"])
def test_a_chunked_body_above_the_limit_is_rejected(url: str, path: str) -> None:
    """The body is rejected even if the endpoint does not read bodies: the server never stores more than the limit."""
    chunk = b"10000\r\n" + b"x" * 2**16 + b"\r\n"
    with Raw(url) as client:
        client.send(f"POST {path} HTTP/1.1\r\n".encode() + HOST + b"Transfer-Encoding: chunked\r\n\r\n")
        client.send(200 * chunk)
        response = client.receive()
        assert response.status == (413 if path == "/v1/loaders" else 404)
        assert client.receive_all() == b""


@pytest.mark.parametrize("sent", [b"", b"{"], ids=["nothing", "one byte"])
def test_a_body_slower_than_min_body_rate_is_rejected(url: str, sent: bytes) -> None:
    """The rate is measured over `body_timeout`."""
    with Raw(url) as client:
        client.send(b"POST /v1/loaders HTTP/1.1\r\n" + HOST + b"Content-Length: 1000\r\n\r\n" + sent)
        response = client.receive()
        assert (response.status, response.problem["code"]) == (408, "RequestTimeout")
        assert client.receive_all() == b""


def test_a_body_at_min_body_rate_is_accepted(start: Start) -> None:
    """The body is accepted however long it takes."""
    with Raw(start(min_body_rate=1000.0).url) as client:
        client.send(b"POST /v1/loaders HTTP/1.1\r\n" + HOST + b"Content-Length: 12000\r\n\r\n")
        for _ in range(12):
            client.send(b" " * 1000)
            time.sleep(0.1)
        assert client.receive().problem["detail"].startswith("invalid request body: expected JSON")


def test_the_rest_of_a_body_is_discarded_after_an_early_response(url: str) -> None:
    """A request that is rejected before its body was read does not close the connection."""
    with Raw(url) as client:
        client.send(b"POST /v1/loaders/x/epochs/0/batches HTTP/1.1\r\n" + HOST + b"Content-Length: 900000\r\n\r\n")
        assert client.receive().problem["code"] == "UnknownLoader"
        client.send(b"x" * 900_000)
        assert client.get("/healthz").status == 200


def test_a_connection_is_closed_if_100_continue_was_not_sent(start: Start) -> None:
    """The client may omit the body, so the server could not find the start of the next request."""
    with Raw(start(body_timeout=30).url) as client:
        head = HOST + b"Expect: 100-continue\r\nContent-Length: 900000\r\n\r\n"
        client.send(b"POST /v1/loaders/x/epochs/0/batches HTTP/1.1\r\n" + head)
        assert client.receive().problem["code"] == "UnknownLoader"
        assert client.receive_all() == b""


def test_the_number_of_connections_is_limited(start: Start) -> None:
    """Further connections get an error and are closed; a closed connection makes room for another."""
    running = start(max_connections=3, header_timeout=10)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Raw(running.url)) for _ in range(3)]
        for client in clients:
            assert client.get("/v1/datasets").status == 200
        with Raw(running.url) as refused:
            response = refused.receive()
            assert (response.status, response.problem["code"]) == (503, "ServerUnavailable")
            assert response.headers["retry-after"]
            assert refused.receive_all() == b""
        for client in clients:
            assert client.get("/healthz").status == 200
        clients[0].socket.close()

        def has_room() -> bool:
            with Raw(running.url) as another:
                return another.get("/healthz").status == 200

        eventually(has_room)


def test_a_client_that_does_not_read_is_disconnected(start: Start) -> None:
    """The memory of its response is released."""
    running = start()
    path = running.register()
    with Raw(running.url, buffer=4096) as client:
        client.send_get(f"{path}/0")
        eventually(lambda: running.service.quotas.sending >= MEGABYTES * 2**20)
        eventually(lambda: running.service.quotas.sending == 0)
        assert len(client.receive_all()) < MEGABYTES * 2**20


@pytest.mark.parametrize("query", ["/0", "?ranges=0:2"], ids=["one batch", "a stream"])
def test_a_client_that_reads_slowly_is_not_disconnected(start: Start, query: str) -> None:
    """Reading one byte within `send_timeout`, also from the kernel's buffer, is sufficient."""
    running = start(send_timeout=0.8)
    path = running.register()
    with Raw(running.url, buffer=2**18) as client:
        client.send_get(path + query, b"Connection: close\r\n")
        time.sleep(0.4)
        got = 0
        began = time.monotonic()
        while data := client.socket.recv(2**17):
            got += len(data)
            if time.monotonic() - began < 2:
                time.sleep(0.1)
        assert got >= MEGABYTES * 2**20 * (1 if query == "/0" else 2)


def test_pressure_send_timeout_applies_when_memory_is_short(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory budget does not include responses in transit, so their memory must be limited."""
    running = start(send_timeout=1000.0, pressure_send_timeout=0.2)
    path = running.register()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Raw(running.url, buffer=4096)) for _ in range(4)]
        for k, client in enumerate(clients):
            client.send_get(f"{path}/{k}")
        eventually(lambda: running.service.quotas.sending >= 4 * MEGABYTES * 2**20)
        time.sleep(0.6)
        assert running.service.quotas.sending >= 4 * MEGABYTES * 2**20, "there is room"
        monkeypatch.setattr("teleloader_server.dispatch.quotas.MIN_SENDING", 2**20)
        running.service.quotas.of(ANYONE).memory = 2**20
        eventually(lambda: running.service.quotas.sending == 0)


def test_pipelined_requests_get_responses_in_order(url: str) -> None:
    """Pipelined requests get their responses in order."""
    with Raw(url) as client:
        for path in ("/healthz", "/nothing", "/readyz"):
            client.send_get(path)
        assert [client.receive().status for _ in range(3)] == [200, 404, 200]


def test_the_number_of_pipelined_requests_is_limited(url: str) -> None:
    """They take more memory on the server than on the client."""
    with Raw(url) as client:
        client.send((b"GET /stats HTTP/1.1\r\n" + HOST + b"\r\n") * 1000)
        assert client.receive_all().count(b"HTTP/1.1 200") <= QUICK.max_pipelined


def test_all_requests_of_a_broken_connection_end(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """All pipelined requests end: workers stop computing for the client, and no error is logged."""
    running = start()
    path = running.register()
    with Raw(running.url, buffer=4096) as client:
        client.send_get(f"{path}?ranges=0:200")
        client.send_get("/healthz")
        eventually(lambda: running.service.quotas.sending > 0)
    stats = f"{running.url}/stats"
    eventually(lambda: running.service.quotas.sending == 0)

    def computed() -> int:
        found: int = httpx.get(stats).json()["datasets"][0]["batches_computed"]
        return found

    before = -1
    while (now := computed()) != before:
        before = now
        time.sleep(0.1)
    assert now < 100
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


MALFORMED = {
    "garbage": b"\x00\x01\x02garbage\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303") + b"\0" * 100,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an unknown method": b"FROB /healthz HTTP/1.1\r\n" + HOST + b"\r\n",
    "CONNECT": b"CONNECT x:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "no path": b"GET ?x HTTP/1.1\r\n" + HOST + b"\r\n",
    "NUL": b"GET /\0 HTTP/1.1\r\n" + HOST + b"\r\n",
    "not ASCII": "GET /ü HTTP/1.1\r\n".encode() + HOST + b"\r\n",
    "a bare CR": b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: a\rSet-Cookie: b\r\n\r\n",
    "a bare LF": b"GET /healthz HTTP/1.1\nHost: x\n\n",
    "both lengths": b"POST /v1/loaders HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST /v1/loaders HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "a negative length": b"POST /v1/loaders HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    "a huge length": b"POST /v1/loaders HTTP/1.1\r\nContent-Length: " + b"9" * 40 + b"\r\n\r\n",
    "a bad chunk": b"POST /v1/loaders HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "no Host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET /healthz HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    "two Hosts in HTTP/1.0": b"GET /healthz HTTP/1.0\r\n" + HOST + HOST + b"\r\n",
    "an empty Host": b"GET /healthz HTTP/1.1\r\nHost: \r\n\r\n",
    "WebSocket": b"GET /stats HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_rejected(url: str, name: str) -> None:
    """The status is 400 with a message, and the connection is closed."""
    with Raw(url) as client:
        client.send(MALFORMED[name])
        response = client.receive()
        assert (response.status, response.problem["code"]) == (400, "BadRequest")
        assert response.headers["connection"] == "close"
        assert client.receive_all() == b""


@pytest.mark.parametrize("version", ["2.0", "0.9"])
def test_other_versions_of_http_are_rejected(url: str, version: str) -> None:
    """The status is 505 for versions other than 1.0 and 1.1, and the connection is closed."""
    with Raw(url) as client:
        client.send(f"GET /healthz HTTP/{version}\r\n".encode() + HOST + b"\r\n")
        response = client.receive()
        assert (response.status, response.problem["code"]) == (505, "HttpVersionNotSupported")
        assert client.receive_all() == b""


def test_the_number_of_header_fields_is_limited(start: Start) -> None:
    """Beyond `max_headers`, the server responds with 431 before the end of the head."""
    running = start(max_headers=40, header_timeout=30)
    with Raw(running.url) as client:
        assert client.get("/healthz", b"".join(b"X-%d: y\r\n" % n for n in range(39))).status == 200
        client.send(b"GET /healthz HTTP/1.1\r\n" + HOST + b"a:\r\n" * 41)
        response = client.receive()
        assert (response.status, response.problem["code"]) == (431, "HeadTooLarge")
        assert "max_headers" in response.problem["detail"]
        assert client.receive_all() == b""


CHUNKED = b"POST /v1/loaders HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n"
FRAMING = {
    "trailers": b"0\r\n" + b"X: y\r\n" * 2**16,
    "one trailer": b"0\r\nX: " + b"y" * 2**18,
    "a chunk extension": b"1;x=" + b"y" * 2**18,
}


@pytest.mark.parametrize("piece", [1000, 2**24], ids=["in pieces", "at once"])
@pytest.mark.parametrize("name", FRAMING)
def test_trailers_and_chunk_extensions_are_limited(start: Start, name: str, piece: int) -> None:
    """The status is 431 once trailers or chunk extensions without content exceed `max_header_bytes`."""
    data = CHUNKED + FRAMING[name]
    with Raw(start(body_timeout=30).url) as client:
        for begin in range(0, len(data), piece):
            client.send(data[begin : begin + piece])
        response = client.receive()
        assert (response.status, response.problem["code"]) == (431, "HeadTooLarge")
        assert client.receive_all() == b""


def test_the_limit_of_chunk_extensions_restarts_with_content(start: Start) -> None:
    """A body of any length may contain some chunk extensions."""
    with Raw(start(body_timeout=30).url) as client:
        client.send(CHUNKED + (b"40;" + b"x" * 100 + b"\r\n" + b" " * 64 + b"\r\n") * 2000 + b"0\r\n\r\n")
        assert client.receive().problem["detail"].startswith("the body is too large for a loader spec")


def test_the_number_of_small_chunks_is_limited(start: Start) -> None:
    """A body may have 256 chunks of any size, and one more for each 64 bytes."""
    with Raw(start(body_timeout=30).url) as client:
        client.send(CHUNKED + b"1\r\n \r\n" * 256 + b"0\r\n\r\n")
        assert client.receive().problem["detail"].startswith("invalid request body: expected JSON")
        client.send(CHUNKED + b"1\r\n \r\n" * 300 + b"0\r\n\r\n")
        assert "send chunks of at least 64 bytes" in client.receive().problem["detail"]


def test_trailers_are_not_headers(start: Start) -> None:
    """A trailer is discarded: it neither authorizes a request nor sets its Host."""
    with serve([1], num_workers=0, token="a-token-of-the-tests") as url, Raw(url) as client:
        body = b'{"dataset": "dataset"}'
        for field in (b"Authorization: Bearer a-token-of-the-tests", b"Host: evil.example"):
            client.send(CHUNKED + b"%x\r\n%b\r\n0\r\n%b\r\n\r\n" % (len(body), body, field))
            response = client.receive()
            assert (response.status, response.problem["code"]) == (401, "Unauthorized")


def test_unauthenticated_connections_are_closed_for_new_ones(start: Start) -> None:
    """At the limit of an IP address or the server, the oldest connection without authenticated request is closed."""
    with (
        serve(
            [1], num_workers=0, token="a-token-of-the-tests", limits=ClientLimits(max_connections_per_address=3)
        ) as url,
        contextlib.ExitStack() as stack,
    ):
        trainer, silent, refused = (stack.enter_context(Raw(url)) for _ in range(3))
        assert trainer.get("/v1/datasets", b"Authorization: Bearer a-token-of-the-tests\r\n").status == 200
        assert refused.get("/v1/datasets").status == 401
        for closed in (silent, refused):
            newcomer = stack.enter_context(Raw(url))
            assert newcomer.get("/v1/datasets", b"Authorization: Bearer a-token-of-the-tests\r\n").status == 200
            assert closed.receive_all() == b""
        assert stack.enter_context(Raw(url)).receive().status == 503, "authenticated connections are not closed"


def test_the_memory_of_unfinished_heads_is_limited(start: Start) -> None:
    """Unauthenticated connections share `max_unauthenticated_bytes`; beyond it the oldest ones are closed."""
    running = start(max_unauthenticated_bytes=2**20, header_timeout=60)
    head = b"GET /v1/datasets HTTP/1.1\r\n" + HOST + b"X: " + b"x" * 50_000
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Raw(running.url)) for _ in range(40)]
        for client in clients:
            client.send(head)
        # more than 67 KB are counted for each
        eventually(lambda: sum(client.is_open() for client in clients) <= 15)
        assert clients[-1].is_open()
        clients[-1].send(b"\r\n\r\n")
        assert clients[-1].receive().status == 200


def test_each_header_field_counts_256_bytes_of_memory(start: Start) -> None:
    """Each field counts 256 bytes in addition to its length, as short fields use more memory than their bytes."""
    running = start(max_unauthenticated_bytes=2**20, header_timeout=60)
    head = b"GET /v1/datasets HTTP/1.1\r\n" + HOST + b"a:\r\n" * 120
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Raw(running.url)) for _ in range(30)]
        for client in clients:
            client.send(head)
        # each counts 55 KB, of which 30 KB are for its fields
        eventually(lambda: sum(client.is_open() for client in clients) <= 20)
        assert clients[-1].is_open()


def test_memory_of_finished_requests_is_not_counted(start: Start) -> None:
    """A connection without pending requests counts as idle, however much it has sent before."""
    running = start(max_unauthenticated_bytes=2**20, header_timeout=60)
    with Raw(running.url) as idle, Raw(running.url) as busy:
        for _ in range(100):
            assert busy.get("/healthz", b"X: " + b"x" * 30_000 + b"\r\n").status == 200
        assert idle.get("/healthz").status == 200


HANDSHAKE = (
    HOST
    + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    + b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def open_websocket(running: Running, client: Raw) -> None:
    """Open a WebSocket on a connection."""
    key = running.register().split("/")[3]
    client.send(f"GET /v1/loaders/{key}/stream HTTP/1.1\r\n".encode() + HANDSHAKE)
    assert client.receive().status == 101


def websocket(running: Running, client: Raw) -> None:
    """Open a WebSocket, and request four batches."""
    open_websocket(running, client)
    client.send(masked(0x82, msgpack.packb([0, 0, 4])))


def masked(opcode: int, content: bytes) -> bytes:
    """Return a frame of a client. Its mask of zeros changes nothing."""
    if len(content) < 126:
        return bytes([opcode, 0x80 | len(content)]) + bytes(4) + content
    return bytes([opcode, 0x80 | 126]) + len(content).to_bytes(2) + bytes(4) + content


def test_websocket_messages_are_parsed_on_demand(start: Start) -> None:
    """One read may contain 20,000 messages; waiting messages are stored as received bytes."""
    running = start(max_batches_per_request=1, send_timeout=60, header_timeout=60)
    with Raw(running.url, buffer=4096) as client:
        open_websocket(running, client)
        client.send(masked(0x82, msgpack.packb([0, 0, 1])) * 100_000)
        eventually(lambda: len(running.connections()) == 1)
        connection: Any = running.connections()[0]
        assert isinstance(connection, WebSocketConnection), "it has taken the place of the connection that it was"
        eventually(lambda: connection.read_paused and connection._unparsed)
        assert connection.queue.qsize() <= PIECE_BYTES // 6
        assert len(connection._unparsed) < 2**20


def test_the_memory_of_unfinished_messages_is_limited(start: Start) -> None:
    """A quarter of `max_buffered_request_bytes`; beyond it, a connection is closed with code 1012."""
    running = start(max_buffered_request_bytes=2**19, header_timeout=60, body_timeout=60)
    with contextlib.ExitStack() as stack:

        def begin() -> Raw:
            client = stack.enter_context(Raw(running.url))
            open_websocket(running, client)
            client.send(masked(0x02, b"x" * 30_000) + masked(0x00, b"x" * 60_000))
            return client

        first = begin()
        eventually(lambda: running.unfinished() >= 90_000)
        refused = begin()
        received = refused.receive_all()
        assert b"a quarter of max_buffered_request_bytes" in received
        assert received.endswith((1012).to_bytes(2))
        assert first.is_open()
        first.socket.close()
        eventually(lambda: running.unfinished() == 0)
        begin()
        eventually(lambda: running.unfinished() >= 90_000)


@pytest.mark.parametrize(
    "beginning",
    [masked(0x02, b"x"), masked(0x01, b"x"), masked(0x82, b"x" * 1000)[:20], masked(0x82, b"x")[:1]],
    ids=["a fragment", "a text fragment", "a part of a frame", "a part of a frame's head"],
)
def test_a_message_slower_than_min_body_rate_is_rejected(start: Start, beginning: bytes) -> None:
    """The connection is closed with code 1008."""
    running = start(header_timeout=60, send_timeout=60)
    with Raw(running.url) as idle, Raw(running.url) as client:
        open_websocket(running, idle)
        open_websocket(running, client)
        client.send(beginning)
        received = b""
        while not received.endswith((1008).to_bytes(2)):
            received += client.socket.recv(2**16)
        assert b"(min_body_rate)" in received
        assert idle.is_open()


def test_a_message_at_min_body_rate_is_accepted(start: Start) -> None:
    """The message is accepted even if it takes longer than `body_timeout`."""
    running = start(header_timeout=60, send_timeout=60, min_body_rate=10.0)
    with Raw(running.url) as client:
        open_websocket(running, client)
        frame = masked(0x82, b"x" * 60)
        for byte in frame:
            client.send(bytes([byte]))
            time.sleep(0.02)
        assert b"expected a msgpack array" in client.socket.recv(2**16)


@pytest.mark.parametrize("text", [b"\xff\xfe", b"text"], ids=["not UTF-8", "UTF-8"])
def test_text_messages_are_rejected(start: Start, caplog: pytest.LogCaptureFixture, text: bytes) -> None:
    """Any text message is rejected with a problem and code 1008, without a traceback in the log."""
    running = start(header_timeout=60)
    with Raw(running.url) as client:
        open_websocket(running, client)
        client.send(masked(0x01, text) + masked(0x80, text))
        received = client.receive_all()
    assert b"expected a binary message, got text" in received
    assert received.endswith((1008).to_bytes(2))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_websocket_client_that_does_not_read_is_disconnected(start: Start) -> None:
    """After `send_timeout`, as for HTTP responses."""
    running = start(header_timeout=10)
    with Raw(running.url, buffer=4096) as client:
        websocket(running, client)
        eventually(lambda: not client.is_open())


UNREADABLE = {
    "a long header": b"X: " + b"y" * 9000 + b"\r\n",
    "a body": b"Transfer-Encoding: chunked\r\n",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_websocket_request_with_a_malformed_head_is_rejected(start: Start, name: str) -> None:
    """The connection is closed; limits of other connections still apply, and the server stops at once."""
    running = start(lingering_time=60)
    head = HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    with Raw(running.url) as client, Raw(running.url) as other:
        client.send(b"GET /v1/loaders/x/stream HTTP/1.1\r\n" + head + UNREADABLE[name] + b"\r\n")
        response = client.receive()
        assert (response.status, response.problem["code"]) == (400, "BadRequest")
        assert client.receive_all() == b""
        other.send(b"GET /hea")
        assert other.receive().status == 408


def test_a_connection_whose_check_raises_is_aborted(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log contains the cause; limits of other connections still apply."""
    running = start(header_timeout=2)  # longer than a pause between connecting and the first request
    with Raw(running.url) as client, Raw(running.url) as other:
        assert client.get("/healthz").status == other.get("/healthz").status == 200
        one, _ = running.connections()
        check = Connection.check
        monkeypatch.setattr(Connection, "check", lambda self, now: 1 / 0 if self is one else check(self, now))
        eventually(lambda: client.is_open() != other.is_open())
        left = client if client.is_open() else other
        left.send(b"GET /hea")
        assert left.receive().status == 408
    assert "cannot enforce the limits of a connection" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_pings_of_a_client_that_does_not_read_get_no_pongs(start: Start) -> None:
    """Pongs would fill the memory; the batches arrive complete."""
    count = 50_000
    running = start(send_timeout=60, header_timeout=10)
    with Raw(running.url, buffer=4096) as client:
        websocket(running, client)
        client.socket.recv(1, socket.MSG_PEEK)  # now there is something to read
        client.send(masked(0x89, b"x" * 100) * count)
        client.send(masked(0x88, b""))
        received = client.receive_all()
    pongs = received.count(b"\x8a\x64" + b"x" * 100)
    assert pongs < count // 2
    assert len(received) - pongs * 102 > MEGABYTES * 2**20


def test_compressed_bodies_are_rejected(url: str) -> None:
    """Compressed bodies are rejected without decompression."""
    with Raw(url) as client:
        client.send(b"POST /v1/loaders HTTP/1.1\r\n" + HOST + b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\n")
        assert client.receive().status == 415


def test_the_idle_timeout_does_not_apply_during_a_head(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `header_timeout` applies while a head arrives."""
    monkeypatch.setattr("teleloader_server.web.app.KEEP_ALIVE", 1)
    with Raw(start(header_timeout=30).url) as client:
        assert client.get("/healthz").status == 200
        client.send(b"GET /healthz HTTP/1.1\r\n")
        time.sleep(1.5)
        client.send(HOST + b"\r\n")
        assert client.receive().status == 200
        assert client.receive_all() == b"", "an idle connection is closed"


def test_the_body_of_an_upgrade_request_is_ignored(url: str) -> None:
    """The body could be data of the other protocol, so it is ignored and the connection is closed."""
    with Raw(url) as client:
        fields = b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Type: application/json\r\nContent-Length: 22\r\n\r\n"
        client.send(b"POST /v1/loaders HTTP/1.1\r\n" + HOST + fields)
        assert client.receive().problem["detail"].startswith("invalid request body: expected JSON")
        assert client.receive_all() == b""


def test_other_upgrades_are_ignored(url: str) -> None:
    """The request gets a normal response, and the connection is closed."""
    with Raw(url) as client:
        response = client.get(
            "/healthz", b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
        )
        assert response.status == 200
        assert client.receive_all() == b""


def test_http_1_0_is_supported(start: Start) -> None:
    """HTTP/1.0 is supported except for responses without Content-Length."""
    running = start()
    path = running.register()
    with Raw(running.url) as client:
        client.send(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert (client.receive().status, client.receive_all()) == (200, b"")
    with Raw(running.url) as client:
        client.send(f"GET {path}?ranges=0:1 HTTP/1.0\r\n\r\n".encode())
        assert (client.receive().status, client.receive_all()) == (426, b"")


def test_rejected_connections_are_logged_in_summary(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rejection is logged immediately, others within 10 s in one line, without data of the client."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("teleloader_server.web.guard_manager.LOG_INTERVAL_S", 600.0)
    running = start(header_timeout=0.04)
    for _ in range(20):
        with Raw(running.url) as client:
            client.send(b"GET /\r\n 2026 ERROR forged\r\n\r\n")
            client.receive_all()
        eventually(lambda: "BadRequest" in caplog.text)
    with Raw(running.url) as client:  # closed by the same round that would write the next line
        client.send(b"GET")
        client.receive_all()
    lines = [record.getMessage() for record in caplog.records]
    assert sum("BadRequest" in line for line in lines) == 1
    assert not any("forged" in line or "\n" in line for line in lines)


def test_accepted_connections_use_tcp_keep_alive() -> None:
    """Accepted connections inherit the setting from the listening socket."""
    with bind("127.0.0.1", 0) as listening:
        listening.listen()
        with socket.create_connection(listening.getsockname()):
            accepted, _ = listening.accept()
            with accepted:
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
                    assert accepted.getsockopt(socket.IPPROTO_TCP, option) == value


@pytest.mark.parametrize(("files", "workers", "expected"), [(1024, 2, 896), (1024, 100, 560), (2**16, 2, 57344)])
def test_file_descriptors_are_reserved_for_workers(
    monkeypatch: pytest.MonkeyPatch, files: int, workers: int, expected: int
) -> None:
    """The more connections are allowed, the more descriptors are reserved."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert connections_for(workers) == expected


async def test_file_descriptors_are_reserved_for_further_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """File descriptors are also reserved for workers that start while the server runs."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    limits = Limits(num_workers=2)
    service = LoaderService(ObjectPools(lambda: {"x": host([1], name="x")}, limits), limits)
    resized = Mock()
    monkeypatch.setattr(service, "resize", resized)
    app, connections = create_app(service, Authenticator()), ConnectionManager(ClientLimits(), Authenticator())
    app.state.lifecycle = Lifecycle(asyncio.Event(), connections)
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 4000))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for count, status, most in ((100, 200, 560), (1000, 409, 560), (1, 200, 896)):
            assert (await client.put("/v1/workers", json={"num_workers": count})).status_code == status
            assert connections.limits.max_connections == most
    assert [call.args for call in resized.call_args_list] == [(100,), (1,)]


def test_a_too_low_limit_of_open_files_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message contains the limit and the required value."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(
        ConfigError, match=r"\(RLIMIT_NOFILE\) is 64, but a server with 3 workers requires 140: increase the limit"
    ):
        connections_for(3)
