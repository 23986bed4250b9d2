"""Length-balanced batches: every sample once, equal costs of all ranks, and the same batches on other world sizes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from teleloader_shared.balance import MAX_WINDOWS, BalanceSpec
from teleloader_shared.errors import DatasetChanged, InvalidSpec
from teleloader_shared.lengths import Lengths, padding_fraction
from teleloader_shared.orders.balance import prepared
from teleloader_shared.orders.plan import Plan, check_limit
from teleloader_shared.spec import LoaderSpec, Tail
from tests.conftest import examples

Ints = NDArray[np.int64]

TAILS: tuple[Tail, ...] = ("pad", "drop", "uneven")
LENGTHS = st.lists(st.integers(1, 60) | st.sampled_from([1, 7]), max_size=150).map(
    lambda each: Lengths(each, len(each))
)


def fixed(lengths: Lengths, batch_size: int, world_size: int = 1, steps: int = 4, **fields: Any) -> LoaderSpec:
    """Return the spec of a loader with batches of a fixed size."""
    group = batch_size * world_size
    balance = BalanceSpec(lengths.digest, steps * group, group)
    given = {"shuffle": True, "seed": 7, **fields}
    return LoaderSpec(dataset="text", batch_size=batch_size, world_size=world_size, balance=balance, **given)


def limited(lengths: Lengths, max_tokens: int, group: int = 2, windows: int = 4, **fields: Any) -> LoaderSpec:
    """Return the spec of a loader with a limit of tokens."""
    balance = BalanceSpec(lengths.digest, windows * group, group, max_tokens)
    return LoaderSpec(dataset="text", balance=balance, **{"shuffle": True, "seed": 7, **fields})


def batches(spec: LoaderSpec, lengths: Lengths, epoch: int = 0, rank: int = 0) -> list[list[int]]:
    """Return the indices of all batches of a rank."""
    return [each.tolist() for each in Plan(replace(spec, rank=rank), len(lengths), epoch, lengths)]


def steps(spec: LoaderSpec, lengths: Lengths) -> list[list[list[int]]]:
    """Return the batches of all ranks in each step; with ``tail="uneven"``, the last one may lack some."""
    ranks = [batches(spec, lengths, rank=rank) for rank in range(spec.world_size)]
    return [[found[k] for found in ranks if k < len(found)] for k in range(max(map(len, ranks)))]


def joined(lists: list[list[int]]) -> list[int]:
    """Return the items of all lists."""
    return list(itertools.chain.from_iterable(lists))


def visits(spec: LoaderSpec, lengths: Lengths) -> list[int]:
    """Return how often each sample is visited in an epoch by all ranks."""
    listed = [index for step in steps(spec, lengths) for batch in step for index in batch]
    counts: list[int] = np.bincount(np.array(listed, np.int64), minlength=len(lengths)).tolist()
    return counts


# --- Batches of a fixed size --------------------------------------------------------------------------------------


@given(LENGTHS, st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.sampled_from(TAILS))
@settings(max_examples=examples(300))
def test_samples_are_visited_as_often_as_without_balance(
    lengths: Lengths, size: int, ranks: int, windows: int, shuffle: bool, tail: Tail
) -> None:
    """``pad`` repeats and ``drop`` omits fewer samples than there are ranks, and ``uneven`` visits each exactly once.

    The sizes of all batches, and the number of padding samples, are those of the order without `balance`.
    """
    spec = fixed(lengths, size, ranks, windows, shuffle=shuffle, tail=tail)
    plain = replace(spec, balance=None)
    counts, n = visits(spec, lengths), len(lengths)
    expected = {"pad": -(-n // ranks) * ranks, "drop": n // ranks * ranks, "uneven": n}[tail]
    assert sum(counts) == expected
    if n >= ranks:
        assert set(counts) <= {"pad": {1, 2}, "drop": {0, 1}, "uneven": {1}}[tail]
    padding = 0
    for rank in range(ranks):
        found, other = Plan(replace(spec, rank=rank), n, 0, lengths), Plan(replace(plain, rank=rank), n, 0)
        assert len(found) == len(other)
        assert [len(each) for each in found] == [len(each) for each in other]
        padding += sum(map(found.padding, range(len(found)))) - sum(map(other.padding, range(len(other))))
        for k in range(len(found)):
            repeated = found[k][len(found[k]) - found.padding(k) :].tolist()
            assert all(counts[index] > 1 or n < ranks for index in repeated)
    assert padding == 0


@given(LENGTHS, st.integers(1, 6), st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]))
@settings(max_examples=examples(100))
def test_global_batches_depend_on_batch_size_times_world_size(
    lengths: Lengths, windows: int, factors: tuple[int, int]
) -> None:
    """If the product is equal, all complete steps have the same samples, so that a resumed epoch visits each once."""
    ranks, size = factors
    found = steps(fixed(lengths, size, ranks, windows), lengths)
    expected = steps(fixed(lengths, 12, 1, windows), lengths)
    full = len(lengths) // 12
    assert [sorted(joined(step)) for step in found[:full]] == [sorted(joined(step)) for step in expected[:full]]


@given(LENGTHS, st.integers(1, 5), st.integers(2, 6), st.integers(1, 4))
@settings(max_examples=examples(200))
def test_the_costs_of_the_ranks_differ_by_at_most_the_range_of_the_step(
    lengths: Lengths, size: int, ranks: int, windows: int
) -> None:
    """In a complete step, the sums of the lengths differ by at most the longest less the shortest sample."""
    for step in steps(fixed(lengths, size, ranks, windows, tail="drop", drop_last=True), lengths):
        costs = [int(lengths.of(np.array(batch)).sum()) for batch in step]
        values = lengths.of(np.array(joined(step)))
        assert max(costs) - min(costs) <= values.max() - values.min()


def test_each_window_has_the_samples_of_the_epochs_order() -> None:
    """Balancing rearranges the samples within windows: each window has those of the order without it."""
    lengths = Lengths(np.random.default_rng(0).integers(1, 1000, 4000), 4000)
    spec = fixed(lengths, 8, 4, steps=16)
    found = [sorted(joined(step)) for step in steps(spec, lengths)]
    plain = replace(spec, balance=None, batch_size=32, world_size=1)
    expected = [each.tolist() for each in Plan(plain, 4000, 0)]
    for start in range(0, len(found), 16):
        assert sorted(joined(found[start : start + 16])) == sorted(joined(expected[start : start + 16]))


def test_padding_and_imbalance_are_much_smaller_than_in_a_random_order() -> None:
    """With lengths like those of texts, the padding of random batches is several times that of balanced ones."""
    values = np.random.default_rng(1).lognormal(5, 1, 20_000).astype(np.int64) + 1
    lengths = Lengths(values, 20_000)
    spec = fixed(lengths, 16, 4, steps=64)

    def waste(spec: LoaderSpec) -> float | None:
        each = [lengths.of(np.array(batch)) for step in steps(spec, lengths) for batch in step]
        return padding_fraction(sum(int(x.sum()) for x in each), sum(len(x) * int(x.max()) for x in each))

    found = [waste(spec), waste(replace(spec, balance=None))]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0] < 0.2 < 0.5 < found[1]


def test_without_shuffling_the_steps_of_a_window_are_in_descending_order() -> None:
    """``shuffle=False`` takes windows of the dataset in its order, and the longest samples of each first."""
    lengths = Lengths([3, 9, 1, 5, 7, 7, 2, 8], 8)
    assert batches(fixed(lengths, 2, steps=2, shuffle=False), lengths) == [[1, 3], [0, 2], [7, 4], [5, 6]]


def test_all_ranks_get_the_longest_samples_equally_often() -> None:
    """Which rank gets the first column of a step changes pseudo-randomly."""
    lengths = Lengths(np.random.default_rng(2).integers(1, 10**6, 8000), 8000)
    winners = [int(np.argmax([max(lengths.of(np.array(batch))) for batch in step])) for step in
               steps(fixed(lengths, 2, 4), lengths)]  # fmt: skip
    assert np.bincount(winners, minlength=4).min() > 200


# --- Batches of at most T tokens ----------------------------------------------------------------------------------


@given(LENGTHS, st.integers(60, 300), st.integers(1, 5), st.integers(1, 9), st.booleans())
@settings(max_examples=examples(300))
def test_limited_batches_contain_each_sample_once(
    lengths: Lengths, most: int, group: int, windows: int, shuffle: bool
) -> None:
    """Each sample is in one batch, and samples x longest sample never exceeds the limit."""
    found = batches(limited(lengths, most, group, windows, shuffle=shuffle), lengths)
    assert sorted(joined(found)) == list(range(len(lengths)))
    for batch in found:
        assert 1 <= len(batch) * lengths.of(np.array(batch)).max() <= most


@given(LENGTHS, st.integers(60, 300), st.integers(1, 6), st.integers(1, 9))
@settings(max_examples=examples(200))
def test_windows_have_a_multiple_of_the_group_of_batches(lengths: Lengths, most: int, group: int, windows: int) -> None:
    """In all windows but the last; and the batches of a group are neighbours in the order of the lengths."""
    spec = limited(lengths, most, group, windows)
    assert spec.balance is not None
    counts = np.diff(prepared(spec.balance, lengths, 0, spec.seed))
    assert not (counts[:-1] % group).any()
    found = batches(spec, lengths)
    start = 0
    for count in counts.tolist():
        window = found[start : start + count]
        groups = [window[place : place + group] for place in range(0, count, group)]
        ranges = sorted(
            (min(lengths.of(np.array(joined(each)))), max(lengths.of(np.array(joined(each))))) for each in groups
        )
        if count % group == 0:
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
        start += count


@given(LENGTHS, st.integers(60, 200), st.integers(1, 4), st.integers(1, 6), st.sampled_from(TAILS), st.data())
@settings(max_examples=examples(200))
def test_limited_batches_are_the_same_on_all_world_sizes(
    lengths: Lengths, most: int, group: int, ranks: int, tail: Tail, data: st.DataObject
) -> None:
    """Step k of W ranks consists of the batches kW to (k + 1)W - 1, so that a step is a place on each world size.

    At the end, ``pad`` repeats the first batches of the epoch, ``drop`` omits the rest, and with ``uneven`` some ranks
    have one batch less.
    """
    spec = limited(lengths, most, group, windows=3, world_size=ranks, tail=tail)
    alone = batches(replace(spec, world_size=1), lengths)
    n = len(alone)
    total = {"pad": -(-n // ranks) * ranks, "drop": n // ranks * ranks, "uneven": n}[tail]
    listed = [batch for step in steps(spec, lengths) for batch in step]
    assert listed == [alone[k % n] for k in range(total)]
    for rank in range(ranks):
        plan = Plan(replace(spec, rank=rank), len(lengths), 0, lengths)
        padding = [len(plan[k]) if rank + k * ranks >= n else 0 for k in range(len(plan))]
        assert [plan.padding(k) for k in range(len(plan))] == padding
        if len(plan):
            k = data.draw(st.integers(0, len(plan) - 1))
            count = data.draw(st.integers(0, 5))
            assert plan.first(k, count).tolist() == plan[k][:count].tolist()


FACTORS = [(ranks, 12 // ranks) for ranks in (1, 2, 3, 4, 6, 12)]


@given(LENGTHS, st.sampled_from(FACTORS), st.sampled_from(FACTORS), st.booleans(), st.data())
@settings(max_examples=examples(200))
def test_an_epoch_that_resumes_on_another_world_size_visits_each_sample_once(
    lengths: Lengths, before: tuple[int, int], after: tuple[int, int], is_limited: bool, data: st.DataObject
) -> None:
    """At any place that is a step of both world sizes, the batches before and after it are an epoch."""

    def listed(ranks: int, size: int) -> list[list[list[int]]]:
        if is_limited:
            return steps(limited(lengths, 60, group=12, windows=2, world_size=ranks, tail="uneven"), lengths)
        return steps(fixed(lengths, size, ranks, tail="uneven"), lengths)

    first, rest = listed(*before), listed(*after)
    # a step has 12 samples of a fixed size, and a batch of each rank with a limit
    common = math.lcm(before[0], after[0]) if is_limited else 1
    place = data.draw(st.integers(0, len(first) * (before[0] if is_limited else 1) // common)) * common
    done, skipped = (place // before[0], place // after[0]) if is_limited else (place, place)
    seen = joined([batch for step in first[:done] + rest[skipped:] for batch in step])
    assert sorted(seen) == list(range(len(lengths)))


def test_the_number_of_batches_is_close_to_the_smallest_possible() -> None:
    """Padding and rounding to groups cost a few percent of the tokens."""
    values = np.random.default_rng(3).lognormal(5, 1, 50_000).astype(np.int64).clip(1, 4096)
    lengths = Lengths(values, 50_000)
    found = batches(limited(lengths, 16_384, group=8, windows=1024), lengths)
    assert len(found) < 1.1 * math.ceil(lengths.total / 16_384)


def test_the_epochs_and_seeds_differ() -> None:
    """Each epoch and each seed has other batches, and the same ones each time."""
    lengths = Lengths(np.random.default_rng(4).integers(1, 50, 500), 500)
    for spec in (fixed(lengths, 4), limited(lengths, 100)):
        listed = [batches(spec, lengths, epoch) for epoch in (0, 1)] + [batches(replace(spec, seed=8), lengths)]
        assert listed[0] == batches(spec, lengths)
        assert all(a != b for place, a in enumerate(listed) for b in listed[:place])


def test_samples_longer_than_the_limit_are_named() -> None:
    """A batch cannot contain a sample that is longer than max_tokens."""
    lengths = Lengths([3, 99, 4], 3)
    with pytest.raises(InvalidSpec, match="sample 1 has length 99, more than max_tokens=50: increase max_tokens"):
        Plan(limited(lengths, 50), 3, 0, lengths)


def test_the_number_of_windows_is_limited() -> None:
    """The preparation of a huge dataset must not have one number per sample."""
    balance = BalanceSpec("0" * 32, 8, 8, 100)
    check_limit(balance, 8 * MAX_WINDOWS, 100, 0)
    with pytest.raises(InvalidSpec, match="window=8 divides 8388609 samples into more than 1048576 windows"):
        check_limit(balance, 8 * MAX_WINDOWS + 1, 100, 0)


def test_a_batch_is_found_after_the_preparation_of_one_number_per_window() -> None:
    """Batch k in the middle of an epoch divides one window, and equals that of the full listing."""
    lengths = Lengths(np.random.default_rng(5).integers(1, 100, 20_000), 20_000)
    spec = limited(lengths, 1000, group=4, windows=32)
    listed = batches(spec, lengths)
    for k in (0, len(listed) // 2, len(listed) - 1):
        assert Plan(spec, 20_000, 0, lengths)[k].tolist() == listed[k]


# --- Lengths --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 120), max_size=50))
@settings(max_examples=examples(50))
def test_the_digest_depends_on_the_values_alone(values: list[int]) -> None:
    """All integer types, lists and arrays have the same digest, and other values another one."""
    found = [Lengths(np.array(values, dtype), len(values)) for dtype in ("i1", ">i4", "<u8")]
    found.append(Lengths(values, len(values)))
    assert len(set(found)) == 1
    assert Lengths([*values, 1], len(values) + 1) not in found
    assert found[0].longest == max(values, default=0)
    assert found[0].total == sum(values)
    if values:
        assert values[found[0].longest_sample] == found[0].longest


def test_lengths_in_a_file_are_mapped(tmp_path: Any) -> None:
    """The path of a .npy file gives the same lengths as its array."""
    values = np.arange(1, 1001, dtype=np.uint16)
    np.save(tmp_path / "lengths.npy", values)
    found = Lengths(str(tmp_path / "lengths.npy"), 1000)
    assert found == Lengths(values, 1000)
    assert isinstance(found.values, np.memmap)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1.0, 2.0], "lengths must be a 1-D array of integers, got shape .2,. and dtype float64"),
        ([[1], [2]], r"got shape \(2, 1\)"),
        ([True, False], "dtype bool"),
        ([1, 2, 3], "one number per sample: got 3 for 2 samples"),
        ([5, 0], r"in \[1, 2\*\*40\], got 0 for sample 1: use 1 for an empty sample"),
        ([2**41, 1], "for sample 0"),
        ("/nowhere.npy", "cannot read lengths from '/nowhere.npy': No such file"),
    ],
)
def test_invalid_lengths_are_named(given: Any, message: str) -> None:
    """Lengths are positive integers, one per sample."""
    with pytest.raises(ValueError, match=message):
        Lengths(given, 2)


def test_files_of_other_formats_are_rejected(tmp_path: Any) -> None:
    """A pickled or compressed file is not read."""
    np.save(tmp_path / "objects.npy", np.array([{}, 1], object))
    np.savez(tmp_path / "several.npz", a=[1, 2])
    for name in ("objects.npy", "several.npz"):
        with pytest.raises(ValueError, match=r"cannot read lengths from .*: expected a .npy"):
            Lengths(tmp_path / name, 2)


# --- Parameters -----------------------------------------------------------------------------------------------------


def test_other_lengths_than_those_of_the_loader_are_refused() -> None:
    """The digest is part of the spec, so that a worker with other lengths computes no batch."""
    lengths, others = Lengths([3, 1, 2, 4], 4), Lengths([3, 1, 2, 5], 4)
    for spec in (fixed(lengths, 2), limited(lengths, 9)):
        with pytest.raises(DatasetChanged, match=f"digest {others.digest}, but the loader requires {lengths.digest}"):
            Plan(spec, 4, 0, others)
        with pytest.raises(DatasetChanged):
            Plan(spec, 5, 0, lengths)


def test_specs_survive_json() -> None:
    """A spec with balance is equal after a round trip, and each parameter changes the key."""
    lengths = Lengths([1, 2], 2)
    spec = limited(lengths, 9)
    assert LoaderSpec.from_json(spec.to_json()) == spec
    assert spec.balance is not None
    others = [
        replace(spec.balance, **change)
        for change in ({"lengths": "0" * 32}, {"window": 64}, {"group": 4}, {"max_tokens": 10})
    ]
    keys = {replace(spec, balance=balance).key for balance in (spec.balance, *others)}
    assert len(keys) == len({balance.identity for balance in (spec.balance, *others)}) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": "abc"}, "digest of 32 hexadecimal digits, got 'abc'"),
        ({"window": 0}, r"window of balance must be an integer in \[1, 4194304\], got 0"),
        ({"window": 10}, r"multiple of batch_size \* world_size = 8, got 10: use 8"),
        ({"group": True}, "group of balance must be an integer"),
        ({"group": 4}, r"group of balance must be batch_size \* world_size = 8 without max_tokens, got 4"),
        ({"max_tokens": 100}, "max_tokens of balance excludes batch_size and drop_last, got batch_size=4"),
        ({"max_tokens": 0}, "max_tokens of balance must be an integer"),
        ({"more": 1}, "balance must be null or an object with lengths, window, group and max_tokens"),
    ],
)
def test_invalid_parameters_are_named(changes: dict[str, Any], message: str) -> None:
    """A spec with invalid parameters of balance is rejected."""
    fields = {"lengths": "0" * 32, "window": 16, "group": 8, "max_tokens": None, **changes}
    with pytest.raises(InvalidSpec, match=message):
        LoaderSpec.from_json({"dataset": "text", "batch_size": 4, "world_size": 2, "balance": fields})


def test_balance_excludes_other_orders_and_single_samples() -> None:
    """A client-side sampler determines the batches, and single samples have no padding."""
    lengths = Lengths([1, 2], 2)
    spec = fixed(lengths, 1)
    with pytest.raises(InvalidSpec, match="balance excludes order=client"):
        replace(spec, order="client", session="a")
    with pytest.raises(InvalidSpec, match="balance requires batches"):
        replace(spec, batch_size=None)


def test_epochs_with_few_samples_have_few_batches() -> None:
    """Without samples there are no batches, and fewer samples than a group are batches of their own."""
    empty = Lengths([], 0)
    assert batches(fixed(empty, 4), empty) == batches(limited(empty, 4), empty) == []
    few = Lengths([5, 5, 5], 3)
    assert sorted(batches(limited(few, 100, group=8, windows=1), few)) == [[0], [1], [2]]
