"""The contract's rules on iterable-style datasets: replicas, shards, lengths and their warnings."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from tests.conftest import StartServer
from tests.end_to_end.contract import (
    IterableDataset,
    Noisy,
    Numbers,
    Range,
    ShardedRange,
    SizedRange,
    assert_same,
    both,
    both_raise,
    few_cpus_are_fine,
    get_worker_info,
    narrow,
    ours,
    torch,
    torch_is_there,
    torchs,
)

__all__ = ["torch_is_there"]


def _flat(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


def _warned(loader: Any, *, ask_length: bool = False, epochs: int = 1) -> tuple[list[Any], list[str]]:
    """Return a loader's batches and its warnings, except those on the number of workers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if ask_length:
            len(loader)
        got = [batch for _ in range(epochs) for batch in loader]
    texts = [str(warning.message) for warning in caught]
    return got, [text for text in texts if "will create" not in text and "fork" not in text]


# -- replicas and shards


@pytest.mark.parametrize("num_workers", [2, 3])
def test_replicas_duplicate_the_data(num_workers: int) -> None:
    """A13: without sharding each worker yields every sample in turn, as in torch: [3], [3], [4], [4] ..."""
    with few_cpus_are_fine():
        expected = list(torchs(Range(3, 7), num_workers=num_workers))
        with ours(Range(3, 7), num_workers=num_workers) as loader:
            got, _ = _warned(loader)
    assert_same(got, expected)
    assert _flat(got) == [number for number in range(3, 7) for _ in range(num_workers)]


def test_duplicates_are_warned_of_once() -> None:
    """A13: each loader warns once of duplicates, with the server and both remedies."""
    with serve(Range(3, 7)) as url:
        _, (text,) = _warned(DataLoader(RemoteDataset(url), num_workers=2), epochs=3)
        assert url in text
        assert "get_worker_info().id" in text
        assert "worker_init_fn" in text


@pytest.mark.parametrize("worker_init_fn", [None, narrow], ids=["__iter__", "worker_init_fn"])
def test_shards_are_no_duplicates(worker_init_fn: Any) -> None:
    """A13: a dataset that is sharded in either way causes no warning."""
    dataset = ShardedRange(3, 20) if worker_init_fn is None else SizedRange(3, 20)
    with ours(dataset, num_workers=2, worker_init_fn=worker_init_fn) as loader:
        assert _warned(loader, epochs=2)[1] == []


class Guide(SizedRange):
    """Dataset that is sharded by a formula with a misplaced parenthesis, as in some guides."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None:
            return iter(range(self.start, self.end))
        per_worker = int(math.ceil(self.end - self.start) / float(info.num_workers))
        first = self.start + info.id * per_worker
        return iter(range(first, min(first + per_worker, self.end)))


def test_shards_take_turns() -> None:
    """A14: batch j comes from worker j mod W: [3], [35], [67], [4], [36], [68] ..."""
    (epoch,) = both(Guide(3, 99), num_workers=3, epochs=1)
    assert _flat(epoch)[:6] == [3, 35, 67, 4, 36, 68]


@pytest.mark.parametrize("sizes", [(5, 2), (0, 3), (2, 0, 4), (1, 4, 0, 2), (0, 0)])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_ended_shards_are_skipped(sizes: tuple[int, ...], batch_size: int) -> None:
    """A14: the other shards continue in turn, and the epoch ends with the last of them."""
    (epoch,) = both(Noisy(*sizes), num_workers=len(sizes), batch_size=batch_size, epochs=1)
    assert sum(len(batch["seed"]) for batch in epoch) == sum(sizes)


def test_each_worker_batches_alone() -> None:
    """A14: every shard may have a short batch, and drop_last drops them all."""

    class EvenAndOdd(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            return iter(range(info.id, 10, info.num_workers))

    (epoch,) = both(EvenAndOdd(), num_workers=2, batch_size=3, epochs=1)
    assert [batch.tolist() for batch in epoch] == [[0, 2, 4], [1, 3, 5], [6, 8], [7, 9]]
    (epoch,) = both(EvenAndOdd(), num_workers=2, batch_size=3, drop_last=True, epochs=1)
    assert [batch.tolist() for batch in epoch] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_init_may_narrow_the_replica_once(persistent_workers: bool) -> None:
    """A15: worker_init_fn changes the worker's own copy once: a second epoch is not narrowed again."""
    dataset = SizedRange(3, 40)
    epochs = both(
        dataset, num_workers=3, worker_init_fn=narrow, persistent_workers=persistent_workers, epochs=3, batch_size=2
    )
    assert [sorted(_flat(epoch)) for epoch in epochs] == [[*range(3, 40)]] * 3
    assert (dataset.start, dataset.end) == (3, 40)


@pytest.mark.parametrize(("num_workers", "covered"), [(3, 96), (10, 90)])
def test_shards_that_do_not_meet_are_warned_of(num_workers: int, covered: int) -> None:
    """A16: a wrong formula gives torch's samples, and a warning of lost ones, which torch lacks."""
    with few_cpus_are_fine():
        expected = list(torchs(Guide(3, 100), num_workers=num_workers))
        with ours(Guide(3, 100), num_workers=num_workers) as loader:
            got, (text,) = _warned(loader)
    assert_same(got, expected)
    assert len(got) == covered
    assert f"reported to be 97, but only {covered} samples have been fetched from its {num_workers} shards" in text


def test_the_documented_formula_covers_all() -> None:
    """A16: with torch's own formula, every sample arrives without a warning."""
    for num_workers in (1, 2, 3, 4, 10):
        with few_cpus_are_fine(), ours(ShardedRange(3, 100), num_workers=num_workers) as loader:
            got, texts = _warned(loader)
        assert sorted(_flat(got)) == [*range(3, 100)]
        assert texts == []


def test_the_plan_of_a_map_style_dataset_is_exactly_once() -> None:
    """A16: the plan of a map-style dataset can be audited in advance."""
    with ours(Numbers(97), batch_size=4, shuffle=True, seed=3) as loader:
        assert all(count == 1 for count in _counts(loader.plan(0)))
        assert sorted(_flat(loader)) == [*range(97)]


def _counts(plan: Any) -> list[int]:
    counts = [0] * 97
    for k in range(len(plan)):
        for index in plan[k]:
            counts[index] += 1
    return counts


def test_a_dataset_that_does_not_check_for_worker_info() -> None:
    """A17: without workers get_worker_info() is None; code that ignores this fails as in torch, with a hint."""

    class Forgetful(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            return iter(range(get_worker_info().id, 4))

    message = "'NoneType' object has no attribute 'id'"
    with pytest.raises(AttributeError, match=message):
        list(torchs(Forgetful()))
    with ours(Forgetful()) as loader, pytest.raises(AttributeError, match=message) as raised:
        list(loader)
    assert "num_workers" in str(raised.value), "the hint"
    with few_cpus_are_fine():
        both(Forgetful(), num_workers=3)


# -- shuffling of streams


class Buffered(IterableDataset):  # type: ignore[misc]
    """Dataset with a shuffle buffer, as users write it."""

    def __init__(self, source: Any, size: int) -> None:
        self._source = source
        self._size = size

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for sample in self._source:
            if len(buffer) == self._size:
                yield buffer.pop(random.randrange(len(buffer)))
            buffer.append(sample)
        random.shuffle(buffer)
        yield from buffer


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_shuffle_buffer_in_the_stream(num_workers: int) -> None:
    """A39: a stream shuffles itself with its worker's seed in torch's order, differently in each epoch."""
    first, second = both(Buffered(ShardedRange(0, 40), 8), num_workers=num_workers, batch_size=4)
    assert sorted(_flat(first)) == sorted(_flat(second)) == [*range(40)]
    assert _flat(first) != _flat(second)


def test_batch_sizes_are_the_clients() -> None:
    """A39: clients of one dataset choose their batch sizes, for map-style and iterable-style datasets."""
    for dataset in (Numbers(12), Range(0, 12)):
        with serve(dataset) as url:
            for size in (1, 5, 12):
                shapes = [len(batch) for batch in DataLoader(RemoteDataset(url), size)]
                assert shapes == [size] * (12 // size) + ([12 % size] if 12 % size else [])


def test_a_stream_takes_no_order() -> None:
    """A34: shuffle, sampler and batch_sampler are rejected for a stream with torch's text."""
    both_raise(ValueError, lambda make, data: make(data, shuffle=True), Range(0, 3))
    both_raise(ValueError, lambda make, data: make(data, sampler=[1]), Range(0, 3))
    both_raise(ValueError, lambda make, data: make(data, batch_sampler=[[1]]), Range(0, 3))
    both(Range(0, 3), shuffle=False)


# -- lengths


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, None])
def test_lengths_are_torchs(batch_size: int | None, drop_last: bool) -> None:
    """A41: ``len(loader)`` is computed from the stream's own length, for any number of workers."""
    if batch_size is None and drop_last:
        return
    arguments: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
    for num_workers in (0, 2):
        with ours(SizedRange(0, 10), num_workers=num_workers, **arguments) as loader:
            assert len(loader) == len(torchs(SizedRange(0, 10), num_workers=num_workers, **arguments))


def test_a_stream_without_a_length_has_none() -> None:
    """A41: ``len(loader)`` raises TypeError, as in torch."""
    message = both_raise(TypeError, lambda make, data: len(make(data)), Range(0, 3))
    assert message == "object of type 'Range' has no len()"


class Liar(Range):
    """Dataset that yields more samples than its length."""

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("ask_length", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_too_many_samples_are_warned_of_as_in_torch(num_workers: int, ask_length: bool) -> None:
    """A16: after len(loader), each excess batch causes torch's warning, with the dataset's name."""
    with few_cpus_are_fine():
        expected, texts = _warned(torchs(Liar(0, 6), num_workers=num_workers), ask_length=ask_length)
        with ours(Liar(0, 6), num_workers=num_workers, worker_init_fn=_nothing) as loader:
            got, our_texts = _warned(loader, ask_length=ask_length)
    assert_same(got, expected)
    assert len(our_texts) == len(texts)
    for mine, theirs in zip(our_texts, texts, strict=True):
        assert mine.partition(" was reported")[2] == theirs.partition(" was reported")[2]


def _nothing(_: int) -> None:
    """Do nothing: a worker_init_fn that prevents the warning of duplicates."""


# -- torch's combinations, and recipes


def test_chained_streams() -> None:
    """A18: torch's ChainDataset of two streams works."""
    from torch.utils.data import ChainDataset

    both(ChainDataset([ShardedRange(0, 5), ShardedRange(7, 10)]), num_workers=2, batch_size=2)


def test_plain_generators_as_streams() -> None:
    """A18: a stream needs ``__iter__`` only, and may be a generator function."""

    class Lines(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for i in range(5):
                yield {"text": f"line {i}", "length": torch.tensor(i)}

    with ours(Lines(), batch_size=2) as loader:
        assert_same(list(loader), list(torchs(Lines(), batch_size=2)))


def test_an_error_ends_a_shard_and_not_the_others() -> None:
    """A14: a generator that raised has ended, as in torch; other shards continue."""

    class Breaks(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            for i in range(4):
                if info.id == 0 and i == 1:
                    raise ValueError("damaged")
                yield 10 * info.id + i

    def outcomes(loader: Any) -> list[Any]:
        iterator, found = iter(loader), []
        while True:
            try:
                found.append(next(iterator).tolist())
            except ValueError as error:
                found.append(str(error).splitlines()[0])
            except StopIteration:
                return found

    with ours(Breaks(), num_workers=2) as loader:
        assert outcomes(loader) == outcomes(torchs(Breaks(), num_workers=2))


@pytest.mark.parametrize("recipe", ["__iter__", "worker_init_fn"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_both_recipes_on_a_server_elsewhere(
    start_server: StartServer, tmp_path: Any, recipe: str, num_workers: int
) -> None:
    """A43: the two ways to shard a stream work on a server that imports them by name."""
    config = tmp_path / "server.toml"
    factory = "a_sharded_range" if recipe == "__iter__" else "a_sized_range"
    config.write_text(
        f'[datasets.stream]\nfactory = "tests.end_to_end.contract:{factory}"\n'
        'functions = ["tests.end_to_end.contract:narrow"]\n'
    )
    server = start_server("--config", str(config))
    init: dict[str, Any] = {} if recipe == "__iter__" else {"worker_init_fn": narrow}
    loader = DataLoader(RemoteDataset(server.url), batch_size=4, num_workers=num_workers, **init)
    dataset = ShardedRange(3, 40) if recipe == "__iter__" else SizedRange(3, 40)
    for _ in range(2):
        assert_same(list(loader), list(torchs(dataset, batch_size=4, num_workers=num_workers, **init)))
