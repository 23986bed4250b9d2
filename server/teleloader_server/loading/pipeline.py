"""From a task to a frame: indices -> samples -> batch -> bytes. Runs in workers; knows nothing of processes."""

from __future__ import annotations

import random
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from teleloader_server.loading import index_lists
from teleloader_server.loading.datasets import HostedDataset
from teleloader_server.loading.replay import Reached, Replay
from teleloader_server.loading.shards import Outcome, RandomNumbers, Shard
from teleloader_server.loading.worker_info import was_asked
from teleloader_shared import delivered, user_state
from teleloader_shared.codec import MAX_INDICES, MAX_TEXT, Address, End, Failure, FrameWriter
from teleloader_shared.delivered import Delivered
from teleloader_shared.errors import StateMismatch, WorkerDied
from teleloader_shared.orders.plan import Plan
from teleloader_shared.orders.seeding import derive_seed
from teleloader_shared.protocols import accepts
from teleloader_shared.spec import MAX_STATES, LoaderSpec
from teleloader_shared.text import short

Indices = NDArray[np.int64] | list[Any]
"""What a batch holds: an array of the plan's, or whatever a client's own order lists."""

MAX_PASSES: Final = 16
"""Passes of a session of which a worker remembers how they began; one after another is the rule."""


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


class Began(NamedTuple):
    """The random state in which a worker began a pass; travels to the worker that replaces it."""

    loader: str
    epoch: int
    generators: str
    """What `_random_state` returned, packed."""
    initial: str
    """The same before the worker's first pass."""


@dataclass(slots=True)
class _Pass:
    """A pass through an iterable-style dataset: one epoch of one loader."""

    shard: Shard
    replay: Replay
    generators: Any = None
    """The random state in which it began."""

    def state(self, number: int) -> str | None:
        """Return the shard's state after its batch `number`; after the first one with that before it."""
        return self.shard.state(with_beginning=self.replay.first in (None, number))


class _RandomNumbers(RandomNumbers):
    """The generators of a worker, as the dataset of a pass draws from them.

    Args:
        prepare: Called before the dataset is iterated, with the random state that is known of the epoch's beginning.
        initial: The random state in which any worker in the place of this one starts; None if they start in others.
    """

    def __init__(self, prepare: Callable[[Any], object], initial: Any) -> None:
        self._prepare = prepare
        self._initial = initial

    def begin(self, saved: Any) -> None:
        """Prepare for iterating the dataset."""
        self._prepare(saved)

    def restore(self, saved: Any) -> None:
        """Set the generators."""
        if saved is not None:
            _set_random_state(saved)

    def state(self) -> Any:
        """Return the states of all generators."""
        now = _random_state()
        return None if self._initial is not None and _are_equal(now, self._initial) else now


class _CallersRandomNumbers(_RandomNumbers):
    """The generators of a training process that loads by itself: the loader saves and restores them."""

    _before: Any = None

    def begin(self, saved: Any) -> None:
        """Prepare for iterating the dataset."""
        self._before = _random_state()
        super().begin(saved)

    def restore(self, saved: Any) -> None:
        """Undo what iterating the dataset anew drew."""
        if self._before is not None:
            _set_random_state(self._before)

    def passed(self) -> None:
        """Undo what batches drew that were not delivered."""
        _set_random_state(self._before)

    def state(self) -> Any:
        """Return nothing."""


class Fetched(NamedTuple):
    """The samples of a batch."""

    samples: list[Any] | None
    """None after the last batch of an iterable-style dataset."""
    state: str | None = None
    """Where the shard of an iterable-style dataset stands after the batch, if it can say so."""
    iteration: _Pass | None = None
    """For an iterable-style dataset."""


class Loading:
    """Makes the frames of tasks.

    Args:
        hosted: The datasets by name.
        worker: Number of the worker that this runs in, -1 in the server's own process.
        max_batch_bytes: The largest frame that may be.
        torch_loaded: Called when a dataset has loaded torch in the middle of a batch.
        skipped: Called for each batch of an iterable-style dataset that is only gone through.
        began: Called when a pass through an iterable-style dataset begins.
        seeds: Whether random numbers are a function of a batch's address; else they are drawn as the generators stand.
    """

    def __init__(
        self,
        hosted: Mapping[str, HostedDataset],
        worker: int,
        max_batch_bytes: int,
        torch_loaded: Callable[[], None] = lambda: None,
        skipped: Callable[[], None] = lambda: None,
        began: Callable[[Began], None] = lambda began: None,
        *,
        seeds: bool = True,
    ) -> None:
        self._seeds = seeds
        self._initial: Any = None
        """For a worker: the random state before its first pass."""
        self._torch_loaded = torch_loaded
        self._skipped = skipped
        self._tell_began = began
        self._began: Began | None = None
        self._passes: OrderedDict[tuple[str, int], _Pass] = OrderedDict()
        """The passes through iterable-style datasets, by (loader, epoch); only the last one is being iterated."""
        self.reached: Reached | None = None
        """How far the last pass has come."""
        self._epochs: dict[str, int] = {}
        """Epochs of the map-style datasets, by name."""
        self.torch_is_seeded = False
        """Whether a worker-init function has seeded torch: then it is not seeded for each batch, as with torch."""
        self._hosted = hosted
        self._worker = worker
        # sys.exit() ends a worker process, but must not end the thread of a server without workers
        self._exits = worker >= 0
        self._max_batch_bytes = max_batch_bytes
        self._plan = lru_cache(maxsize=64)(Plan)

    def replace(self, began: Began | None, reached: Reached | None) -> None:
        """Continue the pass that another worker has begun, from where it came to."""
        self._began, self.reached = began, reached
        if began is not None:  # what frames say of generators must not depend on which worker computes them
            self._initial = user_state.unpack(began.initial)

    def forget(self, loader: str) -> None:
        """Release what is kept of a loader."""
        for run in [run for run in self._passes if run[0] == loader]:
            self._passes.pop(run).shard.close()

    def close(self) -> None:
        """Release the iterators of all datasets, so that ``finally`` blocks of generators run."""
        while self._passes:
            self._passes.popitem()[1].shard.close()

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
            indices, padding = self._indices(task)
            found = self.fetch(task, indices)
            fetched = collated = time.perf_counter()
            count, batch = self.collate(task, indices, found)
            collated = time.perf_counter()
            writer = self._writer(task, batch, padding, found.state)
            frame = place(writer.nbytes)
            writer.write(frame)
            if found.iteration is not None and found.samples is not None:
                self._deliver(found.iteration, task, frame[: writer.nbytes], found.state)
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

    def fetch(self, task: Task, indices: Indices) -> Fetched:
        """Return the samples of a batch.

        Args:
            task: The batch.
            indices: What it holds; empty for an iterable-style dataset.

        Raises:
            Exception: What the dataset raises.
        """
        hosted = self._hosted[task.spec.dataset]
        if hosted.info.kind == "iterable":
            pass_ = self._pass(hosted, task)
            samples = _fetch_of_shard(pass_, task)
            return Fetched(samples, pass_.state(_number(task)), pass_)
        self._set_epoch(hosted, task.address.epoch)
        return Fetched(self._fetch(hosted, task, indices))

    def collate(self, task: Task, indices: Indices, fetched: Fetched) -> tuple[int, Any]:
        """Return how many samples a batch has, and the batch; an `End` in its place after the last one."""
        if fetched.samples is None:
            return 0, End(0 if fetched.iteration is None else fetched.iteration.shard.samples, replica=not was_asked())
        return _collate(self._hosted[task.spec.dataset], task, indices, fetched.samples)

    def _set_epoch(self, hosted: HostedDataset, epoch: int) -> None:
        """Set the epoch of a map-style dataset that has one, where it is another than that of the batch before."""
        name = hosted.info.name
        # only a worker has the dataset for itself: in the server's own process others may have set another epoch
        if self._exits and self._epochs.get(name) == epoch:
            return
        self._epochs.pop(name, None)
        if accepts(hosted.dataset, "set_epoch", epoch):
            hosted.dataset.set_epoch(epoch)
        self._epochs[name] = epoch

    def _indices(self, task: Task) -> tuple[Indices, int]:
        """What the batch holds, and how many of it are padding; nothing for an iterable-style dataset."""
        hosted = self._hosted[task.spec.dataset]
        if hosted.info.kind == "iterable":
            return [], 0
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

    # -- iterable-style datasets

    def _pass(self, hosted: HostedDataset, task: Task) -> _Pass:
        run = task.address[:2]
        last = next(reversed(self._passes), None)
        if last != run:
            if last is not None:  # all passes share one dataset, so only one of them can be iterated
                self._passes[last].shard.close()
            if run not in self._passes:
                self._passes[run] = self._new_pass(hosted, task)
            self._passes.move_to_end(run)
            if len(self._passes) > MAX_PASSES:
                self._passes.popitem(last=False)
        return self._passes[run]

    def _new_pass(self, hosted: HostedDataset, task: Task) -> _Pass:
        spec, run = task.spec, task.address[:2]
        saved = []
        if spec.shard_states is not None and spec.resumed_epoch == task.address.epoch:
            text = spec.shard_states[task.address.batch % spec.shards]
            saved += [] if text is None else [text]
        if self._initial is None and self._exits:
            self._initial = _random_state()
        earlier = self._delivered_earlier(spec, task.address)
        if earlier is not None and earlier.state is not None and _can_be_unpacked(earlier.state):
            saved.append(earlier.state)
        shard = Shard(
            hosted.dataset,
            spec.batch_size,
            spec.drop_last,
            epoch=task.address.epoch,
            # not the pass itself, which refers to the shard: a reference cycle would keep the dataset in memory
            random_numbers=(_RandomNumbers if self._seeds else _CallersRandomNumbers)(
                lambda saved: self._prepare(hosted, task, self._passes[run], saved), self._initial
            ),
            passed=lambda number, outcome: self._passed_over(hosted, task, self._passes[run], number, outcome),
            saved=saved,
            max_state=MAX_STATES // spec.shards,
        )
        return _Pass(shard, Replay(earlier))

    def _delivered_earlier(self, spec: LoaderSpec, address: Address) -> Delivered | None:
        """Return what an earlier worker, or an earlier session, delivered of a batch's shard in its epoch."""
        if self.reached is not None and self.reached[:2] == address[:2]:
            return self.reached.shard
        if spec.delivered is None:
            return None
        return delivered.unpack(spec.delivered, address.epoch, address.batch % spec.shards)

    def _prepare(self, hosted: HostedDataset, task: Task, pass_: _Pass, saved: Any) -> None:
        """Before the dataset is iterated: each time in the same epoch, with the same random numbers."""
        loader, epoch, _ = task.address
        if accepts(hosted.dataset, "set_epoch", epoch):
            hosted.dataset.set_epoch(epoch)
        pass_.replay.restart(pass_.shard.next - 1)
        if not self._seeds:
            return
        if saved is not None:
            pass_.generators = saved
        elif pass_.generators is None and self._began is not None and self._began[:2] == (loader, epoch):
            pass_.generators = user_state.unpack(self._began.generators)
        if pass_.generators is not None:
            _set_random_state(pass_.generators)
            return
        pass_.generators = _random_state()
        texts = (user_state.pack(generators) for generators in (pass_.generators, self._initial))
        self._tell_began(Began(loader, epoch, *texts))

    def _passed_over(self, hosted: HostedDataset, task: Task, pass_: _Pass, number: int, outcome: Outcome) -> None:
        """Do for a batch on the way what was done when it was delivered: collate functions draw random numbers, too."""
        self._skipped()
        if isinstance(outcome, Exception):
            return
        spec, (loader, epoch, batch) = task.spec, task.address
        there = task._replace(address=Address(loader, epoch, number * spec.shards + batch % spec.shards))
        try:
            _, content = _collate(hosted, there, [], outcome)
            if not pass_.replay.covers(number):
                return
            state = pass_.state(number)
            writer = self._writer(there, content, 0, state)
            frame = np.empty(writer.nbytes, np.uint8)
            writer.write(frame)
        except Exception:  # noqa: BLE001 - it was reported in its own place
            return
        self._deliver(pass_, there, frame, state)

    def _deliver(self, pass_: _Pass, task: Task, frame: NDArray[np.uint8], state: str | None) -> None:
        """Note a batch as delivered.

        Raises:
            WorkerDied: When an earlier worker delivered other batches up to here.
        """
        replay, (loader, epoch, _) = pass_.replay, task.address
        if not replay.matches(_number(task), frame, checksum=task.spec.checksum):
            pass_.shard.end()
            raise _other_samples(task)
        if replay.next == _number(task) + 1:
            self.reached = Reached(loader, epoch, Delivered(replay.first or 0, replay.next, replay.digest, state))

    def _fetch(self, hosted: HostedDataset, task: Task, indices: Indices) -> list[Any]:
        if not self._seeds or sys.modules.get("torch") is not None:
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
            seed_all(derive_seed(purpose, *coordinates), torch_too=not self.torch_is_seeded)

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


def _number(task: Task) -> int:
    """Number of the batch among those of its shard."""
    return task.address.batch // task.spec.shards


def _fetch_of_shard(pass_: _Pass, task: Task) -> list[Any] | None:
    """Return the samples of a batch of a shard; None when it has no more.

    Raises:
        WorkerDied: When it has fewer than were delivered.
    """
    samples = pass_.shard.fetch(_number(task))
    if samples is None and pass_.replay.falls_short():
        raise _other_samples(task)
    return samples


def _other_samples(task: Task) -> WorkerDied:
    """The error of a dataset that cannot be iterated again."""
    return WorkerDied(
        f"the iterable-style dataset {task.spec.dataset!r} gave other samples when it was iterated again up to "
        f"{task.address}, because the worker that had come so far is gone: its shard ends here, since samples "
        "would be lost or repeated. Give the dataset state_dict() and load_state_dict() (torchdata's "
        "Stateful), or derive its order from a seed and the epoch (set_epoch)"
    )


def _can_be_unpacked(state: str) -> bool:
    try:
        user_state.unpack(state)
    except StateMismatch:
        return False
    return True


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


def seed_worker(base_seed: int, worker: int) -> None:
    """Seed as torch seeds its workers: with base seed + worker ID, and NumPy with what torch derives from both."""
    seed_all((base_seed + worker) % 2**63)  # an int64, as torch's
    if sys.modules.get("torch") is not None:
        from torch.utils.data._utils.worker import _generate_state

        np.random.seed(_generate_state(base_seed, worker))


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
    """Set all generators.

    Raises:
        StateMismatch: If the state, which may come from a client, is not one of `_random_state`.
    """
    try:
        python, legacy, torch_state = state
        range(_WORDS + 1).index(legacy[2])
        random.setstate(python)
        np.random.set_state(legacy)
        torch = sys.modules.get("torch")
        if torch_state is not None and torch is not None:
            torch.set_rng_state(torch_state)
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, OverflowError) as error:
        raise StateMismatch(
            f"invalid random state of a shard: {short(error)}. Resume from an undamaged checkpoint"
        ) from None


_WORDS: Final = 624
"""Words of a Mersenne Twister. NumPy does not check that the position is within them, and reads beyond them."""


def _are_equal(one: _RandomState, other: _RandomState) -> bool:
    (python, legacy, tensor), (other_python, other_legacy, other_tensor) = one, other
    if python != other_python or legacy[2:] != other_legacy[2:] or not np.array_equal(legacy[1], other_legacy[1]):
        return False
    if tensor is None or other_tensor is None:
        return tensor is other_tensor
    return bool(tensor.equal(other_tensor))


def _collate(hosted: HostedDataset, task: Task, indices: Indices, samples: list[Any]) -> tuple[int, Any]:
    """How many samples the batch has, and the batch."""
    name = task.spec.collate
    if task.spec.batch_size is None:
        return 1, hosted.convert_sample(samples[0], name)
    if hosted.gives_batches(name):
        return len(indices), hosted.convert_sample(samples[0], name)
    return len(samples), hosted.collate_batch(samples, name)
