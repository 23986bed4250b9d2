"""Records of the response to ``GET /stats/history``: series of the last hour with one value per second.

Seconds count from the start of the server process, by a monotonic clock: a step of the machine's clock moves no value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from teleloader_shared.stats import Bottleneck

HISTORY_S: Final = 3600
"""Seconds for which the series are kept."""
MAX_POINTS: Final = 600
"""Maximum number of points of each series in a response."""

SERVER_SERIES: Final = (
    "batches_per_second",
    "bytes_per_second",
    "data_wait",
    "workers_busy",
    "main_process_cpu",
    "machine_cpu",
    "event_loop_lag",
    "memory",
    "prefetched",
    "errors_per_second",
    "consumers",
)
"""Series of the server.

In this order: sent batches and bytes; mean data wait of its active consumers; busy fraction of the workers;
CPU use of the main process's event loop; used fraction of the machine's CPUs; lag of the event loop in seconds; used
fraction of the memory budget; batches, computed or in progress, that a consumer has not received; failed batches; and
active consumers."""
DATASET_SERIES: Final = ("batches_per_second", "bytes_per_second", "samples_per_second", "errors_per_second")
"""Series of a dataset, which are sent batches and bytes, computed samples, and failed batches."""
CONSUMER_SERIES: Final = (
    "batches_per_second",
    "bytes_per_second",
    "data_wait",
    "starved",
    "in_transit",
    "round_trip_time",
)
"""Series of a training loop.

In this order: consumed batches (sent ones if the client does not report them); sent bytes; fraction of
the time for which it waited for data, for which a requested batch was not ready, and for which a response was in
transit; and the round-trip time of its connections in seconds."""

MarkKind = Literal["start", "restart", "workers", "error", "draining"]
"""Kind of an event.

In this order: start of the server, exit of a worker, another number of workers, first failed batch after
`ERROR_PAUSE_S` without one, and start of the shutdown.
"""
ERROR_PAUSE_S: Final = 10


@dataclass(frozen=True, slots=True)
class Series:
    """One value per point; None where nothing was measured."""

    mean: list[float | None]
    min: list[float | None] | None = None
    """Smallest value of each point's seconds; None if each point is one second, as for `max`."""
    max: list[float | None] | None = None


@dataclass(frozen=True, slots=True)
class LabelChange:
    """Diagnosis from a second on, until the next one."""

    second: int
    bottleneck: Bottleneck | None
    """None if there was no diagnosis."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Event of the server."""

    second: int
    kind: MarkKind
    text: str
    """Description for display."""


@dataclass(frozen=True, slots=True)
class LoopId:
    """Training loop whose series are kept."""

    id: str
    """Value of the query parameter `consumer`."""
    consumer: str
    """Name that the client sent, without the number of the iteration."""
    token: str
    """Name of the client's token."""
    dataset: str
    run: str | None
    """Name of the training run; None if it is unknown."""


@dataclass(frozen=True, slots=True)
class History:
    """Response to ``GET /stats/history``."""

    pid: int
    """Process ID of the server: another process starts with an empty history."""
    started: float
    """Time of second 0 in Unix seconds, by the server's clock when it started."""
    now: int
    """The current second, which has no values yet."""
    since: int
    """First second of the first point."""
    step: int
    """Seconds per point."""
    series: dict[str, Series]
    """Series of the server, or of the dataset or training loop that the request selects."""
    diagnoses: list[LabelChange]
    """Diagnosis of the training loop, or of the one that waits most; empty for a dataset."""
    marks: list[Mark]
    """Events since `since`."""
    datasets: list[str]
    """Datasets whose series are kept."""
    consumers: list[LoopId]
    """Training loops whose series are kept, most recently active first."""
