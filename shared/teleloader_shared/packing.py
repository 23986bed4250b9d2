"""Parameters of packed sequences (`PackingSpec`); part of the loader spec."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from teleloader_shared.balance import MAX_WINDOW
from teleloader_shared.checks import check_digest, check_whole
from teleloader_shared.errors import InvalidSpec
from teleloader_shared.text import short

MAX_SEQUENCE_LENGTH: Final = 2**30
"""Maximum tokens in a sequence: offsets in a batch are int32."""

MIN_WINDOW: Final = 16
"""Minimum documents in a window; bounds the time of the preparation, about 1 us per document and 5 us per window."""


@dataclass(frozen=True, slots=True)
class PackingSpec:
    """Validated parameters of packed sequences.

    Raises:
        InvalidSpec: If a field is invalid.
    """

    lengths: str
    """Digest of the lengths of the documents (`Lengths.digest`)."""
    sequence_length: int
    """Tokens in each sequence, including padding."""
    window: int
    """Documents that are packed together, over all ranks."""
    pad_token_id: int = 0
    """Token that fills the end of a sequence."""

    def __post_init__(self) -> None:
        """Validate all fields."""
        check_digest("lengths of packing", self.lengths)
        check_whole("sequence_length of packing", self.sequence_length, 1, MAX_SEQUENCE_LENGTH)
        check_whole("window of packing", self.window, MIN_WINDOW, MAX_WINDOW)
        check_whole("pad_token_id of packing", self.pad_token_id, -(2**63), 2**63 - 1)

    @property
    def identity(self) -> str:
        """All parameters as a short text, which is part of saved states."""
        return (
            f"sequence_length={self.sequence_length}, window={self.window}, pad_token_id={self.pad_token_id}, "
            f"lengths={self.lengths[:16]}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the parameters as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: object) -> PackingSpec:
        """Create parameters from a JSON object.

        Raises:
            InvalidSpec: If the object has another structure, or a field is invalid.
        """
        match fields:
            case {
                "lengths": lengths, "sequence_length": length, "window": window, "pad_token_id": token, **others
            } if not others:  # fmt: skip
                return cls(lengths, length, window, token)
        raise InvalidSpec(
            "packing must be null or an object with lengths, sequence_length, window and pad_token_id, got "
            f"{short(fields)}"
        )
