"""Errors over HTTP: application/problem+json (RFC 9457), one sentence that says what was wrong and what to do."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

RETRY_AFTER: Final = "1"
"""Seconds after which what is unavailable may be asked for again."""
RETRIED: Final = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)


class HttpProblem(Exception):
    """A request that is not carried out, for a reason that only HTTP knows of."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail

    @property
    def headers(self) -> dict[str, str]:
        """Those that the answer needs."""
        return headers_for(self.status)


def headers_for(status: HTTPStatus | int) -> dict[str, str]:
    """The headers of a problem with this status, besides the usual ones."""
    if status == HTTPStatus.UNAUTHORIZED:
        return {"WWW-Authenticate": "Bearer"}
    return {"Retry-After": RETRY_AFTER} if status in RETRIED else {}
