"""From a task to a frame: indices -> samples -> batch -> bytes. Runs in workers; knows nothing of processes."""

from __future__ import annotations

import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from teleloader_server import index_lists
from teleloader_server.datasets import HostedDataset
from teleloader_server.shards import Shard
from teleloader_server.worker_info import was_asked
from teleloader_shared.codec import MAX_INDICES, MAX_TEXT, Address, End, Failure, FrameWriter
from teleloader_shared.plan import Plan
from teleloader_shared.seeding import derive
from teleloader_shared.spec import LoaderSpec

Indices = NDArray[np.int64] | list[Any]
"""What a batch holds: an array of the plan's, or whatever a client's own order lists."""


class Task(NamedTuple):
    """A batch to be made. The plan is computed by the worker: a few numbers travel to it, not an index list."""

    spec: LoaderSpec
    length: int
    """Samples in the dataset, 0 when it has no length."""
    address: Address
    indices: bytes | None = None
    """The frame in which a client of an order of its own lists what the batch holds."""


class Report(NamedTuple):
    """How a task went; times in seconds."""

    samples: int
    failed: bool
    fetch: float
    collate: float
    encode: float

    @property
    def seconds(self) -> float:
        """The whole time."""
        return self.fetch + self.collate + self.encode


class Loading:
    """Makes the frames of tasks.

    Args:
        hosted: The datasets by name.
        worker: Number of the worker that this runs in, -1 in the server's own process.
        max_batch_bytes: The largest frame that may be.
        torch_loaded: Called when a dataset has loaded torch in the middle of a batch.
        seeds: Whether random numbers are a function of a batch's address; else they are drawn as the generators stand.
        seed_worker: Seeds the worker as at its birth; an iterable-style dataset that begins again draws as before.
        skipped: Called for each batch of an iterable-style dataset that is only gone through.
    """

    def __init__(
        self,
        hosted: Mapping[str, HostedDataset],
        worker: int,
        max_batch_bytes: int,
        torch_loaded: Callable[[], None] = lambda: None,
        seed_worker: Callable[[], None] = lambda: None,
        skipped: Callable[[], None] = lambda: None,
        *,
        seeds: bool = True,
    ) -> None:
        self._seeds = seeds
        self._torch_loaded = torch_loaded
        self._seed_worker = seed_worker
        self._skipped = skipped
        self._shards: dict[tuple[str, int], Shard] = {}
        """The passes through iterable-style datasets, by (loader, epoch)."""
        self.torch_is_seeded = False
        """Whether a worker-init function has seeded torch: then it is not seeded for each batch, as with torch."""
        self._hosted = hosted
        self._worker = worker
        # sys.exit() ends a worker process, but must not end the thread of a server without workers
        self._exits = worker >= 0
        self._max_batch_bytes = max_batch_bytes
        self._plan = lru_cache(maxsize=64)(Plan)

    def load(self, task: Task, place: Callable[[int], NDArray[np.uint8]]) -> tuple[int, Report]:
        """Write the frame of `task` to a buffer that `place(nbytes)` gives; an exception becomes a failure frame.

        Returns:
            The frame's size, and how it went.
        """
        started = fetched = collated = time.perf_counter()
        indices: Indices = []
        count = 0
        failed = False
        try:
            hosted = self._hosted[task.spec.dataset]
            padding, shard_state = 0, None
            if hosted.info.kind == "iterable":
                shard = self._shard(hosted, task)
                samples = shard.fetch(task.address.batch // task.spec.shards)
                shard_state = shard.state()
            else:
                indices, padding = self._indices(hosted, task)
                samples = self._fetch(hosted, task, indices)
            fetched = collated = time.perf_counter()
            if samples is None:
                batch: Any = End(shard.samples, replica=not was_asked())
            else:
                count, batch = _collate(hosted, task, indices, samples)
            collated = time.perf_counter()
            writer = self._writer(task, batch, padding, shard_state)
            writer.write(place(writer.nbytes))
        except BaseException as error:  # KeyboardInterrupt too: a real one does not come here
            if isinstance(error, SystemExit) and self._exits:
                raise
            failed = True
            writer = FrameWriter(task.address, describe(error, indices, self._worker), checksum=task.spec.checksum)
            writer.write(place(writer.nbytes))
        ended = time.perf_counter()
        report = Report(
            samples=count, failed=failed, fetch=fetched - started, collate=collated - fetched, encode=ended - collated,
        )  # fmt: skip
        return writer.nbytes, report

    def _indices(self, hosted: HostedDataset, task: Task) -> tuple[Indices, int]:
        """What the batch holds, and how many of it are padding."""
        if task.indices is not None:
            listed = index_lists.read(task.indices, single=task.spec.batch_size is None)
            if hosted.indices == "integers":
                index_lists.check_range(listed, hosted.info.length, hosted.info.name)
            return listed, 0
        if task.spec.order == "client":
            raise RuntimeError(
                "the server does not know what this batch holds: a bug, and it must not make another one"
            )
        plan = self._plan(task.spec, task.length, task.address.epoch)
        return plan[task.address.batch], plan.padding(task.address.batch)

    def _shard(self, hosted: HostedDataset, task: Task) -> Shard:
        run = (task.address.loader, task.address.epoch)
        if run not in self._shards:
            self._shards.clear()  # a session goes through its epochs one after another
            spec = task.spec
            saved = None
            if spec.shard_states is not None and spec.resumed_epoch == task.address.epoch:
                saved = spec.shard_states[task.address.batch % spec.shards]
            self._shards[run] = Shard(
                hosted.dataset, spec.batch_size, spec.drop_last, self._seed_worker, saved, self._skipped
            )
        return self._shards[run]

    def _fetch(self, hosted: HostedDataset, task: Task, indices: Indices) -> list[Any]:
        if sys.modules.get("torch") is not None:
            return self._fetch_seeded(hosted, task, indices)
        try:
            samples = self._fetch_seeded(hosted, task, indices)
        except Exception:
            if sys.modules.get("torch") is None:
                raise
        else:
            if sys.modules.get("torch") is None:
                return samples
        # the dataset loaded torch just now, and drew from it before it could be seeded: once more, as every other time
        self._torch_loaded()
        return self._fetch_seeded(hosted, task, indices)

    def _fetch_seeded(self, hosted: HostedDataset, task: Task, indices: Indices) -> list[Any]:
        spec, epoch, dataset = task.spec, task.address.epoch, hosted.dataset
        per_sample = hosted.info.seeding == "sample"
        if not per_sample:
            self._seed("batch", spec.seed, epoch, spec.rank, task.address.batch)
            if spec.batch_size is not None and hosted.gives_batches(spec.collate):
                # a copy: user code may sort it in place, or keep it
                return [dataset.__getbatch__(np.array(indices))]
        numbers = _as_list(indices)
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
            # torch lets it end the epoch silently: samples are lost and nobody knows
            raise RuntimeError(f"the dataset raised StopIteration at index {index}") from stop
        return samples

    def _seed(self, purpose: str, *coordinates: int) -> None:
        if self._seeds:
            seed_all(derive(purpose, *coordinates), torch_too=not self.torch_is_seeded)

    def _writer(self, task: Task, content: object, padding: int, shard_state: str | None) -> FrameWriter:
        return FrameWriter(
            task.address,
            content,
            padding=padding,
            shard_state=shard_state,
            name="sample" if task.spec.batch_size is None else "batch",
            checksum=task.spec.checksum,
            compression=task.spec.compression,
            max_bytes=self._max_batch_bytes,
        )


def indices_of(task: Task, count: int = MAX_INDICES) -> list[int]:
    """The first `count` indices of a batch, as far as they are integers: [] for an iterable-style dataset."""
    if task.indices is not None:
        return index_lists.first_integers(task.indices, count)
    if task.spec.session is not None and task.length == 0:
        return []
    found: list[int] = Plan(task.spec, task.length, task.address.epoch).first(task.address.batch, count).tolist()
    return found


def _as_list(indices: Indices) -> list[Any]:
    return indices.tolist() if isinstance(indices, np.ndarray) else indices


def _numbers(indices: Indices) -> list[int]:
    return [index for index in _as_list(indices[:MAX_INDICES]) if isinstance(index, int)]


def describe(error: BaseException, indices: Indices, worker: int) -> Failure:
    """What travels of an exception."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - an exception that cannot even be printed must not hide itself
        message = f"<{name} whose str() fails>"
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - as above
        text = f"{name}: {message}\n"
    return Failure(
        type=name, message=message[:MAX_TEXT], traceback=_cut(text), indices=_numbers(indices), worker=worker
    )


def _cut(text: str) -> str:
    """The text without its middle: a long message must not push out the lines that it came from."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2 - 10]}\n[...]\n{text[-MAX_TEXT // 2 + 10 :]}"


def seed_all(seed: int, *, torch_too: bool = True) -> None:
    """Seed `random`, NumPy's legacy generator and, when it is loaded, torch."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None and torch_too:
        # torch.manual_seed looks for every accelerator besides, which takes 80 us, for each batch
        torch.default_generator.manual_seed(seed)


class OwnRandomState:
    """What is drawn inside goes on from the last time, and leaves no trace outside.

    For loading in a process that draws random numbers for itself.
    """

    def __init__(self) -> None:
        self._inside: _RandomState | None = None

    def __enter__(self) -> None:
        self._outside = _random_state()
        if self._inside is not None:
            _set_random_state(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = _random_state()
        _set_random_state(self._outside)


_RandomState = tuple[Any, Any, Any]


def _random_state() -> _RandomState:
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state()


def _set_random_state(state: _RandomState) -> None:
    python, legacy, torch_state = state
    random.setstate(python)
    np.random.set_state(legacy)
    if torch_state is not None:
        sys.modules["torch"].set_rng_state(torch_state)


def _collate(hosted: HostedDataset, task: Task, indices: Indices, samples: list[Any]) -> tuple[int, Any]:
    """How many samples the batch has, and the batch."""
    name = task.spec.collate
    if task.spec.batch_size is None:
        return 1, hosted.convert_sample(samples[0], name)
    if hosted.gives_batches(name):
        return len(indices), hosted.convert_sample(samples[0], name)
    return len(samples), hosted.collate_batch(samples, name)
