"""Cache of a dataset's samples in a file, between deterministic loading and random transforms.

A dataset whose samples do not depend on random numbers is wrapped in `CachedDataset`; random transforms are applied to
the samples of the wrapper. All workers and servers of a machine, and later runs, share the file.

The file is an SQLite database with frames (`codec`) as values: nothing is unpickled, and each value has a checksum.
SQLite is part of Python and safe against processes that are killed at any moment. LMDB would read large samples faster
(a copy less), but reserves its maximum size as address space, and is a further dependency of servers.

There is no eviction. An epoch visits each sample once, so of the samples that do not fit, each policy evicts samples
before their next visit; those that are stored first are as useful as any others, and cost no further writes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from teleloader_server.loading.random_state import random_state, seed_all, set_random_state
from teleloader_server.loading.tasks import CacheCounts, integer_of
from teleloader_shared import codec
from teleloader_shared.codec import BatchId, Failure
from teleloader_shared.errors import TeleloaderError
from teleloader_shared.forks import after_fork_in_child
from teleloader_shared.memory import TorchMemory

logger = logging.getLogger(__name__)

FORMAT: Final = 1
"""Version of the file format, part of the file's name."""
LOCK_TIMEOUT: Final = 0.1
"""Time in seconds to wait for another process that writes; after it, the sample is not stored."""
_PAGE_BYTES: Final = 16 * 2**10
_SPARE_PAGES: Final = 4
"""Pages that a new sample may need in addition to its size."""
_MIN_BYTES: Final = 2**20
_LOG_BYTES: Final = 64 * 2**20
"""Size to which SQLite truncates its write-ahead log."""
_SEED: Final = 0x5EED_0F_CA0E
_SAMPLE: Final = BatchId("", 0, 0)


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

    The first sample that a process reads from the file is compared with a recomputed one, which detects samples that
    depend on random numbers, and files of other data or code. Samples are copies, which transforms may modify. The
    random generators of `random`, NumPy and torch are the same after each sample, whether it was computed or read.

    If the file cannot be written or read (full disk, I/O error), a warning is logged, and samples are computed.

    Args:
        dataset: Map-style dataset. ``dataset[index]`` must depend on `index` alone.
        directory: Directory of the file on a local disk, created if necessary. Datasets need directories of their own:
            files of other versions in it are deleted.
        version: Version of data and code. Change it whenever a sample would be different.
        max_bytes: Maximum size of the file in bytes, at least 1 MiB. Once it is reached, further samples are computed
            each time. SQLite's write-ahead log beside the file takes up to some 64 MiB.

    Raises:
        TypeError: If `dataset` is not map-style.
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
        """The open file; None before the first sample, and after an error."""
        self._has_failed = False
        """True after an error, until the process ends."""
        self._is_verified = False
        """True once a sample that was read has been compared with a recomputed one."""
        _caches.add(self)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        """Return a sample, from the file if it contains the sample. Only integers and strings as indices are stored.

        Raises:
            EncodeError: If the sample cannot be encoded, see "Types" in the documentation.
            ValueError: If the first sample that was read differs from a recomputed one.
        """
        began = time.perf_counter()
        key = index if isinstance(index, str) else integer_of(index)
        found = None if key is None else self._read(key)
        if found is None:
            frame, seconds = self._compute(index)
            if key is not None:
                self._write(key, seconds, frame)
            _count(0, 1, 0.0)
            return _decoded(frame)
        seconds, frame, sample = found
        saved = seconds - (time.perf_counter() - began)
        if not self._is_verified:
            self._verify(index, frame)
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
        return codec.to_bytes(_SAMPLE, sample, name="sample"), seconds

    def _verify(self, index: Any, frame: bytes) -> None:
        # an unusual seed: a caller that seeds the generators for each sample must not hide that the sample is random
        if self._compute(index, _SEED)[0] != frame:
            raise ValueError(
                f"sample {index!r} in the cache {self.directory} differs from the recomputed one: the sample depends "
                "on random numbers, or data or code have changed. Apply random transforms to the samples of the "
                "CachedDataset, and change version= with each change of data or code"
            )
        self._is_verified = True

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
            return *found, _decoded(found[1])
        except TeleloaderError:
            return None  # damaged: the sample is computed, and replaced in the file

    def _write(self, key: int | str, seconds: float, frame: bytes) -> None:
        with self._lock:
            file = self._open()
            if file is None or file.is_full:
                return
            try:
                file.write(key, seconds, frame)
            except sqlite3.Error as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    self._failed("write", error)
                    return
                file.is_full = True
                if file.exceeds(self.max_bytes, len(frame)):
                    logger.info("the cache %s has reached max_bytes=%d", self.directory, self.max_bytes)
                else:
                    logger.warning("cannot write the cache %s: the disk is full", self.directory)

    def _open(self) -> _File | None:
        if self._file is None and not self._has_failed:
            facts = repr((FORMAT, type(self.dataset).__qualname__, _length(self.dataset), self.version))
            digest = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
            try:
                self._file = _File(self.directory, f"samples-{digest}.sqlite", self.max_bytes)
            except (sqlite3.Error, OSError) as error:
                self._failed("open", error)
        return self._file

    def _failed(self, action: str, error: sqlite3.Error | OSError) -> None:
        """Log an error, and use the file no more in this process; delete it if it is damaged."""
        code = getattr(error, "sqlite_errorcode", None)
        if code == sqlite3.SQLITE_BUSY:
            return  # other processes write: this sample is computed, or not stored
        logger.warning(
            "cannot %s the cache %s (%s): samples are computed without it until the worker restarts",
            action, self.directory, error,
        )  # fmt: skip
        file, self._file, self._has_failed = self._file, None, True
        if file is not None:
            file.close()
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            _delete(self.directory, except_name=None)

    def leave_to_parent(self) -> None:
        """Forget the parent's connection in a forked child: SQLite connections must not be used, or closed, there."""
        _of_parent.append(self._file)
        self._start()

    def __getstate__(self) -> dict[str, Any]:
        names = ("dataset", "directory", "version", "max_bytes")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()


class _File:
    """Open database.

    Args:
        directory: Directory of the file.
        name: Name of the file; files of other versions are deleted.
        max_bytes: Maximum size in bytes.
    """

    def __init__(self, directory: Path, name: str, max_bytes: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        _delete(directory, except_name=name)
        self.is_full = False
        """True after a sample did not fit."""
        # autocommit: each statement is a transaction of its own
        self._database = sqlite3.connect(
            directory / name, timeout=LOCK_TIMEOUT, isolation_level=None, check_same_thread=False
        )
        try:
            for statement in (
                f"PRAGMA page_size = {_PAGE_BYTES}",
                "PRAGMA journal_mode = WAL",
                "PRAGMA synchronous = NORMAL",
                f"PRAGMA journal_size_limit = {_LOG_BYTES}",
                f"PRAGMA max_page_count = {max_bytes // _PAGE_BYTES}",
                "CREATE TABLE IF NOT EXISTS samples (item PRIMARY KEY, seconds REAL NOT NULL, frame BLOB NOT NULL)",
            ):
                self._database.execute(statement)
        except sqlite3.Error:
            self.close()
            raise

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


def _delete(directory: Path, except_name: str | None) -> None:
    """Delete the files of all versions but one; processes that have them open continue with the deleted files."""
    for path in directory.glob("samples-*.sqlite*"):
        if except_name is None or not path.name.startswith(except_name):
            path.unlink(missing_ok=True)


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def _decoded(frame: bytes) -> Any:
    """Return the sample in a frame, in memory of its own.

    Raises:
        TeleloaderError: If the frame is damaged, or a type in it is not registered or not imported.
    """
    # a generated class would differ from that of computed samples: the dataset may import its class later
    content = codec.read(TorchMemory(np.frombuffer(bytearray(frame), np.uint8)), generate_classes=False).content
    if isinstance(content, Failure):
        raise TeleloaderError(content.message)
    return content


_caches: weakref.WeakSet[CachedDataset] = weakref.WeakSet()
"""All caches of this process."""
_of_parent: list[_File | None] = []
"""Connections of the parent, in a forked child."""


def _leave_to_parent() -> None:
    for cache in list(_caches):
        cache.leave_to_parent()


after_fork_in_child(_leave_to_parent)
