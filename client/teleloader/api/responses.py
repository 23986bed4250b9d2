"""Conversion of HTTP responses to exceptions and typed records, as pure functions."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import UnionType
from typing import Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

import httpx

from teleloader.errors import known_error
from teleloader_shared.errors import AccessDenied, ProtocolError, ServerUnavailable, TeleloaderError, WorkerDied
from teleloader_shared.messages import DatasetInfo, PublishedVersion, Registration
from teleloader_shared.spec import MAX_EPOCH
from teleloader_shared.text import excerpt, sentence, short

MAX_NAME: Final = 4096
"""Maximum length of a string in a record, in characters."""
MAX_LISTED: Final = 4096
"""Maximum length of a list in a record."""
MAX_RETRY_DIGITS: Final = 10

_Record = TypeVar("_Record", DatasetInfo, PublishedVersion, Registration)

TRANSIENT: Final = frozenset(
    {httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS, httpx.codes.NOT_FOUND}
)
"""Status codes besides 5xx after which a retry may succeed; 404 only from a proxy."""
UNSUPPORTED: Final = frozenset({httpx.codes.NOT_IMPLEMENTED, httpx.codes.HTTP_VERSION_NOT_SUPPORTED})
"""Status codes 5xx after which a retry would fail again."""


def error_of(
    status: int,
    body: bytes | bytearray,
    server: str,
    path: str = "",
    *,
    retry_after: float = 0.0,
    is_identified: bool = True,
) -> TeleloaderError:
    """Create the exception for an HTTP error response.

    Args:
        status: Status code of the response.
        body: Body of the response: problem details with a code if a loader server sent it, else a proxy's content.
        server: URL of the server.
        path: Path of the request.
        retry_after: Seconds to wait before a retry, from the ``Retry-After`` header.
        is_identified: Whether a loader server has responded at this URL before.

    Returns:
        `ServerUnavailable` if a retry may succeed, else another `TeleloaderError`.
    """
    problem = _problem_of(body)
    code, detail = problem.get("code", ""), sentence(problem.get("detail", excerpt(body)))
    # every web server responds with 404 to unknown paths
    doubt = "" if code and status != httpx.codes.NOT_FOUND else f". Check that {server} is the URL of a loader server"
    error = known_error(code, detail) or ProtocolError(
        f"{server}{path} responded with {status}{f': {detail}' if detail else ''}{doubt}"
    )
    if isinstance(error, AccessDenied | ServerUnavailable):
        error = type(error)(f"{refusing(server)}{error}")
    elif _is_transient(status, code) and (code or is_identified):
        error = ServerUnavailable(str(error))
    if isinstance(error, ServerUnavailable):
        error.retry_after = retry_after
    return error


def _is_transient(status: int, code: str) -> bool:
    """Return True if a retry may succeed after a response with that status and problem code."""
    if code and (status == httpx.codes.NOT_FOUND or code == WorkerDied.__name__):
        return False
    return status in TRANSIENT or (status >= httpx.codes.INTERNAL_SERVER_ERROR and status not in UNSUPPORTED)


def parse_retry_after(header: str) -> float:
    """Return the wait in seconds that a ``Retry-After`` header (seconds or HTTP date) requests, or 0.0 if invalid."""
    if header.isascii() and header.isdecimal() and len(header) < MAX_RETRY_DIGITS:
        return float(header)
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def refusing(server: str) -> str:
    """Return the error message prefix for a rejected request, including the server's URL."""
    return f"{server} refused the request: "


def _problem_of(body: bytes | bytearray) -> dict[str, str]:
    """Return the string fields of a problem+json body; {} for any other body."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, str)} if isinstance(content, dict) else {}


def record(kind: type[_Record], fields: Any, url: str) -> _Record:
    """Convert a JSON object to a record of type `kind`; ignore unknown fields, which a newer server may add.

    Args:
        kind: Dataclass of the record.
        fields: JSON object from a server.
        url: URL of the server, for error messages.

    Raises:
        ProtocolError: If a field is missing, or its value has a wrong type.
    """
    hints = get_type_hints(kind)
    optional = {field.name for field in dataclasses.fields(kind) if field.default is None}  # older servers lack them
    if not isinstance(fields, dict) or not set(hints) <= set(fields) | optional:
        raise ProtocolError(
            f"invalid response from {url}: {short(fields)}, expected the fields {', '.join(hints)}. Check that {url} "
            "is the URL of a loader server, and install the same release of teleloader on both sides"
        )
    values: dict[str, Any] = {name: fields.get(name) for name in hints}
    for name, hint in hints.items():
        if not _fits(values[name], hint):
            raise ProtocolError(
                f"invalid response from {url}: invalid {name} = {short(values[name])}. Check that {url} is the URL of "
                "a loader server"
            )
    return kind(**values)


def _fits(value: object, hint: Any) -> bool:
    """Return True if a JSON value matches the type hint of a record's field."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return any(_fits(value, part) for part in parts)
    if kind is list:
        return isinstance(value, list) and len(value) <= MAX_LISTED and all(_fits(item, parts[0]) for item in value)
    return value in parts if kind is Literal else _is_plain(value, hint)


def _is_plain(value: object, hint: Any) -> bool:
    if hint is str:
        return type(value) is str and len(value) <= MAX_NAME and value.isprintable()
    if hint is int:
        return type(value) is int and 0 <= value <= MAX_EPOCH
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint
