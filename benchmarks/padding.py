"""A typical collate function for sequences: returns tensors if torch is installed, otherwise arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    from torch import from_numpy as tensor
except ModuleNotFoundError:

    def tensor(array: NDArray[Any]) -> NDArray[Any]:
        """Return the array itself."""
        return array


def pad(samples: Sequence[NDArray[np.int64]]) -> dict[str, Any]:
    """Return the sequences, padded with zeros, and their lengths."""
    ids = np.zeros((len(samples), max(map(len, samples))), np.int64)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample)] = sample
    return {"ids": tensor(ids), "lengths": tensor(np.array([len(sample) for sample in samples]))}
