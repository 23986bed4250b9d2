"""What is loaded: datasets that do no work, so that what is measured is the loader.

A server hosts them as ``benchmarks.workloads:wire`` and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

EPOCH_BATCHES: Final = 10**6


class InMemory:
    """Samples that stand in memory; sample i is row ``i % len(rows)``, so the dataset can be as long as one likes."""

    def __init__(self, rows: NDArray[Any], length: int) -> None:
        self._rows = rows
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[Any]:
        sample: NDArray[Any] = self._rows[index % len(self._rows)]
        return sample


@dataclass(frozen=True, slots=True)
class Workload:
    """A dataset and how it is batched."""

    name: str
    """Its factory's name in this module."""
    about: str
    batch_size: int
    sample_shape: tuple[int, ...]
    dtype: str
    rows: int
    """Different samples; no divisor of the batch size, so that neighbouring batches differ."""

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of a batch."""
        return (self.batch_size, *self.sample_shape)

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch's elements: what counts for every contender, whatever it sends around them."""
        return int(np.prod(self.batch_shape)) * np.dtype(self.dtype).itemsize

    def dataset(self) -> InMemory:
        """The dataset, longer than any run."""
        return InMemory(_rows(self), EPOCH_BATCHES * self.batch_size)

    def samples(self, dataset: InMemory, k: int) -> list[NDArray[Any]]:
        """The samples of batch k in their own order."""
        return [dataset[i] for i in range(k * self.batch_size, (k + 1) * self.batch_size)]


@cache
def _rows(workload: Workload) -> NDArray[Any]:
    shape = (workload.rows, *workload.sample_shape)
    size = int(np.prod(shape)) * np.dtype(workload.dtype).itemsize
    values = np.random.default_rng(0).integers(0, 64, size, np.uint8)  # as floats, these bytes hold no NaN
    return values.view(workload.dtype).reshape(shape)


WIRE: Final = Workload("wire", "38.5 MB batches: 256 images of 3x224x224, uint8", 256, (3, 224, 224), "uint8", rows=257)
SMALL: Final = Workload("small", "4 KB batches: one sample of 1024 float32", 1, (1024,), "float32", rows=1009)
WORKLOADS: Final = {workload.name: workload for workload in (WIRE, SMALL)}


def wire() -> InMemory:
    """Factory of the dataset of `WIRE`."""
    return WIRE.dataset()


def small() -> InMemory:
    """Factory of the dataset of `SMALL`."""
    return SMALL.dataset()
