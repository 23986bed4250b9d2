"""Assignment of the batches that were never requested to the servers of an iteration. No I/O, no clock.

All clients of an epoch assign its blocks in the same way (`teleloader_shared.rendezvous`), so that each batch is
computed once. A block whose server is unusable goes to the next server of the block's ranking: other clients that find
the server unusable choose the same one, and blocks of other servers do not move.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import Final, NamedTuple

from teleloader_shared.ranges import MAX_RANGES, BatchRanges
from teleloader_shared.rendezvous import Assignment, Capacity, weights_of

BLOCK: Final = 2
"""Batches in a block. A constant, because all clients must agree; small, so that the servers of a window have
equal loads, but greater than 1, because a request lists its ranges."""


class Member(NamedTuple):
    """A server that has registered the loader."""

    name: str
    """Name of the server that is the same for all clients."""
    capacity: Capacity


class BlockAssignment:
    """Queues of the batches that each server is to compute.

    Args:
        loader: Key of the loader.
        epoch: Number of the epoch.
    """

    def __init__(self, loader: str, epoch: int) -> None:
        self._loader = loader
        self._epoch = epoch
        self._numbers: dict[str, int] = {}
        """Numbers of the servers, by name."""
        self._weights: dict[str, float] = {}
        self._assignment: Assignment | None = None
        """Created when it is needed, because many servers may join one after another; None before."""
        self._queues: dict[int, list[range]] = {}
        """Ranges within a block that were assigned and are not requested, by server, in order."""

    def set_members(self, members: Mapping[int, Member], usable: Collection[int]) -> list[range]:
        """Replace the servers, and assign all queued ranges again.

        Args:
            members: The servers, by number.
            usable: Servers that can be sent requests now.

        Returns:
            Ranges that have no server, because there are none.
        """
        numbers: dict[str, int] = {}
        for number, member in members.items():
            name = member.name if member.name not in numbers else f"{member.name}#{number}"  # listed by two URLs
            numbers[name] = number
        weights = weights_of({name: members[number].capacity for name, number in numbers.items()})
        if numbers == self._numbers and weights == self._weights:
            return []
        self._numbers, self._weights = numbers, weights
        self._assignment = None
        ranges = list(chain.from_iterable(self._queues.values()))
        self._queues = {number: [] for number in members}
        if not weights:
            return ranges
        for each in ranges:
            self._enqueue(each, usable)
        return []

    def assign(self, start: int, stop: int, usable: Collection[int]) -> None:
        """Assign the batches [start, stop); there must be a server."""
        while start < stop:
            end = min(stop, (start // BLOCK + 1) * BLOCK)
            self._enqueue(range(start, end), usable)
            start = end

    def reassign(self, server: int, usable: Collection[int]) -> None:
        """Assign the queued ranges of a server again, because it became unusable."""
        ranges, self._queues[server] = self._queues[server], []
        for each in ranges:
            self._enqueue(each, usable)

    def ranking(self, k: int) -> list[int]:
        """Return the servers in the order in which the block of batch k prefers them."""
        return [self._numbers[name] for name in self._current().ranking(k // BLOCK)] if self._weights else []

    def queue(self, server: int) -> Sequence[range]:
        """Return the queued ranges of a server, in order."""
        return self._queues.get(server, ())

    def take(self, server: int, limit: int) -> BatchRanges:
        """Remove the first queued ranges of a server, up to `limit` batches but at least one range; return these."""
        queue = self._queues[server]
        batches = accumulate(map(len, queue[:limit]))
        joined = accumulate((before.stop != each.start for before, each in pairwise(queue[:limit])), initial=1)
        number = max(
            1, sum(most <= limit and ranges <= MAX_RANGES for most, ranges in zip(batches, joined, strict=True))
        )
        self._queues[server] = queue[number:]
        return BatchRanges(*queue[:number])

    def holder(self, k: int) -> int | None:
        """Return the server whose first queued range has batch k."""
        return next((server for server, queue in self._queues.items() if queue and k in queue[0]), None)

    def _current(self) -> Assignment:
        """Return the assignment to the current servers; there must be one."""
        if self._assignment is None:
            self._assignment = Assignment(self._loader, self._epoch, self._weights)
        return self._assignment

    def _enqueue(self, batches: range, usable: Collection[int]) -> None:
        server = self._numbers[self._current().owner(batches.start // BLOCK)]
        if server not in usable:
            server = next((other for other in self.ranking(batches.start) if other in usable), server)
        insort(self._queues[server], batches, key=attrgetter("start"))
