"""Which batch is begun next, by whom and for whom: nothing twice, the urgent first, each consumer in its turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from teleloader_server.dispatch import dispatcher
from teleloader_server.dispatch.dispatcher import MAX_REQUESTED
from teleloader_server.dispatch.records import Epoch
from teleloader_shared.codec import Address
from tests.server.dispatching import (
    BATCHES,
    OTHER,
    QUICK,
    SLOW,
    TRAIN,
    Service,
    names,
    numbers,
)

pytestmark = pytest.mark.usefixtures("dispatcher_figures")

# --- Rule 1: nothing is made twice --------------------------------------------------------------------------------


def test_equal_asks_share_one_batch() -> None:
    """Two clients that ask for the same batches are answered with batches that were made once."""
    service = Service(workers=2)
    requests = [service.request(who, TRAIN, 0, 4) for who in ("a", "b")]
    while service.decide():
        service.finish_all()
    assert [service.send_ready(request) for request in requests] == [[0, 1, 2, 3]] * 2
    assert set(service.started.values()) == {1}


def test_a_batch_in_the_making_is_not_begun_again() -> None:
    """An ask, work ahead and another consumer's ask all wait for the one that is being made."""
    service = Service(workers=4)
    service.request("a", TRAIN, 0, 1)
    assert numbers(service.decide()) == [0]
    service.request("a", TRAIN, 0, 1, ahead=1)
    service.request("b", TRAIN, 0, 2)
    assert numbers(service.decide()) == [1]
    service.request("c", TRAIN, 0, 2)
    assert service.decide() == []


def test_different_epochs_and_loaders_are_different_batches() -> None:
    """Only the whole address makes two asks equal."""
    service = Service(workers=3)
    for run in (TRAIN, OTHER, ("train", 1)):
        service.request("a", run, 0, 1)
    assert {(a.loader, a.epoch) for a in service.decide()} == {TRAIN, OTHER, ("train", 1)}


def test_two_connections_of_a_consumer_share_what_they_ask_for() -> None:
    """A client that asks again before its broken connection is noticed costs nothing."""
    service = Service()
    first = service.request("a", TRAIN, 0, 3)
    second = service.request("a", TRAIN, 0, 3)
    while service.decide():
        service.finish_all()
        service.send_ready(second)
    assert (second.next, service.send_ready(first)) == (3, [0, 1, 2])
    assert set(service.started.values()) == {1}


# --- Rule 3: urgency ----------------------------------------------------------------------------------------------


def test_what_a_client_waits_for_goes_first_and_work_ahead_last() -> None:
    """Waited-for, asked for besides, ahead: in this order, over all consumers."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    service.request("a", TRAIN, 0, 2, ahead=1)
    service.request("b", OTHER, 5, 7, ahead=1)
    order: list[str] = []
    while started := service.decide():
        order += names(started)
        service.finish()
    assert order == ["train 0", "other 5", "train 1", "other 6", "train 2", "other 7"]


def test_a_client_that_comes_to_wait_overtakes_work_ahead() -> None:
    """However much is wanted ahead, the next free worker takes what somebody waits for."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    service.request("a", TRAIN, 0, 1, ahead=1000)
    for _ in range(10):
        service.decide()
        service.finish()
    service.request("b", OTHER, 0, 1)
    assert names(service.decide()) == ["other 0"]


def test_each_connection_waits_for_its_first_batch() -> None:
    """Of two open asks of a consumer, the first batches of both are waited for; the rest comes after them."""
    service = Service()
    service.warm_up(TRAIN)
    service.request("a", TRAIN, 0, 3)
    service.request("a", TRAIN, 3, 6)
    order: list[int] = []
    while started := service.decide():
        order += numbers(started)
        service.finish()
    assert order == [0, 3, 1, 2, 4, 5]


def test_a_request_without_end_is_worked_on_so_far_and_no_further() -> None:
    """An ask for a whole epoch takes no more than MAX_REQUESTED batches beyond the one that its client waits for."""
    service = Service()
    request = service.request("a", TRAIN, 0, BATCHES)
    while service.decide():
        service.finish_all()
    assert len(service.ready) == MAX_REQUESTED
    assert service.send_ready(request, limit=10) == list(range(10))
    while service.decide():
        service.finish_all()
    assert max(numbers(service.ready)) == 10 + MAX_REQUESTED - 1


def test_nothing_is_made_that_nobody_asked_for() -> None:
    """Without `ahead` work ends with the request; with it, so many batches later, and at the end of the epoch."""
    service = Service()
    service.request("a", TRAIN, 0, 2, batches=10)
    service.request("b", OTHER, 7, 8, ahead=5, batches=10)
    while service.decide():
        service.finish_all()
    assert sorted(numbers(service.ready)) == [0, 1]
    assert sorted(numbers(service.ready, OTHER)) == [7, 8, 9]


def test_work_goes_on_ahead_when_the_answer_is_complete() -> None:
    """Between two requests of a client, its work ahead is done."""
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


def test_batches_are_spread_over_the_idle_workers() -> None:
    """No worker is given a second batch while another has none."""
    service = Service(workers=4)
    service.request("a", TRAIN, 0, 4)
    service.decide()
    assert [len(queue) for queue in service.queues.values()] == [1] * 4


def test_a_worker_with_a_long_batch_is_given_no_other() -> None:
    """Of batches that take long, each waits for an idle worker: another one may be idle sooner."""
    service = Service(workers=2)
    service.warm_up(TRAIN)
    service.request("a", TRAIN, 0, 100)
    service.decide()
    assert [len(queue) for queue in service.queues.values()] == [1, 1]


def test_a_worker_is_given_several_short_batches() -> None:
    """Short batches are queued to a few milliseconds of work, so that a worker does not wait for messages."""
    service = Service()
    service.warm_up(TRAIN, seconds=QUICK)
    service.request("a", TRAIN, 0, 100)
    service.decide()
    work = len(service.queues[0]) * QUICK
    assert dispatcher.QUEUE_SECONDS <= work <= dispatcher.QUEUE_SECONDS + QUICK


def test_the_shortest_batches_are_queued_to_a_limit() -> None:
    """A batch of no measurable time does not make the queue endless."""
    service = Service()
    service.warm_up(TRAIN, seconds=0.0)
    service.request("a", TRAIN, 0, 200)
    service.decide()
    assert len(service.queues[0]) <= dispatcher.MAX_QUEUE + 1


def test_without_workers_nothing_is_begun_and_nothing_is_lost() -> None:
    """Asks wait until a worker is ready."""
    service = Service(workers=0)
    request = service.request("a", TRAIN, 0, 2)
    assert service.decide() == []
    service.worker_ready(7)
    assert numbers(service.decide()) == [0, 1]
    service.finish_all()
    assert service.send_ready(request) == [0, 1]


def test_a_worker_is_busy_while_it_has_a_batch() -> None:
    """`is_busy` is true from the start of a batch to its end, and false of a worker that there is not."""
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
    service: Service, rounds: int, seconds: Callable[[Address], float] = lambda _: SLOW
) -> list[Address]:
    """One worker, its batches one after another, each sent to whoever asked for it at once."""
    order: list[Address] = []
    for _ in range(rounds):
        order += service.decide()
        service.finish(seconds=seconds(service.queues[0][0]))
        for consumer in service.dispatcher.consumers():
            for request in consumer.requests:
                service.send_ready(request)
    return order


def test_equal_consumers_take_turns() -> None:
    """Two clients that want as much as they can get have the same share at any time."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    service.request("a", TRAIN, 0, 1000, ahead=10)
    service.request("b", OTHER, 0, 1000, ahead=10)
    order = begun_in_turns(service, 40)
    for end in range(len(order)):
        assert abs(len(numbers(order[:end], TRAIN)) - len(numbers(order[:end], OTHER))) <= 1


def test_a_greedy_consumer_does_not_delay_a_modest_one() -> None:
    """Who asks for one batch at a time has each begun by the first worker that is free, whatever others ask for."""
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
        # the greedy one's batch that was under way, its own, and a greedy one between them when that was served less
        assert waited <= 3
        service.dispatcher.close(modest)


def test_many_connections_are_not_many_shares() -> None:
    """A consumer with ten open asks gets what one with a single ask gets."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    for start in range(0, 1000, 100):
        service.request("greedy", TRAIN, start, start + 100)
    service.request("modest", OTHER, 0, 1000)
    order = begun_in_turns(service, 60)
    assert abs(len(numbers(order, TRAIN)) - len(numbers(order, OTHER))) <= 1


def test_shares_are_counted_in_time_not_in_batches() -> None:
    """A loader whose batches take ten times as long has a tenth as many of them made."""
    service = Service()
    service.warm_up(TRAIN, seconds=0.1)
    service.warm_up(OTHER, seconds=1.0)
    service.request("light", TRAIN, 0, 1000)
    service.request("heavy", OTHER, 0, 1000)
    order = begun_in_turns(service, 110, lambda address: 0.1 if address.loader == "train" else 1.0)
    assert abs(len(numbers(order, TRAIN)) - 100) <= 10
    assert abs(len(numbers(order, OTHER)) - 10) <= 1


def test_a_newcomer_takes_turns_with_those_who_were_there() -> None:
    """It neither waits for the past of the others nor makes up for its own."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    service.request("veteran", TRAIN, 0, BATCHES)
    begun_in_turns(service, 100)
    service.request("newcomer", OTHER, 0, 1000)
    order = begun_in_turns(service, 20)
    assert abs(len(numbers(order, TRAIN)) - len(numbers(order, OTHER))) <= 1


def test_one_who_hardly_asks_does_not_set_the_level_for_newcomers() -> None:
    """A client that looks at one batch a minute must not make each newcomer shut out the one who trains."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    begun_in_turns_once(service, "visitor", ("visited", 0))
    service.request("veteran", TRAIN, 0, BATCHES)
    begun_in_turns(service, 100)
    service.request("newcomer", OTHER, 0, 1000)
    order = begun_in_turns(service, 40)
    assert len(numbers(order, TRAIN)) >= 15


def test_a_pause_is_no_credit() -> None:
    """Who comes back after a pause shares with the others from then on; it does not shut them out to catch up."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    begun_in_turns_once(service, "paused", OTHER)
    service.request("steady", TRAIN, 0, BATCHES)
    begun_in_turns(service, 100)
    service.request("paused", OTHER, 1, 1000)
    order = begun_in_turns(service, 40)
    assert len(numbers(order, TRAIN)) >= 15


def begun_in_turns_once(service: Service, who: str, run: Epoch) -> None:
    """A consumer asks for its first batch, gets it, and asks for no more."""
    request = service.request(who, run, 0, 1)
    begun_in_turns(service, 1)
    service.dispatcher.close(request)


def test_a_slow_consumer_of_large_batches_leaves_the_others_their_work_ahead() -> None:
    """Memory that has no room for one's next batch but for another's is used for the other's."""
    service = Service(budget=10, workers=4)
    service.warm_up(OTHER, nbytes=1)
    service.warm_up(TRAIN, nbytes=6)
    service.request("slow", TRAIN, 0, 50)  # it takes nothing of what is made for it
    assert numbers(service.decide()) == [0]
    service.finish_all(nbytes=6)
    service.request("quick", OTHER, 0, 50)
    assert numbers(service.decide(), OTHER) == [0, 1, 2, 3]
