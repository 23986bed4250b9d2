"""Parsing of request bodies that contain index lists of batches, without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from typing import Final

from teleloader_server.loading.index_lists import Rules, checked_batch_id
from teleloader_shared import codec
from teleloader_shared.codec import BatchId
from teleloader_shared.errors import InvalidSpec, ProtocolError

MAX_FRAME_BYTES: Final = 16 * 2**20
"""Maximum size of one index list; 2**20 packed integers take 8 MiB."""


LISTS_TOGETHER: Final = 64
"""Maximum number of index lists that are checked in one iteration of the event loop."""


BYTES_TOGETHER: Final = 256 * 2**10
"""Size of an index list in bytes above which the event loop runs other tasks after validating the list."""


async def split(pieces: AsyncIterable[bytes], rules: Rules) -> tuple[BatchId, dict[int, bytes]]:
    """Split a request body into the index lists of ascending batches of one epoch, one frame per list.

    Yields to the event loop after large index lists, and after every `LISTS_TOGETHER` lists.

    Args:
        pieces: Pieces of the body.
        rules: Limits and types of index lists.

    Returns:
        The ID of the first batch, and the frames by batch number.

    Raises:
        InvalidSpec: If the lists are invalid, out of order or too many.
    """
    found: dict[int, bytes] = {}
    first = last = None
    async for frame in _frames(pieces):
        batch_id = checked_batch_id(frame, rules)
        if last is not None and not (batch_id[:2] == last[:2] and batch_id.batch > last.batch):
            raise InvalidSpec(f"invalid body: index list for {batch_id}, expected batch {last.batch + 1} or later")
        first, last = first or batch_id, batch_id
        if len(found) == rules.max_lists:
            raise InvalidSpec(
                f"too many index lists: the limit is {rules.max_lists:,} (max_batches_per_request). Send fewer lists"
            )
        found[batch_id.batch] = frame
        if len(found) % LISTS_TOGETHER == 0 or len(frame) > BYTES_TOGETHER:
            await asyncio.sleep(0)
    if first is None:
        raise InvalidSpec(f"empty body: expected index lists of 1 to {rules.max_lists:,} batches")
    return first, found


async def _frames(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the frames of a body without joining all its pieces: a join would block the event loop."""
    waiting = bytearray()
    async for piece in pieces:
        waiting += piece
        while len(waiting) >= codec.PROLOGUE_SIZE and len(waiting) >= (size := _size(waiting)):
            with memoryview(waiting) as view:
                frame = bytes(view[:size])
            del waiting[:size]
            yield frame
    if waiting:
        raise InvalidSpec(f"invalid body: the last frame is truncated after {len(waiting):,} bytes")


def _size(waiting: bytearray) -> int:
    try:
        size = codec.frame_size(memoryview(waiting))
    except ProtocolError as error:
        raise InvalidSpec(f"invalid body: {error}") from None
    if size > MAX_FRAME_BYTES:
        raise InvalidSpec(
            f"index list of {size:,} bytes exceeds the limit of {MAX_FRAME_BYTES:,} bytes: encode indices as an array"
        )
    return size
