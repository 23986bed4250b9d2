"""Batch scheduling: which worker computes which batch next.

Synchronous functions over plain state, without processes, sockets or clocks. `Engine` reports events (`add_request`,
`sent`, `finished`, `worker_lost`, ...), then submits the batches that `decide` starts. `Store` decides which finished
batches are kept; `records` defines the records of both.

Rules:

1. A batch that exists or is being computed is never started again: equal requests share it.
2. The principal with the least served time, divided by its weight, goes first, so that no principal can slow others,
   regardless of its number of clients.
3. Of a principal's batches, a batch for which a client waits goes before other requested batches, and these go before
   prefetched batches (`Urgency`).
4. Within an urgency, the consumer with the least served time goes first, so that no consumer can slow others. If
   its batches are small, the time of its next group counts, too: of consumers that were served equally, the one that
   needs fewer batches goes first.
5. When memory is full, a batch for which no client waits is not started, unless `Store` evicts others for it.
6. Small batches are started in groups of successive batches of one consumer, for one worker: up to `GROUP_BYTES` and
   `GROUP_SECONDS`, because a message and a decision cost more than a small batch.
7. Computing time beyond a batch's estimate is charged as soon as it is known.
8. A batch of a background consumer is started only on an idle worker, and if no other batch of any principal can be
   started.
9. A batch with slow samples is started before the prefetch window reaches it, on an idle worker, and no other batch is
   queued behind it. Such batches take up to half of the workers (`stragglers`).
10. If a client waits for a batch whose worker takes unusually long, an idle worker computes the batch, too (a backup).
   The first result counts. A backup that takes unusually long, too, ends if another batch waits for a worker.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from teleloader_server.dispatch.quotas import Memory, Quota, too_many
from teleloader_server.dispatch.records import (
    Backup,
    Batch,
    Candidate,
    Consumer,
    Epoch,
    Loader,
    PendingRequest,
    PrincipalShare,
    RangeRequest,
    ReadyFrame,
    Urgency,
    training_loop,
)
from teleloader_server.dispatch.store import Store
from teleloader_server.dispatch.stragglers import (
    BACKUP_LEAST,
    DEPTH_BYTES,
    BackupBudget,
    Lookahead,
    SlowBatch,
    depth,
    is_slow,
    lead,
    patience,
    slow_samples,
)
from teleloader_server.dispatch.worker_loads import WorkerLoads
from teleloader_server.loading.tasks import GROUP_BYTES, GROUP_SECONDS, MAX_MAIN_SLOTS, SLOW_FROM, Task, indices_of
from teleloader_server.workers.health import WorkerExit, WorkerHealth
from teleloader_shared.codec import BatchId, Substituted
from teleloader_shared.errors import InvalidSpec
from teleloader_shared.orders.plan import Plan
from teleloader_shared.spec import MAX_EPOCH

MAX_ATTEMPTS: Final = 3
"""Number of worker exits that a batch may cause before it is replaced by an error."""
MAX_REQUESTED: Final = 1024
"""Maximum number of a request's batches that are computed ahead of the batch for which the client waits."""
MAX_BEHIND: Final = 4096
"""Maximum number of batches sent to a consumer beyond its position; above it, the position moves past these batches."""
FORGET_AFTER: Final = 60.0
"""Seconds after the last request and the last sent batch until a consumer without open requests is removed."""
PAUSE_SECONDS: Final = 1.0
"""Seconds without an open request after which a consumer loses its claim to worker time, even if batches remain to be
prefetched for it: while others keep all workers busy, they are never started."""
QUEUE_SECONDS: Final = 0.01
"""Seconds of work that are queued for a busy worker, so that it does not wait for the next message."""
MAX_QUEUE: Final = 256
LEAVE_SECONDS: Final = 10.0
"""Seconds after the last request of all others until a capped principal or consumer may use all workers again."""
MAX_SUBSTITUTIONS: Final = 20_000
"""Number of skipped and replaced samples of an epoch after which those of further batches are not kept."""
SCANS_TOGETHER: Final = 4
"""Maximum number of scans for slow samples per event of a consumer."""
MAX_EXAMINED: Final = 16
"""Number of a consumer's next batches with slow samples from which the one to start is selected."""
LOSS_SECONDS: Final = 1.0
"""Minimum worker time in seconds that is charged to a consumer if a worker exits while computing its batch."""


_NEXT: Final = attrgetter("next")


class Learned(NamedTuple):
    """Slow samples that were found in a computed batch."""

    new: Sequence[int]
    """Indices of the slow samples that were not known."""
    typical: float | None
    """Median time of a batch in seconds; None if it is unknown."""


Submit = Callable[[int, Sequence[Batch]], object]
"""Callback, called with the worker ID and each group of batches that the worker must compute."""


class Dispatcher:
    """Batch scheduler of one engine: decides which worker computes which batch next.

    Args:
        memory: Memory budget, shared with other dispatchers.
        in_turn: Number of workers that compute batches in turn, as in torch: only worker k mod `in_turn` computes batch
            k, in ascending order. A wanted batch is then not evicted: to recompute a batch of an iterable-style
            dataset, the worker would have to iterate its shard from the start. 0 if any worker may compute any batch.
    """

    def __init__(self, memory: Memory, in_turn: int = 0) -> None:
        self._in_turn = in_turn
        self.store: Final = Store(memory, keeps_wanted=in_turn > 0)
        """Batches and their consumers, modified by this dispatcher only."""
        self._loads = WorkerLoads()
        """Workers with their state and tasks, modified by the worker's pool only."""
        self._consumers: dict[tuple[str, str, Epoch], Consumer] = {}
        """Consumers by principal name, consumer name and epoch."""
        self._principal_shares: dict[str, PrincipalShare] = {}
        """Shares of the principals that have consumers, by principal name."""
        self._tickets = itertools.count()
        self._slow: set[BatchId] = set()
        """Batches with slow samples that are being computed."""
        self._backups = BackupBudget()
        self._ended: set[BatchId] = set()
        """Batches in progress whose backup has ended without a result."""
        self.lacks_memory = False
        """True if the last decision left a worker without a batch because memory was full."""
        self._level = 0.0
        """Served seconds of the principal for which a batch was started last; new principals start with this value."""

    # -- events of consumers

    def add_request(self, quota: Quota, request: RangeRequest, loader: Loader, now: float) -> PendingRequest:
        """Add a client's request for batches of an epoch.

        Args:
            quota: Quota of the client's principal.
            request: The request.
            loader: Loader of the requested batches.
            now: Current time.

        Returns:
            The pending batches of the request, to be passed to `sent` and `close`.

        Raises:
            ServerUnavailable: If the principal has too many consumers with open requests.
        """
        epoch, start, stop = (request.key, request.epoch), request.batches.start, request.batches.stop
        consumer = self._consumers.get((quota.name, request.consumer, epoch))
        if consumer is None:
            if self._in_turn:  # the next epoch of a session: batches prefetched in the previous epoch are unwanted
                self._forget([c for c in self._consumers.values() if not c.requests and c.epoch != epoch])
            consumer = self._join(quota, request, loader, now)
        elif not request.is_background:
            consumer.is_background = False
        if consumer not in self.store.active or (not consumer.requests and now - consumer.last_seen > PAUSE_SECONDS):
            principal_share = consumer.principal_share
            principal_share.served = max(principal_share.served, self._level)
            consumer.served = max(consumer.served, principal_share.current_level)
        consumer.last_seen = now
        pending = PendingRequest(consumer, request.batches, request.indices)
        if not consumer.position <= start <= consumer.position + MAX_BEHIND:
            consumer.sent_beyond.clear()
            self.store.move(consumer, start)
            consumer.scanned, consumer.early = start, []
        consumer.requests.append(pending)
        if consumer.sent_beyond:
            self.store.unmark_unwanted(consumer.state, [k for k in consumer.sent_beyond if start <= k < stop])
        furthest = max(pending.stop for pending in consumer.requests)
        consumer.ahead_start = consumer.ahead_cursor = furthest
        consumer.ahead_stop = min(loader.batches, furthest + self._depth(consumer, request.prefetch))
        if request.prefetch or furthest < loader.batches:
            looks_ahead = request.prefetch > 0 and not consumer.is_background
            consumer.looks_ahead = looks_ahead and self._knows_order(loader)
        self.store.active[consumer] = None
        if consumer.looks_ahead and loader.slow.seconds:
            self._look_ahead(consumer)
        self._enqueue(consumer)
        return pending

    def sent(self, pending: PendingRequest, now: float, count: int = 1) -> None:
        """Record that a request's next `count` batches were sent."""
        consumer = pending.consumer
        consumer.last_seen = now
        position, numbers = consumer.position, pending.advance(count)
        for k in numbers:
            if k == position:
                position += 1
            elif k > position:
                consumer.sent_beyond.add(k)
        while position in consumer.sent_beyond:
            consumer.sent_beyond.remove(position)
            position += 1
        if len(consumer.sent_beyond) > MAX_BEHIND:  # the consumer receives the skipped batches from another server
            position = max(consumer.sent_beyond) + 1
            consumer.sent_beyond.clear()
        if position != consumer.position:
            self.store.move(consumer, position)
        self.store.sent(consumer, numbers)
        if consumer.looks_ahead and consumer.loader.slow.seconds:
            self._look_ahead(consumer)
        self._enqueue(consumer)

    def close(self, pending: PendingRequest) -> None:
        """Close a request that is complete, or whose client disconnected."""
        pending.consumer.requests.remove(pending)
        end = max(pending.started, min(pending.sent + 1, len(pending.batches)))
        left = [pending.batches[place] for place in range(pending.sent, end)]
        self.store.mark_unwanted(pending.consumer.state, left)
        self._enqueue(pending.consumer)

    def forget_idle(self, now: float) -> list[Consumer]:
        """Remove and return the consumers that have been idle for `FORGET_AFTER` seconds.

        Returns an empty list if workers compute batches in turn.
        """
        if self._in_turn:
            return []  # a session ends with its client, and its evicted batches would be expensive to recompute
        removed = [c for c in self._consumers.values() if not c.requests and now - c.last_seen > FORGET_AFTER]
        self._forget(removed)
        return removed

    def _join(self, quota: Quota, request: RangeRequest, loader: Loader, now: float) -> Consumer:
        if len(quota.consumers) >= quota.max_consumers:
            self._forget_some(quota)
        principal_share = self._principal_shares.setdefault(quota.name, PrincipalShare(quota, self._level))
        epoch, loop = (request.key, request.epoch), training_loop(request.consumer)
        state = self.store.state(epoch)
        # the next iteration of a training loop has a new name, which must give it no advantage
        mine = (c for c in self._consumers.values() if c.principal_share is principal_share)
        served = max((c.served for c in mine if training_loop(c.name) == loop), default=0.0)
        start = request.batches.start
        consumer = Consumer(
            principal_share, request.consumer, loader, epoch, state, start, served, now, scanned=start,
            is_background=request.is_background,
        )  # fmt: skip
        self._consumers[quota.name, consumer.name, epoch] = consumer
        quota.consumers[consumer] = consumer.requests
        self.store.join(consumer)
        return consumer

    def _forget_some(self, quota: Quota) -> None:
        """Remove half of a principal's consumers without an open request, longest idle first, to admit another one."""
        mine = [c for c in self._consumers.values() if c.principal_share.quota is quota]
        idle = [c for c in mine if not c.requests]
        if not idle:
            if sum(map(bool, quota.consumers.values())) < quota.max_consumers:
                return  # the principal's consumers in other dispatchers are idle
            raise too_many(quota, quota.max_consumers, "consumers with open requests", "max_consumers")
        idle.sort(key=lambda consumer: consumer.last_seen)
        self._forget(idle[: len(idle) // 2 + 1])

    def _forget(self, removed: list[Consumer]) -> None:
        for consumer in removed:
            consumer.candidate = None
            quota = consumer.principal_share.quota
            del self._consumers[quota.name, consumer.name, consumer.epoch], quota.consumers[consumer]
        shares = (consumer.principal_share for consumer in self._consumers.values())
        self._principal_shares = {share.quota.name: share for share in shares}
        self.store.leave(removed)

    # -- events of workers

    def worker_ready(self, worker: int, health: WorkerHealth) -> None:
        """Add an idle worker, to which batches can be assigned; `health` is the pool's record of the worker."""
        self._loads.add(worker, health)

    def worker_removed(self, worker: int) -> None:
        """Remove a worker without batches."""
        self._loads.remove(worker)

    def worker_stalled(self, waiting: Iterable[BatchId]) -> bool:
        """Reassign the batches queued behind a slow batch of a worker.

        Returns:
            True if other workers will compute the batches; False if workers compute batches in turn, and therefore
            cannot replace each other.
        """
        if self._in_turn:
            return False
        for batch_id in waiting:
            if not self._has_other_worker(batch_id):
                self._requeue(batch_id)
        return True

    def worker_resumed(self, worker: int) -> None:
        """Record that a worker has completed its slow batch; the batches queued behind it were reassigned."""
        self._loads.update(worker)

    def worker_lost(self, worker: int, lost: Sequence[BatchId], worker_exit: WorkerExit) -> list[BatchId]:
        """Requeue the batches of an exited worker, except those that hung, caused too many exits or lacked resources.

        A batch that hung is not retried: it would probably hang again, until the timeout each time.

        Args:
            worker: Worker ID.
            lost: Batches of the worker.
            worker_exit: Exit of the worker, with its cause.

        Returns:
            The batches that are not retried; the caller passes failures in their place to `finished`.
        """
        self._loads.remove(worker)
        deaths = self.store.deaths
        failed = []
        if lost and worker_exit.attribution not in ("nobody", "machine"):
            self._charge(self.store.batch(lost[0]), LOSS_SECONDS)
        for batch_id in lost:
            if worker_exit.attribution == "unknown":
                # With several batches in the queue, the culprit is unknown. From now on, each of them is assigned to a
                # worker without other batches, so that the next exit identifies the culprit.
                deaths[batch_id] = deaths.get(batch_id, 0) + (len(lost) == 1)
            if self._has_other_worker(batch_id):
                continue
            if (
                batch_id == worker_exit.attribution
                or batch_id in worker_exit.overdue
                or deaths.get(batch_id, 0) >= MAX_ATTEMPTS
            ):
                failed.append(batch_id)
            else:
                self._requeue(batch_id)
        return failed

    def _has_other_worker(self, batch_id: BatchId) -> bool:
        """Return True if another worker computes a batch that one worker will not complete."""
        batch = self.store.batch(batch_id)
        if batch.backup is None:
            return False
        batch.backup = None
        self._backups.running -= 1
        return True

    def _requeue(self, batch_id: BatchId) -> None:
        """Remove a batch that is not computed, so that it is started again if a consumer wants it."""
        batch = self.store.batch(batch_id)
        self._slow.discard(batch_id)
        self._ended.discard(batch_id)
        self.store.remove(batch)
        if batch.slow is not None:
            for consumer in batch.state.consumers:
                if consumer.looks_ahead:  # the indices of other orders are in the requests
                    bisect.insort(consumer.early, (batch_id.batch, batch.slow))

    def finished(
        self,
        worker: int | None,
        batch_id: BatchId,
        frame: ReadyFrame,
        seconds: float = 0.0,
        *,
        is_beyond: bool = False,
    ) -> int | None:
        """Store the frame of a completed batch.

        Args:
            worker: Worker that computed the batch; None for a failure frame created by the server itself.
            batch_id: The batch.
            frame: Its frame.
            seconds: Its computing time in seconds.
            is_beyond: True if the batch is beyond the end of the epoch or shard, so that its time and size say nothing
                about others.

        Returns:
            Another worker that computes the same batch, whose result must be discarded; None if there is none.
        """
        other = None
        if worker is not None:
            batch = self.store.batch(batch_id)
            loader = batch.consumer.loader
            self._backups.computed += seconds
            if batch.backup is not None:
                other = self._end_backup(batch, batch.backup, worker, seconds)
            if not is_beyond:
                if batch.slow is None:
                    loader.batch_seconds = _smoothed(loader.batch_seconds, seconds)
                    loader.times.add(seconds)
                elif seconds <= SLOW_FROM and not frame.failed:
                    loader.slow.forget(batch.slow.samples)
                loader.batch_nbytes = _smoothed(loader.batch_nbytes, len(frame.raw))
            self._loads.update(worker)
        self._slow.discard(batch_id)
        self._ended.discard(batch_id)
        self.store.deaths.pop(batch_id, None)
        self._charge(self.store.finished(batch_id, frame), seconds)
        return other

    def _end_backup(self, batch: Batch, backup: Backup, worker: int, seconds: float) -> int:
        """Record the result of a batch with a backup; return the worker whose result is not needed."""
        other, spent = backup.worker, seconds
        if worker == backup.worker:
            other, spent = backup.other, max(0.0, seconds - backup.after)
            batch.consumer.served += spent
            batch.consumer.principal_share.charge(spent)
        batch.backup = None
        self._backups.running -= 1
        self._backups.spent += spent
        return other

    def learn(
        self, batch_id: BatchId, fetch: float, measured: Sequence[tuple[int, float]], suspects: Iterable[int]
    ) -> Learned:
        """Update the slow samples of the dataset from a computed batch; called before `finished`.

        Args:
            batch_id: The batch.
            fetch: Time to fetch its samples in seconds.
            measured: Index and time in seconds of each sample that took longer than `SLOW_FROM`.
            suspects: Samples of the batch if the times of its samples are unknown, else empty.
        """
        batch = self.store.batch(batch_id)
        loader = batch.consumer.loader
        typical = loader.times.typical
        found = slow_samples(fetch, measured, suspects, typical)
        known = () if batch.slow is None else batch.slow.samples
        loader.slow.forget(set(known) - {index for index, _ in found})
        new = loader.slow.learn(found, batch_id, typical)
        if found and batch.slow is None:
            batch.slow = SlowBatch(sum(seconds for _, seconds in found), tuple(index for index, _ in found))
        return Learned(new, typical)

    def substituted(self, batch_id: BatchId, substituted: Substituted) -> None:
        """Keep the skipped and replaced samples of a batch for the epoch, up to `MAX_SUBSTITUTIONS`."""
        state = self.store.state(batch_id[:2])
        if batch_id.batch not in state.substituted and state.substitutions < MAX_SUBSTITUTIONS:
            state.substituted[batch_id.batch] = substituted
            state.substitutions += len(substituted.substitutions)

    def _charge(self, batch: Batch, seconds: float) -> None:
        """Charge a batch to its consumer and principal, given its total computing time in seconds so far."""
        more = seconds - batch.charged
        if more > 0:
            batch.charged = seconds
            batch.consumer.served += more
            batch.consumer.principal_share.charge(more)

    def release(self) -> None:
        """Release all memory for use by other dispatchers, when this dispatcher is closed."""
        self.store.release()
        for consumer in self._consumers.values():
            del consumer.principal_share.quota.consumers[consumer]

    # -- state

    def consumers(self) -> Iterable[Consumer]:
        """Return the current consumers."""
        return self._consumers.values()

    def is_busy(self, worker: int) -> bool:
        """Return True if at least one batch is assigned to a worker."""
        health = self._loads.workers.get(worker)
        return health is not None and bool(health.tasks)

    # -- decisions

    def decide(self, submit: Submit) -> None:
        """Start batches on available workers by calling `submit`; evict sent failures and excess cached batches."""
        self.store.evict_sent_failures()
        self._start_batches(submit)
        self.store.evict_cached()

    def _start_batches(self, submit: Submit) -> None:
        """Start batches while workers are available, each for the principal with the least served time."""
        rejected: list[Candidate] = []
        self.lacks_memory = False
        while (found := self._next_start()) is not None:
            candidate, urgency, batch_id, worker = found
            consumer = candidate.consumer
            principal_share = consumer.principal_share
            heapq.heappop(principal_share.queue)
            level, before = principal_share.served, consumer.served
            if self._start(worker, batch_id, consumer, urgency, submit):
                self._level = max(self._level, level)
                principal_share.level = max(principal_share.level, before)
                consumer.candidate = None
                self._enqueue(consumer)
            else:
                rejected.append(candidate)
        for candidate in rejected:  # until the next decision
            if candidate is candidate.consumer.candidate:
                heapq.heappush(candidate.consumer.principal_share.queue, candidate)

    def _next_start(self) -> tuple[Candidate, Urgency, BatchId, int] | None:
        """Return the batch to start next, with its worker; None if no batch can be started now."""
        worker = -1 if self._in_turn else self._free_worker()
        if worker is None:
            return None  # without examining the consumers
        while self.store.reopened:
            self._enqueue(self.store.reopened.popitem()[0])
        while queued := [share for share in self._principal_shares.values() if share.queue]:
            share = min(queued, key=_turn) if len(queued) > 1 else queued[0]
            turn = _turn(share)
            found = self._first_candidate(share)
            if found is None or (len(queued) > 1 and _turn(share) != turn):  # the first entry was outdated
                continue
            candidate, urgency, k = found
            batch_id = BatchId(*candidate.consumer.epoch, k)
            if urgency is Urgency.EARLY:
                batch_id = _early_id(candidate.consumer, k)
                worker = self._free_worker(suspect=True)
            elif self._in_turn:
                worker = self._owner(batch_id)
            elif batch_id in self.store.deaths:
                worker = self._free_worker(suspect=True)
            elif urgency is Urgency.BACKGROUND:  # it must not delay a batch that is queued behind it
                worker = self._idle_worker()
            # otherwise the next principal could take the worker for which this one waits
            return None if worker is None else (candidate, urgency, batch_id, worker)
        return None

    def _enqueue(self, consumer: Consumer) -> None:
        """Queue a consumer for its most urgent batch that is not started yet.

        Must be called after each event that adds such a batch or makes it more urgent. All other changes are found when
        the consumer is the first in its queue.
        """
        found = self._next(consumer)
        if found is None:
            consumer.candidate = None
            if not consumer.requests:
                self.store.active.pop(consumer, None)
        elif consumer.candidate is None or consumer.candidate.urgency is not found[0]:
            principal_share = consumer.principal_share
            consumer.candidate = Candidate(
                found[0], self._due(consumer, *found), next(self._tickets), consumer.served, consumer
            )
            heapq.heappush(principal_share.queue, consumer.candidate)
            if len(principal_share.queue) > 2 * len(principal_share.quota.consumers) + 16:
                principal_share.queue = [each for each in principal_share.queue if each is each.consumer.candidate]
                heapq.heapify(principal_share.queue)

    def _due(self, consumer: Consumer, urgency: Urgency, k: int) -> float:
        """Return `Candidate.due` of a consumer whose most urgent batch is k."""
        most = _group_limit(consumer.loader)
        if most < 2 or urgency is Urgency.EARLY:
            return consumer.served
        count = min(most, consumer.startable_until(k, MAX_REQUESTED) - k)
        return consumer.served + (count - 1) * (consumer.loader.batch_seconds or 0.0)

    def _first_candidate(self, principal_share: PrincipalShare) -> tuple[Candidate, Urgency, int] | None:
        """Return the first entry of a principal's queue with its batch, after outdated entries were replaced.

        Returns None if the queue is empty.
        """
        queue = principal_share.queue
        while queue:
            first = queue[0]
            consumer = first.consumer
            if first is consumer.candidate:
                found = self._next(consumer)
                if found is not None and first.urgency is found[0] and first.served == consumer.served:
                    return first, *found
                consumer.candidate = None
                heapq.heappop(queue)
                self._enqueue(consumer)
            else:
                heapq.heappop(queue)
        return None

    def _start(self, worker: int, batch_id: BatchId, consumer: Consumer, urgency: Urgency, submit: Submit) -> bool:
        loader, principal_share = consumer.loader, consumer.principal_share
        estimate = int(loader.batch_nbytes or 0)
        if consumer.reads_too_little or self._takes_all_workers(consumer):
            return False
        is_early = urgency is Urgency.EARLY
        group = [batch_id.batch] if is_early else self._group(worker, batch_id, consumer)
        if len(group) > 1 and self.store.is_full(principal_share, estimate * len(group)):
            group = group[:1]
        if len(group) == 1 and self.store.is_full(principal_share, estimate):
            distance = consumer.distance(batch_id.batch) or 0
            is_awaited = urgency is Urgency.WAITING
            self.store.make_room(estimate, distance, principal_share, force=is_awaited)
            if not is_awaited and self.store.is_full(principal_share, estimate):
                self.lacks_memory = True
                return False
        seconds = 0.001 if loader.batch_seconds is None else loader.batch_seconds
        batches = []
        loader_key, epoch, _ = batch_id
        for number in group:
            batch = self.store.add(BatchId(loader_key, epoch, number), consumer, estimate)
            self._charge(batch, seconds)
            batches.append(batch)
        lookahead = consumer.next_lookahead if batch_id.epoch != consumer.epoch[1] else consumer.state.lookahead
        if lookahead is not None and (slow := lookahead.found.get(batch_id.batch)) is not None:
            batches[0].slow = slow
            self._slow.add(batch_id)
        if is_early:
            batches[0].is_early = True
            is_next = batch_id.epoch != consumer.epoch[1]
            consumer.started_early.append(batch_id.batch + is_next * loader.batches)
        submit(worker, batches)
        self._loads.update(worker)
        return True

    def _group(self, worker: int, batch_id: BatchId, consumer: Consumer) -> range:
        """Return the numbers of the batches to start together: a batch and, if they are small, batches after it."""
        k, loader, step = batch_id.batch, consumer.loader, self._in_turn or 1
        alone = range(k, k + 1)
        by_size = _group_limit(loader)
        lookahead = consumer.state.lookahead
        slow = {} if lookahead is None else lookahead.found
        if by_size < 2 or batch_id in self.store.deaths or k in slow:
            return alone
        health = self._loads.workers[worker]
        room = MAX_QUEUE if self._in_turn else _most_queued(loader.batch_seconds) + 1
        most = min(by_size, health.room, room - len(health.tasks))
        stop = consumer.startable_until(k, MAX_REQUESTED)
        if not self._in_turn:  # leave batches to the workers that would otherwise be idle
            workers = max(1, len(self._loads.workers) // len(self.store.active))
            most = min(most, math.ceil((max(stop, consumer.ahead_stop) - k) / workers))
        batches, deaths = consumer.state.batches, self.store.deaths
        for number in range(k + step, min(stop, k + step * int(most)), step):
            if number in batches or number in slow or (deaths and BatchId(*consumer.epoch, number) in deaths):
                return range(k, number, step)
        return range(k, max(k + 1, min(stop, k + step * int(most))), step)

    def _next(self, consumer: Consumer) -> tuple[Urgency, int] | None:
        """Return the consumer's most urgent batch that is not started yet, or None if all are started."""
        found = self._next_wanted(consumer)
        return found if found is None or not consumer.is_background else (Urgency.BACKGROUND, found[1])

    def _next_wanted(self, consumer: Consumer) -> tuple[Urgency, int] | None:
        """Return the result of `_next` for a consumer with normal priority."""
        batches = consumer.state.batches
        requested = None
        # in turn, no batch may overtake an earlier one
        limit = MAX_EPOCH if self._in_turn else MAX_REQUESTED
        for number, pending in enumerate(sorted(consumer.requests, key=_NEXT) if self._in_turn else consumer.requests):
            missing = pending.first_missing(batches, limit)
            if missing is not None and missing == pending.next and not (self._in_turn and number):
                return Urgency.WAITING, missing
            if requested is None:
                requested = missing
        if consumer.early and (early := self._next_early(consumer)) is not None:
            return Urgency.EARLY, early
        if requested is not None:
            return Urgency.REQUESTED, requested
        k = consumer.ahead_cursor  # after the end of all requests
        while k < consumer.ahead_stop and (k in batches or not consumer.lacks(k)):
            k += 1
        consumer.ahead_cursor = k
        return (Urgency.PREFETCHED, k) if k < consumer.ahead_stop else None

    def _owner(self, batch_id: BatchId) -> int | None:
        """Return the worker that computes a batch in turn, or None if the batch must wait for it."""
        owner = batch_id.batch % self._in_turn
        takes = self._takes_suspect if batch_id in self.store.deaths else self._takes
        health = self._loads.workers.get(owner)
        is_available = health is not None and takes(health) and len(health.tasks) < MAX_QUEUE
        return owner if is_available else None

    def _free_worker(self, *, suspect: bool = False) -> int | None:
        """Return the worker with the fewest batches, or None if a batch must wait until it has less work.

        A suspect batch, which may have caused a worker exit, requires a worker without other batches.
        """
        worker = self._loads.least_busy(self._takes_suspect if suspect else self._takes)
        queue = {} if worker is None else self._loads.workers[worker].tasks
        if not queue:
            return worker
        seconds = self.store.batch(_last(queue)).consumer.loader.batch_seconds
        return worker if len(queue) <= _most_queued(seconds) else None

    def _idle_worker(self) -> int | None:
        """Return a worker without batches, or None."""
        return self._loads.least_busy(self._takes_suspect)

    def _takes(self, health: WorkerHealth) -> bool:
        """Return True if a batch that is not suspect can be assigned to a worker."""
        if health.recycling or health.stalled:
            return False
        deaths, slow = self.store.deaths, self._slow
        if not (deaths or slow) or not health.tasks:
            return True
        last = _last(health.tasks)
        return last not in deaths and last not in slow

    def _takes_suspect(self, health: WorkerHealth) -> bool:
        """Return True if a suspect batch can be assigned to a worker."""
        return not health.tasks and self._takes(health)

    # -- slow samples

    def _knows_order(self, loader: Loader) -> bool:
        """Return True if the batches of an epoch can be searched for slow samples."""
        spec, mixture = loader.spec, loader.spec.mixture
        is_seeded = spec.order == "plan" and loader.length > 0 and not self._in_turn
        # only workers have the lengths of the samples
        return is_seeded and spec.required_lengths is None and (mixture is None or mixture.slots <= MAX_MAIN_SLOTS)

    def _rate(self, loader: Loader) -> float:
        """Return how many batches/s the workers compute for a consumer if it gets an equal share of their time."""
        seconds = loader.times.typical or loader.batch_seconds or SLOW_FROM
        return len(self._loads.workers) / (max(1, len(self.store.active)) * seconds)

    def _depth(self, consumer: Consumer, prefetch: int) -> int:
        """Return the length of the prefetch window, given the length that the client requested."""
        loader = consumer.loader
        # without a known end, further batches may not exist; in the background, they would be computed in vain
        is_limited = self._in_turn or not prefetch or loader.batches == MAX_EPOCH or consumer.is_background
        p99 = None if is_limited else loader.times.p99
        if p99 is None:
            return prefetch
        budget = consumer.principal_share.quota.memory
        return max(prefetch, depth(p99, self._rate(loader), loader.batch_nbytes or 0.0, budget))

    def _look_ahead(self, consumer: Consumer) -> None:
        """Search the next batches of a consumer, which may be of the next epoch, for slow samples."""
        loader, state = consumer.loader, consumer.state
        reach = min(consumer.position + lead(loader.slow.longest, self._rate(loader)), 2 * loader.batches)
        for _ in range(SCANS_TOGETHER):
            if consumer.scanned >= reach:
                return
            first = loader.batches if consumer.scanned >= loader.batches else 0
            lookahead = consumer.next_lookahead if first else state.lookahead
            if lookahead is None:
                try:
                    plan = Plan(loader.spec, loader.length, consumer.epoch[1] + (first > 0))
                except InvalidSpec:  # a mixture has no further epoch
                    return
                lookahead = Lookahead(plan, loader.slow)
                if first:
                    consumer.next_lookahead = lookahead
                else:
                    state.lookahead = lookahead
            start = consumer.scanned - first
            stop, typical = lookahead.scan(start), loader.times.typical
            found = ((k, lookahead.found[k]) for k in range(start, stop) if k in lookahead.found)
            consumer.early += [(first + k, slow) for k, slow in found if is_slow(slow.seconds, typical)]
            consumer.scanned = first + stop

    def _next_early(self, consumer: Consumer) -> int | None:
        """Return the consumer's most urgent batch with slow samples that must be started now, or None."""
        early, loader = consumer.early, consumer.loader
        while early and self._is_started(consumer, early[0][0]):
            del early[0]
        if len(self._slow) >= len(self._loads.workers) // 2:
            return None
        rate = self._rate(loader)
        found, least = None, 0
        for k, slow in early[:MAX_EXAMINED]:
            rest = k - consumer.position - lead(slow.seconds, rate)
            if rest <= least and not self._is_started(consumer, k):
                found, least = k, rest
        return None if found is None or self._keeps_enough(consumer) else found

    def _is_started(self, consumer: Consumer, k: int) -> bool:
        """Return True if the consumer needs no early start of a batch, numbered as in `Consumer.early`."""
        loader, epoch = consumer.epoch
        if k < consumer.loader.batches:
            return k in consumer.state.batches or not consumer.lacks(k)
        following = self.store.known_state((loader, epoch + 1))
        return following is not None and (k - consumer.loader.batches in following.batches or bool(following.consumers))

    def _keeps_enough(self, consumer: Consumer) -> bool:
        """Return True if no further batch may be started early for a consumer, because of the memory."""
        nbytes, share = int(consumer.loader.batch_nbytes or 0), consumer.principal_share
        consumer.started_early = [k for k in consumer.started_early if k >= consumer.position]
        most = min(DEPTH_BYTES, share.quota.memory / 8)
        if consumer.started_early and (len(consumer.started_early) + 1) * nbytes > most:
            return True
        window = consumer.ahead_stop - consumer.position + 1
        return self.store.is_full(share, nbytes * window)

    # -- slow workers

    def start_backups(
        self, now: float, submit: Callable[[int, Task], object], reassign_queued: Callable[[int], object]
    ) -> list[tuple[Task, Backup]]:
        """Start backups of batches for which clients wait, and whose workers take unusually long.

        The batches queued behind such a batch come first, because its backup may take as long.

        Not if workers compute batches in turn: their batches depend on the worker.

        Args:
            now: Current time.
            submit: Callback, called with the worker ID of each backup and the task.
            reassign_queued: Callback that reassigns the batches queued behind a worker's current batch.

        Returns:
            The tasks with their backups.
        """
        started: list[tuple[Task, Backup]] = []
        for worker, health in () if self._in_turn else list(self._loads.workers.items()):
            seconds = now - health.progressed_at
            if seconds < BACKUP_LEAST or not health.tasks:
                continue
            task = next(iter(health.tasks.values()))
            batch = self.store.batch(task.batch_id)
            if batch.backup is not None or task.batch_id in self._ended:
                continue
            if not self._is_overdue(batch, task, seconds):
                continue
            if len(health.tasks) > 1:
                reassign_queued(worker)
                continue
            idle = self._free_worker(suspect=True)
            if idle is None or not self._backups.allows(len(self._loads.workers)):
                break
            self._backups.running += 1
            batch.backup = Backup(worker, idle, seconds)
            submit(idle, task)
            self._loads.update(idle)
            started.append((task, batch.backup))
        return started

    def backup_to_end(self, now: float) -> int | None:
        """Return the worker of a backup that must be killed, or None.

        A backup that takes unusually long, too, probably has slow samples. It must not take a worker for which another
        batch waits.
        """
        if not self._backups.running or self._free_worker() is not None:
            return None
        following = (self._next(consumer) for consumer in self.store.active)
        if not any(found is not None and found[0] is Urgency.WAITING for found in following):
            return None
        for worker, health in self._loads.workers.items():
            batch = self.store.batch(next(iter(health.tasks.values())).batch_id) if health.tasks else None
            if batch is not None and batch.backup is not None and batch.backup.other == worker:
                p99 = batch.consumer.loader.times.p99
                if p99 is not None and now - health.progressed_at > patience(p99, 0.0):
                    self._ended.add(batch.batch_id)
                    self._backups.spent += now - health.progressed_at
                    return worker
        return None

    @staticmethod
    def _is_overdue(batch: Batch, task: Task, seconds: float) -> bool:
        """Return True if a client waits for a batch whose worker had no result for unusually many seconds."""
        k, loader = batch.batch_id.batch, batch.consumer.loader
        p99 = loader.times.p99
        if p99 is None or seconds <= patience(p99, 0.0):
            return False
        waiting = (each for each in batch.state.consumers if not each.is_background)
        if all(pending.next != k for consumer in waiting for pending in consumer.requests):
            return False
        if batch.slow is None and loader.slow.seconds:  # a client-side sampler determines the order
            batch.slow = loader.slow.batch(indices_of(task))
        return seconds > patience(p99, 0.0 if batch.slow is None else batch.slow.seconds)

    # -- preemption

    def preempt(self, working: Mapping[int, tuple[BatchId, float]]) -> int | None:
        """Charge slow batches to their principals, and select a worker to preempt for a waiting consumer.

        A worker is preempted if all workers compute slow batches, and the waiting consumer uses none of them: first a
        worker whose result is not needed (`Pool.withdraw`), otherwise one of another consumer or principal that uses
        several, and whose weight is not higher. The other consumer or principal is capped from then on: it leaves one
        worker to others.

        Args:
            working: Slow batches in progress by worker, with their computing time so far in seconds.

        Returns:
            ID of the worker to kill; None if no worker is preempted.
        """
        at = {worker: self.store.batch(batch_id) for worker, (batch_id, _) in working.items()}
        for worker, batch in at.items():
            self._charge(batch, working[worker][1])
        unneeded = [worker for worker, health in self._loads.workers.items() if health.stalled and not health.tasks]
        if self._in_turn or not self._loads.workers or len(at) + len(unneeded) < len(self._loads.workers):
            return None
        served = {batch.consumer for batch in at.values()}
        for consumer in self.store.active:
            found = self._next(consumer)
            if consumer in served or found is None or found[0] is not Urgency.WAITING:
                continue
            if unneeded:
                return unneeded[0]
            owners = _owners(list(at.values()), consumer)
            most = max(owners, key=owners.count)
            weight = most.principal_share.quota.weight if isinstance(most, Consumer) else most.quota.weight
            if owners.count(most) > 1 and weight <= consumer.principal_share.quota.weight:
                most.is_capped = True
                return list(at)[owners.index(most)]
        return None

    def _takes_all_workers(self, consumer: Consumer) -> bool:
        """Return True if the consumer is capped, and one more batch would leave no worker to others."""
        principal_share = consumer.principal_share
        if not (consumer.is_capped or principal_share.is_capped):
            return False

        def is_mine(other: Consumer) -> bool:
            return other is consumer or (principal_share.is_capped and other.principal_share is principal_share)

        recent = consumer.last_seen - LEAVE_SECONDS
        if all(is_mine(c) or not (c.requests or c.last_seen > recent) for c in self._consumers.values()):
            return False  # no other consumer is active
        workers = self._loads.workers.values()
        current = [next(iter(health.tasks.values())) for health in workers if health.tasks]
        busy = [self.store.batch(task.batch_id).consumer for task in current]
        return sum(map(is_mine, busy)) + 1 >= max(2, len(workers))


def _turn(share: PrincipalShare) -> tuple[bool, float]:
    """Return the sort key of a principal with queued consumers; the smallest goes first."""
    return share.queue[0].urgency is Urgency.BACKGROUND if share.queue else True, share.served


def _early_id(consumer: Consumer, k: int) -> BatchId:
    """Return the ID of a batch, numbered as in `Consumer.early`."""
    (loader, epoch), batches = consumer.epoch, consumer.loader.batches
    return BatchId(loader, epoch, k) if k < batches else BatchId(loader, epoch + 1, k - batches)


def _group_limit(loader: Loader) -> float:
    """Return how many batches of a loader one group may have; less than 2 if each batch is a group."""
    if not loader.batch_seconds or not loader.batch_nbytes:
        return 1
    return min(GROUP_SECONDS / loader.batch_seconds, GROUP_BYTES / loader.batch_nbytes)


def _most_queued(seconds: float | None) -> int:
    """Return how many batches may be queued for a worker before another one, given their computing time in seconds."""
    return 1 if seconds is None else min(MAX_QUEUE, int(QUEUE_SECONDS / max(seconds, 1e-6)))


def _last(queue: dict[int, Task]) -> BatchId:
    return next(reversed(queue.values())).batch_id


def _owners(batches: Sequence[Batch], waiting: Consumer) -> Sequence[PrincipalShare | Consumer]:
    """Return the principal of each batch, or its consumer if the waiting consumer's principal owns a batch."""
    principals = [batch.consumer.principal_share for batch in batches]
    return [batch.consumer for batch in batches] if waiting.principal_share in principals else principals


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else 0.8 * before + 0.2 * now
