"""The history: ring buffers, their reduction to points, and what is kept of whom."""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader_server.dispatch.counters import Counters
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.stats.history import (
    LABELS,
    MAX_BYTES,
    MAX_DATASETS,
    MAX_LOOPS,
    MAX_MARKS,
    MAX_SKIPPED,
    Marks,
    Ring,
    RingTable,
    changes_of,
    reduced,
    series_of,
    span_of,
)
from teleloader_server.stats.recorder import Recorder, Tick
from teleloader_shared.history import (
    CONSUMER_SERIES,
    DATASET_SERIES,
    HISTORY_S,
    MAX_POINTS,
    SERVER_SERIES,
    LabelChange,
)

NAN = math.nan
VALUES = st.floats(-1e6, 1e6, width=32)
PAUSES = st.lists(st.integers(1, 40), min_size=1, max_size=60)
"""Seconds from one sample to the next one."""


def listed(values: np.ndarray) -> list[float | None]:
    """Return values with None in place of NaN, which equals nothing."""
    return [None if math.isnan(value) else value for value in values.tolist()]


# -- ring buffers


@given(PAUSES, st.integers(3, 50), st.data())
def test_a_ring_returns_the_last_seconds_and_gaps(pauses: list[int], size: int, data: st.DataObject) -> None:
    """A ring equals a table of all seconds, cut to its size, whatever wraps around.

    A pause of up to `MAX_SKIPPED` seconds belongs to the sample after it; a longer one is a gap.
    """
    ring, expected, second = Ring(1, size), {}, -1
    for number, pause in enumerate(pauses):
        before, second = second, second + pause
        ring.put(second, [number])
        covered = pause if before >= 0 and pause <= MAX_SKIPPED + 1 else 1
        expected.update(dict.fromkeys(range(second - covered + 1, second + 1), number))
    start = data.draw(st.integers(-5, second + 5))
    stop = data.draw(st.integers(start, second + 10))
    kept = range(second - size + 1, second + 1)
    assert listed(ring.window(start, stop)[0]) == [
        expected.get(each) if each in kept else None for each in range(start, stop)
    ]
    assert ring.nbytes == 4 * size


def test_a_second_that_is_recorded_again_has_the_latest_value() -> None:
    """An older second is ignored: the clock is monotonic, but a caller might not be."""
    ring = Ring(1, 10)
    for second, value in ((5, 1), (5, 2), (4, 9)):
        ring.put(second, [value])
    assert listed(ring.window(3, 6)[0]) == [None, None, 2]


def test_the_latest_value_of_a_second_can_be_read() -> None:
    """Unknown seconds have no value: before the first, after the last, and overwritten ones."""
    ring = Ring(2, 4)
    for second in range(6):
        ring.put(second, [second, 10 * second])
    assert [ring.latest(second, 1) for second in (2, 5)] == [20, 50]
    assert all(math.isnan(ring.latest(second, 1)) for second in (-1, 1, 6))


# -- points


@settings(deadline=None)
@given(st.lists(st.none() | VALUES, min_size=1, max_size=400), st.integers(1, 50))
def test_points_have_the_mean_and_the_extremes_of_their_seconds(seconds: list[float | None], step: int) -> None:
    """No extreme is lost, and seconds without a value count for nothing; points without a value are gaps."""
    values = np.array([[NAN if value is None else value for value in seconds]], np.float32)
    found = reduced(values, step)
    for point, start in enumerate(range(0, len(seconds), step)):
        known = [float(value) for value in values[0, start : start + step] if not math.isnan(value)]
        mean, low, high = (float(part[0, point]) for part in found)
        if not known:
            assert all(map(math.isnan, (mean, low, high)))
            continue
        assert (low, high) == (min(known), max(known))
        assert mean == pytest.approx(sum(known) / len(known), rel=1e-5, abs=1e-3)
        assert low <= mean + 1e-3
        assert mean <= high + 1e-3
    assert found.mean.shape == (1, -(-len(seconds) // step))


@given(
    st.integers(0, 10**6), st.none() | st.integers(0, 10**6), st.none() | st.integers(0, 10**6), st.integers(1, 3600)
)
def test_a_response_is_bounded(now: int, since: int | None, until: int | None, step: int) -> None:
    """Whatever is requested, a response covers at most the kept seconds, with at most `MAX_POINTS` points."""
    span = span_of(now, since, until, step)
    assert 0 <= span.since <= span.until <= now
    assert span.until - span.since <= HISTORY_S
    assert span.step >= step
    assert -(-(span.until - span.since) // span.step) <= MAX_POINTS


def test_a_spike_of_one_second_is_seen_in_an_hour() -> None:
    """Points of several seconds have extremes; points of one second have none, and each value stands alone."""
    ring = Ring(2)
    for second in range(HISTORY_S):
        ring.put(second, [1000.0 if second == 1234 else 1.0, 0.0])
    hour = series_of(ring, ("first", "second"), span_of(HISTORY_S, None, None, 1))
    assert hour["first"].max is not None
    assert hour["first"].min is not None
    assert max(value or 0 for value in hour["first"].max) == 1000
    assert min(value or 0 for value in hour["first"].min) == 1
    assert len(hour["first"].mean) == MAX_POINTS
    minute = series_of(ring, ("first", "second"), span_of(HISTORY_S, 1230, 1240, 1))["first"]
    assert (minute.mean, minute.min, minute.max) == ([1, 1, 1, 1, 1000, 1, 1, 1, 1, 1], None, None)


def test_diagnoses_are_returned_as_changes() -> None:
    """The first one holds at the start of the response; a period without one is None."""
    ring = Ring(1)
    for second in range(20):
        if second != 12:
            ring.put(second, [NAN if 13 <= second < 15 else LABELS.index("workers" if second < 10 else "training")])
    assert changes_of(ring, 0, span_of(20, 5, None, 1)) == [
        LabelChange(5, "workers"), LabelChange(10, "training"), LabelChange(12, None), LabelChange(15, "training"),
    ]  # fmt: skip
    assert changes_of(ring, 0, span_of(20, 20, None, 1)) == []


# -- limits


def test_the_least_recently_active_owner_is_replaced() -> None:
    """The number of owners is bounded, and an active owner is not replaced: its history would be lost."""
    table: RingTable[str, None] = RingTable(1, 2, quiet=10)
    assert table.keep("a", None, 0) is not None
    assert table.keep("b", None, 5) is not None
    assert table.keep("c", None, 9) is None, "the others were active within 10 s"
    assert table.keep("a", None, 12) is not None
    assert table.keep("c", None, 15) is not None
    assert [key for key, _ in table.recent()] == ["c", "a"]
    assert table.get("b") is None


def test_the_memory_of_all_series_is_bounded_as_documented() -> None:
    """With the maximum number of datasets and training loops, the series take exactly `MAX_BYTES`."""
    datasets: RingTable[int, None] = RingTable(len(DATASET_SERIES), MAX_DATASETS, 0)
    loops: RingTable[int, None] = RingTable(len(CONSUMER_SERIES) + 1, MAX_LOOPS, 0)
    for number in range(200):
        datasets.keep(number, None, number)
        loops.keep(number, None, number)
    assert (len(datasets), len(loops)) == (MAX_DATASETS, MAX_LOOPS)
    assert datasets.nbytes + loops.nbytes + Ring(len(SERVER_SERIES) + 1).nbytes == MAX_BYTES


def test_more_active_datasets_than_series_do_not_replace_one_another() -> None:
    """The first datasets keep their history: replaced every second, none of them would have one."""
    counters = Counters()
    limits = SimpleNamespace(memory_budget=1)
    service = SimpleNamespace(counters=counters, limits=limits, num_workers=1, draining=asyncio.Event())
    started = time.monotonic()
    recorder = Recorder(cast(LoaderService, service), started)
    names = [f"{number:02}" for number in range(MAX_DATASETS + 8)]
    for second in (1.5, 2.5, 3.5, 4.5, 5.5):
        for name in names:
            counters.datasets[name].sent += 1
        recorder.record(started + second, [], Tick(0.0, None, []))
        for name in names:
            counters.datasets[name].mark(started + second)
    found = recorder.history(started + 6.5, since=1, until=6, step=1, dataset=names[0], consumer=None)
    assert found.datasets == names[:MAX_DATASETS]
    assert None not in found.series["batches_per_second"].mean


def test_the_oldest_events_are_dropped() -> None:
    """A worker that exits all the time does not fill the memory."""
    marks = Marks()
    for second in range(2 * MAX_MARKS):
        marks.add(second, "restart", "worker 0 exited")
    assert [mark.second for mark in marks.since(0)] == list(range(MAX_MARKS, 2 * MAX_MARKS))
    assert [mark.second for mark in marks.since(2 * MAX_MARKS - 1)] == [2 * MAX_MARKS - 1]
