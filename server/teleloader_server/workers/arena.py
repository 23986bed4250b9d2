"""Shared-memory slots for frames, written by a worker and sent by the server without copying.

A slot is an anonymous memory file (memfd): it needs no name, is not subject to the size limit on /dev/shm, and is
released when both processes have exited. Small frames are sent through the channel instead.

The worker creates and recycles slots, because only the worker knows a frame's size. The server maps each slot once,
hands out its bytes as leases, and reports when a slot is free again. Recycling is essential for throughput: writing to
fresh pages takes 1.7 times as long as writing to used pages.

A slot that was lent to a client (`lendable`) has an owner. The worker writes only the owner's batches to it, because
the client may have kept a descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from teleloader_server.workers.lendable import (
    DISCARD,
    MIN_LENT_BYTES,
    NOBODY,
    SEALS,
    LendableFrame,
    LendableSlot,
    is_sealed,
)

_SMALLEST: Final = 4096


@dataclass(slots=True)
class Slot:
    """Shared-memory slot, mapped in the worker."""

    number: int
    memory: NDArray[np.uint8]
    owner: int = NOBODY
    """Owner of the slot (`LendableSlot.owner`)."""
    written: int = 0
    """End of the bytes that are not zero."""

    def clear_after(self, end: int) -> None:
        """Overwrite the remains of earlier frames, because a client to which the slot is lent can read all of it."""
        if len(self.memory) >= MIN_LENT_BYTES:
            self.memory[end : self.written] = 0
            self.written = end


class Arena:
    """Allocator of shared-memory slots in a worker process.

    Args:
        free_limit: Maximum bytes of free slots that are kept for reuse; other slots are returned to the system.
        announce: Callback, called with (number, file descriptor, size) of each new slot before it is used.
        retract: Callback, called with the number of each slot that is returned to the system.
    """

    def __init__(
        self, free_limit: int, announce: Callable[[int, int, int], None], retract: Callable[[int], None]
    ) -> None:
        self.free_limit = free_limit
        self._announce = announce
        self._retract = retract
        self._made = 0
        self._used: dict[int, Slot] = {}
        self._free: OrderedDict[tuple[int, int], deque[Slot]] = OrderedDict()
        """Free slots by owner and size. Keys, and the slots of each key, are in order of last use, oldest first."""
        self._free_bytes = 0

    def take(self, nbytes: int, owner: int = NOBODY) -> Slot:
        """Allocate a slot of at least `nbytes` bytes: the smallest free slot up to twice that size, else a new slot.

        Args:
            nbytes: Minimum size of the slot.
            owner: Owner of the batch. Free slots of this owner are preferred, then those that were never lent.

        Raises:
            OSError: If the system is out of memory.
        """
        size = _rounded(nbytes)
        fitting = (key for key in self._free if key[0] in (owner, NOBODY) and size <= key[1] <= 2 * size)
        slot = self._reuse(min(fitting, key=lambda key: (key[0] != owner, key[1]), default=(NOBODY, 0)))
        if slot is None:
            slot = self._make(size)
        self._used[slot.number] = slot
        return slot

    def _reuse(self, key: tuple[int, int]) -> Slot | None:
        slots = self._free.get(key)
        if not slots:
            return None
        slot = slots.pop()  # the slot that was used last may still be in the CPU cache
        self._free_bytes -= key[1]
        if slots:
            self._free.move_to_end(key)
        else:
            del self._free[key]
        return slot

    def give_back(self, number: int, owner: int | None = None) -> None:
        """Free a slot after the server has released it; return excess free slots to the system.

        Args:
            number: Number of the slot.
            owner: New owner of the slot, `DISCARD` to return the slot to the system; None if the slot was not lent.
        """
        slot = self._used.pop(number)
        if owner == DISCARD:
            self._retract(number)
            return
        if owner is not None:
            slot.owner = owner
        size = len(slot.memory)
        self._free.setdefault((slot.owner, size), deque()).append(slot)
        self._free_bytes += size
        while self._free_bytes > self.free_limit:
            oldest, slots = next(iter(self._free.items()))
            self._free_bytes -= oldest[1]
            self._retract(slots.popleft().number)
            if not slots:
                del self._free[oldest]

    def _make(self, size: int) -> Slot:
        fd = os.memfd_create("teleloader", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # allocate the memory now: if the system is out of memory, this raises an error instead of a later SIGBUS
            os.posix_fallocate(fd, 0, size)
            slot = Slot(self._made, _mapped(fd, size, mmap.PROT_READ | mmap.PROT_WRITE))
            with suppress(OSError):  # before Linux 5.1: the slot cannot be lent
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)  # the mapping above stays writable
            self._made += 1
            self._announce(slot.number, fd, size)
        finally:
            os.close(fd)
        return slot


class Mapping:
    """Shared-memory slot of a worker, mapped read-only in the server."""

    def __init__(self, fd: int, size: int) -> None:
        try:
            # a memoryview: otherwise views of a lease would refer to the owner of the memory and not to the lease
            self._memory = _mapped(fd, size, mmap.PROT_READ).data.toreadonly()
            self.lendable = LendableSlot.of(fd, size)
            """The slot, if it can be lent to clients; else None."""
        finally:
            os.close(fd)
        self.size = size
        self._watch: weakref.ref[NDArray[np.uint8]] | None = None

    @classmethod
    def checked(cls, fd: int, size: int) -> Mapping:
        """Map a slot of a worker that is not trusted, because it runs as another user.

        Raises:
            OSError: If the slot cannot be mapped, or the worker could shrink it: reading it would then end the server
                by SIGBUS.
        """
        if not is_sealed(fd) or os.fstat(fd).st_size < size:
            os.close(fd)
            raise OSError(errno.EPERM, "the worker sent memory without seals")
        return cls(fd, size)

    @property
    def owner(self) -> int:
        """Owner for whose batches the slot may be reused."""
        return NOBODY if self.lendable is None else self.lendable.owner

    def lease(self, nbytes: int, released: Callable[[], None]) -> NDArray[np.uint8]:
        """Return the first `nbytes` bytes as a read-only array; call `released` when the array and its views are freed.

        The event loop's transport holds a view of unsent bytes, so a slot is never overwritten while it is being sent.
        A slot has one lease at a time, because a worker writes only to free slots.
        """
        lease = np.frombuffer(self._memory, np.uint8, nbytes)
        self._watch = weakref.ref(lease, lambda _: released())
        return lease if self.lendable is None else LendableFrame.of(lease, self.lendable)


# Not CPython's mmap, which keeps a duplicate of the descriptor (before 3.13 always): a server with a thousand slots
# would have no descriptors left for connections.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _mapped(fd: int, size: int, protection: int) -> NDArray[np.uint8]:
    """Map a file into memory; unmap it when the returned array and all its views are freed.

    The caller may close the file after the call.
    """
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8)


def _rounded(nbytes: int) -> int:
    """Round up to one of eight sizes per power of two, so that batches of varying size can reuse slots."""
    step = max(_SMALLEST, 1 << max(0, (nbytes - 1).bit_length() - 4))
    return -(-nbytes // step) * step
