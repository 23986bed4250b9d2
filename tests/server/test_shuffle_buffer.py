"""Shuffle buffer of a shard: every sample once, a bounded distance, and a state from which it continues."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server.loading.shards import Shard
from teleloader_server.loading.shuffle_buffer import BufferState, ShuffleBuffer, ShuffleSettings
from teleloader_shared.errors import StateMismatch

SIZES = st.integers(1, 40)
SEEDS = st.integers(0, 2**64 - 1)


class Stream:
    """Stateful dataset of the integers below a limit, which counts the samples that were read."""

    def __init__(self, limit: int, fails_at: int | None = None) -> None:
        self.limit = limit
        self.position = 0
        self.read = 0
        self._fails_at = fails_at

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.position >= self.limit:
            raise StopIteration
        self.position += 1
        self.read += 1
        if self.position - 1 == self._fails_at:
            raise ValueError(f"sample {self._fails_at}")
        return self.position - 1

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from the position."""
        self.position = state["position"]


def shuffled(stream: Stream, size: int, seed: int = 0, state: BufferState | None = None) -> ShuffleBuffer:
    """Return the shuffled stream, from a state on if there is one."""
    block, drawn, source = (0, 0, None) if state is None else state
    if source is not None:
        stream.load_state_dict(source)
    settings = ShuffleSettings(size, seed)
    return ShuffleBuffer(stream, settings, lambda block: stream.state_dict(), block=block, drawn=drawn)


@given(length=st.integers(0, 200), size=SIZES, seed=SEEDS)
def test_each_sample_is_yielded_once(length: int, size: int, seed: int) -> None:
    """The order is a permutation, and a function of size and seed."""
    got = list(shuffled(Stream(length), size, seed))
    assert sorted(got) == list(range(length))
    assert got == list(shuffled(Stream(length), size, seed))


@given(length=st.integers(0, 200), size=SIZES, seed=SEEDS)
def test_the_buffer_holds_no_more_than_its_size(length: int, size: int, seed: int) -> None:
    """At the first sample `size` samples are read, and with each further one only one more."""
    stream = Stream(length)
    for yielded, _ in enumerate(shuffled(stream, size, seed)):
        assert stream.read == min(length, size + yielded)


@given(length=st.integers(0, 200), size=SIZES, seed=SEEDS)
def test_samples_stay_within_their_block(length: int, size: int, seed: int) -> None:
    """A sample is displaced by less than `size`."""
    got = list(shuffled(Stream(length), size, seed))
    assert all(abs(place - sample) < size for place, sample in enumerate(got))


def test_a_short_stream_is_shuffled_as_a_whole() -> None:
    """Of a stream that fits in the buffer, each sample comes first for some seed."""
    assert {next(shuffled(Stream(10), 10, seed)) for seed in range(200)} == set(range(10))


def test_the_limits_of_blocks_differ_between_seeds() -> None:
    """Neighbours on both sides of a limit are shuffled together with another seed."""
    limits = set()
    for seed in range(50):
        got = list(shuffled(Stream(40), 10, seed))
        limits.add(next(stop for stop in range(11, 40) if set(got[10:stop]) == set(range(10, stop))))
    assert len(limits) > 5


@given(length=st.integers(1, 150), size=SIZES, seed=SEEDS, data=st.data())
def test_a_state_continues_the_order(length: int, size: int, seed: int, data: st.DataObject) -> None:
    """After any sample, the rest is the same, and less than two buffers of samples are read again."""
    whole = list(shuffled(Stream(length), size, seed))
    count = data.draw(st.integers(1, length))
    first_stream = Stream(length)
    first = shuffled(first_stream, size, seed)
    assert [next(first) for _ in range(count)] == whole[:count]
    state = first.state
    assert state is not None
    stream = Stream(length)
    second = shuffled(stream, size, seed, state)
    assert stream.position == first_stream.position
    assert stream.read < 2 * size
    assert second.state is None or second.state[:2] == state[:2]
    assert list(second) == whole[count:]


def test_a_failed_sample_is_shuffled_as_the_others() -> None:
    """The exception is raised in the place of the sample, and all others are yielded."""
    order = list(shuffled(Stream(20), 8))
    failing = shuffled(Stream(20, fails_at=3), 8)
    got: list[Any] = []
    while len(got) < 20:
        try:
            got.append(next(failing))
        except ValueError as error:
            got.append(str(error))
    assert got == ["sample 3" if sample == 3 else sample for sample in order]
    assert next(failing, None) is None


# --- In a shard ---------------------------------------------------------------------------------------------------


def shard(dataset: Any, saved: tuple[str, ...] = (), size: int = 6, batch_size: int = 4) -> Shard:
    """Return a shard with a shuffle buffer."""
    return Shard(dataset, batch_size, False, shuffle=ShuffleSettings(size, 5), saved=saved)


def batches(of: Shard, first: int = 0) -> list[Any]:
    """Return the batches from number `first` on; the text of an exception in place of a failed batch."""
    found: list[Any] = []
    while True:
        try:
            samples = of.fetch(first + len(found))
        except ValueError as error:
            found.append(str(error))
            continue
        if samples is None:
            return found
        found.append(samples)


class StatelessAtFirst(Stream):
    """Dataset whose state is available only during the iteration."""

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        if self.position == 0:
            raise RuntimeError("the iteration has not begun")
        return super().state_dict()


@pytest.mark.parametrize("kind", [Stream, StatelessAtFirst])
@pytest.mark.parametrize("fails_at", [None, 9])
def test_each_state_of_a_shard_continues_it(kind: type[Stream], fails_at: int | None) -> None:
    """From the state after any batch, the later batches are equal, and no other sample is read twice."""
    whole = batches(shard(kind(30, fails_at)))
    assert sum(len(batch) for batch in whole if isinstance(batch, list)) >= 26
    for number in range(len(whole)):
        before = shard(kind(30, fails_at))
        try:
            before.fetch(number)
        except ValueError:
            continue
        state = before.state()
        assert state is not None
        after = shard(kind(30, fails_at), (state,))
        assert batches(after, number + 1) == whole[number + 1 :]


def test_a_shard_without_state_is_iterated_again() -> None:
    """Batches are reached by counting, and there is no state."""
    whole = batches(shard(range(30)))
    assert sorted(chain.from_iterable(whole)) == list(range(30))
    for number in range(len(whole)):
        again = shard(range(30))
        assert again.fetch(number) == whole[number]
        assert again.state() is None
        assert batches(again, 1) == whole[1:]


def test_a_shard_cannot_go_back_beyond_its_state() -> None:
    """A dataset that was resumed cannot yield the samples before, also in the buffer's first block."""
    first = shard(StatelessAtFirst(30), size=3)
    first.fetch(4)
    state = first.state()
    assert state is not None
    resumed = shard(StatelessAtFirst(30), (state,), size=3)
    resumed.fetch(5)
    with pytest.raises(StateMismatch, match="cannot load batch 0 of the shard"):
        resumed.fetch(0)
