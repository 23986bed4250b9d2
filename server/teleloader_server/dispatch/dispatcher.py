"""The dispatcher decides which worker makes which batch next.

Plain synchronous functions over plain state: no process, no socket, no clock of its own. `Engine` tells it what
happened (`ask`, `sent`, `finished`, `worker_lost`, ...), then carries out what `decide` returns. Which finished batches
are kept is decided by `Store`; the records of both are in `demand`.

The rules:

1. A batch that exists or is being made is never begun a second time: equal asks share it.
2. The principal that was served least goes first: a greedy one costs the others nothing, however many clients it is.
3. Of a principal's batches, one for which a client waits goes before one that it asked for besides, and that before
   work ahead (`Urgency`).
4. Within a class, the consumer that was served least goes first: a greedy one costs the others nothing.
5. When memory is full, a batch for which no client waits must wait, unless `Store` lets go of others for it.
6. What batches took longer than was expected is charged when it shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from teleloader_server.dispatch.quotas import Memory, Quota, too_many
from teleloader_server.dispatch.records import (
    Batch,
    Consumer,
    Epoch,
    PendingRange,
    PrincipalShare,
    RangeRequest,
    ReadyFrame,
    Urgency,
)
from teleloader_server.dispatch.store import Store
from teleloader_server.workers.health import Attribution
from teleloader_shared.codec import Address

MAX_ATTEMPTS: Final = 3
"""How many workers a batch may kill before it becomes an error."""
MAX_ASKED: Final = 256
"""How far beyond the batch that it waits for a request is worked on."""
MAX_BEHIND: Final = 4096
"""How far a consumer may have been sent batches beyond one that it did not ask for, before that one is given up."""
FORGET_AFTER: Final = 60.0
"""Seconds after its last ask when nothing is kept or made for a consumer any more."""
QUEUE_SECONDS: Final = 0.01
"""Work that a busy worker is given beforehand, so that it does not wait for the next message."""
MAX_QUEUE: Final = 256
LEAVE_SECONDS: Final = 10.0
"""So long after the last ask of the others, who has had a worker taken from it may have all of them again."""
LOSS_SECONDS: Final = 1.0
"""What the end of a worker is charged with: another one has to be started."""


class Start(NamedTuple):
    """Have `worker` make a batch."""

    worker: int
    batch: Batch


class Dispatcher:
    """See the module.

    Args:
        memory: What frames may take together with those of other dispatchers.
        in_turn: How many workers make the batches in turn, as torch's do: batch k comes from worker k mod `in_turn`
            only, one after another. It is not let go while it is wanted, because the share of an iterable-style
            dataset that a worker has would have to be gone through from its beginning to make it again. 0 when any
            worker may make any batch.
    """

    def __init__(self, memory: Memory, in_turn: int = 0) -> None:
        self._in_turn = in_turn
        self.store: Final = Store(memory, keeps_wanted=in_turn > 0)
        """The batches that there are, and who wants them; others only look."""
        self._queues: dict[int, deque[Address]] = {}
        """What each worker has to do, in its order."""
        self._recycling: set[int] = set()
        """Workers that finish what they have, and will be replaced then."""
        self._stalled: set[int] = set()
        """Workers whose batch takes long: nothing is given to them that would wait behind it."""
        self._consumers: dict[tuple[str, str, Epoch], Consumer] = {}
        """By their principal's name, their own, and what they go through."""
        self._principal_shares: dict[str, PrincipalShare] = {}
        """The principals of the consumers that are known."""
        self._level = 0.0
        """What the principal for which a batch was begun last had been served: who comes anew starts there."""
        self._seconds: dict[str, float] = {}
        self._sizes: dict[str, float] = {}

    # -- what happened: consumers

    def ask(self, quota: Quota, request: RangeRequest, batches: int, now: float) -> PendingRange:
        """A client requests batches of an epoch.

        Args:
            quota: The quota of the client's principal.
            request: The request.
            batches: Number of batches in the epoch.
            now: The time.

        Raises:
            ServerUnavailable: If the principal has too many consumers with open requests.
        """
        run, start, stop = (request.key, request.epoch), request.start, request.stop
        consumer = self._consumers.get((quota.name, request.consumer, run))
        if consumer is None:
            if self._in_turn:  # a session's next epoch: what was made ahead in the one before is not wanted any more
                self._forget([other for other in self._consumers.values() if not other.asks and other.run != run])
            consumer = self._join(quota, request.consumer, run, start, now)
        if consumer not in self.store.active:
            # time in which it wanted nothing is no credit, or it would shut the others out until it has caught up
            principal_share = consumer.principal_share
            principal_share.served = max(principal_share.served, self._level)
            consumer.served = max(consumer.served, principal_share.level)
        consumer.last_seen = now
        asked = PendingRange(consumer, start, stop, start, request.indices)
        if not consumer.position <= start <= consumer.position + MAX_BEHIND:
            consumer.sent_beyond.clear()
            self.store.move(consumer, start)
        quota.counts["asking"] += not consumer.asks
        consumer.asks.append(asked)
        if consumer.sent_beyond:
            self.store.want_again(consumer.state, [k for k in consumer.sent_beyond if start <= k < stop])
        furthest = max(ask.stop for ask in consumer.asks)
        consumer.ahead_start = consumer.ahead_cursor = furthest
        consumer.ahead_stop = min(batches, furthest + request.prefetch)
        self.store.active[consumer] = None
        return asked

    def sent(self, ask: PendingRange, now: float) -> None:
        """The batch ``ask.next`` was handed to the connection."""
        consumer = ask.consumer
        consumer.last_seen = now
        k = ask.next
        if k >= consumer.position:
            consumer.sent_beyond.add(k)
        ask.next += 1
        ask.cursor = max(ask.cursor, ask.next)
        position = consumer.position
        while position in consumer.sent_beyond:
            consumer.sent_beyond.remove(position)
            position += 1
        if len(consumer.sent_beyond) > MAX_BEHIND:  # it skips batches: they come from another server
            position = max(consumer.sent_beyond) + 1
            consumer.sent_beyond.clear()
        if position != consumer.position:
            self.store.move(consumer, position)
        self.store.sent(consumer, k)

    def close(self, ask: PendingRange) -> None:
        """The request is answered, or its client has gone."""
        ask.consumer.asks.remove(ask)
        ask.consumer.principal_share.quota.counts["asking"] -= not ask.consumer.asks
        self.store.mark_unwanted(ask.consumer.state, range(ask.next, min(ask.stop, max(ask.cursor, ask.next + 1))))

    def forget_idle(self, now: float) -> list[Consumer]:
        """Forget the consumers that have not asked for so long that they have probably gone."""
        if self._in_turn:
            return []  # the session ends with its client; what is let go could not be made again at once
        gone = [c for c in self._consumers.values() if not c.asks and now - c.last_seen > FORGET_AFTER]
        self._forget(gone)
        return gone

    def _join(self, quota: Quota, name: str, run: Epoch, position: int, now: float) -> Consumer:
        if quota.counts["consumers"] >= quota.max_consumers:
            self._forget_some(quota)
        principal_share = self._principal_shares.get(quota.name)
        if principal_share is None:
            principal_share = self._principal_shares[quota.name] = PrincipalShare(quota, self._level)
        consumer = self._consumers[quota.name, name, run] = self.store.join(principal_share, name, run, position, now)
        principal_share.consumers += 1
        quota.counts["consumers"] += 1
        return consumer

    def _forget_some(self, quota: Quota) -> None:
        """Make room for a principal's next consumer: half of those that have no open request go, the idlest first."""
        mine = [c for c in self._consumers.values() if c.principal_share.quota is quota]
        idle = [c for c in mine if not c.asks]
        if not idle:
            if quota.counts["asking"] < quota.max_consumers:
                return  # those of other dispatchers are idle
            raise too_many(quota, quota.max_consumers, "consumers with open requests", "max_consumers")
        idle.sort(key=lambda consumer: consumer.last_seen)
        self._forget(idle[: len(idle) // 2 + 1])

    def _forget(self, gone: list[Consumer]) -> None:
        for consumer in gone:
            principal_share = consumer.principal_share
            del self._consumers[principal_share.quota.name, consumer.name, consumer.run]
            principal_share.consumers -= 1
            principal_share.quota.counts["consumers"] -= 1
            if not principal_share.consumers:
                del self._principal_shares[principal_share.quota.name]
        self.store.leave(gone)

    # -- what happened: workers

    def worker_ready(self, worker: int) -> None:
        """A worker, which has nothing to do, can take batches."""
        self._queues[worker] = deque()
        self._recycling.discard(worker)
        self._stalled.discard(worker)

    def worker_recycling(self, worker: int) -> None:
        """A worker finishes what it has and takes nothing more, until another is ready in its place."""
        self._recycling.add(worker)

    def worker_stalled(self, worker: int, waiting: Iterable[Address]) -> bool:
        """What a worker makes takes long: what waits behind it is made by others, and it gets nothing more meanwhile.

        Returns:
            Whether that is so: where workers make batches in turn, no other one may make them.
        """
        if self._in_turn:
            return False
        self._stalled.add(worker)
        for address in waiting:
            self._queues[worker].remove(address)
            self.store.remove(self.store.batch(address))
        return True

    def worker_resumed(self, worker: int) -> None:
        """A worker that was held up can take batches again."""
        self._stalled.discard(worker)

    def worker_lost(
        self, worker: int, attribution: Attribution = "unknown", overdue: frozenset[Address] = frozenset()
    ) -> list[Address]:
        """A worker is gone. What it had is made again, but for a batch that has killed too many, or that hung.

        A batch that hung is not tried again: most likely it hangs each time, and each time costs the whole limit.

        Args:
            worker: Which.
            attribution: The cause, see `Attribution`.
            overdue: Batches that are not to be tried again.

        Returns:
            The batches that are given up; `finished` must be told what stands in their place.
        """
        queue = self._queues.pop(worker, deque())
        deaths = self.store.deaths
        given_up = []
        if queue and attribution not in ("nobody", "machine"):
            self._charge(self.store.batch(queue[0]), LOSS_SECONDS)
        for address in queue:
            if attribution == "unknown":
                # Of several batches it cannot be told which one did it: from now on each is given to a worker that
                # has nothing else, and then it can.
                deaths[address] = deaths.get(address, 0) + (len(queue) == 1)
            if address == attribution or address in overdue or deaths.get(address, 0) >= MAX_ATTEMPTS:
                given_up.append(address)
            else:
                self.store.remove(self.store.batch(address))
        return given_up

    def finished(self, worker: int | None, address: Address, frame: ReadyFrame, seconds: float = 0.0) -> None:
        """A batch is ready; `worker` is None for a failure that the server itself put in its place."""
        if worker is not None:
            self._queues[worker].remove(address)
            self._seconds[address.loader] = _smoothed(self._seconds.get(address.loader), seconds)
            self._sizes[address.loader] = _smoothed(self._sizes.get(address.loader), len(frame.raw))
        self.store.deaths.pop(address, None)
        self._charge(self.store.finished(address, frame), seconds)

    def _charge(self, batch: Batch, seconds: float) -> None:
        """A batch has taken so long until now."""
        more = seconds - batch.charged
        if more > 0:
            batch.charged = seconds
            batch.consumer.served += more
            batch.consumer.principal_share.served += more

    def forget_loader(self, key: str) -> None:
        """What was learned of a loader that is not registered any more."""
        self._seconds.pop(key, None)
        self._sizes.pop(key, None)

    def release(self) -> None:
        """There will be no more batches: what they took is free for other dispatchers."""
        self.store.release()
        for principal_share in self._principal_shares.values():
            principal_share.quota.counts["consumers"] -= principal_share.consumers

    # -- what can be asked

    def consumers(self) -> Iterable[Consumer]:
        """Those that are known now."""
        return self._consumers.values()

    def is_busy(self, worker: int) -> bool:
        """Whether the worker has a batch to make."""
        return bool(self._queues.get(worker))

    # -- what to do now

    def decide(self) -> list[Start]:
        """Evict batches, and return those that are to be begun, in this order."""
        store = self.store
        store.evict_told()
        begun: list[Start] = []
        self._begin(begun)
        for consumer in [c for c in store.active if not c.asks and c.ahead_cursor >= c.ahead_stop]:
            del store.active[consumer]
        store.evict_cached()
        return begun

    def _begin(self, begun: list[Start]) -> None:
        """Begin batches, each for the principal that was served least by then, while there are workers for them."""
        active: dict[PrincipalShare, list[Consumer]] = {}
        for consumer in self.store.active:
            active.setdefault(consumer.principal_share, []).append(consumer)
        wishes = {principal_share: self._wishes(consumers) for principal_share, consumers in active.items()}
        while wishes:
            principal_share = min(wishes, key=lambda principal_share: principal_share.served)
            wish = next(wishes[principal_share], None)
            if wish is None:
                del wishes[principal_share]
                continue
            urgency, consumer, k = wish
            address = Address(*consumer.run, k)
            worker = self._free_worker(address)
            if worker is None:
                return  # who is served next must not take the worker for which this one waits
            level, before = principal_share.served, consumer.served
            principal_share.was_begun = self._start(worker, address, consumer, urgency, begun)
            if principal_share.was_begun:
                self._level = max(self._level, level)
                principal_share.level = max(principal_share.level, before)

    def _wishes(self, consumers: list[Consumer]) -> Iterator[tuple[Urgency, Consumer, int]]:
        """What a principal wants next, as often as that is asked: class by class, whoever was served least first."""
        for urgency in Urgency:
            left = [consumer for consumer in consumers if self._next(consumer, urgency) is not None]
            while left:
                consumer = min(left, key=lambda consumer: consumer.served)
                k = self._next(consumer, urgency)
                if k is not None:
                    yield urgency, consumer, k
                if k is None or not consumer.principal_share.was_begun:
                    left.remove(consumer)

    def _start(self, worker: int, address: Address, consumer: Consumer, urgency: Urgency, begun: list[Start]) -> bool:
        estimate = int(self._sizes.get(address.loader, 0))
        principal_share = consumer.principal_share
        if consumer.reads_too_little or self._takes_all_workers(consumer):
            return False
        if self.store.is_full(principal_share, estimate):
            distance = consumer.distance(address.batch) or 0
            waited_for = urgency is Urgency.WAITING
            self.store.make_room(estimate, distance, principal_share, at_any_price=waited_for)
            if not waited_for and self.store.is_full(principal_share, estimate):
                return False
        batch = self.store.begun(address, consumer, estimate)
        self._charge(batch, self._seconds.get(address.loader, 0.001))
        self._queues[worker].append(address)
        begun.append(Start(worker, batch))
        return True

    def _next(self, consumer: Consumer, urgency: Urgency) -> int | None:
        """The consumer's first batch of that class that is not begun."""
        batches = consumer.state.batches
        if self._in_turn and urgency is not Urgency.AHEAD:
            return self._next_in_turn(consumer, urgency)
        if urgency is Urgency.WAITING:
            return next((ask.next for ask in consumer.asks if ask.next < ask.stop and ask.next not in batches), None)
        if urgency is Urgency.ASKED:
            for ask in consumer.asks:
                missing = ask.first_missing(batches, min(ask.stop, ask.next + MAX_ASKED))
                if missing is not None:
                    return missing
            return None
        while consumer.ahead_cursor < consumer.ahead_stop and (
            consumer.ahead_cursor in batches or consumer.distance(consumer.ahead_cursor) is None
        ):
            consumer.ahead_cursor += 1
        return consumer.ahead_cursor if consumer.ahead_cursor < consumer.ahead_stop else None

    def _next_in_turn(self, consumer: Consumer, urgency: Urgency) -> int | None:
        """The first batch that is not begun, whichever request it belongs to, so that none overtakes another."""
        batches = consumer.state.batches
        for number, ask in enumerate(sorted(consumer.asks, key=lambda ask: ask.next)):
            missing = ask.first_missing(batches, ask.stop)
            if missing is not None:
                waited_for = number == 0 and missing == ask.next
                return missing if waited_for == (urgency is Urgency.WAITING) else None
        return None

    def _free_worker(self, address: Address) -> int | None:
        """The worker with the least to do, if it can take this batch besides."""
        suspect = address in self.store.deaths
        if self._in_turn:
            owner = address.batch % self._in_turn
            open_ = self._takes(owner, suspect=suspect) and len(self._queues[owner]) < MAX_QUEUE
            return owner if open_ else None
        open_to_all = [number for number in self._queues if self._takes(number, suspect=suspect)]
        worker = min(open_to_all, key=lambda number: len(self._queues[number]), default=None)
        if worker is None or not self._queues[worker]:
            return worker
        queue = self._queues[worker]
        seconds = self._seconds.get(queue[-1].loader, QUEUE_SECONDS)
        room = min(MAX_QUEUE, int(QUEUE_SECONDS / max(seconds, 1e-6)))
        return worker if len(queue) <= room else None

    def _takes(self, worker: int, *, suspect: bool) -> bool:
        """Whether the worker is there for more; beside a suspect nothing else is queued, nor a suspect beside it."""
        queue = self._queues.get(worker)
        if queue is None or worker in self._recycling or worker in self._stalled:
            return False
        return not queue or not (suspect or queue[-1] in self.store.deaths)

    # -- workers that are not to be had

    def preempt(self, working: Mapping[int, tuple[Address, float]]) -> int | None:
        """Charge for batches that are being made, and find a worker that must be taken from who has too many of them.

        That is when somebody waits and no worker makes anything for it, while another one has several at work on
        batches that take long, perhaps for ever. From then on that one leaves a worker to the others.

        Args:
            working: What workers make that have been at it for longer than others can be expected to wait, and the
                seconds for which they have.

        Returns:
            The worker, to be ended, through no fault of its batch.
        """
        at = {worker: self.store.batch(address) for worker, (address, _) in working.items()}
        for worker, batch in at.items():
            self._charge(batch, working[worker][1])
        if self._in_turn or not at or len(at) < len(self._queues):
            return None
        served = {batch.consumer for batch in at.values()}
        for consumer in self.store.active:
            if consumer in served or self._next(consumer, Urgency.WAITING) is None:
                continue
            owners = _owners(list(at.values()), consumer)
            most = max(owners, key=owners.count)
            if owners.count(most) > 1:
                most.is_capped = True
                return list(at)[owners.index(most)]
        return None

    def _takes_all_workers(self, consumer: Consumer) -> bool:
        """Whether the batch would leave no worker to others, of one that must leave one."""
        principal_share = consumer.principal_share
        if not (consumer.is_capped or principal_share.is_capped):
            return False

        def is_mine(other: Consumer) -> bool:
            return other is consumer or (principal_share.is_capped and other.principal_share is principal_share)

        lately = consumer.last_seen - LEAVE_SECONDS
        if all(is_mine(other) or not (other.asks or other.last_seen > lately) for other in self._consumers.values()):
            return False  # nobody is there to leave it to
        busy = [self.store.batch(queue[0]).consumer for queue in self._queues.values() if queue]
        return sum(map(is_mine, busy)) + 1 >= max(2, len(self._queues))


def _owners(batches: Sequence[Batch], waiting: Consumer) -> Sequence[PrincipalShare | Consumer]:
    """Return the consumer of each batch if a waiting consumer's principal has any of them, otherwise the principals."""
    principals = [batch.consumer.principal_share for batch in batches]
    return [batch.consumer for batch in batches] if waiting.principal_share in principals else principals


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else 0.8 * before + 0.2 * now
