"""Mixtures: proportions of the sources in every part of the order, and every sample once per pass over its source."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from teleloader_shared.errors import InvalidSpec
from teleloader_shared.orders.mixture import Interleaving, MixtureOrder, StoppingStrategy, epoch_samples
from teleloader_shared.orders.plan import Plan
from teleloader_shared.spec import LoaderSpec, Tail
from teleloader_shared.weights import MAX_PERIOD, MixtureSpec, whole_weights
from tests.conftest import examples

Ints = NDArray[np.int64]
Stages = tuple[tuple[int, tuple[int, ...]], ...]

STRATEGIES: tuple[StoppingStrategy, ...] = ("first_exhausted", "all_exhausted")


@st.composite
def schedules(draw: st.DrawFn, max_stages: int = 5) -> Stages:
    """Return a strategy for schedules of weights with a common period."""
    period = draw(st.integers(1, 12) | st.sampled_from([24, 60, 100]))
    sources = draw(st.integers(1, 8))

    def weights() -> tuple[int, ...]:
        cuts = sorted(draw(st.lists(st.integers(0, period), min_size=sources - 1, max_size=sources - 1)))
        return tuple(b - a for a, b in itertools.pairwise([0, *cuts, period]))

    lengths = st.integers(1, 3) | st.integers(1, 6 * period) | st.integers(1, 20 * period)
    starts = itertools.accumulate(draw(st.lists(lengths, max_size=max_stages - 1)), initial=0)
    return tuple((start, weights()) for start in starts)


def listed(stages: Stages, count: int) -> tuple[Ints, Ints]:
    """Return the counts of the sources, and the sums of their weights, after 0 to `count` positions."""
    period, width = sum(stages[0][1]), len(stages[0][1])
    sources, _ = Interleaving(stages).at(np.arange(count))
    counts = np.zeros((count + 1, width), np.int64)
    counts[1:] = np.cumsum(sources[:, None] == np.arange(width), axis=0)
    weights = np.zeros((count + 1, width), np.int64)
    for start, each in stages:
        weights[start + 1 :] = each
    return counts * period, np.cumsum(weights, axis=0)


# --- Proportions --------------------------------------------------------------------------------------------------


@settings(max_examples=examples(400))
@given(schedules())
def test_each_count_differs_from_the_weights_by_less_than_one_after_any_number_of_samples(stages: Stages) -> None:
    """The count of each source is within 1 of the sum of its weights, in every prefix and across stages."""
    period = sum(stages[0][1])
    counts, expected = listed(stages, stages[-1][0] + 7 * period + 3)
    assert np.abs(counts - expected).max() < period


@settings(max_examples=examples(100))
@given(schedules(max_stages=3), st.data())
def test_counts_in_a_window_differ_by_less_than_two(stages: Stages, data: st.DataObject) -> None:
    """In the samples between any two positions, the count of each source is within 2 of the sum of its weights."""
    period = sum(stages[0][1])
    count = stages[-1][0] + 5 * period
    counts, expected = listed(stages, count)
    start = data.draw(st.integers(0, count))
    deviations = (counts[start:] - counts[start]) - (expected[start:] - expected[start])
    assert np.abs(deviations).max() < 2 * period


def test_the_bound_holds_with_many_sources_and_a_period_of_a_million() -> None:
    """64 random six-digit weights deviate by less than 1 in each of the first two million prefixes."""
    random = np.random.default_rng(5)
    cuts = np.sort(random.integers(0, 10**6, 63)).tolist()
    weights = tuple(b - a for a, b in itertools.pairwise([0, *cuts, 10**6]))
    found = Interleaving(((0, weights),))
    sources, _ = found.at(np.arange(2 * 10**6 + 5))
    for source, weight in enumerate(weights):
        positions = np.flatnonzero(sources == source)
        numbers = np.arange(len(positions))
        # before and after each occurrence, where the deviation is largest
        assert (np.abs(numbers * 10**6 - positions * weight) < 10**6).all()
        assert (np.abs((numbers + 1) * 10**6 - (positions + 1) * weight) < 10**6).all()


@settings(max_examples=examples(100))
@given(schedules(), st.data())
def test_positions_are_independent_of_each_other(stages: Stages, data: st.DataObject) -> None:
    """The source and its number at a position are those of a full listing, also far beyond the tables."""
    period = sum(stages[0][1])
    count = stages[-1][0] + 9 * period
    found = Interleaving(stages)
    sources, numbers = found.at(np.arange(count))
    positions = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=20)), np.int64)
    for array, alone in zip((sources, numbers), found.at(positions), strict=True):
        assert array[positions].tolist() == alone.tolist()
    for position in positions.tolist():
        assert found.counts(position).tolist() == np.bincount(sources[:position], minlength=len(stages[0][1])).tolist()
        assert numbers[position] == found.counts(position)[sources[position]]
    far = (MAX_PERIOD * 10**6 // period) * period
    positions = positions[positions >= stages[-1][0] + period]  # where the order is periodic
    again, shifted = found.at(positions + far)
    assert again.tolist() == sources[positions].tolist()
    assert (shifted == numbers[positions] + far // period * np.array(stages[-1][1])[again]).all()


def test_the_size_of_the_tables_depends_on_the_period_and_not_on_the_stages_lengths() -> None:
    """Two stages of half a billion samples with period 10 take less than a kilobyte."""
    found = Interleaving(((0, (7, 3)), (500_000_003, (2, 8))))
    assert found.nbytes < 1000
    assert found.counts(10**9).sum() == 10**9
    assert abs(found.counts(10**9)[0] - (0.7 * 500_000_003 + 0.2 * 499_999_997)) < 1


def test_a_known_order_stays_the_same() -> None:
    """Saved states depend on the order: these values must never change."""
    sources, numbers = Interleaving(((0, (5, 3, 2)), (7, (1, 1, 8)))).at(np.arange(24))
    assert "".join("abc"[source] for source in sources) == "abacabccaccccbccccaccccb"
    assert numbers.tolist() == [0, 0, 1, 0, 2, 1, 1, 2, 3, 3, 4, 5, 6, 2, 7, 8, 9, 10, 4, 11, 12, 13, 14, 3]
    spec = MixtureSpec((("web", 50), ("code", 30)), ((0, (2, 1)),), 75)
    assert MixtureOrder(spec, 2, 7)(np.arange(6)).tolist() == [0, 45, 51, 39, 47, 66]


# --- Samples ------------------------------------------------------------------------------------------------------


@st.composite
def mixtures(draw: st.DrawFn) -> MixtureSpec:
    """Return a strategy for mixtures of short sources."""
    stages = draw(schedules(max_stages=3))
    sources = tuple((f"source {place}", draw(st.integers(1, 40))) for place in range(len(stages[0][1])))
    return MixtureSpec(sources, stages, draw(st.integers(1, 200)))


@settings(max_examples=examples(200))
@given(mixtures(), st.none() | st.integers(0, 2**64 - 1))
def test_each_pass_over_a_source_contains_each_sample_once(mixture: MixtureSpec, seed: int | None) -> None:
    """All epochs in succession use each source's samples pass by pass, and no pass repeats a sample."""
    epochs = [MixtureOrder(mixture, epoch, seed)(np.arange(mixture.samples)) for epoch in range(4)]
    indices = np.concatenate(epochs)
    start = 0
    for _, length in mixture.sources:
        own = indices[(indices >= start) & (indices < start + length)] - start
        passes = [own[first : first + length] for first in range(0, len(own), length)]
        for each in passes:
            assert len(set(each.tolist())) == len(each)
            assert seed is not None or each.tolist() == list(range(len(each)))
        start += length
    assert indices.min() >= 0
    assert indices.max() < start


def test_passes_and_sources_have_different_orders() -> None:
    """Each pass over a source has its own permutation, and so has each source of the same length."""
    mixture = MixtureSpec((("web", 100), ("code", 100)), ((0, (1, 1)),), 400)
    indices = MixtureOrder(mixture, 0, 7)(np.arange(400))
    web, code = indices[indices < 100], indices[indices >= 100] - 100
    orders = [tuple(each) for each in (web[:100], web[100:], code[:100], code[100:])]
    assert len(set(orders)) == 4


def test_the_order_of_a_source_depends_on_its_name_and_not_on_the_other_sources() -> None:
    """Adding a source does not change which samples the others deliver, in which order."""
    two = MixtureSpec((("web", 90), ("code", 60)), ((0, (1, 1)),), 100)
    three = MixtureSpec((("books", 30), ("web", 90), ("code", 60)), ((0, (2, 1, 1)),), 100)
    first, second = (MixtureOrder(each, 0, 7)(np.arange(100)) for each in (two, three))
    web = first[first < 90]
    among_three = second[(second >= 30) & (second < 120)] - 30
    assert among_three.tolist() == web[: len(among_three)].tolist()


def test_sources_and_passes_of_positions_match_the_indices() -> None:
    """Sources and passes belong to the indices at the same positions."""
    mixture = MixtureSpec((("web", 10), ("code", 4)), ((0, (1, 1)),), 40)
    order, positions = MixtureOrder(mixture, 1, 7), np.arange(40)
    indices, sources, passes = order(positions), order.sources(positions), order.passes(positions)
    assert (sources == (indices >= 10)).all()
    assert passes[sources == 0].tolist() == [2] * 10 + [3] * 10
    assert passes[sources == 1].tolist() == [5] * 4 + [6] * 4 + [7] * 4 + [8] * 4 + [9] * 4


# --- Batches ------------------------------------------------------------------------------------------------------


def specs_of_ranks(mixture: MixtureSpec, world_size: int, **fields: Any) -> list[LoaderSpec]:
    """Return the loader specs of all ranks."""
    common = {"dataset": "d", "shuffle": True, "seed": 7, "mixture": mixture, "world_size": world_size, **fields}
    return [LoaderSpec(**common, rank=rank) for rank in range(world_size)]


@settings(max_examples=examples(200))
@given(mixtures(), st.integers(1, 5), st.integers(1, 30), st.sampled_from(["pad", "drop", "uneven"]), st.integers(0, 3))
def test_the_batches_of_all_ranks_are_the_order(
    mixture: MixtureSpec, world_size: int, batch_size: int, tail: Tail, epoch: int
) -> None:
    """Batches k of all ranks are successive parts of the order, each part in one rank's batch and in order."""
    order = MixtureOrder(mixture, epoch, 7)(np.arange(mixture.samples)).tolist()
    length = {
        "drop": len(order) // world_size * world_size,
        "pad": -(-len(order) // world_size) * world_size,
        "uneven": len(order),
    }[tail]
    order = (order * (world_size + 1))[:length]
    specs = specs_of_ranks(mixture, world_size, batch_size=batch_size, tail=tail)
    plans = [Plan(spec, mixture.length, epoch) for spec in specs]
    size = world_size * batch_size
    for k, start in enumerate(range(0, length, size)):
        block = order[start : start + size]
        parts = [part.tolist() for part in np.array_split(block, world_size) if len(part)]
        found = [plan[k].tolist() for plan in plans if k < len(plan)]
        if len(block) == size:
            assert found in [parts[first:] + parts[:first] for first in range(world_size)]
        else:
            assert found == parts
    assert max(map(len, plans)) == -(-length // size)


@settings(max_examples=examples(100))
@given(mixtures(), st.integers(1, 5), st.integers(1, 30), st.sampled_from(["pad", "drop", "uneven"]))
def test_a_batch_by_number_is_that_of_a_listing(
    mixture: MixtureSpec, world_size: int, batch_size: int, tail: Tail
) -> None:
    """Indices, sources, passes and padding of a batch do not depend on the batches that were computed before."""
    starts = list(itertools.accumulate((length for _, length in mixture.sources), initial=0))
    for spec in specs_of_ranks(mixture, world_size, batch_size=batch_size, tail=tail):
        plan = Plan(spec, mixture.length, 1)
        batches = [batch.tolist() for batch in plan]
        for k in reversed(range(len(plan))):
            assert Plan(spec, mixture.length, 1)[k].tolist() == batches[k]
            assert plan.first(k, 3).tolist() == batches[k][:3]
            assert [starts[source] for source in plan.sources(k)] == [mixture.range_of(i).start for i in batches[k]]
            assert len(plan.passes(k)) == len(batches[k])
    padding = [Plan(spec, mixture.length, 1) for spec in specs_of_ranks(mixture, world_size, tail=tail)]
    padded = sum(plan.padding(k) for plan in padding for k in range(len(plan)))
    assert padded == (-mixture.samples % world_size if tail == "pad" else 0)


@pytest.mark.parametrize("world_size", [2, 5, 8, 10])
def test_no_rank_gets_other_proportions_because_the_order_is_periodic(world_size: int) -> None:
    """Each batch of each rank is within 2 of the weights, and each rank gets each slot of the period equally often."""
    mixture = MixtureSpec((("web", 10**6), ("code", 10**6)), ((0, (9, 1)),), 10**6)
    for spec in specs_of_ranks(mixture, world_size, batch_size=5):
        plan = Plan(spec, mixture.length, 0)
        code = np.array([plan.sources(k).sum() for k in range(2000)])
        assert np.abs(code - 0.5).max() < 2
        assert abs(code.sum() - 1000) < 150


@settings(max_examples=examples(100))
@given(mixtures(), st.sampled_from([(1, 24), (2, 12), (3, 8), (4, 6), (6, 4), (8, 3), (24, 1)]))
def test_global_batches_are_the_same_on_another_world_size(mixture: MixtureSpec, division: tuple[int, int]) -> None:
    """A run that resumes with W * B unchanged sees the same samples in each step, on any number of ranks."""
    world_size, batch_size = division
    alone = Plan(LoaderSpec(dataset="d", seed=7, shuffle=True, mixture=mixture, batch_size=24), mixture.length, 1)
    specs = specs_of_ranks(mixture, world_size, batch_size=batch_size, tail="uneven")
    plans = [Plan(spec, mixture.length, 1) for spec in specs]
    for k in range(len(alone)):
        together = [index for plan in plans if k < len(plan) for index in plan[k].tolist()]
        assert sorted(together) == sorted(alone[k].tolist())


def test_a_plan_of_a_billion_samples_starts_at_once() -> None:
    """A batch at the end of a billion samples needs no batch before it, and little memory."""
    mixture = MixtureSpec((("web", 2**40), ("code", 10**6)), ((0, (7, 3)), (3 * 10**8, (1, 9))), 10**9)
    tracemalloc.start()
    try:
        plan = Plan(specs_of_ranks(mixture, 8, batch_size=250)[5], mixture.length, 3)
        assert abs(plan.sources(len(plan) - 1).sum() - 225) < 2
        assert len(set(plan[len(plan) - 1].tolist())) == 250
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_plan_without_weights_has_no_sources() -> None:
    """The error states the argument that a mixture needs."""
    with pytest.raises(TypeError, match="the plan has no sources: the dataset of the loader must be a Mixture"):
        Plan(LoaderSpec(dataset="d"), 10, 0).sources(0)


def test_another_length_of_the_dataset_is_refused() -> None:
    """A mixture whose sources have other lengths than the dataset has no plan."""
    mixture = MixtureSpec((("web", 10), ("code", 4)), ((0, (1, 1)),), 40)
    with pytest.raises(InvalidSpec, match="the sources of the mixture have 14 samples and the dataset 15"):
        Plan(LoaderSpec(dataset="d", mixture=mixture), 15, 0)
    with pytest.raises(InvalidSpec, match="is beyond position 2"):
        Plan(LoaderSpec(dataset="d", mixture=mixture), 14, 2**61)


# --- End of an epoch ----------------------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(mixtures(), st.sampled_from(STRATEGIES))
def test_an_epoch_ends_when_the_first_or_the_last_source_is_exhausted(
    mixture: MixtureSpec, strategy: StoppingStrategy
) -> None:
    """first_exhausted is the longest order without repetitions, all_exhausted the shortest with every sample."""
    used = [any(weights[place] for _, weights in mixture.stages) for place in range(len(mixture.sources))]
    try:
        samples = epoch_samples(mixture.sources, mixture.stages, strategy)
    except ValueError:
        assert strategy == "all_exhausted"
        assert any(not last and is_used for last, is_used in zip(mixture.stages[-1][1], used, strict=True))
        return
    found = Interleaving(mixture.stages)

    def remaining(position: int) -> list[int]:
        counts = found.counts(position)
        pairs = zip(mixture.sources, counts, used, strict=True)
        return [length - count for (_, length), count, is_used in pairs if is_used]

    if strategy == "first_exhausted":
        assert min(remaining(samples)) >= 0 > min(remaining(samples + 1))
    else:
        assert max(remaining(samples)) <= 0 < max(remaining(samples - 1))


def test_a_source_that_is_never_exhausted_is_refused() -> None:
    """all_exhausted names a source whose weight becomes 0 before its last sample."""
    with pytest.raises(ValueError, match="'code' becomes 0 before: pass a number of samples"):
        epoch_samples((("web", 10), ("code", 100)), ((0, (1, 1)), (20, (2, 0))), "all_exhausted")


# --- Weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ({"a": 0.7, "b": 0.3}, (7, 3)),
        ({"a": 7, "b": 2}, (7, 2)),
        ({"a": 1}, (1, 0)),
        ({"a": 1 / 3, "b": 2 / 3}, (1, 2)),
        ({"b": Fraction(1, 7), "a": Decimal("0.5")}, (7, 2)),
        ({"a": np.float64(0.123457), "b": np.float32(0.25)}, (123457, 250000)),
        ({"a": 1e300, "b": 3e300}, (1, 3)),
    ],
)
def test_weights_are_exact_ratios_of_decimal_numbers(weights: dict[str, Any], whole: tuple[int, ...]) -> None:
    """Weights are relative, and their ratios are kept exactly if their common denominator is at most a million."""
    assert whole_weights(["a", "b"], {0: weights}) == ((0, whole),)


@settings(max_examples=examples(200))
@given(st.lists(st.lists(st.floats(0.001, 1), min_size=3, max_size=3), min_size=1, max_size=4))
def test_other_weights_are_rounded_to_the_smallest_fraction(stages: list[list[float]]) -> None:
    """Whole weights have the same sum in all stages, and differ from the given ones by less than the fraction."""
    given_weights = {100 * number: dict(zip("abc", stage, strict=True)) for number, stage in enumerate(stages)}
    found = whole_weights(["a", "b", "c"], given_weights)
    period = sum(found[0][1])
    assert period <= MAX_PERIOD
    for (_, whole), stage in zip(found, stages, strict=True):
        assert sum(whole) == period
        for weight, share in zip(whole, stage, strict=True):
            assert math.isclose(weight / period, share / sum(stage), abs_tol=1 / period)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({1: {"a": 1}}, "including 0, got"),
        ({0: {"a": 1}, -1: {"a": 1}}, "non-negative integers as keys"),
        ({0: {"c": 1}}, "unknown source 'c' in weights: the dataset has 'a', 'b'"),
        ({0: {"a": -1, "b": 2}}, "weight of source 'a' must be a finite non-negative number, got -1"),
        ({0: {"a": math.nan}}, "finite"),
        ({0: {"a": math.inf}}, "finite"),
        ({0: {"a": "1"}}, "got '1'"),
        ({0: {"a": True}}, "got True"),
        ({0: {"a": 0}}, "must have a positive sum"),
        ({0: {}}, "must map source names to numbers"),
        ({0: [1, 2]}, "must map source names to numbers"),
        ({0: {"a": 1, "b": 1e-9}}, "weight of source 'b' in stage 0 is 1.0e-09 of the sum, less than"),
    ],
)
def test_invalid_weights_are_refused(stages: dict[int, Any], message: str) -> None:
    """The message names the source, its value and the valid values."""
    with pytest.raises(ValueError, match=message):
        whole_weights(["a", "b"], stages)


def test_many_stages_get_a_smaller_period() -> None:
    """A ramp of 1,000 stages with arbitrary weights is rounded to a period whose tables are of limited size."""
    ramp = {10**6 * step: {"a": 1 + math.sqrt(step), "b": 7.0} for step in range(1000)}
    found = whole_weights(["a", "b"], ramp)
    assert sum(found[0][1]) == 1024
    MixtureSpec((("a", 1), ("b", 1)), found, 10)


# --- Parameters ---------------------------------------------------------------------------------------------------


def test_parameters_survive_json() -> None:
    """`from_json` inverts `to_json`."""
    mixture = MixtureSpec((("web", 10), ("code", 4)), ((0, (1, 1)), (8, (2, 0))), 40)
    assert MixtureSpec.from_json(mixture.to_json()) == mixture


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": []}, "1 to 1024 sources"),
        ({"sources": [["web", -1], ["code", 4]]}, "names and lengths"),
        ({"sources": [["web", 1], ["web", 4]]}, "unique names"),
        ({"sources": [["web", 2**62], ["code", 4]]}, "at most 2..62 samples"),
        ({"sources": [["web", 10], ["code", 0]]}, "source 'code' of a mixture has a weight but no samples"),
        ({"sources": "web"}, "mixture must be null or an object"),
        ({"samples": -1}, "samples of a mixture must be an integer"),
        ({"stages": []}, "must start at 0"),
        ({"stages": [[1, [1, 1]]]}, "must start at 0"),
        ({"stages": [[0, [1, 1]], [0, [1, 1]]]}, "ascend"),
        ({"stages": [[0, [1]]]}, "requires 2 non-negative integers"),
        ({"stages": [[0, [1, 1.5]]]}, "requires 2 non-negative integers"),
        ({"stages": [[0, [0, 0]]]}, "the same sum in"),
        ({"stages": [[0, [1, 1]], [5, [1, 2]]]}, "the same sum in"),
        ({"stages": [[0, [2**20, 1]]]}, "the same sum in"),
        ({"stages": [[2**23 * n, [2**19, 2**19]] for n in range(4)]}, "exceed the limit"),
        ({"stages": [[0, [1, 2]], [2**61, [2, 1]]]}, "exceed the limit"),
        ({"more": 1}, "mixture must be null or an object"),
    ],
)
def test_invalid_parameters_are_refused(change: dict[str, Any], message: str) -> None:
    """A mixture that another program sends is validated, and tables of unlimited size are refused."""
    fields = {"sources": [["web", 10], ["code", 4]], "stages": [[0, [1, 1]]], "samples": 40}
    with pytest.raises(InvalidSpec, match=message):
        MixtureSpec.from_json({**fields, **change})


def test_fractions_are_exact() -> None:
    """`fractions` gives the weights of the stage at a position; unused sources are omitted."""
    mixture = MixtureSpec((("web", 10), ("code", 4), ("books", 9)), ((0, (1, 3, 0)), (8, (2, 2, 0))), 40)
    assert mixture.fractions() == {"web": Fraction(1, 4), "code": Fraction(3, 4)}
    assert mixture.fractions(8) == {"web": Fraction(1, 2), "code": Fraction(1, 2)}


def test_the_range_of_a_source_contains_its_indices() -> None:
    """`range_of` returns the indices of the source of a sample."""
    mixture = MixtureSpec((("web", 10), ("code", 4)), ((0, (1, 3)),), 40)
    assert [mixture.range_of(index) for index in (0, 9, 10, 13)] == [range(10), range(10), range(10, 14), range(10, 14)]
    with pytest.raises(IndexError, match="index 14 is out of range"):
        mixture.range_of(14)
