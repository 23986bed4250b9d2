"""Contenders of the throughput benchmarks: a contender opens a stream of batches, and ends its processes with it."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice
from typing import Any

import numpy as np

from benchmarks import floor
from benchmarks.measuring import Contender, Indices
from benchmarks.parts import Setting
from benchmarks.peers import taking_part
from benchmarks.processes import Hosting, cpu_seconds
from benchmarks.workloads import EPOCH_BATCHES, SMALL, WIRE, Workload

FLOOR = "floor"
COMPUTING = "socket, computing"
TORCH = "torch local"


class Socket:
    """Plain sockets.

    Args:
        workload: The workload.
        producers: Number of processes that compute batches; 0 for the floor, whose frames are prepared.
    """

    beside = None

    def __init__(self, workload: Workload, producers: int) -> None:
        self.name = COMPUTING if producers else FLOOR
        self._workload = workload
        self._producers = producers

    def open(self) -> AbstractContextManager[Iterator[Any]]:
        """Start producer processes."""
        return floor.receiving(self._workload, self._producers)

    def indices(self, count: int) -> None:
        """Return None: frames have the right size, but no header."""

    def server_cpu(self) -> None:
        """Return None."""


class Teleloader:
    """teleloader in seeded order, with torch tensors if torch is installed; the server runs all the time.

    Each run has a new seed, so that the server has none of its batches buffered.
    """

    beside: str | None = None

    def __init__(self, workload: Workload, server: Hosting, variant: str = "", **arguments: Any) -> None:
        from teleloader import DataLoader, RemoteDataset

        self.name = f"teleloader{variant}"
        self._pid = server.pid
        self._loader = DataLoader(
            RemoteDataset(server.url, workload.name, ca=server.ca),
            **{
                "batch_size": workload.batch_size, "shuffle": workload.shuffled, "seed": secrets.randbits(63),
                **arguments,
            },
        )  # fmt: skip
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

    def server_cpu(self) -> float | None:
        """Return the CPU time of the server."""
        return None if self._pid is None else cpu_seconds(self._pid)


class TeleloaderShuffledHere:
    """teleloader with torch's RandomSampler, which generates the order in the client."""

    def __init__(self, workload: Workload, server: Hosting, beside: str) -> None:
        from teleloader import DataLoader, RemoteDataset

        self.name = "teleloader, shuffled by the client"
        self.beside: str | None = beside
        self._loader = DataLoader(
            RemoteDataset(server.url, workload.name), batch_size=workload.batch_size, shuffle=True
        )
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

    def server_cpu(self) -> None:
        """Return None."""


class InProcess:
    """``DataLoader(dataset)``: the loader hosts the dataset object in this process, in ascending order."""

    beside = None

    def __init__(self, workload: Workload) -> None:
        from teleloader import DataLoader

        self.name = "DataLoader(object)"
        self._workload = workload
        self._loader = DataLoader(workload.dataset(), workload.batch_size, num_workers=workload.num_workers)

    @contextmanager
    def open(self) -> Iterator[Iterator[Any]]:
        """Start workers."""
        yield iter(self._loader)

    def indices(self, count: int) -> Indices:
        """Return the workload's own order."""
        return list(islice(self._workload.batches(), count))

    def server_cpu(self) -> None:
        """Return None: server and client are one process."""


class Served:
    """``serve(dataset)`` in this process, with a loader in seeded order."""

    beside = None

    def __init__(self, workload: Workload) -> None:
        self.name = "serve(object)"
        self._workload = workload

    @contextmanager
    def open(self) -> Iterator[Iterator[Any]]:
        """Start the server and its workers."""
        from teleloader_server import serve

        workload = self._workload
        with serve(workload.dataset(), name=workload.name, num_workers=workload.num_workers) as url:
            self._loader = Teleloader(workload, Hosting(url))
            with self._loader.open() as batches:
                yield batches

    def indices(self, count: int) -> Indices:
        """Return the indices of the seeded order."""
        return self._loader.indices(count)

    def server_cpu(self) -> None:
        """Return None: server and client are one process."""


class TorchLocal:
    """``torch.utils.data.DataLoader``: the same worker processes, without a network."""

    beside = None

    def __init__(self, workload: Workload) -> None:
        import torch.utils.data

        self.name = TORCH
        self._workload = workload
        options: dict[str, Any] = {"batch_size": workload.batch_size, "sampler": InOrder(workload)}
        dataset = workload.dataset()
        if workload.whole_batches:  # with torch, only a batch sampler in place of the sampler fetches whole batches
            dataset = ByIndexLists(dataset)
            options = {
                "batch_size": None,
                "sampler": torch.utils.data.BatchSampler(InOrder(workload), workload.batch_size, drop_last=True),
            }
        self._loader = torch.utils.data.DataLoader(
            dataset, num_workers=workload.num_workers, collate_fn=workload.collate_function, **options
        )

    @contextmanager
    def open(self) -> Iterator[Iterator[Any]]:
        """Start workers."""
        yield iter(self._loader)

    def indices(self, count: int) -> Indices:
        """Return the workload's own order."""
        return list(islice(self._workload.batches(), count))

    def server_cpu(self) -> None:
        """Return None."""


def contenders(workload: Workload, setting: Setting) -> list[Contender]:
    """Return all contenders; the floor, TLS and local hosting need a server on this machine."""
    server = setting.servers.get(workload.num_workers)
    found: list[Contender] = [Teleloader(workload, server)]
    if setting.is_local:
        found[:0] = [Socket(workload, 0), Socket(workload, workload.num_workers)]
    if workload is WIRE:
        found.append(Teleloader(workload, server, ", without checksum", checksum=False))
        if setting.is_local:
            found += [
                Teleloader(workload, setting.servers.get(workload.num_workers, tls=True), ", TLS"),
                Teleloader(workload, setting.servers.get(workload.num_workers, lends=True), ", same host"),
                InProcess(workload),
                Served(workload),
            ]
    found += taking_part(setting.peers, workload)
    if has_torch():
        found.append(TorchLocal(workload))
        if workload is SMALL:  # with large batches, the cost of the sampling order is not measurable
            shuffled = Teleloader(workload, server, ", shuffled", shuffle=True)
            found += [shuffled, TeleloaderShuffledHere(workload, server, shuffled.name)]
    return found


class InOrder:
    """Sampler that yields the workload's own order without generating it."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def __iter__(self) -> Iterator[int]:
        return self._workload.order()

    def __len__(self) -> int:
        return EPOCH_BATCHES * self._workload.batch_size


class ByIndexLists:
    """Dataset of whole batches, indexed by lists."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, indices: list[int]) -> Any:
        return self._dataset.__getbatch__(np.array(indices))


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
