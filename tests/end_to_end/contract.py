"""Helpers for tests of torch's contract: running both loaders on one dataset, and the datasets."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from tests.conftest import need
from tests.end_to_end import compare

try:
    import torch
    from torch.utils.data import DataLoader as TorchLoader
    from torch.utils.data import Dataset, IterableDataset, get_worker_info
except ModuleNotFoundError:  # the tests skip
    torch = None
    TorchLoader = get_worker_info = None
    Dataset = IterableDataset = object

__all__ = ["Dataset", "IterableDataset", "TorchLoader", "get_worker_info", "torch"]  # and this module's definitions

SEED = 20


@pytest.fixture(autouse=True)
def torch_is_there() -> None:
    """Skip tests without torch, for modules that compare with it in every test."""
    need("torch")


# -- both loaders


def assert_same(got: Any, expected: Any, path: str = "batch") -> None:
    """Assert that containers, dtypes and bits are equal, including tensors and NaN."""
    compare.assert_same(got, expected, path)
    assert _bits(got) == _bits(expected), path


def _bits(batch: Any) -> Any:
    """Return the batch with each tensor replaced by its bytes, for comparison."""
    if isinstance(batch, torch.Tensor):
        plain = batch.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return str(batch.dtype), tuple(batch.shape), plain.view(torch.uint8).numpy().tobytes() if len(plain) else b""
    if isinstance(batch, dict):
        return [(key, _bits(item)) for key, item in batch.items()]
    if isinstance(batch, list | tuple):
        return [_bits(item) for item in batch]
    return repr(batch)


def seed_everything(seed: int = SEED) -> None:
    """Seed all generators, as a training script does at its start."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def torchs(dataset: Any, **arguments: Any) -> Any:
    """Return torch's loader, with forked workers on every platform and Python version, as in teleloader."""
    if arguments.get("num_workers"):
        arguments.setdefault("multiprocessing_context", "fork")
    return TorchLoader(dataset, **arguments)


@contextmanager
def ours(dataset: Any, *, serve_with: dict[str, Any] | None = None, **arguments: Any) -> Iterator[DataLoader]:
    """Yield a teleloader DataLoader with its own server."""
    with serve(dataset, **{"num_workers": 2, **(serve_with or {})}) as url:
        yield DataLoader(RemoteDataset(url), **arguments)


@contextmanager
def here(dataset: Any, *, serve_with: dict[str, Any] | None = None, **arguments: Any) -> Iterator[DataLoader]:
    """Yield a loader of the local object, which loads in the calling thread without workers."""
    assert not serve_with
    yield DataLoader(dataset, **arguments)


@contextmanager
def few_cpus_are_fine() -> Iterator[None]:
    """Ignore torch's warning of more workers than CPUs, and Python's warning of threads at a fork."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        yield


def random_states() -> tuple[Any, ...]:
    """Return the states of this process's generators."""
    numpys: Any = np.random.get_state()
    return random.getstate(), numpys[1].tobytes(), torch.get_rng_state()


def both(
    dataset: Any,
    *,
    epochs: int = 2,
    fresh: Callable[[], dict[str, Any]] = dict,
    serve_with: dict[str, Any] | None = None,
    **arguments: Any,
) -> list[list[Any]]:
    """Assert that both loaders yield the same epochs under the same seed, and leave the generators in the same state.

    Ours does so with a server and, without workers, also in the calling thread.

    Args:
        dataset: For both.
        epochs: How many to go through, one after another.
        fresh: Makes further arguments anew for each loader: generators, and samplers that have a state.
        serve_with: Arguments of `serve`.
        arguments: Of both loaders.

    Returns:
        What came, by epoch.
    """
    with few_cpus_are_fine():
        seed_everything()
        loader = torchs(dataset, **arguments, **fresh())
        expected = [list(loader) for _ in range(epochs)]
        state = random_states()
        del loader
        for place in (ours, here) if not arguments.get("num_workers") and not serve_with else (ours,):
            seed_everything()
            with place(dataset, serve_with=serve_with, **arguments, **fresh()) as our_loader:
                got = [list(our_loader) for _ in range(epochs)]
                ours_state = random_states()
            assert_same(got, expected, "epochs")
            assert ours_state[0] == state[0], "Python's generator was drawn from differently"
            assert ours_state[1] == state[1], "NumPy's generator was drawn from differently"
            assert ours_state[2].equal(state[2]), "torch's generator was drawn from differently"
    return got


def both_raise(kind: type[Exception], make: Callable[[Callable[..., Any], Any], Any], dataset: Any) -> str:
    """Assert that `make(loader class, dataset)` raises the same error with both loaders; return its message."""
    with pytest.raises(kind) as theirs:
        make(torchs, dataset)
    with serve(dataset) as url:
        for ours_too in (RemoteDataset(url), dataset):
            with pytest.raises(kind) as mine:
                make(DataLoader, ours_too)
            assert type(mine.value) is type(theirs.value)
            assert str(mine.value) == str(theirs.value)
    return str(theirs.value)


def workers_alive() -> list[psutil.Process]:
    """Return the running child processes of this process, and their children, without multiprocessing's own."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        try:
            is_tracker = "multiprocessing.resource_tracker" in " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and not is_tracker:
                alive.append(process)
        except psutil.NoSuchProcess:
            continue
    return alive


# -- datasets


class Numbers(Dataset):  # type: ignore[misc]
    """Dataset of the numbers [0, length)."""

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index


class Made(Numbers):
    """Dataset of `length` samples, which `make` computes from their index."""

    def __init__(self, make: Callable[[Any], Any], length: int = 10) -> None:
        super().__init__(length)
        self._make = make

    def __getitem__(self, index: Any) -> Any:
        return self._make(index)


class Noisy(IterableDataset):  # type: ignore[misc]
    """Shards of given sizes; each sample has its shard's number and random numbers of three generators."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        number = 0 if info is None else info.id
        for i in range(self.sizes[number]):
            yield {
                "place": (number, i),
                "python": random.random(),
                "numpy": np.random.normal(),
                "torch": torch.rand(2),
                "seed": 0 if info is None else info.seed,
            }


class Range(IterableDataset):  # type: ignore[misc]
    """Dataset of the numbers [start, end), which each worker yields completely: the naive stream of torch's guide."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


class SizedRange(Range):
    """Iterable-style dataset with a length."""

    def __len__(self) -> int:
        return self.end - self.start


def part(start: int, end: int, worker: int, num_workers: int) -> tuple[int, int]:
    """Return the worker's part of [start, end) by the formula of torch's documentation."""
    per_worker = -(-(end - start) // num_workers)
    first = start + worker * per_worker
    return first, max(first, min(first + per_worker, end))


class ShardedRange(SizedRange):
    """Dataset that each worker divides in ``__iter__``: the first recipe of torch's documentation."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None:
            return iter(range(self.start, self.end))
        return iter(range(*part(self.start, self.end, info.id, info.num_workers)))


def narrow(worker: int) -> None:
    """Reduce the replica itself: a worker_init_fn of torch's documentation."""
    info = get_worker_info()
    dataset = info.dataset
    dataset.start, dataset.end = part(dataset.start, dataset.end, worker, info.num_workers)


class ProcessIds(Numbers):
    """Dataset in which each sample is the PID of the process that computed it."""

    def __getitem__(self, index: int) -> Any:
        return os.getpid()


def a_sharded_range() -> ShardedRange:
    """Return the dataset: a factory for servers."""
    return ShardedRange(3, 40)


def a_sized_range() -> SizedRange:
    """Return the dataset: a factory for servers."""
    return SizedRange(3, 40)
