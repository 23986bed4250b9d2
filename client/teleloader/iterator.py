"""One pass through an epoch, as the training loop sees it."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from teleloader.failures import exception_of
from teleloader.inbox import Inbox, timed_out
from teleloader.lengths import Lengths
from teleloader.measures import Measures
from teleloader.receiver import Receiver
from teleloader.remote import RemoteDataset, consumers_prefix
from teleloader.sampling import IndexLists, index_frame
from teleloader.session import Session
from teleloader.staging import AHEAD, Staging
from teleloader.state import Position
from teleloader_shared.codec import Address, End, Failure, Frame
from teleloader_shared.errors import TeleloaderError
from teleloader_shared.forks import after_fork_in_child
from teleloader_shared.spec import LoaderSpec


@dataclass(slots=True)
class Progress:
    """How far a pass through an epoch is; outlives its iterator, so that a loop that was left can be resumed."""

    next: Position
    """The next batch."""
    longest: int | None = None
    """Batches of the rank that has the most, where that is known."""
    keeps_base_seed: bool = False
    """Whether the next epoch has the same base seed, as torch's persistent workers have."""
    finished: bool = False
    """Whether the loop was told that there are no more."""
    is_unused: bool = True
    """Whether the loop has asked for nothing yet."""

    @property
    def batch(self) -> int:
        """Number of the next batch."""
        return self.next.batch

    def advance(self, frame: Frame, shards: int) -> None:
        """The loop was given the next batch, or an error in its place."""
        self.next = self.next._replace(batch=self.next.batch + 1)
        if frame.shard_state is not None:
            place = frame.address.batch % shards
            states = self.next.shard_states or (None,) * shards
            self.next = self.next._replace(shard_states=(*states[:place], frame.shard_state, *states[place + 1 :]))

    @property
    def position(self) -> Position:
        """What comes next; after the last batch, the beginning of the next epoch."""
        over = self.finished or (self.longest is not None and self.next.batch >= self.longest)
        if not over:
            return self.next
        return Position(self.next.epoch + 1, base_seed=self.next.base_seed if self.keeps_base_seed else None)


@dataclass(slots=True, eq=False)
class Pass:
    """All that a pass through an epoch is made of."""

    dataset: RemoteDataset
    """Kept: the server of an object of this process goes with it."""
    spec: LoaderSpec
    key: str
    """The spec's."""
    progress: Progress
    session: Session
    receiver: Receiver
    lists: IndexLists | None
    """For an order of the client's own."""
    timeout: float
    stays: bool
    """Whether the loader's own workers are kept when the epoch is over."""
    lengths: Lengths | None
    """For an iterable-style dataset."""
    convert: Callable[[Any], Any] | None
    """What is made of a batch in the training loop's own thread."""
    staging: Staging | None
    """Where batches go to an accelerator."""

    @property
    def inbox(self) -> Inbox:
        """Where its batches arrive."""
        return self.receiver.inbox

    @property
    def measures(self) -> Measures:
        """What is measured of it."""
        return self.receiver.inbox.measures

    def feed(self, *, taking: bool = False) -> None:
        """Draw further index lists: not for each batch that the loop takes, but for some of them at once.

        Args:
            taking: Whether the loop is about to take a batch: what is drawn after it is drawn before, because drawing
                is user code, which may be interrupted, and the batch would be lost.
        """
        lists = self.lists
        if lists is None:
            return
        window = self.session.window
        # a sampler of the user's own may draw from generators that the loop draws from too: one list for each batch,
        # as torch does; ours is drawn from for some batches at once
        step = max(1, window // 4) if self.session.adaptive else 1
        goal = self.progress.batch + taking + window
        if goal - lists.drawn < step:
            return
        key, epoch = self.key, self.progress.next.epoch
        frames = {}
        try:
            for k, indices in lists.draw(goal):
                try:
                    frames[k] = index_frame(Address(key, epoch, k), indices)
                except TypeError as error:
                    lists.fail(k, error)
        finally:
            self.inbox.feed(frames)
        if lists.exhausted:
            self.progress.longest = lists.drawn if lists.error is None else None
            self.inbox.complete()

    def over(self) -> bool:
        """Whether the epoch's last batch was taken."""
        drawn_all = self.lists is None or self.lists.exhausted
        return drawn_all and self.progress.batch >= self.session.stop

    def close(self) -> None:
        """Nobody will take any more of its batches."""
        self.measures.end()
        self.receiver.close()
        if self.staging is not None:
            self.staging.close()


class LoaderIterator:
    """Iterates over the batches of a pass; ends what belongs to it when it ends, or is not referred to any more."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.base_seed: int | None = None
        """With persistent workers: drawn once, as by torch."""
        self.session: str | None = None
        """With persistent workers: whose they are."""
        self._pid = os.getpid()
        self._is_awaited = False
        self._pass: Pass | None = None
        self._finalizer: weakref.finalize[Any, LoaderIterator] | None = None

    @classmethod
    def consumer_name(cls, rank: int, loader: int) -> str:
        """What the server calls a new pass: those of one loader differ in what follows the ``#`` only."""
        return f"{consumers_prefix()}rank{rank}/loader{loader}#{next(cls._numbers)}"

    def begin(self, pass_: Pass) -> None:
        """Go through another epoch; what is left of the one before is given up."""
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._pass is not None:
            self._pass.close()
            _passes.discard(self._pass)
        self._pass = pass_
        self._finalizer = weakref.finalize(self, _end, pass_)
        self._finalizer.atexit = False  # see `_leave`
        _passes.add(pass_)

    @property
    def is_copy(self) -> bool:
        """Whether this is a forked process's copy, whose threads and connections are the parent's."""
        return os.getpid() != self._pid

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        current = self._current
        if current is None or current.progress.finished:
            raise StopIteration
        current.progress.is_unused = False
        if not self._is_there(current):
            self._wait(current)
        if current.over():
            self._finish(current)
        if not current.session.on_demand:
            current.feed(taking=True)
        frame, server = current.inbox.take()
        current.measures.steps += 1
        current.progress.advance(frame, current.spec.shards)
        if isinstance(frame.content, Failure):
            raise exception_of(frame.content, frame.address, server)
        if current.lengths is not None:
            current.lengths.yielded(frame.address.batch, frame.content)
        if current.staging is not None:
            return current.staging.take(frame, current.inbox.coming(AHEAD))
        return frame.content if current.convert is None else current.convert(frame.content)

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
                if not self._is_there(current):
                    with current.measures.waiting():
                        async with asyncio.timeout(current.timeout or None):
                            while not self._is_there(current):
                                await _arrival(current.inbox)
            except TimeoutError:
                raise timed_out(current.timeout) from None
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None

    @property
    def _current(self) -> Pass | None:
        if self.is_copy:
            raise TeleloaderError(
                f"this iterator belongs to process {self._pid}, of which this one (pid {os.getpid()}) is a fork: "
                "iter(loader) makes another one here"
            )
        return self._pass

    def _wait(self, current: Pass) -> None:
        with current.measures.waiting():
            while True:
                current.inbox.wait(current.timeout)
                if self._is_there(current):
                    return

    def _is_there(self, current: Pass) -> bool:
        """Whether the next batch, an error in its place, or the epoch's end has come."""
        if current.lists is not None and current.lists.drawn <= current.progress.batch:
            current.feed()
        while (frame := current.inbox.head) is not None and isinstance(frame.content, End):
            current.progress.advance(current.inbox.take()[0], current.spec.shards)
            if current.lengths is not None:
                current.lengths.ended(frame.address.batch, frame.content)
        return frame is not None or current.over()

    def _finish(self, current: Pass) -> NoReturn:
        if current.lists is not None and current.lists.error is not None:
            error, current.lists.error = current.lists.error, None
            raise error
        current.progress.finished = True
        current.measures.end()
        if not current.stays and self._finalizer is not None:
            self._finalizer()
        if current.lengths is not None:
            current.lengths.finished()
        raise StopIteration

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError("{} cannot be pickled", type(self).__name__)


class AsyncLoaderIterator:
    """The same for asyncio; even the beginning, where the server is asked, does not hold up the event loop."""

    def __init__(self, begin: Callable[[], LoaderIterator]) -> None:
        self._begin = begin
        self._iterator: LoaderIterator | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._iterator is None:
            self._iterator = await asyncio.to_thread(self._begin)
        return await self._iterator.__anext__()


async def _arrival(inbox: Inbox) -> None:
    """Wait without holding up the event loop; a task that is cancelled meanwhile takes nothing."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(arrived.set)

    inbox.call_when_arrived(tell)
    try:
        await arrived.wait()
    finally:
        inbox.call_when_arrived(None)
    inbox.wait(0)  # raises what has come in place of a batch


_passes: set[Pass] = set()
"""Those of this process that have not ended."""


def _end(pass_: Pass) -> None:
    """Nobody will go on with a pass, nor begin another one on its session."""
    if pass_ not in _passes:
        return  # a forked copy: it is the parent's
    _passes.discard(pass_)
    pass_.close()
    if pass_.spec.session is not None:
        pass_.receiver.end_session()


def _leave() -> None:
    """The interpreter ends: so do threads that still iterate, without a word."""
    for pass_ in _passes.copy():
        pass_.receiver.close(SystemExit())
        _end(pass_)


# what is registered last is called first: before the servers of objects of this process end, which are finalizers too
weakref.finalize(Pass, lambda: None)
atexit.register(_leave)
after_fork_in_child(_passes.clear)
