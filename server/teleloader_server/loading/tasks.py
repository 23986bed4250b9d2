"""Tasks and reports: input and result of loading one batch, and functions shared by several stages."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from teleloader_server.loading import index_lists
from teleloader_server.loading.datasets import HostedDataset
from teleloader_shared.codec import MAX_INDICES, MAX_KEY, BatchId, FrameWriter, Substituted
from teleloader_shared.orders.plan import Plan
from teleloader_shared.spec import LoaderSpec

GROUP_BYTES: Final = 2**20
"""Maximum size of a group, that is, of successive small batches that a worker computes and reports together."""
GROUP_SECONDS: Final = 0.005
"""Computing time in seconds after which a group ends, because its first batch waits for the last one."""

SLOW_FROM: Final = 0.05
"""Time in seconds to fetch a sample above which the worker reports the sample as slow."""
MAX_SLOW: Final = 8
"""Maximum number of samples of a batch that are reported as slow: the slowest ones."""

MAX_MAIN_SLOTS: Final = 2**14
"""Maximum size of a mixture's tables, in samples, for which the server computes indices outside of workers: preparing
the tables takes about 1 µs per sample, during which the event loop handles no requests."""

Indices = NDArray[np.int64] | list[Any]
"""Indices of a batch's samples: an array in seeded order, or the items of a client-side sampler."""


class Task(NamedTuple):
    """Worker task: one batch to load."""

    spec: LoaderSpec
    length: int
    """Length of the dataset; 0 if unknown."""
    batch_id: BatchId
    indices: bytes | None = None
    """Frame with the index list of a client-side sampler; None in seeded order: workers then compute the indices."""
    owner: int = 0
    """Dataset and principal of the batch, as a number, if slots were lent to this principal (`Lender`); else 0."""
    substituted: Substituted | None = None
    """Samples that were skipped or replaced when the batch was computed before; None if there were none."""
    assigned: float = 0.0
    """Time at which the batch was assigned to the worker, by ``time.monotonic()``."""


class CacheCounts(NamedTuple):
    """Number of samples that were read from caches (`CachedDataset`) and computed for them, and the saved time."""

    hits: int = 0
    misses: int = 0
    saved: float = 0.0
    """Time in seconds to compute the samples that were read, less the time to read them."""

    @classmethod
    def sum(cls, counts: Iterable[CacheCounts]) -> CacheCounts:
        """Add several counts."""
        return cls(*map(sum, zip(*counts, strict=True)))


class Report(NamedTuple):
    """Report on a completed task: sample count, success and times."""

    samples: int
    failed: bool
    stages: Sequence[float]
    """Time of each stage in seconds, in the order of `stages.STAGES`."""
    substituted: Substituted | None = None
    """Skipped and replaced samples; None if there are none."""
    slowest: int | None = None
    """Index of the sample whose fetch took longest; None if it is unknown."""
    slow: Sequence[tuple[int, float]] = ()
    """Index and time in seconds of each slow sample, slowest first; see `SLOW_FROM` and `MAX_SLOW`."""
    lengths: tuple[int, int] = (0, 0)
    """Sum of the lengths of the samples, and number of samples x longest sample; (0, 0) if unknown.
    With packed sequences, numbers of their tokens without and with padding."""
    cache: CacheCounts = CacheCounts()
    ended: float = 0.0
    """Time at which the last stage ended, by ``time.perf_counter()``; all processes of a machine share this clock."""


class GroupReport(NamedTuple):
    """Worker report on one task, or on several small ones that it completed in succession."""

    samples: Sequence[int]
    """Number of samples of each batch."""
    failed: bool
    """True if the last batch failed; no other batch of a group did, because a failure ends the group."""
    stages: Sequence[Sequence[float]]
    """Times of each stage in seconds, one per batch; stages in the order of `stages.STAGES`."""
    cpu_wait: float
    """Part of these times for which the worker was ready to run and had no CPU, in seconds."""
    cpu: float = 0.0
    """CPU time of the worker, over all its threads, in seconds."""
    substituted: Sequence[tuple[int, Substituted]] = ()
    """Skipped and replaced samples of each batch that has any, with the place of the batch in the group."""
    slowest: Sequence[int | None] = ()
    """Index of the slowest sample of each batch (`Report.slowest`)."""
    slow: Sequence[tuple[int, Sequence[tuple[int, float]]]] = ()
    """Slow samples of each batch that has any (`Report.slow`), with the place of the batch in the group."""
    ended: Sequence[float] = ()
    """Time at which each batch was completed (`Report.ended`)."""
    lengths: tuple[int, int] = (0, 0)
    """Sums of `Report.lengths` over all batches."""
    cache: CacheCounts = CacheCounts()

    @classmethod
    def of(cls, reports: Sequence[Report], cpu_wait: float, cpu: float) -> GroupReport:
        """Combine the reports on successive batches."""
        samples, failed, stages, substituted, slowest, slow, lengths, cache, ended = zip(*reports, strict=True)
        found = [(place, each) for place, each in enumerate(substituted) if each is not None]
        late = [(place, each) for place, each in enumerate(slow) if each]
        times = list(zip(*stages, strict=True))
        padding = sum(tokens for tokens, _ in lengths), sum(padded for _, padded in lengths)
        counts = CacheCounts.sum(cache)
        return cls(samples, failed[-1], times, cpu_wait, cpu, found, slowest, late, ended, padding, counts)

    def without(self, places: Container[int]) -> GroupReport:
        """Return the report without the batches at the given places."""
        kept = [place for place in range(len(self.samples)) if place not in places]
        stages = [[times[place] for place in kept] for times in self.stages]
        is_last = len(self.samples) - 1 in kept
        substituted = [(kept.index(place), each) for place, each in self.substituted if place in kept]
        samples = [self.samples[place] for place in kept]
        slowest = [self.slowest[place] for place in kept]
        slow = [(kept.index(place), each) for place, each in self.slow if place in kept]
        ended = [self.ended[place] for place in kept]
        return self._replace(
            samples=samples, failed=self.failed and is_last, stages=stages, substituted=substituted, slowest=slowest,
            slow=slow, ended=ended,
        )  # fmt: skip


def integer_of(index: Any) -> int | None:
    """Return an index as an int, also if it is a NumPy integer; None if it is no integer or has more than 64 bits."""
    try:
        found = operator.index(index)
    except TypeError:
        return None
    return found if -(2**63) < found < 2**63 else None


def key_of(index: Any) -> int | str | None:
    """Return an index as records and caches contain it; None if it is neither an integer nor a short string."""
    if not isinstance(index, str):
        return integer_of(index)
    try:
        index.encode()
    except UnicodeEncodeError:  # lone surrogates
        return None
    return index if len(index) <= MAX_KEY else None


def indices_of(task: Task, count: int = MAX_INDICES) -> list[int]:
    """Return the integers among the first `count` indices of a batch.

    Returns [] for an iterable-style dataset, and for orders that only workers compute.
    """
    if task.indices is not None:
        return [index for index in index_lists.first_indices(task.indices, count) or () if type(index) is int]
    if task.spec.session is not None and task.length == 0:
        return []
    mixture = task.spec.mixture
    if task.spec.required_lengths is not None or (mixture is not None and mixture.slots > MAX_MAIN_SLOTS):
        return []  # the lengths are in the workers, and large tables take too long
    found: list[int] = Plan(task.spec, task.length, task.batch_id.epoch).first(task.batch_id.batch, count).tolist()
    return found


def collate(hosted: HostedDataset, task: Task, indices: Indices, samples: list[Any]) -> tuple[int, Any]:
    """Collate samples into a batch; return the sample count and the batch."""
    name = task.spec.collate
    if task.spec.batch_size is None:
        return 1, hosted.convert_sample(samples[0], name)
    if hosted.gives_batches(name):
        return len(indices), hosted.convert_sample(samples[0], name)
    return len(samples), hosted.collate_batch(samples, name)


def frame_writer(
    task: Task,
    content: object,
    max_bytes: int,
    padding: int,
    shard_state: str | None,
    substituted: Substituted | None = None,
) -> FrameWriter:
    """Create the writer that encodes a batch as a frame."""
    spec = task.spec
    return FrameWriter(
        task.batch_id,
        content,
        padding=padding,
        shard_state=shard_state,
        substituted=substituted,
        name="sample" if spec.batch_size is None else "batch",
        checksum=spec.checksum,
        compression=spec.compression,
        max_bytes=max_bytes,
    )
