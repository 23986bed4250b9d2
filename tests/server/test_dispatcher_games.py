"""Random games against a simple model of the dispatcher."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from teleloader_server.dispatch import dispatcher, store
from teleloader_server.dispatch.dispatcher import FORGET_AFTER, MAX_ATTEMPTS
from teleloader_server.dispatch.records import Epoch, PendingRange
from teleloader_shared.codec import Address
from tests.conftest import examples
from tests.server.dispatching import Service, containers, release_all

pytestmark = pytest.mark.usefixtures("dispatcher_figures")

EPOCH = 12
SMALL_LIMITS = [
    (store, "MAX_BATCHES", 9),
    (dispatcher, "MAX_REQUESTED", 4),
    (dispatcher, "MAX_BEHIND", 3),
    (dispatcher, "MAX_QUEUE", 3),
]
"""Limits that short games meet."""

pick = st.integers(0, 10**6)


class Game(RuleBasedStateMachine):
    """Clients, workers and time do as they like; the dispatcher decides now and then."""

    @initialize(budget=st.integers(1, 30), workers=st.integers(1, 3))
    def begin(self, budget: int, workers: int) -> None:
        """A memory of a few batches, some workers."""
        self.budget = budget
        self.service = Service(budget, 0)
        self.workers = range(workers)
        self.requests: list[PendingRange] = []
        self.due: dict[int, int] = {}
        """The batch that each open request must be sent next."""
        self.sizes: dict[str, float] = {}
        self.estimates: dict[Address, int] = {}
        self.deaths: Counter[Address] = Counter()
        """How often a batch died alone since it was made last."""
        self.recorded: dict[Address, int] = {}
        """The same, as far as nobody forgot it since."""
        self.patch = pytest.MonkeyPatch()
        for module, name, limit in SMALL_LIMITS:
            self.patch.setattr(module, name, limit)

    # -- clients

    @rule(
        who=st.sampled_from("abc"),
        run=st.tuples(st.sampled_from(["x", "y"]), st.integers(0, 1)),
        start=st.integers(0, EPOCH - 1),
        length=st.integers(1, 6),
        ahead=st.integers(0, 6),
    )
    def request(self, who: str, run: Epoch, start: int, length: int, ahead: int) -> None:
        """A client asks for some batches, anywhere."""
        stop = min(EPOCH, start + length)
        request = self.service.request(who, run, start, stop, ahead, batches=EPOCH)
        self.requests.append(request)
        self.due[id(request)] = start

    @precondition(lambda self: self.requests)
    @rule(pick=pick, most=st.integers(1, 3))
    def send(self, pick: int, most: int) -> None:
        """A client takes what is ready for it, or some of it."""
        self.send_ready(self.requests[pick % len(self.requests)], most)

    def send_ready(self, request: PendingRange, most: int = EPOCH) -> None:
        """Each batch comes once and in its place, as what it is or as an error."""
        for k in self.service.send_ready(request, most):
            assert k == self.due[id(request)]
            self.due[id(request)] += 1
        if request.next == request.stop:
            assert self.due[id(request)] == request.stop
            self.drop(request)

    @precondition(lambda self: self.requests)
    @rule(pick=pick)
    def hang_up(self, pick: int) -> None:
        """A client goes, whatever it has got."""
        self.drop(self.requests[pick % len(self.requests)])

    @rule(who=st.sampled_from("abc"))
    def leave(self, who: str) -> None:
        """A client goes with all that it has asked for."""
        for request in [request for request in self.requests if request.consumer.name == who]:
            self.drop(request)

    def drop(self, request: PendingRange) -> None:
        """The request is over."""
        self.requests.remove(request)
        del self.due[id(request)]
        self.service.dispatcher.close(request)

    # -- workers

    @rule(pick=pick)
    def worker_ready(self, pick: int) -> None:
        """A worker starts in an empty place."""
        worker = self.workers[pick % len(self.workers)]
        if worker not in self.service.queues:
            self.service.worker_ready(worker)

    @rule(pick=pick, nbytes=st.integers(1, 8), seconds=st.sampled_from([0.0, 0.001, 0.003, 0.1]))
    def finish(self, pick: int, nbytes: int, seconds: float) -> None:
        """A worker finishes its first batch."""
        busy = [worker for worker, queue in self.service.queues.items() if queue]
        if busy:
            self.done(busy[pick % len(busy)], nbytes, seconds)

    def done(self, worker: int, nbytes: int, seconds: float) -> None:
        """That worker does; one that was held up goes on, and one that is worn is replaced after its last."""
        address = self.service.finish(worker, nbytes, seconds)
        if worker in self.service.stalled:
            self.service.resume(worker)
        if worker in self.service.recycling and not self.service.queues[worker]:
            self.service.worker_ready(worker)
        before = self.sizes.get(address.loader)
        self.sizes[address.loader] = nbytes if before is None else 0.8 * before + 0.2 * nbytes
        self.forgive(address)

    def forgive(self, address: Address) -> None:
        """The batch is ready, whatever it is."""
        del self.estimates[address]
        self.deaths.pop(address, None)
        self.recorded.pop(address, None)

    @rule(pick=pick)
    def recycle(self, pick: int) -> None:
        """A worker gets nothing more: it is replaced when it has nothing left to do, if that is not so already."""
        if self.service.queues:
            worker = list(self.service.queues)[pick % len(self.service.queues)]
            self.service.recycle(worker)
            if not self.service.queues[worker]:
                self.service.worker_ready(worker)

    @rule(pick=pick, at_hand=pick)
    def stall(self, pick: int, at_hand: int) -> None:
        """A batch takes long: what the worker has besides is taken back, or all, if it had not begun any of it."""
        busy = [w for w, queue in self.service.queues.items() if queue and w not in self.service.stalled]
        if not busy:
            return
        worker = busy[pick % len(busy)]
        queue = self.service.queues[worker]
        started = [*queue, None][at_hand % (len(queue) + 1)]
        waiting = [address for address in queue if address != started]
        assert self.service.stall(worker, waiting)
        for address in waiting:
            del self.estimates[address]
        self.forget_suspects()

    @rule()
    def resume(self) -> None:
        """Workers that had begun nothing find that there is nothing left to do."""
        for worker, queue in self.service.queues.items():
            if worker in self.service.stalled and not queue:
                self.service.resume(worker)

    @rule(pick=pick)
    def lose_worker(self, pick: int) -> None:
        """A worker dies: a batch that died alone three times, and no other, is given up."""
        for worker in self.one_of_the_workers(pick):
            queue = list(self.service.queues[worker])
            for address in queue:
                self.deaths[address] += len(queue) == 1
                self.recorded[address] = self.recorded.get(address, 0) + (len(queue) == 1)
            failed = self.service.lose_worker(worker)
            self.check_given_up(queue, failed)
            assert all(self.deaths[address] >= MAX_ATTEMPTS for address in failed)

    @rule(pick=pick)
    def take(self, pick: int) -> None:
        """A worker is ended for what is not its batches' fault: none is given up, and none is suspected."""
        for worker in self.one_of_the_workers(pick):
            queue = list(self.service.queues[worker])
            assert self.service.lose_worker(worker, "nobody") == []
            self.check_given_up(queue, [])

    @rule(pick=pick, at_hand=pick)
    def hang(self, pick: int, at_hand: int) -> None:
        """A worker is killed because a batch hung: that one is given up at once, and no other is suspected."""
        for worker in self.one_of_the_workers(pick):
            queue = list(self.service.queues[worker])
            if queue:
                hung = queue[at_hand % len(queue)]
                failed = self.service.lose_worker(worker, hung)
                assert failed == [hung]
                self.check_given_up(queue, failed)

    def one_of_the_workers(self, pick: int) -> list[int]:
        """If there is any."""
        workers = list(self.service.queues)
        return workers[pick % len(workers) :][:1] if workers else []

    def check_given_up(self, queue: list[Address], failed: list[Address]) -> None:
        """Whatever a lost worker had is ready as a failure, or is not there any more."""
        for address in queue:
            if address in failed:
                self.forgive(address)
            else:
                assert self.recorded.get(address, 0) < MAX_ATTEMPTS
                del self.estimates[address]
        self.forget_suspects()

    # -- time

    @rule(seconds=st.sampled_from([1.0, FORGET_AFTER / 2, FORGET_AFTER + 1]))
    def pass_time(self, seconds: float) -> None:
        """Those that have gone are forgotten, and loaders that nobody uses."""
        before = {(c.name, c.epoch): (c.requests, c.last_seen) for c in self.service.dispatcher.consumers()}
        self.service.pass_time(seconds)
        after = {(c.name, c.epoch) for c in self.service.dispatcher.consumers()}
        for known, (requests, last_seen) in before.items():
            assert (known in after) == (bool(requests) or self.service.now - last_seen <= FORGET_AFTER)
        for loader in "xy":
            batches = [*self.service.running(), *self.service.ready]
            if not any(run[0] == loader for _, run in after) and not any(a.loader == loader for a in batches):
                self.service.loaders.pop(loader, None)
                self.sizes.pop(loader, None)
        self.forget_suspects()

    def forget_suspects(self) -> None:
        """A dispatcher may forget who died, when no consumer and no batch of the run is left."""
        known = {consumer.epoch for consumer in self.service.dispatcher.consumers()}
        known |= {(address.loader, address.epoch) for address in (*self.service.running(), *self.service.ready)}
        self.recorded = {a: count for a, count in self.recorded.items() if (a.loader, a.epoch) in known}

    # -- decisions

    @rule()
    def decide(self) -> None:
        """What is decided may be done (`Service.decide`), and nobody waits who could be served."""
        waited_for = {Address(*request.consumer.epoch, request.next) for request in self.requests}
        decided = self.service.decide()
        for address in decided:
            self.estimates[address] = int(self.sizes.get(address.loader, 0))
        if not waited_for.issuperset(decided):
            assert self.service.dispatcher.store.used <= self.budget, "only what is waited for is begun at any price"
        self.forget_suspects()
        for queue in self.service.queues.values():
            assert len(queue) <= dispatcher.MAX_QUEUE + 1
            assert len(queue) == 1 or not any(address in self.recorded for address in queue), "suspects are alone"
        started = {*self.service.ready, *self.service.running()}
        idle = any(
            not queue and worker not in self.service.recycling | self.service.stalled
            for worker, queue in self.service.queues.items()
        )
        waiting = [
            request for request in self.requests if Address(*request.consumer.epoch, request.next) not in started
        ]
        assert not idle or not waiting

    @invariant()
    def memory_is_counted(self) -> None:
        """What is kept, and the estimates of what is being made."""
        if hasattr(self, "service"):
            used = self.service.dispatcher.store.used
            assert used == sum(self.service.ready.values()) + sum(self.estimates.values())
            assert used >= 0
            assert set(self.estimates) == set(self.service.running())

    # -- the end

    def teardown(self) -> None:
        """When workers go on finishing, every client gets all that it asked for; then nothing is left."""
        try:
            if hasattr(self, "service"):
                self.drive_to_quiescence()
                self.leave_nothing()
        finally:
            if hasattr(self, "patch"):
                self.patch.undo()

    def drive_to_quiescence(self) -> None:
        """Each round every worker finishes what it has, and every client takes what is there."""
        for worker in self.workers:
            self.worker_ready(worker)
        wanted = sum(request.stop - request.next for request in self.requests)
        for _ in range(2 * wanted + 2):
            self.resume()
            self.decide()
            for worker, queue in self.service.queues.items():
                while queue:
                    self.done(worker, 2, 0.003)
            for request in list(self.requests):
                self.send_ready(request)
        assert self.requests == [], "somebody waits for ever"

    def leave_nothing(self) -> None:
        """No consumer, no batch, no worker: no record."""
        self.decide()
        for worker, queue in self.service.queues.items():
            while queue:
                self.done(worker, 1, 0.003)
        release_all(self.service)
        assert self.service.ready == {}
        assert self.service.dispatcher.store.used == 0
        left: dict[str, Any] = containers(self.service.dispatcher)
        assert left == {}


TestRandomGames = Game.TestCase
TestRandomGames.settings = settings(max_examples=examples(150), stateful_step_count=50)
