"""Records of the responses about single events: errors, slow samples, workers, and the timeline of batches.

Times are in seconds, sizes in bytes. Times named `...at` are by the monotonic clock of the server's machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Handling = Literal["raised", "replaced", "skipped"]
"""Reaction to an exception. Either the training loop raised it, or ``on_error`` replaced or skipped the sample."""


@dataclass(frozen=True, slots=True)
class Preview:
    """Request that computes a batch again, or a batch of one sample: register `spec`, then request the batch."""

    spec: dict[str, Any]
    """Loader spec as JSON, without `session`; `is_private` states whether to add one."""
    epoch: int
    batch: int
    indices: list[int] | None
    """Index list to send; of a loader without batches (`batch_size` null), its only index is sent in place of the list.
    None if the server computes the indices."""
    is_private: bool
    """True if the spec requires a session, which must be ended after the request."""


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """One failure of a batch, or one sample that was skipped or replaced."""

    number: int
    """Consecutive number of the error since the server started, from 1."""
    time: float
    """Unix time."""
    age: float
    """Time since the error."""
    dataset: str
    loader: str
    """Key of the loader."""
    epoch: int
    batch: int
    worker: int
    """Worker ID; -1 if the batch was loaded by the server process."""
    run: str | None
    """Name of a training run that requested the batch; None if unknown."""
    type: str
    """Qualified name of the exception."""
    message: str
    """First 500 characters."""
    traceback: str
    """Last 4,000 characters; empty for skipped and replaced samples, whose workers report only type and message."""
    sample: int | str | None
    """Index of the sample that failed; None if unknown."""
    indices: list[int]
    """First 20 sample indices of the batch."""
    handling: Handling
    replacement: int | str | None
    """Index of the sample that replaced the failed one; None if none did."""
    batch_preview: Preview | None
    """Request for exactly this batch; None for an iterable-style dataset, and for index lists that are too long or not
    integers."""
    sample_preview: Preview | None
    """Request for a batch that contains only the failed sample; None if its index is unknown."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Response to ``GET /v1/errors``."""

    total: int
    """Number of errors since the server started."""
    errors: list[ErrorRecord]
    """Latest errors, newest first; at most 100."""


@dataclass(frozen=True, slots=True)
class SlowSample:
    """Sample that took unusually long the last time it was fetched."""

    dataset: str
    index: int
    """Index of the sample in the dataset; in a mixture, in the sequence of all sources."""
    seconds: float
    """Time of the last fetch."""
    typical: float | None
    """Median time of the loader's batches at that time; None if it was unknown."""
    times: int
    """Number of fetches that were slow, since the sample was last removed from the table."""
    epoch: int | None
    """Epoch of the last slow fetch; None if unknown."""
    batch: int | None
    """Batch of the last slow fetch; None if unknown."""
    batch_preview: Preview | None
    sample_preview: Preview | None


@dataclass(frozen=True, slots=True)
class SlowSampleList:
    """Response to ``GET /v1/slow-samples``."""

    total: int
    """Number of samples in the tables of all datasets."""
    samples: list[SlowSample]
    """Slowest first; the query parameter `limit` is their maximum number."""


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """Batch that a worker is computing."""

    dataset: str
    loader: str
    """Key of the loader."""
    epoch: int
    batch: int
    seconds: float
    """Time since the worker's last progress."""
    sample: int | None
    """Index of the sample that the worker is fetching; None between fetches and if it is unknown."""


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """Resources of a worker process at one time."""

    age: float
    """Time since the measurement."""
    pid: int
    rss: int
    """Resident memory, shared pages included."""
    cpu: float
    """CPUs used since the previous measurement."""


@dataclass(frozen=True, slots=True)
class WorkerDetail:
    """Response to ``GET /v1/workers/{worker}``."""

    worker: int
    """Worker ID."""
    pid: int | None
    """None while the process is being replaced."""
    loader: str | None
    """Key of the loader that the worker is private to; None for workers of the shared pool."""
    state: Literal["starting", "idle", "busy"]
    task: WorkerTask | None
    batches: int
    """Batches finished."""
    restarts: int
    recycled: int
    last_exit: str | None
    history: list[WorkerSample]
    """Memory and CPU use every five seconds for up to an hour, oldest first."""
    stages: list[str]
    """Names of the loading stages, in the order of `BatchTimes.stages`."""
    recent: list[BatchTimes]
    """Last batches of the worker, newest first; at most 20."""


@dataclass(frozen=True, slots=True)
class WorkerStack:
    """Response to ``GET /v1/workers/{worker}/stack``."""

    worker: int
    pid: int | None
    stack: str
    """Stacks of all threads, most recent call first; a reason in parentheses if they are unavailable."""


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Computation of one batch by a worker."""

    number: int
    """Consecutive number of the computation since the server started."""
    dataset: str
    loader: str
    """Key of the loader."""
    epoch: int
    batch: int
    worker: int
    """Worker ID; 0 for a server that loads in its own process."""
    pool: str | None
    """Key of the loader that the worker is private to; None for the shared pool."""
    assigned_at: float
    """Time at which the batch was assigned to the worker; until `began_at`, it waited behind other batches."""
    began_at: float
    """Time at which the worker began to fetch the samples."""
    stages: list[float]
    """Duration of each loading stage, in the order of `Timeline.stages`; they follow each other from `began_at`."""
    ready_at: float
    """Time at which the server process received the result; the same for all batches of a group."""
    group: int
    """`number` of the first batch of its group: a worker reports several small batches together."""
    samples: int
    failed: bool


@dataclass(frozen=True, slots=True)
class SendTimes:
    """One response, or one part of a streamed response."""

    number: int
    """Consecutive number of the response since the server started."""
    loader: str
    epoch: int
    batches: list[int]
    """Numbers of the batches in it."""
    consumer: str
    token: str
    """Name of the client's token."""
    began_at: float
    ended_at: float
    """Time at which the response was written to the connection; the kernel may still buffer a part of it."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """Part of a client in the timeline; times by the clock of the server, converted with `offset`."""

    consumer: str
    token: str
    run: str | None
    host: str
    pid: int
    loader: str
    epoch: int
    offset: float
    """Clock of the server minus that of the client."""
    uncertainty: float
    """Maximum error of `offset`: half of the time that the fastest of the last requests took in the network."""
    received: list[Received]
    waits: list[Waited]
    steps: list[Step]


@dataclass(frozen=True, slots=True)
class Received:
    """One response, as the client received it."""

    first: int
    """Number of the first batch."""
    batches: int
    """Number of batches."""
    first_byte_at: float
    last_byte_at: float
    decoded_at: float


@dataclass(frozen=True, slots=True)
class Waited:
    """One wait of the training loop in ``next()``."""

    batch: int
    """Number of the batch that it waited for."""
    began_at: float
    ended_at: float


@dataclass(frozen=True, slots=True)
class Step:
    """Delivery of one batch to the training loop."""

    batch: int
    at: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Response to ``GET /v1/timeline``."""

    now: float
    """Current time by the monotonic clock of the server's machine."""
    unix_time: float
    """The same time as Unix time."""
    host: str
    pid: int
    stages: list[str]
    """Names of the loading stages."""
    computed: list[BatchTimes]
    """Last computed batches, oldest first."""
    sent: list[SendTimes]
    """Last responses, oldest first."""
    clients: list[ClientTimes]
    """Reports of clients, which they send for ten seconds after each request with ``clients=true``."""
    computed_total: int
    """Number of computations since the server started; `computed` contains the last ones."""
    sent_total: int
