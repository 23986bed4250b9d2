"""Datasets that servers under test host: ``tests.end_to_end.hosted:name``."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from teleloader_server import get_worker_info

Point = namedtuple("Point", ["x", "y"])


class Samples:
    """`length` samples, each made of its index by `make`."""

    def __init__(self, make: Any, length: int = 50) -> None:
        self._make = make
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return self._make(index)


SAMPLES: dict[str, Any] = {
    "dict": lambda i: {"image": np.full((2, 3), i, np.uint8), "label": i, "weight": i / 3},
    "tuple": lambda i: (np.arange(i, i + 4, dtype=np.float32), i % 2 == 0, np.float64(i)),
    "nested": lambda i: {"a": [i, (i + 1, {"b": np.int16(i)})], "p": Point(np.zeros(2, np.float16), f"p{i}")},
    "string": lambda i: f"sample {i}",
    "bytes": lambda i: (bytes([i]), str(i)),
    "scalar": lambda i: i * 0.5,
    "array": lambda i: np.array([[i, -i]], dtype=np.int64),
    "complex": lambda i: np.array([i + 1j], dtype=np.complex64),
}


class Augmented:
    """Draws from each random generator that users draw from."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        return {
            "python": random.random(),
            "numpy": np.random.normal(size=3),
            "torch": torch.randn(2),
            "index": index,
        }


class WithTorch:
    """Tensors, bfloat16 among them."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        return {"half": torch.full((2,), index / 7, dtype=torch.bfloat16), "bool": torch.tensor(index % 3 == 0)}


def failing() -> Samples:
    """Sample 17 cannot be had."""

    def make(index: int) -> int:
        if index == 17:
            raise ValueError(f"sample {index} is damaged")
        return index

    return Samples(make, 40)


class KillsOnce:
    """The worker that loads sample 20 first dies of SIGKILL in the middle of it."""

    def __init__(self, marker: str) -> None:
        self._marker = Path(marker)

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> int:
        if index == 20 and not self._marker.exists():
            self._marker.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def kills_once() -> KillsOnce:
    """The marker's path comes by the environment."""
    return KillsOnce(os.environ["KILL_MARKER"])


def killed_while_built() -> Samples:
    """The process that builds it is killed, as often as the environment says."""
    marker = Path(os.environ["KILL_MARKER"])
    with marker.open("a") as file:
        file.write("x")
    if marker.stat().st_size <= int(os.environ["KILLS"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return Samples(int)


class Poisoned:
    """Sample 5 ends every worker."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 5:
            sys.stdout.flush()
            os._exit(3)
        return index


class Large:
    """`megabytes` in memory, shared by all workers."""

    def __init__(self, megabytes: int) -> None:
        self._rows = np.ones((megabytes, 2**20), np.uint8)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> int:
        return int(self._rows[index].sum())


def large() -> Large:
    """256 MiB."""
    return Large(256)


def images() -> Samples:
    """Return samples of 3 MiB, which are sent in shared memory."""
    return Samples(lambda i: np.full(3 * 2**20, 1 + i % 251, np.uint8), 60)


def interfaces() -> Samples:
    """Return the names of the network interfaces of the worker."""
    return Samples(lambda i: ", ".join(name for _, name in socket.if_nameindex()))


def small_images() -> Samples:
    """Return samples of 2 MiB, which fit into the slots of `images`."""
    return Samples(lambda i: np.full(2 * 2**20, 1 + i % 251, np.uint8), 60)


class Slow:
    """Waits for a file to appear before it gives a sample; for tests that look at a server at work."""

    def __init__(self, gate: str) -> None:
        self._gate = Path(gate)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        while not self._gate.exists():
            time.sleep(0.005)
        return index


def slow() -> Slow:
    """A dataset that waits for a file, whose path is in the environment variable GATE."""
    return Slow(os.environ["GATE"])


def built_slowly() -> Slow:
    """A factory that waits for a file, whose path is in the environment variable GATE."""
    while not Path(os.environ["GATE"]).exists():
        time.sleep(0.005)
    return slow()


def counted() -> Samples:
    """A factory that appends a character to a file, whose path is in the environment variable BUILT."""
    with Path(os.environ["BUILT"]).open("a") as file:
        file.write(".")
    return Samples(int, 100_000)


def broken() -> Any:
    """A factory that fails."""
    raise RuntimeError("the disk is not mounted")


class Stream:
    """Iterable-style: the numbers below `length`, each shard every so manyth of them."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self._length)[info.id :: info.num_workers] if info else range(self._length))


def wide_stream() -> Iterator[Any]:
    """Iterable-style: 600 samples of 1 MiB."""
    for number in range(600):
        yield np.full(2**20, number % 251, np.uint8)


class Colleagues:
    """Map-style: every sample is the number of workers that its worker knows."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        assert info is not None
        return info.num_workers


stream = Stream(25)
long_stream = Stream(1000)
colleagues = Colleagues()
many = Samples(int, 100_000)
"""So many that an epoch takes a while."""


def unhurried() -> Samples:
    """Samples that take a millisecond each."""

    def make(index: int) -> int:
        time.sleep(0.001)
        return index

    return Samples(make, 1000)


class Paced:
    """500 samples that take as long as the constructor says."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> int:
        time.sleep(self._seconds)
        return index


nothing = 5
"""No dataset."""


def make_squares(length: int) -> Samples:
    """So many squares."""
    return Samples(lambda i: i * i, length)


_worker = -1


def remember_worker(worker: int) -> None:
    """A worker-init function."""
    global _worker
    _worker = worker


def collate_sum(samples: list[int]) -> dict[str, int]:
    """A collate function that knows which worker it runs in."""
    return {"sum": sum(samples), "worker": _worker}


numbers = [(i, float(i) ** 2) for i in range(100)]
samples = {name: Samples(make) for name, make in SAMPLES.items()}
augmented = Augmented()
with_torch = WithTorch()
poisoned = Poisoned()


def of_names(names: list[str]) -> list[str]:
    """As many samples as names."""
    return names


class LazyTorch:
    """Loads torch only when it is asked for a sample."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> float:
        import torch

        assert torch.utils.data.get_worker_info() is not None
        return float(torch.rand(1))


lazy_torch = LazyTorch()


def threaded() -> Samples:
    """Its factory starts a thread that never ends."""
    threading.Thread(target=threading.Event().wait).start()
    return Samples(lambda i: i)


heavy = Samples(lambda i: np.full(8 * 2**20, i, np.uint8), 64)
"""Batches that no socket's buffers hold."""
