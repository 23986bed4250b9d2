"""Decoding of a response to a request for batches."""

from __future__ import annotations

from itertools import chain

from teleloader_shared import codec
from teleloader_shared.codec import BatchId, End, Frame, Memory
from teleloader_shared.errors import CorruptFrame, ProtocolError
from teleloader_shared.ranges import BatchRanges


def decode(
    memory: Memory, first: BatchId, batches: BatchRanges, max_bytes: int, *, verified: int, has_shards: bool
) -> list[Frame]:
    """Decode a response, which must consist of one or more of the first requested batches.

    Args:
        memory: Body of the response.
        first: Identifier of any batch of the epoch.
        batches: Requested batches.
        max_bytes: Maximum total size of the arrays of a batch, in bytes.
        verified: Size of the frames at the start of `memory` whose checksums need not be verified.
        has_shards: Whether frames may state the end of a shard.

    Raises:
        CorruptFrame: If the response contains anything else.
    """
    frames = []
    loader, epoch, _ = first
    try:
        read = codec.read_all(memory, max_bytes, verified=verified)
        for frame, number in zip(read, chain(batches, [None]), strict=False):
            if number is None:
                raise CorruptFrame(f"received more than the {len(batches)} requested batches")
            if frame.batch_id != (loader, epoch, number):
                raise CorruptFrame(f"received {frame.batch_id}, expected {BatchId(loader, epoch, number)}")
            if isinstance(frame.content, End) and not has_shards:
                raise CorruptFrame(f"received the end of a shard, expected batch {number} of a map-style dataset")
            frames.append(frame)
    except ProtocolError as error:
        raise CorruptFrame(str(error)) from error
    if not frames:
        raise CorruptFrame("received no batch")
    return frames


def with_bytes(frames: list[Frame], memory: Memory) -> list[Frame]:
    """Return the frames of a response with their encoded bytes in `Frame.raw`, which are views of `memory`."""
    found, start = [], 0
    for frame in frames:
        stop = start + frame.nbytes
        found.append(frame._replace(raw=memory.data[start:stop]))
        start = stop
    return found
