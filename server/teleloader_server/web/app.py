"""ASGI application of the server, and the uvicorn server that runs it."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar, cast

import uvicorn

from teleloader_server import audit
from teleloader_server.auth.authenticator import Authenticator
from teleloader_server.auth.rate_limit import AddressLimit, RateLimiter
from teleloader_server.auth.tls import ClientTls, Renewal, TlsFiles
from teleloader_server.config import DEFAULT_SHUTDOWN_GRACE
from teleloader_server.dispatch.quotas import BodyBudget
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.fleet.registry import Registry
from teleloader_server.request_ids import Identified
from teleloader_server.stats.collector import StatsCollector
from teleloader_server.stats.requests import HttpCounters
from teleloader_server.web.authentication import Authentication
from teleloader_server.web.batches import batch_routes, make_router
from teleloader_server.web.dashboard import add_dashboard
from teleloader_server.web.direct_routes import Application
from teleloader_server.web.guard import Connection, observed
from teleloader_server.web.guard_manager import ConnectionManager, limits_for
from teleloader_server.web.handoff import Channels
from teleloader_server.web.inspection import make_inspection_router
from teleloader_server.web.lifecycle import Lifecycle, make_lifecycle_router
from teleloader_server.web.problem_responses import DOCUMENTED, handle_problems
from teleloader_server.web.servers import make_servers_router
from teleloader_server.web.sign_in import make_access_router
from teleloader_server.web.status import make_status_router
from teleloader_server.web.stream import make_stream_router
from teleloader_server.web.uvicorn_members import check_members
from teleloader_server.web.versions import make_versions_router
from teleloader_server.web.websocket import MAX_MESSAGE_BYTES, WebSocketConnection
from teleloader_shared.errors import ServerUnavailable
from teleloader_shared.secret import Secret
from teleloader_shared.server_summary import ServerSummary
from teleloader_shared.version import VERSION

KEEP_ALIVE: Final = 75
"""Timeout of idle connections in seconds, long because training steps may be long."""
TICK: Final = 1.0
"""Interval in seconds at which the Date header is updated, and token and certificate files are polled for changes."""
HANDSHAKE: Final = 10.0
"""Timeout of the TLS handshake in seconds."""
SHUTDOWN: Final = 2.0
"""Timeout of the TLS shutdown in seconds."""
DEAD_PEER: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""TCP keep-alive: the kernel closes an idle connection whose peer has not responded for 20 s.

Not TCP_USER_TIMEOUT, which overrides TCP_KEEPCNT. Peers that do not read their response are detected by `Connection`.
"""

HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
"""Security headers of all responses: no content sniffing, no framing, no cross-origin use."""
logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def create_app(
    service: LoaderService, authenticator: Authenticator | None = None, client_tls: ClientTls | None = None
) -> Application:
    """Create the ASGI application of a server.

    Args:
        service: Loader service of the application; the caller starts and closes it.
        authenticator: The server's authenticator; None disables authentication.
        client_tls: TLS settings for requests to other servers; None for the CAs of the system.
    """
    app = Application(
        title="teleloader",
        version=VERSION,
        description="Batches of hosted datasets, each with a URL of its own.",
        openapi_url=None,
        # redirects would bypass the authenticator
        redirect_slashes=False,
        responses=DOCUMENTED,
    )
    app.state.authenticator = authenticator or Authenticator()
    app.state.authenticator.on_change = service.tokens_changed
    app.state.authenticator.on_expiry = service.grants.tokens_changed.set
    app.state.rate_limiter = RateLimiter(service.quotas, service.client_limits.max_requests_per_second)
    unauthenticated = AddressLimit(service.client_limits.max_unauthenticated_requests_per_second)
    authentication = {"authenticator": app.state.authenticator, "limit": unauthenticated}
    app.add_middleware(Authentication, **authentication)
    service.is_shared = lambda: app.state.authenticator.is_shared
    app.state.service = service
    app.state.collector = StatsCollector(service)
    app.state.http = HttpCounters()
    app.state.certificate = None
    app.state.body_budget = BodyBudget(service.client_limits.max_buffered_request_bytes, service.is_shared)
    app.state.stats_streams = {}
    app.state.delayed_sign_ins = 0
    app.state.instance_key = Secret(secrets.token_hex(16))
    app.state.registry = Registry(time.monotonic())
    app.state.client_tls = client_tls or ClientTls()
    app.state.channels = None
    for make in (
        make_access_router, make_router, make_stream_router, make_status_router, make_servers_router,
        make_lifecycle_router, make_inspection_router, make_versions_router,
    ):  # fmt: skip
        app.include_router(make())
    add_dashboard(app)
    handle_problems(app)
    app.add_direct_routes(batch_routes(), authentication)
    return app


class Server(uvicorn.Server):
    """uvicorn server with connection limits, an event `listening`, and graceful shutdown.

    Args:
        service: Loader service of the application; the caller starts and closes it.
        host: Name or IP address of the listening socket.
        port: Port of the listening socket.
        grace: Seconds to complete pending requests at shutdown.
        authenticator: The server's authenticator; None disables authentication.
        tls: Certificate and key; None for plain HTTP.
        client_tls: TLS settings for requests to other servers; None for the CAs of the system.

    Raises:
        ConfigError: If the limit on open files is too low, or the installed uvicorn lacks a required member.
    """

    def __init__(
        self,
        service: LoaderService,
        host: str,
        port: int,
        grace: float = DEFAULT_SHUTDOWN_GRACE,
        authenticator: Authenticator | None = None,
        tls: TlsFiles | None = None,
        client_tls: ClientTls | None = None,
    ) -> None:
        check_members()
        limits = limits_for(service.client_limits, service.limits.num_workers)
        self.authenticator = authenticator or Authenticator()
        http = HttpCounters()
        self._connections = ConnectionManager(limits, self.authenticator, http)
        service.connections = lambda: len(self._connections.connections)
        service.publisher.reserve = self._reserve
        self._exit_requested = asyncio.Event()
        app = create_app(service, self.authenticator, client_tls)
        self._state = app.state
        app.state.http = http
        self.instance_key: Final[Secret] = app.state.instance_key
        """Secret of this server process, which its announcements contain."""
        self._channels = app.state.channels = Channels(service.lender, self._connections)
        self.lifecycle: Final = Lifecycle(self._exit_requested, self._connections)
        app.state.lifecycle = self.lifecycle
        self.before_drain: Callable[[], Coroutine[Any, Any, None]] = _nothing
        """Called at the start of the shutdown, while the server still accepts requests."""
        self._collector: StatsCollector = app.state.collector
        super().__init__(
            uvicorn.Config(
                observed(Identified(app)),
                host=host,
                port=port,
                http="httptools",
                ws=cast("type[asyncio.Protocol]", functools.partial(WebSocketConnection, self._connections)),
                ws_max_size=MAX_MESSAGE_BYTES,
                # TCP keep-alive detects dead peers; pings would also disconnect a peer that reads a large batch slowly
                ws_ping_interval=None,
                ws_per_message_deflate=False,
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE,
                # the remaining grace period after `shutdown` has waited
                timeout_graceful_shutdown=max(1, round(grace / 10)),
                headers=list(HEADERS.items()),
                **({} if tls is None else tls.for_uvicorn()),
            )
        )
        self._tls = tls
        self._service = service
        self._grace = grace
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the caller handles signals, and the server may run in any thread."""
        yield

    @property
    def should_exit(self) -> bool:
        """True once shutdown was requested; must be set in the server's event loop."""
        return self._exit_requested.is_set()

    @should_exit.setter
    def should_exit(self, told: bool) -> None:
        if told:
            self._exit_requested.set()

    def summary(self) -> ServerSummary:
        """Return the figures for the announcements of this server; must be called in the server's event loop."""
        return self._collector.summary()

    def _reserve(self, num_workers: int) -> None:
        """Limit the connections so that the workers have enough file descriptors."""
        self._connections.limits = limits_for(self._service.client_limits, num_workers)

    @property
    def scheme(self) -> str:
        """URL scheme of the server: http or https."""
        return "http" if self._tls is None else "https"

    async def main_loop(self) -> None:
        """Run periodic tasks until shutdown is requested.

        Replaces uvicorn's loop, whose ten iterations per second took most of an idle server's CPU time.
        """
        while not await self.on_tick(0):
            self.authenticator.reload_if_changed()
            audit.tick(time.monotonic())
            if self._renewal is not None:
                self._renewal.reload_if_changed()
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK):
                    await self._exit_requested.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections, and set the event `listening`."""
        await self.lifespan.startup()
        self.authenticator.reload_if_changed()  # starts to fetch the keys of issuers
        config, loop = self.config, asyncio.get_running_loop()
        self._renewal = None if self._tls is None or config.ssl is None else Renewal(self._tls, config.ssl)
        self._state.certificate = self._renewal
        # uvicorn allows a minute for the TLS handshake, during which the connection is not counted
        is_tls = config.ssl is not None
        self.servers = [
            await loop.create_server(
                self._connection, sock=bound, backlog=config.backlog, ssl=config.ssl,
                ssl_handshake_timeout=HANDSHAKE if is_tls else None, ssl_shutdown_timeout=SHUTDOWN if is_tls else None,
            )
            for bound in sockets or ()
        ]  # fmt: skip
        self._state.registry = Registry(time.monotonic())  # no server could announce itself before
        self._channels.start()
        self.started = True
        self._background_tasks = [asyncio.create_task(each.run()) for each in (self._connections, self._collector)]
        self.listening.set()

    def _connection(self) -> Connection:
        return Connection(self._connections, self.config, self.server_state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down gracefully: complete pending requests, reject new requests, then close all connections.

        Meanwhile the server still listens, and responds to new requests with an error, so that clients switch to
        another server immediately. Responses that are incomplete after the grace period are aborted.
        """
        await self._unless_forced(self.before_drain())
        self._service.draining.set()
        self._connections.drain()
        # at 80 % of the grace period, pending requests get an error response
        if not await self._all_sent(0.8 * self._grace):
            self.give_up()
            await self._all_sent(0.1 * self._grace)
        self._channels.close()
        self._connections.abort()
        await super().shutdown(sockets)
        for task in self._background_tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def give_up(self) -> None:
        """Reject new requests for batches, and respond to pending ones with an error; does not shut the server down."""
        self._service.draining.set()
        self._service.give_up(ServerUnavailable("the server is stopping: use another server, or retry later"))

    async def _all_sent(self, seconds: float) -> bool:
        """Wait until all responses are sent, for at most `seconds` or until `force_exit`; return True if all are."""
        return await self._unless_forced(self._connections.wait_responded(seconds)) is True

    async def _unless_forced(self, work: Coroutine[Any, Any, _Result]) -> _Result | None:
        """Return the result of a coroutine, or None if `force_exit` was set before it ended."""
        task = asyncio.create_task(work)
        while not task.done() and not self.force_exit:
            await asyncio.wait({task}, timeout=0.05)
        task.cancel()
        return task.result() if task.done() else None


async def _nothing() -> None:
    pass


def bind(host: str, port: int) -> socket.socket:
    """Create a bound but not yet listening socket, so that its port is known before the server starts.

    Raises:
        OSError: If the address is in use or not available.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in DEAD_PEER.items():
            if hasattr(socket, option):
                # accepted connections inherit the option from the listening socket
                bound.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def url_of(bound: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a bound socket, with a loopback address in place of a wildcard address."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - a comparison, not a bind
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
