"""Validation of values of specs."""

from __future__ import annotations

import re
from typing import Final

from teleloader_shared.errors import InvalidSpec
from teleloader_shared.text import short

_DIGEST: Final = re.compile("[0-9a-f]{32}")


def check_digest(name: str, value: object) -> None:
    """Check that a value is the digest of lengths.

    Raises:
        InvalidSpec: If it is not; the message contains the name and the value.
    """
    if not isinstance(value, str) or _DIGEST.fullmatch(value) is None:
        raise InvalidSpec(f"{name} must be a digest of 32 hexadecimal digits, got {short(value)}")


def check_whole(name: str, value: object, low: int, high: int) -> None:
    """Check that a value is an integer in [low, high].

    Raises:
        InvalidSpec: If it is not; the message contains the name and the value.
    """
    # bool is a subclass of int, but a batch size of True is a mistake
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidSpec(f"{name} must be an integer in [{low}, {high}], got {short(value)}")
