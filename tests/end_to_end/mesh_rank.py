"""Functions that the tests of device meshes call on each rank, and their datasets."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from teleloader import DataLoader, LoaderTimeout, RemoteDataset
from teleloader_server import get_worker_info

LENGTH = 96
MeshShape = tuple[tuple[int, ...], tuple[str, ...]]
"""Sizes and names of the dims of a mesh."""

loaders: dict[str, Any] = {}
"""Loaders and iterators that a rank keeps between calls."""


class Noisy:
    """Map-style dataset: the index, a random number and an image."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        return {"index": index, "noise": np.random.random(), "image": torch.rand(3, 8, 8)}


class Odd(Noisy):
    """Dataset whose length is not a multiple of the number of ranks."""

    def __len__(self) -> int:
        return LENGTH + 1


class Failing(Noisy):
    """Dataset that raises an exception for sample 40."""

    def __getitem__(self, index: int) -> Any:
        """Return a sample, or raise."""
        if index == 40:
            raise KeyError(f"no sample {index}")
        return super().__getitem__(index)


class Large:
    """Dataset with samples of 4 MiB, of which a buffer holds few."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        return torch.full((2**20,), index, dtype=torch.int32)


class Slow(Noisy):
    """Dataset whose samples take time."""

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        time.sleep(0.02)
        return super().__getitem__(index)


class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
    """Iterable-style dataset, divided among the shards, the last of which is shorter."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of a shard."""
        info = get_worker_info()
        assert info is not None
        for index in range(info.id, 21, info.num_workers):
            yield torch.tensor([index, int(np.random.randint(2**31))])


class Stateful(Stream):
    """Stream whose state is its position."""

    def __init__(self) -> None:
        self._next = 0
        self._resumed = False

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a position."""
        self._next, self._resumed = state["next"], True

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of a shard."""
        info = get_worker_info()
        assert info is not None
        start, self._resumed = self._next if self._resumed else info.id, False
        for index in range(start, 21, info.num_workers):
            self._next = index + info.num_workers
            yield torch.tensor([index, 0])


def device_mesh(mesh: MeshShape) -> Any:
    """Create a mesh of CPUs."""
    shape, names = mesh
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def create(
    name: str, url: str, dataset: str, mesh: MeshShape, remote: Mapping[str, Any] | None = None, **options: Any
) -> None:
    """Create a loader, and keep it under a name; `remote` are options of the dataset."""
    loaders[name] = DataLoader(RemoteDataset(url, dataset, **(remote or {})), mesh=device_mesh(mesh), **options)


def as_bytes(value: Any) -> Any:
    """Return a batch with the types and bytes of its tensors."""
    if isinstance(value, dict):
        return {key: as_bytes(each) for key, each in value.items()}
    return str(value.dtype), tuple(value.shape), value.numpy().tobytes()


def indices(batch: Any) -> list[int]:
    """Return the sample indices of a batch."""
    found: list[int] = (batch["index"] if isinstance(batch, dict) else batch[:, 0]).tolist()
    return found


def digest(batch: Any) -> str:
    """Return a digest of the types, shapes and bytes of a batch."""
    return hashlib.sha256(repr(as_bytes(batch)).encode()).hexdigest()


def epoch(name: str, count: int | None = None) -> list[tuple[list[int], str]]:
    """Iterate over a loader, up to a number of batches; return the indices and the digest of each batch."""
    return [(indices(batch), digest(batch)) for batch in itertools.islice(loaders[name], count)]


def epoch_with_errors(name: str) -> list[Any]:
    """Iterate over a loader; return the digest of each batch, or the exception in its place."""
    found: list[Any] = []
    iterator = iter(loaders[name])
    while True:
        try:
            found.append(digest(next(iterator)))
        except StopIteration:
            return found
        except Exception as error:  # noqa: BLE001 - part of the result
            found.append((type(error).__qualname__, str(error)))


def begin(name: str) -> int:
    """Start an epoch, and return the number of batches."""
    loaders[f"{name} iterator"] = iterator = iter(loaders[name])
    return len(iterator)


def proceed(name: str, count: int | None = None) -> list[list[int]]:
    """Return the indices of the next batches of the epoch that `begin` started."""
    return [indices(batch) for batch in itertools.islice(loaders[f"{name} iterator"], count)]


def alternate(*names: str) -> dict[str, list[list[int]]]:
    """Advance loaders in turn, until one of them ends; return the indices of each one's batches."""
    found: dict[str, list[list[int]]] = {name: [] for name in names}
    for batches in zip(*(loaders[f"{name} iterator"] for name in names), strict=False):
        for name, batch in zip(names, batches, strict=True):
            found[name].append(indices(batch))
    return found


def proceed_until_timeout(name: str) -> int:
    """Return the number of batches before the one that does not arrive in time."""
    for count in itertools.count():
        try:
            next(loaders[f"{name} iterator"])
        except LoaderTimeout:
            return count
    raise AssertionError


def change_in_place(name: str) -> list[int]:
    """Add 1 to each element of the first batch as soon as it arrives; return its sum before."""
    sums = []
    for batch in loaders[name]:
        sums.append(int(batch.sum(dtype=torch.int64)))
        batch += 1
    return sums


def state(name: str) -> str:
    """Return the state of a loader as JSON."""
    return json.dumps(loaders[name].state_dict(), sort_keys=True)


def restore(name: str, text: str) -> None:
    """Load a state from JSON."""
    loaders[name].load_state_dict(json.loads(text))


def set_epoch(name: str, number: int) -> None:
    """Select the next epoch."""
    loaders[name].set_epoch(number)


def facts(name: str) -> dict[str, Any]:
    """Return the length of a loader, its visits and counters of the last epoch."""
    loader = loaders[name]
    stats = loader.stats()
    return {
        "length": len(loader), "visits": int(loader.visits().sum()), "steps": stats.steps, "batches": stats.batches,
        "bytes": stats.bytes_received,
    }  # fmt: skip


def objects(mesh: MeshShape) -> list[str]:
    """Iterate over a dataset object of each rank."""
    return [digest(batch) for batch in DataLoader(Noisy(), 8, num_workers=1, mesh=device_mesh(mesh))]


def on_device(url: str, mesh: MeshShape) -> list[tuple[int, ...]]:
    """Return the bytes of each batch as a kernel of the simulated accelerator reads them."""
    from tests.gpu import simulated

    with pytest.MonkeyPatch.context() as patch, simulated.machine(patch) as machine:
        loader = DataLoader(RemoteDataset(url, "large"), mesh=device_mesh(mesh), device=simulated.NAME)
        snapshots = []
        for batch in loader:
            assert hasattr(batch, "simulated_device")
            snapshots.append(machine.snapshot(batch))
        machine.finish()
        return [tuple(np.unique(snapshot)) for snapshot in snapshots]


def numpy_arrays(url: str, mesh: MeshShape) -> list[Any]:
    """Return the first batch as NumPy arrays."""
    loader = DataLoader(RemoteDataset(url, "noisy"), 8, mesh=device_mesh(mesh), output="numpy")
    batch = next(iter(loader))
    return [type(batch["image"]).__name__, batch["image"].tobytes()]
