"""Conversion of exceptions to HTTP error responses: application/problem+json (RFC 9457)."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from teleloader_server import request_ids
from teleloader_server.problems import PROBLEM_CODE, HttpProblem, headers_for
from teleloader_shared.errors import (
    BatchOutOfRange,
    DatasetChanged,
    Forbidden,
    InvalidSpec,
    ServerUnavailable,
    TeleloaderError,
    Unauthorized,
    UnknownDataset,
    UnknownLoader,
    VersionMismatch,
    WorkerDied,
)
from teleloader_shared.messages import PROBLEM_MEDIA_TYPE

logger = logging.getLogger(__name__)


STATUS: Final[dict[type[TeleloaderError], HTTPStatus]] = {
    Unauthorized: HTTPStatus.UNAUTHORIZED,
    Forbidden: HTTPStatus.FORBIDDEN,
    InvalidSpec: HTTPStatus.UNPROCESSABLE_ENTITY,
    UnknownDataset: HTTPStatus.NOT_FOUND,
    UnknownLoader: HTTPStatus.NOT_FOUND,
    BatchOutOfRange: HTTPStatus.NOT_FOUND,
    DatasetChanged: HTTPStatus.CONFLICT,
    VersionMismatch: HTTPStatus.UPGRADE_REQUIRED,
    ServerUnavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    WorkerDied: HTTPStatus.INTERNAL_SERVER_ERROR,
}


_TEXT: Final = {"type": "string"}


DOCUMENTED: Final[dict[int | str, dict[str, Any]]] = {
    "default": {
        "description": "Error response: `code` is machine-readable, `detail` human-readable",
        "content": {
            PROBLEM_MEDIA_TYPE: {
                "schema": {
                    "type": "object",
                    "required": ["type", "title", "status", "code", "detail", "request"],
                    "properties": {
                        "type": _TEXT,
                        "title": _TEXT,
                        "status": {"type": "integer", "minimum": 400, "maximum": 599},
                        "code": _TEXT,
                        "detail": _TEXT,
                        "request": {**_TEXT, "description": "request ID, as in X-Request-ID"},
                    },
                }
            }
        },
    }
}
"""OpenAPI description of all error responses."""


REFUSED: Final = "teleloader.refused"
"""Key under which an ASGI WebSocket message contains an error, to be reported to the client before closing."""


MAX_DETAIL: Final = 2000
"""Maximum length of `detail` in characters: `detail` may quote client input."""


class Problem(Response):
    """HTTP error response with a machine-readable ``code`` and a human-readable ``detail``."""

    media_type = PROBLEM_MEDIA_TYPE

    def __init__(self, status: HTTPStatus | int, code: str, detail: str, headers: dict[str, str] | None = None) -> None:
        request = request_ids.current()
        super().__init__(
            encoded(status, code, detail, request), int(status), {**headers_for(status), **(headers or {})}
        )
        self._code = code

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, with its code for `Connection`."""

        async def send_with_code(message: Message) -> None:
            if message["type"] == "http.response.start":
                message[PROBLEM_CODE] = self._code
            await send(message)

        await super().__call__(scope, receive, send_with_code)


def encoded(status: HTTPStatus | int, code: str, detail: str, request: str | None) -> bytes:
    """Encode the body of an error response; `request` is the request ID, or None outside of requests."""
    if len(detail) > MAX_DETAIL:
        detail = detail[:MAX_DETAIL] + " ..."
    content = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": int(status),
        "code": code,
        "detail": detail,
        "request": request,
    }
    # in ASCII: client input may contain lone surrogates, which UTF-8 cannot encode
    return json.dumps(content).encode()


def problem_of(error: TeleloaderError | HttpProblem) -> Problem:
    """Convert an exception to an HTTP error response."""
    if isinstance(error, HttpProblem):
        return Problem(error.status, error.code, error.detail)
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), HTTPStatus.BAD_REQUEST)
    return Problem(status, type(error).__name__, str(error))


def handle_problems(app: FastAPI) -> None:
    """Register exception handlers that convert all errors of an application to problem+json responses."""

    @app.exception_handler(TeleloaderError)
    @app.exception_handler(HttpProblem)
    async def refused(request: Request, error: TeleloaderError | HttpProblem) -> Problem:
        return problem_of(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Problem:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "InvalidRequest", f"{where}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Problem:
        detail = error.detail
        if error.status_code == HTTPStatus.NOT_FOUND:
            detail = f"unknown path {request.url.path[:200]!r}: /openapi.json lists the endpoints"
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            detail = (
                f"method {request.method} not allowed for {request.url.path[:200]!r}: /openapi.json lists the methods"
            )
        headers = dict(error.headers) if error.headers else None
        return Problem(error.status_code, HTTPStatus(error.status_code).name.title().replace("_", ""), detail, headers)

    @app.exception_handler(ClientDisconnect)
    async def client_disconnected(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=HTTPStatus.NO_CONTENT)  # the client has disconnected

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Problem:
        # repr: a path may contain line breaks, which would forge log lines
        logger.error("%s %r failed", request.method, request.url.path, exc_info=error)
        return Problem(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            "InternalError",
            f"internal server error: the server's log has the traceback of request {request_ids.current()}",
        )
