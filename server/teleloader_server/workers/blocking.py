"""Helper to wait for processes and threads without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def run_blocking(function: Callable[[], object]) -> None:
    """Call a function that blocks until a process or thread ends, without blocking the event loop."""
    try:
        ended = asyncio.get_running_loop().run_in_executor(None, function)
    except RuntimeError:  # the interpreter is shutting down and cannot start a thread
        function()
    else:
        await ended
