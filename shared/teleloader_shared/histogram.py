"""Histogram of durations with bucket widths of 10 %: quantiles of any number of durations in 2 KB of memory.

Durations are counted in blocks: NumPy sorts a thousand of them into buckets in the time that Python needs for a
hundred. HdrHistogram takes 0.7 us per duration and prometheus_client 0.6 us, too much where a whole batch may take
20 us; and the default buckets of the latter are too coarse for a 99th percentile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from teleloader_shared.stats import Latency

PER_DECADE: Final = 24
"""Buckets per factor of ten: the midpoint of a bucket differs from each value in it by at most 5 %."""
_BOUNDS: Final[NDArray[np.float64]] = 10.0 ** (np.arange(-6 * PER_DECADE, 4 * PER_DECADE + 1) / PER_DECADE)
"""Upper bounds of the buckets, in seconds, from 1 us to 10,000 s. Two more buckets hold the values outside."""
BLOCK: Final = 1024
"""Number of durations that `Histogram.observe` buffers before they are counted together."""
_BUCKET_STEP: Final = 8
"""`Histogram.buckets` returns every eighth bound: three per factor of ten."""


class Histogram:
    """Histogram of durations with quantiles accurate to 5 %."""

    def __init__(self) -> None:
        self._counts = np.zeros(len(_BOUNDS) + 1, np.int64)
        self._sum = 0.0
        self._max = 0.0
        self._pending: list[float] = []

    def observe(self, seconds: Iterable[float]) -> None:
        """Add durations in seconds; durations are buffered and counted in blocks, for speed."""
        self._pending.extend(seconds)
        if len(self._pending) >= BLOCK:
            self._flush()

    def add(self, seconds: Sequence[float] | NDArray[np.float64]) -> None:
        """Add several durations in seconds to the counts."""
        times = np.asarray(seconds, np.float64)
        if times.size:
            self._counts += np.bincount(np.searchsorted(_BOUNDS, times), minlength=len(self._counts))
            self._sum += float(times.sum())
            self._max = max(self._max, float(times.max()))

    @property
    def count(self) -> int:
        """Number of durations added so far."""
        return int(self._counts.sum()) + len(self._pending)

    def latency(self, zeros: int = 0) -> Latency:
        """Return mean, quantiles and maximum of the durations, including `zeros` additional durations of 0 seconds."""
        self._flush()
        counts = self._counts.copy()
        counts[0] += zeros
        reached = np.cumsum(counts)
        count = int(reached[-1])
        p50, p95, p99 = (self._quantile(reached, share, zeros) for share in (0.5, 0.95, 0.99))
        return Latency(count, self._sum / count if count else 0.0, p50, p95, p99, self._max)

    def buckets(self) -> tuple[list[tuple[float, int]], float]:
        """Return the cumulative buckets as (upper bound, count) pairs, and the sum of all durations in seconds.

        The last bound is infinity, as in Prometheus.
        """
        self._flush()
        reached = np.cumsum(self._counts)
        some = [(float(_BOUNDS[i]), int(reached[i])) for i in range(0, len(_BOUNDS), _BUCKET_STEP)]
        return [*some, (math.inf, int(reached[-1]))], self._sum

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        self.add(pending)

    def _quantile(self, reached: NDArray[np.int64], share: float, zeros: int) -> float:
        rank = math.ceil(share * int(reached[-1]))
        if rank <= zeros:
            return 0.0
        bucket = int(np.searchsorted(reached, rank))
        if bucket in (0, len(_BOUNDS)):
            return float(min(_BOUNDS[0], self._max)) if bucket == 0 else self._max
        return min(self._max, math.sqrt(_BOUNDS[bucket - 1] * _BOUNDS[bucket]))
