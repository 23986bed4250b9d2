"""Batches with slow samples start earlier, and batches of slow workers are computed by others, too."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server.dispatch.dispatcher import FORGET_AFTER
from teleloader_server.dispatch.records import Loader
from teleloader_server.dispatch.stragglers import BACKUP_ALLOWANCE, BACKUP_FACTOR, MIN_BATCHES
from teleloader_shared.codec import BatchId
from teleloader_shared.spec import LoaderSpec
from tests.server.dispatching import OTHER, QUICK, SLOW, TRAIN, Service, numbers

pytestmark = pytest.mark.usefixtures("dispatcher_figures")
BATCHES = 1000
NEXT = ("train", 1)
LATE = 100 * SLOW
"""Time of a slow sample in seconds."""
OVERDUE = 2 * BACKUP_FACTOR * SLOW
"""Seconds after which a worker takes unusually long."""


def trained(workers: int = 4, batches: int = BATCHES, budget: int = 10**9, in_turn: int = 0, **spec: object) -> Service:
    """Return a service with a loader whose batch k is sample k, and whose usual computing time is known."""
    service = Service(budget, workers, in_turn)
    known = LoaderSpec(**{"dataset": "data", **spec})  # type: ignore[arg-type]
    for key in ("train", "other"):
        loader = Loader(key, known, batches, batches, batch_seconds=SLOW, batch_nbytes=1.0)
        for _ in range(MIN_BATCHES):
            loader.times.add(SLOW)
        service.loaders[key] = loader
    return service


def learn(service: Service, *samples: int, seconds: float = LATE) -> None:
    """Make samples of the training slow."""
    service.loader("train").slow.learn((index, seconds) for index in samples)


# -- slow samples


@pytest.mark.parametrize(("position", "started"), [(0, [0, 1, 2, 3]), (200, [200, 900, 201, 202])])
def test_a_batch_with_a_slow_sample_starts_long_before_its_turn(position: int, started: list[int]) -> None:
    """It starts before the requested batches, once it is near enough."""
    service = trained()
    learn(service, 900)
    service.request("a", TRAIN, position, position + 4, ahead=4, batches=BATCHES)
    assert numbers(service.decide()) == started


def test_a_batch_for_which_the_client_waits_starts_first() -> None:
    """A slow sample delays no batch for which the client waits now."""
    service = trained(workers=2)
    learn(service, 2, 3)
    service.request("a", TRAIN, 0, 4, ahead=4, batches=BATCHES)
    assert numbers(service.decide()) == [0, 2]


def test_slow_samples_take_half_of_the_workers() -> None:
    """The others compute the batches before them."""
    service = trained(workers=4)
    learn(service, *range(20, 60))
    service.request("a", TRAIN, 0, 4, ahead=4, batches=BATCHES)
    assert numbers(service.decide()) == [0, 20, 21, 1]


def test_a_single_worker_computes_batches_in_their_order() -> None:
    """An early start would only delay the batches before it."""
    service = trained(workers=1)
    learn(service, 5)
    service.request("a", TRAIN, 0, 4, ahead=4, batches=BATCHES)
    assert numbers(service.decide()) == [0]


def test_no_batch_is_queued_behind_a_slow_sample() -> None:
    """Small batches are queued for workers that will soon be idle, and this one will not."""
    service = trained(workers=2)
    loader = service.loader("train")
    for _ in range(300):
        loader.times.add(QUICK)
    loader.batch_seconds = QUICK
    learn(service, 50)
    service.request("a", TRAIN, 0, 40, ahead=40, batches=BATCHES)
    started = numbers(service.decide())
    assert 50 in started
    (slow,) = [queue for queue in service.queues.values() if BatchId(*TRAIN, 50) in queue]
    assert slow == [BatchId(*TRAIN, 50)]
    assert len(started) > 3


@pytest.mark.parametrize(
    ("spec", "ahead", "in_turn"),
    [
        pytest.param({}, 0, 0, id="the client gets the following batches from other servers"),
        pytest.param({"order": "client", "session": "s"}, 4, 0, id="a sampler determines the order"),
        pytest.param({"session": "s", "num_workers": 4}, 4, 4, id="the batches depend on the worker"),
    ],
)
def test_no_batch_starts_early_if_the_order_is_unknown(spec: dict[str, Any], ahead: int, in_turn: int) -> None:
    """The server must know the samples of the following batches, and may choose the worker."""
    service = trained(in_turn=in_turn, **spec)
    learn(service, 50)
    service.request("a", TRAIN, 0, 4, ahead=ahead, batches=BATCHES)
    assert max(numbers(service.decide())) < 8


def test_full_memory_prevents_early_starts() -> None:
    """Batches that are needed first have priority."""
    service = trained(budget=6)
    learn(service, 50)
    service.request("a", TRAIN, 0, 4, ahead=4, batches=BATCHES)
    assert numbers(service.decide()) == [0, 1, 2, 3]


def test_early_batches_are_limited_by_their_size() -> None:
    """They take an eighth of the memory, however many slow samples there are; one may always start."""
    service = trained(budget=1600)
    loader = service.loader("train")
    loader.batch_nbytes = 50.0
    learn(service, *range(100, 200))
    request = service.request("a", TRAIN, 0, 4, ahead=4, batches=BATCHES)
    early: set[int] = set()
    for _ in range(10):
        early |= {k for k in numbers(service.decide()) if k >= 100}
        service.finish_all(nbytes=50)
        service.send_ready(request, 1)
    assert len(early) == 4


def test_a_sample_that_is_not_slow_any_more_is_forgotten() -> None:
    """The next epoch computes its batch in its turn."""
    service = trained()
    learn(service, 20)
    service.request("a", TRAIN, 0, 4, ahead=4, batches=BATCHES)
    service.decide()
    service.finish_all(seconds=0.01)
    assert not service.loader("train").slow.seconds


def test_a_sample_that_is_slow_is_learned_from_its_batch() -> None:
    """It changes the usual time of a batch neither the first time nor later."""
    service = trained()
    loader = service.loader("train")
    for epoch in (TRAIN, NEXT):
        service.request("a", epoch, 0, 1, batches=BATCHES)
        service.decide()
        learned = service.dispatcher.learn(BatchId(*epoch, 0), LATE, [(0, LATE)], [])
        service.finish(seconds=LATE)
        assert loader.slow.seconds == {0: LATE}
        assert loader.batch_seconds == SLOW
    assert learned.new == []


def test_the_worker_of_an_early_batch_may_exit() -> None:
    """The batch is started early again."""
    service = trained()
    learn(service, 20)
    request = service.request("a", TRAIN, 0, 8, ahead=4, batches=BATCHES)
    service.decide()
    (worker,) = [worker for worker, queue in service.queues.items() if BatchId(*TRAIN, 20) in queue]
    service.lose_worker(worker, attribution="nobody")
    service.worker_ready(worker)
    assert numbers(service.decide()) == [20]
    service.finish_all()
    assert service.send_ready(request, 1) == [0]


def test_the_worker_of_a_slow_batch_of_a_sampler_may_exit() -> None:
    """Its batch starts again when it is requested, and not early: its indices come with the request."""
    service = trained(order="client", session="s")
    learn(service, 0)
    request = service.request("a", TRAIN, 0, 8, ahead=4, batches=BATCHES)
    service.decide()
    service.dispatcher.store.batch(BatchId(*TRAIN, 0)).slow = service.loader("train").slow.batch([0])
    service.lose_worker(0, attribution="nobody")
    assert service.consumer("a").early == []
    service.worker_ready(0)
    service.decide()
    service.finish_all()
    assert service.send_ready(request, 1) == [0]


def test_batches_beyond_the_end_are_no_estimate_of_time_and_size() -> None:
    """The last worker of a stream finds its end at once, with a frame of few bytes."""
    service = trained()
    loader = service.loader("train")
    service.request("a", TRAIN, 0, BATCHES, batches=BATCHES)
    for _ in range(2 * MIN_BATCHES):
        for batch_id in service.decide():
            worker = next(number for number, queue in service.queues.items() if batch_id in queue)
            service.queues[worker].remove(batch_id)
            service.dispatcher.finished(worker, batch_id, service.frame(batch_id, 1000), QUICK, is_beyond=True)
    assert (loader.batch_seconds, loader.batch_nbytes, loader.times.typical) == (SLOW, 1.0, SLOW)


def test_a_slow_sample_at_the_start_of_the_next_epoch_is_computed_in_this_one() -> None:
    """Its batch is kept until the next epoch starts, and is sent then."""
    service = trained()
    learn(service, 3)
    request = service.request("a", TRAIN, 990, 1000, batches=BATCHES)
    service.consumer("a").looks_ahead = True  # as after a request with further batches
    service.dispatcher.sent(request, service.now, 0)
    started = service.decide()
    assert BatchId(*NEXT, 3) in started
    while request.next < request.stop:
        service.finish_all()
        service.send_ready(request)
        service.decide()
    service.dispatcher.close(request)
    service.empty_cache()
    assert BatchId(*NEXT, 3) in service.ready
    following = service.request("b", NEXT, 0, 8, ahead=4, batches=BATCHES)
    while following.next < following.stop:
        service.decide()
        service.finish_all()
        service.send_ready(following)
    assert service.started[BatchId(*NEXT, 3)] == 1


def test_an_epoch_that_never_starts_keeps_no_memory() -> None:
    """Its batches are evicted when their consumer is removed."""
    service = trained()
    learn(service, 3)
    request = service.request("a", TRAIN, 998, 1000, batches=BATCHES)
    service.consumer("a").looks_ahead = True
    service.dispatcher.sent(request, service.now, 0)
    service.decide()
    service.finish_all()
    service.send_ready(request)
    service.dispatcher.close(request)
    assert BatchId(*NEXT, 3) in service.ready
    service.pass_time(FORGET_AFTER + 1)
    service.empty_cache()
    assert not service.ready
    assert not service.memory.used


@given(
    st.integers(1, 60), st.integers(1, 7), st.integers(1, 5), st.sets(st.integers(0, 299), max_size=40), st.booleans(),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_each_batch_is_computed_once_and_sent_in_order(
    batches: int, batch_size: int, workers: int, slow: set[int], shuffle: bool, random: object
) -> None:
    """For random slow samples, over three epochs, with workers that complete their batches in a random order."""
    service = trained(workers, batches, batch_size=batch_size, shuffle=shuffle)
    service.loader("train").length = service.loader("other").length = batches * batch_size
    learn(service, *slow)
    for epoch in range(3):
        sent: list[int] = []
        for start in range(0, batches, 4):
            stop = min(start + 4, batches)
            request = service.request("a", ("train", epoch), start, stop, min(4, batches - stop), batches=batches)
            sent += service.send_ready(request)
            while request.next < request.stop:
                service.decide()
                busy = [worker for worker, queue in service.queues.items() if queue]
                service.finish(random.choice(busy))  # type: ignore[attr-defined]
                sent += service.send_ready(request)
            service.dispatcher.close(request)
        assert sent == list(range(batches))
    assert set(service.started.values()) == {1}
    early = {batch_id.epoch for batch_id in service.started}
    assert early <= {0, 1, 2, 3}


def test_the_prefetch_window_covers_batches_that_take_longer() -> None:
    """If one batch in fifty takes ten times as long, ten batches of each worker are prefetched."""
    service = trained(workers=2)
    times = service.loader("train").times
    for k in range(250):
        times.add(10 * SLOW if k % 50 == 0 else SLOW)
    service.request("a", TRAIN, 0, 2, ahead=2, batches=BATCHES)
    started = list(itertools.chain.from_iterable(iter(lambda: _computed(service), [])))
    assert started == list(range(2 + 2 * 10))


def _computed(service: Service) -> list[int]:
    started = numbers(service.decide())
    service.finish_all()
    return started


# -- slow workers


def stuck(service: Service) -> None:
    """Let a client wait for batch 0, whose worker 0 takes unusually long; the other workers become idle."""
    service.request("a", TRAIN, 0, 4, batches=BATCHES)
    service.decide()
    service.now = OVERDUE
    for worker in list(service.queues)[1:]:
        while service.queues[worker]:
            service.finish(worker)
            service.decide()


def test_an_idle_worker_computes_the_batch_of_a_stuck_one() -> None:
    """The first result counts; the stuck worker gets no batches until it continues."""
    service = trained(workers=2)
    stuck(service)
    assert service.back_up() == [(1, BatchId(*TRAIN, 0))]
    assert service.back_up() == [], "one backup is enough"
    service.finish(1)
    assert service.withdrawn == [0]
    (request,) = service.consumer("a").requests
    assert service.send_ready(request) == [0, 1, 2, 3]
    service.request("a", TRAIN, 4, 8, batches=BATCHES)
    assert numbers(service.decide()) == [4]
    assert not service.queues[0]
    service.resume(0)
    assert numbers(service.decide()) == [5]


def test_a_worker_that_continues_before_its_backup_wins() -> None:
    """The worker of the backup gets no batches until it has completed its computation."""
    service = trained(workers=2)
    stuck(service)
    service.back_up()
    before = service.consumer("a").served
    service.finish(0, seconds=OVERDUE + SLOW)
    assert service.withdrawn == [1]
    assert service.consumer("a").served == pytest.approx(before + OVERDUE + SLOW - SLOW + SLOW), "both are charged"


def test_batches_behind_a_stuck_one_are_reassigned_before_its_backup() -> None:
    """Other workers compute them first, because the backup may take as long as the batch."""
    service = trained(workers=2)
    loader = service.loader("train")
    loader.batch_seconds = QUICK
    service.request("a", TRAIN, 0, 8, batches=BATCHES)
    service.decide()
    queued = service.queues[0][1:]
    assert queued
    while service.queues[1]:
        service.finish(1, seconds=QUICK)
        service.decide()
    queued = service.queues[0][1:]
    service.now = OVERDUE
    assert service.back_up() == []
    assert numbers(service.decide()) == numbers(queued)
    while service.queues[1]:
        service.finish(1, seconds=QUICK)
        service.decide()
    assert service.back_up() == [(1, BatchId(*TRAIN, 0))]


@pytest.mark.parametrize(
    "reason", ["soon", "prefetched", "unknown times", "no idle worker", "known samples", "spent", "in turn"]
)
def test_no_backup_starts_without_need(reason: str) -> None:
    """A backup needs a client that waits, an idle worker, and a batch that takes unusually long without a reason."""
    service = trained(workers=2, in_turn=2 if reason == "in turn" else 0)
    stuck(service)
    loader, backups = service.loader("train"), service.dispatcher._backups
    match reason:
        case "soon":
            service.now = SLOW
        case "prefetched":
            (request,) = service.consumer("a").requests
            service.dispatcher.close(request)
        case "unknown times":
            loader.times = type(loader.times)()
        case "no idle worker":
            service.request("b", OTHER, 0, 1, batches=BATCHES)
            service.decide()
        case "known samples":
            service.dispatcher.store.batch(BatchId(*TRAIN, 0)).slow = loader.slow.batch([])
            learn(service, 0)
            service.dispatcher.store.batch(BatchId(*TRAIN, 0)).slow = loader.slow.batch([0])
        case "spent":
            backups.spent = 2 * BACKUP_ALLOWANCE
    assert service.back_up() == []


@pytest.mark.parametrize("first", [0, 1])
def test_a_batch_with_a_backup_survives_one_exit(first: int) -> None:
    """It is computed again only if both workers exit."""
    service = trained(workers=2)
    stuck(service)
    service.back_up()
    assert service.lose_worker(first) == []
    service.worker_ready(first)
    assert service.decide() == []
    assert service.lose_worker(1 - first) == []
    service.worker_ready(1 - first)
    assert numbers(service.decide()) == [0]
    assert service.dispatcher._backups.running == 0


def test_a_batch_that_hangs_on_both_workers_fails_once() -> None:
    """The timeout of the second worker decides."""
    service = trained(workers=2)
    stuck(service)
    service.back_up()
    assert service.lose_worker(0, attribution=BatchId(*TRAIN, 0)) == []
    assert numbers(service.lose_worker(1, attribution=BatchId(*TRAIN, 0))) == [0]


def test_a_backup_ends_if_another_client_waits_for_its_worker() -> None:
    """A batch that is slow on both workers has slow samples, and the computation of one is enough."""
    service = trained(workers=2)
    stuck(service)
    service.back_up()
    service.now += OVERDUE
    assert service.dispatcher.backup_to_end(service.now) is None, "no other batch waits"
    service.request("b", OTHER, 0, 1, batches=BATCHES)
    assert service.decide() == []
    assert service.dispatcher.backup_to_end(service.now - OVERDUE) is None, "it may soon be complete"
    assert service.dispatcher.backup_to_end(service.now) == 1
    assert service.lose_worker(1, attribution="nobody") == []
    service.worker_ready(1)
    assert numbers(service.decide(), OTHER) == [0]
    service.finish(1)
    assert service.back_up() == [], "the batch gets no second backup"
    service.finish(0)
    assert not service.dispatcher._ended
