"""Scheduling of batch requests: next batches, server and prefetch window. No I/O, no threads.

A request is for one large batch, or for many small ones, because the overhead of a response would otherwise dominate.

With several servers, the client sends each server the requests for the blocks of batches that are assigned to it (see
`assignment`): all clients of an epoch request a batch from the same server, which computes it once. Batches are
delivered in order, so the training loop waits for the slowest response. If this response is overdue, the client sends
the same request to an idle server (a *hedged* request), and uses the first response. If the idle server responds first,
the server of the original request is ejected for a cooldown.

The shards of an iterable-style dataset are divided among servers for the whole epoch (`divide`): each server is sent
requests only for the batches of its shards, in order.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from teleloader.fetch.assignment import BLOCK, BlockAssignment, Member
from teleloader.transport.request import BatchRequest
from teleloader_shared.messages import READY_BYTES
from teleloader_shared.ranges import MAX_RANGES, BatchRanges
from teleloader_shared.rendezvous import Capacity

COVERED_SECONDS: Final = 0.25
"""Training time that the prefetch window covers, in seconds, to hide the network's latency."""
COVERED_BYTES: Final = 128 * 2**20
"""Maximum size of the batches that are prefetched for `COVERED_SECONDS`."""
MAX_WINDOW: Final = 2048
SHARED_TURNOVER: Final = 4
"""Prefetch window with several servers, as a multiple of the batches that the training loop takes during a response."""
TURNOVER_DECAY: Final = 0.98
"""Factor by which this number may fall from one response to the next."""
REGISTRATION_S: Final = 0.5
"""Seconds after the first request in which nothing is prefetched if initial servers have not registered the loader."""
MAX_WORKERS: Final = 1024
"""Upper limit for the number of workers that a server reports, since each worker enlarges the prefetch window."""
MIN_BATCH_RATE: Final = 1e-6
MAX_BATCH_RATE: Final = 1e9
"""Limits of the batches/s that a server reports; other values count as unknown."""
RESPONSES_AHEAD: Final = 4
"""Number of responses for which a server computes batches beyond the requested ones, so that its workers stay busy."""
MAX_AHEAD: Final = 1024
"""Maximum number of batches that a server computes beyond the requested ones."""

HEDGE_QUANTILE: Final = 0.95
"""Quantile of the recent latencies after which a request is hedged."""
HEDGE_FACTOR: Final = 1.5
"""Factor of that latency after which a request is hedged: each batch that is computed twice delays other batches."""
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
    """Pending request."""

    wanted: BatchRequest
    """Batches that have not arrived."""
    since: float
    taken: int
    """Number of the next batch of the training loop at this time."""
    is_hedge: bool = False
    """True if the same batches were already requested from another server."""


@dataclass(slots=True)
class _Server:
    num_workers: int = 0
    member: Member | None = None
    """None until the server has registered the loader, and after it has left."""
    has_left: bool = False
    """True if no further request is sent to it."""
    in_flight: deque[_Request] = field(default_factory=deque)
    """Pending requests, in the order of their responses."""
    responded_at: float = -math.inf
    is_disconnected: bool = False
    requested: int = 0
    """If shards are divided: number of the first batch of its shards that was never requested, or one before it."""
    cooldown: float = 0.0
    ejected_until: float = -math.inf

    @property
    def batch_seconds(self) -> float:
        """Seconds of a worker per batch, as the server reports them; 0 if unknown."""
        rate = None if self.member is None else self.member.capacity.batch_rate
        return max(1, self.num_workers) / rate if rate else 0.0


class RangeScheduler:
    """Scheduler of requests for the batches [start, stop) of an epoch, on one or several servers.

    Servers may join and leave at any time. Server 0 exists from the beginning; `add_server` adds further ones.

    Args:
        start: Number of the first batch.
        stop: End of the epoch, as far as known; changed by `extend` and `shard_ended`.
        prefetch_factor: Batches to prefetch for each of the servers' workers.
        num_workers: Workers of server 0, 0 if unknown; updated by `joined`.
        adaptive: Whether to enlarge the window for a fast training loop, and let the server compute batches beyond it.
        shards: Number of shards of an iterable-style dataset, which deliver batches in turn; 0 for map-style.
        name: Name of server 0 that is the same for all clients.
        batch_rate: Batches/s that server 0 can compute, as it reports; None if unknown.
        loader: Key of the loader.
        epoch: Number of the epoch.
        is_background: Whether the training loop has not started the epoch. Server 0 has then not registered the loader,
            and nothing is requested before `approach`.
        has_lists: Whether requests contain index lists. In the background, one request then has all batches of the
            prefetch window, because the server computes no batches beyond it.
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
        name: str = "",
        batch_rate: float | None = None,
        loader: str = "",
        epoch: int = 0,
        is_background: bool = False,
        has_lists: bool = False,
    ) -> None:
        self.is_background = is_background
        """True until the training loop starts the epoch."""
        self.start = start
        self.taken = start
        """Number of the next batch that the training loop receives; lower before it starts the epoch, so that the
        prefetch window extends over both epochs."""
        self.received = start
        """Number of the first batch that has not arrived."""
        self.stop = stop
        self.over_memory = is_background
        """True while buffered batches exceed the memory limit, so that requests are paused."""
        self.needed = 0
        """Number of batches that are requested regardless of the memory limit and of the prefetch window."""
        self.hedges = 0
        """Number of batches that were requested from a second server because the first one was slow."""
        self._requested = start
        """Number of the first batch that was neither requested nor assigned to a server."""
        self._retries: list[BatchRequest] = []
        """Requests to send again, because the only server disconnected; sorted."""
        self._received_beyond: set[int] = set()
        """Numbers of the batches after `received` that have arrived."""
        self._servers: dict[int, _Server] = {}
        self._members = 0
        """Number of servers that have registered the loader and not left."""
        self._workers = 0
        """Their workers; a server without workers counts as one."""
        self._joining: set[int] = set()
        """Servers that were added before the first request and have not registered the loader. Until they have, the
        client does not know to which servers the batches are assigned, and would request them elsewhere than others."""
        self._joining_until = math.inf
        self._turnover = 0.0
        """Maximum number of batches that the training loop has taken during a recent response."""
        self._blocks = BlockAssignment(loader, epoch)
        self._prefetch_factor = prefetch_factor
        self.adaptive = adaptive
        self._has_lists = has_lists
        self._shards = shards
        self._shard_ends: dict[int, int] = {}
        """Number of the first batch after the end of each shard that has ended."""
        self._groups = 1
        """Number of servers among which the shards are divided."""
        self._frame_bytes = 0.0
        self._latencies: deque[float] = deque(maxlen=RECENT_RESPONSES)
        self._waits_since: float | None = None
        """Time since which `received` is the next batch that has not arrived; None before the first request."""
        self._pace = 0.0
        self._pace_mark: tuple[float, int] | None = None
        server = self.add_server()
        if not self.is_background:
            self.joined(server, num_workers, name, batch_rate)

    # -- selection of requests

    @property
    def connections(self) -> int:
        """Maximum number of concurrent connections per server.

        A second connection carries the next request while a response is received on the first one. Shards use only one,
        because two requests may overtake each other, and a shard cannot go back to an earlier batch. In the background,
        responses need not be fast, and the one connection is replaced when the training loop starts the epoch.
        """
        return 1 if self._shards or self.is_background else 2

    @property
    def has_shards(self) -> bool:
        """True if the dataset is iterable-style: its shards deliver batches in turn, and can have different lengths."""
        return self._shards > 0

    @property
    def shared(self) -> bool:
        """True if several servers share the batches, and any server may compute any batch."""
        return self._members > 1 and not self._shards

    @property
    def requested_all(self) -> bool:
        """True if all batches of the epoch have been requested, or assigned to a server."""
        return self._requested >= self.stop

    @property
    def finished(self) -> bool:
        """True if all batches of the epoch have arrived."""
        return self.received >= self.stop

    @property
    def window(self) -> int:
        """Prefetch window: maximum number of requested batches that the training loop has not received."""
        if self._groups > 1:  # twice, because each server must have work while the loop waits for another one
            return 2 * self._prefetch_factor * self._shards
        least = self.base_window
        if not self.adaptive:
            return least
        if self._joining:
            return BLOCK
        if self.shared:  # twice, because blocks of one server are not evenly spaced
            # a slow loop needs no more than with one server; for a fast one, the turnover soon equals the window
            least = min(2 * least, max(2 * least // self._members, math.ceil(SHARED_TURNOVER * self._turnover)))
        covered = self._pace * COVERED_SECONDS
        if self._frame_bytes:
            covered = min(covered, COVERED_BYTES / self._frame_bytes)
        return max(least, min(MAX_WINDOW, math.ceil(covered)))

    @property
    def base_window(self) -> int:
        """Prefetch window of a slow training loop: `prefetch_factor` batches for each worker."""
        return self._prefetch_factor * max(1, self._workers)

    @property
    def has_room(self) -> bool:
        """True if the prefetch window has room for another request, which covers several batches."""
        if self._requested < min(self.needed, self.stop):
            return True
        if self.over_memory:
            return False
        room, rest = self.taken + self.window - self._requested, self.stop - self._requested
        return rest > 0 and room > 0 and (room >= self.window // 4 or rest <= room)

    def has_work(self, server: int, now: float) -> bool:
        """Return True if `next_request` would return a request for a server."""
        if self._servers[server].has_left:
            return False
        if self._groups > 1:
            return not self._servers[server].in_flight and bool(self._batches_of_group(server))
        if self._next_retry() is not None:
            return True
        if self._is_ejected(server, now):
            return False
        return self._has_new_batches(server, now) or self._overdue_request(server, now) is not None

    def next_request(self, server: int = 0, now: float = 0.0) -> BatchRequest | None:
        """Return the next request for a server, or None if enough requests are pending."""
        if self._servers[server].has_left:
            return None
        if self._waits_since is None:
            self._waits_since, self._joining_until = now, now + REGISTRATION_S
        if self._groups > 1:
            batches = self._batches_of_group(server)
            return self._add_request(server, self._request_of_group(server, batches), now) if batches else None
        lost = self._next_retry()
        if lost is not None:
            self._retries.remove(lost)
            return self._add_request(server, lost, now)
        if self._is_ejected(server, now):
            return None
        if self._has_new_batches(server, now):
            return self._add_request(server, self._new_request(server), now)
        overdue = self._overdue_request(server, now)
        if overdue is None:
            return None
        holder = self._blocks.holder(overdue.batches.start)
        if holder is not None:
            return self._add_request(server, BatchRequest(self._blocks.take(holder, 1)), now)
        self.hedges += len(overdue.batches)
        return self._add_request(server, overdue, now, is_hedge=True)

    def _add_request(self, server: int, wanted: BatchRequest, now: float, *, is_hedge: bool = False) -> BatchRequest:
        self._servers[server].in_flight.append(_Request(wanted, now, self.taken, is_hedge))
        return wanted

    def _has_new_batches(self, server: int, now: float) -> bool:
        """Return True if `_new_request` would return a request for the server."""
        if now >= self._joining_until:
            self._joining.clear()
        if self.has_room and self.shared:
            stop = min(self.stop, max(self.taken + self.window, self.needed))
            self._blocks.assign(self._requested, stop, self._usable(now))
            self._requested = stop
        queue = self._blocks.queue(server)
        if not queue:
            return self.has_room
        is_awaited = queue[0].start <= self.received == self.taken or queue[0].start < self.needed
        return is_awaited or not self.over_memory

    def _new_request(self, server: int) -> BatchRequest:
        """Return a request for batches that were never requested, or whose server disconnected."""
        if self._blocks.queue(server):
            least = self._servers[server].num_workers + BLOCK - 1  # a block alone would not keep all workers busy
            return BatchRequest(self._blocks.take(server, max(self._batches_together, least)))
        start = self._requested
        self._requested = min(self.stop, max(self.taken + self.window, self.needed), start + self._batches_together)
        batches = BatchRanges(range(start, self._requested))
        return BatchRequest(batches, min(self._ahead(server), self.stop - self._requested))

    @property
    def _batches_together(self) -> int:
        """Number of batches in one response."""
        if self._has_lists and self.is_background:
            return self.window
        return max(1, int(READY_BYTES / self._frame_bytes)) if self._frame_bytes else 1

    def _ahead(self, server: int) -> int:
        """Return the number of batches that the server computes beyond the requested ones."""
        if self._shards or self.is_background:  # only one request is sent at a time: for all workers, but not more
            return max(0, self.taken + self.window - self._requested)
        if not self.adaptive or self._joining:
            return 0
        small = RESPONSES_AHEAD * (self._batches_together - 1)  # 0 if a response carries one batch, which may be large
        most = min(small, self.window, MAX_AHEAD)
        return max(most, self._servers[server].num_workers)

    # -- shards on several servers

    def divide(self, groups: int) -> None:
        """Divide the shards among servers 0 to `groups` - 1: shard j belongs to server j mod `groups`.

        Must be called before the first request. The batches of a server that disconnects are requested again from the
        same server: its caller moves it to another machine.
        """
        self._groups = groups
        while len(self._servers) < groups:
            self.add_server()
        for server in self._servers.values():
            server.requested = self.taken

    def _batches_of_group(self, server: int) -> list[int]:
        """Return the batches of a server's shards that may be requested now."""
        stop, first = self.stop, self._servers[server].requested
        if self.over_memory:
            stop = min(stop, max(self.needed, self.received + 1 if self.received == self.taken else 0))
        else:
            stop = min(stop, max(self.needed, self.taken + self.window))
        return [
            k for k in range(first, stop) if k % self._shards % self._groups == server and self.is_missing(k)
        ][:MAX_RANGES]  # fmt: skip

    def _request_of_group(self, server: int, batches: list[int]) -> BatchRequest:
        self._servers[server].requested = max(batches[-1] + 1, self._servers[server].requested)
        return BatchRequest(BatchRanges.of(batches))

    def _missing(self, wanted: BatchRequest) -> BatchRequest | None:
        """Return a request without its first batches that have arrived, or None if all have."""
        first = next(filter(self.is_missing, wanted.batches), self.stop)
        rest = wanted.batches.within(first, self.stop)
        return wanted._replace(batches=rest) if rest else None

    def _next_retry(self) -> BatchRequest | None:
        """Return the first request of a disconnected server that has to be sent again, or None."""
        missing = [self._missing(lost) for lost in self._retries]
        self._retries = [wanted for wanted in missing if wanted is not None]
        return self._retries[0] if self._retries else None

    # -- several servers

    def _is_preferred(self, server: int, k: int, usable: set[int]) -> bool:
        """Return True unless an idle server precedes this one in the ranking of batch k, and will request it."""
        for other in self._blocks.ranking(k) if len(usable) > 1 else ():
            if other == server:
                return True
            if other in usable and not self._servers[other].in_flight:
                return False
        return True

    def _overdue_request(self, server: int, now: float) -> BatchRequest | None:
        """Return the request to hedge, or None: the rest of another server's, if it is overdue and awaited."""
        if self.taken < self.received or self._waits_since is None or now - self._waits_since < HEDGE_LEAST:
            return None
        if self.is_background:  # the training loop does not wait
            return None
        held = [
            (other, max(request.since, state.responded_at), request.wanted._replace(ahead=0))
            for other, state in self._servers.items()
            for request in state.in_flight
            if request.wanted.batches.place(self.received) is not None
        ]
        queued = None if held else self._blocks.holder(self.received)
        if queued is not None:
            held = [(queued, self._waits_since, BatchRequest(BatchRanges(self._blocks.queue(queued)[0])))]
        if not held:
            return None
        holders = {holder for holder, _, _ in held}
        holder, since, overdue = max(held, key=lambda holding: holding[1])  # a hedge may be overdue, too
        if server in holders or now - since < self._patience(holder):
            return None
        is_preferred = self._is_preferred(server, overdue.batches.start, self._usable(now) - holders)
        return self._missing(overdue) if is_preferred else None

    def _patience(self, holder: int) -> float:
        """Return the seconds after which a request to a server is hedged."""
        # responses with batches that were computed for other clients arrive sooner than a batch can be computed
        computed = HEDGE_FACTOR * self._servers[holder].batch_seconds
        if len(self._latencies) < RECENT_RESPONSES // 4:
            return max(HEDGE_UNKNOWN, computed)
        recent = sorted(self._latencies)[int(HEDGE_QUANTILE * len(self._latencies))]
        return max(HEDGE_LEAST, HEDGE_FACTOR * recent, computed)

    def _usable(self, now: float) -> set[int]:
        """Return the servers that can be sent requests."""
        return {number for number, server in self._servers.items() if self._is_usable(server, now)}

    def _is_usable(self, server: _Server, now: float) -> bool:
        """Return True if a server is connected, not ejected, and not stuck in a request that others have completed."""
        if server.member is None or server.is_disconnected or now < server.ejected_until:
            return False
        oldest = server.in_flight[0] if server.in_flight else None
        return oldest is None or oldest.is_hedge or any(map(self.is_missing, oldest.wanted.batches))

    def _is_ejected(self, server: int, now: float) -> bool:
        """Return True if the server is not to be sent requests and another one is available."""
        if not self.shared or self._is_usable(self._servers[server], now):
            return False
        return any(self._is_usable(other, now) for other in self._servers.values())

    # -- events

    def approach(self, preceding: int) -> None:
        """Move the prefetch window of an epoch that has not started.

        Args:
            preceding: Number of batches that the training loop takes from the epoch before.
        """
        if self.is_background:
            self.taken = self.start - preceding

    def begin(self, now: float) -> None:
        """Record that the training loop starts the epoch."""
        self.is_background = False
        self.taken = self.start
        if self._waits_since is not None:
            self._waits_since = now

    def add_server(self) -> int:
        """Return the number of another server, which is sent requests once it has `joined`."""
        number = max(self._servers, default=-1) + 1
        self._servers[number] = _Server()
        if self._waits_since is None:
            self._joining.add(number)
        return number

    def forget_server(self, server: int) -> None:
        """Delete the state of a server that has left; a later server may have the same number."""
        if self._servers[server].has_left:
            del self._servers[server]

    def joined(
        self, server: int, num_workers: int, name: str = "", batch_rate: float | None = None, now: float = 0.0
    ) -> None:
        """Record that a server has registered the loader.

        Its name and rate are those of its first registration, which are the same for all clients of the epoch.

        Args:
            server: Number of the server.
            num_workers: Its number of workers.
            name: Name of the server that is the same for all clients.
            batch_rate: Batches/s that it can compute, as it reports; None if unknown.
            now: The time.
        """
        state = self._servers[server]
        if state.has_left:
            return
        state.num_workers = min(num_workers, MAX_WORKERS)
        state.is_disconnected = False
        self._joining.discard(server)
        if state.member is None:
            is_valid = batch_rate is not None and MIN_BATCH_RATE <= batch_rate <= MAX_BATCH_RATE
            state.member = Member(name or str(server), Capacity(state.num_workers, batch_rate if is_valid else None))
        self._members_changed(now)

    def remove_server(self, server: int, now: float = 0.0) -> None:
        """Send no further request to a server; pending responses are still received."""
        state = self._servers[server]
        state.has_left, state.member = True, None
        self._joining.discard(server)
        self._members_changed(now)

    def awaits_others(self, server: int) -> bool:
        """Return True if a response of another server is pending."""
        return any(state.in_flight for number, state in self._servers.items() if number != server)

    def is_requested(self, server: int, k: int) -> bool:
        """Return True if a pending request of a server contains batch k."""
        return any(request.wanted.batches.place(k) is not None for request in self._servers[server].in_flight)

    def has_left(self, server: int) -> bool:
        """Return True if a server was removed, and none of its responses is pending."""
        state = self._servers[server]
        return state.has_left and not state.in_flight

    def disconnected(self, server: int, now: float = 0.0) -> None:
        """Reschedule the pending requests of a server whose connection broke."""
        gone = self._servers[server]
        gone.is_disconnected = True
        self._joining.discard(server)
        lost = [request.wanted for request in gone.in_flight]
        gone.in_flight.clear()
        if self._groups > 1:
            gone.requested = self.received
            return
        self._retry(lost, now)
        if gone.member is not None:
            self._blocks.reassign(server, self._usable(now))

    def _retry(self, lost: list[BatchRequest], now: float) -> None:
        """Reschedule failed requests, except for batches that are pending on another server."""
        usable = self._usable(now)
        requests = (request.wanted for state in self._servers.values() for request in state.in_flight)
        pending = {k for wanted in requests for k in wanted.batches}
        for wanted in lost:
            rest = BatchRanges.of(k for k in wanted.batches if self.is_missing(k) and k not in pending)
            if self.shared:  # by blocks, because other clients have grouped these batches differently
                for each in rest.ranges:
                    self._blocks.assign(each.start, each.stop, usable)
            elif rest:
                self._retries.append(wanted)
        self._retries.sort(key=lambda wanted: wanted.batches.start)

    def _members_changed(self, now: float) -> None:
        members = {number: state.member for number, state in self._servers.items() if state.member is not None}
        self._members = len(members)
        self._workers = sum(max(1, self._servers[number].num_workers) for number in members)
        unassigned = [BatchRequest(BatchRanges(each)) for each in self._blocks.set_members(members, self._usable(now))]
        lost, self._retries = self._retries + unassigned, []
        self._retry(lost, now)
        self._reassign_unusable(now)

    def extend(self, stop: int) -> None:
        """Set the end of the epoch, as far as known, to batch `stop` (exclusive)."""
        self.stop = stop

    def shard_ended(self, k: int) -> None:
        """Record that the shard of batch k has ended; the epoch ends with the last shard."""
        if self._shards:
            shard = k % self._shards
            self._shard_ends[shard] = min(k, self._shard_ends.get(shard, k))  # servers respond in any order
            if len(self._shard_ends) == self._shards:
                self.stop = max(self._shard_ends.values()) + 1

    def is_missing(self, k: int) -> bool:
        """Return True if batch k has not arrived."""
        return k >= self.received and k not in self._received_beyond

    def arrived(self, count: int, nbytes: int, server: int = 0, now: float = 0.0) -> BatchRequest | None:
        """Record that the first `count` batches (`nbytes` bytes together) of a server's oldest request have arrived.

        Returns:
            The request for the rest, which must be the next request on the same connection; None if nothing is left.
        """
        responding = self._servers[server]
        request = responding.in_flight[0]
        missing = set(filter(self.is_missing, islice(request.wanted.batches, count)))
        self._received_beyond |= missing
        if self.received in self._received_beyond:
            self._waits_since = now
        while self.received in self._received_beyond:
            self._received_beyond.remove(self.received)
            self.received += 1
        mean = nbytes / count
        self._frame_bytes = mean if not self._frame_bytes else 0.8 * self._frame_bytes + 0.2 * mean
        self._latencies.append(now - request.since)
        self._turnover = max(self.taken - request.taken, TURNOVER_DECAY * self._turnover)
        responding.responded_at = now
        responding.is_disconnected = False
        rest = self._missing(request.wanted)
        if self._groups > 1 and rest is not None:  # keep all workers busy: request further batches with the rest
            more = self._batches_of_group(server)[: MAX_RANGES - len(rest.batches)]
            rest = self._request_of_group(server, [*rest.batches, *more])
        if rest is None or responding.has_left:
            responding.in_flight.popleft()
        else:
            request.wanted, request.since, request.taken = rest, now, self.taken
        if missing:
            responding.cooldown = 0.0
        elif not request.is_hedge:
            responding.cooldown = min(MAX_COOLDOWN_S, max(MIN_COOLDOWN_S, 2 * responding.cooldown))
            responding.ejected_until = now + responding.cooldown
        if self.shared and (request.is_hedge or not missing):
            self._reassign_unusable(now)
        if rest is not None and responding.has_left:
            self._retry([rest], now)
            return None
        return rest

    def _reassign_unusable(self, now: float) -> None:
        """Assign the queued batches of unusable servers to usable ones."""
        usable = self._usable(now)
        for number, state in self._servers.items():
            if usable and state.member is not None and number not in usable:
                self._blocks.reassign(number, usable)

    def paced(self, now: float) -> None:
        """Update the estimated batch rate of the training loop; called whenever batches arrive."""
        if self._pace_mark is None or self.is_background:  # `approach` moves `taken` by several batches at once
            self._pace_mark = (now, self.taken)
            return
        then, taken = self._pace_mark
        if now - then >= 0.02:
            self._pace = max((self.taken - taken) / (now - then), 0.7 * self._pace)
            self._pace_mark = (now, self.taken)
