"""A buffer is reused once no view of it exists, and not before."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from teleloader_shared.buffers import BufferPool
from tests.conftest import need


def address(array: NDArray[Any]) -> int:
    """Return the memory address of an array."""
    return int(array.ctypes.data)


def test_a_buffer_without_views_is_reused() -> None:
    """The memory is the same, so that its pages need not be allocated again."""
    pool = BufferPool()
    first = address(pool.take(10**6))
    assert address(pool.take(10**6)) == first


def test_a_view_keeps_its_buffer() -> None:
    """A view of any size, and any number of views of views, keeps the buffer."""
    pool = BufferPool()
    view = pool.take(10**6)[100:200].view(np.int32).reshape(5, 5)[1:]
    kept = address(view)
    view[:] = 7
    other = pool.take(10**6)
    other[:] = 0
    assert address(view) == kept
    assert (view == 7).all()


def test_a_tensor_keeps_its_buffer() -> None:
    """A tensor's storage keeps the array that it was created from."""
    need("torch")
    import torch

    pool = BufferPool()
    tensor = torch.from_numpy(pool.take(2**20)[:64])
    tensor.fill_(7)
    part = tensor[3:5]
    del tensor
    other = pool.take(2**20)
    other[:] = 0
    assert part.tolist() == [7, 7]
    where = part.data_ptr() - 3
    del part
    gc.collect()
    assert address(pool.take(2**20)) == where


@pytest.mark.parametrize("nbytes", [1, 63, 4096, 65_537, 10**6])
def test_buffers_are_aligned(nbytes: int) -> None:
    """Buffers are aligned to 64 bytes, as the arrays in a frame are."""
    buffer = BufferPool().take(nbytes)
    assert len(buffer) == nbytes
    assert address(buffer) % 64 == 0


def test_free_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free buffers in excess of the limit are returned to the system."""
    made = []

    def make(size: int) -> NDArray[np.uint8]:
        made.append(size)
        return np.empty(size, np.uint8)

    monkeypatch.setattr("teleloader_shared.buffers.allocate", make)
    pool = BufferPool(free_bytes=3 * 2**20)
    held = [pool.take(2**20 - 64) for _ in range(5)]
    del held
    again = [pool.take(2**20 - 64) for _ in range(5)]
    assert len(again) == 5
    assert len(made) == 7, "two of five were kept: each has room to align"


def test_much_too_large_buffers_are_not_taken() -> None:
    """A small batch does not use a large buffer."""
    pool = BufferPool()
    large = address(pool.take(10**7))
    assert address(pool.take(10**6)) != large
