"""Properties of the schedule of a seed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.run import RECONNECT_TIMEOUT
from tests.chaos.schedule import CONSUMERS, MAX_BOTH_AWAY, RETURN, ROUND, SERVERS, Fault, Kind, plan

seeds = st.integers(0, 2**32)


@given(seeds)
def test_a_schedule_is_a_function_of_its_seed(seed: int) -> None:
    """A seed always gives the same faults at the same times, and a longer run starts like a shorter one."""
    assert plan(seed, 60) == plan(seed, 60)
    assert plan(seed, 120)[: len(plan(seed, 60))] == plan(seed, 60)


def test_seeds_differ() -> None:
    """Different seeds give different schedules."""
    assert len({tuple(plan(seed, 30)) for seed in range(50)}) == 50


def test_a_known_schedule() -> None:
    """A seed gives the same faults in later versions, so that failures can be reproduced; else this test fails."""
    assert [(fault.at, fault.kind, fault.target, fault.seconds) for fault in plan(1, 3)] == [
        (0.123, Kind.FORKSERVER_KILL, 0, 0.0),
        (0.841, Kind.MEMORY, 1, 3.907),
        (1.14, Kind.STORM, 1, 0.55),
        (1.45, Kind.CONSUMER_KILL, 3, 0.0),
        (1.747, Kind.BANDWIDTH, 1, 1.649),
        (2.123, Kind.SERVER_STOP, 0, 3.432),
        (2.874, Kind.WORKER_STOP, 1, 2.186),
    ]


@given(seeds)
def test_every_kind_comes_before_one_comes_again(seed: int) -> None:
    """Every kind of fault occurs, and each consumer is killed once, before any fault is repeated."""
    faults = plan(seed, 300)
    for start in range(0, len(faults) - len(ROUND), len(ROUND)):
        these = faults[start : start + len(ROUND)]
        assert sorted(fault.kind for fault in these) == sorted(ROUND)
        assert {fault.target for fault in these if fault.kind is Kind.CONSUMER_KILL} == set(range(CONSUMERS))
        assert {fault.target for fault in these if fault.kind is not Kind.CONSUMER_KILL} <= set(range(SERVERS))


@given(seeds)
def test_there_is_a_server_often_enough(seed: int) -> None:
    """The time without any server is bounded, well below the clients' timeouts."""
    assert _longest_without(plan(seed, 600)) <= MAX_BOTH_AWAY < RECONNECT_TIMEOUT / 2


def test_at_times_there_is_no_server() -> None:
    """Schedules include times without any server."""
    assert max(_longest_without(plan(seed, 600)) for seed in range(10)) > 1


@given(seeds)
def test_a_server_that_is_away_is_not_sent_away_again(seed: int) -> None:
    """No fault makes a server unavailable before it has recovered from the previous one."""
    back = [0.0] * SERVERS
    for fault in plan(seed, 600):
        if fault.kind in RETURN:
            assert fault.at >= back[fault.target] - 0.002
            back[fault.target] = fault.at + fault.seconds + RETURN[fault.kind]


@given(seeds)
def test_nothing_is_broken_at_a_server_that_is_away(seed: int) -> None:
    """No other fault hits an unavailable server while the other server is available."""
    back = [0.0] * SERVERS
    for fault in plan(seed, 600):
        if fault.kind in RETURN:
            back[fault.target] = fault.at + fault.seconds + RETURN[fault.kind]
        elif fault.kind is not Kind.CONSUMER_KILL and min(back) <= fault.at:
            assert back[fault.target] <= fault.at + 0.002


def _longest_without(faults: list[Fault]) -> float:
    """Return the longest time in which all servers are unavailable."""
    longest = 0.0
    back = [0.0] * SERVERS
    for fault in faults:
        if fault.kind in RETURN:
            back[fault.target] = fault.at + fault.seconds + RETURN[fault.kind]
            longest = max(longest, min(back) - fault.at)
    return longest
