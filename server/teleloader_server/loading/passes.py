"""Passes over iterable-style datasets in a worker, with resume, replay and verification."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from teleloader_server.loading.datasets import HostedDataset
from teleloader_server.loading.random_state import (
    CallersRandomNumbers,
    WorkerRandomNumbers,
    random_state,
    seed_all,
    set_random_state,
)
from teleloader_server.loading.replay import Reached, Replay, Replayed
from teleloader_server.loading.shards import Outcome, Shard
from teleloader_server.loading.shuffle_buffer import ShuffleSettings
from teleloader_server.loading.tasks import Task, collate, frame_writer
from teleloader_shared import delivered, user_state
from teleloader_shared.codec import BatchId
from teleloader_shared.delivered import Delivered
from teleloader_shared.errors import StateMismatch, WorkerDied
from teleloader_shared.orders.seeding import derive, derive_seed
from teleloader_shared.protocols import accepts
from teleloader_shared.spec import MAX_STATES

MAX_PASSES: Final = 16
"""Maximum number of passes whose starting state a worker keeps; usually there is one at a time."""


class Began(NamedTuple):
    """Random state at the start of a worker's pass over a dataset; sent to the worker's replacement."""

    loader: str
    epoch: int
    generators: str
    """Serialized `random_state` at the start of the pass."""
    initial: str
    """Serialized `random_state` before the worker's first pass."""


@dataclass(slots=True)
class Pass:
    """Pass over an iterable-style dataset: one epoch of one loader, in one worker."""

    shard: Shard
    replay: Replay
    generators: Any = None
    """Random state at the start of the pass."""
    is_unverified: bool = False
    """True if an earlier worker may have fetched samples without a digest, against which a replay could be verified."""
    seeds: bool = True
    """True to seed the generators for the collate function if the dataset's ones are suspended (`RandomNumbers`)."""

    @staticmethod
    def number(task: Task) -> int:
        """Return the position of a batch within its shard."""
        return task.batch_id.batch // task.spec.shards

    def state(self, number: int) -> str | None:
        """Return the shard state after a batch; None for a dataset without a state.

        For the first delivered batch, include the state before the batch.
        """
        return self.shard.state(with_beginning=self.replay.first in (None, number))

    def seed_collate(self, task: Task) -> None:
        """Seed the generators that the collate function uses, if the shard has a shuffle buffer."""
        spec, (_, epoch, batch) = task.spec, task.batch_id
        if self.seeds and spec.shuffle_buffer_size is not None:
            seed_all(derive_seed("collate", spec.seed, epoch, spec.rank, batch))

    def fetch(self, task: Task) -> list[Any] | None:
        """Fetch the samples of a batch; return None after the end of the shard.

        Raises:
            WorkerDied: If the shard has fewer samples than an earlier worker delivered, or if the samples that the
                earlier worker fetched are unknown.
        """
        samples = self.shard.fetch(self.number(task))
        self.seed_collate(task)
        if samples is None and self.replay.falls_short():
            raise _other_samples(task)
        if self.is_unverified and self.shard.is_stateless:
            self.shard.end()
            raise WorkerDied(
                f"cannot restore iterable-style dataset {task.spec.dataset!r} at {task.batch_id} after a worker exit: "
                "no delivered batch or state shows its position. The shard ends here, because samples may be lost or "
                "repeated. Define state_dict() and load_state_dict() (torchdata's Stateful)"
            )
        return samples


class Passes:
    """All passes over iterable-style datasets of one worker.

    Args:
        max_batch_bytes: Maximum size of a frame in bytes.
        owns_datasets: Whether no other code in this process uses the datasets.
        seeds: True to start each pass over an epoch with the same random state.
        skipped: Callback, called with the progress for each batch that is iterated only to reach a later one, and with
            None for each sample that is read to fill a shuffle buffer, and for each batch from such a buffer. It may
            then raise MemoryError, which ends the shard.
        max_replay: Maximum number of batches to iterate again; 0 for no limit.
        began: Callback, called when a pass starts.
    """

    def __init__(
        self,
        max_batch_bytes: int,
        *,
        owns_datasets: bool,
        seeds: bool,
        skipped: Callable[[Replayed | None], None],
        began: Callable[[Began], None],
        max_replay: int = 0,
    ) -> None:
        self._max_batch_bytes = max_batch_bytes
        self._owns_datasets = owns_datasets
        self._seeds = seeds
        self._skipped = skipped
        self._max_replay = max_replay
        self._tell_began = began
        self._initial: Any = None
        """Random state before the first pass of a worker process."""
        self._began: Began | None = None
        """Start of the replaced worker's last pass, until this worker starts a pass."""
        self._passes: OrderedDict[tuple[str, int], Pass] = OrderedDict()
        """Passes by (loader, epoch); only the last one has an open iterator."""
        self.reached: Reached | None = None
        """Progress of the most recent pass."""

    def replace(self, began: Began | None, reached: Reached | None) -> None:
        """Prepare to continue the last pass of the worker that this worker replaces."""
        self._began, self.reached = began, reached
        if began is not None:  # random states in frames must not depend on which worker computes them
            self._initial = user_state.unpack(began.initial)

    def forget(self, loader: str) -> None:
        """Close and remove all passes of a loader."""
        for run in [run for run in self._passes if run[0] == loader]:
            self._passes.pop(run).shard.close()

    def close(self) -> None:
        """Close the iterators of all datasets, so that ``finally`` blocks of generators run."""
        while self._passes:
            self._passes.popitem()[1].shard.close()

    def of(self, hosted: HostedDataset, task: Task) -> Pass:
        """Return the pass that a task belongs to, starting the pass if necessary."""
        run = task.batch_id[:2]
        last = next(reversed(self._passes), None)
        if last != run:
            if last is not None:  # all passes share one dataset object, so only one of them can have an open iterator
                self._passes[last].shard.close()
            if run not in self._passes:
                self._passes[run] = self._new(hosted, task)
            self._passes.move_to_end(run)
            if len(self._passes) > MAX_PASSES:
                self._passes.popitem(last=False)
        if self._passes[run].shard.has_buffer:
            self._check_buffer(task)
        return self._passes[run]

    def deliver(self, pass_: Pass, task: Task, frame: NDArray[np.uint8], state: str | None) -> None:
        """Record a batch as delivered, and compare a replayed batch with the delivery of the previous worker.

        Raises:
            WorkerDied: If the batches up to this one differ from the batches that an earlier worker delivered.
        """
        replay, (loader, epoch, _) = pass_.replay, task.batch_id
        if not replay.matches(pass_.number(task), frame, checksum=task.spec.checksum):
            pass_.shard.end()
            raise _other_samples(task)
        if replay.next == pass_.number(task) + 1:
            self.reached = Reached(loader, epoch, Delivered(replay.first or 0, replay.next, replay.digest, state))

    def end(self, task: Task, state: str | None) -> None:
        """Record the state at the end of a shard; a dataset that is its own iterator starts the next epoch from it."""
        (loader, epoch, _), number = task.batch_id, Pass.number(task)
        if self.reached is None or self.reached[:2] != (loader, epoch):
            self.reached = Reached(loader, epoch, Delivered(number, number, 0, None))
        self.reached = self.reached._replace(end=state)

    def _new(self, hosted: HostedDataset, task: Task) -> Pass:
        spec, run = task.spec, task.batch_id[:2]
        if self._initial is None and self._owns_datasets:
            self._initial = random_state()
        is_own_iterator = isinstance(hosted.dataset, Iterator)
        earlier = self._earlier(task, is_own_iterator=is_own_iterator)
        is_undelivered = earlier is not None and earlier.is_empty
        began, self._began = self._began, None
        shard = Shard(
            hosted.dataset,
            spec.batch_size,
            spec.drop_last,
            epoch=task.batch_id.epoch,
            # looked up and not bound, because a pass refers to its shard: a reference cycle would keep the dataset in
            # memory until the next garbage collection
            random_numbers=(WorkerRandomNumbers if self._seeds else CallersRandomNumbers)(
                lambda saved: self._prepare(hosted, task, self._passes[run], saved), self._initial
            ),
            passed=lambda number, outcome: self._skip(hosted, task, self._passes[run], number, outcome),
            shuffle=_shuffle_settings(task),
            progress=lambda: self._check_buffer(task),
            max_replay=self._max_replay,
            saved=_saved_states(task, earlier, is_own_iterator=is_own_iterator),
            max_state=MAX_STATES // spec.shards,
        )
        generators = user_state.unpack(began.generators) if began is not None and began[:2] == run else None
        has_ended = is_undelivered and self.reached is not None and self.reached[:2] == run
        if has_ended:  # an empty shard, of which an earlier worker delivered the end
            shard.end()
        replay = Replay(None if is_undelivered else earlier)
        return Pass(shard, replay, generators, is_unverified=is_undelivered and not has_ended, seeds=self._seeds)

    def _earlier(self, task: Task, *, is_own_iterator: bool) -> Delivered | None:
        """Return the progress of an earlier worker or session in the shard, or None if the shard starts anew.

        If the earlier worker delivered no batch in this epoch, `next` is equal to `first`, and `state` is its last
        state in another epoch, from which a dataset that is its own iterator continues.
        """
        (loader, epoch, batch), began, reached = task.batch_id, self._began, self.reached
        if reached is not None and reached[:2] == (loader, epoch):
            return reached.shard
        number, state, has_iterated = Pass.number(task), None, False
        if task.spec.delivered is not None:
            recorded, found = delivered.unpack(task.spec.delivered, batch % task.spec.shards)
            if recorded == epoch and found is not None:
                return found
            if found is not None and not self._passes:
                state, has_iterated = found.state, True
        if began is not None:
            has_iterated = True
            if reached is not None:
                state = reached.end or reached.shard.state
        has_begun = began is not None and began[:2] == (loader, epoch)
        return Delivered(number, number, 0, state) if has_begun or (is_own_iterator and has_iterated) else None

    def _prepare(self, hosted: HostedDataset, task: Task, pass_: Pass, saved: Any) -> None:
        """Set the epoch and the random state before iterating the dataset.

        All iterations of the same epoch start with the same random state.
        """
        loader, epoch, _ = task.batch_id
        if accepts(hosted.dataset, "set_epoch", epoch):
            hosted.dataset.set_epoch(epoch)
        pass_.replay.restart(pass_.shard.next - 1)
        if not self._seeds:
            return
        is_known = pass_.generators is not None
        if saved is not None:
            pass_.generators = saved
        if pass_.generators is None:
            pass_.generators = random_state()
        else:
            set_random_state(pass_.generators)
        if is_known:
            return
        texts = (user_state.pack(generators) for generators in (pass_.generators, self._initial))
        self._tell_began(Began(loader, epoch, *texts))

    def _check_buffer(self, task: Task) -> None:
        """Report that a shuffle buffer makes progress; end its shard if it takes too much memory.

        Raises:
            MemoryError: If the worker exceeds its memory limit.
        """
        try:
            self._skipped(None)
        except MemoryError as error:
            self._passes[task.batch_id[:2]].shard.end()
            raise MemoryError(
                f"cannot keep a shuffle buffer of {task.spec.shuffle_buffer_size:,} samples of dataset "
                f"{task.spec.dataset!r}: {error}. The shard ends here. Decrease shuffle_buffer_size, or increase "
                "--max-worker-memory of the server"
            ) from None

    def _skip(self, hosted: HostedDataset, task: Task, pass_: Pass, number: int, outcome: Outcome) -> None:
        """Collate a skipped batch, because collate functions may draw random numbers as well.

        If an earlier worker delivered the batch, also compute its frame, and verify it against the earlier delivery.
        """
        first = pass_.shard.skipped_from
        self._skipped(Replayed(task.batch_id.loader, number + 1 - first, pass_.number(task) - first))
        if isinstance(outcome, Exception):
            return
        spec, (loader, epoch, batch) = task.spec, task.batch_id
        there = task._replace(batch_id=BatchId(loader, epoch, number * spec.shards + batch % spec.shards))
        try:
            pass_.seed_collate(there)
            _, content = collate(hosted, there, [], outcome)
            if not pass_.replay.covers(number):
                return
            state = pass_.state(number)
            writer = frame_writer(there, content, self._max_batch_bytes, 0, state)
            frame = np.empty(writer.nbytes, np.uint8)
            writer.write(frame)
        except Exception:  # noqa: BLE001 - it was already reported in place of its batch
            return
        self.deliver(pass_, there, frame, state)


def _other_samples(task: Task) -> WorkerDied:
    """Return the error for a dataset that yielded different samples when it was iterated again."""
    return WorkerDied(
        f"cannot restore iterable-style dataset {task.spec.dataset!r} up to {task.batch_id} after a worker exited: a "
        "second iteration yielded different samples. The shard ends here, because samples would be lost or repeated. "
        "Define state_dict() and load_state_dict() (torchdata's Stateful), or derive the order from a seed and the "
        "epoch (set_epoch)"
    )


def _saved_states(task: Task, earlier: Delivered | None, *, is_own_iterator: bool) -> list[str]:
    """Return the states from which a shard may continue, in the order of their positions."""
    spec, states = task.spec, []
    if spec.shard_states is not None and spec.resumed_epoch == task.batch_id.epoch:
        states.append(spec.shard_states[task.batch_id.batch % spec.shards])
    if earlier is not None and (is_own_iterator or not earlier.is_empty):
        states.append(earlier.state if earlier.state is not None and _can_be_unpacked(earlier.state) else None)
    return [state for state in states if state is not None]


def _shuffle_settings(task: Task) -> ShuffleSettings | None:
    spec, (_, epoch, batch) = task.spec, task.batch_id
    if spec.shuffle_buffer_size is None:
        return None
    shard = batch % spec.shards + spec.shards * spec.rank
    return ShuffleSettings(spec.shuffle_buffer_size, derive("shuffle buffer", spec.seed, epoch, shard))


def _can_be_unpacked(state: str) -> bool:
    try:
        user_state.unpack(state)
    except StateMismatch:
        return False
    return True
