"""Rolling digests of delivered batches, to verify that an iterable-style dataset repeats the same samples.

A worker that replaces another one, or that must go back, iterates the dataset again up to the position that was
reached. If the dataset's order is not reproducible (an unseeded generator, a queue, a growing file), continuing there
would lose some samples and repeat others. Therefore each pass keeps a rolling digest of its delivered frames, and a
replay must have the same digest at the same position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from teleloader_shared import delivered
from teleloader_shared.delivered import Delivered


class Reached(NamedTuple):
    """Progress of a worker in a pass over a dataset; sent to the worker's replacement."""

    loader: str
    epoch: int
    shard: Delivered
    """Delivered batches of the shard, with the result of `Shard.state`."""
    end: str | None = None
    """Result of `Shard.state` at the end of the shard; None before the end."""

    @classmethod
    def from_message(cls, loader: str, epoch: int, shard: Sequence[Any], end: str | None) -> Reached:
        """Decode the record from a worker message, where `shard` is a list."""
        return cls(loader, epoch, Delivered(*shard), end)


class Replayed(NamedTuple):
    """Progress of a worker that iterates a shard again."""

    loader: str
    batches: int
    """Number of batches that were iterated again."""
    total: int
    """Number of batches to iterate again."""


class Replay:
    """Rolling digest of one pass over a dataset, for the verification of replays.

    Args:
        earlier: Delivery of earlier workers, if any.
    """

    def __init__(self, earlier: Delivered | None = None) -> None:
        self.first = None if earlier is None else earlier.first
        """Position of the first delivered batch in the shard; None before the first delivery."""
        self.next = 0 if earlier is None else earlier.next
        """Position after the last delivered batch."""
        self.digest = 0 if earlier is None else earlier.digest
        """Digest of the batches [first, next)."""
        self._saved = {self.next: self.digest}
        """Digest by position in the shard, for resuming from an earlier worker's state."""
        self._current = 0
        self._position = self.next
        """Position after the last batch of the current iteration."""

    def restart(self, number: int) -> None:
        """Restart the digest at position `number`, because the dataset is iterated again from there."""
        self._current = self._saved.get(number, 0)
        self._position = number

    def covers(self, number: int) -> bool:
        """Return True if a skipped batch is part of the digest, so that its frame must be computed."""
        return self.first is not None and number >= self.first

    def matches(self, number: int, frame: NDArray[np.uint8], *, checksum: bool) -> bool:
        """Add a batch to the digest; return False if the replayed batches differ from the earlier delivery.

        The digests are compared at the last batch of the earlier delivery.

        Args:
            number: Position of the batch within the shard.
            frame: Frame of the batch.
            checksum: Whether the frame's prologue contains a checksum of the rest of the frame.
        """
        if self.first is None:
            self.first = number
        if number < self.first:  # before the first delivered batch: nothing to compare
            return True
        self._current = delivered.extended(self._current, frame, checksum=checksum)
        self._position = number + 1
        if number + 1 > self.next:
            self.next, self.digest = number + 1, self._current
        return number + 1 < self.next or self._current == self.digest

    def falls_short(self) -> bool:
        """Return True if the dataset ended before the position that the previous worker reached.

        Call this at the end of the dataset. Only the first call can return True, because the shard then ends there.
        """
        is_short = self._position < self.next
        self._position = self.next
        return is_short
