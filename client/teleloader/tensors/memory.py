"""Host memory for received responses, either pageable or page-locked.

Pageable memory is recycled by a pool. Page-locked memory must not be: a copy to an accelerator with
``non_blocking=True`` reads the memory after Python has deleted the tensor, and only torch's allocator knows when such a
copy has ended. The allocator records the stream of each copy from one of its storages, and reuses the block after the
operations that the stream had queued. Pinned batches are therefore tensors on the storage that torch allocated, and
this module neither keeps nor recycles the storage.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from teleloader.tensors.output import Output
from teleloader.tensors.pinned import PinnedBudget
from teleloader_shared.buffers import SMALLEST, BufferPool, allocate
from teleloader_shared.codec import Bits, Memory
from teleloader_shared.memory import NumpyMemory, TorchMemory
from teleloader_shared.tree import Tensor


class MarkedMemory(NumpyMemory):
    """Pageable buffer for frames; returns their tensors as NumPy arrays of type `Tensor`, which become JAX arrays."""

    __slots__ = ()

    def leaf(self, offset: int, dtype_name: str, shape: tuple[int, ...], kind: str) -> Any:
        """Return a NumPy scalar, or a NumPy view of this memory, of type `Tensor` if the dataset returned a tensor."""
        array = super().leaf(offset, dtype_name, shape, kind)
        return array.view(Tensor) if kind == "tensor" else array

    def leaves(self, offsets: range, dtype_name: str, shape: tuple[int, ...], kind: str) -> list[Any]:
        """Return what `leaf` returns for each offset."""
        return Bits.leaves(self, offsets, dtype_name, shape, kind)


class PinnedMemory(Bits):
    """Page-locked buffer for frames, from torch's allocator; returns their tensors as views that share its storage.

    NumPy arrays are copied to pageable memory: if a user created a tensor from a view, torch's allocator would not
    record the asynchronous copies of that tensor. (torch's DataLoader does not pin NumPy arrays either.)

    Args:
        block: 1-D uint8 tensor, contiguous, on a storage of torch's pinned allocator.
        buffers: Allocator of the memory for copied and decompressed arrays.
    """

    __slots__ = ("_buffers", "_storage")

    def __init__(self, block: Any, buffers: HostBuffers) -> None:
        super().__init__(block.numpy())
        self._storage = block.untyped_storage()
        self._buffers = buffers

    def allocate(self, nbytes: int) -> Memory:
        """Allocate page-locked memory, or pageable memory if the budget is exhausted."""
        return self._buffers.allocate(nbytes)

    def leaf(self, offset: int, dtype_name: str, shape: tuple[int, ...], kind: str) -> Any:
        """Return a torch tensor that views this memory, or a copy if the leaf is a NumPy array or scalar."""
        bits = super().leaf(offset, dtype_name, shape, kind)
        if kind != "tensor":
            return NumpyMemory(bits.reshape(-1).view(np.uint8).copy()).leaf(0, dtype_name, shape, kind)
        import torch

        strides = [stride // bits.itemsize for stride in bits.strides]
        # set_() and not a slice: slices of one tensor share its version counter, so after an in-place change of the
        # labels autograd would reject the images that a model saved for its backward pass
        tensor = torch.empty(0, dtype=getattr(torch, dtype_name), device="cpu")
        return tensor.set_(self._storage, offset // bits.itemsize, shape, strides)


class _Scratch(Bits):
    """Pageable buffer for a response with several batches, whose frames are copied to memory of their own."""

    __slots__ = ("_buffers",)

    def __init__(self, data: NDArray[np.uint8], buffers: HostBuffers) -> None:
        super().__init__(data)
        self._buffers = buffers

    def frame(self, start: int, nbytes: int) -> Memory:
        """Copy frames to newly allocated memory, except for pageable frames that fill this buffer."""
        if nbytes == len(self.data) and self._buffers.pinned is None:
            return self._buffers.pageable(self.data)
        memory = self._buffers.allocate(nbytes)
        memory.data[:] = self.data[start : start + nbytes]
        return memory


_PAGEABLE: Final[dict[Output, type[NumpyMemory]]] = {"torch": TorchMemory, "numpy": NumpyMemory, "jax": MarkedMemory}


def pageable_memory(output: Output, data: NDArray[np.uint8]) -> Memory:
    """Return a `Memory` over `data` that creates the arrays for the library `output`."""
    return _PAGEABLE[output](data)


class HostBuffers:
    """Thread-safe allocator of host memory for the responses of one iterator.

    Args:
        output: Array library of the batches.
        pool: Pool of pageable memory.
        pinned: Allocator of page-locked memory; None to use pageable memory only.
    """

    def __init__(self, output: Output, pool: BufferPool, pinned: PinnedBudget | None = None) -> None:
        self._output: Output = output
        self._pool = pool
        self.pinned = pinned
        self.pin_seconds = 0.0
        """Total duration of the allocations of page-locked memory, in seconds."""
        self.unpinned = 0
        """Number of allocations of pageable memory because the budget for page-locked memory was exhausted."""
        self._lock = threading.Lock()
        """Guards the counters: an iterator has a receiving thread for each server."""

    def take(self, nbytes: int, batches: int) -> Memory:
        """Allocate memory for a response of `nbytes` bytes with up to `batches` batches."""
        return _Scratch(self._pool.take(nbytes), self) if batches > 1 else self.allocate(nbytes)

    def pageable(self, data: NDArray[np.uint8]) -> Memory:
        """Return a `Memory` over pageable bytes."""
        return pageable_memory(self._output, data)

    def allocate(self, nbytes: int) -> Memory:
        """Allocate page-locked memory, or pageable memory if none is requested or its budget is exhausted."""
        if self.pinned is None:
            # the pool's smallest buffer would keep more memory alive than a small frame needs
            return self.pageable(self._pool.take(nbytes) if nbytes >= SMALLEST else allocate(nbytes))
        began = time.perf_counter()
        block = self.pinned.allocate(nbytes)
        with self._lock:
            self.pin_seconds += time.perf_counter() - began
            self.unpinned += block is None
        if block is None:
            return self.pageable(self._pool.take(nbytes))
        return PinnedMemory(block, self)
