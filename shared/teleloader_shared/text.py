"""Texts of others, made harmless to show: a terminal obeys some characters, and a log has one line for an entry."""

from __future__ import annotations

import reprlib
from typing import Any, Final

MAX_SHOWN: Final = 4096
"""Characters of a sentence of others that are shown."""
_MAX_EXCERPT: Final = 200
"""Bytes of an unexpected body that are shown."""


def harmless(text: str) -> str:
    """The text without the characters that a terminal obeys; lines stay lines."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs())


def sentence(text: str) -> str:
    """A harmless part of the text, in one line."""
    return harmless(text[:MAX_SHOWN]).replace("\n", " ")


def excerpt(body: bytes | bytearray) -> str:
    """The beginning of a received body as harmless text in one line."""
    return sentence(body[:_MAX_EXCERPT].decode(errors="replace"))


class _Short(reprlib.Repr):
    """Bounded descriptions, which cost no more time or memory however large the value is.

    `reprlib` itself formats bytes and other objects as a whole before it shortens them: a gigabyte of bytes would take
    four gigabytes.
    """

    def repr_bytes(self, value: bytes, level: int) -> str:
        return f"<bytes of length {len(value):,}>"

    def repr_instance(self, value: Any, level: int) -> str:
        return repr(value) if value is None or isinstance(value, bool | float) else f"<{type(value).__name__}>"


short: Final = _Short().repr
"""Returns a bounded description of a received value, for error messages."""
