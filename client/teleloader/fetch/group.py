"""Receivers of the iterations of a model-parallel group: its leader fetches the batches and broadcasts their frames.

On the leader, a `Receiver` fetches batches as without a group. The thread of the channel broadcasts the encoded frames
in order, and then adds them to a second reorder buffer, from which the training loop takes them. The training loop may
change a batch in place, so it must not receive the batch before the broadcast. On the other members, the thread decodes
the received frames and adds them to the same kind of buffer. A rank takes part in the next broadcast only if its buffer
has room, so the slowest rank limits the number of batches on all ranks.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from teleloader.fetch.channel import EXIT_TIMEOUT, Announcement, Channel, Kind
from teleloader.fetch.receiver import MEMORY_LIMIT_FACTOR, Receiver
from teleloader.fetch.reorder import ReorderBuffer
from teleloader.fetch.scheduler import RangeScheduler
from teleloader.sampling import index_frame
from teleloader.stats import Measures
from teleloader.tensors.memory import HostBuffers
from teleloader.transport.request import BatchRequest
from teleloader.transport.response import decode
from teleloader_shared.codec import BatchId, Frame
from teleloader_shared.errors import TeleloaderError
from teleloader_shared.messages import READY_BYTES
from teleloader_shared.ranges import BatchRanges


class GroupReceiver(ABC):
    """Counterpart of `Receiver` for an iteration of a model-parallel group.

    Args:
        channel: Broadcasts from the leader.
        key: Key of the loader.
        scheduler: Holds the position of the training loop, and limits the number of received batches.
        measures: Counters of received batches.
        max_batch_bytes: Maximum size of a batch.
    """

    loads_ahead: Final = True
    index_list = staticmethod(index_frame)

    def __init__(
        self, channel: Channel, key: str, scheduler: RangeScheduler, measures: Measures, max_batch_bytes: int
    ) -> None:
        self.key = key
        self.requests = scheduler
        """Scheduler of the requests to servers; that of the broadcasts on members, which send no requests."""
        self.reorder_buffer = ReorderBuffer(
            scheduler, [""], measures, MEMORY_LIMIT_FACTOR * max_batch_bytes, complete=True, stays=False
        )
        self._channel = channel
        self._wanted: BatchRequest | None = None
        """Next batches to receive; None if the buffer has no room."""
        self._url = ""
        """URL of the server that sent the last frames."""

    def begin(self) -> None:
        """Start to receive batches."""
        self._channel.current = weakref.ref(self)
        self._done = self._channel.submit(self._run)

    def close(self, why: BaseException | None = None) -> None:
        """Discard all batches; the channel's thread ends the iteration when the other ranks have done so, too.

        Args:
            why: Exception to raise in threads that wait for a batch; SystemExit also waits for the channel's thread.
        """
        self.reorder_buffer.close(why)
        if isinstance(why, SystemExit):
            # a daemon thread that runs torch's code when the interpreter exits would abort the process
            self._done.exception(EXIT_TIMEOUT)

    @abstractmethod
    def end_session(self) -> None:
        """Request the end of the loader's private workers from all servers."""

    # -- in the channel's thread

    @abstractmethod
    def _run(self) -> None:
        """Receive the batches of the iteration."""

    def _await_room(self) -> bool:
        """Wait until the buffer has room for a batch; return False if it needs no further ones."""
        buffer = self.reorder_buffer
        while not buffer.is_over():
            self._wanted = self._wanted or buffer.next_request(0)
            if self._wanted is not None:
                return True
            buffer.await_work(0, None)
        return False

    def _deliver(self, frames: list[Frame]) -> None:
        """Add frames to the buffer as soon as it has room."""
        while frames and self._await_room():
            assert self._wanted is not None  # noqa: S101
            count = len(self._wanted.batches)
            nbytes = sum(frame.nbytes for frame in frames[:count])
            self._wanted = self.reorder_buffer.deliver(0, self._url, frames[:count], nbytes)
            del frames[:count]


class LeaderReceiver(GroupReceiver):
    """Receiver of the leader, which fetches the batches of the group.

    Args:
        channel: Broadcasts to the members.
        receiver: Receives the batches from servers, with ``FetchOptions.keeps_bytes``.
        scheduler: Holds the position of the training loop.
        max_batch_bytes: Maximum size of a batch.
    """

    def __init__(self, channel: Channel, receiver: Receiver, scheduler: RangeScheduler, max_batch_bytes: int) -> None:
        super().__init__(channel, receiver.key, scheduler, receiver.reorder_buffer.measures, max_batch_bytes)
        self._receiver = receiver
        self.requests = receiver.requests

    def close(self, why: BaseException | None = None) -> None:
        """Stop fetching batches, and end the iteration on the other ranks."""
        self.reorder_buffer.close(why)
        self._receiver.close(why)
        super().close(why)

    def end_session(self) -> None:
        """Request the end of the loader's private workers from all servers."""
        self._receiver.end_session()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._await_room():
                self._forward()
        except BaseException as caught:  # noqa: BLE001 - raised in the training loop of each rank
            if self.reorder_buffer.closed is None:
                error = caught
                self.reorder_buffer.fail(caught)
        self._channel.end(error)

    def _forward(self) -> None:
        """Broadcast the batches that have arrived from servers: several small ones together."""
        assert self._wanted is not None  # noqa: S101
        source = self._receiver.reorder_buffer
        source.wait(0)
        frames: list[Frame] = []
        parts: list[NDArray[np.uint8]] = []
        url, nbytes = None, 0
        while len(frames) < len(self._wanted.batches) and (arrived := source.peek()) is not None:
            frame = arrived.frame
            if frames and (arrived.url != url or nbytes + frame.nbytes > READY_BYTES):
                break
            assert frame.raw is not None, "the receiver keeps the bytes of frames"  # noqa: S101
            url, nbytes = arrived.url, nbytes + frame.nbytes
            parts.append(frame.raw)
            frames.append(frame._replace(raw=None))
            source.take(frame.batch_id.batch)
        if url is not None and url != self._url:
            self._url = url
            self._channel.send_url(url)
        self._channel.send_frames(parts[0] if len(parts) == 1 else np.concatenate(parts), len(frames))
        del parts  # the thread must not keep a batch in memory
        self._deliver(frames)


class MemberReceiver(GroupReceiver):
    """Receiver of the other members, which receive the batches from the leader.

    Args:
        channel: Broadcasts from the leader.
        announced: Description of the leader's iteration.
        scheduler: Holds the position of the training loop.
        measures: Counters of received batches.
        buffers: Allocator of the memory to receive into.
        max_batch_bytes: Maximum size of a batch.
        url: URL of the server in exceptions; None for the URL of the leader's server.
    """

    def __init__(
        self,
        channel: Channel,
        announced: Announcement,
        scheduler: RangeScheduler,
        measures: Measures,
        buffers: HostBuffers,
        max_batch_bytes: int,
        *,
        url: str | None,
    ) -> None:
        super().__init__(channel, announced.key, scheduler, measures, max_batch_bytes)
        self._batch_id = BatchId(announced.key, announced.epoch, 0)
        self._next = announced.batch
        self._buffers = buffers
        self._max_batch_bytes = max_batch_bytes
        self._own_url = url

    def end_session(self) -> None:
        """Do nothing: the workers are those of the leader."""

    def _run(self) -> None:
        buffer = self.reorder_buffer
        try:
            while True:
                self._await_room()
                header = self._channel.receive()
                if header.kind is Kind.END:
                    break
                if header.kind is Kind.URL:
                    url = self._channel.text(header)
                    self._url = self._own_url or url
                    continue
                self._receive(header.nbytes, header.frames)
            error = self._channel.error(header)
            if error is None and not buffer.is_over():
                error = TeleloaderError(
                    f"rank {self._channel.leader}, which fetches the batches of this rank, ended its iteration at "
                    f"batch {self._next}: all ranks that receive the same batches must request the same number of them"
                )
            if error is not None:
                buffer.fail(error)
        except BaseException as error:  # noqa: BLE001 - raised in the training loop, which would otherwise wait forever
            buffer.fail(error)
            self._channel.abandon(error)

    def _receive(self, nbytes: int, count: int) -> None:
        """Receive frames; decode them unless the iteration is over, because its messages must be read to the end."""
        memory = self._buffers.take(nbytes, count)
        self._channel.fill(memory.data)
        if self.reorder_buffer.is_over():
            return
        batches = BatchRanges(range(self._next, self._next + count))
        began = time.perf_counter()
        try:
            frames = decode(
                memory, self._batch_id, batches, self._max_batch_bytes,
                verified=0, has_shards=self.reorder_buffer.scheduler.has_shards,
            )  # fmt: skip
        except TeleloaderError as error:
            self.reorder_buffer.fail(error)
            return
        del memory  # a waiting thread must not keep a batch in memory
        self.reorder_buffer.received(count, nbytes, time.perf_counter() - began)
        self._next += count
        self._deliver(frames)
