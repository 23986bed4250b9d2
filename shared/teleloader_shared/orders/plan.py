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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from teleloader_shared.errors import BatchOutOfRange, InvalidSpec
from teleloader_shared.orders.mixture import MixtureOrder
from teleloader_shared.orders.permutation import Permutation
from teleloader_shared.orders.seeding import derive
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

    Raises:
        InvalidSpec: If the epoch or the length is out of range.
    """

    def __init__(self, spec: LoaderSpec, length: int, epoch: int) -> None:
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
        self._epoch_samples = length if mixture is None else mixture.samples
        self._total = _total(spec, self._epoch_samples)
        self.samples = max(0, -(-(self._total - spec.rank) // spec.world_size))
        self._batch_size = spec.batch_size or 1
        self._batches = self.samples // self._batch_size if spec.drop_last else -(-self.samples // self._batch_size)
        self._order = _order(spec, length, epoch)
        self._rotation_key = derive("ranks", spec.seed, epoch)
        self._batches_per_block = max(1, _BLOCK_SAMPLES // self._batch_size)
        self._block: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return self._batches

    def __getitem__(self, k: int) -> NDArray[np.int64]:
        """Return the dataset indices of batch k, int64 of shape (samples in the batch,).

        Raises:
            BatchOutOfRange: If k is not in [0, len(plan)).
        """
        self.check(k)
        number, within = divmod(k, self._batches_per_block)
        if self._block[0] != number:
            self._block = (number, self._indices_of_block(number))
        start = within * self._batch_size
        return self._block[1][start : start + self._batch_size]

    def first(self, k: int, count: int) -> NDArray[np.int64]:
        """Return the first `count` indices of batch k, in time that does not depend on the batch size.

        Raises:
            BatchOutOfRange: If k is not in [0, len(plan)).
        """
        self.check(k)
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
        return int((self._unwrapped(start, stop) >= self._epoch_samples).sum())

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
        if self.spec.mixture is None:
            return rank + ranks * places
        blocks, within = np.divmod(places, self._batch_size)
        positions = (blocks * ranks + (rank + self._rotations(blocks)) % ranks) * self._batch_size + within
        # the incomplete last block is divided into parts whose sizes differ by at most one sample
        full, rest = divmod(self._total, ranks * self._batch_size)
        first = full * ranks * self._batch_size + rank * (rest // ranks) + min(rank, rest % ranks)
        return np.where(blocks < full, positions, first + within)

    def _rotations(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return pseudo-random numbers in [0, world_size) for the numbers of blocks."""
        mixed = (blocks.view(np.uint64) + np.uint64(self._rotation_key)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
        return ((mixed >> np.uint64(32)) * np.uint64(self.spec.world_size) >> np.uint64(32)).astype(np.int64)


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
