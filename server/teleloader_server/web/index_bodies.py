"""Request bodies that list the indices of batches: split into frames, without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from typing import Final

from teleloader_server.loading.index_lists import Rules, checked_address
from teleloader_shared import codec
from teleloader_shared.codec import Address
from teleloader_shared.errors import InvalidSpec, ProtocolError

MAX_FRAME_BYTES: Final = 16 * 2**20
"""Bytes of one list: 2**20 packed integers take 8 MiB."""


LISTS_TOGETHER: Final = 64
"""Lists that are checked in one turn of the event loop."""


BYTES_TOGETHER: Final = 256 * 2**10
"""Their bytes: further lists are checked in the next turn."""


async def split(pieces: AsyncIterable[bytes], rules: Rules) -> tuple[Address, dict[int, bytes]]:
    """The frames of a body, by batch, each of which must list the indices of the batch after the one before.

    Other tasks run between lists of which there are many, or large ones.

    Args:
        pieces: The body.
        rules: What the frames may hold.

    Returns:
        The first one's address, and the frames.

    Raises:
        InvalidSpec: When they do not.
    """
    found: dict[int, bytes] = {}
    first: Address | None = None
    async for frame in _frames(pieces):
        address = checked_address(frame, rules)
        first = first or address
        due = first._replace(batch=first.batch + len(found))
        if address != due:
            raise InvalidSpec(f"the body lists the indices of {address} in the place of batch {due.batch}")
        if len(found) == rules.max_lists:
            raise InvalidSpec(
                f"the body lists the indices of more than {rules.max_lists:,} batches (max_batches_per_request)"
            )
        found[due.batch] = frame
        if len(found) % LISTS_TOGETHER == 0 or len(frame) > BYTES_TOGETHER:
            await asyncio.sleep(0)
    if first is None:
        raise InvalidSpec(f"the body must list the indices of 1 to {rules.max_lists:,} batches, lists none")
    return first, found


async def _frames(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The frames in a body. It is never joined as a whole: 64 MiB would take longer than the event loop may be held."""
    waiting = bytearray()
    async for piece in pieces:
        waiting += piece
        while len(waiting) >= codec.PROLOGUE_SIZE and len(waiting) >= (size := _size(waiting)):
            with memoryview(waiting) as view:
                frame = bytes(view[:size])
            del waiting[:size]
            yield frame
    if waiting:
        raise InvalidSpec(f"the body lists no indices: its last frame is cut off after {len(waiting):,} bytes")


def _size(waiting: bytearray) -> int:
    try:
        size = codec.frame_size(memoryview(waiting))
    except ProtocolError as error:
        raise InvalidSpec(f"the body lists no indices: {error}") from None
    if size > MAX_FRAME_BYTES:
        raise InvalidSpec(f"an index list of {size:,} bytes exceeds the limit of {MAX_FRAME_BYTES:,} bytes")
    return size
