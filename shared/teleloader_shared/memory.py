"""Pageable frame buffers that return the arrays of a batch as NumPy arrays or torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from teleloader_shared import dtypes
from teleloader_shared.codec import Bits
from teleloader_shared.tree import MAX_DIMENSIONS


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

    def leaves(self, offsets: range, dtype_name: str, shape: tuple[int, ...], kind: str) -> list[Any]:
        """Return the NumPy view or scalar at each offset, all created at once."""
        if not _is_iterable(shape, kind):
            return super().leaves(offsets, dtype_name, shape, kind)
        arrays = _stacked(self.data, offsets, dtype_name, shape)
        return list(arrays.view(dtypes.extended_numpy(dtype_name)) if dtype_name in dtypes.EXTENDED else arrays)


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

    def leaves(self, offsets: range, dtype_name: str, shape: tuple[int, ...], kind: str) -> list[Any]:
        """Return the tensor, NumPy view or scalar at each offset, all created at once."""
        if kind != "tensor" or not _is_iterable(shape, kind):
            return super().leaves(offsets, dtype_name, shape, kind)
        import torch

        bits = _stacked(self.data, offsets, dtype_name, shape)
        # not unbind(), whose results share a version counter and a storage
        if dtype_name not in dtypes.EXTENDED:
            return list(map(torch.from_numpy, bits))
        integers = bits.view(np.int16 if bits.itemsize == 2 else np.uint8)
        return [torch.from_numpy(each).view(getattr(torch, dtype_name)) for each in integers]


def _is_iterable(shape: tuple[int, ...], kind: str) -> bool:
    """Return True if iterating over an array of such leaves returns the leaves.

    Iterating over a 1-D array returns scalars. NumPy limits the number of dimensions, and the product of the others if
    one is 0.
    """
    return kind == "scalar" if not shape else 0 not in shape and len(shape) < MAX_DIMENSIONS


def _stacked(data: NDArray[np.uint8], offsets: range, dtype_name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a view of the arrays at several offsets of `data`, stacked along a new first dimension."""
    storage = dtypes.storage(dtype_name)
    first: NDArray[Any] = np.ndarray(shape, storage, data, offsets.start)
    return np.ndarray((len(offsets), *shape), storage, data, offsets.start, (offsets.step, *first.strides))
