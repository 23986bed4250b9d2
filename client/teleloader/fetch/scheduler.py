"""Scheduling of batch requests: next range, server and prefetch window. No I/O, no threads.

A request is for a range of batches: one large batch, or many small ones, because the overhead of a response would
otherwise dominate.

With several servers, the client sends a server its next request when the server has responded, so a faster server
computes more batches. Batches are delivered in order, so the training loop waits for the slowest response. If this
response is overdue, the client sends the same request to an idle server (a *hedged* request), and uses the first
response. If the idle server responds first, the server of the original request is ejected for a cooldown.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from teleloader.transport.range import Range
from teleloader_shared.messages import READY_BYTES

COVERED_SECONDS: Final = 0.25
"""Training time that the prefetch window covers, in seconds, to hide the network's latency."""
COVERED_BYTES: Final = 128 * 2**20
"""Maximum size of the batches that are prefetched for `COVERED_SECONDS`."""
MAX_WINDOW: Final = 2048
MAX_WORKERS: Final = 1024
"""Upper limit for the number of workers that a server reports, since each worker enlarges the prefetch window."""
MAX_AHEAD: Final = 256
"""Maximum number of batches that a server computes beyond the requested ones."""

HEDGE_QUANTILE: Final = 0.95
"""Quantile of the recent latencies after which a request is hedged."""
HEDGE_LEAST: Final = 0.05
"""Minimum seconds before a request is hedged, and interval at which idle servers check for overdue requests."""
HEDGE_UNKNOWN: Final = 1.0
"""Seconds before a request is hedged while too few latencies are known."""
RECENT_RESPONSES: Final = 64
MIN_COOLDOWN_S: Final = 1.0
"""Seconds for which a slow server is ejected; doubled for each consecutive slow response."""
MAX_COOLDOWN_S: Final = 30.0


@dataclass(slots=True, eq=False)
class _Request:
    """Pending request for batches [start, stop)."""

    start: int
    stop: int
    ahead: int
    since: float
    is_hedge: bool = False
    """True if the same batches were already requested from another server."""


@dataclass(slots=True)
class _Server:
    num_workers: int
    in_flight: deque[_Request] = field(default_factory=deque)
    """Pending requests, in the order of their responses."""
    is_disconnected: bool = False
    cooldown: float = 0.0
    ejected_until: float = -math.inf


class RangeScheduler:
    """Scheduler of requests for the batches [start, stop) of an epoch, on one or several servers.

    Args:
        start: Number of the first batch.
        stop: End of the epoch, as far as known; changed by `extend` and `shard_ended`.
        prefetch_factor: Batches to prefetch for each of the servers' workers.
        num_workers: Workers of each server, 0 if unknown; updated by `joined`.
        adaptive: Whether to enlarge the window for a fast training loop, and let the server compute batches beyond it.
        shards: Number of shards of an iterable-style dataset, which deliver batches in turn; 0 for map-style.
        servers: Number of servers; they are numbered from 0.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        prefetch_factor: int,
        num_workers: int = 0,
        *,
        adaptive: bool = True,
        shards: int = 0,
        servers: int = 1,
    ) -> None:
        self.taken = start
        """Number of the next batch that the training loop receives."""
        self.received = start
        """Number of the first batch that has not arrived."""
        self.stop = stop
        self.over_memory = False
        """True while buffered batches exceed the memory limit, so that requests are paused."""
        self.needed = 0
        """Number of batches that are requested regardless of the memory limit and of the prefetch window."""
        self.hedges = 0
        """Number of batches that were requested from a second server because the first one was slow."""
        self._requested = start
        """Number of the first batch that was never requested."""
        self._retries: list[Range] = []
        """Ranges to request again, because their servers disconnected; sorted."""
        self._received_beyond: set[int] = set()
        """Numbers of the batches after `received` that have arrived."""
        self._servers = [_Server(min(num_workers, MAX_WORKERS)) for _ in range(servers)]
        self._prefetch_factor = prefetch_factor
        self.adaptive = adaptive
        self._shards_left = set(range(shards))
        self._shards = shards
        self._frame_bytes = 0.0
        self._latencies: deque[float] = deque(maxlen=RECENT_RESPONSES)
        self._pace = 0.0
        self._pace_mark: tuple[float, int] | None = None

    # -- selection of requests

    @property
    def connections(self) -> int:
        """Maximum number of concurrent connections per server.

        A second connection carries the next request while a response is received on the first one. Shards use only one,
        because two requests may overtake each other, and a shard cannot go back to an earlier batch.
        """
        return 1 if self._shards else 2

    @property
    def has_shards(self) -> bool:
        """True if the dataset is iterable-style: its shards deliver batches in turn, and can have different lengths."""
        return self._shards > 0

    @property
    def shared(self) -> bool:
        """True if several servers share the batches."""
        return len(self._servers) > 1

    @property
    def finished(self) -> bool:
        """True if all batches of the epoch have arrived."""
        return self.received >= self.stop

    @property
    def window(self) -> int:
        """Prefetch window: maximum number of requested batches that the training loop has not received."""
        least = self._prefetch_factor * sum(max(1, server.num_workers) for server in self._servers)
        if not self.adaptive:
            return least
        covered = self._pace * COVERED_SECONDS
        if self._frame_bytes:
            covered = min(covered, COVERED_BYTES / self._frame_bytes)
        return max(least, min(MAX_WINDOW, math.ceil(covered)))

    @property
    def has_room(self) -> bool:
        """True if the prefetch window has room for another request, which covers several batches."""
        if self._requested < min(self.needed, self.stop):
            return True
        if self.over_memory:
            return False
        room, rest = self.taken + self.window - self._requested, self.stop - self._requested
        return rest > 0 and room > 0 and (room >= self.window // 4 or rest <= room)

    @property
    def has_retries(self) -> bool:
        """True if ranges must be requested again, because their servers disconnected."""
        return bool(self._retries)

    def has_work(self, server: int, now: float) -> bool:
        """Return True if `next_range` would return a range of batches to request from a server."""
        if self._retries:
            return True
        if self._is_ejected(server, now):
            return False
        return self.has_room or self._overdue_range(server, now) is not None

    def next_range(self, server: int = 0, now: float = 0.0) -> Range | None:
        """Return the next range to request from a server, or None if enough requests are pending."""
        while self._retries:
            lost = self._retries.pop(0)
            if (wanted := self._missing(lost)) is not None:
                return self._add_request(server, wanted, now)
        if self._is_ejected(server, now):
            return None
        if self.has_room:
            return self._add_request(server, self._new_range(server), now)
        overdue = self._overdue_range(server, now)
        if overdue is None:
            return None
        self.hedges += overdue.stop - overdue.start
        return self._add_request(server, overdue, now, is_hedge=True)

    def _add_request(self, server: int, wanted: Range, now: float, *, is_hedge: bool = False) -> Range:
        self._servers[server].in_flight.append(_Request(wanted.start, wanted.stop, wanted.ahead, now, is_hedge))
        return wanted

    def _new_range(self, server: int) -> Range:
        """Return a range of batches that were never requested."""
        start = self._requested
        together = self._batches_together
        if self.shared:
            # the next range may go to another server, so this range must occupy all workers of this server, and still
            # leave the other servers their share of the window
            share = math.ceil(self.window / (self.connections * len(self._servers)))
            together = max(self._servers[server].num_workers, min(together, share))
        self._requested = min(self.stop, max(self.taken + self.window, self.needed), start + together)
        return Range(start, self._requested, min(self._ahead, self.stop - self._requested))

    @property
    def _batches_together(self) -> int:
        """Number of batches in one response."""
        return max(1, int(READY_BYTES / self._frame_bytes)) if self._frame_bytes else 1

    @property
    def _ahead(self) -> int:
        """Number of batches that the server computes beyond the requested ones."""
        if self.shared:
            return 0
        if self._shards:  # shards deliver in turn, so only one range is requested at a time
            return max(0, self.taken + self.window - self._requested)
        if not self.adaptive:
            return 0
        # as many as the next response can carry, so that the workers stay busy until the next request arrives
        return max(min(self._batches_together, self.window, MAX_AHEAD), self._servers[0].num_workers)

    def _missing(self, wanted: Range) -> Range | None:
        """Return the part of a range that still has to be received, or None if everything has arrived."""
        start, stop = max(wanted.start, self.received), min(wanted.stop, self.stop)
        while start in self._received_beyond:
            start += 1
        return wanted._replace(start=start, stop=stop) if start < stop else None

    # -- several servers

    def _is_pending(self, wanted: Range) -> bool:
        """Return True if a pending request covers the whole range."""
        in_flight = (request for server in self._servers for request in server.in_flight)
        return any(request.start <= wanted.start and wanted.stop <= request.stop for request in in_flight)

    def _overdue_range(self, server: int, now: float) -> Range | None:
        """Return the range to hedge, or None: the rest of another server's request, if it is overdue and awaited."""
        holding = [
            (other, request)
            for other, state in enumerate(self._servers)
            for request in state.in_flight
            if request.start <= self.received < request.stop
        ]
        if len(holding) != 1:
            return None
        ((other, overdue),) = holding
        if other == server or now - overdue.since < self._patience:
            return None
        return self._missing(Range(overdue.start, overdue.stop, 0))

    @property
    def _patience(self) -> float:
        """Seconds after which a request is hedged."""
        if len(self._latencies) < RECENT_RESPONSES // 4:
            return HEDGE_UNKNOWN
        return max(HEDGE_LEAST, sorted(self._latencies)[int(HEDGE_QUANTILE * len(self._latencies))])

    def _is_ejected(self, server: int, now: float) -> bool:
        """Return True if the server is ejected for a cooldown and another one is available."""
        return now < self._servers[server].ejected_until and any(
            not other.is_disconnected and now >= other.ejected_until for other in self._servers
        )

    # -- events

    def joined(self, server: int, num_workers: int) -> None:
        """Record the worker count that a server reports."""
        self._servers[server].num_workers = min(num_workers, MAX_WORKERS)

    def disconnected(self, server: int) -> None:
        """Reschedule the pending requests of a server whose connection broke."""
        gone = self._servers[server]
        gone.is_disconnected = True
        in_flight = list(gone.in_flight)
        gone.in_flight.clear()
        lost = [self._missing(Range(request.start, request.stop, request.ahead)) for request in in_flight]
        self._retries += [wanted for wanted in lost if wanted is not None and not self._is_pending(wanted)]
        self._retries.sort()

    def extend(self, stop: int) -> None:
        """Set the end of the epoch, as far as known, to batch `stop` (exclusive)."""
        self.stop = stop

    def shard_ended(self, k: int) -> None:
        """Record that the shard of batch k has ended; the epoch ends with the last shard."""
        if self._shards_left:
            self._shards_left.discard(k % self._shards)
            if not self._shards_left:
                self.stop = k + 1

    def is_missing(self, k: int) -> bool:
        """Return True if batch k has not arrived."""
        return k >= self.received and k not in self._received_beyond

    def arrived(self, count: int, nbytes: int, server: int = 0, now: float = 0.0) -> Range | None:
        """Record that the first `count` batches (`nbytes` bytes together) of a server's oldest request have arrived.

        Returns:
            The rest of the range, which must be the next request on the same connection; None if nothing is left.
        """
        responding = self._servers[server]
        request = responding.in_flight[0]
        missing = set(range(max(request.start, self.received), request.start + count)) - self._received_beyond
        self._received_beyond |= missing
        while self.received in self._received_beyond:
            self._received_beyond.remove(self.received)
            self.received += 1
        mean = nbytes / count
        self._frame_bytes = mean if not self._frame_bytes else 0.8 * self._frame_bytes + 0.2 * mean
        self._latencies.append(now - request.since)
        responding.is_disconnected = False
        if missing:
            responding.cooldown = 0.0
        elif not request.is_hedge:
            responding.cooldown = min(MAX_COOLDOWN_S, max(MIN_COOLDOWN_S, 2 * responding.cooldown))
            responding.ejected_until = now + responding.cooldown
        rest = self._missing(Range(request.start + count, request.stop, request.ahead))
        if rest is None:
            responding.in_flight.popleft()
        else:
            request.start, request.stop, request.since = rest.start, rest.stop, now
        return rest

    def paced(self, now: float) -> None:
        """Update the estimated batch rate of the training loop; called whenever batches arrive."""
        if self._pace_mark is None:
            self._pace_mark = (now, self.taken)
            return
        then, taken = self._pace_mark
        if now - then >= 0.02:
            self._pace = max((self.taken - taken) / (now - then), 0.7 * self._pace)
            self._pace_mark = (now, self.taken)
