"""What the kernel says of processes' memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import psutil


class Memory(NamedTuple):
    """Bytes of a process."""

    rss: int
    """Resident, shared pages included."""
    pss: int
    """Resident, each shared page divided by the number of processes that share it."""


NO_MEMORY: Final = Memory(0, 0)


def memory(pids: Iterable[int | None]) -> dict[int | None, Memory]:
    """The memory of each process; None is this one, and one that is gone has none.

    Reads every mapping of the processes, which takes milliseconds: not for the event loop.
    """
    found = {}
    for pid in pids:
        try:
            info = psutil.Process(pid).memory_full_info()
            found[pid] = Memory(info.rss, info.pss)
        except psutil.Error:
            found[pid] = NO_MEMORY
    return found


async def aside(function: Callable[[], object]) -> None:
    """Call a function that waits for a process or a thread to end, without holding up the event loop."""
    loop = asyncio.get_running_loop()
    try:
        ended = loop.run_in_executor(None, function)
    except RuntimeError:  # the interpreter is ending, and starts no thread any more
        function()
    else:
        await ended
