"""HTTP/1.1 connections with timeouts, size limits and connection limits, composed around uvicorn's protocol.

uvicorn has no timeout for receiving a request, no size limit for headers and bodies, and no timeout for a client that
does not read its response. A `Connection` parses received data first, enforces the limits (docs/limits.md), and
forwards each request to an instance of uvicorn's protocol in a canonical form:

- Trailers, chunk extensions, and upgrades to protocols other than WebSocket are not forwarded.
- uvicorn receives one request at a time. Pipelined requests are queued here, so that the running request is notified
  when its connection is lost. (With its own pipeline, uvicorn notifies the last request, which has not started.)
- `observed`, an ASGI middleware, detects the start and the end of responses.

A request that exceeds a limit gets an error response unless its response has started, and its connection is closed.
uvicorn closes connections that are idle between two requests; TCP keep-alive detects dead peers of idle connections.

Rejected: a subclass of uvicorn's HttpToolsProtocol. It overrode and used 34 members that uvicorn does not document, and
a renamed member could have disabled a limit without an error. The price is that headers are parsed twice: 4 to 5 us of
CPU time per request (minimum of many rounds: GET 26 -> 30 us, POST of 4 KB 29 -> 34 us in this layer), about 4 % of a
request for a small batch, and no measurable difference for a response of 38 MB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from teleloader_server.auth.certificates import PEER_CERTIFICATE, PeerCertificate
from teleloader_server.dispatch.quotas import Quota, quota_of
from teleloader_server.problems import PROBLEM_CODE, HttpProblem
from teleloader_server.web.guard_manager import CONNECTION_BYTES, FIELD_BYTES, REQUEST_BYTES, ConnectionManager
from teleloader_server.web.guard_rules import (
    WEBSOCKET,
    Head,
    Phase,
    RequestProgress,
    SlowReader,
    check_head,
    check_pipelined,
    check_url_size,
)
from teleloader_server.web.guard_transport import JoiningTransport, abort, final_response, unread_bytes

_KEY: Final = "teleloader.connection"
"""Key under which the state in an ASGI scope contains the `Connection` of the request."""
JOINED: Final = "teleloader.joined"
"""Key under which an ASGI message ``http.response.start`` contains True if its body follows at once."""
_EXCHANGE: Final = "teleloader.exchange"
"""Key under which an ASGI scope contains the `Exchange` of the request."""


class Exchange:
    """Exchange of a request and its response, until the response is complete."""

    __slots__ = ("has_response_begun", "is_disconnected", "on_disconnect", "status", "transport", "unforwarded")

    def __init__(self, transport: asyncio.Transport | None = None) -> None:
        self.transport = transport
        """Transport of the connection; None outside of a `Connection`."""
        self.has_response_begun = False
        self.status = 0
        """Status code of the response; 0 before the response."""
        self.unforwarded: list[bytes] = []
        """Parts of the request that were not forwarded to uvicorn yet."""
        self.is_disconnected = False
        """True if the client disconnected before the response was complete."""
        self.on_disconnect: Callable[[], object] = _nothing
        """Function that is called if the client disconnects before the response is complete."""

    def disconnect(self) -> None:
        """Record that the client has disconnected, and notify the application."""
        if not self.is_disconnected:
            self.is_disconnected = True
            self.on_disconnect()


def _nothing() -> None:
    pass


@contextmanager
def calling_on_disconnect(scope: Scope, callback: Callable[[], object]) -> Iterator[Exchange]:
    """Context manager that calls `callback` if the client disconnects, or has already disconnected.

    ASGI reports a disconnect only as the result of `receive`, which would need a task beside each request that waits.

    Args:
        scope: ASGI scope of a request.
        callback: Function to call; not called for a scope that is not of a `Connection`.
    """
    exchange: Exchange = scope.get(_EXCHANGE) or Exchange()
    exchange.on_disconnect = callback
    if exchange.is_disconnected:
        callback()
    try:
        yield exchange
    finally:
        exchange.on_disconnect = _nothing


class Connection(asyncio.Protocol):
    """asyncio protocol of one HTTP/1.1 connection; enforces limits and forwards requests to uvicorn.

    Args:
        manager: Manager of all connections of the server.
        config: Loaded configuration of uvicorn, whose application is wrapped in `observed`.
        server_state: State of uvicorn's server.
    """

    # slots, because there are many connections, and a dictionary of attributes takes 1 KB each
    __slots__ = (
        "_default_headers", "_exchanges", "_head", "_headers", "_joining", "_limits", "_loop", "_manager", "_parser",
        "_progress", "_receiving", "_scope", "_slow_reader", "_state", "_transport", "_url", "_uvicorn", "address",
        "has_requested",
    )  # fmt: skip

    def __init__(self, manager: ConnectionManager, config: uvicorn.Config, server_state: ServerState) -> None:
        self.address = ""
        """IP address of the client."""
        self._manager = manager
        self._limits = manager.limits
        self._state: dict[str, Any] = {_KEY: self}
        """State that uvicorn copies into the scope of each request."""
        protocol: Any = config.http_protocol_class
        self._uvicorn: Any = protocol(config=config, server_state=server_state, app_state=self._state)
        self._default_headers = server_state.default_headers
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpRequestParser(self)
        # a request with `Connection: close` gets its response even if another request follows
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head = Head()
        self._progress = RequestProgress(self._limits, self._loop.time())
        self._slow_reader = SlowReader(self._limits)
        self._exchanges: list[Exchange] = []
        """Incomplete exchanges, oldest first; the first one is being processed by uvicorn."""
        self._receiving = Exchange()
        """Exchange of the last request; its response may be complete before the request is."""
        self._scope: Scope | None = None
        """ASGI scope of the last request that the application received."""
        self.has_requested = False
        """True if the client has sent a request."""

    @property
    def is_responding(self) -> bool:
        """True while a response is incomplete."""
        return bool(self._exchanges) or self._transport.get_write_buffer_size() > 0

    @property
    def quota(self) -> Quota | None:
        """Quota of the last request's principal; None if that request was not authenticated."""
        return None if self._scope is None else quota_of(self._scope)

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit a new connection, or reject the connection with status 503 if a connection limit is reached."""
        self._transport = cast("asyncio.Transport", transport)
        self._joining = JoiningTransport(self._transport)
        self._uvicorn.connection_made(self._joining)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        certificate = transport.get_extra_info("peercert")
        if certificate:
            self._state[PEER_CERTIFICATE] = PeerCertificate(certificate)
        reason = self._manager.admit(self)
        if reason is not None:
            self._refuse(HttpProblem(503, "ServerUnavailable", reason))
            self._transport.close()  # without waiting for the client to read: descriptors are scarce

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the running request that the connection is closed, and break reference cycles."""
        self._manager.leave(self)
        self._disconnect(exc)
        self._parser = self._scope = None
        self._state.clear()

    def _disconnect(self, exc: Exception | None) -> None:
        self._uvicorn.connection_lost(exc)
        if self._exchanges:
            self._exchanges[0].disconnect()

    def data_received(self, data: bytes) -> None:
        """Parse received data, enforce the limits, and forward requests to uvicorn."""
        if self._progress.phase is Phase.REFUSED:
            return
        if self._progress.phase is Phase.IDLE:
            self._enter(Phase.HEAD)
        try:
            self._feed(data)
        except httptools.HttpParserUpgrade:
            pass  # either `WebSocketConnection` has taken over, or the connection closes after the response
        except httptools.HttpParserError as error:
            cause = error.__context__
            if not isinstance(cause, HttpProblem):
                cause = HttpProblem(400, "BadRequest", f"invalid HTTP/1.1 request: {error}")
            self._refuse(cause)
        except HttpProblem as problem:
            self._refuse(problem)

    def eof_received(self) -> None:
        """Forward the client's end of file to uvicorn; asyncio closes the transport afterwards."""
        self._uvicorn.eof_received()

    def pause_writing(self) -> None:
        """Pause the response until the client reads, and count the unsent bytes."""
        self._uvicorn.pause_writing()
        self._manager.charge(self, self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Resume sending the response."""
        self._uvicorn.resume_writing()
        self._settle()

    def _feed(self, data: bytes) -> None:
        progress, start = self._progress, 0
        while start < len(data):
            # a piece may contain the end of one request and the headers of the next, so its size is limited like that
            # of headers
            piece = data[start : start + progress.allowance]
            if not piece:
                raise progress.too_much_framing(
                    is_request_line=not self._headers and len(self._url) > self._limits.max_header_bytes // 2
                )
            if progress.phase is not Phase.BODY or self._exchanges:  # a body after the response is discarded
                self._manager.charge(self, len(piece))
            progress.add_framing(len(piece))
            self._parser.feed_data(piece)
            start += len(piece)
        if progress.phase is Phase.BODY:
            self._forward_received()
        elif progress.phase is Phase.HEAD and not self._exchanges:
            self._uvicorn.data_received(b"")  # the connection is not idle any more

    # -- called by the parser; an exception ends parsing

    def on_message_begin(self) -> None:
        """Start a request (parser callback)."""
        if self._progress.phase is not Phase.HEAD:
            self._enter(Phase.HEAD)
        self._manager.charge(self, REQUEST_BYTES)
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        """Append received bytes to the request's URL (parser callback)."""
        self._url += url
        check_url_size(len(self._url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Append a header field (parser callback).

        Trailer fields are dropped, because RFC 9110, 6.5.1 forbids merging them into the headers.
        """
        if self._progress.phase is Phase.BODY:
            return
        limit = self._limits.max_headers
        if len(self._headers) == limit:
            raise HttpProblem(
                431,
                "HeadTooLarge",
                f"the request has more than {limit:,} header fields: send fewer, or increase max_headers in [limits]",
            )
        self._manager.charge(self, FIELD_BYTES)
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Check the headers, and start an exchange or reject the request (parser callback)."""
        check_pipelined(len(self._exchanges), self._limits)
        version, method = self._parser.get_http_version(), self._parser.get_method()
        self._head = head = check_head(version, self._url, self._headers, self._limits)
        self._check_target(method)
        if self._parser.should_upgrade() and head.upgrade == WEBSOCKET and self._exchanges:
            raise HttpProblem(
                400,
                "BadRequest",
                "cannot open a WebSocket while earlier requests are pending: wait for their responses",
            )
        self.has_requested = True
        self._receiving = exchange = Exchange(self._transport)
        self._exchanges.append(exchange)
        if len(self._exchanges) > 1:
            self._transport.pause_reading()
        self._enter(Phase.BODY)
        self._canonicalize()
        exchange.unforwarded.append(b"%b %b HTTP/%b\r\n" % (method, self._url, version.encode()))
        exchange.unforwarded += [b"%b: %b\r\n" % field for field in self._headers]
        exchange.unforwarded.append(b"\r\n")

    def _check_target(self, method: bytes) -> None:
        """Reject a request target that uvicorn cannot decode."""
        try:
            path = httptools.parse_url(self._url).path
            is_path = method != b"CONNECT" and path is not None and path.isascii()
        except httptools.HttpParserInvalidURLError:
            is_path = False
        if not is_path:
            raise HttpProblem(
                400,
                "BadRequest",
                f"invalid request target {self._url[:200].decode('latin-1')!r}: expected an ASCII path such as "
                "/v1/datasets; percent-encode other characters",
            )

    def _canonicalize(self) -> None:
        """Replace header fields that uvicorn would interpret differently from this class."""
        if self._parser.should_upgrade():
            if self._head.upgrade == WEBSOCKET:
                self._replace({b"connection": b"upgrade", b"upgrade": WEBSOCKET})
                # `WebSocketConnection` takes over: the manager counts it in place of this connection
                self._manager.leave(self)
                del self._state[_KEY]  # the certificate stays: uvicorn passes the state to `WebSocketConnection`
                return
            # the parser has treated the body as data of the other protocol
            self._replace({b"content-length": b"", b"transfer-encoding": b""})
            self._head = Head()
        if self._head.upgrade or self._parser.should_upgrade() or self._manager.draining:
            # further data may belong to the other protocol
            self._replace({b"connection": b"close", b"upgrade": b""})

    def _replace(self, fields: dict[bytes, bytes]) -> None:
        """Replace header fields; fields with an empty value are removed."""
        self._headers = [field for field in self._headers if field[0] not in fields]
        self._headers += [field for field in fields.items() if field[1]]

    def on_body(self, body: bytes) -> None:
        """Append received bytes to the request's body (parser callback)."""
        self._progress.add_content(len(body))
        if self._head.is_chunked:
            self._receiving.unforwarded += [b"%x\r\n" % len(body), body, b"\r\n"]
        else:
            self._receiving.unforwarded.append(body)

    def on_message_complete(self) -> None:
        """Complete a request (parser callback)."""
        if self._head.is_chunked:
            self._receiving.unforwarded.append(b"0\r\n\r\n")
        self._forward_received()
        self._headers.clear()
        self._progress.phase = Phase.IDLE
        self._settle()

    # -- called by the application

    def _forward_received(self) -> None:
        """Forward the received part of a request to uvicorn, unless earlier requests wait for their responses."""
        if not self._exchanges or self._exchanges[0] is self._receiving:
            self._forward(self._receiving)

    def _forward(self, exchange: Exchange) -> None:
        if exchange.unforwarded:
            data = b"".join(exchange.unforwarded)
            exchange.unforwarded.clear()
            self._uvicorn.data_received(data)

    async def respond(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for a request, and detect the start and the end of its response."""
        scope[_EXCHANGE] = exchange = self._exchanges[0]
        self._scope = scope
        http, began = self._manager.http, self._loop.time()

        async def finish(message: Message) -> None:
            await send(message)
            self._complete(exchange)

        # a plain function and not a coroutine function, which would cost each of many messages a coroutine
        def observe(message: Message) -> Any:
            if message["type"] == "http.response.start":
                exchange.has_response_begun = True
                exchange.status = status = message["status"]
                if status >= HTTPStatus.BAD_REQUEST:
                    http.refusals[message.get(PROBLEM_CODE, "Other")] += 1
                if message.get(JOINED):
                    self._joining.hold_next()
            elif not message.get("more_body", False):
                return finish(message)
            return send(message)

        try:
            await app(scope, receive, observe)
        finally:
            self._complete(exchange)
            route = scope.get("route")
            http.responded("" if route is None else route.path, exchange.status, self._loop.time() - began)

    def _complete(self, exchange: Exchange) -> None:
        """End an exchange, and forward the next request to uvicorn."""
        if not self._exchanges or self._exchanges[0] is not exchange:
            return  # already ended
        del self._exchanges[0]
        if self._progress.phase is Phase.REFUSED or self._transport.is_closing():
            return
        if self._exchanges:
            self._transport.resume_reading()
            self._forward(self._exchanges[0])
        elif self._is_out_of_step():
            self._transport.close()
        self._settle()

    def _is_out_of_step(self) -> bool:
        """Return True if it is unknown whether the next received data belongs to a body or to a new request.

        This happens when the response was sent before ``100 Continue``: the client may then omit the body.
        """
        progress = self._progress
        return progress.phase is Phase.BODY and self._head.expects_continue and not progress.received

    def _settle(self) -> None:
        """Release the memory counted for requests once all requests are received and have their responses."""
        if self._progress.phase is Phase.IDLE and not self._exchanges:
            self._manager.settle(self, CONNECTION_BYTES + self._transport.get_write_buffer_size())

    # -- called by the manager

    def shutdown(self) -> None:
        """Close the connection after responses to all pending requests."""
        if not self._exchanges:
            self._transport.close()
        elif len(self._exchanges) == 1:
            self._uvicorn.shutdown()  # the response then has the header `Connection: close`

    def check(self, now: float) -> None:
        """Close the connection if the client reads too slowly; reject a request that arrives too slowly."""
        quota, progress = self.quota, self._progress
        patience = self._limits.send_timeout if quota is None else quota.patience(self._limits)
        if self._slow_reader.is_too_slow(now, unread_bytes(self._transport), patience):
            self._manager.count("response not read")
            self.abort()
        elif self._transport.is_closing():
            pass  # the rest of the response is being sent
        elif progress.phase is Phase.REFUSED:
            if progress.has_lingered(now):
                self._transport.abort()
        elif not self._transport.is_reading() or (progress.phase is Phase.HEAD and self._exchanges):
            progress.restart(now)
        elif (problem := progress.problem(now)) is not None:
            self._refuse(problem)

    def abort(self) -> None:
        """Close the connection immediately, and discard unsent data."""
        abort(self._transport)

    # -- rejection

    def _enter(self, phase: Phase) -> None:
        self._progress.enter(phase, self._loop.time())

    def _refuse(self, problem: HttpProblem) -> None:
        """Reject the request that is being received: send an error response, and discard further data.

        No response is sent if the client could mistake it for the response to another request.
        """
        self._manager.count(f"{problem.status} {problem.code}")
        self._manager.http.refusals[problem.code] += 1
        # a client that sent nothing within the timeout gets no response
        is_reported = (self._progress.has_begun or problem.status != 408) and self._is_next_response()
        self._enter(Phase.REFUSED)
        self._disconnect(ConnectionAbortedError(problem.detail))
        self._transport.resume_reading()
        if not is_reported:
            self._transport.abort()
            return
        self._transport.write(final_response(problem, self._default_headers))
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()  # TLS: asyncio discards received data until the client has closed

    def _is_next_response(self) -> bool:
        """Return True if the next response to be sent belongs to the request that is being received."""
        if self._progress.phase is not Phase.BODY:
            return not self._exchanges
        return self._exchanges == [self._receiving] and not self._receiving.has_response_begun


def observed(app: ASGIApp) -> ASGIApp:
    """Wrap an ASGI application so that each `Connection` detects the start and the end of its responses."""

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            connection: Connection = scope["state"].pop(_KEY)
            await connection.respond(app, scope, receive, send)
        else:
            await app(scope, receive, send)

    return respond
