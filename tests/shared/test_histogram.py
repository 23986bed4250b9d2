"""Latency quantiles with an error of at most 5 %, for any distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_shared.histogram import BLOCK, Histogram
from teleloader_shared.stats import Latency

TIMES = st.floats(1e-6, 1e4)


def exact(times: list[float], share: float) -> float:
    """Return the smallest of the times that is at least the given quantile."""
    return sorted(times)[math.ceil(share * len(times)) - 1]


@given(st.lists(TIMES, min_size=1, max_size=200))
def test_quantiles_are_five_percent_off_at_most(times: list[float]) -> None:
    """The error is at most 5 % from a microsecond to hours; count, mean and maximum are exact."""
    counted = Histogram()
    counted.add(times)
    found = counted.latency()
    assert (found.count, found.max) == (len(times), max(times))
    assert found.mean == pytest.approx(sum(times) / len(times))
    for value, share in ((found.p50, 0.5), (found.p95, 0.95), (found.p99, 0.99)):
        assert value == pytest.approx(exact(times, share), rel=0.05)


@given(st.lists(TIMES, min_size=1, max_size=50), st.integers(0, 100))
def test_what_took_no_time_counts_too(times: list[float], zeros: int) -> None:
    """Times of zero count, too."""
    counted = Histogram()
    counted.add(times)
    found = counted.latency(zeros)
    everything = [0.0] * zeros + times
    assert found.count == len(everything)
    for value, share in ((found.p50, 0.5), (found.p95, 0.95), (found.p99, 0.99)):
        assert value == pytest.approx(exact(everything, share), rel=0.05)


def test_nothing_has_no_latency() -> None:
    """Without times, all figures are 0."""
    assert Histogram().latency() == Latency(0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_single_times_are_counted_like_blocks() -> None:
    """Single times are counted like blocks, including those not sorted into buckets yet."""
    one, other = Histogram(), Histogram()
    times = np.random.default_rng(0).lognormal(-5, 2, BLOCK + 10)
    other.add(times)
    for seconds in times:
        one.observe((float(seconds),))
    assert one.count == other.count == len(times)
    assert one.latency().p99 == other.latency().p99


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 2e4, 1e9])
def test_times_out_of_range_are_counted(seconds: float) -> None:
    """Times below a microsecond or above 10,000 s are counted."""
    counted = Histogram()
    counted.add([seconds])
    found = counted.latency()
    assert (found.count, found.max) == (1, seconds)
    assert found.p99 == pytest.approx(seconds, abs=1e-6)


@given(st.lists(TIMES, max_size=100))
def test_few_buckets_say_how_many_times_there_are_up_to_a_bound(times: list[float]) -> None:
    """Buckets are cumulative, as Prometheus expects, and the last one contains all times."""
    counted = Histogram()
    counted.add(times)
    buckets, total = counted.buckets()
    assert total == pytest.approx(sum(times))
    assert buckets[-1] == (math.inf, len(times))
    assert all(count == sum(seconds <= bound for seconds in times) for bound, count in buckets)
    assert len(buckets) < 40
