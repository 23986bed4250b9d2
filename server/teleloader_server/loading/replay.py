"""Digests of delivered batches: proof that an iterable-style dataset gave the same samples when it was iterated again.

A worker that replaces another one, or that must go back, iterates the dataset up to the place that was reached. Where
the dataset's order is its own (an unseeded generator, a queue, a growing file), that gives other samples, and going on
would lose some and repeat others. So each pass keeps one rolling digest of the frames that it delivered, and a replay
must come to the same digest at the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from teleloader_shared import delivered
from teleloader_shared.delivered import Delivered


class Reached(NamedTuple):
    """Progress of a worker in a pass; sent to the worker that replaces it."""

    loader: str
    epoch: int
    shard: Delivered
    """What it delivered of its shard; the state is `Shard.state`."""

    @classmethod
    def from_message(cls, loader: str, epoch: int, shard: Sequence[Any]) -> Reached:
        """Return the record that travelled as a list."""
        return cls(loader, epoch, Delivered(*shard))


class Replay:
    """The rolling digest of one pass.

    Args:
        earlier: What earlier workers delivered.
    """

    def __init__(self, earlier: Delivered | None = None) -> None:
        self.first = None if earlier is None else earlier.first
        """The first batch that was delivered."""
        self.next = 0 if earlier is None else earlier.next
        """The batch after the last that was delivered."""
        self.digest = 0 if earlier is None else earlier.digest
        """Digest before batch `next`."""
        self._saved = {self.next: self.digest}
        """Digest before the batch where an earlier worker's state begins."""
        self._current = 0
        self._position = self.next
        """The batch after the last one of this iteration."""

    def restart(self, number: int) -> None:
        """Begin again before batch `number`."""
        self._current = self._saved.get(number, 0)
        self._position = number

    def covers(self, number: int) -> bool:
        """Return True if the frame of batch `number` must be computed, although no client waits for it."""
        return self.first is not None and number >= self.first

    def matches(self, number: int, frame: NDArray[np.uint8], *, checksum: bool) -> bool:
        """Add the frame of a batch; False when the place that was reached before has another digest.

        Args:
            number: The batch of the shard.
            frame: Its frame.
            checksum: Whether the frame's prologue holds a checksum of all the rest.
        """
        if self.first is None:
            self.first = number
        if number < self.first:  # a client that goes back before the place where it began: nothing to compare
            return True
        self._current = delivered.extended(self._current, frame, checksum=checksum)
        self._position = number + 1
        if number + 1 > self.next:
            self.next, self.digest = number + 1, self._current
        return number + 1 < self.next or self._current == self.digest

    def falls_short(self) -> bool:
        """Return True if the dataset, which has no more batches, ended before the place that was reached before.

        Only once: the shard ends there.
        """
        is_short = self._position < self.next
        self._position = self.next
        return is_short
