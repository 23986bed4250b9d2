"""Pageable frame buffers that return the arrays of a batch as NumPy arrays or torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from teleloader_shared import dtypes
from teleloader_shared.codec import Bits


class NumpyMemory(Bits):
    """Pageable buffer for frames; returns their arrays as NumPy views, without a copy."""

    __slots__ = ()

    def leaf(self, offset: int, dtype_name: str, shape: tuple[int, ...], kind: str) -> Any:
        """Return a NumPy view of this memory, or a NumPy scalar; ml_dtypes provides the types that NumPy lacks.

        Raises:
            TeleloaderError: If ml_dtypes is needed and not installed.
        """
        array = super().leaf(offset, dtype_name, shape, kind)
        if dtype_name in dtypes.EXTENDED:
            array = array.view(dtypes.extended_numpy(dtype_name))
        return array[()] if kind == "scalar" else array


class TorchMemory(NumpyMemory):
    """Pageable buffer for frames; returns their tensors as torch views, and other leaves as `NumpyMemory` does."""

    __slots__ = ()

    def leaf(self, offset: int, dtype_name: str, shape: tuple[int, ...], kind: str) -> Any:
        """Return a torch or NumPy view of this memory, or a NumPy scalar, depending on `kind`."""
        if kind != "tensor":
            return super().leaf(offset, dtype_name, shape, kind)
        import torch

        bits = Bits.leaf(self, offset, dtype_name, shape, kind)
        if dtype_name not in dtypes.EXTENDED:
            return torch.from_numpy(bits)
        integers = bits.view(np.int16 if bits.itemsize == 2 else np.uint8)
        return torch.from_numpy(integers).view(getattr(torch, dtype_name))
