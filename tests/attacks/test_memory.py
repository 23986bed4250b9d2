"""Memory bound of a server while clients, with and without tokens, send 50 MB of unfinished requests."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.conftest import ServerProcess
from tests.raw import HOST, Raw

MIB = 2**20
SENT = 50 * 10**6
UNAUTHENTICATED = 16 * MIB
"""Limit `max_unauthenticated_bytes`."""
HELD = 64 * MIB
"""Limit `max_buffered_request_bytes`, of which unfinished WebSocket messages may take a quarter."""
ALLOCATOR = 24 * MIB
"""Memory that the allocator and the event loop keep in addition to memory in use."""
TOKEN = "a-token-of-the-tests"
AUTHORIZATION = f"Authorization: Bearer {TOKEN}\r\n".encode()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """Run a server that requires a token, a new one for each test, because reused memory would hide growth."""
    tokens = tmp_path / "tokens.toml"
    tokens.touch(0o600)
    tokens.write_text(f'[trainer]\ntoken = "{TOKEN}"\nscopes = ["read", "stats"]\n')
    running = ServerProcess(
        "--port", "0", "tests.end_to_end.hosted:numbers", "--num-workers", "1", "--tokens", str(tokens),
        "--limit", f"max_unauthenticated_bytes={UNAUTHENTICATED}", "--limit", f"max_buffered_request_bytes={HELD}",
        "--limit", "header_timeout=300", "--limit", "body_timeout=300",
    )  # fmt: skip
    yield running
    assert running.end() == 0


class Attack:
    """Sends data on many connections, which stay open, and watches the server's memory.

    Args:
        server: The server.
    """

    def __init__(self, server: ServerProcess) -> None:
        self.url = server.url
        self._process = psutil.Process(server.pid)
        self._before = self._process.memory_info().rss
        self._left = SENT
        self._open = ExitStack()
        self.peak = 0

    def __enter__(self) -> Attack:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def send(self, connection: Callable[[], Raw], data: bytes) -> None:
        """Send `data` on one connection after another until 50 MB are sent, then serve a client with a token."""
        while self._left > 0:
            self._open.enter_context(connection()).send(data)
            self._left -= len(data)
            self._measure()
        # each request takes a round of the event loop, in which the server reads from all connections
        for _ in range(10):
            registered(self.url)
            self._measure()

    def _measure(self) -> None:
        self.peak = max(self.peak, self._process.memory_info().rss - self._before)

    def raw(self) -> Raw:
        """Return a connection on which nothing was sent."""
        return Raw(self.url)

    def websocket(self, key: str, headers: bytes) -> Raw:
        """Return a connection after a handshake and its response."""
        client = self.raw()
        client.send(
            f"GET /v1/loaders/{key}/stream HTTP/1.1\r\n".encode()
            + HOST
            + headers
            + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
            + b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        assert client.receive().status == (101 if headers else 401)
        return client


def registered(url: str) -> str:
    """Return the key of a loader."""
    request = urllib.request.Request(
        f"{url}/v1/loaders",
        json.dumps({"dataset": "numbers", "batch_size": 4}).encode(),
        {"Authorization": f"Bearer {TOKEN}"},
    )
    with urllib.request.urlopen(request) as response:
        key: str = json.load(response)["key"]
    return key


def frame(opcode: int, content: bytes) -> bytes:
    """Return a WebSocket frame of a client. Its mask of zeros changes nothing."""
    return bytes([opcode, 0x80 | 126]) + len(content).to_bytes(2) + bytes(4) + content


CHUNKED = b"POST /v1/loaders HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"
STRANGERS = {
    "trailers": CHUNKED + b"a: b\r\n" * 10**6,
    "one trailer": CHUNKED + b"a: " + b"b" * 10**6,
    "header fields": b"GET /v1/datasets HTTP/1.1\r\n" + HOST + b"a:\r\n" * 15_000,
    "unfinished heads": b"GET /v1/datasets HTTP/1.1\r\n" + HOST + (b"a:" + b"b" * 480 + b"\r\n") * 120,
}
TRAINERS = {
    "WebSocket fragments": frame(0x02, b"x" * 4000) + frame(0x00, b"x" * 4000) * 60,
    "invalid UTF-8": frame(0x01, b"\xff" * 4000) + frame(0x00, b"\xff" * 4000) * 60,
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_what_strangers_send_takes_a_bounded_memory(server: ServerProcess, kind: str) -> None:
    """50 MB without a token use at most `max_unauthenticated_bytes`, whatever the number of open connections."""
    with Attack(server) as attack:
        attack.send(attack.raw, STRANGERS[kind])
        assert attack.peak < UNAUTHENTICATED + ALLOCATOR


@pytest.mark.parametrize("kind", TRAINERS)
def test_messages_of_strangers_are_not_read(server: ServerProcess, kind: str) -> None:
    """A WebSocket without a token is rejected before the server reads a message from it."""
    key = registered(server.url)
    with Attack(server) as attack:
        attack.send(lambda: attack.websocket(key, b""), TRAINERS[kind])
        assert attack.peak < UNAUTHENTICATED + ALLOCATOR


@pytest.mark.parametrize("kind", TRAINERS)
def test_unfinished_messages_take_a_bounded_memory(server: ServerProcess, kind: str) -> None:
    """Unfinished messages, with a token too, use at most a quarter of `max_buffered_request_bytes`."""
    key = registered(server.url)
    with Attack(server) as attack:
        attack.send(lambda: attack.websocket(key, AUTHORIZATION), TRAINERS[kind])
        assert attack.peak < HELD // 4 + ALLOCATOR


def test_invalid_text_does_not_grow_the_log(server: ServerProcess) -> None:
    """The log has no traceback of 200 text messages that are not UTF-8, and no line for each."""
    key = registered(server.url)
    lines = len(server.log)
    for _ in range(200):
        with Attack(server) as attack, attack.websocket(key, AUTHORIZATION) as client:
            client.send(frame(0x81, b"\xff"))
            received = b""
            while b"expected a binary message, got text" not in received:
                received += client.socket.recv(2**16)
    new = server.log[lines:]
    assert not [line for line in new if "Traceback" in line or "UTF-8" in line]
    assert sum("closed connections" not in line for line in new) == 0
    assert len(new) < 50
