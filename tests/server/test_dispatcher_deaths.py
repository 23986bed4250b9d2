"""Workers that exit: their batches are recomputed, and the batch that caused the exit is identified."""

from __future__ import annotations

import pytest

from teleloader_server.dispatch import dispatcher
from teleloader_server.dispatch.dispatcher import MAX_ATTEMPTS
from teleloader_server.workers.health import WorkerExit
from teleloader_shared.codec import BatchId
from tests.server.dispatching import (
    OTHER,
    QUICK,
    SLOW,
    TRAIN,
    Service,
    complete,
    names,
    numbers,
)

pytestmark = pytest.mark.usefixtures("dispatcher_figures")


def test_batches_of_a_lost_worker_are_computed_by_other_workers() -> None:
    """The client receives every batch once."""
    service = Service(workers=2)
    service.warm_up(TRAIN)
    request = service.request("a", TRAIN, 0, 4)
    service.decide()
    assert service.lose_worker(0) == []
    complete(service, request)
    assert request.next == 4
    assert service.started[BatchId(*TRAIN, 0)] == 2
    assert [service.started[BatchId(*TRAIN, k)] for k in (1, 2, 3)] == [1, 1, 1]


def test_a_batch_that_kills_max_attempts_workers_fails() -> None:
    """Only workers without other batches count: then an error takes the place of the batch."""
    service = Service()
    service.warm_up(TRAIN)
    request = service.request("a", TRAIN, 0, 2)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert numbers(service.decide()) == [0]
        failed = service.lose_worker()
        assert numbers(failed) == ([0] if attempt == MAX_ATTEMPTS else [])
        service.worker_ready(0)
    assert service.send_ready(request) == [0]
    assert complete(service, request) == [1]


def test_a_failed_batch_is_retried_after_its_failure_was_evicted() -> None:
    """The batch has `MAX_ATTEMPTS` attempts again."""
    service = Service(budget=2)
    service.warm_up(TRAIN)
    request = service.request("a", TRAIN, 0, 1)
    for _ in range(MAX_ATTEMPTS):
        service.decide()
        failed = service.lose_worker()
        service.worker_ready(0)
    assert numbers(failed) == [0]
    service.send_ready(request)
    service.dispatcher.close(request)
    complete(service, service.request("b", OTHER, 0, 4))
    assert numbers(service.ready) == []
    service.request("a", TRAIN, 0, 1)
    for _ in range(MAX_ATTEMPTS - 1):
        assert numbers(service.decide()) == [0]
        assert service.lose_worker() == []
        service.worker_ready(0)


def test_a_batch_is_blamed_only_if_its_worker_had_no_other() -> None:
    """After a worker with several batches died, each of them is assigned to a worker without other batches."""
    service = Service()
    service.warm_up(TRAIN, seconds=QUICK)
    request = service.request("a", TRAIN, 0, 8)
    service.decide()
    assert len(service.queues[0]) == 8
    assert service.lose_worker() == []
    service.worker_ready(0)
    for k in range(8):
        assert numbers(service.decide()) == [k], "each alone"
        assert service.decide() == []
        service.finish(seconds=QUICK)
        service.send_ready(request)
    assert request.next == 8


def test_batches_queued_behind_a_fatal_batch_do_not_fail() -> None:
    """They are computed, however many workers the fatal batch killed."""
    service = Service()
    service.warm_up(TRAIN, seconds=QUICK)
    request = service.request("a", TRAIN, 0, 20)
    failed = []
    while request.next < request.stop:
        service.decide()
        while service.queues[0]:
            if service.queues[0][0].batch == 3:
                failed += service.lose_worker()
                service.worker_ready(0)
            else:
                service.finish(seconds=QUICK)
        service.send_ready(request)
    assert numbers(failed) == [3]
    assert service.started[BatchId(*TRAIN, 3)] == MAX_ATTEMPTS + 1


def test_a_completed_batch_is_not_suspect() -> None:
    """Its earlier worker exits do not count: further batches are queued behind it."""
    service = Service()
    service.warm_up(TRAIN, seconds=QUICK)
    request = service.request("a", TRAIN, 0, 4)
    service.decide()
    service.lose_worker()
    service.worker_ready(0)
    while request.next < request.stop:
        service.decide()
        service.finish(seconds=QUICK)
        service.send_ready(request)
    service.request("b", ("train", 1), 0, 4)
    service.decide()
    assert len(service.queues[0]) == 4


def test_a_suspect_batch_does_not_block_idle_workers() -> None:
    """While one worker computes a suspect batch, other workers get batches."""
    service = Service(workers=3)
    service.warm_up(TRAIN, OTHER)
    service.request("a", TRAIN, 0, 1)
    service.decide()
    service.lose_worker(0)
    service.worker_ready(0)
    service.request("b", OTHER, 0, 9)
    assert sorted(names(service.decide())) == ["other 0", "other 1", "train 0"]


def test_prefetching_does_not_starve_an_awaited_suspect_batch() -> None:
    """No worker gets prefetched batches until the suspect batch, which needs an empty queue, has started."""
    service = Service()
    service.warm_up(OTHER, seconds=QUICK)
    service.warm_up(TRAIN, seconds=SLOW)
    waiting = service.request("a", TRAIN, 0, 2)
    # two batches in one queue, because unknown durations are assumed to be short
    service.loader("train").batch_seconds = None
    service.decide()
    assert numbers(service.queues[0]) == [0, 1]
    service.lose_worker()
    service.worker_ready(0)
    service.decide()
    service.finish()
    k = 0
    busy = service.request("b", OTHER, k, k + 1, ahead=50)
    service.decide()
    assert service.send_ready(waiting) == [0]
    for _ in range(1000):
        service.decide()
        if BatchId(*TRAIN, 1) in service.running():
            break
        service.finish(seconds=QUICK)
        while service.send_ready(busy):
            service.dispatcher.close(busy)
            k += 1
            busy = service.request("b", OTHER, k, k + 1, ahead=50)
    assert k * QUICK <= SLOW + dispatcher.LOSS_SECONDS + dispatcher.QUEUE_SECONDS, (
        "the other one had what this one has had"
    )


def test_the_death_of_an_idle_worker_has_no_effect() -> None:
    """An idle worker's exit has no effect, even if it was never ready."""
    service = Service(workers=2)
    assert service.lose_worker(0) == []
    assert service.dispatcher.worker_lost(5, [], WorkerExit("killed")) == []
    request = service.request("a", TRAIN, 0, 3)
    complete(service, request)
    assert request.next == 3


def test_completed_batches_of_a_lost_worker_are_kept() -> None:
    """Only its other batches are recomputed."""
    service = Service(workers=1)
    service.request("a", TRAIN, 0, 2)
    service.decide()
    service.finish()
    service.lose_worker()
    service.worker_ready(1)
    assert numbers(service.decide()) == [1]


def test_a_lost_batch_of_a_closed_request_is_not_recomputed() -> None:
    """Only the closed request may have contained its indices."""
    service = Service()
    service.warm_up(TRAIN)
    request = service.request("a", TRAIN, 0, 1)
    assert numbers(service.decide()) == [0]
    service.dispatcher.close(request)
    service.lose_worker()
    service.worker_ready(0)
    assert service.decide() == []
    service.request("a", TRAIN, 0, 1)
    assert numbers(service.decide()) == [0]
