"""Whether an iterable-style dataset gave as many samples as it said: nothing else tells when its shards are wrong."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from teleloader_shared.codec import End
from teleloader_shared.errors import EncodeError
from teleloader_shared.tree import ArrayLeaf, flatten
from teleloader_shared.units import counted

_IN_NEXT, _IN_FINISH = 4, 5
"""The line of the training loop, seen from here through `LoaderIterator`."""


class LengthCheck:
    """Counts what one pass gives, and warns.

    Args:
        dataset: The dataset.
        num_workers: Shards, as the loader was told; 0 for one pass without workers.
        asked: What ``len(dataset)`` was when ``len(loader)`` asked for it, None when it never did.
        samples: What ``len(dataset)`` is, None when it has none or other ranks have a part of it.
        may_repeat: Whether shards that each give the whole dataset are worth a warning: once for each loader, and not
            where a ``worker_init_fn`` may have told them apart.
    """

    def __init__(
        self, dataset: Any, num_workers: int, asked: int | None, samples: int | None, *, may_repeat: bool
    ) -> None:
        self._dataset = dataset
        self._num_workers = num_workers
        self._asked = asked
        self._samples = samples
        self._may_repeat = may_repeat
        self._yielded = 0
        self._number: int | None = None
        """The last batch."""
        self._ends: dict[int, End] = {}
        self._first: Any = None
        self._alike = False
        self.repeated = False
        """Whether it was found that every shard gave the whole dataset."""

    def yielded(self, number: int, batch: Any) -> None:
        """Note that the loop is given batch `number`; a second call for it changes nothing.

        torch compares batches with samples here; so do we.
        """
        if number == self._number:
            return
        self._number = number
        self._yielded += 1
        if number == 0 and self._num_workers > 1 and self._may_repeat:
            self._first = batch
        elif number == 1 and self._first is not None:
            self._alike, self._first = _equal(self._first, batch), None
        if self._asked is not None and self._yielded > self._asked:
            text = (
                f"Length of IterableDataset {self._dataset} was reported to be {self._asked}"
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
        """The shard of batch `number` has no more; it says so in the place of each further batch."""
        self._ends[number % max(1, self._num_workers)] = end

    def finished(self) -> None:
        """The epoch is over."""
        ends = self._ends.values()
        total = sum(end.samples for end in ends)
        if self._samples is not None and total < self._samples:
            warnings.warn(
                f"Length of IterableDataset {self._dataset} was reported to be {self._samples}, but only {total} "
                f"samples have been fetched from its {counted(len(ends), 'shard')}. If that is not "
                "meant, look at how the shards divide the dataset: samples are lost where they do not meet.",
                stacklevel=_IN_FINISH,
            )
        if self._may_repeat and self._alike and len(ends) > 1 and all(end.replica for end in ends):
            self.repeated = True
            warnings.warn(
                f"Each of the {len(ends)} workers of {self._dataset} gave the whole dataset, so every sample came "
                f"{len(ends)} times. Either have its __iter__ take a part of the data, by get_worker_info().id and "
                ".num_workers; or have a worker_init_fn change get_worker_info().dataset so that each has a part.",
                stacklevel=_IN_FINISH,
            )


def _equal(one: Any, other: Any) -> bool:
    """Whether two batches hold the same."""
    try:
        (tree, leaves), (other_tree, other_leaves) = flatten(one), flatten(other)
    except EncodeError:  # arrays of a kind that does not travel, such as JAX's
        return False
    return bool(tree == other_tree) and all(
        isinstance(a, ArrayLeaf) and isinstance(b, ArrayLeaf) and np.array_equal(a.array, b.array)
        for a, b in zip(leaves, other_leaves, strict=True)
    )
