"""Length-balanced batches: samples of similar length in each batch, and equal costs of all ranks in each step.

The epoch's order is cut into windows (`windows`), and the samples of a window are sorted by length, longest first;
samples of equal length keep their order. All choices are functions of the seed, the epoch and the number of the window.

*Batches of a fixed size* (`StepOrder`). The sorted samples are cut into global steps of batch size x world size
samples, and the steps of the window are shuffled. A step is dealt to the ranks in rows of one sample per rank, forward
and backward in turn, so that the sums of the lengths differ between two ranks by at most the difference between the
longest and the shortest sample of the step. Which rank gets the first column changes from step to step. The steps
depend on the product of batch size and world size, and not on either of them. If the number of samples is not a
multiple of this product, an incomplete step is cut from a pseudo-random place of the last window, and is the last step
of the epoch. It contains the padding, and from it samples are omitted (`LoaderSpec.tail`).

*Batches of at most T tokens* (`TokenBatches`). The sorted samples are cut into batches with samples x longest <= T:
each batch takes as many of the next samples as possible, which yields the smallest number of batches. The number is
rounded up to a multiple of the group size M; this is possible because M divides the window, except in the last one. The
batches are then cut again, with the smallest limit that yields no more batches, which distributes the room that
rounding leaves; if there are still too few, the batch with the most samples is halved repeatedly. M successive batches
form a group of similar length. The groups of the window are shuffled, and each group is rotated. Batches do not depend
on the world size W: step k consists of the batches k * W to (k + 1) * W - 1. If W divides M, they are in one group.

Only the number of batches per window has to be known in advance (`windows.first_groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

from teleloader_shared.balance import BalanceSpec
from teleloader_shared.lengths import Lengths
from teleloader_shared.orders.permutation import Permutation
from teleloader_shared.orders.seeding import derive, random_below
from teleloader_shared.orders.windows import Groups, Ints, Windows, first_groups

Order = Callable[[Ints], Ints]

_LIMITS: Final = 64
"""Limits that are tried at the same time."""


class StepOrder:
    """Positions of the ranks' samples in each global step of an epoch with batches of a fixed size.

    Args:
        balance: Parameters.
        lengths: Lengths of the samples.
        order: Function that returns the dataset indices at positions of the epoch.
        samples: Samples of all ranks in the epoch.
        epoch_samples: Positions of the order; padding samples continue after its end.
        world_size: Number of ranks.
        seed: Seed of the epoch; None to keep the steps of a window in descending order of length.
    """

    def __init__(
        self,
        balance: BalanceSpec,
        lengths: Lengths,
        order: Order,
        *,
        samples: int,
        epoch_samples: int,
        world_size: int,
        seed: int | None,
    ) -> None:
        self._lengths, self._order = lengths, order
        self._group, self._epoch_samples = balance.group, epoch_samples
        self._incomplete = samples - epoch_samples // balance.group * balance.group
        """Samples of all ranks in the incomplete last step, with padding or without omitted samples (`tail`)."""
        self._ranks, self._seed = world_size, seed
        self._windows = Windows(epoch_samples, balance.window)
        per_window = balance.window // balance.group
        self.steps = Groups(range(0, len(self._windows) * per_window + 1, per_window), self._divide)
        """Positions of each rank's samples in each step: int64 of shape (samples,), padding samples last. The last
        window may have fewer steps."""

    def _divide(self, window: int) -> list[Sequence[Ints]]:
        positions = np.arange(*self._windows.bounds(window), dtype=np.int64)
        positions = positions[np.argsort(-self._lengths.of(self._order(positions)), kind="stable")]
        count, rest = divmod(len(positions), self._group)
        places = _shuffled(self._seed, window, count)
        cut = self._group * (_choice(self._seed, window, count + 1) if rest else count)
        last = positions[cut : cut + rest]
        steps = np.delete(positions, slice(cut, cut + rest)).reshape(count, self._group // self._ranks, self._ranks)
        steps = steps[places]
        steps[:, 1::2] = steps[:, 1::2, ::-1]
        of_ranks = steps.transpose(0, 2, 1)
        if self._seed is not None:
            turns = random_below(np.arange(count), derive("columns", self._seed, window), self._ranks)
            columns = (np.arange(self._ranks) + turns[:, None]) % self._ranks
            of_ranks = np.take_along_axis(of_ranks, columns[:, :, None], axis=1)
        found: list[Sequence[Ints]] = [list(step) for step in of_ranks]
        if not rest:
            return found
        padding = np.arange(self._epoch_samples, self._epoch_samples + self._incomplete - rest, dtype=np.int64)
        positions = np.concatenate([last, padding])[: self._incomplete]
        return [*found, [self._share(positions, rank) for rank in range(self._ranks)]]

    def _share(self, positions: Ints, rank: int) -> Ints:
        """Return a rank's part of the incomplete step, with padding last.

        The first ranks have one sample more if the numbers differ.
        """
        rows = len(positions) // self._ranks
        table = positions[: rows * self._ranks].reshape(rows, self._ranks).copy()
        table[1::2] = table[1::2, ::-1]
        more = positions[rows * self._ranks :][rank : rank + 1]
        own = np.concatenate([table[:, rank], more])
        return own[np.argsort(own >= self._epoch_samples, kind="stable")]


class TokenBatches:
    """Batches of all ranks, as dataset indices, with a limit of samples x longest sample.

    Args:
        balance: Parameters, with `max_tokens`.
        lengths: Lengths of the samples.
        order: Function that returns the dataset indices at positions of the epoch.
        seed: Seed of the epoch; None to keep the batches of a window in descending order of length.
    """

    def __init__(self, balance: BalanceSpec, lengths: Lengths, order: Order, seed: int | None) -> None:
        self._most, self._group = balance.max_tokens or 0, balance.group
        self._lengths, self._order, self._seed = lengths, order, seed
        self.windows = Windows(len(lengths), balance.window)

    def count(self, start: int, stop: int) -> Ints:
        """Return the number of batches in each window from start to stop."""
        size = self.windows.size
        full = stop if stop * size <= self.windows.samples else stop - 1
        counts = [np.empty(0, np.int64)]
        for first, last in ((start, full), (full, stop)):
            if first < last:
                positions = np.arange(first * size, self.windows.bounds(last - 1)[1], dtype=np.int64)
                rows = -self._lengths.of(self._order(positions)).reshape(last - first, -1)
                rows.sort(axis=1)
                counts.append(self._rounded(_count(-rows, np.full(last - first, self._most)), rows.shape[1]))
        return np.concatenate(counts)

    def divide(self, window: int) -> list[Ints]:
        """Return the batches of a window."""
        indices = self._order(np.arange(*self.windows.bounds(window), dtype=np.int64))
        lengths = self._lengths.of(indices)
        longest_first = np.argsort(-lengths, kind="stable")
        indices, lengths = indices[longest_first], lengths[longest_first]
        fewest = _count(lengths[None], np.array([self._most]))
        number = int(self._rounded(fewest, len(indices))[0])
        cuts = _cuts(lengths, _least_limit(lengths, self._most, number))
        sizes = np.diff([*cuts, len(indices)]).tolist()
        heap = [(-size, start) for size, start in zip(sizes, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True)]
        heapify(heap)
        while len(heap) < number:
            negative, start = heappop(heap)
            half = -negative // 2
            heappush(heap, (negative + half, start))
            heappush(heap, (-half, start - negative - half))
        batches = np.split(indices, sorted(start for _, start in heap)[1:])
        return [batches[place] for place in self._places(window, number)]

    def _rounded(self, counts: Ints, samples: int) -> Ints:
        return np.minimum(-(-counts // self._group) * self._group, samples)

    def _places(self, window: int, number: int) -> list[int]:
        """Return the places of the batches of a window, in their order in the epoch, among the sorted ones."""
        count, rest = divmod(number, self._group)
        cut = self._group * (_choice(self._seed, window, count + 1) if rest else count)
        places = np.arange(number)
        groups = np.delete(places, slice(cut, cut + rest)).reshape(count, self._group)
        groups = groups[_shuffled(self._seed, window, count)]
        if self._seed is not None:
            turns = random_below(np.arange(count), derive("columns", self._seed, window), self._group)
            groups = np.take_along_axis(groups, (places[: self._group] + turns[:, None]) % self._group, axis=1)
        return [*groups.ravel().tolist(), *places[cut : cut + rest].tolist()]


def _shuffled(seed: int | None, window: int, count: int) -> Ints:
    places = np.arange(count)
    return places if seed is None else Permutation(count, derive("steps", seed, window))(places)


def _choice(seed: int | None, window: int, count: int) -> int:
    """Return a number in [0, count), the last one without a seed."""
    return count - 1 if seed is None else derive("rest", seed, window) % count


def _count(lengths: Ints, limits: Ints) -> Ints:
    """Return the smallest number of batches for each limit.

    Args:
        lengths: Lengths in descending order, of shape (limits, samples), or (1, samples) for all limits.
        limits: Limits of samples x longest sample, none less than the longest sample: shape (limits,).
    """
    counts, next_ = np.zeros(len(limits), np.int64), np.zeros(len(limits), np.int64)
    active = np.arange(len(limits))
    while active.size:
        at = next_[active]
        at += limits[active] // lengths[active if len(lengths) > 1 else 0, at]
        next_[active] = at
        counts[active] += 1
        active = active[at < lengths.shape[1]]
    return counts


def _least_limit(lengths: Ints, most: int, number: int) -> int:
    """Return the smallest limit up to `most` that yields at most `number` batches; `most` must be such a limit."""
    low, high = int(lengths[0]), most
    while low < high:
        limits = np.unique(np.linspace(low, high, _LIMITS).astype(np.int64))
        place = int(np.argmax(_count(lengths[None], limits) <= number))
        low, high = (int(limits[place - 1]) + 1 if place else low), int(limits[place])
    return high


def _cuts(lengths: Ints, limit: int) -> list[int]:
    """Return the first sample of each batch."""
    cuts, at, values = [], 0, lengths.tolist()
    while at < len(values):
        cuts.append(at)
        at += limit // values[at]
    return cuts


def _permuted(length: int, epoch: int, seed: int | None) -> Order:
    return (lambda positions: positions) if seed is None else Permutation(length, derive("order", seed, epoch))


def token_batches(
    balance: BalanceSpec, lengths: Lengths, epoch: int, seed: int | None, starts: Ints | None = None
) -> Groups[NDArray[np.int64]]:
    """Return the batches of all ranks in an epoch, as dataset indices.

    Args:
        balance: Parameters, with `max_tokens`.
        lengths: Lengths of the samples.
        epoch: Epoch number.
        seed: Seed of the loader; None for the order of the dataset.
        starts: Result of `prepared`; None to prepare the order.
    """
    found = _batches(balance, lengths, epoch, seed)
    return Groups(prepared(balance, lengths, epoch, seed) if starts is None else starts, found.divide)


@lru_cache(maxsize=8)
def prepared(balance: BalanceSpec, lengths: Lengths, epoch: int, seed: int | None) -> Ints:
    """Prepare an epoch of batches with `max_tokens`; the last results are kept.

    Returns:
        Number of the first batch of each window, and the number of all batches.
    """
    found = _batches(balance, lengths, epoch, seed)
    starts = first_groups(found.windows, found.count)
    starts.setflags(write=False)
    return starts


def _batches(balance: BalanceSpec, lengths: Lengths, epoch: int, seed: int | None) -> TokenBatches:
    order = _permuted(len(lengths), epoch, seed)
    return TokenBatches(balance, lengths, order, None if seed is None else derive("balance", seed, epoch))
