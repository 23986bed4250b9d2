"""Helpers for tests of loading: computation of batches as in a worker, and datasets for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from teleloader_server.loading.datasets import host
from teleloader_server.loading.passes import Began
from teleloader_server.loading.pipeline import Loading
from teleloader_server.loading.stages import Batch
from teleloader_server.loading.tasks import Report, Task
from teleloader_shared import codec
from teleloader_shared.codec import (
    DEFAULT_MAX_BATCH_BYTES,
    PROLOGUE_SIZE,
    BatchId,
    Failure,
    Frame,
    Substituted,
    to_bytes,
)
from teleloader_shared.spec import LoaderSpec

Seeding = Literal["batch", "sample"]


class Made:
    """Dataset whose samples a function computes from their index."""

    def __init__(self, make: Callable[[int], Any], length: int = 12) -> None:
        self._make = make
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


class Cursor:
    """Infinite dataset of numbers, ten per epoch, which is its own iterator."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.position += 1
        if self.position % 11 == 0:
            raise StopIteration
        return self.position


class KeptCursor(Cursor):
    """Dataset like `Cursor`, with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state's position."""
        self.position = state["position"]


class Bench:
    """Loader of one dataset's batches, as in a worker."""

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Callable[[Any], Any] | None = None,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        seeding: Seeding = "batch",
        max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES,
        worker: int = 3,
        seeds: bool = True,
    ) -> None:
        hosted = host(dataset, name="data", collate=collate, functions=functions, seeding=seeding)
        self.length = hosted.info.length or 0
        self.places: list[NDArray[np.uint8]] = []
        self.report: Report | None = None
        self.began: list[Began] = []
        self.loading = Loading({"data": hosted}, worker, max_batch_bytes, began=self.began.append, seeds=seeds)

    def frame(
        self,
        batch: int = 0,
        epoch: int = 0,
        *,
        indices: Any = None,
        substituted: Substituted | None = None,
        **spec: Any,
    ) -> Frame:
        """Return the decoded frame of a batch; `substituted` is the record of an earlier computation."""
        self.places.clear()
        if indices is not None:
            spec = {"order": "client", "session": "mine", **spec}
        batch_id = BatchId("key", epoch, batch)
        listed = None if indices is None else to_bytes(batch_id, indices)
        task = Task(LoaderSpec(**{"dataset": "data", **spec}), self.length, batch_id, listed, substituted=substituted)
        nbytes, self.report = self.loading.load(task, self._place)
        raw = self.places[-1][:nbytes]
        assert codec.frame_size(raw[:PROLOGUE_SIZE].tobytes()) == nbytes
        frame = codec.read(codec.Bits(raw))
        assert frame.batch_id == task.batch_id
        return frame

    def batch(self, batch: int = 0, epoch: int = 0, **spec: Any) -> Any:
        """Return the content of a batch, which must not have failed."""
        content = self.frame(batch, epoch, **spec).content
        assert not isinstance(content, Failure), content.traceback
        return content

    def failure(self, batch: int = 0, epoch: int = 0, **spec: Any) -> Failure:
        """Return the failure in place of the batch."""
        content = self.frame(batch, epoch, **spec).content
        assert isinstance(content, Failure), "the batch did not fail"
        assert self.report is not None
        assert self.report.failed
        return content

    def run(self, indices: Any, **spec: Any) -> Batch:
        """Load a batch without encoding it, as a loader without a server."""
        spec = {"dataset": "data", "order": "client", "session": "mine", **spec}
        return self.loading.run(Task(LoaderSpec(**spec), self.length, BatchId("key", 0, 0)), indices)

    def _place(self, nbytes: int) -> NDArray[np.uint8]:
        room = np.empty(nbytes + 64, np.uint8)
        start = -room.ctypes.data % 64
        self.places.append(room[start : start + nbytes])
        return self.places[-1]


def raising(error: BaseException) -> Made:
    """Return a dataset whose sample 2 raises `error`."""

    def make(index: int) -> int:
        if index == 2:
            raise error
        return index

    return Made(make)


class Bulk(Made):
    """Dataset that reads several samples at once."""

    def __init__(self) -> None:
        super().__init__(lambda index: index)
        self.calls: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.calls.append(indices)
        return [index * 10 for index in indices]


def drawn(index: int) -> list[float]:
    """Return a sample's random numbers from each generator."""
    return [random.random(), float(np.random.random())]


def draws(seeding: Seeding, batches: list[int], **spec: Any) -> dict[int, list[float]]:
    """Return the random numbers of each sample when these batches are loaded in this order."""
    found: dict[int, list[float]] = {}

    def make(index: int) -> int:
        found[index] = drawn(index)
        return index

    bench = Bench(Made(make), seeding=seeding)
    for k in batches:
        bench.batch(k, **spec)
    return found
