"""Stragglers: slow samples with the batches that contain them, and batches that a slow worker holds up.

Pure functions and records, without clocks and I/O. `Dispatcher` uses them to start batches with slow samples earlier,
and to start a *backup* of a batch that takes unusually long: a second computation of it on an idle worker, as in
MapReduce.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from teleloader_server.loading.tasks import SLOW_FROM
from teleloader_shared.codec import BatchId
from teleloader_shared.orders.plan import Plan
from teleloader_shared.spec import LoaderSpec

RECENT_BATCHES: Final = 256
"""Number of computing times from which the quantiles of a loader's batches are computed."""
MIN_BATCHES: Final = 16
"""Number of computing times below which the quantiles are unknown."""
REFRESH_BATCHES: Final = 16
"""Number of further computing times after which the quantiles are computed again."""

SLOW_FACTOR: Final = 2.0
"""A sample is slow if its time exceeds `SLOW_FROM` and this multiple of the median time of a batch; the prefetch window
hides shorter times."""
MAX_SLOW_SAMPLES: Final = 4096
"""Maximum number of slow samples of a dataset; beyond it, the slowest three quarters are kept."""
MAX_TABLES: Final = 32
"""Maximum number of datasets and mixtures whose slow samples are kept: the last ones for which a loader was registered.
"""
MAX_SUSPECTS: Final = 1024
"""Size of a batch above which its samples are not suspected if it was slow and the times of its samples are unknown."""

SCAN_SAMPLES: Final = 4096
"""Number of samples that one scan for slow samples examines, which takes about 0.4 ms."""
SCAN_BATCHES: Final = 256
"""Maximum number of batches of one scan."""
LEAD_FACTOR: Final = 2.0
"""Multiple of its expected time by which a batch with slow samples is started before it is needed."""
MAX_LEAD: Final = 4096
"""Maximum number of batches before which a batch with slow samples is started."""

MAX_DEPTH: Final = 1024
"""Maximum number of batches that are prefetched because some batches take longer than others."""
DEPTH_BYTES: Final = 128 * 2**20
"""Maximum size of these batches in bytes."""

BACKUP_FACTOR: Final = 3.0
"""Multiple of the 99th percentile of the computing time after which a batch gets a backup."""
BACKUP_LEAST: Final = 0.1
"""Minimum time in seconds without a result of its worker before a batch gets a backup."""
BACKUP_SHARE: Final = 0.05
"""Maximum fraction of the workers' computing time that backups may take, beyond `BACKUP_ALLOWANCE`."""
BACKUP_ALLOWANCE: Final = 10.0
"""Time in seconds that backups may take, regardless of `BACKUP_SHARE`."""


class BatchTimes:
    """Distribution of the recent computing times of a loader's batches, without batches of known slow samples."""

    __slots__ = ("_added", "_computed_at", "_p99", "_recent", "_typical")

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_BATCHES)
        self._added = 0
        self._computed_at = -REFRESH_BATCHES
        self._typical = self._p99 = 0.0

    def add(self, seconds: float) -> None:
        """Add the computing time of a batch in seconds."""
        self._recent.append(seconds)
        self._added += 1

    @property
    def typical(self) -> float | None:
        """Median of the recent times in seconds; None if too few are known."""
        return self._typical if self._is_known() else None

    @property
    def p99(self) -> float | None:
        """99th percentile of the recent times in seconds; None if too few are known."""
        return self._p99 if self._is_known() else None

    def _is_known(self) -> bool:
        if self._added < MIN_BATCHES:
            return False
        if self._added >= self._computed_at + REFRESH_BATCHES:
            self._computed_at, times = self._added, sorted(self._recent)
            self._typical, self._p99 = times[len(times) // 2], times[math.ceil(0.99 * len(times)) - 1]
        return True


class SlowBatch(NamedTuple):
    """Batch with slow samples."""

    seconds: float
    """Expected time of its slow samples in seconds."""
    samples: tuple[int, ...]
    """Indices of its slow samples."""


class SlowFetches(NamedTuple):
    """Slow fetches of a sample."""

    times: int
    """Number of slow fetches since the sample was added to the table."""
    batch_id: BatchId | None
    """Batch of the last one; None if unknown."""
    typical: float | None
    """Median time of the loader's batches at that time in seconds; None if unknown."""


class SlowSamples:
    """Bounded table of a dataset's slow samples, with the last measured time of each.

    If the time of each sample is unknown, as with ``__getitems__``, all samples of a slow batch are suspected; those
    whose next batch is not slow are removed again.
    """

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        """Time to fetch each slow sample in seconds, by index."""
        self.fetches: dict[int, SlowFetches] = {}
        """Slow fetches of each of these samples, for display."""
        self._changes = 0
        self._sorted = np.empty(0, np.int64), np.empty(0)
        """Indices and times at the last call of `sort`, in ascending order of the indices."""
        self._longest = 0.0

    def learn(
        self, samples: Iterable[tuple[int, float]], batch_id: BatchId | None = None, typical: float | None = None
    ) -> list[int]:
        """Set the times of samples in seconds; return the indices that were not in the table.

        Args:
            samples: Index and time of each sample.
            batch_id: Batch that contained them; None if unknown.
            typical: Median time of the loader's batches in seconds; None if unknown.
        """
        new = []
        for index, seconds in samples:
            if index not in self.seconds:
                new.append(index)
            self.seconds[index] = seconds
            before = self.fetches.get(index)
            self.fetches[index] = SlowFetches(1 if before is None else before.times + 1, batch_id, typical)
            self._changes += 1
        if len(self.seconds) > MAX_SLOW_SAMPLES:
            slowest = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)
            self.seconds = {index: self.seconds[index] for index in slowest[: MAX_SLOW_SAMPLES * 3 // 4]}
            self.fetches = {index: self.fetches[index] for index in self.seconds}
        return new

    def forget(self, indices: Iterable[int]) -> None:
        """Remove samples that are not slow any more."""
        for index in indices:
            self._changes += self.seconds.pop(index, None) is not None
            self.fetches.pop(index, None)

    def sort(self) -> None:
        """Make all changes visible to `find`, which otherwise ignores changes of less than a sixteenth of the table."""
        if self._changes:
            self._changes = 0
            known = sorted(self.seconds.items())
            self._sorted = np.array([i for i, _ in known], np.int64), np.array([s for _, s in known], np.float64)
            self._longest = max(self.seconds.values(), default=0.0)

    def _sort_if_due(self) -> None:
        if self._changes > len(self.seconds) // 16:
            self.sort()

    def find(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Return the positions of the slow samples in `indices`, and their times in seconds."""
        self._sort_if_due()
        known, seconds = self._sorted
        if not known.size:
            return np.empty(0, np.intp), np.empty(0)
        places = np.minimum(np.searchsorted(known, indices), known.size - 1)
        found = np.flatnonzero(known[places] == indices)
        return found, seconds[places[found]]

    def batch(self, indices: Iterable[int]) -> SlowBatch | None:
        """Return the slow samples among the indices of a batch; None if there are none."""
        found = {index: self.seconds[index] for index in indices if index in self.seconds}
        return SlowBatch(sum(found.values()), tuple(found)) if found else None

    @property
    def longest(self) -> float:
        """Maximum time of a sample in seconds; ignores the same changes as `find`."""
        self._sort_if_due()
        return self._longest


class SlowTables:
    """Tables of slow samples of all datasets, shared by all loaders of a server."""

    def __init__(self) -> None:
        self._tables: OrderedDict[tuple[str, str | None], SlowSamples] = OrderedDict()

    def all(self) -> Iterator[tuple[str, SlowSamples]]:
        """Iterate over the content that the tables belong to (`LoaderSpec.content`), and the tables."""
        return ((content, table) for (content, _), table in self._tables.items())

    def of(self, spec: LoaderSpec) -> SlowSamples:
        """Return the table of a loader's dataset, creating it if necessary."""
        key = spec.content, spec.fingerprint
        found = self._tables.setdefault(key, SlowSamples())
        self._tables.move_to_end(key)
        if len(self._tables) > MAX_TABLES:
            self._tables.popitem(last=False)
        return found


def slow_samples(
    fetch: float, measured: Sequence[tuple[int, float]], suspects: Iterable[int], typical: float | None
) -> list[tuple[int, float]]:
    """Return the slow samples of a computed batch, with their times in seconds.

    Args:
        fetch: Time to fetch all samples of the batch, in seconds.
        measured: Index and time in seconds of each sample that took longer than `SLOW_FROM`.
        suspects: Samples of the batch if the times of its samples are unknown, else empty.
        typical: Median time of a batch in seconds; None if it is unknown.
    """
    if typical is None:  # without slow samples
        typical = max(0.0, fetch - sum(seconds for _, seconds in measured))
    least = max(SLOW_FROM, SLOW_FACTOR * typical)
    found = [(index, seconds) for index, seconds in measured if seconds > least]
    return found or ([(index, fetch) for index in suspects] if fetch > least else [])


@dataclass(slots=True)
class Lookahead:
    """Search for batches with slow samples in one epoch of a seeded order."""

    plan: Plan
    slow: SlowSamples
    found: dict[int, SlowBatch] = field(default_factory=dict)
    """Batches with slow samples in the parts of the epoch that were scanned last, by number."""
    _scanned: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Numbers of these parts, in the order of their scans."""

    def __post_init__(self) -> None:
        """Use all samples that are known now."""
        self.slow.sort()

    @property
    def step(self) -> int:
        """Number of batches that one scan examines."""
        return max(1, min(SCAN_BATCHES, SCAN_SAMPLES // (self.plan.spec.batch_size or 1)))

    def scan(self, start: int) -> int:
        """Examine the part of the epoch that contains batch `start`; return the number after its last batch."""
        part, step = start // self.step, self.step
        numbers = range(part * step, min((part + 1) * step, len(self.plan)))
        if part not in self._scanned:
            self._scanned[part] = None
            self._scan(numbers)
            if len(self._scanned) > 2 * MAX_LEAD // step + 1:
                first, _ = self._scanned.popitem(last=False)
                for k in range(first * step, (first + 1) * step):
                    self.found.pop(k, None)
        return numbers.stop

    def _scan(self, numbers: range) -> None:
        batches = [self.plan[k] for k in numbers]
        if not batches:
            return
        indices = np.concatenate(batches)
        places, seconds = self.slow.find(indices)
        if not places.size:
            return
        ends = np.cumsum([len(batch) for batch in batches])
        for position, within, took in zip(
            np.searchsorted(ends, places, side="right").tolist(), places.tolist(), seconds.tolist(), strict=True
        ):
            k, sample = numbers[position], int(indices[within])
            known = self.found.get(k, SlowBatch(0.0, ()))
            if sample not in known.samples:  # padding repeats samples
                self.found[k] = SlowBatch(known.seconds + took, (*known.samples, sample))


def is_slow(seconds: float, typical: float | None) -> bool:
    """Return True if a batch whose slow samples take `seconds` must start earlier than others."""
    return seconds > max(SLOW_FROM, SLOW_FACTOR * (typical or 0.0))


def lead(seconds: float, rate: float) -> int:
    """Return how many batches before it is needed a batch with slow samples is started.

    Args:
        seconds: Expected time of the batch in seconds.
        rate: Maximum number of batches/s that its consumer receives.
    """
    return min(MAX_LEAD, math.ceil(LEAD_FACTOR * seconds * rate))


def depth(p99: float, rate: float, nbytes: float, budget: float) -> int:
    """Return how many batches to prefetch so that batches which take `p99` are ready in time.

    Args:
        p99: 99th percentile of the computing time in seconds.
        rate: Maximum number of batches/s that the consumer receives.
        nbytes: Size of a batch in bytes.
        budget: Memory budget in bytes, of which an eighth may be used.
    """
    return int(min(MAX_DEPTH, math.ceil(p99 * rate), min(DEPTH_BYTES, budget / 8) / max(1.0, nbytes)))


def patience(p99: float, expected: float) -> float:
    """Return the time in seconds without a result of its worker after which a batch gets a backup.

    Args:
        p99: 99th percentile of the computing time in seconds.
        expected: Expected time of the slow samples of the batch in seconds.
    """
    return max(BACKUP_LEAST, BACKUP_FACTOR * (p99 + expected))


@dataclass(slots=True)
class BackupBudget:
    """Limit on the computing time and on the number of backups of a worker pool."""

    computed: float = 0.0
    """Total computing time of all batches in seconds."""
    spent: float = 0.0
    """Total computing time of backups in seconds."""
    running: int = 0
    """Number of batches with a backup in progress."""

    def allows(self, num_workers: int) -> bool:
        """Return True if a pool of `num_workers` workers may start a further backup."""
        return self.running < max(1, num_workers // 4) and (
            self.spent <= BACKUP_ALLOWANCE + BACKUP_SHARE * self.computed
        )
