"""Shared memory that a worker writes frames to and the server sends them from, without copying.

A slot is one anonymous memory file (memfd): no name, no limit of /dev/shm, nothing left when the processes are gone.
Small frames do not come here: they travel through the channel.

The worker makes and recycles slots, because only it knows a frame's size; the server maps each slot once, gives the
bytes out as leases, and says when a slot is free again. Recycling matters more than anything else here: writing to
fresh pages costs 1.7 times as much as writing to pages that were used before.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_SMALLEST: Final = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """Shared memory as the worker sees it."""

    number: int
    memory: NDArray[np.uint8]


class Arena:
    """The slots of one worker, on the worker's side.

    Args:
        free_limit: Bytes of free slots that are kept for reuse; others are returned to the system.
        announce: Called with (number, file descriptor, size) of each new slot, before it is used.
        retract: Called with the number of each slot that is returned to the system.
    """

    def __init__(
        self, free_limit: int, announce: Callable[[int, int, int], None], retract: Callable[[int], None]
    ) -> None:
        self._free_limit = free_limit
        self._announce = announce
        self._retract = retract
        self._made = 0
        self._used: dict[int, Slot] = {}
        self._free: OrderedDict[int, deque[Slot]] = OrderedDict()
        """The free slots by their size, the size that was used longest ago first, and of each size the slot."""
        self._free_bytes = 0

    def take(self, nbytes: int) -> Slot:
        """Return a slot of at least `nbytes`: the smallest free one of at most twice the size, else a new one.

        Raises:
            OSError: If the system lacks memory.
        """
        size = _rounded(nbytes)
        slot = self._reuse(min((free for free in self._free if size <= free <= 2 * size), default=0))
        if slot is None:
            slot = self._make(size)
        self._used[slot.number] = slot
        return slot

    def _reuse(self, size: int) -> Slot | None:
        slots = self._free.get(size)
        if not slots:
            return None
        slot = slots.pop()  # what was used last is still in the processor's cache
        self._free_bytes -= size
        if slots:
            self._free.move_to_end(size)
        else:
            del self._free[size]
        return slot

    def give_back(self, number: int) -> None:
        """Free a slot that the server does not read any more."""
        slot = self._used.pop(number)
        size = len(slot.memory)
        self._free.setdefault(size, deque()).append(slot)
        self._free_bytes += size
        while self._free_bytes > self._free_limit:
            oldest, slots = next(iter(self._free.items()))
            self._free_bytes -= oldest
            self._retract(slots.popleft().number)
            if not slots:
                del self._free[oldest]

    def _make(self, size: int) -> Slot:
        fd = os.memfd_create("teleloader", os.MFD_CLOEXEC)
        try:
            # allocates the memory now: a system without memory returns an error here, not a signal later
            os.posix_fallocate(fd, 0, size)
            slot = Slot(self._made, _mapped(fd, size, mmap.PROT_READ | mmap.PROT_WRITE))
            self._made += 1
            self._announce(slot.number, fd, size)
        finally:
            os.close(fd)
        return slot


class Mapping:
    """A slot as the server sees it: mapped memory of a worker."""

    def __init__(self, fd: int, size: int) -> None:
        try:
            # a memoryview: NumPy would let a view of an array refer to the owner of the memory, past the lease
            self._memory = _mapped(fd, size, mmap.PROT_READ).data.toreadonly()
        finally:
            os.close(fd)
        self.size = size
        self._watch: weakref.ref[NDArray[np.uint8]] | None = None

    def lease(self, nbytes: int, released: Callable[[], None]) -> NDArray[np.uint8]:
        """Return the first `nbytes`, read-only; `released` is called once neither the array nor a view of it exists.

        The event loop's transport holds a view of what it has not sent yet, so a slot is never written to while the
        kernel still reads it. There is one lease at a time: a worker does not fill a slot that is not free.
        """
        lease = np.frombuffer(self._memory, np.uint8, nbytes)
        self._watch = weakref.ref(lease, lambda _: released())
        return lease


# CPython's mmap keeps a duplicate of the descriptor (3.13 can be told not to), and a server that keeps a thousand slots
# would have no descriptor left for a connection.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _mapped(fd: int, size: int, protection: int) -> NDArray[np.uint8]:
    """Map `fd`, which may be closed afterwards; unmapped once neither the array nor a view of it exists."""
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8)


def _rounded(nbytes: int) -> int:
    """Round up to one of eight sizes per power of two, so that batches of varying size find slots to reuse."""
    step = max(_SMALLEST, 1 << max(0, (nbytes - 1).bit_length() - 4))
    return -(-nbytes // step) * step
