"""Stages of loading a batch. To add one, write a class and add it to `STAGES`: statistics show its time by its name."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from teleloader_server.loading import index_lists
from teleloader_server.loading.datasets import HostedDataset
from teleloader_server.loading.passes import Pass, Passes
from teleloader_server.loading.random_state import seed_all
from teleloader_server.loading.tasks import Indices, Task, collate, frame_writer
from teleloader_server.loading.worker_info import was_asked
from teleloader_shared.codec import End
from teleloader_shared.orders.plan import Plan
from teleloader_shared.orders.seeding import derive_seed
from teleloader_shared.protocols import accepts

Place = Callable[[int], NDArray[np.uint8]]
"""Return a buffer of so many bytes for a frame; called again, replace the one before."""

_NO_FRAME: Final = np.empty(0, np.uint8)


@dataclass(slots=True)
class Context:
    """Facts about the process that loads."""

    passes: Passes
    max_batch_bytes: int
    """Size limit of a frame."""
    owns_datasets: bool
    """Whether nothing else in this process uses the datasets, as in a worker."""
    seeds: bool
    """Whether random numbers are a function of a batch's address; otherwise no generator is seeded."""
    torch_loaded: Callable[[], None]
    """Called if a dataset imports torch while it loads a batch."""
    torch_is_seeded: bool = False
    """Whether a worker-init function has seeded torch: then batches do not seed it, as with torch's workers."""


@dataclass(slots=True, eq=False)
class Batch:
    """A batch on its way through the stages."""

    task: Task
    place: Place
    remaining: Iterator[tuple[int, Stage]]
    """Stages that have not run, with their positions."""
    seconds: list[float]
    """Seconds in each stage, without those in the stages that it ran by `run_remaining`."""
    indices: Indices = field(default_factory=list)
    """Empty for an iterable-style dataset."""
    has_indices: bool = False
    """Whether the caller has set them; otherwise `Fetch` does."""
    hosted: HostedDataset = field(init=False)
    padding: int = 0
    samples: list[Any] | None = None
    """None after the last batch of an iterable-style dataset."""
    pass_: Pass | None = None
    """For an iterable-style dataset."""
    state: str | None = None
    """Shard state of an iterable-style dataset after the batch, if it has one."""
    content: Any = None
    """The collated batch; an `End` after the last batch of an iterable-style dataset."""
    count: int = 0
    """Number of samples."""
    frame: NDArray[np.uint8] = field(default_factory=lambda: _NO_FRAME)
    """Empty until a stage sets it; no stage follows that one."""
    _running: int = 0
    _since: float = field(default_factory=time.perf_counter)

    def run_remaining(self) -> None:
        """Run the remaining stages, until one sets the frame."""
        caller = self._running
        self.count_time()
        for position, stage in self.remaining:
            self._running = position
            stage.run(self)
            self.count_time()
            if len(self.frame):
                break
        self._running = caller

    def count_time(self) -> None:
        """Add the time since the last call to the running stage's."""
        now = time.perf_counter()
        self.seconds[self._running] += now - self._since
        self._since = now


class Stage(ABC):
    """A step from a task to a frame, which reads and sets attributes of a `Batch`.

    A cache sets `Batch.frame` on a hit; on a miss, it calls `Batch.run_remaining` and stores the frame.
    """

    name: ClassVar[str]
    """Name in statistics, metrics and traces."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @abstractmethod
    def run(self, batch: Batch) -> None:
        """Do the work of this stage; an exception becomes the batch's failure."""


class Fetch(Stage):
    """Take the samples from the dataset."""

    name = "fetch"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._plan = lru_cache(maxsize=64)(Plan)
        self._epochs: dict[str, int] = {}
        """Epochs of the map-style datasets, by name."""

    def run(self, batch: Batch) -> None:
        """Set the indices and the samples."""
        task, hosted = batch.task, batch.hosted
        if hosted.info.kind == "iterable":
            batch.pass_ = found = self._context.passes.of(hosted, task)
            batch.samples = found.fetch(task)
            batch.state = found.state(found.number(task))
            return
        if not batch.has_indices:
            batch.indices, batch.padding = self._indices(hosted, task)
        epoch = task.address.epoch
        # datasets in the server's own process are shared: the epoch may have been changed since the last batch
        if not self._context.owns_datasets or self._epochs.get(hosted.info.name) != epoch:
            self._set_epoch(hosted, epoch)
        batch.samples = self._fetch(hosted, task, batch.indices)

    def _set_epoch(self, hosted: HostedDataset, epoch: int) -> None:
        self._epochs.pop(hosted.info.name, None)
        if accepts(hosted.dataset, "set_epoch", epoch):
            hosted.dataset.set_epoch(epoch)
        self._epochs[hosted.info.name] = epoch

    def _indices(self, hosted: HostedDataset, task: Task) -> tuple[Indices, int]:
        """Return the indices of a batch, and how many of them are padding."""
        if task.indices is not None:
            listed = index_lists.read(task.indices, single=task.spec.batch_size is None)
            if hosted.indices == "integers":
                index_lists.check_range(listed, hosted.info.length, hosted.info.name)
            return listed, 0
        if task.spec.order == "client":
            raise RuntimeError(f"cannot load {task.address}: its index list is missing. This is a bug of the server")
        plan = self._plan(task.spec, task.length, task.address.epoch)
        return plan[task.address.batch], plan.padding(task.address.batch)

    def _fetch(self, hosted: HostedDataset, task: Task, indices: Indices) -> list[Any]:
        if not self._context.seeds or sys.modules.get("torch") is not None:
            return self._fetch_seeded(hosted, task, indices)
        try:
            samples = self._fetch_seeded(hosted, task, indices)
        except Exception:
            if sys.modules.get("torch") is None:
                raise
        else:
            if sys.modules.get("torch") is None:
                return samples
        # the dataset imported torch and drew from it before it was seeded: fetch again, so that each run draws the same
        self._context.torch_loaded()
        return self._fetch_seeded(hosted, task, indices)

    def _fetch_seeded(self, hosted: HostedDataset, task: Task, indices: Indices) -> list[Any]:
        spec, epoch, dataset = task.spec, task.address.epoch, hosted.dataset
        per_sample = hosted.info.seeding == "sample"
        if not per_sample:
            self._seed("batch", spec.seed, epoch, spec.rank, task.address.batch)
            if spec.batch_size is not None and hosted.gives_batches(spec.collate):
                # a copy, because user code may sort or keep it
                return [dataset.__getbatch__(np.array(indices))]
        numbers = indices.tolist() if isinstance(indices, np.ndarray) else indices
        if not per_sample and spec.batch_size is not None and getattr(dataset, "__getitems__", None) is not None:
            found: list[Any] = dataset.__getitems__(numbers)
            return found
        samples: list[Any] = []
        try:
            for index in numbers:
                if per_sample:
                    self._seed("sample", spec.seed, epoch, index if isinstance(index, int) else len(samples))
                samples.append(dataset[index])
        except StopIteration as stop:
            # torch ends the epoch here without an error, and samples are lost
            raise RuntimeError(f"the dataset raised StopIteration at index {index}") from stop
        return samples

    def _seed(self, purpose: str, *coordinates: int) -> None:
        if self._context.seeds:
            seed_all(derive_seed(purpose, *coordinates), torch_too=not self._context.torch_is_seeded)


class Collate(Stage):
    """Make a batch of the samples."""

    name = "collate"

    def run(self, batch: Batch) -> None:
        """Set the content and the number of samples."""
        if batch.samples is None:
            batch.content = End(0 if batch.pass_ is None else batch.pass_.shard.samples, replica=not was_asked())
        else:
            batch.count, batch.content = collate(batch.hosted, batch.task, batch.indices, batch.samples)


class Encode(Stage):
    """Write the frame."""

    name = "encode"

    def run(self, batch: Batch) -> None:
        """Set the frame."""
        task = batch.task
        writer = frame_writer(task, batch.content, self._context.max_batch_bytes, batch.padding, batch.state)
        batch.frame = batch.place(writer.nbytes)[: writer.nbytes]
        writer.write(batch.frame)
        if batch.pass_ is not None and batch.samples is not None:
            self._context.passes.deliver(batch.pass_, task, batch.frame, batch.state)


STAGES: Final[list[type[Stage]]] = [Fetch, Collate, Encode]
"""Stages of each batch, in order."""
