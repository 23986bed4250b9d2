"""Recent rates of monotonic counters, computed on read, so that counting an event is a single addition."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from teleloader_shared.stats import WINDOW

Values = tuple[float, ...]

MAX_MARKS: Final = 64
"""Maximum number of samples of a window; reached only if a client's clock is much slower than the server's."""


class RateWindow:
    """Sliding window of the last `WINDOW` seconds over samples of monotonic counters.

    The counters are sampled about once a second.

    Args:
        now: Current time in seconds; all calls must use the same clock.
        values: Current totals of the counters.
    """

    __slots__ = ("_marks",)

    def __init__(self, now: float, *values: float) -> None:
        self._marks: deque[tuple[float, Values]] = deque([(now, values)], MAX_MARKS)

    def mark(self, now: float, *values: float) -> None:
        """Add a sample of the totals."""
        marks = self._marks
        if now > marks[-1][0]:
            marks.append((now, values))
        while len(marks) > 1 and marks[1][0] <= now - WINDOW:
            marks.popleft()

    def rates(self, now: float, *values: float) -> Values:
        """Return the rate of change per second of each total, over the window."""
        span = self.span(now)
        _, before = self._marks[0]
        return tuple((value - then) / span if span > 0 else 0.0 for value, then in zip(values, before, strict=True))

    def latest(self, now: float, *values: float) -> Values:
        """Return the rate of change per second of each total since the latest sample; NaN if no time has passed."""
        then, before = self._marks[-1]
        span = now - then
        return tuple((value - old) / span if span > 0 else math.nan for value, old in zip(values, before, strict=True))

    def span(self, now: float) -> float:
        """Return the seconds from the oldest sample in the window until `now`."""
        return now - self._marks[0][0]


def as_share(share: float) -> float:
    """Clamp a fraction of time to [0, 1]; unsynchronized clock readings can make the fraction slightly larger."""
    return min(1.0, max(0.0, share))


class Stopwatch:
    """Stopwatch for the total duration of events; overlapping events count once."""

    __slots__ = ("_count", "_seconds", "_since")

    def __init__(self) -> None:
        self._count = 0
        self._seconds = 0.0
        self._since = 0.0

    def begin(self, now: float) -> None:
        """Start timing an event."""
        if not self._count:
            self._since = now
        self._count += 1

    def end(self, now: float) -> float:
        """Stop timing an event; return the seconds since the first overlapping event, or 0 while others continue."""
        self._count -= 1
        over = 0.0 if self._count else now - self._since
        self._seconds += over
        return over

    def until(self, now: float) -> float:
        """Return the total duration in seconds, including events in progress."""
        return self._seconds + (now - self._since if self._count else 0.0)
