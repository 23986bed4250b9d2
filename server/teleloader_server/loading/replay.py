"""Digests of delivered batches: proof that an iterable-style dataset gave the same samples when it was iterated again.

A worker that replaces another one, or that must go back, iterates the dataset up to the place that was reached. Where
the dataset's order is its own (an unseeded generator, a queue, a growing file), that gives other samples, and going on
would lose some and repeat others. So each pass keeps one rolling digest of the frames that it delivered, and a replay
must come to the same digest at the same place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from teleloader_shared.codec import PROLOGUE_SIZE


class Reached(NamedTuple):
    """How far a worker came in a pass; travels to the worker that replaces it."""

    loader: str
    epoch: int
    first: int
    """The first batch of the shard that was delivered: a resumed pass begins there."""
    next: int
    """The batch of the shard after the last that was delivered."""
    digest: int
    """Rolling digest of the frames of [first, next)."""
    state: str | None
    """`Shard.state` after the last."""


class Replay:
    """The rolling digest of one pass.

    Args:
        reached: How far an earlier worker came.
    """

    def __init__(self, reached: Reached | None = None) -> None:
        self.first = None if reached is None else reached.first
        """The first batch that was delivered."""
        self.next = 0 if reached is None else reached.next
        """The batch after the last that was delivered."""
        self.digest = 0 if reached is None else reached.digest
        """Digest before batch `next`."""
        self._saved = {self.next: self.digest}
        """Digest before the batch where an earlier worker's state begins."""
        self._current = 0

    def restart(self, number: int) -> None:
        """Begin again before batch `number`."""
        self._current = self._saved.get(number, 0)

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
        content = frame[:PROLOGUE_SIZE] if checksum else frame
        self._current = xxhash.xxh3_64_intdigest(content.data, seed=self._current)
        if number + 1 > self.next:
            self.next, self.digest = number + 1, self._current
        return number + 1 < self.next or self._current == self.digest
