"""Datasets for servers behind bad networks: ``tests.faults.hosted:name``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Rows:
    """Dataset of rows of numbers, each of which contains its index.

    Args:
        length: How many rows.
        width: int64 numbers in each.
    """

    def __init__(self, length: int, width: int) -> None:
        self.table = np.arange(width, dtype=np.int64) * 2654435761 + np.arange(length)[:, None]

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        row: NDArray[np.int64] = self.table[index]
        return row


small = Rows(5000, 2)
"""Dataset for batches of a few hundred bytes."""
large = Rows(400, 2**13)
"""Dataset with 64 KiB per row."""
