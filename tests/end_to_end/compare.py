"""Bitwise comparison of batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np


def assert_same(got: Any, expected: Any, path: str = "batch") -> None:
    """Assert that containers, dtypes and bits are equal."""
    assert type(got).__name__ == type(expected).__name__, f"{path}: {type(got)} is not {type(expected)}"
    if isinstance(expected, dict):
        assert list(got) == list(expected), path
        for key in expected:
            assert_same(got[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), path
        for i, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_same(one, other, f"{path}[{i}]")
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype, path
        assert got.shape == expected.shape, path
        assert got.tobytes() == expected.tobytes(), path
    elif type(expected).__module__ == "torch":
        assert got.dtype == expected.dtype, path
        assert got.shape == expected.shape, path
        assert _bits(got) == _bits(expected), path
    elif hasattr(expected, "to_dict"):  # a graph
        assert_same(got.to_dict(), expected.to_dict(), path)
    else:
        assert got == expected, path


def _bits(tensor: Any) -> bytes:
    import torch

    dense = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    bits: bytes = dense.view(torch.uint8).numpy().tobytes()
    return bits


def reference(dataset: Any, plan: Sequence[Any], collate: Any) -> Iterator[Any]:
    """Yield the batches of the loop that a loader must equal."""
    for indices in plan:
        yield collate([dataset[i] for i in indices.tolist()])
