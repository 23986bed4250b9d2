"""Where batches arrive: threads that receive put them in, in any order; the training loop takes them in order."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from teleloader.fetch.scheduler import HEDGE_LEAST, RangeScheduler
from teleloader.stats import Measures
from teleloader.transport.base import Range
from teleloader_shared.codec import End, Frame
from teleloader_shared.errors import (
    CorruptFrame,
    LoaderTimeout,
    ServerUnavailable,
    TeleloaderError,
    UnknownLoader,
)

BROKEN: Final = (OSError, http.client.HTTPException, CorruptFrame, UnknownLoader, ServerUnavailable)
"""What asking again mends."""


class Arrived(NamedTuple):
    """A batch that the loop may take."""

    frame: Frame
    url: str
    """The server that sent it."""
    total: int
    """Bytes of memory of all batches from the first one of the iterator up to this one."""


class ReorderBuffer:
    """What has arrived of an epoch, and why no more can come.

    Args:
        scheduler: What is asked for; only to be touched under `changed`, but for what the loop's thread says to it.
        urls: The servers that there are.
        measures: Where to count what arrives.
        most_held: Bytes that batches may take which the loop has not taken, before no more is asked for.
        complete: Whether it is known how far the epoch goes, or a server will tell.
        stays: Whether those who receive are needed when all has arrived, until `close`.
    """

    def __init__(
        self,
        scheduler: RangeScheduler,
        urls: list[str],
        measures: Measures,
        most_held: int,
        *,
        complete: bool,
        stays: bool,
    ) -> None:
        self.scheduler = scheduler
        self.measures = measures
        self.lock = threading.RLock()
        """Held by its own methods in C, unlike a condition: a signal handler that raises cannot leave it locked."""
        self.changed = threading.Condition(self.lock)
        self.closed: BaseException | None = None
        """What to raise where somebody waits for a batch of an iterator that was closed."""
        self._most_held = most_held
        self._bell = threading.Lock()
        """Locked until the training loop, which waits for it, is to look again."""
        self._bell.acquire()
        self._bytes_in = 0
        """Of all that has arrived; only the threads that receive touch it, under `changed`."""
        self._bytes_ordered = 0
        """Of all that has come to `_batches`."""
        self._bytes_out = 0
        """Of all that the loop has taken; only its thread touches it."""
        self._complete = complete
        self._stays = stays
        self._indices: dict[int, bytes] = {}
        """For an order of the client's own: what the batches hold that have not arrived."""
        self._early: dict[int, tuple[Frame, str]] = {}
        """What has arrived before a batch that comes first."""
        self._batches: deque[Arrived] = deque()
        """What the loop may take, in order."""
        self.starved = False
        """Whether the loop waits for a batch."""
        self._is_ready: Callable[[Frame], bool] | None = None
        """None unless batches are copied to a device before the loop may take them."""
        self._callback: Callable[[], object] | None = None
        self._sated = 0
        """How many of those who receive have nothing to ask for."""
        self._failing: dict[str, Exception | None] = dict.fromkeys(urls)
        """Why nothing comes from a server, for those that it is no use to wait for."""
        self._error: Exception | None = None
        self._on_end: list[Callable[[], object]] = []

    # -- in the training loop's thread

    def peek(self) -> Arrived | None:
        """Return the next batch, or the failure or end in its place; None while the loop cannot take it."""
        if not self._batches:
            return None
        first = self._batches[0]
        return first if self._is_ready is None or self._is_ready(first.frame) else None

    def wait(self, timeout: float) -> None:
        """Wait until the next batch, or the failure in its place, has arrived.

        Args:
            timeout: Seconds to wait for it; 0 waits as long as a server is there.

        Raises:
            LoaderTimeout: When it did not come in time; it may come later.
            Exception: Why no more batches can come.
        """
        if self.peek() is None:
            self._await_batch(timeout)

    def call_when_arrived(self, callback: Callable[[], object] | None) -> None:
        """Have `callback` called, in whichever thread, once `wait` would not wait any more; None takes it back."""
        with self.lock:
            if callback is None:
                self._callback = None
                self.starved = False
                return
            # said before it is looked: the other thread looks after it has delivered
            self._callback = callback
            self.starved = True
            self.changed.notify_all()
            if self.peek() is not None or self._error or self.closed:
                self._wake()

    async def arrival(self) -> None:
        """Wait like `wait`, without holding up the event loop; a task that is cancelled meanwhile takes nothing."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(arrived.set)

        self.call_when_arrived(tell)
        try:
            await arrived.wait()
        finally:
            self.call_when_arrived(None)
        self.wait(0)  # raises what has come in place of a batch

    def take(self, number: int) -> None:
        """Remove the batch that `peek` returned; does nothing if it was removed before.

        Whatever a signal handler interrupts here can be done again: totals are set, and not added to.
        """
        with self.lock:
            if self._batches and self._batches[0].frame.address.batch == number:
                self._bytes_out = self._batches[0].total
                self.scheduler.taken = number + 1
                self._batches.popleft()
            was_over_memory = self.scheduler.over_memory
            if was_over_memory:  # taking a batch only frees memory
                self._weigh()
            if was_over_memory or self._is_ready is not None or (self._sated and self.scheduler.has_room):
                self.changed.notify_all()

    def feed(self, indices: dict[int, bytes]) -> None:
        """Tell what further batches hold, in an order of the client's own; they are asked for in their turn."""
        if indices:
            with self.lock:
                self._indices.update(indices)
                self.scheduler.extend(max(indices) + 1)
                self.changed.notify_all()

    def complete(self) -> None:
        """No more will be fed."""
        with self.lock:
            self._complete = True
            self.changed.notify_all()

    def close(self, why: BaseException | None = None) -> None:
        """Nobody will take any more."""
        with self.lock:
            self.closed = why or TeleloaderError("this iterator was closed; iter(loader) makes another one")
            self._batches.clear()
            self._wake()
            self._end()

    def _await_batch(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout if timeout > 0 else None
        try:
            while True:
                with self.lock:
                    self._weigh()
                    self.starved = True
                    if self._is_ready is not None or (self._sated and self.scheduler.has_room):
                        self.changed.notify_all()
                    if self.peek() is not None:
                        return
                    if self._error is not None:
                        raise self._error
                    if self.closed is not None:
                        raise self.closed
                left = -1 if deadline is None else deadline - time.monotonic()
                if deadline is not None and left <= 0:
                    raise timed_out(timeout)
                # not a condition: a signal handler that raised in its wait() could leave the lock in any state
                self._bell.acquire(timeout=left)
        finally:
            self.starved = False

    # -- in the thread that copies to a device

    def stage(self, is_ready: Callable[[Frame], bool]) -> None:
        """Let the loop take a batch only once `is_ready` returns True for it; call `staged` when that may change."""
        self._is_ready = is_ready

    def arrived(self) -> Iterator[Frame]:
        """Iterate over the batches that have arrived in order; call it under `changed`."""
        return (batch.frame for batch in self._batches)

    def staged(self) -> None:
        """Wake the loop if it waits for a batch that is ready now; call it under `changed`."""
        if self.starved and self.peek() is not None:
            self._wake()

    # -- in the threads that receive

    def is_over(self) -> bool:
        """Whether there is nothing more to receive."""
        all_here = self._complete and self.scheduler.finished and not self._stays
        return self.closed is not None or all_here or self._error is not None

    @property
    def several(self) -> bool:
        """Whether there is more than one server."""
        return len(self._failing) > 1

    def on_end(self, interrupt: Callable[[], object]) -> None:
        """Have `interrupt` called when there is nothing more to receive, to end a thread that waits for it."""
        with self.changed:
            self._on_end.append(interrupt)
            if self.is_over():
                interrupt()

    def await_room(self, k: int, timeout: float) -> bool:
        """Wait until the rest of an answer, from batch k on, may be asked for, or so long; whether it may.

        That is when the loop has taken enough, or when it waits for just that batch.
        """
        scheduler = self.scheduler
        with self.changed:
            return self.changed.wait_for(
                lambda: (
                    not scheduler.over_memory
                    or self.is_over()
                    or scheduler.has_retries
                    or (not self._batches and k <= scheduler.received)
                ),
                timeout,
            )

    def next_range(self, server: int) -> Range | None:
        """What to ask a server for now."""
        with self.changed:
            wanted = self.scheduler.next_range(server, time.monotonic())
            self.measures.hedges = self.scheduler.hedges
            return self._listed(wanted)

    def await_work(self, server: int, timeout: float | None) -> None:
        """Wait until there may be something to ask a server for, or so long."""
        if self.scheduler.shared:  # what another server is late with tells nobody of it
            timeout = HEDGE_LEAST
        with self.changed:
            self._sated += 1
            self.changed.wait_for(lambda: self.is_over() or self.scheduler.has_work(server, time.monotonic()), timeout)
            self._sated -= 1

    def deliver(self, server: int, url: str, frames: list[Frame], nbytes: int) -> Range | None:
        """The first batches of what a server was asked for have arrived; what is left to ask for of it."""
        now = time.monotonic()
        with self.changed:
            if self.closed is not None:
                return None
            self._failing[url] = None
            self.measures.batches += len(frames)
            self.measures.nbytes += nbytes
            scheduler, first = self.scheduler, self.scheduler.received
            for frame in frames:
                k = frame.address.batch
                if scheduler.is_missing(k):
                    self._early[k] = (frame, url)
                    self._bytes_in += frame.memory
                    if isinstance(frame.content, End):
                        scheduler.shard_ended(k)
            self._weigh()
            rest = scheduler.arrived(len(frames), nbytes, server, now)
            scheduler.paced(now)
            for k in range(first, scheduler.received):
                self._indices.pop(k, None)
                frame, source = self._early.pop(k)
                self._bytes_ordered += frame.memory
                self._batches.append(Arrived(frame, source, self._bytes_ordered))
            if self._is_ready is not None:
                self.changed.notify_all()
            self.staged()
            if self.is_over():
                self._end()
            return self._listed(rest)

    def _weigh(self) -> None:
        """Find out whether so much is here that no more is to be asked for."""
        was_over_memory, self.scheduler.over_memory = (
            self.scheduler.over_memory,
            self._bytes_in - self._bytes_out > self._most_held,
        )
        if was_over_memory and not self.scheduler.over_memory:
            self.changed.notify_all()

    def joined(self, server: int, url: str, num_workers: int) -> None:
        """A server knows the loader, and has so many workers."""
        with self.changed:
            self._failing[url] = None
            self.scheduler.joined(server, num_workers)

    def decoded(self, seconds: float) -> None:
        """Decoding an answer took so long."""
        with self.changed:
            self.measures.decode += seconds

    def broke(self) -> None:
        """A connection did, or was closed by the server."""
        with self.changed:
            self.measures.reconnects += 1

    def disconnected(self, server: int) -> None:
        """What a server was asked for must be asked for again."""
        with self.changed:
            self.scheduler.disconnected(server)
            self.changed.notify_all()

    def give_up(self, url: str, error: Exception) -> bool:
        """It is no use to wait for a server any longer; False when there is another one."""
        with self.changed:
            self._failing[url] = error
            if not all(self._failing.values()):
                return False
            final = (error for error in self._failing.values() if not isinstance(error, BROKEN))
            if self.several:
                error = ServerUnavailable("; ".join(map(str, self._failing.values())))
            self._error = next(final, error)
            self._wake()
            self._end()
            return True

    def fail(self, error: Exception) -> None:
        """Raise `error` in the training loop: nothing more can be received."""
        with self.changed:
            self._error = error
            self._wake()
            self._end()

    def sleep(self, seconds: float) -> None:
        """Wait so long, or until there is nothing more to receive."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_over(), seconds)

    def _listed(self, wanted: Range | None) -> Range | None:
        """With what the batches hold, for an order of the client's own: once they are here it is forgotten."""
        if wanted is None or not self._indices:
            return wanted
        return wanted._replace(listed=b"".join(self._indices[k] for k in range(wanted.start, wanted.stop)))

    def _wake(self) -> None:
        """Tell whoever waits, in this thread or another."""
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
    """The error of a batch that did not come in so many seconds, in torch's words."""
    return LoaderTimeout(f"DataLoader timed out after {timeout:g} seconds")
