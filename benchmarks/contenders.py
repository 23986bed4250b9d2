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
    """One way to get the batches of a workload."""

    @property
    def name(self) -> str:
        """What the table calls it."""

    @property
    def num_workers(self) -> int:
        """Processes that run the dataset."""

    @property
    def beside(self) -> str | None:
        """The contender that does the same in another order, if a ratio to it is wanted."""

    def open(self) -> AbstractContextManager[Iterator[Any]]:
        """Batches from batch 0; each is what the consumer would train on, and nobody looks into it."""

    def indices(self, count: int) -> Indices:
        """What the first `count` batches hold of that which `open` gave last."""


class Floor:
    """Plain sockets."""

    beside = None

    def __init__(self, workload: Workload, num_workers: int) -> None:
        self.name = f"floor, {counted(num_workers, 'worker')}"
        self.num_workers = num_workers
        self._workload = workload

    def open(self) -> AbstractContextManager[Iterator[Any]]:
        """Producer processes of its own."""
        return floor.floor(self._workload, self.num_workers)

    def indices(self, count: int) -> Indices:
        """The workload's own."""
        return in_turn(self._workload, count)


class Teleloader:
    """Our client, to torch tensors where torch is installed; the server runs all the time.

    The order is the plan's: its batches can be shared, so no index list is sent for them. The seed is another one in
    each run, so that nothing is of use that a server has kept of the one before.
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
        """The next epoch: what the server has kept of the one before is of no use."""
        self._epoch += 1
        self._loader.set_epoch(self._epoch)
        yield iter(self._loader)

    def indices(self, count: int) -> Indices:
        """Those of the plan."""
        plan = self._loader.plan(self._epoch)
        return [plan[k].tolist() for k in range(count)]


class TeleloaderShuffledHere:
    """The same with an order that is the client's: torch's RandomSampler draws it, and index lists are sent."""

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
        """The next epoch."""
        self._seed += 1
        with _torch_seeded(self._seed):
            batches = iter(self._loader)
            first = next(batches)  # now the order is drawn
        yield chain([first], batches)

    def indices(self, count: int) -> Indices:
        """Those of torch's own loader under the same seed."""
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
        if workload.whole_batches:  # torch has no other way: batches of indices as if they were samples
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
        """Workers of its own."""
        yield iter(self._loader)

    def indices(self, count: int) -> Indices:
        """The workload's own."""
        return in_turn(self._workload, count)


def contenders(workload: Workload, setting: Setting) -> list[Contender]:
    """All of them; the floor can send over loopback only."""
    found: list[Contender] = []
    for num_workers, url in setting.urls.items():
        if setting.is_local:
            found.append(Floor(workload, num_workers))
        found += [Teleloader(workload, url, num_workers, checksum=checksum) for checksum in (False, True)]
        if has_torch():
            found.append(TorchLocal(workload, num_workers))
        if has_torch() and workload is SMALL:  # what an order costs is a matter of small batches
            shuffled = Teleloader(workload, url, num_workers, shuffle=True)
            found += [shuffled, TeleloaderShuffledHere(workload, url, num_workers, shuffled.name)]
    return found


class InOrder:
    """A sampler: the workload's own order, which takes no time to be drawn."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def __iter__(self) -> Iterator[int]:
        return self._workload.order()

    def __len__(self) -> int:
        return EPOCH_BATCHES * self._workload.batch_size


class _ByIndexLists:
    """A dataset of whole batches, each indexed by what it holds."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, indices: list[int]) -> Any:
        return self._dataset.__getbatch__(np.array(indices))


def in_turn(workload: Workload, count: int) -> Indices:
    """What the first batches hold in the workload's own order."""
    order = workload.order()
    return [list(islice(order, workload.batch_size)) for _ in range(count)]


def has_torch() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


@contextmanager
def _torch_seeded(seed: int) -> Iterator[None]:
    """Torch's global generator begins at `seed` here, and is as it was before afterwards."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
