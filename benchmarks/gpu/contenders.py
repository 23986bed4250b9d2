"""Contenders of the GPU benchmarks: each yields the same transformed batches on the device, in the order of a seed."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.utils.data

from benchmarks.gpu.accelerator import Accelerator
from benchmarks.gpu.data import Images, Source, rows
from benchmarks.gpu.training import Batch, Begin, first_rows, to_float

LOCAL: Final = "device tensors (ceiling)"
TORCH: Final = "torch, pinned"
PREFETCHER: Final = "torch, prefetcher"
OWN_TO: Final = "teleloader, own .to"
DEVICE: Final = "teleloader, device="
NOT_AHEAD: Final = "teleloader, device=, device_ahead=0"


@dataclass(frozen=True, slots=True)
class Config:
    """Settings that are the same for all loaders; can be sent to another process."""

    url: str
    """URL of the loader server."""
    num_workers: int
    """Number of workers of the server, and of each local loader."""
    batch_size: int


class Ranks(NamedTuple):
    """A process among several that share an epoch."""

    rank: int
    world_size: int


ALONE: Final = Ranks(0, 1)
Copies = list[tuple[Any, Any]]
"""Marks before and after each copy to the device."""


class Contender(Protocol):
    """Way to load batches."""

    @property
    def name(self) -> str:
        """The name in tables."""

    @property
    def has_torchs_order(self) -> bool:
        """Return True if a seed gives the order of torch's RandomSampler."""

    def open(self, source: Source, ranks: Ranks = ALONE, copies: Copies | None = None) -> AbstractContextManager[Begin]:
        """Make a loader; its processes end with the context.

        Args:
            source: The dataset.
            ranks: The part of it.
            copies: Is given the marks of all copies.
        """

    def processes(self, server: int) -> list[int]:
        """Return the process IDs of the open contender's data source; `server` is the PID of the loader server."""


class Local:
    """Batches that are already on the device: an upper bound for every loader."""

    name = LOCAL
    has_torchs_order = True

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        self._accelerator = accelerator
        self._batch_size = config.batch_size

    @contextmanager
    def open(self, source: Source, ranks: Ranks = ALONE, copies: Copies | None = None) -> Iterator[Begin]:
        """Copy the first batches to the device, and repeat them."""
        accelerator = self._accelerator

        def begin(seed: int) -> Iterator[Batch]:
            chosen = [torch.tensor(numbers) for numbers in first_rows(seed, source, self._batch_size)]
            batches = [
                (torch.from_numpy(rows()[numbers.numpy()]).to(accelerator.device), numbers.to(accelerator.device))
                for numbers in chosen
            ]
            return (to_float(batch, accelerator.dtype) for batch in cycle(batches))

        yield begin

    def processes(self, server: int) -> list[int]:
        """Return none."""
        return []


class Torch:
    """torch's DataLoader with workers and pinned memory.

    Args:
        accelerator: The device.
        config: Settings.
        prefetches: Whether batches are copied one step ahead, on a stream of their own; else in the training loop, with
            ``non_blocking=True``.
    """

    has_torchs_order = True

    def __init__(self, accelerator: Accelerator, config: Config, *, prefetches: bool) -> None:
        self.name = PREFETCHER if prefetches else TORCH
        self._accelerator = accelerator
        self._config = config
        self._prefetches = prefetches

    @contextmanager
    def open(self, source: Source, ranks: Ranks = ALONE, copies: Copies | None = None) -> Iterator[Begin]:
        """Start workers with the first epoch; they stay for further ones."""
        gc.collect()  # in a forked worker, freeing an event of earlier contenders would abort the worker
        accelerator = self._accelerator
        dataset = Images(source.length)
        sampler: Any = None
        if ranks != ALONE:
            sampler = torch.utils.data.DistributedSampler(dataset, ranks.world_size, ranks.rank)
        loader = torch.utils.data.DataLoader(
            dataset,
            self._config.batch_size,
            shuffle=sampler is None,
            sampler=sampler,
            num_workers=max(1, self._config.num_workers // ranks.world_size),
            pin_memory=accelerator.is_gpu,
            drop_last=True,
            persistent_workers=True,
        )
        copy = partial(copy_batch, accelerator, copies)

        def begin(seed: int) -> Iterator[Batch]:
            torch.manual_seed(seed)
            if sampler is not None:
                sampler.set_epoch(seed)
            copied = Prefetcher(iter(loader), accelerator, copy) if self._prefetches else map(copy, iter(loader))
            return (to_float(batch, accelerator.dtype) for batch in copied)

        yield begin

    def processes(self, server: int) -> list[int]:
        """Return the workers of this process."""
        return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


class Prefetcher:
    """Copies the next batch on a stream of its own while the loop computes, as NVIDIA's examples do.

    Args:
        batches: In main memory.
        accelerator: The device.
        copy: Copies a batch on the current stream.
    """

    def __init__(self, batches: Iterator[Batch], accelerator: Accelerator, copy: Callable[[Batch], Batch]) -> None:
        self._batches = batches
        self._accelerator = accelerator
        self._copy = copy
        self._stream = accelerator.stream()
        self._load()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self._next
        if batch is None:
            raise StopIteration
        self._accelerator.join(self._stream, batch)
        self._load()
        return batch

    def _load(self) -> None:
        batch = next(self._batches, None)
        with self._accelerator.on(self._stream):
            self._next = None if batch is None else self._copy(batch)


class Teleloader:
    """Our client; batches come from a loader server on the same machine.

    Args:
        accelerator: The device.
        config: Settings.
        ahead: `device_ahead` of a loader with ``device=``; None for a loop that copies batches itself.
    """

    has_torchs_order = True

    def __init__(self, accelerator: Accelerator, config: Config, *, ahead: int | None) -> None:
        self.name = OWN_TO if ahead is None else DEVICE if ahead else NOT_AHEAD
        self._accelerator = accelerator
        self._config = config
        self._ahead = ahead

    @contextmanager
    def open(self, source: Source, ranks: Ranks = ALONE, copies: Copies | None = None) -> Iterator[Begin]:
        """Make a loader; the server runs already."""
        from teleloader import DataLoader, RemoteDataset

        accelerator = self._accelerator
        options: dict[str, Any] = {}
        # without a GPU, device= does not apply: the loop makes a plain copy
        by_loader = accelerator.is_gpu and self._ahead is not None
        if by_loader:
            options = {
                "device": accelerator.device,
                "device_ahead": self._ahead,
                "device_transform": partial(to_float, dtype=accelerator.dtype),
            }
        else:
            options = {"pin_memory": accelerator.is_gpu}
        if ranks != ALONE:
            options |= {"seed": 0, "rank": ranks.rank, "world_size": ranks.world_size}
        dataset = RemoteDataset(self._config.url, source.name)
        loader = DataLoader(dataset, self._config.batch_size, shuffle=True, drop_last=True, **options)
        copy = partial(copy_batch, accelerator, copies)

        def begin(seed: int) -> Iterator[Batch]:
            torch.manual_seed(seed)
            if ranks != ALONE:
                loader.set_epoch(seed)
            if by_loader:
                return iter(loader)
            return (to_float(copy(batch), accelerator.dtype) for batch in loader)

        with _recorded(copies) if by_loader and copies is not None else nullcontext():
            yield begin

    def processes(self, server: int) -> list[int]:
        """Return the server."""
        return [server]


def copy_batch(accelerator: Accelerator, copies: Copies | None, batch: Batch) -> Batch:
    """Return a copy of a batch on the device, made by the current stream.

    Args:
        accelerator: The device.
        copies: Is given marks around the copy.
        batch: Tensors in main memory.
    """
    start = None if copies is None else accelerator.mark()
    # copy=True: without a GPU, .to() would return the tensor itself
    copied = [tensor.to(accelerator.device, non_blocking=True, copy=True) for tensor in batch]
    if copies is not None:
        copies.append((start, accelerator.mark()))
    return copied


@contextmanager
def _recorded(copies: Copies) -> Iterator[None]:
    """Record the events of the copies that loaders with ``device=`` make."""
    from teleloader.tensors.devices import Copy, TorchDevice

    plain = TorchDevice.copy

    def copy(device: TorchDevice, batch: Any) -> Copy:
        made = plain(device, batch)
        copies.append((made.started, made.done))
        return made

    TorchDevice.copy = copy  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        TorchDevice.copy = plain  # type: ignore[method-assign]


def torchs(accelerator: Accelerator, config: Config) -> list[Contender]:
    """Return the contenders of torch's loader: without and with a prefetcher."""
    return [Torch(accelerator, config, prefetches=prefetches) for prefetches in (False, True)]


def ours(accelerator: Accelerator, config: Config) -> list[Contender]:
    """Return the contenders of teleloader: without and with ``device=``."""
    return [Teleloader(accelerator, config, ahead=ahead) for ahead in (None, 2)]


def usual(accelerator: Accelerator, config: Config) -> list[Contender]:
    """Return the contenders of torch and of teleloader."""
    return [*torchs(accelerator, config), *ours(accelerator, config)]


def named(contenders: Sequence[Contender], name: str) -> Contender:
    """Return the contender with a name."""
    return next(each for each in contenders if each.name == name)
