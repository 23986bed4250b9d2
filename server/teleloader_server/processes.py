"""What the kernel says of processes' memory."""

from __future__ import annotations

from collections.abc import Iterable
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
