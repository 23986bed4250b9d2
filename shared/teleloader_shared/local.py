"""What client and server hand each other without a wire when they are in one process, as with ``serve(object)``.

A function cannot travel, but to a server in the same process it need not: the client lends it under a name that nobody
can guess, and the server looks it up there.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any, Final

PREFIX: Final = "local:"

_lent: dict[str, Callable[..., Any]] = {}
_served: dict[str, tuple[threading.Thread, int]] = {}


def lend(function: Callable[..., Any]) -> str:
    """A name under which `borrowed` finds the function in this process, until `take_back`."""
    name = PREFIX + secrets.token_hex(16)
    _lent[name] = function
    return name


def take_back(name: str) -> None:
    """Forget a function that was lent."""
    _lent.pop(name, None)


def borrowed(name: str) -> Callable[..., Any] | None:
    """The function that was lent under `name` in this process, if any."""
    return _lent.get(name)


def begin_serving(url: str, thread: threading.Thread, num_workers: int) -> None:
    """A server of this process listens at `url`, runs in that thread, and has so many workers."""
    _served[url] = (thread, num_workers)


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
    return any(thread is threading.current_thread() for thread, _ in _served.values())


def loads_by_itself(url: str) -> bool:
    """Whether the server at `url` is in this process and has no workers, so that it loads here."""
    return url in _served and _served[url][1] == 0
