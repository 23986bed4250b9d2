"""Scheduling order: no batch is computed twice, awaited batches go first, and consumers take turns."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from teleloader_server.dispatch import dispatcher
from teleloader_server.dispatch.dispatcher import MAX_REQUESTED
from teleloader_server.dispatch.records import Epoch
from teleloader_shared.codec import BatchId
from tests.server.dispatching import (
    BATCHES,
    OTHER,
    QUICK,
    SLOW,
    THIRD,
    TRAIN,
    Service,
    names,
    numbers,
)

pytestmark = pytest.mark.usefixtures("dispatcher_figures")

# --- Rule 1: batches are computed once ----------------------------------------------------------------------------


def test_equal_requests_share_one_batch() -> None:
    """A batch that two clients request is computed once."""
    service = Service(workers=2)
    requests = [service.request(who, TRAIN, 0, 4) for who in ("a", "b")]
    while service.decide():
        service.finish_all()
    assert [service.send_ready(request) for request in requests] == [[0, 1, 2, 3]] * 2
    assert set(service.started.values()) == {1}


def test_a_batch_in_progress_is_not_started_again() -> None:
    """Requests and prefetching of all consumers wait for it."""
    service = Service(workers=4)
    service.request("a", TRAIN, 0, 1)
    assert numbers(service.decide()) == [0]
    service.request("a", TRAIN, 0, 1, ahead=1)
    service.request("b", TRAIN, 0, 2)
    assert numbers(service.decide()) == [1]
    service.request("c", TRAIN, 0, 2)
    assert service.decide() == []


def test_batches_of_different_epochs_and_loaders_are_not_shared() -> None:
    """Requests share a batch only if loader, epoch and number are equal."""
    service = Service(workers=3)
    for run in (TRAIN, OTHER, ("train", 1)):
        service.request("a", run, 0, 1)
    assert {(a.loader, a.epoch) for a in service.decide()} == {TRAIN, OTHER, ("train", 1)}


def test_two_connections_of_a_consumer_share_batches() -> None:
    """A client may repeat a request before the server notices that its connection broke."""
    service = Service()
    first = service.request("a", TRAIN, 0, 3)
    second = service.request("a", TRAIN, 0, 3)
    while service.decide():
        service.finish_all()
        service.send_ready(second)
    assert (second.next, service.send_ready(first)) == (3, [0, 1, 2])
    assert set(service.started.values()) == {1}


# --- Rule 3: urgency ----------------------------------------------------------------------------------------------


def test_awaited_batches_go_first_and_prefetched_batches_last() -> None:
    """The order over all consumers is awaited, requested, prefetched batches."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    service.request("a", TRAIN, 0, 2, ahead=1)
    service.request("b", OTHER, 5, 7, ahead=1)
    order: list[str] = []
    while started := service.decide():
        order += names(started)
        service.finish()
    assert [sorted(order[place : place + 2]) for place in (0, 2, 4)] == [
        ["other 5", "train 0"], ["other 6", "train 1"], ["other 7", "train 2"],
    ]  # fmt: skip


def test_an_awaited_batch_goes_before_prefetched_batches() -> None:
    """The next available worker computes it, however many batches are to be prefetched."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    service.request("a", TRAIN, 0, 1, ahead=1000)
    for _ in range(10):
        service.decide()
        service.finish()
    service.request("b", OTHER, 0, 1)
    assert names(service.decide()) == ["other 0"]


def test_the_first_batch_of_each_open_request_is_awaited() -> None:
    """The first batches of both requests of a consumer go before their other batches."""
    service = Service()
    service.warm_up(TRAIN)
    service.request("a", TRAIN, 0, 3)
    service.request("a", TRAIN, 3, 6)
    order: list[int] = []
    while started := service.decide():
        order += numbers(started)
        service.finish()
    assert order == [0, 3, 1, 2, 4, 5]


def test_batches_of_a_long_request_are_limited_to_max_requested() -> None:
    """At most `MAX_REQUESTED` batches are computed beyond the awaited one."""
    service = Service()
    request = service.request("a", TRAIN, 0, BATCHES)
    while service.decide():
        service.finish_all()
    assert len(service.ready) == MAX_REQUESTED
    assert service.send_ready(request, limit=10) == list(range(10))
    while service.decide():
        service.finish_all()
    assert max(numbers(service.ready)) == 10 + MAX_REQUESTED - 1


def test_only_requested_and_prefetched_batches_are_computed() -> None:
    """Prefetching ends `ahead` batches after the request, and at the end of the epoch."""
    service = Service()
    service.request("a", TRAIN, 0, 2, batches=10)
    service.request("b", OTHER, 7, 8, ahead=5, batches=10)
    while service.decide():
        service.finish_all()
    assert sorted(numbers(service.ready)) == [0, 1]
    assert sorted(numbers(service.ready, OTHER)) == [7, 8, 9]


def test_prefetching_continues_between_two_requests() -> None:
    """Prefetching continues after the response to the first request is complete."""
    service = Service()
    service.warm_up(TRAIN)
    request = service.request("a", TRAIN, 0, 1, ahead=3)
    service.decide()
    service.finish()
    assert service.send_ready(request) == [0]
    service.dispatcher.close(request)
    while service.decide():
        service.finish_all()
    assert set(numbers(service.ready)) >= {1, 2, 3}


# --- Workers and their queues -------------------------------------------------------------------------------------


def test_batches_are_distributed_over_idle_workers() -> None:
    """No worker gets a second batch while another worker is idle."""
    service = Service(workers=4)
    service.request("a", TRAIN, 0, 4)
    service.decide()
    assert [len(queue) for queue in service.queues.values()] == [1] * 4


def test_no_batch_is_queued_behind_a_slow_batch() -> None:
    """Another worker may become idle sooner."""
    service = Service(workers=2)
    service.warm_up(TRAIN)
    service.request("a", TRAIN, 0, 100)
    service.decide()
    assert [len(queue) for queue in service.queues.values()] == [1, 1]


def test_fast_batches_are_queued() -> None:
    """A queue has up to a few milliseconds of work, so that workers do not wait for messages."""
    service = Service()
    service.warm_up(TRAIN, seconds=QUICK)
    service.request("a", TRAIN, 0, 100)
    service.decide()
    work = len(service.queues[0]) * QUICK
    assert dispatcher.QUEUE_SECONDS <= work <= dispatcher.QUEUE_SECONDS + QUICK


def test_the_queue_of_a_worker_is_limited() -> None:
    """The limit also applies to batches without measurable computing time."""
    service = Service()
    service.warm_up(TRAIN, seconds=0.0)
    service.request("a", TRAIN, 0, 200)
    service.decide()
    assert len(service.queues[0]) <= dispatcher.MAX_QUEUE + 1


def test_requests_wait_until_a_worker_is_ready() -> None:
    """No batch is started before, and none is omitted later."""
    service = Service(workers=0)
    request = service.request("a", TRAIN, 0, 2)
    assert service.decide() == []
    service.worker_ready(7)
    assert numbers(service.decide()) == [0, 1]
    service.finish_all()
    assert service.send_ready(request) == [0, 1]


def test_a_worker_with_an_assigned_batch_is_busy() -> None:
    """`is_busy` returns False for unknown workers."""
    service = Service()
    assert not service.dispatcher.is_busy(0)
    service.request("a", TRAIN, 0, 1)
    service.decide()
    assert service.dispatcher.is_busy(0)
    service.finish()
    assert not service.dispatcher.is_busy(0)
    assert not service.dispatcher.is_busy(12)


# --- Rule 4: fairness ---------------------------------------------------------------------------------------------


def begun_in_turns(
    service: Service, rounds: int, seconds: Callable[[BatchId], float] = lambda _: SLOW
) -> list[BatchId]:
    """Return the order in which one worker computes batches, if each is sent to its consumer immediately."""
    order: list[BatchId] = []
    for _ in range(rounds):
        order += service.decide()
        service.finish(seconds=seconds(service.queues[0][0]))
        for consumer in service.dispatcher.consumers():
            for request in consumer.requests:
                service.send_ready(request)
    return order


def test_equal_consumers_take_turns() -> None:
    """Two clients with the same demand have equal shares at any time."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    service.request("a", TRAIN, 0, 1000, ahead=10)
    service.request("b", OTHER, 0, 1000, ahead=10)
    order = begun_in_turns(service, 40)
    for end in range(len(order)):
        assert abs(len(numbers(order[:end], TRAIN)) - len(numbers(order[:end], OTHER))) <= 1


def test_a_greedy_consumer_does_not_delay_a_modest_one() -> None:
    """A consumer that requests single batches gets the next available worker for each."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    for connection in range(8):
        service.request("greedy", TRAIN, 1000 * connection, 1000 * connection + 1000, ahead=1000)
    service.decide()
    for k in range(20):
        modest = service.request("modest", OTHER, k, k + 1)
        waited = 0
        while not service.send_ready(modest):
            waited += service.finish_all()
            service.decide()
        # the greedy consumer's batch in progress, its own one, and a greedy one between if that consumer had less time
        assert waited <= 3
        service.dispatcher.close(modest)


def test_the_share_of_a_consumer_does_not_depend_on_its_open_requests() -> None:
    """Ten open requests get as much worker time as one."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    for start in range(0, 1000, 100):
        service.request("greedy", TRAIN, start, start + 100)
    service.request("modest", OTHER, 0, 1000)
    order = begun_in_turns(service, 60)
    assert abs(len(numbers(order, TRAIN)) - len(numbers(order, OTHER))) <= 1


def test_shares_are_measured_in_worker_time() -> None:
    """A loader with batches ten times as slow gets a tenth as many of them."""
    service = Service()
    service.warm_up(TRAIN, seconds=0.1)
    service.warm_up(OTHER, seconds=1.0)
    service.request("light", TRAIN, 0, 1000)
    service.request("heavy", OTHER, 0, 1000)
    order = begun_in_turns(service, 110, lambda batch_id: 0.1 if batch_id.loader == "train" else 1.0)
    assert abs(len(numbers(order, TRAIN)) - 100) <= 10
    assert abs(len(numbers(order, OTHER)) - 10) <= 1


def test_a_new_consumer_gets_the_same_share_as_earlier_ones() -> None:
    """Earlier worker time of others does not count for or against it."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    service.request("veteran", TRAIN, 0, BATCHES)
    begun_in_turns(service, 100)
    service.request("newcomer", OTHER, 0, 1000)
    order = begun_in_turns(service, 20)
    assert abs(len(numbers(order, TRAIN)) - len(numbers(order, OTHER))) <= 1


def test_a_rarely_active_consumer_does_not_determine_the_level_of_new_ones() -> None:
    """Otherwise each new consumer would block the others until it had caught up."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    begun_in_turns_once(service, "visitor", ("visited", 0))
    service.request("veteran", TRAIN, 0, BATCHES)
    begun_in_turns(service, 100)
    service.request("newcomer", OTHER, 0, 1000)
    order = begun_in_turns(service, 40)
    assert len(numbers(order, TRAIN)) >= 15


def test_a_paused_consumer_gets_no_credit_for_its_idle_time() -> None:
    """After the pause, it gets the same share as the others."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    begun_in_turns_once(service, "paused", OTHER)
    service.request("steady", TRAIN, 0, BATCHES)
    begun_in_turns(service, 100)
    service.request("paused", OTHER, 1, 1000)
    order = begun_in_turns(service, 40)
    assert len(numbers(order, TRAIN)) >= 15


def test_a_paused_consumer_gets_no_credit_for_batches_that_it_could_prefetch() -> None:
    """Others kept the worker busy, so that none of its batches was prefetched in the pause."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    service.request("steady", TRAIN, 0, BATCHES)
    paused = service.request("paused", OTHER, 0, 1, ahead=1000)
    begun_in_turns(service, 3)
    service.dispatcher.close(paused)
    begun_in_turns(service, 100)
    service.pass_time(10)
    service.request("paused", OTHER, 1, 1000)
    order = begun_in_turns(service, 40)
    assert len(numbers(order, TRAIN)) >= 15


def test_prefetching_gives_later_consumers_no_credit() -> None:
    """A consumer for which only batches are prefetched does not determine the level of new ones."""
    service = Service()
    service.warm_up(TRAIN, OTHER, THIRD)
    paused = service.request("paused", OTHER, 0, 1, ahead=1000)
    begun_in_turns(service, 1)
    service.dispatcher.close(paused)
    steady = service.request("steady", TRAIN, 0, 100)
    while steady.next < steady.stop:
        begun_in_turns(service, 1)
    service.dispatcher.close(steady)
    begun_in_turns(service, 5)
    service.request("newcomer", THIRD, 0, 1000)
    service.request("steady", TRAIN, 100, 1000)
    order = begun_in_turns(service, 40)
    assert len(numbers(order, TRAIN)) >= 15


def begun_in_turns_once(service: Service, who: str, run: Epoch) -> None:
    """Request a consumer's first batch, compute and send it, and close the request."""
    request = service.request(who, run, 0, 1)
    begun_in_turns(service, 1)
    service.dispatcher.close(request)


def test_a_prefetched_batch_that_does_not_fit_does_not_block_smaller_ones() -> None:
    """Memory too small for a batch of one consumer is used for another consumer's batches."""
    service = Service(budget=10, workers=4)
    service.warm_up(OTHER, nbytes=1)
    service.warm_up(TRAIN, nbytes=6)
    service.request("slow", TRAIN, 0, 50)  # it receives none of its computed batches
    assert numbers(service.decide()) == [0]
    service.finish_all(nbytes=6)
    service.request("quick", OTHER, 0, 50)
    assert numbers(service.decide(), OTHER) == [0, 1, 2, 3]


def test_loops_that_start_an_iteration_for_each_batch_leave_others_their_share() -> None:
    """A new name gives no advantage: an iteration continues with the worker time of its training loop."""
    service = Service()
    service.warm_up(TRAIN)
    epochs = iter(range(1, 1000))
    steady = service.request("steady", TRAIN, 0, 1000)
    short = {loop: service.request(f"{loop}#0", ("other", next(epochs)), 0, 1) for loop in ("n0", "n1", "n2")}
    served = dict.fromkeys(short, 0)
    for number in range(1, 80):
        service.decide()
        service.finish_all()
        service.send_ready(steady)
        for loop, request in short.items():
            if service.send_ready(request):
                served[loop] += 1
                service.dispatcher.close(request)
                short[loop] = service.request(f"{loop}#{number}", ("other", next(epochs)), 0, 1)
    assert all(abs(count - steady.next) <= 2 for count in served.values()), (served, steady.next)
