"""Measurement of a contender: a turn runs a warm-up, then loads batches and records time and CPU time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from statistics import quantiles
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from benchmarks.workloads import Arrays, Workload, arrays

VERIFIED: Final = 3
"""Batches of each contender that are compared with the dataset."""
LEAST: Final = 10
"""Minimum number of batches per turn."""
WARM_UP: Final = 0.5
"""Warm-up batches before a turn, as a fraction of its batches."""


Indices = list[list[int]]


class Contender(Protocol):
    """Way to load the batches of a workload."""

    @property
    def name(self) -> str:
        """Name in tables."""

    @property
    def beside(self) -> str | None:
        """Contender that loads the same batches in the seeded order, for a ratio; None without comparison."""

    def open(self) -> AbstractContextManager[Iterator[Any]]:
        """Yield batches from batch 0, as a consumer would train on them."""

    def indices(self, count: int) -> Indices | None:
        """Return the indices of the first batches of the stream that `open` returned last; None without content."""

    def server_cpu(self) -> float | None:
        """Return the CPU seconds of the server's main process so far; None without a server that can be inspected."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Measurement of one contender in one round."""

    batches: int
    seconds: float
    cpu: float
    """CPU seconds of all threads of the consumer process."""
    server_cpu: float | None
    """CPU seconds of the server's main process; None without a server that can be inspected."""

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds


class Spread(NamedTuple):
    """Median and quartiles."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        low, middle, high = quantiles(values if len(values) > 1 else [*values, *values], n=4, method="inclusive")
        return cls(middle, low, high)

    def text(self, form: str) -> str:
        """Return "median (lower..upper quartile)", with numbers in the given format."""
        return f"{self.middle:{form}} ({self.low:{form}}..{self.high:{form}})"


def ratios(values: Sequence[float], base: Sequence[float]) -> Spread:
    """Return the spread of the ratios within each round."""
    return Spread.of([value / other for value, other in zip(values, base, strict=True)])


def calibrate(contender: Contender, workload: Workload, seconds: float) -> int:
    """Return the number of batches that take about `seconds`, after checking the content of the first batches.

    All turns take the same number of batches: turns of equal time would count prefetched batches for some contenders
    only.

    Raises:
        AssertionError: A batch has the wrong content.
    """
    dataset = workload.dataset()
    with contender.open() as batches:
        for k, indices in enumerate(contender.indices(VERIFIED) or ()):
            if not _is_right(arrays(next(batches)), workload.expected(dataset, indices)):
                raise AssertionError(f"batch {k} of {contender.name} differs from the dataset")
        _count(batches, seconds / 2)
        taken, took = _count(batches, seconds / 2)
    return max(LEAST, round(taken / took * seconds))


def measure(contender: Contender, count: int) -> Turn:
    """Measure a turn of `count` batches."""
    with contender.open() as batches:
        _drain(batches, round(WARM_UP * count))
        server, cpu, began = contender.server_cpu(), time.process_time(), time.perf_counter()
        _drain(batches, count)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        return Turn(count, seconds, cpu, None if server is None else (contender.server_cpu() or 0.0) - server)


def _is_right(found: Arrays, expected: Arrays) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(array.dtype == right.dtype and np.array_equal(array, right) for array, right in pairs)


def _drain(batches: Iterator[Any], count: int) -> None:
    for _ in islice(batches, count):
        pass


def _count(batches: Iterator[Any], seconds: float) -> tuple[int, float]:
    began, taken = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds or not taken:
        next(batches)
        taken += 1
    return taken, took
