"""Statistics of several servers together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader.cli.aggregate import diagnosis_of, merged
from teleloader_shared.stats import Bottleneck, Diagnosis, Latency, Stats, TokenStats
from tests.conftest import examples
from tests.end_to_end.made_up import BUSY, CONSUMER, DATASET, FINISHED, SERVER, made_up

counts = st.integers(0, 2**40)
rates = st.floats(0, 1e9)
fractions = st.floats(0, 1)
latencies = st.builds(Latency, counts, rates, rates, rates, rates, rates)
servers = st.builds(
    dataclasses.replace, st.just(SERVER), host=st.sampled_from("ab"), cpus=st.just(8), num_workers=st.integers(0, 64),
    batches_per_second=rates, bytes_per_second=rates, pss=counts, event_loop_lag=rates, draining=st.booleans(),
    uptime=rates, load=st.none() | rates, demand=st.none() | rates, saturated=st.none() | st.booleans(),
)  # fmt: skip
datasets = st.builds(
    dataclasses.replace, st.just(DATASET), dataset=st.sampled_from("xyz"), batches_computed=counts,
    samples_per_second=rates, stages=st.dictionaries(st.sampled_from(["fetch", "encode"]), latencies),
)  # fmt: skip
consumers = st.builds(
    dataclasses.replace, st.just(CONSUMER), consumer=st.sampled_from("pqr"), batches_sent=counts, position=counts,
    batches_per_second=rates, starved_fraction=fractions, idle=rates, epoch=st.integers(0, 1),
)  # fmt: skip
tokens = st.builds(TokenStats, st.sampled_from("uv"), counts, counts, st.just(1.0), st.just(0.5))


@st.composite
def statistics(draw: st.DrawFn) -> Stats:
    """Return the statistics of a server: its datasets have different names, and so have its consumers."""
    found = draw(st.lists(consumers, max_size=3, unique_by=lambda one: (one.consumer, one.epoch)))
    return Stats(
        draw(servers),
        draw(st.lists(datasets, max_size=2, unique_by=lambda one: one.dataset)),
        made_up().workers,
        found,
        len(found),
        draw(st.lists(tokens, max_size=2, unique_by=lambda one: one.token)),
    )


fleets = st.lists(statistics(), min_size=1, max_size=3)


def total(fleet: Sequence[Stats], name: str) -> float:
    """Return the sum of a field of the servers."""
    return float(sum(getattr(one.server, name) or 0 for one in fleet))


def numbers_of(record: Any) -> dict[str, float]:
    """Return the fields of a record that are numbers."""
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {name: value for name, value in values.items() if type(value) in (int, float)}


def numbered(record: Any, number: int) -> Any:
    """Return a record in which all numbers have the same value."""
    return dataclasses.replace(record, **dict.fromkeys(numbers_of(record), number))


@settings(max_examples=examples(30))
@given(fleets)
def test_counts_and_rates_are_added(fleet: list[Stats]) -> None:
    """Over servers, datasets and consumers; CPUs of a machine count once."""
    found = merged(fleet)
    for name in ("num_workers", "batches_per_second", "bytes_per_second", "pss", "load", "demand"):
        assert (getattr(found.server, name) or 0) == pytest.approx(total(fleet, name))
    assert found.server.cpus == 8 * len({one.server.host for one in fleet})
    assert found.server.saturated == (any(known) if (known := _known(fleet)) else None)
    assert sum(one.batches_computed for one in found.datasets) == sum(
        one.batches_computed for stats in fleet for one in stats.datasets
    )
    assert sum(one.batches_sent for one in found.consumers) == sum(
        one.batches_sent for stats in fleet for one in stats.consumers
    )
    assert {one.token: one.bytes_sent for one in found.tokens} == {
        name: sum(one.bytes_sent for stats in fleet for one in stats.tokens if one.token == name)
        for name in {one.token for stats in fleet for one in stats.tokens}
    }
    assert len(found.workers) == 4 * len(fleet)
    assert found.consumers_total == len(found.consumers)
    assert len({one.dataset for one in found.datasets}) == len(found.datasets)


def _known(fleet: list[Stats]) -> list[bool]:
    return [one.server.saturated for one in fleet if one.server.saturated is not None]


@settings(max_examples=examples(30))
@given(fleets)
def test_means_lie_between_those_of_the_servers(fleet: list[Stats]) -> None:
    """The weights are the numbers of durations, and the batches of a consumer."""
    found = merged(fleet)
    for dataset in found.datasets:
        for stage, latency in dataset.stages.items():
            parts = [
                one.stages[stage]
                for stats in fleet
                for one in stats.datasets
                if one.dataset == dataset.dataset and stage in one.stages
            ]
            assert latency.count == sum(part.count for part in parts)
            for name in ("mean", "p50", "p95", "p99"):
                values = [getattr(part, name) for part in parts]
                assert min(values) <= getattr(latency, name) <= max(values)
            if latency.count:
                whole = sum(part.mean * part.count for part in parts)
                assert latency.mean * latency.count == pytest.approx(whole)
    assert all(0 <= one.starved_fraction <= 1 for one in found.consumers)


@settings(max_examples=examples(30))
@given(fleets)
def test_the_order_of_the_servers_does_not_matter(fleet: list[Stats]) -> None:
    """Except for the order of names, and for rounding."""
    before = merged(fleet)
    after = merged(fleet[::-1])
    for name in ("num_workers", "cpus", "pss", "draining", "saturated", "uptime", "event_loop_lag"):
        assert getattr(before.server, name) == getattr(after.server, name)
    assert {one.dataset: one.batches_computed for one in before.datasets} == {
        one.dataset: one.batches_computed for one in after.datasets
    }
    assert sorted(one.idle for one in before.consumers) == sorted(one.idle for one in after.consumers)


def test_each_number_of_servers_and_datasets_is_merged() -> None:
    """No number is that of the first server only, with which the result would depend on the order of the servers."""
    one, two = made_up(), made_up()
    fleet = [
        dataclasses.replace(
            stats,
            server=dataclasses.replace(numbered(stats.server, number), host=f"host-{number}"),
            datasets=[dataclasses.replace(numbered(DATASET, number), length=DATASET.length)],
        )
        for number, stats in ((2, one), (5, two))
    ]
    before, after = merged(fleet), merged(fleet[::-1])
    assert numbers_of(before.server) == numbers_of(after.server)
    assert numbers_of(before.datasets[0]) == numbers_of(after.datasets[0])


@settings(max_examples=examples(30))
@given(statistics())
def test_one_server_is_what_it_says(stats: Stats) -> None:
    """Nothing changes, except for the order of consumers with equal times."""
    found = merged([stats])
    assert found.server == stats.server
    assert found.datasets == stats.datasets
    assert sorted(map(repr, found.consumers)) == sorted(map(repr, stats.consumers))


def test_a_consumer_has_the_diagnosis_of_the_most_certain_server() -> None:
    """A server that waits for others explains nothing; of equally certain servers, the one that sends most counts."""
    found: list[tuple[float, Bottleneck, float]] = [(50.0, "unknown", 0.0), (5.0, "io", 0.9), (20.0, "workers", 0.4)]
    parts = [
        dataclasses.replace(CONSUMER, bytes_per_second=rate, diagnosis=Diagnosis(label, None, "", confidence))
        for rate, label, confidence in found
    ]
    assert diagnosis_of(parts).bottleneck == "io"
    assert diagnosis_of(parts[:1]).bottleneck == "unknown"
    equal = [dataclasses.replace(part, diagnosis=dataclasses.replace(part.diagnosis, confidence=0.9)) for part in parts]
    assert diagnosis_of(equal).bottleneck == "workers"


def test_the_parts_of_a_consumer_are_added() -> None:
    """Its rates are added, and its fractions are weighted by bytes."""
    little = dataclasses.replace(
        CONSUMER, batches_per_second=10.0, bytes_per_second=1e6, starved_fraction=0.2, diagnosis=BUSY
    )
    most = dataclasses.replace(CONSUMER, batches_per_second=30.0, bytes_per_second=3e6, starved_fraction=0.6)
    (found,) = merged([dataclasses.replace(made_up(), consumers=[one]) for one in (little, most)]).consumers
    assert found.diagnosis == CONSUMER.diagnosis
    assert found.batches_per_second == 40.0
    assert found.starved_fraction == pytest.approx(0.5)


def test_consumed_batches_are_those_of_all_servers() -> None:
    """A client reports what its training loop consumed to each server: reported rates are not added."""
    known = dataclasses.replace(CONSUMER, position=5, batches_per_second=10.0, finished=False, run="train.py")
    later = dataclasses.replace(known, position=9, batches_per_second=12.0)
    (found,) = merged([dataclasses.replace(made_up(), consumers=[one]) for one in (known, later)]).consumers
    assert (found.position, found.batches_per_second, found.finished, found.run) == (9, 12.0, False, "train.py")
    ended = dataclasses.replace(later, position=400, finished=True, idle=0.0, diagnosis=FINISHED)
    (found,) = merged([dataclasses.replace(made_up(), consumers=[one]) for one in (known, ended)]).consumers
    assert (found.position, found.finished, found.diagnosis) == (400, True, FINISHED)


def test_omitted_consumers_are_counted() -> None:
    """Some of them may be the same on several servers: the result is the least number."""
    found = merged([dataclasses.replace(made_up(3), consumers_total=10), made_up(2)])
    assert (len(found.consumers), found.consumers_total) == (3, 10)


def test_datasets_of_equal_names_and_other_lengths_are_listed_separately() -> None:
    """Some servers may still host the previous data."""
    other = dataclasses.replace(DATASET, length=1)
    found = merged([made_up(), dataclasses.replace(made_up(), datasets=[other]), made_up()]).datasets
    assert [(one.length, one.batches_computed) for one in found] == [
        (DATASET.length, 2 * DATASET.batches_computed), (1, other.batches_computed)
    ]  # fmt: skip
