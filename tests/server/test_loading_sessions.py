"""Batches without a plan: of client-side samplers, and of shards of iterable-style datasets."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from teleloader_server.loading.tasks import Task, indices_of
from teleloader_shared import user_state
from teleloader_shared.codec import BatchId, End, to_bytes
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.tree import Tensor
from tests.server.bench import Bench, Bulk, Made, drawn, draws, raising

# --- An order of the client's own ---------------------------------------------------------------------------------


class Seen(Made):
    """Dataset that records its indices."""

    def __init__(self) -> None:
        super().__init__(lambda index: 0)
        self.indices: list[Any] = []

    def __getitem__(self, index: Any) -> int:
        self.indices.append(index)
        return 0


def test_a_batch_holds_what_the_client_lists() -> None:
    """A batch has the listed samples in their order, with repetitions, whatever the seeded order."""
    frame = Bench(Made(lambda index: index * 10)).frame(7, indices=[5, 2, 2], batch_size=1)
    assert frame.content.tolist() == [50, 20, 20]
    assert frame.padding == 0


@pytest.mark.parametrize(
    "indices",
    [["a", "b"], [(1, "left"), (2, None)], [[1, 2], [3]], [{"row": 1}], [slice(0)][:0], [None, 1.5]],
    ids=repr,
)
def test_an_index_may_be_anything_that_travels(indices: list[Any]) -> None:
    """Any value that can be sent reaches the dataset unchanged as an index."""
    dataset = Seen()
    bench = Bench(dataset, collate=len)
    assert bench.batch(indices=indices, batch_size=1) == len(indices)
    assert dataset.indices == indices


@pytest.mark.parametrize("index", [4, [4, 5], "name", ()], ids=repr)
def test_without_batches_what_is_listed_is_one_index(index: Any) -> None:
    """Without batches, a list is one index, so that a sampler can read in bulk itself."""
    dataset = Seen()
    assert Bench(dataset).batch(indices=index, batch_size=None) == 0
    assert dataset.indices == [index]


@pytest.mark.parametrize("batch_size", [1, None])
def test_numbers_that_travel_packed_are_pythons_again(batch_size: int | None) -> None:
    """The dataset, and `__getitems__`, receive packed integers as a list of ints."""
    dataset = Seen()
    Bench(dataset).batch(indices=np.arange(3).view(Tensor), batch_size=batch_size)
    assert dataset.indices == ([0, 1, 2] if batch_size else [[0, 1, 2]])
    assert {type(index) for index in dataset.indices} == ({int} if batch_size else {list})


def test_an_array_that_is_an_index_stays_one() -> None:
    """An index that is an array reaches the dataset as an array."""
    dataset = Seen()
    Bench(dataset).batch(indices=np.arange(3), batch_size=None)
    assert isinstance(dataset.indices[0], np.ndarray)


def test_a_bulk_is_read_as_the_client_lists_it() -> None:
    """`__getitems__` receives the list; without batches it is not called."""
    dataset = Bulk()
    assert Bench(dataset).batch(indices=[5, 1], batch_size=1).tolist() == [50, 10]
    assert dataset.calls == [[5, 1]]
    Bench(dataset).batch(indices=5, batch_size=None)
    assert len(dataset.calls) == 1


def test_a_failure_names_the_numbers_that_the_client_listed() -> None:
    """The failure has the indices that are integers, and omits others."""
    bench = Bench(raising(ValueError("damaged")))
    assert bench.failure(3, indices=[9, 2], batch_size=1).indices == [9, 2]
    assert bench.failure(3, indices=[9, (1, 2), 2], batch_size=1).indices == [9, 2]


def test_a_dataset_without_a_length_can_be_indexed() -> None:
    """A client-side sampler needs no length."""

    class Endless:
        def __getitem__(self, index: int) -> int:
            return index

    assert Bench(Endless()).batch(indices=[10**12], batch_size=1).tolist() == [10**12]


def test_seeds_of_batches_and_samples_do_not_depend_on_the_sampler() -> None:
    """With seeding="sample", an integer index determines the seed, otherwise the position in the batch does."""
    reference = draws("sample", [0, 1, 2], batch_size=4)
    found: dict[Any, list[float]] = {}

    def make(index: Any) -> int:
        found[index] = drawn(index)
        return 0

    bench = Bench(Made(make), seeding="sample")
    bench.batch(5, indices=[7, 3, 11], batch_size=1)
    assert found == {index: reference[index] for index in (7, 3, 11)}
    bench.batch(6, indices=["a", "b"], batch_size=1)
    assert found["a"] != found["b"]


# --- Shards of an iterable-style dataset --------------------------------------------------------------------------


class Stream:
    """Dataset of samples that a function computes from their number."""

    def __init__(self, length: int, make: Callable[[int], Any] = lambda index: index) -> None:
        self._length = length
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, range(self._length))


STREAM: dict[str, Any] = {"session": "mine", "batch_size": 2}


def test_a_shards_batches_are_every_so_manyth() -> None:
    """Of three workers, worker 1 computes batches 1, 4, 7, ...: the first, second and third ones of its shard."""
    bench = Bench(Stream(5))
    assert [bench.batch(k, num_workers=3, **STREAM).tolist() for k in (1, 4, 7)] == [[0, 1], [2, 3], [4]]
    assert bench.frame(10, num_workers=3, **STREAM).content == End(5, replica=True)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_one_shard_makes_every_batch(num_workers: int) -> None:
    """With one worker, or without any, one shard has all batches."""
    bench = Bench(Stream(3))
    assert [bench.batch(k, num_workers=num_workers, **STREAM).tolist() for k in (0, 1)] == [[0, 1], [2]]
    assert isinstance(bench.batch(2, num_workers=num_workers, **STREAM), End)


def test_an_incomplete_batch_of_a_shard_may_be_left_out() -> None:
    """The samples of a dropped batch count as fetched."""
    bench = Bench(Stream(3))
    assert bench.batch(0, drop_last=True, **STREAM).tolist() == [0, 1]
    assert bench.batch(1, drop_last=True, **STREAM) == End(3, replica=True)


def test_each_epoch_is_a_new_pass() -> None:
    """The dataset is iterated from its beginning in each epoch."""
    bench = Bench(Stream(3))
    for epoch in (0, 1, 5):
        assert bench.batch(0, epoch, **STREAM).tolist() == [0, 1]
        assert bench.batch(1, epoch, **STREAM).tolist() == [2]


def test_single_samples_of_a_shard_are_converted() -> None:
    """Single samples are converted as in torch, without an additional dimension."""
    bench = Bench(Stream(2, lambda index: (np.full(2, index), "s")))
    sample = bench.batch(1, session="mine", batch_size=None)
    assert (sample[0].tolist(), sample[1]) == ([1, 1], "s")


def test_an_exception_of_a_shard_is_a_failure_at_its_batch() -> None:
    """The failure has no indices; an iterator that supports it continues."""
    bench = Bench(Stream(5, lambda index: 1 // (index - 2)))
    assert bench.batch(0, **STREAM).tolist() == [-1, -1]
    failure = bench.failure(1, **STREAM)
    assert (failure.type, failure.indices) == ("ZeroDivisionError", [])
    assert bench.batch(2, **STREAM).tolist() == [1, 0]


def test_a_shard_draws_as_its_worker_was_seeded() -> None:
    """Workers are seeded once, as in torch; an iteration that starts again draws the same random numbers."""
    bench = Bench(Stream(6, lambda index: random.random()))
    random.seed(5)
    first, second, _ = (bench.batch(k, **STREAM).tolist() for k in range(3))
    assert first != second
    assert bench.batch(1, **STREAM).tolist() == second


def test_a_shard_that_keeps_its_place_says_where_it_is() -> None:
    """Each batch has the state after it, from which a worker of a resumed session starts."""

    class Keeping(Stream):
        position = 0

        def __iter__(self) -> Iterator[int]:
            while self.position < 9:
                self.position += 1
                yield self.position - 1

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.position = state["position"]

    first = Bench(Keeping(0))
    states = [first.frame(k, 4, num_workers=2, **STREAM).shard_state for k in (1, 3)]
    assert None not in states
    resumed = {"num_workers": 2, "shard_states": [None, states[1]], "resumed_epoch": 4, **STREAM}
    assert Bench(Keeping(0)).batch(5, 4, **resumed).tolist() == [4, 5]
    assert Bench(Keeping(0)).batch(1, 5, **resumed).tolist() == [0, 1], "the next epoch begins at the beginning"


def test_a_random_state_that_no_generator_has_is_an_error() -> None:
    """Random states come from clients, and an invalid one could make NumPy read out of bounds."""
    legacy: list[Any] = list(np.random.get_state())
    legacy[2] = 10**6
    place = {"epoch": 0, "next": 0, "samples": 0, "ended": False}
    state = user_state.pack({**place, "generators": (random.getstate(), tuple(legacy), None)})
    failure = Bench(Stream(0)).failure(0, shard_states=[state], **STREAM)
    assert failure.type == "teleloader.StateMismatch"
    assert "invalid random state of a shard" in failure.message


# --- Indices of failed batches ------------------------------------------------------------------------------------


def task(batch: int, *, length: int = 12, indices: Any = None, **spec: Any) -> Task:
    """Return a task for a batch."""
    batch_id = BatchId("key", 0, batch)
    listed = None if indices is None else to_bytes(batch_id, indices)
    return Task(LoaderSpec(dataset="data", **spec), length, batch_id, listed)


def test_what_a_batch_should_have_held_is_known_without_making_it() -> None:
    """The indices of a batch that killed its workers come from the seeded order, or from the client's list."""
    assert indices_of(task(1, batch_size=4)) == [4, 5, 6, 7]
    assert indices_of(task(9, indices=[3, (1, 2), 1], order="client", session="mine")) == [3, 1]
    assert indices_of(task(9, indices=8, order="client", session="mine", batch_size=None)) == [8]


def test_of_a_shard_it_cannot_be_known() -> None:
    """The indices of a shard's batches are unknown."""
    for batch in (0, 11, 10**6):
        assert indices_of(task(batch, length=0, session="mine", num_workers=2)) == []
