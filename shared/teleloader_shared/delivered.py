"""Shard progress of an iterable-style dataset, with a digest of the delivered batches.

After a worker exits, its successor iterates the dataset again, from the last saved state or from the start: within a
session, or in a new session if the server no longer has the old one. Server and client keep the same record, and a
replay with a different digest is an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from teleloader_shared.codec import PROLOGUE_SIZE
from teleloader_shared.errors import StateMismatch
from teleloader_shared.text import short

_INVALID: Final = "invalid record of delivered batches {}: send the saved [epoch, [first, next, digest, state], ...]"


class Delivered(NamedTuple):
    """Progress of one shard of an iterable-style dataset in an epoch."""

    first: int
    """First delivered batch, numbered within the shard from 0; not 0 if the iteration was resumed."""
    next: int
    """Next batch to deliver, numbered within the shard; equal to `first` if batches were requested, but none was
    delivered."""
    digest: int
    """Rolling digest (`extended`) of the frames of [first, next), without failures and ends."""
    state: str | None
    """Shard state after the last delivered batch; before the first one, the last state in the previous epoch."""

    @property
    def is_empty(self) -> bool:
        """True if batches were requested, but none was delivered."""
        return self.next == self.first


def extended(digest: int, frame: NDArray[np.uint8], *, checksum: bool) -> int:
    """Return the rolling digest of delivered frames, updated with another frame.

    Args:
        digest: Digest of the preceding frames, 0 for the first frame.
        frame: The frame to add.
        checksum: Whether the frame's prologue holds a checksum of the rest of the frame.
    """
    content = frame[:PROLOGUE_SIZE] if checksum else frame
    return xxhash.xxh3_64_intdigest(content.data, seed=digest)


def pack(epoch: int, shards: Sequence[Delivered | None]) -> str:
    """Encode the progress of all shards in an epoch as text; None stands for a shard without requests."""
    return json.dumps([epoch, *shards], separators=(",", ":"))


def unpack(text: str, shard: int) -> tuple[int, Delivered | None]:
    """Decode the text of `pack`: return the epoch, and the progress of one shard (None if the shard had no requests).

    Raises:
        StateMismatch: If the text does not have the format of `pack`.
    """
    try:
        packed = json.loads(text)
        epoch, entry = packed[0], packed[1 + shard]
        first, stop, digest, state = (0, 0, 0, None) if entry is None else entry
    except (ValueError, RecursionError, LookupError, TypeError):
        raise StateMismatch(_INVALID.format(short(text))) from None
    if not all(type(number) is int for number in (epoch, first, stop, digest)) or not isinstance(state, str | None):
        raise StateMismatch(_INVALID.format(short(text)))
    return epoch, None if entry is None else Delivered(first, stop, digest, state)
