"""The server's log, on stderr: lines for people, or JSON for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, Literal

from teleloader_server import request_ids

Format = Literal["text", "json"]

FIELDS: Final = ("loader", "epoch", "batch", "dataset", "worker", "pid")
"""What a line is about, beside its message: given as ``extra`` where something is logged."""


def _about(record: logging.LogRecord) -> dict[str, object]:
    """Those of `FIELDS` that apply, and the id of the request because of which it is logged."""
    request = request_ids.current()
    found: dict[str, object] = {} if request is None else {"request": request}
    return found | {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}


class TextFormatter(logging.Formatter):
    """Lines for people: time, level, message, and in brackets the ids that one may search for."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """The line, a traceback not included."""
        about = " ".join(f"{name}={value}" for name, value in _about(record).items())
        return super().formatMessage(record) + (f" [{about}]" if about else "")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO 8601, UTC), level, logger, message, request, and those `FIELDS` that apply."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _about(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str, style: Format) -> None:
    """Have everything that is logged in this process written to stderr, uvicorn's lines and Python's warnings too.

    Args:
        level: The least that is written, e.g. ``"info"``.
        style: How.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    if level != "debug":
        # that it starts and ends is said by ours
        logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
