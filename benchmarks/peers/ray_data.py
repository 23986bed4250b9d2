"""Ray Data.

Actors compute the batches of a range of positions, and store them as Arrow blocks in Ray's object store, a shared
memory, from which the training process reads them. The order of blocks is preserved, as for all other contenders.
`tokens` is left out: Ray converts arrays whose lengths differ between batches to Python objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.measuring import Indices
from benchmarks.peers.positions import Positions
from benchmarks.processes import ROOT
from benchmarks.workloads import EPOCH_BATCHES, WORKLOADS, Arrays, Workload, arrays

BUFFERED: Final = 2
"""Batches that the training process fetches ahead, as with torch."""
BLOCK_BYTES: Final = 32 * 2**20
"""Maximum size of blocks in bytes. With Ray's default of 128 MiB, a turn would mostly load batches that were computed
before it began.
"""


class RayData:
    """`ray.data.Dataset`, whose batches `num_workers` actors compute."""

    name = "Ray Data"
    beside = None
    requires = ("ray", "pyarrow", "pandas")
    workloads = ("wire", "small", "table", "whole", "jpeg", "jpeg_native")

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    @contextmanager
    def open(self) -> Iterator[Iterator[Any]]:
        """Start Ray on this machine, and the actors."""
        import ray

        workload = self._workload
        ray.init(
            num_cpus=workload.num_workers + 1, include_dashboard=False, log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        )  # fmt: skip
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.target_max_block_size = BLOCK_BYTES
        context.execution_options.preserve_order = True
        try:
            computed = ray.data.range(EPOCH_BATCHES * workload.batch_size).map_batches(
                Computed, fn_constructor_args=(workload.name,), batch_size=workload.batch_size,
                concurrency=workload.num_workers,
            )  # fmt: skip
            batches = iter(computed.iter_batches(batch_size=workload.batch_size, prefetch_batches=BUFFERED))
            with closing(batches):
                yield map(_ordered, batches)
        finally:
            ray.shutdown()

    def indices(self, count: int) -> Indices:
        """Return the workload's own order."""
        return list(islice(self._workload.batches(), count))

    def server_cpu(self) -> None:
        """Return None."""


class Computed:
    """Function that computes the batch of some positions; constructed in each actor."""

    def __init__(self, name: str) -> None:
        self._workload = WORKLOADS[name]
        self._samples = Positions(self._workload)

    def __call__(self, rows: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
        """Return the arrays of a batch by their numbers."""
        batch = self._workload.expected(self._samples.dataset, self._samples.indices(rows["id"]))
        return {str(number): array for number, array in enumerate(batch)}


def _ordered(batch: dict[str, NDArray[Any]]) -> Arrays:
    return arrays([batch[str(number)] for number in range(len(batch))])
