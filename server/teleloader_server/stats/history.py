"""Series of the last hour in bounded memory: ring buffers and their reduction to points. No I/O, no clock of its own.

A series takes `HISTORY_S` values of 4 bytes. All series of the server, of up to `MAX_DATASETS` datasets and of up to
`MAX_LOOPS` training loops together take at most `MAX_BYTES`; nothing is allocated while values are recorded.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from teleloader_shared.history import (
    CONSUMER_SERIES,
    DATASET_SERIES,
    HISTORY_S,
    MAX_POINTS,
    SERVER_SERIES,
    LabelChange,
    Mark,
    MarkKind,
    Series,
)
from teleloader_shared.stats import Bottleneck

MAX_DATASETS: Final = 32
MAX_LOOPS: Final = 64
MAX_MARKS: Final = 512
"""Maximum number of events; the oldest ones are dropped."""
MAX_SKIPPED: Final = 2
"""Seconds without a sample that the next one covers: a sample is taken a little less often than once a second."""
DIGITS: Final = 4
"""Significant digits of values in responses."""

LABELS: Final[tuple[Bottleneck, ...]] = (
    "workers", "io", "machine", "memory", "prefetch", "server", "network", "client", "training", "unknown", "idle",
    "finished",
)  # fmt: skip
"""Diagnoses, those that need a change first; the series of a diagnosis contains their positions."""

MAX_BYTES: Final = (
    4
    * HISTORY_S
    * (len(SERVER_SERIES) + 1 + MAX_DATASETS * len(DATASET_SERIES) + MAX_LOOPS * (len(CONSUMER_SERIES) + 1))
)
"""Maximum memory of all series; a diagnosis is one more series of the server and of each training loop."""

_Key = TypeVar("_Key", bound=Hashable)
_Owner = TypeVar("_Owner")
Values = NDArray[np.float32]


class Ring:
    """Ring buffer of a fixed number of series, with one value per second; NaN where nothing was recorded.

    Args:
        series: Number of series.
        seconds: Number of seconds that are kept.
    """

    def __init__(self, series: int, seconds: int = HISTORY_S) -> None:
        self._values: Values = np.full((series, seconds), np.nan, np.float32)
        self._seconds = seconds
        self._last = -1
        """The latest recorded second."""

    @property
    def nbytes(self) -> int:
        """Memory of the values in bytes."""
        return self._values.nbytes

    def put(self, second: int, values: Sequence[float]) -> None:
        """Record the values of a second, which also cover up to `MAX_SKIPPED` seconds since the latest one.

        Args:
            second: The second; a second before the latest one is ignored.
            values: One value per series.
        """
        if second < self._last:
            return
        skipped = second - self._last - 1
        first = second - skipped if 0 < skipped <= MAX_SKIPPED and self._last >= 0 else second
        if first == second and skipped > 0:
            self._clear(second - min(skipped, self._seconds), second)
        for each in range(first, second + 1):
            self._values[:, each % self._seconds] = values
        self._last = second

    def _clear(self, start: int, stop: int) -> None:
        begin, end = start % self._seconds, stop % self._seconds
        if stop - start >= self._seconds:
            self._values[:] = np.nan
        elif begin < end:
            self._values[:, begin:end] = np.nan
        elif stop > start:
            self._values[:, begin:] = np.nan
            self._values[:, :end] = np.nan

    def latest(self, second: int, series: int) -> float:
        """Return the value of a series in a second; NaN if it was not recorded, or was overwritten."""
        if not self._last - self._seconds < second <= self._last or second < 0:
            return float("nan")
        return float(self._values[series, second % self._seconds])

    def window(self, start: int, stop: int) -> Values:
        """Return the values of seconds in [start, stop) as a new array of shape (series, stop - start)."""
        found: Values = np.full((len(self._values), max(0, stop - start)), np.nan, np.float32)
        first, last = max(start, self._last - self._seconds + 1, 0), min(stop, self._last + 1)
        if first < last:
            places = np.arange(first, last) % self._seconds
            found[:, first - start : last - start] = self._values[:, places]
        return found


class Reduced(NamedTuple):
    """Points of series: arrays of shape (series, points), with NaN where no second has a value."""

    mean: Values
    min: Values
    max: Values


def reduced(values: Values, step: int) -> Reduced:
    """Reduce every `step` seconds to a point with the mean, the minimum and the maximum of the recorded values.

    Args:
        values: Array of shape (series, seconds); the last point may contain fewer seconds.
        step: Seconds per point.
    """
    series, seconds = values.shape
    points = -(-seconds // step)
    padded = np.full((series, points * step), np.nan, np.float32)
    padded[:, :seconds] = values
    by_point = padded.reshape(series, points, step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # points without a value
        return Reduced(
            np.asarray(np.nanmean(by_point, axis=2, dtype=np.float64), np.float32),
            np.nanmin(by_point, axis=2),
            np.nanmax(by_point, axis=2),
        )


class Span(NamedTuple):
    """Seconds that a response covers."""

    since: int
    until: int
    step: int


def span_of(now: int, since: int | None, until: int | None, step: int) -> Span:
    """Return the seconds and the step of a response with at most `MAX_POINTS` points.

    Args:
        now: The current second.
        since: First second; None for all that are kept.
        until: Second after the last one; None for the current one.
        step: Minimum seconds per point.
    """
    until = now if until is None else min(until, now)
    since = max(0, now - HISTORY_S, 0 if since is None else since)
    since = min(since, until)
    return Span(since, until, max(step, -(-(until - since) // MAX_POINTS), 1))


def series_of(ring: Ring, names: Sequence[str], span: Span) -> dict[str, Series]:
    """Return the points of the first series of a ring, by name."""
    values = ring.window(span.since, span.until)[: len(names)]
    if span.step == 1:
        return {name: Series(_listed(row)) for name, row in zip(names, values, strict=True)}
    mean, low, high = reduced(values, span.step)
    return {name: Series(_listed(mean[i]), _listed(low[i]), _listed(high[i])) for i, name in enumerate(names)}


def _listed(values: Values) -> list[float | None]:
    return [None if value != value else float(f"{value:.{DIGITS}g}") for value in values.tolist()]


def changes_of(ring: Ring, row: int, span: Span) -> list[LabelChange]:
    """Return the changes of a diagnosis, given the row of its series; the first one at the start of the span."""
    codes = ring.window(span.since, span.until)[row]
    known = np.where(np.isnan(codes), -1, codes).astype(int)
    if not len(known):
        return []
    starts = [0, *(np.flatnonzero(np.diff(known)) + 1).tolist()]
    return [LabelChange(span.since + at, LABELS[known[at]] if known[at] >= 0 else None) for at in starts]


class _Kept(Generic[_Owner]):
    __slots__ = ("active", "owner", "ring")

    def __init__(self, owner: _Owner, series: int) -> None:
        self.owner = owner
        self.ring = Ring(series)
        self.active = 0


class RingTable(Generic[_Key, _Owner]):
    """Ring buffers of a bounded number of owners: a new owner replaces the least recently active one.

    Args:
        series: Number of series of each owner.
        most: Maximum number of owners.
        quiet: Seconds without activity before which an owner is not replaced, so that many active owners do not
            replace one another all the time.
    """

    def __init__(self, series: int, most: int, quiet: int) -> None:
        self._series = series
        self._most = most
        self._quiet = quiet
        self._kept: dict[_Key, _Kept[_Owner]] = {}

    def __iter__(self) -> Iterator[tuple[_Key, _Owner, Ring]]:
        """Iterate over the owners, in the order in which they were added."""
        return ((key, kept.owner, kept.ring) for key, kept in self._kept.items())

    def __len__(self) -> int:
        """Return the number of owners."""
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Memory of all ring buffers in bytes."""
        return sum(kept.ring.nbytes for kept in self._kept.values())

    def get(self, key: _Key) -> Ring | None:
        """Return the ring buffer of an owner; None if it has none."""
        kept = self._kept.get(key)
        return None if kept is None else kept.ring

    def owner(self, key: _Key) -> _Owner | None:
        """Return an owner, as it was passed to `keep`; None if it has no ring buffer."""
        kept = self._kept.get(key)
        return None if kept is None else kept.owner

    def recent(self) -> list[tuple[_Key, _Owner]]:
        """Return the owners, most recently active first."""
        order = sorted(self._kept.items(), key=lambda item: item[1].active, reverse=True)
        return [(key, kept.owner) for key, kept in order]

    def keep(self, key: _Key, owner: _Owner, second: int) -> Ring | None:
        """Record that an owner is active, and return its ring buffer; None if all others are active, too."""
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= self._most:
                oldest = min(self._kept, key=lambda each: self._kept[each].active)
                if second - self._kept[oldest].active < self._quiet:
                    return None
                del self._kept[oldest]
            kept = self._kept[key] = _Kept(owner, self._series)
        kept.owner = owner
        kept.active = max(kept.active, second)
        return kept.ring


class Marks:
    """The latest `MAX_MARKS` events."""

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque(maxlen=MAX_MARKS)

    def add(self, second: int, kind: MarkKind, text: str) -> None:
        """Record an event."""
        self._marks.append(Mark(second, kind, text))

    def since(self, second: int) -> list[Mark]:
        """Return the events from a second on."""
        return [mark for mark in self._marks if mark.second >= second]
