"""What holds a consumer back, told from numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server.stats.bottleneck import (
    LOOP_WAITS,
    MAX_WORKERS,
    WORKERS_BUSY,
    ConsumerRates,
    PoolLoad,
    diagnose,
    total_demand,
)
from teleloader_shared.stats import Bottleneck

STAGES = {"fetch": 0.08, "collate": 0.015, "encode": 0.005}


def consumption(**known: Any) -> ConsumerRates:
    """A consumer of which so much is known; each of its batches takes a worker 0.1 s."""
    usual = ConsumerRates(
        known_for=60.0, idle=0.0, pace=20.0, nbytes=20e6, waiting=0.0, sending=0.0, loop_waiting=0.0, stages=STAGES
    )
    return usual._replace(**known)


def workforce(*consumers: ConsumerRates, **known: Any) -> PoolLoad:
    """Three workers that these consumers share."""
    usual = PoolLoad(
        workers=3, busy=0.5, demand=total_demand((number, one.demand) for number, one in enumerate(consumers)),
        consumers=len(consumers), setting="--num-workers {}", cpus=64, cpu=3.0, event_loop_lag=0.0,
    )  # fmt: skip
    return usual._replace(**known)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Bottleneck, int | None, str]] = {
    "batches are not ready": (
        {"loop_waiting": 0.62, "waiting": 0.9}, {"busy": 1.0}, "loader", 5,
        "The loop waits 62 % of the time for batches that are not ready: 5 workers instead of 3 would keep up "
        "(--num-workers 5), or make the fetch faster, which takes 80 % of a batch's time.",
    ),
    "the machine is too small": (
        {"loop_waiting": 0.62, "waiting": 0.9}, {"busy": 1.0, "cpus": 4, "cpu": 3.9}, "loader", 5,
        "The loop waits 62 % of the time for batches that are not ready: 5 workers would keep up, but the machine's 4 "
        "processors are busy already: add another server, or make the fetch faster, which takes 80 % of a batch's "
        "time.",
    ),
    "the machine is small and sleeps": (
        {"loop_waiting": 0.62, "waiting": 0.9}, {"busy": 1.0, "cpus": 4, "cpu": 0.2}, "loader", 5, "(--num-workers 5)",
    ),
    "some batches take long": (
        {"loop_waiting": 0.3, "waiting": 0.4, "pace": 10.0}, {"busy": 0.5}, "loader", 2,
        "The loop waits 30 % of the time for batches that are not ready, though 2 workers would do on average: let "
        "more be fetched ahead (prefetch_factor), for those that take longer, or make the fetch faster, which takes "
        "80 % of a batch's time.",
    ),
    "the workers are enough, and the server's process is late": (
        {"loop_waiting": 0.3, "waiting": 0.4, "pace": 10.0}, {"busy": 0.5, "event_loop_lag": 0.03}, "loader", 2,
        "though 2 workers would do on average: the server's own process is late by 30 ms, so add another server, or",
    ),
    "epochs are short": (
        {"loop_waiting": 0.08, "waiting": 0.06, "stages": {"fetch": 15e-5, "encode": 9e-5}, "pace": 84.0},
        {"workers": 2, "busy": 0.01}, "loader", 1,
        "The loop waits 8 % of the time for batches that are not ready, though the workers rest 99 % of it: more or "
        "faster ones help little, but longer epochs (each begins with a wait), larger batches where they are tiny, or "
        "more ahead (prefetch_factor) where other programs take the processors.",
    ),
    "the server's process is late, and its workers rest": (
        {"loop_waiting": 0.5, "waiting": 0.5, "stages": {"fetch": 1e-4}, "pace": 900.0},
        {"busy": 0.03, "event_loop_lag": 0.02}, "loader", 1,
        "though the workers rest 97 % of it: the server's own process is late by 20 ms, so add another server.",
    ),
    "the loop does nothing but wait, and the workers rest": (
        {"loop_waiting": 0.99, "waiting": 0.9, "stages": {"fetch": 1e-4}, "pace": 900.0}, {"busy": 0.03},
        "loader", None,
        "more or faster ones help little",
    ),
    "a client that says nothing waits for workers that rest": (
        {"loop_waiting": None, "waiting": 0.9, "stages": {"fetch": 1e-4}, "pace": 900.0}, {"busy": 0.03},
        "loader", None,
        "What it asks for is not ready 90 % of the time, though the workers rest 97 % of it: more or faster",
    ),
    "the server's own process loads": (
        {"loop_waiting": 0.5, "waiting": 0.5, "pace": 10.0}, {"workers": 0}, "loader", 2,
        "2 workers would keep up (--num-workers 2)",
    ),
    "the loop does nothing but wait": (
        {"loop_waiting": 0.999, "waiting": 1.0}, {"busy": 1.0}, "loader", None,
        "The loop waits 100 % of the time for batches that are not ready and takes all that come: 3 workers make 20 "
        "batches/s, enough for training steps of 50 ms; for steps of half that it takes 6 (--num-workers 6), or make "
        "the fetch faster, which takes 80 % of a batch's time.",
    ),
    "it does so on a machine that is too small": (
        {"loop_waiting": 0.999, "waiting": 1.0}, {"busy": 1.0, "workers": 1, "cpus": 1, "cpu": 0.99}, "loader", None,
        "1 worker makes 20 batches/s, enough for training steps of 50 ms, "
        "with the machine's processor busy; for shorter ones add another server",
    ),
    "it shares the workers with others": (
        {"loop_waiting": 0.999, "waiting": 1.0}, {"busy": 1.0, "consumers": 3}, "loader", None,
        "3 workers make for it, one of 3 consumers, 20 batches/s",
    ),
    "more workers than one can count on": (
        {"loop_waiting": 0.88, "waiting": 1.0, "pace": 100.0}, {"busy": 1.0, "cpus": 8}, "loader", 80,
        "80 workers would keep up, which are many for the machine's 8 processors: try 32 and look again "
        "(--num-workers 32), or make the fetch faster",
    ),
    "nothing was made yet": (
        {"pace": 0.0, "waiting": 1.0, "stages": {}, "loop_waiting": 1.0}, {}, "loader", None, "make its samples faster",
    ),
    "batches are ready, and on their way": (
        {"loop_waiting": 0.4, "waiting": 0.05}, {"busy": 0.1}, "network", 4,
        "The loop waits 40 % of the time though batches are ready: 20.0 MB/s arrive; if the network carries no more, "
        "use a faster one or send less (smaller dtypes, compression), else the way is long: let more be fetched ahead "
        "(prefetch_factor), and epochs be longer.",
    ),
    "the server's process is what is late": (
        {"loop_waiting": 0.4, "waiting": 0.05}, {"event_loop_lag": 0.03}, "network", 4, "own process is late by 30 ms",
    ),
    "training takes the time": (
        {"loop_waiting": 0.01, "waiting": 0.1, "pace": 5.0}, {"busy": 0.2}, "training", 1,
        "The loop waits 1 % of the time for data, and the workers rest 80 % of it, so training is the bottleneck: "
        "1 worker would do.",
    ),
    "both are as fast": (
        {"loop_waiting": 0.02, "waiting": 0.6, "pace": 30.0}, {"busy": 0.95}, "balanced", 3, "nothing is to be gained",
    ),
    "a client that says nothing waits": (
        {"loop_waiting": None, "waiting": 0.9}, {"busy": 1.0}, "loader", None, "What it asks for is not ready 90 %",
    ),
    "a client that says nothing receives": (
        {"loop_waiting": None, "sending": 0.9}, {}, "network", 2, "Answers are on their way 90 % of the time",
    ),
    "a client that says nothing seldom asks": (
        {"loop_waiting": None, "waiting": 0.1}, {"busy": 0.2}, "training", 2, "Its batches are ready when it asks",
    ),
    "it asks for nothing": ({"idle": 12.0}, {}, "unknown", None, "It has asked for nothing for 12 s."),
    "it has just come": ({"known_for": 0.5, "loop_waiting": 1.0}, {}, "unknown", None, "It is too early to say."),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_holds_a_consumer_back_is_told(case: str) -> None:
    """The bound, the number of workers that would keep up, and a sentence with both."""
    seen, by, bound, workers, said = CASES[case]
    one = consumption(**seen)
    found = diagnose(one, workforce(one, **by))
    assert (found.bottleneck, found.workers) == (bound, workers)
    assert said in found.advice


def test_all_consumers_of_the_workers_are_kept_up_with() -> None:
    """The number of workers is for all who share them, and the sentence says so."""
    hungry = consumption(loop_waiting=0.5, waiting=0.9, pace=15.0)
    modest = consumption(loop_waiting=0.0, pace=20.0)
    found = diagnose(hungry, workforce(hungry, modest, busy=1.0))
    assert found.workers == 5
    assert "5 workers instead of 3 would keep up with all 2 consumers" in found.advice


def test_batches_that_consumers_share_are_made_once() -> None:
    """The demand for them is that of the one who wants most."""
    assert total_demand([("shared", 2.0), ("shared", 3.0), ("own", 1.5)]) == 4.5
    assert total_demand([]) == 0.0


@given(loop_seconds=st.floats(0.001, 1.0), batch_seconds=st.floats(0.001, 1.0), workers=st.integers(1, 64))
def test_the_number_of_workers_is_what_a_model_of_both_needs(
    loop_seconds: float, batch_seconds: float, workers: int
) -> None:
    """A loop and workers that take the same time for each batch: whoever is faster waits, and so many would do."""
    pace = min(1 / loop_seconds, workers / batch_seconds)
    waits = 1 - pace * loop_seconds
    busy = pace * batch_seconds / workers
    one = consumption(pace=pace, loop_waiting=waits, waiting=waits, stages={"fetch": batch_seconds})
    found = diagnose(one, workforce(one, workers=workers, busy=busy))
    needed = batch_seconds / loop_seconds
    if waits >= LOOP_WAITS:
        assert found.bottleneck == "loader"
        assert found.workers is None or needed * (1 - LOOP_WAITS) <= found.workers <= math.ceil(needed)
    else:
        assert found.bottleneck == ("balanced" if busy >= WORKERS_BUSY else "training")
        assert found.workers is not None
        assert found.workers <= max(1, math.ceil(needed))


@given(
    waits=st.floats(LOOP_WAITS, 1.0), late=st.floats(0.5, 1.0), pace=st.floats(0.1, 1e4),
    workers=st.integers(1, 64), work=st.floats(0.0, 0.49), lag=st.sampled_from([0.0, 0.1]),
)  # fmt: skip
def test_work_that_is_less_than_the_waits_is_not_to_be_faster(
    waits: float, late: float, pace: float, workers: int, work: float, lag: float
) -> None:
    """Nor to be done by more: it cannot be what the loop waits for."""
    busy = work * late * waits / workers
    one = consumption(pace=pace, loop_waiting=waits, waiting=late * waits, stages={"fetch": busy * workers / pace})
    found = diagnose(one, workforce(one, workers=workers, busy=busy, event_loop_lag=lag))
    assert "make the" not in found.advice
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
    """No numbers break it, and no more workers are advised than can be."""
    found = diagnose(seen, workforce(seen, workers=workers, busy=busy))
    assert found.advice.endswith(".")
    assert "\n" not in found.advice
    assert found.workers is None or 0 <= found.workers <= MAX_WORKERS
