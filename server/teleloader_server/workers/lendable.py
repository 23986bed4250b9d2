"""Shared-memory slots that the server can lend to clients on the same machine (docs/protocol.md, "Shared memory").

A client receives a read-only descriptor. Seals prevent the client from writing, resizing and punching holes, even if it
opens the slot again for writing. The client may keep the descriptor, or pass it on: therefore a slot that was lent is
written again only for batches of its owner, that is, of one dataset and one principal.

The kernel reports if another process still has a descriptor or a mapping: it grants a write lease (`fcntl`,
F_SETLEASE) only on a file that nobody else has opened. The server's own descriptor does not count, because
``memfd_create`` and not ``open`` returned it. The kernel does not report pages in a pipe and descriptors of O_PATH, so
the owner is necessary in addition.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import sys
import weakref
from typing import Final

import numpy as np
from numpy.typing import NDArray

from teleloader_server.workers.procfs import Capability, capabilities

MIN_LENT_BYTES: Final = 2**20
"""Minimum size of lent slots: smaller frames are sent, because a copy costs less than a mapping."""
_FILES_SHARE: Final = 1 / 16
"""Part of the limit on open files that the descriptors of lendable slots may use."""

F_SEAL_FUTURE_WRITE: Final = 0x10
"""Seal that prevents writing except through existing mappings; the module `fcntl` does not define it."""
SEALS: Final = (
    fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE if sys.platform == "linux" else 0
)

NOBODY: Final = 0
"""Owner of slots that were never lent."""
DISCARD: Final = -1
"""Owner of slots that must not be written again: the worker returns them to the system."""


class LendableSlot:
    """Server-side descriptor of a slot that can be lent."""

    open_files = 0
    """Number of open descriptors of all lendable slots."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self.owner = NOBODY
        """Owner for whose batches the slot may be reused."""
        self.loans = 0
        """Number of loans that have not ended."""
        self._fd = os.dup(fd)
        LendableSlot.open_files += 1
        weakref.finalize(self, _close, self._fd).atexit = False

    @classmethod
    def of(cls, fd: int, size: int) -> LendableSlot | None:
        """Return the slot with a duplicate of its descriptor, or None if it cannot be lent.

        Small slots and slots without seals cannot be lent, nor can further slots if their descriptors already use
        `_FILES_SHARE` of the limit on open files. The kernel grants a lease (`is_held`) on another user's file only
        with CAP_LEASE.
        """
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] * _FILES_SHARE
        if size < MIN_LENT_BYTES or not is_sealed(fd) or cls.open_files >= limit:
            return None
        if os.fstat(fd).st_uid != os.geteuid() and Capability.LEASE not in capabilities():
            return None
        return cls(fd, size)

    def open(self) -> int:
        """Open another descriptor, read-only.

        Raises:
            OSError: If the process has too many open files.
        """
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def assign(self, owner: int) -> None:
        """Make `owner` the owner; a slot with an earlier owner is discarded after its last loan."""
        self.owner = owner if self.owner in (NOBODY, owner) else DISCARD

    def discard(self) -> None:
        """Exclude the slot from reuse."""
        self.owner = DISCARD

    def is_held(self) -> bool:
        """Return True if another process has a descriptor or a mapping, or if the kernel does not report it."""
        try:
            probe = self.open()
        except OSError:
            return True
        try:
            # a client that opens the slot by an O_PATH descriptor at this moment causes a signal: SIGIO would end the
            # server, and SIGURG is ignored by default
            fcntl.fcntl(probe, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError:
            return True
        else:
            return False
        finally:
            os.close(probe)  # ends the lease


class LendableFrame(np.ndarray):
    """Bytes of a frame that is alone in its slot; slices of it have no slot."""

    slot: LendableSlot | None = None

    @classmethod
    def of(cls, lease: NDArray[np.uint8], slot: LendableSlot) -> LendableFrame:
        """Return a view of a lease that refers to the lease's slot."""
        frame = lease.view(cls)
        frame.slot = slot
        return frame


def is_lendable(frame: NDArray[np.uint8]) -> bool:
    """Return True if a frame is alone in a slot that can be lent."""
    return isinstance(frame, LendableFrame) and frame.slot is not None


def is_sealed(fd: int) -> bool:
    """Return True if a descriptor is a memfd with all `SEALS`."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        return False


def is_supported() -> bool:
    """Return True if this system can lend slots: if it supports the seals, and reports descriptors of others."""
    if sys.platform != "linux":
        return False
    try:
        fd = os.memfd_create("teleloader-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            slot = LendableSlot(fd, 0)
        finally:
            os.close(fd)
        other = slot.open()
        try:
            is_reported = slot.is_held()
        finally:
            os.close(other)
        return is_reported and not slot.is_held()
    except OSError:
        return False


def _close(fd: int) -> None:
    os.close(fd)
    LendableSlot.open_files -= 1
