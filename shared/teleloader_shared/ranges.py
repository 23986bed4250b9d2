"""Ranges of batches in one request: their text form, validation and sequence of batch numbers."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import Final, overload

from teleloader_shared.errors import InvalidSpec
from teleloader_shared.spec import MAX_EPOCH

MAX_RANGES: Final = 128
"""Maximum number of ranges in a request: a URL's query may have 4 KiB."""

_TEXT: Final = re.compile(r"[0-9]{1,19}:[0-9]{1,19}(,[0-9]{1,19}:[0-9]{1,19})*")


class BatchRanges:
    """Ascending numbers of the batches in one request, stored as ranges.

    Args:
        ranges: Ascending ranges that do not overlap. Adjacent ranges are joined, so that equal numbers compare equal.
    """

    __slots__ = ("_counts", "_only", "_stops", "ranges")

    def __init__(self, *ranges: range) -> None:
        joined: list[range] = []
        for each in ranges:
            if joined and joined[-1].stop == each.start:
                joined[-1] = range(joined[-1].start, each.stop)
            else:
                joined.append(each)
        self.ranges: Final = tuple(joined)
        self._stops = [each.stop for each in joined]
        self._counts = list(accumulate(map(len, joined)))
        """Number of batches up to the end of each range."""
        self._only = joined[0] if len(joined) == 1 else None
        """The only range, as of most requests to a single server; None if there are several or none."""

    @classmethod
    def parse(cls, text: str) -> BatchRanges:
        """Parse the text form: ``0:8,24:32`` are the batches 0 to 7 and 24 to 31.

        Raises:
            InvalidSpec: If the text is invalid, or the bounds are (see `between`).
        """
        if _TEXT.fullmatch(text) is None:
            raise InvalidSpec(f"invalid ranges {text!r:.100}: expected START:STOP,START:STOP,... such as 0:8,24:32")
        return cls.between(list(map(int, re.split("[:,]", text))))

    @classmethod
    def between(cls, bounds: Sequence[int]) -> BatchRanges:
        """Return the batches between pairs of bounds: start, stop, start, stop, and so on.

        Raises:
            InvalidSpec: If there are no or too many ranges, if bounds are not ascending, or if one is too large.
        """
        if not 0 < len(bounds) <= 2 * MAX_RANGES or len(bounds) % 2:
            raise InvalidSpec(f"{len(bounds) / 2:g} ranges in a request: expected 1 to {MAX_RANGES}")
        for before, bound in pairwise((-1, *bounds)):
            if not before < bound <= MAX_EPOCH:
                raise InvalidSpec(
                    f"invalid ranges: {bound} after {before}, expected ascending numbers from 0 to 2**62. Join adjacent"
                    " ranges"
                )
        return cls(*map(range, bounds[::2], bounds[1::2]))

    @classmethod
    def of(cls, numbers: Iterable[int]) -> BatchRanges:
        """Return the batches with the given ascending numbers."""
        return cls(*(range(k, k + 1) for k in numbers))

    @property
    def start(self) -> int:
        """The first batch."""
        return self.ranges[0].start

    @property
    def stop(self) -> int:
        """End of the last range."""
        return self._stops[-1]

    def place(self, k: int) -> int | None:
        """Return the number of batches before batch k, or None if batch k is not in the request."""
        if self._only is not None:
            return k - self._only.start if k in self._only else None
        number = bisect_right(self._stops, k)
        if number == len(self.ranges) or k < self.ranges[number].start:
            return None
        return self._counts[number] - (self._stops[number] - k)

    def range_of(self, k: int) -> range:
        """Return the range that contains batch k, which must be in the request."""
        return self.ranges[bisect_right(self._stops, k)]

    def within(self, start: int, stop: int) -> BatchRanges:
        """Return the batches in [start, stop), which may be none."""
        first, last = bisect_right(self._stops, start), bisect_left(self.ranges, stop, key=attrgetter("start"))
        ranges = list(self.ranges[first:last])
        for end in {0, len(ranges) - 1} if ranges else ():
            ranges[end] = range(max(start, ranges[end].start), min(stop, ranges[end].stop))
        return BatchRanges(*filter(None, ranges))

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...

    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        if self._only is not None:
            return self._only[place]
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
        number = bisect_right(self._counts, place)
        return self.ranges[number][place - self._counts[number]]

    def __len__(self) -> int:
        return self._counts[-1] if self._counts else 0

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.ranges)

    def __str__(self) -> str:
        return ",".join(f"{each.start}:{each.stop}" for each in self.ranges)

    def __repr__(self) -> str:
        return f"BatchRanges({', '.join(map(repr, self.ranges))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchRanges) and self.ranges == other.ranges

    def __hash__(self) -> int:
        return hash(self.ranges)
