"""Reorder buffer: receiving threads add batches in any order, the training loop removes them in order."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from teleloader.fetch.scheduler import HEDGE_LEAST, RangeScheduler
from teleloader.stats import Arrival, Measures
from teleloader.transport.interface import TransportError
from teleloader.transport.request import BatchRequest
from teleloader_shared.codec import End, Frame
from teleloader_shared.errors import (
    CorruptFrame,
    LoaderTimeout,
    ServerUnavailable,
    TeleloaderError,
    UnknownLoader,
)

BROKEN: Final = (TransportError, CorruptFrame, UnknownLoader, ServerUnavailable)
"""Errors after which a request is retried."""


POLL_INTERVAL: Final = 0.005
"""Seconds between checks in `ReorderBuffer.receive` and `ReorderBuffer.await_end`."""
SIGNAL_INTERVAL: Final = 0.5
"""Maximum length of one wait, in seconds: a signal that arrives while CPython begins to wait does not end that wait."""


class Arrived(NamedTuple):
    """Received batch in order: all earlier batches have arrived, too."""

    frame: Frame
    url: str
    """URL of the server that sent the batch."""
    total: int
    """Cumulative memory of the iterator's batches up to and including this one, in bytes."""


class ReorderBuffer:
    """Thread-safe buffer between receiving threads and training loop; also stores the error that ends the epoch.

    Args:
        scheduler: Scheduler of the requests; guarded by `changed`, except in the training loop's thread.
        urls: URLs of the servers.
        measures: Counters of received batches.
        memory_limit: Maximum memory of buffered batches, in bytes; beyond it, requests are paused.
        complete: Whether the end of the epoch is known or reported by a server; if False, the method `complete` or
            `set_end` declares it.
        stays: Whether to keep the receiving threads until `close`, even if all batches have arrived.
    """

    def __init__(
        self,
        scheduler: RangeScheduler,
        urls: list[str],
        measures: Measures,
        memory_limit: int,
        *,
        complete: bool,
        stays: bool,
    ) -> None:
        self.scheduler = scheduler
        self.measures = measures
        self.lock = threading.RLock()
        """Lock of `changed`, for the training loop's thread: unlike a condition's methods, those of a lock are in C, so
        a signal handler that raises cannot leave it locked."""
        self.changed = threading.Condition(self.lock)
        self.closed: BaseException | None = None
        """Exception that each wait for a batch raises after `close`; None while the iterator is open."""
        self._memory_limit = memory_limit
        self._bell = threading.Lock()
        """Locked while the training loop waits; released to make the loop check again."""
        self._bell.acquire()
        self._bytes_in = 0
        """Total memory of all received batches, in bytes. Written by the receiving threads only, under `changed`."""
        self._bytes_ordered = 0
        """Total memory of all batches that were appended to `_batches` so far, in bytes."""
        self._bytes_out = 0
        """Total memory of all batches that the training loop has received, in bytes. Written by its thread only."""
        self._complete = complete
        self._stays = stays
        self._indices: dict[int, bytes] = {}
        """With a client-side sampler: encoded indices of the batches that have not arrived, by batch number."""
        self._early: dict[int, tuple[Frame, str]] = {}
        """Batches that arrived before one of their predecessors, with the URL of their server."""
        self._batches: deque[Arrived] = deque()
        """Received batches in order, up to the first batch that has not arrived."""
        self.starved = False
        """True while the training loop waits for a batch."""
        self._is_ready: Callable[[Frame], bool] | None = None
        """Predicate of `stage`; None if batches are not copied to a device before delivery."""
        self._callback: Callable[[], object] | None = None
        self._idle_threads = 0
        """Number of receiving threads that have nothing to request."""
        self._preceding_bytes = 0.0
        """Memory of the epoch before that counts towards the limit, in bytes; 0 once this epoch has started."""
        self._failing: dict[str, Exception | None] = dict.fromkeys(urls)
        """Final error by server URL; None for servers that have not failed."""
        self._error: BaseException | None = None
        self._on_end: list[Callable[[], object]] = []

    # -- in the training loop's thread

    def peek(self) -> Arrived | None:
        """Return the next batch, or the failure or end of shard in its place, or None if the batch is not ready."""
        if not self._batches:
            return None
        first = self._batches[0]
        return first if self._is_ready is None or self._is_ready(first.frame) else None

    def wait(self, timeout: float) -> None:
        """Wait until the next batch, or the failure in its place, has arrived.

        Args:
            timeout: Maximum wait in seconds; 0 for no limit.

        Raises:
            LoaderTimeout: If the batch did not arrive in time; it may still arrive.
            Exception: If an error ended the iteration.
        """
        if self.peek() is None:
            self._await_batch(timeout)

    def receive(self, stop: int) -> list[Frame]:
        """Wait until all batches before `stop` have arrived; return the received batches in order, as `arrived`.

        Raises:
            Exception: If the iteration has failed; the same exception that `next()` raises.
        """
        while True:
            with self.lock:
                self.scheduler.needed = stop
                self.changed.notify_all()
                if self.scheduler.received >= stop:
                    return list(self.arrived())
                error = self._error or self.closed
            if error is not None:
                raise error
            time.sleep(POLL_INTERVAL)  # waiting on the condition could leave the lock locked, see `_await_batch`

    def call_when_arrived(self, callback: Callable[[], object] | None) -> None:
        """Call `callback` once, from any thread, as soon as `wait` would not block; None cancels a pending call."""
        with self.lock:
            if callback is None:
                self._callback = None
                self.starved = False
                return
            # set before the check below: a receiving thread that delivers after the check finds the callback
            self._callback = callback
            self.starved = True
            self.changed.notify_all()
            if self.peek() is not None or self._error or self.closed:
                self._wake()

    async def arrival(self) -> None:
        """Wait asynchronously for the next batch, like `wait`; cancellation loses no batch."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()

        def notify() -> None:
            with suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(arrived.set)

        self.call_when_arrived(notify)
        try:
            await arrived.wait()
        finally:
            self.call_when_arrived(None)
        self.wait(0)  # does not block; raises the error that ended the iteration

    def take(self, number: int) -> None:
        """Remove the batch that `peek` returned, unless it was already removed.

        If a signal handler interrupts this method, it can be called again: totals are set, never incremented.
        """
        with self.lock:
            if self._batches and self._batches[0].frame.batch_id.batch == number:
                self._bytes_out = self._batches[0].total
                self.scheduler.taken = number + 1
                self._batches.popleft()
            was_over_memory = self.scheduler.over_memory
            if was_over_memory:  # removing a batch never exceeds the limit
                self._check_memory()
            if was_over_memory or self._is_ready is not None or (self._idle_threads and self.scheduler.has_room):
                self.changed.notify_all()

    @property
    def rest_bytes(self) -> float:
        """Bytes of memory of the batches that the training loop has not received; estimated for missing batches."""
        scheduler, early = self.scheduler, len(self._early)
        arrived, missing = scheduler.received - scheduler.start + early, scheduler.stop - scheduler.received - early
        return self._bytes_in - self._bytes_out + missing * self._bytes_in / max(1, arrived)

    def approach(self, preceding: int, nbytes: float) -> None:
        """Prefetch an epoch that has not started, within the limits of both epochs together.

        Args:
            preceding: Number of batches that the training loop takes from the epoch before.
            nbytes: Memory of these batches in bytes.
        """
        with self.lock:
            if self.scheduler.is_background:
                self._preceding_bytes = nbytes
                self.scheduler.approach(preceding)
                self._check_memory()
                self.changed.notify_all()

    def begin(self) -> bool:
        """Record that the training loop starts the epoch; return False if prefetching the epoch has failed."""
        with self.lock:
            if self._error is not None or self.closed is not None:
                return False
            self._preceding_bytes = 0.0
            self.scheduler.begin(time.monotonic())
            self._check_memory()
            self.changed.notify_all()
            return True

    def feed(self, indices: dict[int, bytes]) -> None:
        """Add encoded index lists from a client-side sampler, and schedule the requests for these batches."""
        if indices:
            with self.lock:
                self._indices.update(indices)
                self.scheduler.extend(max(indices) + 1)
                self.changed.notify_all()

    def complete(self) -> None:
        """Declare the end of the epoch: `feed` will not be called again."""
        with self.lock:
            self._complete = True
            self.changed.notify_all()

    def await_end(self) -> bool:
        """Wait until the end of the epoch is known; return False if the iteration has failed before."""
        while not self._complete:
            if self._error is not None or self.closed is not None:
                return False
            time.sleep(POLL_INTERVAL)  # waiting on the condition could leave the lock locked, see `_await_batch`
        return True

    def close(self, why: BaseException | None = None) -> None:
        """Discard all batches and stop the receiving threads.

        Args:
            why: Exception that further waits raise; None for a `TeleloaderError`.
        """
        with self.lock:
            self.closed = why or TeleloaderError("this iterator is closed: call iter(loader) for another iterator")
            self._batches.clear()
            self._wake()
            self._end()

    def _await_batch(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout if timeout > 0 else None
        try:
            while True:
                with self.lock:
                    self._check_memory()
                    self.starved = True
                    if self._is_ready is not None or self._idle_threads:
                        self.changed.notify_all()
                    if self.peek() is not None:
                        return
                    if self._error is not None:
                        raise self._error
                    if self.closed is not None:
                        raise self.closed
                left = math.inf if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise timed_out(timeout)
                # not a condition: a signal handler that raises in its wait() could leave the lock in any state
                self._bell.acquire(timeout=min(left, SIGNAL_INTERVAL))
        finally:
            self.starved = False

    # -- in the thread that copies to a device

    def stage(self, is_ready: Callable[[Frame], bool]) -> None:
        """Delay the delivery of each batch until `is_ready` returns True for it.

        The caller must call `staged` whenever `is_ready` becomes true for a batch.
        """
        self._is_ready = is_ready

    def arrived(self) -> Iterator[Frame]:
        """Iterate over the received batches in order, up to the first missing one; requires the lock of `changed`."""
        return (batch.frame for batch in self._batches)

    def staged(self) -> None:
        """Wake the training loop if the batch that it waits for is now ready; requires the lock of `changed`."""
        if self.starved and self.peek() is not None:
            self._wake()

    # -- in the threads that receive

    def set_end(self, stop: int) -> None:
        """Set the end of an epoch that was not known when its prefetching began."""
        with self.changed:
            self.scheduler.extend(stop)
            self._complete = True
            self.changed.notify_all()
            if self.is_over():
                self._end()

    def is_over(self) -> bool:
        """Return True if no further batches will be received: at the end of the epoch, after an error or `close`."""
        all_here = self._complete and self.scheduler.finished and not self._stays
        return self.closed is not None or all_here or self._error is not None

    @property
    def is_discarded(self) -> bool:
        """True if the epoch was prefetched in vain: the buffer was closed before the epoch started."""
        return self.closed is not None and self.scheduler.is_background

    @property
    def several(self) -> bool:
        """True if the batches come from more than one server."""
        return len(self._failing) > 1

    def on_end(self, interrupt: Callable[[], object]) -> None:
        """Register a callback that interrupts a thread waiting for a response, called when `is_over` becomes true."""
        with self.changed:
            self._on_end.append(interrupt)
            if self.is_over():
                interrupt()

    def ended(self, server: int, interrupt: Callable[[], object]) -> None:
        """Forget a thread at its end, and its server if it has left."""
        with self.changed:
            self._on_end.remove(interrupt)
            self.scheduler.forget_server(server)

    def await_room(self, server: int, k: int, timeout: float) -> bool:
        """Wait until the request for batch k may be sent, or no batches will be received; return False at the timeout.

        While buffered batches exceed the memory limit, the request may be sent only if the training loop cannot
        continue without batch k or a batch of a later response of the same server, `receive` waits for batch k, or the
        server must be sent another request.

        Args:
            server: Number of the server in the scheduler.
            k: Batch number.
            timeout: Maximum wait in seconds.
        """
        scheduler = self.scheduler
        with self.changed:
            return self.changed.wait_for(
                lambda: (
                    not scheduler.over_memory
                    or self.is_done(server)
                    or scheduler.has_work(server, time.monotonic())
                    or k < scheduler.needed
                    or (
                        not self._batches
                        and (k <= scheduler.received or scheduler.is_requested(server, scheduler.received))
                    )
                ),
                self._interval(server, timeout),
            )

    def next_request(self, server: int) -> BatchRequest | None:
        """Return the next request for a server, or None if no request is due."""
        with self.changed:
            wanted = self.scheduler.next_request(server, time.monotonic())
            if self.several:  # the leader of a model-parallel group has another buffer with the same measures
                self.measures.hedges = self.scheduler.hedges
            return self._with_indices(wanted)

    def await_work(self, server: int, timeout: float | None) -> None:
        """Wait up to `timeout` seconds (None: no limit) until batches may be requested from a server."""
        with self.changed:
            self._idle_threads += 1
            self.changed.wait_for(
                lambda: self.is_done(server) or self.scheduler.has_work(server, time.monotonic()),
                self._interval(server, timeout),
            )
            self._idle_threads -= 1

    def _interval(self, server: int, timeout: float | None) -> float | None:
        """Return the seconds until the scheduler must be checked: a request becomes overdue without a notification."""
        may_hedge = not self.scheduler.has_shards and (self.several or self.scheduler.awaits_others(server))
        return HEDGE_LEAST if may_hedge else timeout

    def deliver(self, server: int, url: str, frames: list[Frame], nbytes: int) -> BatchRequest | None:
        """Add the batches of a response to a server's oldest request; return the request for the rest, or None.

        Args:
            server: Number of the server in the scheduler.
            url: URL of the server.
            frames: Received batches, the first that were requested.
            nbytes: Size of the response in bytes.
        """
        now = time.monotonic()
        with self.changed:
            if self.closed is not None:
                return None
            self._responds(url)
            scheduler, first = self.scheduler, self.scheduler.received
            for frame in frames:
                k = frame.batch_id.batch
                if scheduler.is_missing(k):
                    self._early[k] = (frame, url)
                    self._bytes_in += frame.memory
                    if isinstance(frame.content, End):
                        scheduler.shard_ended(k)
            self._check_memory()
            rest = scheduler.arrived(len(frames), nbytes, server, now)
            scheduler.paced(now)
            for k in range(first, scheduler.received):
                self._indices.pop(k, None)
                frame, source = self._early.pop(k)
                self._bytes_ordered += frame.memory
                self._batches.append(Arrived(frame, source, self._bytes_ordered))
            if self._is_ready is not None or self._idle_threads:  # batches may have to be requested elsewhere now
                self.changed.notify_all()
            self.staged()
            if self.is_over():
                self._end()
            return self._with_indices(rest)

    def _check_memory(self) -> None:
        """Update `over_memory`: True while buffered batches exceed the memory limit, so that requests are paused."""
        was_over_memory, self.scheduler.over_memory = (
            self.scheduler.over_memory,
            self._preceding_bytes + self._bytes_in - self._bytes_out > self._memory_limit,
        )
        if was_over_memory and not self.scheduler.over_memory:
            self.changed.notify_all()

    def set_servers(self, urls: Iterable[str]) -> None:
        """Replace the URLs of the servers whose failures end the iteration, if all of them fail."""
        with self.changed:
            self._failing = {url: self._failing.get(url) for url in urls} or self._failing

    def add_server(self) -> int:
        """Return the number of a new server, for the other methods."""
        with self.changed:
            return self.scheduler.add_server()

    def remove_server(self, server: int) -> None:
        """Send no further requests to a server; pending responses are still received."""
        with self.changed:
            self.scheduler.remove_server(server, time.monotonic())
            self.changed.notify_all()

    def is_done(self, server: int) -> bool:
        """Return True if no further batches will be received from a server."""
        return self.is_over() or self.scheduler.has_left(server)

    def joined(self, server: int, url: str, num_workers: int, batch_rate: float | None) -> None:
        """Record that a server has registered the loader, and store the server's number of workers and batch rate."""
        with self.changed:
            self._responds(url)
            self.scheduler.joined(server, num_workers, url, batch_rate, time.monotonic())
            self.changed.notify_all()

    def received(
        self, batches: int, nbytes: int, seconds: float, url: str = "", first: int = -1, arrival: Arrival | None = None
    ) -> None:
        """Add a response to the statistics.

        Args:
            batches: Number of its batches.
            nbytes: Size in bytes.
            seconds: Decoding time in seconds.
            url: URL of the server.
            first: Number of the first batch.
            arrival: Times of the response; None if it was not received from a server.
        """
        with self.changed:
            self.measures.batches += batches
            self.measures.nbytes += nbytes
            self.measures.decode += seconds
            if arrival is not None:
                is_awaited = self.starved and first <= self.scheduler.received < first + batches
                decoded = arrival.last_byte + seconds
                self.measures.arrived(url, arrival, decoded, is_awaited=is_awaited)
                if self.measures.timings.is_on:
                    times = (arrival.first_byte, arrival.last_byte, decoded)
                    self.measures.timings.received(url, first, batches, times)

    def broke(self) -> None:
        """Count a connection that broke or was closed by the server."""
        with self.changed:
            self.measures.reconnects += 1

    def disconnected(self, server: int) -> None:
        """Reschedule the pending requests of a disconnected server."""
        with self.changed:
            self.scheduler.disconnected(server, time.monotonic())
            self.changed.notify_all()

    def give_up(self, url: str, error: Exception) -> bool:
        """Record the final error of a server; end the iteration and return True if no other servers remain."""
        with self.changed:
            if url in self._failing:
                self._failing[url] = error
            return self._end_if_all_failed()

    def _responds(self, url: str) -> None:
        if url in self._failing:
            self._failing[url] = None

    def _end_if_all_failed(self) -> bool:
        """End the iteration if no server is left, with an error that a retry cannot resolve if there is one."""
        errors = [error for error in self._failing.values() if error is not None]
        if len(errors) < len(self._failing):
            return False
        several = ServerUnavailable("; ".join(map(str, errors))) if self.several else errors[0]
        self._error = next((error for error in errors if not isinstance(error, BROKEN)), several)
        self._wake()
        self._end()
        return True

    def fail(self, error: BaseException) -> None:
        """End the iteration with an error, which the training loop raises."""
        with self.changed:
            self._error = error
            self._wake()
            self._end()

    def fail_in_background(self, error: BaseException) -> bool:
        """End the prefetching of an epoch that has not started, and return True; return False if it has started."""
        with self.changed:
            if self.scheduler.is_background:
                self.fail(error)
            return self.scheduler.is_background

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or until `is_over` becomes true."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_over(), seconds)

    def _with_indices(self, wanted: BatchRequest | None) -> BatchRequest | None:
        """Return a request with the encoded indices of the batches, if a client-side sampler has yielded them."""
        if wanted is None or not self._indices:
            return wanted
        return wanted._replace(listed=b"".join(self._indices[k] for k in wanted.batches))

    def _wake(self) -> None:
        """Wake all waiting threads and call the callback."""
        self.changed.notify_all()
        if self._bell.locked():
            self._bell.release()
        if self._callback is not None:
            callback, self._callback = self._callback, None
            self.starved = False
            callback()

    def _end(self) -> None:
        self.changed.notify_all()
        for interrupt in self._on_end:
            interrupt()


def timed_out(timeout: float) -> LoaderTimeout:
    """Create the error for a batch that did not arrive in time, with torch's message."""
    return LoaderTimeout(f"DataLoader timed out after {timeout:g} seconds")
