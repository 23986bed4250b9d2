"""Packed sequences: every token once, as few sequences as best-fit decreasing, and the same ones on other ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader_shared.balance import BalanceSpec
from teleloader_shared.errors import BatchOutOfRange, DatasetChanged, InvalidSpec
from teleloader_shared.lengths import Lengths
from teleloader_shared.orders.packing import Pieces, audit_tokens, best_fit, prepared
from teleloader_shared.orders.plan import Plan, prepare
from teleloader_shared.packing import MIN_WINDOW, PackingSpec
from teleloader_shared.spec import LoaderSpec, Tail
from tests.conftest import examples

TAILS: tuple[Tail, ...] = ("pad", "drop", "uneven")
CAPACITIES = st.integers(1, 40)
WINDOWS = st.integers(MIN_WINDOW, 60)
Piece = tuple[int, int, int]


@st.composite
def documents(draw: st.DrawFn) -> tuple[Lengths, int]:
    """Draw lengths of documents and of sequences; documents of 1, L, L + 1 and multiples of L tokens are frequent."""
    capacity = draw(CAPACITIES)
    special = [1, capacity, capacity + 1, 2 * capacity, 5 * capacity, 5 * capacity - 1 or 1]
    listed = draw(st.lists(st.integers(1, 3 * capacity) | st.sampled_from(special), max_size=120))
    return Lengths(listed, len(listed)), capacity


def packed(lengths: Lengths, capacity: int, window: int = 16, **fields: Any) -> LoaderSpec:
    """Return the spec of a loader with packed sequences."""
    packing = PackingSpec(lengths.digest, capacity, window)
    return LoaderSpec(dataset="text", packing=packing, **{"shuffle": True, "seed": 7, **fields})


def plan_of(spec: LoaderSpec, lengths: Lengths, epoch: int = 0, rank: int = 0) -> Plan:
    """Return the plan of a rank."""
    return Plan(replace(spec, rank=rank), len(lengths), epoch, lengths)


def sequences_of(pieces: Pieces) -> list[list[Piece]]:
    """Return the sequences of a batch, each as a list of documents, starts and stops."""
    rows = zip(*(each.tolist() for each in pieces), strict=True)
    return [[piece[1:] for piece in group] for _, group in itertools.groupby(rows, key=lambda row: row[0])]


def listed(spec: LoaderSpec, lengths: Lengths, epoch: int = 0) -> list[list[list[Piece]]]:
    """Return the sequences of each step, over all ranks in the order of the epoch."""
    plans = [plan_of(spec, lengths, epoch, rank) for rank in range(spec.world_size)]
    steps = []
    for k in range(max(map(len, plans))):
        ranks = [sequences_of(plan.pieces(k)) for plan in plans if k < len(plan)]
        columns = itertools.zip_longest(*ranks)
        steps.append([sequence for column in columns for sequence in column if sequence is not None])
    return steps


def plain_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Return the rooms of the sequences of best-fit decreasing, piece by piece."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return sorted(rooms)


# --- Tokens -------------------------------------------------------------------------------------------------------


@given(documents(), WINDOWS, st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 3))
@settings(max_examples=examples(300))
def test_each_token_is_in_one_sequence(
    drawn: tuple[Lengths, int], window: int, size: int, ranks: int, shuffle: bool, epoch: int
) -> None:
    """No token is lost or doubled over the batches of all ranks, for any lengths, windows and world sizes."""
    lengths, capacity = drawn
    spec = packed(lengths, capacity, window, batch_size=size, world_size=ranks, shuffle=shuffle, tail="uneven")
    visits = Counter[tuple[int, int]]()
    for sequence in itertools.chain.from_iterable(listed(spec, lengths, epoch)):
        for document, start, stop in sequence:
            visits.update((document, token) for token in range(start, stop))
    tokens = [(document, token) for document in range(len(lengths)) for token in range(lengths.values[document])]
    assert visits == Counter(tokens)


@given(documents(), WINDOWS)
@settings(max_examples=examples(200))
def test_only_documents_longer_than_a_sequence_are_cut(drawn: tuple[Lengths, int], window: int) -> None:
    """All pieces of a document but the last one are whole sequences, and no sequence exceeds its length."""
    lengths, capacity = drawn
    for sequence in itertools.chain.from_iterable(listed(packed(lengths, capacity, window), lengths)):
        assert 1 <= sum(stop - start for _, start, stop in sequence) <= capacity
        for document, start, stop in sequence:
            assert start % capacity == 0
            assert stop - start == capacity or stop == lengths.values[document]


@given(documents(), st.integers(1, 3), st.integers(1, 3), st.sampled_from(TAILS), st.booleans())
@settings(max_examples=examples(200))
def test_sequences_are_divided_among_ranks_as_samples_are(
    drawn: tuple[Lengths, int], size: int, ranks: int, tail: Tail, drop_last: bool
) -> None:
    """The batches have the sizes of those of a dataset with as many samples as there are sequences."""
    lengths, capacity = drawn
    spec = packed(lengths, capacity, batch_size=size, world_size=ranks, tail=tail, drop_last=drop_last)
    assert spec.packing is not None
    number = int(prepared(spec.packing, lengths, 0, 7)[-1])
    for rank in range(ranks):
        plan, plain = plan_of(spec, lengths, rank=rank), Plan(replace(spec, rank=rank, packing=None), number, 0)
        assert len(plan) == len(plain)
        assert [len(sequences_of(plan.pieces(k))) for k in range(len(plan))] == [len(each) for each in plain]
        assert [plan.padding(k) for k in range(len(plan))] == [plain.padding(k) for k in range(len(plain))]


# --- Best fit -----------------------------------------------------------------------------------------------------


@given(CAPACITIES, st.data())
@settings(max_examples=examples(500))
def test_steps_are_those_of_best_fit_decreasing(capacity: int, data: st.DataObject) -> None:
    """Groups of equal pieces yield the rooms that best fit yields piece by piece."""
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=80))
    numbers = sorted(Counter(lengths).items(), reverse=True)
    rooms = Counter[int]()
    pieces = Counter[int]()
    for length, room, taken, per_sequence in best_fit(numbers, capacity):
        if room != capacity:
            assert rooms[room] >= taken
            rooms[room] -= taken
        rooms[room - per_sequence * length] += taken
        pieces[length] += taken * per_sequence
    assert sorted(rooms.elements()) == plain_best_fit(lengths, capacity)
    assert pieces == Counter(lengths)


@given(documents(), WINDOWS, st.booleans())
@settings(max_examples=examples(200))
def test_windows_have_as_few_sequences_as_plain_best_fit(
    drawn: tuple[Lengths, int], window: int, shuffle: bool
) -> None:
    """The counted number of sequences of each window is that of its sequences, and of a plain best fit."""
    lengths, capacity = drawn
    spec = packed(lengths, capacity, window, shuffle=shuffle)
    counts = np.diff(prepare(spec, lengths, 0)).tolist()
    unpacked = Plan(replace(spec, packing=None), len(lengths), 0)
    order = [int(index) for batch in unpacked for index in batch]
    places = iter(itertools.chain.from_iterable(listed(spec, lengths)))
    for number, count in enumerate(counts):
        own = order[number * window : (number + 1) * window]
        sizes = [stop for index in own for stop in _sizes(int(lengths.values[index]), capacity)]
        assert count == len(plain_best_fit(sizes, capacity))
        found = list(itertools.islice(places, count))
        assert sorted(capacity - sum(stop - start for _, start, stop in sequence) for sequence in found) == (
            plain_best_fit(sizes, capacity)
        )
        assert {document for sequence in found for document, _, _ in sequence} == set(own)
    assert next(places, None) is None


def _sizes(length: int, capacity: int) -> list[int]:
    return [capacity] * (length // capacity) + ([length % capacity] if length % capacity else [])


def test_windows_of_short_documents_are_almost_full() -> None:
    """Less than 0.1 % of padding remains in a window of 16,384 documents with log-normal lengths."""
    lengths = Lengths(np.random.default_rng(0).lognormal(5, 1, 2**14).astype(np.int64) + 1, 2**14)
    plan = plan_of(packed(lengths, 2048, 2**14, batch_size=32, tail="uneven"), lengths)
    found = audit_tokens(map(plan.pieces, range(len(plan))), lengths, 2048)
    assert found.exact
    assert found.padding_fraction < 0.001


# --- Order --------------------------------------------------------------------------------------------------------


@given(documents(), st.integers(1, 3), st.integers(0, 3))
@settings(max_examples=examples(100))
def test_global_batches_do_not_depend_on_the_world_size(drawn: tuple[Lengths, int], size: int, epoch: int) -> None:
    """The sequences of each step are the same for all divisions of a global batch among ranks."""
    lengths, capacity = drawn
    divisions = [(4 * size, 1), (2 * size, 2), (size, 4)]
    specs = [packed(lengths, capacity, batch_size=each, world_size=ranks, tail="uneven") for each, ranks in divisions]
    assert listed(specs[0], lengths, epoch) == listed(specs[1], lengths, epoch) == listed(specs[2], lengths, epoch)


@given(documents(), st.data())
@settings(max_examples=examples(100))
def test_batches_by_number_are_those_of_a_full_listing(drawn: tuple[Lengths, int], data: st.DataObject) -> None:
    """A new plan, with or without the preparation of another process, yields batch k of a full listing."""
    lengths, capacity = drawn
    spec = packed(lengths, capacity, batch_size=2)
    plan = plan_of(spec, lengths)
    full = [sequences_of(plan.pieces(k)) for k in range(len(plan))]
    starts = prepare(spec, lengths, 0)
    for k in data.draw(st.permutations(range(len(full)))):
        other = Plan(spec, len(lengths), 0, lengths, starts.copy())
        assert sequences_of(other.pieces(k)) == full[k]
        found = [document for sequence in full[k] for document, _, _ in sequence]
        assert other[k].tolist() == list(dict.fromkeys(found))
        assert other.first(k, 1).tolist() == found[:1]


def test_the_order_is_part_of_saved_states() -> None:
    """The sequences of a seed are always the same: training runs resume in the middle of an epoch."""
    listed_lengths = [3, 9, 2, 8, 21, 1, 5, 4, 8, 7, 2, 6, 9, 9, 1, 3, 4, 30, 5, 6]
    lengths = Lengths(listed_lengths, len(listed_lengths))
    spec = packed(lengths, 8, window=16, batch_size=2, seed=1)
    assert listed(spec, lengths, epoch=2) == EXPECTED


EXPECTED: list[list[list[Piece]]] = [
    [[(17, 8, 16)], [(5, 0, 1), (12, 8, 9), (11, 0, 6)]],
    [[(14, 0, 1), (4, 16, 21)], [(6, 0, 5), (15, 0, 3)]],
    [[(1, 8, 9), (9, 0, 7)], [(17, 24, 30), (10, 0, 2)]],
    [[(4, 8, 16)], [(4, 0, 8)]],
    [[(12, 0, 8)], [(17, 0, 8)]],
    [[(1, 0, 8)], [(19, 0, 6), (2, 0, 2)]],
    [[(7, 0, 4)], [(17, 16, 24)]],
    [[(8, 0, 8)], [(3, 0, 8)]],
    [[(18, 0, 5), (0, 0, 3)], [(13, 0, 8)]],
    [[(16, 0, 4), (13, 8, 9)]],
]


def test_epochs_and_seeds_have_different_orders() -> None:
    """The order of the sequences, and the documents that they contain, change with the epoch and the seed."""
    lengths = Lengths(np.random.default_rng(0).integers(1, 60, 400), 400)
    first, second = (packed(lengths, 64, 64, seed=seed, batch_size=4) for seed in (1, 2))
    orders = [listed(first, lengths, 0), listed(first, lengths, 1), listed(second, lengths, 0)]
    assert all(one != other for one, other in itertools.combinations(orders, 2))


def test_without_shuffling_sequences_follow_the_dataset() -> None:
    """The sequences of a window are in the order of their first documents, and so are the pieces of a sequence."""
    lengths = Lengths(np.random.default_rng(0).integers(1, 150, 300), 300)
    sequences = list(itertools.chain.from_iterable(listed(packed(lengths, 64, 300, shuffle=False), lengths)))
    assert [sequence[0][:2] for sequence in sequences] == sorted(sequence[0][:2] for sequence in sequences)
    assert all(sequence == sorted(sequence) for sequence in sequences)


def test_pieces_are_not_in_the_order_of_their_lengths() -> None:
    """Best fit adds long pieces first, but they are first in a sequence as often as last."""
    lengths = Lengths(np.random.default_rng(0).integers(1, 60, 4000), 4000)
    sequences = itertools.chain.from_iterable(listed(packed(lengths, 64, 4000), lengths))
    ends = [(each[0][2] - each[0][1], each[-1][2] - each[-1][1]) for each in sequences]
    descending, ascending = (sum(one > other for one, other in pairs) for pairs in (ends, [end[::-1] for end in ends]))
    assert 0.8 < descending / ascending < 1.25


# --- Audit --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
@settings(max_examples=examples(300))
def test_the_audit_counts_missing_and_repeated_tokens(sizes: list[int], data: st.DataObject) -> None:
    """For arbitrary pieces, also overlapping ones, the result is that of counting token by token."""
    lengths = Lengths(sizes, len(sizes))
    rows = []
    for _ in range(data.draw(st.integers(0, 12))):
        document = data.draw(st.integers(0, len(sizes) - 1))
        start = data.draw(st.integers(0, sizes[document] - 1))
        rows.append((document, start, data.draw(st.integers(start + 1, sizes[document]))))
    batches = [Pieces.of([np.array([row], np.int64)]) for row in rows]
    visits = Counter((document, token) for document, start, stop in rows for token in range(start, stop))
    missing = {(document, token) for document, size in enumerate(sizes) for token in range(size)} - set(visits)
    repeated = {place for place, count in visits.items() if count > 1}
    found = audit_tokens(batches, lengths, 9)
    assert found.missing_tokens == len(missing)
    assert found.repeated_tokens == visits.total() - len(visits)
    assert found.missing.tolist() == sorted({document for document, _ in missing})
    assert found.repeated.tolist() == sorted({document for document, _ in repeated})
    assert (found.visits, found.tokens, found.sequences) == (visits.total(), sum(sizes), len(rows))
    assert found.exact == (not missing and not repeated)


def test_the_audit_rejects_pieces_outside_of_documents() -> None:
    """A piece beyond the end of its document, or of no document, is an error."""
    lengths = Lengths([3, 4], 2)
    for row in ([0, 0, 4], [2, 0, 1], [-1, 0, 1], [1, 2, 2]):
        with pytest.raises(IndexError):
            audit_tokens([Pieces.of([np.array([row], np.int64)])], lengths, 4)


# --- Validation ---------------------------------------------------------------------------------------------------


def test_other_lengths_are_refused() -> None:
    """A plan with lengths of another digest would compute other sequences than the loader's servers."""
    lengths, others = Lengths([1, 2, 3], 3), Lengths([1, 2, 4], 3)
    with pytest.raises(DatasetChanged, match="lengths with digest"):
        plan_of(packed(lengths, 4), others)
    with pytest.raises(TypeError, match="requires lengths"):
        Plan(packed(lengths, 4), 3, 0)


def test_batches_out_of_range_are_errors() -> None:
    """Only the batches of the epoch have pieces."""
    lengths = Lengths([1, 2, 3], 3)
    with pytest.raises(BatchOutOfRange, match="batch 2 is out of range"):
        plan_of(packed(lengths, 4), lengths).pieces(2)
    with pytest.raises(TypeError, match="requires packing="):
        Plan(LoaderSpec(dataset="text"), 3, 0).pieces(0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"order": "client", "session": "one", "shuffle": False}, "packing excludes order=client"),
        ({"collate": "module:function"}, "packing excludes collate"),
        ({"on_error": "replace"}, "packing excludes on_error=replace"),
        ({"batch_size": None}, "batch_size=null"),
        ({"batch_size": 2**20}, "batch_size=1048576 and sequence_length=2048"),
        ({"balance": BalanceSpec("0" * 32, 4, 1)}, "packing excludes balance"),
    ],
)
def test_arguments_that_exclude_packing_are_named(fields: dict[str, Any], message: str) -> None:
    """The error names the argument and its value."""
    with pytest.raises(InvalidSpec, match=message):
        LoaderSpec(dataset="text", packing=PackingSpec("0" * 32, 2048, 64), **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lengths": "abc"}, "lengths of packing must be a digest"),
        ({"sequence_length": 0}, r"sequence_length of packing must be an integer in \[1, 1073741824\], got 0"),
        ({"window": 2**23}, r"window of packing must be an integer in \[16, 4194304\], got 8388608"),
        ({"pad_token_id": 0.5}, "pad_token_id of packing"),
    ],
)
def test_invalid_parameters_are_named(fields: dict[str, Any], message: str) -> None:
    """The error names the field, its value and the valid values."""
    valid = {"lengths": "0" * 32, "sequence_length": 8, "window": 16, "pad_token_id": 0}
    with pytest.raises(InvalidSpec, match=message):
        PackingSpec(**{**valid, **fields})
    with pytest.raises(InvalidSpec, match=message):
        PackingSpec.from_json({**valid, **fields})


@pytest.mark.parametrize("fields", [[], {}, {"sequence_length": 8}, "packing"])
def test_other_json_is_refused(fields: Any) -> None:
    """All parameters are part of the JSON object, and no other ones."""
    with pytest.raises(InvalidSpec, match="packing must be null or an object with lengths, sequence_length"):
        LoaderSpec.from_json({"dataset": "text", "packing": fields})


def test_specs_with_packing_survive_json() -> None:
    """The parameters are part of the loader's key."""
    spec = packed(Lengths([1, 2], 2), 8)
    assert LoaderSpec.from_json(spec.to_json()) == spec
    assert len({spec.key, replace(spec, packing=None).key, packed(Lengths([1, 3], 2), 8).key}) == 3
