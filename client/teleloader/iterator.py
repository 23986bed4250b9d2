"""One pass through an epoch, as the training loop sees it."""

from __future__ import annotations

import itertools
import os
import socket
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from teleloader.failures import exception_of
from teleloader.lengths import Lengths
from teleloader.receiver import Receiver
from teleloader.remote import RemoteDataset
from teleloader.sampling import IndexLists, index_frame
from teleloader.session import Session
from teleloader.state import Position
from teleloader_shared.codec import Address, End, Failure, Frame
from teleloader_shared.spec import LoaderSpec


@dataclass(slots=True)
class Progress:
    """How far a pass through an epoch is; outlives its iterator, so that a loop that was left can be resumed."""

    next: Position
    """The next batch."""
    longest: int | None = None
    """Batches of the rank that has the most, where that is known."""
    finished: bool = False
    """Whether the loop was told that there are no more."""

    @property
    def batch(self) -> int:
        """Number of the next batch."""
        return self.next.batch

    def advance(self, frame: Frame, shards: int) -> None:
        """The loop was given the next batch, or an error in its place."""
        states = self.next.shard_states
        if frame.shard_state is not None:
            place = frame.address.batch % shards
            states = states or (None,) * shards
            states = (*states[:place], frame.shard_state, *states[place + 1 :])
        self.next = replace(self.next, batch=self.next.batch + 1, shard_states=states)

    @property
    def position(self) -> Position:
        """What comes next; after the last batch, the beginning of the next epoch."""
        over = self.finished or (self.longest is not None and self.next.batch >= self.longest)
        return Position(self.next.epoch + 1) if over else self.next


@dataclass(slots=True)
class Pass:
    """All that a pass through an epoch is made of."""

    dataset: RemoteDataset
    spec: LoaderSpec
    key: str
    """The spec's."""
    progress: Progress
    session: Session
    receiver: Receiver
    lists: IndexLists | None
    """For an order of the client's own."""
    timeout: float
    ends_session: bool
    """Whether the loader's own workers are not needed after this pass."""
    lengths: Lengths | None
    """For an iterable-style dataset."""

    def feed(self) -> None:
        """Draw further index lists: not for each batch that the loop takes, but for some of them at once."""
        lists, window = self.lists, self.session.window
        if lists is None or self.progress.batch + window - lists.drawn < max(1, window // 4):
            return
        key, epoch = self.key, self.progress.next.epoch
        frames = {}
        for k, indices in lists.draw(self.progress.batch + window):
            try:
                frames[k] = index_frame(Address(key, epoch, k), indices)
            except TypeError as error:
                lists.fail(k, error)
        self.receiver.feed(frames)
        if lists.exhausted:
            self.progress.longest = lists.drawn if lists.error is None else None
            self.receiver.complete()

    def over(self) -> bool:
        """Whether the epoch's last batch was taken."""
        drawn_all = self.lists is None or self.lists.exhausted
        return drawn_all and self.progress.batch >= self.session.stop


class LoaderIterator:
    """Iterates over the batches of a pass; ends what belongs to it when it ends, or is not referred to any more."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.base_seed: int | None = None
        """With persistent workers: drawn once, as by torch."""
        self.session: str | None = None
        """With persistent workers: whose they are."""
        self._pass: Pass | None = None
        self._finalizer: weakref.finalize[Any, LoaderIterator] | None = None

    @classmethod
    def consumer_name(cls, rank: int) -> str:
        """What the server calls a new pass."""
        return f"{socket.gethostname()}:{os.getpid()}/rank{rank}#{next(cls._numbers)}"

    def begin(self, pass_: Pass) -> None:
        """Go through another epoch; what is left of the one before is given up."""
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._pass is not None:
            self._pass.receiver.close()
        self._pass = pass_
        self._finalizer = weakref.finalize(self, _end, pass_, os.getpid())

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        current = self._pass
        if current is None or current.progress.finished:
            raise StopIteration
        while True:
            current.feed()
            if current.over():
                self._finish(current)
            frame = current.receiver.take(current.timeout)
            current.progress.advance(frame, max(1, current.spec.num_workers))
            if not isinstance(frame.content, End):
                break
            if current.lengths is not None:
                current.lengths.ended(frame.content)
        if isinstance(frame.content, Failure):
            raise exception_of(frame.content, frame.address, current.dataset.url)
        if current.lengths is not None:
            current.lengths.yielded(frame.address.batch, frame.content)
        return frame.content

    def _finish(self, current: Pass) -> NoReturn:
        if current.lists is not None and current.lists.error is not None:
            error, current.lists.error = current.lists.error, None
            raise error
        current.progress.finished = True
        current.receiver.close()
        if current.ends_session and self._finalizer is not None:
            self._finalizer()
        if current.lengths is not None:
            current.lengths.finished()
        raise StopIteration

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError("{} cannot be pickled", type(self).__name__)


def _end(pass_: Pass, pid: int) -> None:
    """Nobody will go on with a pass, nor begin another one on its session."""
    if os.getpid() != pid:
        return  # a forked copy: it is the parent's
    pass_.receiver.close()
    if pass_.spec.session is not None:
        pass_.dataset.end_session(pass_.key)
