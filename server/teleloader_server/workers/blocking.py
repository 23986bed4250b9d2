"""Helper to wait for processes, threads and files without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


async def run_blocking(function: Callable[[], _Result]) -> _Result:
    """Return the result of a function that waits for a process, a thread or files, without blocking the event loop."""
    try:
        ended = asyncio.get_running_loop().run_in_executor(None, function)
    except RuntimeError:  # the interpreter is shutting down and cannot start a thread
        return function()
    return await ended
