"""Diagnosis of a training loop's bottleneck from measurements."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server.stats.bottleneck import (
    MAX_WORKERS,
    MEMORY_FULL,
    MIN_DATA_WAIT,
    MIN_IDLE,
    WORKERS_BUSY,
    diagnose,
    split,
)
from teleloader_server.stats.evidence import (
    ConsumerRates,
    Link,
    Machine,
    MainProcess,
    PoolLoad,
    Receiving,
    Straggler,
    total_demand,
)
from teleloader_shared.stats import WINDOW, Bottleneck

STAGES = {"fetch": 0.08, "collate": 0.015, "encode": 0.005}
MACHINE = Machine(cpus=64, own=3.0, idle=0.9)
FULL = MACHINE._replace(cpus=4, own=3.9, idle=0.01)
FILLED = MACHINE._replace(cpus=4, own=0.8, idle=0.02)
THROTTLED = MACHINE._replace(cpus=4, own=1.5, idle=0.6, quota=1.5, throttled=0.7)


def receiving(pending: float = 0.0, reading: float = 0.0, **known: float) -> Receiving:
    """Return the measurements of receiving threads that wait for responses."""
    return Receiving(pending, reading, elsewhere=0.0, busy=0.1, cpu=0.02, process=0.1, wakeups=40.0, late=0.0)._replace(
        **known
    )


def consumption(**known: Any) -> ConsumerRates:
    """Return rates of a consumer with these values, each of whose batches takes a worker 0.1 s.

    Its training loop waits for responses of which no byte has arrived.
    """
    usual = ConsumerRates(
        known_for=60.0,
        idle=0.0,
        batch_rate=20.0,
        byte_rate=20e6,
        starved_fraction=0.0,
        sending_fraction=0.0,
        data_wait_fraction=0.0,
        stages=STAGES,
        step=0.02,
        receiving=receiving(known.get("data_wait_fraction") or 0.0),
        window=6,
    )
    return usual._replace(**known)


def workforce(*consumers: ConsumerRates, **known: Any) -> PoolLoad:
    """Return the load of three workers that these consumers share, which compute while they are busy."""
    usual = PoolLoad(
        workers=3, busy=0.5, demand=total_demand((number, one.demand) for number, one in enumerate(consumers)),
        consumers=len(consumers), setting="--num-workers {}", machine=MACHINE, main=MainProcess(0.0, 0.1, 0.0),
        memory_budget=2**30,
    )._replace(**known)  # fmt: skip
    return usual if "cpu" in known else usual._replace(cpu=usual.load)


WAITS = {"data_wait_fraction": 0.62, "starved_fraction": 0.9}
READY = {"data_wait_fraction": 0.4, "starved_fraction": 0.05}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Bottleneck, int | None, str]] = {
    "workers compute": (
        WAITS,
        {"busy": 1.0},
        "workers",
        5,
        "The training loop waits 62 % of the time for batches that workers compute: 5 workers instead of 3 would keep "
        "up (--num-workers 5), or speed up the stage 'fetch', which takes 80 % of the time per batch.",
    ),
    "workers are blocked": (
        WAITS,
        {"busy": 1.0, "cpu": 0.3},
        "io",
        5,
        "The training loop waits 62 % of the time for batches whose workers are blocked 90 % of their time (by disks, "
        "networks, locks or sleep): 5 workers instead of 3 would keep up (--num-workers 5), or speed up",
    ),
    "workers compute as much as they are blocked": (
        WAITS,
        {"busy": 1.0, "cpu": 1.2, "cpu_wait": 0.6},
        "unknown",
        None,
        "Of 3 busy workers, 1.2 compute, 1.2 are blocked, and 0.6 wait for a CPU.",
    ),
    "the workers use all CPUs": (
        WAITS,
        {"busy": 1.0, "workers": 4, "machine": FULL},
        "machine",
        5,
        "The training loop waits 62 % of the time, and the server uses 3.9 of the server's 4 CPUs, so that more "
        "workers would not help: add another server, or speed up the stage 'fetch'",
    ),
    "small batches use all CPUs": (
        {**WAITS, "typical": 40e-6},
        {"busy": 1.0, "workers": 4, "machine": FULL},
        "machine",
        5,
        "A worker computes a batch in 40 us, so that most of the CPU time is overhead per batch: use larger batches",
    ),
    "other programs use all CPUs": (
        WAITS,
        {"busy": 1.0, "cpu": 0.8, "cpu_wait": 2.1, "machine": FILLED},
        "machine",
        5,
        "The training loop waits 62 % of the time, and other programs use 3.12 of the server's 4 CPUs, so that 2.1 of "
        "3 workers wait for a CPU: stop them, or run the server on another machine.",
    ),
    "the quota of the container is used up": (
        WAITS,
        {"busy": 1.0, "cpu": 1.4, "cpu_wait": 1.5, "machine": THROTTLED},
        "machine",
        5,
        "The training loop waits 62 % of the time, and the CPU quota of 1.5 CPUs of the server's container throttles "
        "it in 70 % of the periods: increase the quota (docker run --cpus, resources.limits.cpu in Kubernetes)",
    ),
    "the machine is larger than the workers need": (
        WAITS,
        {"busy": 1.0, "machine": FULL._replace(own=3.9, idle=0.5)},
        "workers",
        5,
        "5 workers would keep up, but the server's 4 CPUs are already busy: add another server",
    ),
    "memory is full": (
        {"data_wait_fraction": 0.3, "starved_fraction": 0.4},
        {"busy": 0.4, "memory_full": 0.8},
        "memory",
        3,
        "The training loop waits 30 % of the time, and the memory budget of 1 GiB is full 80 % of the time, so that "
        "batches are not computed ahead: double it (--memory-budget 2048MiB).",
    ),
    "a sample takes long": (
        {
            "data_wait_fraction": 0.3,
            "starved_fraction": 0.4,
            "batch_rate": 10.0,
            "typical": 0.1,
            "straggler": Straggler(7, 1234, 2.0, 0.3),
            "step": 0.07,
        },
        {"busy": 0.5},
        "workers",
        2,
        "The training loop waits 30 % of the time for slow batches: sample 1234 took 2 s, and the median of all "
        "batches is 100 ms. Speed up this sample, or prefetch more (num_workers=1 and prefetch_factor=10 of the "
        "DataLoader).",
    ),
    "a sample is blocked for long": (
        {
            "data_wait_fraction": 0.3,
            "starved_fraction": 0.4,
            "batch_rate": 10.0,
            "typical": 0.1,
            "straggler": Straggler(7, None, 2.0, 0.3),
            "step": 0.07,
        },
        {"busy": 0.5, "cpu": 0.1},
        "io",
        2,
        "for slow batches: batch 7 took 2 s",
    ),
    "batches start too late": (
        {"data_wait_fraction": 0.3, "starved_fraction": 0.4, "batch_rate": 10.0, "step": 0.07, "p99": 0.5},
        {"busy": 0.5},
        "prefetch",
        2,
        "The training loop waits 30 % of the time for batches that are not ready, although workers are idle 50 % of "
        "the time: prefetch more (num_workers=1 and prefetch_factor=6 of the DataLoader), so that batches start "
        "earlier. If epochs are short, set prefetch_next_epoch=True of the DataLoader.",
    ),
    "a slow sample explains little of the wait": (
        {
            "data_wait_fraction": 0.3,
            "starved_fraction": 0.4,
            "batch_rate": 10.0,
            "typical": 0.1,
            "straggler": Straggler(7, 1234, 0.5, 0.05),
        },
        {"busy": 0.5},
        "prefetch",
        2,
        "although workers are idle 50 % of the time",
    ),
    "idle workers are assigned batches late": (
        {"data_wait_fraction": 0.3, "starved_fraction": 0.4, "batch_rate": 10.0, "step": 0.07, "window": 40},
        {"busy": 0.5, "cpu": 0.1},
        "io",
        2,
        "although 2 workers would suffice on average",
    ),
    "private workers start too late": (
        {"data_wait_fraction": 0.3, "starved_fraction": 0.4, "batch_rate": 10.0, "step": 0.07, "p99": 0.5},
        {"busy": 0.5, "setting": "num_workers={} of the DataLoader"},
        "prefetch",
        2,
        "prefetch more (prefetch_factor=6 of the DataLoader)",
    ),
    "the main process computes": (
        {"data_wait_fraction": 0.5, "starved_fraction": 0.5, "stages": {"fetch": 1e-4}, "batch_rate": 900.0},
        {"busy": 0.03, "main": MainProcess(0.02, 0.97, 0.0)},
        "server",
        1,
        "The training loop waits 50 % of the time, and the server's main process computes 97 % of the time: use larger "
        "batches (batch_size= of the DataLoader), or start the server with --servers 2",
    ),
    "the event loop is late": (
        READY,
        {"main": MainProcess(0.03)},
        "server",
        4,
        "the event loop of the server's main process lags by 30 ms",
    ),
    "a timer of an idle main process is late": (
        {"data_wait_fraction": 0.3, "starved_fraction": 0.4, "batch_rate": 10.0},
        {"busy": 0.5, "main": MainProcess(0.016, 0.09, 0.12)},
        "prefetch",
        2,
        "although workers are idle 50 % of the time",
    ),
    "the main process has no CPU": (
        READY,
        {"main": MainProcess(0.03, 0.2, 0.7), "machine": FILLED},
        "machine",
        4,
        "other programs use 3.12 of the server's 4 CPUs",
    ),
    "idle workers get no batches": (
        {"data_wait_fraction": 0.5, "starved_fraction": 0.5, "stages": {"fetch": 1e-4}, "batch_rate": 900.0},
        {"busy": 0.03},
        "unknown",
        None,
        "although workers are idle 97 % of the time, and no measurement explains it.",
    ),
    "the network is slow": (
        {**READY, "receiving": receiving(0.02, 0.38)},
        {},
        "network",
        4,
        "The training loop waits 40 % of the time, although batches are ready: they arrive at 20.0 MB/s, as fast as "
        'the network permits. Send fewer bytes (smaller dtypes such as uint8, or compression="zstd" of the '
        "DataLoader), or use a faster network.",
    ),
    "compressed batches arrive slowly": (
        {**READY, "receiving": receiving(0.02, 0.38), "is_compressed": True},
        {},
        "network",
        4,
        "Send fewer bytes (smaller dtypes such as uint8), or use a faster network.",
    ),
    "the network delays responses": (
        {**READY, "batch_rate": 100.0, "byte_rate": 1e6, "link": Link(0.2, 1e6, 0.0, 0.9, 0.0)},
        {"demand": 3.5},
        "network",
        4,
        "although batches are ready: responses take long to arrive; the round-trip time to the client or to a proxy is "
        "200 ms. To hide it, prefetch more (num_workers=1 and prefetch_factor=14 of the DataLoader), or run the server",
    ),
    "the network loses packets": (
        {**READY, "link": Link(0.02, 1e6, 0.03, 0.9, 0.0)},
        {},
        "network",
        4,
        "although batches are ready: 3.0 % of the packets to the client are retransmitted.",
    ),
    "the client decodes": (
        {**READY, "receiving": receiving(0.02, 0.01, busy=0.95, cpu=0.9), "is_compressed": True},
        {},
        "client",
        4,
        "The training loop waits 40 % of the time, although batches have arrived: its receiving threads compute 0.9 "
        "s/s to receive and decode 20.0 MB/s. Set compression=None and checksum=False of the DataLoader, or send fewer",
    ),
    "the client reads": (
        {**READY, "receiving": receiving(0.02, 0.38, busy=0.9, cpu=0.8), "has_checksum": False},
        {},
        "client",
        4,
        "Send fewer bytes (smaller dtypes such as uint8), or use several training processes.",
    ),
    "other threads hold the GIL": (
        {**READY, "receiving": receiving(0.2, 0.1, busy=0.5, cpu=0.02, process=1.0, late=0.9)},
        {},
        "client",
        4,
        "other threads of the training process compute 0.98 s/s meanwhile, and hold the GIL. Move their work",
    ),
    "a thread that holds the GIL does not explain a slow network": (
        {**READY, "receiving": receiving(0.02, 0.38, process=1.0, wakeups=4.0, late=0.9)},
        {},
        "network",
        4,
        "although batches are ready: they arrive at 20.0 MB/s",
    ),
    "the client has no CPU": (
        {**READY, "receiving": receiving(0.02, 0.02, busy=0.5, cpu=0.05)},
        {},
        "client",
        4,
        "the training process has no CPU for its receiving threads, or copies to its device take long",
    ),
    "another server is slow": (
        {**READY, "receiving": receiving(0.02, 0.02, elsewhere=0.36)},
        {},
        "unknown",
        None,
        "The training loop waits 40 % of the time, mostly for other servers: run teleloader stats with the URLs of",
    ),
    "several reasons": (
        {"data_wait_fraction": 0.6, "starved_fraction": 0.2, "receiving": receiving(0.2, 0.2)},
        {},
        "unknown",
        None,
        "for several reasons: 20 % for batches that are not ready, 20 % for batches in transit, and 20 % for batches "
        "that have arrived.",
    ),
    "several reasons on full CPUs": (
        {"data_wait_fraction": 0.6, "starved_fraction": 0.2, "receiving": receiving(0.2, 0.2)},
        {"machine": FULL, "main": MainProcess(0.0, 0.5, 0.4)},
        "machine",
        5,
        "the server uses 3.9 of the server's 4 CPUs, so that more workers would not help",
    ),
    "the loop does nothing but wait": (
        {"data_wait_fraction": 0.999, "starved_fraction": 1.0},
        {"busy": 1.0},
        "workers",
        None,
        "for batches that workers compute and consumes each batch at once: 3 workers compute 20 batches/s, enough for "
        "training steps of 50 ms; steps of half that time need 6 workers (--num-workers 6), or speed up",
    ),
    "the server's own process loads": (
        {"data_wait_fraction": 0.5, "starved_fraction": 0.5, "batch_rate": 10.0},
        {"workers": 0, "busy": 0.9},
        "workers",
        2,
        "2 workers would keep up (--num-workers 2)",
    ),
    "more workers than one can count on": (
        {"data_wait_fraction": 0.88, "starved_fraction": 1.0, "batch_rate": 100.0},
        {"busy": 1.0, "machine": MACHINE._replace(cpus=8)},
        "workers",
        80,
        "80 workers would keep up, many more than the server's 8 CPUs: try 32 first (--num-workers 32), or speed",
    ),
    "training takes the time": (
        {"data_wait_fraction": 0.01, "starved_fraction": 0.1, "batch_rate": 5.0},
        {"busy": 0.2},
        "training",
        1,
        "The training loop waits 1 % of the time for data, and the workers are idle 80 % of the time, so training is "
        "the bottleneck: 1 worker would suffice.",
    ),
    "both are as fast": (
        {"data_wait_fraction": 0.02, "starved_fraction": 0.6, "batch_rate": 30.0},
        {"busy": 0.95},
        "training",
        3,
        "so training is the bottleneck; the workers are busy 95 % of the time, so loading is hardly faster.",
    ),
    "a client without reports waits": (
        {"data_wait_fraction": None, "starved_fraction": 0.9, "receiving": None},
        {"busy": 1.0},
        "workers",
        None,
        "Requested batches are not ready 90 % of the time for batches that workers compute: add workers "
        "(--num-workers N)",
    ),
    "a client without reports rarely requests": (
        {"data_wait_fraction": None, "starved_fraction": 0.1, "receiving": None},
        {"busy": 0.2},
        "training",
        2,
        "Batches are ready when they are requested",
    ),
    "it requests nothing": ({"idle": 12.0}, {}, "idle", None, "No request for 12 s."),
    "it has all batches": ({"idle": 3.0, "is_finished": True}, {}, "finished", None, "The epoch is finished"),
    "it has just started": (
        {"known_for": 0.5, "data_wait_fraction": 1.0},
        {},
        "unknown",
        None,
        "A diagnosis needs 2 s of loading.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bottleneck_of_a_consumer_is_reported(case: str) -> None:
    """The diagnosis has the bottleneck, the number of workers that would meet the demand, and the text with both."""
    seen, by, bottleneck, workers, text = CASES[case]
    one = consumption(**seen)
    found = diagnose(one, workforce(one, **by))
    assert text in found.advice, found
    assert (found.bottleneck, found.workers) == (bottleneck, workers), found
    assert (found.confidence > 0) == (bottleneck != "unknown")


def test_the_setting_of_servers_under_a_supervisor_is_their_total() -> None:
    """`--num-workers` is divided among the servers, each of which knows its own share."""
    consumer = consumption(**WAITS)
    advice = diagnose(consumer, workforce(consumer, busy=1.0, servers=2)).advice
    assert "5 workers instead of 3 would keep up (--num-workers 10, divided among 2 servers)" in advice


def test_all_consumers_of_the_workers_are_kept_up_with() -> None:
    """The recommended number of workers is for all consumers that share them, and the text states so."""
    hungry = consumption(data_wait_fraction=0.5, starved_fraction=0.9, batch_rate=15.0)
    modest = consumption(data_wait_fraction=0.0, batch_rate=20.0)
    found = diagnose(hungry, workforce(hungry, modest, busy=1.0))
    assert found.workers == 5
    assert "5 workers instead of 3 would keep up with all 2 consumers" in found.advice


def test_batches_that_consumers_share_are_computed_once() -> None:
    """The demand for shared batches is that of the fastest consumer."""
    assert total_demand([("shared", 2.0), ("shared", 3.0), ("own", 1.5)]) == 4.5
    assert total_demand([]) == 0.0


@given(loop_seconds=st.floats(0.001, 1.0), batch_seconds=st.floats(0.001, 1.0), workers=st.integers(1, 64))
def test_the_number_of_workers_is_what_a_model_of_both_needs(
    loop_seconds: float, batch_seconds: float, workers: int
) -> None:
    """In a model with constant times per step and batch, the recommended workers meet the demand without excess."""
    pace = min(1 / loop_seconds, workers / batch_seconds)
    waits = 1 - pace * loop_seconds
    busy = pace * batch_seconds / workers
    one = consumption(
        batch_rate=pace, data_wait_fraction=waits, starved_fraction=waits, stages={"fetch": batch_seconds}
    )
    found = diagnose(one, workforce(one, workers=workers, busy=busy))
    needed = batch_seconds / loop_seconds
    if waits >= MIN_DATA_WAIT:
        assert found.bottleneck == "workers"
        assert found.workers is None or needed * (1 - MIN_DATA_WAIT) <= found.workers <= math.ceil(needed)
    else:
        assert found.bottleneck == "training"
        assert found.workers is not None
        assert found.workers <= max(1, math.ceil(needed))


SHARE = st.floats(0, 1)
SECONDS = st.floats(0, 1e4)
RECEIVING = st.builds(
    Receiving, SHARE, SHARE, SHARE, st.floats(0, 4), st.floats(0, 4), st.floats(0, 4), st.floats(0, 1e4), SHARE
)
LINKS = st.builds(Link, st.floats(0, 10), st.floats(0, 1e10), st.none() | SHARE, st.none() | SHARE, st.none() | SHARE)
CONSUMERS = st.builds(
    ConsumerRates, SECONDS, st.just(0.0) | SECONDS, st.floats(0, 1e6), st.floats(0, 1e12), SHARE, SHARE,
    st.none() | SHARE, st.fixed_dictionaries({"fetch": SECONDS, "encode": SECONDS}), step=SECONDS,
    receiving=st.none() | RECEIVING, link=st.none() | LINKS,
    straggler=st.none() | st.builds(Straggler, st.integers(0, 99), st.none() | st.integers(0, 999), SECONDS, SHARE),
    typical=st.none() | SECONDS, p99=st.none() | SECONDS, window=st.integers(0, 2048), is_compressed=st.booleans(),
    has_checksum=st.booleans(), is_finished=st.sampled_from([False, False, False, True]),
)  # fmt: skip
MACHINES = st.builds(
    Machine, st.integers(1, 256), st.floats(0, 256), st.none() | SHARE, st.none() | st.floats(0.1, 64),
    st.none() | SHARE, st.none() | SHARE, st.none() | SHARE,
)  # fmt: skip
MAIN = st.builds(MainProcess, st.floats(0, 1), st.none() | SHARE, st.none() | SHARE)
POOLS = st.builds(
    PoolLoad, st.integers(0, 1024), SHARE, st.floats(0, 2000), st.integers(1, 99),
    st.sampled_from(["--num-workers {}", "num_workers={} of serve()", "num_workers={} of the DataLoader"]),
    MACHINES, MAIN, st.none() | st.floats(0, 1024), st.floats(0, 1024), SHARE, st.integers(2**20, 2**40),
    st.integers(1, 8),
)  # fmt: skip


@given(CONSUMERS, POOLS)
def test_any_measurements_give_a_text(seen: ConsumerRates, pool: PoolLoad) -> None:
    """The text is one line of sentences, and never recommends more workers than possible."""
    found = diagnose(seen, pool)
    assert found.advice.endswith(".")
    assert "\n" not in found.advice
    assert found.workers is None or 0 <= found.workers <= MAX_WORKERS
    assert 0 <= found.confidence <= 1
    assert all(each.name and each.value for each in found.evidence)


@given(CONSUMERS, POOLS)
def test_a_bottleneck_does_not_contradict_its_measurements(seen: ConsumerRates, pool: PoolLoad) -> None:
    """Each bottleneck requires what it claims."""
    parts, wait = split(seen), seen.data_wait_fraction
    found = diagnose(seen, pool).bottleneck
    others = pool.load - (pool.cpu or 0.0) - pool.cpu_wait
    claims = {
        "workers": parts.not_ready > 0,
        "io": others > 0 and parts.not_ready == max(parts),
        "machine": (
            pool.cpu_wait > 0
            or (pool.machine.idle is not None and pool.machine.idle < MIN_IDLE)
            or (pool.machine.throttled or 0) > 0
            or (pool.main.cpu_wait or 0) > 0
        ),
        "memory": pool.memory_full >= MEMORY_FULL and pool.busy < WORKERS_BUSY,
        "prefetch": pool.busy < WORKERS_BUSY and parts.not_ready == max(parts),
        "server": pool.main.lag > 0 or (pool.main.cpu or 0) > 0,
        "network": parts.in_transit == max(parts),
        "client": parts.in_client == max(parts) and seen.receiving is not None,
        "training": wait is None or wait < MIN_DATA_WAIT,
        "idle": seen.idle > 0,
        "finished": seen.is_finished,
        "unknown": True,
    }
    assert claims[found]
    if wait is not None:
        assert parts.total == pytest.approx(wait)


MISSING: dict[str, Any] = {
    "the data wait": ({"data_wait_fraction": None}, {}),
    "the receiving threads": ({"receiving": None}, {}),
    "the CPU time of workers": ({}, {"cpu": None}),
    "the machine": ({}, {"machine": Machine(8, 1.0)}),
    "the main process": ({}, {"main": MainProcess()}),
    "a long period": ({"known_for": 2.5}, {}),
}


@pytest.mark.parametrize("missing", MISSING)
@given(seen=CONSUMERS, pool=POOLS)
def test_confidence_falls_when_a_measurement_is_missing(missing: str, seen: ConsumerRates, pool: PoolLoad) -> None:
    """The same bottleneck is less certain than it may be with all measurements."""
    of_consumer, of_pool = MISSING[missing]
    found = diagnose(seen._replace(**of_consumer), pool._replace(**of_pool))
    assert found.bottleneck in ("idle", "finished") or found.confidence < 1.0


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("case", [case for case, found in CASES.items() if found[2] not in ("unknown", "idle")])
def test_no_case_becomes_more_certain_with_less_measured(case: str, missing: str) -> None:
    """If the bottleneck stays the same, the confidence does not rise."""
    seen, by, *_ = CASES[case]
    one = consumption(**seen)
    pool = workforce(one, **by)
    of_consumer, of_pool = MISSING[missing]
    before, after = diagnose(one, pool), diagnose(one._replace(**of_consumer), pool._replace(**of_pool))
    assert after.bottleneck != before.bottleneck or after.confidence <= before.confidence


@given(CONSUMERS, POOLS)
def test_no_setting_is_recommended_that_was_reached(seen: ConsumerRates, pool: PoolLoad) -> None:
    """Numbers are larger than the present ones, and options differ from those that are set."""
    advice = diagnose(seen, pool).advice
    for count in map(int, re.findall(r"(?:--num-workers |num_workers=)(\d+)(?!\d| and prefetch)", advice)):
        assert count > pool.workers * pool.servers
    for factor in map(int, re.findall(r"prefetch_factor=(\d+)", advice)):
        assert factor * max(1, pool.workers) > seen.window
    assert not (seen.is_compressed and 'compression="zstd"' in advice)
    assert not (not seen.is_compressed and "compression=None" in advice)
    assert not (not seen.has_checksum and "checksum=False" in advice)
    for budget in map(int, re.findall(r"--memory-budget (\d+)MiB", advice)):
        assert budget * 2**20 > pool.memory_budget


@given(wait=SHARE, starved=SHARE, found=RECEIVING)
def test_the_parts_of_a_wait_are_the_wait(wait: float, starved: float, found: Receiving) -> None:
    """No part is negative, and together they are the data wait."""
    parts = split(consumption(data_wait_fraction=wait, starved_fraction=starved, receiving=found))
    assert parts.total == pytest.approx(wait)
    assert min(parts) >= -1e-12


def test_a_short_period_is_less_certain() -> None:
    """The confidence grows until the window is full."""
    known = [consumption(**WAITS, known_for=seconds) for seconds in (2.0, 5.0, WINDOW, 60.0)]
    found = [diagnose(one, workforce(one, busy=1.0)).confidence for one in known]
    assert found == sorted(found)
    assert found[0] < found[-1] == found[-2]
