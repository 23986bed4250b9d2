"""Batch store of an engine, with eviction.

When memory or a principal's share of it is full, the store evicts unwanted batches in least-recently-used order, then
batches that are needed later than the batch to be started. If that does not suffice, the start of the batch is
postponed, unless a client waits for it: the store then also evicts batches without an open request, and the batch is
started in any case. Full memory slows clients but never blocks them, except clients that do not read their responses.

Synchronous functions over plain state, as in `dispatcher`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from teleloader_server.dispatch.quotas import Memory, Quota
from teleloader_server.dispatch.records import Batch, Consumer, Epoch, EpochState, PrincipalShare, ReadyFrame
from teleloader_shared.codec import BatchId

CACHE_SHARE: Final = 1 / 8
"""Fraction of the memory budget above which unwanted batches are evicted.

Below it, they serve consumers that start later, and requests that are repeated after a connection broke. A larger
fraction would slow all other consumers: memory that is reused immediately is in the CPU cache, and writing a large
batch to fresh memory takes four times as long.
"""
CACHE_BYTES: Final = 32 * 2**20
"""Size in bytes above which unwanted batches that any worker can recompute are evicted, so that a server whose memory
budget is large takes little memory."""
MAX_BATCHES: Final = 16384
"""Maximum number of kept batches: each may be a memory mapping, and Linux allows 65,530 per process."""


class Store:
    """Store of one engine's batches; evicts batches when memory is full.

    Args:
        memory: Memory budget, shared with other stores.
        keeps_wanted: Whether wanted batches are never evicted, even if memory is full.
    """

    def __init__(self, memory: Memory, *, keeps_wanted: bool) -> None:
        self._memory = memory
        self._keeps_wanted = keeps_wanted
        self._count = 0
        self._unwanted: OrderedDict[Batch, None] = OrderedDict()
        """Ready batches that no consumer wants, least recently used first.

        Not a dict, which takes linear time to find its first item after items were removed from its start.
        """
        self._sent_failures: dict[Batch, None] = {}
        """Batches whose failure was sent; the next decision evicts them, so that a new request recomputes the batch."""
        self._epochs: dict[Epoch, EpochState] = {}
        """State of each epoch that has a batch or a consumer."""
        self.used = 0
        """Memory of kept frames, and estimates for batches in progress, in bytes."""
        self.active: dict[Consumer, None] = {}
        """Consumers that may need a batch, so that decisions need not examine many idle consumers."""
        self.reopened: dict[Consumer, None] = {}
        """Consumers that want a batch again which was removed since the last decision."""
        self.deaths: dict[BatchId, int] = {}
        """Number of worker exits that each suspect batch caused with certainty; 0 if it only may have caused one."""

    # -- batches

    @property
    def num_wanted(self) -> int:
        """Number of batches, computed or in progress, that a consumer wants."""
        return self._count - len(self._unwanted)

    def batch(self, batch_id: BatchId) -> Batch:
        """Return a batch, which must be stored or in progress."""
        return self._epochs[batch_id.loader, batch_id.epoch].batches[batch_id.batch]

    def add(self, batch_id: BatchId, consumer: Consumer, estimate: int) -> Batch:
        """Add a batch at the start of its computation; `estimate` is the expected size in bytes."""
        state, is_next = consumer.state, batch_id.epoch != consumer.epoch[1]
        if is_next:  # the batch must not be evicted before the epoch starts
            state = self.state((batch_id.loader, batch_id.epoch))
            state.kept[batch_id.batch] = consumer
        batch = Batch(batch_id, 0, consumer, 0.0, state)
        state.batches[batch_id.batch] = batch
        self._count += 1
        self._resize(batch, estimate)
        return batch

    def finished(self, batch_id: BatchId, frame: ReadyFrame) -> Batch:
        """Set the frame of a computed batch, and wake the requests waiting for the batch."""
        batch = self.batch(batch_id)
        state = batch.state
        self._resize(batch, len(frame.raw))
        batch.frame = frame
        for wake in state.waiters.pop(batch_id.batch, ()):
            wake()
        self.mark_unwanted(state, (batch_id.batch,))
        return batch

    def sent(self, consumer: Consumer, numbers: Sequence[int]) -> None:
        """Record that batches were sent to a consumer."""
        batches = consumer.state.batches
        self.mark_unwanted(consumer.state, numbers)
        for k in numbers:
            batch = batches.get(k)
            if batch is not None and batch.frame is not None and batch.frame.failed:
                self._sent_failures[batch] = None

    def remove(self, batch: Batch) -> None:
        """Remove a batch; it will be recomputed if a consumer wants it."""
        k, epoch, state = batch.batch_id.batch, batch.batch_id[:2], batch.state
        del state.batches[k]
        state.kept.pop(k, None)
        batch.frame = None  # releases the memory now, even if callers still refer to the batch
        self._resize(batch, 0)
        self._count -= 1
        for consumer in state.consumers:
            for pending in consumer.requests:
                if pending.next <= k and (distance := pending.distance(k)) is not None:
                    pending.started = min(pending.started, pending.sent + distance)
                    self.reopened[consumer] = None
            # A batch before `ahead_start` was requested. Once its request is closed, it is not recomputed until it is
            # requested again: with a client-side sampler, only an open request contains its indices.
            if consumer.ahead_start <= k < consumer.ahead_cursor and consumer.distance(k) is not None:
                furthest = max((pending.stop for pending in consumer.requests), default=consumer.position)
                if furthest <= k:
                    consumer.ahead_cursor = k
                    self.active[consumer] = self.reopened[consumer] = None
        if not state.batches:
            self._drop_empty(epoch)

    def release(self) -> None:
        """Remove all batches, and release their memory for other stores."""
        for state in self._epochs.values():
            for batch in state.batches.values():
                self._resize(batch, 0)
            state.batches.clear()
        self._unwanted.clear()
        self._sent_failures.clear()

    def _resize(self, batch: Batch, nbytes: int) -> None:
        """Set the size of a batch in bytes, and update all totals of used memory."""
        more = nbytes - batch.nbytes
        batch.nbytes = nbytes
        self.used += more
        self._memory.used += more
        batch.consumer.principal_share.quota.frames += more

    def _drop_empty(self, epoch: Epoch) -> None:
        state = self._epochs[epoch]
        if not state.batches and not state.consumers:
            del self._epochs[epoch]
            for batch_id in [a for a in self.deaths if (a.loader, a.epoch) == epoch]:
                del self.deaths[batch_id]

    # -- consumers

    def state(self, epoch: Epoch) -> EpochState:
        """Return the state of an epoch, creating it if necessary."""
        return self._epochs.setdefault(epoch, EpochState())

    def known_state(self, epoch: Epoch) -> EpochState | None:
        """Return the state of an epoch, or None if it has neither batches nor consumers."""
        return self._epochs.get(epoch)

    def join(self, consumer: Consumer) -> None:
        """Add a consumer, and unmark unwanted batches that the consumer wants."""
        state = consumer.state
        state.consumers.append(consumer)
        self.unmark_unwanted(state, state.batches)
        if state.kept:
            kept, state.kept = state.kept, {}
            self.mark_unwanted(state, kept)

    def leave(self, consumers: list[Consumer]) -> None:
        """Remove consumers, and mark batches that no other consumer wants as unwanted."""
        for consumer in consumers:
            self.active.pop(consumer, None)
            self.reopened.pop(consumer, None)
            consumer.state.consumers.remove(consumer)
        # once for all of them: hundreds may be removed together, and this examines every batch
        for loader, number in {consumer.epoch for consumer in consumers}:
            state, following = self._epochs[loader, number], self._epochs.get((loader, number + 1))
            self.mark_unwanted(state, state.batches)
            if following is not None and following.kept:
                unkept = [k for k, consumer in following.kept.items() if consumer in consumers]
                for k in unkept:
                    del following.kept[k]
                self.mark_unwanted(following, unkept)
            self._drop_empty((loader, number))

    def move(self, consumer: Consumer, position: int) -> None:
        """Set the position of a consumer, and update the unwanted marks of batches."""
        before, consumer.position = consumer.position, position
        state = consumer.state
        if position < before:
            self.unmark_unwanted(state, state.batches)
        elif position - before <= len(state.batches):
            self.mark_unwanted(state, range(before, position))
        else:
            self.mark_unwanted(state, state.batches)

    def unmark_unwanted(self, state: EpochState, numbers: Iterable[int]) -> None:
        """Unmark batches that a consumer wants again."""
        for k in numbers:
            batch = state.batches.get(k)
            if batch is not None and batch in self._unwanted and state.wants(k):
                del self._unwanted[batch]

    def mark_unwanted(self, state: EpochState, numbers: Iterable[int]) -> None:
        """Mark ready batches that no consumer wants as unwanted."""
        for k in numbers:
            batch = state.batches.get(k)
            if batch is None or batch.frame is None or batch in self._unwanted:
                continue
            if not state.wants(k):
                self._unwanted[batch] = None

    # -- eviction

    def evict_sent_failures(self) -> None:
        """Evict all failures that were already sent to a client."""
        for batch in list(self._sent_failures):
            self._evict(batch)

    def evict_cached(self) -> None:
        """Evict batches in the order in which they became unwanted, until the remaining ones fit into the cache share.

        The cache share is `CACHE_SHARE` of the memory budget and of `MAX_BATCHES`, and at most `CACHE_BYTES` if the
        batches can be recomputed by any worker.
        """
        most = self._memory.budget * CACHE_SHARE
        if not self._keeps_wanted:
            most = min(most, CACHE_BYTES)
        while self._unwanted and (self.used > most or self._count > MAX_BATCHES * CACHE_SHARE):
            self._evict(next(iter(self._unwanted)))

    def is_full(self, principal_share: PrincipalShare, nbytes: int) -> bool:
        """Return True if `nbytes` additional bytes would exceed the memory budget or the principal's share."""
        return self._lacks(nbytes, None) or self._lacks(nbytes, principal_share.quota)

    def _lacks(self, nbytes: int, quota: Quota | None) -> bool:
        """Return True if `nbytes` additional bytes would exceed a principal's share, or the whole budget for None."""
        if quota is not None:
            return quota.frames + nbytes > quota.memory
        return self._memory.used + nbytes > self._memory.budget or self._count >= MAX_BATCHES

    def make_room(self, nbytes: int, distance: int, principal_share: PrincipalShare, *, force: bool) -> None:
        """Evict unwanted batches, and batches that are needed later than a new batch, if that frees enough memory.

        Args:
            nbytes: Estimated size of the new batch, in bytes.
            distance: Number of batches that the consumer of the new batch needs before it.
            principal_share: Principal of this consumer.
            force: True to evict batches for which no client waits, even if that does not free enough memory.
        """
        for quota in (principal_share.quota, None):
            if self._lacks(nbytes, quota):
                self._make_room_of(quota, nbytes, distance, principal_share, force=force)
                if not force and self._lacks(nbytes, quota):
                    break

    def _make_room_of(
        self, quota: Quota | None, nbytes: int, distance: int, principal_share: PrincipalShare, *, force: bool
    ) -> None:
        """Do the work of `make_room` for one limit: a principal's memory share, or the whole budget for None."""
        if force or self._would_fit(quota, nbytes, []):
            self._evict_unwanted(quota, nbytes)
            if not self._lacks(nbytes, quota):
                return
        # the rest examines every batch: prefetching therefore skips it often, and eviction frees more than is needed
        if principal_share.scans_to_skip and not force:
            principal_share.scans_to_skip -= 1
            return
        candidates = self._evictable(quota, distance, force=force)
        later = [batch for _, batch in sorted(candidates, key=lambda pair: pair[0], reverse=True)]
        if not force and not self._would_fit(quota, nbytes, later):
            principal_share.scans_to_skip = self._count // 16
            return
        self._evict_unwanted(quota, nbytes)
        used, budget = self._room(quota)
        enough = min(0.9 * budget, budget - nbytes)
        for batch in later:
            if used <= enough and (quota is not None or self._count < 0.9 * MAX_BATCHES):
                break
            used -= batch.nbytes
            self._evict(batch)

    def _room(self, quota: Quota | None) -> tuple[int, int]:
        """Return used memory and its limit in bytes, of a principal or of all for None."""
        if quota is not None:
            return quota.frames, quota.memory
        return self._memory.used, self._memory.budget

    def _evict_unwanted(self, quota: Quota | None, nbytes: int) -> None:
        """Evict unwanted batches, least recently used first, until `nbytes` fit."""
        for batch in list(self._unwanted):
            if not self._lacks(nbytes, quota):
                break
            if _is_of(quota, batch):
                self._evict(batch)

    def _would_fit(self, quota: Quota | None, nbytes: int, later: list[Batch]) -> bool:
        """Return True if `nbytes` would fit after evicting the unwanted batches and `later`."""
        evicted = [*(batch for batch in self._unwanted if _is_of(quota, batch)), *later]
        used, budget = self._room(quota)
        fits = used - sum(batch.nbytes for batch in evicted) + nbytes <= budget
        return fits and (quota is not None or self._count - len(evicted) < MAX_BATCHES)

    def _evictable(self, quota: Quota | None, distance: int, *, force: bool) -> Iterator[tuple[int, Batch]]:
        """Yield the distance and record of each wanted, ready batch that is needed later than `distance`.

        With `force`, all wanted batches without an open request are included: their consumers may be disconnected.
        """
        if self._keeps_wanted:
            return
        for state in self._epochs.values():
            requests = [pending for consumer in state.consumers for pending in consumer.requests]
            for k, batch in state.batches.items():
                found = state.distance(k)
                if batch.frame is None or found is None or not _is_of(quota, batch):
                    continue
                if found > distance or (force and not any(pending.distance(k) is not None for pending in requests)):
                    yield found, batch

    def _evict(self, batch: Batch) -> None:
        self._unwanted.pop(batch, None)
        self._sent_failures.pop(batch, None)
        self.remove(batch)


def _is_of(quota: Quota | None, batch: Batch) -> bool:
    return quota is None or batch.consumer.principal_share.quota is quota
