"""Messages between client and server other than frames: paths, headers and JSON records."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

PROTOCOL_VERSION: Final = 1
"""Raised when an older peer would misunderstand; stated by both sides when a loader is registered."""

NO_PAGE_HEADER: Final = "Sec-Teleloader"
"""Sent by clients that are no web page: a script can send no header whose name begins with ``Sec-`` (Fetch, 2.2.2)."""
PROTOCOL_HEADER: Final = "Teleloader-Protocol"
CONSUMER_HEADER: Final = "Teleloader-Consumer"
"""Names the consumer in /stats and in the server's fair sharing; without it a connection's address does."""
PREVIEW: Final = "look"
"""What a consumer calls itself that looks at single batches and trains nothing: /stats leaves it out."""
REPORT_HEADER: Final = "Teleloader-Report"
"""Says how the consumer fares, see `ConsumerReport`."""
FRAME_MEDIA_TYPE: Final = "application/vnd.teleloader.frame+msgpack"
PROBLEM_MEDIA_TYPE: Final = "application/problem+json"

READY_BYTES: Final = 2**21
"""An answer of several frames ends with the one that reaches this size."""

STATS_PATH: Final = "/stats"
DATASETS_PATH: Final = "/v1/datasets"
LOADERS_PATH: Final = "/v1/loaders"
HEALTH_PATH: Final = "/healthz"
STREAM_PATH: Final = "/stream"
"""After a loader's own path: its WebSocket."""


def batches_path(key: str, epoch: int) -> str:
    """Return the URL path of the batches of an epoch; with ``/{k}`` appended, that of batch k."""
    return f"{loader_path(key)}/epochs/{epoch}/batches"


def loader_path(key: str) -> str:
    """Return the URL path of a loader; ``GET`` keeps its session, ``DELETE`` ends it."""
    return f"{LOADERS_PATH}/{key}"


@dataclass(frozen=True, slots=True)
class ConsumerReport:
    """Report of a training loop, sent with each request for batches: totals over all passes of a loader."""

    elapsed: float
    """Seconds that its passes through epochs have taken, this one until now."""
    waited: float
    """Seconds for which its training loop waited for data."""
    taken: int
    """Batches that the loop took."""
    reconnects: int
    """Connections that broke, or that a server closed, and that were made anew."""
    hedges: int
    """Batches that were asked for once more, at another server, because one was late."""

    def to_header(self) -> str:
        """Return the value of the header."""
        return (
            f"elapsed={self.elapsed:.3f},waited={self.waited:.3f},taken={self.taken},"
            f"reconnects={self.reconnects},hedges={self.hedges}"
        )

    @classmethod
    def from_header(cls, text: str) -> ConsumerReport | None:
        """The report, or None where there is none that can be: no client is refused for what it says of itself."""
        said = _REPORT.match(text[:MAX_REPORT])
        if said is None:
            return None
        elapsed, waited = float(said[1]), float(said[2])
        # rounded each for itself
        return cls(elapsed, min(elapsed, waited), int(said[3]), int(said[4]), int(said[5]))


MAX_REPORT: Final = 200
_REPORT: Final = re.compile(
    r"elapsed=(\d{1,9}\.\d{1,6}),waited=(\d{1,9}\.\d{1,6}),taken=(\d{1,18}),reconnects=(\d{1,9}),hedges=(\d{1,9})(?:,|$)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """Entry of one dataset in the response to ``GET /v1/datasets``."""

    name: str
    kind: Literal["map", "iterable"]
    type: str
    """Name of its class."""
    length: int | None
    """Number of samples; None when it has no ``__len__``."""
    version: str
    """What its owner calls this state of the data, "" when nothing was stated."""
    fingerprint: str
    """Digest of name, kind, length, version and of how it is collated and seeded."""
    collate: str
    """The collate function, ``default`` or ``module:function``."""
    worker_init: str | None
    """The worker-init function, ``module:function``; None when there is none."""
    functions: list[str]
    """The collate and worker-init functions, ``module:function``, that a client may choose."""
    seeding: Literal["batch", "sample"]
    """Whether random numbers are seeded anew for each batch or for each sample."""
    cpus: int
    """How many CPUs the server may use."""


@dataclass(frozen=True, slots=True)
class Registration:
    """Response to ``POST /v1/loaders``."""

    key: str
    """Name of the loader in the paths of its batches; the same for the same spec, on every server."""
    batches: int | None
    """Batches in an epoch; None when that shows only at its end."""
    length: int | None
    """Samples in the dataset; None when it has no ``__len__``."""
    fingerprint: str
    """The dataset's fingerprint."""
    num_workers: int
    """Worker processes that serve this loader, 0 when the server loads in its own process."""
    max_batch_bytes: int
    """The largest frame that the server sends."""
    protocol: int = PROTOCOL_VERSION
