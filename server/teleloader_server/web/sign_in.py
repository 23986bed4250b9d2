"""Endpoints for browser sign-in and the OpenAPI description."""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import JSONResponse

from teleloader_server.auth.authenticator import Authenticator
from teleloader_server.permissions import ANY, OPEN, Principal, needs
from teleloader_server.problems import HttpProblem
from teleloader_server.web.authentication import GuardedRoute, caller_of
from teleloader_server.web.small_bodies import read_object
from teleloader_shared.errors import AccessDenied

SESSION_PATH: Final = "/session"
MAX_SIGN_IN_BYTES: Final = 24 * 1024
"""Maximum size of the body: a JWT of 16 KiB, and its JSON object."""
FAILED_SECONDS: Final = 0.5
"""Delay in seconds of the response to an invalid token, against guessing."""
MAX_DELAYED: Final = 64
"""Maximum number of concurrently delayed responses, to limit memory; further responses are not delayed."""


def make_access_router() -> APIRouter:
    """Create the router with the endpoints for browser sign-in and the OpenAPI description.

    The endpoints use `authenticator` of the application's state, and `delayed_sign_ins`: the current number of delayed
    responses to invalid tokens.
    """
    router = APIRouter(route_class=GuardedRoute)
    _add_sessions(router)
    _add_descriptions(router)
    return router


def _authenticator_of(request: Request) -> Authenticator:
    return cast("Authenticator", request.app.state.authenticator)


def _add_sessions(router: APIRouter) -> None:
    @router.get(SESSION_PATH, include_in_schema=False)
    @needs(OPEN)
    async def session(request: Request) -> dict[str, Any]:
        authenticator = _authenticator_of(request)
        if not authenticator.has_tokens:
            return _session_record(None, required=False)
        return _session_record(caller_of(request).principal, required=True)

    @router.post(SESSION_PATH, include_in_schema=False)
    @needs(OPEN)
    async def sign_in(request: Request) -> Response:
        state = request.app.state
        token = await _token_in(request)
        try:
            principal, cookie = _authenticator_of(request).sign_in(token, request.scope)
        except AccessDenied as refusal:
            _authenticator_of(request).count_rejection(refusal, request.scope)
            if state.delayed_sign_ins < MAX_DELAYED:
                state.delayed_sign_ins += 1
                try:
                    await asyncio.sleep(FAILED_SECONDS)
                finally:
                    state.delayed_sign_ins -= 1
            raise
        return JSONResponse(_session_record(principal, required=True), headers={"set-cookie": cookie})

    @router.delete(SESSION_PATH, include_in_schema=False, status_code=204)
    @needs(OPEN)
    async def sign_out(request: Request) -> Response:
        return Response(status_code=204, headers={"set-cookie": _authenticator_of(request).sign_out(request.scope)})


def _add_descriptions(router: APIRouter) -> None:
    @router.get("/openapi.json", include_in_schema=False)
    @needs(ANY)
    async def openapi(request: Request) -> dict[str, Any]:
        described: dict[str, Any] = request.app.openapi()
        return described

    @router.get("/docs", include_in_schema=False)
    @needs(ANY)
    async def docs(request: Request) -> Response:
        if _authenticator_of(request).has_tokens:
            # third-party scripts would run with the permissions of the signed-in user
            raise HttpProblem(404, "NotFound", "/docs is disabled on servers with tokens, because the page loads "
                          "third-party scripts: use /openapi.json")  # fmt: skip
        return get_swagger_ui_html(openapi_url="openapi.json", title=request.app.title)


def _session_record(principal: Principal | None, *, required: bool) -> dict[str, Any]:
    """Return the JSON record of a browser session; `required` is True if the server requires a token."""
    scopes = [] if principal is None else sorted(principal.scopes)
    return {"required": required, "name": None if principal is None else principal.name, "scopes": scopes}


async def _token_in(request: Request) -> str:
    """Return the token from the body of a sign-in request."""
    token = (await read_object(request, MAX_SIGN_IN_BYTES)).get("token")
    if not isinstance(token, str):
        raise HttpProblem(422, "InvalidRequest", 'invalid body: expected JSON {"token": "..."}')
    return token
