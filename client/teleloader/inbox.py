"""Where batches arrive: threads that receive put them in, in any order; the training loop takes them in order."""

from __future__ import annotations

import http.client
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from teleloader.measures import Measures
from teleloader.session import HEDGE_LEAST, Range, Session
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


class Inbox:
    """What has arrived of an epoch, and why no more can come.

    Args:
        session: What is asked for; only to be touched under `changed`, but for what the loop's thread says to it.
        urls: The servers that there are.
        measures: Where to count what arrives.
        most_held: Bytes that batches may take which the loop has not taken, before no more is asked for.
        complete: Whether it is known how far the epoch goes, or a server will tell.
        stays: Whether those who receive are needed when all has arrived, until `close`.
    """

    def __init__(
        self, session: Session, urls: list[str], measures: Measures, most_held: int, *, complete: bool, stays: bool
    ) -> None:
        self.session = session
        self.measures = measures
        self.changed = threading.Condition()
        self.closed: BaseException | None = None
        """What to raise where somebody waits for a batch of an iterator that was closed."""
        self._most_held = most_held
        self._bytes_in = 0
        """Of all that has arrived; only the threads that receive touch it, under `changed`."""
        self._bytes_out = 0
        """Of all that the loop has taken; only its thread touches it."""
        self._complete = complete
        self._stays = stays
        self._indices: dict[int, bytes] = {}
        """For an order of the client's own: what the batches hold that have not arrived."""
        self._early: dict[int, tuple[Frame, str]] = {}
        """What has arrived before a batch that comes first."""
        self._batches: deque[tuple[Frame, str]] = deque()
        """What the loop may take, and from which server it is."""
        self._starved = False
        self._callback: Callable[[], object] | None = None
        self._sated = 0
        """How many of those who receive have nothing to ask for."""
        self._failing: dict[str, Exception | None] = dict.fromkeys(urls)
        """Why nothing comes from a server, for those that it is no use to wait for."""
        self._error: Exception | None = None
        self._on_end: list[Callable[[], object]] = []

    # -- in the training loop's thread

    @property
    def head(self) -> Frame | None:
        """What `take` would give, if it has arrived."""
        return self._batches[0][0] if self._batches else None

    def wait(self, timeout: float) -> None:
        """Wait until the next batch, or the failure in its place, has arrived.

        Args:
            timeout: Seconds to wait for it; 0 waits as long as a server is there.

        Raises:
            LoaderTimeout: When it did not come in time; it may come later.
            Exception: Why no more batches can come.
        """
        if not self._batches:
            self._await_batch(timeout)

    def call_when_arrived(self, callback: Callable[[], object] | None) -> None:
        """Have `callback` called, in whichever thread, once `wait` would not wait any more; None takes it back."""
        with self.changed:
            if callback is None:
                self._callback = None
                self._starved = self.session.waiting = False
                return
            # said before it is looked: the other thread looks after it has delivered
            self._callback = callback
            self._starved = self.session.waiting = True
            self.changed.notify_all()
            if self._batches or self._error or self.closed:
                self._wake()

    def take(self) -> tuple[Frame, str]:
        """The batch that has arrived, and the URL of the server that sent it."""
        taken = self._batches.popleft()
        self._bytes_out += taken[0].memory
        self.session.taken += 1
        if self.session.stuffed:
            with self.changed:
                self._weigh()
                self.changed.notify_all()  # of the rest that is waited for, it may be the next now
        if self._sated and self.session.has_room:
            with self.changed:
                self.changed.notify_all()
        return taken

    def coming(self, count: int) -> list[Frame]:
        """As many as have arrived of the `count` batches that the loop may take next."""
        # by index: a deque that grows meanwhile cannot be iterated
        return [self._batches[i][0] for i in range(min(count, len(self._batches)))]

    def feed(self, indices: dict[int, bytes]) -> None:
        """Tell what further batches hold, in an order of the client's own; they are asked for in their turn."""
        if indices:
            with self.changed:
                self._indices.update(indices)
                self.session.extend(max(indices) + 1)
                self.changed.notify_all()

    def complete(self) -> None:
        """No more will be fed."""
        with self.changed:
            self._complete = True
            self.changed.notify_all()

    def close(self, why: BaseException | None = None) -> None:
        """Nobody will take any more."""
        with self.changed:
            self.closed = why or TeleloaderError("this iterator was closed; iter(loader) makes another one")
            self._batches.clear()
            self._wake()
            self._end()

    def _await_batch(self, timeout: float) -> None:
        with self.changed:
            self._weigh()
            self._starved = self.session.waiting = True
            if self._sated and self.session.has_room:
                self.changed.notify_all()
            try:
                arrived = self.changed.wait_for(
                    lambda: self._batches or self._error or self.closed, timeout if timeout > 0 else None
                )
            finally:
                self._starved = self.session.waiting = False
        if self._batches:
            return
        if self._error is not None:
            raise self._error
        if self.closed is not None:
            raise self.closed
        if not arrived:
            raise timed_out(timeout)

    # -- in the threads that receive

    def is_over(self) -> bool:
        """Whether there is nothing more to receive."""
        all_here = self._complete and self.session.finished and not self._stays
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
        session = self.session
        with self.changed:
            return self.changed.wait_for(
                lambda: (
                    not session.stuffed
                    or self.is_over()
                    or session.has_lost
                    or (not self._batches and k <= session.received)
                ),
                timeout,
            )

    def next_range(self, server: int) -> Range | None:
        """What to ask a server for now."""
        with self.changed:
            wanted = self.session.next_range(server, time.monotonic())
            self.measures.hedges = self.session.hedges
            return self._listed(wanted)

    def await_work(self, server: int, timeout: float | None) -> None:
        """Wait until there may be something to ask a server for, or so long."""
        if self.session.shared:  # what another server is late with tells nobody of it
            timeout = HEDGE_LEAST
        with self.changed:
            self._sated += 1
            self.changed.wait_for(lambda: self.is_over() or self.session.has_work(server, time.monotonic()), timeout)
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
            session, first = self.session, self.session.received
            for frame in frames:
                k = frame.address.batch
                if session.is_missing(k):
                    self._early[k] = (frame, url)
                    if isinstance(frame.content, End):
                        session.shard_ended(k)
            self._bytes_in += sum(frame.memory for frame in frames)
            self._weigh()
            rest = session.arrived(len(frames), nbytes, server, now)
            session.paced(now)
            for k in range(first, session.received):
                self._indices.pop(k, None)
                self._batches.append(self._early.pop(k))
            if self._starved and self._batches:
                self._wake()
            if self.is_over():
                self._end()
            return self._listed(rest)

    def _weigh(self) -> None:
        """Find out whether so much is here that no more is to be asked for."""
        was_stuffed, self.session.stuffed = self.session.stuffed, self._bytes_in - self._bytes_out > self._most_held
        if was_stuffed and not self.session.stuffed:
            self.changed.notify_all()

    def joined(self, server: int, url: str, num_workers: int) -> None:
        """A server knows the loader, and has so many workers."""
        with self.changed:
            self._failing[url] = None
            self.session.joined(server, num_workers)

    def decoded(self, seconds: float) -> None:
        """Decoding an answer took so long."""
        with self.changed:
            self.measures.decode += seconds

    def broke(self) -> None:
        """A connection did, or was closed by the server."""
        with self.changed:
            self.measures.reconnects += 1

    def lost(self, server: int) -> None:
        """What a server was asked for must be asked for again."""
        with self.changed:
            self.session.lost(server)
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
        if self._callback is not None:
            callback, self._callback = self._callback, None
            self._starved = self.session.waiting = False
            callback()

    def _end(self) -> None:
        self.changed.notify_all()
        for interrupt in self._on_end:
            interrupt()


def timed_out(timeout: float) -> LoaderTimeout:
    """The error of a batch that did not come in so many seconds, in torch's words."""
    return LoaderTimeout(f"DataLoader timed out after {timeout:g} seconds")
