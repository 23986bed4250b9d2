"""String type for tokens and passwords, hidden in tracebacks."""

from __future__ import annotations


class Secret(str):
    """String whose ``repr`` is ``Secret(...)``, so that tracebacks and debuggers do not show the text.

    Error reporters, debuggers and ``pytest --showlocals`` print the ``repr`` of the local variables of every frame of a
    traceback. ``str()`` and formatting still return the text, because it has to be sent: never format a `Secret` into
    a message.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "Secret(...)"
