"""Sample count check of an iterable-style dataset, to detect shards that overlap or omit samples."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from teleloader_shared.codec import End
from teleloader_shared.errors import EncodeError
from teleloader_shared.tree import ArrayLeaf, flatten
from teleloader_shared.units import counted

_IN_NEXT, _IN_FINISH = 4, 5
"""Stack levels of the training loop in `LengthCheck.yielded` and `LengthCheck.finished`."""


class LengthCheck:
    """Sample count check for one epoch of an iterable-style dataset; warns about missing, excess or repeated samples.

    Args:
        dataset: Iterable-style dataset, named in the warnings.
        num_workers: Number of shards (`num_workers` of the loader); 0 for one shard without worker information.
        reported: ``len(dataset)`` when ``len(loader)`` was last called; None if it was never called.
        samples: ``len(dataset)``; None if unknown, or if it includes samples of other ranks.
        may_repeat: Whether to warn if each shard yields the whole dataset; False after the first warning of a loader,
            and if a ``worker_init_fn`` may divide the dataset.
    """

    def __init__(
        self, dataset: Any, num_workers: int, reported: int | None, samples: int | None, *, may_repeat: bool
    ) -> None:
        self._dataset = dataset
        self._num_workers = num_workers
        self._reported = reported
        self._samples = samples
        self._may_repeat = may_repeat
        self._yielded = 0
        self._number: int | None = None
        """Number of the last counted batch."""
        self._ends: dict[int, End] = {}
        self._first: Any = None
        self._batches_equal = False
        self.repeated = False
        """True if every shard yielded the whole dataset."""

    def yielded(self, number: int, batch: Any) -> None:
        """Count a batch that the training loop received; repeated calls for a batch have no effect.

        As in torch, the warning compares the number of batches, not of samples, with the reported length.
        """
        if number == self._number:
            return
        self._number = number
        self._yielded += 1
        if number == 0 and self._num_workers > 1 and self._may_repeat:
            self._first = batch
        elif number == 1 and self._first is not None:
            self._batches_equal, self._first = _equal(self._first, batch), None
        if self._reported is not None and self._yielded > self._reported:
            text = (
                f"Length of IterableDataset {self._dataset} was reported to be {self._reported}"
                f"(when accessing len(dataloader)), but {self._yielded} samples have been fetched. "
            )
            if self._num_workers > 0:
                text += (
                    "For multiprocessing data-loading, this could be caused by not properly configuring the "
                    "IterableDataset replica at each worker. Please see "
                    "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
                )
            warnings.warn(text, stacklevel=_IN_NEXT)

    def ended(self, number: int, end: End) -> None:
        """Record the end of a shard, received in place of batch `number`; repeated calls have no effect."""
        self._ends[number % max(1, self._num_workers)] = end

    def finished(self) -> None:
        """Warn of missing or repeated samples at the end of the epoch."""
        ends = self._ends.values()
        total = sum(end.samples for end in ends)
        if self._samples is not None and total < self._samples:
            warnings.warn(
                f"Length of IterableDataset {self._dataset} was reported to be {self._samples}, but only {total} "
                f"samples have been fetched from its {counted(len(ends), 'shard')}. If this is not intended, check how "
                "the shards divide the dataset: samples that belong to no shard are not loaded.",
                stacklevel=_IN_FINISH,
            )
        if self._may_repeat and self._batches_equal and len(ends) > 1 and all(end.replica for end in ends):
            self.repeated = True
            warnings.warn(
                f"Each of the {len(ends)} workers of {self._dataset} yielded the whole dataset, so every sample was "
                f"loaded {len(ends)} times. To divide the data, use get_worker_info().id and .num_workers "
                "in __iter__, or change get_worker_info().dataset in worker_init_fn.",
                stacklevel=_IN_FINISH,
            )


def _equal(one: Any, other: Any) -> bool:
    """Return True if two batches are equal, False also if a batch cannot be encoded."""
    try:
        (tree, leaves), (other_tree, other_leaves) = flatten(one), flatten(other)
    except EncodeError:  # arrays that cannot be encoded, such as JAX's
        return False
    return bool(tree == other_tree) and all(
        isinstance(a, ArrayLeaf) and isinstance(b, ArrayLeaf) and np.array_equal(a.array, b.array)
        for a, b in zip(leaves, other_leaves, strict=True)
    )
