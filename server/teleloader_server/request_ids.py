"""Request IDs, which link a response to the log lines of its request."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # workers import this module for their log, and must not import starlette
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER: Final = b"x-request-id"
_VALID_ID: Final = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
"""IDs accepted from clients: only characters that cannot forge log lines or headers."""
_START: Final = secrets.token_hex(4)
"""Random prefix of this process, which makes request IDs unique among processes."""
_numbers: Final = itertools.count(1)
_current: Final[ContextVar[str | None]] = ContextVar("request_id", default=None)


def new_id() -> str:
    """Return a new, unique request ID."""
    return f"{_START}-{next(_numbers):x}"


def current() -> str | None:
    """Return the ID of the current request, or None outside a request."""
    return _current.get()


@contextmanager
def on_behalf_of(request: str | None) -> Iterator[None]:
    """Context manager that sets the current request ID, for background work caused by a request."""
    before = _current.set(request)
    try:
        yield
    finally:
        _current.reset(before)


def _id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name == HEADER:
            return value.decode() if _VALID_ID.fullmatch(value) else new_id()
    return new_id()


class Identified:
    """ASGI middleware that assigns a request ID: the client's ``X-Request-ID`` if valid, else a new ID."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and add the request ID to its response headers."""
        request = _id_of(scope["headers"])
        _current.set(request)  # each request is a task of its own

        # a plain function and not a coroutine function, which would cost each of many messages a coroutine
        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                message["headers"] = [*message["headers"], (HEADER, request.encode())]
            return send(message)

        await self._app(scope, receive, send_with_id)
