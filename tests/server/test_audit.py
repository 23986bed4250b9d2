"""The audit log: refusals are counted, files are rotated, and faults of the disk are reported."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import sys
import termios
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server import audit
from teleloader_server.audit import REFUSAL_PERIOD_S, Refusal, Refusals
from teleloader_server.config import ConfigError
from tests.conftest import eventually

KINDS = [Refusal("Unauthorized", None, "10.0.0.1"), Refusal("Forbidden", "trainer", "10.0.0.2")]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the events in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@given(events=st.lists(st.tuples(st.floats(0, 50), st.sampled_from(KINDS)), max_size=100))
def test_each_refusal_is_counted_once(events: list[tuple[float, Refusal]]) -> None:
    """The counts of all lines add up, and each kind has at most one line per period besides its first one."""
    refusals, now = Refusals(), 0.0
    written: Counter[Refusal] = Counter()
    lines: Counter[Refusal] = Counter()
    for pause, refusal in events:
        now += pause
        for kind, count in [(refusals.add(refusal, now), 1), *refusals.take(now)]:
            if kind is not None:
                written[kind] += count
                lines[kind] += 1
    for kind, count in refusals.take(float("inf")):
        written[kind] += count
        lines[kind] += 1
    assert written == Counter(refusal for _, refusal in events)
    assert all(count <= 2 + 2 * now / REFUSAL_PERIOD_S for count in lines.values())
    assert refusals.take(float("inf")) == []


def test_many_different_refusals_are_counted_together() -> None:
    """Beyond the maximum, refusals with the same code share a line."""
    refusals = Refusals()
    for number in range(audit.MAX_REFUSALS + 10):
        refusals.add(Refusal("Unauthorized", None, str(number)), 0.0)
    assert refusals.take(REFUSAL_PERIOD_S) == [(Refusal("Unauthorized", None, None), 9)]


def test_files_are_rotated_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No event is lost between two files, the number of files is limited, and other users cannot read them."""
    monkeypatch.setattr(audit, "FILE_BYTES", 1000)
    path = tmp_path / "audit.jsonl"
    with audit.written_to(path):
        for number in range(200):
            audit.record("event", number=number)
    files = [path.with_name(f"{path.name}.{number}") for number in range(audit.OLD_FILES, 0, -1)] + [path]
    assert sorted(files) == sorted(tmp_path.iterdir())
    numbers = [line["number"] for file in files for line in lines_of(file)]
    assert numbers == list(range(200 - len(numbers), 200))
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_events_without_room_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk is slow, events are lost; the next line after them states their number."""
    monkeypatch.setattr(audit, "MAX_QUEUED", 2)
    monkeypatch.setattr(audit._File, "shouldRollover", lambda *_: False)  # a pipe has no size
    path = tmp_path / "pipe"
    os.mkfifo(path)
    received = bytearray()
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as pipe, audit.written_to(path):
        for number in range(200):  # more than the pipe and the queue have room for
            audit.record("event", number=number, text="x" * 1000)

        def has_arrived(event: str) -> bool:
            received.extend(pipe.read() or b"")
            return f'"event": "{event}"'.encode() in received

        def later() -> bool:
            audit.record("later")
            return has_arrived("later")

        eventually(lambda: has_arrived("event"))
        eventually(later)
    lines = [json.loads(line) for line in received.decode().splitlines()]
    numbers = [line["number"] for line in lines if line["event"] == "event"]
    lost = sum(line["count"] for line in lines if line["event"] == "lost")
    assert numbers == sorted(numbers)
    assert len(numbers) < 200 <= len(numbers) + lost


def test_events_lost_at_the_same_time_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that the writing thread loses while the number of lost events is written is in the next number."""
    events: queue.Queue[Any] = queue.Queue()
    handler = audit._Queue(events)
    handler.count_lost()
    prepare = handler.prepare
    writing = threading.Thread(target=handler.count_lost)

    def prepare_slowly(event: logging.LogRecord) -> Any:
        if event.getMessage() == "lost":
            writing.start()
            writing.join(0.2)
        return prepare(event)

    monkeypatch.setattr(handler, "prepare", prepare_slowly)
    handler.handle(logging.makeLogRecord({"msg": "read"}))
    writing.join()
    lost = events.get_nowait()
    assert lost.fields["count"] + handler._lost == 2


def test_a_full_disk_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's log names the file and the error, and the next event states the number of lost ones."""
    with audit.written_to(Path("/dev/full")):
        (handler,) = [each for each in logging.getLogger("teleloader.audit").handlers if isinstance(each, audit._Queue)]
        for _ in range(10):
            audit.record("event")
        eventually(lambda: handler._lost > 0)
    (logged,) = [record for record in caplog.records if record.name == audit.__name__]
    assert "cannot write the audit log /dev/full" in logged.message
    assert "No space left" in caplog.text


def test_a_server_stops_although_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for a limited time, and logs that the audit log is incomplete."""
    monkeypatch.setattr(audit, "MAX_QUEUED", 2)
    monkeypatch.setattr(audit._File, "shouldRollover", lambda *_: False)  # a pipe has no size
    monkeypatch.setattr(audit, "STOP_SECONDS", 0.1)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as pipe:  # nobody reads
        with audit.written_to(path):

            def is_full() -> bool:
                audit.record("event", text="x" * 1000)
                waiting = fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))
                return int.from_bytes(waiting, sys.byteorder) > 40_000

            eventually(is_full)
            for _ in range(40):
                audit.record("event", text="x" * 1000)
                time.sleep(0.001)  # lets the thread write until the pipe is full
        assert "the audit log is incomplete" in caplog.text
        while pipe.read(2**20):  # lets the thread end
            pass


def test_an_unusable_file_is_a_usage_error(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(ConfigError, match="cannot open the audit log"), audit.written_to(tmp_path / "no" / "folder"):
        pass


def test_nothing_is_recorded_without_a_file(tmp_path: Path) -> None:
    """A server without an audit log keeps no events."""
    audit.record("event")
    audit.refused("Unauthorized", None, "10.0.0.1")
    path = tmp_path / "audit.jsonl"
    with audit.written_to(path):
        pass
    assert lines_of(path) == []
