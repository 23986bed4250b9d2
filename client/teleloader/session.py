"""What to ask for next, and how far ahead: the client's side of one epoch, without I/O, threads or a clock of its own.

Batches are asked for in ranges. Large batches are asked for one by one; many small ones travel in one answer, or the
cost of each answer would be most of the time.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from teleloader_shared.messages import READY_BYTES

COVERED_SECONDS: Final = 0.25
"""How long the loop can go on at its pace with what is fetched ahead: hides the network's delay."""
COVERED_BYTES: Final = 128 * 2**20
"""Fetching ahead for `COVERED_SECONDS` does not go beyond so many bytes."""
MAX_WINDOW: Final = 2048


class Range(NamedTuple):
    """Batches [start, stop) to ask for, and how many will be wanted after them."""

    start: int
    stop: int
    ahead: int


class Session:
    """The state of one pass through [start, stop) of an epoch.

    Args:
        start: The first batch that is wanted.
        stop: The end of the epoch, or as far as it is known: `extend` and `shard_ended` move it.
        prefetch_factor: Batches to hold ready for each of the server's workers.
        num_workers: The server's workers; each is given one batch more to make ahead.
        adaptive: Whether to fetch further ahead for a fast loop, and have the server work ahead of that.
        shards: From how many shards of an iterable-style dataset the batches come in turn; 0 for a map-style one.
        on_demand: Whether to ask for a batch only while the loop waits for it: loading is then never at the same time
            as training, as with torch's ``num_workers=0``.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        prefetch_factor: int,
        num_workers: int = 0,
        *,
        adaptive: bool = True,
        shards: int = 0,
        on_demand: bool = False,
    ) -> None:
        self.taken = start
        """The next batch that the loop will take."""
        self.received = start
        """The next batch that has not arrived."""
        self.stop = stop
        self.waiting = False
        """Whether the loop waits for a batch."""
        self.on_demand = on_demand
        self._asked = start
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self.adaptive = adaptive
        self._shards_left = set(range(shards))
        self._shards = shards
        self._frame_bytes = 0.0
        self._pace = 0.0
        self._pace_mark: tuple[float, int] | None = None

    @property
    def connections(self) -> int:
        """On how many connections to ask at once.

        While one answer is being received, the next one is already asked for on another connection. But two requests
        may overtake each other, and a shard that has given a batch cannot give one that comes before it.
        """
        return 1 if self._shards else 2

    @property
    def finished(self) -> bool:
        """Whether every batch has arrived."""
        return self.received >= self.stop

    @property
    def window(self) -> int:
        """How many batches may be asked for beyond those that the loop took."""
        if self.on_demand:
            return 1
        least = self._prefetch_factor * max(1, self._num_workers)
        if not self.adaptive:
            return least
        covered = self._pace * COVERED_SECONDS
        if self._frame_bytes:
            covered = min(covered, COVERED_BYTES / self._frame_bytes)
        return max(least, min(MAX_WINDOW, math.ceil(covered)))

    @property
    def has_room(self) -> bool:
        """Whether to ask for more now: not for each batch that the loop takes, but for some of them at once."""
        if self.on_demand and not self.waiting:
            return False
        room = self.taken + self.window - self._asked
        return self._asked < self.stop and room > 0 and (room >= self.window // 4 or self.stop - self._asked <= room)

    def next_range(self) -> Range | None:
        """What to ask for now; None when enough is on its way."""
        if not self.has_room:
            return None
        start = self._asked
        together = max(1, int(READY_BYTES / self._frame_bytes)) if self._frame_bytes else 1
        self._asked = min(self.stop, self.taken + self.window, start + together)
        return Range(start, self._asked, min(self._ahead, self.stop - self._asked))

    @property
    def _ahead(self) -> int:
        """How many batches the server shall make beyond those that are asked for."""
        if self.on_demand:
            return 0
        if self._shards:  # shards make them in turn, so they are asked for one range after another
            return max(0, self.taken + self.window - self._asked)
        return max(1, self._num_workers) if self.adaptive else 0

    def extend(self, stop: int) -> None:
        """More batches are known to be wanted."""
        self.stop = stop

    def shard_ended(self, k: int) -> None:
        """The shard of batch k has no more; when none has, the epoch ends there."""
        if self._shards_left:
            self._shards_left.discard(k % self._shards)
            if not self._shards_left:
                self.stop = k + 1

    def arrived(self, count: int, nbytes: int) -> None:
        """The next `count` batches arrived, `nbytes` together."""
        self.received += count
        mean = nbytes / count
        self._frame_bytes = mean if not self._frame_bytes else 0.8 * self._frame_bytes + 0.2 * mean

    def paced(self, now: float) -> None:
        """Measure the loop's pace; to be called whenever batches arrive."""
        if self._pace_mark is None:
            self._pace_mark = (now, self.taken)
            return
        then, taken = self._pace_mark
        if now - then >= 0.02:
            self._pace = max((self.taken - taken) / (now - then), 0.7 * self._pace)
            self._pace_mark = (now, self.taken)

    def rewind(self) -> None:
        """The connection broke: what has not arrived must be asked for again."""
        self._asked = self.received
