"""Demand and saturation of a server."""

from __future__ import annotations

import pytest

from teleloader_server.stats.demand import ConsumerLoad, demand, is_saturated

LOAD = 9.0
"""Workers that compute, above the present load of each consumer."""


def load(epoch: str, rate: float, wait: float | None, step: float, known_for: float = 60.0) -> ConsumerLoad:
    """Return a consumer whose batches take a worker 0.1 s."""
    return ConsumerLoad(epoch, rate, wait, step, known_for, 0.1)


def test_the_demand_is_that_of_loops_that_never_wait() -> None:
    """20 batches/s of 0.1 s, half of the time waited for."""
    assert demand([load("a", 20, 0.5, 0.025)], LOAD) == (4.0, 0.0)
    assert demand([], LOAD) == (0.0, 0.0)


def test_an_epoch_is_computed_once_for_all_its_consumers() -> None:
    """The fastest one counts."""
    assert demand([load("a", 20, 0.0, 0.05), load("a", 10, 0.0, 0.1), load("b", 10, 0.0, 0.1)], LOAD) == (3.0, 0.0)


@pytest.mark.parametrize(
    "consumer",
    [load("a", 20, None, 0.01), load("a", 20, 0.999, 0.00001), load("a", 20, 0.9, 0.005, known_for=5.0)],
    ids=["no report", "no step", "new"],
)
def test_an_unknown_demand_is_the_present_load(consumer: ConsumerLoad) -> None:
    """It is stated apart; a measured consumer of the same epoch is known better."""
    assert demand([consumer], LOAD) == (2.0, 2.0)
    assert demand([consumer, load("a", 30, 0.0, 0.03)], LOAD) == (3.0, 0.0)


def test_an_unknown_demand_is_at_most_what_workers_do() -> None:
    """A loop without steps receives batches that were computed for others, faster than workers compute."""
    assert demand([load("a", 1000, None, 0.0), load("b", 20, 0.0, 0.05)], 4.0) == (6.0, 4.0)
    assert demand([load("a", 1000, 0.99, 0.0)], 0.0) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("busy", "working", "idle", "saturated"),
    [
        (4.0, 4.0, 0.5, False),
        (4.0, 4.0, 0.01, True),  # as many workers as CPUs
        (4.0, 2.0, 0.5, True),  # a quota
        (0.0, 0.0, 0.01, True),  # other programs
        (0.02, 0.01, 0.9, False),  # a worker that wakes up once in a while
        (4.0, 3.9, 0.2, False),
        (0.0, 0.0, 1.0, False),
    ],
)
def test_a_server_whose_workers_find_no_cpu_is_saturated(
    busy: float, working: float, idle: float, saturated: bool
) -> None:
    """All CPUs are in use, or workers wait for one although the machine has idle ones."""
    assert is_saturated(busy, working, idle) is saturated


def test_a_server_that_sends_a_part_of_a_loops_batches_reports_a_part_of_its_demand() -> None:
    """So the demands of all servers can be added."""
    whole = demand([load("a", 20, 0.8, 0.01)], LOAD).total
    parts = [demand([load("a", rate, 0.8, 0.01)], LOAD).total for rate in (5, 15)]
    assert sum(parts) == pytest.approx(whole)
    assert whole == pytest.approx(10)
