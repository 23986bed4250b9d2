"""HTTP and WebSocket authentication and authorization: ASGI middleware and a route class."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from teleloader_server import audit
from teleloader_server.auth.authenticator import Authenticator, RequestCaller
from teleloader_server.auth.rate_limit import AddressLimit, RateLimiter
from teleloader_server.fleet.verification import is_loopback
from teleloader_server.permissions import ADMIN, UNCHECKED, need_of
from teleloader_server.problems import HttpProblem
from teleloader_server.web.problem_responses import problem_of

MAX_QUERY_BYTES: Final = 4096


def caller_of(connection: HTTPConnection) -> RequestCaller:
    """Return the `RequestCaller` that the `Authentication` middleware attached to a request."""
    return cast("RequestCaller", connection.scope["state"]["caller"])


def address_of(request: Request) -> str:
    """Return the IP address of the client, or "" if it is unknown."""
    return request.client.host if request.client else ""


def refuse_remote_without_token(request: Request) -> None:
    """Reject a request from another machine if the server has no tokens, and therefore cannot authenticate clients.

    Raises:
        HttpProblem: If the client is on another machine, and the server has no tokens (status 403).
    """
    if not request.app.state.authenticator.has_tokens and not is_loopback(address_of(request)):
        raise HttpProblem(
            403, "Forbidden", f"{request.method} {request.url.path} requires a token, and this server has none: start "
            "it with --tokens, or send the request from its own machine",
        )  # fmt: skip


class Authentication:
    """ASGI middleware that attaches a `RequestCaller` to each request, and rate-limits requests without a valid token.

    The middleware runs before routing, so it also covers unknown paths and endpoints without a required token.

    Args:
        app: Next ASGI application.
        authenticator: The server's authenticator.
        limit: Rate limiter for requests without a valid token.
    """

    def __init__(self, app: ASGIApp, authenticator: Authenticator, limit: AddressLimit) -> None:
        self._app = app
        self._authenticator = authenticator
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the next application, or respond with status 414 or 429."""
        if scope["type"] in ("http", "websocket"):
            caller = RequestCaller(self._authenticator, scope)
            scope.setdefault("state", {})["caller"] = caller
            address = (scope.get("client") or ("unknown", 0))[0]
            audit.address.set(address)
            try:
                _check_query(scope)
                if caller.principal is None:
                    await self._limit.acquire(address)
            except HttpProblem as refusal:
                self._authenticator.count_rejection(refusal, scope)
                await problem_of(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _check_query(scope: Scope) -> None:
    """Reject a long query string, whose parsing would block the event loop.

    Raises:
        HttpProblem: If the query string exceeds `MAX_QUERY_BYTES` (status 414).
    """
    if (nbytes := len(scope["query_string"])) > MAX_QUERY_BYTES:
        raise HttpProblem(
            414,
            "UriTooLong",
            f"the query string has {nbytes:,} bytes, and the limit is {MAX_QUERY_BYTES:,}: send fewer parameters",
        )


class GuardedRoute(APIRoute):
    """FastAPI route that authorizes each request by the scope declared with `needs` on the endpoint.

    Raises:
        LookupError: If the endpoint declares no scope; raised at construction.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the endpoint's request handler, wrapped in authorization."""
        handle = super().get_route_handler()
        need = need_of(self.endpoint)
        if need == UNCHECKED:
            return handle

        async def guarded(request: Request) -> Response:
            await enter(request, need)
            if need != ADMIN or request.method == "GET":
                return await handle(request)
            status = 500
            try:
                response = await handle(request)
                status = response.status_code
            except HttpProblem as problem:
                status = problem.status
                raise
            finally:
                _record_action(request, status)
            return response

        return guarded


def _record_action(request: Request, status: int) -> None:
    """Add an administrative action to the audit log."""
    principal = caller_of(request).principal
    audit.record(
        "action",
        principal=None if principal is None else principal.name,
        method=request.method,
        path=request.url.path,
        status=status,
    )


async def enter(connection: HTTPConnection, need: str) -> None:
    """Authorize a request, and wait until the rate limit admits the request.

    Args:
        connection: A request or WebSocket.
        need: Declared requirement of its endpoint.

    Raises:
        HttpProblem: If the Host header is not allowed, the request is cross-site, or the rate limit is exceeded.
        Unauthorized: If the request has no valid token.
        Forbidden: If the token's scopes do not permit the request.
    """
    rate_limiter: RateLimiter = connection.app.state.rate_limiter
    await rate_limiter.acquire(connection.scope, caller_of(connection).admit(need))
