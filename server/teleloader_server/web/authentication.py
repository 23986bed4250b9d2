"""Authentication of HTTP requests and WebSockets: ASGI middleware, and routes that declare what they need."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from teleloader_server.auth.authenticator import Authenticator, RequestCaller
from teleloader_server.auth.rate_limit import AddressLimit, RateLimiter
from teleloader_server.permissions import UNCHECKED, need_of
from teleloader_server.problems import HttpProblem
from teleloader_server.web.problem_responses import problem_of

MAX_QUERY_BYTES: Final = 4096


def caller_of(connection: HTTPConnection) -> RequestCaller:
    """Return the caller of a request that has passed `Authentication`."""
    return cast("RequestCaller", connection.scope["state"]["caller"])


class Authentication:
    """ASGI middleware that identifies the caller of each request, and limits requests without a valid token by address.

    It stands before all routes, so that it also covers those that need no token, and paths that do not exist.

    Args:
        app: Receives the requests that pass.
        authenticator: Knows the tokens.
        limit: Limits the requests without a valid token.
    """

    def __init__(self, app: ASGIApp, authenticator: Authenticator, limit: AddressLimit) -> None:
        self._app = app
        self._authenticator = authenticator
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 414 or 429."""
        if scope["type"] in ("http", "websocket"):
            caller = RequestCaller(self._authenticator, scope)
            scope.setdefault("state", {})["caller"] = caller
            try:
                _check_query(scope)
                if caller.principal is None:
                    await self._limit.come((scope.get("client") or ("unknown", 0))[0])
            except HttpProblem as refusal:
                self._authenticator.note(refusal, scope)
                await problem_of(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _check_query(scope: Scope) -> None:
    """Refuse a query that takes long to parse: it is taken apart parameter by parameter.

    Raises:
        HttpProblem: With 414.
    """
    if (nbytes := len(scope["query_string"])) > MAX_QUERY_BYTES:
        raise HttpProblem(
            414, "UriTooLong", f"the query of the request has {nbytes:,} bytes, and {MAX_QUERY_BYTES:,} are allowed"
        )


class GuardedRoute(APIRoute):
    """A route whose endpoint declares what it needs, and is reached through the application's authenticator only.

    Raises:
        LookupError: At construction, when it declares nothing.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind the authenticator."""
        handle = super().get_route_handler()
        need = need_of(self.endpoint)
        if need == UNCHECKED:
            return handle

        async def guarded(request: Request) -> Response:
            await enter(request, need)
            return await handle(request)

        return guarded


async def enter(connection: HTTPConnection, need: str) -> None:
    """Let a request in when its time has come.

    Args:
        connection: The request, or a WebSocket.
        need: What its endpoint has declared.

    Raises:
        HttpProblem: When it is meant for another server, comes too often, or a page of another site has caused it.
        Unauthorized: When there is no token with it, or none of this server's.
        Forbidden: When the token is not for this.
    """
    rate_limiter: RateLimiter = connection.app.state.rate_limiter
    await rate_limiter.come(connection.scope, caller_of(connection).admit(need))
