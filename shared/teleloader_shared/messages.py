"""HTTP API of the server: URL paths, headers and JSON records."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from teleloader_shared.errors import VersionMismatch
from teleloader_shared.text import short

PROTOCOL_VERSIONS: Final = (1,)
"""Protocol versions of this release.

An incompatible change adds a version. When a client registers a loader, the server selects the highest version that
both sides support."""

NO_PAGE_HEADER: Final = "Sec-Teleloader"
"""Protects against cross-site requests: scripts in web pages cannot set headers whose names begin with ``Sec-``
(Fetch standard, 2.2.2)."""
PROTOCOL_HEADER: Final = "Teleloader-Protocol"
CONSUMER_HEADER: Final = "Teleloader-Consumer"
"""Carries the consumer's name for /stats and fair scheduling; the default is the client's IP address and port."""
PREVIEW: Final = "look"
"""Consumer name of clients that fetch single batches for display (``teleloader peek``); /stats omits them."""
REPORT_HEADER: Final = "Teleloader-Report"
"""Carries a `ConsumerReport`."""
TIMELINE_HEADER: Final = "Teleloader-Timeline"
"""Header of responses with batches: requests the client's part of the timeline (`timings_path`)."""
PRIORITY_HEADER: Final = "Priority"
"""Carries the urgency of a batch request (RFC 9218)."""
BACKGROUND_PRIORITY: Final = "u=7"
"""Lowest urgency: the training loop has not started the epoch."""
FRAME_MEDIA_TYPE: Final = "application/vnd.teleloader.frame+msgpack"
PROBLEM_MEDIA_TYPE: Final = "application/problem+json"

READY_BYTES: Final = 2**21
"""Target size of a response with several frames, in bytes: the response ends after the frame that reaches it."""

STATS_PATH: Final = "/stats"
HISTORY_PATH: Final = "/stats/history"
DATASETS_PATH: Final = "/v1/datasets"
LOADERS_PATH: Final = "/v1/loaders"
SERVERS_PATH: Final = "/v1/servers"
DRAIN_PATH: Final = "/v1/drain"
WORKERS_PATH: Final = "/v1/workers"
VERSIONS_PATH: Final = "/v1/versions"
ERRORS_PATH: Final = "/v1/errors"
SLOW_SAMPLES_PATH: Final = "/v1/slow-samples"
TIMELINE_PATH: Final = "/v1/timeline"
HEALTH_PATH: Final = "/healthz"
STREAM_PATH: Final = "/stream"
"""Suffix appended to `loader_path` in the URL of a loader's WebSocket."""


def format_protocols() -> str:
    """Return the value of `PROTOCOL_HEADER`: the protocol versions of this release, the highest one first."""
    return ", ".join(map(str, sorted(PROTOCOL_VERSIONS, reverse=True)))


def select_protocol(offered: str | None) -> int:
    """Return the highest protocol version that both sides support.

    Args:
        offered: Value of `PROTOCOL_HEADER` in a request; None for clients that do not send it, which use version 1.

    Raises:
        VersionMismatch: If the client supports none of `PROTOCOL_VERSIONS`, or the value is invalid.
    """
    found = re.findall(r"[^,\s]+", "1" if offered is None else offered[:MAX_PROTOCOLS])
    if not found or not all(re.fullmatch(r"[1-9][0-9]{0,8}", version, re.ASCII) for version in found):
        raise VersionMismatch(
            f"invalid header {PROTOCOL_HEADER}: {short(offered)}, expected versions such as '{format_protocols()}'. "
            "Check the client"
        )
    versions = {int(version) for version in found}
    if common := versions.intersection(PROTOCOL_VERSIONS):
        return max(common)
    side = "server" if max(versions) > max(PROTOCOL_VERSIONS) else "client"
    raise VersionMismatch(
        f"no common protocol version: the client supports {_listed(versions)}, and this server supports "
        f"{_listed(PROTOCOL_VERSIONS)}. Update the {side}"
    )


def check_protocol(selected: int, url: str) -> None:
    """Check that a server selected a version that this client offered.

    Raises:
        VersionMismatch: If the version is not one of `PROTOCOL_VERSIONS`.
    """
    if selected not in PROTOCOL_VERSIONS:
        side = "client" if selected > max(PROTOCOL_VERSIONS) else "server"
        raise VersionMismatch(
            f"{url} uses protocol version {selected}, and this client supports {_listed(PROTOCOL_VERSIONS)}. Update "
            f"the {side}"
        )


def _listed(versions: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(versions)))


MAX_PROTOCOLS: Final = 200
"""Characters of `PROTOCOL_HEADER` that the server reads."""


def batches_path(key: str, epoch: int) -> str:
    """Return the URL path for the batches of an epoch; the path of batch k is this path followed by ``/{k}``."""
    return f"{loader_path(key)}/epochs/{epoch}/batches"


def progress_path(key: str, epoch: int) -> str:
    """Return the URL path of the progress of an epoch's consumers."""
    return f"{loader_path(key)}/epochs/{epoch}/progress"


def timings_path(key: str, epoch: int) -> str:
    """Return the URL path for the client's part of the timeline of an epoch's batches."""
    return f"{loader_path(key)}/epochs/{epoch}/timings"


def loader_path(key: str) -> str:
    """Return the URL path of a loader: ``GET`` renews the loader's session, ``DELETE`` ends the session."""
    return f"{LOADERS_PATH}/{key}"


MAX_RUN_NAME: Final = 64
"""Maximum number of characters of a run name."""
RUN_CHARACTERS: Final = "A-Za-z0-9 ._:/@+-"
"""Characters of run names, as in a character class of a regular expression."""
RUN_NAME: Final = re.compile(rf"[A-Za-z0-9_][{RUN_CHARACTERS}]{{0,{MAX_RUN_NAME - 1}}}", re.ASCII)
"""Pattern of valid run names."""
RUN_NAME_RULE: Final = (
    f"1 to {MAX_RUN_NAME} letters, digits, spaces, '.', '_', ':', '/', '@', '+' and '-', starting with a letter, a "
    "digit or '_'"
)


class ReceivingTotals(NamedTuple):
    """Measurements of a client's receiving threads: totals over all iterations of the loader, times in seconds."""

    pending: float
    """Time for which the training loop waited for a response of this server of which no byte had arrived."""
    reading: float
    """Time for which it waited for a response of this server that was arriving."""
    elsewhere: float
    """Time for which it waited for responses of other servers."""
    busy: float
    """Time from the first byte of a response until its batches were decoded."""
    cpu: float
    """CPU time of the receiving threads."""
    process: float
    """CPU time of the process while the training loop waited."""
    wakeups: float
    """Waits of the training loop that ended with the delivery of a batch."""
    late: float
    """Those of them after which the training loop did not continue at once, because it had neither GIL nor CPU."""


NO_RECEIVING: Final = ReceivingTotals(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class ConsumerReport:
    """Progress of a training loop, sent with each batch request: totals over all iterations of the loader."""

    elapsed: float
    """Seconds spent in iterations over epochs, including the current one."""
    waited: float
    """Seconds for which the training loop waited for data."""
    taken: int
    """Batches that the training loop consumed."""
    reconnects: int
    """Connections that were reopened after they broke or a server closed them."""
    hedges: int
    """Batches that were also requested from a second server because the first one was slow."""
    position: int | None = None
    """Number of the first batch of the epoch that the training loop has not consumed; None if unknown."""
    finished: bool = False
    """True if the training loop has consumed the last batch of the epoch."""
    run: str | None = None
    """Name of the training run, see `RUN_NAME`; None if it has none."""

    receiving: ReceivingTotals | None = None
    """Measurements of the receiving threads; None if unknown."""

    def to_header(self) -> str:
        """Format the report as the value of `REPORT_HEADER`."""
        position = "" if self.position is None else f",position={self.position}"
        finished = ",finished=1" if self.finished else ""
        run = "" if self.run is None else f",run={self.run}"
        text = (
            f"elapsed={self.elapsed:.3f},waited={self.waited:.3f},taken={self.taken},"
            f"reconnects={self.reconnects},hedges={self.hedges}{position}{finished}{run}"
        )
        found = self.receiving
        if found is None:
            return text
        return (
            f"{text},pending={found.pending:.3f},reading={found.reading:.3f},elsewhere={found.elsewhere:.3f},"
            f"busy={found.busy:.3f},cpu={found.cpu:.3f},process={found.process:.3f},wakeups={found.wakeups:.0f},"
            f"late={found.late:.0f}"
        )

    @classmethod
    def from_header(cls, text: str) -> ConsumerReport | None:
        """Return the report in a header value; None if it is invalid, because statistics must not fail a request."""
        match = _REPORT.match(text[:MAX_REPORT])
        if match is None:
            return None
        elapsed, waited = float(match[1]), float(match[2])
        receiving = _RECEIVING.search(text[:MAX_REPORT], match.end() - 1)
        measured = None if receiving is None else ReceivingTotals(*map(float, receiving.groups()))
        # each is rounded on its own, so waited may exceed elapsed by a rounding error
        return cls(
            elapsed, min(elapsed, waited), int(match[3]), int(match[4]), int(match[5]),
            None if match[6] is None else int(match[6]), match[7] is not None, match[8], measured,
        )  # fmt: skip


MAX_REPORT: Final = 600
_SECONDS: Final = r"(\d{1,9}\.\d{1,6})"
_REPORT: Final = re.compile(
    r"elapsed=(\d{1,9}\.\d{1,6}),waited=(\d{1,9}\.\d{1,6}),taken=(\d{1,18}),reconnects=(\d{1,9}),hedges=(\d{1,9})"
    rf"(?:,position=(\d{{1,18}})(?=,|$))?(?:,finished=(1)(?=,|$))?(?:,run=({RUN_NAME.pattern})(?=,|$))?(?:,|$)",
    re.ASCII,
)
_RECEIVING: Final = re.compile(
    rf",pending={_SECONDS},reading={_SECONDS},elsewhere={_SECONDS},busy={_SECONDS},cpu={_SECONDS},"
    rf"process={_SECONDS},wakeups=(\d{{1,18}}),late=(\d{{1,18}})(?:,|$)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """Description of one dataset in the response to ``GET /v1/datasets``."""

    name: str
    kind: Literal["map", "iterable"]
    type: str
    """Name of the dataset's class."""
    length: int | None
    """Number of samples; None if the dataset has no ``__len__``."""
    version: str
    """Version of the data, as configured by the operator; "" by default."""
    fingerprint: str
    """Digest of name, kind, length, version, collate function, seeding, and lengths of the samples."""
    collate: str
    """Default collate function: ``default`` or ``module:function``."""
    worker_init: str | None
    """Default worker-init function as ``module:function``; None if there is no default."""
    functions: list[str]
    """Collate and worker-init functions that clients may choose, as ``module:function``."""
    seeding: Literal["batch", "sample"]
    """Granularity at which random number generators are reseeded."""
    cpus: int
    """Number of CPUs that the server may use."""
    ports: list[int] | None = None
    """Ports of all servers that the server's supervisor runs on this machine; None for a single server."""
    environment: str | None = None
    """Versions of the server's libraries that determine the bits of batches; None if unknown."""
    lengths: str | None = None
    """Digest of the lengths of the samples (`sample_lengths` of the dataset); None if the dataset has none."""
    longest: int | None = None
    """Length of the longest sample; None without lengths."""
    longest_sample: int | None = None
    """Index of the longest sample; None without lengths."""
    available: list[str] | None = None
    """Fingerprints of all versions that loaders can use, newest first; None if there is only this one."""


Change = Literal["added", "restored", "unchanged"]
"""Effect of a publication on a dataset: its workers were started, a previous version is the newest one again, or the
newest version has this configuration already."""


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """Version of a dataset in the response to a publication (``POST /v1/versions``)."""

    dataset: str
    version: str
    fingerprint: str
    change: Change


@dataclass(frozen=True, slots=True)
class Registration:
    """Response to the registration of a loader (``POST /v1/loaders``)."""

    key: str
    """Identifier of the loader in URL paths (`LoaderSpec.key`); equal specs have equal keys on every server."""
    batches: int | None
    """Batches in an epoch; None if a client-side sampler, an iterable-style dataset or `max_tokens` determines the
    number."""
    length: int | None
    """Samples in the dataset; None if it has no ``__len__``."""
    fingerprint: str
    """Fingerprint of the dataset (`DatasetInfo.fingerprint`)."""
    num_workers: int
    """Worker processes that serve this loader, 0 if the server loads in its own process."""
    max_batch_bytes: int
    """Maximum size of the frames that the server sends, in bytes."""
    protocol: int = max(PROTOCOL_VERSIONS)
    """Protocol version that the server selected."""
    batch_rate: float | None = None
    """Batches/s that all workers together could compute for this loader when a client first registered for the epoch;
    None if unknown. Clients that share an epoch divide its batches among servers by these rates."""
    environment: str | None = None
    """Versions of the libraries that determine the bits of batches; None if unknown."""
    handoff: str | None = None
    """Unix socket and key with which a client on the server's machine can receive batches in shared memory, as
    formatted by `handoff.Offer`; None if the server lends no memory."""
    replayed: list[int] | None = None
    """Number of batches of a shard that a worker has iterated again, and number of all that it has to; of several
    workers, of the one with the most remaining batches. None if no worker does so."""
