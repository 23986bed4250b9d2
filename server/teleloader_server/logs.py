"""The server's log, on stderr: lines for people, or JSON for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, Literal

Format = Literal["text", "json"]

FIELDS: Final = ("loader", "epoch", "batch", "dataset", "worker", "pid")
"""What a line is about, beside its message: given as ``extra`` where something is logged, written in JSON only."""

TEXT: Final = "%(asctime)s %(levelname)-7s %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (ISO 8601, UTC), level, logger, message, and those of `FIELDS` that apply."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
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
    handler.setFormatter(JsonFormatter() if style == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    if level != "debug":
        # that it starts and ends is said by ours
        logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
