"""WebDataset.

The samples of the first batches lie in tar files, one for each worker, which a contender writes to a temporary folder
before its first batch. Workers of torch's `DataLoader` read and decode their files again and again. The batches of the
first pass are those of the workload, in its own order. Random access to the rows of a table is not what tar files are
for, and a tar file is a multiple of the size of the table, so `table` and `whole` are left out.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.measuring import VERIFIED, Indices
from benchmarks.workloads import Photographs, Workload

SHARD_SIZE: Final = 2**26
"""Minimum content of a tar file in bytes, unless it has `SHARD_SAMPLES` samples."""
SHARD_SAMPLES: Final = 8192


class WebDataset:
    """WebDataset, with the workers of torch's `DataLoader`."""

    name = "WebDataset"
    beside = None
    requires = ("webdataset", "torch")
    workloads = ("wire", "small", "tokens", "jpeg", "jpeg_native")

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._folder: TemporaryDirectory[str] | None = None  # removed with this object or at exit

    @contextmanager
    def open(self) -> Iterator[Iterator[Any]]:
        """Write the tar files once, and start workers."""
        import webdataset

        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="benchmarks-")
            for worker in range(self._workload.num_workers):
                self._write(webdataset.TarWriter(str(Path(self._folder.name, f"{worker:02}.tar"))), worker)
        shards = sorted(map(str, Path(self._folder.name).iterdir()))
        samples = webdataset.WebDataset(shards, shardshuffle=False)
        if isinstance(self._workload.dataset(), Photographs):
            samples = samples.map(Cropping(self._workload))
        else:
            samples = samples.decode().map(_array)
        collate = np.stack if self._workload.collate is None else self._workload.collate_function
        batches = samples.batched(self._workload.batch_size, collation_fn=collate, partial=False).repeat()
        yield iter(webdataset.WebLoader(batches, batch_size=None, num_workers=self._workload.num_workers))

    def _write(self, writer: Any, worker: int) -> None:
        workload = self._workload
        dataset, size, samples, batches = workload.dataset(), 0, 0, 0
        with writer as file:
            for indices in islice(workload.batches(), worker, None, workload.num_workers):
                if batches >= VERIFIED and (size >= SHARD_SIZE or samples >= SHARD_SAMPLES):
                    return
                for index in indices:
                    size += file.write({"__key__": f"{index:08}", **_stored(dataset, index)})
                samples, batches = samples + len(indices), batches + 1

    def indices(self, count: int) -> Indices:
        """Return the workload's own order."""
        return list(islice(self._workload.batches(), count))

    def server_cpu(self) -> None:
        """Return None."""


class Cropping:
    """Function of a stored photograph that returns the sample of a workload."""

    def __init__(self, workload: Workload) -> None:
        self._dataset: Photographs = workload.dataset()

    def __call__(self, stored: Mapping[str, Any]) -> NDArray[np.uint8]:
        """Decode, crop and resize the photograph."""
        return self._dataset.sample(stored["jpg"], int(stored["__key__"]))


def _stored(dataset: Any, index: int) -> dict[str, bytes]:
    """Return the content of the files of a sample by extension."""
    if isinstance(dataset, Photographs):
        return {"jpg": dataset.files[index % dataset.FILES]}
    file = io.BytesIO()
    np.save(file, dataset[index])
    return {"npy": file.getvalue()}


def _array(decoded: Mapping[str, Any]) -> Any:
    return decoded["npy"]
