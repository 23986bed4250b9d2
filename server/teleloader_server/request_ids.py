"""Request IDs: in the response, in its error body, and in log lines that the request causes."""

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
_HARMLESS: Final = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
"""IDs that are accepted from clients; they are written to logs and headers."""
_START: Final = secrets.token_hex(4)
"""Prefix of the IDs of this process, which distinguishes them from those of other processes."""
_numbers: Final = itertools.count(1)
_current: Final[ContextVar[str | None]] = ContextVar("request_id", default=None)


def new_id() -> str:
    """Return a new, unique ID."""
    return f"{_START}-{next(_numbers):x}"


def current() -> str | None:
    """Return the ID of the current request; None outside of requests."""
    return _current.get()


@contextmanager
def on_behalf_of(request: str | None) -> Iterator[None]:
    """Attribute work outside of requests to a request: in this context, its ID is the current one."""
    before = _current.set(request)
    try:
        yield
    finally:
        _current.reset(before)


def _id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name == HEADER:
            return value.decode() if _HARMLESS.fullmatch(value) else new_id()
    return new_id()


class Identified:
    """ASGI middleware that assigns request IDs: the client's ``X-Request-ID`` if it is valid, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application and add the ID to its response."""
        request = _id_of(scope["headers"])
        _current.set(request)  # each request is a task of its own

        # not a coroutine: only the first of possibly many messages is changed
        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                message["headers"] = [*message["headers"], (HEADER, request.encode())]
            return send(message)

        await self._app(scope, receive, send_with_id)
