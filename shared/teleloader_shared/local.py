"""What client and server hand each other without a wire when they are in one process, as with ``serve(object)``.

A function cannot travel, but to a server in the same process it need not: the client lends it under a name that nobody
can guess, and the server looks it up there.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakValueDictionary

PREFIX: Final = "local:"

_lenders: WeakValueDictionary[str, object] = WeakValueDictionary()
"""Weak: a function may refer to the loader that lends it, and then must not keep it in memory."""
_served: dict[str, threading.Thread] = {}


def lend(owner: object, argument: str) -> str:
    """Return a name under which `borrowed` finds a function in this process, while `owner` exists.

    Args:
        owner: Refers to the function; the registry of names refers to neither.
        argument: Name of the attribute of `owner` that is the function.
    """
    name = f"{PREFIX}{argument}:{secrets.token_hex(16)}"
    _lenders[name] = owner
    return name


def borrowed(name: str) -> Callable[..., Any] | None:
    """Return the function that was lent under `name` in this process; None if there is none."""
    owner = _lenders.get(name)
    return None if owner is None else getattr(owner, name.split(":")[1])


def begin_serving(url: str, thread: threading.Thread) -> None:
    """A server of this process listens at `url` and runs in that thread."""
    _served[url] = thread


def end_serving(url: str) -> None:
    """It does not any more."""
    _served.pop(url, None)


def is_served_here(url: str) -> bool:
    """Whether the server at `url` is in this process."""
    return url in _served


def is_server_thread() -> bool:
    """Whether this is a server's thread, which must not wait for its own answers.

    Finalizers of a client's objects may come to run there, as in any thread.
    """
    return any(thread is threading.current_thread() for thread in _served.values())
