"""Figures that a server sends with its announcements, so that one page can show all servers of a fleet."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Final

MAX_LOADERS: Final = 8
MAX_TEXT: Final = 600
"""Maximum length of a text in characters."""


@dataclass(frozen=True, slots=True)
class ServerSummary:
    """Figures of a server: means of the last 10 s. None if a value is unknown."""

    version: str
    uptime: float
    """Seconds since the start of the server."""
    workers: int
    batches_per_second: float
    """Sent batches/s."""
    bytes_per_second: float
    busy: float | None
    """Busy fraction of the workers."""
    data_wait: float | None
    """Mean data wait of the consumers."""
    bottleneck: str | None
    """Diagnosis of the consumer that the server explains with the largest confidence."""
    confidence: float
    advice: str
    loaders: list[str]
    """Keys of up to `MAX_LOADERS` loaders that it serves at present, to compare servers with the same loaders."""


_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "str": (str,), "float": (float, int), "int": (int,), "float | None": (float, int, type(None)),
    "str | None": (str, type(None)), "list[str]": (list,),
}  # fmt: skip


def summary_of(value: Any) -> ServerSummary | None:
    """Convert a JSON value from another server; return None if it is not a valid summary, as of another release."""
    names = {field.name for field in fields(ServerSummary)}
    if not isinstance(value, dict) or not names <= value.keys():
        return None
    found = {field.name: value[field.name] for field in fields(ServerSummary)}
    for field in fields(ServerSummary):
        if not _is_valid(found[field.name], str(field.type)):
            return None
    return ServerSummary(**found)


def _is_valid(value: Any, kind: str) -> bool:
    if type(value) not in _TYPES[kind]:
        return False
    if isinstance(value, list):
        return len(value) <= MAX_LOADERS and all(_is_valid(item, "str") for item in value)
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return value is None or (math.isfinite(value) and abs(value) < 1e18)
