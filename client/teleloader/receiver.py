"""The background thread that asks, receives and decodes, and the queue from which the training loop takes."""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from teleloader.backoff import Backoff
from teleloader.buffers import Buffer, BufferPool
from teleloader.remote import RemoteDataset
from teleloader.session import Range, Session
from teleloader.transport import BatchConnection
from teleloader_shared import codec, local
from teleloader_shared.codec import Address, End, Frame, MakeArray
from teleloader_shared.errors import (
    CorruptFrame,
    LoaderTimeout,
    ProtocolError,
    ServerUnavailable,
    TeleloaderError,
    UnknownLoader,
)
from teleloader_shared.messages import READY_BYTES, batches_path
from teleloader_shared.spec import LoaderSpec

logger = logging.getLogger("teleloader")

MAX_DAMAGED: Final = 3
"""Damaged answers in a row after which something is wrong that asking again does not mend."""

CLOSE_TIMEOUT: Final = 5.0
"""Seconds to wait for the thread to end; it takes long only while it connects to a machine that is silent."""

_BROKEN = (OSError, http.client.HTTPException, CorruptFrame, UnknownLoader, ServerUnavailable)
"""What asking again mends."""


class Receiver:
    """Receives the batches of one epoch in order.

    Args:
        dataset: Where they come from.
        spec: The loader, registered there.
        epoch: The epoch.
        session: What to ask for.
        consumer: What the server calls this iterator.
        make_array: What to make of arrays.
        pool: What to receive into.
        max_batch_bytes: The largest frame that is accepted.
    """

    def __init__(
        self,
        dataset: RemoteDataset,
        spec: LoaderSpec,
        epoch: int,
        session: Session,
        consumer: str,
        make_array: MakeArray,
        pool: BufferPool,
        max_batch_bytes: int,
    ) -> None:
        self._dataset = dataset
        self._spec = spec
        self._key = spec.key
        self._epoch = epoch
        self._session = session
        self._consumer = consumer
        self._make_array = make_array
        self._pool = pool
        self._max_batch_bytes = max_batch_bytes
        self._lanes: deque[tuple[BatchConnection, Range]] = deque()
        self._idle: list[BatchConnection] = []
        self._connections: list[BatchConnection] = []
        self._register = False
        self._indices: dict[int, bytes] = {}
        """For an order of the client's own: what the batches hold that have not arrived."""
        self._complete = spec.order != "client"
        """Whether it is known how far the epoch goes, or the server will tell."""
        self._batches: deque[Frame] = deque()
        self._changed = threading.Condition()
        self._starved = False
        self._callback: Callable[[], object] | None = None
        self._sated = False
        self._closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="teleloader-receiver", daemon=True)
        self._thread.start()

    @property
    def head(self) -> Frame | None:
        """What `take` would give, if it has arrived."""
        return self._batches[0] if self._batches else None

    def wait(self, timeout: float) -> None:
        """Wait until the next batch, or the failure in its place, has arrived.

        Args:
            timeout: Seconds to wait for it; 0 waits as long as the server is there.

        Raises:
            LoaderTimeout: When it did not come in time; it may come later.
            Exception: Why no more batches can come.
        """
        if not self._batches:
            self._await_batch(timeout)

    def call_when_arrived(self, callback: Callable[[], object] | None) -> None:
        """Have `callback` called, in whichever thread, once `wait` would not wait any more; None takes it back."""
        with self._changed:
            if callback is None:
                self._callback = None
                self._starved = self._session.waiting = False
                return
            # said before it is looked: the other thread looks after it has delivered
            self._callback = callback
            self._starved = self._session.waiting = True
            self._changed.notify_all()
            if self._batches or self._error or self._closed:
                self._wake()

    def take(self) -> Frame:
        """The batch that has arrived."""
        frame = self._batches.popleft()
        self._session.taken += 1
        if self._sated and self._session.has_room:
            with self._changed:
                self._changed.notify_all()
        return frame

    def feed(self, indices: dict[int, bytes]) -> None:
        """Tell what further batches hold, in an order of the client's own; they are asked for in their turn."""
        if indices:
            with self._changed:
                self._indices.update(indices)
                self._session.extend(max(indices) + 1)
                self._changed.notify_all()

    def complete(self) -> None:
        """No more will be fed: the thread ends when all has arrived."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and its connections."""
        with self._changed:
            self._closed = True
            self._wake()
            for connection in self._connections:
                connection.shut_down()
        self._batches.clear()
        if threading.current_thread() is not self._thread and not local.is_server_thread():
            # a daemon thread that is in torch's code when the interpreter ends would abort the process
            self._thread.join(CLOSE_TIMEOUT)

    # -- in the training loop's thread

    def _await_batch(self, timeout: float) -> None:
        with self._changed:
            self._starved = self._session.waiting = True
            if self._sated and self._session.has_room:
                self._changed.notify_all()
            try:
                arrived = self._changed.wait_for(
                    lambda: self._batches or self._error or self._closed, timeout if timeout > 0 else None
                )
            finally:
                self._starved = self._session.waiting = False
        if self._batches:
            return
        if self._error is not None:
            raise self._error
        if not arrived:
            raise timed_out(timeout)
        raise TeleloaderError("this iterator was closed; iter(loader) makes another one")

    # -- in the receiver's own thread

    def _run(self) -> None:
        try:
            self._receive_epoch()
        except Exception as error:  # noqa: BLE001 - raised in the training loop, which is where the user looks
            with self._changed:
                self._error = error
                self._wake()
        finally:
            self._drop_connections()

    def _receive_epoch(self) -> None:
        """Receive until the epoch's end, beginning again where something broke."""
        backoff = Backoff(self._dataset.reconnect_timeout, self._sleep)
        damaged = 0
        while True:
            before = self._session.received
            try:
                self._receive_connected()
                return
            except _BROKEN as error:
                if self._closed:
                    return
                damaged = damaged + 1 if isinstance(error, CorruptFrame) else 0
                if damaged >= MAX_DAMAGED:
                    raise ProtocolError(
                        f"{damaged} damaged answers in a row from {self._dataset.url}: {error}"
                    ) from None
                if self._session.received > before:
                    backoff.reset()
                    damaged = min(damaged, 1)
                if backoff.first:
                    logger.warning(
                        "%s does not send batch %d (%s); trying again for %g s",
                        self._dataset.url, self._session.received, error, self._dataset.reconnect_timeout,
                    )  # fmt: skip
                if not backoff.pause():
                    raise self._unavailable(error) from error
            self._drop_connections()
            self._session.rewind()
            self._register = True

    def _receive_connected(self) -> None:
        if self._register:
            self._dataset.register(self._spec, wait=False)
            self._register = False
        while not self._over:
            self._ask()
            if not self._lanes:
                self._await_room()
                continue
            connection, wanted = self._lanes[0]
            buffer = connection.receive(self._pool, self._max_batch_bytes + READY_BYTES)
            frames = self._decode(buffer, wanted)
            self._deliver(frames, len(buffer))
            # the answer may be shorter than the range: what was not ready is asked for again, before anything else
            rest = wanted._replace(start=wanted.start + len(frames))
            if rest.start < min(rest.stop, self._session.stop):
                self._send(connection, rest)
                self._lanes[0] = (connection, rest)
            else:
                self._lanes.popleft()
                self._idle.append(connection)

    @property
    def _over(self) -> bool:
        return self._closed or (self._complete and self._session.finished)

    def _ask(self) -> None:
        while len(self._lanes) < self._session.connections and (wanted := self._session.next_range()) is not None:
            connection = self._idle.pop() if self._idle else self._connect()
            self._lanes.append((connection, wanted))
            self._send(connection, wanted)

    def _send(self, connection: BatchConnection, wanted: Range) -> None:
        listed = [self._indices[k] for k in range(wanted.start, wanted.stop) if k in self._indices]
        connection.ask(wanted, b"".join(listed) if self._spec.order == "client" else None)

    def _connect(self) -> BatchConnection:
        path = batches_path(self._key, self._epoch)
        connection = BatchConnection(self._dataset.url, path, self._consumer)
        with self._changed:
            self._connections.append(connection)
            if self._closed:  # while it was being made
                connection.shut_down()
        return connection

    def _decode(self, buffer: Buffer, wanted: Range) -> list[Frame]:
        """The frames of an answer, which must be the first batches of the range that was asked for."""
        frames = []
        try:
            for number, raw in enumerate(codec.split(buffer), wanted.start):
                frame = codec.read(raw, self._make_array, self._max_batch_bytes)
                expected = Address(self._key, self._epoch, number)
                if frame.address != expected:
                    raise CorruptFrame(f"got {frame.address} where {expected} was asked for")
                frames.append(frame)
        except ProtocolError as error:
            raise CorruptFrame(str(error)) from error
        if not 0 < len(frames) <= wanted.stop - wanted.start:
            raise CorruptFrame(f"got {len(frames)} batches, {wanted.stop - wanted.start} were asked for")
        return frames

    def _deliver(self, frames: list[Frame], nbytes: int) -> None:
        for frame in frames:
            self._indices.pop(frame.address.batch, None)
            if isinstance(frame.content, End):
                self._session.shard_ended(frame.address.batch)
        self._session.arrived(len(frames), nbytes)
        self._session.paced(time.monotonic())
        self._batches.extend(frames)
        if self._starved:
            with self._changed:
                self._wake()

    def _wake(self) -> None:
        """Tell whoever waits, in this thread or another."""
        self._changed.notify_all()
        if self._callback is not None:
            callback, self._callback = self._callback, None
            self._starved = self._session.waiting = False
            callback()

    def _await_room(self) -> None:
        with self._changed:
            self._sated = True
            self._changed.wait_for(lambda: self._over or self._session.has_room)
            self._sated = False

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)

    def _drop_connections(self) -> None:
        with self._changed:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
        self._lanes.clear()
        self._idle.clear()

    def _unavailable(self, error: Exception) -> ServerUnavailable:
        return ServerUnavailable(
            f"{self._dataset.url} did not send batch {self._session.received} of epoch {self._epoch}: "
            f"{error or type(error).__name__} (tried for {self._dataset.reconnect_timeout:g} s). "
            "loader.state_dict() says where to go on, here or on another server"
        )


def timed_out(timeout: float) -> LoaderTimeout:
    """The error of a batch that did not come in so many seconds, in torch's words."""
    return LoaderTimeout(f"DataLoader timed out after {timeout:g} seconds")
