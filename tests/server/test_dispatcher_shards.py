"""Workers that compute batches in turn, as in torch: each batch belongs to one worker, and is expensive to recompute.

Each worker has a shard of an iterable-style dataset. For map-style datasets, loaders with private workers behave alike.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from teleloader_server.dispatch.dispatcher import FORGET_AFTER, MAX_ATTEMPTS
from teleloader_server.dispatch.records import Epoch, PendingRequest
from teleloader_shared.codec import BatchId
from tests.conftest import examples
from tests.server.dispatching import QUICK, TRAIN, Service, complete, numbers

pytestmark = pytest.mark.usefixtures("dispatcher_figures")

NEXT_EPOCH: Epoch = (TRAIN[0], TRAIN[1] + 1)


def sharded(shards: int, budget: int = 10**9) -> Service:
    """Create a service with one worker per shard."""
    return Service(budget, workers=shards, in_turn=shards)


def queued(service: Service) -> dict[int, list[int]]:
    """Return the batch numbers assigned to each worker."""
    return {worker: [batch_id.batch for batch_id in queue] for worker, queue in service.queues.items()}


# --- Assignment ---------------------------------------------------------------------------------------------------


def test_a_batch_goes_to_the_worker_of_its_shard() -> None:
    """Worker k mod S computes batch k, in ascending order, even if other workers are idle."""
    service = sharded(3)
    service.request("a", TRAIN, 0, 8)
    service.decide()
    assert queued(service) == {0: [0, 3, 6], 1: [1, 4, 7], 2: [2, 5]}


def test_slow_batches_of_a_shard_are_queued() -> None:
    """No other worker could compute them sooner."""
    service = sharded(2)
    service.warm_up(TRAIN, seconds=10.0)
    service.request("a", TRAIN, 0, 2, ahead=6)
    service.decide()
    assert queued(service) == {0: [0, 2, 4, 6], 1: [1, 3, 5, 7]}


def test_an_epoch_can_start_at_any_batch() -> None:
    """Batches are assigned to the workers of their shards."""
    service = sharded(3)
    request = service.request("a", TRAIN, 100, 104)
    service.decide()
    assert queued(service) == {0: [102], 1: [100, 103], 2: [101]}
    service.finish_all()
    assert service.send_ready(request) == [100, 101, 102, 103]


def test_consecutive_requests_are_computed_in_order() -> None:
    """Prefetched batches are not recomputed."""
    service = sharded(2)
    order: dict[int, list[int]] = {0: [], 1: []}
    for start in range(0, 40, 4):
        request = service.request("a", TRAIN, start, start + 4, ahead=3)
        while request.next < request.stop:
            service.decide()
            for worker, queue in service.queues.items():
                order[worker] += [batch_id.batch for batch_id in queue]
            service.finish_all(seconds=QUICK)
            service.send_ready(request)
        service.dispatcher.close(request)
    assert [made[:20] for made in order.values()] == [list(range(0, 40, 2)), list(range(1, 40, 2))]


def test_batches_of_two_connections_are_computed_in_ascending_order() -> None:
    """A worker must not get batch 3 before batch 1."""
    service = sharded(2)
    service.request("a", TRAIN, 0, 3)
    service.request("a", TRAIN, 3, 6)
    service.decide()
    assert queued(service) == {0: [0, 2, 4], 1: [1, 3, 5]}


def test_a_batch_waits_for_the_worker_of_its_shard() -> None:
    """The batch waits even if other workers are idle."""
    service = Service(workers=0, in_turn=2)
    request = service.request("a", TRAIN, 0, 4)
    service.worker_ready(1)
    service.decide()
    assert set(numbers(service.running())) <= {1, 3}
    service.worker_ready(0)
    complete(service, request)
    assert request.next == 4
    assert set(service.started.values()) == {1}


# --- Retention ----------------------------------------------------------------------------------------------------


def test_wanted_batches_of_shards_are_never_evicted() -> None:
    """Awaited batches exceed the memory budget instead."""
    service = sharded(2, budget=4)
    service.warm_up(TRAIN)
    service.request("a", TRAIN, 0, 4)
    while service.decide():
        service.finish_all()
    assert len(service.ready) == 4
    other = service.request("a", NEXT_EPOCH, 0, 2)
    assert complete(service, other) == [0, 1]
    assert numbers(service.evicted) == []


def test_a_full_memory_stops_work_ahead_until_something_was_taken() -> None:
    """Prefetching pauses while memory is full, and resumes when a client receives a batch."""
    service = sharded(2, budget=4)
    service.warm_up(TRAIN)
    request = service.request("a", TRAIN, 0, 4, ahead=20)
    while service.decide():
        service.finish_all()
    assert sorted(numbers(service.ready)) == [0, 1, 2, 3]
    assert service.send_ready(request, limit=2) == [0, 1]
    assert numbers(service.decide()) == [4, 5]
    assert service.dispatcher.store.used <= 4


def test_sent_batches_of_shards_are_evicted() -> None:
    """Sent batches are evicted when memory is needed."""
    service = sharded(1, budget=4)
    service.warm_up(TRAIN)
    request = service.request("a", TRAIN, 0, 100)
    for _ in range(100):
        service.decide()
        service.finish_all()
        service.send_ready(request)
        assert service.dispatcher.store.used <= 4
    assert request.next == 100
    assert set(service.started.values()) == {1}
    assert numbers(service.evicted) == sorted(numbers(service.evicted))


def test_prefetched_batches_of_shards_are_kept_during_a_long_pause() -> None:
    """Prefetched batches are kept, since otherwise workers would iterate their shards from the start."""
    service = sharded(2, budget=8)
    service.warm_up(TRAIN)
    request = service.request("a", TRAIN, 0, 2, ahead=6)
    while service.decide():
        service.finish_all()
    assert service.send_ready(request) == [0, 1]
    service.dispatcher.close(request)
    service.pass_time(5 * FORGET_AFTER)
    service.decide()
    again = service.request("a", TRAIN, 2, 8)
    assert service.send_ready(again) == [2, 3, 4, 5, 6, 7]


# --- Workers that die ---------------------------------------------------------------------------------------------


def test_batches_of_a_lost_worker_are_computed_by_its_replacement() -> None:
    """They are computed in ascending order; batches of other workers are not recomputed."""
    service = sharded(2)
    request = service.request("a", TRAIN, 0, 6)
    service.decide()
    service.finish(0)
    assert service.lose_worker(0) == []
    service.finish_all()
    service.worker_ready(0)
    for k in (2, 4):  # one after another, because either of them may be the cause
        assert numbers(service.decide()) == [k]
        service.finish_all()
    assert service.send_ready(request) == list(range(6))
    assert [service.started[BatchId(*TRAIN, k)] for k in range(6)] == [1, 1, 2, 1, 2, 1]


def test_a_batch_in_a_longer_queue_is_not_blamed() -> None:
    """The batch at the head of the queue may have been completed without a report."""
    service = sharded(1)
    request = service.request("a", TRAIN, 0, 3)
    service.decide()
    assert service.lose_worker() == []  # it had 0, 1 and 2
    for attempt in range(1, MAX_ATTEMPTS + 1):
        service.worker_ready(0)
        assert numbers(service.decide()) == [0]
        assert numbers(service.lose_worker()) == ([0] if attempt == MAX_ATTEMPTS else [])
    service.worker_ready(0)
    assert service.send_ready(request) == [0]
    assert complete(service, request) == [1, 2]


def test_a_suspect_batch_requires_an_empty_queue() -> None:
    """If the worker dies again, the cause is certain."""
    service = sharded(1)
    service.request("a", TRAIN, 0, 3)
    service.decide()
    service.lose_worker()
    service.worker_ready(0)
    service.decide()
    assert queued(service) == {0: [0]}


# --- Random games -------------------------------------------------------------------------------------------------

EPOCH = 40

pick = st.integers(0, 10**6)


class Game(RuleBasedStateMachine):
    """Client that loads an epoch over consecutive connections, while workers start and exit."""

    @initialize(shards=st.integers(1, 3), budget=st.integers(1, 20), start=st.integers(0, 9))
    def begin(self, shards: int, budget: int, start: int) -> None:
        """Create a dispatcher without workers and requests."""
        self.shards = shards
        self.service = Service(budget, 0, shards)
        self.position = start
        self.pending: PendingRequest | None = None
        self.made: dict[int, int] = {}
        """Last batch assigned to each running worker."""

    @rule(length=st.integers(1, 5), ahead=st.integers(0, 9))
    def request(self, length: int, ahead: int) -> None:
        """Request the next batches, after closing the previous request."""
        if self.pending is not None:
            self.service.dispatcher.close(self.pending)
        if self.position < EPOCH:
            stop = min(EPOCH, self.position + length)
            self.pending = self.service.request("a", TRAIN, self.position, stop, ahead, batches=EPOCH)

    @precondition(lambda self: self.pending is not None)
    @rule(most=st.integers(1, 4))
    def send(self, most: int) -> None:
        """Send ready batches to the client."""
        assert self.pending is not None
        for k in self.service.send_ready(self.pending, most):
            assert k == self.position
            self.position += 1

    @rule(pick=pick)
    def worker_ready(self, pick: int) -> None:
        """Start a worker with an unused ID."""
        if (worker := pick % self.shards) not in self.service.queues:
            self.service.worker_ready(worker)
            self.made.pop(worker, None)

    @rule(pick=pick, nbytes=st.integers(1, 8))
    def finish(self, pick: int, nbytes: int) -> None:
        """Complete the first batch of a worker."""
        busy = [worker for worker, queue in self.service.queues.items() if queue]
        if busy:
            self.service.finish(busy[pick % len(busy)], nbytes)

    @rule(pick=pick)
    def lose_worker(self, pick: int) -> None:
        """End a worker; only its current batch may fail."""
        if self.service.queues:
            worker = list(self.service.queues)[pick % len(self.service.queues)]
            first = self.service.queues[worker][:1]
            assert self.service.lose_worker(worker) in ([], first)

    @rule()
    def decide(self) -> None:
        """Assert that each worker gets batches of its shard in ascending order, and no wanted batch is evicted."""
        before = len(self.service.evicted)
        for batch_id in self.service.decide():
            worker = batch_id.batch % self.shards
            assert batch_id in self.service.queues[worker]
            assert batch_id.batch > self.made.get(worker, -1)
            self.made[worker] = batch_id.batch
        assert all(batch_id.batch < self.position for batch_id in self.service.evicted[before:])

    def teardown(self) -> None:
        """Assert that the client receives the rest of the epoch once all workers run."""
        if not hasattr(self, "service"):
            return
        for worker in range(self.shards):
            self.worker_ready(worker)
        while self.position < EPOCH:
            before = self.position
            self.request(3, 2)
            self.decide()
            for worker, queue in self.service.queues.items():
                while queue:
                    self.service.finish(worker, 2)
            self.send(3)
            assert self.position > before, "the client waits for ever"


TestRandomGames = Game.TestCase
TestRandomGames.settings = settings(max_examples=examples(100), stateful_step_count=50)
