"""HTTP client that sends arbitrary bytes."""

from __future__ import annotations

import json
import select
import socket
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

HOST = b"Host: localhost\r\n"


class Response(NamedTuple):
    """A received response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def problem(self) -> dict[str, Any]:
        """Body of an error response."""
        assert self.headers["content-type"] == "application/problem+json", self
        found: dict[str, Any] = json.loads(self.body)
        assert found["status"] == self.status
        return found


class Raw:
    """One connection.

    Args:
        url: URL of the server.
        buffer: Size of the kernel's receive buffer; None uses the default.
        source: Source IP address; None uses the default.
    """

    def __init__(self, url: str, buffer: int | None = None, source: str | None = None) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        if buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(30)
        if source is not None:
            self.socket.bind((source, 0))
        self.socket.connect((host, int(port)))
        self._unread = b""

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send all data, or as much as the server accepts before it closes the connection."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def get(self, path: str, headers: bytes = b"") -> Response:
        """Send a GET request and return the response."""
        self.send_get(path, headers)
        return self.receive()

    def send_get(self, path: str, headers: bytes = b"") -> None:
        """Send a GET request."""
        self.send(f"GET {path} HTTP/1.1\r\n".encode() + HOST + headers + b"\r\n")

    def receive(self) -> Response:
        """Receive a response with a Content-Length header."""
        while b"\r\n\r\n" not in self._unread:
            self._read()
        head, _, rest = self._unread.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        size = int(headers.get("content-length", 0))
        self._unread = rest
        while len(self._unread) < size:
            self._read()
        body, self._unread = self._unread[:size], self._unread[size:]
        return Response(int(first.split()[1]), headers, body)

    def receive_all(self) -> bytes:
        """Receive all data until the server closes the connection."""
        try:
            while True:
                self._read()
        except ConnectionError:
            return self._unread

    def is_open(self) -> bool:
        """Return False if the server is known to have closed the connection, even if unread data remains."""
        ended = select.poll()
        ended.register(self.socket, select.POLLRDHUP)
        return not ended.poll(0)

    def _read(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError(f"the server closed the connection after {self._unread[:200]!r}")
        self._unread += data
