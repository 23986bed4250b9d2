"""Child process of ``teleloader-server check``: builds a dataset, computes some batches, and reports problems.

The dataset is built as in a server, and workers compute the batches. This finds problems before production:
exceptions, workers that die or hang, and samples that differ when they are loaded again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import uvloop
from numpy.typing import NDArray

from teleloader_server.cli.fork_safety import ProcessState, dangers
from teleloader_server.cli.profiling import FetchProfile
from teleloader_server.cli.repeatability import path_of_difference, unseeded_generators
from teleloader_server.config import ConfigError, DatasetConfig
from teleloader_server.dispatch.records import RangeRequest
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.limits import Limits
from teleloader_server.loading.collate import UNSUPPORTED
from teleloader_server.loading.datasets import HostedDataset, open_datasets
from teleloader_server.loading.sample_cache import CachedDataset
from teleloader_server.permissions import ANYONE
from teleloader_server.stats.collector import StatsCollector
from teleloader_server.workers.factory import ConfiguredPools, ObjectPools, PoolFactory
from teleloader_server.workers.procfs import resident_bytes
from teleloader_server.workers.worker import end_with_parent, ignore_stop_signals
from teleloader_shared.balance import BalanceSpec
from teleloader_shared.codec import BatchId, Bits, End, Failure, read, to_bytes
from teleloader_shared.errors import TeleloaderError
from teleloader_shared.lengths import padding_of
from teleloader_shared.orders.plan import Plan
from teleloader_shared.ranges import BatchRanges
from teleloader_shared.registry import keeping_unrestored
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.stats import Latency
from teleloader_shared.summary import Part, summarize
from teleloader_shared.tree import ArrayLeaf
from teleloader_shared.units import counted, seconds, size

PASS_SECONDS: Final = 10.0
"""Time limit in seconds of each pass over the batches."""
SEVERAL: Final = 4
"""Number of workers in the pass that detects interference between workers."""
SHOWN_FILES: Final = 3
SHOWN_CAUSES: Final = 3

BALANCED_STEPS: Final = 64
"""Batches per window for which the padding of length-balanced batches is measured: the default of clients."""
PADDED_BATCHES: Final = 4096
"""Maximum number of batches for which the padding is computed."""

SLOW_DECODER: Final = 1 / 3
"""Fraction of the fetch time from which Pillow's JPEG decoder is reported. The decoder takes half of the time of a
dataset that only decodes and resizes photographs."""

SLOW_SAMPLE: Final = 1e-3
"""Time in seconds to fetch a sample from which `check` tries whether a cache would be faster."""
CACHE_GAIN: Final = 0.5
"""Maximum time to read a sample, as a fraction of the time to fetch it, for which a cache is recommended."""
CACHED: Final = 16
"""Number of samples with which the cache is tried."""

Severity = Literal["error", "warning", "hint"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem with a dataset, and advice on how to fix the problem."""

    severity: Severity
    """``error``: batches fail or are wrong. ``warning``: batches may differ from the user's intent. ``hint``: batches
    are right, and could be computed faster."""
    what: str
    advice: str


@dataclass(slots=True)
class Checked:
    """Report of ``teleloader-server check`` on a dataset: times in seconds, sizes in bytes, None if unknown."""

    dataset: str
    kind: Literal["map", "iterable"] | None = None
    type: str | None = None
    """Name of the dataset's class."""
    length: int | None = None
    built_in: float | None = None
    """Time to import the dataset's module and build the dataset."""
    memory: int | None = None
    """Growth of resident memory while the dataset was built, including imports."""
    pickled: int | None = None
    """Size of the pickled dataset; None if the dataset cannot be pickled."""
    sample: Latency | None = None
    """Distribution of the time to fetch one sample in a worker."""
    batch_size: int | None = None
    batch_bytes: int | None = None
    """Mean size of an encoded batch."""
    parts: list[Part] = field(default_factory=list)
    """Content of the first batch."""
    samples_per_second: float | None = None
    """Throughput of one worker, including collation and encoding."""
    padding: float | None = None
    """Fraction of padding in batches of a random order; None if the dataset states no lengths."""
    balanced_padding: float | None = None
    """Fraction of padding in length-balanced batches."""
    repeatable: bool | None = None
    """True if batches are bit-for-bit equal when they are computed again."""
    problems: list[Problem] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    """Names of the functions that were not called, although clients may select them."""

    @property
    def failed(self) -> bool:
        """True if at least one problem has the severity ``error``."""
        return any(problem.severity == "error" for problem in self.problems)


@dataclass(frozen=True, slots=True)
class PassResult:
    """Result of a pass over some batches: decoded batches, first failure, total size and stage times."""

    batches: dict[int, Any]
    """Decoded batches by batch number; arrays are replaced by `ArrayLeaf` objects."""
    failure: Failure | None
    """Exception that ended the pass; None if no batch failed."""
    nbytes: int
    """Total size of the frames in bytes."""
    stages: Mapping[str, Latency]
    """Time per batch of each loading stage."""


def main() -> None:
    """Run the probe: read JSON arguments from stdin, and write steps and report to stdout as JSON lines."""
    # output of user code goes to stderr, to keep it out of the report
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    end_with_parent()
    ignore_stop_signals()
    # the report lists failed batches and dead workers, so they need not be logged
    logging.getLogger("teleloader_server").setLevel(logging.ERROR)
    request = json.load(sys.stdin)
    sys.path[:] = request["path"]

    def report(**message: Any) -> None:
        print(json.dumps(message), file=lines, flush=True)

    probe = Probe(
        DatasetConfig(**request["dataset"]), Limits(**request["limits"]), request["batch_size"], request["batches"],
        lambda step: report(step=step),
    )  # fmt: skip
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(probe.run())
    report(checked=asdict(probe.found))
    # skip the interpreter's shutdown, which would wait for threads that user code started
    os._exit(0)


@dataclass
class Probe:
    """Check of one dataset: builds the dataset, loads batches with workers, and collects problems in `found`.

    Args:
        config: Configuration of the dataset.
        limits: Worker limits of the server that will host the dataset.
        batch_size: Samples per batch.
        batches: Batches per pass.
        on_step: Callback, called with the name of each step.
    """

    config: DatasetConfig
    limits: Limits
    batch_size: int
    batches: int
    on_step: Callable[[str], None]

    def __post_init__(self) -> None:
        """Start with an empty report."""
        self.found = Checked(self.config.name)

    async def run(self) -> None:
        """Run all checks of the dataset, and store the results in `found`."""
        hosted = self._build()
        if hosted is None:
            return
        self._pickle(hosted)
        if hosted.info.kind == "map" and not hosted.info.length:
            none = hosted.info.length is None
            self._problem(
                "warning",
                "the dataset has no length" if none else "the dataset is empty",
                "no batch was computed. Define __len__, or use a sampler in each loader"
                if none
                else "no batch was computed. Check that the files of the dataset exist on this machine",
            )
            return
        try:
            await self._load(hosted)
        except TeleloaderError as error:
            self._problem("error", str(error), "see the log above")

    def _problem(self, severity: Severity, what: str, advice: str) -> None:
        self.found.problems.append(Problem(severity, what, advice))

    # -- building

    def _build(self) -> HostedDataset | None:
        self.on_step("building the dataset")
        before, files, memory = ProcessState(), _open_files(), resident_bytes(os.getpid())
        began = time.perf_counter()
        try:
            hosted = open_datasets([self.config])[self.config.name]
        except ConfigError as error:
            self._problem("error", str(error), "a server with this dataset would not start")
            return None
        self.found.built_in = time.perf_counter() - began
        self.found.memory = max(0, resident_bytes(os.getpid()) - memory)
        self.found.kind, self.found.type = hosted.info.kind, hosted.info.type
        self.found.length = hosted.info.length
        if self.config.start_method == "fork":
            self._check_fork_safety(_open_files() - files, dangers(before, hosted.dataset))
        return hosted

    def _check_fork_safety(self, files: set[str], reasons: list[str]) -> None:
        if files:
            more = f" and {len(files) - SHOWN_FILES} more" if len(files) > SHOWN_FILES else ""
            self._problem(
                "warning",
                f"building the dataset leaves files open: {', '.join(sorted(files)[:SHOWN_FILES])}{more}",
                "forked workers would share the position in an open file. Open files in __getitem__ or worker_init",
            )
        if reasons:
            self._problem(
                "warning",
                "; ".join(reasons),
                "threads and connections do not work in forked workers. Let each worker build the dataset: set "
                f'start_method = "spawn" in [datasets.{self.config.name}] of the --config file',
            )
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            self._problem(
                "error",
                "building the dataset initializes CUDA",
                "CUDA does not work in forked workers. Keep tensors on the CPU, and copy them to the GPU in training",
            )

    def _pickle(self, hosted: HostedDataset) -> None:
        self.on_step("pickling the dataset")
        counter = _Counter()
        with suppress(Exception):  # user code can raise any exception, and pickling is optional
            pickle.Pickler(counter, pickle.HIGHEST_PROTOCOL).dump(hosted.dataset)
            self.found.pickled = counter.nbytes

    # -- loading

    async def _load(self, hosted: HostedDataset) -> None:
        self.on_step("fetching samples")
        profile = FetchProfile()
        profiled = profile.profiled(hosted) if self.config.start_method == "fork" else hosted
        singles = await self._compute(profiled, 1, range(self.batches * self.batch_size))
        self.found.sample = singles.stages["fetch"]
        if self._failed(singles):
            return
        self._check_decoder(profile.pillow_jpeg_fraction())
        if hosted.info.kind == "map":
            await self._check_cache(hosted, singles)
        self.on_step("computing batches")
        first = await self._compute(hosted, self.batch_size, range(self.batches))
        if self._failed(first):
            return
        if not first.batches:
            self._problem("warning", "the dataset yields no samples", "check that its files exist on this machine")
            return
        self.found.batch_size = self.batch_size
        self._measure_padding(hosted)
        self.found.parts = summarize(first.batches[0])
        self.found.batch_bytes = first.nbytes // len(first.batches)
        self.found.samples_per_second = self.batch_size / sum(stage.p50 for stage in first.stages.values())
        if hosted.info.kind == "map":
            await self._compare(hosted, first)
        else:
            await self._compare_shards(hosted, first)
        await self._check_functions(hosted)

    async def _check_functions(self, hosted: HostedDataset) -> None:
        """Collate a batch with each function that clients may select as ``collate_fn``."""
        names = [name for name in hosted.info.functions if name != hosted.info.collate]
        if hosted.info.kind == "iterable":  # a function may be a worker-init function, unlike for map-style datasets
            self.found.unchecked = names
            return
        for name in names:
            self.on_step(f"collating with {name}")
            failure = (await self._compute(hosted, self.batch_size, range(1), collate=name)).failure
            if failure is not None:
                text = failure.traceback.rstrip() or f"{failure.type}: {failure.message}"
                self._problem(
                    "warning",
                    f"collate_fn={name} fails for a list of samples:\n{text}",
                    "a training loop with this function would raise this exception. Fix the function, unless it is for "
                    "batch_size=None",
                )

    def _measure_padding(self, hosted: HostedDataset) -> None:
        lengths, size = hosted.lengths, self.batch_size
        if lengths is None:
            return
        balance = BalanceSpec(lengths.digest, BALANCED_STEPS * size, size)
        spec = LoaderSpec(dataset=self.config.name, batch_size=size, shuffle=True)
        for name, given in (("padding", None), ("balanced_padding", balance)):
            plan = Plan(replace(spec, balance=given), len(lengths), 0, lengths)
            batches = (plan[k] for k in range(min(len(plan), PADDED_BATCHES)))
            setattr(self.found, name, padding_of(batches, lengths))

    def _check_decoder(self, fraction: float) -> None:
        if fraction >= SLOW_DECODER:
            self._problem(
                "hint",
                f"Pillow's JPEG decoder takes {fraction:.0%} of the time to fetch samples",
                "simplejpeg and OpenCV decode and resize about twice as fast, with slightly different pixels: see the "
                'section "Faster JPEG decoding" of the guide',
            )

    async def _check_cache(self, hosted: HostedDataset, singles: PassResult) -> None:
        """Report a hint if samples are the same in each epoch, and a cache would return them much faster."""
        if not singles.batches or singles.stages["fetch"].p50 < SLOW_SAMPLE:
            return
        self.on_step("fetching samples of another epoch")
        again = await self._compute(hosted, 1, range(min(len(singles.batches), CACHED)), epoch=1)
        if again.failure is not None or _differing(singles, again) is not None:
            return
        samples = [singles.batches[k] for k in list(singles.batches)[:CACHED]]
        read = _cached_read_time(samples)
        if read < singles.stages["fetch"].p50 * CACHE_GAIN:
            whole = (
                ""
                if self.found.length is None
                else (
                    f" All {self.found.length:,} samples take about "
                    f"{size(self.found.length * singles.nbytes / len(singles.batches))}."
                )
            )
            self._problem(
                "hint",
                f"the first {counted(len(again.batches), 'sample')} do not depend on random numbers, and take "
                f"{seconds(singles.stages['fetch'].p50)} each: reading them from a file takes {seconds(read)}",
                f'wrap the dataset in CachedDataset, see the section "Sample cache" of the guide.{whole}',
            )

    def _failed(self, made: PassResult) -> bool:
        if made.failure is None:
            return False
        failure = made.failure
        text = failure.traceback.rstrip() or f"{failure.type}: {failure.message}"
        self._problem("error", f"cannot {_failed_step(failure)}:\n{text}", _advice_on(failure))
        return True

    async def _compare(self, hosted: HostedDataset, first: PassResult) -> None:
        self.on_step("computing batches again")
        # in reverse order: otherwise a generator that continues from batch to batch would look seeded per batch
        again = await self._compute(hosted, self.batch_size, range(len(first.batches))[::-1])
        if self._differ(hosted, first, again):
            return
        self.on_step("computing batches with several workers")
        several = await self._compute(hosted, self.batch_size, range(len(first.batches)), SEVERAL)
        if not self._failed(several) and _differing(first, several) is not None:
            self.found.repeatable = False
            self._problem(
                "error",
                f"batches differ between one worker and {SEVERAL} concurrent workers",
                "workers share state, such as a file opened before the fork. Open files in __getitem__ or worker_init",
            )

    async def _compare_shards(self, hosted: HostedDataset, first: PassResult) -> None:
        self.on_step("computing batches again")
        self._differ(hosted, first, await self._compute(hosted, self.batch_size, range(len(first.batches))))
        self.on_step("computing batches with two workers")
        two = await self._compute(hosted, self.batch_size, range(2), 2)
        if not self._failed(two) and len(two.batches) == 2 and _encoded(two.batches[0]) == _encoded(two.batches[1]):
            self._problem(
                "warning",
                "all shards start with the same samples",
                "with num_workers > 1 each worker would yield all samples. Select the worker's part of the data with "
                "get_worker_info() in __iter__",
            )

    def _differ(self, hosted: HostedDataset, first: PassResult, again: PassResult) -> bool:
        """Report a problem if recomputed batches differ, and return True in this case."""
        differing = _differing(first, again)
        self.found.repeatable = differing is None
        if differing is None:
            return False
        one, other = first.batches[differing], again.batches[differing]
        place = path_of_difference(one, other, lambda one, other: _encoded(one) == _encoded(other))
        named = (self.config.factory, self.config.collate)
        modules = [name.partition(":")[0] for name in named if name is not None]
        unseeded = unseeded_generators(hosted.dataset, modules, lambda: self._compute_here(hosted))
        cause = f". Probable cause: {'; '.join(unseeded[:SHOWN_CAUSES])}" if unseeded else ""
        advice = (
            "a batch must depend only on its indices and on random generators that workers seed: those of random, "
            "np.random and torch, and those in attributes of the dataset and its transforms. Move other generators "
            "there, or seed them in a method __seed__(self, seed) of the dataset"
            if hosted.info.kind == "map"
            else "the order and the samples must not depend on other generators than those of random, np.random and "
            "torch. Seed other generators in __iter__"
        )
        self._problem("warning", f"recomputed batches differ in {place}{cause}", advice)
        return True

    def _compute_here(self, hosted: HostedDataset) -> None:
        """Compute a batch in this process."""
        if hosted.info.kind == "map":
            samples = [hosted.dataset[index] for index in range(min(self.batch_size, hosted.info.length or 0))]
        else:
            samples = list(islice(hosted.dataset, self.batch_size))
        hosted.collate_batch(samples)

    async def _compute(
        self, hosted: HostedDataset, batch_size: int, numbers: range, workers: int = 1, epoch: int = 0,
        collate: str | None = None,
    ) -> PassResult:  # fmt: skip
        """Compute batches with new workers, for at most `PASS_SECONDS`."""
        limits = replace(self.limits, num_workers=workers)
        pools: PoolFactory = ObjectPools(lambda: {hosted.info.name: hosted}, limits)
        spec = LoaderSpec(
            dataset=hosted.info.name, batch_size=batch_size, num_workers=workers, session=secrets.token_hex(16),
            collate=collate,
        )  # fmt: skip
        if self.config.start_method == "spawn":
            pools = ConfiguredPools([self.config], limits)
            if hosted.info.kind == "map":  # the shared pool
                spec = replace(spec, num_workers=0, session=None)
        service = LoaderService(pools, limits)
        await service.start()
        try:
            registered = await service.register(spec, ANYONE)
            if registered.batches is not None:
                numbers = numbers[: registered.batches]
            frames = await _take(service, registered.key, numbers, epoch)
            return _read_all(frames, (await StatsCollector(service).stats()).datasets[0].stages)
        finally:
            await service.close()


async def _take(service: LoaderService, key: str, numbers: range, epoch: int) -> list[NDArray[np.uint8]]:
    """Return the frames of batches; ascending batches are requested together, so that all workers compute some."""
    deadline = time.monotonic() + PASS_SECONDS
    frames: list[NDArray[np.uint8]] = []
    for wanted in [numbers] if numbers.step == 1 else [range(k, k + 1) for k in numbers]:
        request = RangeRequest(consumer="check", key=key, epoch=epoch, batches=BatchRanges(wanted))
        with service.batches(ANYONE, request) as stream:
            while not stream.exhausted and time.monotonic() < deadline:
                ready = await stream.take()
                frames.append(np.array(ready.raw))
                if ready.failed:
                    return frames
    return frames


def _cached_read_time(samples: Sequence[Any]) -> float:
    """Return the median time in seconds to read one of these samples from a `CachedDataset`."""
    times = []
    with tempfile.TemporaryDirectory() as directory:
        dataset = CachedDataset(samples, directory, version="check", max_bytes=2**40)
        for _ in range(3):  # the first pass writes, the second one compares a sample
            for index in range(len(samples)):
                began = time.perf_counter()
                dataset[index]
                times.append(time.perf_counter() - began)
    return statistics.median(times[-len(samples) :])


class _LeafMemory(Bits):
    """Buffer of a frame whose arrays are not converted, because they are only compared and described."""

    __slots__ = ()

    def leaf(self, offset: int, dtype_name: str, shape: tuple[int, ...], kind: str) -> ArrayLeaf:
        return ArrayLeaf(dtype_name, kind, super().leaf(offset, dtype_name, shape, kind))


def _read_all(frames: Sequence[NDArray[np.uint8]], stages: Mapping[str, Latency]) -> PassResult:
    batches, failure = {}, None
    for frame in frames:
        with keeping_unrestored():  # not every type can be restored from `ArrayLeaf` objects
            batch_id, content, *_ = read(_LeafMemory(frame))
        if isinstance(content, Failure):
            failure = content
        elif not isinstance(content, End):
            batches[batch_id.batch] = content
    return PassResult(batches, failure, sum(map(len, frames)), stages)


def _differing(one: PassResult, other: PassResult) -> int | None:
    """Return the number of the first batch that differs between two passes; None if all common batches are equal."""
    both = sorted(one.batches.keys() & other.batches.keys())
    return next((k for k in both if _encoded(one.batches[k]) != _encoded(other.batches[k])), None)


def _encoded(batch: Any) -> bytes:
    return to_bytes(BatchId("", 0, 0), batch)


def _failed_step(failure: Failure) -> str:
    if failure.sample is not None:
        return f"load sample {failure.sample}"
    if len(failure.indices) == 1:
        return f"compute a batch of sample {failure.indices[0]}"
    return f"compute a batch that starts with sample {failure.indices[0]}" if failure.indices else "compute a batch"


def _advice_on(failure: Failure) -> str:
    name = failure.type.rpartition(".")[2]
    if name == "WorkerDied":
        return "possible causes: a crash in C code, os._exit() or exhausted memory"
    if name == "LoaderTimeout":
        return "the stack shows where the worker hung. If the dataset is slow, increase --batch-timeout"
    if failure.message.startswith(UNSUPPORTED.partition("{")[0]):
        return (
            "remove or convert the value in the dataset, or configure a collate function. The default one collates "
            "tensors, arrays, numbers, strings, and containers of these"
        )
    if ", in lazy_collate" in failure.traceback:
        return "samples of one batch must have the same shape: resize or pad them, or configure a collate function"
    if name == "EncodeError":
        return "batches may contain arrays, numbers, text and containers of them: convert other values in the dataset"
    if name == "BatchTooLarge":
        return "use smaller batches, or increase --max-batch-bytes"
    if failure.sample is not None:
        return (
            'a training loop would raise this exception. Fix the dataset, or pass on_error="skip" or '
            'on_error="replace" to the DataLoader (map-style datasets)'
        )
    return "a training loop would raise this exception. Fix the dataset or its collate function"


def _open_files() -> set[str]:
    """Return the paths of the regular files that are open in this process, except memory-mapped ones.

    A mapping, such as a `numpy.memmap`, keeps its file open, but reads do not use the position in the file.
    """
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the directory listing itself is already closed
            target = entry.readlink()
            if target.is_absolute() and target.is_file():
                found.add(str(target))
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return found - mapped


class _Counter:
    """File object that counts the bytes written to it, and discards them."""

    def __init__(self) -> None:
        self.nbytes = 0

    def write(self, piece: bytes | memoryview) -> int:
        """Add the size of `piece` to `nbytes` and return this size, without storing `piece`."""
        size = memoryview(piece).nbytes
        self.nbytes += size
        return size
