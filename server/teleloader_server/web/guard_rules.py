"""Rules that enforce connection limits: pure functions of bytes, counts and times, without I/O or clocks.

`guard` and `websocket` apply the rules. A violated rule is reported as an `HttpProblem` that names the limit.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, NamedTuple

from teleloader_server.limits import ClientLimits
from teleloader_server.problems import HttpProblem
from teleloader_shared.messages import STREAM_PATH

MAX_URL_BYTES: Final = 8 * 2**10
"""Maximum size of a request's URL: uvicorn decodes the path, which blocks the event loop."""
MIN_CHUNK_BYTES: Final = 64
"""Minimum mean size of a body's chunks: each chunk takes as much time as a kilobyte of content."""
MAX_SMALL_CHUNKS: Final = 256
"""Number of chunks of a body that may be smaller than `MIN_CHUNK_BYTES`."""
WEBSOCKET: Final = b"websocket"
_VERSIONS: Final = ("1.0", "1.1")
_CHECKED: Final = frozenset({
    b"content-encoding", b"content-length", b"expect", b"host", b"transfer-encoding", b"upgrade",
})  # fmt: skip


class Phase(enum.Enum):
    """Part of a request that is expected next on a connection."""

    HEAD = "request line and headers"
    BODY = "body"
    IDLE = "nothing: the request is complete"
    REFUSED = "data that the server discards"


class Head(NamedTuple):
    """Request properties parsed from the headers."""

    is_chunked: bool = False
    expects_continue: bool = False
    upgrade: bytes = b""
    """Value of the Upgrade header in lower case; empty without the header."""


def check_head(version: str, url: bytes, headers: Sequence[tuple[bytes, bytes]], limits: ClientLimits) -> Head:
    """Validate the request line and the headers of a request, and return its properties.

    Args:
        version: HTTP version of the request line.
        url: Target of the request line.
        headers: Header fields with names in lower case.
        limits: Limits of the server.

    Raises:
        HttpProblem: If the request is invalid or exceeds a limit.
    """
    if version not in _VERSIONS:
        raise HttpProblem(505, "HttpVersionNotSupported", f"HTTP/{version} is not supported: send HTTP/1.1")
    head, hosts = Head(), []
    for name, value in headers:
        if name not in _CHECKED:
            continue
        if name == b"host":
            hosts.append(value)
        elif name == b"content-length":
            check_body_size(int(value), limits)  # the parser accepts digits only
        elif name == b"transfer-encoding":
            head = head._replace(is_chunked=True)  # the parser accepts no other framing
        elif name == b"expect":
            head = head._replace(expects_continue=value.lower() == b"100-continue")
        elif name == b"upgrade":
            head = head._replace(upgrade=value.lower())
        else:
            _check_encoding(value)
    _check_hosts(hosts, version)
    if head.upgrade == WEBSOCKET and not url.partition(b"?")[0].endswith(STREAM_PATH.encode()):
        raise HttpProblem(
            400,
            "BadRequest",
            f"{url[:200].decode('latin-1')!r} does not accept WebSocket connections: connect to "
            f"/v1/loaders/KEY{STREAM_PATH}",
        )
    return head


def _check_hosts(hosts: Sequence[bytes], version: str) -> None:
    """Require one Host header (RFC 9112, section 3.2); HTTP/1.0 may omit it."""
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise HttpProblem(400, "BadRequest", f"the request has {len(hosts)} Host headers: send exactly one")
    if hosts and not hosts[0].strip():
        raise HttpProblem(400, "BadRequest", "the Host header is empty: send the host and port of the server's URL")


def _check_encoding(encoding: bytes) -> None:
    if encoding.lower() != b"identity":
        name = encoding[:64].decode("latin-1")
        raise HttpProblem(
            415, "UnsupportedEncoding", f"content encoding {name!r} is not supported: send an uncompressed body"
        )


def check_url_size(nbytes: int) -> None:
    """Raise `HttpProblem` (status 414) if a URL exceeds `MAX_URL_BYTES`."""
    if nbytes > MAX_URL_BYTES:
        raise HttpProblem(
            414, "UriTooLong", f"the URL has at least {nbytes:,} bytes, and the limit is {MAX_URL_BYTES:,}: shorten it"
        )


def check_body_size(nbytes: int, limits: ClientLimits, name: str = "max_body_bytes") -> None:
    """Raise `HttpProblem` (status 413) if a request body exceeds the limit with the given name."""
    if nbytes > (limit := getattr(limits, name)):
        raise HttpProblem(
            413,
            "BodyTooLarge",
            f"the body has at least {nbytes:,} bytes, and the limit is {limit:,} bytes ({name}). Send fewer index "
            f"lists or smaller states per request, or increase {name} in [limits] of the server",
        )


def check_pipelined(waiting: int, limits: ClientLimits) -> None:
    """Raise `HttpProblem` (status 400) if `waiting` pipelined requests reach the limit per connection."""
    if waiting >= limits.max_pipelined:
        raise HttpProblem(
            400,
            "BadRequest",
            f"the connection has {waiting} pending requests, the maximum (max_pipelined): read their responses before "
            "sending more requests",
        )


class ArrivalRate:
    """Arrival rate of a request body or WebSocket message, measured over intervals of `body_timeout`.

    Args:
        limits: Limits of the server.
        now: Start of the first interval, in seconds of the event loop's clock.
    """

    __slots__ = ("_limits", "_received", "_since")

    def __init__(self, limits: ClientLimits, now: float) -> None:
        self._limits = limits
        self.restart(now)

    def restart(self, now: float) -> None:
        """Start a new measurement interval."""
        self._since = now
        self._received = 0

    def add(self, nbytes: int) -> None:
        """Add received bytes to the current interval."""
        self._received += nbytes

    def problem(self, now: float, what: str) -> HttpProblem | None:
        """Return an error (status 408) if a completed interval had a rate below `min_body_rate`, else None.

        Args:
            now: Current time.
            what: Name of the body or message, for the error message.
        """
        seconds = now - self._since
        if seconds <= self._limits.body_timeout:
            return None
        rate = self._limits.min_body_rate
        is_slow = self._received < seconds * rate
        self.restart(now)
        if not is_slow:
            return None
        return HttpProblem(
            408, "RequestTimeout", f"{what} arrived at less than {rate:,.0f} bytes/s (min_body_rate): send it faster"
        )


class RequestProgress:
    """Progress of receiving a request, checked against size limits and timeouts.

    Args:
        limits: Limits of the server.
        now: Time at which the connection was established; `header_timeout` of its first request starts then.
    """

    __slots__ = ("_chunks", "_framing", "_limits", "_rate", "_since", "phase", "received")

    def __init__(self, limits: ClientLimits, now: float) -> None:
        self._limits = limits
        self._rate = ArrivalRate(limits, now)
        self.enter(Phase.HEAD, now)

    def enter(self, phase: Phase, now: float) -> None:
        """Enter the next phase of receiving a request, and reset the counters."""
        self.phase = phase
        self.received = 0
        """Received bytes of the body's content, without chunk framing."""
        self._chunks = 0
        """Number of parts in which the parser reported the body: at least one per chunk."""
        self._framing = 0
        """Bytes received since the start of the request line, or since the last byte of the body's content."""
        self.restart(now)

    def restart(self, now: float) -> None:
        """Restart the timeouts of the current phase, to exclude time in which the server did not read."""
        self._since = now
        self._rate.restart(now)

    @property
    def has_begun(self) -> bool:
        """True if the client has sent part of a request."""
        return self.phase is not Phase.HEAD or self._framing > 0

    @property
    def allowance(self) -> int:
        """Number of bytes that may be parsed before the next check of `max_header_bytes`."""
        return self._limits.max_header_bytes - self._framing

    def add_framing(self, nbytes: int) -> None:
        """Count unparsed bytes as headers or chunk framing; `add_content` resets this count."""
        self._framing += nbytes

    def add_content(self, nbytes: int) -> None:
        """Count received bytes of request body content.

        Raises:
            HttpProblem: If the body is too large, or its chunks are too small.
        """
        self._framing = 0
        self.received += nbytes
        self._rate.add(nbytes)
        check_body_size(self.received, self._limits)
        self._chunks += 1
        if self._chunks > MAX_SMALL_CHUNKS + self.received // MIN_CHUNK_BYTES:
            raise HttpProblem(
                400,
                "BadRequest",
                f"the body has {self._chunks:,} chunks for {self.received:,} bytes: send chunks of at least "
                f"{MIN_CHUNK_BYTES} bytes",
            )

    def too_much_framing(self, *, is_request_line: bool) -> HttpProblem:
        """Return the error for headers or chunk framing that exceed `max_header_bytes`.

        Args:
            is_request_line: Whether most of the bytes belong to the request line.
        """
        limit = f"the limit of {self._limits.max_header_bytes:,} bytes (max_header_bytes)"
        if self.phase is Phase.BODY:
            return HttpProblem(
                431,
                "HeadTooLarge",
                f"chunk extensions or trailers exceed {limit}: omit them, because the server ignores them",
            )
        if is_request_line:
            return HttpProblem(414, "UriTooLong", f"the request line exceeds {limit}: send fewer query parameters")
        return HttpProblem(
            431, "HeadTooLarge", f"the headers exceed {limit}: send fewer headers, or increase the limit in [limits]"
        )

    def problem(self, now: float) -> HttpProblem | None:
        """Return the error (status 408) if the request exceeds a timeout, else None."""
        if self.phase is Phase.BODY:
            return self._rate.problem(now, "the body")
        limit = self._limits.header_timeout
        if self.phase is not Phase.HEAD or now - self._since <= limit:
            return None
        detail = f"the headers were incomplete after {limit:g} s (header_timeout): send them faster"
        return HttpProblem(408, "RequestTimeout", detail)

    def has_lingered(self, now: float) -> bool:
        """Return True if `lingering_time` has passed since the request was rejected."""
        return self.phase is Phase.REFUSED and now - self._since > self._limits.lingering_time


class SlowReader:
    """Detector of clients that read responses too slowly.

    Args:
        limits: Limits of the server.
    """

    __slots__ = ("_interval", "_limits", "_since", "_unread")

    def __init__(self, limits: ClientLimits) -> None:
        self._limits = limits
        self._unread = 0
        self._since = 0.0
        """Time at which the number of unread bytes last changed."""
        self._interval = (0.0, 0)
        """Start of the interval over which the rate is measured: time, and unread bytes at that time."""

    def is_too_slow(self, now: float, unread: int, patience: float) -> bool:
        """Return True if the client reads too slowly and must be disconnected.

        Args:
            now: Current time.
            unread: Bytes of responses that the client has not read.
            patience: Seconds within which the client must read at least one byte. A value below `send_timeout` means
                that the principal's unread responses exceed its memory share; then `pressure_min_send_rate` applies
                as well.
        """
        if unread != self._unread:
            self._unread, self._since = unread, now
        is_below_rate = self._is_below_rate(now)
        if not unread:
            return False
        return now - self._since > patience or (patience < self._limits.send_timeout and is_below_rate)

    def _is_below_rate(self, now: float) -> bool:
        since, before = self._interval
        seconds = now - since
        if 0 < self._unread <= before and seconds < self._limits.pressure_send_timeout:
            return False
        self._interval = (now, self._unread)
        return 0 < self._unread <= before and before - self._unread < self._limits.pressure_min_send_rate * seconds
