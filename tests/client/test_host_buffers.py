"""Memory of received responses: copied frames are recycled, and a small batch keeps no large buffer alive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from teleloader.tensors.memory import HostBuffers
from teleloader_shared import buffers, codec
from teleloader_shared.buffers import BufferPool
from teleloader_shared.codec import BatchId, Bits, to_bytes


def decoded(host: HostBuffers, frames: list[bytes]) -> list[Any]:
    """Return the batches of a response with these frames."""
    memory = host.take(sum(map(len, frames)), len(frames))
    memory.data[:] = np.frombuffer(b"".join(frames), np.uint8)
    return [frame.content for frame in codec.read_all(memory)]


def frames_of(sizes: list[int]) -> list[bytes]:
    """Return the frames of batches with one array of each size."""
    return [to_bytes(BatchId("key", 0, k), np.full(size, k % 256, np.uint8)) for k, size in enumerate(sizes)]


@pytest.mark.parametrize("size", [2000, 35_000, 250_000])
def test_the_memory_of_copied_frames_is_recycled(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """After the first responses, no response allocates memory, except for small frames that are decoded alone."""
    host = HostBuffers("numpy", BufferPool())
    frames = frames_of([size] * (2**21 // size))
    for _ in range(2):
        batches = decoded(host, frames)
        assert [batch[0] for batch in batches] == [k % 256 for k in range(len(frames))]
        del batches
    allocated: list[int] = []
    allocate = buffers.allocate

    def counted(nbytes: int) -> buffers.Buffer:
        allocated.append(nbytes)
        return allocate(nbytes)

    monkeypatch.setattr(buffers, "allocate", counted)
    monkeypatch.setattr(Bits, "allocate", None)
    for _ in range(5):
        decoded(host, frames)
    assert allocated == []


def test_a_response_with_one_frame_is_not_copied() -> None:
    """A server may send fewer batches than were requested; its only frame is used where it was received."""
    (frame,) = frames_of([100_000])
    memory = HostBuffers("numpy", BufferPool()).take(len(frame), 8)
    memory.data[:] = np.frombuffer(frame, np.uint8)
    (decoded_frame,) = codec.read_all(memory)
    assert np.shares_memory(decoded_frame.content, memory.data)


def test_a_small_frame_keeps_no_pooled_buffer_alive() -> None:
    """A frame that is decoded alone has memory of its own size."""
    for batch in decoded(HostBuffers("numpy", BufferPool()), frames_of([1000, 5000, 2000])):
        owner = batch
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        assert owner.nbytes < batch.nbytes + 1000
        assert owner.base is None
