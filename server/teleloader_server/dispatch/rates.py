"""Recent rates of what only grows: whoever counts adds to a total, and nothing is done for each event besides."""

from __future__ import annotations

from collections import deque
from typing import Final

from teleloader_shared.stats import WINDOW

Values = tuple[float, ...]

MAX_MARKS: Final = 64
"""Of a window: a clock that a client states may stand still."""


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
        """By how much each total has grown a second, over the window or since its beginning."""
        span = self.span(now)
        _, before = self._marks[0]
        return tuple((value - then) / span if span > 0 else 0.0 for value, then in zip(values, before, strict=True))

    def span(self, now: float) -> float:
        """Over how many seconds that is."""
        return now - self._marks[0][0]


def as_share(share: float) -> float:
    """A share of the time, which clocks that are read one after another can make a little more than all of it."""
    return min(1.0, max(0.0, share))


class Stopwatch:
    """For how long something goes on; where several of its kind overlap, their time counts once."""

    __slots__ = ("_count", "_seconds", "_since")

    def __init__(self) -> None:
        self._count = 0
        self._seconds = 0.0
        self._since = 0.0

    def begin(self, now: float) -> None:
        """One begins."""
        if not self._count:
            self._since = now
        self._count += 1

    def end(self, now: float) -> float:
        """One is over; the time that ends with it, which is 0 while others go on."""
        self._count -= 1
        over = 0.0 if self._count else now - self._since
        self._seconds += over
        return over

    def until(self, now: float) -> float:
        """The time by now, in seconds."""
        return self._seconds + (now - self._since if self._count else 0.0)
