"""Eviction: full memory delays prefetching but never blocks awaited batches, and no records remain."""

from __future__ import annotations

import pytest

from teleloader_server.dispatch import dispatcher, store
from teleloader_server.dispatch.dispatcher import FORGET_AFTER
from teleloader_shared.codec import BatchId
from tests.server.dispatching import (
    BATCHES,
    OTHER,
    THIRD,
    TRAIN,
    Service,
    complete,
    containers,
    names,
    numbers,
    release_all,
)

pytestmark = pytest.mark.usefixtures("dispatcher_figures")

# --- Retention ----------------------------------------------------------------------------------------------------


def test_a_batch_is_kept_until_every_consumer_has_received_it() -> None:
    """If memory suffices, batches of the faster consumer are kept for the slower one."""
    service = Service(budget=100)
    slow, quick = service.request("slow", TRAIN, 0, 80), service.request("quick", TRAIN, 0, 80)
    assert complete(service, quick) == list(range(80))
    service.decide()
    assert len(service.ready) == 80
    assert complete(service, slow) == []


def test_full_memory_is_reported_while_it_leaves_a_worker_without_a_batch() -> None:
    """Not while all workers are busy, and not after memory was released."""
    service = Service(budget=10)
    pending = service.request("a", TRAIN, 0, 1, ahead=40)
    service.decide()
    seen = [service.dispatcher.lacks_memory]
    while service.running():
        service.finish()
        service.decide()
    seen.append(service.dispatcher.lacks_memory)
    service.send_ready(pending)
    service.decide()
    seen.append(service.dispatcher.lacks_memory)
    assert seen == [False, True, False]


def test_unwanted_batches_are_kept_up_to_the_cache_share() -> None:
    """The most recently used batches stay for consumers that start later."""
    service = Service(budget=100)
    complete(service, service.request("a", TRAIN, 0, 80))
    service.decide()
    assert sorted(numbers(service.ready)) == list(range(30, 80))


def test_a_late_consumer_gets_cached_batches_and_others_are_recomputed() -> None:
    """Cached batches are not computed again."""
    service = Service(budget=100)
    complete(service, service.request("a", TRAIN, 0, 80))
    service.decide()
    late = service.request("late", TRAIN, 0, 80)
    assert complete(service, late) == list(range(30))
    assert late.next == 80


def test_a_cached_batch_that_a_consumer_wants_is_not_evicted() -> None:
    """A cached batch that is requested is no longer unwanted, and is not evicted."""
    service = Service(budget=100)
    complete(service, service.request("a", TRAIN, 0, 40))
    service.request("late", TRAIN, 0, 40)
    complete(service, service.request("b", OTHER, 0, 200))
    assert sorted(numbers(service.ready)) == list(range(40))


def test_a_consumer_that_starts_over_gets_cached_batches() -> None:
    """Only evicted batches are recomputed."""
    service = Service(budget=100)
    complete(service, service.request("a", TRAIN, 0, 30))
    again = service.request("a", TRAIN, 10, 40)
    assert complete(service, again) == list(range(30, 40))
    assert again.next == 40


def test_a_batch_that_is_requested_again_is_wanted_again() -> None:
    """Batches are kept for a consumer that starts over, as for a new one."""
    service = Service(budget=100)
    complete(service, service.request("a", TRAIN, 0, 40))
    service.request("a", TRAIN, 0, 40)
    complete(service, service.request("b", OTHER, 0, 200))
    assert sorted(numbers(service.ready)) == list(range(40))


def test_starting_over_resets_the_record_of_sent_batches() -> None:
    """Batches that were sent out of order are kept until they are sent again."""
    service = Service(budget=30)
    first, second = service.request("a", TRAIN, 0, 10), service.request("a", TRAIN, 10, 20)
    while service.decide():
        service.finish_all()
    service.send_ready(first, limit=5)
    service.send_ready(second)
    for request in (first, second):
        service.dispatcher.close(request)
    again = service.request("a", TRAIN, 0, 20)
    assert service.send_ready(again, limit=10) == list(range(10))
    complete(service, service.request("b", OTHER, 0, 50))
    assert service.send_ready(again) == list(range(10, 20))
    assert [service.started[BatchId(*TRAIN, k)] for k in range(10, 20)] == [1] * 10


def test_batches_that_a_consumer_skipped_are_unwanted() -> None:
    """They are kept only up to the cache share."""
    service = Service(budget=100)
    left = service.request("a", TRAIN, 0, 90)
    while service.decide():
        service.finish_all()
    assert len(service.ready) == 90
    service.dispatcher.close(left)
    service.request("a", TRAIN, BATCHES - 1, BATCHES)
    service.decide()
    assert service.dispatcher.store.used <= 50


def test_a_client_continues_after_a_partial_response() -> None:
    """The client requests the remaining batches, and no batch is computed twice."""
    service = Service()
    first = service.request("a", TRAIN, 0, 6)
    service.decide()
    service.finish_all()
    sent = service.send_ready(first)
    service.dispatcher.close(first)
    assert 0 < len(sent) < 6
    rest = service.request("a", TRAIN, len(sent), 6)
    complete(service, rest)
    assert rest.next == 6
    assert [service.started[BatchId(*TRAIN, k)] for k in range(6)] == [1] * 6


def test_an_idle_consumer_is_removed_after_a_minute() -> None:
    """Batches wanted only by this consumer become unwanted, and its name can be reused."""
    service = Service(budget=100)
    request = service.request("a", TRAIN, 0, 90)
    while service.decide():
        service.finish_all()
    service.dispatcher.close(request)
    assert service.pass_time(FORGET_AFTER) == []
    assert service.decide() == []
    assert len(service.ready) == 90
    assert service.pass_time(0.5) == ["a"]
    service.decide()
    assert service.dispatcher.store.used == 50
    assert list(service.dispatcher.consumers()) == []


def test_the_idle_time_starts_at_the_last_sent_batch() -> None:
    """The idle time starts at the last sent batch if that was after the last request."""
    service = Service()
    request = service.request("a", TRAIN, 0, 2)
    service.decide()
    service.finish_all()
    service.pass_time(FORGET_AFTER)
    service.send_ready(request)
    service.dispatcher.close(request)
    assert service.pass_time(FORGET_AFTER) == []
    assert service.pass_time(0.5) == ["a"]


def test_a_consumer_with_an_open_request_is_not_removed() -> None:
    """The consumer stays however long it waits, or reads its response."""
    service = Service()
    request = service.request("a", TRAIN, 0, 1)
    assert service.pass_time(1000) == []
    service.dispatcher.close(request)
    assert service.pass_time(0) == ["a"]


def test_a_batch_completed_after_its_consumer_was_removed_is_cached() -> None:
    """The batch is cached as unwanted, and a later request uses it."""
    service = Service(budget=4)
    request = service.request("a", TRAIN, 0, 2)
    service.decide()
    service.dispatcher.close(request)
    assert service.pass_time(FORGET_AFTER + 1) == ["a"]
    service.finish_all()
    service.decide()
    assert numbers(service.ready) == [0, 1]
    assert complete(service, service.request("b", TRAIN, 0, 2)) == []


# --- Several open requests of one consumer ------------------------------------------------------------------------


def test_a_consumer_may_receive_batches_out_of_order() -> None:
    """A batch sent on one connection does not evict batches that another connection waits for."""
    service = Service(budget=20)
    slow, quick = service.request("a", TRAIN, 0, 10), service.request("a", TRAIN, 10, 20)
    while service.decide():
        service.finish_all()
    assert service.send_ready(quick) == list(range(10, 20))
    service.decide()
    assert set(numbers(service.ready)) >= set(range(10))
    assert service.consumer("a").position == 0
    assert service.send_ready(slow) == list(range(10))
    assert service.consumer("a").position == 20
    assert set(service.started.values()) == {1}


def test_two_connections_of_a_consumer_share_one_position() -> None:
    """Each batch is computed once, although memory holds only a few batches."""
    service = Service(budget=8, workers=2)
    service.warm_up(TRAIN)
    lanes = [service.request("a", TRAIN, 0, 2, ahead=2), service.request("a", TRAIN, 2, 4, ahead=2)]
    received: list[int] = []
    while len(received) < 100:
        service.decide()
        service.finish_all()
        received += service.send_ready(lanes[0])
        if lanes[0].next == lanes[0].stop:
            service.dispatcher.close(lanes.pop(0))
            stop = lanes[-1].stop
            lanes.append(service.request("a", TRAIN, stop, stop + 2, ahead=2))
    assert received == list(range(len(received)))
    assert [service.started[BatchId(*TRAIN, k)] for k in received] == [1] * len(received)
    assert service.dispatcher.store.used <= 8


def test_the_position_advances_past_batches_from_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that a consumer skips for long come from another server."""
    monkeypatch.setattr(dispatcher, "MAX_BEHIND", 20)
    service = Service()
    for k in range(0, 44, 2):
        complete(service, service.request("a", TRAIN, k, k + 1))
    assert service.consumer("a").position > 20


def test_prefetching_starts_after_all_requests_of_a_consumer() -> None:
    """Prefetching starts after the last batch of any open request."""
    service = Service()
    service.request("a", TRAIN, 10, 20)
    service.request("a", TRAIN, 5, 10, ahead=3)
    while service.decide():
        service.finish_all()
    assert sorted(numbers(service.ready)) == list(range(5, 23))


def test_a_sent_batch_is_not_recomputed_for_the_same_request() -> None:
    """This holds even if it was cached, sent at once, and evicted for the request's remaining batches."""
    service = Service(budget=8)
    service.warm_up(TRAIN)
    requests = [service.request("a", TRAIN, 0, 8), service.request("b", TRAIN, 0, 10)]
    while service.decide():
        service.finish()
    assert service.dispatcher.store.used == 8
    late = service.request("c", TRAIN, 0, 10)
    for request in (*requests, late):
        assert service.send_ready(request) == list(range(8))
    while service.decide():
        service.finish_all()
    assert service.send_ready(late) == [8, 9]
    assert set(service.started.values()) == {1}


def test_batches_sent_beyond_a_gap_are_evicted() -> None:
    """A consumer that gets every other batch from another server stays within the memory budget."""
    service = Service(budget=10)
    for k in range(0, 400, 2):
        complete(service, service.request("a", TRAIN, k, k + 1))
        assert service.dispatcher.store.used <= 10


def test_sent_batches_are_not_prefetched() -> None:
    """Batches that another connection of the consumer received are not prefetched, either."""
    service = Service(budget=4)
    service.warm_up(TRAIN)
    first, second = service.request("a", TRAIN, 0, 4), service.request("a", TRAIN, 4, 8)
    while second.next < second.stop:
        service.decide()
        service.finish_all()
        service.send_ready(second)
    service.dispatcher.close(second)
    service.send_ready(first)
    service.dispatcher.close(first)
    rest = service.request("a", TRAIN, first.next, 4, ahead=4)
    while service.decide():
        service.finish_all()
        service.send_ready(rest)
    assert [service.started[BatchId(*TRAIN, k)] for k in range(4, 8)] == [1] * 4


def test_a_batch_is_kept_for_a_second_connection_that_requested_it() -> None:
    """The batch is not recomputed for the slower connection."""
    service = Service(budget=10)
    slow, quick = service.request("a", TRAIN, 0, 20), service.request("a", TRAIN, 0, 20)
    service.request("b", OTHER, 0, 20)  # it fills the memory, and takes nothing
    for _ in range(100):
        service.decide()
        if service.queues[0]:
            service.finish()
        service.send_ready(quick)
    assert quick.next == 20
    assert service.started[BatchId(*TRAIN, slow.next)] <= 2


def test_a_batch_that_a_second_connection_requested_is_not_evicted_for_prefetching() -> None:
    """The batch stays however far it is from the consumer's position."""
    service = Service(budget=3)
    service.warm_up(TRAIN, OTHER)
    service.request("a", TRAIN, 0, 1)
    service.request("a", TRAIN, 100, 101)
    while service.decide():
        service.finish_all()
    assert set(numbers(service.ready)) == {0, 100}
    service.request("b", OTHER, 0, 5)
    while service.decide():
        service.finish_all()
    assert service.started[BatchId(*TRAIN, 100)] == 1


# --- Rule 5: memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7])
def test_unwanted_batches_are_evicted_first_in_lru_order(size: int) -> None:
    """Wanted batches are evicted only when no unwanted batches are left."""
    service = Service(budget=8)
    service.warm_up(TRAIN, OTHER)
    service.warm_up(THIRD, nbytes=size)
    complete(service, service.request("a", TRAIN, 0, 2))
    complete(service, service.request("a", OTHER, 0, 2))
    complete(service, service.request("b", TRAIN, 1, 2))  # uses train 1 again
    service.request("c", THIRD, 0, 20)
    while service.decide():
        service.finish_all(nbytes=size)
    assert names(service.evicted) == ["train 0", "other 0", "other 1", "train 1"]
    assert len(service.ready) == 8 // size


def test_batches_needed_last_are_evicted_for_a_batch_needed_sooner() -> None:
    """If all batches are wanted, those needed last are evicted."""
    service = Service(budget=10)
    service.warm_up(TRAIN, OTHER)
    service.request("a", TRAIN, 0, 10)
    while service.decide():
        service.finish_all()
    assert len(service.ready) == 10
    service.request("b", OTHER, 0, 1)
    assert numbers(service.decide(), OTHER) == [0]
    assert numbers(service.evicted) == [9], "and no more than that"


def test_batches_needed_equally_soon_are_not_evicted_for_each_other() -> None:
    """Otherwise consumers at the same distance would cause each other's batches to be recomputed."""
    service = Service(budget=7)
    service.warm_up(TRAIN, OTHER, THIRD)
    for run in (TRAIN, OTHER, THIRD):
        service.request("a", run, 0, 5)
    for _ in range(60):
        service.decide()
        service.finish_all()
    assert max(service.started.values()) <= 2


def test_prefetching_waits_if_all_batches_in_memory_are_needed_sooner() -> None:
    """Prefetching does not evict batches that are needed sooner."""
    service = Service(budget=10)
    service.warm_up(TRAIN, OTHER)
    service.request("a", TRAIN, 0, 20)
    service.request("b", OTHER, 0, 20)
    while service.decide():
        service.finish_all()
    assert service.dispatcher.store.used == 10
    assert service.evicted == []
    assert sorted(names(service.ready)) == sorted([f"{name} {k}" for name in ("train", "other") for k in range(5)])


def test_a_batch_in_progress_is_never_evicted() -> None:
    """Only ready batches are evicted: the first batch of a new consumer may exceed the budget."""
    service = Service(budget=3, workers=4)
    service.warm_up(TRAIN, OTHER)
    service.request("a", TRAIN, 0, 9)
    assert numbers(service.decide()) == [0, 1, 2]
    service.request("b", OTHER, 0, 9)
    assert names(service.decide()) == ["other 0"]
    assert service.evicted == []
    assert service.dispatcher.store.used == 4


def test_awaited_batches_are_computed_even_if_they_exceed_the_budget() -> None:
    """One batch for each waiting client may exceed the budget."""
    service = Service(budget=1, workers=3)
    service.warm_up(TRAIN, OTHER, nbytes=100)
    requests = [
        service.request("a", TRAIN, 0, 20),
        service.request("a", TRAIN, 20, 40),
        service.request("b", OTHER, 0, 20, ahead=9),
    ]
    for _ in range(20):
        assert sorted(names(service.decide())) == sorted(f"{a.consumer.epoch[0]} {a.next}" for a in requests)
        service.finish_all(nbytes=100)
        assert [len(service.send_ready(request)) for request in requests] == [1, 1, 1]
    assert [request.next for request in requests] == [20, 40, 20]


def test_a_full_memory_stops_work_ahead_until_something_was_taken() -> None:
    """Prefetching pauses while memory is full, and resumes when a client receives a batch."""
    service = Service(budget=5)
    service.warm_up(TRAIN)
    request = service.request("a", TRAIN, 0, 100)
    while service.decide():
        service.finish_all()
    assert sorted(numbers(service.ready)) == [0, 1, 2, 3, 4]
    assert service.send_ready(request, limit=2) == [0, 1]
    assert numbers(service.decide()) == [5]


def test_memory_is_counted_by_estimates_until_sizes_are_known() -> None:
    """A batch in progress counts with the recent size of its loader's batches, then with its own size."""
    service = Service(budget=1000, workers=2)
    service.warm_up(TRAIN, nbytes=40)
    service.request("a", TRAIN, 0, 2)
    service.decide()
    assert service.dispatcher.store.used == 80
    service.finish(0, nbytes=10)
    assert service.dispatcher.store.used == 10 + 40
    service.lose_worker(1)
    assert service.dispatcher.store.used == 10


def test_the_number_of_batches_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be a memory mapping: beyond `MAX_BATCHES` only awaited batches are started."""
    monkeypatch.setattr(store, "MAX_BATCHES", 20)
    service = Service()
    request = service.request("a", TRAIN, 0, 100)
    while service.decide():
        service.finish_all()
    assert len(service.ready) == 20
    service.request("b", OTHER, 0, 1)
    service.decide()
    service.finish_all()
    assert len(service.ready) <= 20
    assert complete(service, request)
    assert request.next == 100
    service.request("c", THIRD, 0, 100)
    while service.decide():
        service.finish_all()
    assert len(numbers(service.ready, THIRD)) > 10, "those that are gone do not count"


def test_evicted_prefetched_batches_are_recomputed_when_memory_is_free() -> None:
    """Evicted batches are recomputed without a new request."""
    service = Service(budget=10)
    service.warm_up(TRAIN, OTHER)
    request = service.request("a", TRAIN, 0, 1, ahead=9)
    while service.decide():
        service.finish_all()
    service.send_ready(request)
    service.dispatcher.close(request)
    assert sorted(numbers(service.ready)) == list(range(10))
    other = service.request("b", OTHER, 0, 4)
    for _ in range(4):
        service.decide()
        service.finish_all()
    assert 9 not in numbers(service.ready)
    service.send_ready(other)
    service.dispatcher.close(other)
    while service.decide():
        service.finish_all()
    assert sorted(numbers(service.ready))[-9:] == list(range(1, 10))


def test_nothing_is_evicted_if_the_new_batch_would_not_fit() -> None:
    """Otherwise other consumers' batches would be recomputed for nothing."""
    service = Service(budget=20, workers=2)
    service.warm_up(OTHER, nbytes=1)
    service.warm_up(TRAIN, nbytes=12)
    service.request("large", TRAIN, 0, 1, ahead=1)  # it takes nothing: its second batch never has room
    service.request("small", OTHER, 0, 8)
    for _ in range(50):
        service.decide()
        for worker, queue in service.queues.items():
            if queue:
                service.finish(worker, nbytes=12 if queue[0].loader == "train" else 1)
    assert max(service.started.values()) == 1


# --- No leak ------------------------------------------------------------------------------------------------------


def test_no_records_remain_after_all_consumers_were_removed() -> None:
    """The dispatcher uses no memory, and its containers are empty."""
    service = Service(budget=10, workers=2)
    for who, run, start in (("a", TRAIN, 0), ("b", TRAIN, 5), ("a", OTHER, 3), ("a", TRAIN, 50)):
        request = service.request(who, run, start, start + 9, ahead=9)
        for _ in range(4):
            service.decide()
            service.finish_all()
            service.send_ready(request)
    release_all(service)
    assert service.ready == {}
    assert service.dispatcher.store.used == 0
    assert containers(service.dispatcher) == {}


def test_records_of_suspect_batches_are_removed_with_their_consumers() -> None:
    """A batch whose worker died is forgotten if no consumer wants it."""
    service = Service()
    request = service.request("a", TRAIN, 0, 1)
    service.decide()
    service.dispatcher.close(request)
    service.lose_worker()
    release_all(service)
    assert containers(service.dispatcher) == {}
