"""Audit log: JSON lines about who read which dataset, administrative actions, and refused requests.

Events are written by a thread, so a slow disk delays no request. Their number does not depend on the number of batches
or requests: a consumer causes two lines per epoch, and identical refusals one line per minute.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from typing import Any, Final, NamedTuple

from teleloader_server import logs, request_ids
from teleloader_server.config import ConfigError

FILE_BYTES: Final = 64 * 2**20
"""Size of a file in bytes, after which a new one is started."""
OLD_FILES: Final = 9
"""Number of previous files that are kept, with the suffixes ``.1`` (the latest) to ``.9``."""
MAX_QUEUED: Final = 10_000
"""Maximum number of events that wait for the disk; further ones are counted as lost."""
REFUSAL_PERIOD_S: Final = 60.0
"""Seconds over which identical refusals are counted in one line."""
MAX_REFUSALS: Final = 1000
"""Maximum number of different refusals per period; the others are counted together."""
STOP_SECONDS: Final = 5.0
"""Maximum time to write the remaining events at the end."""
LOG_INTERVAL_S: Final = 60.0
"""Minimum seconds between two log lines about an audit log that cannot be written."""

address: Final[ContextVar[str | None]] = ContextVar("address", default=None)
"""IP address of the client whose request is processed."""

logger = logging.getLogger(__name__)
_events: Final = logging.getLogger("teleloader.audit")
_events.propagate = False
_events.setLevel(logging.INFO)
_events.disabled = True


class Refusal(NamedTuple):
    """Kind of refused requests; those of the same kind are counted in one line."""

    code: str
    """Code of the error."""
    principal: str | None
    """Name of the token; None if it is unknown."""
    address: str | None
    """IP address of the client; None for the refusals beyond `MAX_REFUSALS`."""


class Refusals:
    """Counts of refusals that were not written yet. Without I/O or clocks."""

    def __init__(self) -> None:
        self._counts: dict[Refusal, int] = {}
        self._due: dict[Refusal, float] = {}
        """End of the period of each refusal, in ascending order."""

    def add(self, refusal: Refusal, now: float) -> Refusal | None:
        """Add a refusal; return it if it must be written now, because it is the first one of its kind."""
        if refusal not in self._due and len(self._due) >= MAX_REFUSALS:
            refusal = refusal._replace(principal=None, address=None)
        if refusal in self._due:
            self._counts[refusal] = self._counts.get(refusal, 0) + 1
            return None
        self._due[refusal] = now + REFUSAL_PERIOD_S
        return refusal

    def take(self, now: float) -> list[tuple[Refusal, int]]:
        """Remove and return the counts of the periods that have ended."""
        found = []
        while self._due and (first := next(iter(self._due))) and self._due[first] <= now:
            del self._due[first]
            count = self._counts.pop(first, 0)
            if count:  # it continues: the next line follows after a further period
                found.append((first, count))
                self._due[first] = now + REFUSAL_PERIOD_S
        return found


_refusals: Final = Refusals()


def is_on() -> bool:
    """Return True if this process writes an audit log."""
    return not _events.disabled


def record(event: str, **fields: object) -> None:
    """Add an event to the audit log, if there is one.

    Args:
        event: Kind of the event.
        fields: Further fields of the line; those with the value None are omitted.
    """
    if is_on():
        _events.info(event, extra={"fields": fields})


def refused(code: str, principal: str | None, peer: str) -> None:
    """Record a refused request: at once if it is the first of its kind, else in a count after up to a minute."""
    if is_on():
        first = _refusals.add(Refusal(code, principal, peer), time.monotonic())
        if first is not None:
            _write_refusal(first, 1)


def tick(now: float) -> None:
    """Write the counts of refusals that are due; called once a second."""
    for refusal, count in _refusals.take(now):
        _write_refusal(refusal, count)


def _write_refusal(refusal: Refusal, count: int) -> None:
    record("refused", code=refusal.code, principal=refusal.principal, address=refusal.address, count=count)


@contextmanager
def written_to(path: Path | None) -> Iterator[None]:
    """Context manager that writes the audit log of this process to a file; does nothing for None.

    Args:
        path: File; its name gets the number of the server if there are several on this machine.

    Raises:
        ConfigError: If the file cannot be opened.
    """
    if path is None:
        yield
        return
    if (number := logs.server()) is not None:
        path = path.with_stem(f"{path.stem}-{number}")
    events: queue.Queue[Any] = queue.Queue(MAX_QUEUED)
    try:
        file = _File(path, maxBytes=FILE_BYTES, backupCount=OLD_FILES, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot open the audit log {path}: {error.strerror}. Select another file") from None
    handler, listener = _Queue(events), _Listener(events, file)
    file.on_lost = handler.count_lost
    handler.setFormatter(_Formatter())
    _events.addHandler(handler)
    _events.disabled = False
    listener.start()
    try:
        yield
    finally:
        tick(float("inf"))
        _events.disabled = True
        _events.removeHandler(handler)
        listener.stop()
        if listener.has_ended:  # else the disk hangs, and so would the end of the file
            with suppress(OSError):  # a full disk, which was logged
                file.close()


class _Formatter(logging.Formatter):
    """Formatter of events as JSON lines."""

    def format(self, event: logging.LogRecord) -> str:
        """Return a JSON object with the time (ISO 8601, UTC), the event and its fields."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(event.created, UTC).isoformat(timespec="milliseconds"),
            "event": event.getMessage(),
            "server": logs.server(),
            "request": request_ids.current(),
            "address": address.get(),
        }
        line |= getattr(event, "fields", {})
        return json.dumps({name: value for name, value in line.items() if value is not None}, default=str)


class _Queue(QueueHandler):
    """Handler that passes events to the writing thread, and counts those for which there is no room."""

    def __init__(self, events: queue.Queue[Any]) -> None:
        super().__init__(events)
        self._lost = 0

    def enqueue(self, event: logging.LogRecord) -> None:
        """Add an event to the queue, after the number of events that were lost before it."""
        if self._lost:
            lost = _events.makeRecord(_events.name, logging.INFO, "", 0, "lost", (), None, extra={
                "fields": {"count": self._lost}
            })  # fmt: skip
            self.queue.put_nowait(self.prepare(lost))
            self._lost = 0
        self.queue.put_nowait(event)

    def handleError(self, _: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """Count an event for which the queue had no room."""
        self.count_lost()

    def count_lost(self) -> None:
        """Count a lost event; with the lock of `emit`, because the writing thread calls it as well."""
        self.acquire()
        try:
            self._lost += 1
        finally:
            self.release()


class _Listener(QueueListener):
    """Writing thread that ends within `STOP_SECONDS`."""

    @property
    def has_ended(self) -> bool:
        """True if all events were written."""
        return self._thread is None or not self._thread.is_alive()

    def stop(self) -> None:
        """Write all events in the queue, unless the disk is too slow."""
        with suppress(queue.Full):
            self.queue.put(self._sentinel, timeout=STOP_SECONDS)  # type: ignore[attr-defined]
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)
        if not self.has_ended:
            logger.error("the audit log is incomplete: the disk took more than %g s", STOP_SECONDS)


class _File(RotatingFileHandler):
    """Files that only the server's user can read."""

    _logged_at = -LOG_INTERVAL_S
    on_lost: Callable[[], object]
    """Callback, called for each event that was not written."""

    def _open(self) -> Any:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # and no device
            os.fchmod(descriptor, 0o600)
        return os.fdopen(descriptor, self.mode, encoding=self.encoding)

    def handleError(self, _: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """Count the event, and log the error: the server continues."""
        self.on_lost()
        now = time.monotonic()
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            logger.exception("cannot write the audit log %s: events are lost", self.baseFilename)
