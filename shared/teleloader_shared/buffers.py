"""Buffers that batches are received into, used again when nobody holds a view of them any more.

Fresh memory costs a page fault for every 4 KiB, which at tens of megabytes a batch is most of the time that a receiver
takes; so a buffer goes back to its pool the moment the last array or tensor that views it is gone, however long the
training loop keeps it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from teleloader_shared.codec import ALIGNMENT

Buffer = NDArray[np.uint8]

FREE_BYTES: Final = 512 * 2**20
"""Free memory that a pool keeps for reuse."""
_SMALLEST: Final = 64 * 1024


def allocate(size: int) -> Buffer:
    """Ordinary memory."""
    return np.empty(size, np.uint8)


class BufferPool:
    """Hands out buffers and takes them back by itself.

    Args:
        free_bytes: How much free memory is kept, from the next `take` on.
    """

    def __init__(self, free_bytes: int = FREE_BYTES) -> None:
        self._free_bytes = free_bytes
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        """Iterators of one loader share its pool, and each has a thread."""
        self._free: deque[Buffer] = deque()
        # filled by finalizers, which may run in any thread and at any moment: nothing there may take a lock
        self._returned: deque[Buffer] = deque()
        self._pid = os.getpid()  # last: another thread takes it for a sign that all is there

    def take(self, nbytes: int) -> Buffer:
        """A buffer of `nbytes`, aligned to 64 bytes."""
        size = _rounded(nbytes)
        if self._pid != os.getpid():
            self._start()  # a forked copy: a thread that is not there may have held the lock
        with self._lock:
            self._collect()
            storage = self._find(size)
        if storage is None:
            storage = allocate(size)
        start = -storage.ctypes.data % ALIGNMENT
        # frombuffer puts a memoryview between the lease and the storage; a slice would not keep the lease alive,
        # because NumPy lets a view of a view refer to the owner of the memory directly
        lease: Buffer = np.frombuffer(storage.data[start : start + nbytes], np.uint8)
        weakref.finalize(lease, self._returned.append, storage).atexit = False
        return lease

    def _find(self, size: int) -> Buffer | None:
        # what came back last is still in the processor's cache
        for i in reversed(range(len(self._free))):
            storage = self._free[i]
            if size <= len(storage) <= 2 * size:
                del self._free[i]
                return storage
        return None

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        free = sum(map(len, self._free))
        while free > self._free_bytes:
            free -= len(self._free.popleft())


def _rounded(nbytes: int) -> int:
    """The next of eight sizes in each power of two, and room to align."""
    size = max(_SMALLEST, nbytes + ALIGNMENT)
    step = 1 << max(0, (size - 1).bit_length() - 3)
    return -(-size // step) * step
