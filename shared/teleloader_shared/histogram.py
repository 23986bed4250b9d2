"""Histograms of durations with buckets 10 % wide: quantiles of any number of durations, in 2 KB.

Times are counted in blocks: NumPy finds the buckets of a thousand in the time in which Python finds those of a hundred.
(HdrHistogram takes 0.7 us for a time and prometheus_client 0.6, where a batch may have 20 us in all; and the few
buckets of the latter say little of a 99th percentile.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from teleloader_shared.stats import Latency

PER_DECADE: Final = 24
"""Buckets between a time and ten times that: the middle of one is at most 5 % off all that is in it."""
_BOUNDS: Final[NDArray[np.float64]] = 10.0 ** (np.arange(-6 * PER_DECADE, 4 * PER_DECADE + 1) / PER_DECADE)
"""Upper bounds of the buckets, in seconds: from 1 us to 10,000 s. Two more buckets are for what lies outside."""
BLOCK: Final = 1024
"""So many single times are counted at once."""
_COARSE: Final = 8
"""Of so many bounds one is told to those who want few buckets: three a decade."""


class Histogram:
    """Counts times; see the module."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(_BOUNDS) + 1, np.int64)
        self._sum = 0.0
        self._max = 0.0
        self._noted: list[float] = []

    def note(self, seconds: float) -> None:
        """Count a time, soon."""
        self._noted.append(seconds)
        if len(self._noted) >= BLOCK:
            self._put_away()

    def add(self, seconds: Sequence[float] | NDArray[np.float64]) -> None:
        """Count some times, in seconds."""
        times = np.asarray(seconds, np.float64)
        if times.size:
            self._counts += np.bincount(np.searchsorted(_BOUNDS, times), minlength=len(self._counts))
            self._sum += float(times.sum())
            self._max = max(self._max, float(times.max()))

    @property
    def count(self) -> int:
        """Number of durations counted."""
        return int(self._counts.sum()) + len(self._noted)

    def latency(self, zeros: int = 0) -> Latency:
        """Return the statistics of the durations and of `zeros` further ones of zero seconds."""
        self._put_away()
        counts = self._counts.copy()
        counts[0] += zeros
        reached = np.cumsum(counts)
        count = int(reached[-1])
        p50, p95, p99 = (self._quantile(reached, share, zeros) for share in (0.5, 0.95, 0.99))
        return Latency(count, self._sum / count if count else 0.0, p50, p95, p99, self._max)

    def buckets(self) -> tuple[list[tuple[float, int]], float]:
        """(upper bound, how many times up to it) for some bounds and infinity; and the sum of all times."""
        self._put_away()
        reached = np.cumsum(self._counts)
        some = [(float(_BOUNDS[i]), int(reached[i])) for i in range(0, len(_BOUNDS), _COARSE)]
        return [*some, (math.inf, int(reached[-1]))], self._sum

    def _put_away(self) -> None:
        noted, self._noted = self._noted, []
        self.add(noted)

    def _quantile(self, reached: NDArray[np.int64], share: float, zeros: int) -> float:
        rank = math.ceil(share * int(reached[-1]))
        if rank <= zeros:
            return 0.0
        bucket = int(np.searchsorted(reached, rank))
        if bucket in (0, len(_BOUNDS)):
            return float(min(_BOUNDS[0], self._max)) if bucket == 0 else self._max
        return min(self._max, math.sqrt(_BOUNDS[bucket - 1] * _BOUNDS[bucket]))
