"""What ``teleloader-server check`` runs: a process of its own that tries one dataset, and says what it finds.

It builds the dataset as a server does, and has real workers, forked from it, make real batches. What goes wrong with a
dataset in production goes wrong here: an exception, a worker that dies or hangs, samples that are not the same twice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import uvloop
from numpy.typing import NDArray

from teleloader_server.config import ConfigError, DatasetConfig, Limits
from teleloader_server.dispatch.records import RangeRequest
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.loading.datasets import HostedDataset, open_datasets
from teleloader_server.permissions import ANYONE
from teleloader_server.stats.collector import StatsCollector
from teleloader_server.workers.factory import ObjectPools
from teleloader_server.workers.procfs import resident_bytes
from teleloader_server.workers.worker import end_with_parent, leave_signals_to_the_server
from teleloader_shared.codec import Address, Bits, End, Failure, read, to_bytes
from teleloader_shared.errors import TeleloaderError
from teleloader_shared.outline import Part, outline
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.stats import Latency
from teleloader_shared.tree import ArrayLeaf

PASS_SECONDS: Final = 10.0
"""After so long a pass over some batches is ended."""
SEVERAL: Final = 4
"""Workers of the pass that looks whether they disturb one another."""
SHOWN_FILES: Final = 3

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong with a dataset."""

    severity: Severity
    """``error``: batches cannot be had, or are wrong. ``warning``: they are not what users usually want."""
    what: str
    advice: str
    """One sentence."""


@dataclass(slots=True)
class Checked:
    """What was found. Times in seconds, sizes in bytes; None is what was not found out."""

    dataset: str
    kind: Literal["map", "iterable"] | None = None
    type: str | None = None
    """Name of its class."""
    length: int | None = None
    built_in: float | None = None
    """To import its module and make it."""
    memory: int | None = None
    """Resident memory that building it took, with what it imports."""
    pickled: int | None = None
    """Size of its pickle; None when it cannot be pickled."""
    sample: Latency | None = None
    """To fetch one sample, in a worker."""
    batch_size: int | None = None
    batch_bytes: int | None = None
    """Mean size of a batch on the wire."""
    parts: list[Part] = field(default_factory=list)
    """What the first batch holds."""
    samples_per_second: float | None = None
    """What one worker makes in batches, collated and encoded."""
    repeatable: bool | None = None
    """Whether batches are the same bit for bit when they are made again."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether it cannot be depended on."""
        return any(problem.severity == "error" for problem in self.problems)


@dataclass(frozen=True, slots=True)
class Made:
    """What a pass over some batches gave."""

    batches: dict[int, Any]
    """By number; arrays are leaves."""
    failure: Failure | None
    """The exception that ended it."""
    nbytes: int
    """Of their frames together."""
    stages: Mapping[str, Latency]
    """How long it took."""


def main() -> None:
    """Be that process: what to check comes on stdin as JSON, what is found goes to stdout, a JSON object a line."""
    # what user code prints must not come between
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    end_with_parent()
    leave_signals_to_the_server()
    # failed batches and workers that died are what is found: they need not be told of twice
    logging.getLogger("teleloader_server").setLevel(logging.ERROR)
    asked = json.load(sys.stdin)
    sys.path[:] = asked["path"]

    def tell(**message: Any) -> None:
        print(json.dumps(message), file=lines, flush=True)

    probe = Probe(
        DatasetConfig(**asked["dataset"]), Limits(**asked["limits"]), asked["batch_size"], asked["batches"],
        lambda step: tell(step=step),
    )  # fmt: skip
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(probe.run())
    tell(checked=asdict(probe.found))
    # not by way of the interpreter's shutdown, which would wait for threads that user code has started
    os._exit(0)


class Probe:
    """Tries one dataset.

    Args:
        config: The dataset.
        limits: Of the server that would host it.
        batch_size: Samples in a batch.
        batches: How many batches to make in a pass.
        tell: Called with what is done now.
    """

    def __init__(
        self, config: DatasetConfig, limits: Limits, batch_size: int, batches: int, tell: Callable[[str], None]
    ) -> None:
        self._config = config
        self._limits = limits
        self._batch_size = batch_size
        self._batches = batches
        self._tell = tell
        self.found = Checked(config.name)

    async def run(self) -> None:
        """Fill `found`."""
        hosted = self._build()
        if hosted is None:
            return
        self._pickle(hosted)
        if hosted.info.kind == "map" and not hosted.info.length:
            none = hosted.info.length is None
            self._problem(
                "warning",
                "it has no length" if none else "it is empty",
                "no batch was tried; only loaders with a sampler of their own can use it: give it a __len__"
                if none
                else "no batch was tried: see whether its files are where it looks for them",
            )
            return
        try:
            await self._load(hosted)
        except TeleloaderError as error:
            self._problem("error", str(error), "see the server's log above")

    def _problem(self, severity: Severity, what: str, advice: str) -> None:
        self.found.problems.append(Problem(severity, what, advice))

    # -- building it

    def _build(self) -> HostedDataset | None:
        self._tell("building it")
        threads, files, memory = set(threading.enumerate()), _open_files(), resident_bytes(os.getpid())
        began = time.perf_counter()
        try:
            hosted = open_datasets([self._config])[self._config.name]
        except ConfigError as error:
            self._problem("error", str(error), "a server with this dataset does not start")
            return None
        self.found.built_in = time.perf_counter() - began
        self.found.memory = max(0, resident_bytes(os.getpid()) - memory)
        self.found.kind, self.found.type = hosted.info.kind, hosted.info.type
        self.found.length = hosted.info.length
        self._look_for_what_forks_badly(_open_files() - files, set(threading.enumerate()) - threads)
        return hosted

    def _look_for_what_forks_badly(self, files: set[str], threads: set[threading.Thread]) -> None:
        if files:
            more = f" and {len(files) - SHOWN_FILES} more" if len(files) > SHOWN_FILES else ""
            self._problem(
                "warning",
                f"building it leaves files open: {', '.join(sorted(files)[:SHOWN_FILES])}{more}",
                "forked workers share one position in an open file and read each other's bytes: open files in "
                "__getitem__ or in a worker_init function",
            )
        if threads:
            self._problem(
                "warning",
                f"building it starts threads: {', '.join(sorted(thread.name for thread in threads))}",
                "forked workers do not have them, and locks that they hold stay locked: start them in a worker_init "
                "function",
            )
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            self._problem(
                "error",
                "building it initialises CUDA",
                "forked workers cannot use it: keep tensors on the CPU here, and move them where you train",
            )

    def _pickle(self, hosted: HostedDataset) -> None:
        self._tell("pickling it")
        counter = _Counter()
        with suppress(Exception):  # whatever user code raises: it need not be pickled
            pickle.Pickler(counter, pickle.HIGHEST_PROTOCOL).dump(hosted.dataset)
            self.found.pickled = counter.nbytes

    # -- loading from it

    async def _load(self, hosted: HostedDataset) -> None:
        self._tell("fetching samples")
        singles = await self._make(hosted, 1, range(self._batches * self._batch_size))
        self.found.sample = singles.stages["fetch"]
        if self._failed(singles):
            return
        self._tell("making batches")
        first = await self._make(hosted, self._batch_size, range(self._batches))
        if self._failed(first):
            return
        if not first.batches:
            self._problem("warning", "it gives no samples", "see whether its files are where it looks for them")
            return
        self.found.batch_size = self._batch_size
        self.found.parts = outline(first.batches[0])
        self.found.batch_bytes = first.nbytes // len(first.batches)
        self.found.samples_per_second = self._batch_size / sum(stage.p50 for stage in first.stages.values())
        if hosted.info.kind == "map":
            await self._compare(hosted, first)
        else:
            await self._look_at_shards(hosted, first)

    def _failed(self, made: Made) -> bool:
        if made.failure is None:
            return False
        failure = made.failure
        first = f", with index {failure.indices[0]}" if failure.indices else ""
        text = failure.traceback.rstrip() or f"{failure.type}: {failure.message}"
        self._problem("error", f"a batch cannot be made{first}:\n{text}", _advice_on(failure))
        return True

    async def _compare(self, hosted: HostedDataset, first: Made) -> None:
        self._tell("making them again")
        # the other way round: a generator that goes on from batch to batch must not pass for one that is seeded
        again = await self._make(hosted, self._batch_size, range(len(first.batches))[::-1])
        self.found.repeatable = _equal(first, again)
        if not self.found.repeatable:
            self._not_repeatable()
            return
        self._tell("making them with several workers")
        several = await self._make(hosted, self._batch_size, range(len(first.batches)), SEVERAL)
        if not self._failed(several) and not _equal(first, several):
            self.found.repeatable = False
            self._problem(
                "error",
                f"with {SEVERAL} workers at once, batches are not what one worker makes",
                "workers disturb one another, as by a file that was opened before they were forked: open it in "
                "__getitem__ or in a worker_init function",
            )

    async def _look_at_shards(self, hosted: HostedDataset, first: Made) -> None:
        self._tell("making them again")
        self.found.repeatable = _equal(first, await self._make(hosted, self._batch_size, range(len(first.batches))))
        if not self.found.repeatable:
            self._not_repeatable()
        self._tell("making them with two workers")
        two = await self._make(hosted, self._batch_size, range(2), 2)
        if not self._failed(two) and len(two.batches) == 2 and _encoded(two.batches[0]) == _encoded(two.batches[1]):
            self._problem(
                "warning",
                "all shards begin with the same samples",
                "with num_workers > 1 each sample comes once for each worker: ask get_worker_info() in __iter__ which "
                "part of the data to give",
            )

    def _not_repeatable(self) -> None:
        self._problem(
            "warning",
            "the same batch is not the same when it is made again",
            "it depends on something else than the indices and the random numbers that are seeded for each batch: draw "
            "from random, np.random's functions or torch's global generator, or seed a generator of its own from the "
            "index",
        )

    async def _make(self, hosted: HostedDataset, batch_size: int, numbers: range, workers: int = 1) -> Made:
        """A pass by fresh workers, over these batches, or as many of them as can be had in `PASS_SECONDS`."""
        service = LoaderService(ObjectPools(lambda: {hosted.info.name: hosted}, self._limits), self._limits)
        await service.start()
        try:
            spec = LoaderSpec(
                dataset=hosted.info.name, batch_size=batch_size, num_workers=workers, session=secrets.token_hex(16)
            )
            registered = await service.register(spec, ANYONE)
            if registered.batches is not None:
                numbers = numbers[: registered.batches]
            frames = await _take(service, registered.key, numbers)
            return _read_all(frames, (await StatsCollector(service).stats()).datasets[0].stages)
        finally:
            await service.close()


async def _take(service: LoaderService, key: str, numbers: range) -> list[NDArray[np.uint8]]:
    """The frames of these batches; numbers that ascend are asked for at once, so that several workers have some."""
    deadline = time.monotonic() + PASS_SECONDS
    frames: list[NDArray[np.uint8]] = []
    for asked in [numbers] if numbers.step == 1 else [range(k, k + 1) for k in numbers]:
        request = RangeRequest(consumer="check", key=key, epoch=0, start=asked.start, stop=asked.stop)
        async with service.batches(ANYONE, request) as stream:
            while not stream.exhausted and time.monotonic() < deadline:
                ready = await stream.take()
                frames.append(np.array(ready.raw))
                if ready.failed:
                    return frames
    return frames


class _LeafMemory(Bits):
    """Memory of a frame whose arrays are compared and described, and not used."""

    __slots__ = ()

    def leaf(self, offset: int, dtype_name: str, shape: tuple[int, ...], kind: str) -> ArrayLeaf:
        return ArrayLeaf(dtype_name, kind, super().leaf(offset, dtype_name, shape, kind))


def _read_all(frames: Sequence[NDArray[np.uint8]], stages: Mapping[str, Latency]) -> Made:
    batches, failure = {}, None
    for frame in frames:
        address, content, *_ = read(_LeafMemory(frame))
        if isinstance(content, Failure):
            failure = content
        elif not isinstance(content, End):
            batches[address.batch] = content
    return Made(batches, failure, sum(map(len, frames)), stages)


def _equal(one: Made, other: Made) -> bool:
    """Whether they are the same, as far as both went."""
    both = one.batches.keys() & other.batches.keys()
    return all(_encoded(one.batches[k]) == _encoded(other.batches[k]) for k in both)


def _encoded(batch: Any) -> bytes:
    return to_bytes(Address("", 0, 0), batch)


def _advice_on(failure: Failure) -> str:
    name = failure.type.rpartition(".")[2]
    if name == "WorkerDied":
        return "the worker process ended: a crash in C code, os._exit(), or memory that ran out"
    if name == "LoaderTimeout":
        return "it hung where the stack shows: raise --batch-timeout if it is only slow"
    if "collate" in failure.traceback:
        return (
            "samples of one batch must fit together: make them alike, or name a collate function in the configuration"
        )
    if name == "EncodeError":
        return "a batch may hold arrays, numbers, text and containers of these: convert the rest in the dataset"
    if name == "BatchTooLarge":
        return "choose a smaller batch, or raise --max-batch-bytes"
    return "mend it, or leave such samples out: at this place a training loop gets the exception"


def _open_files() -> set[str]:
    """The regular files that this process has open."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the listing itself is gone already
            target = entry.readlink()
            if target.is_absolute() and target.is_file():
                found.add(str(target))
    return found


class _Counter:
    """A file that only counts what is written to it."""

    def __init__(self) -> None:
        self.nbytes = 0

    def write(self, piece: bytes | memoryview) -> int:
        """Count it."""
        size = memoryview(piece).nbytes
        self.nbytes += size
        return size
