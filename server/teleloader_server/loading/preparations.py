"""Prepared orders: the numbers of batches or sequences per window, computed by one worker and read by the others.

A preparation evaluates the whole order of an epoch (`orders.plan.prepare`). The workers of a server are forks of one
process, and share a file in memory, to which the first worker that needs an order appends its preparation. Other
workers that need this order wait for a lock meanwhile, and then read the result.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from teleloader_shared.lengths import Lengths
from teleloader_shared.orders.plan import prepare
from teleloader_shared.spec import LoaderSpec

if sys.platform != "win32":
    import fcntl

MAX_BYTES: Final = 64 * 2**20
"""Size of the file from which the next preparation replaces all others."""
_KEY_BYTES: Final = 32


class Preparations:
    """Preparations in a file that the forks of this process share. Not thread-safe.

    The file is a sequence of records: the digest of the order's parameters, the number of int64 values, and the values.
    """

    def __init__(self) -> None:
        # in memory, because servers may run with a read-only file system
        self._file = os.memfd_create("teleloader-orders", os.MFD_CLOEXEC)

    def of(self, spec: LoaderSpec, lengths: Lengths, epoch: int) -> NDArray[np.int64]:
        """Return the preparation of an epoch; prepare the epoch if no process has done so.

        Args:
            spec: Parameters of the loader, with `LoaderSpec.is_prepared`.
            lengths: Lengths of the samples.
            epoch: Epoch number.
        """
        determining = {name: value for name, value in spec.to_json().items() if name in ("balance", "packing")}
        facts = json.dumps([determining, lengths.digest, epoch, spec.seed if spec.shuffle else None])
        key = hashlib.blake2b(facts.encode(), digest_size=_KEY_BYTES).digest()
        # a byte of the file for each order, so that others do not wait for its preparation
        with _locked(self._file, 1 + int.from_bytes(key[:4], "little")):
            with _locked(self._file, 0):
                found = self._read(key)
            if found is None:
                found = prepare(spec, lengths, epoch)
                with _locked(self._file, 0):
                    self._append(key, found)
        return found

    def close(self) -> None:
        """Close the file in this process."""
        os.close(self._file)

    def _read(self, key: bytes) -> NDArray[np.int64] | None:
        file = self._file
        end, place = os.fstat(file).st_size, 0
        while place < end:
            header = os.pread(file, _KEY_BYTES + 8, place)
            nbytes = 8 * int.from_bytes(header[_KEY_BYTES:], "little")
            if place + len(header) + nbytes > end or len(header) < _KEY_BYTES + 8:  # its writer was killed
                os.ftruncate(file, place)
                return None
            place += len(header)
            if header[:_KEY_BYTES] == key:
                return np.frombuffer(os.pread(file, nbytes, place), np.int64)
            place += nbytes
        return None

    def _append(self, key: bytes, values: NDArray[np.int64]) -> None:
        file = self._file
        data = key + len(values).to_bytes(8, "little") + values.tobytes()
        end = os.fstat(file).st_size
        if end + len(data) > MAX_BYTES:
            os.ftruncate(file, end := 0)
        try:
            written = os.pwrite(file, data, end)
        except OSError:  # out of memory: each worker prepares the order itself
            written = 0
        if written < len(data):
            os.ftruncate(file, end)


@contextmanager
def _locked(file: int, place: int) -> Iterator[None]:
    """Context manager that locks a byte of a file for other processes; the end of this process releases the lock."""
    fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


_shared: Preparations | None = None


def share() -> None:
    """Create the file of this process, before it forks the processes that will use it."""
    global _shared
    if _shared is None:
        _shared = Preparations()


def starts_of(spec: LoaderSpec, lengths: Lengths | None, epoch: int) -> NDArray[np.int64] | None:
    """Return the preparation of an epoch for `Plan`; None if the loader's order requires none.

    Args:
        spec: Parameters of the loader.
        lengths: Lengths of the samples; None if the dataset has none.
        epoch: Epoch number.
    """
    if not spec.is_prepared or lengths is None or _shared is None:
        return None
    return _shared.of(spec, lengths, epoch)
