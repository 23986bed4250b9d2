"""Registry of the servers of this process, and of functions that clients pass to them without a network.

A function cannot be serialized. A client passes a function to a server in its own process (``serve(object)``) by a
random name, under which the server looks it up.
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
    """Register a server of this process that listens at `url` and runs in `thread`."""
    _served[url] = thread


def end_serving(url: str) -> None:
    """Remove the server at `url`."""
    _served.pop(url, None)


def is_served_here(url: str) -> bool:
    """Return True if the server at `url` runs in this process."""
    return url in _served


def is_server_thread() -> bool:
    """Return True if the calling thread runs a server, which must not wait for its own responses.

    Finalizers of a client's objects can run in any thread.
    """
    return any(thread is threading.current_thread() for thread in _served.values())
