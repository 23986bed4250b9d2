"""Text encoding for the ``state_dict()`` of a user's dataset or sampler: a frame in base64.

JSON would silently change tuples, tensors, NumPy numbers and integer keys. States therefore use the tree encoding of
batches (docs/protocol.md, "Tree encoding"), which preserves the types of all values or reports the path of a value
that it cannot encode. The result is text, so that the ``state_dict()`` of a loader, which contains it, is valid JSON.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

import numpy as np

from teleloader_shared import codec
from teleloader_shared.codec import BatchId, Bits, Failure
from teleloader_shared.errors import BatchTooLarge, CorruptFrame, EncodeError, ProtocolError, StateMismatch
from teleloader_shared.memory import TorchMemory
from teleloader_shared.spec import MAX_STATES

_NO_BATCH: Final = BatchId("", 0, 0)
"""Placeholder: the frame of a state does not belong to a batch."""
_CANNOT_BE_KEPT: Final = (
    "cannot save the state of {}: {}. Alternatively, remove the method state_dict(): a resumed loader then iterates "
    "from the beginning"
)


def pack(state: object, limit: int | None = MAX_STATES, owner: str = "an iterable-style dataset") -> str:
    """Encode a ``state_dict()`` as text.

    If the state cannot be encoded, the text holds the error instead, and `unpack` raises it. The batch that the state
    is sent with is still valid, and the user gets the error only if the state is used.

    Args:
        state: Any value that can be in a batch.
        limit: Maximum length of the text in characters; None for no limit.
        owner: Description of the object that the state belongs to, for the error message.
    """
    try:
        text = _encode(state)
    except (EncodeError, BatchTooLarge) as error:
        return _encode_error(owner, str(error))
    if limit is not None and len(text) > limit:
        return _encode_error(owner, f"the encoded state has {len(text):,} characters, more than {limit:,}: store less")
    return text


def unpack(text: str) -> Any:
    """Decode a ``state_dict()`` from the text returned by `pack`; arrays and tensors are writable copies.

    Raises:
        StateMismatch: If the text is damaged, or holds an error because the state could not be encoded.
    """
    return _read(text, TorchMemory)


def check(text: str) -> None:
    """Check that `unpack` can decode the text, without creating tensors, because a client may lack torch.

    Raises:
        StateMismatch: If the text is damaged, or holds an error because the state could not be encoded.
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
