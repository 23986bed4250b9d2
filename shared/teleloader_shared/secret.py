"""Strings that must not be shown."""

from __future__ import annotations


class Secret(str):
    """A string whose ``repr`` does not show it.

    Error reporters, debuggers and ``pytest --showlocals`` print the ``repr`` of the local variables of every frame of a
    traceback. ``str()`` and formatting return the text, because it has to be sent: a `Secret` is for variables and
    containers, and never for a message.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "Secret(...)"
