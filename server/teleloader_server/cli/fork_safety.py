"""Detection of datasets that do not work in forked workers, for ``teleloader-server check``."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from teleloader_server.loading.generators import reachable

UNSAFE_LIBRARIES: Final = ("grpc", "lance")
"""Libraries that start native threads once they are used, possibly after the check."""
UNSAFE_TYPES: Final = {
    "lmdb": "Environment", "pyarrow.fs": "S3FileSystem GcsFileSystem", "lance": "LanceDataset", "grpc": "Channel",
}  # fmt: skip
"""Names of the types whose objects do not work in a forked process, by module."""

HARMLESS_THREADS: Final = {
    "tqdm_monitor": "refreshes progress bars every 10 s, and progress bars work without it",
    "jemalloc_bg_thd": "returns unused memory of Arrow; jemalloc has fork handlers, and works without the thread",
}
"""Reason why a dataset works in a forked process without the thread, by the name of the thread. Arrow's own threads
have the name of the process, and Arrow starts new ones after a fork."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Threads and imported libraries of this process, to be compared before and after a dataset is built."""

    threads: frozenset[threading.Thread] = field(default_factory=lambda: frozenset(threading.enumerate()))
    native_threads: frozenset[tuple[int, str]] = field(default_factory=lambda: frozenset(_native_threads()))
    """ID and name of each thread that is not Python's."""
    libraries: frozenset[str] = field(default_factory=lambda: frozenset(set(UNSAFE_LIBRARIES) & set(sys.modules)))


def dangers(before: ProcessState, dataset: Any) -> list[str]:
    """Return the reasons why a dataset, built in this process since `before`, does not work in a forked process."""
    now = ProcessState()
    found = []
    threads = sorted({thread.name for thread in now.threads - before.threads} - HARMLESS_THREADS.keys())
    threads += sorted({name for _, name in now.native_threads - before.native_threads} - HARMLESS_THREADS.keys())
    if threads:
        found.append(f"building the dataset starts threads: {', '.join(threads)}")
    if libraries := sorted(now.libraries - before.libraries):
        found.append(f"building the dataset imports {', '.join(libraries)}")
    types = dict(_unsafe_types())
    for path, each in reachable(dataset):
        found += [f"dataset{path} is a {name}" for kind, name in types.items() if issubclass(type(each), kind)]
    return found


def _native_threads() -> Iterator[tuple[int, str]]:
    """Yield the threads of native libraries that have a name of their own.

    The threads of OpenBLAS and OpenMP have the name of the process; these libraries are prepared for a fork. Threads
    whose names start with ``iou-`` belong to the kernel's io_uring, which some versions of uvloop use.
    """
    known = {thread.native_id for thread in threading.enumerate()}
    names = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            names[int(task.name)] = (task / "comm").read_text().rstrip()
    main = names.get(os.getpid())
    names = {thread: name for thread, name in names.items() if name != main and not name.startswith("iou-")}
    yield from ((thread, name) for thread, name in names.items() if thread not in known)


def _unsafe_types() -> Iterator[tuple[type, str]]:
    """Yield the types that exist in this process, with their full names."""
    for module, names in UNSAFE_TYPES.items():
        for name in names.split():
            kind = getattr(sys.modules.get(module), name, None)  # the module may be a build without this type
            if isinstance(kind, type):
                yield kind, f"{module}.{name}"
