"""Access to the samples of a workload by their positions in the order of contenders without shuffling."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.workloads import EPOCH_BATCHES, Workload


class Positions:
    """Samples of a workload in its own order, with random access.

    Args:
        workload: The workload.
    """

    def __init__(self, workload: Workload) -> None:
        self.dataset = workload.dataset()
        self._length = EPOCH_BATCHES * workload.batch_size
        length = workload.order_length
        self._order = None if length is None else np.fromiter(islice(workload.order(), length), np.int64, length)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> Any:
        return self.dataset[position if self._order is None else int(self._order[position % len(self._order)])]

    def indices(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of the samples at some positions."""
        return positions if self._order is None else self._order[positions % len(self._order)]


class Batches:
    """Whole batches of a workload in its own order, with random access.

    Args:
        workload: Workload whose dataset has `__getbatch__`.
    """

    def __init__(self, workload: Workload) -> None:
        self._samples = Positions(workload)
        self._batch_size = workload.batch_size

    def __len__(self) -> int:
        return EPOCH_BATCHES

    def __getitem__(self, number: int) -> Any:
        positions = np.arange(number * self._batch_size, (number + 1) * self._batch_size)
        return self._samples.dataset.__getbatch__(self._samples.indices(positions))
