"""What to ask which server for next, and how far ahead: the client's side of one epoch, without I/O or threads.

Batches are asked for in ranges. Large batches are asked for one by one; many small ones travel in one answer, or the
cost of each answer would be most of the time.

Where several servers host the dataset, whichever has answered is asked for the next range, so a fast one makes more of
the batches. Order is kept, so the loop waits for the slowest answer: when the one that holds it up is out for longer
than most have been, a server that has nothing else to do is asked for the same (a *hedged* ask), and the first answer
counts. A server whose answers come too late in this way is left for a while.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from teleloader.transport.base import Range
from teleloader_shared.messages import READY_BYTES

COVERED_SECONDS: Final = 0.25
"""How long the loop can go on at its pace with what is fetched ahead: hides the network's delay."""
COVERED_BYTES: Final = 128 * 2**20
"""Fetching ahead for `COVERED_SECONDS` does not go beyond so many bytes."""
MAX_WINDOW: Final = 2048
MAX_WORKERS: Final = 1024
"""A server that states more workers is not believed: each is a reason to ask for further batches."""
MAX_AHEAD: Final = 256
"""What a server may make beyond what it is asked for: it stays there while the loop does something else."""

HEDGE_QUANTILE: Final = 0.95
"""A hedged ask goes out when the answer takes longer than this share of the recent ones took."""
HEDGE_LEAST: Final = 0.05
"""Seconds before which no ask is hedged, and how often a server that has nothing to do looks for one to hedge."""
HEDGE_UNKNOWN: Final = 1.0
"""Seconds before which no ask is hedged while it is not known how long answers take."""
RECENT_ANSWERS: Final = 64
MIN_COOLDOWN_S: Final = 1.0
"""Seconds for which a server is left whose answer came too late; doubled each time in a row."""
MAX_COOLDOWN_S: Final = 30.0


@dataclass(slots=True, eq=False)
class _Request:
    """Batches [start, stop) that a server was asked for and has not answered."""

    start: int
    stop: int
    ahead: int
    since: float
    is_hedge: bool = False
    """Whether another server had been asked for the same."""


@dataclass(slots=True)
class _Server:
    num_workers: int
    in_flight: deque[_Request] = field(default_factory=deque)
    """In the order in which they are answered."""
    is_disconnected: bool = False
    cooldown: float = 0.0
    ejected_until: float = -math.inf


class RangeScheduler:
    """The state of one pass through [start, stop) of an epoch.

    Args:
        start: The first batch that is wanted.
        stop: The end of the epoch, or as far as it is known: `extend` and `shard_ended` move it.
        prefetch_factor: Batches to hold ready for each of the servers' workers.
        num_workers: The workers of each server, as far as it is known: `joined` tells more.
        adaptive: Whether to fetch further ahead for a fast loop, and have the server work ahead of that.
        shards: From how many shards of an iterable-style dataset the batches come in turn; 0 for a map-style one.
        servers: How many servers there are to ask; they are numbered from 0.
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
        """The next batch that the loop will take."""
        self.received = start
        """The next batch that has not arrived."""
        self.stop = stop
        self.over_memory = False
        """Whether what has arrived takes so much memory that no more is to be asked for."""
        self.hedges = 0
        """Batches that were asked for once more because another server was late with them."""
        self._asked = start
        """Nothing from here on was ever asked for."""
        self._retries: list[Range] = []
        """What was asked of servers that were lost, in order."""
        self._beyond: set[int] = set()
        """What has arrived of the batches after `received`."""
        self._servers = [_Server(min(num_workers, MAX_WORKERS)) for _ in range(servers)]
        self._prefetch_factor = prefetch_factor
        self.adaptive = adaptive
        self._shards_left = set(range(shards))
        self._shards = shards
        self._frame_bytes = 0.0
        self._latencies: deque[float] = deque(maxlen=RECENT_ANSWERS)
        self._pace = 0.0
        self._pace_mark: tuple[float, int] | None = None

    # -- what there is to ask for

    @property
    def connections(self) -> int:
        """On how many connections to ask a server at once.

        While one answer is being received, the next one is already asked for on another connection. But two requests
        may overtake each other, and a shard that has given a batch cannot give one that comes before it.
        """
        return 1 if self._shards else 2

    @property
    def has_shards(self) -> bool:
        """Whether the batches come from shards, each of which ends for itself."""
        return self._shards > 0

    @property
    def shared(self) -> bool:
        """Whether the batches are spread over several servers."""
        return len(self._servers) > 1

    @property
    def finished(self) -> bool:
        """Whether every batch has arrived."""
        return self.received >= self.stop

    @property
    def window(self) -> int:
        """How many batches may be asked for beyond those that the loop took."""
        least = self._prefetch_factor * sum(max(1, server.num_workers) for server in self._servers)
        if not self.adaptive:
            return least
        covered = self._pace * COVERED_SECONDS
        if self._frame_bytes:
            covered = min(covered, COVERED_BYTES / self._frame_bytes)
        return max(least, min(MAX_WINDOW, math.ceil(covered)))

    @property
    def has_room(self) -> bool:
        """Whether to ask for more now: not for each batch that the loop takes, but for some of them at once."""
        if self.over_memory:
            return False
        room = self.taken + self.window - self._asked
        return self._asked < self.stop and room > 0 and (room >= self.window // 4 or self.stop - self._asked <= room)

    @property
    def has_retries(self) -> bool:
        """Whether something must be asked for again that another server did not send."""
        return bool(self._retries)

    def has_work(self, server: int, now: float) -> bool:
        """Whether `next_range` has something to ask the server for."""
        if self._retries:
            return True
        if self._is_ejected(server, now):
            return False
        return self.has_room or self._to_hedge(server, now) is not None

    def next_range(self, server: int = 0, now: float = 0.0) -> Range | None:
        """What to ask a server for now; None when enough is on its way."""
        while self._retries:
            lost = self._retries.pop(0)
            if (wanted := self._missing(lost)) is not None:
                return self._ask(server, wanted, now)
        if self._is_ejected(server, now):
            return None
        if self.has_room:
            return self._ask(server, self._further(server), now)
        late = self._to_hedge(server, now)
        if late is None:
            return None
        self.hedges += late.stop - late.start
        return self._ask(server, late, now, is_hedge=True)

    def _ask(self, server: int, wanted: Range, now: float, *, is_hedge: bool = False) -> Range:
        self._servers[server].in_flight.append(_Request(wanted.start, wanted.stop, wanted.ahead, now, is_hedge))
        return wanted

    def _further(self, server: int) -> Range:
        """The next batches that nobody was asked for."""
        start = self._asked
        together = self._together
        if self.shared:
            # what follows may be another server's: this one's workers know of no more than what it is asked for; and
            # the others shall have their share of the window
            share = math.ceil(self.window / (self.connections * len(self._servers)))
            together = max(self._servers[server].num_workers, min(together, share))
        self._asked = min(self.stop, self.taken + self.window, start + together)
        return Range(start, self._asked, min(self._ahead, self.stop - self._asked))

    @property
    def _together(self) -> int:
        """How many batches travel in one answer."""
        return max(1, int(READY_BYTES / self._frame_bytes)) if self._frame_bytes else 1

    @property
    def _ahead(self) -> int:
        """How many batches the server shall make beyond those that are asked for."""
        if self.shared:
            return 0
        if self._shards:  # shards make them in turn, so they are asked for one range after another
            return max(0, self.taken + self.window - self._asked)
        if not self.adaptive:
            return 0
        # as many as the next answer can carry: its workers go on while that is asked for
        return max(min(self._together, self.window, MAX_AHEAD), self._servers[0].num_workers)

    def _missing(self, wanted: Range) -> Range | None:
        """What is left of a range without the batches at its beginning that are there, or are not wanted any more."""
        start, stop = max(wanted.start, self.received), min(wanted.stop, self.stop)
        while start in self._beyond:
            start += 1
        return wanted._replace(start=start, stop=stop) if start < stop else None

    # -- several servers

    def _is_out(self, wanted: Range) -> bool:
        """Whether some server is asked for all of it."""
        in_flight = (request for server in self._servers for request in server.in_flight)
        return any(request.start <= wanted.start and wanted.stop <= request.stop for request in in_flight)

    def _to_hedge(self, server: int, now: float) -> Range | None:
        """What is missing of an ask that holds the loop up, if one other server has been at it for too long."""
        holding = [
            (other, request)
            for other, state in enumerate(self._servers)
            for request in state.in_flight
            if request.start <= self.received < request.stop
        ]
        if len(holding) != 1:
            return None
        ((other, late),) = holding
        if other == server or now - late.since < self._patience:
            return None
        return self._missing(Range(late.start, late.stop, 0))

    @property
    def _patience(self) -> float:
        """Seconds after which an ask is hedged."""
        if len(self._latencies) < RECENT_ANSWERS // 4:
            return HEDGE_UNKNOWN
        return max(HEDGE_LEAST, sorted(self._latencies)[int(HEDGE_QUANTILE * len(self._latencies))])

    def _is_ejected(self, server: int, now: float) -> bool:
        """Whether to leave a server that was too slow, while there is another one."""
        return now < self._servers[server].ejected_until and any(
            not other.is_disconnected and now >= other.ejected_until for other in self._servers
        )

    # -- what happened

    def joined(self, server: int, num_workers: int) -> None:
        """A server has told how many workers it has."""
        self._servers[server].num_workers = min(num_workers, MAX_WORKERS)

    def disconnected(self, server: int) -> None:
        """The connection to a server broke: what it has not answered must be asked for again, here or elsewhere."""
        gone = self._servers[server]
        gone.is_disconnected = True
        in_flight = list(gone.in_flight)
        gone.in_flight.clear()
        lost = [self._missing(Range(request.start, request.stop, request.ahead)) for request in in_flight]
        self._retries += [wanted for wanted in lost if wanted is not None and not self._is_out(wanted)]
        self._retries.sort()

    def extend(self, stop: int) -> None:
        """More batches are known to be wanted."""
        self.stop = stop

    def shard_ended(self, k: int) -> None:
        """The shard of batch k has no more; when none has, the epoch ends there."""
        if self._shards_left:
            self._shards_left.discard(k % self._shards)
            if not self._shards_left:
                self.stop = k + 1

    def is_missing(self, k: int) -> bool:
        """Whether batch k has not arrived."""
        return k >= self.received and k not in self._beyond

    def arrived(self, count: int, nbytes: int, server: int = 0, now: float = 0.0) -> Range | None:
        """The first `count` batches of what the server was asked for first arrived, `nbytes` together.

        Returns:
            What is left of the range: to be asked for again, on the same connection and before anything else.
        """
        answering = self._servers[server]
        request = answering.in_flight[0]
        missing = set(range(max(request.start, self.received), request.start + count)) - self._beyond
        self._beyond |= missing
        while self.received in self._beyond:
            self._beyond.remove(self.received)
            self.received += 1
        mean = nbytes / count
        self._frame_bytes = mean if not self._frame_bytes else 0.8 * self._frame_bytes + 0.2 * mean
        self._latencies.append(now - request.since)
        answering.is_disconnected = False
        if missing:
            answering.cooldown = 0.0
        elif not request.is_hedge:
            answering.cooldown = min(MAX_COOLDOWN_S, max(MIN_COOLDOWN_S, 2 * answering.cooldown))
            answering.ejected_until = now + answering.cooldown
        rest = self._missing(Range(request.start + count, request.stop, request.ahead))
        if rest is None:
            answering.in_flight.popleft()
        else:
            request.start, request.stop, request.since = rest.start, rest.stop, now
        return rest

    def paced(self, now: float) -> None:
        """Measure the loop's pace; to be called whenever batches arrive."""
        if self._pace_mark is None:
            self._pace_mark = (now, self.taken)
            return
        then, taken = self._pace_mark
        if now - then >= 0.02:
            self._pace = max((self.taken - taken) / (now - then), 0.7 * self._pace)
            self._pace_mark = (now, self.taken)
