"""Connections that nobody can hold open, fill up or pile up: uvicorn's HTTP/1.1 with deadlines and limits.

uvicorn waits for a request's head for as long as it takes, reads heads and bodies of any size, and waits for ever for a
peer that never reads. Here

- a head must be complete `header_timeout` after the connection, or after its first byte on one that was used before;
- a head may have `max_header_bytes` and `max_headers` header fields, a body `max_body_bytes` and no less than
  `min_body_rate` bytes a second; what frames the chunks of a body has the limit of a head, and trailers are dropped;
- a peer must take something of its answer every `send_timeout`, or `pressure_min_send_rate` bytes a second over
  `pressure_send_timeout` while its principal leaves more unread than it may;
- `max_connections` may be open, so that descriptors are left for workers, and `max_connections_per_address` of them
  from one address; one more is answered with 503, unless one without an authenticated request can be closed for it;
- connections without an authenticated request may take `max_unauthenticated_bytes` of memory together; beyond that the
  oldest of them is closed.

A request that breaks a rule is answered with a problem where its answer has not begun, and its connection is closed.
What stays idle between two requests is closed by uvicorn. A dead peer of an idle connection is found by the kernel.
"""

from __future__ import annotations

import asyncio
import enum
import fcntl
import logging
import resource
import socket
import struct
import termios
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from teleloader_server import request_ids
from teleloader_server.auth.authenticator import Authenticator
from teleloader_server.config import ClientLimits, ConfigError
from teleloader_server.dispatch.quotas import Account, Holdings, account_of
from teleloader_server.problems import HttpProblem
from teleloader_server.web.problem_responses import encoded
from teleloader_shared.messages import PROBLEM_MEDIA_TYPE, STREAM_PATH
from teleloader_shared.units import counted

OWN_FILES: Final = 64
"""Descriptors for the event loop, the datasets' files and whatever comes up."""
FILES_PER_WORKER: Final = 4
"""A worker's channel, and the memory that passes through it."""
MIN_CONNECTIONS: Final = 64
"""With fewer a server is of no use."""

CONNECTION_BYTES: Final = 16 * 2**10
"""Memory of a connection on which nothing is pending, rounded up: transport, parser, protocol and the last request."""
REQUEST_BYTES: Final = 8 * 2**10
"""Memory of a request besides what was received of it, rounded up: its scope, task and response."""
FIELD_BYTES: Final = 256
"""Memory of a header field besides its bytes, rounded up: a tuple and two bytes objects."""
MAX_URL_BYTES: Final = 8 * 2**10
"""Bytes of a request's URL."""
MIN_CHUNK_BYTES: Final = 64
"""Bytes that the chunks of a body have on average: each takes the event loop as long as a kilobyte of content."""
MAX_SMALL_CHUNKS: Final = 256
"""Chunks of a body that may be smaller."""
LOG_INTERVAL_S: Final = 10.0
"""Seconds between two lines on connections that were closed."""
_VERSIONS: Final = ("1.0", "1.1")

_CHECKED: Final = frozenset({b"content-length", b"content-encoding", b"upgrade"})
_AT_ONCE: Final = struct.pack("ii", 1, 0)

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """A connection, of either protocol."""

    @property
    def answering(self) -> bool:
        """Whether an answer is under way."""

    @property
    def has_asked(self) -> bool:
        """Whether there was a request; if not, the first one may be on its way."""

    @property
    def address(self) -> str:
        """The network address of its peer."""

    @property
    def account(self) -> Account | None:
        """Account of the principal of its last request, None where that request was not authenticated."""

    def check(self, now: float) -> None:
        """Hold it to its limits."""

    def shutdown(self) -> None:
        """Close when what is asked is answered."""

    def break_off(self) -> None:
        """Close without sending what is left."""


class Watch:
    """Looks after the connections of one server, which it knows from their birth.

    Args:
        limits: What they may take.
        authenticator: Knows the tokens. On a server without tokens, every request counts as authenticated.
    """

    def __init__(self, limits: ClientLimits, authenticator: Authenticator) -> None:
        self.limits = limits
        self.unfinished = Holdings(
            limits.max_buffered_request_bytes // 4, lambda: len(authenticator.tokens.entries) > 1
        )
        """Bytes of WebSocket messages whose end was not received yet."""
        self._authenticator = authenticator
        self.draining = False
        """Whether connections close after their answer."""
        self.connections: set[Watched] = set()
        self._unauthenticated: dict[Watched, int] = {}
        """Memory in bytes of each connection without an authenticated request, the oldest connection first."""
        self._unauthenticated_bytes = 0
        self._broken: Counter[str] = Counter()
        self._logged = -LOG_INTERVAL_S
        self._by_address: Counter[str] = Counter()
        interval = min(limits.header_timeout, limits.body_timeout, limits.send_timeout, limits.lingering_time) / 4
        self._interval = min(1.0, interval)
        """How often connections are looked at."""

    def admit(self, connection: Watched) -> str | None:
        """Look after a connection from now on; why there is no room for it, if there is none."""
        self.connections.add(connection)
        address = connection.address
        self._by_address[address] += 1
        self._unauthenticated[connection] = 0
        self.charge(connection, CONNECTION_BYTES)
        limits = self.limits
        if len(self.connections) > limits.max_connections and not self._evict(connection):
            most = counted(limits.max_connections, "connection")
            return f"the server has {most}, its limit (max_connections): try later"
        if self._by_address[address] > limits.max_connections_per_address and not self._evict(connection, address):
            return (
                f"{address} has {counted(limits.max_connections_per_address, 'connection')}, its limit on this server "
                "(max_connections_per_address): close some"
            )
        return None

    def leave(self, connection: Watched) -> None:
        """The connection is closed."""
        if connection in self.connections:
            self.connections.discard(connection)
            self._stop_counting(connection)
            self._by_address[connection.address] -= 1
            if not self._by_address[connection.address]:
                del self._by_address[connection.address]

    def charge(self, connection: Watched, nbytes: int) -> None:
        """Count memory that an unauthenticated connection takes, and close the oldest ones beyond the limit.

        An authenticated connection is not counted: the limits of its principal hold from then on.

        Args:
            connection: The connection.
            nbytes: Bytes that it takes more than before; less than 0 for bytes that were released.
        """
        if connection not in self._unauthenticated:
            return
        if self._is_authenticated(connection):
            self._stop_counting(connection)
            return
        self._unauthenticated[connection] += nbytes
        self._unauthenticated_bytes += nbytes
        while self._unauthenticated_bytes > self.limits.max_unauthenticated_bytes:
            self._evict()

    def settle(self, connection: Watched, nbytes: int) -> None:
        """Count `nbytes` for an unauthenticated connection in place of everything that was counted before."""
        self.charge(connection, nbytes - self._unauthenticated.get(connection, 0))

    def _is_authenticated(self, connection: Watched) -> bool:
        account = connection.account
        return account is not None and not (account.is_alone and self._authenticator.has_tokens)

    def _stop_counting(self, connection: Watched) -> None:
        self._unauthenticated_bytes -= self._unauthenticated.pop(connection, 0)

    def _evict(self, newcomer: Watched | None = None, address: str | None = None) -> bool:
        """Close the oldest unauthenticated connection, so that strangers cannot keep clients out by staying connected.

        Args:
            newcomer: The connection to make room for, which is not closed.
            address: The network address whose connections may be closed; None is any.

        Returns:
            Whether there was one.
        """
        while found := next(
            (one for one in self._unauthenticated if one is not newcomer and address in (None, one.address)), None
        ):
            if self._is_authenticated(found):
                self._stop_counting(found)
                continue
            self.count("unauthenticated connection closed to make room")
            self.leave(found)  # at once: the event loop reports the loss of a connection later
            found.break_off()
            return True
        return False

    async def keep(self) -> None:
        """Hold connections to the limits, until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            now = asyncio.get_running_loop().time()
            for connection in list(self.connections):
                try:
                    connection.check(now)
                except Exception:  # the others are to be held to their limits all the same
                    logger.exception("a connection could not be held to its limits, and is broken off")
                    connection.break_off()
            if self._broken and now - self._logged >= LOG_INTERVAL_S:
                self._logged = now
                what = ", ".join(f"{count} x {rule}" for rule, count in self._broken.items())
                logger.warning("connections were closed: %s", what)
                self._broken.clear()

    def count(self, rule: str) -> None:
        """Note a breach for the log, which has one line for many: whoever makes breaches can make millions."""
        self._broken[rule] += 1

    def drain(self) -> None:
        """Close what is idle between two requests, and everything else after its answer."""
        self.draining = True
        for connection in list(self.connections):
            if connection.has_asked:
                connection.shutdown()

    async def answered(self, seconds: float) -> bool:
        """Wait until all answers that are under way have been sent, or so long; whether they have."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(connection.answering for connection in self.connections):
                    await asyncio.sleep(0.02)
                return True
        return False

    def abort(self) -> None:
        """Break all connections."""
        for connection in list(self.connections):
            connection.break_off()


class _Phase(enum.Enum):
    HEAD = "a head is due"
    BODY = "a body is due"
    QUIET = "nothing is due"
    REFUSED = "what comes is thrown away"


class Connection(HttpToolsProtocol):
    """One connection; see the module. uvicorn makes it."""

    def __init__(self, watch: Watch, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self.url = b""
        self.address = ""
        """The network address of its peer."""
        self._watch = watch
        self._limits = watch.limits
        self._framing = 0
        """Bytes received since the beginning of the head, or since the last byte of the body's content."""
        self._earlier: list[RequestResponseCycle] = []
        """Requests before the last one that it may have overtaken: whoever pipelines does not wait for answers."""
        self._is_last = False
        """Whether the connection closes after the request at hand."""
        self._enter(_Phase.HEAD)

    @property
    def answering(self) -> bool:
        """Whether an answer is under way."""
        return bool(self._unanswered()) or self.transport.get_write_buffer_size() > 0

    @property
    def has_asked(self) -> bool:
        """Whether there was a request; if not, the first one may be on its way."""
        return self.cycle is not None

    @property
    def account(self) -> Account | None:
        """Account of the principal of its last request, None where that request was not authenticated."""
        return None if self.cycle is None else account_of(self.cycle.scope)

    # -- what asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, if there is room for it."""
        super().connection_made(transport)
        self.address = "" if self.client is None else self.client[0]
        self._unread = Unread(transport, self._limits)
        no_room = self._watch.admit(self)
        if no_room is not None:
            self._refuse(HttpProblem(503, "ServerUnavailable", no_room))
            # no time to read it: descriptors are what there is too little of
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the requests, all of them: uvicorn tells the last one."""
        self._watch.leave(self)
        super().connection_lost(exc)
        for cycle in self._unanswered():
            self._forsake(cycle)

    def data_received(self, data: bytes) -> None:
        """Parse what came, and no more of a head than it may have."""
        if self._phase is _Phase.REFUSED:
            return
        self._unset_keepalive_if_required()
        if self._phase is _Phase.QUIET:
            self._enter(_Phase.HEAD)
        try:
            self._feed(data)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            # else it is answered as if it asked for no other protocol; what follows it is not understood
        except httptools.HttpParserError as error:
            cause = error.__context__
            if not isinstance(cause, HttpProblem):
                what = "its target is no path" if cause else error
                cause = HttpProblem(400, "BadRequest", f"the request is not HTTP/1.1: {what}")
            self._refuse(cause)
        except HttpProblem as refusal:
            self._refuse(refusal)

    def _feed(self, data: bytes) -> None:
        limit = self._limits.max_header_bytes
        start = 0
        while start < len(data):
            # a piece may hold the end of one request and the head of the next, so none is larger than a head may be
            piece = data[start : start + limit - self._framing]
            if not piece:
                raise self._head_too_large()
            if self._phase is not _Phase.BODY or self._unanswered():  # else what comes is thrown away
                self._watch.charge(self, len(piece))
            self._framing += len(piece)
            self.parser.feed_data(piece)
            start += len(piece)

    def _head_too_large(self) -> HttpProblem:
        limit = self._limits.max_header_bytes
        if self._phase is _Phase.BODY:
            return HttpProblem(
                431,
                "HeadTooLarge",
                f"{limit:,} bytes of chunk extensions or trailers without content: the limit is that of a head "
                "(max_header_bytes); send fewer, trailers are ignored",
            )
        if not self.headers and len(self.url) > limit // 2:
            return HttpProblem(
                414,
                "UriTooLong",
                f"the request line exceeds the limit of {limit:,} bytes (max_header_bytes)",
            )
        return HttpProblem(
            431, "HeadTooLarge", f"the headers are larger than the {limit:,} bytes that are allowed (max_header_bytes)"
        )

    # -- what the parser calls; an exception ends the parsing

    def on_message_begin(self) -> None:
        """A request's first byte."""
        if self._phase is not _Phase.HEAD:
            self._enter(_Phase.HEAD)
        self._watch.charge(self, REQUEST_BYTES)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Keep a piece of the URL; a longer one would hold the event loop while uvicorn decodes its path."""
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            raise HttpProblem(414, "UriTooLong", f"the URL exceeds {MAX_URL_BYTES:,} bytes: send a shorter one")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header field, and drop a trailer field: RFC 9110, 6.5.1 forbids to treat one as a header field.

        uvicorn would add trailers to the headers, which the application reads at any time: a trailer could authorize
        a request that was refused for its headers, or the reverse.
        """
        if self._phase is _Phase.BODY:
            return
        most = self._limits.max_headers
        if len(self.headers) == most:
            raise HttpProblem(431, "HeadTooLarge", f"more than {most:,} header fields, the limit (max_headers)")
        self._watch.charge(self, FIELD_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Refuse what is not to be read; begin to answer the rest."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._earlier = self._unanswered()
            most = self._limits.max_pipelined
            if len(self._earlier) >= most:
                raise HttpProblem(
                    400,
                    "BadRequest",
                    f"{most} requests of this connection wait for their answers: read some (max_pipelined)",
                )
        self._check_version_and_host()
        for name, value in self.headers:
            if name in _CHECKED:
                self._check_header(name, value)
        super().on_headers_complete()
        self._enter(_Phase.BODY)
        if self._should_upgrade():
            return
        if self._is_last or self._watch.draining:
            self.cycle.keep_alive = False

    def _check_version_and_host(self) -> None:
        version = self.parser.get_http_version()
        if version not in _VERSIONS:
            raise HttpProblem(505, "HttpVersionNotSupported", f"HTTP/{version} is not supported: send HTTP/1.1")
        hosts = [value for name, value in self.headers if name == b"host"]
        # RFC 9112, 3.2; a request of HTTP/1.0 may have none
        if len(hosts) > 1 or (not hosts and version != "1.0"):
            raise HttpProblem(400, "BadRequest", f"the request has {len(hosts)} Host headers: send exactly one")
        if hosts and not hosts[0].strip():
            raise HttpProblem(400, "BadRequest", "the Host header is empty: send the host and port of the server's URL")

    def _check_header(self, name: bytes, value: bytes) -> None:
        if name == b"content-length":
            # the parser has seen to it that this is a number
            self._check_body(int(value))
        elif name == b"content-encoding" and value.lower() != b"identity":
            raise HttpProblem(415, "UnsupportedEncoding", "bodies are taken as they are, not compressed")
        elif name == b"upgrade":
            if value.lower() == b"websocket":
                self._check_websocket()
            self._is_last = True

    def _check_websocket(self) -> None:
        if not self.url.partition(b"?")[0].endswith(STREAM_PATH.encode()):
            raise HttpProblem(400, "BadRequest", f"no WebSocket is here, but at /v1/loaders/KEY{STREAM_PATH}")
        if self._unanswered():
            raise HttpProblem(400, "BadRequest", "a WebSocket was requested before earlier requests were answered")

    def handle_websocket_upgrade(self) -> None:
        """Leave the connection to the other protocol."""
        self._watch.leave(self)
        super().handle_websocket_upgrade()

    def _check_body(self, size: int) -> None:
        limit = self._limits.max_body_bytes
        if size > limit:
            raise HttpProblem(
                413, "BodyTooLarge", f"the body is larger than the {limit:,} bytes that are allowed (max_body_bytes)"
            )

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._framing = 0
        self._received += len(body)
        self._check_body(self._received)
        self._chunks += 1
        if self._chunks > MAX_SMALL_CHUNKS + self._received // MIN_CHUNK_BYTES:
            raise HttpProblem(
                400,
                "BadRequest",
                f"{self._chunks:,} chunks for {self._received:,} bytes of a body: send chunks of at least "
                f"{MIN_CHUNK_BYTES} bytes",
            )
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request's last byte."""
        self._phase = _Phase.QUIET
        super().on_message_complete()
        self._settle()

    def on_response_complete(self) -> None:
        """An answer's last byte was written."""
        super().on_response_complete()
        if self._phase is _Phase.BODY and self.expect_100_continue and not self._received:
            # the client may leave its body out now, so what it sends next could be either
            self.transport.close()
        self._settle()

    def pause_writing(self) -> None:
        """Wait until the peer has read more, and count what waits to be sent."""
        super().pause_writing()
        self._watch.charge(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Go on sending."""
        super().resume_writing()
        self._settle()

    def _settle(self) -> None:
        """Release the memory that is counted for requests, when all of them are received and answered."""
        if self._phase is _Phase.QUIET and not self._unanswered():
            self._watch.settle(self, CONNECTION_BYTES + self.transport.get_write_buffer_size())

    # -- what the watch calls

    def check(self, now: float) -> None:
        """Hold the connection to its limits."""
        if self._unread.too_much(now, self.account):
            self._watch.count("answer not read")
            self.break_off()
        elif self.transport.is_closing():
            pass  # what was written is being sent
        elif self._phase is _Phase.REFUSED:
            if now - self._since > self._limits.lingering_time:
                self.transport.abort()
        elif self.flow.read_paused or (self._phase is _Phase.HEAD and self._unanswered()):
            self._mark(now)  # we do not read, or are not done with the request before
        elif self._phase is _Phase.HEAD:
            self._check_head(now)
        elif self._phase is _Phase.BODY:
            self._check_rate(now)

    def break_off(self) -> None:
        """Close without sending what is left."""
        break_off(self.transport)

    def _check_head(self, now: float) -> None:
        limit = self._limits.header_timeout
        if now - self._since > limit:
            self._refuse(
                HttpProblem(
                    408, "RequestTimeout", f"the request's headers were not complete after {limit:g} s (header_timeout)"
                )
            )

    def _check_rate(self, now: float) -> None:
        seconds = now - self._since
        if seconds <= self._limits.body_timeout:
            return
        rate = self._limits.min_body_rate
        if self._received - self._marked < seconds * rate:
            self._refuse(
                HttpProblem(408, "RequestTimeout", f"the body arrives at less than {rate:,.0f} bytes/s (min_body_rate)")
            )
        self._mark(now)

    # -- state

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._received = 0
        self._chunks = 0
        """Pieces in which the parser has handed over the body: one for each chunk, or more."""
        self._framing = 0
        self._mark(self.loop.time())

    def _mark(self, now: float) -> None:
        """Measure from here on."""
        self._since = now
        self._marked = self._received

    def _unanswered(self) -> list[RequestResponseCycle]:
        cycles = self._earlier if self.cycle is None else [*self._earlier, self.cycle]
        return [cycle for cycle in cycles if not cycle.response_complete]

    @staticmethod
    def _forsake(cycle: RequestResponseCycle) -> None:
        """The answer is not wanted any more."""
        cycle.disconnected = True
        cycle.message_event.set()

    def _refuse(self, refusal: HttpProblem) -> None:
        """Say why, where that can be told from another answer, and read no further."""
        self._watch.count(f"{refusal.status} {refusal.code}")
        has_asked = self._phase is not _Phase.HEAD or self._framing > 0 or refusal.status != 408
        can_be_told = has_asked and self._nothing_is_answered()
        self._enter(_Phase.REFUSED)
        for cycle in self._unanswered():
            self._forsake(cycle)
        self.flow.resume_reading()
        if can_be_told:
            self._tell(refusal)
        else:
            self.transport.abort()

    def _nothing_is_answered(self) -> bool:
        """Whether the next bytes to be sent answer the request at hand."""
        waiting = self._unanswered()
        if self._phase is _Phase.BODY:
            return waiting == [self.cycle] and not self.cycle.response_started
        return not waiting

    def _tell(self, refusal: HttpProblem) -> None:
        self.transport.write(last_answer(refusal, self.server_state.default_headers))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()  # TLS: what still comes is read and thrown away until the peer has taken note


def last_answer(refusal: HttpProblem, default_headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """An answer that says why a request is not read, after which its connection is closed."""
    request = request_ids.new_id()
    content = encoded(refusal.status, refusal.code, refusal.detail, request)
    head = [
        *default_headers,
        (b"content-type", PROBLEM_MEDIA_TYPE.encode()),
        (b"content-length", str(len(content)).encode()),
        (request_ids.HEADER, request.encode()),
        (b"connection", b"close"),
        *((name.encode(), value.encode()) for name, value in refusal.headers.items()),
    ]
    lines = b"".join(b"%b: %b\r\n" % header for header in head)
    return STATUS_LINE[refusal.status] + lines + b"\r\n" + content


class Unread:
    """What a peer has not taken of what is written to its connection.

    Args:
        transport: The connection's.
        limits: How fast it must take it.
    """

    def __init__(self, transport: asyncio.Transport, limits: ClientLimits) -> None:
        self._transport = transport
        self._limits = limits
        self._waiting = 0
        self._since = 0.0
        self._taking_from = (0.0, 0)
        """When there were how many bytes that the peer had not taken: its rate is measured from there."""

    def too_much(self, now: float, account: Account | None) -> bool:
        """Whether it takes too little; while its principal leaves much unread, it must take what there is faster."""
        patience = self._limits.send_timeout if account is None else account.patience(self._limits)
        pressed = patience < self._limits.send_timeout
        unread = self._seconds(now)
        is_slow = self._is_taken_slowly(now)
        return unread > patience or (pressed and is_slow)

    def _seconds(self, now: float) -> float:
        waiting = self._transport.get_write_buffer_size()
        if waiting:
            waiting += _unacknowledged(self._transport)
        if waiting != self._waiting:
            self._waiting, self._since = waiting, now
        return now - self._since if waiting else 0.0

    def _is_taken_slowly(self, now: float) -> bool:
        since, unread = self._taking_from
        seconds = now - since
        if self._waiting and self._waiting <= unread and seconds < self._limits.pressure_send_timeout:
            return False
        self._taking_from = (now, self._waiting)
        return 0 < self._waiting <= unread and unread - self._waiting < self._limits.pressure_min_send_rate * seconds


def break_off(transport: asyncio.Transport) -> None:
    """Close a connection without sending what is left."""
    if transport.get_write_buffer_size():
        # else the kernel would go on offering its part to a peer that does not read, for minutes and megabytes
        with suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    transport.abort()


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Bytes that the kernel has and the peer has not: they show that a slow peer reads, where our buffer does not."""
    sock = transport.get_extra_info("socket")
    try:
        found: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]
    except (OSError, ValueError):
        return 0  # it was closed meanwhile
    return found


def raise_file_limit() -> None:
    """Allow this process as many open files as the system lets it: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_for(num_workers: int) -> int:
    """How many connections leave enough descriptors for the rest of the server.

    Raises:
        ConfigError: When too few do.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 2**20
    # sessions have workers of their own, so the more the system gives, the more is kept
    kept = max(OWN_FILES + FILES_PER_WORKER * num_workers, limit // 8)
    if limit - kept < MIN_CONNECTIONS:
        raise ConfigError(
            f"the limit of open files (RLIMIT_NOFILE) is {limit}, and a server with {counted(num_workers, 'worker')} "
            f"needs {kept + MIN_CONNECTIONS}: raise it with ulimit -n"
        )
    return limit - kept
