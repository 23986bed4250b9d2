"""Contenders of the throughput benchmarks: a contender opens a stream of batches, and ends its processes with it."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np

from benchmarks import floor
from benchmarks.parts import Setting, counted
from benchmarks.workloads import EPOCH_BATCHES, SMALL, Workload

Indices = list[list[int]]


class Contender(Protocol):
    """Way to load the batches of a workload."""

    @property
    def name(self) -> str:
        """Name in tables."""

    @property
    def num_workers(self) -> int:
        """Number of processes that run the dataset."""

    @property
    def beside(self) -> str | None:
        """Contender that loads the same batches in the seeded order, for a ratio; None without comparison."""

    def open(self) -> AbstractContextManager[Iterator[Any]]:
        """Yield batches from batch 0, as a consumer would train on them."""

    def indices(self, count: int) -> Indices:
        """Return the indices of the first `count` batches of the stream that `open` returned last."""


class Floor:
    """Plain sockets, without a loader."""

    beside = None

    def __init__(self, workload: Workload, num_workers: int) -> None:
        self.name = f"floor, {counted(num_workers, 'worker')}"
        self.num_workers = num_workers
        self._workload = workload

    def open(self) -> AbstractContextManager[Iterator[Any]]:
        """Start producer processes."""
        return floor.floor(self._workload, self.num_workers)

    def indices(self, count: int) -> Indices:
        """Return the workload's own order."""
        return in_turn(self._workload, count)


class Teleloader:
    """teleloader in seeded order, with torch tensors if torch is installed; the server runs all the time.

    Each run has a new seed, so that the server has none of its batches buffered.
    """

    beside: str | None = None

    def __init__(
        self, workload: Workload, url: str, num_workers: int, *, checksum: bool = True, shuffle: bool = False
    ) -> None:
        from teleloader import DataLoader, RemoteDataset

        kind = ", shuffled" if shuffle else ", checksum" if checksum else ""
        self.name = f"teleloader, {counted(num_workers, 'worker')}{kind}"
        self.num_workers = num_workers
        self._loader = DataLoader(
            RemoteDataset(url, workload.name),
            batch_size=workload.batch_size,
            shuffle=shuffle or workload.shuffled,
            seed=secrets.randbits(63),
            checksum=checksum,
        )
        self._epoch = -1

    @contextmanager
    def open(self) -> Iterator[Iterator[Any]]:
        """Load the next epoch, of which the server has no batches buffered."""
        self._epoch += 1
        self._loader.set_epoch(self._epoch)
        yield iter(self._loader)

    def indices(self, count: int) -> Indices:
        """Return the indices of the seeded order."""
        plan = self._loader.plan(self._epoch)
        return [plan[k].tolist() for k in range(count)]


class TeleloaderShuffledHere:
    """teleloader with torch's RandomSampler, which generates the order in the client."""

    def __init__(self, workload: Workload, url: str, num_workers: int, beside: str) -> None:
        from teleloader import DataLoader, RemoteDataset

        self.name = f"teleloader, {counted(num_workers, 'worker')}, shuffled by the client"
        self.num_workers = num_workers
        self.beside: str | None = beside
        self._loader = DataLoader(RemoteDataset(url, workload.name), batch_size=workload.batch_size, shuffle=True)
        self._workload = workload
        self._seed = -1

    @contextmanager
    def open(self) -> Iterator[Iterator[Any]]:
        """Load the next epoch."""
        self._seed += 1
        with _torch_seeded(self._seed):
            batches = iter(self._loader)
            first = next(batches)  # generates the order
        yield chain([first], batches)

    def indices(self, count: int) -> Indices:
        """Return the indices of torch's loader with the same seed."""
        import torch.utils.data

        numbers: Any = range(len(self._workload.dataset()))
        with _torch_seeded(self._seed):
            local = torch.utils.data.DataLoader(numbers, batch_size=self._workload.batch_size, shuffle=True)
            return [batch.tolist() for batch in islice(local, count)]


class TorchLocal:
    """``torch.utils.data.DataLoader``: the same worker processes, without a network."""

    beside = None

    def __init__(self, workload: Workload, num_workers: int) -> None:
        import torch.utils.data

        self.name = f"torch local, {counted(num_workers, 'worker')}"
        self.num_workers = num_workers
        self._workload = workload
        options: dict[str, Any] = {"batch_size": workload.batch_size, "sampler": InOrder(workload)}
        dataset = workload.dataset()
        if workload.whole_batches:  # with torch, only a batch sampler in place of the sampler fetches whole batches
            dataset = _ByIndexLists(dataset)
            options = {
                "batch_size": None,
                "sampler": torch.utils.data.BatchSampler(InOrder(workload), workload.batch_size, drop_last=True),
            }
        self._loader = torch.utils.data.DataLoader(
            dataset, num_workers=num_workers, collate_fn=workload.collate_function, **options
        )

    @contextmanager
    def open(self) -> Iterator[Iterator[Any]]:
        """Start workers."""
        yield iter(self._loader)

    def indices(self, count: int) -> Indices:
        """Return the workload's own order."""
        return in_turn(self._workload, count)


def contenders(workload: Workload, setting: Setting) -> list[Contender]:
    """Return all contenders; the floor works over loopback only."""
    found: list[Contender] = []
    for num_workers, url in setting.urls.items():
        if setting.is_local:
            found.append(Floor(workload, num_workers))
        found += [Teleloader(workload, url, num_workers, checksum=checksum) for checksum in (False, True)]
        if has_torch():
            found.append(TorchLocal(workload, num_workers))
        if has_torch() and workload is SMALL:  # with large batches, the cost of the sampling order is not measurable
            shuffled = Teleloader(workload, url, num_workers, shuffle=True)
            found += [shuffled, TeleloaderShuffledHere(workload, url, num_workers, shuffled.name)]
    return found


class InOrder:
    """Sampler that yields the workload's own order without generating it."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def __iter__(self) -> Iterator[int]:
        return self._workload.order()

    def __len__(self) -> int:
        return EPOCH_BATCHES * self._workload.batch_size


class _ByIndexLists:
    """Dataset of whole batches, indexed by lists."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, indices: list[int]) -> Any:
        return self._dataset.__getbatch__(np.array(indices))


def in_turn(workload: Workload, count: int) -> Indices:
    """Return the indices of the first batches in the workload's own order."""
    order = workload.order()
    return [list(islice(order, workload.batch_size)) for _ in range(count)]


def has_torch() -> bool:
    """Return True if torch is installed."""
    return importlib.util.find_spec("torch") is not None


@contextmanager
def _torch_seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generator, and restore its state at the end."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
