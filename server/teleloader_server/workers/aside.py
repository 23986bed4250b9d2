"""Waiting for processes and threads without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def aside(function: Callable[[], object]) -> None:
    """Call a function that waits for a process or a thread to end, without blocking the event loop."""
    loop = asyncio.get_running_loop()
    try:
        ended = loop.run_in_executor(None, function)
    except RuntimeError:  # the interpreter is shutting down and starts no thread
        function()
    else:
        await ended
