"""Consumers that share an epoch on several servers, in virtual time: how often batches are computed, and the delays.

The scheduler is the real one; servers, network and training loops are simulated.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.fleet import Fleet, Scenario, fast_loops, moved
from benchmarks.fleet_simulation import Job, Loader, Server, Simulation
from teleloader.fetch.scheduler import HEDGE_UNKNOWN

SECONDS = 0.1
"""Seconds of a worker per batch."""


def servers(*speeds: float, num_workers: int = 4) -> list[Server]:
    """Return servers whose workers have these speeds."""
    return [Server(f"server-{i}", num_workers, SECONDS / speed) for i, speed in enumerate(speeds)]


def simulation(found: list[Server], *, consumers: int = 4, apart: float = 0.1, step: float = 0.0) -> Simulation:
    """Return a simulation whose consumers start one after another."""
    made = Simulation(found)
    loader = Loader(batches=600)
    for number in range(consumers):
        made.consume(apart * number, loader, Job(made, step))
    return made


def work(run: Simulation) -> float:
    """Return the number of computed batches, divided by the number of distinct ones."""
    return run.consumers[0].loader.work


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("speeds", [(1,), (1, 1), (1, 1, 1), (1, 0.5), (1, 0.5, 0.25), (1,) * 8], ids=str)
def test_a_batch_is_computed_once(speeds: tuple[float, ...], num_workers: int) -> None:
    """Consumers compute few batches twice and reach 80 % of the servers' rate, whichever side is the bottleneck."""
    found = servers(*speeds, num_workers=num_workers)
    for apart in (0.0, 1.0):
        run = simulation(found, apart=apart)
        ended = run.run()
        assert work(run) <= 1.05
        if not apart:
            assert 600 / sum(server.rate for server in found) / ended > 0.8
        found = servers(*speeds, num_workers=num_workers)
    slow = simulation(found, step=2 * SECONDS / sum(speeds) / num_workers)
    slow.run()
    assert work(slow) <= 1.05


@pytest.mark.parametrize("step", [0.0, 0.02])
@pytest.mark.parametrize("apart", [0.0, 0.3])
def test_few_batches_are_computed_again_when_a_server_joins_and_another_dies(apart: float, step: float) -> None:
    """At most 15 % of the batches are computed again when a server joins and one dies, and no wait exceeds 1 s."""
    run = simulation(servers(1, 1, 1), apart=apart, step=step)
    run.join(1.5, Server("joining", 4, SECONDS))
    run.kill(3.0, run.servers[1])
    run.run()
    assert work(run) <= 1.15
    assert max(consumer.longest_wait for consumer in run.consumers) < 1
    assert len(run.servers[-1].ready) > 20


def test_a_server_that_is_stuck_stops_no_consumer() -> None:
    """Consumers complete their epoch although a server keeps its connections and never responds."""
    run = simulation(servers(1, 1, 1))
    run.stop(2.0, run.servers[0])
    run.run()
    assert max(consumer.longest_wait for consumer in run.consumers) < 2 * HEDGE_UNKNOWN
    assert work(run) < 1.2


def test_a_consumer_that_cannot_reach_a_server_uses_the_others() -> None:
    """Only the batches of the server that a consumer cannot reach are computed twice."""
    run = simulation(servers(1, 1, 1, 1))
    run.part(0.5, 3, run.servers[0])
    run.part(0.5, 3, run.servers[1])
    run.run()
    assert max(consumer.longest_wait for consumer in run.consumers) < 1
    assert work(run) < 1.75


def test_servers_whose_rates_are_unknown_share_by_their_workers() -> None:
    """Servers of unknown rate compute each batch once, at the pace of the slowest server."""
    found = servers(1, 0.5)
    for server in found:
        server.reports = False
    run = simulation(found)
    ended = run.run()
    assert work(run) <= 1.05
    assert ended < 1.6 * 600 / sum(server.rate for server in found)


# -- a fleet: 96 training processes and 40 servers of unequal size and speed, which stall


FLEET = Scenario(servers=40, jobs=6, ranks=16, seconds=40, start_seconds=5, join_at=15, loss_at=25, lost=0, joining=0)
START = 15
"""Seconds in which the jobs start."""


def check_delivery(fleet: Fleet) -> None:
    """Check that each training process received every batch once; the simulator checks the order."""
    simulation = fleet.simulation
    first = {loader: min(loader.computed) for loader in fleet.loaders}
    taken = sum(consumer.scheduler.taken - first[consumer.loader] for consumer in simulation.consumers)
    assert taken == fleet.delivered > 2000
    assert len(simulation.first_waits) == len(simulation.consumers) == FLEET.jobs * FLEET.ranks


@pytest.mark.parametrize("seed", range(3))
def test_a_fleet_computes_each_batch_once(seed: int) -> None:
    """Jobs that start at different times compute 5 % of the batches twice at first, and 1 % later."""
    fleet = replace(FLEET, late_jobs=0, seed=seed).build().run()
    check_delivery(fleet)
    assert fleet.work_between(0, START) <= 1.05
    assert fleet.work_between(START, 40) <= 1.01
    assert fleet.data_wait <= 0.01
    assert max(load for load, _ in fleet.loads.values()) < 0.8, "no server is overloaded"


@pytest.mark.parametrize("seed", range(3))
def test_a_fleet_with_changes_computes_few_batches_again(seed: int) -> None:
    """At most 5 % of the batches are computed again when 4 servers join and 2 lose power; no wait exceeds 5 s."""
    fleet = replace(FLEET, late_jobs=1, joining=4, lost=2, seed=seed).build().run()
    check_delivery(fleet)
    assert fleet.work_between(0, 40) <= 1.05
    assert max(seconds for _, seconds in fleet.simulation.job_waits) < 5


def test_slow_loops_prefetch_little_from_many_servers() -> None:
    """A training process prefetches about as much from 32 servers as from one, not as much as they could compute."""
    fleet = replace(FLEET, late_jobs=0).build().run()
    for consumer in fleet.simulation.consumers:
        assert len(consumer.connections) == 32
        workers = sum(connection.server.num_workers for connection in consumer.connections.values())
        assert consumer.most_buffered < 2 * workers / 4


def test_hedging_shortens_the_waits_of_fast_loops() -> None:
    """Hedging halves the time that loops with short steps wait for servers that stall, and costs 5 % at most."""
    hedged, unhedged = (fast_loops(0.1, hedging=hedging) for hedging in (True, False))
    waits = [sum(seconds for _, seconds in each.job_waits) / each.job_seconds for each in (hedged, unhedged)]
    assert waits[0] < waits[1] / 2
    assert hedged.computed_at.total() < 1.05 * (hedged.computed_at.total() - hedged.repeated_at.total())
    assert not unhedged.repeated_at.total()


@pytest.mark.parametrize(("number", "most"), [(2, 0.7), (8, 0.5), (32, 0.25)])
def test_a_change_moves_a_part_of_the_blocks(number: int, most: float) -> None:
    """A server that joins, leaves or is replaced moves fewer of a loader's blocks the more servers it has."""
    for change in ("joins", "leaves", "is replaced"):
        assert 1 / (number + 1) <= moved(number, change, blocks=256) <= most
