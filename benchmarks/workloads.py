"""Workloads of the benchmarks. Servers host their datasets as ``benchmarks.workloads:WIRE.dataset`` and so on.

`wire` and `small` do no work, so that only the loader is measured; the others resemble real training data.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pkgutil import resolve_name
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from teleloader_shared.codec import BatchId, to_bytes

Arrays = list[NDArray[Any]]

EPOCH_BATCHES: Final = 10**6
FRAMES: Final = 8
"""Number of batches whose sizes the floor repeats."""


class InMemory:
    """Dataset in memory of any length; sample i is row ``i % len(rows)``."""

    def __init__(self, shape: tuple[int, ...], dtype: str, length: int) -> None:
        self.rows = _rows(shape, dtype)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[Any]:
        sample: NDArray[Any] = self.rows[index % len(self.rows)]
        return sample


class Table:
    """Table in memory; a sample is a row of 32 float32 values and its label."""

    ROWS: Final = 10**6

    def __init__(self, length: int) -> None:
        self.rows = _rows((self.ROWS, 32), "float32")
        self.labels = np.arange(self.ROWS) % 1000
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], np.int64]:
        index %= self.ROWS
        return self.rows[index], self.labels[index]


class WholeBatches(Table):
    """The same table, which returns a whole batch for an array of indices."""

    def __getbatch__(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the batch without computing single samples."""
        rows = indices % self.ROWS
        return self.rows[rows], self.labels[rows]


class Ragged:
    """Dataset of sequences of 16 to 255 tokens, slices of one array."""

    def __init__(self, length: int) -> None:
        generator = np.random.default_rng(0)
        self._tokens = generator.integers(0, 50_000, 2**20)
        self._sizes = generator.integers(16, 256, 1009)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        start = index * 7919 % (len(self._tokens) - 256)
        return self._tokens[start : start + int(self._sizes[index % len(self._sizes)])]


class Photographs:
    """Dataset of JPEG files in memory; a sample is decoded, and a crop drawn from its index is resized."""

    FILES: Final = 250
    SIZE: Final = (500, 375)

    def __init__(self, length: int) -> None:
        self._length = length
        self.files = self._drawn()

    @classmethod
    @cache
    def _drawn(cls) -> list[bytes]:
        return [cls._draw(number) for number in range(cls.FILES)]

    @classmethod
    def _draw(cls, number: int) -> bytes:
        from PIL import Image

        generator = np.random.default_rng(number)
        # enlarged coarse noise, with about the detail and file size of a photograph
        coarse = Image.fromarray(generator.integers(0, 256, (48, 64, 3), np.uint8), "RGB")
        file = io.BytesIO()
        coarse.resize(cls.SIZE, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        return file.getvalue()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        return self.sample(self.files[index % self.FILES], index)

    def sample(self, file: bytes, index: int) -> NDArray[np.uint8]:
        """Return the sample of an index, whose file is given."""
        generator = np.random.default_rng(index)
        width, height = self.SIZE
        size = int(generator.integers(160, height))
        left, top = int(generator.integers(0, width - size)), int(generator.integers(0, height - size))
        return self._decoded(file, left, top, size).transpose(2, 0, 1)

    @staticmethod
    def _decoded(file: bytes, left: int, top: int, size: int) -> NDArray[np.uint8]:
        """Decode a file; crop a square, and resize it to 224x224."""
        from PIL import Image

        with Image.open(io.BytesIO(file)) as image:
            box = (left, top, left + size, top + size)
            return np.array(image.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR, box))


class NativePhotographs(Photographs):
    """The same files, decoded by simplejpeg and resized by OpenCV, whose pixels differ slightly from Pillow's."""

    @staticmethod
    def _decoded(file: bytes, left: int, top: int, size: int) -> NDArray[np.uint8]:
        import cv2
        import simplejpeg

        cv2.setNumThreads(1)  # each worker process uses one core
        crop = simplejpeg.decode_jpeg(file)[top : top + size, left : left + size]
        resized: NDArray[np.uint8] = cv2.resize(crop, (224, 224), interpolation=cv2.INTER_LINEAR)
        return resized


@dataclass(frozen=True, slots=True)
class Workload:
    """Dataset with batch size and collate function."""

    name: str
    """Name of the variable in this module, in lower case."""
    about: str
    batch_size: int
    make: Callable[[int], Any]
    """Constructs the dataset with a given length."""
    order_length: int | None = None
    """Number of samples that all contenders load in a random order; None selects ascending order."""
    whole_batches: bool = False
    """True if contenders fetch whole batches with `__getbatch__`."""
    collate: str | None = None
    """Collate function as ``module:function``, imported only when needed; None selects torch's default."""
    num_workers: int = 1
    """Number of processes that run the dataset."""
    requires: Sequence[str] = ()
    """Optional modules that the dataset imports."""

    @property
    def missing(self) -> list[str]:
        """Optional modules that are not installed."""
        return [module for module in self.requires if importlib.util.find_spec(module) is None]

    @property
    def shuffled(self) -> bool:
        """True if all contenders load the samples in a random order."""
        return self.order_length is not None

    @property
    def table(self) -> str:
        """Configuration table of a server."""
        collate = "" if self.collate is None else f'collate = "{self.collate}"\n'
        return f'factory = "{__name__}:{self.name.upper()}.dataset"\n{collate}'

    @property
    def collate_function(self) -> Any:
        """Collate function, or None."""
        return None if self.collate is None else resolve_name(self.collate)

    def dataset(self) -> Any:
        """Return the dataset, longer than any run."""
        return self.make(EPOCH_BATCHES * self.batch_size)

    def order(self) -> Iterator[int]:
        """Return sample indices in the order of contenders without shuffling."""
        if self.order_length is None:
            yield from range(EPOCH_BATCHES * self.batch_size)
            return
        while True:
            yield from np.random.default_rng(0).permutation(self.order_length).tolist()

    def batches(self) -> Iterator[list[int]]:
        """Return the indices of each batch in this order."""
        order = self.order()
        return iter(lambda: list(islice(order, self.batch_size)), [])

    def columns(self, dataset: Any, indices: Sequence[int] | NDArray[np.int64]) -> list[Any]:
        """Return the arrays of a batch, each either as an array or as a sequence of the samples' values."""
        if self.whole_batches:
            return arrays(dataset.__getbatch__(np.asarray(indices)))
        samples = [dataset[i] for i in indices]
        if self.collate is not None:
            return arrays(self.collate_function(samples))
        return list(zip(*samples, strict=True)) if isinstance(samples[0], tuple) else [samples]

    def expected(self, dataset: Any, indices: Sequence[int] | NDArray[np.int64]) -> Arrays:
        """Return the arrays of a batch."""
        columns = self.columns(dataset, indices)
        return [column if isinstance(column, np.ndarray) else np.stack(column) for column in columns]


def arrays(batch: Any) -> Arrays:
    """Return the arrays of a batch, in the order of its keys or elements."""
    if isinstance(batch, Mapping):
        return [array for value in batch.values() for array in arrays(value)]
    if isinstance(batch, tuple | list):
        return [array for value in batch for array in arrays(value)]
    return [np.asarray(batch)]


@cache
def sizes(workload: Workload) -> tuple[list[int], float]:
    """Return the sizes of the first frames as a server sends them, and the mean size of their elements, in bytes."""
    dataset, found, content = workload.dataset(), [], 0
    for k, indices in enumerate(islice(workload.batches(), FRAMES)):
        batch = workload.expected(dataset, indices)
        found.append(len(to_bytes(BatchId("0" * 32, 0, k), batch)))
        content += sum(array.nbytes for array in batch)
    return found, content / FRAMES


@cache
def _rows(shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    values = np.random.default_rng(0).integers(0, 64, size, np.uint8)  # as floats, these bytes contain no NaN
    return values.view(dtype).reshape(shape)


# 257 and 1009 rows, which the batch sizes do not divide, so that consecutive batches differ
WIRE: Final = Workload(
    "wire", "38.5 MB batches: 256 images of 3x224x224, uint8", 256, partial(InMemory, (257, 3, 224, 224), "uint8")
)
SMALL: Final = Workload(
    "small", "4 KB batches: one sample of 1024 float32", 1, partial(InMemory, (1009, 1024), "float32")
)
TABLE: Final = Workload(
    "table", "1,000,000 rows of 32 float32 and an int64 label, shuffled, 256 a batch, fetched one by one", 256, Table,
    Table.ROWS,
)  # fmt: skip
WHOLE: Final = Workload(
    "whole", "the same table, fetched as whole batches", 256, WholeBatches, Table.ROWS, whole_batches=True
)
TOKENS: Final = Workload(
    "tokens",
    "250 KB batches: 120 sequences of 16 to 255 int64 tokens, padded",
    120,
    Ragged,
    collate="benchmarks.padding:pad",
)
JPEG: Final = Workload(
    "jpeg",
    "9.6 MB batches: 64 JPEGs of 500x375, decoded, cropped, resized to 3x224x224",
    64,
    Photographs,
    num_workers=2,
)
JPEG_NATIVE: Final = Workload(
    "jpeg_native",
    "the same JPEGs, decoded by simplejpeg, resized by OpenCV",
    64,
    NativePhotographs,
    num_workers=2,
    requires=("simplejpeg", "cv2"),
)
WORKLOADS: Final = {workload.name: workload for workload in (WIRE, SMALL, TABLE, WHOLE, TOKENS, JPEG, JPEG_NATIVE)}
