"""Pool of receive buffers, each reused after its last view is garbage-collected.

Fresh memory costs a page fault for every 4 KiB. For batches of tens of megabytes, page faults would dominate the time
to receive a batch. A buffer therefore returns to its pool as soon as the last array or tensor that views it is
deleted, however long the training loop keeps it.
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
"""Default maximum total size of the free buffers in a pool, in bytes."""
SMALLEST: Final = 64 * 1024
"""Smallest size of a pooled buffer, in bytes."""


def allocate(size: int) -> Buffer:
    """Allocate `size` bytes of uninitialized pageable memory."""
    return np.empty(size, np.uint8)


class BufferPool:
    """Thread-safe pool of aligned buffers; a buffer returns to the pool when its last view is garbage-collected.

    Args:
        free_bytes: Maximum total size of the free buffers in the pool, in bytes; enforced by each call of `take`.
    """

    def __init__(self, free_bytes: int = FREE_BYTES) -> None:
        self._free_bytes = free_bytes
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        """Needed because all iterators of a loader share one pool, and each receives batches in its own threads."""
        self._free: deque[Buffer] = deque()
        self._size = 0
        """Total size of `_free` in bytes: a sum over hundreds of buffers would take longer than receiving a batch."""
        # filled by finalizers, which may run in any thread and at any moment: they must not acquire a lock
        self._returned: deque[Buffer] = deque()
        self._pid = os.getpid()  # set last: other threads use the pool as soon as the process ID matches

    def take(self, nbytes: int) -> Buffer:
        """Return an uninitialized buffer of `nbytes` bytes, aligned to 64 bytes."""
        size = _rounded(nbytes)
        if self._pid != os.getpid():
            self._start()  # after a fork, the copied lock may be held by a thread that does not exist in the child
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
        # most recently returned first: that memory is probably still in the processor's cache
        for i in reversed(range(len(self._free))):
            storage = self._free[i]
            if size <= len(storage) <= 2 * size:
                del self._free[i]
                self._size -= len(storage)
                return storage
        return None

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
            self._size += len(self._free[-1])
        while self._size > self._free_bytes:
            self._size -= len(self._free.popleft())


def _rounded(nbytes: int) -> int:
    """Round up to the next size class (eight per power of two), including room for alignment."""
    size = max(SMALLEST, nbytes + ALIGNMENT)
    step = 1 << max(0, (size - 1).bit_length() - 3)
    return -(-size // step) * step
