"""Workloads of the benchmarks. Servers host their datasets as ``benchmarks.workloads:WIRE.dataset`` and so on.

`wire` and `small` do no work, so that only the loader is measured; the others resemble real training data.
`Workload.fill` computes a batch for producers with plain sockets.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Arrays = list[NDArray[Any]]

EPOCH_BATCHES: Final = 10**6


class InMemory:
    """Dataset in memory of any length; sample i is row ``i % len(rows)``."""

    def __init__(self, rows: NDArray[Any], length: int) -> None:
        self._rows = rows
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[Any]:
        sample: NDArray[Any] = self._rows[index % len(self._rows)]
        return sample


class WholeBatches(InMemory):
    """Dataset in memory that returns a whole batch for an array of indices."""

    def __getbatch__(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Return the batch without computing single samples."""
        return self._rows.take(indices, axis=0, mode="wrap")


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

    FILES: Final = 2000
    SIZE: Final = (500, 375)

    def __init__(self, length: int) -> None:
        self._length = length
        self._files = self._drawn()

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
        from PIL import Image

        generator = np.random.default_rng(index)
        width, height = self.SIZE
        size = int(generator.integers(160, height))
        left, top = int(generator.integers(0, width - size)), int(generator.integers(0, height - size))
        with Image.open(io.BytesIO(self._files[index % self.FILES])) as image:
            part = image.convert("RGB").resize(
                (224, 224), Image.Resampling.BILINEAR, (left, top, left + size, top + size)
            )
        return np.array(part).transpose(2, 0, 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """Dataset with batch size and collate function; samples of equal shape are stacked."""

    name: str
    """Name of the variable in this module, in lower case."""
    about: str
    batch_size: int
    sample_shape: tuple[int, ...]
    dtype: str
    rows: int
    """Number of different samples, which the batch size does not divide, so that consecutive batches differ."""
    shuffled: bool = False
    """True if all contenders load the samples in a random order."""
    whole_batches: bool = False
    """True if contenders fetch whole batches with `__getbatch__`."""
    collate: str | None = None
    """Collate function as ``module:function``, imported only when needed; None selects torch's default."""

    @property
    def max_bytes(self) -> int:
        """Maximum number of bytes that `fill` writes."""
        return self.batch_bytes

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch's elements, counted for every contender regardless of its encoding."""
        return self.batch_size * int(np.prod(self.sample_shape)) * np.dtype(self.dtype).itemsize

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
        kind = WholeBatches if self.whole_batches else InMemory
        return kind(_rows(self), EPOCH_BATCHES * self.batch_size)

    def order(self) -> Iterator[int]:
        """Return sample indices in the order of contenders without shuffling."""
        if not self.shuffled:
            yield from range(EPOCH_BATCHES * self.batch_size)
        while self.shuffled:
            yield from np.random.default_rng(0).permutation(self.rows).tolist()

    def fill(self, dataset: Any, indices: Sequence[int], out: NDArray[np.uint8]) -> int:
        """Write a batch to the start of `out`; return its size in bytes."""
        batch = out.view(self.dtype).reshape(self.batch_size, *self.sample_shape)
        if self.whole_batches:
            batch[:] = dataset.__getbatch__(np.asarray(indices))
        else:
            np.stack([dataset[i] for i in indices], out=batch)
        return out.nbytes

    def arrays(self, batch: Any) -> Arrays:
        """Return the arrays of a batch of any contender."""
        if isinstance(batch, memoryview):
            return [np.frombuffer(batch, self.dtype).reshape(self.batch_size, *self.sample_shape)]
        return [np.asarray(batch)]

    def expected(self, dataset: Any, indices: Sequence[int]) -> Arrays:
        """Return the expected arrays."""
        return [np.stack([dataset[i] for i in indices])]


class Padded(Workload):
    """Workload of sequences that are padded in each batch."""

    __slots__ = ()

    @property
    def max_bytes(self) -> int:
        """Maximum number of bytes that `fill` writes."""
        return 8 + self.batch_size * 8 * 257

    def dataset(self) -> Ragged:
        """Return the dataset, longer than any run."""
        return Ragged(EPOCH_BATCHES * self.batch_size)

    def fill(self, dataset: Any, indices: Sequence[int], out: NDArray[np.uint8]) -> int:
        """Write the longest sample's length, all lengths, and the rows."""
        samples = [dataset[i] for i in indices]
        words = out.view(np.int64)
        words[0] = longest = max(map(len, samples))
        words[1 : 1 + self.batch_size] = [len(sample) for sample in samples]
        ids = words[1 + self.batch_size :][: self.batch_size * longest].reshape(self.batch_size, longest)
        ids[:] = 0
        for row, sample in zip(ids, samples, strict=True):
            row[: len(sample)] = sample
        return 8 * (1 + self.batch_size * (1 + longest))

    def arrays(self, batch: Any) -> Arrays:
        """Return tokens and lengths."""
        if isinstance(batch, memoryview):
            words = np.frombuffer(batch, np.int64)
            lengths, ids = words[1 : 1 + self.batch_size], words[1 + self.batch_size :]
            return [ids.reshape(self.batch_size, int(words[0])), lengths]
        return [np.asarray(batch["ids"]), np.asarray(batch["lengths"])]

    def expected(self, dataset: Any, indices: Sequence[int]) -> Arrays:
        """Return tokens and lengths."""
        return self.arrays(self.collate_function([dataset[i] for i in indices]))


class Decoded(Workload):
    """Workload of samples that are decoded."""

    __slots__ = ()

    def dataset(self) -> Photographs:
        """Return the dataset, longer than any run."""
        return Photographs(EPOCH_BATCHES * self.batch_size)


@cache
def _rows(workload: Workload) -> NDArray[Any]:
    shape = (workload.rows, *workload.sample_shape)
    size = int(np.prod(shape)) * np.dtype(workload.dtype).itemsize
    values = np.random.default_rng(0).integers(0, 64, size, np.uint8)  # as floats, these bytes contain no NaN
    return values.view(workload.dtype).reshape(shape)


WIRE: Final = Workload("wire", "38.5 MB batches: 256 images of 3x224x224, uint8", 256, (3, 224, 224), "uint8", rows=257)
SMALL: Final = Workload("small", "4 KB batches: one sample of 1024 float32", 1, (1024,), "float32", rows=1009)
TABLE: Final = Workload(
    "table", "1,000,000 rows of 32 float32, shuffled, 256 per batch, fetched one by one", 256, (32,), "float32", 10**6,
    shuffled=True,
)  # fmt: skip
WHOLE: Final = Workload(
    "whole", "the same table, fetched as whole batches", 256, (32,), "float32", 10**6, shuffled=True, whole_batches=True
)
TOKENS: Final = Padded(
    "tokens",
    "sequences of 16 to 255 int64 tokens, padded, 32 per batch",
    32,
    (170,),
    "int64",
    1009,
    collate="benchmarks.padding:pad",
)
JPEG: Final = Decoded(
    "jpeg", "JPEGs of 500x375, decoded, cropped, resized to 3x224x224, 64 per batch", 64, (3, 224, 224), "uint8", 2000
)
WORKLOADS: Final = {workload.name: workload for workload in (WIRE, SMALL, TABLE, WHOLE, TOKENS, JPEG)}
