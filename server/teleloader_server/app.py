"""The web application, assembled, and the uvicorn server that runs it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
from fastapi import FastAPI

from teleloader_server.api_http import make_router
from teleloader_server.config import DEFAULT_SHUTDOWN_GRACE
from teleloader_server.problems import handle_problems
from teleloader_server.service import LoaderService
from teleloader_shared.errors import ServerUnavailable
from teleloader_shared.version import VERSION

KEEP_ALIVE: Final = 75
"""Seconds that an idle connection stays open: a trainer may think for a while between two batches."""

logger = logging.getLogger(__name__)


def create_app(service: LoaderService) -> FastAPI:
    """The ASGI application of `service`, which its caller starts and closes."""
    app = FastAPI(
        title="teleloader",
        version=VERSION,
        description="Batches of hosted datasets, each at an address of its own.",
        redoc_url=None,
    )
    app.include_router(make_router(service))
    handle_problems(app)
    return app


class Server(uvicorn.Server):
    """uvicorn, with `listening` set when it does and the service told when it stops."""

    def __init__(self, service: LoaderService, host: str, port: int, grace: float = DEFAULT_SHUTDOWN_GRACE) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service),
                host=host,
                port=port,
                http="httptools",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=max(1, round(grace)),
            )
        )
        self._service = service
        self._grace = grace
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to whoever runs the server: it is also started and stopped outside of uvicorn's reach."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more loaders, finish what was asked, close."""
        self._service.draining = True
        # before uvicorn's own patience ends, which would cancel what is left with a traceback for each
        stopping = ServerUnavailable("the server is stopping: ask another one, or later")
        telling = asyncio.get_running_loop().call_later(0.8 * self._grace, self._service.give_up, stopping)
        await super().shutdown(sockets)
        telling.cancel()
        self._service.give_up(stopping)


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
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL that reaches a bound socket from this machine."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - a comparison, not a bind
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
