"""Random operations, compared with a simple model of the dispatcher."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from teleloader_server.dispatch import dispatcher, store
from teleloader_server.dispatch.dispatcher import FORGET_AFTER, MAX_ATTEMPTS
from teleloader_server.dispatch.records import Epoch, PendingRequest
from teleloader_shared.codec import BatchId
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
"""Limits small enough to be reached by short games."""

pick = st.integers(0, 10**6)


class Game(RuleBasedStateMachine):
    """Clients, workers and time in random order; the dispatcher decides at random times."""

    @initialize(budget=st.integers(1, 30), workers=st.integers(1, 3))
    def begin(self, budget: int, workers: int) -> None:
        """Create a dispatcher with memory for a few batches, and IDs for a few workers."""
        self.budget = budget
        self.service = Service(budget, 0)
        self.workers = range(workers)
        self.requests: list[PendingRequest] = []
        self.due: dict[int, list[int]] = {}
        """Unsent batches in the expected order, by the request's `id`."""
        self.sizes: dict[str, float] = {}
        self.estimates: dict[BatchId, int] = {}
        self.deaths: Counter[BatchId] = Counter()
        """Deaths of workers that had only this batch, since the batch was last computed."""
        self.recorded: dict[BatchId, int] = {}
        """The same deaths, without those that the dispatcher may have forgotten."""
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
        gaps=st.sets(st.integers(1, EPOCH - 1)),
    )
    def request(self, who: str, run: Epoch, start: int, length: int, ahead: int, gaps: set[int]) -> None:
        """Add a request of a client for any batches, in one range or several."""
        gaps.discard(start)
        stop = min(EPOCH, start + length)
        request = self.service.request(who, run, start, stop, ahead, batches=EPOCH, without=gaps)
        self.requests.append(request)
        self.due[id(request)] = [k for k in range(start, stop) if k not in gaps]

    @precondition(lambda self: self.requests)
    @rule(pick=pick, most=st.integers(1, 3))
    def send(self, pick: int, most: int) -> None:
        """Send some ready batches of a request."""
        self.send_ready(self.requests[pick % len(self.requests)], most)

    def send_ready(self, request: PendingRequest, most: int = EPOCH) -> None:
        """Send ready batches, and assert that each batch is sent once and in order."""
        for k in self.service.send_ready(request, most):
            assert k == self.due[id(request)].pop(0)
        if request.next == request.stop:
            assert self.due[id(request)] == []
            self.drop(request)

    @precondition(lambda self: self.requests)
    @rule(pick=pick)
    def hang_up(self, pick: int) -> None:
        """Close a request, whether it is complete or not."""
        self.drop(self.requests[pick % len(self.requests)])

    @rule(who=st.sampled_from("abc"))
    def leave(self, who: str) -> None:
        """Close all requests of a client."""
        for request in [request for request in self.requests if request.consumer.name == who]:
            self.drop(request)

    def drop(self, request: PendingRequest) -> None:
        """Close a request and remove it from the model."""
        self.requests.remove(request)
        del self.due[id(request)]
        self.service.dispatcher.close(request)

    # -- workers

    @rule(pick=pick)
    def worker_ready(self, pick: int) -> None:
        """Start a worker with an unused ID."""
        worker = self.workers[pick % len(self.workers)]
        if worker not in self.service.queues:
            self.service.worker_ready(worker)

    @rule(pick=pick, nbytes=st.integers(1, 8), seconds=st.sampled_from([0.0, 0.001, 0.003, 0.1]))
    def finish(self, pick: int, nbytes: int, seconds: float) -> None:
        """Complete the first batch of a worker."""
        busy = [worker for worker, queue in self.service.queues.items() if queue]
        if busy:
            self.done(busy[pick % len(busy)], nbytes, seconds)

    def done(self, worker: int, nbytes: int, seconds: float) -> None:
        """Complete a batch; a stalled worker resumes, and a recycling worker is replaced after its last batch."""
        batch_id = self.service.finish(worker, nbytes, seconds)
        if worker in self.service.stalled:
            self.service.resume(worker)
        if worker in self.service.recycling and not self.service.queues[worker]:
            self.service.worker_ready(worker)
        before = self.sizes.get(batch_id.loader)
        self.sizes[batch_id.loader] = nbytes if before is None else 0.8 * before + 0.2 * nbytes
        self.forget_batch(batch_id)

    def forget_batch(self, batch_id: BatchId) -> None:
        """Remove estimate and deaths of a batch, because it or a failure in its place is ready."""
        del self.estimates[batch_id]
        self.deaths.pop(batch_id, None)
        self.recorded.pop(batch_id, None)

    @rule(pick=pick)
    def recycle(self, pick: int) -> None:
        """Mark a worker to be replaced once it has no batches."""
        if self.service.queues:
            worker = list(self.service.queues)[pick % len(self.service.queues)]
            self.service.recycle(worker)
            if not self.service.queues[worker]:
                self.service.worker_ready(worker)

    @rule(pick=pick, started_index=pick)
    def stall(self, pick: int, started_index: int) -> None:
        """Report a slow batch: the other batches of the worker are reassigned, or all if none has started."""
        busy = [w for w, queue in self.service.queues.items() if queue and w not in self.service.stalled]
        if not busy:
            return
        worker = busy[pick % len(busy)]
        queue = self.service.queues[worker]
        started = [*queue, None][started_index % (len(queue) + 1)]
        waiting = [batch_id for batch_id in queue if batch_id != started]
        assert self.service.stall(worker, waiting)
        for batch_id in waiting:
            del self.estimates[batch_id]
        self.forget_suspects()

    @rule()
    def resume(self) -> None:
        """Resume stalled workers without batches."""
        for worker, queue in self.service.queues.items():
            if worker in self.service.stalled and not queue:
                self.service.resume(worker)

    @rule(pick=pick)
    def lose_worker(self, pick: int) -> None:
        """End a worker: only a batch that was alone in `MAX_ATTEMPTS` deaths fails."""
        for worker in self.some_worker(pick):
            queue = list(self.service.queues[worker])
            for batch_id in queue:
                self.deaths[batch_id] += len(queue) == 1
                self.recorded[batch_id] = self.recorded.get(batch_id, 0) + (len(queue) == 1)
            failed = self.service.lose_worker(worker)
            self.check_lost(queue, failed)
            assert all(self.deaths[batch_id] >= MAX_ATTEMPTS for batch_id in failed)

    @rule(pick=pick)
    def take(self, pick: int) -> None:
        """End a worker through no fault of its batches: none fails, and none becomes suspect."""
        for worker in self.some_worker(pick):
            queue = list(self.service.queues[worker])
            assert self.service.lose_worker(worker, "nobody") == []
            self.check_lost(queue, [])

    @rule(pick=pick, started_index=pick)
    def hang(self, pick: int, started_index: int) -> None:
        """Kill a worker because a batch hung: this batch fails immediately, and no other becomes suspect."""
        for worker in self.some_worker(pick):
            queue = list(self.service.queues[worker])
            if queue:
                hung = queue[started_index % len(queue)]
                failed = self.service.lose_worker(worker, hung)
                assert failed == [hung]
                self.check_lost(queue, failed)

    def some_worker(self, pick: int) -> list[int]:
        """Return one of the workers, or an empty list without workers."""
        workers = list(self.service.queues)
        return workers[pick % len(workers) :][:1] if workers else []

    def check_lost(self, queue: list[BatchId], failed: list[BatchId]) -> None:
        """Assert that the batches of a lost worker have failed or were removed."""
        for batch_id in queue:
            if batch_id in failed:
                self.forget_batch(batch_id)
            else:
                assert self.recorded.get(batch_id, 0) < MAX_ATTEMPTS
                del self.estimates[batch_id]
        self.forget_suspects()

    # -- time

    @rule(seconds=st.sampled_from([1.0, FORGET_AFTER / 2, FORGET_AFTER + 1]))
    def pass_time(self, seconds: float) -> None:
        """Advance the time, and assert that exactly the idle consumers are removed."""
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
        """Drop the deaths of epochs without consumers and batches, which the dispatcher may have forgotten."""
        known = {consumer.epoch for consumer in self.service.dispatcher.consumers()}
        known |= {(batch_id.loader, batch_id.epoch) for batch_id in (*self.service.running(), *self.service.ready)}
        self.recorded = {a: count for a, count in self.recorded.items() if (a.loader, a.epoch) in known}

    # -- decisions

    @rule()
    def decide(self) -> None:
        """Assert that all decisions are allowed, and that no client waits while a worker is idle."""
        awaited = {BatchId(*request.consumer.epoch, request.next) for request in self.requests}
        decided = self.service.decide()
        for batch_id in decided:
            self.estimates[batch_id] = int(self.sizes.get(batch_id.loader, 0))
        if not awaited.issuperset(decided):
            assert self.service.dispatcher.store.used <= self.budget, "only awaited batches may exceed the budget"
        self.forget_suspects()
        for queue in self.service.queues.values():
            assert len(queue) <= dispatcher.MAX_QUEUE + 1
            assert len(queue) == 1 or not any(batch_id in self.recorded for batch_id in queue), (
                "a suspect batch requires an empty queue"
            )
        started = {*self.service.ready, *self.service.running()}
        idle = any(
            not queue and worker not in self.service.recycling | self.service.stalled
            for worker, queue in self.service.queues.items()
        )
        waiting = [
            request for request in self.requests if BatchId(*request.consumer.epoch, request.next) not in started
        ]
        assert not idle or not waiting

    @invariant()
    def memory_is_counted(self) -> None:
        """Assert that the used memory is the size of ready batches plus the estimates of batches in progress."""
        if hasattr(self, "service"):
            used = self.service.dispatcher.store.used
            assert used == sum(self.service.ready.values()) + sum(self.estimates.values())
            assert used >= 0
            assert set(self.estimates) == set(self.service.running())

    # -- the end

    def teardown(self) -> None:
        """Assert that all requests complete, and that no records remain afterwards."""
        try:
            if hasattr(self, "service"):
                self.complete_all()
                self.check_empty()
        finally:
            if hasattr(self, "patch"):
                self.patch.undo()

    def complete_all(self) -> None:
        """Complete and send batches in rounds until all requests are complete."""
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
        assert self.requests == [], "a request never completes"

    def check_empty(self) -> None:
        """Remove all consumers, batches and workers, and assert that no records remain."""
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
