"""An id for each request: in its answer, in the problem that it may be, and in what is logged because of it."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # workers log too, and know no web
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER: Final = b"x-request-id"
_HARMLESS: Final = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
"""What is taken over from a client: it goes to logs and headers."""
_START: Final = secrets.token_hex(4)
"""Of the ids that this process makes: those of another one are others."""
_numbers: Final = itertools.count(1)
_current: Final[ContextVar[str | None]] = ContextVar("request_id", default=None)


def new_id() -> str:
    """One that no other request has."""
    return f"{_START}-{next(_numbers):x}"


def current() -> str | None:
    """That of the request that is being answered; None outside of one."""
    return _current.get()


@contextmanager
def on_behalf_of(request: str | None) -> Iterator[None]:
    """What is done meanwhile, outside of any request, is done because of this one."""
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
    """An application whose requests have an id: the client's ``X-Request-ID`` if it is harmless, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and say the id."""
        request = _id_of(scope["headers"])
        _current.set(request)  # each request is a task of its own

        # no coroutine: there may be many messages, and only the first is changed
        def tell(message: Message) -> Awaitable[None]:
            if message["type"] in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                message["headers"] = [*message["headers"], (HEADER, request.encode())]
            return send(message)

        await self._app(scope, receive, tell)
