"""Registry of the servers in this process, and of functions that in-process clients pass by name.

Functions cannot be serialized. A client therefore passes a function to a server in its own process
(``serve(object)``) as a random name, under which the server looks it up.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakValueDictionary

PREFIX: Final = "local:"

_owners: WeakValueDictionary[str, object] = WeakValueDictionary()
"""Owners of the registered functions, by name. Weak references: a function may refer to the loader that registered it,
and the registry must not keep that loader in memory."""
_served: dict[str, threading.Thread] = {}
_thread: Final = threading.local()


def register_function(owner: object, argument: str) -> str:
    """Register a function of `owner` for in-process use and return its name for `registered_function`.

    Args:
        owner: Object that refers to the function; the registry holds a weak reference to it.
        argument: Name of the attribute of `owner` that is the function.
    """
    name = f"{PREFIX}{argument}:{secrets.token_hex(16)}"
    _owners[name] = owner
    return name


def registered_function(name: str) -> Callable[..., Any] | None:
    """Return the function registered under `name`, or None if the name is unknown or the owner no longer exists."""
    owner = _owners.get(name)
    return None if owner is None else getattr(owner, name.split(":")[1])


def begin_serving(url: str, thread: threading.Thread) -> None:
    """Register a server in this process, with its URL and thread."""
    _served[url] = thread


def end_serving(url: str) -> None:
    """Unregister the server at `url`."""
    _served.pop(url, None)


def is_served_in_process(url: str) -> bool:
    """Return True if the server at `url` runs in this process."""
    return url in _served


@contextmanager
def serving() -> Iterator[None]:
    """Context manager that marks the calling thread as a server thread."""
    _thread.is_serving = True
    try:
        yield
    finally:
        _thread.is_serving = False


def is_server_thread() -> bool:
    """Return True if the calling thread is a server thread, which must not wait for responses of its own server.

    Finalizers of client objects run in any thread, including that of a server in the same process.
    """
    is_serving = getattr(_thread, "is_serving", False)
    return is_serving or any(thread is threading.current_thread() for thread in _served.values())
