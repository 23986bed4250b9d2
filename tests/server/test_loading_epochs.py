"""Epoch of a dataset: whenever a batch of epoch e is computed, the dataset's epoch is e."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server.loading.passes import MAX_PASSES
from tests.server.bench import Bench, Made

STREAM: dict[str, Any] = {"session": "mine", "batch_size": 2}


class Rows(Made):
    """Map-style dataset whose samples are its epoch."""

    def __init__(self) -> None:
        super().__init__(lambda index: self.epoch)
        self.epoch = -1
        self.told: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        """Record the epoch."""
        self.told.append(epoch)
        self.epoch = epoch


class Stream:
    """Iterable-style dataset in the order of its epoch, which its samples show."""

    def __init__(self, length: int = 8) -> None:
        self._length = length
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        """Select the next iteration's order."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._length))
        random.Random(self.epoch).shuffle(order)
        for index in order:
            yield 100 * self.epoch + index


def epoch_of(epoch: int, length: int = 8) -> list[list[int]]:
    """Return the batches of an epoch of `Stream`."""
    stream = Stream(length)
    stream.set_epoch(epoch)
    samples = list(stream)
    return [samples[i : i + 2] for i in range(0, length, 2)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12))
def test_a_map_style_dataset_has_the_epoch_of_each_batch(requests: list[tuple[int, int]]) -> None:
    """Consumers in different epochs may share a worker; set_epoch is called when the epoch changes, and only then."""
    dataset = Rows()
    bench = Bench(dataset)
    changes = [epoch for i, (epoch, _) in enumerate(requests) if i == 0 or requests[i - 1][0] != epoch]
    for epoch, batch in requests:
        assert bench.batch(batch, epoch, batch_size=2).tolist() == [epoch] * 2
    assert dataset.told == changes


def test_the_epoch_of_a_local_dataset_is_set_before_each_batch() -> None:
    """Without workers, the caller or another loader may have set another epoch since the last batch."""
    dataset = Rows()
    bench = Bench(dataset, worker=-1)
    for _ in range(2):
        assert bench.batch(0, 3, batch_size=1).tolist() == [3]
        dataset.set_epoch(7)


def test_an_error_of_set_epoch_is_an_error_of_the_batch() -> None:
    """The next batch calls it again: the dataset's epoch is unknown until it has succeeded."""

    class Fails(Rows):
        def set_epoch(self, epoch: int) -> None:
            super().set_epoch(epoch)
            if len(self.told) == 2:
                raise ValueError("no such epoch")

    dataset = Fails()
    bench = Bench(dataset)
    assert bench.batch(0, 0, batch_size=1).tolist() == [0]
    assert bench.failure(0, 1, batch_size=1).message == "no such epoch"
    assert bench.batch(0, 1, batch_size=1).tolist() == [1]
    assert dataset.told == [0, 1, 1]


@pytest.mark.parametrize("method", [None, lambda: 1 / 0, lambda first, second: 1 / 0], ids=["none", "none taken", "2"])
def test_only_a_set_epoch_that_takes_one_number_is_called(method: Any) -> None:
    """Another method of that name has another purpose."""
    rows, stream = Rows(), Stream()
    for dataset in (rows, stream):
        setattr(dataset, "set_epoch", method)  # noqa: B010 - as classes of other libraries have it
    assert Bench(rows).batch(0, 2, batch_size=1).tolist() == [-1]
    assert Bench(stream).batch(0, 2, **STREAM).tolist() == epoch_of(-1)[0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12))
def test_a_stream_has_the_epoch_of_each_batch(requests: list[tuple[int, int]]) -> None:
    """The worker sets the right epoch, whatever epoch and batch it computed before."""
    bench = Bench(Stream())
    for epoch, batch in requests:
        assert bench.batch(batch, epoch, **STREAM).tolist() == epoch_of(epoch)[batch]


def test_passes_that_take_turns_draw_what_they_drew_before() -> None:
    """An iteration that starts again uses the random state of its first start, not that of another one's end."""

    class Noise:
        def __iter__(self) -> Iterator[float]:
            return (random.random() for _ in range(8))

    random.seed(3)
    bench = Bench(Noise())
    first = [bench.batch(k, 0, **STREAM).tolist() for k in range(4)]
    second = [bench.batch(k, 1, **STREAM).tolist() for k in range(4)]
    assert first != second
    for k in (1, 3, 0):
        assert bench.batch(k, 0, **STREAM).tolist() == first[k]
        assert bench.batch(k, 1, **STREAM).tolist() == second[k]


def test_only_some_passes_are_remembered() -> None:
    """A client that requests many epochs does not fill the worker's memory."""
    bench = Bench(Stream())
    for epoch in range(2 * MAX_PASSES):
        bench.batch(0, epoch, **STREAM)
    assert len(bench.loading.passes._passes) == MAX_PASSES
    bench.loading.passes.forget("key")
    assert not bench.loading.passes._passes


def test_a_state_is_loaded_after_the_epoch_is_set() -> None:
    """A dataset whose set_epoch() resets its position still continues from its state."""

    class Keeping(Stream):
        position = 0

        def set_epoch(self, epoch: int) -> None:
            super().set_epoch(epoch)
            self.position = 0

        def __iter__(self) -> Iterator[int]:
            order = [sample for batch in epoch_of(self.epoch) for sample in batch]
            while self.position < len(order):
                self.position += 1
                yield order[self.position - 1]

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.position = state["position"]

    state = Bench(Keeping()).frame(1, 2, **STREAM).shard_state
    resumed = {"shard_states": [state], "resumed_epoch": 2, **STREAM}
    assert Bench(Keeping()).batch(2, 2, **resumed).tolist() == epoch_of(2)[2]
    assert Bench(Keeping()).batch(2, 3, **resumed).tolist() == epoch_of(3)[2], "the state is that of another epoch"
