"""The consumers: the arguments of each loader, and its expected batches, computed from the dataset without a server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from teleloader import DataLoader, RemoteDataset
from teleloader_server.loading.random_state import seed_all
from teleloader_shared.orders.plan import Plan
from teleloader_shared.orders.seeding import derive_seed
from teleloader_shared.spec import LoaderSpec
from tests.chaos import dataset


class Strides:
    """Sampler that yields every seventh sample, then the others, from a start that depends on the epoch."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Select the start of an epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return dataset.LENGTH

    def __iter__(self) -> Iterator[int]:
        positions = np.arange(dataset.LENGTH)
        order: NDArray[np.int64] = np.argsort((positions + self._epoch) % 7, kind="stable")
        return iter(order.tolist())


@dataclass(frozen=True)
class Role:
    """Arguments and expected batches of one consumer."""

    name: str
    batch_size: int
    step: float
    """Seconds per training step."""
    ranks: int = 1
    own_order: bool = False
    augmented: bool = False

    def loader(self, urls: list[str], seed: int, reconnect_timeout: float, stall_timeout: float) -> DataLoader:
        """Return the consumer's loader."""
        name = "augmented" if self.augmented else "plain"
        remote = RemoteDataset(urls, name, reconnect_timeout=reconnect_timeout, stall_timeout=stall_timeout)
        if self.own_order:
            return DataLoader(remote, self.batch_size, sampler=Strides(), num_workers=2, output="numpy")
        place: dict[str, Any] = {"rank": self.ranks - 1, "world_size": self.ranks} if self.ranks > 1 else {}
        return DataLoader(remote, self.batch_size, shuffle=True, seed=seed, output="numpy", **place)

    def train(self) -> None:
        """Run a training step."""
        time.sleep(self.step)

    def expected(self, seed: int, epoch: int) -> list[int]:
        """Return the digests of an epoch's batches."""
        return [
            dataset.digest(self._batch(seed, epoch, k, indices)) for k, indices in enumerate(self._order(seed, epoch))
        ]

    def difference(self, seed: int, epoch: int, k: int, got: dict[str, Any]) -> str:
        """Return the difference between a batch and the expected one as a text."""
        expected = self._batch(seed, epoch, k, self._order(seed, epoch)[k])
        return "; ".join(f"{name}: {_difference(array, got.get(name))}" for name, array in expected.items())

    def _batch(self, seed: int, epoch: int, k: int, indices: list[int]) -> dict[str, Any]:
        if self.augmented:
            seed_all(derive_seed("batch", seed, epoch, self.ranks - 1, k))
        samples = _samples(self.augmented)
        return dataset.collate([samples[index] for index in indices])

    def _order(self, seed: int, epoch: int) -> list[list[int]]:
        if self.own_order:
            strides = Strides()
            strides.set_epoch(epoch)
            order = list(strides)
            return [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        spec = LoaderSpec(
            dataset="reference", batch_size=self.batch_size, shuffle=True, seed=seed,
            rank=self.ranks - 1, world_size=self.ranks,
        )  # fmt: skip
        return [indices.tolist() for indices in Plan(spec, dataset.LENGTH, epoch)]


@cache
def _samples(augmented: bool) -> dataset.Samples:
    return dataset.Samples(augmented=augmented)


def _difference(expected: NDArray[Any], got: Any) -> str:
    if got is None or got.dtype != expected.dtype or got.shape != expected.shape:
        return f"is {got!r:.300}, not {expected!r:.300}"
    places = np.flatnonzero(got != expected)
    if not len(places):
        return "right"
    first = places[0]
    return f"{len(places)} of {len(got)} differ, from {first} on: {got[first:][:16]}, not {expected[first:][:16]}"


ROLES: Final = (
    Role("plan", batch_size=16, step=0.005),
    Role("sampler", batch_size=24, step=0.03, own_order=True),
    Role("rank 1 of 2", batch_size=4, step=0.001, ranks=2, augmented=True),
    Role("shared memory", batch_size=320, step=0.05),  # 1.3 MB: servers lend batches of at least 1 MiB
)
