"""Records of batches, requests and consumers, shared by `Dispatcher` and `Store`."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from teleloader_server.config import IndexKind
from teleloader_server.dispatch.quotas import UNREAD_FACTOR, Quota
from teleloader_server.dispatch.stragglers import BatchTimes, Lookahead, SlowBatch, SlowSamples
from teleloader_server.workers.pool import Lease
from teleloader_shared.codec import BatchId, Substituted
from teleloader_shared.messages import ConsumerReport
from teleloader_shared.ranges import BatchRanges
from teleloader_shared.rendezvous import Capacity
from teleloader_shared.spec import MAX_EPOCH, LoaderSpec

if TYPE_CHECKING:
    from teleloader_server.dispatch.tracing import Made, RequestTrace

MAX_CAPACITIES: Final = 16
"""Maximum number of epochs whose capacities are kept: the last ones for which clients registered."""

Epoch = tuple[str, int]
"""Epoch of a loader: (loader key, epoch number)."""


class Urgency(enum.IntEnum):
    """Urgency of a batch for a consumer, most urgent first."""

    WAITING = enum.auto()
    """The client waits for the batch."""
    EARLY = enum.auto()
    """The batch contains slow samples, so that it must be started long before the client waits for it."""
    REQUESTED = enum.auto()
    """The client requested the batch, and waits for an earlier one."""
    PREFETCHED = enum.auto()
    """The client will request the batch later (prefetching)."""
    BACKGROUND = enum.auto()
    """A background consumer needs the batch: its training loop has not started the epoch."""


class ReadyFrame(NamedTuple):
    """Encoded batch or failure, ready to be sent."""

    raw: Lease
    failed: bool
    """True for an exception in place of the batch, which is sent once and not kept, because a retry may succeed."""
    made: Made | None = None
    """Times and worker of the computation; None if tracing is disabled."""


@dataclass(slots=True, eq=False)
class Loader:
    """Registered loader: its spec, and the measured computation time and size of its batches."""

    key: str
    """Key of the spec, stored because its computation takes 75 us."""
    spec: LoaderSpec
    length: int
    """Length of the dataset; 0 if unknown."""
    batches: int
    """Number of batches in an epoch; `MAX_EPOCH` if it is known only at the end of the epoch."""
    indices: IndexKind = "any"
    """Indices that a client-side sampler may send, see `DatasetConfig.indices`."""
    batch_seconds: float | None = None
    """Exponential moving average of the computing time of a batch; None before the first batch."""
    capacities: dict[int, Capacity] = field(default_factory=dict)
    """Capacity that the server states for each of the last epochs."""
    batch_nbytes: float | None = None
    """Exponential moving average of the size of a frame in bytes; None before the first batch."""
    times: BatchTimes = field(default_factory=BatchTimes)
    """Distribution of the computing time of a batch."""
    slow: SlowSamples = field(default_factory=SlowSamples)
    """Slow samples of the dataset, shared by its loaders."""

    def capacity_of(self, epoch: int, num_workers: int) -> Capacity:
        """Return the capacity of the workers when a client first registered for an epoch.

        All clients of the epoch receive the same capacity, so that they divide the epoch in the same way.
        """
        if epoch not in self.capacities:
            if len(self.capacities) == MAX_CAPACITIES:
                del self.capacities[next(iter(self.capacities))]
            rate = max(1, num_workers) / self.batch_seconds if self.batch_seconds else None
            self.capacities[epoch] = Capacity(num_workers, rate)
        return self.capacities[epoch]


@dataclass(slots=True, eq=False)
class Batch:
    """Batch in progress or in memory."""

    batch_id: BatchId
    nbytes: int
    """Size of the frame in bytes; an estimate until the batch is ready."""
    consumer: Consumer
    """Consumer for which the batch was started."""
    charged: float
    """Computing time charged to the consumer, in seconds."""
    state: EpochState = field(repr=False)
    """State of the epoch of the batch, which may be the one after that of the consumer."""
    frame: ReadyFrame | None = None
    """Frame; None until the batch is ready."""
    slow: SlowBatch | None = None
    """Slow samples of the batch; None if it has none."""
    is_early: bool = False
    """True if the batch was started before others because of them."""
    backup: Backup | None = None
    """Second computation of the batch, in progress; None if there is none."""


class Backup(NamedTuple):
    """Second computation of a batch, because its worker takes unusually long."""

    worker: int
    """Worker that takes unusually long."""
    other: int
    """Worker of the second computation."""
    after: float
    """Seconds for which the first worker had no result when the second computation was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRequest:
    """Parsed client request for batches of an epoch."""

    consumer: str
    """Name of the consumer, chosen by the client."""
    key: str
    """Key of the loader."""
    epoch: int
    batches: BatchRanges
    prefetch: int = 0
    """Number of batches after these that the client will request later."""
    is_background: bool = False
    """True for the lowest priority: the training loop has not started the epoch."""
    indices: Mapping[int, bytes] | None = None
    """Index list of each batch as a frame, for a client-side sampler; None for seeded order."""
    report: ConsumerReport | None = None
    """Measurements of the client."""
    trace: RequestTrace | None = None
    """Spans of the request; None if it is not traced."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """Open request, whose first `sent` batches were sent."""

    consumer: Consumer
    batches: BatchRanges
    indices: Mapping[int, bytes] | None = None
    """Index lists of the request, see `RangeRequest`."""
    sent: int = 0
    started: int = 0
    """Number of first batches that were sent, are computed or are being computed."""
    next: int = field(init=False)
    """Batch for which the client waits; `stop` once all batches were sent."""
    stop: int = field(init=False)
    """End of the last range."""

    def __post_init__(self) -> None:
        """Set the first batch."""
        self.next, self.stop = self.batches.start, self.batches.stop

    def advance(self, count: int) -> Sequence[int]:
        """Record that the next `count` batches were sent, and return their numbers."""
        numbers = self.batches[self.sent : self.sent + count]
        self.sent += count
        self.started = max(self.started, self.sent)
        self.next = self.batches[self.sent] if self.sent < len(self.batches) else self.stop
        return numbers

    def unsent(self) -> Iterator[int]:
        """Iterate over the batches that were not sent, in order."""
        return (self.batches[place] for place in range(self.sent, len(self.batches)))

    def distance(self, k: int) -> int | None:
        """Return the number of unsent batches before batch k, or None if batch k is not requested or was sent."""
        place = self.batches.place(k)
        return None if place is None or place < self.sent else place - self.sent

    def stop_after(self, k: int, limit: int) -> int | None:
        """Return the end of the range that contains batch k; None if batch k is not requested or was sent.

        Args:
            k: Batch number.
            limit: Number of unsent batches to include at most.
        """
        place = self.batches.place(k)
        if place is None or place < self.sent:
            return None
        return min(self.batches.range_of(k).stop, k + self.sent + limit - place)

    def first_missing(self, batches: dict[int, Batch], limit: int) -> int | None:
        """Return the first batch that is not started yet, or None if all within `limit` are started.

        Args:
            batches: Batches of the epoch that are computed or being computed.
            limit: Number of unsent batches to examine.
        """
        stop = min(len(self.batches), self.sent + limit)
        while self.started < stop:
            k = self.batches[self.started]
            if k not in batches:
                return k
            self.started += 1
        return None


@dataclass(slots=True, eq=False)
class PrincipalShare:
    """Worker time used by a principal in one dispatcher, for fair scheduling."""

    quota: Quota
    served: float
    """Worker time used for the principal, in seconds, divided by its weight."""
    level: float = 0.0
    """Highest value of `served` that a consumer had when one of its batches was started."""
    scans_to_skip: int = 0
    queue: list[Candidate] = field(default_factory=list)
    """Heap of the principal's consumers that may start a batch; an entry that is not the `candidate` of its consumer is
    outdated."""
    is_capped: bool = False
    """True after preemption: the principal then leaves one worker to others."""

    def charge(self, seconds: float) -> None:
        """Add worker time used for the principal, in seconds."""
        self.served += seconds / self.quota.weight

    @property
    def current_level(self) -> float:
        """Value of `served` with which a consumer starts to request batches: that of the consumer that is served next.

        Otherwise a consumer that was idle would block all others until it had been served as much, or would itself wait
        until all others have been served as much as one of them.
        """
        first = self.queue[0] if self.queue else None
        return self.level if first is None or first.urgency is not Urgency.WAITING else first.served


@dataclass(slots=True, eq=False)
class Consumer:
    """Iteration of one client over one epoch, with the client's position and open requests."""

    principal_share: PrincipalShare
    name: str
    loader: Loader
    epoch: Epoch
    state: EpochState = field(repr=False)
    """State of the epoch."""
    position: int
    """Batch before which all batches were sent to the consumer or are not wanted by it."""
    served: float
    """Worker time used for the consumer, in seconds."""
    last_seen: float
    is_background: bool = False
    """True until the consumer sends a request with normal priority."""
    candidate: Candidate | None = None
    """Entry in the queue of the principal; None if all batches are started."""
    sent_beyond: set[int] = field(default_factory=set)
    """Batches at or after `position` that were already sent, on another connection."""
    requests: list[PendingRequest] = field(default_factory=list)
    sending: int = 0
    """Bytes of responses that are being sent to the consumer."""
    is_capped: bool = False
    """True after preemption: the consumer then leaves one worker to others."""
    ahead_start: int = 0
    ahead_cursor: int = 0
    ahead_stop: int = 0
    """End of the prefetch window [ahead_start, ahead_stop), whose batches before `ahead_cursor` are already started."""
    looks_ahead: bool = False
    """True if the client requests the batches of the epoch in order, all from this server."""
    scanned: int = 0
    """Number of the batch until which the epoch was searched for slow samples. Numbers from the end of the epoch are
    those of the next epoch."""
    early: list[tuple[int, SlowBatch]] = field(default_factory=list)
    """Batches with slow samples that may not be started yet, by number as in `scanned`, in ascending order."""
    started_early: list[int] = field(default_factory=list)
    """Batches of `early` that were started and may not be sent yet."""
    next_lookahead: Lookahead | None = None
    """Search in the next epoch; None before it is searched."""

    @property
    def reads_too_little(self) -> bool:
        """True if the consumer gets no further batches until the client reads more of its responses.

        Above the principal's limit on unread bytes, this affects consumers with an unread response; above twice the
        limit, all consumers of the principal.
        """
        quota = self.principal_share.quota
        return quota.unread > 1 and (self.sending > 0 or quota.unread > UNREAD_FACTOR)

    def distance(self, k: int) -> int | None:
        """Return the number of batches that the consumer needs before batch k, or None if it does not want batch k.

        The batches of a background consumer are further away than all others, so that they are evicted first.
        """
        # a request may start before the position, if another connection of the consumer requested the same batches
        found = min((d for pending in self.requests if (d := pending.distance(k)) is not None), default=None)
        if found is None and self.lacks(k):
            found = k - self.position
        return found + MAX_EPOCH if found is not None and self.is_background else found

    def lacks(self, k: int) -> bool:
        """Return True if batch k was not sent to the consumer, and the consumer has not moved past it."""
        return k >= self.position and k not in self.sent_beyond

    def startable_until(self, k: int, limit: int) -> int:
        """Return the number after the last batch that may be started together with batch k, which is not started yet.

        Args:
            k: Batch number.
            limit: Number of unsent batches of a request to include at most.
        """
        requested = next((s for p in self.requests if (s := p.stop_after(k, limit)) is not None), None)
        if requested is not None:
            return requested
        return min((n for n in self.sent_beyond if k < n < self.ahead_stop), default=self.ahead_stop)

    def index_list(self, k: int) -> bytes | None:
        """Return the index list of batch k from an open request, or None in seeded order (computed by workers)."""
        return next((p.indices[k] for p in self.requests if p.indices and k in p.indices), None)

    def wants(self, k: int) -> bool:
        """Return True if the consumer has requested batch k, or will request it later."""
        if self.lacks(k):
            return True
        for pending in self.requests:  # noqa: SIM110 - a generator takes longer than one item
            if pending.next <= k and pending.distance(k) is not None:
                return True
        return False


def training_loop(consumer: str) -> str:
    """Return the part of a consumer's name that all iterations of a training loop have in common."""
    return consumer.rpartition("#")[0] or consumer


class Candidate(NamedTuple):
    """Consumer in the queue of its principal, in the order of the first three fields."""

    urgency: Urgency
    """Urgency of the consumer's most urgent batch that was not started."""
    due: float
    """Value of `Consumer.served` after all batches of the consumer's next group but one."""
    ticket: int
    """Number of the entry: if all else is equal, the entries are in the order of events."""
    served: float
    """Value of `Consumer.served` when the entry was queued."""
    consumer: Consumer


@dataclass(slots=True)
class EpochState:
    """State of an epoch: batches, consumers and waiting requests."""

    batches: dict[int, Batch] = field(default_factory=dict)
    consumers: list[Consumer] = field(default_factory=list)
    waiters: dict[int, list[Callable[[], object]]] = field(default_factory=dict)
    """Callbacks of the requests that wait for a batch, by batch number, including batches that are not started yet."""
    substituted: dict[int, Substituted] = field(default_factory=dict)
    """Skipped and replaced samples, by batch number, so that a batch that is computed again has the same ones."""
    substitutions: int = 0
    """Total number of samples in `substituted`."""
    lookahead: Lookahead | None = None
    """Search for batches with slow samples; None before the first one is known."""
    kept: dict[int, Consumer] = field(default_factory=dict)
    """Batches that were started before the epoch, with the consumer of the previous epoch for which they are kept."""

    def frame(self, k: int) -> ReadyFrame | None:
        """Return the frame of batch k if it is ready, else None."""
        batch = self.batches.get(k)
        return None if batch is None else batch.frame

    def distance(self, k: int) -> int | None:
        """Return the minimum of `Consumer.distance` over all consumers, or None if no consumer wants batch k."""
        found = min((d for consumer in self.consumers if (d := consumer.distance(k)) is not None), default=None)
        return MAX_EPOCH if found is None and k in self.kept else found

    def wants(self, k: int) -> bool:
        """Return True if at least one consumer wants batch k."""
        for consumer in self.consumers:
            if consumer.wants(k):
                return True
        return k in self.kept
