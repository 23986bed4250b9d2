"""The number of servers: enough for training, no more, and without going up and down."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader_server.fleet.scaler import STEP_S, WINDOW_S, Report, Scaler
from tests.conftest import examples
from tests.server.fleet_model import Fleet, Loop, Node

HOUR = 3600.0
EMPTY = math.inf


def fleet(
    *loops: Callable[[float], float],
    minimum: int = 1,
    maximum: int = 50,
    cpus: float = 8,
    nodes: int = 60,
    noise: float = 0.03,
) -> Fleet:
    """Return a fleet of servers with 4 workers each, and nodes with 8 CPUs."""
    machines = {f"node-{i}": Node(cpus) for i in range(nodes)}
    return Fleet(Scaler(minimum, maximum, minimum, 0.0), 4, machines, [Loop(loop) for loop in loops], noise)


# --- Closed loop: servers serve training loops, whose demand the scaler sees --------------------------------------


@pytest.mark.parametrize(("workers", "servers"), [(0, 1), (1, 1), (4, 1), (5, 2), (10, 3), (100, 24)])
def test_a_step_is_followed_at_once(workers: float, servers: int) -> None:
    """With as many servers as training needs, and no more than one above that because of noise."""
    run = fleet(lambda now: workers if now > 100 else 0)
    run.run(160)
    assert servers <= run.history[-1] <= servers + 1
    run.run(HOUR)
    assert servers <= run.history[-1] <= servers + 1
    assert run.served > 0.94


def test_a_ramp_is_followed_up_and_down() -> None:
    """Without going back and forth."""
    run = fleet(lambda now: 40 * max(0.0, 1 - abs(now - HOUR) / HOUR))
    run.run(2 * HOUR + 1000)
    top = run.history.index(max(run.history))
    assert 10 <= max(run.history) <= 11
    assert run.history[:top] == sorted(run.history[:top])
    assert run.history[top:] == sorted(run.history[top:], reverse=True)
    assert run.history[-1] == 1


@settings(max_examples=examples(20))
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_any_sequence_of_steps_is_followed_without_flapping(levels: list[int]) -> None:
    """In each step, servers are first added, then removed; its end has what training needs, and one more at most."""
    run = fleet(lambda now: levels[min(len(levels) - 1, int(now / 900))], noise=0.0)
    for level in levels:
        begin = len(run.history)
        run.run(890)
        history = run.history[begin:]
        top = history.index(max(history))
        assert history[:top] == sorted(history[:top])
        assert history[top:] == sorted(history[top:], reverse=True)
        enough = max(1, math.ceil(level * 0.95 / 4))
        assert enough <= history[-1] <= enough + 1
        assert run.served > 0.94
        run.run(10)


@pytest.mark.parametrize(("workers", "cpus"), [(4, 1.5), (17, 3.0), (3, 2.0)])
def test_removals_on_machines_without_spare_cpus_become_rare(workers: float, cpus: float) -> None:
    """With one server less, all CPUs are full, and it returns at once; at most once an hour in the end."""
    run = fleet(lambda now: workers, cpus=cpus, noise=0.0)
    run.run(4 * HOUR)
    start = run.changes
    run.run(4 * HOUR)
    assert run.changes - start <= 8
    assert max(run.history) <= math.ceil(workers / cpus) + 1


def test_the_window_is_reset_once_a_removal_lasts() -> None:
    """Later removals do not wait longer because of an earlier one."""
    scaler = grown(2)
    most: dict[str, Report | None] = {"a": report(8.0)}
    least: dict[str, Report | None] = {"a": report(1.0)}

    def removed_at(now: float) -> float:
        return next(at for at in itertools.count(int(now)) if scaler.decide(least, at).servers == 1)

    assert removed_at(0) == WINDOW_S + 1
    scaler.decide(most, 400)
    assert removed_at(401) == 400 + 2 * WINDOW_S + 1
    scaler.decide(most, 5000)
    assert removed_at(5001) == 5000 + WINDOW_S + 1


@pytest.mark.parametrize("period", [20, 60, 250])
def test_an_oscillation_keeps_the_servers_of_its_peak(period: float) -> None:
    """They are added once."""
    run = fleet(lambda now: 4 if now % period < period / 2 else 16)
    run.run(HOUR)
    assert run.history[-1] in (4, 5)
    assert run.changes <= 3
    assert run.history == sorted(run.history)


def test_a_pause_for_an_evaluation_removes_no_server() -> None:
    """Of 4 minutes, every 20 minutes."""
    run = fleet(lambda now: 0 if now % 1200 > 960 else 20)
    run.run(3 * HOUR)
    assert run.history == sorted(run.history)
    assert run.history[-1] in (5, 6)


def test_a_long_pause_removes_servers_one_by_one() -> None:
    """Down to the minimum; they are back at once."""
    run = fleet(lambda now: 20 if now < 600 or now > 2000 else 0, minimum=2)
    run.run(600)
    most = run.history[-1]
    run.run(1390)
    assert run.history[-1] == 2
    falling = run.history[120:]
    assert all(a - b in (0, 1) for a, b in itertools.pairwise(falling))
    run.run(60)
    assert abs(run.history[-1] - most) <= 1


@pytest.mark.parametrize("cpus", [1, 2, 3])
def test_full_cpus_are_made_up_for_on_other_nodes(cpus: float) -> None:
    """Servers have 4 workers, of which not all find a CPU: as many servers as together have the CPUs, and no more."""
    run = fleet(lambda now: 12, cpus=cpus, noise=0.0)
    run.run(HOUR)
    enough = math.ceil(12 * 0.95 / cpus)
    assert enough <= run.history[-1] <= enough + 1
    assert run.served >= 0.94
    assert max(sum(server.node == node for server in run.running) for node in run.nodes) == 1


def test_full_cpus_without_other_nodes_are_no_runaway() -> None:
    """The engine has one node of 2 CPUs, and training wants 16 workers: what is missing is stated, and stays so."""
    run = fleet(lambda now: 16, cpus=2, nodes=1)
    run.run(HOUR)
    assert len(run.running) == 1
    assert run.history[-1] <= 6
    assert run.changes <= 2


def test_a_noisy_neighbor_is_made_up_for() -> None:
    """Another program takes the CPUs of a node: a server on another node is added, and that of this node removed."""
    run = fleet(lambda now: 3.5)
    run.run(800)
    (server,) = run.running
    run.nodes[server.node].others = 7.5
    run.run(60)
    assert run.history[-1] == 2
    assert run.served > 0.94
    run.run(2000)
    assert run.served > 0.94
    assert [other.node for other in run.running] != [server.node]
    assert len(run.running) == 1


def test_idle_workers_on_full_nodes_are_not_made_up_for() -> None:
    """Other programs use the CPUs that the servers leave idle: surplus servers are removed nevertheless."""
    run = fleet(lambda now: 20 if now < 600 else 2)
    for node in run.nodes.values():
        node.is_filled = True
    run.run(600)
    assert 5 <= run.history[-1] <= 6
    run.run(HOUR)
    assert run.history[-1] == 1
    assert run.served > 0.94


@pytest.mark.parametrize("minimum", [1, 2, 5])
def test_an_empty_loop_doubles_the_minimum_at_most(minimum: int) -> None:
    """A benchmark, or a training script that does not train: it takes all that it is sent."""
    run = fleet(lambda now: EMPTY if now < HOUR else 0, minimum=minimum)
    run.run(HOUR)
    assert run.history[-1] == 2 * minimum
    assert run.changes <= 2
    run.run(WINDOW_S + STEP_S * (minimum + 2))
    assert run.history[-1] == minimum


def test_an_empty_loop_beside_training_doubles_what_training_needs() -> None:
    """At most."""
    run = fleet(lambda now: 12, lambda now: EMPTY)
    run.run(HOUR)
    assert 6 <= run.history[-1] <= 8


def test_loops_that_are_measured_and_unmeasured_in_turn_are_no_runaway() -> None:
    """They restart every minute."""
    run = fleet(lambda now: EMPTY if now % 60 < 20 else 6)
    run.run(2 * HOUR)
    assert max(run.history) <= 4


def test_a_demand_far_above_the_servers_is_met() -> None:
    """A step takes a hundredth of the time for which the loop waits: the step is known nevertheless."""
    run = fleet(lambda now: 160)
    run.run(120)
    assert 38 <= run.history[-1] <= 41


def test_the_maximum_is_kept() -> None:
    """However much training wants."""
    run = fleet(lambda now: 1000, maximum=7)
    run.run(HOUR)
    assert max(run.history) == 7


# --- Single decisions ---------------------------------------------------------------------------------------------


def report(demand: float, *, node: str = "a", saturated: bool = False, busy: float = 4.0, load: float = 4.0) -> Report:
    """Return the report of a server with 4 workers."""
    return Report(node, 4, demand, 0.0, busy, load, saturated)


def grown(servers: int) -> Scaler:
    """Return a scaler that starts with a number of servers."""
    return Scaler(1, 50, servers, 0.0)


def test_no_server_is_removed_while_one_does_not_report() -> None:
    """Its consumers may want much."""
    scaler = grown(3)
    reports = {"a": report(1.0), "b": report(1.0), "c": None}
    for now in range(10, 3000, 10):
        assert scaler.decide(reports, now).servers == 3
    assert scaler.decide({**reports, "c": report(0.0)}, 3010.0).servers == 2


def test_the_server_on_a_full_node_is_drained_first() -> None:
    """Then the one with the lowest demand."""
    scaler = grown(3)
    reports: dict[str, Report | None] = {
        "a": report(1.0), "b": report(2.0, node="full", saturated=True), "c": report(0.5),
    }  # fmt: skip
    decisions = [scaler.decide(reports, now) for now in (2.0, WINDOW_S + 2)]
    assert [decision.drain for decision in decisions] == [set(), {"b"}]
    assert decisions[-1].avoid == {"full"}
    del reports["b"]
    assert scaler.decide(reports, WINDOW_S + 3).drain == set()
    assert scaler.decide(reports, WINDOW_S + 2 + STEP_S).drain == {"c"}


def test_surplus_servers_that_do_not_respond_are_drained_last() -> None:
    """Their consumers are unknown."""
    reports = {"a": None, "b": report(3.0), "c": report(3.0), "d": report(1.0)}
    assert grown(2).decide(reports, 1.0).drain == {"d", "b"}


def test_present_servers_are_kept_at_the_start() -> None:
    """A scaler that was restarted while training pauses does not remove the servers at once."""
    scaler = Scaler(1, 8, 5, 0.0)
    reports: dict[str, Report | None] = {name: report(0.0) for name in "abcde"}
    assert [scaler.decide(reports, now).servers for now in (1.0, WINDOW_S, WINDOW_S + 1)] == [5, 5, 4]
    assert Scaler(3, 8, 1, 0.0).decide({}, 1.0).servers == 3
    assert Scaler(3, 8, 9, 0.0).decide({}, 1.0).servers == 8


@pytest.mark.parametrize(
    ("busy", "load", "saturated", "missing"),
    [(4, 2, True, 2), (1, 1, True, 0), (1, 0.5, True, 2), (0, 0, True, 0), (1, 1.1, True, 0), (4, 2, False, 0)],
)
def test_missing_workers_are_those_that_wait_for_a_cpu(busy: float, load: float, saturated: bool, missing: int) -> None:
    """Idle workers are not missing: the busy ones show which fraction finds a CPU."""
    assert report(1.0, busy=busy, load=load, saturated=saturated).missing == missing


reports = st.none() | st.builds(
    lambda node, total, part, busy, load, saturated: Report(node, 4, total, total * part, busy, load, saturated),
    st.sampled_from("abc"), st.floats(0, 100), st.floats(0, 1), st.floats(0, 4), st.floats(0, 4), st.booleans(),
)  # fmt: skip


@settings(max_examples=examples(100))
@given(
    st.integers(1, 5),
    st.integers(0, 20),
    st.lists(st.tuples(st.floats(0.1, 100), st.dictionaries(st.sampled_from("pqrstuvwxyz"), reports)), max_size=60),
)
def test_any_sequence_of_reports_is_within_the_rules(
    minimum: int, more: int, looks: list[tuple[float, dict[str, Report | None]]]
) -> None:
    """Limits, at most one removal per step, and none without reports."""
    scaler = Scaler(minimum, minimum + more, minimum, 0.0)
    now, before, removed_at = 0.0, minimum, 0.0
    for seconds, found in looks:
        now += seconds
        decision = scaler.decide(found, now)
        assert minimum <= decision.servers <= minimum + more
        if decision.servers < before:
            assert before - decision.servers == 1
            assert now - removed_at >= STEP_S
            assert None not in found.values()
            removed_at = now
        assert decision.drain <= found.keys()
        assert len(decision.drain) == max(0, len(found) - decision.servers)
        before = decision.servers
