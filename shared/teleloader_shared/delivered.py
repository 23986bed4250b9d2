"""Progress of the shards of an iterable-style dataset, with a digest of the delivered batches.

A worker iterates a dataset again where its predecessor is gone: within a session, or in a new one after the server has
forgotten it. Servers and clients keep the same record, and a replay that comes to another digest is an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from teleloader_shared.codec import PROLOGUE_SIZE
from teleloader_shared.errors import StateMismatch


class Delivered(NamedTuple):
    """Progress of a shard in an epoch."""

    first: int
    """The first batch of the shard that was delivered: a resumed pass begins there."""
    next: int
    """The batch of the shard after the last that was delivered."""
    digest: int
    """`extended` over the frames of [first, next), without failures and ends."""
    state: str | None
    """The shard state of the last."""


def extended(digest: int, frame: NDArray[np.uint8], *, checksum: bool) -> int:
    """Return the rolling digest after one more frame.

    Args:
        digest: That of the frames before, 0 if there are none.
        frame: The frame.
        checksum: Whether the frame's prologue holds a checksum of all the rest.
    """
    content = frame[:PROLOGUE_SIZE] if checksum else frame
    return xxhash.xxh3_64_intdigest(content.data, seed=digest)


def pack(epoch: int, shards: Sequence[Delivered | None]) -> str:
    """Return the text form of what was delivered of the shards in an epoch, None for nothing."""
    return json.dumps([epoch, *shards], separators=(",", ":"))


def unpack(text: str, epoch: int, shard: int) -> Delivered | None:
    """Return what was delivered of a shard; None if the text is of another epoch.

    Raises:
        StateMismatch: If `pack` did not make the text.
    """
    try:
        packed = json.loads(text)
        if packed[0] != epoch or packed[1 + shard] is None:
            return None
        first, stop, digest, state = packed[1 + shard]
    except (ValueError, RecursionError, LookupError, TypeError):
        raise StateMismatch("invalid record of delivered batches: register with what the client kept") from None
    if not all(type(number) is int for number in (first, stop, digest)) or not isinstance(state, str | None):
        raise StateMismatch("invalid record of delivered batches: register with what the client kept")
    return Delivered(first, stop, digest, state)
