"""The dispatcher's four rules, what it keeps, whom it blames, and that nothing waits for ever.

No process, no socket and no clock: `Service` carries out what is decided, as `LoaderService` does, and refuses what
must never be decided. The last part plays random games against a simple model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sized
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from teleloader_server import dispatcher as module
from teleloader_server.dispatcher import FORGET_AFTER, MAX_ASKED, MAX_ATTEMPTS, Ask, Consumer, Dispatcher, Evict, Run
from teleloader_shared.codec import Address

TRAIN: Run = ("train", 0)
OTHER: Run = ("other", 0)
THIRD: Run = ("third", 0)
PLENTY = 10**9
BATCHES = 10**6
SLOW = 0.1
"""Seconds of a batch that is so long that no worker is given another one besides."""
QUICK = 0.0005
"""Seconds of a batch of which a worker is given several at once."""


@pytest.fixture(autouse=True)
def figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules are tested with figures of their own: those of the module may be tuned."""
    monkeypatch.setattr(module, "CACHE_SHARE", 0.5)
    monkeypatch.setattr(module, "QUEUE_SECONDS", 0.004)
    monkeypatch.setattr(module, "MAX_QUEUE", 64)


class Service:
    """Does what a dispatcher decides, and holds it to what may be decided at all."""

    def __init__(self, budget: int = PLENTY, workers: int = 1) -> None:
        self.dispatcher = Dispatcher(budget)
        self.queues: dict[int, list[Address]] = {}
        self.ready: dict[Address, int] = {}
        self.begun: Counter[Address] = Counter()
        self.evicted: list[Address] = []
        self.now = 0.0
        for worker in range(workers):
            self.worker_ready(worker)

    def ask(self, who: str, run: Run, start: int, stop: int, ahead: int = 0) -> Ask:
        """A client asks for [start, stop)."""
        return self.dispatcher.ask(who, run, BATCHES, start, stop, ahead, self.now)

    def decide(self) -> list[Address]:
        """Carry out what is decided; what was begun, in this order."""
        begun = []
        for action in self.dispatcher.decide():
            if isinstance(action, Evict):
                del self.ready[action.address]  # only what is ready can be let go
                self.evicted.append(action.address)
                continue
            assert action.address not in self.ready, f"{action.address} is there already"
            assert action.address not in self.running(), f"{action.address} is being made already"
            self.queues[action.worker].append(action.address)
            begun.append(action.address)
        self.begun.update(begun)
        return begun

    def running(self) -> list[Address]:
        """What workers have to do."""
        return [address for queue in self.queues.values() for address in queue]

    def finish(self, worker: int = 0, nbytes: int = 1, seconds: float = SLOW) -> Address:
        """The worker finishes its first batch."""
        address = self.queues[worker].pop(0)
        self.ready[address] = nbytes
        self.dispatcher.finished(worker, address, nbytes, seconds)
        return address

    def finish_all(self, nbytes: int = 1, seconds: float = SLOW) -> int:
        """All workers finish what they have; how many batches that was."""
        done = 0
        for worker, queue in self.queues.items():
            while queue:
                self.finish(worker, nbytes, seconds)
                done += 1
        return done

    def answer(self, ask: Ask, limit: int = BATCHES) -> list[int]:
        """Send what is ready of a request, in its order."""
        sent: list[int] = []
        while ask.next < ask.stop and Address(*ask.consumer.run, ask.next) in self.ready and len(sent) < limit:
            sent.append(ask.next)
            self.dispatcher.sent(ask, self.now)
        return sent

    def worker_ready(self, worker: int) -> None:
        """A new worker in that place."""
        self.queues[worker] = []
        self.dispatcher.worker_ready(worker)

    def lose(self, worker: int = 0) -> list[Address]:
        """The worker dies; what is given up gets a failure in its place."""
        del self.queues[worker]
        given_up = self.dispatcher.worker_lost(worker)
        for address in given_up:
            self.ready[address] = 1
            self.dispatcher.finished(None, address, 1)
        return given_up

    def teach(self, *runs: Run, nbytes: int = 1, seconds: float = SLOW) -> None:
        """At the start: have one batch of each loader made, and let go of, so that size and time are known."""
        for loader, _ in runs:
            ask = self.ask("teacher", (loader, 99), 0, 1)
            self.decide()
            for worker, queue in self.queues.items():
                if queue:
                    self.finish(worker, nbytes, seconds)
            assert self.answer(ask) == [0]
            self.dispatcher.close(ask)
        self.pass_time(FORGET_AFTER + 1)
        self.empty_cache()
        self.begun.clear()
        self.evicted.clear()

    def empty_cache(self) -> None:
        """Have all let go that nobody wants."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "CACHE_SHARE", -1)
            self.decide()

    def pass_time(self, seconds: float) -> list[str]:
        """Time passes, then the idle are forgotten; their names."""
        self.now += seconds
        return [consumer.name for consumer in self.dispatcher.forget_idle(self.now)]

    def consumer(self, who: str) -> Consumer:
        """What is known of a consumer."""
        (found,) = [consumer for consumer in self.dispatcher.consumers() if consumer.name == who]
        return found


def numbers(addresses: Iterable[Address], run: Run = TRAIN) -> list[int]:
    """The batch numbers of those addresses that are of a run."""
    return [address.batch for address in addresses if (address.loader, address.epoch) == run]


def names(addresses: Iterable[Address]) -> list[str]:
    """What is begun or let go, readable: ``train 0``."""
    return [f"{address.loader} {address.batch}" for address in addresses]


# --- Rule 1: nothing is made twice --------------------------------------------------------------------------------


def test_equal_asks_share_one_batch() -> None:
    """Two clients that ask for the same batches are answered with batches that were made once."""
    service = Service(workers=2)
    asks = [service.ask(who, TRAIN, 0, 4) for who in ("a", "b")]
    while service.decide():
        service.finish_all()
    assert [service.answer(ask) for ask in asks] == [[0, 1, 2, 3]] * 2
    assert set(service.begun.values()) == {1}


def test_a_batch_in_the_making_is_not_begun_again() -> None:
    """An ask, work ahead and another consumer's ask all wait for the one that is being made."""
    service = Service(workers=4)
    service.ask("a", TRAIN, 0, 1)
    assert numbers(service.decide()) == [0]
    service.ask("a", TRAIN, 0, 1, ahead=1)
    service.ask("b", TRAIN, 0, 2)
    assert numbers(service.decide()) == [1]
    service.ask("c", TRAIN, 0, 2)
    assert service.decide() == []


def test_different_epochs_and_loaders_are_different_batches() -> None:
    """Only the whole address makes two asks equal."""
    service = Service(workers=3)
    for run in (TRAIN, OTHER, ("train", 1)):
        service.ask("a", run, 0, 1)
    assert {(a.loader, a.epoch) for a in service.decide()} == {TRAIN, OTHER, ("train", 1)}


def test_two_connections_of_a_consumer_share_what_they_ask_for() -> None:
    """A client that asks again before its broken connection is noticed costs nothing."""
    service = Service()
    first = service.ask("a", TRAIN, 0, 3)
    second = service.ask("a", TRAIN, 0, 3)
    while service.decide():
        service.finish_all()
        service.answer(second)
    assert (second.next, service.answer(first)) == (3, [0, 1, 2])
    assert set(service.begun.values()) == {1}


# --- Rule 2: urgency ----------------------------------------------------------------------------------------------


def test_what_a_client_waits_for_goes_first_and_work_ahead_last() -> None:
    """Waited-for, asked for besides, ahead: in this order, over all consumers."""
    service = Service()
    service.teach(TRAIN, OTHER)
    service.ask("a", TRAIN, 0, 2, ahead=1)
    service.ask("b", OTHER, 5, 7, ahead=1)
    order: list[str] = []
    while begun := service.decide():
        order += names(begun)
        service.finish()
    assert order == ["train 0", "other 5", "train 1", "other 6", "train 2", "other 7"]


def test_a_client_that_comes_to_wait_overtakes_work_ahead() -> None:
    """However much is wanted ahead, the next free worker takes what somebody waits for."""
    service = Service()
    service.teach(TRAIN, OTHER)
    service.ask("a", TRAIN, 0, 1, ahead=1000)
    for _ in range(10):
        service.decide()
        service.finish()
    service.ask("b", OTHER, 0, 1)
    assert names(service.decide()) == ["other 0"]


def test_each_connection_waits_for_its_first_batch() -> None:
    """Of two open asks of a consumer, the first batches of both are waited for; the rest comes after them."""
    service = Service()
    service.teach(TRAIN)
    service.ask("a", TRAIN, 0, 3)
    service.ask("a", TRAIN, 3, 6)
    order: list[int] = []
    while begun := service.decide():
        order += numbers(begun)
        service.finish()
    assert order == [0, 3, 1, 2, 4, 5]


def test_a_request_without_end_is_worked_on_so_far_and_no_further() -> None:
    """An ask for a whole epoch takes no more than MAX_ASKED batches beyond the one that its client waits for."""
    service = Service()
    ask = service.ask("a", TRAIN, 0, BATCHES)
    while service.decide():
        service.finish_all()
    assert len(service.ready) == MAX_ASKED
    assert service.answer(ask, limit=10) == list(range(10))
    while service.decide():
        service.finish_all()
    assert max(numbers(service.ready)) == 10 + MAX_ASKED - 1


def test_nothing_is_made_that_nobody_asked_for() -> None:
    """Without `ahead` work ends with the request; with it, so many batches later, and at the end of the epoch."""
    service = Service()
    service.dispatcher.ask("a", TRAIN, 10, 0, 2, 0, service.now)
    service.dispatcher.ask("b", OTHER, 10, 7, 8, 5, service.now)
    while service.decide():
        service.finish_all()
    assert sorted(numbers(service.ready)) == [0, 1]
    assert sorted(numbers(service.ready, OTHER)) == [7, 8, 9]


def test_work_goes_on_ahead_when_the_answer_is_complete() -> None:
    """Between two requests of a client, its work ahead is done."""
    service = Service()
    service.teach(TRAIN)
    ask = service.ask("a", TRAIN, 0, 1, ahead=3)
    service.decide()
    service.finish()
    assert service.answer(ask) == [0]
    service.dispatcher.close(ask)
    while service.decide():
        service.finish_all()
    assert set(numbers(service.ready)) >= {1, 2, 3}


# --- Workers and their queues -------------------------------------------------------------------------------------


def test_batches_are_spread_over_the_idle_workers() -> None:
    """No worker is given a second batch while another has none."""
    service = Service(workers=4)
    service.ask("a", TRAIN, 0, 4)
    service.decide()
    assert [len(queue) for queue in service.queues.values()] == [1] * 4


def test_a_worker_with_a_long_batch_is_given_no_other() -> None:
    """Of batches that take long, each waits for an idle worker: another one may be idle sooner."""
    service = Service(workers=2)
    service.teach(TRAIN)
    service.ask("a", TRAIN, 0, 100)
    service.decide()
    assert [len(queue) for queue in service.queues.values()] == [1, 1]


def test_a_worker_is_given_several_short_batches() -> None:
    """Short batches are queued to a few milliseconds of work, so that a worker does not wait for messages."""
    service = Service()
    service.teach(TRAIN, seconds=QUICK)
    service.ask("a", TRAIN, 0, 100)
    service.decide()
    work = len(service.queues[0]) * QUICK
    assert module.QUEUE_SECONDS <= work <= module.QUEUE_SECONDS + QUICK


def test_the_shortest_batches_are_queued_to_a_limit() -> None:
    """A batch of no measurable time does not make the queue endless."""
    service = Service()
    service.teach(TRAIN, seconds=0.0)
    service.ask("a", TRAIN, 0, 200)
    service.decide()
    assert len(service.queues[0]) <= module.MAX_QUEUE + 1


def test_without_workers_nothing_is_begun_and_nothing_is_lost() -> None:
    """Asks wait until a worker is ready."""
    service = Service(workers=0)
    ask = service.ask("a", TRAIN, 0, 2)
    assert service.decide() == []
    service.worker_ready(7)
    assert numbers(service.decide()) == [0, 1]
    service.finish_all()
    assert service.answer(ask) == [0, 1]


def test_a_worker_is_busy_while_it_has_a_batch() -> None:
    """`is_busy` is true from the start of a batch to its end, and false of a worker that there is not."""
    service = Service()
    assert not service.dispatcher.is_busy(0)
    service.ask("a", TRAIN, 0, 1)
    service.decide()
    assert service.dispatcher.is_busy(0)
    service.finish()
    assert not service.dispatcher.is_busy(0)
    assert not service.dispatcher.is_busy(12)


# --- Rule 3: fairness ---------------------------------------------------------------------------------------------


def begun_in_turns(
    service: Service, rounds: int, seconds: Callable[[Address], float] = lambda _: SLOW
) -> list[Address]:
    """One worker, its batches one after another, each sent to whoever asked for it at once."""
    order: list[Address] = []
    for _ in range(rounds):
        order += service.decide()
        service.finish(seconds=seconds(service.queues[0][0]))
        for consumer in service.dispatcher.consumers():
            for ask in consumer.asks:
                service.answer(ask)
    return order


def test_equal_consumers_take_turns() -> None:
    """Two clients that want as much as they can get have the same share at any time."""
    service = Service()
    service.teach(TRAIN, OTHER)
    service.ask("a", TRAIN, 0, 1000, ahead=10)
    service.ask("b", OTHER, 0, 1000, ahead=10)
    order = begun_in_turns(service, 40)
    for end in range(len(order)):
        assert abs(len(numbers(order[:end], TRAIN)) - len(numbers(order[:end], OTHER))) <= 1


def test_a_greedy_consumer_does_not_delay_a_modest_one() -> None:
    """Who asks for one batch at a time has each begun by the first worker that is free, whatever others ask for."""
    service = Service()
    service.teach(TRAIN, OTHER)
    for connection in range(8):
        service.ask("greedy", TRAIN, 1000 * connection, 1000 * connection + 1000, ahead=1000)
    service.decide()
    for k in range(20):
        modest = service.ask("modest", OTHER, k, k + 1)
        waited = 0
        while not service.answer(modest):
            waited += service.finish_all()
            service.decide()
        # the greedy one's batch that was under way, its own, and a greedy one between them when that was served less
        assert waited <= 3
        service.dispatcher.close(modest)


def test_many_connections_are_not_many_shares() -> None:
    """A consumer with ten open asks gets what one with a single ask gets."""
    service = Service()
    service.teach(TRAIN, OTHER)
    for start in range(0, 1000, 100):
        service.ask("greedy", TRAIN, start, start + 100)
    service.ask("modest", OTHER, 0, 1000)
    order = begun_in_turns(service, 60)
    assert abs(len(numbers(order, TRAIN)) - len(numbers(order, OTHER))) <= 1


def test_shares_are_counted_in_time_not_in_batches() -> None:
    """A loader whose batches take ten times as long has a tenth as many of them made."""
    service = Service()
    service.teach(TRAIN, seconds=0.1)
    service.teach(OTHER, seconds=1.0)
    service.ask("light", TRAIN, 0, 1000)
    service.ask("heavy", OTHER, 0, 1000)
    order = begun_in_turns(service, 110, lambda address: 0.1 if address.loader == "train" else 1.0)
    assert abs(len(numbers(order, TRAIN)) - 100) <= 10
    assert abs(len(numbers(order, OTHER)) - 10) <= 1


def test_a_newcomer_takes_turns_with_those_who_were_there() -> None:
    """It neither waits for the past of the others nor makes up for its own."""
    service = Service()
    service.teach(TRAIN, OTHER)
    service.ask("veteran", TRAIN, 0, BATCHES)
    begun_in_turns(service, 100)
    service.ask("newcomer", OTHER, 0, 1000)
    order = begun_in_turns(service, 20)
    assert abs(len(numbers(order, TRAIN)) - len(numbers(order, OTHER))) <= 1


def test_one_who_hardly_asks_does_not_set_the_level_for_newcomers() -> None:
    """A client that looks at one batch a minute must not make each newcomer shut out the one who trains."""
    service = Service()
    service.teach(TRAIN, OTHER)
    begun_in_turns_once(service, "visitor", ("visited", 0))
    service.ask("veteran", TRAIN, 0, BATCHES)
    begun_in_turns(service, 100)
    service.ask("newcomer", OTHER, 0, 1000)
    order = begun_in_turns(service, 40)
    assert len(numbers(order, TRAIN)) >= 15


def test_a_pause_is_no_credit() -> None:
    """Who comes back after a pause shares with the others from then on; it does not shut them out to catch up."""
    service = Service()
    service.teach(TRAIN, OTHER)
    begun_in_turns_once(service, "paused", OTHER)
    service.ask("steady", TRAIN, 0, BATCHES)
    begun_in_turns(service, 100)
    service.ask("paused", OTHER, 1, 1000)
    order = begun_in_turns(service, 40)
    assert len(numbers(order, TRAIN)) >= 15


def begun_in_turns_once(service: Service, who: str, run: Run) -> None:
    """A consumer asks for its first batch, gets it, and asks for no more."""
    ask = service.ask(who, run, 0, 1)
    begun_in_turns(service, 1)
    service.dispatcher.close(ask)


def test_a_slow_consumer_of_large_batches_leaves_the_others_their_work_ahead() -> None:
    """Memory that has no room for one's next batch but for another's is used for the other's."""
    service = Service(budget=10, workers=4)
    service.teach(OTHER, nbytes=1)
    service.teach(TRAIN, nbytes=6)
    service.ask("slow", TRAIN, 0, 50)  # it takes nothing of what is made for it
    assert numbers(service.decide()) == [0]
    service.finish_all(nbytes=6)
    service.ask("quick", OTHER, 0, 50)
    assert numbers(service.decide(), OTHER) == [0, 1, 2, 3]


# --- Retention: what is kept --------------------------------------------------------------------------------------


def run_through(service: Service, ask: Ask, nbytes: int = 1) -> list[int]:
    """Make and send all that a request asks for, and close it; what was begun for it."""
    before = service.begun.copy()
    while ask.next < ask.stop:
        service.decide()
        service.finish_all(nbytes)
        service.answer(ask)
    service.dispatcher.close(ask)
    return sorted(numbers((service.begun - before).elements(), ask.consumer.run))


def test_a_batch_is_kept_while_a_known_consumer_has_not_had_it() -> None:
    """However long the slower of two takes, what the quicker one had made for it stays, when there is room."""
    service = Service(budget=100)
    slow, quick = service.ask("slow", TRAIN, 0, 80), service.ask("quick", TRAIN, 0, 80)
    assert run_through(service, quick) == list(range(80))
    service.decide()
    assert len(service.ready) == 80
    assert run_through(service, slow) == []


def test_what_nobody_wants_is_kept_up_to_a_share_of_memory() -> None:
    """After all had them, the latest batches stay for late comers, up to half of the budget."""
    service = Service(budget=100)
    run_through(service, service.ask("a", TRAIN, 0, 80))
    service.decide()
    assert sorted(numbers(service.ready)) == list(range(30, 80))


def test_a_late_consumer_finds_what_is_kept_and_the_rest_is_made_again() -> None:
    """It gets the whole epoch; what is there is not made for it once more."""
    service = Service(budget=100)
    run_through(service, service.ask("a", TRAIN, 0, 80))
    service.decide()
    late = service.ask("late", TRAIN, 0, 80)
    assert run_through(service, late) == list(range(30))
    assert late.next == 80


def test_what_a_late_consumer_wants_is_kept_again() -> None:
    """A batch that nobody wanted is not let go once somebody does."""
    service = Service(budget=100)
    run_through(service, service.ask("a", TRAIN, 0, 40))
    service.ask("late", TRAIN, 0, 40)
    run_through(service, service.ask("b", OTHER, 0, 200))
    assert sorted(numbers(service.ready)) == list(range(40))


def test_who_starts_over_is_served_from_what_is_kept() -> None:
    """A consumer may ask for batches that it was sent before; they are made again only when they are gone."""
    service = Service(budget=100)
    run_through(service, service.ask("a", TRAIN, 0, 30))
    again = service.ask("a", TRAIN, 10, 40)
    assert run_through(service, again) == list(range(30, 40))
    assert again.next == 40


def test_what_is_asked_for_again_is_kept_again() -> None:
    """A consumer that starts over has what it was sent before kept for it, as if it were new."""
    service = Service(budget=100)
    run_through(service, service.ask("a", TRAIN, 0, 40))
    service.ask("a", TRAIN, 0, 40)
    run_through(service, service.ask("b", OTHER, 0, 200))
    assert sorted(numbers(service.ready)) == list(range(40))


def test_who_starts_over_has_been_sent_nothing() -> None:
    """What it was sent out of order before is forgotten: it is kept until it was sent again."""
    service = Service(budget=30)
    first, second = service.ask("a", TRAIN, 0, 10), service.ask("a", TRAIN, 10, 20)
    while service.decide():
        service.finish_all()
    service.answer(first, limit=5)
    service.answer(second)
    for ask in (first, second):
        service.dispatcher.close(ask)
    again = service.ask("a", TRAIN, 0, 20)
    assert service.answer(again, limit=10) == list(range(10))
    run_through(service, service.ask("b", OTHER, 0, 50))
    assert service.answer(again) == list(range(10, 20))
    assert [service.begun[Address(*TRAIN, k)] for k in range(10, 20)] == [1] * 10


def test_who_jumps_forward_lets_go_of_what_it_left_out() -> None:
    """Batches that a consumer passed over are not kept for it beyond the cache's share."""
    service = Service(budget=100)
    left = service.ask("a", TRAIN, 0, 90)
    while service.decide():
        service.finish_all()
    assert len(service.ready) == 90
    service.dispatcher.close(left)
    service.ask("a", TRAIN, BATCHES - 1, BATCHES)
    service.decide()
    assert service.dispatcher.memory_used <= 50


def test_a_partial_answer_is_gone_on_with() -> None:
    """A client that was answered in part asks for the rest, and nothing is made twice."""
    service = Service()
    first = service.ask("a", TRAIN, 0, 6)
    service.decide()
    service.finish_all()
    sent = service.answer(first)
    service.dispatcher.close(first)
    assert 0 < len(sent) < 6
    rest = service.ask("a", TRAIN, len(sent), 6)
    run_through(service, rest)
    assert rest.next == 6
    assert [service.begun[Address(*TRAIN, k)] for k in range(6)] == [1] * 6


def test_a_consumer_is_forgotten_when_it_asks_no_more() -> None:
    """A minute after its last ask; what was kept for it alone is let go, and its name means nothing any more."""
    service = Service(budget=100)
    ask = service.ask("a", TRAIN, 0, 90)
    while service.decide():
        service.finish_all()
    service.dispatcher.close(ask)
    assert service.pass_time(FORGET_AFTER) == []
    assert service.decide() == []
    assert len(service.ready) == 90
    assert service.pass_time(0.5) == ["a"]
    service.decide()
    assert service.dispatcher.memory_used == 50
    assert list(service.dispatcher.consumers()) == []


def test_a_consumer_that_is_being_sent_batches_is_not_idle() -> None:
    """The minute counts from the last batch that it took, if that was after its last ask."""
    service = Service()
    ask = service.ask("a", TRAIN, 0, 2)
    service.decide()
    service.finish_all()
    service.pass_time(FORGET_AFTER)
    service.answer(ask)
    service.dispatcher.close(ask)
    assert service.pass_time(FORGET_AFTER) == []
    assert service.pass_time(0.5) == ["a"]


def test_a_consumer_with_an_open_ask_is_not_forgotten() -> None:
    """A client may wait, or be slow to take what it is sent, as long as it likes."""
    service = Service()
    ask = service.ask("a", TRAIN, 0, 1)
    assert service.pass_time(1000) == []
    service.dispatcher.close(ask)
    assert service.pass_time(0) == ["a"]


def test_what_is_made_for_one_who_has_gone_is_kept_as_cache() -> None:
    """A batch that is ready only after its consumer was forgotten belongs to nobody, and does no harm."""
    service = Service(budget=4)
    ask = service.ask("a", TRAIN, 0, 2)
    service.decide()
    service.dispatcher.close(ask)
    assert service.pass_time(FORGET_AFTER + 1) == ["a"]
    service.finish_all()
    service.decide()
    assert numbers(service.ready) == [0, 1]
    assert run_through(service, service.ask("b", TRAIN, 0, 2)) == []


# --- Lanes: several open asks of one consumer ---------------------------------------------------------------------


def test_a_consumer_may_be_sent_batches_out_of_order() -> None:
    """Two connections of a client: what one was sent does not let go of what the other still waits for."""
    service = Service(budget=20)
    slow, quick = service.ask("a", TRAIN, 0, 10), service.ask("a", TRAIN, 10, 20)
    while service.decide():
        service.finish_all()
    assert service.answer(quick) == list(range(10, 20))
    service.decide()
    assert set(numbers(service.ready)) >= set(range(10))
    assert service.consumer("a").position == 0
    assert service.answer(slow) == list(range(10))
    assert service.consumer("a").position == 20
    assert set(service.begun.values()) == {1}


def test_lanes_that_answer_in_turns_are_one_passage() -> None:
    """A client with two connections gets an epoch in order, each batch made once, in a memory of a few batches."""
    service = Service(budget=8, workers=2)
    service.teach(TRAIN)
    lanes = [service.ask("a", TRAIN, 0, 2, ahead=2), service.ask("a", TRAIN, 2, 4, ahead=2)]
    received: list[int] = []
    while len(received) < 100:
        service.decide()
        service.finish_all()
        received += service.answer(lanes[0])
        if lanes[0].next == lanes[0].stop:
            service.dispatcher.close(lanes.pop(0))
            stop = lanes[-1].stop
            lanes.append(service.ask("a", TRAIN, stop, stop + 2, ahead=2))
    assert received == list(range(len(received)))
    assert [service.begun[Address(*TRAIN, k)] for k in received] == [1] * len(received)
    assert service.dispatcher.memory_used <= 8


def test_one_who_skips_batches_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a consumer leaves out for long comes from elsewhere: its passage goes on without it."""
    monkeypatch.setattr(module, "MAX_BEHIND", 20)
    service = Service()
    for k in range(0, 44, 2):
        run_through(service, service.ask("a", TRAIN, k, k + 1))
    assert service.consumer("a").position > 20


def test_work_ahead_is_ahead_of_all_connections() -> None:
    """It begins after the furthest batch that any open ask of the consumer is for."""
    service = Service()
    service.ask("a", TRAIN, 10, 20)
    service.ask("a", TRAIN, 5, 10, ahead=3)
    while service.decide():
        service.finish_all()
    assert sorted(numbers(service.ready)) == list(range(5, 23))


def test_what_was_sent_is_not_made_again_for_the_same_request() -> None:
    """Also when it was there, was sent at once, and had to make room for the rest."""
    service = Service(budget=8)
    service.teach(TRAIN)
    asks = [service.ask("a", TRAIN, 0, 8), service.ask("b", TRAIN, 0, 10)]
    while service.decide():
        service.finish()
    assert service.dispatcher.memory_used == 8
    late = service.ask("c", TRAIN, 0, 10)
    for ask in (*asks, late):
        assert service.answer(ask) == list(range(8))
    while service.decide():
        service.finish_all()
    assert service.answer(late) == [8, 9]
    assert set(service.begun.values()) == {1}


def test_what_was_sent_beyond_a_gap_is_let_go() -> None:
    """A consumer that takes every other batch, the rest from another server, stays within the budget."""
    service = Service(budget=10)
    for k in range(0, 400, 2):
        run_through(service, service.ask("a", TRAIN, k, k + 1))
        assert service.dispatcher.memory_used <= 10


def test_work_ahead_leaves_out_what_was_sent() -> None:
    """A lane that asks for its rest while the next one is done has nothing made that was sent on the other."""
    service = Service(budget=4)
    service.teach(TRAIN)
    first, second = service.ask("a", TRAIN, 0, 4), service.ask("a", TRAIN, 4, 8)
    while second.next < second.stop:
        service.decide()
        service.finish_all()
        service.answer(second)
    service.dispatcher.close(second)
    service.answer(first)
    service.dispatcher.close(first)
    rest = service.ask("a", TRAIN, first.next, 4, ahead=4)
    while service.decide():
        service.finish_all()
        service.answer(rest)
    assert [service.begun[Address(*TRAIN, k)] for k in range(4, 8)] == [1] * 4


def test_what_a_connection_waits_for_is_kept_for_it() -> None:
    """Of two connections that ask for the same batches, the slower finds them too: they are not made over and over."""
    service = Service(budget=10)
    slow, quick = service.ask("a", TRAIN, 0, 20), service.ask("a", TRAIN, 0, 20)
    service.ask("b", OTHER, 0, 20)  # it fills the memory, and takes nothing
    for _ in range(100):
        service.decide()
        if service.queues[0]:
            service.finish()
        service.answer(quick)
    assert quick.next == 20
    assert service.begun[Address(*TRAIN, slow.next)] <= 2


def test_what_a_second_lane_waits_for_is_not_let_go_for_work_ahead() -> None:
    """A ready batch that a connection is about to take is wanted now, however far its number is from the position."""
    service = Service(budget=3)
    service.teach(TRAIN, OTHER)
    service.ask("a", TRAIN, 0, 1)
    service.ask("a", TRAIN, 100, 101)
    while service.decide():
        service.finish_all()
    assert set(numbers(service.ready)) == {0, 100}
    service.ask("b", OTHER, 0, 5)
    while service.decide():
        service.finish_all()
    assert service.begun[Address(*TRAIN, 100)] == 1


# --- Rule 4: memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7])
def test_what_nobody_wants_goes_first_the_longest_unused_before_all(size: int) -> None:
    """Room is made of cached batches in the order of their last use, before a wanted batch is touched."""
    service = Service(budget=8)
    service.teach(TRAIN, OTHER)
    service.teach(THIRD, nbytes=size)
    run_through(service, service.ask("a", TRAIN, 0, 2))
    run_through(service, service.ask("a", OTHER, 0, 2))
    run_through(service, service.ask("b", TRAIN, 1, 2))  # uses train 1 again
    service.ask("c", THIRD, 0, 20)
    while service.decide():
        service.finish_all(nbytes=size)
    assert names(service.evicted) == ["train 0", "other 0", "other 1", "train 1"]
    assert len(service.ready) == 8 // size


def test_then_what_is_wanted_latest_goes_for_what_is_wanted_sooner() -> None:
    """When all is wanted, a batch that is needed soon takes the place of those that are needed last."""
    service = Service(budget=10)
    service.teach(TRAIN, OTHER)
    service.ask("a", TRAIN, 0, 10)
    while service.decide():
        service.finish_all()
    assert len(service.ready) == 10
    service.ask("b", OTHER, 0, 1)
    assert numbers(service.decide(), OTHER) == [0]
    assert numbers(service.evicted) == [9], "and no more than that"


def test_what_is_wanted_equally_soon_is_left_alone() -> None:
    """Consumers that are equally far do not have each other's batches made over and over."""
    service = Service(budget=7)
    service.teach(TRAIN, OTHER, THIRD)
    for run in (TRAIN, OTHER, THIRD):
        service.ask("a", run, 0, 5)
    for _ in range(60):
        service.decide()
        service.finish_all()
    assert max(service.begun.values()) <= 2


def test_work_ahead_does_not_take_the_place_of_what_is_wanted_sooner() -> None:
    """A full memory of batches that are all wanted sooner lets work ahead wait, and lets go of nothing."""
    service = Service(budget=10)
    service.teach(TRAIN, OTHER)
    service.ask("a", TRAIN, 0, 20)
    service.ask("b", OTHER, 0, 20)
    while service.decide():
        service.finish_all()
    assert service.dispatcher.memory_used == 10
    assert service.evicted == []
    assert sorted(names(service.ready)) == sorted([f"{name} {k}" for name in ("train", "other") for k in range(5)])


def test_a_batch_that_is_being_made_is_never_let_go() -> None:
    """Room is made of ready batches only: a full memory of running ones makes a newcomer's first batch one too many."""
    service = Service(budget=3, workers=4)
    service.teach(TRAIN, OTHER)
    service.ask("a", TRAIN, 0, 9)
    assert numbers(service.decide()) == [0, 1, 2]
    service.ask("b", OTHER, 0, 9)
    assert names(service.decide()) == ["other 0"]
    assert service.evicted == []
    assert service.dispatcher.memory_used == 4


def test_a_waiting_client_is_served_whatever_the_memory() -> None:
    """Batches larger than the whole budget are made one by one, for each client that waits."""
    service = Service(budget=1, workers=3)
    service.teach(TRAIN, OTHER, nbytes=100)
    asks = [service.ask("a", TRAIN, 0, 20), service.ask("a", TRAIN, 20, 40), service.ask("b", OTHER, 0, 20, ahead=9)]
    for _ in range(20):
        assert sorted(names(service.decide())) == sorted(f"{a.consumer.run[0]} {a.next}" for a in asks)
        service.finish_all(nbytes=100)
        assert [len(service.answer(ask)) for ask in asks] == [1, 1, 1]
    assert [ask.next for ask in asks] == [20, 40, 20]


def test_a_full_memory_stops_work_ahead_until_something_was_taken() -> None:
    """Memory slows: with no room work waits, and it goes on when a client takes what is there."""
    service = Service(budget=5)
    service.teach(TRAIN)
    ask = service.ask("a", TRAIN, 0, 100)
    while service.decide():
        service.finish_all()
    assert sorted(numbers(service.ready)) == [0, 1, 2, 3, 4]
    assert service.answer(ask, limit=2) == [0, 1]
    assert numbers(service.decide()) == [5]


def test_memory_is_counted_by_estimates_until_sizes_are_known() -> None:
    """A batch in the making counts as much as those of its loader did lately; then by what it is."""
    service = Service(budget=1000, workers=2)
    service.teach(TRAIN, nbytes=40)
    service.ask("a", TRAIN, 0, 2)
    service.decide()
    assert service.dispatcher.memory_used == 80
    service.finish(0, nbytes=10)
    assert service.dispatcher.memory_used == 10 + 40
    service.lose(1)
    assert service.dispatcher.memory_used == 10


def test_the_number_of_batches_is_limited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is a mapping, and a process may have so many: beyond MAX_BATCHES only waiting clients are served."""
    monkeypatch.setattr(module, "MAX_BATCHES", 20)
    service = Service()
    ask = service.ask("a", TRAIN, 0, 100)
    while service.decide():
        service.finish_all()
    assert len(service.ready) == 20
    service.ask("b", OTHER, 0, 1)
    service.decide()
    service.finish_all()
    assert len(service.ready) <= 20
    assert run_through(service, ask)
    assert ask.next == 100
    service.ask("c", THIRD, 0, 100)
    while service.decide():
        service.finish_all()
    assert len(numbers(service.ready, THIRD)) > 10, "those that are gone do not count"


def test_work_ahead_that_made_room_is_done_again() -> None:
    """When there is room again, what was let go for others is made once more, also without a new ask."""
    service = Service(budget=10)
    service.teach(TRAIN, OTHER)
    ask = service.ask("a", TRAIN, 0, 1, ahead=9)
    while service.decide():
        service.finish_all()
    service.answer(ask)
    service.dispatcher.close(ask)
    assert sorted(numbers(service.ready)) == list(range(10))
    other = service.ask("b", OTHER, 0, 4)
    for _ in range(4):
        service.decide()
        service.finish_all()
    assert 9 not in numbers(service.ready)
    service.answer(other)
    service.dispatcher.close(other)
    while service.decide():
        service.finish_all()
    assert sorted(numbers(service.ready))[-9:] == list(range(1, 10))


def test_nothing_is_let_go_for_a_batch_that_has_no_room_all_the_same() -> None:
    """Work ahead that cannot be begun does not have others' finished batches made over and over."""
    service = Service(budget=20, workers=2)
    service.teach(OTHER, nbytes=1)
    service.teach(TRAIN, nbytes=12)
    service.ask("large", TRAIN, 0, 1, ahead=1)  # it takes nothing: its second batch never has room
    service.ask("small", OTHER, 0, 8)
    for _ in range(50):
        service.decide()
        for worker, queue in service.queues.items():
            if queue:
                service.finish(worker, nbytes=12 if queue[0].loader == "train" else 1)
    assert max(service.begun.values()) == 1


# --- Workers that die ---------------------------------------------------------------------------------------------


def test_what_a_lost_worker_had_is_made_by_others() -> None:
    """Nothing is lost and nothing is doubled: its batches go to workers that live."""
    service = Service(workers=2)
    service.teach(TRAIN)
    ask = service.ask("a", TRAIN, 0, 4)
    service.decide()
    assert service.lose(0) == []
    run_through(service, ask)
    assert ask.next == 4
    assert service.begun[Address(*TRAIN, 0)] == 2
    assert [service.begun[Address(*TRAIN, k)] for k in (1, 2, 3)] == [1, 1, 1]


def test_a_batch_that_kills_its_workers_is_given_up() -> None:
    """After MAX_ATTEMPTS deaths of workers that had nothing else, an error stands in its place."""
    service = Service()
    service.teach(TRAIN)
    ask = service.ask("a", TRAIN, 0, 2)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert numbers(service.decide()) == [0]
        given_up = service.lose()
        assert numbers(given_up) == ([0] if attempt == MAX_ATTEMPTS else [])
        service.worker_ready(0)
    assert service.answer(ask) == [0]
    assert run_through(service, ask) == [1]


def test_a_batch_that_was_given_up_may_be_tried_anew_later() -> None:
    """The error is a batch like any other: once it is gone, the batch has its three attempts again."""
    service = Service(budget=2)
    service.teach(TRAIN)
    ask = service.ask("a", TRAIN, 0, 1)
    for _ in range(MAX_ATTEMPTS):
        service.decide()
        given_up = service.lose()
        service.worker_ready(0)
    assert numbers(given_up) == [0]
    service.answer(ask)
    service.dispatcher.close(ask)
    run_through(service, service.ask("b", OTHER, 0, 4))
    assert numbers(service.ready) == []
    service.ask("a", TRAIN, 0, 1)
    for _ in range(MAX_ATTEMPTS - 1):
        assert numbers(service.decide()) == [0]
        assert service.lose() == []
        service.worker_ready(0)


def test_only_a_batch_that_died_alone_is_blamed() -> None:
    """Of several that a worker had, none is blamed: each is then given to a worker that has nothing else."""
    service = Service()
    service.teach(TRAIN, seconds=QUICK)
    ask = service.ask("a", TRAIN, 0, 8)
    service.decide()
    assert len(service.queues[0]) == 8
    assert service.lose() == []
    service.worker_ready(0)
    for k in range(8):
        assert numbers(service.decide()) == [k], "each alone"
        assert service.decide() == []
        service.finish(seconds=QUICK)
        service.answer(ask)
    assert ask.next == 8


def test_innocent_queue_mates_are_never_given_up() -> None:
    """A poisonous batch is given up; those that were queued behind it are made, however often it killed a worker."""
    service = Service()
    service.teach(TRAIN, seconds=QUICK)
    ask = service.ask("a", TRAIN, 0, 20)
    given_up = []
    while ask.next < ask.stop:
        service.decide()
        while service.queues[0]:
            if service.queues[0][0].batch == 3:
                given_up += service.lose()
                service.worker_ready(0)
            else:
                service.finish(seconds=QUICK)
        service.answer(ask)
    assert numbers(given_up) == [3]
    assert service.begun[Address(*TRAIN, 3)] == MAX_ATTEMPTS + 1


def test_an_acquitted_batch_is_no_suspect_any_more() -> None:
    """A batch that was made is forgiven the deaths before: work is queued as it was."""
    service = Service()
    service.teach(TRAIN, seconds=QUICK)
    ask = service.ask("a", TRAIN, 0, 4)
    service.decide()
    service.lose()
    service.worker_ready(0)
    while ask.next < ask.stop:
        service.decide()
        service.finish(seconds=QUICK)
        service.answer(ask)
    service.ask("b", ("train", 1), 0, 4)
    service.decide()
    assert len(service.queues[0]) == 4


def test_a_suspect_does_not_keep_others_from_the_idle_workers() -> None:
    """While one worker has a suspect alone, the other workers are given work."""
    service = Service(workers=3)
    service.teach(TRAIN, OTHER)
    service.ask("a", TRAIN, 0, 1)
    service.decide()
    service.lose(0)
    service.worker_ready(0)
    service.ask("b", OTHER, 0, 9)
    assert sorted(names(service.decide())) == ["other 0", "other 1", "train 0"]


def test_a_suspect_that_a_client_waits_for_is_not_starved_by_work_ahead() -> None:
    """It needs a worker with nothing else to do: no worker may be kept busy with less urgent work until it is begun."""
    service = Service()
    service.teach(OTHER, seconds=QUICK)
    service.teach(TRAIN, seconds=SLOW)
    waiting = service.ask("a", TRAIN, 0, 2)
    # two batches in one queue: unknown times are taken for short ones
    service.dispatcher.forget_loader("train")
    service.decide()
    assert numbers(service.queues[0]) == [0, 1]
    service.lose()
    service.worker_ready(0)
    service.decide()
    service.finish()
    k = 0
    busy = service.ask("b", OTHER, k, k + 1, ahead=50)
    service.decide()
    assert service.answer(waiting) == [0]
    for _ in range(500):
        service.decide()
        if Address(*TRAIN, 1) in service.running():
            break
        service.finish(seconds=QUICK)
        while service.answer(busy):
            service.dispatcher.close(busy)
            k += 1
            busy = service.ask("b", OTHER, k, k + 1, ahead=50)
    assert k < 2 * module.MAX_QUEUE


def test_a_lost_worker_that_had_nothing_blames_nobody() -> None:
    """An idle worker's death changes nothing, even of one that was never ready."""
    service = Service(workers=2)
    assert service.lose(0) == []
    assert service.dispatcher.worker_lost(5) == []
    ask = service.ask("a", TRAIN, 0, 3)
    run_through(service, ask)
    assert ask.next == 3


def test_what_a_worker_finished_before_it_died_stays() -> None:
    """Only what it still had is made again."""
    service = Service(workers=1)
    service.ask("a", TRAIN, 0, 2)
    service.decide()
    service.finish()
    service.lose()
    service.worker_ready(1)
    assert numbers(service.decide()) == [1]


# --- No leak ------------------------------------------------------------------------------------------------------


def containers(dispatcher: Dispatcher) -> dict[str, int]:
    """Names and sizes of what a dispatcher holds, as far as it holds anything."""
    held = {name: len(value) for name, value in vars(dispatcher).items() if isinstance(value, Sized)}
    return {name: size for name, size in held.items() if size}


def let_go_of_all(service: Service) -> None:
    """All consumers, workers and loaders go; what is kept is let go."""
    for consumer in service.dispatcher.consumers():
        for ask in list(consumer.asks):
            service.dispatcher.close(ask)
    service.finish_all()
    service.pass_time(FORGET_AFTER + 1)
    service.empty_cache()
    for worker in list(service.queues):
        service.lose(worker)
    for loader in {address.loader for address in service.begun}:
        service.dispatcher.forget_loader(loader)


def test_nothing_is_left_of_consumers_that_have_gone() -> None:
    """When all have gone and all is let go, the dispatcher holds no memory and no record of anything."""
    service = Service(budget=10, workers=2)
    for who, run, start in (("a", TRAIN, 0), ("b", TRAIN, 5), ("a", OTHER, 3), ("a", TRAIN, 50)):
        ask = service.ask(who, run, start, start + 9, ahead=9)
        for _ in range(4):
            service.decide()
            service.finish_all()
            service.answer(ask)
    let_go_of_all(service)
    assert service.ready == {}
    assert service.dispatcher.memory_used == 0
    assert containers(service.dispatcher) == {}


def test_nothing_is_left_of_suspects_that_nobody_wants() -> None:
    """A batch that died with its worker, and whose consumer has gone, is forgotten too."""
    service = Service()
    ask = service.ask("a", TRAIN, 0, 1)
    service.decide()
    service.dispatcher.close(ask)
    service.lose()
    let_go_of_all(service)
    assert containers(service.dispatcher) == {}


# --- Random games against a model ---------------------------------------------------------------------------------

EPOCH = 12
SMALL_LIMITS = {"MAX_BATCHES": 9, "MAX_ASKED": 4, "MAX_BEHIND": 3, "MAX_QUEUE": 3}
"""Limits that short games meet."""

pick = st.integers(0, 10**6)


class Game(RuleBasedStateMachine):
    """Clients, workers and time do as they like; the dispatcher decides now and then."""

    @initialize(budget=st.integers(1, 30), workers=st.integers(1, 3))
    def begin(self, budget: int, workers: int) -> None:
        """A memory of a few batches, some workers."""
        self.service = Service(budget, 0)
        self.workers = range(workers)
        self.asks: list[Ask] = []
        self.sizes: dict[str, float] = {}
        self.estimates: dict[Address, int] = {}
        self.deaths: Counter[Address] = Counter()
        """How often a batch died alone since it was made last."""
        self.recorded: dict[Address, int] = {}
        """The same, as far as nobody forgot it since."""
        self.patch = pytest.MonkeyPatch()
        for name, limit in SMALL_LIMITS.items():
            self.patch.setattr(module, name, limit)

    # -- clients

    @rule(
        who=st.sampled_from("abc"),
        run=st.tuples(st.sampled_from(["x", "y"]), st.integers(0, 1)),
        start=st.integers(0, EPOCH - 1),
        length=st.integers(1, 6),
        ahead=st.integers(0, 6),
    )
    def ask(self, who: str, run: Run, start: int, length: int, ahead: int) -> None:
        """A client asks for some batches, anywhere."""
        stop = min(EPOCH, start + length)
        self.asks.append(self.service.dispatcher.ask(who, run, EPOCH, start, stop, ahead, self.service.now))

    @precondition(lambda self: self.asks)
    @rule(pick=pick, most=st.integers(1, 3))
    def send(self, pick: int, most: int) -> None:
        """A client takes what is ready for it, or some of it."""
        ask = self.asks[pick % len(self.asks)]
        self.service.answer(ask, most)
        if ask.next == ask.stop:
            self.drop(ask)

    @precondition(lambda self: self.asks)
    @rule(pick=pick)
    def hang_up(self, pick: int) -> None:
        """A client goes, whatever it has got."""
        self.drop(self.asks[pick % len(self.asks)])

    def drop(self, ask: Ask) -> None:
        """The request is over."""
        self.asks.remove(ask)
        self.service.dispatcher.close(ask)

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
        """That worker does."""
        address = self.service.finish(worker, nbytes, seconds)
        before = self.sizes.get(address.loader)
        self.sizes[address.loader] = nbytes if before is None else 0.8 * before + 0.2 * nbytes
        self.forgive(address)

    def forgive(self, address: Address) -> None:
        """The batch is ready, whatever it is."""
        del self.estimates[address]
        self.deaths.pop(address, None)
        self.recorded.pop(address, None)

    @rule(pick=pick)
    def lose(self, pick: int) -> None:
        """A worker dies: who died alone three times, and no other, is given up."""
        if not self.service.queues:
            return
        worker = list(self.service.queues)[pick % len(self.service.queues)]
        queue = list(self.service.queues[worker])
        for address in queue:
            self.deaths[address] += len(queue) == 1
            self.recorded[address] = self.recorded.get(address, 0) + (len(queue) == 1)
        given_up = self.service.lose(worker)
        for address in queue:
            if address in given_up:
                assert self.deaths[address] >= MAX_ATTEMPTS
                self.forgive(address)
            else:
                assert self.recorded[address] < MAX_ATTEMPTS
                del self.estimates[address]
        self.forget_suspects()

    # -- time

    @rule(seconds=st.sampled_from([1.0, FORGET_AFTER / 2, FORGET_AFTER + 1]))
    def pass_time(self, seconds: float) -> None:
        """Those that have gone are forgotten, and loaders that nobody uses."""
        before = {(c.name, c.run): (c.asks, c.last_seen) for c in self.service.dispatcher.consumers()}
        self.service.pass_time(seconds)
        after = {(c.name, c.run) for c in self.service.dispatcher.consumers()}
        for known, (asks, last_seen) in before.items():
            assert (known in after) == (bool(asks) or self.service.now - last_seen <= FORGET_AFTER)
        for loader in "xy":
            batches = [*self.service.running(), *self.service.ready]
            if not any(run[0] == loader for _, run in after) and not any(a.loader == loader for a in batches):
                self.service.dispatcher.forget_loader(loader)
                self.sizes.pop(loader, None)
        self.forget_suspects()

    def forget_suspects(self) -> None:
        """A dispatcher may forget who died, when no consumer and no batch of the run is left."""
        known = {consumer.run for consumer in self.service.dispatcher.consumers()}
        known |= {(address.loader, address.epoch) for address in (*self.service.running(), *self.service.ready)}
        self.recorded = {a: count for a, count in self.recorded.items() if (a.loader, a.epoch) in known}

    # -- decisions

    @rule()
    def decide(self) -> None:
        """What is decided may be done (`Service.decide`), and nobody waits who could be served."""
        for address in self.service.decide():
            self.estimates[address] = int(self.sizes.get(address.loader, 0))
        self.forget_suspects()
        for queue in self.service.queues.values():
            assert len(queue) <= module.MAX_QUEUE + 1
            assert len(queue) == 1 or not any(address in self.recorded for address in queue), "suspects are alone"
        begun = {*self.service.ready, *self.service.running()}
        idle = any(not queue for queue in self.service.queues.values())
        waiting = [ask for ask in self.asks if Address(*ask.consumer.run, ask.next) not in begun]
        assert not idle or not waiting

    @invariant()
    def memory_is_counted(self) -> None:
        """What is kept, and the estimates of what is being made."""
        if hasattr(self, "service"):
            used = self.service.dispatcher.memory_used
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
        wanted = sum(ask.stop - ask.next for ask in self.asks)
        for _ in range(2 * wanted + 2):
            self.decide()
            for worker, queue in self.service.queues.items():
                while queue:
                    self.done(worker, 2, 0.003)
            for ask in list(self.asks):
                self.service.answer(ask)
                if ask.next == ask.stop:
                    self.drop(ask)
        assert self.asks == [], "somebody waits for ever"

    def leave_nothing(self) -> None:
        """No consumer, no batch, no worker: no record."""
        self.decide()
        for worker, queue in self.service.queues.items():
            while queue:
                self.done(worker, 1, 0.003)
        let_go_of_all(self.service)
        assert self.service.ready == {}
        assert self.service.dispatcher.memory_used == 0
        left: dict[str, Any] = containers(self.service.dispatcher)
        assert left == {}


TestRandomGames = Game.TestCase
TestRandomGames.settings = settings(max_examples=150, stateful_step_count=50, deadline=None, derandomize=True)
