"""Who takes part. A contender opens a stream of batches; its processes are ended when the stream is closed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

from benchmarks import floor
from benchmarks.workloads import Workload

WORKERS: Final = (1, 2)


class Contender(Protocol):
    """One way to get the batches of a workload."""

    @property
    def name(self) -> str:
        """What the table calls it."""

    @property
    def num_workers(self) -> int:
        """Processes that run the dataset."""

    def open(self) -> AbstractContextManager[Iterator[Any]]:
        """Batches from batch 0; each is what the consumer would train on, and nobody looks into it."""


class Floor:
    """Plain sockets."""

    name = "floor"
    num_workers = 1

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def open(self) -> AbstractContextManager[Iterator[Any]]:
        """A producer process of its own."""
        return floor.floor(self._workload)


class Teleloader:
    """Our client, to torch tensors where torch is installed; the server runs all the time."""

    def __init__(self, workload: Workload, url: str, num_workers: int, *, checksum: bool) -> None:
        from teleloader import DataLoader, RemoteDataset

        self.name = f"teleloader, {_workers(num_workers)}{', checksum' if checksum else ''}"
        self.num_workers = num_workers
        dataset = RemoteDataset(url, workload.name)
        self._loader = DataLoader(dataset, batch_size=workload.batch_size, checksum=checksum)

    @contextmanager
    def open(self) -> Iterator[Iterator[Any]]:
        """The next epoch."""
        yield iter(self._loader)


class TorchLocal:
    """``torch.utils.data.DataLoader``: the same worker processes, without a network."""

    def __init__(self, workload: Workload, num_workers: int) -> None:
        import torch.utils.data

        self.name = f"torch local, {_workers(num_workers)}"
        self.num_workers = num_workers
        self._loader = torch.utils.data.DataLoader(
            workload.dataset(), batch_size=workload.batch_size, num_workers=num_workers
        )

    @contextmanager
    def open(self) -> Iterator[Iterator[Any]]:
        """Workers of its own."""
        yield iter(self._loader)


def contenders(workload: Workload, urls: Mapping[int, str]) -> list[Contender]:
    """All of them; `urls` are of running servers, by their number of workers."""
    found: list[Contender] = [Floor(workload)]
    for num_workers, url in urls.items():
        found += [Teleloader(workload, url, num_workers, checksum=checksum) for checksum in (False, True)]
        if has_torch():
            found.append(TorchLocal(workload, num_workers))
    return found


def has_torch() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"
