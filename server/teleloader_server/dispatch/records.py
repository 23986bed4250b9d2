"""Who wants which batches: the plain records over which `Dispatcher` and `Store` decide.

Nothing is decided here. A consumer says of a batch whether it wants it, and how soon.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from teleloader_server.dispatch.quotas import UNREAD_FACTOR, Quota
from teleloader_server.workers.pool import Lease
from teleloader_shared.codec import Address
from teleloader_shared.messages import ConsumerReport

if TYPE_CHECKING:
    from teleloader_server.dispatch.tracing import Made, RequestTrace

Epoch = tuple[str, int]
"""One epoch of one loader: (key, epoch)."""


class Urgency(enum.Enum):
    """How urgently a consumer wants a batch."""

    WAITING = enum.auto()
    """Its client waits for it."""
    ASKED = enum.auto()
    """It is asked for besides."""
    AHEAD = enum.auto()
    """It will be asked for later."""


class ReadyFrame(NamedTuple):
    """A frame that can be sent."""

    raw: Lease
    failed: bool
    """True if it holds an exception in place of the batch. It is sent once and not kept: a retry may succeed."""
    made: Made | None = None
    """Times and worker of the computation; None without tracing."""


@dataclass(slots=True, eq=False)
class Batch:
    """A batch that exists or is being made."""

    address: Address
    nbytes: int
    """Size of the frame; an estimate until it is ready."""
    consumer: Consumer
    """For whom it was begun."""
    charged: float
    """Seconds that were charged for it."""
    frame: ReadyFrame | None = None
    """None until it is ready."""


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
    """The batches [next, stop) of a request, which are not sent yet."""

    consumer: Consumer
    next: int
    """The batch that the client waits for."""
    stop: int
    cursor: int
    """All batches of the request before this one exist or are being made."""
    indices: Mapping[int, bytes] | None = None
    """Index lists of the request, see `RangeRequest`."""

    def first_missing(self, batches: dict[int, Batch], stop: int) -> int | None:
        """The first batch of the request before `stop` that is not among `batches`, those of its run."""
        cursor = self.cursor
        while cursor < stop and cursor in batches:
            cursor += 1
        self.cursor = cursor
        return cursor if cursor < stop else None


@dataclass(slots=True, eq=False)
class PrincipalShare:
    """A principal, as far as this dispatcher goes."""

    quota: Quota
    served: float
    """Seconds of worker time spent for it."""
    level: float = 0.0
    """What the one of its consumers for which a batch was begun last had been served: who comes anew starts there."""
    consumers: int = 0
    scans_to_skip: int = 0
    was_begun: bool = False
    """Whether the batch that it wished for last was."""
    is_capped: bool = False
    """Whether a worker had to be taken from it: it leaves one to the others."""


@dataclass(slots=True, eq=False)
class Consumer:
    """One client's passage through one run."""

    principal_share: PrincipalShare
    name: str
    run: Epoch
    state: EpochState = field(repr=False)
    """What there is of that run."""
    position: int
    """It was sent all batches before this one, or does not want them."""
    served: float
    """Seconds of worker time spent for it."""
    last_seen: float
    sent_beyond: set[int] = field(default_factory=set)
    """What it was sent out of order, on another connection."""
    asks: list[PendingRange] = field(default_factory=list)
    sending: int = 0
    """Bytes of the answers that it is being sent."""
    is_capped: bool = False
    """As of the principal."""
    ahead_start: int = 0
    ahead_cursor: int = 0
    ahead_stop: int = 0
    """Batches in [ahead_start, ahead_stop) are prefetched; those before `ahead_cursor` exist or are being computed."""

    @property
    def reads_too_little(self) -> bool:
        """Whether nothing is made for it until answers are taken: its own, or in the end all of its principal's."""
        quota = self.principal_share.quota
        return quota.unread > 1 and (self.sending > 0 or quota.unread > UNREAD_FACTOR)

    def distance(self, k: int) -> int | None:
        """How many batches from now it wants batch k; None when it does not want it."""
        # an ask may stand before the position: another connection of the consumer asked for the same
        found = min((k - ask.next for ask in self.asks if ask.next <= k < ask.stop), default=None)
        if found is None and k >= self.position and k not in self.sent_beyond:
            found = k - self.position
        return found

    def index_list(self, k: int) -> bytes | None:
        """Return the index list of batch k from an open request; None in seeded order, whose indices workers know."""
        return next((ask.indices[k] for ask in self.asks if ask.indices and k in ask.indices), None)

    def wants(self, k: int) -> bool:
        """Whether it wants batch k."""
        ahead = k >= self.position and k not in self.sent_beyond
        return ahead or any(ask.next <= k < ask.stop for ask in self.asks)


@dataclass(slots=True)
class EpochState:
    """What there is of a run, and who goes through it."""

    batches: dict[int, Batch] = field(default_factory=dict)
    consumers: list[Consumer] = field(default_factory=list)
    waiters: dict[int, list[Callable[[], object]]] = field(default_factory=dict)
    """Called when a batch is ready; a client may wait for a batch before it is begun."""

    def frame(self, k: int) -> ReadyFrame | None:
        """Return the frame of batch k if it is ready."""
        batch = self.batches.get(k)
        return None if batch is None else batch.frame

    def distance(self, k: int) -> int | None:
        """How many batches from now the first consumer wants batch k; None when nobody does."""
        return min((d for consumer in self.consumers if (d := consumer.distance(k)) is not None), default=None)

    def wants(self, k: int) -> bool:
        """Whether anybody wants batch k."""
        return any(consumer.wants(k) for consumer in self.consumers)
