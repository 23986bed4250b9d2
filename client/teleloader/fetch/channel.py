"""Broadcast of messages from the leader of a model-parallel group to its members, over a gloo process group.

Each loader has a process group of its own, so that its broadcasts interleave neither with those of other loaders nor
with the collectives of the training loop, on any backend. A daemon thread runs the broadcasts in the order in which the
loader starts its iterations, which is the same on all ranks. A gloo operation cannot be interrupted, so members read
all messages of an iteration, even if they have closed it.
"""

from __future__ import annotations

import atexit
import itertools
import json
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from enum import IntEnum
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from teleloader.errors import error_of
from teleloader.mesh import MeshPosition
from teleloader_shared.errors import StateMismatch, TeleloaderError
from teleloader_shared.forks import after_fork_in_child
from teleloader_shared.text import sentence

_Result = TypeVar("_Result")

_UNLIMITED: Final = timedelta(days=365)
"""Timeout of a broadcast: it waits while the training loop of a rank is paused, for example by a long evaluation. If a
process exits, its connections break, and the broadcast fails immediately."""
_CONNECT_TIMEOUT: Final = timedelta(minutes=30)
"""Maximum wait for the other ranks to create the process group; torch's default."""
EXIT_TIMEOUT: Final = 5.0
"""Maximum wait for the end of a broadcast when the interpreter exits, in seconds."""
_open: Final[weakref.WeakSet[Channel]] = weakref.WeakSet()
"""Channels with connections in this process."""
_numbers: Final[dict[tuple[int, ...], Iterator[int]]] = defaultdict(itertools.count)
"""Numbers of the process groups that were created for the same ranks; part of their names."""


class Kind(IntEnum):
    """Kind of a message."""

    START = 0
    """Start of an iteration; the content is an `Announcement` as JSON."""
    URL = 1
    """URL of the server that sent the following frames."""
    FRAMES = 2
    END = 3
    """End of an iteration; the content is the type and text of the exception that ended it as JSON, or null."""
    FAILED = 4
    """An iteration could not be started; the content is that of `END`."""


class Closable(Protocol):
    """Receiver of an iteration."""

    def close(self) -> None:
        """Discard all batches."""


class Announcement(NamedTuple):
    """Description of the leader's iteration, which must match that of each member."""

    key: str
    """Key of the loader in the frames (`LoaderSpec.key`)."""
    identity: str
    """Digest of the arguments that must be equal."""
    epoch: int
    batch: int
    """Number of the first batch."""
    stop: int
    """End of the epoch, as far as known; with `max_tokens` or `packing`, its computation takes seconds."""
    longest: int | None
    """See `Progress.longest`."""
    keeps_dataset: bool
    """See `Progress.keeps_dataset`."""
    continues_dataset: bool
    """See `Progress.continues_dataset`."""

    def check(self, identity: str, epoch: int, batch: int, leader: int) -> None:
        """Raise StateMismatch if the member's arguments or position differ from the leader's.

        Args:
            identity: Digest of the member's arguments.
            epoch: The member's epoch.
            batch: Number of the member's first batch.
            leader: Global rank of the leader.
        """
        same = "Call set_epoch, load_state_dict and iter alike on all ranks that receive the same batches"
        if (epoch, batch) != (self.epoch, self.batch):
            raise StateMismatch(
                f"this rank starts at batch {batch} of epoch {epoch}, but rank {leader}, which fetches its batches, "
                f"starts at batch {self.batch} of epoch {self.epoch}. {same}"
            )
        if identity != self.identity:
            raise StateMismatch(
                "the loader of this rank has another dataset, other arguments or another saved state than that of rank "
                f"{leader}, which fetches its batches. Use equal loaders in the same order on all ranks that receive "
                "the same batches"
            )


class Header(NamedTuple):
    """First part of a message, of a fixed size."""

    kind: Kind
    nbytes: int
    """Size of the content."""
    frames: int
    """Number of frames in the content."""


class Channel:
    """Broadcasts from the leader of a model-parallel group to its members; other methods than `open` do not block.

    Args:
        position: Position of this process in the device mesh.
    """

    def __init__(self, position: MeshPosition) -> None:
        self.position = position
        self.is_leader = position.place == 0
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._group: Any = None
        self._error: BaseException | None = None
        """Raised by each broadcast after the first one that failed."""
        self.current: Callable[[], Closable | None] = lambda: None
        """Weak reference to the receiver of the last iteration; returns None once it was deleted."""

    @property
    def leader(self) -> int:
        """Global rank of the leader."""
        return self.position.members[0]

    def open(self) -> None:
        """Create the process group if there is none; a collective call of all members.

        Raises:
            TeleloaderError: If not all members call this method within 30 minutes.
        """
        if self._group is not None or self._error is not None:
            return
        import torch.distributed as dist

        members = self.position.members
        # not new_group(): its names depend on which groups exist, so ranks that have garbage-collected different
        # loaders would wait for each other
        name = f"teleloader/{'-'.join(map(str, members))}/{next(_numbers[members])}"
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        try:
            self._group = dist.ProcessGroupGloo(store, self.position.place, len(members), _CONNECT_TIMEOUT)
        except RuntimeError as error:
            raise TeleloaderError(
                f"cannot connect to the ranks {self._others} that receive the same batches: {_reason(error)}. Call "
                "iter(loader) on all of them"
            ) from None
        self._thread = Thread(target=_work, args=(self._jobs,), name="teleloader-channel", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None).atexit = False
        _open.add(self)

    def submit(self, job: Callable[[], _Result]) -> Future[_Result]:
        """Call `job` in the channel's thread, after the earlier jobs."""
        future: Future[_Result] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - raised by the future
                future.set_exception(error)

        self._jobs.put(run)
        return future

    def close(self) -> None:
        """Close the connections when the interpreter exits; gloo's threads would otherwise abort the process."""
        self._jobs.put(None)
        self._thread.join(EXIT_TIMEOUT)
        if not self._thread.is_alive():
            self._group = None

    def close_current(self) -> None:
        """Close the last iteration, whose remaining messages precede those of the next one."""
        receiver = self.current()
        if receiver is not None:
            receiver.close()

    # -- in the channel's thread

    def start(self, announced: Announcement) -> None:
        """Announce an iteration to the members."""
        self._send(Kind.START, _bytes(json.dumps(announced)))

    def send_url(self, url: str) -> None:
        """Send the URL of the server that sent the following frames."""
        self._send(Kind.URL, _bytes(url))

    def send_frames(self, frames: NDArray[np.uint8], count: int) -> None:
        """Send encoded frames."""
        self._send(Kind.FRAMES, frames, count)

    def end(self, error: BaseException | None, *, started: bool = True) -> None:
        """Announce the end of the iteration.

        Args:
            error: Exception that ended it, which the members raise, too; None at the end of the epoch.
            started: Whether the iteration was announced.
        """
        name = type(error).__qualname__
        fields = None if error is None else (name, str(error) or name)
        self._send(Kind.END if started else Kind.FAILED, _bytes(json.dumps(fields)))

    def await_start(self) -> Announcement:
        """Receive the description of the leader's next iteration.

        Raises:
            Exception: If the leader could not start the iteration; an exception of the same type.
        """
        while True:
            header = self.receive()
            if header.kind is Kind.START:
                return Announcement(*json.loads(self.text(header)))
            if header.kind is Kind.FAILED:
                raise self.error(header) or TeleloaderError(f"rank {self.leader} could not start the iteration")
            self._discard(header)

    def discard(self) -> None:
        """Receive and discard the messages of an iteration that this rank cannot start."""
        kind = None
        while kind is not Kind.END:
            header = self.receive()
            self._discard(header)
            kind = header.kind

    def _discard(self, header: Header) -> None:
        self.fill(np.empty(header.nbytes, np.uint8))

    def receive(self) -> Header:
        """Receive the header of a message; `fill` or `text` must receive its content."""
        values = np.empty(3, np.int64)
        self._broadcast(values)
        kind, nbytes, frames = values.tolist()
        return Header(Kind(kind), nbytes, frames)

    def fill(self, content: NDArray[np.uint8]) -> None:
        """Receive the content of a message into an array of its size."""
        self._broadcast(content)

    def text(self, header: Header) -> str:
        """Receive the content of a message that is a text."""
        content = np.empty(header.nbytes, np.uint8)
        self.fill(content)
        return content.tobytes().decode()

    def error(self, header: Header) -> Exception | None:
        """Receive the exception that ended the leader's iteration, or None if there was none."""
        fields = json.loads(self.text(header))
        return None if fields is None else error_of(*fields)

    def _send(self, kind: Kind, content: NDArray[np.uint8], count: int = 0) -> None:
        self._broadcast(np.array([kind, content.nbytes, count], np.int64))
        self._broadcast(content)

    def _broadcast(self, values: NDArray[Any]) -> None:
        if self._error is not None:
            raise self._error
        import torch
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, _UNLIMITED
        try:
            self._group.broadcast([torch.from_numpy(values)], options).wait()
        except RuntimeError as error:
            lost = TeleloaderError(
                f"lost the connection to a rank that receives the same batches, one of {self._others}: "
                f"{_reason(error)}. It exited, or an error ended its iteration; see its output"
            )
            self.abandon(lost)
            raise lost from None

    def abandon(self, error: BaseException) -> None:
        """Close the connections, so that no other rank waits for this one; later broadcasts raise `error`."""
        self._error = self._error or error
        self._group = None

    @property
    def _others(self) -> str:
        own = self.position.members[self.position.place]
        return str([rank for rank in self.position.members if rank != own])


def _leave() -> None:
    for channel in list(_open):
        channel.close()


_of_parent: Final[list[Channel]] = []
"""The parent's channels, in a forked child. Never freed, because gloo would wait for threads that do not run there."""


def _leave_to_parent() -> None:
    _of_parent.extend(_open)
    _open.clear()


after_fork_in_child(_leave_to_parent)

# Exit handlers run in reverse order of registration: that of `teleloader.fetch.iteration`, which ends all iterations,
# must run before this one, and is registered after it.
atexit.register(_leave)


def _work(jobs: SimpleQueue[Callable[[], object] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # a waiting thread must not keep an iteration in memory


def _bytes(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(bytearray(text.encode()), np.uint8)


def _reason(error: RuntimeError) -> str:
    """Return gloo's message without the source file and the advice that follows."""
    text = str(error).partition("] ")[2] or str(error)
    return sentence(text.partition(". This is typically")[0].splitlines()[0])
