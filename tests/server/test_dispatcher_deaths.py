"""Workers that die: nothing is lost, and the cause is found out."""

from __future__ import annotations

import pytest

from teleloader_server.dispatch import dispatcher
from teleloader_server.dispatch.dispatcher import MAX_ATTEMPTS
from teleloader_server.workers.health import WorkerExit
from teleloader_shared.codec import Address
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


def test_what_a_lost_worker_had_is_made_by_others() -> None:
    """Nothing is lost and nothing is doubled: its batches go to workers that live."""
    service = Service(workers=2)
    service.warm_up(TRAIN)
    request = service.request("a", TRAIN, 0, 4)
    service.decide()
    assert service.lose_worker(0) == []
    complete(service, request)
    assert request.next == 4
    assert service.started[Address(*TRAIN, 0)] == 2
    assert [service.started[Address(*TRAIN, k)] for k in (1, 2, 3)] == [1, 1, 1]


def test_a_batch_that_kills_its_workers_is_given_up() -> None:
    """After MAX_ATTEMPTS deaths of workers that had nothing else, an error stands in its place."""
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


def test_a_batch_that_was_given_up_may_be_tried_anew_later() -> None:
    """The error is a batch like any other: once it is gone, the batch has its three attempts again."""
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


def test_only_a_batch_that_died_alone_is_blamed() -> None:
    """Of several that a worker had, none is blamed: each is then given to a worker that has nothing else."""
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


def test_innocent_queue_mates_are_never_given_up() -> None:
    """A poisonous batch is given up; those that were queued behind it are made, however often it killed a worker."""
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
    assert service.started[Address(*TRAIN, 3)] == MAX_ATTEMPTS + 1


def test_an_acquitted_batch_is_no_suspect_any_more() -> None:
    """A batch that was made is forgiven the deaths before: work is queued as it was."""
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


def test_a_suspect_does_not_keep_others_from_the_idle_workers() -> None:
    """While one worker has a suspect alone, the other workers are given work."""
    service = Service(workers=3)
    service.warm_up(TRAIN, OTHER)
    service.request("a", TRAIN, 0, 1)
    service.decide()
    service.lose_worker(0)
    service.worker_ready(0)
    service.request("b", OTHER, 0, 9)
    assert sorted(names(service.decide())) == ["other 0", "other 1", "train 0"]


def test_a_suspect_that_a_client_waits_for_is_not_starved_by_work_ahead() -> None:
    """It needs a worker with nothing else to do: no worker may be kept busy with less urgent work until it is begun."""
    service = Service()
    service.warm_up(OTHER, seconds=QUICK)
    service.warm_up(TRAIN, seconds=SLOW)
    waiting = service.request("a", TRAIN, 0, 2)
    # two batches in one queue: unknown times are taken for short ones
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
        if Address(*TRAIN, 1) in service.running():
            break
        service.finish(seconds=QUICK)
        while service.send_ready(busy):
            service.dispatcher.close(busy)
            k += 1
            busy = service.request("b", OTHER, k, k + 1, ahead=50)
    assert k * QUICK <= SLOW + dispatcher.LOSS_SECONDS + dispatcher.QUEUE_SECONDS, (
        "the other one had what this one has had"
    )


def test_a_lost_worker_that_had_nothing_blames_nobody() -> None:
    """An idle worker's death changes nothing, even of one that was never ready."""
    service = Service(workers=2)
    assert service.lose_worker(0) == []
    assert service.dispatcher.worker_lost(5, [], WorkerExit("killed")) == []
    request = service.request("a", TRAIN, 0, 3)
    complete(service, request)
    assert request.next == 3


def test_what_a_worker_finished_before_it_died_stays() -> None:
    """Only what it still had is made again."""
    service = Service(workers=1)
    service.request("a", TRAIN, 0, 2)
    service.decide()
    service.finish()
    service.lose_worker()
    service.worker_ready(1)
    assert numbers(service.decide()) == [1]


def test_a_batch_of_a_closed_request_is_not_computed_again() -> None:
    """Its worker was lost, and so was the request that may have been the only one to know its indices."""
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
