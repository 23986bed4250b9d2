"""The web application, assembled, and the uvicorn server that runs it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, cast

import uvicorn
from fastapi import FastAPI

from teleloader_server.auth.authenticator import Authenticator
from teleloader_server.auth.rate_limit import AddressLimit, RateLimiter
from teleloader_server.auth.tls import Renewal, TlsFiles
from teleloader_server.config import DEFAULT_SHUTDOWN_GRACE
from teleloader_server.dispatch.quotas import BodyBudget
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.request_ids import Identified
from teleloader_server.stats.collector import StatsCollector
from teleloader_server.web.authentication import Authentication
from teleloader_server.web.batches import make_router
from teleloader_server.web.dashboard import add_dashboard
from teleloader_server.web.guard import Connection, observed
from teleloader_server.web.guard_manager import ConnectionManager, connections_for
from teleloader_server.web.problem_responses import DOCUMENTED, handle_problems
from teleloader_server.web.sign_in import make_access_router
from teleloader_server.web.status import make_status_router
from teleloader_server.web.stream import make_stream_router
from teleloader_server.web.uvicorn_members import check_members
from teleloader_server.web.websocket import MAX_MESSAGE_BYTES, WebSocketConnection
from teleloader_shared.errors import ServerUnavailable
from teleloader_shared.version import VERSION

KEEP_ALIVE: Final = 75
"""Seconds that an idle connection stays open: a trainer may think for a while between two batches."""
TICK: Final = 1.0
"""Seconds between two updates of the Date header, and between two looks at the files of tokens and certificates."""
HANDSHAKE: Final = 10.0
"""Seconds that a client has for the TLS handshake."""
GOODBYE: Final = 2.0
"""Seconds that a client has to take note of the end of a TLS connection."""
DEAD_PEER: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""The kernel drops an idle connection whose other machine has not answered for 20 s. (With TCP_USER_TIMEOUT, Linux does
not count tries; that an answer is not taken, whatever the cause, is seen by the connection itself.)"""

HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
"""With every answer: what it is not, browsers do not take it for, and no page of another site gets hold of it."""
logger = logging.getLogger(__name__)


def create_app(service: LoaderService, authenticator: Authenticator | None = None) -> FastAPI:
    """Return the ASGI application of a service, which the caller starts and closes.

    Args:
        service: The service.
        authenticator: Knows the tokens; None disables authentication.
    """
    app = FastAPI(
        title="teleloader",
        version=VERSION,
        description="Batches of hosted datasets, each at an address of its own.",
        openapi_url=None,
        # a redirect would be answered without passing the authenticator
        redirect_slashes=False,
        responses=DOCUMENTED,
    )
    app.state.authenticator = authenticator or Authenticator()
    app.state.authenticator.on_change = service.grants.tokens_changed
    app.state.rate_limiter = RateLimiter(service.quotas, service.client_limits.max_requests_per_second)
    unauthenticated = AddressLimit(service.client_limits.max_unauthenticated_requests_per_second)
    app.add_middleware(Authentication, authenticator=app.state.authenticator, limit=unauthenticated)
    service.is_shared = lambda: len(app.state.authenticator.tokens.entries) > 1
    app.state.service = service
    app.state.collector = StatsCollector(service)
    app.state.body_budget = BodyBudget(service.client_limits.max_buffered_request_bytes, service.is_shared)
    app.state.stats_streams = {}
    app.state.delayed_sign_ins = 0
    for router in (make_access_router(), make_router(), make_stream_router(), make_status_router()):
        app.include_router(router)
    add_dashboard(app)
    handle_problems(app)
    return app


class Server(uvicorn.Server):
    """uvicorn with connections that keep to limits, `listening` set when it does, and an end that loses no answer.

    Args:
        service: What it serves.
        host: The address that is bound.
        port: The port that is bound.
        grace: Seconds that answers have to be finished when the server stops.
        authenticator: Who may come in; None is everybody.
        tls: The certificate; None speaks plain HTTP.

    Raises:
        ConfigError: When the limit of open files is too low for a server, or uvicorn lacks a member that is needed.
    """

    def __init__(
        self,
        service: LoaderService,
        host: str,
        port: int,
        grace: float = DEFAULT_SHUTDOWN_GRACE,
        authenticator: Authenticator | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        check_members()
        limits = service.client_limits
        most = min(limits.max_connections, connections_for(service.limits.num_workers))
        limits = dataclasses.replace(limits, max_connections=most)
        self.authenticator = authenticator or Authenticator()
        self._connections = ConnectionManager(limits, self.authenticator)
        service.connections = lambda: len(self._connections.connections)
        self._told_to_exit = asyncio.Event()
        app = create_app(service, self.authenticator)
        self._collector: StatsCollector = app.state.collector
        super().__init__(
            uvicorn.Config(
                observed(Identified(app)),
                host=host,
                port=port,
                http="httptools",
                ws=cast("type[asyncio.Protocol]", functools.partial(WebSocketConnection, self._connections)),
                ws_max_size=MAX_MESSAGE_BYTES,
                # a dead peer is found by the kernel, and one that is slow to read a large batch is none
                ws_ping_interval=None,
                ws_per_message_deflate=False,
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE,
                # what is left of the grace after `shutdown` has waited
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
        """Leave signals to whoever runs the server: it is also started and stopped outside of uvicorn's reach."""
        yield

    @property
    def should_exit(self) -> bool:
        """Whether it was told to stop; to be set in its event loop."""
        return self._told_to_exit.is_set()

    @should_exit.setter
    def should_exit(self, told: bool) -> None:
        if told:
            self._told_to_exit.set()

    @property
    def scheme(self) -> str:
        """What its URL begins with."""
        return "http" if self._tls is None else "https"

    async def main_loop(self) -> None:
        """Go on until told to stop. uvicorn looks ten times a second, which was most of what an idle server did."""
        while not await self.on_tick(0):
            self.authenticator.look()
            if self._renewal is not None:
                self._renewal.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK):
                    await self._told_to_exit.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await self.lifespan.startup()
        config, loop = self.config, asyncio.get_running_loop()
        self._renewal = None if self._tls is None or config.ssl is None else Renewal(self._tls, config.ssl)
        # uvicorn gives a handshake a minute, in which nobody counts the connection
        is_tls = config.ssl is not None
        self.servers = [
            await loop.create_server(
                self._connection, sock=bound, backlog=config.backlog, ssl=config.ssl,
                ssl_handshake_timeout=HANDSHAKE if is_tls else None, ssl_shutdown_timeout=GOODBYE if is_tls else None,
            )
            for bound in sockets or ()
        ]  # fmt: skip
        self.started = True
        self._always = [asyncio.create_task(self._connections.run()), asyncio.create_task(self._collector.run())]
        self.listening.set()

    def _connection(self) -> Connection:
        return Connection(self._connections, self.config, self.server_state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nothing new, finish what was asked, close.

        Until that is done the server still listens, and says that it is stopping: a client knows at once that it should
        go elsewhere. What is not done when the grace ends is broken off, clients that do not read among it.
        """
        self._service.drain()
        self._connections.drain()
        # told in time, whoever still waits for a batch gets an answer that says so
        if not await self._answered(0.8 * self._grace):
            self._service.give_up(ServerUnavailable("the server is stopping: ask another one, or later"))
            await self._answered(0.1 * self._grace)
        self._connections.abort()
        await super().shutdown(sockets)
        for task in self._always:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _answered(self, seconds: float) -> bool:
        """Wait until all answers are sent, so long, or until nobody wants to wait any more; whether they are."""
        answered = asyncio.create_task(self._connections.wait_responded(seconds))
        while not answered.done() and not self.force_exit:
            await asyncio.wait({answered}, timeout=0.05)
        answered.cancel()
        return answered.done() and answered.result()


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet, so that its port is known before the server starts.

    Raises:
        OSError: When the address is not to be had.
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
                # accepted connections have it from the socket that listens
                bound.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def url_of(bound: socket.socket, scheme: str = "http") -> str:
    """The URL that reaches a bound socket from this machine."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - a comparison, not a bind
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
