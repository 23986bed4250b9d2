"""A worker's shard of an iterable-style dataset, in batches that can be computed again by counting, or from a state."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server.loading.shards import RandomNumbers, Shard
from teleloader_shared.errors import StateMismatch
from teleloader_shared.spec import MAX_STATES
from tests.conftest import need

Outcome = list[Any] | str | None
"""Result of `fetch`: samples, an exception's text, or None at the end."""


class Counting:
    """Dataset of the integers below a limit, which counts its iterations and samples."""

    def __init__(self, limit: int, fails_at: set[int] | None = None) -> None:
        self.limit = limit
        self.begun = 0
        self.given = 0
        self._fails_at = fails_at or set()

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return _Numbers(self, self._fails_at)


class _Numbers:
    """Iterator that continues after an exception, unlike a generator."""

    def __init__(self, owner: Counting, fails_at: set[int]) -> None:
        self._owner = owner
        self._fails_at = fails_at
        self._next = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._next >= self._owner.limit:
            raise StopIteration
        self._next += 1
        self._owner.given += 1
        if self._next - 1 in self._fails_at:
            raise ValueError(f"sample {self._next - 1}")
        return self._next - 1


def never() -> None:
    """Fail: the iteration must not start again."""
    pytest.fail("the dataset was begun again")


def shard(
    dataset: Any,
    batch_size: int | None = 2,
    *,
    drop_last: bool = False,
    restart: Callable[[], object] = never,
    state: str | None = None,
) -> Shard:
    """Return an iteration of `dataset`, which calls `restart` when it starts again."""

    class Watched(RandomNumbers):
        begun = False

        def begin(self, saved: Any) -> None:
            if self.begun:
                restart()
            self.begun = True

    return Shard(dataset, batch_size, drop_last, random_numbers=Watched(), saved=[] if state is None else [state])


def outcome(of: Shard, number: int) -> Outcome:
    """Return the result of `fetch`, or the text of its exception."""
    try:
        return of.fetch(number)
    except ValueError as error:
        return str(error)


def everything(of: Shard) -> list[Outcome]:
    """Return all outcomes before the end."""
    found: list[Outcome] = []
    while (next_one := outcome(of, len(found))) is not None:
        found.append(next_one)
    return found


# --- In order -----------------------------------------------------------------------------------------------------


def test_batches_are_those_of_torchs_fetcher() -> None:
    """Each batch has `batch_size` samples, and the last one the remaining ones."""
    assert everything(shard(Counting(5))) == [[0, 1], [2, 3], [4]]
    assert everything(shard(Counting(4))) == [[0, 1], [2, 3]]
    assert everything(shard(Counting(0))) == []


def test_an_incomplete_batch_may_be_left_out() -> None:
    """The samples of a dropped incomplete batch count as fetched."""
    dropping = shard(Counting(5), drop_last=True)
    assert everything(dropping) == [[0, 1], [2, 3]]
    assert dropping.samples == 5


def test_without_batches_samples_come_one_by_one() -> None:
    """Without batches, `fetch` returns lists with one sample, which are not collated."""
    assert everything(shard(Counting(3), None)) == [[0], [1], [2]]


def test_samples_are_taken_as_they_are_needed() -> None:
    """Only samples of requested batches are read, as a stream may be infinite."""
    dataset = Counting(10**12)
    stream = shard(dataset, 3)
    assert dataset.begun == 0
    assert stream.fetch(0) == [0, 1, 2]
    assert (dataset.begun, dataset.given, stream.samples) == (1, 3, 3)


def test_what_has_ended_stays_ended() -> None:
    """After the end, the dataset is not read again."""
    dataset = Counting(2)
    ended = shard(dataset)
    assert [ended.fetch(k) for k in (0, 1, 2, 7)] == [[0, 1], None, None, None]
    assert (dataset.begun, ended.samples) == (1, 2)


def test_any_iterable_can_be_a_shard() -> None:
    """Lists, generators and one-time iterators are valid shards."""
    assert everything(shard([1, 2, 3])) == [[1, 2], [3]]
    assert everything(shard(i * i for i in range(3))) == [[0, 1], [4]]
    assert everything(shard(iter("abc"))) == [["a", "b"], ["c"]]


# --- Not in order -------------------------------------------------------------------------------------------------


def test_a_batch_further_on_is_found_by_iterating() -> None:
    """Skipped batches are read, and their samples count."""
    dataset = Counting(10)
    seeking = shard(dataset)
    assert seeking.fetch(3) == [6, 7]
    assert (dataset.begun, seeking.samples) == (1, 8)
    assert seeking.fetch(4) == [8, 9]


def test_a_batch_behind_is_found_from_the_beginning() -> None:
    """An earlier batch starts a new iteration after the worker was reseeded."""
    dataset = Counting(10)
    told: list[int] = []
    seeking = shard(dataset, restart=lambda: told.append(dataset.begun))
    assert seeking.fetch(0) == [0, 1]
    assert seeking.fetch(3) == [6, 7]
    assert told == []
    assert seeking.fetch(2) == [4, 5]
    assert (told, dataset.begun, seeking.samples) == ([1], 2, 6)


def test_an_ended_shard_can_restart() -> None:
    """A batch may be requested again after the end of the epoch."""
    told: list[str] = []
    seeking = shard(Counting(3), restart=lambda: told.append("again"))
    assert seeking.fetch(9) is None
    assert seeking.fetch(1) == [2]
    assert seeking.fetch(2) is None
    assert seeking.samples == 3
    assert told == ["again"]


@given(
    limit=st.integers(0, 12), batch_size=st.none() | st.integers(1, 4), drop_last=st.booleans(),
    fails_at=st.sets(st.integers(0, 11), max_size=3), numbers=st.lists(st.integers(0, 14), max_size=8),
)  # fmt: skip
def test_a_batch_does_not_depend_on_earlier_requests(
    limit: int, batch_size: int | None, drop_last: bool, fails_at: set[int], numbers: list[int]
) -> None:
    """A replacement of a worker computes the same batch, or raises the same exception."""
    dataset = Counting(limit, fails_at)
    in_order = everything(shard(dataset, batch_size, drop_last=drop_last))
    seeking = shard(dataset, batch_size, drop_last=drop_last, restart=lambda: None)
    for number in numbers:
        assert outcome(seeking, number) == (in_order[number] if number < len(in_order) else None)


# --- Exceptions ---------------------------------------------------------------------------------------------------


def test_an_exception_takes_the_place_of_its_batch() -> None:
    """The samples of a failed batch are lost, as in torch; an iterator that supports it continues."""
    assert everything(shard(Counting(7, {3}))) == [[0, 1], "sample 3", [4, 5], [6]]


def test_a_generator_ends_with_its_exception() -> None:
    """After an exception in a generator, the shard ends."""

    def stream() -> Iterator[int]:
        yield from range(3)
        raise ValueError("no more of the file")

    failing = shard(stream())
    assert everything(failing) == [[0, 1], "no more of the file"]
    assert failing.samples == 3


def test_an_exception_among_what_is_sought_is_passed_over() -> None:
    """Exceptions of skipped batches are not raised again."""
    assert shard(Counting(9, {1, 3})).fetch(2) == [4, 5]


class Unopened:
    """Dataset whose iteration fails to start."""

    def __init__(self) -> None:
        self.tried = 0

    def __iter__(self) -> Iterator[int]:
        self.tried += 1
        raise ValueError("the disk is not mounted")


@pytest.mark.parametrize("first", [0, 2])
def test_a_dataset_that_cannot_begin_fails_once_and_ends(first: int) -> None:
    """The shard ends after one failure, as an iteration of torch does."""
    dataset = Unopened()
    failing = shard(dataset)
    # later batches come after the failure, which was reported at batch 0
    assert outcome(failing, first) == ("the disk is not mounted" if first == 0 else None)
    assert [outcome(failing, first + k) for k in (1, 2)] == [None, None]
    assert (dataset.tried, failing.samples) == (1, 0)


def test_what_is_no_iterable_fails_once_and_ends() -> None:
    """The failure is the TypeError of ``iter()``; the shard then ends."""
    failing = shard(5)
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        failing.fetch(0)
    assert failing.fetch(1) is None


# --- Datasets with a state ----------------------------------------------------------------------------------------


class Keeping(Counting):
    """Dataset with a state as in torchdata's Stateful: iterating continues from its position."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        while self.position < self.limit:
            self.position += 1
            self.given += 1
            yield self.position - 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position."""
        self.position = state["position"]


class KeepingIterator:
    """Dataset whose iterators have a state."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.given = 0

    def __iter__(self) -> Iterator[int]:
        return _Keeper(self)


class _Keeper:
    def __init__(self, owner: KeepingIterator) -> None:
        self._owner = owner
        self._position = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._position >= self._owner.limit:
            raise StopIteration
        self._position += 1
        self._owner.given += 1
        return self._position - 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]


Keeper = Callable[[int], Any]
keepers = pytest.mark.parametrize("make", [Keeping, KeepingIterator])


@keepers
def test_a_shard_continues_from_a_saved_state(make: Keeper) -> None:
    """Earlier samples are not read again; batch numbers and the sample count continue."""
    before = shard(make(9))
    assert [before.fetch(k) for k in (0, 1)] == [[0, 1], [2, 3]]
    state = before.state()
    dataset = make(9)
    again = shard(dataset, state=state)
    assert again.fetch(2) == [4, 5]
    assert (dataset.given, again.samples) == (2, 6)
    assert [again.fetch(k) for k in (3, 4, 5)] == [[6, 7], [8], None]
    assert again.samples == 9


@keepers
@pytest.mark.parametrize("batches", range(6))
def test_a_place_can_be_kept_after_any_batch(make: Keeper, batches: int) -> None:
    """States can be saved after any batch, including the last one, and before the first."""
    whole = everything(shard(make(9)))
    before = shard(make(9))
    for k in range(batches):
        before.fetch(k)
    again = shard(make(9), state=before.state())
    rest = [again.fetch(k) for k in range(batches, len(whole) + 1)]
    assert rest == [*whole[batches:], None][: len(rest)]


@keepers
def test_a_kept_place_is_come_back_to(make: Keeper) -> None:
    """A batch before the last one, but after the saved state, is computed from that state."""
    before = shard(make(20))
    before.fetch(3)
    told: list[str] = []
    dataset = make(20)
    again = shard(dataset, restart=lambda: told.append("again"), state=before.state())
    assert again.fetch(6) == [12, 13]
    assert again.fetch(4) == [8, 9]
    assert told == ["again"]
    assert dataset.given == (14 - 8) + 2


def test_a_dataset_that_keeps_its_place_begins_again_at_its_beginning() -> None:
    """Its first state is restored, because iterating alone would continue."""
    seeking = shard(Keeping(10), restart=lambda: None)
    assert [seeking.fetch(k) for k in (0, 3, 1)] == [[0, 1], [6, 7], [2, 3]]


def test_an_iterator_with_a_state_can_go_back_before_it() -> None:
    """If only the iterator has a state, a new iteration starts at the beginning."""
    before = shard(KeepingIterator(10))
    before.fetch(2)
    again = shard(KeepingIterator(10), restart=lambda: None, state=before.state())
    assert [again.fetch(k) for k in (3, 1)] == [[6, 7], [2, 3]]


def test_a_dataset_with_a_state_cannot_go_back_before_it() -> None:
    """A dataset that was given a state has no known beginning, so an earlier batch is an error, never other samples."""
    before = shard(Keeping(10))
    before.fetch(2)
    again = shard(Keeping(10), restart=lambda: None, state=before.state())
    assert again.fetch(3) == [6, 7]
    with pytest.raises(StateMismatch, match="batch 1 of the shard: the dataset was resumed from a later state"):
        again.fetch(1)
    assert again.fetch(3) == [6, 7]


def test_a_dataset_without_a_state_has_none() -> None:
    """Batches of such a dataset are found by counting."""
    plain = shard(Counting(5))
    assert plain.state() is None
    plain.fetch(0)
    assert plain.state() is None


class Both(Keeping):
    """Dataset with a state whose iterators have one, too, for example a shuffle buffer and a file position."""

    def __iter__(self) -> Iterator[int]:
        return _Doubling(self)


class _Doubling:
    """Iterator that yields each number of its owner twice."""

    def __init__(self, owner: Both) -> None:
        self._owner = owner
        self._left: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self._left:
            if self._owner.position >= self._owner.limit:
                raise StopIteration
            self._left = [self._owner.position] * 2
            self._owner.position += 1
        return self._left.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"left": self._left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._left = state["left"]


@pytest.mark.parametrize("batches", range(1, 4))
def test_the_states_of_dataset_and_iterator_are_both_kept(batches: int) -> None:
    """Both states are saved, as by torchdata: either alone would lose or repeat samples."""
    whole = everything(shard(Both(6), 3))
    before = shard(Both(6), 3)
    for k in range(batches):
        before.fetch(k)
    again = shard(Both(6), 3, state=before.state())
    assert [again.fetch(k) for k in range(batches, len(whole))] == whole[batches:]


class Late(Counting):
    """Dataset whose state exists only during an iteration."""

    def __iter__(self) -> Iterator[int]:
        self._position = getattr(self, "_loaded", 0)
        while self._position < self.limit:
            self._position += 1
            yield self._position - 1

    def state_dict(self) -> dict[str, int]:
        """Return the state, or raise before the first sample."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the state in the next iteration."""
        self._loaded = state["position"]


def test_a_state_is_requested_only_after_the_iteration_began() -> None:
    """Torchdata requests a state after a batch, so many datasets have none before."""
    before = shard(Late(9))
    assert [before.fetch(k) for k in (0, 1)] == [[0, 1], [2, 3]]
    assert shard(Late(9), state=before.state()).fetch(2) == [4, 5]


class Foreign(Counting):
    """Dataset with a state_dict() as in mosaicml-streaming and litdata, which only their own loaders can call."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Raise if called as torchdata does."""
        return {}

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Do nothing: this method is never called."""


class Half(Counting):
    """Dataset whose methods have torchdata's names but not its signatures."""

    state_dict = None

    def load_state_dict(self) -> None:
        """Accept no state."""


@pytest.mark.parametrize("make", [Foreign, Half])
def test_only_methods_of_torchdatas_protocol_are_called(make: Keeper) -> None:
    """Other methods of the same names are left alone, and the batches are found by iterating."""
    found = shard(make(5), restart=lambda: None)
    assert everything(found) == [[0, 1], [2, 3], [4]]
    assert found.state() is None
    assert found.fetch(1) == [2, 3]


# --- Content of states --------------------------------------------------------------------------------------------


class Stating(Keeping):
    """Dataset with another state in addition to its position."""

    def __init__(self, limit: int, also: Any = None) -> None:
        super().__init__(limit)
        self.also = also

    def state_dict(self) -> Any:
        """Return both states."""
        return {"position": self.position, "also": self.also}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both states."""
        self.position, self.also = state["position"], state["also"]


def kept(also: Any) -> Any:
    """Return a value after saving and loading it as part of a state."""
    before = shard(Stating(5, also))
    before.fetch(0)
    dataset = Stating(5)
    again = shard(dataset, state=json.loads(json.dumps(before.state())))
    assert again.fetch(1) == [2, 3]
    return dataset.also


@pytest.mark.parametrize(
    "also",
    [(1, (2,)), {1: "one", (2, 3): "pair"}, {4, 5}, b"\0\xff", 2**100, random.getstate(), np.float32(0.1), None],
    ids=["tuple", "keys", "set", "bytes", "large", "random", "numpy", "none"],
)
def test_a_state_keeps_its_types(also: Any) -> None:
    """JSON would change or refuse these without the dataset's knowledge, and the resumed run would differ."""
    found = kept(also)
    assert found == also
    assert type(found) is type(also)


def test_a_state_keeps_generators_of_numpy_and_torch() -> None:
    """Arrays and tensors of generator states are writable after loading."""
    need("torch")
    import torch

    legacy, new, tensor = kept((np.random.get_state(), np.random.default_rng(5).bit_generator.state, torch.arange(3)))
    np.random.set_state(legacy)
    assert new == np.random.default_rng(5).bit_generator.state
    assert torch.equal(tensor.add_(1), torch.arange(1, 4))
    np.testing.assert_array_equal(kept(np.eye(2)), np.eye(2))


@pytest.mark.parametrize(
    ("also", "reason"),
    [
        ({"file": object()}, r"state\['dataset'\]\['also'\]\['file'\]: unsupported type object"),
        ("x" * MAX_STATES, "the encoded state has [0-9,]+ characters, more than 786,432"),
    ],
    ids=["object", "long"],
)
def test_a_state_that_cannot_be_kept_is_an_error_that_names_the_reason(also: Any, reason: str) -> None:
    """The batches are valid; resuming from the state raises an error with the value's path, and loses no sample."""
    before = shard(Stating(5, also))
    assert before.fetch(0) == [0, 1]
    again = shard(Stating(5), state=before.state())
    with pytest.raises(StateMismatch, match=f"(?s)cannot save the state of .*{reason}"):
        again.fetch(1)
    assert again.fetch(1) is None, "reported once"


@pytest.mark.parametrize("text", ["", "{}", "AAAA", "\u00e9", "VExGMQ=="])
def test_a_damaged_state_is_an_error(text: str) -> None:
    """States come from clients, so that every part is verified."""
    with pytest.raises(StateMismatch, match="invalid state of a dataset or sampler"):
        shard(Stating(5), state=text).fetch(1)


# --- The dataset's iterator ---------------------------------------------------------------------------------------


def test_a_generator_is_closed_when_the_shard_is() -> None:
    """Its ``finally`` runs at once, when the shard is closed or iterated again."""
    closed: list[int] = []

    class Files:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(10)
            finally:
                closed.append(len(closed))

    open_ = shard(Files(), restart=lambda: None)
    open_.fetch(2)
    assert closed == []
    open_.fetch(0)
    assert closed == [0]
    open_.close()
    assert closed == [0, 1]
