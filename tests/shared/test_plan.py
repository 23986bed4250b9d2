"""Content of batches: an exact division of the epoch among ranks and batches, independent of other requests."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from teleloader_shared.errors import BatchOutOfRange, InvalidSpec
from teleloader_shared.orders.permutation import Permutation
from teleloader_shared.orders.plan import Coverage, Plan, audit
from teleloader_shared.orders.seeding import derive
from teleloader_shared.spec import MAX_EPOCH, LoaderSpec, Tail
from tests.conftest import examples, need

Ints = NDArray[np.int64]

fixed = settings(max_examples=examples(100))

# Up to 1024 the permutation is a table and above it a network; plans are computed in blocks of about 4096 samples.
lengths = st.integers(0, 120) | st.integers(1000, 3000) | st.integers(4000, 10_000)
epochs = st.integers(0, 5) | st.integers(0, MAX_EPOCH - 1)
tails: tuple[Tail, ...] = ("pad", "drop", "uneven")


@st.composite
def loaders(draw: st.DrawFn, tail: Tail | None = None, drop_last: bool | None = None) -> LoaderSpec:
    """Return a strategy for loaders, as their rank 0 registers them."""
    batch_size = draw(st.none() | st.integers(1, 40) | st.integers(900, 1200))
    dropping = draw(st.booleans()) if drop_last is None else drop_last
    return LoaderSpec(
        dataset="d",
        batch_size=batch_size,
        shuffle=draw(st.booleans()),
        drop_last=dropping and batch_size is not None,
        seed=draw(st.integers(0, 2**64 - 1)),
        world_size=draw(st.integers(1, 9)),
        tail=draw(st.sampled_from(tails)) if tail is None else tail,
    )


def plans_of_ranks(spec: LoaderSpec, length: int, epoch: int) -> list[Plan]:
    """Return the plans of all ranks that share the epoch."""
    return [Plan(dataclasses.replace(spec, rank=rank), length, epoch) for rank in range(spec.world_size)]


def order_of(spec: LoaderSpec, length: int, epoch: int) -> Ints:
    """Return the epoch's order, computed independently of the plan."""
    positions = np.arange(length, dtype=np.int64)
    return Permutation(length, derive("order", spec.seed, epoch))(positions) if spec.shuffle else positions


def joined(batches: Iterable[Ints]) -> Ints:
    """Return all indices of some batches in one array."""
    return np.concatenate([*batches, np.empty(0, np.int64)])


def interleaved(batches: Sequence[Ints]) -> list[int]:
    """Return the global batches: batch k of every rank, rank by rank."""
    places = itertools.zip_longest(*(batch.tolist() for batch in batches))
    return [index for place in places for index in place if index is not None]


def global_batches(spec: LoaderSpec, length: int, epoch: int) -> list[list[int]]:
    """Return the global batches of an epoch; a rank without a batch k has no part of it."""
    plans = plans_of_ranks(spec, length, epoch)
    return [interleaved([plan[k] for plan in plans if k < len(plan)]) for k in range(max(map(len, plans)))]


# --- Every sample, as specified by the tail -----------------------------------------------------------------------


@fixed
@given(loaders(tail="uneven", drop_last=False), lengths, epochs)
def test_uneven_visits_each_sample_exactly_once(spec: LoaderSpec, length: int, epoch: int) -> None:
    """Over all ranks, an epoch of ``tail="uneven"`` holds each index once and pads nothing."""
    plans = plans_of_ranks(spec, length, epoch)
    visited = joined(batch for plan in plans for batch in plan)
    assert np.array_equal(np.sort(visited), np.arange(length))
    assert audit((batch for plan in plans for batch in plan), length).exact
    assert sum(plan.padding(k) for plan in plans for k in range(len(plan))) == 0


@fixed
@given(loaders(tail="pad", drop_last=False), lengths, epochs)
def test_pad_repeats_the_head_of_the_order(spec: LoaderSpec, length: int, epoch: int) -> None:
    """Under ``tail="pad"`` the order is extended by its head until each rank has ceil(N / W) samples."""
    per_rank = -(-length // spec.world_size)
    order = order_of(spec, length, epoch)
    padded = order[np.arange(per_rank * spec.world_size) % max(length, 1)] if length else order
    for rank, plan in enumerate(plans_of_ranks(spec, length, epoch)):
        assert np.array_equal(joined(plan), padded[rank :: spec.world_size])


@fixed
@given(loaders(tail="pad"), lengths, epochs)
def test_padding_counts_the_repetitions_at_the_end_of_a_batch(spec: LoaderSpec, length: int, epoch: int) -> None:
    """``plan.padding(k)`` is how many samples at the end of batch k come from positions >= N of the padded order."""
    size = spec.batch_size or 1
    for rank, plan in enumerate(plans_of_ranks(spec, length, epoch)):
        for k, batch in enumerate(plan):
            positions = rank + spec.world_size * (k * size + np.arange(len(batch)))
            repeated = positions >= length
            assert plan.padding(k) == repeated.sum()
            assert not repeated[: len(batch) - plan.padding(k)].any()


@fixed
@given(loaders(tail="pad", drop_last=False), lengths, epochs)
def test_all_padding_together_is_what_the_ranks_lacked(spec: LoaderSpec, length: int, epoch: int) -> None:
    """The padding of an epoch sums up to W * ceil(N / W) - N."""
    plans = plans_of_ranks(spec, length, epoch)
    padding = sum(plan.padding(k) for plan in plans for k in range(len(plan)))
    assert padding == spec.world_size * -(-length // spec.world_size) - length


@fixed
@given(loaders(tail="drop", drop_last=False), lengths, epochs)
def test_drop_leaves_out_the_end_of_the_order(spec: LoaderSpec, length: int, epoch: int) -> None:
    """Under ``tail="drop"`` the last N mod W positions are left out, the others are visited once, nothing is padded."""
    kept = order_of(spec, length, epoch)[: length // spec.world_size * spec.world_size]
    plans = plans_of_ranks(spec, length, epoch)
    for rank, plan in enumerate(plans):
        assert np.array_equal(joined(plan), kept[rank :: spec.world_size])
    assert sum(plan.padding(k) for plan in plans for k in range(len(plan))) == 0


@fixed
@given(loaders(drop_last=True), lengths, epochs)
def test_drop_last_leaves_out_the_incomplete_batch_and_nothing_else(spec: LoaderSpec, length: int, epoch: int) -> None:
    """``drop_last`` removes exactly the batch of fewer than B samples from an epoch."""
    whole = dataclasses.replace(spec, drop_last=False)
    for dropped, kept in zip(plans_of_ranks(spec, length, epoch), plans_of_ranks(whole, length, epoch), strict=True):
        expected = [batch.tolist() for batch in kept if len(batch) == (spec.batch_size or 1)]
        assert [batch.tolist() for batch in dropped] == expected


@pytest.mark.parametrize("drop_last", [False, True])
def test_pad_and_drop_divide_as_torchs_distributed_sampler(drop_last: bool) -> None:
    """Without shuffle, each rank gets torch's indices: ``pad`` equals drop_last=False there, ``drop`` True."""
    need("torch")
    from torch.utils.data import DistributedSampler

    tail: Tail = "drop" if drop_last else "pad"
    for length, world_size in itertools.product([*range(1, 14), 64, 1025], [1, 2, 3, 5, 8, 13]):
        for rank in range(world_size):
            sampler = DistributedSampler(
                range(length), num_replicas=world_size, rank=rank, shuffle=False, drop_last=drop_last
            )
            spec = LoaderSpec(dataset="d", batch_size=4, world_size=world_size, rank=rank, tail=tail)
            assert joined(Plan(spec, length, 0)).tolist() == list(sampler)


# --- Ranks and batches divide one order ---------------------------------------------------------------------------


@fixed
@given(loaders(drop_last=False), lengths, epochs)
def test_a_global_batch_is_a_block_of_the_order(spec: LoaderSpec, length: int, epoch: int) -> None:
    """Batch k of all ranks together is the block [k * B * W, (k + 1) * B * W) of the order, in that order."""
    block = (spec.batch_size or 1) * spec.world_size
    positions = {
        "uneven": np.arange(length),
        "drop": np.arange(length // spec.world_size * spec.world_size),
        "pad": np.arange(-(-length // spec.world_size) * spec.world_size) % max(length, 1),
    }[spec.tail]
    order = order_of(spec, length, epoch)[positions].tolist()
    expected = [order[start : start + block] for start in range(0, len(order), block)]
    assert global_batches(spec, length, epoch) == expected


@fixed
@given(st.data(), lengths, epochs)
def test_twice_the_ranks_with_half_the_batch_go_on_exactly(data: st.DataObject, length: int, epoch: int) -> None:
    """Doubling W and halving B keeps every global batch, so that the world size may change at any k."""
    spec = data.draw(loaders())
    size = data.draw(st.integers(1, 20))
    few = dataclasses.replace(spec, batch_size=2 * size)
    many = dataclasses.replace(spec, batch_size=size, world_size=2 * spec.world_size)
    before, after = global_batches(few, length, epoch), global_batches(many, length, epoch)
    complete = length // (2 * size * spec.world_size)
    assert before[:complete] == after[:complete]
    if spec.tail == "uneven" and not spec.drop_last:
        assert before == after


@fixed
@given(loaders(), st.sampled_from(["pad", "drop"]), lengths, epochs)
def test_all_ranks_have_the_same_number_of_batches(spec: LoaderSpec, tail: Tail, length: int, epoch: int) -> None:
    """Under ``pad`` and ``drop`` no rank waits in a collective operation for another that has finished."""
    plans = plans_of_ranks(dataclasses.replace(spec, tail=tail), length, epoch)
    assert len({(len(plan), plan.samples) for plan in plans}) == 1


@fixed
@given(loaders(), lengths, epochs)
def test_every_batch_but_the_last_has_the_batch_size(spec: LoaderSpec, length: int, epoch: int) -> None:
    """Batches are int64 arrays of B indices; the last may be shorter, and is never empty."""
    size = spec.batch_size or 1
    for plan in plans_of_ranks(spec, length, epoch):
        batches = list(plan)
        assert all(batch.dtype == np.int64 and batch.shape == (size,) for batch in batches[:-1])
        assert all(0 < len(batch) <= size for batch in batches[-1:])
        assert len(batches) == len(plan)
        assert sum(map(len, batches)) == (len(plan) * size if spec.drop_last else plan.samples)


def test_a_loader_without_batches_has_one_sample_at_each_place() -> None:
    """``batch_size=None`` gives single samples in the order of the batches of ``batch_size=1``."""
    single = Plan(LoaderSpec(dataset="d", batch_size=None, shuffle=True), 9, 0)
    ones = Plan(LoaderSpec(dataset="d", batch_size=1, shuffle=True), 9, 0)
    assert [batch.tolist() for batch in single] == [batch.tolist() for batch in ones]
    assert len(single) == 9


@pytest.mark.parametrize(
    ("visits", "exact"), [([], True), ([1, 1], True), ([1, 0], False), ([1, 2], False), ([1, -1], False)]
)
def test_an_epoch_is_exact_if_each_sample_is_visited_once(visits: list[int], exact: bool) -> None:
    """Counts that are neither missing nor repeated, such as negative ones, are not exact."""
    assert Coverage.of(np.array(visits, np.int64)).exact is exact


# --- A pure function of the batch's ID ----------------------------------------------------------------------------


@fixed
@given(loaders(), lengths, epochs, st.data())
def test_a_batch_does_not_depend_on_earlier_requests(
    spec: LoaderSpec, length: int, epoch: int, data: st.DataObject
) -> None:
    """``plan[k]`` equals batch k of a full listing, in any order of access, for new and used plans."""
    spec = dataclasses.replace(spec, rank=data.draw(st.integers(0, spec.world_size - 1)))
    listing = [batch.tolist() for batch in Plan(spec, length, epoch)]
    used = Plan(spec, length, epoch)
    for k in data.draw(st.lists(st.integers(0, len(listing) - 1), max_size=12)) if listing else ():
        assert used[k].tolist() == listing[k]
        assert Plan(spec, length, epoch)[k].tolist() == listing[k]


@pytest.mark.parametrize("shuffle", [False, True])
def test_what_a_caller_does_to_a_batch_changes_no_later_one(shuffle: bool) -> None:
    """Arrays are read-only or the caller's own: writing to one never changes the plan."""
    plan = Plan(LoaderSpec(dataset="d", batch_size=4, shuffle=shuffle), 12, 0)
    before = [batch.tolist() for batch in plan]
    for k in range(len(plan)):
        try:
            plan[k][:] = -1
        except ValueError as error:
            assert "read-only" in str(error)  # noqa: PT017 - either of the two ways to keep the rule will do
    assert [batch.tolist() for batch in plan] == before


def test_each_seed_and_epoch_has_an_order_of_its_own() -> None:
    """No two pairs (seed, epoch) share an order, even with the same sum: (5, 1) differs from (6, 0)."""
    orders = {
        (seed, epoch): tuple(Plan(LoaderSpec(dataset="d", batch_size=100, shuffle=True, seed=seed), 100, epoch)[0])
        for seed, epoch in itertools.product([*range(8), 2**32, 2**64 - 1], [*range(8), 2**32, MAX_EPOCH - 1])
    }
    assert len(set(orders.values())) == len(orders)
    assert orders[5, 1] != orders[6, 0]


def test_without_shuffle_each_epoch_has_the_order_of_the_dataset() -> None:
    """Without shuffle, neither seed nor epoch changes the order."""
    for seed, epoch in itertools.product((0, 7), (0, 1, MAX_EPOCH - 1)):
        plan = Plan(LoaderSpec(dataset="d", batch_size=3, seed=seed), 8, epoch)
        assert [batch.tolist() for batch in plan] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_the_order_never_changes() -> None:
    """Orders of a length that is sorted and of one that uses the network never change: resumed runs depend on them."""
    small = Plan(LoaderSpec(dataset="d", batch_size=4, shuffle=True, seed=1), 10, 0)
    assert [batch.tolist() for batch in small] == [[0, 3, 8, 7], [9, 4, 5, 2], [6, 1]]
    large = Plan(LoaderSpec(dataset="d", batch_size=4, shuffle=True, seed=1, rank=1, world_size=2), 10**6, 3)
    assert large[12_345].tolist() == [14986, 990727, 748468, 576329]


# --- Any size -----------------------------------------------------------------------------------------------------


@fixed
@given(loaders(), epochs)
def test_an_empty_dataset_has_no_batches(spec: LoaderSpec, epoch: int) -> None:
    """An epoch without samples has no batches under any tail, and accessing one raises an error that states so."""
    for plan in plans_of_ranks(spec, 0, epoch):
        assert len(plan) == 0
        assert list(plan) == []
        with pytest.raises(BatchOutOfRange, match=f"batch 0 is out of range: epoch {epoch} has no batches"):
            plan[0]


def test_a_batch_of_a_huge_epoch_takes_the_memory_of_a_batch() -> None:
    """Batch 7, and the last one, of 10**12 shuffled samples are computed without a list of the epoch."""
    length = 10**12
    spec = LoaderSpec(dataset="d", batch_size=256, shuffle=True, seed=3)
    Plan(spec, 2000, 0)[0]  # warm-up: excludes NumPy's one-time allocations
    tracemalloc.start()
    try:
        plan = Plan(spec, length, 0)
        batch = plan[7]
        last = plan[len(plan) - 1]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 256 * 1024
    assert len(set(batch.tolist())) == 256
    assert 0 <= batch.min() <= batch.max() < length
    assert len(last) == length - 256 * (len(plan) - 1)
    assert np.array_equal(batch, Permutation(length, derive("order", 3, 0))(np.arange(7 * 256, 8 * 256)))


@pytest.mark.parametrize("tail", tails)
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_longest_dataset_can_be_planned(tail: Tail, shuffle: bool) -> None:
    """At N = 2**62 no position overflows, in any rank, up to the last batch."""
    for rank in (0, 6):
        spec = LoaderSpec(dataset="d", batch_size=3, shuffle=shuffle, rank=rank, world_size=7, tail=tail)
        plan = Plan(spec, 2**62, 0)
        last = plan[len(plan) - 1]
        assert 0 <= last.min() <= last.max() < 2**62
        assert len(last) == plan.samples - 3 * (len(plan) - 1)


# --- Refusals -----------------------------------------------------------------------------------------------------


@fixed
@given(loaders(), lengths, st.integers(0, 3))
def test_a_number_that_is_no_batch_is_refused(spec: LoaderSpec, length: int, beyond: int) -> None:
    """The error for k below 0 or from len(plan) on states the valid range, for padding too."""
    plan = Plan(spec, length, 0)
    for k in (len(plan) + beyond, -1 - beyond):
        expected = f"batch {k} is out of range: epoch 0 " + (
            f"of rank 0 of {spec.world_size} has batches 0 to {len(plan) - 1}" if len(plan) else "has no batches"
        )
        for ask in (plan.__getitem__, plan.padding, plan.check):
            with pytest.raises(BatchOutOfRange) as caught:
                ask(k)
            assert str(caught.value) == expected
            assert isinstance(caught.value, IndexError)


@pytest.mark.parametrize(("length", "epoch"), [(-1, 0), (2**62 + 1, 0), (10, -1), (10, MAX_EPOCH)])
def test_a_length_or_epoch_out_of_range_is_refused(length: int, epoch: int) -> None:
    """The error names the field, its range and the value."""
    name, value = ("length", length) if epoch == 0 else ("epoch", epoch)
    end = r"\]" if name == "length" else r"\)"
    with pytest.raises(InvalidSpec, match=rf"{name} must be in \[0, .*{end}, got {value}"):
        Plan(LoaderSpec(dataset="d"), length, epoch)


# --- The audit ----------------------------------------------------------------------------------------------------


def test_an_audit_finds_what_is_missing_and_what_is_repeated() -> None:
    """The audit lists samples that no batch contained and samples that came more than once."""
    found = audit([np.array([0, 1, 1]), np.array([4, 1])], 6)
    assert found.missing.tolist() == [2, 3, 5]
    assert found.repeated.tolist() == [1]
    assert (found.length, found.visits, found.exact) == (6, 5, False)
    assert not audit([np.array([0])], 2).exact
    assert not audit([np.array([0, 1, 1])], 2).exact
    assert audit([np.array([1]), np.empty(0, np.int64), np.array([0])], 2).exact
    assert audit([], 0).exact


@fixed
@given(loaders(tail="uneven", drop_last=False), lengths.filter(bool), st.data())
def test_an_audit_finds_a_batch_that_was_lost_or_doubled(spec: LoaderSpec, length: int, data: st.DataObject) -> None:
    """Without one batch, exactly its samples are missing; with one batch twice, exactly these are repeated."""
    batches = [batch for plan in plans_of_ranks(spec, length, 0) for batch in plan]
    chosen = data.draw(st.integers(0, len(batches) - 1))
    samples = np.sort(batches[chosen])
    lost = audit([*batches[:chosen], *batches[chosen + 1 :]], length)
    assert np.array_equal(lost.missing, samples)
    assert not lost.repeated.size
    doubled = audit([*batches, batches[chosen]], length)
    assert np.array_equal(doubled.repeated, samples)
    assert not doubled.missing.size
    assert not lost.exact
    assert not doubled.exact


@fixed
@given(loaders(drop_last=False), lengths, epochs)
def test_an_audit_agrees_with_what_the_tail_says(spec: LoaderSpec, length: int, epoch: int) -> None:
    """``pad`` misses nothing, ``drop`` repeats nothing and misses N mod W samples, ``uneven`` does neither."""
    plans = plans_of_ranks(spec, length, epoch)
    found = audit((batch for plan in plans for batch in plan), length)
    assert found.missing.size == (length % spec.world_size if spec.tail == "drop" else 0)
    padding = sum(plan.padding(k) for plan in plans for k in range(len(plan)))
    assert found.visits == length - found.missing.size + padding
    assert bool(found.repeated.size) == bool(padding)


@pytest.mark.parametrize("index", [-1, 6])
def test_an_audit_refuses_an_index_that_the_dataset_does_not_have(index: int) -> None:
    """An index outside [0, N) is an error, not a sample counted from the end."""
    with pytest.raises(IndexError, match=rf"in \[0, 6\), got minimum {index}, maximum {index}"):
        audit([np.array([index])], 6)
