"""Errors over HTTP: application/problem+json (RFC 9457), one sentence that says what was wrong and what to do."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from teleloader_shared.errors import (
    BatchOutOfRange,
    DatasetChanged,
    InvalidSpec,
    ServerUnavailable,
    TeleloaderError,
    UnknownDataset,
    UnknownLoader,
    VersionMismatch,
    WorkerDied,
)
from teleloader_shared.messages import PROBLEM_MEDIA_TYPE

logger = logging.getLogger(__name__)

STATUS: Final[dict[type[TeleloaderError], HTTPStatus]] = {
    InvalidSpec: HTTPStatus.UNPROCESSABLE_ENTITY,
    UnknownDataset: HTTPStatus.NOT_FOUND,
    UnknownLoader: HTTPStatus.NOT_FOUND,
    BatchOutOfRange: HTTPStatus.NOT_FOUND,
    DatasetChanged: HTTPStatus.CONFLICT,
    VersionMismatch: HTTPStatus.UPGRADE_REQUIRED,
    ServerUnavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    WorkerDied: HTTPStatus.INTERNAL_SERVER_ERROR,
}


class Problem(JSONResponse):
    """A problem; ``code`` is the name that programs go by, ``detail`` the sentence for people."""

    media_type = PROBLEM_MEDIA_TYPE

    def __init__(self, status: HTTPStatus | int, code: str, detail: str, headers: dict[str, str] | None = None) -> None:
        title = HTTPStatus(status).phrase
        content = {"type": "about:blank", "title": title, "status": int(status), "code": code, "detail": detail}
        super().__init__(content, int(status), headers)


def handle_problems(app: FastAPI) -> None:
    """Make every error of `app` a problem."""

    @app.exception_handler(TeleloaderError)
    async def refused(request: Request, error: TeleloaderError) -> Problem:
        status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), HTTPStatus.BAD_REQUEST)
        return Problem(status, type(error).__name__, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Problem:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "InvalidRequest", f"{where}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Problem:
        detail = error.detail
        if error.status_code == HTTPStatus.NOT_FOUND:
            detail = f"nothing is at {request.url.path[:200]!r}; /docs lists what there is"
        headers = dict(error.headers) if error.headers else None
        return Problem(error.status_code, HTTPStatus(error.status_code).name.title().replace("_", ""), detail, headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=HTTPStatus.NO_CONTENT)  # nobody reads it

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Problem:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return Problem(
            HTTPStatus.INTERNAL_SERVER_ERROR, "InternalError", "the server failed to answer; its log has the details"
        )
