"""One worker's share of an iterable-style dataset: samples come one after another, and a place is found by counting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Shard:
    """A pass through the worker's replica of the dataset, which can be brought to any of its batches.

    The batches are those of torch's iterable-style fetcher: each worker batches by itself, an incomplete batch at the
    end is given unless `drop_last`, and an exception takes the place of the batch in which it was raised.

    Args:
        dataset: The replica.
        batch_size: Samples in a batch; None for single ones.
        drop_last: Whether an incomplete last batch is left out.
        restart: Called before the dataset is iterated once more from its beginning; not before the first time.
    """

    def __init__(self, dataset: Any, batch_size: int | None, drop_last: bool, restart: Callable[[], object]) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._restart = restart
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._ended = False
        self.samples = 0
        """Samples that were taken since the beginning."""

    def fetch(self, number: int) -> list[Any] | None:
        """The samples of the shard's batch `number`; None when it has fewer batches.

        A number that is not the next one is found by iterating, from the beginning if it lies behind.

        Raises:
            Exception: What the dataset raises; the next batch is another try.
        """
        if number < self._next:
            self._iterator, self._next, self._ended, self.samples = None, 0, False, 0
            self._restart()
        while self._next < number and not self._ended:
            try:
                self._take()
            except Exception:  # noqa: BLE001, S112 - it was told at its own place
                continue
        return self._take()

    def _take(self) -> list[Any] | None:
        if self._ended:
            return None
        self._next += 1
        if self._iterator is None:
            self._ended = True  # where it cannot even begin, there is nothing to try again
            self._iterator = iter(self._dataset)
            self._ended = False
        wanted = self._batch_size or 1
        taken: list[Any] = []
        while len(taken) < wanted:
            try:
                taken.append(next(self._iterator))
            except StopIteration:
                self._ended = True
                return None if not taken or self._drop_last else taken
            self.samples += 1
        return taken
