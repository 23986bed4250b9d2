"""Workers that are slow, recycled or killed: their batches, and assignment of new ones."""

from __future__ import annotations

import pytest

from teleloader_server.dispatch.dispatcher import MAX_ATTEMPTS
from teleloader_shared.codec import BatchId
from tests.server.dispatching import OTHER, QUICK, TRAIN, Service, complete, numbers

pytestmark = pytest.mark.usefixtures("dispatcher_figures")


def test_a_batch_that_hung_is_given_up_at_once() -> None:
    """Only the batch that hung fails; the queued ones go to several other workers, since none of them is suspected."""
    service = Service()
    service.warm_up(TRAIN, seconds=QUICK)
    request = service.request("a", TRAIN, 0, 8)
    service.decide()
    service.finish(seconds=QUICK)
    assert numbers(service.lose_worker(attribution=BatchId(*TRAIN, 1))) == [1]
    service.worker_ready(0)
    assert numbers(service.decide()) == [2, 3, 4, 5, 6, 7]
    service.finish_all(seconds=QUICK)
    assert service.send_ready(request) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert service.started[BatchId(*TRAIN, 1)] == 1


def test_what_is_nobodys_fault_is_never_held_against_a_batch() -> None:
    """A batch is retried however often its worker is preempted."""
    service = Service()
    service.warm_up(TRAIN)
    request = service.request("a", TRAIN, 0, 2)
    for _ in range(2 * MAX_ATTEMPTS):
        assert numbers(service.decide()) == [0]
        assert service.lose_worker(attribution="nobody") == []
        service.worker_ready(0)
    assert complete(service, request) == [0, 1]


def test_what_is_nobodys_fault_makes_no_suspects() -> None:
    """After such an exit, batches are queued as before."""
    service = Service()
    service.warm_up(TRAIN, seconds=QUICK)
    service.request("a", TRAIN, 0, 8)
    service.decide()
    service.lose_worker(attribution="nobody")
    service.worker_ready(0)
    assert numbers(service.decide()) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_suspect_stays_one_whatever_happens_to_others() -> None:
    """Earlier exits still count after its worker was preempted."""
    service = Service()
    service.warm_up(TRAIN)
    service.request("a", TRAIN, 0, 1)
    for _ in range(MAX_ATTEMPTS - 1):
        service.decide()
        assert service.lose_worker() == []
        service.worker_ready(0)
    service.decide()
    assert numbers(service.lose_worker(attribution="nobody")) == []
    service.worker_ready(0)
    service.decide()
    assert numbers(service.lose_worker()) == [0]


def test_what_waits_behind_a_slow_batch_is_made_by_others() -> None:
    """The slow batch keeps its worker, which gets no other batches until it continues."""
    service = Service(workers=2)
    service.warm_up(TRAIN, OTHER, seconds=QUICK)
    request = service.request("a", TRAIN, 0, 8)
    service.decide()
    slow, *waiting = service.queues[0]
    assert service.stall(0, waiting)
    assert sorted(numbers(service.decide())) == sorted(numbers(waiting))
    assert service.queues[0] == [slow]
    other = service.request("b", OTHER, 0, 4)
    service.decide()
    while service.queues[1]:
        service.finish(1, seconds=QUICK)
        service.decide()
    assert service.send_ready(other) == [0, 1, 2, 3]
    assert service.queues[0] == [slow]
    assert service.finish(0) == slow
    service.resume(0)
    assert service.send_ready(request) == [0, 1, 2, 3, 4, 5, 6, 7]
    service.request("c", ("train", 1), 0, 8)
    service.decide()
    assert service.queues[0]


def test_in_turn_no_other_worker_computes_queued_batches() -> None:
    """Only its own worker can compute a shard's next batch."""
    service = Service(workers=2, in_turn=2)
    service.request("a", TRAIN, 0, 6)
    service.decide()
    assert numbers(service.queues[0]) == [0, 2, 4]
    assert not service.stall(0, service.queues[0][1:])
    assert service.decide() == []


def test_a_worker_that_is_recycled_completes_its_batches_and_gets_no_more() -> None:
    """Other workers compute the rest, and the replacement gets batches again."""
    service = Service(workers=2)
    service.warm_up(TRAIN)
    request = service.request("a", TRAIN, 0, 6)
    assert numbers(service.decide()) == [0, 1]
    service.recycle(0)
    service.finish(0)
    assert service.decide() == []
    service.finish(1)
    assert numbers(service.decide()) == [2]
    assert service.queues[0] == []
    service.worker_ready(0)
    assert numbers(service.decide()) == [3]
    assert numbers(service.queues[0]) == [3]
    assert complete(service, request) == [4, 5]


@pytest.mark.parametrize("in_turn", [0, 1])
def test_a_worker_in_turn_that_is_recycled_gets_no_more_batches(in_turn: int) -> None:
    """Its batches wait for the replacement."""
    service = Service(in_turn=in_turn)
    service.request("a", TRAIN, 0, 2)
    service.recycle(0)
    assert service.decide() == []
    service.worker_ready(0)
    assert numbers(service.decide()) == [0, 1]


def test_a_replacement_is_not_stalled() -> None:
    """A replacement is not stalled even if its predecessor was."""
    service = Service()
    service.request("a", TRAIN, 0, 1)
    service.decide()
    assert service.stall(0, list(service.queues[0]))
    service.recycle(0)
    assert service.decide() == []
    service.worker_ready(0)
    assert numbers(service.decide()) == [0]


@pytest.mark.parametrize("attribution", ["unknown", "nobody"])
def test_the_replacement_of_a_lost_worker_is_neither_stalled_nor_recycling(attribution: str) -> None:
    """Both states belong to the process, not to the worker ID."""
    service = Service()
    service.request("a", TRAIN, 0, 1)
    service.decide()
    service.stall(0, [])
    service.recycle(0)
    service.lose_worker(0, "unknown" if attribution == "unknown" else "nobody")
    assert service.decide() == []
    service.worker_ready(0)
    assert numbers(service.decide()) == [0]


def test_a_worker_whose_batches_were_all_reassigned_is_idle() -> None:
    """It gets batches again as soon as it resumes, although another worker is busy with a slow batch."""
    service = Service(workers=2)
    service.warm_up(TRAIN, seconds=QUICK)
    service.warm_up(OTHER)
    service.request("b", OTHER, 0, 1)
    service.decide()
    (busy,) = [worker for worker, queue in service.queues.items() if queue]
    service.request("a", TRAIN, 0, 8)
    service.decide()
    idle = 1 - busy
    waiting = list(service.queues[idle])
    assert len(waiting) == 8
    assert service.stall(idle, waiting)
    service.resume(idle)
    assert numbers(service.decide()) == numbers(waiting)
