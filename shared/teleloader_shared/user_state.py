"""Text form of a user's state: what ``state_dict()`` of a dataset or sampler returned, as a frame in base64.

JSON would change tuples, tensors, NumPy numbers and integer keys without an error, so states use the tree of batches
(docs/protocol.md, "The tree"), which keeps the types of all values or names the path of the value that it cannot keep.
Clients keep the text without looking into it; a loader's own ``state_dict()`` stays JSON.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

import numpy as np

from teleloader_shared import codec
from teleloader_shared.codec import Address, Bits, Failure
from teleloader_shared.errors import BatchTooLarge, CorruptFrame, EncodeError, ProtocolError, StateMismatch
from teleloader_shared.memory import TorchMemory
from teleloader_shared.spec import MAX_STATES

_NO_BATCH: Final = Address("", 0, 0)
"""States are frames of no batch."""
_CANNOT_BE_KEPT: Final = (
    "the state of {} cannot be saved: {}. Return a smaller or plainer state_dict(), or remove the method: then a "
    "resumed loader iterates from the beginning"
)


def pack(state: object, limit: int | None = MAX_STATES, owner: str = "an iterable-style dataset") -> str:
    """Encode a state.

    A state that cannot be kept becomes a text that `unpack` refuses with the reason: the batches that it travels with
    are valid, and the user learns the reason where the state is used.

    Args:
        state: Any value that can be in a batch.
        limit: Characters that the text may have; None for any number.
        owner: The object whose state it is, for the error message.
    """
    try:
        text = _encode(state)
    except (EncodeError, BatchTooLarge) as error:
        return _encode_error(owner, str(error))
    if limit is not None and len(text) > limit:
        return _encode_error(owner, f"it takes {len(text):,} characters, and the limit is {limit:,}")
    return text


def unpack(text: str) -> Any:
    """Decode a state; its arrays and tensors are writable copies.

    Raises:
        StateMismatch: When the text is damaged, or the state could not be kept when it was saved.
    """
    return _read(text, TorchMemory)


def check(text: str) -> None:
    """Raise what `unpack` would, without making arrays: a client may have no torch.

    Raises:
        StateMismatch: When the text is damaged, or the state could not be kept.
    """
    _read(text, Bits)


def _read(text: str, kind: type[Bits]) -> Any:
    try:
        raw = np.frombuffer(bytearray(base64.b64decode(text, validate=True)), np.uint8)
        found = codec.read(kind(raw), max(MAX_STATES, len(raw))).content
    except (binascii.Error, ValueError, ProtocolError, CorruptFrame) as error:
        raise StateMismatch(
            f"invalid state of a dataset or sampler: {error}. Resume from an undamaged checkpoint"
        ) from None
    if isinstance(found, Failure):
        raise StateMismatch(found.message)
    return found


def _encode(content: object) -> str:
    return base64.b64encode(codec.to_bytes(_NO_BATCH, content, name="state")).decode()


def _encode_error(owner: str, reason: str) -> str:
    return _encode(Failure(StateMismatch.__name__, _CANNOT_BE_KEPT.format(owner, reason), "", [], -1))
