"""Weights of a mixture: validated parameters (`MixtureSpec`), and conversion of numbers to whole weights.

All weights of a mixture are integers whose sum, the period, is the same in each stage. The client converts the user's
numbers once, and sends integers, so that all servers compute the same order without floating-point arithmetic.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final

import numpy as np

from teleloader_shared.errors import InvalidSpec
from teleloader_shared.text import short

MAX_SOURCES: Final = 1024
MAX_PERIOD: Final = 2**20
"""Maximum sum of the whole weights: decimal weights with up to 6 digits are exact."""
MAX_SLOTS: Final = 2**22
"""Maximum size of the tables of a mixture, in samples; bounds the time to prepare them to seconds."""
MAX_POSITION: Final = 2**62
_TOLERANCE: Final = Fraction(1, 10**12)
"""Maximum difference between a weight and the fraction that replaces it: floats such as 1 / 3 become 1/3."""

Weights = Mapping[str, Any]
"""Weight of each source by name, as numbers; sources without a weight are not used."""


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """Validated parameters of a mixture; part of the loader spec.

    Raises:
        InvalidSpec: If a field is invalid.
    """

    sources: tuple[tuple[str, int], ...]
    """Name and length of each source, in the order of the dataset's indices."""
    stages: tuple[tuple[int, tuple[int, ...]], ...]
    """Start and weights of each stage: the weights of the sources from this position on, counted over all epochs."""
    samples: int
    """Number of samples in an epoch, over all ranks."""

    def __post_init__(self) -> None:
        """Validate all fields."""
        if not 1 <= len(self.sources) <= MAX_SOURCES or not all(
            isinstance(name, str) and _is_whole(length, 0, MAX_POSITION) for name, length in self.sources
        ):
            raise InvalidSpec(
                f"a mixture requires 1 to {MAX_SOURCES} sources with names and lengths, got {short(self.sources)}"
            )
        if len({name for name, _ in self.sources}) < len(self.sources) or self.length > MAX_POSITION:
            raise InvalidSpec(f"a mixture requires unique names and at most 2**62 samples, got {short(self.sources)}")
        if not _is_whole(self.samples, 0, MAX_POSITION):
            raise InvalidSpec(f"samples of a mixture must be an integer in [0, 2**62], got {short(self.samples)}")
        self._check_stages()

    def _check_stages(self) -> None:
        starts = [start for start, _ in self.stages]
        if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise InvalidSpec(f"stages of a mixture must start at 0 and ascend, got starts {short(starts)}")
        for start, weights in self.stages:
            if len(weights) != len(self.sources) or not all(_is_whole(each, 0, MAX_PERIOD) for each in weights):
                raise InvalidSpec(
                    f"stage {start} of a mixture requires {len(self.sources)} non-negative integers, got "
                    f"{short(weights)}"
                )
            if not 1 <= sum(weights) == self.period <= MAX_PERIOD:
                raise InvalidSpec(
                    f"the weights in all stages of a mixture must have the same sum in [1, {MAX_PERIOD}], got "
                    f"{sum(weights)} in stage {start} and {self.period} in stage 0"
                )
        empty = [name for place, (name, length) in enumerate(self.sources) if not length and self._is_used(place)]
        if empty:
            raise InvalidSpec(f"source {empty[0]!r} of a mixture has a weight but no samples: remove its weight")
        if starts[-1] * self.period > MAX_POSITION or self.slots > MAX_SLOTS:
            raise InvalidSpec(
                f"{len(starts)} stages of a mixture with period {self.period} exceed the limit of {MAX_SLOTS} table "
                "slots: use fewer stages, or weights with a smaller common denominator"
            )

    @property
    def period(self) -> int:
        """Sum of the weights in each stage."""
        return sum(self.stages[0][1])

    @property
    def slots(self) -> int:
        """Upper bound of the size of the tables, in samples."""
        return table_slots([start for start, _ in self.stages], self.period)

    @property
    def length(self) -> int:
        """Number of samples in all sources together: the length of the dataset."""
        return sum(length for _, length in self.sources)

    @property
    def memory(self) -> int:
        """Estimated memory of the parameters, in bytes."""
        numbers = len(self.sources) + sum(2 + len(weights) for _, weights in self.stages)
        return 64 * numbers + sum(sys.getsizeof(name) for name, _ in self.sources)

    def range_of(self, index: int) -> range:
        """Return the indices of the source to which a sample belongs.

        Raises:
            IndexError: If the index is not in the dataset.
        """
        start = 0
        for _, length in self.sources:
            if start <= index < start + length:
                return range(start, start + length)
            start += length
        raise IndexError(f"index {index} is out of range: the mixture has {start} samples")

    def fractions(self, position: int = 0) -> dict[str, Fraction]:
        """Return the exact weights of the used sources at a position, which have the sum 1."""
        weights = next(weights for start, weights in reversed(self.stages) if start <= position)
        return {
            name: Fraction(weight, self.period)
            for place, ((name, _), weight) in enumerate(zip(self.sources, weights, strict=True))
            if self._is_used(place)
        }

    def _is_used(self, place: int) -> bool:
        return any(weights[place] for _, weights in self.stages)

    @property
    def digest(self) -> str:
        """Digest of all parameters as 16 hexadecimal digits; part of saved states, whose size does not depend on it."""
        return hashlib.blake2b(json.dumps(self.to_json()).encode(), digest_size=8).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the parameters as a JSON object."""
        return {
            "sources": [list(source) for source in self.sources],
            "stages": [[start, list(weights)] for start, weights in self.stages],
            "samples": self.samples,
        }

    @classmethod
    def from_json(cls, fields: object) -> MixtureSpec:
        """Create parameters from a JSON object.

        Raises:
            InvalidSpec: If the object has another structure, or a field is invalid.
        """
        match fields:
            case {"sources": [*sources], "stages": [*stages], "samples": samples, **others} if not others:
                if all(_is_pair(each) for each in sources) and all(
                    _is_pair(each) and _is_whole(each[0], 0, MAX_POSITION) and isinstance(each[1], list | tuple)
                    for each in stages
                ):
                    return cls(
                        tuple((name, length) for name, length in sources),
                        tuple((start, tuple(weights)) for start, weights in stages),
                        samples,
                    )
        raise InvalidSpec(
            "mixture must be null or an object with sources [[name, length], ...], stages [[start, weights], ...] and "
            f"samples, got {short(fields)}"
        )


def table_slots(starts: Sequence[int], period: int) -> int:
    """Return an upper bound of the size of a mixture's tables, in samples."""
    lengths = (stop - start for start, stop in pairwise(starts))
    return sum(min(length, 4 * period) for length in lengths) + 2 * period


def whole_weights(names: Sequence[str], stages: Mapping[int, Weights]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Convert the weights of a schedule to integers with a common sum, at most `MAX_PERIOD`.

    Ratios of the weights are exact if they have a common denominator up to `MAX_PERIOD`; floats are read as decimal
    numbers, and as the fractions nearest to them. Otherwise each weight is rounded to a multiple of the smallest
    possible fraction.

    Args:
        names: Names of all sources.
        stages: Weights of the sources by the position from which they apply.

    Raises:
        ValueError: If no stage starts at 0, a name is unknown, or a weight is negative, not finite, or too small.
    """
    if not all(_is_whole(start, 0, MAX_POSITION) for start in stages) or 0 not in stages:
        raise ValueError(
            f"a schedule of weights must have non-negative integers as keys, including 0, got {short(list(stages))}"
        )
    starts = sorted(stages)
    shares = [_shares(names, stages[start], start) for start in starts]
    simple = [[share.limit_denominator(MAX_PERIOD) for share in stage] for stage in shares]
    is_exact = all(
        sum(nearest) == 1 and all(abs(a - b) <= _TOLERANCE for a, b in zip(nearest, stage, strict=True))
        for nearest, stage in zip(simple, shares, strict=True)
    )
    period = math.lcm(*(share.denominator for stage in simple for share in stage)) if is_exact else MAX_PERIOD + 1
    if period > MAX_PERIOD or table_slots(starts, period) > MAX_SLOTS:
        simple, period = shares, MAX_PERIOD
        while table_slots(starts, period) > MAX_SLOTS and period > 1:
            period //= 2
    rounded = tuple((start, _apportioned(stage, period)) for start, stage in zip(starts, simple, strict=True))
    for (start, whole), stage in zip(rounded, shares, strict=True):
        for name, weight, share in zip(names, whole, stage, strict=True):
            if share and not weight:
                raise ValueError(
                    f"weight of source {name!r} in stage {start} is {float(share):.1e} of the sum, less than the "
                    f"smallest possible fraction 1/{period}: increase the weight, or omit the source"
                )
    return rounded


def _shares(names: Sequence[str], weights: object, start: int) -> list[Fraction]:
    """Return the fraction of each source in the sum of the weights."""
    if not isinstance(weights, Mapping) or not weights:
        raise ValueError(f"weights must map source names to numbers, got {short(weights)} in stage {start}")
    unknown = next((name for name in weights if name not in names), None)
    if unknown is not None:
        raise ValueError(f"unknown source {unknown!r} in weights: the dataset has {', '.join(map(repr, names))}")
    numbers = [_number(name, weights.get(name, 0)) for name in names]
    total = sum(numbers)
    if total <= 0:
        raise ValueError(f"weights must have a positive sum, got {short(dict(weights))} in stage {start}")
    return [number / total for number in numbers]


def _number(name: str, weight: Any) -> Fraction:
    exact = isinstance(weight, int | Fraction | Decimal) and not isinstance(weight, bool)
    if (exact or isinstance(weight, float | np.floating)) and 0 <= weight < math.inf:
        return Fraction(weight if exact else str(float(weight)))
    raise ValueError(f"weight of source {name!r} must be a finite non-negative number, got {short(weight)}")


def _apportioned(shares: Sequence[Fraction], period: int) -> tuple[int, ...]:
    """Round fractions to multiples of 1/period with the sum 1, by largest remainders."""
    whole = [math.floor(share * period) for share in shares]
    missing = period - sum(whole)
    by_remainder = sorted(range(len(shares)), key=lambda place: whole[place] - shares[place] * period)
    for place in by_remainder[:missing]:
        whole[place] += 1
    return tuple(whole)


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
