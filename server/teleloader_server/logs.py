"""Server logging to stderr, as text or JSON lines."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, Literal

from teleloader_server import request_ids

Format = Literal["text", "json"]

FIELDS: Final = ("loader", "epoch", "batch", "dataset", "worker", "pid", "run")
"""Additional fields of a log line, passed as ``extra``."""
_process: Final[dict[str, object]] = {}
"""Additional fields of all log lines of this process."""


def _about(record: logging.LogRecord) -> dict[str, object]:
    """Return the `FIELDS` of a record, the ID of the request that caused it, and the number of the server."""
    request = request_ids.current()
    found: dict[str, object] = _process if request is None else _process | {"request": request}
    return found | {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}


class TextFormatter(logging.Formatter):
    """Log formatter that writes text lines: time, level, message, and additional fields in brackets."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """Format a log record as one line of text, without its traceback."""
        about = " ".join(f"{name}={value}" for name, value in _about(record).items())
        return super().formatMessage(record) + (f" [{about}]" if about else "")


class JsonFormatter(logging.Formatter):
    """Log formatter that writes one JSON object per line.

    Its fields are time (ISO 8601, UTC), level, logger, message, request ID and the additional fields.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a log record as one JSON object."""
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


def set_server(number: int) -> None:
    """Add the number of the server to all log lines of this process."""
    _process["server"] = number


def server() -> object:
    """Return the number of the server; None if it is the only one on this machine."""
    return _process.get("server")


def configure(level: str, style: Format) -> None:
    """Configure logging to stderr for all log records of this process, including uvicorn's records and Python warnings.

    Args:
        level: Minimum level, e.g. ``"info"``.
        style: Format of the lines.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    if level != "debug":
        # the server logs its start, its shutdown and its announcements itself
        for name in ("uvicorn", "httpx"):
            logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
