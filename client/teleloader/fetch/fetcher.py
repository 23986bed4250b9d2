"""A background thread that asks a server for batches, receives and decodes them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from teleloader.api.backoff import Backoff
from teleloader.api.control import Server
from teleloader.api.responses import refusing
from teleloader.fetch.reorder import BROKEN, ReorderBuffer
from teleloader.fetch.shards import DeliveredShards
from teleloader.tensors.devices import Device
from teleloader.tensors.memory import HostBuffers
from teleloader.transport.base import Range
from teleloader.transport.http import BatchConnection, SilentConnection
from teleloader.transport.tracing import IterationTrace
from teleloader_shared import codec
from teleloader_shared.codec import Address, End, Frame, Memory
from teleloader_shared.errors import CorruptFrame, ProtocolError, ServerUnavailable
from teleloader_shared.messages import READY_BYTES, batches_path
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.text import sentence

logger = logging.getLogger("teleloader")

MAX_DAMAGED: Final = 3
"""Damaged answers in a row after which something is wrong that asking again does not mend."""
LEFT_SECONDS: Final = 5.0
"""How long a server is left that was given up, while there are others."""
TOUCH_EVERY: Final = 10.0
"""Seconds after which the server of a session is told that its client, which asks for nothing, is there."""


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """What is received, and into what."""

    spec: LoaderSpec
    key: str
    """The spec's."""
    epoch: int
    consumer: str
    """What servers call this iterator."""
    buffers: HostBuffers
    """The memory that it is received into."""
    device: Device | None
    """The accelerator of that memory, if it is page-locked."""
    max_batch_bytes: int
    """The largest frame that is accepted."""
    reconnect_timeout: float
    trace: IterationTrace | None
    """Makes spans, where somebody traces."""


class _Failures:
    """The failures of a server since it last sent a batch.

    Args:
        backoff: The waits between attempts.
    """

    def __init__(self, backoff: Backoff) -> None:
        self.backoff = backoff
        self.reset()

    def reset(self) -> None:
        """Forget all failures, because a batch was received."""
        self.backoff.reset()
        self.damaged = 0
        """Damaged responses in a row."""
        self._refused = False

    def count(self, error: Exception, *, is_confirmed: bool) -> bool:
        """Count a failure.

        Args:
            error: The failure.
            is_confirmed: Whether the request has been repeated already.

        Returns:
            False for the first refusal. One damaged bit in a request, or in the head of a response, can look like any
            refusal, so it is confirmed by a second request, which is sent at once on a new connection.
        """
        self.damaged = self.damaged + 1 if isinstance(error, CorruptFrame) else 0
        if is_confirmed or isinstance(error, BROKEN):
            return True
        was_refused, self._refused = self._refused, not self._refused
        return was_refused


class Fetcher:
    """Receives from one server, or from one of several at a time.

    Args:
        number: What the session calls it.
        servers: Where to receive from; when one fails, from the next.
        options: What to receive.
        reorder_buffer: Where to put it.
        is_registered: Whether the first server knows the loader.
    """

    def __init__(
        self,
        number: int,
        servers: list[Server],
        options: FetchOptions,
        reorder_buffer: ReorderBuffer,
        *,
        is_registered: bool,
    ) -> None:
        self._number = number
        self._servers = deque(servers)
        self._options = options
        self._reorder_buffer = reorder_buffer
        self._is_registered = is_registered
        self._shards = DeliveredShards(options.spec, options.epoch) if reorder_buffer.scheduler.has_shards else None
        """What has arrived: a server that has forgotten the session continues there."""
        self.registered_at = {servers[0]} if is_registered else set()
        """The servers that have been told of the loader."""
        self._in_flight: deque[tuple[BatchConnection, Range]] = deque()
        """What is asked for, in the order in which it is received."""
        self._idle: list[BatchConnection] = []
        self._connections: list[BatchConnection] = []
        self._has_received = False
        """Whether the server has done something since it was last tried."""
        self._calls = False
        """Whether the thread waits for a server in a way that `interrupt` does not end."""
        self._heard = time.monotonic()
        """When the server was last asked for something."""
        self.thread = threading.Thread(target=self._run, name="teleloader-receiver", daemon=True)
        self.thread.start()

    def interrupt(self) -> None:
        """Wake the thread when the epoch is over. The caller holds the reorder buffer's lock."""
        for connection in self._connections:
            connection.shut_down()

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended, unless it waits for a server: it ends when that has answered, or has not."""
        if not self._calls:
            self.thread.join(timeout)

    # -- in the thread

    def _run(self) -> None:
        self._reorder_buffer.on_end(self.interrupt)
        try:
            if self._options.device is not None:
                self._options.device.enter_thread()
            self._receive_epoch()
        except Exception as error:  # noqa: BLE001 - raised in the training loop, which would wait for ever
            self._reorder_buffer.fail(error)
        finally:
            self._drop_connections()

    def _receive_epoch(self) -> None:
        """Receive until nothing more is to be received, beginning again where something broke."""
        failures = _Failures(Backoff(self._options.reconnect_timeout, self._reorder_buffer.sleep))
        while not self._reorder_buffer.is_over():
            self._has_received = False
            try:
                self._receive_connected()
            except Exception as error:  # noqa: BLE001 - raised in the training loop, which is where the user looks
                if self._reorder_buffer.is_over():
                    return
                if self._has_received:
                    failures.reset()
                # `Server.register` confirms refusals itself
                is_confirmed = failures.count(error, is_confirmed=not self._is_registered)
                self._disconnect(error)
                if not is_confirmed:
                    continue
                self._pause(failures, error)
                if not self._has_received or isinstance(error, ServerUnavailable):
                    self._servers.rotate(-1)

    def _disconnect(self, error: Exception) -> None:
        """Drop all connections after an error; what was requested on them is requested again."""
        for connection, _ in self._in_flight:
            if connection.trace is not None:
                connection.trace.broke(error)
        if self._connections:
            self._reorder_buffer.broke()
        self._drop_connections()
        self._reorder_buffer.disconnected(self._number)
        self._is_registered = False

    def _pause(self, failures: _Failures, error: Exception) -> None:
        """Wait before the server is tried again, or give it up."""
        server, timeout = self._servers[0], self._options.reconnect_timeout
        if failures.damaged >= MAX_DAMAGED:
            error = ProtocolError(
                f"{failures.damaged} damaged answers in a row from {server.url}: {sentence(str(error))}"
            )
        last_error = ServerUnavailable if isinstance(error, BROKEN) else type(error)
        if server.last_error is not last_error:
            others = "the other servers are asked, and it is tried now and then"
            alone = f"trying again for {timeout:g} s" if isinstance(error, BROKEN) else "trying again would not help"
            logger.warning(
                "batch %d does not come from %s (%s); %s",
                self._reorder_buffer.scheduler.received, server.url, self._reason(error),
                others if self._reorder_buffer.several else alone,
            )  # fmt: skip
        server.last_error = last_error
        if isinstance(error, BROKEN):
            # of several servers the next one is tried meanwhile, which has not asked for this wait
            asked = error.retry_after if isinstance(error, ServerUnavailable) and len(self._servers) == 1 else 0.0
            if failures.backoff.pause(asked):
                return
            error = self._unavailable(error)
        if not self._reorder_buffer.give_up(server.url, error) and len(self._servers) == 1:
            self._reorder_buffer.sleep(LEFT_SECONDS)  # others are there: look now and then whether this one is too

    def _receive_connected(self) -> None:
        if not self._is_registered:
            self._register()
        while not self._reorder_buffer.is_over():
            self._ask()
            if not self._in_flight:
                self._await_work()
                continue
            connection, wanted = self._in_flight[0]
            try:
                memory = connection.receive(
                    self._options.buffers, wanted.stop - wanted.start, self._options.max_batch_bytes + READY_BYTES
                )
            except SilentConnection:
                self._reorder_buffer.broke()
                self._close(connection)
                self._in_flight[0] = (self._send(self._connect(), wanted), wanted)
                continue
            began = time.perf_counter()
            last_byte = time.time_ns()
            frames, nbytes = self._decode(memory, wanted), len(memory.data)
            if self._shards is not None:
                self._shards.add(frames, memory.data)
            del memory  # while this thread waits it must keep no batch alive
            self._reorder_buffer.decoded(time.perf_counter() - began)
            if connection.trace is not None:
                connection.trace.arrived(connection.first_byte, last_byte, len(frames), nbytes)
            self._has_received = True
            # not before: who lets a loader be registered may still refuse its batches
            self._servers[0].succeeded()
            rest = self._reorder_buffer.deliver(self._number, self._servers[0].url, frames, nbytes)
            del frames
            # the answer may be shorter than the range: what was not ready is asked for again, before anything else
            if rest is not None:
                while not self._reorder_buffer.await_room(rest.start, TOUCH_EVERY):
                    self._keep_session()
                self._in_flight[0] = (self._send(self._usable(connection), rest), rest)
            else:
                self._in_flight.popleft()
                self._idle.append(connection)

    def _register(self) -> None:
        server = self._servers[0]
        with self._calling():
            registered = server.register(self._options.spec if self._shards is None else self._shards.spec)
        self._heard = time.monotonic()
        self._is_registered = True
        self.registered_at.add(server)
        self._reorder_buffer.joined(self._number, server.url, registered.num_workers)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        self._calls = True
        try:
            yield
        finally:
            self._calls = False

    def _ask(self) -> None:
        while len(self._in_flight) < self._reorder_buffer.scheduler.connections:
            wanted = self._reorder_buffer.next_range(self._number)
            if wanted is None:
                return
            connection = self._usable(self._idle.pop() if self._idle else None)
            self._in_flight.append((self._send(connection, wanted), wanted))

    def _send(self, connection: BatchConnection, wanted: Range) -> BatchConnection:
        connection.ask(wanted, None if self._options.trace is None else self._options.trace.ask(wanted))
        self._heard = time.monotonic()
        return connection

    def _usable(self, connection: BatchConnection | None) -> BatchConnection:
        """The connection, or another one where the server has closed it."""
        if connection is not None and connection.is_usable:
            return connection
        if connection is not None:
            self._reorder_buffer.broke()
            self._close(connection)
        return self._connect()

    def _connect(self) -> BatchConnection:
        path = batches_path(self._options.key, self._options.epoch)
        with self._calling():
            connection = BatchConnection(
                self._servers[0], path, self._options.consumer, self._reorder_buffer.measures.report
            )
        with self._reorder_buffer.changed:
            self._connections.append(connection)
            if self._reorder_buffer.is_over():  # while it was being made
                connection.shut_down()
        return connection

    def _await_work(self) -> None:
        self._reorder_buffer.await_work(self._number, None if self._options.spec.session is None else TOUCH_EVERY)
        self._keep_session()

    def _keep_session(self) -> None:
        """Tell the server of a session, which has heard nothing for long, that its client is there."""
        if self._options.spec.session is not None and time.monotonic() - self._heard >= TOUCH_EVERY:
            with self._calling():
                self._servers[0].touch(self._options.key)
            self._heard, self._has_received = time.monotonic(), True

    def _decode(self, memory: Memory, wanted: Range) -> list[Frame]:
        """The frames of an answer, which must be the first batches of the range that was asked for."""
        frames = []
        key, epoch = self._options.key, self._options.epoch
        try:
            read = codec.read_all(memory, self._options.max_batch_bytes)
            for number, frame in enumerate(read, wanted.start):
                if frame.address != (key, epoch, number):
                    raise CorruptFrame(f"got {frame.address} where {Address(key, epoch, number)} was asked for")
                if isinstance(frame.content, End) and not self._reorder_buffer.scheduler.has_shards:
                    raise CorruptFrame(f"got an end in the place of batch {number}, and there are no shards to end")
                frames.append(frame)
        except ProtocolError as error:
            raise CorruptFrame(str(error)) from error
        if not 0 < len(frames) <= wanted.stop - wanted.start:
            raise CorruptFrame(f"got {len(frames)} batches, {wanted.stop - wanted.start} were asked for")
        return frames

    def _close(self, connection: BatchConnection) -> None:
        with self._reorder_buffer.changed:
            self._connections.remove(connection)
        connection.close()

    def _drop_connections(self) -> None:
        with self._reorder_buffer.changed:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
        self._in_flight.clear()
        self._idle.clear()

    def _unavailable(self, error: Exception) -> ServerUnavailable:
        return ServerUnavailable(
            f"{self._servers[0].url} did not send batch {self._reorder_buffer.scheduler.received} of epoch "
            f"{self._options.epoch}: "
            f"{self._reason(error)} (tried for {self._options.reconnect_timeout:g} s). "
            "loader.state_dict() says where to go on, here or on another server"
        )

    def _reason(self, error: Exception) -> str:
        """What is wrong, for a sentence that names the server already."""
        return sentence(str(error)).removeprefix(refusing(self._servers[0].url)) or type(error).__name__
