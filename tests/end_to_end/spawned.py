"""Datasets that do not work in a forked process, or record where they are built."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from teleloader_server import get_worker_info
from tests.end_to_end.hosted import Samples

_initialized: list[int] = []
"""Arguments of the calls of `remember`."""


class Threaded:
    """Map-style dataset that computes its samples in a thread, as clients of gRPC do: without it, a request hangs."""

    def __init__(self, length: int = 40) -> None:
        self._length = length
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._threads.submit(int).result()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return self._threads.submit(lambda: index * index).result()


class Identified(Threaded):
    """The same with the PID of the worker in each sample."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), os.getpid()


class ThreadedStream:
    """Iterable-style dataset of 20 numbers that come from a thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1)
        self._threads.submit(int).result()

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        for number in range(20)[info.id :: info.num_workers] if info else range(20):
            yield self._threads.submit(int, number).result()


def builders() -> list[int]:
    """Return the PID of each process that has built a dataset with `record`."""
    path = Path(os.environ["BUILDERS"])
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def record() -> int:
    """Record that this process builds a dataset; return how many have before."""
    before = len(builders())
    with Path(os.environ["BUILDERS"]).open("a") as file:
        file.write(f"{os.getpid()} ")
    return before


def recorded() -> Samples:
    """Record the process, whose PID each sample also has."""
    record()
    return Samples(lambda index: (index, os.getpid(), len(_initialized)))


def remember(worker: int) -> None:
    """Worker-init function that counts its calls."""
    _initialized.append(worker)


def shuffled() -> Samples:
    """Return 40 samples in an order that is drawn without a seed, as from a list of files."""
    order = random.sample(range(40), 40)
    return Samples(lambda index: (order[index], os.getpid()), 40)


def fails_at_first() -> Samples:
    """Fail in the first worker that builds it."""
    if record() == 1:
        raise ConnectionError("the store is not available")
    return Samples(int)


def kills_workers() -> Samples:
    """End each process that builds it, except for the first."""
    if record():
        os._exit(3)
    return Samples(int)


def grows() -> Samples:
    """Have one more sample in each process."""
    return Samples(int, 10 + record())


def fails() -> Any:
    """Fail in each process."""
    raise RuntimeError("the disk is not mounted")


def crashes() -> Any:
    """End the process by a signal, as a fault in C code does."""
    os.kill(os.getpid(), signal.SIGSEGV)
