"""Plain records of batches and their consumers, over which `Dispatcher` and `Store` decide.

Nothing is decided here. A consumer knows which batches it wants, and how soon.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from teleloader_server.config import IndexKind
from teleloader_server.dispatch.quotas import UNREAD_FACTOR, Quota
from teleloader_server.workers.pool import Lease
from teleloader_shared.codec import Address
from teleloader_shared.messages import ConsumerReport
from teleloader_shared.spec import LoaderSpec

if TYPE_CHECKING:
    from teleloader_server.dispatch.tracing import Made, RequestTrace

Epoch = tuple[str, int]
"""One epoch of one loader: (key, epoch)."""


class Urgency(enum.Enum):
    """Urgency of a batch for a consumer."""

    WAITING = enum.auto()
    """The client waits for the batch."""
    ASKED = enum.auto()
    """The batch is requested, after others."""
    AHEAD = enum.auto()
    """The batch is prefetched: it will be requested later."""


class ReadyFrame(NamedTuple):
    """A frame that can be sent."""

    raw: Lease
    failed: bool
    """True if it holds an exception in place of the batch. It is sent once and not kept: a retry may succeed."""
    made: Made | None = None
    """Times and worker of the computation; None without tracing."""


@dataclass(slots=True, eq=False)
class Loader:
    """A registered loader."""

    key: str
    """Key of the spec, stored because its computation takes 75 us."""
    spec: LoaderSpec
    length: int
    """Samples in the dataset; 0 if it has no length."""
    batches: int
    """Batches in an epoch; `MAX_EPOCH` if only its end determines their number."""
    indices: IndexKind = "any"
    """Indices that a client-side sampler may list, see `DatasetConfig.indices`."""
    batch_seconds: float | None = None
    """Smoothed time of computation of a batch; None until one is finished."""
    batch_nbytes: float | None = None
    """Smoothed size of a frame; None until one is finished."""


@dataclass(slots=True, eq=False)
class Batch:
    """A batch that exists or is being computed."""

    address: Address
    nbytes: int
    """Size of the frame; an estimate until the batch is ready."""
    consumer: Consumer
    """Consumer for which it was begun."""
    charged: float
    """Seconds charged for it."""
    frame: ReadyFrame | None = None
    """None until the batch is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRequest:
    """A client's request for the batches [start, stop) of an epoch, as the endpoint that received it parsed it."""

    consumer: str
    """Name that the client gives itself."""
    key: str
    """The loader's."""
    epoch: int
    start: int
    stop: int
    prefetch: int = 0
    """Batches after `stop` that the client will request later."""
    indices: Mapping[int, bytes] | None = None
    """With a client-side sampler: the index list of each batch, as a frame."""
    report: ConsumerReport | None = None
    """Measurements of the client."""
    trace: RequestTrace | None = None
    """Spans of the request; None if it is not traced."""


@dataclass(slots=True, eq=False)
class PendingRange:
    """Batches [next, stop) of a request that have not been sent."""

    consumer: Consumer
    next: int
    """Batch that the client waits for."""
    stop: int
    cursor: int
    """All batches of the request before this one exist or are being computed."""
    indices: Mapping[int, bytes] | None = None
    """Index lists of the request, see `RangeRequest`."""

    def first_missing(self, batches: dict[int, Batch], stop: int) -> int | None:
        """Return the first batch of the request before `stop` that is not in `batches`, those of its epoch."""
        cursor = self.cursor
        while cursor < stop and cursor in batches:
            cursor += 1
        self.cursor = cursor
        return cursor if cursor < stop else None


@dataclass(slots=True, eq=False)
class PrincipalShare:
    """Share of a principal in the workers of one dispatcher."""

    quota: Quota
    served: float
    """Seconds of worker time used for it."""
    level: float = 0.0
    """Seconds served to its consumer for which a batch was begun last: new consumers start there."""
    scans_to_skip: int = 0
    was_begun: bool = False
    """True if the last batch that was tried for it was begun."""
    is_capped: bool = False
    """True if it was preempted: it leaves a worker to the others."""


@dataclass(slots=True, eq=False)
class Consumer:
    """One client's iteration over one epoch."""

    principal_share: PrincipalShare
    name: str
    loader: Loader
    run: Epoch
    state: EpochState = field(repr=False)
    """State of that epoch."""
    position: int
    """The consumer was sent all batches before this one, or does not want them."""
    served: float
    """Seconds of worker time used for it."""
    last_seen: float
    sent_beyond: set[int] = field(default_factory=set)
    """Batches that were sent out of order, on another connection."""
    asks: list[PendingRange] = field(default_factory=list)
    sending: int = 0
    """Bytes of responses that are being sent to it."""
    is_capped: bool = False
    """As for `PrincipalShare`."""
    ahead_start: int = 0
    ahead_cursor: int = 0
    ahead_stop: int = 0
    """Batches in [ahead_start, ahead_stop) are prefetched; those before `ahead_cursor` exist or are being computed."""

    @property
    def reads_too_little(self) -> bool:
        """True if no further batch of this consumer is started because responses are not read.

        Above the principal's share of unread bytes, it affects consumers with an unread response; above twice the
        share, all consumers of the principal.
        """
        quota = self.principal_share.quota
        return quota.unread > 1 and (self.sending > 0 or quota.unread > UNREAD_FACTOR)

    def distance(self, k: int) -> int | None:
        """Return how many batches from now it wants batch k; None if it does not want it."""
        # a request may begin before the position: another connection of the consumer requested the same
        found = min((k - ask.next for ask in self.asks if ask.next <= k < ask.stop), default=None)
        if found is None and k >= self.position and k not in self.sent_beyond:
            found = k - self.position
        return found

    def index_list(self, k: int) -> bytes | None:
        """Return the index list of batch k from an open request; None in seeded order, whose indices workers know."""
        return next((ask.indices[k] for ask in self.asks if ask.indices and k in ask.indices), None)

    def wants(self, k: int) -> bool:
        """Return True if it wants batch k."""
        ahead = k >= self.position and k not in self.sent_beyond
        return ahead or any(ask.next <= k < ask.stop for ask in self.asks)


@dataclass(slots=True)
class EpochState:
    """Batches of an epoch, and its consumers."""

    batches: dict[int, Batch] = field(default_factory=dict)
    consumers: list[Consumer] = field(default_factory=list)
    waiters: dict[int, list[Callable[[], object]]] = field(default_factory=dict)
    """Callbacks for the arrival of batches, which clients may wait for before they are begun."""

    def frame(self, k: int) -> ReadyFrame | None:
        """Return the frame of batch k if it is ready."""
        batch = self.batches.get(k)
        return None if batch is None else batch.frame

    def distance(self, k: int) -> int | None:
        """Return how many batches from now the first consumer wants batch k; None if no consumer does."""
        return min((d for consumer in self.consumers if (d := consumer.distance(k)) is not None), default=None)

    def wants(self, k: int) -> bool:
        """Return True if a consumer wants batch k."""
        return any(consumer.wants(k) for consumer in self.consumers)
