"""Transport operations that asyncio lacks, and error responses that close a connection."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import Iterable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

from teleloader_server import request_ids
from teleloader_server.problems import HttpProblem
from teleloader_server.web.problem_responses import encoded
from teleloader_shared.messages import PROBLEM_MEDIA_TYPE

_AT_ONCE: Final = struct.pack("ii", 1, 0)

MAX_JOINED_BYTES: Final = 64 * 1024
"""Maximum size of a part that is joined with the head: asyncio copies both parts, which blocks its event loop."""


class JoiningTransport:
    """Transport that joins the head of a response with the first part of its body, if the application asks for it.

    uvicorn writes them separately, and each write is a system call and a packet. Large parts are not joined.

    Args:
        transport: Transport of the connection, which does everything else.
    """

    __slots__ = ("_held", "_holds", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._holds = False
        self._held: bytes | None = None
        """Data that is written together with the next data."""

    def hold_next(self) -> None:
        """Hold the next data until more data is written."""
        self._holds = True

    def write(self, data: bytes | memoryview) -> None:
        """Write data, after the held data."""
        if self._holds:
            self._holds, self._held = False, bytes(data)
            return
        held, self._held = self._held, None
        if held is None:
            self._transport.write(data)
        else:
            write_joined(self._transport, held, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def write_joined(transport: asyncio.Transport, head: bytes, data: bytes | memoryview) -> None:
    """Write a head and data together, unless the data is large."""
    if len(data) <= MAX_JOINED_BYTES:
        transport.writelines([head, data])
    else:
        transport.write(head)
        transport.write(data)


def abort(transport: asyncio.Transport) -> None:
    """Close a connection immediately, and discard unsent data."""
    if transport.get_write_buffer_size():
        # otherwise the kernel keeps its part, up to megabytes, and offers it for minutes to a peer that does not read
        with suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    transport.abort()


def unread_bytes(transport: asyncio.Transport) -> int:
    """Return the number of bytes that the peer has not acknowledged; 0 if the transport's buffer is empty.

    Includes the kernel's send buffer, which shows the progress of a slow peer while the transport's buffer is constant.
    """
    buffered = transport.get_write_buffer_size()
    if not buffered:
        return 0
    sock = transport.get_extra_info("socket")
    try:
        in_kernel: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]
    except (OSError, ValueError):
        in_kernel = 0  # the socket was closed concurrently
    return buffered + in_kernel


def final_response(problem: HttpProblem, default_headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode an error response after which the server closes the connection."""
    request = request_ids.new_id()
    content = encoded(problem.status, problem.code, problem.detail, request)
    headers = [
        *default_headers,
        (b"content-type", PROBLEM_MEDIA_TYPE.encode()),
        (b"content-length", str(len(content)).encode()),
        (request_ids.HEADER, request.encode()),
        (b"connection", b"close"),
        *((name.encode(), value.encode()) for name, value in problem.headers.items()),
    ]
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    status = f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\n".encode()
    return status + lines + b"\r\n" + content
