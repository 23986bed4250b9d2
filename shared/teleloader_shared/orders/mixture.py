"""Random-access mixture: which source, and which of its samples, is at a position of an order of several datasets.

`Interleaving` assigns a source to each position n = 0, 1, ... so that after any n positions, in which source s occurs
c(n) times,

    |c(n) - I(n)| < 1,      I(n) = sum of the source's weights at the positions before n,

for every source at once, also across changes of the weights. In any window, the difference is therefore less than 2.
A random choice, as in Hugging Face's ``interleave_datasets``, differs by the order of sqrt(n): 0.5 million samples in
10**9 have about the right proportions, but 1,000 consecutive ones do not.

Algorithm (part of the resumable state: any change here changes the sample order of existing training runs). Weights
are integers a with the sum D (the period) in each stage; U = D * I is an integer at each position. Occurrence j = 1, 2,
... of a source must be assigned a position in its window:

    first position r with U(r + 1) > (j - 1) * D,      last position d with U(d) < j * D

*The windows are the bound.* If c(n) >= j, occurrence j is before n, so r < n and I(n) >= I(r + 1) > j - 1: therefore
c(n) - I(n) < 1. If c(n) < j, occurrence j is not before n, so d >= n and I(n) <= I(d) < j: therefore I(n) - c(n) < 1.

*The windows can be met.* Divide each position among the sources in the proportion of the weights. This fractional
assignment fills each position exactly, and gives occurrence j a total of 1 within its window, because it covers the
part of I from j - 1 to j. A bipartite graph with a fractional perfect matching has an integral one, and for unit jobs
with windows on a line, assigning to each position the open occurrence with the *earliest deadline* finds it (Jackson's
rule). These are the windows of proportionate progress (Baruah, Cohen, Plaxton & Varvel 1996), of which Tijdeman's
chairman assignment (1980) is the case of constant weights; the proof needs no constant weights.

The assignment is sequential: its state at a position is the set of sources that are *ahead*, c > I. (Rounding the
cumulative weights gives a closed form with the same bound, but counts that decrease.) It is made random-access by
tables, whose size depends on the period and the number of stages, and not on the number of samples:

- After D positions of a stage, U has grown by a multiple of D for each source, so that the windows repeat. With
  constant weights from position 0 on, no source is ahead at a multiple of D, and one table of D positions is all.
- A later stage begins with sources that are ahead, and earliest-deadline assignment need not return to the same set
  after D positions. Its first D positions (the *head*) are a table of their own, which ends with a set A. The next
  table (the *cycle*) also begins and ends with A: its occurrences are those up to the counts of A, with deadlines at
  the end of the table. This can be met: a set is possible at the end of a table if in each final part of the table the
  occurrences that must be in it fit in it, which holds for A because the head, in which the windows are the same, ends
  with it; and at the beginning if in each initial part the open occurrences fit in it, which holds because the
  assignment continues after the head; all other windows are met by the fractional assignment.
- Before the next stage, deadlines depend on the coming weights. The last D to 2 * D positions (the *tail*) are
  therefore a table again. Up to D positions after its beginning, the open occurrences with deadlines are those of a
  cycle, and fit. Later, each source with a weight has I >= c again, so that their number is that after the head, less D
  per cycle, for as many positions less: they fit because the assignment after the head can be continued. (A source with
  weight 0 has no occurrences in the cycle, and remains ahead or not.) A stage shorter than 4 * D is one table.

So a position is located by a division and a look-up. All arithmetic is on integers.

The order of an epoch: sample number m of a source (counted over all epochs) is sample m mod L of pass m // L over its
L samples, and each pass has its own permutation, whose key is derived from the seed, the source's name and the pass.
A source that is exhausted begins its next pass, and a new epoch continues where the last one ended: no sample of a
source is used again before all others have been.

Sources: Tijdeman, "The chairman assignment problem" (Discrete Mathematics 32, 1980); Baruah, Cohen, Plaxton & Varvel,
"Proportionate progress" (Algorithmica 15, 1996); Jackson, "Scheduling a production line to minimize maximum tardiness"
(1955).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from teleloader_shared.orders.permutation import Permutation
from teleloader_shared.orders.seeding import derive
from teleloader_shared.weights import MAX_POSITION, MixtureSpec

Ints = NDArray[np.int64]
Stages = tuple[tuple[int, tuple[int, ...]], ...]
StoppingStrategy = Literal["first_exhausted", "all_exhausted"]

_NEVER: Final = 2**62
"""Deadline of an occurrence whose source has no further weight."""


class Interleaving:
    """Sequence of sources: the source at each position, and the number of its earlier occurrences.

    Instances are immutable and can be shared between threads.

    Args:
        stages: Start and weights of each stage (`MixtureSpec.stages`).
    """

    def __init__(self, stages: Stages) -> None:
        self._windows = _Windows(stages)
        self._counts = [0] * len(stages[0][1])
        self._segments: list[tuple[int, int, int, list[int], list[int]]] = []
        """Start, table offset, table length, counts before the start, and counts per table, of each segment."""
        self._tables: list[tuple[NDArray[np.uint16], NDArray[np.int32]]] = []
        self._size = 0
        period = self._windows.period
        stops = [start for start, _ in stages[1:]]
        for (start, weights), stop in zip(stages, [*stops, None], strict=True):
            if stop is None or stop - start > 4 * period:
                self._add_cycles(start, stop, weights)
            else:
                self._add(start, stop)
        self._sources = np.concatenate([sources for sources, _ in self._tables])
        self._numbers = np.concatenate([numbers for _, numbers in self._tables])
        starts, offsets, lengths, before, per_table = zip(*self._segments, strict=True)
        self._starts, self._offsets, self._lengths = (np.array(each, np.int64) for each in (starts, offsets, lengths))
        self._before, self._per_table = np.array(before, np.int64), np.array(per_table, np.int64)
        del self._windows, self._segments, self._tables

    @property
    def nbytes(self) -> int:
        """Size of the tables in bytes."""
        return self._sources.nbytes + self._numbers.nbytes

    def at(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the source at each position, and the number of its occurrences before the position.

        Args:
            positions: Int64 array of positions in [0, 2**62).
        """
        segments = np.searchsorted(self._starts, positions, side="right") - 1
        tables, within = np.divmod(positions - self._starts[segments], self._lengths[segments])
        slots = self._offsets[segments] + within
        sources = self._sources[slots].astype(np.int64)
        before = self._before[segments, sources] + tables * self._per_table[segments, sources]
        return sources, before + self._numbers[slots]

    def counts(self, position: int) -> Ints:
        """Return the number of occurrences of each source before a position, int64 of shape (sources,)."""
        segment = int(np.searchsorted(self._starts, position, side="right")) - 1
        tables, within = divmod(position - int(self._starts[segment]), int(self._lengths[segment]))
        offset = self._offsets[segment]
        part = np.bincount(self._sources[offset : offset + within], minlength=self._before.shape[1])
        counts: Ints = self._before[segment] + tables * self._per_table[segment] + part
        return counts

    def _add_cycles(self, start: int, stop: int | None, weights: tuple[int, ...]) -> None:
        """Add the head, the cycle and the tail of a stage."""
        period, before = self._windows.period, self._counts
        self._add(start, start + period)
        grown = [after - count for after, count in zip(self._counts, before, strict=True)]
        cycles = start
        if grown != list(weights):  # another set is ahead than before: the cycle differs from the head
            cycles = start + period
            ends = [count + weight for count, weight in zip(self._counts, weights, strict=True)]
            self._add(cycles, cycles + period, ends)
        if stop is not None:
            number = (stop - cycles) // period - 1
            before = self._segments[-1][3]
            self._counts = [count + number * weight for count, weight in zip(before, weights, strict=True)]
            self._add(cycles + number * period, stop)

    def _add(self, start: int, stop: int, ends: list[int] | None = None) -> None:
        """Add a table for the positions from start to stop, with the final counts `ends` if given."""
        sources = np.array(_earliest_deadlines(*self._windows.between(start, stop, self._counts, ends), stop - start))
        grown = np.bincount(sources, minlength=len(self._counts))
        by_source = np.argsort(sources, kind="stable")
        numbers = np.empty(len(sources), np.int32)
        numbers[by_source] = np.arange(len(sources)) - np.repeat(np.cumsum(grown) - grown, grown)
        self._tables.append((sources.astype(np.uint16), numbers))
        self._segments.append((start, self._size, stop - start, self._counts, grown.tolist()))
        self._counts = [count + int(more) for count, more in zip(self._counts, grown, strict=True)]
        self._size += stop - start


class _Windows:
    """Windows of the occurrences of all sources.

    Args:
        stages: Start and weights of each stage.
    """

    def __init__(self, stages: Stages) -> None:
        self.period = sum(stages[0][1])
        self._starts = np.array([start for start, _ in stages], np.int64)
        self._weights = np.array([weights for _, weights in stages], np.int64)
        grown = np.diff(self._starts)[:, None] * self._weights[:-1]
        self._totals = np.concatenate([np.zeros((1, self._weights.shape[1]), np.int64), np.cumsum(grown, axis=0)])
        """U at the start of each stage, of shape (stages, sources)."""

    def between(
        self, start: int, stop: int, counts: Sequence[int], ends: Sequence[int] | None
    ) -> tuple[list[int], list[int], int]:
        """Return the windows of the open occurrences that may be at the positions from start to stop.

        Args:
            start: First position.
            stop: End of the positions.
            counts: Occurrences of each source before `start`.
            ends: Occurrences of each source before `stop`, if they are prescribed: all must then be before `stop`.

        Returns:
            First position of each occurrence relative to `start`, ascending; last position * sources + source; and the
            number of sources.
        """
        found = []
        for source, count in enumerate(counts):
            end = self._begun(source, stop) if ends is None else ends[source]
            firsts, lasts = self._of(source, np.arange(count, max(count, end), dtype=np.int64))
            lasts = np.minimum(lasts, (_NEVER if ends is None else stop) - 1)
            found.append((firsts - start, np.minimum(lasts - start, 2**40) * len(counts) + source))
        firsts, keys = (np.concatenate(each) for each in zip(*found, strict=True))
        order = np.argsort(firsts, kind="stable")
        return firsts[order].tolist(), keys[order].tolist(), len(counts)

    def _begun(self, source: int, stop: int) -> int:
        """Return the number of occurrences whose window begins before a position."""
        stage = int(np.searchsorted(self._starts, stop, side="right")) - 1
        total = int(self._totals[stage, source]) + int(self._weights[stage, source]) * (stop - int(self._starts[stage]))
        return -(-total // self.period)

    def _of(self, source: int, numbers: Ints) -> tuple[Ints, Ints]:
        """Return the first and the last position of occurrences, which are numbered from 0."""
        totals, weights = self._totals[:, source], self._weights[:, source]
        begin, end = numbers * self.period, (numbers + 1) * self.period
        stage = np.searchsorted(totals[1:], begin, side="right")
        firsts = self._starts[stage] + (begin - totals[stage]) // np.maximum(weights[stage], 1)
        stage = np.searchsorted(totals[1:], end, side="left")
        lasts = self._starts[stage] - (totals[stage] - end) // np.maximum(weights[stage], 1) - 1
        return firsts, np.where(weights[stage] > 0, lasts, _NEVER - 1)


def _earliest_deadlines(firsts: list[int], keys: list[int], sources: int, length: int) -> list[int]:
    """Return the source at each position: that of the open occurrence with the earliest deadline."""
    heap: list[int] = []
    found = []
    number, count = 0, len(firsts)
    for position in range(length):
        while number < count and firsts[number] <= position:
            heappush(heap, keys[number])
            number += 1
        found.append(heappop(heap) % sources)
    return found


@lru_cache(maxsize=8)
def interleaving(stages: Stages) -> Interleaving:
    """Return the interleaving of a schedule of weights; the last ones are kept."""
    return Interleaving(stages)


class MixtureOrder:
    """Sample order of a mixture in one epoch: the dataset indices at positions of the epoch.

    Args:
        mixture: Parameters of the mixture.
        epoch: Epoch number, from 0.
        seed: Seed of the permutations; None for the order of each source's indices.
    """

    def __init__(self, mixture: MixtureSpec, epoch: int, seed: int | None) -> None:
        self._mixture = mixture
        self._first = epoch * mixture.samples
        self._seed = seed
        self._lengths = np.array([length for _, length in mixture.sources], np.int64)
        self._offsets = np.cumsum(self._lengths) - self._lengths

    def __call__(self, positions: Ints) -> Ints:
        """Return the dataset indices at positions of the epoch, in a new int64 array of shape (positions,)."""
        sources, passes, within = self._places(positions)
        if self._seed is not None:
            groups = np.stack([sources, passes])
            order = np.lexsort(groups[::-1])
            changes = np.flatnonzero((np.diff(groups[:, order]) != 0).any(axis=0)) + 1
            for places in np.split(order, changes) if len(order) else []:
                source, number = int(sources[places[0]]), int(passes[places[0]])
                name, length = self._mixture.sources[source]
                within[places] = _permutation(length, self._seed, name, number)(within[places])
        return self._offsets[sources] + within

    def sources(self, positions: Ints) -> Ints:
        """Return the number of the source at positions of the epoch."""
        return self._places(positions)[0]

    def passes(self, positions: Ints) -> Ints:
        """Return the pass over its source, counted from 0, to which the sample at each position belongs."""
        return self._places(positions)[1]

    def _places(self, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the source, the pass, and the position in the pass, of positions of the epoch."""
        sources, numbers = interleaving(self._mixture.stages).at(self._first + positions)
        return sources, *np.divmod(numbers, self._lengths[sources])


@lru_cache(maxsize=256)
def _permutation(length: int, seed: int, name: str, number: int) -> Permutation:
    source = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return Permutation(length, derive("mixture", seed, source, number))


def epoch_samples(sources: Sequence[tuple[str, int]], stages: Stages, strategy: StoppingStrategy) -> int:
    """Return the number of samples in an epoch that ends with the first pass over some source, or over all sources.

    Args:
        sources: Name and length of each source.
        stages: Start and weights of each stage.
        strategy: ``first_exhausted``: the largest number of samples in which none is repeated. ``all_exhausted``: the
            smallest number of samples that contains each sample of the used sources.

    Raises:
        ValueError: If a source is never exhausted, because its weight becomes 0 before.
    """
    found = interleaving(stages)
    used = np.array([weights for _, weights in stages]).any(axis=0)
    lengths = np.array([length for _, length in sources], np.int64)[used]

    def is_over(samples: int) -> bool:
        counts = found.counts(samples)[used]
        return bool((counts > lengths).any() if strategy == "first_exhausted" else (counts >= lengths).all())

    high = 1
    while not is_over(high):
        high *= 2
        if high > MAX_POSITION // 2:
            missing = np.flatnonzero(used)[found.counts(high)[used] < lengths]
            raise ValueError(
                f'samples="all_exhausted" requires that each source is exhausted, but the weight of source '
                f"{sources[missing[0]][0]!r} becomes 0 before: pass a number of samples"
            )
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_over(middle) else (middle, high)
    return high if strategy == "all_exhausted" else high - 1
