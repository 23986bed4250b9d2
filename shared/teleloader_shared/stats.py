"""Records of the response of ``/stats``. Times are in seconds, sizes in bytes, rates per second, shares in [0, 1].

What is called `recent` is taken over the last `WINDOW` seconds, or since its subject is known when that is shorter; all
other counts are totals since the server's start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

WINDOW: Final = 10.0

Bottleneck = Literal["loader", "training", "network", "balanced", "unknown"]
"""What holds a consumer back.

``loader``: batches are not ready when they are wanted. ``training``: they are, and wait for the training loop.
``network``: they are ready, and do not arrive as fast as the loop takes them. ``balanced``: the loop hardly waits, and
the workers hardly rest. ``unknown``: it asks for nothing now, or not for long enough.
"""


@dataclass(frozen=True, slots=True)
class Latency:
    """Durations: quantiles of all since the start of the server, each with an error of at most 5 %."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Failures of one kind."""

    type: str
    """Qualified name of the exception."""
    count: int
    last: str
    """The last one's message, its first 500 characters."""
    traceback: str
    """The last one's traceback, its last 4,000 characters."""
    indices: list[int]
    """What the last one's batch should have held, the first 20."""
    age: float
    """Since the last one."""


@dataclass(frozen=True, slots=True)
class SlowBatch:
    """One of the batches that took a worker longest to fetch."""

    batch: int
    epoch: int
    loader: str
    seconds: float
    indices: list[int]
    """The first 20 of what it holds."""


@dataclass(frozen=True, slots=True)
class ServerStats:
    """The server as a whole."""

    version: str
    host: str
    """Name of its machine."""
    pid: int
    uptime: float
    """Since the server's start."""
    cpus: int
    """Processors that the server may use."""
    cpu: float
    """Recent processor use of server, template and workers together: 1.0 is one processor."""
    num_workers: int
    """Workers that should run; 0 means that the server loads in its own process."""
    memory_budget: int
    """What encoded batches may take together."""
    memory_used: int
    """What encoded batches take now, ready or being written; not those that were let go and are still being sent."""
    memory_mapped: int
    """Shared memory that is mapped for large batches, used or free for reuse; small ones are not kept there."""
    memory_sending: int
    """What answers take that are being sent."""
    pss: int
    """Proportional set size of server, template and workers together: shared pages counted once."""
    event_loop_lag: float
    """Recent mean time for which the event loop was late: from 0.01 on, requests wait for the server's own process."""
    connections: int
    """Open connections."""
    worker_restarts: int
    """Workers that died and were replaced."""
    batches_per_second: float
    """Recent; sent."""
    bytes_per_second: float
    """Recent; sent."""
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
    current_task: str | None
    """What it makes now, e.g. ``batch 12 of epoch 0 of train``."""
    current_task_seconds: float | None
    """For how long."""
    batches: int
    """Batches that this place has finished."""
    busy: float
    """Time spent on finished batches."""
    busy_fraction: float
    """Recent share of the time in which it was at work."""
    restarts: int
    """How often its process died, or was killed because it hung, and was replaced."""
    recycled: int
    """How often its process was replaced because it had made many batches, or had much memory."""
    last_exit: str | None
    """Which process ended last, and why, e.g. ``worker 0 (pid 4711) killed by signal SIGKILL (Killed)``."""
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
    kind: Literal["map", "iterable"]
    length: int | None
    """Samples, where it is known."""
    batches_computed: int
    """Batches that workers finished, failures included."""
    batches_sent: int
    """Batches that were sent to consumers; more than were computed when consumers share."""
    batches_failed: int
    """Batches in whose place an exception was sent."""
    batches_retried: int
    """Times that a batch was begun again because its worker died."""
    samples_computed: int
    samples_per_second: float
    """Recent; computed."""
    stages: dict[str, Latency]
    """Time per batch by stage of loading, in order.

    ``fetch``: the dataset's ``__getitem__`` or ``__getitems__``. ``collate``: the collate function. ``encode``: layout,
    copy and checksum of the frame.
    """
    slowest: list[SlowBatch]
    """The five that took longest to fetch, the slowest first."""
    errors: list[ErrorCount]
    """By type, at most twenty, the latest first."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Bottleneck of a consumer, and the setting to change."""

    bottleneck: Bottleneck
    workers: int | None
    """How many workers in all would keep up with the training loop; None where it cannot be known."""
    advice: str
    """One sentence."""


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """One client's iterator: a training loop in a pass through an epoch."""

    consumer: str
    """What the client calls itself."""
    token: str
    """Name of the client's token, by which consumers of the same name are told apart; ``anyone`` without tokens."""
    dataset: str
    loader: str
    """Key of its loader."""
    rank: int
    world_size: int
    epoch: int
    position: int
    """The next batch that it has not been sent."""
    batches: int | None
    """Batches in its epoch; None where only its end tells."""
    batches_sent: int
    bytes_sent: int
    batches_per_second: float
    """Recent; sent."""
    bytes_per_second: float
    """Recent; sent."""
    waiting: float
    """Time in which it had asked and the batch was not ready: the loader held the trainer back."""
    starved_fraction: float
    """Recent share of the time for which that was so; as the diagnosis, of its training loop in this pass and the
    passes before, if they were short."""
    sending_fraction: float
    """Recent share of the time in which an answer to it was being sent; likewise."""
    data_wait_fraction: float | None
    """Recent share of the time in which its training loop waited for data, as its client says; None if it does not."""
    reconnects: int | None
    """Connections that broke, or were closed, and were made anew, as its client says; in all passes of its loader."""
    hedges: int | None
    """Batches that its client asked another server for because this or another one was late; likewise."""
    idle: float
    """Since it asked last."""
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True)
class Stats:
    """The whole answer."""

    server: ServerStats
    datasets: list[DatasetStats]
    workers: list[WorkerStats]
    consumers: list[ConsumerStats]
    """Those who asked last come first; see `consumers_total`. Of a training loop's passes there is the last one."""
    consumers_total: int
    """How many there are: the answer lists the first `limit` of them after `offset`."""
