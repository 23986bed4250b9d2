"""Records of the response to ``GET /stats``. Times are in seconds, sizes in bytes, fractions in [0, 1].

Values described as recent are averages over the last `WINDOW` seconds, or since the described object was created if
that is shorter; all other counts and durations are totals since the server started.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

WINDOW: Final = 10.0

Bottleneck = Literal[
    "workers",
    "io",
    "machine",
    "memory",
    "prefetch",
    "server",
    "network",
    "client",
    "training",
    "idle",
    "finished",
    "unknown",
]
"""Resource that limits a consumer's batch rate.

``workers``: batches are not ready, because the workers compute all the time, and CPUs are free. ``io``: batches are not
ready, because the workers are blocked, for example by a disk. ``machine``: the CPUs of the server's machine or its CPU
quota are full. ``memory``: nothing is computed ahead, because the memory budget is full. ``prefetch``: batches are
not ready although workers are idle, because they are started too late. ``server``: the main process of the server is
full. ``network``: batches are ready and arrive slowly. ``client``: batches have arrived, and the training process takes
long to decode them, or to copy them to its device. ``training``: batches wait for the training loop. ``idle``: the
consumer sends no requests at present. ``finished``: it has received all batches of its epoch. ``unknown``: the
measurements do not explain the data wait, or cover too short a time.
"""


@dataclass(frozen=True, slots=True)
class Latency:
    """Distribution of durations; quantiles have an error of at most 5 %."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Count and latest occurrence of batch failures with the same exception type."""

    type: str
    """Qualified name of the exception."""
    count: int
    last: str
    """First 500 characters of the latest failure's message."""
    traceback: str
    """Last 4,000 characters of the latest failure's traceback."""
    indices: list[int]
    """First 20 sample indices of the latest failed batch."""
    age: float
    """Time since the latest failure."""
    sample: int | None = None
    """Index of the sample that failed last; None if it is unknown."""


@dataclass(frozen=True, slots=True)
class SlowBatch:
    """One of the slowest batches of a dataset, by the time that the dataset took to return the samples."""

    batch: int
    epoch: int
    loader: str
    """Key of the loader."""
    seconds: float
    """Duration of the batch's ``fetch`` stage (`DatasetStats.stages`)."""
    indices: list[int]
    """First 20 sample indices of the batch."""
    sample: int | None = None
    """Index of the sample that took longest; None if it is unknown, for example if samples take less than 20 us."""


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Statistics of the server process, its memory and network traffic."""

    version: str
    host: str
    """Host name of the server's machine."""
    pid: int
    uptime: float
    cpus: int
    """Number of CPUs that the server may use."""
    cpu: float
    """Recent CPU use of server, fork server and workers together: 1.0 is one CPU."""
    num_workers: int
    """Configured number of workers; 0 if the server loads in its own process."""
    memory_budget: int
    """Maximum memory for encoded batches."""
    memory_used: int
    """Memory of encoded batches, complete or being written, excluding evicted batches that are still being sent."""
    memory_mapped: int
    """Shared memory mapped for large batches, used or free for reuse; small batches are stored elsewhere."""
    memory_sending: int
    """Memory of the responses that are being sent."""
    pss: int
    """Proportional set size of server, fork server and workers together: shared pages counted once."""
    event_loop_lag: float
    """Recent mean delay of the event loop's timers; above 0.01 s, the server process itself delays requests."""
    connections: int
    """Open connections."""
    worker_restarts: int
    """Workers that died and were replaced."""
    batches_per_second: float
    """Recent rate of batches that this server sent."""
    bytes_per_second: float
    """Recent rate of sent bytes."""
    draining: bool
    """True if the server is stopping and accepts no new loaders."""
    load: float | None = None
    """Recent mean number of workers that compute or are blocked (by a disk, for example).

    Does not include workers that are ready to run and have no CPU, because other processes use it or a quota throttles
    them. None if the server is of an older version, as for the fields below.
    """
    demand: float | None = None
    """Number of workers that the training loops would keep busy if they never waited for data.

    The demands of several servers can be added. They do not depend on the load of the servers' CPUs.
    """
    demand_unmeasured: float | None = None
    """Part of `demand` of training loops whose step time is unknown; they count with the workers that they keep busy.

    The step time is unknown for the first 10 s, for steps below 1 ms, and if the client does not report it.
    """
    saturated: bool | None = None
    """True if the CPUs that the server may use are full, or its workers wait for a CPU.

    More workers or servers on the same machine would not compute more batches.
    """
    ports: list[int] | None = None
    """Ports of all servers that run under the same supervisor (``--servers``), or None."""
    memory_lent: int | None = None
    """Shared memory that is lent to clients on the server's machine; a slot lent to several clients counts for each.

    Includes slots that a client gave back and still has open. Evicted batches that are lent are not part of
    `memory_used`.
    """
    publication_error: str | None = None
    """Last 4,000 characters of the error of the last publication (``POST /v1/versions``); None if it succeeded."""


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Statistics of one worker ID, across all processes with this ID."""

    worker: int
    """Worker ID, from 0; user code sees it in ``get_worker_info()``."""
    pid: int | None
    """None while the process is being replaced."""
    loader: str | None
    """Key of the loader that the worker is private to; ``revision N`` for the shared workers of versions that were
    published while the server runs; None for workers of the first shared pool."""
    state: Literal["starting", "idle", "busy"]
    current_task: str | None
    """Batch that is being computed, e.g. ``batch 12 of epoch 0 of train``; None if the worker is not busy. While the
    worker iterates its shard again, followed by ``, after 1,200 of 5,000 replayed batches``."""
    current_task_seconds: float | None
    """Time since the current task started; None if the worker is not busy."""
    batches: int
    """Batches finished."""
    busy: float
    """Total time spent on finished batches."""
    busy_fraction: float
    """Recent fraction of the time in which the worker was busy."""
    restarts: int
    """Replacements of processes that died, or were killed because they were unresponsive."""
    recycled: int
    """Planned replacements of processes that reached the batch limit or the memory limit."""
    last_exit: str | None
    """Latest process exit, e.g. ``worker 0 (pid 4711) killed by signal SIGKILL (Killed)``; None before any exit."""
    last_restart: float | None
    """Duration of the latest replacement, from the exit until the new process was ready; None before any."""
    rss: int
    """Resident memory, shared pages included."""
    pss: int
    """Resident memory, each shared page divided by the number of processes that share it."""


@dataclass(frozen=True, slots=True)
class VersionStats:
    """Version of a dataset that loaders can use."""

    version: str
    """Version as in the server's configuration."""
    fingerprint: str
    revision: int
    """Number of the publication that added the version, from 1; its workers have the pool ``revision N``."""
    newest: bool
    """True if new runs get this version; another one is retired when it has been idle for ``--retire-after``."""
    loaders: int
    """Registered loaders that use this version."""
    idle: float
    """Time since the latest registration or request of a loader."""


@dataclass(frozen=True, slots=True)
class DatasetStats:
    """Statistics of one dataset, over all its loaders and versions."""

    dataset: str
    kind: Literal["map", "iterable"]
    length: int | None
    """Number of samples; None if the dataset has no ``__len__``."""
    batches_computed: int
    """Batches that workers finished, failures included."""
    batches_sent: int
    """Batches sent to consumers; may exceed `batches_computed`, because consumers can share batches."""
    batches_failed: int
    """Batches for which an exception was sent."""
    batches_retried: int
    """Number of times that a batch was restarted because its worker died."""
    samples_computed: int
    samples_per_second: float
    """Recent rate of computed samples."""
    stages: dict[str, Latency]
    """Time per batch by loading stage, in order of execution.

    ``fetch``: the dataset's ``__getitem__`` or ``__getitems__``. ``collate``: the collate function. ``encode``: layout,
    copy and checksum of the frame.
    """
    slowest: list[SlowBatch]
    """The five batches with the longest fetch stage, slowest first."""
    errors: list[ErrorCount]
    """At most twenty exception types, latest first."""
    samples_substituted: int = 0
    """Samples that were skipped or replaced because the dataset raised an exception (``on_error``)."""
    cache_hits: int = 0
    """Samples that workers read from the file of a ``CachedDataset``."""
    cache_misses: int = 0
    """Samples of a ``CachedDataset`` that workers computed."""
    cache_saved: float = 0.0
    """Time to compute the samples that were read, less the time to read them."""
    samples_slow: int = 0
    """Samples that took unusually long, counted again if they were not slow in between."""
    batches_early: int = 0
    """Batches that were started before others because they contain slow samples."""
    batches_backed_up: int = 0
    """Batches that a second worker computed, too, because the first one took unusually long."""
    tokens: int = 0
    """Sum of the lengths of the samples in computed batches (`sample_lengths` of the dataset)."""
    tokens_padded: int = 0
    """Sum of (samples x longest sample) over computed batches: their size after padding, in the unit of the lengths.
    With packed sequences, their total size."""
    padding_fraction: float | None = None
    """Fraction of padding in computed batches, 1 - tokens / tokens_padded; None without lengths."""
    versions: list[VersionStats] = field(default_factory=list)
    """Available versions, newest first; empty for dataset objects."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement on which a diagnosis rests, for display."""

    name: str
    """Name with its subject, such as ``workers blocked``."""
    value: str
    """Recent value with its unit, such as ``62 %``."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Bottleneck of a consumer, and the recommended setting change."""

    bottleneck: Bottleneck
    workers: int | None
    """Total number of workers that would keep up with the training loop; None if unknown."""
    advice: str
    """Cause and recommended change, in one to three sentences."""
    confidence: float = 0.0
    """Fraction of the data wait that the bottleneck explains, reduced for each missing measurement."""
    evidence: list[Measurement] = field(default_factory=list)
    """Measurements on which the diagnosis rests, over the last `WINDOW` seconds."""


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """Statistics of one consumer: a client's iterator over an epoch."""

    consumer: str
    """Name that the client sent."""
    token: str
    """Name of the client's token, to distinguish consumers with equal names; ``anyone`` if authentication is off."""
    dataset: str
    loader: str
    """Key of the loader."""
    rank: int
    world_size: int
    epoch: int
    position: int
    """Number of the first batch of the epoch that the training loop has not consumed.

    If the client does not report it, number of the first batch that this server has not sent.
    """
    batches: int | None
    """Batches in the epoch; None if the number is unknown before the epoch ends."""
    batches_sent: int
    """Batches that this server sent. Prefetched batches that the training loop has not consumed are included."""
    bytes_sent: int
    batches_per_second: float
    """Recent rate of batches that the training loop consumed, from all servers.

    If the client does not report them, recent rate of batches that this server sent.
    """
    bytes_per_second: float
    """Recent rate of bytes that this server sent."""
    waiting: float
    """Total time in which a request was pending and its batch not ready."""
    starved_fraction: float
    """Recent fraction of the time in which a request was pending and its batch not ready.

    If epochs are short, this fraction, `sending_fraction` and the diagnosis include the training loop's earlier epochs.
    """
    sending_fraction: float
    """Recent fraction of the time in which a response was being sent."""
    data_wait_fraction: float | None
    """Recent fraction of the time in which the training loop waited for data; None if the client does not report it."""
    reconnects: int | None
    """Connections that the client reopened, over all epochs of the loader; None if the client does not report it."""
    hedges: int | None
    """Batches that the client also requested from a second server because the first one was slow.

    Counted over all epochs of the loader; None if the client does not report it.
    """
    idle: float
    """Time since the latest request or report of progress."""
    diagnosis: Diagnosis
    batches_lent: int | None = None
    """Part of `batches_sent` that the consumer received in shared memory."""
    run: str | None = None
    """Name of the training run (``DataLoader(name=)``, by default the script's file name); None if unknown."""
    finished: bool | None = None
    """True if the training loop has consumed the whole epoch; None if the client does not report its position."""
    version: str | None = None
    """Version of the dataset; None for a mixture, and for dataset objects."""


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Resources that the clients with one token have used since the server started."""

    token: str
    """Name of the token; ``anyone`` if authentication is off."""
    batches_sent: int
    bytes_sent: int
    worker_seconds: float
    """Time of workers for batches that were started for the token. A batch that several tokens share counts once."""
    cpu_seconds: float
    """CPU time of workers for these batches."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Response to ``GET /stats``."""

    server: ServerStats
    datasets: list[DatasetStats]
    workers: list[WorkerStats]
    consumers: list[ConsumerStats]
    """Sorted by latest request, most recent first; a training loop is listed with its current epoch only."""
    consumers_total: int
    """Total number of consumers; the query parameters `limit` and `offset` select those that the response lists."""
    tokens: list[TokenStats] = field(default_factory=list)
    """Tokens that have received or computed batches, by name."""
