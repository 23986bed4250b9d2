"""Requests to several servers, which join, leave, fail, return and are slow."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from teleloader.fetch.assignment import BLOCK
from teleloader.fetch.scheduler import (
    HEDGE_FACTOR,
    HEDGE_LEAST,
    HEDGE_UNKNOWN,
    MAX_COOLDOWN_S,
    MAX_WINDOW,
    MIN_COOLDOWN_S,
    REGISTRATION_S,
    RangeScheduler,
)
from teleloader.transport.request import BatchRequest
from teleloader_shared.messages import READY_BYTES
from teleloader_shared.ranges import MAX_RANGES, BatchRanges
from tests.conftest import examples

LOADER = "0123456789abcdef" * 2


def fleet(
    servers: int, num_workers: int = 4, *, stop: int = 1000, epoch: int = 0, factor: int = 2, rate: float | None = None
) -> RangeScheduler:
    """Return the scheduler of an epoch on several servers, which are registered."""
    scheduler = RangeScheduler(
        0, stop, factor, num_workers, name="server-0", batch_rate=rate, loader=LOADER, epoch=epoch
    )
    for number in range(1, servers):
        assert scheduler.add_server() == number
        scheduler.joined(number, num_workers, f"server-{number}", rate)
    return scheduler


def requested(scheduler: RangeScheduler, server: int, now: float = 0.0) -> list[BatchRequest]:
    """Return all requests that may be sent to a server now, before its first response."""
    found = []
    while (wanted := scheduler.next_request(server, now)) is not None:
        found.append(wanted)
    return found


def batches(ranges: list[BatchRequest]) -> set[int]:
    """Return the numbers of the batches."""
    return {k for wanted in ranges for k in wanted.batches}


def respond(scheduler: RangeScheduler, server: int, wanted: BatchRequest, now: float) -> BatchRequest | None:
    """Receive all batches of the server's oldest request, which is `wanted`."""
    return scheduler.arrived(len(wanted.batches), READY_BYTES * (len(wanted.batches)), server, now)


def measured(servers: int, now: float = 10.0) -> RangeScheduler:
    """Return a scheduler that knows that responses take 10 ms, and whose training loop took all of them."""
    scheduler = fleet(servers)
    for step in range(12):
        for server in range(servers):
            for wanted in requested(scheduler, server, now + step):
                respond(scheduler, server, wanted, now + step + 0.01)
        scheduler.taken = scheduler.received
    return scheduler


def owner_of_next(scheduler: RangeScheduler, now: float) -> tuple[int, BatchRequest]:
    """Return the server that is sent the next batch, and its request."""
    for server in range(3):
        if (wanted := scheduler.next_request(server, now)) is not None:
            if wanted.batches.start == scheduler.received:
                return server, wanted
            respond(scheduler, server, wanted, now)
    raise AssertionError("no server is sent the next batch")


# --- Prefetch window ----------------------------------------------------------------------------------------------


def run_loop(scheduler: RangeScheduler, steps: int, *, keeps_up: bool) -> None:
    """Let all servers respond to all requests; the training loop takes each batch on arrival, or one per step."""
    for step in range(steps):
        found = [(server, wanted) for server in range(8) for wanted in requested(scheduler, server, step)]
        scheduler.taken = min(scheduler.taken + 1, scheduler.received)
        for server, wanted in found:
            respond(scheduler, server, wanted, step + 0.5)
            if keeps_up:
                scheduler.taken = scheduler.received


def test_a_slow_loop_prefetches_from_many_servers_as_much_as_from_one() -> None:
    """The window does not grow with the number of servers unless the training loop uses the batches."""
    scheduler = fleet(8, stop=10**6)
    assert scheduler.window == 2 * 2 * 4
    run_loop(scheduler, 100, keeps_up=False)
    assert scheduler.window == 2 * 2 * 4


def test_a_fast_loop_keeps_all_workers_of_all_servers_busy() -> None:
    """The window grows to twice the prefetch factor times the workers, and falls when the loop becomes slow."""
    scheduler = fleet(8, stop=10**6)
    run_loop(scheduler, 10, keeps_up=True)
    assert scheduler.window == 2 * 2 * 8 * 4
    run_loop(scheduler, 1000, keeps_up=False)
    assert scheduler.window == 2 * 2 * 4


def test_nothing_is_prefetched_before_the_initial_servers_have_registered() -> None:
    """The first block is requested at once; the others, once all servers have registered, failed or left."""
    scheduler = RangeScheduler(0, 1000, 2, 4, name="server-0", loader=LOADER)
    joining = [scheduler.add_server() for _ in range(3)]
    assert batches(requested(scheduler, 0)) == set(range(BLOCK))
    scheduler.joined(joining[0], 4, "server-1", now=0.1)
    scheduler.disconnected(joining[1], 0.2)
    assert not requested(scheduler, 0, 0.2)
    assert not requested(scheduler, joining[0], 0.2)
    scheduler.remove_server(joining[2], 0.3)
    found = [batches(requested(scheduler, server, 0.3)) for server in (0, joining[0])]
    assert all(found)
    assert set.union(*found) == set(range(BLOCK, scheduler.window))


def test_a_server_that_does_not_register_delays_prefetching_for_a_short_time() -> None:
    """After `REGISTRATION_S`, the client prefetches from the servers that have registered."""
    scheduler = RangeScheduler(0, 1000, 2, 4, name="server-0", loader=LOADER)
    joined, _ = scheduler.add_server(), scheduler.add_server()
    scheduler.joined(joined, 4, "server-1")
    before = batches(requested(scheduler, 0)) | batches(requested(scheduler, joined))
    assert before == set(range(BLOCK))
    assert not scheduler.has_work(0, 0.9 * REGISTRATION_S)
    after = [batches(requested(scheduler, server, REGISTRATION_S)) for server in (0, joined)]
    assert all(after)
    assert set.union(*after) == set(range(BLOCK, scheduler.window))


# --- Blocks -------------------------------------------------------------------------------------------------------


def test_clients_request_each_batch_from_the_same_server() -> None:
    """All clients request a batch from the same server, whatever their position and their order of the servers."""
    one = fleet(3)
    other = RangeScheduler(0, 1000, 2, 4, name="server-2", loader=LOADER, epoch=0)
    for name in ("server-0", "server-1"):
        other.joined(other.add_server(), 4, name)
    later = RangeScheduler(16, 1000, 2, 4, name="server-1", loader=LOADER, epoch=0)
    for name in ("server-2", "server-0"):
        later.joined(later.add_server(), 4, name)
    by_name = [batches(requested(one, server)) for server in range(3)]
    assert by_name == [batches(requested(other, server)) for server in (1, 2, 0)]
    assert all(by_name)
    assert set.union(*by_name) == set(range(one.window))
    assert [{k for k in found if k >= 16} for found in by_name] == [
        {k for k in batches(requested(later, server)) if k < one.window} for server in (2, 0, 1)
    ]


@pytest.mark.parametrize("num_workers", [1, 5, 8])
def test_a_request_occupies_all_workers(num_workers: int) -> None:
    """A request has at least one batch for each worker of its server, and prefetches no batches beyond them."""
    scheduler = fleet(2, num_workers, factor=4)
    found = [requested(scheduler, server) for server in range(2)]
    assert sum(len(wanted.batches) for one in found for wanted in one) == scheduler.window == 4 * 2 * num_workers
    assert all(num_workers <= len(one[0].batches) <= num_workers + BLOCK for one in found)
    assert all(wanted.ahead == 0 for one in found for wanted in one)


def test_the_blocks_of_an_epoch_do_not_depend_on_the_client() -> None:
    """Clients assign blocks equally, although they registered at different servers first."""
    capacities = [("small", 2), ("large", 8), ("medium", 3)]
    owners = []
    for order in permutations(capacities):
        (name, num_workers), *others = order
        scheduler = RangeScheduler(0, 1000, 8, num_workers, name=name, loader=LOADER, epoch=0)
        for other, workers in others:
            scheduler.joined(scheduler.add_server(), workers, other)
        owners.append({name: batches(requested(scheduler, number)) for number, (name, _) in enumerate(order)})
    assert all(found == owners[0] for found in owners)


def test_small_blocks_are_requested_together() -> None:
    """One request contains all due blocks of a server, up to the number of batches in one response."""
    scheduler = fleet(2, stop=10**6, factor=100)
    for server in range(2):
        for wanted in requested(scheduler, server):
            scheduler.arrived(len(wanted.batches), 4096 * len(wanted.batches), server, 0.1)
    scheduler.taken = scheduler.received
    found = [requested(scheduler, server, 0.2) for server in range(2)]
    assert all(len(one[0].batches.ranges) > 20 for one in found)
    assert all(
        len(wanted.batches) >= READY_BYTES // 4096 - BLOCK or len(wanted.batches.ranges) == MAX_RANGES
        for one in found
        for wanted in one[:-1]
    )
    assert not batches(found[0]) & batches(found[1])
    assert batches(found[0]) | batches(found[1]) == set(range(scheduler.taken, scheduler.taken + scheduler.window))


def test_a_request_has_a_limited_number_of_ranges() -> None:
    """A request has at most `MAX_RANGES` ranges, also if the blocks of a server are hardly ever adjacent."""
    scheduler = fleet(5, 1, stop=10**6, factor=400)
    for server in range(5):
        for wanted in requested(scheduler, server):
            scheduler.arrived(len(wanted.batches), 10 * len(wanted.batches), server, 0.1)
    scheduler.taken = scheduler.received
    wanted = requested(scheduler, 0, 0.2)[0]
    assert len(wanted.batches.ranges) <= MAX_RANGES <= len(wanted.batches)


def test_the_blocks_of_a_failed_request_are_requested_from_different_servers() -> None:
    """Each block of a failed request goes to the next server of its ranking, which is the same for all clients."""
    scheduler = fleet(3, stop=10**6, factor=30)
    for server in range(3):
        for wanted in requested(scheduler, server):
            scheduler.arrived(len(wanted.batches), 4096 * len(wanted.batches), server, 0.1)
    scheduler.taken = scheduler.received
    (lost,) = requested(scheduler, 0, 0.2)
    early = [batches(requested(scheduler, server, 0.2)) for server in (1, 2)]
    assert len(lost.batches.ranges) > 10
    scheduler.disconnected(0, 0.3)
    found = [batches(requested(scheduler, server, 0.3)) for server in (1, 2)]
    assert all(found)
    assert not found[0] & found[1]
    assert not (early[0] | early[1]) & (found[0] | found[1])
    assert set(lost.batches) <= found[0] | found[1]


def test_a_faster_server_is_sent_more_blocks() -> None:
    """Servers are sent blocks in proportion to the rates that they report, which clients do not measure."""
    scheduler = RangeScheduler(0, 6400, 200, 4, name="fast", batch_rate=30.0, loader=LOADER, epoch=0)
    scheduler.joined(scheduler.add_server(), 4, "slow", 10.0)
    scheduler.joined(0, 4, "fast", 1.0)  # again, after a restart: other clients of the epoch know the first rate
    fast, slow = (len(batches(requested(scheduler, server))) for server in range(2))
    assert 2.5 < fast / slow < 3.5


@pytest.mark.parametrize("rate", [0.0, -1.0, 1e-300, 1e300, math.inf, math.nan])
def test_an_invalid_rate_is_ignored(rate: float) -> None:
    """Zero, negative, extreme and non-finite rates count as unknown."""
    scheduler = RangeScheduler(0, 6400, 200, 4, name="one", batch_rate=rate, loader=LOADER, epoch=0)
    scheduler.joined(scheduler.add_server(), 4, "other", rate)
    found = [len(batches(requested(scheduler, server))) for server in range(2)]
    assert 0.9 < found[0] / found[1] < 1.1


def test_a_server_with_two_urls_is_two_servers() -> None:
    """A server that is known by two URLs is sent blocks at each of them."""
    scheduler = RangeScheduler(0, 1000, 2, 4, name="same", loader=LOADER, epoch=0)
    scheduler.joined(scheduler.add_server(), 4, "same")
    assert requested(scheduler, 0)
    assert requested(scheduler, 1)


def test_full_memory_stops_requests_except_for_the_next_batch() -> None:
    """While received batches fill the memory, only the batch that the training loop needs next is requested."""
    scheduler = fleet(2)
    first, second = (batches(requested(scheduler, server)) for server in range(2))
    scheduler = fleet(2)
    holder = 0 if 0 in first else 1
    early = requested(scheduler, 1 - holder)
    for wanted in early:
        respond(scheduler, 1 - holder, wanted, 0.1)
    scheduler.over_memory = True
    (wanted,) = requested(scheduler, holder)
    assert wanted.batches.start == 0
    assert first | second == batches(early) | (first, second)[holder]


def test_needed_batches_may_exceed_the_prefetch_window() -> None:
    """Batches that the training loop needs now are requested once, even above the memory limit."""
    scheduler = fleet(2, 1, factor=1)
    scheduler.over_memory, scheduler.needed = True, 16
    wanted = [scheduler.next_request(number % 2) for number in range(40)]
    assert sorted(k for each in wanted if each is not None for k in each.batches) == list(range(16))


# --- Servers that join and leave ----------------------------------------------------------------------------------


def test_a_server_is_sent_requests_once_it_has_registered_the_loader() -> None:
    """A server that joins in mid-epoch gets requests after its registration; pending requests stay where they are."""
    scheduler = fleet(2)
    before = [batches(requested(scheduler, server)) for server in range(2)]
    joining = scheduler.add_server()
    scheduler.joined(joining, 4, "server-2", now=0.5)
    scheduler.needed = 64
    after = batches(requested(scheduler, joining, 0.5))
    assert after
    assert not after & (before[0] | before[1])
    assert after <= set(range(scheduler.needed))


def test_a_join_moves_batches_that_were_not_requested() -> None:
    """A joining server is sent its part of the unrequested batches at once, and each batch is sent to one server."""
    scheduler = fleet(2)
    first = scheduler.next_request(0)
    assert first is not None
    joining = scheduler.add_server()
    scheduler.joined(joining, 4, "server-2")
    found = [batches(requested(scheduler, server)) for server in range(3)]
    assert all(found)
    assert sum(map(len, found)) + len(batches([first])) == scheduler.window
    assert set.union(*found) | batches([first]) == set(range(scheduler.window))


def test_a_server_that_left_is_sent_nothing() -> None:
    """Pending responses of a server that left are received; the rest of their ranges goes to other servers."""
    scheduler = fleet(3)
    wanted, window = scheduler.next_request(1), scheduler.window
    assert wanted is not None
    scheduler.remove_server(1, 1.0)
    assert scheduler.next_request(1, 1.0) is None
    assert not scheduler.has_work(1, 1.0)
    assert not scheduler.has_left(1)
    assert scheduler.arrived(1, READY_BYTES, 1, 1.0) is None
    assert scheduler.has_left(1)
    found = [batches(requested(scheduler, server, 1.0)) for server in (0, 2)]
    assert set.union(*found) == set(range(window)) - {wanted.batches.start}
    scheduler.joined(1, 4, "server-1", now=2.0)
    assert not scheduler.has_work(1, 100.0), "it registered the loader when it had left already"


def test_pending_ranges_of_a_server_that_left_survive_its_disconnection() -> None:
    """The pending ranges of a server that left and disconnects are requested from the other servers."""
    scheduler = fleet(2)
    sent = batches(requested(scheduler, 1))
    scheduler.remove_server(1)
    scheduler.disconnected(1)
    assert sent <= batches(requested(scheduler, 0))


def test_an_epoch_continues_after_all_servers_left() -> None:
    """After all servers left, a server that joins is sent the remaining batches."""
    scheduler = fleet(2)
    pending = [requested(scheduler, 0), requested(scheduler, 1)[:0]]
    scheduler.remove_server(0)
    scheduler.remove_server(1)
    for wanted in pending[0]:
        respond(scheduler, 0, wanted, 1.0)
    scheduler.disconnected(1)
    joining = scheduler.add_server()
    scheduler.joined(joining, 4, "server-2")
    seen = batches(pending[0])
    while not scheduler.finished:
        scheduler.taken = scheduler.received
        found = requested(scheduler, joining, 2.0)
        assert found
        seen |= batches(found)
        for wanted in found:
            respond(scheduler, joining, wanted, 2.0)
    assert seen == set(range(1000))


# --- Servers that fail, and servers that are slow -----------------------------------------------------------------


def test_the_ranges_of_a_disconnected_server_are_requested_from_others() -> None:
    """Missing batches of a disconnected server are requested first, and batches of other servers do not move."""
    intact, scheduler = fleet(3), fleet(3)
    expected = [batches(requested(intact, server)) for server in range(3)]
    lost = scheduler.next_request(0)
    assert lost is not None
    scheduler.arrived(1, READY_BYTES, 0, 0.1)
    scheduler.disconnected(0, 0.2)
    found = [batches(requested(scheduler, server, 0.2)) for server in (1, 2)]
    assert expected[1] <= found[0]
    assert expected[2] <= found[1]
    assert found[0] | found[1] == set(range(scheduler.window)) - {lost.batches.start}
    assert not found[0] & found[1]


def test_a_server_that_returns_is_sent_its_blocks_again() -> None:
    """A server that reconnects is sent its blocks from then on."""
    intact, scheduler = fleet(3), fleet(3)
    scheduler.disconnected(0, 0.2)
    scheduler.joined(0, 4, "server-0", now=0.3)
    assert [batches(requested(scheduler, server, 0.3)) for server in range(3)] == [
        batches(requested(intact, server)) for server in range(3)
    ]


def test_a_server_without_others_is_sent_its_ranges_again() -> None:
    """The only usable server is sent its ranges again after a connection broke."""
    scheduler = fleet(2)
    scheduler.disconnected(1)
    before = requested(scheduler, 0)
    scheduler.disconnected(0)
    scheduler.joined(0, 4, "server-0")
    assert batches(requested(scheduler, 0)) == batches(before) == set(range(scheduler.window))


def test_an_overdue_request_is_hedged() -> None:
    """An idle server is sent a request that takes longer than most, and the first response counts."""
    scheduler = measured(3)
    holder, late = owner_of_next(scheduler, 30.0)
    others = [server for server in range(3) if server != holder]
    for other in others:
        for wanted in requested(scheduler, other, 30.0):
            respond(scheduler, other, wanted, 30.01)
    early, overdue = 30.0 + 0.9 * HEDGE_LEAST, 30.0 + 1.1 * HEDGE_LEAST
    assert not any(scheduler.has_work(other, early) for other in others)
    takes = [other for other in others if scheduler.has_work(other, overdue)]
    assert len(takes) == 1, "the first idle one of the ranking"
    assert scheduler.next_request(takes[0], overdue) == late._replace(ahead=0)
    assert scheduler.hedges == len(late.batches)
    assert not any(scheduler.has_work(other, overdue) for other in others), "it is hedged once"
    respond(scheduler, takes[0], late, overdue)
    assert not scheduler.is_missing(late.batches.start)
    before = scheduler.received
    assert scheduler.arrived(1, READY_BYTES, holder, overdue) is None, "no rest is requested of the slow server"
    assert scheduler.received == before


@pytest.mark.parametrize(
    ("latency", "rate", "patience"), [(0.2, None, 0.3), (0.001, None, HEDGE_LEAST), (0.001, 8.0, 0.75)]
)
def test_a_request_is_overdue_after_the_usual_time(latency: float, rate: float | None, patience: float) -> None:
    """The threshold follows recent responses, or the rate: responses with other clients' batches are fast."""
    scheduler, now = fleet(2, rate=rate), 10.0
    for step in range(12):
        for server in range(2):
            for wanted in requested(scheduler, server, now + step):
                respond(scheduler, server, wanted, now + step + latency)
        scheduler.taken = scheduler.received
    holder, _ = owner_of_next(scheduler, 30.0)
    other = 1 - holder
    for wanted in requested(scheduler, other, 30.0):
        respond(scheduler, other, wanted, 30.0 + latency)
    assert not scheduler.has_work(other, 30.0 + 0.95 * patience)
    assert scheduler.has_work(other, 30.0 + 1.05 * patience)


def test_a_request_is_not_hedged_while_the_training_loop_has_batches() -> None:
    """An overdue request is not hedged while the training loop has batches, however long the request takes."""
    scheduler = measured(2)
    holder, _ = owner_of_next(scheduler, 30.0)
    for wanted in requested(scheduler, 1 - holder, 30.0):
        respond(scheduler, 1 - holder, wanted, 30.01)
    scheduler.taken -= 1
    assert not scheduler.has_work(1 - holder, 60.0)
    scheduler.taken += 1
    assert scheduler.has_work(1 - holder, 60.0)


def test_all_clients_hedge_to_the_same_server() -> None:
    """All clients hedge to the same server, so that a slow server's batches are computed only twice."""
    found = []
    for _ in range(2):
        scheduler = measured(3)
        holder, _ = owner_of_next(scheduler, 30.0)
        for other in {0, 1, 2} - {holder}:
            for wanted in requested(scheduler, other, 30.0):
                respond(scheduler, other, wanted, 30.01)
        found.append([server for server in range(3) if scheduler.next_request(server, 31.0) is not None])
    assert found[0] == found[1]


def test_a_failed_hedge_is_repeated() -> None:
    """A failed hedge is repeated while the first request is pending."""
    scheduler = measured(2)
    holder, late = owner_of_next(scheduler, 30.0)
    for wanted in requested(scheduler, 1 - holder, 30.0):
        respond(scheduler, 1 - holder, wanted, 30.01)
    for now in (31.0, 32.0):
        assert scheduler.next_request(1 - holder, now) == late._replace(ahead=0)
        scheduler.disconnected(1 - holder, now)
        scheduler.joined(1 - holder, 4, f"server-{1 - holder}", now=now)


def test_until_latencies_are_known_requests_are_hedged_late() -> None:
    """Hedging starts later while latencies are unknown, because a server's first responses take long."""
    scheduler = fleet(2, stop=BLOCK)
    holder = 0 if scheduler.next_request(0) is not None else 1
    if holder == 1:
        assert scheduler.next_request(1) is not None
    assert scheduler.next_request(1 - holder, 0.9 * HEDGE_UNKNOWN) is None
    assert scheduler.next_request(1 - holder, HEDGE_UNKNOWN) == BatchRequest(BatchRanges(range(BLOCK)))


def test_the_first_batches_are_not_hedged_before_a_worker_can_compute_them() -> None:
    """While latencies are unknown, hedging waits for the reported computing time of a batch, if it is long."""
    seconds = 4 * HEDGE_UNKNOWN
    scheduler = fleet(2, 1, stop=BLOCK, rate=1 / seconds)
    holder = 0 if scheduler.next_request(0) is not None else 1
    if holder == 1:
        assert scheduler.next_request(1) is not None
    assert scheduler.next_request(1 - holder, seconds) is None
    assert scheduler.next_request(1 - holder, HEDGE_FACTOR * seconds) is not None


def test_a_block_that_its_server_does_not_request_is_taken_over() -> None:
    """Another server takes over a block that the training loop needs while its server's connections are occupied."""
    scheduler = measured(2)
    now = 30.0
    assert scheduler.next_request(0, now) is not None
    assert scheduler.next_request(0, now) is not None
    for _ in range(100):  # it never responds
        now += 1.0
        for wanted in requested(scheduler, 1, now):
            respond(scheduler, 1, wanted, now)
        scheduler.taken = scheduler.received
        if scheduler.finished:
            break
    assert scheduler.finished


def be_late(scheduler: RangeScheduler, now: float) -> tuple[int, float]:
    """Let the server of the next batch respond after a hedge; return the server and the time."""
    holder, late = owner_of_next(scheduler, now)
    other = 1 - holder
    for wanted in requested(scheduler, other, now):
        respond(scheduler, other, wanted, now)
    now += 1.0
    hedge = scheduler.next_request(other, now)
    assert hedge is not None
    respond(scheduler, other, hedge, now)
    scheduler.taken = scheduler.received
    respond(scheduler, holder, late, now)
    return holder, now


def test_a_slow_server_is_ejected_for_a_cooldown() -> None:
    """The blocks of an ejected server go to the other server during the cooldown."""
    scheduler = measured(2)
    slow, now = be_late(scheduler, 30.0)
    assert not scheduler.has_work(slow, now + 0.9 * MIN_COOLDOWN_S)
    found = batches(requested(scheduler, 1 - slow, now + 0.9 * MIN_COOLDOWN_S))
    near = range(scheduler.taken, scheduler.taken + 3 * scheduler.window // 4)
    assert found >= {k for k in near if scheduler.is_missing(k)}
    scheduler.taken = scheduler.received + scheduler.window // 2
    assert scheduler.next_request(slow, now + MIN_COOLDOWN_S) is not None


def test_a_slow_server_is_used_if_it_is_the_only_one() -> None:
    """A slow server stays in use if no other server is available."""
    scheduler = measured(2)
    slow, now = be_late(scheduler, 30.0)
    scheduler.disconnected(1 - slow, now)
    assert scheduler.next_request(slow, now) is not None


@pytest.mark.parametrize("servers", [2, 3, 5])
def test_a_server_that_never_responds_does_not_stop_the_others(servers: int) -> None:
    """An epoch completes although any one server keeps its connections and never responds."""
    for silent in range(servers):
        scheduler, now = fleet(servers, stop=300), 0.0
        requested(scheduler, silent, now)
        while not scheduler.finished:
            now += 0.5
            assert now < 200, "no batch arrives any more"
            for server in set(range(servers)) - {silent}:
                for wanted in requested(scheduler, server, now):
                    respond(scheduler, server, wanted, now)
            scheduler.taken = scheduler.received
        assert now < 60


# --- Any sequence of events ---------------------------------------------------------------------------------------


BEGIN = 100.0
"""Time at the start of a sequence of events, in seconds."""


class Fleet(RuleBasedStateMachine):
    """Servers join, leave, break, return and do not respond, in any order; the training loop takes batches."""

    @initialize(
        start=st.integers(0, 30),
        length=st.integers(1, 120),
        factor=st.integers(1, 4),
        num_workers=st.integers(0, 5),
        adaptive=st.booleans(),
        nbytes=st.sampled_from([10**3, 10**5, 10**7]),
    )
    def begin(self, start: int, length: int, factor: int, num_workers: int, adaptive: bool, nbytes: int) -> None:
        """Start an epoch on one server."""
        self.nbytes = nbytes
        self.factor, self.adaptive, self.now = factor, adaptive, BEGIN
        self.start, self.stop = start, start + length
        self.scheduler = RangeScheduler(
            start, self.stop, factor, num_workers, adaptive=adaptive, name="0", loader=LOADER, epoch=1
        )
        self.workers = {0: num_workers}
        """Registered servers that have not left."""
        self.absent: set[int] = set()
        """Servers that have not registered the loader, or have disconnected."""
        self.in_flight: dict[int, list[BatchRequest]] = {0: []}
        self.arrived: set[int] = set()

    def up(self) -> list[int]:
        """Return the servers that can be sent requests."""
        return [server for server in self.workers if server not in self.absent]

    @rule(num_workers=st.integers(0, 5), registers=st.booleans(), rate=st.none() | st.sampled_from([1.0, 3.0, 10.0]))
    def join(self, num_workers: int, registers: bool, rate: float | None) -> None:
        """A server appears in the directory."""
        if len(self.workers) < 6:
            server = self.scheduler.add_server()
            self.workers[server], self.in_flight[server] = num_workers, []
            self.absent.add(server)
            if registers:
                self.register(server, rate)

    def register(self, server: int, rate: float | None = None) -> None:
        """A server registers the loader, for the first time or again."""
        self.scheduler.joined(server, self.workers[server], str(server), rate, self.now)
        self.absent.discard(server)

    @precondition(lambda self: self.absent)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        """A disconnected server responds again."""
        self.register(data.draw(st.sampled_from(sorted(self.absent))))

    @rule(data=st.data(), rate=st.sampled_from([1.0, 3.0, 10.0]))
    def report(self, data: st.DataObject, rate: float) -> None:
        """A server reports another rate."""
        if self.up():
            self.register(data.draw(st.sampled_from(self.up())), rate)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A server disappears from the directory."""
        server = data.draw(st.sampled_from(sorted(self.workers)))
        self.scheduler.remove_server(server, self.now)
        del self.workers[server]
        self.absent.discard(server)

    @rule()
    def forget(self) -> None:
        """The threads of servers that have left end; servers that join later may have the same numbers."""
        for server in [server for server in self.in_flight if self.scheduler.has_left(server)]:
            self.scheduler.forget_server(server)
            del self.in_flight[server]

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """The connections of a server break, also of one that has left."""
        server = data.draw(st.sampled_from(sorted(self.in_flight)))
        self.scheduler.disconnected(server, self.now)
        self.in_flight[server].clear()
        if server in self.workers:
            self.absent.add(server)

    @rule(data=st.data(), times=st.integers(1, 3))
    def send(self, data: st.DataObject, times: int) -> None:
        """A thread sends requests to its server."""
        for _ in range(times if self.up() else 0):
            self.pull(data.draw(st.sampled_from(self.up())))

    def pull(self, server: int) -> None:
        """Send as many requests as a server has connections."""
        in_flight = self.in_flight[server]
        while len(in_flight) < self.scheduler.connections:
            has_work = self.scheduler.has_work(server, self.now)
            wanted = self.scheduler.next_request(server, self.now)
            assert has_work == (wanted is not None)
            if wanted is None:
                return
            assert self.scheduler.received <= wanted.batches.start < wanted.batches.stop <= self.scheduler.stop
            assert wanted.batches.stop <= self.scheduler.taken + max(self.most, self.scheduler.window)
            assert self.scheduler.is_missing(wanted.batches.start)
            assert len(wanted.batches.ranges) <= MAX_RANGES
            assert list(wanted.batches) == sorted(set(wanted.batches))
            in_flight.append(wanted)

    @property
    def most(self) -> int:
        """The largest window that there can have been."""
        return MAX_WINDOW if self.adaptive else self.factor * 6 * 5

    @rule(data=st.data(), times=st.integers(1, 4))
    def receive(self, data: st.DataObject, times: int) -> None:
        """Responses arrive, some of them incomplete; other servers are slow and do not respond."""
        for _ in range(times):
            responding = sorted(server for server, in_flight in self.in_flight.items() if in_flight)
            if responding:
                server = data.draw(st.sampled_from(responding))
                wanted = self.in_flight[server][0]
                self.respond(server, data.draw(st.integers(1, len(wanted.batches))))

    def respond(self, server: int, count: int) -> None:
        """The first `count` batches of a server's oldest request arrive."""
        wanted = self.in_flight[server][0]
        new = {k for k in list(wanted.batches)[:count] if self.scheduler.is_missing(k)}
        assert not new & self.arrived, "each batch arrives once"
        self.arrived |= new
        rest = self.scheduler.arrived(count, self.nbytes * count, server, self.now)
        if rest is None:
            self.in_flight[server].pop(0)
        else:
            assert server in self.workers
            self.in_flight[server][0] = rest

    @rule(share=st.floats(0, 1))
    def take(self, share: float) -> None:
        """The training loop takes batches."""
        self.scheduler.taken += round(share * (self.scheduler.received - self.scheduler.taken))
        self.scheduler.paced(self.now)

    @rule(seconds=st.sampled_from([0.01, 0.2, 2.0, MAX_COOLDOWN_S]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    @rule()
    def fill_memory(self) -> None:
        """Received batches exceed the limit, or do not any more."""
        self.scheduler.over_memory = not self.scheduler.over_memory

    @invariant()
    def receives_in_order(self) -> None:
        """All batches before `received` have arrived, and the next one has not."""
        assert set(range(self.start, self.scheduler.received)) <= self.arrived
        assert self.scheduler.received not in self.arrived
        assert self.start <= self.scheduler.taken <= self.scheduler.received <= self.stop

    def teardown(self) -> None:
        """The epoch ends if one server responds, however many others do not.

        A request is hedged after a multiple of the latencies seen before, which are at most as long as the test.
        """
        if not hasattr(self, "scheduler"):
            return
        patience = 100.0 + HEDGE_FACTOR * (self.now - BEGIN)
        silent = set(self.in_flight)
        server = self.scheduler.add_server()
        self.workers[server], self.in_flight[server] = 2, []
        self.register(server)
        received, since = -1, self.now
        while not self.scheduler.finished:
            if self.scheduler.received > received:
                received, since = self.scheduler.received, self.now
            assert self.now - since < patience, "no batch arrives any more"
            self.now += 0.5
            for other in self.up():
                self.pull(other)
            while self.in_flight[server]:
                wanted = self.in_flight[server][0]
                self.respond(server, len(wanted.batches))
            self.scheduler.over_memory = False
            self.scheduler.taken = self.scheduler.received
        assert self.arrived == set(range(self.start, self.stop))
        for other in silent:
            while self.in_flight[other]:
                wanted = self.in_flight[other][0]
                self.respond(other, len(wanted.batches))


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=examples(100), stateful_step_count=50)
