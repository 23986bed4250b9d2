"""The records that ``/stats`` answers with. Times are in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ServerStats:
    """The server as a whole."""

    version: str
    uptime: float
    """Since the server's start."""
    num_workers: int
    """Workers that should run; 0 means that the server loads in its own process."""
    memory_budget: int
    """What encoded batches may take together."""
    memory_used: int
    """What encoded batches take now, ready or being written; not those that were let go and are still being sent."""
    memory_mapped: int
    """Shared memory that is mapped for large batches, used or free for reuse; small ones are not kept there."""
    pss: int
    """Proportional set size of server, template and workers together: shared pages counted once."""
    worker_restarts: int
    """Workers that died and were replaced."""
    draining: bool
    """Whether the server is stopping and takes no new loaders."""


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """One place in the pool, whichever process fills it."""

    worker: int
    """Number of the place, from 0; what user code sees as the worker's id."""
    pid: int | None
    """The process, None while it is being replaced."""
    loader: str | None
    """Key of the loader whose own it is; None for those that all share."""
    state: Literal["starting", "idle", "busy"]
    batches: int
    """Batches that this place has finished."""
    busy: float
    """Time spent on finished batches."""
    restarts: int
    """How often its process died, or was killed because it hung, and was replaced."""
    recycled: int
    """How often its process was replaced because it had made many batches, or had much memory."""
    last_exit: str | None
    """Why the last process ended, e.g. ``killed by signal SIGKILL``."""
    last_restart: float | None
    """How long the last replacement took, from the death to readiness."""
    rss: int
    """Resident memory, shared pages included."""
    pss: int
    """Resident memory, each shared page divided by the number of processes that share it."""


@dataclass(frozen=True, slots=True)
class DatasetStats:
    """All loaders of one dataset."""

    dataset: str
    batches_computed: int
    """Batches that workers finished, failures included."""
    batches_sent: int
    """Batches that were sent to consumers; more than were computed when consumers share."""
    batches_failed: int
    """Batches in whose place an exception was sent."""
    batches_retried: int
    """Times that a batch was begun again because its worker died."""
    samples_computed: int
    fetch: float
    """Time in the dataset's ``__getitem__`` (or ``__getitems__``)."""
    collate: float
    """Time in the collate function."""
    encode: float
    """Time to lay out, copy and checksum frames."""


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """One client's iterator."""

    consumer: str
    """What the client calls itself."""
    dataset: str
    loader: str
    """Key of its loader."""
    rank: int
    world_size: int
    epoch: int
    position: int
    """The next batch that it has not been sent."""
    batches: int
    """Batches in its epoch."""
    batches_sent: int
    bytes_sent: int
    waiting: float
    """Time in which it had asked and the batch was not ready: the loader held the trainer back."""
    idle: float
    """Since it asked last."""


@dataclass(frozen=True, slots=True)
class Stats:
    """The whole answer."""

    server: ServerStats
    datasets: list[DatasetStats]
    workers: list[WorkerStats]
    consumers: list[ConsumerStats]
