"""Memory and CPU use of each worker over the last hour, in rings of fixed size."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import numpy as np

from teleloader_shared.inspection import WorkerSample

SAMPLE_EVERY: Final = 5.0
"""Seconds between two samples."""
MAX_SAMPLES: Final = 720
"""Number of samples of a worker: an hour. They take 23 KB."""
MAX_WORKERS: Final = 1024
"""Maximum number of workers whose samples are kept."""

_SAMPLE: Final = np.dtype([("at", "f8"), ("pid", "i8"), ("rss", "i8"), ("cpu", "f8")])

WorkerKey = tuple[str | None, int]
"""Key of the loader that a worker is private to, and worker ID."""


class Ring:
    """Ring of the last samples of one worker."""

    def __init__(self, size: int = MAX_SAMPLES) -> None:
        self._samples = np.zeros(size, _SAMPLE)
        self._added = 0

    def add(self, at: float, pid: int, rss: int, cpu_seconds: float) -> None:
        """Add a sample; it replaces the oldest one if the ring is full.

        Args:
            at: Time of the sample.
            pid: Process ID.
            rss: Resident memory in bytes.
            cpu_seconds: CPU time of the process since its start.
        """
        self._samples[self._added % len(self._samples)] = (at, pid, rss, cpu_seconds)
        self._added += 1

    def records(self, now: float) -> list[WorkerSample]:
        """Return the samples, oldest first; the first sample of each process, whose CPU use is unknown, is omitted."""
        place = self._added % len(self._samples)
        ordered = self._samples[: self._added]
        if self._added > len(self._samples):
            ordered = np.roll(self._samples, -place)
        found, rows = [], ordered.tolist()
        for (before, known, _, used_before), (at, pid, rss, used) in pairwise(rows):
            if pid == known and at > before:
                cpu = max(0.0, used - used_before) / (at - before)
                found.append(WorkerSample(max(0.0, now - at), pid, rss, cpu))
        return found


class WorkerHistory:
    """Samples of all workers; those of removed workers are deleted."""

    def __init__(self) -> None:
        self._rings: dict[WorkerKey, Ring] = {}

    def sample(self, now: float, workers: Iterable[tuple[WorkerKey, int, int, float]]) -> None:
        """Add a sample of each worker.

        Args:
            now: Current time.
            workers: Key, process ID, resident memory in bytes, and CPU seconds of each worker.
        """
        before, self._rings = self._rings, {}
        for key, pid, rss, used in workers:
            if len(self._rings) < MAX_WORKERS:
                ring = self._rings[key] = before.get(key) or Ring()
                ring.add(now, pid, rss, used)

    def of(self, key: WorkerKey, now: float) -> list[WorkerSample]:
        """Return the samples of a worker, oldest first."""
        ring = self._rings.get(key)
        return [] if ring is None else ring.records(now)
