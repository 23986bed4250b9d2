"""Exceptions and headers of HTTP error responses (application/problem+json, RFC 9457)."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

RETRY_AFTER: Final = "1"
"""Value of the Retry-After header, in seconds."""
PROBLEM_CODE: Final = "teleloader.problem"
"""Key under which the ASGI message ``http.response.start`` of an error response contains its code."""
RETRIED: Final = (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS)


class HttpProblem(Exception):
    """Exception that rejects a request for a reason specific to HTTP, such as a body that is too large."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail

    @property
    def headers(self) -> dict[str, str]:
        """Additional headers of the error response."""
        return headers_for(self.status)


def headers_for(status: HTTPStatus | int) -> dict[str, str]:
    """Return the additional headers for a status code: WWW-Authenticate, Retry-After or none."""
    if status == HTTPStatus.UNAUTHORIZED:
        return {"WWW-Authenticate": "Bearer"}
    return {"Retry-After": RETRY_AFTER} if status in RETRIED else {}
