"""Typical collate functions for sequences."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


def pad_arrays(samples: Sequence[NDArray[np.int64]]) -> Mapping[str, Any]:
    """Return the sequences, padded with zeros, and their lengths."""
    ids = np.zeros((len(samples), max(map(len, samples))), np.int64)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample)] = sample
    return {"ids": ids, "lengths": np.array([len(sample) for sample in samples])}


def pad(samples: Sequence[NDArray[np.int64]]) -> Mapping[str, Any]:
    """Return the same as tensors if torch is installed, otherwise as arrays."""
    return {name: _tensor()(array) for name, array in pad_arrays(samples).items()}


@cache
def _tensor() -> Any:
    if importlib.util.find_spec("torch") is None:
        return np.asarray
    import torch

    return torch.from_numpy
