"""The package ``my_package`` of the documentation, with all objects that its pages name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from teleloader_server import get_worker_info


class Images:
    """A few pairs of an image and a label."""

    def __init__(self, length: int = 640) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        return np.full((8, 8, 3), index % 256, np.uint8), index % 10


class Stream:
    """Each worker gives its part of the samples."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, 640, step))


train = Images()
validation = Images(128)
stream = Stream()


def make_dataset(split: str) -> Images:
    """Return a dataset by its name."""
    return {"train": train, "validation": validation}[split]


def stack(samples: list[Any]) -> list[NDArray[Any]]:
    """A collate function."""
    return [np.stack(column) for column in zip(*samples, strict=True)]


def pad_batch(samples: list[Any]) -> list[NDArray[Any]]:
    """Return a padded batch."""
    return stack(samples)


def open_files(worker: int) -> None:
    """Run once in a worker before its first batch."""
