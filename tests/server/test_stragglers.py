"""Slow samples and slow workers: the decisions of `stragglers`, for random times and indices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server.dispatch.stragglers import (
    BACKUP_LEAST,
    MAX_LEAD,
    MAX_SLOW_SAMPLES,
    MAX_TABLES,
    MIN_BATCHES,
    BackupBudget,
    BatchTimes,
    Lookahead,
    SlowSamples,
    SlowTables,
    depth,
    is_slow,
    lead,
    patience,
    slow_samples,
)
from teleloader_server.loading.tasks import SLOW_FROM
from teleloader_shared.orders.plan import Plan
from teleloader_shared.spec import LoaderSpec

SECONDS = st.floats(1e-6, 1e4)
INDICES = st.integers(-(2**63), 2**63 - 1)


def test_quantiles_of_few_batches_are_unknown() -> None:
    """Nothing is unusual before the usual time is known."""
    times = BatchTimes()
    for _ in range(MIN_BATCHES - 1):
        times.add(1.0)
        assert times.typical is times.p99 is None
    times.add(1.0)
    assert times.typical == times.p99 == 1.0


@given(st.lists(SECONDS, min_size=MIN_BATCHES, max_size=600))
def test_quantiles_are_those_of_recent_batches(seconds: list[float]) -> None:
    """The median does not exceed the 99th percentile, and both are times of batches."""
    times = BatchTimes()
    for each in seconds:
        times.add(each)
    assert times.typical is not None
    assert times.p99 is not None
    assert times.typical <= times.p99
    assert {times.typical, times.p99} <= set(seconds)


def test_one_stall_does_not_change_the_quantiles() -> None:
    """A batch in two hundred is beyond the 99th percentile."""
    times = BatchTimes()
    for k in range(256):
        times.add(3.0 if k == 100 else 0.02)
    assert times.typical == times.p99 == 0.02


@given(st.dictionaries(INDICES, SECONDS, max_size=50), st.lists(INDICES, max_size=50), st.data())
def test_a_table_finds_the_samples_that_it_contains(
    known: dict[int, float], others: list[int], data: st.DataObject
) -> None:
    """`find` and `batch` return each known sample with its time, and no other one."""
    table = SlowSamples()
    assert table.learn(known.items()) == list(known)
    assert table.learn(known.items()) == [], "they are not new a second time"
    table.sort()
    indices = data.draw(st.permutations([*known, *others]))
    places, seconds = table.find(np.array(indices, np.int64))
    assert [(indices[place], took) for place, took in zip(places.tolist(), seconds.tolist(), strict=True)] == [
        (index, known[index]) for index in indices if index in known
    ]
    assert table.longest == max(known.values(), default=0.0)
    found = table.batch(indices)
    assert (found is None) == (not known)
    if found is not None:
        assert set(found.samples) == set(known)
        assert found.seconds == pytest.approx(sum(known.values()))


@given(st.dictionaries(INDICES, SECONDS, min_size=1, max_size=50))
def test_a_table_forgets_samples(known: dict[int, float]) -> None:
    """A sample that is not slow any more is not found."""
    table = SlowSamples()
    table.learn(known.items())
    table.forget(known)
    table.forget(known)
    assert table.batch(known) is None
    assert table.longest == 0.0


def test_a_full_table_keeps_the_slowest_samples() -> None:
    """It never has more samples than its limit, and the fastest ones go first."""
    table = SlowSamples()
    for index in range(3 * MAX_SLOW_SAMPLES):
        table.learn([(index, 1.0 + index % 1000)])
        assert len(table.seconds) <= MAX_SLOW_SAMPLES
    longest = [index for index in range(3 * MAX_SLOW_SAMPLES) if index % 1000 == 999]
    assert all(table.seconds[index] == 1000.0 for index in longest)


def test_a_change_of_a_large_table_becomes_visible_with_the_next_epoch() -> None:
    """Sorting the table for each sample would take longer than the search."""
    table = SlowSamples()
    table.learn((index, 1.0) for index in range(1000))
    table.sort()
    table.learn([(5000, 3.0)])
    assert table.find(np.array([5000]))[0].size == 0
    Lookahead(Plan(LoaderSpec(dataset="data"), 1, 0), table)
    assert table.find(np.array([5000]))[1].tolist() == [3.0]


def test_loaders_of_a_dataset_share_a_table_and_the_number_of_tables_is_limited() -> None:
    """Clients choose mixtures, so that the number of their tables must be bounded."""
    tables = SlowTables()
    spec = LoaderSpec(dataset="a", fingerprint="1")
    first = tables.of(spec)
    assert tables.of(LoaderSpec(dataset="a", fingerprint="1", batch_size=7, seed=3)) is first
    assert tables.of(LoaderSpec(dataset="a", fingerprint="2")) is not first
    for k in range(MAX_TABLES):
        tables.of(LoaderSpec(dataset=f"other {k}", fingerprint="1"))
    assert tables.of(spec) is not first


@pytest.mark.parametrize(
    ("fetch", "measured", "suspects", "typical", "expected"),
    [
        pytest.param(3.02, [(7, 3.0)], [], 0.02, [(7, 3.0)], id="slow"),
        pytest.param(3.02, [(7, 3.0)], [], None, [(7, 3.0)], id="slow among the first batches"),
        pytest.param(3.2, [(k, 0.1) for k in range(8)], [], None, [], id="all samples take equally long"),
        pytest.param(3.2, [(7, 3.0)], [], 2.0, [], id="hidden by the prefetch window"),
        pytest.param(0.1, [(7, SLOW_FROM)], [], 0.001, [], id="too short for any clock"),
        pytest.param(3.0, [], [7, 8], 0.02, [(7, 3.0), (8, 3.0)], id="fetched together"),
        pytest.param(0.03, [], [7, 8], 0.02, [], id="fetched together, not slow"),
    ],
)
def test_a_sample_is_slow_compared_with_a_whole_batch(
    fetch: float,
    measured: list[tuple[int, float]],
    suspects: list[int],
    typical: float | None,
    expected: list[tuple[int, float]],
) -> None:
    """Samples that were fetched together are suspected together."""
    assert slow_samples(fetch, measured, suspects, typical) == expected


@given(
    st.integers(1, 2000), st.integers(1, 300), st.integers(0, 2**32), st.sets(st.integers(0, 1999), max_size=20),
    st.booleans(),
)  # fmt: skip
def test_a_search_finds_the_batches_with_slow_samples(
    length: int, batch_size: int, seed: int, samples: set[int], drop_last: bool
) -> None:
    """Each batch of the epoch is found if and only if it contains a slow sample, with the sum of their times."""
    table = SlowSamples()
    table.learn((index, 1.0 + index) for index in samples)
    plan = Plan(LoaderSpec(dataset="d", batch_size=batch_size, shuffle=True, seed=seed, drop_last=drop_last), length, 3)
    lookahead = Lookahead(plan, table)
    position = 0
    while position < len(plan):
        stop = lookahead.scan(position)
        assert stop > position
        position = stop
    expected = {k: samples & set(plan[k].tolist()) for k in range(len(plan)) if samples & set(plan[k].tolist())}
    assert {k: set(found.samples) for k, found in lookahead.found.items()} == expected
    for found in lookahead.found.values():
        assert found.seconds == sum(1.0 + index for index in found.samples)


def test_a_search_keeps_a_bounded_part_of_an_epoch() -> None:
    """An epoch of any length takes limited memory, even if each batch is slow."""
    table = SlowSamples()
    table.learn((index, 1.0) for index in range(1000))
    plan = Plan(LoaderSpec(dataset="d", batch_size=4096, tail="pad"), 2**40, 0)
    lookahead = Lookahead(plan, table)
    for k in range(3 * MAX_LEAD):
        lookahead.scan(k)
    assert len(lookahead._scanned) <= 2 * MAX_LEAD + 1
    assert 0 not in lookahead.found, "the first part was dropped with its batches"


@given(SECONDS, st.floats(1e-3, 1e6), st.floats(1e-3, 1e6))
def test_a_batch_starts_early_enough(seconds: float, rate: float, faster: float) -> None:
    """Its computation is complete before the consumer needs it, unless that is too far ahead."""
    found = lead(seconds, rate)
    assert 0 < found <= MAX_LEAD
    assert found == MAX_LEAD or found / rate >= seconds
    assert lead(seconds, rate + faster) >= found


@given(SECONDS, st.floats(1e-3, 1e6), st.floats(0, 2**40), st.floats(0, 2**40))
def test_the_prefetch_window_stays_within_the_memory(p99: float, rate: float, nbytes: float, budget: float) -> None:
    """It covers the 99th percentile, or it is as long as the memory permits."""
    found = depth(p99, rate, nbytes, budget)
    assert found * nbytes <= budget / 8
    assert found <= math.ceil(p99 * rate)


@given(SECONDS, SECONDS)
def test_a_batch_of_slow_samples_gets_a_backup_later(p99: float, expected: float) -> None:
    """No usual batch has a backup, and none whose samples are as slow as before."""
    assert patience(p99, 0.0) >= max(p99, BACKUP_LEAST)
    assert patience(p99, expected) >= p99 + expected


@pytest.mark.parametrize(("num_workers", "running"), [(1, 1), (2, 1), (7, 1), (8, 2), (64, 16)])
def test_the_number_of_backups_is_limited(num_workers: int, running: int) -> None:
    """A quarter of the workers may compute backups, and at least one."""
    assert BackupBudget(running=running - 1).allows(num_workers)
    assert not BackupBudget(running=running).allows(num_workers)


def test_the_time_of_backups_is_limited() -> None:
    """Backups take a small part of the time of all batches."""
    assert not BackupBudget(computed=0.0, spent=60.0).allows(8)
    assert BackupBudget(computed=10_000.0, spent=60.0).allows(8)


def test_short_delays_are_not_slow() -> None:
    """A batch is slow compared with others, and absolutely."""
    assert is_slow(3.0, 0.02)
    assert is_slow(3.0, None)
    assert not is_slow(0.04, 0.001)
    assert not is_slow(3.0, 2.0)
