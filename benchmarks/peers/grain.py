"""Google's Grain.

Worker processes compute the batches of a `MapDataset`, and copy them into shared memory. Samples are in memory, so
workers read without threads, as Grain's documentation recommends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

import numpy as np

from benchmarks.measuring import Indices
from benchmarks.peers.positions import Batches, Positions
from benchmarks.workloads import WORKLOADS, Arrays, Workload, arrays

BUFFERED: Final = 2
"""Batches that each worker computes ahead, as with torch."""


class Grain:
    """Grain's `MapDataset`, whose batches worker processes compute."""

    name = "Grain"
    beside = None
    requires = ("grain",)
    workloads = tuple(WORKLOADS)

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    @contextmanager
    def open(self) -> Iterator[Iterator[Any]]:
        """Start workers."""
        import grain

        reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        workers = grain.MultiprocessingOptions(self._workload.num_workers, per_worker_buffer_size=BUFFERED)
        batches = iter(self._batches(grain).map(_contiguous).to_iter_dataset(reading).mp_prefetch(workers))
        try:
            yield batches
        finally:
            batches.close()

    def _batches(self, grain: Any) -> Any:
        workload = self._workload
        if workload.whole_batches:
            return grain.MapDataset.source(Batches(workload))
        samples = grain.MapDataset.source(Positions(workload))
        return samples.batch(workload.batch_size, drop_remainder=True, batch_fn=workload.collate_function)

    def indices(self, count: int) -> Indices:
        """Return the workload's own order."""
        return list(islice(self._workload.batches(), count))

    def server_cpu(self) -> None:
        """Return None."""


def _contiguous(batch: Any) -> Arrays:
    """Return contiguous arrays, because Grain passes only those in shared memory."""
    return [np.ascontiguousarray(array) for array in arrays(batch)]
