"""One HTTP connection on which ranges of batches are asked for, one at a time, and received without a copy.

httpx is four times slower at this than the standard library's ``readinto``: it hands out chunks that must be joined,
while here the kernel writes to the buffer in which the batch will stay.
"""

from __future__ import annotations

import http.client
import io
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from teleloader.api.control import MAX_PROBLEM_BYTES, Server
from teleloader.api.responses import error_of, parse_retry_after
from teleloader.tensors.memory import HostBuffers
from teleloader.transport.base import Range
from teleloader.transport.tracing import RequestTrace
from teleloader_shared.codec import Memory
from teleloader_shared.errors import ProtocolError, ServerUnavailable
from teleloader_shared.forks import after_fork_in_child
from teleloader_shared.messages import CONSUMER_HEADER, REPORT_HEADER, ConsumerReport

KEEPALIVE_IDLE: Final = 5
"""Seconds of silence after which the kernel asks the other machine whether it is still there."""
KEEPALIVE_TRIES: Final = 3
KEEPALIVE_OPTIONS: Final = (
    ("TCP_KEEPIDLE", KEEPALIVE_IDLE),
    ("TCP_KEEPALIVE", KEEPALIVE_IDLE),  # the name of TCP_KEEPIDLE on macOS
    ("TCP_KEEPINTVL", KEEPALIVE_IDLE),
    ("TCP_KEEPCNT", KEEPALIVE_TRIES),
    # while a request is not acknowledged, no keep-alive is sent
    ("TCP_USER_TIMEOUT", 1000 * KEEPALIVE_IDLE * (1 + KEEPALIVE_TRIES)),
)
"""Names in `socket`, of which each system has some."""
# unlike the default selector of Linux and macOS it needs no descriptor of its own, which forked processes would share
_Selector: Final[type[selectors.BaseSelector]] = getattr(selectors, "PollSelector", selectors.SelectSelector)
MAX_HEAD_BYTES: Final = 128 * 1024
"""Bytes of an answer besides its body: a server could send headers, or say "100 Continue", without end."""
LEAST_RATE: Final = 1024
"""Bytes a second that an answer must have, once it has begun."""
SILENT_TIMEOUTS: Final = 6
"""After so many times the server's `timeout` a silent connection is given up though the server is there: something
between may have forgotten it."""

_open: set[BatchConnection] = set()
"""All connections of this process."""


class SilentConnection(OSError):
    """Nothing came for long, and the server is there: ask again on another connection."""


class Paced(io.RawIOBase):
    """An answer as it arrives: no more of it than is allowed, and not so slowly that it would never end.

    Args:
        raw: Where its bytes come from.
        patience: Seconds over which its rate is taken, from its first byte on.
    """

    def __init__(self, raw: io.RawIOBase, patience: float) -> None:
        self._raw = raw
        self._patience = patience
        self._left = MAX_HEAD_BYTES
        self._count = 0
        self._due = 0.0

    def allow(self, nbytes: int) -> None:
        """Let so many more bytes in."""
        self._left += nbytes

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """The next bytes.

        Raises:
            ProtocolError: When there are more than were allowed.
            TimeoutError: When they come too slowly.
        """
        got = self._raw.readinto(buffer)
        if got:
            self._left -= got
            self._count += got
            if self._left < 0:
                raise ProtocolError("an answer goes on after what it stated, or its headers do not end")
            now = time.monotonic()
            if now > self._due:
                self._check_rate(now)
        return got

    def _check_rate(self, now: float) -> None:
        if self._due and self._count < LEAST_RATE * self._patience:
            raise TimeoutError(f"an answer came at less than {LEAST_RATE:,} bytes a second for {self._patience:g} s")
        self._count = 0
        self._due = now + self._patience

    def close(self) -> None:
        """Close it."""
        self._raw.close()
        super().close()


class BatchConnection:
    """A connection to a server.

    Args:
        server: Where to.
        path: Path of the epoch's batches.
        consumer: What the server calls this iterator.
        report: Says how it fares; the server is told so with each request.

    Raises:
        OSError: When the server cannot be reached.
        TlsError: When its certificate is not to be trusted.
    """

    def __init__(self, server: Server, path: str, consumer: str, report: Callable[[], ConsumerReport]) -> None:
        parts = urlsplit(server.url)
        self._server = server
        self._below = path
        self._path = parts.path + path
        self.trace: RequestTrace | None = None
        """Of the last request."""
        self.first_byte = 0
        """When its answer began, as ``time.time_ns()``."""
        self._shown: str | None = None
        self._consumer = consumer
        self._report = report
        if parts.scheme == "https":
            self._http: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.netloc, timeout=server.timeout, context=server.credentials.context()
            )
        else:
            self._http = http.client.HTTPConnection(parts.netloc, timeout=server.timeout)
        try:
            self._http.connect()
        except ssl.SSLError as error:
            raise server.broke(error) or error from None
        self._http.response_class = self._answer  # type: ignore[assignment]
        self._http.auto_open = 0  # a connection that broke is not made anew behind our back
        self._socket: socket.socket = self._http.sock
        self._arrival = _Selector()
        self._arrival.register(self._socket, selectors.EVENT_READ)
        _open.add(self)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE_OPTIONS:
            if hasattr(socket, option):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    @property
    def is_usable(self) -> bool:
        """Whether something can be asked, as far as is known: servers close connections that are idle for long."""
        return self._http.sock is not None and not self._arrival.select(0)

    def ask(self, wanted: Range, trace: RequestTrace | None = None) -> None:
        """Send the request for a range; `receive` takes the answer.

        Args:
            wanted: The range.
            trace: Of this request, where somebody traces.

        Raises:
            OSError: When the connection broke.
        """
        self._shown = self._server.credentials.token
        headers = {
            CONSUMER_HEADER: self._consumer,
            REPORT_HEADER: self._report().to_header(),
            **self._server.credentials.headers,
        }
        self.trace = trace
        if trace is not None:
            headers |= trace.headers
        if wanted.listed is not None:
            self._http.request("POST", f"{self._path}?start={wanted.start}", body=wanted.listed, headers=headers)
            return
        query = urlencode({"start": wanted.start, "stop": wanted.stop, "ahead": wanted.ahead, "ready": "true"})
        self._http.request("GET", f"{self._path}?{query}", headers=headers)

    def receive(self, buffers: HostBuffers, batches: int, max_bytes: int) -> Memory:
        """Return the frames of the response: the first batches of the range, at least one.

        Args:
            buffers: Provides the memory to receive into.
            batches: Batches in the range.
            max_bytes: The largest response that is accepted.

        Raises:
            OSError: When the connection broke.
            SilentConnection: When nothing comes for long from a server that is there.
            ServerUnavailable: When nothing comes, and the server does not answer otherwise either.
            http.client.HTTPException: When the answer is cut off or no HTTP.
            TeleloaderError: When the server refused.
        """
        with self._http.getresponse() as answer:
            if answer.status == http.client.UNAUTHORIZED and self._server.credentials.renew(self._shown):
                raise ConnectionError("the token was replaced")
            if answer.status != http.client.OK:
                self._arriving.allow(MAX_PROBLEM_BYTES)
                raise error_of(
                    answer.status, answer.read(MAX_PROBLEM_BYTES), self._server.url, self._below,
                    retry_after=parse_retry_after(answer.getheader("Retry-After", "")),
                )  # fmt: skip
            size = answer.length
            if size is None or not 0 < size <= max_bytes:
                raise ProtocolError(
                    f"an answer must state its size in bytes, up to {max_bytes:,} (see max_batch_bytes), stated {size}"
                )
            self._arriving.allow(size)
            memory = buffers.take(size, batches)
            view = memoryview(memory.data.data)
            filled = 0
            while filled < size:
                got = answer.readinto(view[filled:])
                if not got:
                    raise http.client.IncompleteRead(b"", size - filled)
                filled += got
            return memory

    def _answer(self, *args: Any, **options: Any) -> http.client.HTTPResponse:
        """The answer, of which something has come."""
        answer = http.client.HTTPResponse(*args, **options)
        try:
            self._arriving = Paced(answer.fp.detach(), self._server.timeout)
            answer.fp = io.BufferedReader(self._arriving)
            self._await(answer.fp)
            self.first_byte = time.time_ns()
        except BaseException:
            answer.close()
            raise
        return answer

    def _await(self, arriving: io.BufferedReader) -> None:
        """A batch may take as long as it takes; that the server is there can be seen by asking something else."""
        for _ in range(2 * SILENT_TIMEOUTS):
            if self._arrival.select(self._server.timeout / 2):
                if self._has_begun(arriving):
                    return
                continue
            if not self._server.is_alive() and not self._arrival.select(0):
                raise ServerUnavailable(f"{self._server.url} has sent nothing for {self._server.timeout:g} s")
        raise SilentConnection

    def _has_begun(self, arriving: io.BufferedReader) -> bool:
        """Whether it is the answer that comes: over TLS, what the two sides say to each other may come first."""
        if not isinstance(self._socket, ssl.SSLSocket):
            return True
        self._socket.settimeout(0)
        try:
            arriving.peek(1)
        except ssl.SSLWantReadError:
            return False
        finally:
            self._socket.settimeout(self._server.timeout)
        return True

    def shut_down(self) -> None:
        """Break the connection, from any thread: whoever is waiting in it wakes with an error."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was broken already

    def close(self) -> None:
        """Close the connection."""
        _open.discard(self)
        self._http.close()

    def close_copy(self) -> None:
        """In a forked process: close its copy, which would keep the connection open after its owner's end."""
        descriptor = self._socket.detach()
        if descriptor >= 0:  # a server may have ended it after its last answer
            socket.close(descriptor)


def _close_copies() -> None:
    for connection in list(_open):
        connection.close_copy()
    _open.clear()


after_fork_in_child(_close_copies)
