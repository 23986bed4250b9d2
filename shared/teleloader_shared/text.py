"""Text of messages: sanitized received text, short representations of values, and suggestions for misspelled names."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Final

MAX_SHOWN: Final = 4096
"""Maximum length of received text in a message, in characters."""
_MAX_EXCERPT: Final = 200
"""Maximum length of the excerpt of an unexpected body, in bytes."""


def printable(text: str) -> str:
    """Replace control characters, which a terminal would interpret, but keep line breaks."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs())


def sentence(text: str) -> str:
    """Return the sanitized beginning of a text as one line, for log entries and error messages."""
    return printable(text[:MAX_SHOWN]).replace("\n", " ")


def excerpt(body: bytes | bytearray) -> str:
    """Return the beginning of a received HTTP body as one line of sanitized text."""
    return sentence(body[:_MAX_EXCERPT].decode(errors="replace"))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that suggests the known names most similar to a misspelled one; "" if none is similar."""
    similar = get_close_matches(name[:_MAX_EXCERPT], known)
    return f"Did you mean {' or '.join(map(repr, similar))}?" if similar else ""


def missing_package(what: str, error: ModuleNotFoundError, extra: str) -> str:
    """Return the message that a package of an optional dependency is not installed.

    Args:
        what: Command or function that requires the package.
        error: Error of the import.
        extra: Extra of teleloader that installs the package.
    """
    package = str(error.name).partition(".")[0]
    return f"{what} requires {package}, which is not installed: pip install 'teleloader[{extra}]'"


class _Short(reprlib.Repr):
    """Length-limited ``repr`` whose time and memory do not depend on the size of the value.

    `reprlib` formats bytes and other objects completely before it shortens them: a gigabyte of bytes would take four
    gigabytes of memory.
    """

    def repr_bytes(self, value: bytes, level: int) -> str:
        return f"<bytes of length {len(value):,}>"

    def repr_instance(self, value: Any, level: int) -> str:
        return repr(value) if value is None or isinstance(value, bool | float) else f"<{type(value).__name__}>"


short: Final = _Short().repr
"""Returns a length-limited ``repr`` of a received value, for error messages."""
