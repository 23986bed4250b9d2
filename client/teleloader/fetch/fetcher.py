"""Background thread that requests, receives and decodes batches from a server."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from teleloader.api.backoff import Backoff
from teleloader.api.responses import refusing
from teleloader.fetch.reorder import BROKEN, ReorderBuffer
from teleloader.fetch.shards import DeliveredShards, group_spec
from teleloader.fleet.trust import check_environment
from teleloader.stats import Arrival
from teleloader.tensors.devices import Device
from teleloader.tensors.memory import HostBuffers
from teleloader.transport.interface import BatchServer, Connection, SilentConnection, TransportError
from teleloader.transport.request import BatchRequest
from teleloader.transport.response import decode, with_bytes
from teleloader.transport.tracing import IterationTrace
from teleloader_shared.codec import BatchId, Memory
from teleloader_shared.errors import CorruptFrame, ProtocolError, ServerUnavailable
from teleloader_shared.messages import READY_BYTES
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.text import sentence

logger = logging.getLogger("teleloader")

MAX_DAMAGED: Final = 3
"""Consecutive corrupt responses after which the client stops using the server."""
FAILED_COOLDOWN_S: Final = 5.0
"""Cooldown of a failed server while others are available, in seconds."""
TOUCH_EVERY: Final = 10.0
"""Interval of the heartbeats that keep a session alive while no batches are requested, in seconds."""


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """Batch request parameters for one epoch."""

    spec: LoaderSpec
    first_spec: LoaderSpec
    """Spec for the first registration, with the shard states of the previous epoch if they are known."""
    previous_states: tuple[str | None, ...] | None
    """Last state of each shard in the previous epoch (None if unknown); None if other workers iterated that epoch."""
    key: str
    """Key of the loader (`LoaderSpec.key`)."""
    epoch: int
    consumer: str
    """Name of this iterator in the statistics of servers."""
    buffers: HostBuffers
    """Allocator of the memory to receive into."""
    device: Device | None
    """Accelerator that page-locked memory is allocated for; None for pageable memory."""
    max_batch_bytes: int
    """Maximum size of a frame, in bytes."""
    reconnect_timeout: float
    """Seconds for which requests are retried."""
    environment: str | None
    """Versions of libraries that servers must have; None to accept any."""
    trace: IterationTrace | None
    """Creates the spans of the requests; None if tracing is disabled."""
    keeps_bytes: bool = False
    """True to store the encoded frames, for the other members of a model-parallel group."""
    compute_stop: Callable[[], int] | None = None
    """Computes the end of the epoch, which may take seconds; None if the scheduler knows it."""

    def of_group(self, number: int, groups: int) -> FetchOptions:
        """Return the options for one of the groups of shards, which has a session of its own (`group_spec`)."""
        spec, first = (group_spec(each, number, groups) for each in (self.spec, self.first_spec))
        return replace(self, spec=spec, first_spec=first, key=spec.key)


class _Failures:
    """Counter of a server's consecutive failures since its last batch.

    Args:
        backoff: Backoff between retries.
    """

    def __init__(self, backoff: Backoff) -> None:
        self.backoff = backoff
        self.reset()

    def reset(self) -> None:
        """Reset the counters after a batch was received."""
        self.backoff.reset()
        self.damaged = 0
        """Consecutive corrupt responses."""
        self._refused = False

    def count(self, error: Exception, *, is_confirmed: bool) -> bool:
        """Count a failed request.

        Args:
            error: The exception.
            is_confirmed: Whether the request has already been repeated.

        Returns:
            True for a broken connection, or a refusal that was repeated. False for the first refusal: the request
            should be sent again immediately on a new connection, because any refusal may result from a corrupted bit
            in the request, or in the headers of the response.
        """
        self.damaged = self.damaged + 1 if isinstance(error, CorruptFrame) else 0
        if is_confirmed or isinstance(error, BROKEN):
            return True
        was_refused, self._refused = self._refused, not self._refused
        return was_refused


class Fetcher:
    """Background thread that receives batches from one server at a time, and fails over to the next server.

    Args:
        number: Number of this fetcher in the reorder buffer and the scheduler, from 0.
        servers: Servers to receive from; if one fails, the next one is used.
        options: Parameters of the requests.
        reorder_buffer: Destination of the batches.
        failed: Function to call with the URL of a server whose request failed.
        is_registered: Whether the loader is already registered with the first server.
    """

    def __init__(
        self,
        number: int,
        servers: list[BatchServer],
        options: FetchOptions,
        reorder_buffer: ReorderBuffer,
        failed: Callable[[str], object],
        *,
        is_registered: bool,
    ) -> None:
        self.number = number
        self.key = options.key
        self._servers = deque(servers)
        self._followed = tuple(servers)
        """Servers to use after the next failure."""
        self._options = options
        self._reorder_buffer = reorder_buffer
        self._failed = failed
        self._is_registered = is_registered
        self._compute_stop = options.compute_stop if number == 0 else None
        """Computes the end of the epoch; None if it is known, or another thread computes it."""
        has_shards = reorder_buffer.scheduler.has_shards
        self._shards = DeliveredShards(options.spec, options.epoch, options.previous_states) if has_shards else None
        """Record of delivered batches, from which a server restores an evicted session; None for map-style datasets."""
        self.registered_at = {servers[0]} if is_registered else set()
        """Servers with which the loader was registered."""
        self._in_flight: deque[tuple[Connection, BatchRequest]] = deque()
        """Pending requests, in the order in which their responses are received."""
        self._in_background: Connection | None = None
        """Connection with a pending request of low priority; guarded by the reorder buffer's lock."""
        self._idle: list[Connection] = []
        self._connections: list[Connection] = []
        self._has_received = False
        """True if a request succeeded since the last retry."""
        self._in_control_request = False
        """True during a control request or connection attempt, which `interrupt` cannot end."""
        self._last_request = time.monotonic()
        """Time of the last request (``time.monotonic()``)."""
        self._cpu = 0.0
        """CPU time of the thread when its previous response had been decoded."""
        self.thread = threading.Thread(target=self._run, name="teleloader-receiver", daemon=True)
        self.thread.start()

    def interrupt(self) -> None:
        """Shut down all connections to wake the thread at the end of the epoch; requires the reorder buffer's lock."""
        for connection in self._connections:
            connection.shut_down()

    def expedite(self) -> None:
        """Send the pending request again with normal priority, unless its response has begun to arrive.

        A request for batches of shards is not sent again: no other loader uses the workers, and a shard cannot go back.
        Requires the reorder buffer's lock.
        """
        if self._shards is None and self._in_background is not None and not self._in_background.first_byte:
            self._in_background.shut_down()

    def follow(self, servers: Iterable[BatchServer]) -> None:
        """Use these servers after the next failure; the current server stays in use while it responds."""
        self._followed = tuple(servers)

    def join(self, timeout: float) -> None:
        """Join the thread, unless it waits for a control request; such a thread ends after the response or timeout."""
        if not self._in_control_request:
            self.thread.join(timeout)

    # -- in the thread

    def _run(self) -> None:
        self._reorder_buffer.on_end(self.interrupt)
        try:
            if self._options.device is not None:
                self._options.device.enter_thread()
            self._receive_epoch()
            if self._options.spec.session is not None and not self._reorder_buffer.is_over():
                self._end_session()  # only this server ends: it has left
        except BaseException as error:  # noqa: BLE001 - raised in the training loop, which would otherwise wait forever
            self._reorder_buffer.fail(error)
        finally:
            self._drop_connections()
            self._reorder_buffer.ended(self.number, self.interrupt)

    def _end_session(self) -> None:
        for server in self.registered_at:
            with self._control_request():
                server.end_session(self._options.key)

    def _receive_epoch(self) -> None:
        """Receive all batches of the epoch, with retries after failures."""
        failures = _Failures(Backoff(self._options.reconnect_timeout, self._reorder_buffer.sleep))
        while not self._is_done:
            self._has_received = False
            try:
                self._receive_connected()
            except Exception as error:  # noqa: BLE001 - raised in the training loop if retries do not help
                if self._reorder_buffer.is_over() or self._reorder_buffer.fail_in_background(error):
                    return
                if self._has_received:
                    failures.reset()
                # `Server.register` repeats a refused registration itself
                is_confirmed = failures.count(error, is_confirmed=not self._is_registered)
                self._disconnect(error)
                if self._is_done or not is_confirmed:
                    continue
                self._pause(failures, error)
                if not self._has_received or isinstance(error, ServerUnavailable):
                    self._rotate()

    @property
    def _is_done(self) -> bool:
        return self._reorder_buffer.is_done(self.number)

    def _rotate(self) -> None:
        """Move to the next server; remove those that have left, and append those that have joined."""
        self._update_servers()
        self._servers.rotate(-1)
        if self._servers[-1] not in self._followed:
            self._servers.pop()

    def _update_servers(self) -> None:
        """Remove servers that have left, except for the current one, and append those that have joined."""
        followed = self._followed
        remaining = [server for server in self._servers if server in followed or server is self._servers[0]]
        self._servers = deque(remaining + [server for server in followed if server not in remaining])

    def _disconnect(self, error: Exception) -> None:
        """Close all connections after an error; their pending ranges are requested again."""
        for connection, _ in self._in_flight:
            if connection.trace is not None:
                connection.trace.broke(error)
        if self._connections:
            self._reorder_buffer.broke()
        self._drop_connections()
        self._reorder_buffer.disconnected(self.number)
        self._is_registered = False

    def _pause(self, failures: _Failures, error: Exception) -> None:
        """Wait before a retry; after `reconnect_timeout`, take the server out of rotation."""
        self._update_servers()
        server, timeout = self._servers[0], self._options.reconnect_timeout
        if failures.damaged >= MAX_DAMAGED:
            error = ProtocolError(
                f"{failures.damaged} consecutive damaged responses from {server.url}: {sentence(str(error))}. Check "
                "the network and proxies between client and server"
            )
        previous = server.last_error
        server.failed(ServerUnavailable() if isinstance(error, BROKEN) else error)
        if server.last_error is not previous:
            others = "using the other servers, and retrying this one periodically"
            alone = f"retrying for {timeout:g} s" if isinstance(error, BROKEN) else "a retry would not help"
            logger.warning(
                "cannot receive batch %d from %s (%s); %s",
                self._reorder_buffer.scheduler.received, server.url, self._reason(error),
                others if self._reorder_buffer.several else alone,
            )  # fmt: skip
        self._failed(server.url)
        if isinstance(error, BROKEN):
            # with several servers the next attempt uses another one, which did not request this wait
            requested = error.retry_after if isinstance(error, ServerUnavailable) and len(self._servers) == 1 else 0.0
            if failures.backoff.pause(requested):
                return
            error = self._unavailable(error)
        if not self._reorder_buffer.give_up(server.url, error) and len(self._servers) == 1:
            self._reorder_buffer.sleep(FAILED_COOLDOWN_S)  # other servers are available: retry this one later

    def _receive_connected(self) -> None:
        self._begin()
        while not self._is_done:
            self._send_requests()
            if not self._in_flight:
                self._await_work()
                continue
            connection, wanted = self._in_flight[0]
            memory = self._receive(connection, wanted)
            if memory is None:
                continue
            began = time.perf_counter()
            last_byte = time.time_ns()
            frames = decode(
                memory, BatchId(self._options.key, self._options.epoch, 0), wanted.batches,
                self._options.max_batch_bytes, verified=connection.verified, has_shards=self._shards is not None,
            )  # fmt: skip
            if connection.wants_timings:
                self._reorder_buffer.measures.timings.request()
            nbytes = len(memory.data)
            if self._options.keeps_bytes:
                frames = with_bytes(frames, memory)
            if self._shards is not None:
                self._shards.add(frames, memory.data)
            del memory  # a waiting thread must not keep a batch in memory
            arrival = self._arrival(connection, began, last_byte)
            url, first = self._servers[0].url, frames[0].batch_id.batch
            self._reorder_buffer.received(len(frames), nbytes, time.perf_counter() - began, url, first, arrival)
            if connection.trace is not None:
                connection.trace.arrived(connection.first_byte, last_byte, len(frames), nbytes)
            self._has_received = True
            # only here, because a server that registers a loader may still refuse its batches
            self._servers[0].succeeded()
            rest = self._reorder_buffer.deliver(self.number, self._servers[0].url, frames, nbytes)
            del frames
            # a response may have only the first batches: the rest, which was not ready, is requested next
            if rest is not None:
                while not self._reorder_buffer.await_room(self.number, rest.batches.start, TOUCH_EVERY):
                    self._keep_session()
                self._in_flight[0] = (self._send(self._usable(connection), rest), rest)
            else:
                self._in_flight.popleft()
                self._idle.append(connection)

    def _arrival(self, connection: Connection, now: float, last_byte: int) -> Arrival:
        """Return the times of the last response, given the time of its last byte on two clocks."""
        before, self._cpu = self._cpu, time.thread_time()
        return Arrival(now - max(0.0, (last_byte - connection.first_byte) / 1e9), now, self._cpu - before)

    def _receive(self, connection: Connection, wanted: BatchRequest) -> Memory | None:
        """Receive the response to the oldest request; return None if the request was sent again instead."""
        options = self._options
        try:
            memory = connection.receive(options.buffers, len(wanted.batches), options.max_batch_bytes + READY_BYTES)
        except SilentConnection:
            self._reorder_buffer.broke()
        except TransportError:  # also if `expedite` has shut the connection down
            if connection is not self._in_background or self._reorder_buffer.scheduler.is_background:
                raise
        else:
            if self._in_background is not None:
                with self._reorder_buffer.changed:
                    self._in_background = None
            return memory
        self._in_background = None
        self._close(connection)
        self._in_flight[0] = (self._send(self._connect(), wanted), wanted)
        return None

    def _begin(self) -> None:
        """Register the loader, and compute the end of the epoch, unless this was done before."""
        if not self._is_registered:
            self._register()
        if self._compute_stop is not None:
            with self._control_request():
                self._reorder_buffer.set_end(self._compute_stop())
            self._compute_stop = None

    def _register(self) -> None:
        server = self._servers[0]
        with self._control_request():
            spec = self._options.first_spec
            if self._shards is not None and (self.registered_at or self._options.previous_states is None):
                spec = self._shards.spec
            registered = server.register(spec, self._options.epoch)
        self.registered_at.add(server)
        if self._options.spec.session is not None and self._reorder_buffer.is_discarded:
            self._end_session()  # `close` could not end a session that the server was still starting
        check_environment(server.url, registered.environment, self._options.environment)
        self._last_request = time.monotonic()
        self._is_registered = True
        self._reorder_buffer.joined(self.number, server.url, registered.num_workers, registered.batch_rate)

    @contextmanager
    def _control_request(self) -> Iterator[None]:
        self._in_control_request = True
        try:
            yield
        finally:
            self._in_control_request = False

    def _send_requests(self) -> None:
        while len(self._in_flight) < self._reorder_buffer.scheduler.connections:
            wanted = self._reorder_buffer.next_request(self.number)
            if wanted is None:
                return
            connection = self._usable(self._idle.pop() if self._idle else None)
            self._in_flight.append((self._send(connection, wanted), wanted))

    def _send(self, connection: Connection, wanted: BatchRequest) -> Connection:
        if self._shards is not None:
            self._shards.request(wanted)
        wanted = wanted._replace(is_background=self._reorder_buffer.scheduler.is_background)
        connection.send(wanted, None if self._options.trace is None else self._options.trace.start(wanted))
        self._last_request = time.monotonic()
        if wanted.is_background:
            with self._reorder_buffer.changed:
                self._in_background = connection
                if not self._reorder_buffer.scheduler.is_background:  # the epoch has started meanwhile
                    self.expedite()
        return connection

    def _usable(self, connection: Connection | None) -> Connection:
        """Return `connection` if it is still usable, else a new connection."""
        if connection is not None and connection.is_usable:
            return connection
        if connection is not None:
            self._reorder_buffer.broke()
            self._close(connection)
        return self._connect()

    def _connect(self) -> Connection:
        options = self._options
        with self._control_request():
            server = self._servers[0]
            report = partial(self._reorder_buffer.measures.report, server.url)
            connection = server.connect(options.key, options.epoch, options.consumer, report)
        with self._reorder_buffer.changed:
            self._connections.append(connection)
            if self._reorder_buffer.is_over():  # the epoch ended while connecting
                connection.shut_down()
        return connection

    def _await_work(self) -> None:
        self._reorder_buffer.await_work(self.number, None if self._options.spec.session is None else TOUCH_EVERY)
        self._keep_session()

    def _keep_session(self) -> None:
        """Send a heartbeat to the server of a session after `TOUCH_EVERY` seconds without a request."""
        if self._options.spec.session is not None and time.monotonic() - self._last_request >= TOUCH_EVERY:
            with self._control_request():
                self._servers[0].touch(self._options.key)
            self._last_request, self._has_received = time.monotonic(), True

    def _close(self, connection: Connection) -> None:
        with self._reorder_buffer.changed:
            self._connections.remove(connection)
        connection.close()

    def _drop_connections(self) -> None:
        with self._reorder_buffer.changed:
            for connection in self._connections:
                connection.close()
            self._connections.clear()
            self._in_background = None
        self._in_flight.clear()
        self._idle.clear()

    def _unavailable(self, error: Exception) -> ServerUnavailable:
        return ServerUnavailable(
            f"{self._servers[0].url} did not send batch {self._reorder_buffer.scheduler.received} of epoch "
            f"{self._options.epoch}: "
            f"{self._reason(error)} (tried for {self._options.reconnect_timeout:g} s). "
            "To resume later, on this or another server, save loader.state_dict()"
        )

    def _reason(self, error: Exception) -> str:
        """Return the text of an exception without the URL of the server."""
        return sentence(str(error)).removeprefix(refusing(self._servers[0].url)) or type(error).__name__
