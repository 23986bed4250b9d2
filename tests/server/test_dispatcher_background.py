"""Background consumers: their batches have the lowest priority of all principals, and displace no others."""

from __future__ import annotations

import pytest

from teleloader_server.dispatch.records import Epoch
from tests.server.dispatching import OTHER, THIRD, TRAIN, Service, names, numbers

pytestmark = pytest.mark.usefixtures("dispatcher_figures")

NEXT: Epoch = (TRAIN[0], TRAIN[1] + 1)


def test_batches_of_a_background_consumer_go_last() -> None:
    """They go after prefetched batches, also after those of a principal that was served more."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    service.request("a", OTHER, 0, 2, ahead=2, of="served more")
    for _ in range(2):
        service.decide()
        service.finish()
    service.request("b", NEXT, 0, 2, of="served less", is_background=True)
    order: list[str] = []
    while started := service.decide():
        order += names(started)
        service.finish()
    assert order == ["other 2", "other 3", "train 0", "train 1"]


def test_a_background_batch_is_started_only_on_an_idle_worker() -> None:
    """A batch that a client awaits is therefore never queued behind it."""
    service = Service()
    service.warm_up(TRAIN, OTHER, seconds=0.0)  # such batches are otherwise queued for a busy worker
    service.request("a", OTHER, 0, 1)
    assert names(service.decide()) == ["other 0"]
    service.request("b", NEXT, 0, 1, is_background=True)
    assert service.decide() == []
    service.request("c", THIRD, 0, 1)
    assert names(service.decide()) == ["third 0"]
    service.finish_all()
    assert names(service.decide()) == ["train 0"]


def test_a_request_with_normal_priority_ends_the_low_priority_of_a_consumer() -> None:
    """All batches of the consumer then go in the usual order."""
    service = Service()
    service.warm_up(TRAIN, OTHER)
    service.request("b", NEXT, 0, 2, is_background=True)
    service.request("b", NEXT, 2, 3)
    service.request("a", OTHER, 0, 1, ahead=3)
    order: list[str] = []
    while started := service.decide():
        order += names(started)
        service.finish()
    assert order.index("other 1") > max(order.index(f"train {k}") for k in (0, 1, 2))


def test_a_background_batch_evicts_no_batch_that_a_consumer_wants() -> None:
    """With full memory, it is not started."""
    service = Service(budget=30)
    service.warm_up(TRAIN, OTHER, nbytes=10)
    service.request("a", OTHER, 0, 1, ahead=9)
    while service.decide():
        service.finish(nbytes=10)
    assert sorted(numbers(service.ready, OTHER)) == [0, 1, 2]
    service.request("b", NEXT, 0, 1, is_background=True)
    assert service.decide() == []
    assert service.evicted == []


def test_background_batches_are_evicted_before_all_others() -> None:
    """Prefetching for a current epoch evicts them, although the next epoch needs its first batch first."""
    service = Service(budget=30)
    service.warm_up(TRAIN, OTHER, nbytes=10)
    service.request("b", NEXT, 0, 3, is_background=True)
    while service.decide():
        service.finish(nbytes=10)
    assert sorted(numbers(service.ready, NEXT)) == [0, 1, 2]
    service.request("a", OTHER, 0, 1, ahead=2)
    while service.decide():
        service.finish(nbytes=10)
    assert sorted(numbers(service.ready, OTHER)) == [0, 1, 2]
    assert numbers(service.ready, NEXT) == []
