"""Dataset indices of each batch, as a pure function of the loader spec, the dataset's length and the epoch.

Rank r of W owns the positions p = r (mod W) of the epoch's order, as in ``torch.utils.data.DistributedSampler``, and
batch k of rank r is ``order[r + W * (k * B + j)]`` for j = 0..B-1. The batches k of all ranks together are therefore
the block ``[k * B * W, (k + 1) * B * W)`` of the order. If W changes and B * W does not, a resumed training run sees
the same global batches.

The order of a mixture interleaves its sources (`mixture`). It is periodic, and the ranks divide each
block into contiguous parts of B positions instead: every W-th position of a periodic order would give a rank other
proportions (two sources alternate, and each of two ranks would get one of them). Each batch of each rank is therefore
a window of the order. Which rank has which part changes pseudo-randomly from block to block, because a part of a block
is periodic, too.

Length-balanced batches (`balance`) rearrange the positions of each window. With a limit of tokens, the number of
samples in a batch varies: positions are then the numbers of the batches of all ranks, and each rank has one per step.

With packed sequences (`packing`), positions are the numbers of the sequences of all ranks, and are divided like
samples.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from teleloader_shared.balance import MAX_WINDOWS, BalanceSpec
from teleloader_shared.errors import BatchOutOfRange, DatasetChanged, InvalidSpec
from teleloader_shared.lengths import Lengths
from teleloader_shared.orders import balance, packing
from teleloader_shared.orders.balance import StepOrder, token_batches
from teleloader_shared.orders.mixture import MixtureOrder
from teleloader_shared.orders.packing import Pieces, packed_sequences
from teleloader_shared.orders.permutation import Permutation
from teleloader_shared.orders.seeding import derive, random_below
from teleloader_shared.orders.windows import Groups
from teleloader_shared.spec import MAX_EPOCH, LoaderSpec
from teleloader_shared.weights import MAX_POSITION

# Evaluating the permutation takes 30 us for 256 positions and only three times as long for 4096, so the indices of
# small batches are computed in blocks of about this many samples.
_BLOCK_SAMPLES: Final = 4096


class Plan:
    """Sequence of a loader's batches in one epoch; ``plan[k]`` is the array of dataset indices in batch k.

    Args:
        spec: Parameters of the loader.
        length: Number of samples in the dataset, up to 2**62.
        epoch: Epoch number, from 0.
        lengths: Lengths of the samples, if the spec has `balance` or `packing`. None is sufficient for the number of
            balanced batches of a fixed size.
        starts: Result of `prepare`, if the spec is prepared (`LoaderSpec.is_prepared`); None to prepare the order.

    Raises:
        InvalidSpec: If the epoch or the length is out of range, or a sample is longer than `max_tokens`.
        DatasetChanged: If `lengths` differ from those of the spec.
    """

    def __init__(
        self,
        spec: LoaderSpec,
        length: int,
        epoch: int,
        lengths: Lengths | None = None,
        starts: NDArray[np.int64] | None = None,
    ) -> None:
        if not 0 <= epoch < MAX_EPOCH:
            raise InvalidSpec(f"epoch must be in [0, 2**62), got {epoch}")
        if not 0 <= length <= 2**62:
            raise InvalidSpec(f"the dataset's length must be in [0, 2**62], got {length}")
        mixture = spec.mixture
        if mixture is not None and (mixture.length != length or (epoch + 1) * mixture.samples > MAX_POSITION):
            raise InvalidSpec(
                f"the sources of the mixture have {mixture.length} samples and the dataset {length}: create another "
                "loader for the changed dataset"
                if mixture.length != length
                else f"epoch {epoch} with {mixture.samples} samples is beyond position 2**62 of the mixture"
            )
        self.spec = spec
        self.length = length
        self.epoch = epoch
        check_lengths(spec, length, lengths)
        self._epoch_samples = length if mixture is None else mixture.samples
        self._groups: Groups[NDArray[np.int64]] | None = None
        """Batches of all ranks with `max_tokens`; None for batches of a fixed size."""
        self._sequences: Groups[NDArray[np.int64]] | None = None
        """Packed sequences of all ranks; None without packing."""
        if spec.is_prepared:
            if lengths is None:
                raise TypeError("a plan with max_tokens or packing requires lengths")
            seed = spec.seed if spec.shuffle else None
            if spec.packing is not None:
                self._sequences = packed_sequences(spec.packing, lengths, epoch, seed, starts)
            elif spec.balance is not None:
                self._groups = token_batches(spec.balance, lengths, epoch, seed, starts)
            self._epoch_samples = len(self._groups or self._sequences or ())
        self._total = _total(spec, self._epoch_samples)
        self._batch_size = spec.batch_size or 1
        self._order = _order(spec, length, epoch)
        self._rotation_key = derive("ranks", spec.seed, epoch)
        self._batches_per_block = max(1, _BLOCK_SAMPLES // self._batch_size)
        if spec.balance is not None:  # the ranks reach a window at about the same time, and the next one later
            steps = spec.balance.window // spec.balance.group
            self._batches_per_block = min(self._batches_per_block, steps)
        self._steps = None if self._groups is not None else self._step_order(lengths)
        self._select_rank()

    def of_rank(self, spec: LoaderSpec) -> Plan:
        """Return the plan of another rank, which uses the windows that were divided for this one, and vice versa.

        Both plans must be used in the same thread.

        Args:
            spec: Parameters of the loader of that rank, which are otherwise those of this plan.
        """
        other = copy.copy(self)
        other.spec = spec
        other._select_rank()
        return other

    def _select_rank(self) -> None:
        """Set the attributes that depend on the rank."""
        spec, size = self.spec, self._batch_size
        self.samples = max(0, -(-(self._total - spec.rank) // spec.world_size))
        self._batches = self.samples // size if spec.drop_last else -(-self.samples // size)
        self._block: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def _step_order(self, lengths: Lengths | None) -> StepOrder | None:
        spec, order = self.spec, self._order
        if spec.balance is None or lengths is None:
            return None
        return StepOrder(
            spec.balance, lengths, (lambda positions: positions) if order is None else order,
            samples=self._total, epoch_samples=self._epoch_samples, world_size=spec.world_size,
            seed=derive("balance", spec.seed, self.epoch) if spec.shuffle else None,
        )  # fmt: skip

    def __len__(self) -> int:
        return self._batches

    def __getitem__(self, k: int) -> NDArray[np.int64]:
        """Return the dataset indices of batch k, int64 of shape (samples in the batch,).

        With packed sequences, the indices of the documents of which the batch contains pieces, each once.

        Raises:
            BatchOutOfRange: If k is not in [0, len(plan)).
        """
        self.check(k)
        if self._sequences is not None:
            return self.pieces(k).distinct
        if self._groups is not None:
            return self._groups[int(self._positions(k, k + 1)[0])]
        number, within = divmod(k, self._batches_per_block)
        if self._block[0] != number:
            self._block = (number, self._indices_of_block(number))
        start = within * self._batch_size
        return self._block[1][start : start + self._batch_size]

    def first(self, k: int, count: int) -> NDArray[np.int64]:
        """Return the first `count` indices of batch k, in time that does not depend on the batch size.

        With `LoaderSpec.balance` or `LoaderSpec.packing`, the time is that of batch k.

        Raises:
            BatchOutOfRange: If k is not in [0, len(plan)).
        """
        self.check(k)
        if self.spec.is_prepared:
            return self[k][:count]
        start = k * self._batch_size
        return self._indices_at(start, start + min(count, self._batch_size))

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return (self[k] for k in range(len(self)))

    def padding(self, k: int) -> int:
        """Return the number of padding samples at the end of batch k; ``tail="pad"`` repeats samples from the start."""
        self.check(k)
        start, stop = k * self._batch_size, (k + 1) * self._batch_size
        if stop * self.spec.world_size <= self._epoch_samples:
            return 0
        padding = int((self._unwrapped(start, stop) >= self._epoch_samples).sum())
        return padding if self._groups is None else padding * len(self[k])

    def pieces(self, k: int) -> Pieces:
        """Return the pieces of documents of which the packed sequences in batch k consist.

        Raises:
            BatchOutOfRange: If k is not in [0, len(plan)).
            TypeError: If the loader has no `packing`.
        """
        if self._sequences is None:
            raise TypeError("the plan has no pieces of documents: the loader requires packing=")
        return Pieces.of(self._sequences[int(number)] for number in self._positions_of(k))

    def sources(self, k: int) -> NDArray[np.int64]:
        """Return the number of the source of each sample in batch k of a mixture, int64 of shape (samples,).

        Raises:
            BatchOutOfRange: If k is not in [0, len(plan)).
            TypeError: If the dataset is not a mixture.
        """
        return self._mixture.sources(self._positions_of(k))

    def passes(self, k: int) -> NDArray[np.int64]:
        """Return the pass over its source to which each sample in batch k of a mixture belongs, as `sources` does."""
        return self._mixture.passes(self._positions_of(k))

    @property
    def _mixture(self) -> MixtureOrder:
        if isinstance(self._order, MixtureOrder):
            return self._order
        raise TypeError("the plan has no sources: the dataset of the loader must be a Mixture")

    def _positions_of(self, k: int) -> NDArray[np.int64]:
        self.check(k)
        return self._positions(k * self._batch_size, (k + 1) * self._batch_size)

    def check(self, k: int) -> None:
        """Check that batch k exists in the epoch.

        Raises:
            BatchOutOfRange: If k is not in [0, len(plan)).
        """
        if not 0 <= k < self._batches:
            raise BatchOutOfRange(
                f"batch {k} is out of range: epoch {self.epoch} of rank {self.spec.rank} of {self.spec.world_size} "
                f"has batches 0 to {self._batches - 1}"
                if self._batches
                else f"batch {k} is out of range: epoch {self.epoch} has no batches"
            )

    def _indices_of_block(self, number: int) -> NDArray[np.int64]:
        size = self._batches_per_block * self._batch_size
        return self._indices_at(number * size, (number + 1) * size)

    def _indices_at(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the dataset indices of the rank's samples [start, stop), truncated at the end of the epoch."""
        positions = self._positions(start, stop)
        indices = positions if self._order is None else self._order(positions)
        indices.setflags(write=False)  # batches are views of this array: a caller must not modify later batches
        return indices

    def _positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the positions in the epoch's order of the rank's samples [start, stop), truncated at its end."""
        return self._unwrapped(start, stop) % self._epoch_samples

    def _unwrapped(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the positions, in which those of padding samples continue after the end of the order."""
        places = np.arange(start, min(stop, self.samples), dtype=np.int64)
        rank, ranks = self.spec.rank, self.spec.world_size
        if self.spec.balance is not None and self._groups is None:
            return self._balanced(start, start + len(places))
        if self.spec.mixture is None:
            return rank + ranks * places
        blocks, within = np.divmod(places, self._batch_size)
        rotations = random_below(blocks, self._rotation_key, ranks)
        positions = (blocks * ranks + (rank + rotations) % ranks) * self._batch_size + within
        # the incomplete last block is divided into parts whose sizes differ by at most one sample
        full, rest = divmod(self._total, ranks * self._batch_size)
        first = full * ranks * self._batch_size + rank * (rest // ranks) + min(rank, rest % ranks)
        return np.where(blocks < full, positions, first + within)

    def _balanced(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the positions of the rank's samples [start, stop) in the balanced steps."""
        if self._steps is None:
            raise TypeError("the indices of balanced batches require lengths")
        first = start // self._batch_size
        steps = [self._steps.steps[step][self.spec.rank] for step in range(first, -(-stop // self._batch_size))]
        found = np.concatenate([np.empty(0, np.int64), *steps])
        return found[start - first * self._batch_size : stop - first * self._batch_size]


def prepare(spec: LoaderSpec, lengths: Lengths, epoch: int) -> NDArray[np.int64]:
    """Prepare an epoch: return the number of batches (`balance`) or sequences (`packing`) before each window, and all.

    Args:
        spec: Parameters of the loader, with `is_prepared`.
        lengths: Lengths of the samples.
        epoch: Epoch number.

    Raises:
        TypeError: If the order does not require a preparation.
    """
    seed = spec.seed if spec.shuffle else None
    if spec.packing is not None:
        return packing.prepared(spec.packing, lengths, epoch, seed)
    if spec.balance is not None and spec.has_token_batches:
        return balance.prepared(spec.balance, lengths, epoch, seed)
    raise TypeError("only orders with max_tokens or packing are prepared")


def check_lengths(spec: LoaderSpec, length: int, lengths: Lengths | None) -> None:
    """Check that lengths are those for which a loader was created, and allow its `max_tokens` or `packing`.

    Args:
        spec: Parameters of the loader; without `balance` and `packing`, nothing is checked.
        length: Number of samples in the dataset.
        lengths: The lengths; None if they are not used.

    Raises:
        DatasetChanged: If the lengths differ from those of the spec.
        InvalidSpec: If a sample is longer than `max_tokens`, or the window is too small.
    """
    required = spec.required_lengths
    if required is None or lengths is None:
        return
    if lengths.digest != required or len(lengths) != length:
        raise DatasetChanged(other_lengths(spec.dataset, lengths.digest, required))
    if spec.balance is not None:
        check_limit(spec.balance, length, lengths.longest, lengths.longest_sample)
    if spec.packing is not None:
        check_windows(spec.packing.window, length)


def other_lengths(dataset: str, found: str | None, required: str) -> str:
    """Return the message for lengths with another digest than that of the loader."""
    return (
        f"dataset {dataset!r} has lengths with digest {found}, but the loader requires {required}: all servers must "
        "have the same sample_lengths. Host the same data, or create the loader again"
    )


def check_limit(balance: BalanceSpec, length: int, longest: int, sample: int) -> None:
    """Check that each sample fits into a batch with `max_tokens`, and that the preparation is small.

    Args:
        balance: Parameters; without `max_tokens`, nothing is checked.
        length: Number of samples in the dataset.
        longest: Length of the longest sample.
        sample: Index of the longest sample.

    Raises:
        InvalidSpec: If a sample is longer than `max_tokens`, or the window is too small.
    """
    if balance.max_tokens is None:
        return
    if longest > balance.max_tokens:
        raise InvalidSpec(
            f"sample {sample} has length {longest}, more than max_tokens={balance.max_tokens}: increase max_tokens, or "
            "truncate or remove long samples in the dataset, and in its sample_lengths"
        )
    check_windows(balance.window, length)


def check_windows(window: int, length: int) -> None:
    """Check that the preparation of an order is small.

    Args:
        window: Samples in a window.
        length: Number of samples in the dataset.

    Raises:
        InvalidSpec: If the window is too small.
    """
    if length > window * MAX_WINDOWS:
        raise InvalidSpec(
            f"window={window} divides {length} samples into more than {MAX_WINDOWS} windows: increase window"
        )


def _order(spec: LoaderSpec, length: int, epoch: int) -> Permutation | MixtureOrder | None:
    """Return the order of the epoch's positions; None for the order of the indices."""
    if spec.mixture is not None:
        return MixtureOrder(spec.mixture, epoch, spec.seed if spec.shuffle else None)
    return Permutation(length, derive("order", spec.seed, epoch)) if spec.shuffle else None


def _total(spec: LoaderSpec, length: int) -> int:
    """Return the number of samples of all ranks in an epoch."""
    match spec.tail:
        case "drop":
            return length // spec.world_size * spec.world_size
        case "pad":
            return -(-length // spec.world_size) * spec.world_size
        case "uneven":
            return length


@dataclass(frozen=True, slots=True)
class Coverage:
    """Result of an epoch audit: number of visits, and the samples that were missing or repeated."""

    length: int
    """Samples in the dataset."""
    visits: int
    """Samples in all audited batches."""
    missing: NDArray[np.int64]
    """Dataset indices in no batch, ascending."""
    repeated: NDArray[np.int64]
    """Dataset indices that occurred more than once, ascending."""
    exact: bool
    """True if each sample was visited exactly once."""

    @classmethod
    def of(cls, visits: NDArray[np.int64]) -> Coverage:
        """Create the result from the number of visits to each sample."""
        missing, repeated = np.flatnonzero(visits == 0), np.flatnonzero(visits > 1)
        return cls(visits.size, int(visits.sum()), missing, repeated, bool(np.all(visits == 1)))


def count_visits(batches: Iterable[NDArray[np.int64]], length: int) -> NDArray[np.int64]:
    """Return how often each sample occurs in the index arrays of `batches`: int64 of shape (length,).

    Raises:
        IndexError: If a batch holds an index outside [0, length).
    """
    visits = np.zeros(length, dtype=np.int64)
    for indices in batches:
        if indices.size and not 0 <= indices.min() <= indices.max() < length:
            raise IndexError(f"indices must be in [0, {length}), got minimum {indices.min()}, maximum {indices.max()}")
        np.add.at(visits, indices, 1)
    return visits


def audit(batches: Iterable[NDArray[np.int64]], length: int) -> Coverage:
    """Count the visits to each sample in the index arrays of `batches`, to find missing and repeated samples.

    Takes 8 bytes of memory per sample of the dataset.

    Raises:
        IndexError: If a batch holds an index outside [0, length).
    """
    return Coverage.of(count_visits(batches, length))
