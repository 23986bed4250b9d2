"""Recent rates of totals that only grow. Counting an event is one addition; rates are derived when they are read."""

from __future__ import annotations

from collections import deque
from typing import Final

from teleloader_shared.stats import WINDOW

Values = tuple[float, ...]

MAX_MARKS: Final = 64
"""Marks of one window. The limit matters if the clock of a client stands still."""


class RateWindow:
    """Totals as they were up to `WINDOW` seconds ago, noted about once a second.

    Args:
        now: A time, in seconds; of whichever clock, if it is always the same.
        values: The totals then.
    """

    __slots__ = ("_marks",)

    def __init__(self, now: float, *values: float) -> None:
        self._marks: deque[tuple[float, Values]] = deque([(now, values)], MAX_MARKS)

    def mark(self, now: float, *values: float) -> None:
        """Note the totals as they are now."""
        marks = self._marks
        if now > marks[-1][0]:
            marks.append((now, values))
        while len(marks) > 1 and marks[1][0] <= now - WINDOW:
            marks.popleft()

    def rates(self, now: float, *values: float) -> Values:
        """Return the growth per second of each total, over the window or since its beginning."""
        span = self.span(now)
        _, before = self._marks[0]
        return tuple((value - then) / span if span > 0 else 0.0 for value, then in zip(values, before, strict=True))

    def span(self, now: float) -> float:
        """Return the seconds that `rates` covers."""
        return now - self._marks[0][0]


def as_share(share: float) -> float:
    """Limit a fraction of the time to 0..1, which clocks that are read one after another can exceed slightly."""
    return min(1.0, max(0.0, share))


class Stopwatch:
    """Total duration of events; the time of overlapping events counts once."""

    __slots__ = ("_count", "_seconds", "_since")

    def __init__(self) -> None:
        self._count = 0
        self._seconds = 0.0
        self._since = 0.0

    def begin(self, now: float) -> None:
        """Begin an event."""
        if not self._count:
            self._since = now
        self._count += 1

    def end(self, now: float) -> float:
        """End an event; return the seconds that end with it, 0 while others continue."""
        self._count -= 1
        over = 0.0 if self._count else now - self._since
        self._seconds += over
        return over

    def until(self, now: float) -> float:
        """Return the total in seconds."""
        return self._seconds + (now - self._since if self._count else 0.0)
