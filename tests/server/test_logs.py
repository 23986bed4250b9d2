"""Log of the server, as text and as JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from teleloader_server import request_ids
from teleloader_server.logs import FIELDS, JsonFormatter, TextFormatter


def line_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the JSON line of a record."""
    text = JsonFormatter().format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def record(message: str, *arguments: object, **fields: object) -> logging.LogRecord:
    """Return a log record."""
    made = logging.LogRecord("teleloader_server.workers.pool", logging.WARNING, __file__, 1, message, arguments, None)
    made.__dict__.update(fields)
    made.created = 1_700_000_000.25
    return made


def test_a_line_has_time_level_logger_and_message() -> None:
    """A line has time, level, logger and message, and no empty fields."""
    assert line_of(record("worker %d\nis gone", 3)) == {
        "time": "2023-11-14T22:13:20.250+00:00", "level": "warning", "logger": "teleloader_server.workers.pool",
        "message": "worker 3\nis gone",
    }  # fmt: skip


def test_a_line_says_what_it_is_about() -> None:
    """A line has the extra attributes with known names, and no other attributes."""
    known = dict.fromkeys(FIELDS, 7)
    line = line_of(record("gone", **known, headers={"Authorization": "secret"}))
    assert known.items() <= line.items()
    assert "secret" not in json.dumps(line)


def test_a_line_has_the_traceback() -> None:
    """The JSON line contains the traceback."""
    made = record("failed")
    try:
        int("damaged")
    except ValueError:
        made.exc_info = sys.exc_info()
    assert "ValueError: invalid literal" in line_of(made)["exception"]


def test_a_line_for_people_ends_with_what_one_may_search_for() -> None:
    """A text line has the message first, followed by the known IDs."""
    plain = TextFormatter().format(record("worker %d is gone", 3))
    assert plain.endswith(" WARNING worker 3 is gone")
    known = TextFormatter().format(record("gone", batch=7, loader="0f1e", headers="secret"))
    assert known.endswith(" WARNING gone [loader=0f1e batch=7]")


def test_a_line_names_the_request_that_it_is_written_for() -> None:
    """A line has the current request's ID without an argument of the logging call."""
    with request_ids.on_behalf_of("3f9a-1"):
        assert TextFormatter().format(record("gone", batch=7)).endswith(" gone [request=3f9a-1 batch=7]")
        assert line_of(record("gone"))["request"] == "3f9a-1"
    assert "request" not in line_of(record("gone"))


def test_a_line_for_people_has_its_traceback_below() -> None:
    """The traceback follows the IDs."""
    made = record("failed", worker=1)
    try:
        int("damaged")
    except ValueError:
        made.exc_info = sys.exc_info()
    first, *_, last = TextFormatter().format(made).splitlines()
    assert first.endswith("failed [worker=1]")
    assert last.startswith("ValueError: invalid literal")
