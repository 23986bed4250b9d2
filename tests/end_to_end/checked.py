"""Datasets to check: valid ones, and ones with problems."""

from __future__ import annotations

import io
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

from teleloader_server import get_worker_info
from tests.end_to_end.hosted import SAMPLES, Samples

dicts = Samples(SAMPLES["dict"])


def talkative() -> Samples:
    """Return a dataset that prints, which must not disturb the output."""
    print("{building}")

    def make(index: int) -> int:
        print(f"sample {index}")
        return index

    return Samples(make, 300)


generator = np.random.default_rng(3)


class OwnGenerator:
    """Dataset that draws from its own generator, which is seeded for each batch."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(3)

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "noise": self._noise()}

    def _noise(self) -> float:
        return float(self._generator.normal())


class OthersGenerator(OwnGenerator):
    """Dataset that draws from a variable of its module."""

    def _noise(self) -> float:
        return float(generator.normal())


class LateGenerator(OwnGenerator):
    """Dataset that creates its generator for the first sample."""

    def _noise(self) -> float:
        if not hasattr(self, "late"):
            self.late = np.random.default_rng()
        return float(self.late.normal())


class Unknown(OwnGenerator):
    """Dataset whose random numbers come from nowhere."""

    def _noise(self) -> float:
        return float(os.urandom(1)[0])


class OpenFile:
    """Dataset of samples in a file that is opened before workers are forked."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(buffering=0)  # noqa: SIM115 - that is the mistake
        self._file.write(np.arange(2000 * 100, dtype=np.int32).tobytes())

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> Any:
        self._file.seek(400 * index)
        time.sleep(0.0003)  # another worker comes between
        return np.frombuffer(self._file.read(400), np.int32).copy()


def mapped() -> Any:
    """Return a memory-mapped file, which stays open."""
    return np.memmap(__file__, np.uint8, "r")


def threaded() -> Samples:
    """Return a dataset after starting a thread."""
    threading.Thread(target=threading.Event().wait, name="reader", daemon=True).start()
    return Samples(int)


def ragged() -> Samples:
    """Return a dataset whose samples have different shapes."""
    return Samples(lambda index: np.zeros(index % 3 + 1))


nones = [{"label": None}] * 64


def crashes() -> Samples:
    """Exit the process while the dataset is built."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return Samples(int)


def exits() -> Samples:
    """Return a dataset whose sample 5 exits the worker."""
    return Samples(lambda index: os._exit(3) if index == 5 else index)


def hangs() -> Samples:
    """Return a dataset whose sample 5 hangs."""
    return Samples(lambda index: threading.Event().wait() if index == 5 else index)


class Shards:
    """Iterable-style dataset in which each worker yields its part."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(1000) if info is None else range(info.id, 1000, info.num_workers))


class Replicas:
    """Iterable-style dataset in which each worker yields all samples."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(1000))


def _slow_sample(index: int) -> int:
    time.sleep(0.001)
    return index


def _encoded(kind: str) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((600, 600)).save(file, kind)
    return file.getvalue()


class Pictures:
    """Dataset of image files in memory, decoded with Pillow; `work` is called for each sample as well."""

    def __init__(self, kind: str, work: Callable[[], object]) -> None:
        self._file = _encoded(kind)
        self._work = work

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Any:
        self._work()
        with Image.open(io.BytesIO(self._file)) as image:
            return np.asarray(image.crop((0, 0, 8, 8)))


class RandomPictures(Pictures):
    """The same with random brightness."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) * np.random.random()


def jpegs() -> Pictures:
    """Return a dataset that spends its time decoding JPEG files."""
    return Pictures("JPEG", lambda: None)


def random_jpegs() -> Pictures:
    """Return a dataset whose samples depend on random numbers, and take long."""
    return RandomPictures("JPEG", lambda: sum(range(10**6)))


def pngs() -> Pictures:
    """Return a dataset that decodes PNG files."""
    return Pictures("PNG", lambda: None)


def few_jpegs() -> Pictures:
    """Return a dataset that decodes JPEG files, and spends most of its time in its own Python code."""
    return Pictures("JPEG", lambda: sum(range(10**6)))


slowly = Samples(_slow_sample, 1_000_000)
"""Dataset with slow samples and a very long epoch."""


def collate_total(samples: list[int]) -> dict[str, int]:
    """Return the total of the samples."""
    return {"total": sum(samples)}


def collate_images(samples: list[Any]) -> dict[str, Any]:
    """Return images, whose type a process without Pillow cannot restore."""
    return {"images": [Image.new("L", (2, 3), color) for color in range(len(samples))]}


def collate_unfinished(samples: list[Any]) -> Any:
    """Raise an exception, as a function that was never called before."""
    raise NotImplementedError(f"{len(samples)} samples")


class NoLength:
    """Map-style dataset without a length, which needs the user's own sampler."""

    def __getitem__(self, index: int) -> int:
        return index


empty: list[int] = []
