"""Iterator over the batches of an epoch, running in the training loop's thread."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from teleloader.dataset import RemoteDataset, consumers_prefix
from teleloader.errors import exception_of
from teleloader.fetch.direct import DirectDataset, DirectReceiver, DirectStager, Raised
from teleloader.fetch.group import GroupReceiver
from teleloader.fetch.length_check import LengthCheck
from teleloader.fetch.progress import reporter
from teleloader.fetch.receiver import Receiver
from teleloader.fetch.reorder import Arrived, ReorderBuffer, timed_out
from teleloader.fetch.scheduler import RangeScheduler
from teleloader.fetch.stager import Stager
from teleloader.forecast import Forecast
from teleloader.sampling import IndexLists, SamplerStates
from teleloader.state import Position
from teleloader.stats import Measures
from teleloader.tensors.devices import is_out_of_memory
from teleloader_shared.codec import BatchId, End, Failure, Frame, Substituted, Substitution
from teleloader_shared.errors import TeleloaderError, TooManyErrors
from teleloader_shared.forks import after_fork_in_child
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.text import sentence
from teleloader_shared.units import counted

logger = logging.getLogger("teleloader")


class Delivery(NamedTuple):
    """Result of ``next()`` for one batch, stored until ``next()`` has returned the batch or raised the exception."""

    frame: Frame
    batch: Any = None
    raised: Raised | None = None
    """Exception to raise in place of the batch; None to return the batch."""


@dataclass(slots=True)
class Progress:
    """Position of an iterator in its epoch; kept after the iterator's deletion, for resuming an abandoned epoch.

    Signal handlers may raise in ``next()`` at any bytecode. Position and delivery are therefore replaced in a single
    store: if ``next()`` is interrupted before the store, the next call delivers the same batch; after the store,
    ``next()`` only returns.
    """

    state: tuple[Position, Delivery | None]
    """Position of the next batch, and its delivery if an interrupted call of ``next()`` has prepared it, else None."""
    longest: int | None = None
    """Number of batches of the rank with the most batches; None if unknown."""
    sampler_states: SamplerStates | None = None
    """States of a client-side sampler; None if servers compute the indices."""
    keeps_base_seed: bool = False
    """True if the next epoch has the same base seed, as with torch's persistent workers."""
    keeps_dataset: bool = False
    """True if the next epoch iterates the same replicas of the dataset."""
    continues_dataset: bool = False
    """True if the previous epoch iterated the same replicas of the dataset."""
    finished: bool = False
    """True once ``next()`` has raised StopIteration."""
    is_unused: bool = True
    """True until the first call of ``next()``."""

    @property
    def next(self) -> Position:
        """Position of the next batch, without the state of a client-side sampler."""
        return self.state[0]

    @property
    def batch(self) -> int:
        """Number of the next batch."""
        return self.state[0].batch

    @property
    def delivery(self) -> Delivery | None:
        """Delivery of the next batch; None unless an interrupted call of ``next()`` has prepared it."""
        return self.state[1]

    def after(self, frame: Frame, shards: int, *, raised: bool = False) -> tuple[Position, None]:
        """Return the value of `state` after the delivery of the batch in `frame`, or of an exception in its place."""
        epoch, batch, random, base_seed, states, sampler, errors, failed_batches = self.state[0]
        if frame.shard_state is not None:
            place = frame.batch_id.batch % shards
            states = states or (None,) * shards
            states = (*states[:place], frame.shard_state, *states[place + 1 :])
        # _replace() takes twice as long, for each batch
        if frame.substituted is not None:
            found = frame.substituted.substitutions
            # the training loop has received neither the samples nor their replacements, but max_errors counts them
            errors += tuple((None, None) if raised else (each.sample, each.replacement) for each in found)
        if raised:
            failed_batches += (frame.batch_id.batch,)
        position = Position(epoch, batch + 1, random, base_seed, states, sampler, errors, failed_batches)
        return position, None

    @property
    def position(self) -> Position:
        """Position to resume from: the next batch, or the start of the next epoch after the last batch."""
        position = self.next
        if self.finished or (self.longest is not None and position.batch >= self.longest):
            return self.following
        if position.random is not None and not self.is_unused:
            position = position._replace(random={**position.random, "drawn": True})
        if self.sampler_states is not None:
            position = position._replace(sampler=self.sampler_states.before(position.batch))
        return position

    @property
    def following(self) -> Position:
        """Start of the next epoch, with the states of this epoch from which it continues."""
        position = self.next
        return Position(
            position.epoch + 1,
            base_seed=position.base_seed if self.keeps_base_seed else None,
            shard_states=position.shard_states if self.keeps_dataset and self.finished else None,
            sampler=None if self.sampler_states is None else self.sampler_states.end(),
        )


@dataclass(slots=True, eq=False)
class Iteration:
    """State and resources of one iteration over an epoch."""

    dataset: RemoteDataset | DirectDataset
    """Referenced to keep a server in this process running."""
    spec: LoaderSpec
    progress: Progress
    batches: Sized | None
    """Sized object that provides ``len()`` of the iterator; None for an iterable-style dataset."""
    receiver: Receiver | GroupReceiver | DirectReceiver
    lists: IndexLists | None
    """Index lists of a client-side sampler; None if servers compute the indices."""
    timeout: float
    """Seconds to wait for a batch; 0 for no limit."""
    stays: bool
    """True if the loader's private workers outlive the epoch."""
    length_check: LengthCheck | None
    """Sample count check; None for a map-style dataset."""
    stager: Stager | DirectStager | None
    """Copies batches to a device; None if batches stay in host memory."""
    transform: Callable[[Any], Any] | None
    """Applied to each batch in the training loop's thread; None for no transform."""
    max_errors: float
    """Fraction of the samples of the epoch that may be skipped or replaced."""
    samples: int | None
    """Samples of the epoch on this rank; None if they follow from the number of batches."""
    next_epoch: Callable[[], Callable[[int, float, int], object] | None] | None = None
    """Weak reference to the function that prefetches the next epoch, given number and bytes of the batches that the
    training loop has not received, and the prefetch window; None for no prefetching."""
    forecast: Forecast | None = None
    """Forecast whose batches are being received, until the sampler has yielded the same lists; else None."""
    reopen: Callable[[], Iteration] | None = None
    """Creates an iteration to replace this one if the forecast is wrong; None without a forecast."""
    _drawn: dict[int, Any] = field(default_factory=dict)
    """Lists that the sampler has yielded while `forecast` is not None, by batch number."""
    # attributes instead of properties: next() reads them ten times for each batch
    reorder_buffer: ReorderBuffer | DirectReceiver = field(init=False)
    scheduler: RangeScheduler = field(init=False)
    requests: RangeScheduler = field(init=False)
    measures: Measures = field(init=False)
    middle: int = field(init=False)
    """Number of the batch after which the next epoch is prepared, if this takes long: at half of the epoch, so that a
    training run that ends early prepares nothing in vain; -1 for other orders."""

    def __post_init__(self) -> None:
        self._use_receiver()

    def _use_receiver(self) -> None:
        self.reorder_buffer = self.receiver.reorder_buffer
        self.scheduler = self.reorder_buffer.scheduler
        self.requests = self.receiver.requests
        self.measures = self.reorder_buffer.measures
        self.middle = (self.progress.batch + self.scheduler.stop) // 2 if self.spec.is_prepared else -1

    def count_errors(self, batch_id: BatchId, substituted: Substituted) -> TooManyErrors | None:
        """Log and count the skipped and replaced samples of a batch; return an error if there are too many.

        The number of batches of the epoch is that of the sampler, or that of the received batches if it is unknown.
        """
        for found in substituted.substitutions:
            done = "skipped" if found.replacement is None else f"replaced by sample {found.replacement!r}"
            logger.warning(
                "%s of batch %d of epoch %d failed, and was %s: %s",
                _name(found), batch_id.batch, batch_id.epoch, done, sentence(found.error),
            )  # fmt: skip
        self.measures.errors = errors = len(self.progress.next.errors) + len(substituted.substitutions)
        batches = batch_id.batch + 1
        with suppress(TypeError):  # a sampler without a length
            batches = batches if self.batches is None else max(batches, len(self.batches))
        # not the length of this batch alone: the last one may be shorter
        samples = self.samples or batches * max(self.spec.batch_size or 1, substituted.samples)
        if errors <= max(1, int(self.max_errors * samples)) and self.max_errors > 0:
            return None
        last = substituted.substitutions[-1]
        return TooManyErrors(
            f"{counted(errors, 'sample')} of epoch {batch_id.epoch} failed, of {samples:,} samples: more than "
            f"max_errors={self.max_errors:g}. The last one was {_name(last)}: {sentence(last.error)}. Remove "
            "the samples from the dataset, or increase max_errors"
        )

    def feed(self, *, taking: bool = False) -> None:
        """Draw index lists from a client-side sampler and queue the requests for these batches.

        Args:
            taking: Whether ``next()`` is about to return a batch. The list that torch would draw after this batch is
                then drawn before it: if Ctrl-C interrupted the sampler after the batch was taken, the batch would be
                lost.
        """
        lists = self.lists
        if lists is None:
            return
        if self.forecast is not None:
            self._check_forecast(lists, self.forecast, taking=taking)
            return
        if lists.frames:
            self._send_lists(lists)  # lists drawn by an interrupted call
        window = self.scheduler.window
        # a user's sampler may share random generators with the training loop, so one list is drawn for each batch, as
        # in torch; from torch's own samplers, the lists of several batches are drawn at once
        step = max(1, window // 4) if self.scheduler.adaptive else 1
        goal = self.progress.batch + taking + window
        if goal - lists.drawn < step:
            return
        try:
            lists.draw(goal, self._encode)
        finally:
            self._send_lists(lists)

    def _check_forecast(self, lists: IndexLists, forecast: Forecast, *, taking: bool) -> None:
        """Draw the first lists of the epoch; if they are not those of the forecast, discard its batches."""
        goal = max([self.progress.batch + taking + self.scheduler.window, *(k + 1 for k in forecast.expected)])

        def encode(k: int, indices: Any) -> Any:
            self._drawn[k] = indices
            return self._encode(k, indices)

        lists.draw(goal, encode)
        is_right = forecast.matches(self._drawn)
        if is_right:
            for k in forecast.expected:  # already requested
                lists.frames.pop(k, None)
        else:
            self._replace(lists)
        forecast.ended(is_right)
        self.forecast = self.reopen = None
        self._drawn = {}
        self._send_lists(lists)

    def _replace(self, lists: IndexLists) -> None:
        """Fetch the batches anew; the lists that were drawn remain."""
        assert self.reopen is not None, "set together with `forecast`"  # noqa: S101
        other, replaced, stager = self.reopen(), self.receiver, self.stager
        self.spec, self.receiver, self.stager = other.spec, other.receiver, other.stager
        self._use_receiver()
        lists.frames = {k: self._encode(k, self._drawn[k]) for k in lists.frames}
        if stager is not None:
            stager.close()
        replaced.close()
        replaced.end_session()

    def _encode(self, k: int, indices: Any) -> Any:
        return self.receiver.index_list(BatchId(self.receiver.key, self.progress.next.epoch, k), indices)

    def _send_lists(self, lists: IndexLists) -> None:
        self.reorder_buffer.feed(lists.frames)
        lists.frames = {}
        lists.states.release(self.progress.batch)
        if lists.exhausted:
            self.progress.longest = lists.drawn if lists.error is None else None
            self.reorder_buffer.complete()

    def prefetch_next(self, left: int) -> None:
        """Prefetch the next epoch, as far as the prefetch window has room besides the batches of this one.

        Args:
            left: Number of batches that the training loop has not received.
        """
        if self.lists is not None and not self.lists.exhausted:
            return  # the sampler may still draw from its generator
        prefetch = None if self.next_epoch is None else self.next_epoch()
        if prefetch is not None and isinstance(self.reorder_buffer, ReorderBuffer):
            prefetch(left, self.reorder_buffer.rest_bytes, self.requests.base_window)

    def over(self) -> bool:
        """Return True if the training loop has received the last batch of the epoch."""
        drawn_all = self.lists is None or self.lists.exhausted
        return drawn_all and self.progress.batch >= self.scheduler.stop

    def position(self) -> Position:
        """Return the position to resume from.

        If the training loop ended the previous epoch of an iterable-style dataset early (with ``break``), only the
        workers know the state of each shard. This method then waits for the first batch of each shard, whose frame
        contains this state.

        Raises:
            Exception: If the iteration has failed; the same exception that `next()` raises.
        """
        progress, buffer, shards = self.progress, self.reorder_buffer, self.spec.shards
        states = progress.next.shard_states or (None,) * shards
        is_known = not progress.continues_dataset or progress.finished or None not in states[progress.batch :]
        if is_known or isinstance(buffer, DirectReceiver):
            return progress.position
        frames = buffer.receive(shards)
        if progress.delivery is not None:  # an interrupted call of next() has already removed it from the buffer
            frames.append(progress.delivery.frame)
        position = progress.position  # only now, because another thread may have received batches
        if position.epoch != progress.next.epoch:
            return position
        start = {frame.batch_id.batch: frame.shard_state for frame in frames}
        known = position.shard_states or (None,) * shards
        return position._replace(shard_states=tuple(start.get(k) if s is None else s for k, s in enumerate(known)))

    def close(self) -> None:
        """Stop the receiving threads and the device copies."""
        self.measures.end()
        try:
            self.receiver.close()
        finally:
            if self.stager is not None:
                self.stager.close()


class LoaderIterator:
    """Iterator over the batches of an epoch; releases all resources at the end of the epoch or on deletion."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.base_seed: int | None = None
        """Base seed of persistent workers, drawn only once, as in torch; None if none was drawn."""
        self.spec: LoaderSpec | None = None
        """Spec for which persistent workers were started; None if there are no such workers."""
        self._pid = os.getpid()
        self._lock = threading.RLock()
        """Held by ``next()``, because several threads may share an iterator."""
        self._is_awaited = False
        self._iteration: Iteration | None = None
        self._finalizer: weakref.finalize[Any, LoaderIterator] | None = None

    @classmethod
    def consumer_name(cls, rank: int, loader: int) -> str:
        """Return a unique consumer name for a new iteration; all iterations of a loader share the part before ``#``."""
        return f"{consumers_prefix()}rank{rank}/loader{loader}#{next(cls._numbers)}"

    def begin(self, iteration: Iteration) -> None:
        """Set the iteration to yield batches from, and close the previous iteration."""
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._iteration is not None:
            self._iteration.close()
            _iterations.discard(self._iteration)
            if self._iteration.spec.session not in (None, iteration.spec.session):
                self._iteration.receiver.end_session()
        self._iteration = iteration
        self._finalizer = weakref.finalize(self, _end, iteration)
        self._finalizer.atexit = False  # see `_leave`
        _iterations.add(iteration)

    def release(self) -> None:
        """Forget the iteration without closing its receiver."""
        if self._finalizer is not None and self._iteration is not None:
            self._finalizer.detach()
            _iterations.discard(self._iteration)
            self._iteration = None

    @property
    def position(self) -> Position | None:
        """Position to resume from, see `Iteration.position`; None before `begin`, and in a forked child process."""
        return None if self._iteration is None or self.is_copy else self._iteration.position()

    @property
    def is_copy(self) -> bool:
        """True in a forked child process, where the iterator's threads do not run."""
        return os.getpid() != self._pid

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        """Return the number of batches of the whole epoch, as in torch.

        Raises:
            TypeError: If the dataset is iterable-style, or the sampler has no length.
        """
        if self._iteration is None or self._iteration.batches is None:
            raise TypeError("an iterator of an iterable-style dataset has no len(): use len(loader)")
        return len(self._iteration.batches)

    def __next__(self) -> Any:
        current = self._current
        if current is None:
            raise StopIteration
        progress = current.progress
        before, after = progress.state, None
        try:
            with self._lock:
                delivery = self._delivery(current)
                batch, raised = delivery.batch, delivery.raised
                before = progress.state
                after = progress.after(delivery.frame, current.spec.shards, raised=raised is not None)
                self._settle(current, delivery)
                progress.state = after
        except BaseException:
            # a signal handler may have raised after the store, while the lock was released
            if after is not None and progress.state is after:
                progress.state = before
            raise
        # no function call from here on, so no signal handler can run: the committed batch is delivered
        if raised is None:
            return batch
        error = raised.error
        del raised.error
        try:
            raise error
        finally:
            del error

    def _settle(self, current: Iteration, delivery: Delivery) -> None:
        """Release the batch's resources and count the batch; repeatable after an interruption."""
        number = delivery.frame.batch_id.batch
        current.reorder_buffer.take(number)
        if current.next_epoch is not None and (current.requests.requested_all or number == current.middle):
            current.prefetch_next(current.scheduler.stop - number - 1)
        if current.stager is not None:
            current.stager.discard(delivery.frame)
        current.measures.step(number)
        if current.length_check is not None and delivery.raised is None:
            current.length_check.yielded(number, delivery.batch)

    def _delivery(self, current: Iteration) -> Delivery:
        """Return the delivery of the next batch: the one that an interrupted call prepared, or a new one.

        Raises:
            StopIteration: If the epoch has ended.
        """
        progress = current.progress
        if progress.finished:
            raise StopIteration
        if progress.delivery is not None:
            return progress.delivery
        progress.is_unused = False
        if not self._has_arrived(current):
            self._wait(current)
        if current.over():
            self._finish(current)
        if current.lists is not None and current.receiver.loads_ahead:
            current.feed(taking=True)
        arrived = current.reorder_buffer.peek()
        if arrived is None:  # the copy to a device was discarded, so the batch has to be copied again
            self._wait(current)
            arrived = current.reorder_buffer.peek()
        assert arrived is not None, "only the training loop takes a batch that is ready"  # noqa: S101
        if current.stager is not None:
            current.stager.warn()
        delivery = self._transformed(current, arrived)
        progress.state = (progress.next, delivery)
        return delivery

    def _transformed(self, current: Iteration, arrived: Arrived) -> Delivery:
        """Return the transformed batch, or the exception in its place.

        Raises:
            BaseException: If interrupted, for example by Ctrl-C, or out of device memory; the next call copies and
                transforms the batch again.
        """
        frame = arrived.frame
        if isinstance(frame.content, Failure):
            return Delivery(frame, raised=Raised(exception_of(frame.content, frame.batch_id, arrived.url)))
        if isinstance(frame.content, Raised):
            return Delivery(frame, raised=frame.content)
        if frame.substituted is not None:
            error = current.count_errors(frame.batch_id, frame.substituted)
            if error is not None:
                return Delivery(frame, raised=Raised(error))
        try:
            batch = frame.content if current.stager is None else current.stager.use(frame)
            return Delivery(frame, batch if current.transform is None else current.transform(batch))
        except (StopIteration, StopAsyncIteration) as error:  # would look like the end of the epoch (PEP 479)
            stopped = RuntimeError(
                f"device_transform raised {type(error).__name__}, which would end the epoch early: raise a different "
                "exception type, or catch the exception in device_transform"
            )
            stopped.__cause__ = error
            return Delivery(frame, raised=Raised(stopped))
        except BaseException as error:
            if isinstance(error, Exception) and not is_out_of_memory(error):
                return Delivery(frame, raised=Raised(error))
            if current.stager is not None:
                current.stager.discard(frame)  # the transform may have modified the copy in place
            raise

    async def __anext__(self) -> Any:
        if self._is_awaited:
            raise RuntimeError("anext(): asynchronous iterator is already running")
        self._is_awaited = True
        try:
            return await self._next()
        finally:
            self._is_awaited = False

    async def _next(self) -> Any:
        current = self._current
        if current is not None and not current.progress.finished:
            current.progress.is_unused = False
            try:
                if not self._has_arrived(current):
                    with current.measures.waiting():
                        async with asyncio.timeout(current.timeout or None):
                            while not self._has_arrived(current):
                                await current.reorder_buffer.arrival()
            except TimeoutError:
                raise timed_out(current.timeout) from None
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None

    @property
    def _current(self) -> Iteration | None:
        if self.is_copy and (self._iteration is None or self._iteration.receiver.loads_ahead):
            raise TeleloaderError(
                f"cannot use an iterator of process {self._pid} in forked process {os.getpid()}: call iter(loader) in "
                "the forked process"
            )
        return self._iteration

    def _wait(self, current: Iteration) -> None:
        with current.measures.waiting():
            while True:
                current.reorder_buffer.wait(current.timeout)
                if self._has_arrived(current):
                    return

    def _has_arrived(self, current: Iteration) -> bool:
        """Return True if the next batch, an error in its place, or the end of the epoch has arrived."""
        lists = current.lists
        if lists is not None and (lists.drawn <= current.progress.batch or current.forecast is not None):
            current.feed()
        progress, reorder_buffer = current.progress, current.reorder_buffer
        while (arrived := reorder_buffer.peek()) is not None:
            frame = arrived.frame
            if frame.batch_id.batch >= progress.batch:
                if not isinstance(frame.content, End):
                    return True
                if current.length_check is not None:
                    current.length_check.ended(frame.batch_id.batch, frame.content)
                progress.state = progress.after(frame, current.spec.shards)
            reorder_buffer.take(frame.batch_id.batch)
        return current.over()

    def _finish(self, current: Iteration) -> NoReturn:
        if current.lists is not None and current.lists.error is not None:
            raise current.lists.error  # at each call: StopIteration would look like the end of the epoch
        current.progress.finished = True
        current.measures.finish()
        if current.next_epoch is not None:
            current.prefetch_next(0)
        if not current.stays and self._finalizer is not None:
            self._finalizer()
        if current.length_check is not None:
            current.length_check.finished()
        raise StopIteration

    def __reduce__(self) -> NoReturn:
        raise _unpicklable(self)


class AsyncLoaderIterator:
    """Asynchronous iterator over an epoch; neither starting the epoch nor waiting for a batch blocks the event loop."""

    def __init__(self, begin: Callable[[], LoaderIterator]) -> None:
        self._begin = begin
        self._iterator: LoaderIterator | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._iterator is None:
            self._iterator = await asyncio.to_thread(self._begin)
        return await self._iterator.__anext__()

    def __reduce__(self) -> NoReturn:
        raise _unpicklable(self)


def _name(found: Substitution) -> str:
    return f"sample {found.sample!r}" if found.sample is not None else f"the sample at position {found.position}"


def _unpicklable(iterator: object) -> NotImplementedError:
    return NotImplementedError(
        f"{type(iterator).__name__} cannot be pickled or copied: pickle or copy the DataLoader and its state_dict() "
        "in place of the iterator"
    )


_iterations: set[Iteration] = set()
"""Open iterations of this process."""


def _end(iteration: Iteration) -> None:
    """Close an iteration, and end its private workers."""
    if iteration not in _iterations:
        return  # in a forked child: the iteration belongs to the parent
    _iterations.discard(iteration)
    try:
        iteration.close()
    finally:
        if iteration.spec.session is not None:
            iteration.receiver.end_session()


def _leave() -> None:
    """End all iterations when the interpreter exits; threads that still iterate get SystemExit."""
    for iteration in _iterations.copy():
        with suppress(Exception):  # a failure must not keep the other iterations open
            iteration.receiver.close(SystemExit())
            _end(iteration)
    reporter.flush()


_of_parent: list[Iteration] = []
"""The parent's iterations, in a forked child. Never freed, because freeing device memory calls the device's driver,
which does not work after a fork."""


def _leave_to_parent() -> None:
    _of_parent.extend(_iterations)
    _iterations.clear()


# Exit handlers run in reverse order of registration. Finalizers stop the servers in this process, and iterations must
# end before: creating a finalizer here registers the exit handler of all finalizers before `_leave`.
weakref.finalize(Iteration, lambda: None)
atexit.register(_leave)
after_fork_in_child(_leave_to_parent)
