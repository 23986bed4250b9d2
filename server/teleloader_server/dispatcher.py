"""The dispatcher decides which worker makes which batch next, and which finished batches are kept.

Plain synchronous functions over plain state: no process, no socket, no clock of its own. `Engine` tells it what
happened (`ask`, `sent`, `finished`, `worker_lost`, ...), then carries out what `decide` returns.

The rules:

1. A batch that exists or is being made is never begun a second time: equal asks share it.
2. The principal that was served least goes first: a greedy one costs the others nothing, however many clients it is.
3. Of a principal's batches, one for which a client waits goes before one that it asked for besides, and that before
   work ahead.
4. Within a class, the consumer that was served least goes first: a greedy one costs the others nothing.
5. When memory is full, or a principal's share of it, batches that nobody wants are let go first, the longest unused
   first of all; then those that are wanted later than the one to be begun. If that is not enough, the batch must wait -
   unless a client waits for it: then all goes that no client waits for, and it is begun in any case. Memory slows, it
   never blocks - but for those who do not take what they are sent.
6. What batches took longer than was expected is charged when it shows.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from teleloader_server.accounts import UNREAD_FACTOR, Account, Memory, too_many
from teleloader_server.pool import Blame
from teleloader_shared.codec import Address

Run = tuple[str, int]
"""One epoch of one loader: (key, epoch)."""

MAX_ATTEMPTS: Final = 3
"""How many workers a batch may kill before it becomes an error."""
CACHE_SHARE: Final = 1 / 8
"""How much of the memory budget may be filled before batches that nobody wants now are let go.

They are kept for consumers that come late. More would cost every other consumer: memory that is used again at once is
warm, and a large batch is written to fresh memory four times as slowly.
"""
MAX_BATCHES: Final = 16384
"""Batches that are kept at most, whatever their size: each is a memory mapping, and Linux allows 65,530 a process."""
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


class Urgency(enum.Enum):
    """The classes of rule 3."""

    WAITING = enum.auto()
    ASKED = enum.auto()
    AHEAD = enum.auto()


@dataclass(slots=True)
class Batch:
    """A batch that exists or is being made."""

    address: Address
    nbytes: int
    """Size of the frame; an estimate until it is ready."""
    consumer: Consumer
    """For whom it was begun."""
    charged: float
    """Seconds that were charged for it."""
    ready: bool = False
    failed: bool = False
    """It is an exception, which is told once and not kept: another try may go better."""


@dataclass(slots=True, eq=False)
class Ask:
    """A request for the batches [start, stop) that is being answered."""

    consumer: Consumer
    next: int
    """The batch that the client waits for."""
    stop: int
    cursor: int
    """All batches of the request before this one exist or are being made."""


@dataclass(slots=True, eq=False)
class Holder:
    """A principal, as far as this dispatcher goes."""

    account: Account
    served: float
    """Seconds of worker time spent for it."""
    level: float = 0.0
    """What the one of its consumers for which a batch was begun last had been served: who comes anew starts there."""
    consumers: int = 0
    scans_to_skip: int = 0
    was_begun: bool = False
    """Whether the batch that it wished for last was."""
    hogs: bool = False
    """Whether a worker had to be taken from it: it leaves one to the others."""


@dataclass(slots=True, eq=False)
class Consumer:
    """One client's passage through one run."""

    holder: Holder
    name: str
    run: Run
    position: int
    """It was sent all batches before this one, or does not want them."""
    served: float
    """Seconds of worker time spent for it."""
    last_seen: float
    sent_beyond: set[int] = field(default_factory=set)
    """What it was sent out of order, on another connection."""
    asks: list[Ask] = field(default_factory=list)
    sending: int = 0
    """Bytes of the answers that it is being sent."""
    hogs: bool = False
    """As of the principal."""
    ahead_cursor: int = 0
    ahead_stop: int = 0
    """Work ahead is wanted in [ahead_cursor, ahead_stop)."""

    def distance(self, k: int) -> int | None:
        """How many batches from now it wants batch k; None when it does not want it."""
        # an ask may stand before the position: another connection of the consumer asked for the same
        found = min((k - ask.next for ask in self.asks if ask.next <= k < ask.stop), default=None)
        if found is None and k >= self.position and k not in self.sent_beyond:
            found = k - self.position
        return found

    def wants(self, k: int) -> bool:
        """Whether it wants batch k."""
        ahead = k >= self.position and k not in self.sent_beyond
        return ahead or any(ask.next <= k < ask.stop for ask in self.asks)


@dataclass(slots=True)
class _RunState:
    batches: dict[int, Batch] = field(default_factory=dict)
    consumers: list[Consumer] = field(default_factory=list)

    def distance(self, k: int) -> int | None:
        """How many batches from now the first consumer wants batch k; None when nobody does."""
        return min((d for consumer in self.consumers if (d := consumer.distance(k)) is not None), default=None)

    def wants(self, k: int) -> bool:
        """Whether anybody wants batch k."""
        return any(consumer.wants(k) for consumer in self.consumers)


class Start(NamedTuple):
    """Have `worker` make a batch."""

    worker: int
    address: Address


class Evict(NamedTuple):
    """Let go of a finished batch."""

    address: Address


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
        self._memory = memory
        self._in_turn = in_turn
        self._used = 0
        self._count = 0
        self._runs: dict[Run, _RunState] = {}
        self._unwanted: dict[Address, None] = {}
        """Ready batches that nobody wants, the longest unused first."""
        self._deaths: dict[Address, int] = {}
        """Batches that a dead worker had: how often it was surely their fault."""
        self._told: dict[Address, None] = {}
        """Failures that were sent."""
        self._queues: dict[int, deque[Address]] = {}
        """What each worker has to do, in its order."""
        self._worn: set[int] = set()
        """Workers that finish what they have, and will be replaced then."""
        self._held_up: set[int] = set()
        """Workers whose batch takes long: nothing is given to them that would wait behind it."""
        self._consumers: dict[tuple[str, str, Run], Consumer] = {}
        """By their principal's name, their own, and what they go through."""
        self._active: dict[Consumer, None] = {}
        """Those for whom there may be something to begin; the many idle ones are not looked at."""
        self._holders: dict[str, Holder] = {}
        """The principals of the consumers that are known."""
        self._level = 0.0
        """What the principal for which a batch was begun last had been served: who comes anew starts there."""
        self._seconds: dict[str, float] = {}
        self._sizes: dict[str, float] = {}

    # -- what happened: consumers

    def ask(
        self, account: Account, name: str, run: Run, batches: int, start: int, stop: int, ahead: int, now: float
    ) -> Ask:
        """A client asks for [start, stop) of a run that has so many batches, and will want `ahead` more after them.

        Args:
            account: Its principal's.
            name: What the principal calls it.
            run: The run.
            batches: Batches of the run.
            start: The first batch.
            stop: The batch after the last.
            ahead: How many more will be wanted.
            now: When.

        Raises:
            ServerUnavailable: When the principal has too many consumers with open requests.
        """
        consumer = self._consumers.get((account.name, name, run))
        if consumer is None:
            if self._in_turn:  # a session's next epoch: what was made ahead in the one before is not wanted any more
                self._forget([other for other in self._consumers.values() if not other.asks and other.run != run])
            consumer = self._join(account, name, run, start, now)
        if consumer not in self._active:
            # time in which it wanted nothing is no credit, or it would shut the others out until it has caught up
            holder = consumer.holder
            holder.served = max(holder.served, self._level)
            consumer.served = max(consumer.served, holder.level)
        consumer.last_seen = now
        asked = Ask(consumer, start, stop, start)
        if not consumer.position <= start <= consumer.position + MAX_BEHIND:
            consumer.sent_beyond.clear()
            self._move(consumer, start)
        account.counts["asking"] += not consumer.asks
        consumer.asks.append(asked)
        for k in consumer.sent_beyond:
            if start <= k < stop:
                self._unwanted.pop(Address(*run, k), None)
        furthest = max(ask.stop for ask in consumer.asks)
        consumer.ahead_cursor = furthest
        consumer.ahead_stop = min(batches, furthest + ahead)
        self._active[consumer] = None
        return asked

    def sent(self, ask: Ask, now: float) -> None:
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
            self._move(consumer, position)
        self._let_go(consumer.run, (k,))
        batch = self._runs[consumer.run].batches.get(k)
        if batch is not None and batch.failed:
            self._told[batch.address] = None

    def close(self, ask: Ask) -> None:
        """The request is answered, or its client has gone."""
        ask.consumer.asks.remove(ask)
        ask.consumer.holder.account.counts["asking"] -= not ask.consumer.asks
        self._let_go(ask.consumer.run, range(ask.next, min(ask.stop, max(ask.cursor, ask.next + 1))))

    def forget_idle(self, now: float) -> list[Consumer]:
        """Forget the consumers that have not asked for so long that they have probably gone."""
        if self._in_turn:
            return []  # the session ends with its client; what is let go could not be made again at once
        gone = [c for c in self._consumers.values() if not c.asks and now - c.last_seen > FORGET_AFTER]
        self._forget(gone)
        return gone

    def _forget(self, gone: list[Consumer]) -> None:
        for consumer in gone:
            holder = consumer.holder
            del self._consumers[holder.account.name, consumer.name, consumer.run]
            self._active.pop(consumer, None)
            holder.consumers -= 1
            holder.account.counts["consumers"] -= 1
            if not holder.consumers:
                del self._holders[holder.account.name]
            self._runs[consumer.run].consumers.remove(consumer)
        # once for all of them: hundreds may go at a time, and each look is at every batch
        for run in {consumer.run for consumer in gone}:
            self._let_go(run, self._runs[run].batches)
            self._drop_empty(run)

    # -- what happened: workers

    def worker_ready(self, worker: int) -> None:
        """A worker, which has nothing to do, can take batches."""
        self._queues[worker] = deque()
        self._worn.discard(worker)
        self._held_up.discard(worker)

    def worker_worn(self, worker: int) -> None:
        """A worker finishes what it has and takes nothing more, until another is ready in its place."""
        self._worn.add(worker)

    def worker_held_up(self, worker: int, waiting: Iterable[Address]) -> bool:
        """What a worker makes takes long: what waits behind it is made by others, and it gets nothing more meanwhile.

        Returns:
            Whether that is so: where workers make batches in turn, no other one may make them.
        """
        if self._in_turn:
            return False
        self._held_up.add(worker)
        for address in waiting:
            self._queues[worker].remove(address)
            self._remove(address)
        return True

    def worker_goes_on(self, worker: int) -> None:
        """A worker that was held up can take batches again."""
        self._held_up.discard(worker)

    def worker_lost(self, worker: int, blame: Blame = "unknown") -> list[Address]:
        """A worker is gone. What it had is made again, but for a batch that has killed too many, or that hung.

        A batch that hung is not tried again: most likely it hangs each time, and each time costs the whole limit.

        Returns:
            The batches that are given up; `finished` must be told what stands in their place.
        """
        queue = self._queues.pop(worker, deque())
        given_up = []
        if queue and blame != "nobody":
            self._charge(self._batch(queue[0]), LOSS_SECONDS)
        for address in queue:
            if blame == "unknown":
                # Of several batches it cannot be told which one did it: from now on each is given to a worker that
                # has nothing else, and then it can.
                self._deaths[address] = self._deaths.get(address, 0) + (len(queue) == 1)
            if address == blame or self._deaths.get(address, 0) >= MAX_ATTEMPTS:
                given_up.append(address)
            else:
                self._remove(address)
        return given_up

    def finished(
        self, worker: int | None, address: Address, nbytes: int, seconds: float = 0.0, *, failed: bool = False
    ) -> None:
        """A batch is ready; `worker` is None for a failure that the server itself put in its place."""
        if worker is not None:
            self._queues[worker].remove(address)
            self._seconds[address.loader] = _smoothed(self._seconds.get(address.loader), seconds)
            self._sizes[address.loader] = _smoothed(self._sizes.get(address.loader), nbytes)
        self._deaths.pop(address, None)
        batch = self._batch(address)
        self._charge(batch, seconds)
        self._count_bytes(batch, nbytes - batch.nbytes)
        batch.nbytes = nbytes
        batch.ready = True
        batch.failed = failed
        self._let_go((address.loader, address.epoch), (address.batch,))

    def _charge(self, batch: Batch, seconds: float) -> None:
        """A batch has taken so long until now."""
        more = seconds - batch.charged
        if more > 0:
            batch.charged = seconds
            batch.consumer.served += more
            batch.consumer.holder.served += more

    def forget_loader(self, key: str) -> None:
        """What was learned of a loader that is not registered any more."""
        self._seconds.pop(key, None)
        self._sizes.pop(key, None)

    def release(self) -> None:
        """There will be no more batches: what they took is free for other dispatchers."""
        for state in self._runs.values():
            for batch in state.batches.values():
                self._count_bytes(batch, -batch.nbytes)
        for holder in self._holders.values():
            holder.account.counts["consumers"] -= holder.consumers

    # -- what can be asked

    def is_unfinished(self, address: Address) -> bool:
        """Whether the batch is being made."""
        run = self._runs.get((address.loader, address.epoch))
        batch = None if run is None else run.batches.get(address.batch)
        return batch is not None and not batch.ready

    @property
    def memory_used(self) -> int:
        """Bytes of the frames that are kept, and estimates of those that are being made."""
        return self._used

    def consumers(self) -> Iterable[Consumer]:
        """Those that are known now."""
        return self._consumers.values()

    def is_busy(self, worker: int) -> bool:
        """Whether the worker has a batch to make."""
        return bool(self._queues.get(worker))

    # -- what to do now

    def decide(self) -> list[Start | Evict]:
        """What is to be done, in this order."""
        actions: list[Start | Evict] = [self._evict(address) for address in list(self._told)]
        self._begin(actions)
        for consumer in [c for c in self._active if not c.asks and c.ahead_cursor >= c.ahead_stop]:
            del self._active[consumer]
        most = self._memory.budget * CACHE_SHARE
        while self._unwanted and (self._used > most or self._count > MAX_BATCHES * CACHE_SHARE):
            actions.append(self._evict(next(iter(self._unwanted))))
        return actions

    def _begin(self, actions: list[Start | Evict]) -> None:
        """Begin batches, each for the principal that was served least by then, while there are workers for them."""
        active: dict[Holder, list[Consumer]] = {}
        for consumer in self._active:
            active.setdefault(consumer.holder, []).append(consumer)
        wishes = {holder: self._wishes(consumers) for holder, consumers in active.items()}
        while wishes:
            holder = min(wishes, key=lambda holder: holder.served)
            wish = next(wishes[holder], None)
            if wish is None:
                del wishes[holder]
                continue
            urgency, consumer, k = wish
            address = Address(*consumer.run, k)
            worker = self._free_worker(address)
            if worker is None:
                return  # who is served next must not take the worker for which this one waits
            level, before = holder.served, consumer.served
            holder.was_begun = self._start(worker, address, consumer, urgency, actions)
            if holder.was_begun:
                self._level = max(self._level, level)
                holder.level = max(holder.level, before)

    def _wishes(self, consumers: list[Consumer]) -> Iterator[tuple[Urgency, Consumer, int]]:
        """What a principal wants next, as often as that is asked: class by class, whoever was served least first."""
        for urgency in Urgency:
            left = [consumer for consumer in consumers if self._next(consumer, urgency) is not None]
            while left:
                consumer = min(left, key=lambda consumer: consumer.served)
                k = self._next(consumer, urgency)
                if k is not None:
                    yield urgency, consumer, k
                if k is None or not consumer.holder.was_begun:
                    left.remove(consumer)

    def _start(
        self, worker: int, address: Address, consumer: Consumer, urgency: Urgency, actions: list[Start | Evict]
    ) -> bool:
        estimate = int(self._sizes.get(address.loader, 0))
        holder = consumer.holder
        if _reads_too_little(consumer) or self._takes_all_workers(consumer):
            return False
        if self._is_full(holder, estimate):
            distance = consumer.distance(address.batch) or 0
            waited_for = urgency is Urgency.WAITING
            actions += self._make_room(estimate, distance, holder, at_any_price=waited_for)
            if not waited_for and self._is_full(holder, estimate):
                return False
        batch = Batch(address, 0, consumer, 0.0)
        self._runs[consumer.run].batches[address.batch] = batch
        self._count_bytes(batch, estimate)
        batch.nbytes = estimate
        self._charge(batch, self._seconds.get(address.loader, 0.001))
        self._count += 1
        self._queues[worker].append(address)
        actions.append(Start(worker, address))
        return True

    def _next(self, consumer: Consumer, urgency: Urgency) -> int | None:
        """The consumer's first batch of that class that is not begun."""
        batches = self._runs[consumer.run].batches
        if self._in_turn and urgency is not Urgency.AHEAD:
            return self._next_in_turn(consumer, urgency)
        if urgency is Urgency.WAITING:
            return next((ask.next for ask in consumer.asks if ask.next < ask.stop and ask.next not in batches), None)
        if urgency is Urgency.ASKED:
            for ask in consumer.asks:
                stop = min(ask.stop, ask.next + MAX_ASKED)
                ask.cursor = _first_missing(batches, ask.cursor, stop)
                if ask.cursor < stop:
                    return ask.cursor
            return None
        while consumer.ahead_cursor < consumer.ahead_stop and (
            consumer.ahead_cursor in batches or consumer.distance(consumer.ahead_cursor) is None
        ):
            consumer.ahead_cursor += 1
        return consumer.ahead_cursor if consumer.ahead_cursor < consumer.ahead_stop else None

    def _next_in_turn(self, consumer: Consumer, urgency: Urgency) -> int | None:
        """The first batch that is not begun, whichever request it belongs to, so that none overtakes another."""
        batches = self._runs[consumer.run].batches
        for number, ask in enumerate(sorted(consumer.asks, key=lambda ask: ask.next)):
            ask.cursor = _first_missing(batches, ask.cursor, ask.stop)
            if ask.cursor < ask.stop:
                waited_for = number == 0 and ask.cursor == ask.next
                return ask.cursor if waited_for == (urgency is Urgency.WAITING) else None
        return None

    def _free_worker(self, address: Address) -> int | None:
        """The worker with the least to do, if it can take this batch besides."""
        suspect = address in self._deaths
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
        if queue is None or worker in self._worn or worker in self._held_up:
            return False
        return not queue or not (suspect or queue[-1] in self._deaths)

    # -- workers that are not to be had

    def relieve(self, working: Mapping[int, tuple[Address, float]]) -> int | None:
        """Charge for batches that are being made, and find a worker that must be taken from who has too many of them.

        That is when somebody waits and no worker makes anything for it, while another one has several at work on
        batches that take long, perhaps for ever. From then on that one leaves a worker to the others.

        Args:
            working: What workers make that have been at it for longer than others can be expected to wait, and the
                seconds for which they have.

        Returns:
            The worker, to be ended, through no fault of its batch.
        """
        at = {worker: self._batch(address) for worker, (address, _) in working.items()}
        for worker, batch in at.items():
            self._charge(batch, working[worker][1])
        if self._in_turn or not at or len(at) < len(self._queues):
            return None
        served = {batch.consumer for batch in at.values()}
        for consumer in self._active:
            if consumer in served or self._next(consumer, Urgency.WAITING) is None:
                continue
            others = any(batch.consumer.holder is not consumer.holder for batch in at.values())
            within = consumer.holder in {batch.consumer.holder for batch in at.values()}
            if within or not others:
                has: list[Holder | Consumer] = [batch.consumer for batch in at.values()]
            else:
                has = [batch.consumer.holder for batch in at.values()]
            most = max(has, key=has.count)
            if has.count(most) > 1:
                most.hogs = True
                return list(at)[has.index(most)]
        return None

    def _takes_all_workers(self, consumer: Consumer) -> bool:
        """Whether the batch would leave no worker to others, of one that must leave one."""
        holder = consumer.holder
        if not (consumer.hogs or holder.hogs):
            return False

        def is_mine(other: Consumer) -> bool:
            return other is consumer or (holder.hogs and other.holder is holder)

        lately = consumer.last_seen - LEAVE_SECONDS
        if all(is_mine(other) or not (other.asks or other.last_seen > lately) for other in self._consumers.values()):
            return False  # nobody is there to leave it to
        busy = [self._batch(queue[0]).consumer for queue in self._queues.values() if queue]
        return sum(map(is_mine, busy)) + 1 >= max(2, len(self._queues))

    # -- memory

    def _batch(self, address: Address) -> Batch:
        return self._runs[address.loader, address.epoch].batches[address.batch]

    def _count_bytes(self, batch: Batch, nbytes: int) -> None:
        """A batch takes so much more."""
        self._used += nbytes
        self._memory.used += nbytes
        batch.consumer.holder.account.frames += nbytes

    def _is_full(self, holder: Holder, nbytes: int) -> bool:
        return self._lacks(nbytes, None) or self._lacks(nbytes, holder.account)

    def _lacks(self, nbytes: int, account: Account | None) -> bool:
        """Whether there is no room for more in a principal's share of the memory; None stands for all of it."""
        if account is not None:
            return account.frames + nbytes > account.memory
        return self._memory.used + nbytes > self._memory.budget or self._count >= MAX_BATCHES

    def _make_room(self, nbytes: int, distance: int, holder: Holder, *, at_any_price: bool) -> list[Evict]:
        """Let go of what may go for a batch that is wanted `distance` batches from now, if that makes room for it.

        Returns:
            What was let go.
        """
        evicted: list[Evict] = []
        for account in (holder.account, None):
            if self._lacks(nbytes, account):
                evicted += self._make_room_of(account, nbytes, distance, holder, at_any_price=at_any_price)
                if not at_any_price and self._lacks(nbytes, account):
                    break
        return evicted

    def _make_room_of(
        self, account: Account | None, nbytes: int, distance: int, holder: Holder, *, at_any_price: bool
    ) -> list[Evict]:
        """Make room in a principal's share by its own batches, or in all of the memory by anybody's."""
        evicted: list[Evict] = []
        if at_any_price or self._would_fit(account, nbytes, []):
            evicted += self._evict_unwanted(account, nbytes)
            if not self._lacks(nbytes, account):
                return evicted
        # what follows looks at every batch: not each time that there is no room for work ahead, and for more than one
        if holder.scans_to_skip and not at_any_price:
            holder.scans_to_skip -= 1
            return evicted
        candidates = self._may_go(account, distance, at_any_price=at_any_price)
        later = [batch for _, batch in sorted(candidates, key=lambda pair: pair[0], reverse=True)]
        if not at_any_price and not self._would_fit(account, nbytes, later):
            holder.scans_to_skip = self._count // 16
            return evicted
        evicted += self._evict_unwanted(account, nbytes)
        used, budget = self._room(account)
        enough = min(0.9 * budget, budget - nbytes)
        for batch in later:
            if used <= enough and (account is not None or self._count < 0.9 * MAX_BATCHES):
                break
            used -= batch.nbytes
            evicted.append(self._evict(batch.address))
        return evicted

    def _room(self, account: Account | None) -> tuple[int, int]:
        """Bytes that are used, and that may be."""
        if account is not None:
            return account.frames, account.memory
        return self._memory.used, self._memory.budget

    def _evict_unwanted(self, account: Account | None, nbytes: int) -> list[Evict]:
        """Let go of what nobody wants, the longest unused first, until there is room."""
        evicted = []
        for address in list(self._unwanted):
            if not self._lacks(nbytes, account):
                break
            if self._is_of(account, address):
                evicted.append(self._evict(address))
        return evicted

    def _would_fit(self, account: Account | None, nbytes: int, later: list[Batch]) -> bool:
        """Whether there is room when all that nobody wants, and `later`, is let go."""
        unwanted = [self._batch(address) for address in self._unwanted if self._is_of(account, address)]
        going = [*unwanted, *later]
        used, budget = self._room(account)
        fits = used - sum(batch.nbytes for batch in going) + nbytes <= budget
        return fits and (account is not None or self._count - len(going) < MAX_BATCHES)

    def _is_of(self, account: Account | None, address: Address) -> bool:
        return account is None or self._batch(address).consumer.holder.account is account

    def _may_go(self, account: Account | None, distance: int, *, at_any_price: bool) -> Iterator[tuple[int, Batch]]:
        """Ready batches that are wanted later than `distance`; at any price, also those that no open request covers.

        Those are wanted by consumers that are not there at the moment, and may never be again.
        """
        if self._in_turn:
            return
        for state in self._runs.values():
            asks = [ask for consumer in state.consumers for ask in consumer.asks]
            for k, batch in state.batches.items():
                found = state.distance(k)
                if not batch.ready or found is None or not self._is_of(account, batch.address):
                    continue
                if found > distance or (at_any_price and not any(ask.next <= k < ask.stop for ask in asks)):
                    yield found, batch

    def _evict(self, address: Address) -> Evict:
        self._unwanted.pop(address, None)
        self._told.pop(address, None)
        self._remove(address)
        return Evict(address)

    def _remove(self, address: Address) -> None:
        """The batch does not exist any more: whoever wants it must come by it again."""
        run = (address.loader, address.epoch)
        state = self._runs[run]
        batch = state.batches.pop(address.batch)
        self._count_bytes(batch, -batch.nbytes)
        self._count -= 1
        for consumer in state.consumers:
            for ask in consumer.asks:
                if ask.next <= address.batch < ask.cursor:
                    ask.cursor = address.batch
            furthest = max((ask.stop for ask in consumer.asks), default=consumer.position)
            if furthest <= address.batch < consumer.ahead_cursor and consumer.distance(address.batch) is not None:
                consumer.ahead_cursor = address.batch
                self._active[consumer] = None
        self._drop_empty(run)

    # -- who wants what

    def _join(self, account: Account, name: str, run: Run, position: int, now: float) -> Consumer:
        if account.counts["consumers"] >= account.max_consumers:
            self._forget_some(account)
        holder = self._holders.get(account.name)
        if holder is None:
            holder = self._holders[account.name] = Holder(account, self._level)
        consumer = Consumer(holder, name, run, position, holder.level, now)
        holder.consumers += 1
        account.counts["consumers"] += 1
        self._consumers[account.name, name, run] = consumer
        state = self._runs.setdefault(run, _RunState())
        state.consumers.append(consumer)
        self._want_again(state)
        return consumer

    def _forget_some(self, account: Account) -> None:
        """Make room for a principal's next consumer: half of those that have no open request go, the idlest first."""
        mine = [c for c in self._consumers.values() if c.holder.account is account]
        idle = [c for c in mine if not c.asks]
        if not idle:
            if account.counts["asking"] < account.max_consumers:
                return  # those of other dispatchers are idle
            raise too_many(account, account.max_consumers, "consumers with open requests", "max_consumers")
        idle.sort(key=lambda consumer: consumer.last_seen)
        self._forget(idle[: len(idle) // 2 + 1])

    def _move(self, consumer: Consumer, position: int) -> None:
        """The consumer's next batch is `position` now."""
        before, consumer.position = consumer.position, position
        state = self._runs[consumer.run]
        if position < before:
            self._want_again(state)
        elif position - before <= len(state.batches):
            self._let_go(consumer.run, range(before, position))
        else:
            self._let_go(consumer.run, list(state.batches))

    def _want_again(self, state: _RunState) -> None:
        for k, batch in state.batches.items():
            if batch.address in self._unwanted and state.wants(k):
                del self._unwanted[batch.address]

    def _let_go(self, run: Run, numbers: Iterable[int]) -> None:
        """Mark those of these batches that nobody wants."""
        state = self._runs[run]
        for k in numbers:
            batch = state.batches.get(k)
            if batch is not None and batch.ready and not state.wants(k):
                self._unwanted[batch.address] = None

    def _drop_empty(self, run: Run) -> None:
        state = self._runs[run]
        if not state.batches and not state.consumers:
            del self._runs[run]
            for address in [a for a in self._deaths if (a.loader, a.epoch) == run]:
                del self._deaths[address]


def _reads_too_little(consumer: Consumer) -> bool:
    """Whether nothing is made for it until answers are taken: its own, or in the end those to its whole principal."""
    account = consumer.holder.account
    return account.unread > 1 and (consumer.sending > 0 or account.unread > UNREAD_FACTOR)


def _first_missing(batches: dict[int, Batch], cursor: int, stop: int) -> int:
    while cursor < stop and cursor in batches:
        cursor += 1
    return cursor


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else 0.8 * before + 0.2 * now
