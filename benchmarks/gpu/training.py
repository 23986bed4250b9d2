"""The training loop that consumes the batches of all contenders: a transform on the device, and matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from statistics import median
from typing import Any, Final

import torch
import torch.utils.data

from benchmarks.gpu.accelerator import Accelerator
from benchmarks.gpu.data import ROWS, Source, rows

Batch = Sequence[Any]
"""Pair of images and row numbers."""
WARM_UP_SECONDS: Final = 0.5
VERIFIED: Final = 3
"""Batches of each contender that are compared with the dataset."""


class Compute:
    """Matrix products, which take a time that was calibrated.

    Args:
        accelerator: Where.
        unit: Milliseconds of one product; None to calibrate it.
    """

    def __init__(self, accelerator: Accelerator, unit: float | None = None) -> None:
        side = 4096 if accelerator.is_gpu else 256
        self._accelerator = accelerator
        # random values, because a GPU multiplies zeros faster
        self._factors = [torch.randn(side, side, device=accelerator.device).to(accelerator.dtype) for _ in range(2)]
        self._product = torch.empty_like(self._factors[0])
        self.unit = self._calibrate() if unit is None else unit

    def products(self, milliseconds: float) -> int:
        """Return the number of products that take `milliseconds`."""
        return max(1, round(milliseconds / self.unit)) if milliseconds else 0

    def run(self, products: int) -> None:
        """Submit `products` products to the current stream."""
        for _ in range(products):
            torch.mm(*self._factors, out=self._product)

    def _calibrate(self) -> float:
        began = time.perf_counter()
        while time.perf_counter() - began < WARM_UP_SECONDS:  # the clock frequency rises under load
            self.run(10)
            self._accelerator.synchronize()
        times = []
        for _ in range(10):
            start = self._accelerator.mark()
            self.run(20)
            end = self._accelerator.mark()
            self._accelerator.wait(end)
            times.append(self._accelerator.milliseconds(start, end) / 20)
        return median(times)


def to_float(batch: Batch, dtype: Any) -> tuple[Any, Any]:
    """Return a batch with images scaled to 0 to 1, as networks expect them."""
    images, numbers = batch
    return images.to(dtype).div_(255), numbers


def take_steps(batches: Iterator[Batch], count: int, products: int, compute: Compute, accelerator: Accelerator) -> None:
    """Train for `count` steps; the host is at most one step ahead of the device, as with a loss that is logged.

    Returns after the device has finished.
    """
    previous = None
    for _ in range(count):
        batch = next(batches)
        compute.run(products)
        del batch
        mark = accelerator.mark()
        if previous is not None:
            accelerator.wait(previous)
        previous = mark
    accelerator.synchronize()


def first_rows(seed: int, source: Source, batch_size: int) -> list[list[int]]:
    """Return the rows of the first batches, in the order of torch's RandomSampler for a seed."""
    torch.manual_seed(seed)
    numbers: Any = range(source.length)
    loader = torch.utils.data.DataLoader(numbers, batch_size, shuffle=True)
    return [(indices % ROWS).tolist() for indices in islice(loader, VERIFIED)]


def check(batches: Iterator[Batch], expected: Sequence[Sequence[int]] | None, accelerator: Accelerator) -> None:
    """Compare the first batches with the dataset.

    Args:
        batches: On the device.
        expected: Rows of the batches; None if the loader has an order of its own.
        accelerator: Their device.

    Raises:
        AssertionError: If a batch is not equal.
    """
    for k, (images, numbers) in enumerate(islice(batches, VERIFIED)):
        taken = numbers.cpu().tolist()
        if expected is not None and taken != list(expected[k]):
            raise AssertionError(f"batch {k} holds rows {taken[:8]}..., expected {list(expected[k])[:8]}...")
        right, _ = to_float((torch.from_numpy(rows()[taken]).to(accelerator.device), None), accelerator.dtype)
        if not torch.equal(images, right):
            raise AssertionError(f"batch {k} differs from the dataset")


Begin = Callable[[int], Iterator[Batch]]
"""Starts an epoch in the order of a seed."""
