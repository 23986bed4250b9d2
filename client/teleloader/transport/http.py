"""HTTP/1.1 transport: one batch request at a time per connection, with responses received without a copy.

httpx is four times slower at this than ``readinto`` of the standard library: it returns chunks that must be joined,
whereas here the kernel writes into the final buffer of the batch.
"""

from __future__ import annotations

import http.client
import io
import selectors
import socket
import ssl
import sys
import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

from teleloader.api.control import MAX_PROBLEM_BYTES, Server
from teleloader.api.responses import error_of, parse_retry_after
from teleloader.tensors.memory import HostBuffers
from teleloader.transport.interface import BatchServer, SilentConnection, TransportError
from teleloader.transport.request import BatchRequest
from teleloader.transport.tls import TlsSocket
from teleloader.transport.tracing import RequestTrace
from teleloader_shared.codec import ArrivingFrame, Memory
from teleloader_shared.errors import ProtocolError, ServerUnavailable, TeleloaderError
from teleloader_shared.forks import after_fork_in_child
from teleloader_shared.handoff import LOAN_MEDIA_TYPE
from teleloader_shared.messages import (
    BACKGROUND_PRIORITY,
    CONSUMER_HEADER,
    PRIORITY_HEADER,
    REPORT_HEADER,
    TIMELINE_HEADER,
    ConsumerReport,
    Registration,
    batches_path,
)
from teleloader_shared.spec import LoaderSpec

if sys.platform == "linux":
    from teleloader.transport.handoff import connect as open_channel
else:

    def open_channel(_offer: str | None) -> Any:
        """Return None: servers lend shared memory only on Linux."""
        return None


KEEPALIVE_IDLE: Final = 5
"""Seconds without data after which the kernel sends a keep-alive probe."""
KEEPALIVE_TRIES: Final = 3
KEEPALIVE_OPTIONS: Final = (
    ("TCP_KEEPIDLE", KEEPALIVE_IDLE),
    ("TCP_KEEPALIVE", KEEPALIVE_IDLE),  # the name of TCP_KEEPIDLE on macOS
    ("TCP_KEEPINTVL", KEEPALIVE_IDLE),
    ("TCP_KEEPCNT", KEEPALIVE_TRIES),
    # while a request is not acknowledged, the kernel sends no keep-alive probes
    ("TCP_USER_TIMEOUT", 1000 * KEEPALIVE_IDLE * (1 + KEEPALIVE_TRIES)),
)
"""Socket options by their names in the `socket` module; no system has all of them."""
# unlike the default selector of Linux and macOS it has no file descriptor, which forked processes would share
_Selector: Final[type[selectors.BaseSelector]] = getattr(selectors, "PollSelector", selectors.SelectSelector)
MAX_HEAD_BYTES: Final = 128 * 1024
"""Maximum size of the headers and the preceding "100 Continue" responses, in bytes: both could be endless."""
MAX_LOAN_BYTES: Final = 64
"""Maximum size of a response that lends a slot, in bytes."""
PIECE_BYTES: Final = 256 * 1024
"""Size of the pieces in which a response is read, in bytes: small enough to be hashed from the processor's cache."""
MIN_RATE: Final = 1024
"""Minimum rate of a response after its first byte, in bytes/s."""
SILENT_TIMEOUTS: Final = 6
"""Maximum wait on a connection without data, as a multiple of the server's `timeout`: a proxy may have dropped the
connection although the server is available."""

_open: set[HttpConnection] = set()
"""Open connections of this process."""


class HttpServer(BatchServer):
    """HTTP/1.1 client for one loader server; receives batches in shared memory if the server is on this machine."""

    offer: str | None = None
    """`Registration.handoff` of the last registration."""

    def register(self, spec: LoaderSpec, epoch: int) -> Registration:
        """Register a loader with the server; see `Server.register`."""
        registered = super().register(spec, epoch)
        self.offer = registered.handoff
        return registered

    def connect(self, key: str, epoch: int, consumer: str, report: Callable[[], ConsumerReport]) -> HttpConnection:
        """Open an HTTP connection for the batches of one epoch; see `BatchServer.connect`."""
        try:
            return HttpConnection(self, key, batches_path(key, epoch), consumer, report)
        except OSError as error:
            raise self.broke(error) or _broken(error) from error


class _SecureConnection(http.client.HTTPConnection):
    """HTTPS connection that verifies the certificate of the server's `server_name`, which may not be the host.

    The base class is not ``HTTPSConnection``, which would load the CAs of the system for each connection.
    """

    default_port = http.client.HTTPS_PORT

    def __init__(self, netloc: str, server: Server) -> None:
        super().__init__(netloc, timeout=server.timeout)
        self._server = server

    def connect(self) -> None:
        """Connect and perform the TLS handshake."""
        super().connect()
        self.context = self._server.credentials.context()
        self.sock = TlsSocket(self.sock, self.context, self._server.server_name)


class BoundedReader(io.RawIOBase):
    """Response stream that enforces a maximum size and a minimum transfer rate.

    Args:
        raw: Stream to read from.
        patience: Seconds over which the rate is measured, from the first byte on.
    """

    def __init__(self, raw: io.RawIOBase, patience: float) -> None:
        self._raw = raw
        self._patience = patience
        self._limit = MAX_HEAD_BYTES
        self._received = 0
        self._count = 0
        self._due = 0.0

    def allow(self, nbytes: int) -> None:
        """Increase the maximum size by `nbytes`."""
        self._limit += nbytes

    def readable(self) -> bool:
        """Return True: the stream supports reading."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read the next bytes into `buffer`; return the byte count, which is 0 at the end of the stream.

        Raises:
            ProtocolError: If the maximum size is exceeded.
            TimeoutError: If the rate is below the minimum.
        """
        got = self._raw.readinto(buffer)
        if got:
            self._received += got
            self._count += got
            if self._received > self._limit:
                part = "headers" if self._limit == MAX_HEAD_BYTES else "headers and body"
                raise ProtocolError(
                    f"the {part} of the response have at least {self._received:,} bytes, and the limit is "
                    f"{self._limit:,}: check proxies between client and server"
                )
            now = time.monotonic()
            if now > self._due:
                self._check_rate(now)
        return got

    def _check_rate(self, now: float) -> None:
        if self._due and self._count < MIN_RATE * self._patience:
            raise TimeoutError(f"the response arrived at less than {MIN_RATE:,} bytes/s for {self._patience:g} s")
        self._count = 0
        self._due = now + self._patience

    def close(self) -> None:
        """Close this stream and the underlying stream."""
        self._raw.close()
        super().close()


class HttpConnection:
    """HTTP/1.1 connection to a server for the batches of one epoch.

    Args:
        server: Server to connect to.
        path: URL path of the epoch's batches.
        consumer: Name of the iterator in the server's statistics.
        report: Returns the `ConsumerReport` to send with each request.

    Raises:
        OSError: If the server is unreachable.
    """

    def __init__(
        self, server: HttpServer, key: str, path: str, consumer: str, report: Callable[[], ConsumerReport]
    ) -> None:
        parts = urlsplit(server.url)
        self._key = key
        self._server = server
        self._batches_path = path
        self._path = parts.path + path
        self.trace: RequestTrace | None = None
        self.first_byte = 0
        self.wants_timings = False
        self.verified = 0
        self._sent_token: str | None = None
        """Token that the last request carried."""
        self._consumer = consumer
        self._report = report
        if parts.scheme == "https":
            self._http: http.client.HTTPConnection = _SecureConnection(parts.netloc, server)
        else:
            self._http = http.client.HTTPConnection(parts.netloc, timeout=server.timeout)
        self._http.connect()
        self._http.response_class = self._response  # type: ignore[assignment]
        self._http.auto_open = 0  # no implicit reconnection
        self._socket: socket.socket = self._http.sock
        self._arrival = _Selector()
        self._arrival.register(self._socket, selectors.EVENT_READ)
        self._channel = open_channel(server.offer)
        _open.add(self)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE_OPTIONS:
                if hasattr(socket, option):
                    self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        except OSError:
            self.close()
            raise

    @property
    def is_usable(self) -> bool:
        """False if the connection is known to be broken or closed."""
        if self._http.sock is None or self._arrival.select(0):
            return False
        return not (isinstance(self._socket, TlsSocket) and self._socket.has_received)

    def send(self, wanted: BatchRequest, trace: RequestTrace | None = None) -> None:
        """Send the HTTP request for batches."""
        self._sent_token, self.first_byte = self._server.credentials.token, 0
        if self._channel is not None and not self._channel.is_open:
            self._channel.close()
            self._channel = open_channel(self._server.offer)
        headers = {
            CONSUMER_HEADER: self._consumer,
            REPORT_HEADER: self._report().to_header(),
            **self._server.credentials.headers,
            **({} if self._channel is None else self._channel.headers),
            **({PRIORITY_HEADER: BACKGROUND_PRIORITY} if wanted.is_background else {}),
        }
        self.trace = trace
        if trace is not None:
            headers |= trace.headers
        method, path = "POST", self._path
        if wanted.listed is None:
            method, path = "GET", f"{path}?ranges={wanted.batches}&ahead={wanted.ahead}&ready=true"
        try:
            self._http.request(method, path, wanted.listed, headers)
        except (OSError, http.client.HTTPException) as error:
            raise _broken(error) from error

    def receive(self, buffers: HostBuffers, batches: int, max_bytes: int) -> Memory:
        """Receive the response body, a sequence of frames, into newly allocated memory."""
        try:
            return self._receive(buffers, batches, max_bytes)
        except TeleloaderError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise _broken(error) from error

    def _receive(self, buffers: HostBuffers, batches: int, max_bytes: int) -> Memory:
        with self._http.getresponse() as response:
            if response.status == http.client.UNAUTHORIZED and self._has_new_credentials():
                raise TransportError("the server rejected the previous token or certificate")
            if response.status != http.client.OK:
                self._arriving.allow(MAX_PROBLEM_BYTES)
                raise error_of(
                    response.status, response.read(MAX_PROBLEM_BYTES), self._server.url, self._batches_path,
                    retry_after=parse_retry_after(response.getheader("Retry-After", "")),
                )  # fmt: skip
            size = response.length
            if size is None or not 0 < size <= max_bytes:
                raise ProtocolError(
                    f"invalid response from {self._server.url}: Content-Length {size}, expected 1 to {max_bytes:,} "
                    "bytes. If batches are larger, increase max_batch_bytes of the DataLoader"
                )
            self._arriving.allow(size)
            self.wants_timings = response.getheader(TIMELINE_HEADER) is not None
            if self._channel is not None and response.getheader("Content-Type") == LOAN_MEDIA_TYPE:
                memory: Memory = self._channel.receive(response.read(MAX_LOAN_BYTES), buffers, max_bytes)
                self.verified = len(memory.data)
                return memory
            memory = buffers.take(size, batches)
            view = memoryview(memory.data.data)
            arriving = ArrivingFrame(view)
            filled = 0
            while filled < size:
                got = response.readinto(view[filled : filled + PIECE_BYTES])
                if not got:
                    raise TransportError(f"the response is truncated: expected {size:,} bytes, got {filled:,}")
                filled += got
                arriving.advance(filled)
            self.verified = arriving.verified
            return memory

    def _has_new_credentials(self) -> bool:
        """Return True if the token file or the client certificate has changed since the request was sent."""
        credentials = self._server.credentials
        if credentials.renew(self._sent_token):
            return True
        return isinstance(self._http, _SecureConnection) and credentials.context() is not self._http.context

    def _response(self, *args: Any, **options: Any) -> http.client.HTTPResponse:
        """Create the response object, and wait for the first byte of the response."""
        response = http.client.HTTPResponse(*args, **options)
        try:
            self._arriving = BoundedReader(response.fp.detach(), self._server.timeout)
            response.fp = io.BufferedReader(self._arriving)
            self._await(response.fp)
            self.first_byte = time.time_ns()
        except BaseException:
            response.close()
            raise
        return response

    def _await(self, arriving: io.BufferedReader) -> None:
        """Wait for the first byte of the response; check the server's health after each half `timeout` without data.

        Raises:
            ServerUnavailable: If a health check fails.
            SilentConnection: If no data arrives for `SILENT_TIMEOUTS` timeouts although the health checks succeed.
        """
        for _ in range(2 * SILENT_TIMEOUTS):
            if self._arrival.select(self._server.timeout / 2):
                if self._has_begun(arriving):
                    return
                continue
            if not self._server.is_alive() and not self._arrival.select(0):
                raise ServerUnavailable(f"{self._server.url} has sent no data for {self._server.timeout:g} s")
            self._server.log_replay(self._key)
        raise SilentConnection

    def _has_begun(self, arriving: io.BufferedReader) -> bool:
        """Return True if bytes of the response have arrived; over TLS, handshake messages may arrive first."""
        if not isinstance(self._socket, TlsSocket):
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
        """Shut the connection down; may be called from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the connection is already broken

    def close(self) -> None:
        """Close the connection and release its socket."""
        _open.discard(self)
        self._http.close()
        if self._channel is not None:
            self._channel.close()

    def close_copy(self) -> None:
        """Close a forked child's copy of the socket, which would otherwise keep the parent's connection open."""
        descriptor = self._socket.detach()
        if descriptor >= 0:  # negative if the server closed the connection after its last response
            socket.close(descriptor)


def _broken(error: Exception) -> TransportError:
    return TransportError(str(error) or type(error).__name__)


def _close_copies() -> None:
    for connection in list(_open):
        connection.close_copy()
    _open.clear()


after_fork_in_child(_close_copies)
