"""Groups: small batches are started together for one worker; all other rules apply to each batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader_server.loading.tasks import GROUP_BYTES, GROUP_SECONDS
from tests.conftest import examples
from tests.server.dispatching import BATCHES, OTHER, SLOW, TRAIN, Service, complete, numbers

BRIEF = GROUP_SECONDS / 100
"""Computing time in seconds of a batch of which 100 may form a group."""
TINY = GROUP_BYTES // 64
"""Size in bytes of a batch of which 64 may form a group."""


def test_small_batches_are_started_together() -> None:
    """A group has successive batches up to the maximum size."""
    service = Service()
    service.warm_up(TRAIN, nbytes=TINY, seconds=BRIEF)
    request = service.request("a", TRAIN, 0, 100)
    service.decide()
    assert service.groups == [list(range(64)), list(range(64, 100))]
    assert complete(service, request) == []


@pytest.mark.parametrize(
    ("nbytes", "seconds"), [(1, SLOW), (1, GROUP_SECONDS / 1.9), (GROUP_BYTES, BRIEF), (GROUP_BYTES // 2 + 1, BRIEF)]
)
def test_a_batch_that_is_slow_or_large_is_started_alone(nbytes: int, seconds: float) -> None:
    """Its client would wait for the other batches."""
    service = Service()
    service.warm_up(TRAIN, nbytes=nbytes, seconds=seconds)
    service.request("a", TRAIN, 0, 100)
    service.decide()
    assert {len(group) for group in service.groups} == {1}


def test_a_batch_of_unknown_cost_is_started_alone() -> None:
    """The first batches of a loader show what the others cost."""
    service = Service(workers=4)
    service.request("a", TRAIN, 0, 100)
    service.decide()
    assert service.groups[:4] == [[0], [1], [2], [3]]


def test_a_group_leaves_batches_to_idle_workers() -> None:
    """Few batches are divided among the workers."""
    service = Service(workers=4)
    service.warm_up(TRAIN, nbytes=TINY, seconds=BRIEF)
    service.request("a", TRAIN, 0, 8)
    service.decide()
    assert [len(queue) for queue in service.queues.values()] == [2, 2, 2, 2]
    assert [0, 1] in service.groups


def test_a_group_ends_at_a_batch_that_exists() -> None:
    """Consumers share each batch, also the batches of groups."""
    service = Service()
    service.warm_up(TRAIN, nbytes=TINY, seconds=BRIEF)
    first = service.request("a", TRAIN, 10, 20)
    service.decide()
    second = service.request("b", TRAIN, 0, 30)
    service.decide()
    assert service.groups == [list(range(10, 20)), list(range(10)), list(range(20, 30))]
    complete(service, first)
    complete(service, second)
    assert set(service.started.values()) == {1}


def test_a_group_has_only_batches_of_one_range() -> None:
    """The batches between two ranges are computed by other servers."""
    service = Service()
    service.warm_up(TRAIN, nbytes=TINY, seconds=BRIEF)
    service.request("a", TRAIN, 0, 12, without=range(4, 8))
    service.decide()
    assert service.groups == [[0, 1, 2, 3], [8, 9, 10, 11]]


def test_prefetched_batches_are_started_together() -> None:
    """They follow the requested ones, and end with the prefetch window."""
    service = Service()
    service.warm_up(TRAIN, nbytes=TINY, seconds=BRIEF)
    service.request("a", TRAIN, 0, 2, ahead=5)
    service.decide()
    assert service.groups == [[0, 1], [2, 3, 4, 5, 6]]


def test_a_suspect_batch_is_in_no_group() -> None:
    """The next worker exit must show which batch causes it."""
    service = Service()
    service.warm_up(TRAIN, nbytes=TINY, seconds=BRIEF)
    request = service.request("a", TRAIN, 0, 6)
    service.decide()
    assert service.groups == [[0, 1, 2, 3, 4, 5]]
    service.lose_worker()
    service.worker_ready(0)
    service.groups.clear()
    complete(service, request, TINY)
    assert service.groups == [[0], [1], [2], [3], [4], [5]]


def test_the_rest_of_a_slow_group_is_computed_by_another_worker() -> None:
    """Only the slow batch stays with its worker."""
    service = Service(workers=2)
    service.warm_up(TRAIN, nbytes=TINY, seconds=BRIEF)
    request = service.request("a", TRAIN, 0, 8)
    service.decide()
    slow, *behind = service.queues[0]
    service.stall(0, behind)
    assert numbers(service.decide()) == numbers(behind)
    service.finish_all(TINY, BRIEF)
    assert service.send_ready(request) == list(range(8))
    assert service.started[slow] == 1


def test_in_turn_a_group_has_the_batches_of_one_worker() -> None:
    """Each worker computes its own shard's batches in ascending order."""
    service = Service(workers=3, in_turn=3)
    service.warm_up(TRAIN, nbytes=TINY, seconds=BRIEF)
    service.request("a", TRAIN, 0, 9)
    service.decide()
    assert service.groups == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert [numbers(queue) for queue in service.queues.values()] == service.groups


def test_a_worker_gets_no_more_batches_than_its_process_may_compute() -> None:
    """A group ends where the process is to be recycled."""
    service = Service()
    service.warm_up(TRAIN, nbytes=TINY, seconds=BRIEF)
    service.health[0].room = 3
    service.request("a", TRAIN, 0, 10)
    service.decide()
    assert service.groups[0] == [0, 1, 2]


def test_a_group_that_does_not_fit_into_memory_is_not_started() -> None:
    """The batch for which the client waits is started alone."""
    service = Service(budget=10 * TINY)
    service.warm_up(TRAIN, nbytes=TINY, seconds=BRIEF)
    service.request("a", TRAIN, 0, 30)
    service.decide()
    assert service.dispatcher.store.used <= 10 * TINY
    assert service.groups[0] == [0]


@settings(max_examples=examples(60))
@given(
    requests=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 200), st.integers(0, 80)), min_size=1, max_size=5),
    workers=st.integers(1, 4),
    budget=st.sampled_from([4, 40, 10**6]),
    limit=st.integers(1, 40),
)
def test_each_request_gets_its_batches_in_order(
    requests: list[tuple[int, int, int]], workers: int, budget: int, limit: int
) -> None:
    """Groups change neither the order, nor which batches are computed, even if memory is full."""
    service = Service(budget=budget * TINY, workers=workers)
    service.warm_up(TRAIN, OTHER, nbytes=TINY, seconds=BRIEF)
    opened = [
        (start, count, service.request(f"c{place}", TRAIN if place % 2 else OTHER, start, start + count, ahead))
        for place, (start, count, ahead) in enumerate(requests)
    ]
    sent: list[list[int]] = [[] for _ in opened]
    for _ in range(BATCHES):
        if all(len(got) == count for got, (_, count, _) in zip(sent, opened, strict=True)):
            break
        service.decide()
        for worker, queue in service.queues.items():
            for _ in range(min(limit, len(queue))):
                service.finish(worker, TINY, BRIEF)
        for got, (_, _, request) in zip(sent, opened, strict=True):
            got += service.send_ready(request, limit)
    assert sent == [list(range(start, start + count)) for start, count, _ in opened]
    if budget == 10**6:
        assert set(service.started.values()) == {1}, "with enough memory, no batch is computed twice"
    for _, _, request in opened:
        service.dispatcher.close(request)


def test_a_new_consumer_waits_for_at_most_one_group_of_each_other_consumer() -> None:
    """It starts with the worker time of the consumer that is served next, not of the one that was served most."""
    service = Service()
    service.warm_up(TRAIN, nbytes=TINY, seconds=BRIEF)
    others = [("train", number) for number in range(1, 20)]
    for epoch in others:
        service.request("a", epoch, 0, 64)
    most = service.request("most", TRAIN, 0, 100_000)
    for _ in range(100):
        service.decide()
        service.finish_all(TINY, BRIEF)
        service.send_ready(most)
    service.dispatcher.close(most)
    waiting = [service.request("a", epoch, 64, 100_000) for epoch in others]
    service.decide()
    service.finish_all(TINY, BRIEF)
    service.groups.clear()
    modest = service.request("modest", ("train", 99), 0, 1)
    while not service.send_ready(modest):
        service.decide()
        service.finish_all(TINY, BRIEF)
        for request in waiting:
            service.send_ready(request)
    assert len(service.groups) <= len(others)


def test_a_single_batch_does_not_wait_for_a_group_of_each_other_consumer() -> None:
    """Of consumers that were served equally, the one whose group is the shortest goes first."""
    service = Service()
    service.warm_up(TRAIN, nbytes=TINY, seconds=BRIEF)
    greedy = [service.request(f"c{number}", ("train", number), 0, 100_000) for number in range(20)]
    for _ in range(30):
        service.decide()
        service.finish_all(TINY, BRIEF)
        for request in greedy:
            service.send_ready(request)
    service.groups.clear()
    service.request("modest", OTHER, 0, 1)
    service.decide()
    assert service.groups[0] == [0]


def test_requests_for_single_batches_give_no_larger_share() -> None:
    """A consumer that requests its batches one by one is served as much as one that requests many at once."""
    service = Service()
    service.warm_up(TRAIN, nbytes=TINY, seconds=BRIEF)
    many = service.request("many", TRAIN, 0, 100_000)
    one, singles = service.request("singles", OTHER, 0, 1), 0
    for _ in range(2000):
        service.decide()
        service.finish(0, TINY, BRIEF)
        service.send_ready(many)
        if service.send_ready(one):
            service.dispatcher.close(one)
            singles += 1
            one = service.request("singles", OTHER, singles, singles + 1)
    assert singles <= 1000


def test_prefetched_groups_stay_within_the_window() -> None:
    """A batch beyond the window that was already sent does not extend it."""
    service = Service()
    service.warm_up(TRAIN, nbytes=TINY, seconds=BRIEF)
    first = service.request("a", TRAIN, 0, 1)
    far = service.request("a", TRAIN, 1000, 1001)
    service.decide()
    service.finish_all(TINY, BRIEF)
    for request in (first, far):
        assert service.send_ready(request)
        service.dispatcher.close(request)
    service.groups.clear()
    service.request("a", TRAIN, 1, 2, ahead=4)
    service.decide()
    assert service.groups == [[1], [2, 3, 4, 5]]
