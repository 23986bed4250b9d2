"""Allocation of page-locked (pinned) memory with a per-process limit."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, deque
from typing import Any, Final

from teleloader_shared.errors import TeleloaderError

DEFAULT_MAX_PINNED_BYTES: Final = 2 * 2**30
"""Default maximum of the page-locked memory of all loaders in a process, in bytes."""
MAX_PINNED_BYTES_VARIABLE: Final = "TELELOADER_MAX_PINNED_BYTES"


class PinnedBudget:
    """Allocator of pinned memory through torch, with a limit on the total size of pinned blocks.

    torch rounds the size of a block up to the next power of two, and keeps freed blocks for later blocks of that size.
    This class therefore counts, for each size, the maximum number of blocks in use at the same time. Before a further
    block exceeds the limit, this class makes torch unlock its free blocks.

    Args:
        limit: Maximum size of the locked memory, in bytes. Beyond it `allocate` returns None, and batches are received
            into pageable memory, from which copies are slower and block the host.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._used: Counter[int] = Counter()
        """Blocks in use, by size."""
        self._locked: Counter[int] = Counter()
        """Blocks that torch has locked, in use or free, by size."""
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}
        """Weak reference to each storage, and the size of its block in bytes, by ``id()`` of the reference."""
        # filled when storages are freed, in any thread and at any moment: the callback must not acquire a lock or run
        # Python code, in which a signal handler could raise
        self._dead: deque[weakref.ref[Any]] = deque()

    @property
    def in_use(self) -> int:
        """Total size of the blocks that tensors use, in bytes."""
        with self._lock:
            self._collect()
            return _total(self._used)

    def allocate(self, nbytes: int) -> Any | None:
        """Return a new 1-D uint8 tensor of `nbytes` bytes in page-locked memory, or None if the budget is exhausted.

        The budget is exhausted if the tensor would exceed the limit, or if the operating system cannot lock the memory.
        """
        import torch

        size = 1 << max(0, nbytes - 1).bit_length()
        with self._lock:
            self._collect()
            if not self._reserve(size):
                return None
        try:
            block = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            with self._lock:
                self._used[size] -= 1
            return None
        # refers to the storage, not to this tensor, which is deleted while other tensors still use the storage
        storage = weakref.ref(block.untyped_storage(), self._dead.append)
        self._sizes[id(storage)] = storage, size
        return block

    def _reserve(self, size: int) -> bool:
        if self._used[size] == self._locked[size]:
            if _total(self._locked) + size > self.limit and _unlock_free_blocks():
                self._locked = self._used.copy()
            if _total(self._locked) + size > self.limit:
                return False
            self._locked[size] += 1
        self._used[size] += 1
        return True

    def _collect(self) -> None:
        while self._dead:
            _, size = self._sizes.pop(id(self._dead.popleft()))
            self._used[size] -= 1


def _total(blocks: Counter[int]) -> int:
    return sum(size * count for size, count in blocks.items())


def _unlock_free_blocks() -> bool:
    """Make torch release its free pinned memory to the system; return False if torch cannot (before torch 2.5)."""
    import torch

    if hasattr(torch, "accelerator") and hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
        return True
    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()
        return True
    return False


_budget: PinnedBudget | None = None


def process_budget() -> PinnedBudget:
    """Return the pinned memory budget that all loaders of this process share.

    The environment variable ``TELELOADER_MAX_PINNED_BYTES`` sets its limit, 2 GiB by default.

    Raises:
        TeleloaderError: If the variable is not an integer.
    """
    global _budget
    if _budget is None:
        text = os.environ.get(MAX_PINNED_BYTES_VARIABLE, str(DEFAULT_MAX_PINNED_BYTES))
        if not text.isdecimal():
            raise TeleloaderError(
                f"invalid {MAX_PINNED_BYTES_VARIABLE}={text!r}: expected a number of bytes, for example "
                f"{DEFAULT_MAX_PINNED_BYTES}"
            )
        _budget = PinnedBudget(int(text))
    return _budget
