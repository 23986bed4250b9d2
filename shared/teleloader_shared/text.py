"""Texts of others, made harmless to show: a terminal obeys some characters, and a log has one line for an entry."""

from __future__ import annotations

from typing import Final

MAX_SHOWN: Final = 4096
"""Characters of a sentence of others that are shown."""


def harmless(text: str) -> str:
    """The text without the characters that a terminal obeys; lines stay lines."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs())


def sentence(text: str) -> str:
    """A harmless part of the text, in one line."""
    return harmless(text[:MAX_SHOWN]).replace("\n", " ")
