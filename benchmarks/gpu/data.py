"""The dataset: images of the size that ResNet-50 is trained with, for servers and for local loaders."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROWS: Final = 257
"""Number of different samples, which no batch size divides, so that consecutive batches differ."""
SHAPE: Final = (3, 224, 224)
SAMPLE_BYTES: Final = 3 * 224 * 224


class Images:
    """Pairs of an image (uint8 of 3x224x224) and its row number, in memory, so that loading only copies data."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        row = index % ROWS
        image: NDArray[np.uint8] = rows()[row]
        return image, row


class Samples:
    """The source of DALI's worker processes; it is here because they import this module, and not torch.

    Args:
        order: The row of each sample of the epoch.
    """

    def __init__(self, order: NDArray[np.int64]) -> None:
        self._order = order

    def __call__(self, sample: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return a sample by its position in the epoch."""
        if sample.idx_in_epoch >= len(self._order):
            raise StopIteration
        row = self._order[sample.idx_in_epoch]
        return rows()[row], np.array([row])


class Source(NamedTuple):
    """A dataset of a certain length."""

    name: str
    """Name on the server."""
    length: int

    @property
    def table(self) -> str:
        """The configuration of a server that hosts it."""
        return f'factory = "{__name__}:{Images.__name__}"\nkwargs = {{ length = {self.length} }}\n'


LONG: Final = Source("images", 2**17)
"""Dataset longer than any turn."""
SHORT: Final = Source("short", 2**11)
"""Dataset of a few batches, for the change of epochs."""


@cache
def rows() -> NDArray[np.uint8]:
    """Return all images."""
    return np.random.default_rng(0).integers(0, 256, (ROWS, *SHAPE), np.uint8)
