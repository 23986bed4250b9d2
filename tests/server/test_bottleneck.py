"""Diagnosis of a consumer's bottleneck from measurements."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server.stats.bottleneck import (
    MAX_WORKERS,
    MIN_DATA_WAIT,
    WORKERS_BUSY,
    ConsumerRates,
    PoolLoad,
    diagnose,
    total_demand,
)
from teleloader_shared.stats import Bottleneck

STAGES = {"fetch": 0.08, "collate": 0.015, "encode": 0.005}


def consumption(**known: Any) -> ConsumerRates:
    """Return rates of a consumer with these values, each of whose batches takes a worker 0.1 s."""
    usual = ConsumerRates(
        known_for=60.0,
        idle=0.0,
        batch_rate=20.0,
        byte_rate=20e6,
        starved_fraction=0.0,
        sending_fraction=0.0,
        data_wait_fraction=0.0,
        stages=STAGES,
    )
    return usual._replace(**known)


def workforce(*consumers: ConsumerRates, **known: Any) -> PoolLoad:
    """Return the load of three workers that these consumers share."""
    usual = PoolLoad(
        workers=3, busy=0.5, demand=total_demand((number, one.demand) for number, one in enumerate(consumers)),
        consumers=len(consumers), setting="--num-workers {}", cpus=64, cpu=3.0, event_loop_lag=0.0,
    )  # fmt: skip
    return usual._replace(**known)


def test_the_setting_of_servers_under_a_supervisor_is_their_total() -> None:
    """`--num-workers` is divided among the servers, each of which knows its own share."""
    consumer = consumption(data_wait_fraction=0.62, starved_fraction=0.9)
    advice = diagnose(consumer, workforce(consumer, busy=1.0, servers=2)).advice
    assert "5 workers instead of 3 would keep up (--num-workers 10, divided among 2 servers)" in advice


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Bottleneck, int | None, str]] = {
    "batches are not ready": (
        {"data_wait_fraction": 0.62, "starved_fraction": 0.9},
        {"busy": 1.0},
        "loader",
        5,
        "The training loop waits 62 % of the time for batches that are not ready: 5 workers instead of 3 would "
        "keep up (--num-workers 5), or speed up the stage 'fetch', which takes 80 % of the time per batch.",
    ),
    "the machine is too small": (
        {"data_wait_fraction": 0.62, "starved_fraction": 0.9},
        {"busy": 1.0, "cpus": 4, "cpu": 3.9},
        "loader",
        5,
        "The training loop waits 62 % of the time for batches that are not ready: 5 workers would keep up, but the "
        "server's 4 CPUs are already busy: add another server, or speed up the stage 'fetch', which takes 80 % of "
        "the time per batch.",
    ),
    "the machine is small and sleeps": (
        {"data_wait_fraction": 0.62, "starved_fraction": 0.9},
        {"busy": 1.0, "cpus": 4, "cpu": 0.2},
        "loader",
        5,
        "(--num-workers 5)",
    ),
    "some batches take long": (
        {"data_wait_fraction": 0.3, "starved_fraction": 0.4, "batch_rate": 10.0},
        {"busy": 0.5},
        "loader",
        2,
        "The training loop waits 30 % of the time for batches that are not ready, although 2 workers would suffice "
        "on average: prefetch more (prefetch_factor), so that slow batches start earlier, or speed up the stage "
        "'fetch', which takes 80 % of the time per batch.",
    ),
    "the workers are enough, and the server's process is late": (
        {"data_wait_fraction": 0.3, "starved_fraction": 0.4, "batch_rate": 10.0},
        {"busy": 0.5, "event_loop_lag": 0.03},
        "loader",
        2,
        "although 2 workers would suffice on average: the server's event loop lags by 30 ms, so add another server, or",
    ),
    "epochs are short": (
        {
            "data_wait_fraction": 0.08,
            "starved_fraction": 0.06,
            "stages": {"fetch": 15e-5, "encode": 9e-5},
            "batch_rate": 84.0,
        },
        {"workers": 2, "busy": 0.01},
        "loader",
        1,
        "The training loop waits 8 % of the time for batches that are not ready, although workers are idle 99 % of "
        "the time: more workers or faster samples would help little. Use longer epochs (each one starts with a wait), "
        "larger batches if they are tiny, or more prefetching (prefetch_factor) if other programs use the CPUs.",
    ),
    "the server's process is late, and its workers rest": (
        {"data_wait_fraction": 0.5, "starved_fraction": 0.5, "stages": {"fetch": 1e-4}, "batch_rate": 900.0},
        {"busy": 0.03, "event_loop_lag": 0.02},
        "loader",
        1,
        "although workers are idle 97 % of the time: the server's event loop lags by 20 ms, so add another server.",
    ),
    "the loop does nothing but wait, and the workers rest": (
        {"data_wait_fraction": 0.99, "starved_fraction": 0.9, "stages": {"fetch": 1e-4}, "batch_rate": 900.0},
        {"busy": 0.03},
        "loader",
        None,
        "more workers or faster samples would help little",
    ),
    "a client that says nothing waits for workers that rest": (
        {"data_wait_fraction": None, "starved_fraction": 0.9, "stages": {"fetch": 1e-4}, "batch_rate": 900.0},
        {"busy": 0.03},
        "loader",
        None,
        "Requested batches are not ready 90 % of the time, although workers are idle 97 % of the time: more workers "
        "or faster",
    ),
    "the server's own process loads": (
        {"data_wait_fraction": 0.5, "starved_fraction": 0.5, "batch_rate": 10.0},
        {"workers": 0},
        "loader",
        2,
        "2 workers would keep up (--num-workers 2)",
    ),
    "the loop does nothing but wait": (
        {"data_wait_fraction": 0.999, "starved_fraction": 1.0},
        {"busy": 1.0},
        "loader",
        None,
        "The training loop waits 100 % of the time for batches that are not ready and consumes each batch at once: "
        "3 workers compute 20 batches/s, enough for training steps of 50 ms; steps of half that time need 6 workers "
        "(--num-workers 6), or speed up the stage 'fetch', which takes 80 % of the time per batch.",
    ),
    "it does so on a machine that is too small": (
        {"data_wait_fraction": 0.999, "starved_fraction": 1.0},
        {"busy": 1.0, "workers": 1, "cpus": 1, "cpu": 0.99},
        "loader",
        None,
        "1 worker computes 20 batches/s, enough for training steps of 50 ms, with the server's only CPU busy; for "
        "shorter steps add another server",
    ),
    "it shares the workers with others": (
        {"data_wait_fraction": 0.999, "starved_fraction": 1.0},
        {"busy": 1.0, "consumers": 3},
        "loader",
        None,
        "3 workers compute 20 batches/s for this one of 3 consumers, enough",
    ),
    "more workers than one can count on": (
        {"data_wait_fraction": 0.88, "starved_fraction": 1.0, "batch_rate": 100.0},
        {"busy": 1.0, "cpus": 8},
        "loader",
        80,
        "80 workers would keep up, many more than the server's 8 CPUs: try 32 first (--num-workers 32), or speed "
        "up the stage 'fetch'",
    ),
    "nothing was made yet": (
        {"batch_rate": 0.0, "starved_fraction": 1.0, "stages": {}, "data_wait_fraction": 1.0},
        {},
        "loader",
        None,
        "speed up the samples",
    ),
    "batches are ready, and on their way": (
        {"data_wait_fraction": 0.4, "starved_fraction": 0.05},
        {"busy": 0.1},
        "network",
        4,
        "The training loop waits 40 % of the time although batches are ready: 20.0 MB/s arrive. If this rate saturates "
        "the network, use a faster network or send fewer bytes (smaller dtypes, compression). Otherwise latency "
        "dominates: prefetch more (prefetch_factor) and use longer epochs.",
    ),
    "the server's process is what is late": (
        {"data_wait_fraction": 0.4, "starved_fraction": 0.05},
        {"event_loop_lag": 0.03},
        "network",
        4,
        "event loop lags by 30 ms",
    ),
    "training takes the time": (
        {"data_wait_fraction": 0.01, "starved_fraction": 0.1, "batch_rate": 5.0},
        {"busy": 0.2},
        "training",
        1,
        "The training loop waits 1 % of the time for data, and the workers are idle 80 % of the time, so training "
        "is the bottleneck: 1 worker would suffice.",
    ),
    "both are as fast": (
        {"data_wait_fraction": 0.02, "starved_fraction": 0.6, "batch_rate": 30.0},
        {"busy": 0.95},
        "balanced",
        3,
        "loading and training are balanced",
    ),
    "a client that says nothing waits": (
        {"data_wait_fraction": None, "starved_fraction": 0.9},
        {"busy": 1.0},
        "loader",
        None,
        "Requested batches are not ready 90 %",
    ),
    "a client that says nothing receives": (
        {"data_wait_fraction": None, "sending_fraction": 0.9},
        {},
        "network",
        2,
        "Responses are in transit 90 % of the time",
    ),
    "a client that says nothing seldom asks": (
        {"data_wait_fraction": None, "starved_fraction": 0.1},
        {"busy": 0.2},
        "training",
        2,
        "Batches are ready when they are requested",
    ),
    "it asks for nothing": ({"idle": 12.0}, {}, "unknown", None, "No request for 12 s."),
    "it has just come": (
        {"known_for": 0.5, "data_wait_fraction": 1.0},
        {},
        "unknown",
        None,
        "A diagnosis needs 2 s of loading.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bottleneck_of_a_consumer_is_reported(case: str) -> None:
    """The diagnosis has the bottleneck, the number of workers that would meet the demand, and a sentence with both."""
    seen, by, bound, workers, said = CASES[case]
    one = consumption(**seen)
    found = diagnose(one, workforce(one, **by))
    assert (found.bottleneck, found.workers) == (bound, workers)
    assert said in found.advice


def test_all_consumers_of_the_workers_are_kept_up_with() -> None:
    """The recommended number of workers is for all consumers that share them, and the text states so."""
    hungry = consumption(data_wait_fraction=0.5, starved_fraction=0.9, batch_rate=15.0)
    modest = consumption(data_wait_fraction=0.0, batch_rate=20.0)
    found = diagnose(hungry, workforce(hungry, modest, busy=1.0))
    assert found.workers == 5
    assert "5 workers instead of 3 would keep up with all 2 consumers" in found.advice


def test_batches_that_consumers_share_are_made_once() -> None:
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
        assert found.bottleneck == "loader"
        assert found.workers is None or needed * (1 - MIN_DATA_WAIT) <= found.workers <= math.ceil(needed)
    else:
        assert found.bottleneck == ("balanced" if busy >= WORKERS_BUSY else "training")
        assert found.workers is not None
        assert found.workers <= max(1, math.ceil(needed))


@given(
    waits=st.floats(MIN_DATA_WAIT, 1.0), late=st.floats(0.5, 1.0), pace=st.floats(0.1, 1e4),
    workers=st.integers(1, 64), work=st.floats(0.0, 0.49), lag=st.sampled_from([0.0, 0.1]),
)  # fmt: skip
def test_work_that_is_less_than_the_waits_is_not_to_be_faster(
    waits: float, late: float, pace: float, workers: int, work: float, lag: float
) -> None:
    """If computing takes less time than the waits, neither faster batches nor more workers are recommended."""
    busy = work * late * waits / workers
    stages = {"fetch": busy * workers / pace}
    one = consumption(batch_rate=pace, data_wait_fraction=waits, starved_fraction=late * waits, stages=stages)
    found = diagnose(one, workforce(one, workers=workers, busy=busy, event_loop_lag=lag))
    assert "speed up" not in found.advice
    assert "--num-workers" not in found.advice
    assert found.workers is None or found.workers <= workers


SHARE = st.floats(0, 1)


@given(
    seen=st.builds(
        ConsumerRates, st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e6), st.floats(0, 1e12), SHARE, SHARE,
        st.none() | SHARE, st.fixed_dictionaries({"fetch": st.floats(0, 1e4), "encode": st.floats(0, 1e4)}),
    ),
    busy=SHARE,
    workers=st.integers(0, 1024),
)  # fmt: skip
def test_whatever_is_seen_there_is_one_sentence(seen: ConsumerRates, busy: float, workers: int) -> None:
    """Any measurements give a sentence, and never recommend more workers than possible."""
    found = diagnose(seen, workforce(seen, workers=workers, busy=busy))
    assert found.advice.endswith(".")
    assert "\n" not in found.advice
    assert found.workers is None or 0 <= found.workers <= MAX_WORKERS
