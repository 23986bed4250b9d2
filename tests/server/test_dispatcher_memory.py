"""Which finished batches are kept, and for whom: memory slows, it never blocks, and nothing is left behind."""

from __future__ import annotations

import pytest

from teleloader_server.dispatch import dispatcher, store
from teleloader_server.dispatch.dispatcher import FORGET_AFTER
from teleloader_shared.codec import Address
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

# --- Retention: what is kept --------------------------------------------------------------------------------------


def test_a_batch_is_kept_while_a_known_consumer_has_not_had_it() -> None:
    """However long the slower of two takes, what the quicker one had made for it stays, when there is room."""
    service = Service(budget=100)
    slow, quick = service.request("slow", TRAIN, 0, 80), service.request("quick", TRAIN, 0, 80)
    assert complete(service, quick) == list(range(80))
    service.decide()
    assert len(service.ready) == 80
    assert complete(service, slow) == []


def test_what_nobody_wants_is_kept_up_to_a_share_of_memory() -> None:
    """After all had them, the latest batches stay for late comers, up to half of the budget."""
    service = Service(budget=100)
    complete(service, service.request("a", TRAIN, 0, 80))
    service.decide()
    assert sorted(numbers(service.ready)) == list(range(30, 80))


def test_a_late_consumer_finds_what_is_kept_and_the_rest_is_made_again() -> None:
    """It gets the whole epoch; what is there is not made for it once more."""
    service = Service(budget=100)
    complete(service, service.request("a", TRAIN, 0, 80))
    service.decide()
    late = service.request("late", TRAIN, 0, 80)
    assert complete(service, late) == list(range(30))
    assert late.next == 80


def test_what_a_late_consumer_wants_is_kept_again() -> None:
    """A batch that nobody wanted is not let go once somebody does."""
    service = Service(budget=100)
    complete(service, service.request("a", TRAIN, 0, 40))
    service.request("late", TRAIN, 0, 40)
    complete(service, service.request("b", OTHER, 0, 200))
    assert sorted(numbers(service.ready)) == list(range(40))


def test_who_starts_over_is_served_from_what_is_kept() -> None:
    """A consumer may ask for batches that it was sent before; they are made again only when they are gone."""
    service = Service(budget=100)
    complete(service, service.request("a", TRAIN, 0, 30))
    again = service.request("a", TRAIN, 10, 40)
    assert complete(service, again) == list(range(30, 40))
    assert again.next == 40


def test_what_is_asked_for_again_is_kept_again() -> None:
    """A consumer that starts over has what it was sent before kept for it, as if it were new."""
    service = Service(budget=100)
    complete(service, service.request("a", TRAIN, 0, 40))
    service.request("a", TRAIN, 0, 40)
    complete(service, service.request("b", OTHER, 0, 200))
    assert sorted(numbers(service.ready)) == list(range(40))


def test_who_starts_over_has_been_sent_nothing() -> None:
    """What it was sent out of order before is forgotten: it is kept until it was sent again."""
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
    assert [service.started[Address(*TRAIN, k)] for k in range(10, 20)] == [1] * 10


def test_who_jumps_forward_lets_go_of_what_it_left_out() -> None:
    """Batches that a consumer passed over are not kept for it beyond the cache's share."""
    service = Service(budget=100)
    left = service.request("a", TRAIN, 0, 90)
    while service.decide():
        service.finish_all()
    assert len(service.ready) == 90
    service.dispatcher.close(left)
    service.request("a", TRAIN, BATCHES - 1, BATCHES)
    service.decide()
    assert service.dispatcher.store.used <= 50


def test_a_partial_answer_is_gone_on_with() -> None:
    """A client that was answered in part asks for the rest, and nothing is made twice."""
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
    assert [service.started[Address(*TRAIN, k)] for k in range(6)] == [1] * 6


def test_a_consumer_is_forgotten_when_it_asks_no_more() -> None:
    """A minute after its last ask; what was kept for it alone is let go, and its name means nothing any more."""
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


def test_a_consumer_that_is_being_sent_batches_is_not_idle() -> None:
    """The minute counts from the last batch that it took, if that was after its last ask."""
    service = Service()
    request = service.request("a", TRAIN, 0, 2)
    service.decide()
    service.finish_all()
    service.pass_time(FORGET_AFTER)
    service.send_ready(request)
    service.dispatcher.close(request)
    assert service.pass_time(FORGET_AFTER) == []
    assert service.pass_time(0.5) == ["a"]


def test_a_consumer_with_an_open_ask_is_not_forgotten() -> None:
    """A client may wait, or be slow to take what it is sent, as long as it likes."""
    service = Service()
    request = service.request("a", TRAIN, 0, 1)
    assert service.pass_time(1000) == []
    service.dispatcher.close(request)
    assert service.pass_time(0) == ["a"]


def test_what_is_made_for_one_who_has_gone_is_kept_as_cache() -> None:
    """A batch that is ready only after its consumer was forgotten belongs to nobody, and does no harm."""
    service = Service(budget=4)
    request = service.request("a", TRAIN, 0, 2)
    service.decide()
    service.dispatcher.close(request)
    assert service.pass_time(FORGET_AFTER + 1) == ["a"]
    service.finish_all()
    service.decide()
    assert numbers(service.ready) == [0, 1]
    assert complete(service, service.request("b", TRAIN, 0, 2)) == []


# --- Lanes: several open asks of one consumer ---------------------------------------------------------------------


def test_a_consumer_may_be_sent_batches_out_of_order() -> None:
    """Two connections of a client: what one was sent does not let go of what the other still waits for."""
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


def test_lanes_that_answer_in_turns_are_one_passage() -> None:
    """A client with two connections gets an epoch in order, each batch made once, in a memory of a few batches."""
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
    assert [service.started[Address(*TRAIN, k)] for k in received] == [1] * len(received)
    assert service.dispatcher.store.used <= 8


def test_one_who_skips_batches_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a consumer leaves out for long comes from elsewhere: its passage goes on without it."""
    monkeypatch.setattr(dispatcher, "MAX_BEHIND", 20)
    service = Service()
    for k in range(0, 44, 2):
        complete(service, service.request("a", TRAIN, k, k + 1))
    assert service.consumer("a").position > 20


def test_work_ahead_is_ahead_of_all_connections() -> None:
    """It begins after the furthest batch that any open ask of the consumer is for."""
    service = Service()
    service.request("a", TRAIN, 10, 20)
    service.request("a", TRAIN, 5, 10, ahead=3)
    while service.decide():
        service.finish_all()
    assert sorted(numbers(service.ready)) == list(range(5, 23))


def test_what_was_sent_is_not_made_again_for_the_same_request() -> None:
    """Also when it was there, was sent at once, and had to make room for the rest."""
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


def test_what_was_sent_beyond_a_gap_is_let_go() -> None:
    """A consumer that takes every other batch, the rest from another server, stays within the budget."""
    service = Service(budget=10)
    for k in range(0, 400, 2):
        complete(service, service.request("a", TRAIN, k, k + 1))
        assert service.dispatcher.store.used <= 10


def test_work_ahead_leaves_out_what_was_sent() -> None:
    """A lane that asks for its rest while the next one is done has nothing made that was sent on the other."""
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
    assert [service.started[Address(*TRAIN, k)] for k in range(4, 8)] == [1] * 4


def test_what_a_connection_waits_for_is_kept_for_it() -> None:
    """Of two connections that ask for the same batches, the slower finds them too: they are not made over and over."""
    service = Service(budget=10)
    slow, quick = service.request("a", TRAIN, 0, 20), service.request("a", TRAIN, 0, 20)
    service.request("b", OTHER, 0, 20)  # it fills the memory, and takes nothing
    for _ in range(100):
        service.decide()
        if service.queues[0]:
            service.finish()
        service.send_ready(quick)
    assert quick.next == 20
    assert service.started[Address(*TRAIN, slow.next)] <= 2


def test_what_a_second_lane_waits_for_is_not_let_go_for_work_ahead() -> None:
    """A ready batch that a connection is about to take is wanted now, however far its number is from the position."""
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
    assert service.started[Address(*TRAIN, 100)] == 1


# --- Rule 5: memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7])
def test_what_nobody_wants_goes_first_the_longest_unused_before_all(size: int) -> None:
    """Room is made of cached batches in the order of their last use, before a wanted batch is touched."""
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


def test_then_what_is_wanted_latest_goes_for_what_is_wanted_sooner() -> None:
    """When all is wanted, a batch that is needed soon takes the place of those that are needed last."""
    service = Service(budget=10)
    service.warm_up(TRAIN, OTHER)
    service.request("a", TRAIN, 0, 10)
    while service.decide():
        service.finish_all()
    assert len(service.ready) == 10
    service.request("b", OTHER, 0, 1)
    assert numbers(service.decide(), OTHER) == [0]
    assert numbers(service.evicted) == [9], "and no more than that"


def test_what_is_wanted_equally_soon_is_left_alone() -> None:
    """Consumers that are equally far do not have each other's batches made over and over."""
    service = Service(budget=7)
    service.warm_up(TRAIN, OTHER, THIRD)
    for run in (TRAIN, OTHER, THIRD):
        service.request("a", run, 0, 5)
    for _ in range(60):
        service.decide()
        service.finish_all()
    assert max(service.started.values()) <= 2


def test_work_ahead_does_not_take_the_place_of_what_is_wanted_sooner() -> None:
    """A full memory of batches that are all wanted sooner lets work ahead wait, and lets go of nothing."""
    service = Service(budget=10)
    service.warm_up(TRAIN, OTHER)
    service.request("a", TRAIN, 0, 20)
    service.request("b", OTHER, 0, 20)
    while service.decide():
        service.finish_all()
    assert service.dispatcher.store.used == 10
    assert service.evicted == []
    assert sorted(names(service.ready)) == sorted([f"{name} {k}" for name in ("train", "other") for k in range(5)])


def test_a_batch_that_is_being_made_is_never_let_go() -> None:
    """Room is made of ready batches only: a full memory of running ones makes a newcomer's first batch one too many."""
    service = Service(budget=3, workers=4)
    service.warm_up(TRAIN, OTHER)
    service.request("a", TRAIN, 0, 9)
    assert numbers(service.decide()) == [0, 1, 2]
    service.request("b", OTHER, 0, 9)
    assert names(service.decide()) == ["other 0"]
    assert service.evicted == []
    assert service.dispatcher.store.used == 4


def test_a_waiting_client_is_served_whatever_the_memory() -> None:
    """Batches larger than the whole budget are made one by one, for each client that waits."""
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
    """Memory slows: with no room work waits, and it goes on when a client takes what is there."""
    service = Service(budget=5)
    service.warm_up(TRAIN)
    request = service.request("a", TRAIN, 0, 100)
    while service.decide():
        service.finish_all()
    assert sorted(numbers(service.ready)) == [0, 1, 2, 3, 4]
    assert service.send_ready(request, limit=2) == [0, 1]
    assert numbers(service.decide()) == [5]


def test_memory_is_counted_by_estimates_until_sizes_are_known() -> None:
    """A batch in the making counts as much as those of its loader did lately; then by what it is."""
    service = Service(budget=1000, workers=2)
    service.warm_up(TRAIN, nbytes=40)
    service.request("a", TRAIN, 0, 2)
    service.decide()
    assert service.dispatcher.store.used == 80
    service.finish(0, nbytes=10)
    assert service.dispatcher.store.used == 10 + 40
    service.lose_worker(1)
    assert service.dispatcher.store.used == 10


def test_the_number_of_batches_is_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is a mapping, and a process may have so many: beyond MAX_BATCHES only waiting clients are served."""
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


def test_work_ahead_that_made_room_is_done_again() -> None:
    """When there is room again, what was let go for others is made once more, also without a new ask."""
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


def test_nothing_is_let_go_for_a_batch_that_has_no_room_all_the_same() -> None:
    """Work ahead that cannot be begun does not have others' finished batches made over and over."""
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


def test_nothing_is_left_of_consumers_that_have_gone() -> None:
    """When all have gone and all is let go, the dispatcher holds no memory and no record of anything."""
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


def test_nothing_is_left_of_suspects_that_nobody_wants() -> None:
    """A batch that died with its worker, and whose consumer has gone, is forgotten too."""
    service = Service()
    request = service.request("a", TRAIN, 0, 1)
    service.decide()
    service.dispatcher.close(request)
    service.lose_worker()
    release_all(service)
    assert containers(service.dispatcher) == {}
