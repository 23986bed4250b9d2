"""String type for tokens and passwords, hidden in tracebacks."""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from typing import Any


class Secret(str):
    """String whose ``repr`` is ``Secret(...)``, so that tracebacks and debuggers do not show the text.

    Error reporters, debuggers and ``pytest --showlocals`` print the ``repr`` of the local variables of every frame of a
    traceback. ``str()`` and formatting still return the text, because it has to be sent: never format a `Secret` into
    a message.

    Pickling omits the text, because pickles are stored in files such as checkpoints: unpickling returns None. The
    exception is a child process that `multiprocessing` starts, to which the pickle is sent in a pipe.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "Secret(...)"

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Secret:
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return (_omitted, ()) if get_spawning_popen() is None else (Secret, (str(self),))


def _omitted() -> None:
    """Return None in place of a pickled secret."""
