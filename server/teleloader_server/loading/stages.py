"""Loading stages: fetch, collate, encode.

To add a stage, write a subclass of `Stage` and add it to `STAGES`; statistics then show its time under its name.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from teleloader_server.loading import index_lists
from teleloader_server.loading.datasets import HostedDataset
from teleloader_server.loading.generators import Generators
from teleloader_server.loading.packing import pack
from teleloader_server.loading.passes import Pass, Passes
from teleloader_server.loading.preparations import starts_of
from teleloader_server.loading.random_state import seed_all
from teleloader_server.loading.substitutes import Substitutes
from teleloader_server.loading.tasks import MAX_SLOW, SLOW_FROM, Indices, Task, collate, frame_writer, integer_of
from teleloader_server.loading.worker_info import was_read
from teleloader_shared.codec import End, Substituted
from teleloader_shared.lengths import Lengths
from teleloader_shared.orders.packing import Pieces
from teleloader_shared.orders.plan import Plan
from teleloader_shared.orders.seeding import derive_seed
from teleloader_shared.protocols import accepts
from teleloader_shared.spec import LoaderSpec

Place = Callable[[int], NDArray[np.uint8]]
"""Function that returns a buffer of the requested number of bytes for a frame; a second call replaces the buffer."""

TIMED_FROM: Final = 2e-5
"""Mean time in seconds to fetch a sample above which each sample of the next batch is timed; below it, the clock would
take a noticeable part of the time."""
NO_SAMPLE: Final = -(2**63)
"""Value of `Context.sample` if no sample is being fetched."""
_NO_FRAME: Final = np.empty(0, np.uint8)


@dataclass(slots=True)
class Context:
    """Settings and state of the loading process, shared by all stages."""

    passes: Passes
    max_batch_bytes: int
    """Maximum size of a frame in bytes."""
    owns_datasets: bool
    """True if no other code in this process uses the datasets, as in a worker."""
    seeds: bool
    """True to seed random generators as a function of the batch ID; False to seed none."""
    torch_loaded: Callable[[], None]
    """Callback, called if a dataset imports torch while loading a batch."""
    sample: memoryview[int] | list[int] = field(default_factory=lambda: [NO_SAMPLE])
    """One item: index of the sample that is being fetched, or `NO_SAMPLE`: between fetches, if the dataset fetches
    several samples at once, and for indices that are not 64-bit integers. In a worker it is in shared memory, where the
    server reads it if the worker exits."""
    slowest: int | None = None
    """Index of the sample of the last batch whose fetch took longest; None if it is unknown."""
    slow: Sequence[tuple[int, float]] = ()
    """Slow samples of the last batch (`Report.slow`)."""
    torch_is_seeded: bool = False
    """True if a worker-init function has seeded torch: batches then do not seed it, as in torch's workers."""


@dataclass(slots=True, eq=False)
class Batch:
    """Batch that is being loaded; each stage reads and sets attributes of the batch."""

    task: Task
    place: Place
    remaining: Iterator[tuple[int, Stage]]
    """Stages that have not run yet, with their positions."""
    seconds: list[float]
    """Time of each stage in seconds, excluding later stages that it ran with `run_remaining`."""
    indices: Indices = field(default_factory=list)
    """Indices of the samples; empty for an iterable-style dataset."""
    has_indices: bool = False
    """True if the caller has set `indices`; otherwise `Fetch` sets them."""
    hosted: HostedDataset = field(init=False)
    padding: int = 0
    """Number of samples at the end of the batch that repeat earlier ones (`Plan.padding`)."""
    pieces: Pieces | None = None
    """Pieces of the samples in packed sequences; None without packing."""
    substituted: Substituted | None = None
    """Skipped and replaced samples; None if there are none."""
    samples: list[Any] | None = None
    """Fetched samples; None before `Fetch`, and after the last batch of an iterable-style dataset."""
    pass_: Pass | None = None
    """Pass over an iterable-style dataset; None for a map-style dataset."""
    state: str | None = None
    """Shard state after the batch; None for a dataset without a state."""
    content: Any = None
    """Collated batch; an `End` after the last batch of an iterable-style dataset."""
    count: int = 0
    """Number of samples."""
    frame: NDArray[np.uint8] = field(default_factory=lambda: _NO_FRAME)
    """Encoded batch, at the start of the buffer that `place` returned last. Empty until a stage sets it; the remaining
    stages are then skipped."""
    _running: int = 0
    _since: float = field(default_factory=time.perf_counter)

    def run_remaining(self) -> None:
        """Run the remaining stages until a stage sets the frame."""
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
        """Add the time since the previous call to the total time of the running stage."""
        now = time.perf_counter()
        self.seconds[self._running] += now - self._since
        self._since = now

    @property
    def ended(self) -> float:
        """Time of the last call of `count_time`, by ``time.perf_counter()``."""
        return self._since

    def omit_time(self) -> None:
        """Exclude the time since the last call of `count_time` from the times of the stages."""
        self._since = time.perf_counter()


class Stage(ABC):
    """Base class of loading stages, which read and set attributes of a `Batch`.

    For example, a stage that caches frames calls `Batch.place` on a hit, copies the frame to the start of the returned
    buffer, and sets `Batch.frame` to this slice of the buffer; a frame in other memory fails the batch. On a miss, the
    stage calls `Batch.run_remaining`, and stores the frame.
    """

    name: ClassVar[str]
    """Name in statistics, metrics and traces."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @abstractmethod
    def run(self, batch: Batch) -> None:
        """Run this stage for a batch; an exception makes the batch fail."""


class Fetch(Stage):
    """Stage that fetches the samples of a batch from the dataset."""

    name = "fetch"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._plan = lru_cache(maxsize=64)(_plan)
        self._first_rank = lru_cache(maxsize=64)(lambda spec: replace(spec, rank=0))
        self._plans_of_ranks = lru_cache(maxsize=4)(_plans_of_ranks)
        """Plans by rank, for orders that depend on lengths. All plans of an epoch share divided windows, which take up
        to 257 bytes per document."""
        self._epochs: dict[str, int] = {}
        """Epoch that was last set on each map-style dataset, by dataset name."""
        self._is_slow: dict[str, bool] = {}
        """True if fetching the last batch of a dataset took `TIMED_FROM` per sample, by fingerprint."""
        self._generators: dict[str, Generators] = {}
        """Generators of each map-style dataset, by fingerprint."""

    def run(self, batch: Batch) -> None:
        """Fetch the samples of a batch; compute the indices if the caller has not set them."""
        task, hosted = batch.task, batch.hosted
        self._context.slowest, self._context.slow = None, ()
        if hosted.info.kind == "iterable":
            batch.pass_ = found = self._context.passes.of(hosted, task)
            batch.samples = found.fetch(task)
            batch.state = found.state(found.number(task))
            return
        if task.spec.packing is not None:
            plan = self._plan_of(batch)
            batch.pieces, batch.padding = plan.pieces(task.batch_id.batch), plan.padding(task.batch_id.batch)
            batch.indices = batch.pieces.distinct
        elif not batch.has_indices:
            batch.indices, batch.padding = self._indices(batch)
        if task.spec.batch_of == "lengths":
            return
        epoch = task.batch_id.epoch
        for each in hosted.parts or (hosted,):
            # datasets in the server process itself are shared: the epoch may have changed since the last batch
            if not self._context.owns_datasets or self._epochs.get(each.info.name) != epoch:
                self._set_epoch(each, epoch)
        batch.samples, substitutes = self._fetch(hosted, task, batch.indices)
        if substitutes is not None:
            batch.padding = substitutes.remaining(batch.padding)
            batch.indices, batch.substituted = substitutes.indices, substitutes.record()

    def _set_epoch(self, hosted: HostedDataset, epoch: int) -> None:
        self._epochs.pop(hosted.info.name, None)
        if accepts(hosted.dataset, "set_epoch", epoch):
            hosted.dataset.set_epoch(epoch)
            self._generators.clear()  # the dataset may have replaced its own, also as a source of mixtures
        self._epochs[hosted.info.name] = epoch

    def _indices(self, batch: Batch) -> tuple[Indices, int]:
        """Return the indices of a batch, and the number of padding indices among them."""
        task, hosted = batch.task, batch.hosted
        if task.indices is not None:
            listed = index_lists.read(task.indices, single=task.spec.batch_size is None)
            if hosted.indices == "integers":
                index_lists.check_range(listed, hosted.info.length, hosted.info.name)
            return listed, 0
        if task.spec.order == "client":
            raise RuntimeError(f"cannot load {task.batch_id}: its index list is missing. This is a bug in the server")
        plan = self._plan_of(batch)
        return plan[task.batch_id.batch], plan.padding(task.batch_id.batch)

    def _plan_of(self, batch: Batch) -> Plan:
        task = batch.task
        if task.spec.required_lengths is None:
            return self._plan(task.spec, task.length, task.batch_id.epoch, None)
        first = self._first_rank(task.spec)
        plans = self._plans_of_ranks(first, task.length, task.batch_id.epoch, batch.hosted.lengths)
        plan = plans.get(task.spec.rank)
        if plan is None:
            plan = plans[task.spec.rank] = plans[0].of_rank(task.spec)
        batch.omit_time()  # the epoch may have been prepared
        return plan

    def _fetch(self, hosted: HostedDataset, task: Task, indices: Indices) -> tuple[list[Any], Substitutes | None]:
        if not self._context.seeds or sys.modules.get("torch") is not None:
            return self._fetch_seeded(hosted, task, indices)
        try:
            found = self._fetch_seeded(hosted, task, indices)
        except Exception:
            if sys.modules.get("torch") is None:
                raise
        else:
            if sys.modules.get("torch") is None:
                return found
        # the dataset has just imported torch, and torch was not seeded: fetch again, for reproducible random numbers
        self._context.torch_loaded()
        return self._fetch_seeded(hosted, task, indices)

    def _fetch_seeded(
        self, hosted: HostedDataset, task: Task, indices: Indices
    ) -> tuple[list[Any], Substitutes | None]:
        """Fetch the samples of a batch; also return which were skipped or replaced if the loader permits this."""
        substitutes = None if task.spec.on_error == "raise" else Substitutes(task, indices)
        if not _fetches_together(hosted, task):
            return self._fetch_each(hosted, task, indices, substitutes), substitutes
        if substitutes is None:
            return self._fetch_together(hosted, task, indices), None
        if hosted.gives_batches(task.spec.collate):
            return self._fetch_batch_substituting(hosted, task, substitutes), substitutes
        if task.substituted is None:
            for _ in range(1 + task.spec.error_retries):
                with suppress(Exception):
                    return self._fetch_together(hosted, task, indices), None
        get = hosted.dataset.__getitems__
        return self._fetch_each(hosted, task, indices, substitutes, get), substitutes

    def _fetch_together(self, hosted: HostedDataset, task: Task, indices: Indices) -> list[Any]:
        """Fetch samples with one call of the dataset; a batch of ``__getbatch__`` is returned as one sample."""
        self._seed_batch(hosted, task)
        if _gives_batches(hosted, task):
            # a copy, because user code may sort or store the array
            return [hosted.dataset.__getbatch__(np.array(indices))]
        samples: list[Any] = hosted.dataset.__getitems__(_listed(indices))
        return samples

    def _fetch_batch_substituting(self, hosted: HostedDataset, task: Task, substitutes: Substitutes) -> list[Any]:
        """Fetch a batch of ``__getbatch__``, after samples that fail alone were skipped or replaced."""

        def fetch_alone(position: int, index: Any) -> list[Any]:
            self._note(index)
            return self._fetch_together(hosted, task, substitutes.alone(position))

        unexplained = 0
        while True:
            try:
                return self._fetch_together(hosted, task, substitutes.indices)
            except Exception:
                unexplained += 1
                for position, index in list(substitutes.items()):
                    try:
                        fetch_alone(position, index)
                    except Exception as error:
                        if self._retry(fetch_alone, task, substitutes, position, error) is None:
                            raise
                        unexplained = 0
                self._context.sample[0] = NO_SAMPLE
                if unexplained > task.spec.error_retries:
                    raise

    def _fetch_each(
        self,
        hosted: HostedDataset,
        task: Task,
        indices: Indices,
        substitutes: Substitutes | None,
        get: Callable[[list[Any]], list[Any]] | None = None,
    ) -> list[Any]:
        """Fetch samples one by one, and note which one is being fetched and which one takes longest.

        If failed samples are skipped or replaced, random generators are seeded for each sample: the random numbers of
        the other samples must not depend on how often a sample failed.

        Args:
            hosted: The dataset.
            task: Task of the batch.
            indices: Indices of the batch.
            substitutes: Substitutions of the batch; None if failed samples fail the batch.
            get: ``__getitems__`` of the dataset, to fetch each sample with a list of one index; None to call
                ``__getitem__``.
        """
        dataset, sample = hosted.dataset, self._context.sample
        positions: Sequence[int] = range(len(indices))
        numbers: Sequence[Any] = _listed(indices)
        if substitutes is not None:
            positions, numbers = zip(*substitutes.items(), strict=True)
        known = numbers if _are_64_bit(numbers) else [integer_of(index) for index in numbers]
        seeds_each = substitutes is not None or hosted.info.seeding == "sample"
        if not seeds_each:
            self._seed_batch(hosted, task)
        is_timed = self._is_slow.get(hosted.info.fingerprint, True)
        samples: list[Any] = []
        began = time.perf_counter()
        times = [began]
        # without a function call per sample, which would take longer than some datasets
        for position, index, number in zip(positions, numbers, known, strict=True):
            sample[0] = NO_SAMPLE if number is None else number
            try:
                if seeds_each:
                    self._seed_sample(hosted, task, position, number, substitutes)
                samples += (dataset[index],) if get is None else get([index])
            except Exception as error:
                fetch = partial(self._fetch_again, hosted, task, substitutes, get)
                found = self._retry(fetch, task, substitutes, position, error)
                if found is None:
                    if isinstance(error, StopIteration):
                        raise _stopped(index) from error
                    raise
                samples += found
            if is_timed:
                times.append(time.perf_counter())
        sample[0] = NO_SAMPLE
        if is_timed:
            self._report_times(known, times)
        self._is_slow[hosted.info.fingerprint] = time.perf_counter() - began > TIMED_FROM * len(samples)
        return samples

    def _report_times(self, indices: Sequence[int | None], times: Sequence[float]) -> None:
        """Report which samples took longest, given the time before the first and after each sample."""
        seconds = np.diff(times)
        longest = np.argsort(seconds)[: -1 - MAX_SLOW : -1].tolist()
        self._context.slowest = indices[longest[0]] if longest else None
        found = ((indices[place], float(seconds[place])) for place in longest)
        self._context.slow = [(i, took) for i, took in found if i is not None and took > SLOW_FROM]

    def _fetch_again(
        self,
        hosted: HostedDataset,
        task: Task,
        substitutes: Substitutes | None,
        get: Callable[[list[Any]], list[Any]] | None,
        position: int,
        index: Any,
    ) -> list[Any]:
        self._seed_sample(hosted, task, position, self._note(index), substitutes)
        return [hosted.dataset[index]] if get is None else get([index])

    def _retry(
        self,
        fetch: Callable[[int, Any], list[Any]],
        task: Task,
        substitutes: Substitutes | None,
        position: int,
        error: Exception,
    ) -> list[Any] | None:
        """Fetch the failed sample at a position again, then its replacements.

        The caller raises the exception: a frame of its traceback that refers to it would keep the dataset in memory.

        Args:
            fetch: Function that fetches a sample, given its position and index, and returns it in a list.
            task: Task of the batch.
            substitutes: Substitutions of the batch; None if failed samples fail the batch.
            position: Position of the failed sample.
            error: Its exception.

        Returns:
            The sample in a list; [] if it was skipped; None if it can be neither skipped nor replaced.
        """
        failures = 1
        while substitutes is not None:
            if failures > task.spec.error_retries:
                self._note(substitutes.listed[position])
                if not substitutes.substitute(position, error):
                    return None
                if substitutes.skips(position):
                    return []
                failures = 0
            try:
                return fetch(position, substitutes[position])
            except Exception:  # noqa: BLE001 - any exception of the dataset
                failures += 1
        return None

    def _note(self, index: Any) -> int | None:
        """Record which sample is being fetched; return its index, or None if it is no integer."""
        number = integer_of(index)
        self._context.sample[0] = NO_SAMPLE if number is None else number
        return number

    def _seed_batch(self, hosted: HostedDataset, task: Task) -> None:
        self._seed(hosted, "batch", task.spec.seed, task.batch_id.epoch, task.spec.rank, task.batch_id.batch)

    def _seed_sample(
        self, hosted: HostedDataset, task: Task, position: int, number: int | None, substitutes: Substitutes | None
    ) -> None:
        """Seed the generators for a sample: by its index if the dataset is seeded per sample, else by its position.

        A replacement has other random numbers than the sample that it replaces, which may have failed because of them.
        """
        spec, (_, epoch, batch) = task.spec, task.batch_id
        if hosted.info.seeding == "sample" and number is not None:
            self._seed(hosted, "sample", spec.seed, epoch, number)
            return
        replaced = 0 if substitutes is None else substitutes.coordinate(position)
        if hosted.info.seeding == "sample":
            self._seed(hosted, "sample", spec.seed, epoch, replaced - 1 if replaced else position)
        else:
            self._seed(hosted, "position", spec.seed, epoch, spec.rank, batch, position, replaced)

    def _seed(self, hosted: HostedDataset, purpose: str, *coordinates: int) -> None:
        if not self._context.seeds:
            return
        seed = derive_seed(purpose, *coordinates)
        seed_all(seed, torch_too=not self._context.torch_is_seeded)
        if (generators := self._generators.get(hosted.info.fingerprint)) is None:
            generators = self._generators[hosted.info.fingerprint] = Generators(hosted.dataset)
        generators.seed(seed)


def _plan(spec: LoaderSpec, length: int, epoch: int, lengths: Lengths | None) -> Plan:
    return Plan(spec, length, epoch, lengths, starts_of(spec, lengths, epoch))


def _plans_of_ranks(spec: LoaderSpec, length: int, epoch: int, lengths: Lengths | None) -> dict[int, Plan]:
    return {0: _plan(spec, length, epoch, lengths)}


def _listed(indices: Indices) -> list[Any]:
    return indices.tolist() if isinstance(indices, np.ndarray) else indices


def _are_64_bit(indices: Sequence[Any]) -> bool:
    return set(map(type, indices)) == {int} and min(indices) > -(2**63) and max(indices) < 2**63


def _fetches_together(hosted: HostedDataset, task: Task) -> bool:
    """Return True if the dataset returns the samples of a batch with one call."""
    if hosted.info.seeding == "sample" or task.spec.batch_size is None:
        return False
    return _gives_batches(hosted, task) or getattr(hosted.dataset, "__getitems__", None) is not None


def _gives_batches(hosted: HostedDataset, task: Task) -> bool:
    """Return True if the dataset returns a collated batch; packing requires its documents instead."""
    return task.spec.packing is None and hosted.gives_batches(task.spec.collate)


def _stopped(index: Any) -> RuntimeError:
    """Return the error in place of StopIteration, for which torch would end the epoch silently, and lose samples."""
    return RuntimeError(
        f"the dataset raised StopIteration at index {index}, which would end the epoch early: raise a different "
        "exception type, or catch StopIteration from next()"
    )


class Collate(Stage):
    """Stage that collates the samples into a batch."""

    name = "collate"

    def run(self, batch: Batch) -> None:
        """Collate or pack the samples of a batch, and count them."""
        packing = batch.task.spec.packing
        if batch.task.spec.batch_of == "lengths":
            if batch.hosted.lengths is None:
                raise RuntimeError(f"cannot load {batch.task.batch_id}: the dataset has no lengths")
            batch.content = batch.hosted.lengths.of(np.asarray(batch.indices))
            batch.count = len(batch.indices)
        elif packing is not None and batch.pieces is not None and batch.samples is not None:
            limit = self._context.max_batch_bytes
            batch.count, batch.content = pack(batch.hosted, packing, batch.pieces, batch.samples, limit)
        elif batch.samples is None:
            batch.content = End(0 if batch.pass_ is None else batch.pass_.shard.samples, replica=not was_read())
        else:
            batch.count, batch.content = collate(batch.hosted, batch.task, batch.indices, batch.samples)


class Encode(Stage):
    """Stage that encodes a batch as a frame in a buffer."""

    name = "encode"

    def run(self, batch: Batch) -> None:
        """Encode a batch as a frame."""
        task = batch.task
        limit = self._context.max_batch_bytes
        writer = frame_writer(task, batch.content, limit, batch.padding, batch.state, batch.substituted)
        batch.frame = batch.place(writer.nbytes)[: writer.nbytes]
        writer.write(batch.frame)
        if batch.pass_ is None:
            return
        if batch.samples is None:
            self._context.passes.end(task, batch.state)
        else:
            self._context.passes.deliver(batch.pass_, task, batch.frame, batch.state)


STAGES: Final[list[type[Stage]]] = [Fetch, Collate, Encode]
"""Stages of each batch, in order."""
