"""Measurement of a contender: a turn runs a warm-up, then loads batches and records time and CPU time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.contenders import Contender
from benchmarks.workloads import Arrays, Workload

VERIFIED: Final = 3
"""Batches of each contender that are compared with the dataset."""
LEAST: Final = 10
"""Minimum number of batches per turn."""
WARM_UP: Final = 0.5
"""Warm-up batches before a turn, as a fraction of its batches."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Measurement of one contender in one round."""

    batches: int
    seconds: float
    cpu: float
    """CPU seconds of all threads of the consumer process."""

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds


class Spread(NamedTuple):
    """Median, minimum and maximum."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Return the spread of one or more values."""
        return cls(median(values), min(values), max(values))

    def text(self, form: str) -> str:
        """Return "median (minimum..maximum)", with numbers in the given format."""
        return f"{self.middle:{form}} ({self.low:{form}}..{self.high:{form}})"


def calibrate(contender: Contender, workload: Workload, seconds: float) -> int:
    """Return the number of batches that take about `seconds`, after checking the content of the first batches.

    All turns take the same number of batches: turns of equal time would count prefetched batches for some contenders
    only.

    Raises:
        AssertionError: A batch has the wrong content.
    """
    dataset = workload.dataset()
    with contender.open() as batches:
        for k, indices in enumerate(contender.indices(VERIFIED)):
            if not _is_right(workload.arrays(next(batches)), workload.expected(dataset, indices)):
                raise AssertionError(f"batch {k} of {contender.name} differs from the dataset")
        _count(batches, seconds / 2)
        taken, took = _count(batches, seconds / 2)
    return max(LEAST, round(taken / took * seconds))


def measure(contender: Contender, count: int) -> Turn:
    """Measure a turn of `count` batches."""
    with contender.open() as batches:
        _drain(batches, round(WARM_UP * count))
        cpu, began = time.process_time(), time.perf_counter()
        _drain(batches, count)
        return Turn(count, time.perf_counter() - began, time.process_time() - cpu)


def _is_right(arrays: Arrays, expected: Arrays) -> bool:
    pairs = zip(arrays, expected, strict=True)
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
