"""Cache of a dataset's samples in a file, between deterministic loading and random transforms.

A dataset whose samples do not depend on random numbers is wrapped in `CachedDataset`; random transforms are applied to
the samples of the wrapper. All workers and servers of a machine, and later runs, share the file.

The file is an SQLite database with frames (`codec`) as values: nothing is unpickled, and each value has a checksum and
its key. SQLite is part of Python and safe against processes that are killed at any moment. LMDB would read large
samples faster (a copy less), but reserves its maximum size as address space, and is a further dependency of servers.
The database has a rollback journal and not a write-ahead log: with many writers, the log is never reset, grows beyond
the database, and is replayed at length after a kill. Data is not flushed to the disk (``synchronous = OFF``): after a
crash of the machine the file may be damaged, which is detected.

There is no eviction. An epoch visits each sample once, so of the samples that do not fit, each policy evicts samples
before their next visit; those that are stored first are as useful as any others, and cost no further writes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import stat
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from teleloader_server.loading.random_state import random_state, seed_all, set_random_state
from teleloader_server.loading.tasks import CacheCounts, key_of
from teleloader_shared import codec
from teleloader_shared.codec import BatchId, Failure
from teleloader_shared.errors import TeleloaderError
from teleloader_shared.memory import TorchMemory

logger = logging.getLogger(__name__)

FORMAT: Final = 1
"""Version of the file format, part of the file's name."""
CHECKED: Final = 8
"""Number of samples that each process computes twice before it stores them, and of those that it reads and compares."""
LOCK_TIMEOUT: Final = 0.1
"""Time in seconds to wait for another process that writes; after it, the sample is computed, or not stored."""
OPEN_TIMEOUT: Final = 10.0
"""Time in seconds to wait for other processes that write while the file is opened."""
UNUSED_SECONDS: Final = 3600.0
"""Time since a file was last opened after which it is deleted if it has another version."""
_PAGE_BYTES: Final = 16 * 2**10
_SPARE_PAGES: Final = 4
"""Pages that a new sample may need in addition to its size."""
_MIN_BYTES: Final = 2**20
_SEED: Final = 0x5EED_0F_CA0E


_counts = CacheCounts()
"""Counts of this process since the last call of `take_counts`."""


def take_counts() -> CacheCounts:
    """Return the counts of all caches in this process since the previous call."""
    global _counts
    counts, _counts = _counts, CacheCounts()
    return counts


def _count(hits: int, misses: int, saved: float) -> None:
    global _counts
    _counts = CacheCounts.sum([_counts, CacheCounts(hits, misses, saved)])


class CachedDataset:
    """Map-style dataset that stores the samples of another one in a file.

    Each process computes its first samples twice, with different random numbers, and compares the first samples that
    it reads with recomputed ones. This detects most samples that depend on random numbers, and files of other data or
    code. Samples are copies, which transforms may modify. The random generators of `random`, NumPy and torch are the
    same after each sample, whether it was computed or read.

    If the file cannot be written or read (full disk, I/O error), a warning is logged, and samples are computed.

    Args:
        dataset: Map-style dataset. ``dataset[index]`` must depend on `index` alone, so a dataset with ``set_epoch`` is
            refused.
        directory: Directory of the file on a local disk, created if necessary. Other users must not be able to write
            it. Datasets need directories of their own: files of other versions in it are deleted once they were not
            opened for an hour.
        version: Version of data and code. Change it whenever a sample would be different.
        max_bytes: Maximum size of the file in bytes, at least 1 MiB. Once it is reached, further samples are computed
            each time.

    Raises:
        TypeError: If `dataset` is not map-style, or has ``set_epoch``.
        ValueError: If `max_bytes` is too small.

    Example:
        class Train:
            def __init__(self):
                self.decoded = CachedDataset(Decoded("/data"), "/cache/train", version="3", max_bytes=200 * 2**30)

            def __len__(self):
                return len(self.decoded)

            def __getitem__(self, index):
                return augment(self.decoded[index])
    """

    def __init__(self, dataset: Any, directory: str | os.PathLike[str], *, version: str, max_bytes: int) -> None:
        if not hasattr(type(dataset), "__getitem__"):
            raise TypeError(f"cannot cache a dataset of type {type(dataset).__qualname__}: expected __getitem__")
        if hasattr(dataset, "set_epoch"):
            raise TypeError(
                f"cannot cache a dataset of type {type(dataset).__qualname__}: it has set_epoch, so its samples may "
                "depend on the epoch. Cache the part of the dataset that does not"
            )
        if max_bytes < _MIN_BYTES:
            raise ValueError(f"invalid max_bytes={max_bytes}: expected at least {_MIN_BYTES} (1 MiB)")
        self.dataset: Final = dataset
        self.directory: Final = Path(directory)
        self.version: Final = version
        self.max_bytes: Final = max_bytes
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._file: _File | None = None
        """The open file; None before the first sample, after a fork, and after an error."""
        self._has_failed = False
        """True after an error, until the process ends."""
        self._unchecked = {"computed": CHECKED, "read": CHECKED}
        """Number of samples that are still to be checked."""
        _caches.add(self)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def sample_lengths(self) -> Any:
        """Lengths of the samples (`sample_lengths` of the dataset); None if the dataset has none."""
        return getattr(self.dataset, "sample_lengths", None)

    def __getitem__(self, index: Any) -> Any:
        """Return a sample, from the file if it contains the sample. Only integers and short strings are stored.

        Raises:
            EncodeError: If the sample cannot be encoded, see "Types" in the documentation.
            ValueError: If a sample differs from a recomputed one.
        """
        began = time.perf_counter()
        key = key_of(index)
        found = None if key is None else self._read(key)
        if found is None:
            frame, seconds = self._compute(index)
            if key is not None:
                self._check("computed", index, frame)
                self._write(key, seconds, frame)
            _count(0, 1, 0.0)
            return _decoded(frame, index, generate_classes=True)
        seconds, frame, sample = found
        saved = seconds - (time.perf_counter() - began)
        self._check("read", index, frame)
        _count(1, 0, max(0.0, saved))
        return sample

    def _compute(self, index: Any, seed: int | None = None) -> tuple[bytes, float]:
        """Return the frame of a sample, and the time in seconds to compute it.

        Args:
            index: Index of the sample.
            seed: Seed of the random generators for this sample; None to leave them as they are.
        """
        state = random_state()
        if seed is not None:
            seed_all(seed)
        began = time.perf_counter()
        try:
            sample = self.dataset[index]
        finally:
            seconds = time.perf_counter() - began
            set_random_state(state)
        return codec.to_bytes(_batch_id(index), sample, name="sample"), seconds

    def _check(self, what: str, index: Any, frame: bytes) -> None:
        """Compare one of the first frames that were computed or read with a recomputed one."""
        if not self._unchecked[what]:
            return
        # an unusual seed: a caller that seeds the generators for each sample must not hide that the sample is random
        if self._compute(index, _SEED)[0] != frame:
            raise ValueError(
                f"sample {index!r} for the cache {self.directory} differs from the recomputed one: the sample depends "
                "on random numbers, or data or code have changed. Apply random transforms to the samples of the "
                "CachedDataset, and change version= with each change of data or code"
            )
        self._unchecked[what] -= 1

    def _read(self, key: int | str) -> tuple[float, bytes, Any] | None:
        """Return time to compute, frame and sample; None if the file does not contain the sample undamaged."""
        with self._lock:
            file = self._open()
            try:
                found = None if file is None else file.read(key)
            except sqlite3.Error as error:
                self._failed("read", error)
                return None
        if found is None:
            return None
        try:
            # computed samples have the dataset's classes, which it may import in __getitem__
            return *found, _decoded(found[1], key, generate_classes=False)
        except TeleloaderError:
            return None  # the sample is computed, and replaced in the file

    def _write(self, key: int | str, seconds: float, frame: bytes) -> None:
        with self._lock:
            file = self._open()
            if file is None or not file.is_writable:
                return
            try:
                file.write(key, seconds, frame)
            except sqlite3.Error as error:
                code = _code(error)
                if code not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR):
                    self._failed("write", error)
                    return
                file.is_writable = False
                if code == sqlite3.SQLITE_FULL and file.exceeds(self.max_bytes, len(frame)):
                    logger.info("the cache %s has reached max_bytes=%d", self.directory, self.max_bytes)
                else:
                    logger.warning("cannot write the cache %s (%s): no further samples are stored until the worker "
                                   "restarts", self.directory, error)  # fmt: skip

    def _open(self) -> _File | None:
        if self._file is None and not self._has_failed:
            kind = type(self.dataset)
            facts = repr((FORMAT, kind.__module__, kind.__qualname__, _length(self.dataset), self.version))
            digest = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
            try:
                self._file = _File(self.directory, f"samples-{digest}.sqlite", self.max_bytes)
            except (sqlite3.Error, OSError) as error:
                self._failed("open", error)
        return self._file

    def _failed(self, action: str, error: sqlite3.Error | OSError) -> None:
        """Log an error, and use the file no more in this process; delete it if it is damaged."""
        if _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return  # other processes write: this sample is computed, or not stored
        logger.warning(
            "cannot %s the cache %s (%s): samples are computed without it until the worker restarts",
            action, self.directory, error,
        )  # fmt: skip
        self._has_failed = True
        self._close()
        if _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            for path in self.directory.glob("samples-*.sqlite*"):
                path.unlink(missing_ok=True)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def lock_for_fork(self) -> None:
        """Close the file, and keep it closed until `unlock_after_fork`.

        SQLite's table of locks is inherited: a child that opens a file of the parent again would not lock it.
        """
        self._lock.acquire()
        self._close()

    def unlock_after_fork(self) -> None:
        """Permit to open the file again, in the parent and in the child."""
        self._lock.release()

    def __getstate__(self) -> dict[str, Any]:
        names = ("dataset", "directory", "version", "max_bytes")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()


class _File:
    """Open database, read-only if it cannot be written.

    Args:
        directory: Directory of the file.
        name: Name of the file.
        max_bytes: Maximum size in bytes.

    Raises:
        OSError: If other users can write the directory.
        sqlite3.Error: If the file cannot be opened.
    """

    def __init__(self, directory: Path, name: str, max_bytes: int) -> None:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        _check_owner(directory)
        path = directory / name
        self.is_writable = True
        """False after an error, or once `max_bytes` is reached."""
        # autocommit: each statement is a transaction of its own
        self._database = sqlite3.connect(path, timeout=OPEN_TIMEOUT, isolation_level=None, check_same_thread=False)
        try:
            for statement in (
                "PRAGMA trusted_schema = OFF",
                f"PRAGMA page_size = {_PAGE_BYTES}",
                "PRAGMA journal_mode = TRUNCATE",
                "PRAGMA synchronous = OFF",
                f"PRAGMA max_page_count = {max_bytes // _PAGE_BYTES}",
                "CREATE TABLE IF NOT EXISTS samples (item PRIMARY KEY, seconds REAL NOT NULL, frame BLOB NOT NULL)",
            ):
                self._database.execute(statement)
        except sqlite3.Error as error:
            self.close()
            if _code(error) not in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR):
                raise
            self._database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)
            self.is_writable = False
        self._database.execute(f"PRAGMA busy_timeout = {int(LOCK_TIMEOUT * 1000)}")
        with suppress(OSError):  # a read-only file system
            os.utime(path)
            _delete_unused(directory, name)

    def read(self, item: int | str) -> tuple[float, bytes] | None:
        """Return time to compute and frame of a sample; None if it is not stored."""
        found = self._database.execute("SELECT seconds, frame FROM samples WHERE item = ?", (item,)).fetchone()
        return None if found is None else (float(found[0]), bytes(found[1]))

    def write(self, item: int | str, seconds: float, frame: bytes) -> None:
        """Store a sample."""
        self._database.execute("INSERT OR REPLACE INTO samples VALUES (?, ?, ?)", (item, seconds, frame))

    def exceeds(self, max_bytes: int, nbytes: int) -> bool:
        """Return True if the file would exceed the maximum size with `nbytes` more bytes."""
        (pages,) = self._database.execute("PRAGMA page_count").fetchone()
        return bool((pages + _SPARE_PAGES) * _PAGE_BYTES + nbytes > max_bytes)

    def close(self) -> None:
        """Close the database."""
        with suppress(sqlite3.Error):
            self._database.close()

    def __del__(self) -> None:
        """Close the database: since Python 3.13, sqlite3 warns of a connection that is deleted."""
        if hasattr(self, "_database"):
            self.close()


def _check_owner(directory: Path) -> None:
    """Check that no other user can write a directory.

    Raises:
        PermissionError: If another user can: the samples of the cache could be that user's.
    """
    status = directory.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"other users can write the directory (owner {status.st_uid}, mode {stat.filemode(status.st_mode)}): run "
            f"chmod 755 {directory}, or use a directory of the workers' user"
        )


def _delete_unused(directory: Path, name: str) -> None:
    """Delete files of other versions that no process has opened for `UNUSED_SECONDS`."""
    for path in directory.glob("samples-*.sqlite*"):
        if not path.name.startswith(name) and path.stat().st_mtime < time.time() - UNUSED_SECONDS:
            path.unlink(missing_ok=True)


def _code(error: sqlite3.Error | OSError) -> int | None:
    """Return the primary result code of an SQLite error; None for other errors."""
    code = getattr(error, "sqlite_errorcode", None)  # with more bits for details
    return None if code is None else code & 0xFF


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def _batch_id(index: Any) -> BatchId:
    """Return the batch ID of a sample's frame, which contains the key, because the checksum must cover it."""
    return BatchId(repr(key_of(index)), 0, 0)


def _decoded(frame: bytes, index: Any, *, generate_classes: bool) -> Any:
    """Return the sample in a frame, in memory of its own.

    Args:
        frame: The frame.
        index: Index of the sample.
        generate_classes: False to reject a record whose class this process has not imported.

    Raises:
        TeleloaderError: If the frame is damaged or belongs to another index, or a type in it is not registered.
    """
    memory = TorchMemory(np.frombuffer(bytearray(frame), np.uint8))
    found = codec.read(memory, generate_classes=generate_classes)
    if found.batch_id != _batch_id(index):
        raise TeleloaderError(f"the frame of sample {index!r} belongs to sample {found.batch_id.loader}")
    if isinstance(found.content, Failure):
        raise TeleloaderError(found.content.message)
    return found.content


_caches: weakref.WeakSet[CachedDataset] = weakref.WeakSet()
"""All caches of this process."""
_locked: list[CachedDataset] = []
"""Caches that are locked while the process forks."""


def _before_fork() -> None:
    for cache in list(_caches):
        cache.lock_for_fork()
        _locked.append(cache)


def _after_fork() -> None:
    while _locked:
        _locked.pop().unlock_after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
