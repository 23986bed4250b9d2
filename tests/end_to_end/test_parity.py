"""Under the same seed, ``list(loader)`` equals that of torch's own loader for every type of sampler."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.contract import (
    SEED,
    Made,
    Noisy,
    Numbers,
    ShardedRange,
    assert_same,
    both,
    few_cpus_are_fine,
    narrow,
    ours,
    seed_everything,
    torch,
    torch_is_there,
    torchs,
)

__all__ = ["torch_is_there"]

Fresh = Callable[[], dict[str, Any]]


def _samplers() -> Any:
    """Return torch's module of samplers."""
    from torch.utils.data import sampler

    return sampler


class Downwards:
    """User-defined sampler without a length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._length - 1, -1, -1))


class Shuffling:
    """User-defined sampler that draws from all three generators of the process during iteration."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self._length):
            yield (random.randrange(100) + int(np.random.randint(100)) + int(torch.randint(100, ()))) % self._length

    def __len__(self) -> int:
        return self._length


class BySize:
    """User-defined batch sampler whose batches grow."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[list[int]]:
        first, size = 0, 1
        while first < self._length:
            yield list(range(first, min(first + size, self._length)))
            first, size = first + size, size + 1

    def __len__(self) -> int:
        return 4


def _generator() -> Any:
    return torch.Generator().manual_seed(99)


ORDERS: dict[str, Fresh] = {
    "in sequence": lambda: {"batch_size": 3},
    "ragged tail dropped": lambda: {"batch_size": 3, "drop_last": True},
    "tail that fits": lambda: {"batch_size": 5},
    "batch larger than the dataset": lambda: {"batch_size": 16},
    "no batch at all": lambda: {"batch_size": 16, "drop_last": True},
    "single samples": lambda: {"batch_size": None},
    "shuffled": lambda: {"batch_size": 3, "shuffle": True},
    "shuffled, tail dropped": lambda: {"batch_size": 4, "shuffle": True, "drop_last": True},
    "shuffled single samples": lambda: {"batch_size": None, "shuffle": True},
    "shuffled by a generator": lambda: {"batch_size": 3, "shuffle": True, "generator": _generator()},
    "a generator and nothing to shuffle": lambda: {"batch_size": 3, "generator": _generator()},
    "SequentialSampler": lambda: {"batch_size": 3, "sampler": _samplers().SequentialSampler(Numbers())},
    "RandomSampler": lambda: {"batch_size": 3, "sampler": _samplers().RandomSampler(Numbers())},
    "RandomSampler with replacement": lambda: {
        "batch_size": 4, "sampler": _samplers().RandomSampler(Numbers(), replacement=True, num_samples=77)
    },
    "RandomSampler of more samples than there are": lambda: {
        "sampler": _samplers().RandomSampler(Numbers(), num_samples=25), "batch_size": 4
    },
    "RandomSampler with a generator of its own": lambda: {
        "sampler": _samplers().RandomSampler(Numbers(), generator=_generator()), "batch_size": 4
    },
    "one generator for the sampler and the loader": lambda: (
        lambda one: {"sampler": _samplers().RandomSampler(Numbers(), generator=one), "generator": one}
    )(_generator()),
    "WeightedRandomSampler": lambda: {
        "batch_size": 4, "sampler": _samplers().WeightedRandomSampler([0.1, 0, 3, 1, 1, 1, 0, 1, 1, 2], 12)
    },
    "SubsetRandomSampler": lambda: {"batch_size": 2, "sampler": _samplers().SubsetRandomSampler([9, 1, 4, 4, 6])},
    "SubsetRandomSampler with a generator": lambda: {
        "batch_size": 2, "sampler": _samplers().SubsetRandomSampler([9, 1, 4, 6], generator=_generator())
    },
    "a list as sampler": lambda: {"batch_size": 2, "sampler": [3, 1, 2, 2, 9]},
    "NumPy's integers as sampler": lambda: {"batch_size": 2, "sampler": np.array([3, 1, 2])},
    "a tensor as sampler": lambda: {"batch_size": 2, "sampler": torch.tensor([3, 1, 2])},
    "a sampler of one's own": lambda: {"batch_size": 3, "sampler": Downwards(10)},
    "a sampler of one's own that draws": lambda: {"batch_size": 3, "sampler": Shuffling(10)},
    "a sampler of one's own, no batches": lambda: {"batch_size": None, "sampler": Shuffling(10)},
    "BatchSampler": lambda: {
        "batch_sampler": _samplers().BatchSampler(_samplers().RandomSampler(Numbers()), 4, drop_last=True)
    },
    "a batch sampler of one's own": lambda: {"batch_sampler": BySize(10)},
    "a batch sampler that is a list": lambda: {"batch_sampler": [[1, 2, 3], [0], (4, 5)]},
}  # fmt: skip


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ORDERS)
def test_batches_are_torchs(name: str, num_workers: int) -> None:
    """Two epochs and the final states of this process's generators equal torch's."""
    both(Numbers(), fresh=ORDERS[name], num_workers=num_workers)


@pytest.mark.parametrize("name", ["shuffled", "shuffled by a generator", "RandomSampler", "a sampler of one's own"])
def test_persistent_workers_change_the_order_from_the_second_epoch(name: str) -> None:
    """As in torch, the base seed is not drawn again, so that later random numbers differ."""
    persistent = both(Numbers(), fresh=ORDERS[name], num_workers=2, persistent_workers=True, epochs=4)
    others = both(Numbers(), fresh=ORDERS[name], num_workers=2, epochs=4)
    assert_same(persistent[0], others[0])
    if name in ("shuffled", "RandomSampler"):
        assert [torch.cat(epoch).tolist() for epoch in persistent[1:]] != [
            torch.cat(epoch).tolist() for epoch in others[1:]
        ]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("length", [3, 10])
def test_distributed_sampler_of_each_rank(length: int, shuffle: bool, drop_last: bool) -> None:
    """Each of four ranks has torch's indices, including padding, and set_epoch changes the order."""
    from torch.utils.data.distributed import DistributedSampler

    for rank in range(4):
        epochs = []
        for loader_of in (torchs, None):
            sampler = DistributedSampler(Numbers(length), 4, rank, shuffle=shuffle, seed=5, drop_last=drop_last)
            if loader_of is not None:
                loader = loader_of(Numbers(length), batch_size=2, sampler=sampler)
                epochs.append([(sampler.set_epoch(e), list(loader))[1] for e in (0, 1, 0)])
                continue
            with ours(Numbers(length), batch_size=2, sampler=sampler) as mine:
                epochs.append([(sampler.set_epoch(e), list(mine))[1] for e in (0, 1, 0)])
        assert_same(epochs[1], epochs[0], f"rank {rank}")


def test_samplers_that_give_lists_without_batching() -> None:
    """With ``batch_size=None`` each value of the sampler is an index, also a list, for bulk reading."""
    dataset = Made(lambda index: np.array(index) * 2)
    (epoch,) = both(dataset, batch_size=None, sampler=[[1, 2], [3], [4, 5, 6]], epochs=1)
    assert [batch.tolist() for batch in epoch] == [[2, 4], [6], [8, 10, 12]]
    both(
        dataset,
        batch_size=None,
        fresh=lambda: {"sampler": _samplers().BatchSampler(_samplers().RandomSampler(dataset), 4, drop_last=False)},
    )


@pytest.mark.parametrize("index", [(1, 2), "name", {"a": 1}, 2.5, None, slice(1, 3)], ids=repr)
def test_indices_of_any_kind(index: Any) -> None:
    """An index need not be an integer: ``__getitem__`` receives the sampler's value."""
    both(Made(repr), sampler=[index, index], batch_size=None)
    both(Made(repr), sampler=[index, index], batch_size=2)


def test_batch_samplers_of_lists_in_lists() -> None:
    """The indices of a batch may be tuples, as those of multi-scale samplers."""
    both(Made(lambda index: index[0] * index[1]), batch_sampler=[[(1, 2), (3, 4)], [(5, 6)]])


def test_an_endless_sampler() -> None:
    """An infinite sampler is used only as far as needed."""

    def endless() -> dict[str, Any]:
        return {"sampler": itertools.count(), "batch_size": 3}

    seed_everything()
    expected = list(itertools.islice(torchs(Made(lambda i: i % 7), **endless(), num_workers=2), 30))
    seed_everything()
    with ours(Made(lambda i: i % 7), **endless(), num_workers=2) as loader:
        got = list(itertools.islice(loader, 30))
    assert_same(got, expected)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_sampler_is_drawn_from_when_torch_draws_from_it(num_workers: int) -> None:
    """A sampler that shares generators with the training loop has the same effect as in torch."""

    def arguments() -> dict[str, Any]:
        return {"sampler": Shuffling(10), "batch_size": 2, "num_workers": num_workers}

    def loop(loader: Any) -> list[Any]:
        return [(batch.tolist(), float(torch.rand(1)), random.random()) for batch in loader]

    seed_everything()
    expected = loop(torchs(Numbers(), **arguments()))
    seed_everything()
    with ours(Numbers(), **arguments()) as loader:
        assert loop(loader) == expected


@pytest.mark.parametrize("name", ["shuffled", "shuffled by a generator", "RandomSampler", "in sequence"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_that_draws_by_itself(name: str, num_workers: int) -> None:
    """Random numbers that the loop draws between batches, and the batches, equal those with torch's loader."""
    results: list[Any] = []
    for loader_of in (torchs, None):
        seed_everything()
        found = []
        if loader_of is not None:
            loader = loader_of(Numbers(), num_workers=num_workers, **ORDERS[name]())
            found = [(batch.tolist(), float(torch.rand(1))) for _ in range(2) for batch in loader]
        else:
            with ours(Numbers(), num_workers=num_workers, **ORDERS[name]()) as mine:
                found = [(batch.tolist(), float(torch.rand(1))) for _ in range(2) for batch in mine]
        results.append(found)
    assert results[0] == results[1]


def test_a_loop_that_is_left_and_restarted() -> None:
    """``break`` and iter() start another epoch with new random numbers, as in torch."""
    results = []
    for loader_of in (torchs, None):
        seed_everything()
        if loader_of is not None:
            loader = loader_of(Numbers(), batch_size=2, shuffle=True, num_workers=2)
            results.append([next(iter(loader)).tolist() for _ in range(3)] + [b.tolist() for b in loader])
            continue
        with ours(Numbers(), batch_size=2, shuffle=True, num_workers=2) as mine:
            results.append([next(iter(mine)).tolist() for _ in range(3)] + [b.tolist() for b in mine])
    assert results[0] == results[1]


class Bulk(Numbers):
    """Dataset that reads several samples at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, int]]:
        assert type(indices) is list
        return [(index, len(indices)) for index in indices]

    def __getitem__(self, index: int) -> Any:
        return index, 0


@pytest.mark.parametrize("batch_size", [None, 1, 4])
def test_bulk_reading_is_used_where_there_is_any(batch_size: int | None) -> None:
    """``__getitems__`` is called with a batch's indices, and not without batching."""
    both(Bulk(), batch_size=batch_size, shuffle=True)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(7,), (5, 2), (0, 4), (4, 0, 3), (3, 3, 3), (5, 1, 2, 7), (0, 0, 0, 0)])
def test_streams_of_unequal_shards(sizes: tuple[int, ...], batch_size: int, drop_last: bool) -> None:
    """1 to 4 shards give the same batches in the same order, with their workers' random numbers of three generators."""
    both(Noisy(*sizes), num_workers=len(sizes), batch_size=batch_size, drop_last=drop_last)


@pytest.mark.parametrize("sizes", [(7,), (5, 2), (4, 0, 3), (1, 2, 3, 4)])
def test_streams_of_single_samples(sizes: tuple[int, ...]) -> None:
    """Streams without batching equal torch's."""
    both(Noisy(*sizes), num_workers=len(sizes), batch_size=None)


def test_streams_with_persistent_workers_and_generators() -> None:
    """Persistent workers continue their random numbers; a generator determines the base seed."""
    both(Noisy(5, 2), num_workers=2, batch_size=2, persistent_workers=True, epochs=3)
    both(Noisy(5, 2), num_workers=2, batch_size=2, fresh=lambda: {"generator": _generator()}, epochs=3)


@pytest.mark.parametrize("worker_init_fn", [None, narrow])
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3, 4])
def test_sharded_ranges(num_workers: int, worker_init_fn: Any) -> None:
    """Each worker yields its part of the stream; without workers there is one iteration."""
    if worker_init_fn is None or num_workers:
        both(ShardedRange(3, 40), num_workers=num_workers, batch_size=4)


def test_more_epochs_with_other_arguments_between() -> None:
    """Several loaders in one script use the same generator, one after another."""
    results: list[Any] = []
    for loader_of in (torchs, None):
        seed_everything(SEED + 1)
        found = []
        with few_cpus_are_fine():
            for arguments in ({"shuffle": True}, {"batch_size": 4}, {"shuffle": True, "num_workers": 2}):
                if loader_of is not None:
                    found.append([batch.tolist() for batch in loader_of(Numbers(), **arguments)])
                    continue
                with ours(Numbers(), **arguments) as mine:
                    found.append([batch.tolist() for batch in mine])
        results.append(found)
    assert results[0] == results[1]
