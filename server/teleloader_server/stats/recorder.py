"""Recording of the last hour: the values of each second, taken from the counters that `StatsCollector` samples.

Values are the changes of the totals since the latest sample. CPU times of processes, diagnoses and round-trip times,
which cost more, are taken every few seconds, and count until the next ones.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from teleloader_server.dispatch.counters import LoopCounters
from teleloader_server.dispatch.engine import Engine
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.stats.history import (
    LABELS,
    MAX_DATASETS,
    MAX_LOOPS,
    Marks,
    Ring,
    RingTable,
    Values,
    changes_of,
    series_of,
    span_of,
)
from teleloader_shared.history import (
    CONSUMER_SERIES,
    DATASET_SERIES,
    ERROR_PAUSE_S,
    SERVER_SERIES,
    History,
    LoopId,
)
from teleloader_shared.server_summary import MAX_LOADERS, MAX_TEXT, ServerSummary
from teleloader_shared.stats import WINDOW, Diagnosis
from teleloader_shared.units import counted
from teleloader_shared.version import VERSION

DATA_WAIT: Final = CONSUMER_SERIES.index("data_wait")
NO_VALUE: Final = math.nan


class Tick(NamedTuple):
    """Measurements of the second that ends."""

    lag: float
    """Lag of the event loop in seconds."""
    main_cpu: float | None
    """Fraction of the time for which the thread of the event loop computed; None if unknown."""
    busy: list[float]
    """Busy fraction of each worker."""


class LoopKey(NamedTuple):
    """Training loop over all its iterations."""

    token: str
    name: str
    """Part of its consumers' names that all iterations have in common."""
    dataset: str

    @property
    def id(self) -> str:
        """Name for URLs."""
        return hashlib.blake2b("\n".join(self).encode(errors="replace"), digest_size=8).hexdigest()


@dataclass(slots=True)
class LoopState:
    """Training loop whose series are kept, and its latest measurements."""

    run: str | None
    loop: weakref.ref[LoopCounters] | None = None
    """Its counters; a weak reference, because its consumers decide how long they are kept."""
    loader: str = ""
    """Key of the loader of its latest iteration."""
    diagnosis: Diagnosis | None = None
    code: float = NO_VALUE
    """Diagnosis: position in `LABELS`; NaN if unknown."""
    rtt: float = NO_VALUE
    diagnosed: bool = False
    """True if the latest diagnoses included it."""


class UnknownSeries(LookupError):
    """No series are kept of a dataset or training loop."""


class Recorder:
    """Series and events of the last hour.

    Args:
        service: Loader service whose counters are recorded.
        started: Time of second 0, in seconds of a monotonic clock.
    """

    def __init__(self, service: LoaderService, started: float) -> None:
        self._service = service
        self._counters = service.counters
        self._started = started
        self._started_wall = time.time() - (time.monotonic() - started)
        self._server = Ring(len(SERVER_SERIES) + 1)
        self._datasets: RingTable[str, None] = RingTable(len(DATASET_SERIES), MAX_DATASETS, round(WINDOW))
        self._loops: RingTable[LoopKey, LoopState] = RingTable(len(CONSUMER_SERIES) + 1, MAX_LOOPS, round(WINDOW))
        self._marks = Marks()
        self._marks.add(0, "start", f"Server process {os.getpid()} started")
        self._machine_cpu = NO_VALUE
        self._restarts = 0
        self._exits: dict[str, int] = {}
        """Number of exits of each worker by the description of its last one, to find what has changed."""
        self._num_workers: int | None = None
        self._is_draining = False
        self._last_error: int | None = None

    @property
    def nbytes(self) -> int:
        """Memory of all series in bytes."""
        return self._server.nbytes + self._datasets.nbytes + self._loops.nbytes

    # -- recording

    def set_machine_cpu(self, idle: float | None) -> None:
        """Set the idle fraction of the machine's CPUs, which counts until it is set again."""
        self._machine_cpu = NO_VALUE if idle is None else 1 - idle

    def begin_diagnoses(self) -> None:
        """Begin a new round of diagnoses: training loops that are not diagnosed in it have none."""
        for _, state, _ in self._loops:
            state.diagnosed = False

    def keeps(self, key: LoopKey, loop: LoopCounters, loader: str, run: str | None, now: float) -> LoopState | None:
        """Return the state of an active training loop; None if the series of `MAX_LOOPS` other active ones are kept."""
        state = self._loops.owner(key) or LoopState(run)
        if self._loops.keep(key, state, self._second(now)) is None:
            return None
        state.run, state.loader, state.loop, state.diagnosed = run, loader, weakref.ref(loop), True
        return state

    @staticmethod
    def diagnosed(state: LoopState, diagnosis: Diagnosis, rtt: float | None) -> None:
        """Set the diagnosis and the round-trip time of a training loop, which count until the next ones."""
        state.diagnosis = diagnosis
        state.code = float(LABELS.index(diagnosis.bottleneck))
        state.rtt = NO_VALUE if rtt is None else rtt

    def end_diagnoses(self) -> None:
        """Remove the diagnoses of training loops that were not diagnosed in this round."""
        for _, state, _ in self._loops:
            if not state.diagnosed:
                state.code = state.rtt = NO_VALUE
                state.diagnosis = None

    def record(self, now: float, engines: Sequence[Engine], tick: Tick) -> None:
        """Record the second that ends; called before the totals are sampled.

        Args:
            now: Current time in seconds.
            engines: Running engines.
            tick: Measurements of this second.
        """
        second = self._second(now)
        batches = nbytes = errors = 0.0
        for name, tally in self._counters.datasets.items():
            values = tally.latest(now)
            batches, nbytes, errors = batches + values[0], nbytes + values[1], errors + values[3]
            ring = self._datasets.keep(name, None, second) if any(values) else self._datasets.get(name)
            if ring is not None:
                ring.put(second, values)
        wait, code = self._record_loops(now, second)
        self._server.put(
            second,
            (
                batches,
                nbytes,
                wait,
                sum(tick.busy) / len(tick.busy) if tick.busy else NO_VALUE,
                NO_VALUE if tick.main_cpu is None else tick.main_cpu,
                self._machine_cpu,
                tick.lag,
                sum(engine.memory_used for engine in engines) / self._service.limits.memory_budget,
                sum(engine.prefetched for engine in engines),
                errors,
                self._counters.num_active(now),
                code,
            ),
        )
        self._record_marks(now, second, engines, has_errors=errors > 0)

    def _record_loops(self, now: float, second: int) -> tuple[float, float]:
        """Record the active training loops; return their mean data wait, and the diagnosis that needs a change most."""
        waits, codes = [], []
        for _, state, ring in self._loops:
            loop = None if state.loop is None else state.loop()
            if loop is None:
                continue
            found = loop.latest(now)
            is_recent = now - loop.last_request <= WINDOW
            if not is_recent and not found.waiting and not found.sending:
                continue
            wait = found.data_wait
            if math.isnan(wait) and is_recent:  # without a report in this second
                wait = ring.latest(second - 1, DATA_WAIT)
            ring.put(
                second, (found.batches, found.nbytes, wait, found.waiting, found.sending, state.rtt, state.code)
            )  # fmt: skip
            waits.append(found.waiting if math.isnan(wait) else wait)
            if not math.isnan(state.code):
                codes.append(state.code)
        return sum(waits) / len(waits) if waits else NO_VALUE, min(codes, default=NO_VALUE)

    def _record_marks(self, now: float, second: int, engines: Sequence[Engine], *, has_errors: bool) -> None:
        if has_errors:
            if self._last_error is None or second - self._last_error > ERROR_PAUSE_S:
                self._marks.add(second, "error", self._latest_error(now))
            self._last_error = second
        if self._counters.worker_restarts != self._restarts:
            exits = self._new_exits(engines)
            lost = self._counters.worker_restarts - self._restarts
            self._marks.add(second, "restart", exits or f"{counted(lost, 'worker')} exited")
            self._restarts = self._counters.worker_restarts
        if self._service.num_workers != self._num_workers:
            if self._num_workers is not None:
                self._marks.add(
                    second, "workers", f"{self._service.num_workers} workers instead of {self._num_workers}"
                )
            self._num_workers = self._service.num_workers
        if self._service.draining.is_set() and not self._is_draining:
            self._is_draining = True
            self._marks.add(second, "draining", "The server stops")

    def _latest_error(self, now: float) -> str:
        found = [
            (error.age, name, error) for name, tally in self._counters.datasets.items() for error in tally.errors(now)
        ]
        if not found:
            return "A batch failed"
        _, name, error = min(found, key=lambda each: each[0])
        return f"{error.type} in dataset {name}: {error.last.partition(chr(10))[0][:200]}"

    def _new_exits(self, engines: Sequence[Engine]) -> str:
        """Return the descriptions of worker exits since the last call."""
        exits = {
            state.restarts.last_exit: state.restarts.count
            for engine in engines
            for state, _ in engine.workers()
            if state.restarts.last_exit is not None and state.restarts.count
        }
        new = [text for text, count in exits.items() if self._exits.get(text) != count]
        self._exits = exits
        return "; ".join(new[:3])

    def _second(self, now: float) -> int:
        return int(now - self._started)

    # -- reading

    def history(
        self, now: float, *, since: int | None, until: int | None, step: int, dataset: str | None, consumer: str | None
    ) -> History:
        """Return the series of the server, or those of a dataset or training loop.

        Args:
            now: Current time in seconds.
            since: First second; None for all that are kept.
            until: Second after the last one; None for the latest one.
            step: Minimum seconds per point.
            dataset: Name of a dataset; None for others.
            consumer: `LoopId.id` of a training loop; None for others.

        Raises:
            UnknownSeries: If no series of the dataset or training loop are kept.
        """
        # the current second is recorded when it ends, up to a sample later
        span = span_of(self._second(now), since, until, step)
        ring = self._server
        names: Sequence[str] = SERVER_SERIES
        if consumer is not None:
            names = CONSUMER_SERIES
            ring = next((ring for key, _, ring in self._loops if key.id == consumer), None) or self._missing(
                f"training loop {consumer[:64]!r}"
            )
        elif dataset is not None:
            names = DATASET_SERIES
            ring = self._datasets.get(dataset) or self._missing(f"dataset {dataset[:200]!r}")
        return History(
            pid=os.getpid(),
            started=self._started_wall,
            now=self._second(now),
            since=span.since,
            step=span.step,
            series=series_of(ring, names, span),
            diagnoses=[] if names == DATASET_SERIES else changes_of(ring, len(names), span),
            marks=self._marks.since(span.since),
            datasets=sorted(name for name, _, _ in self._datasets),
            consumers=[
                LoopId(key.id, key.name, key.token, key.dataset, state.run) for key, state in self._loops.recent()
            ],
        )

    def summary(self, now: float) -> ServerSummary:
        """Return the figures for the announcements of this server."""
        second = self._second(now)
        recent = self._server.window(second - round(WINDOW), second + 1)
        means = {name: _mean(recent[row]) for row, name in enumerate(SERVER_SERIES)}
        found = [state for _, state, _ in self._loops if state.diagnosis is not None]
        best = max((d for state in found if (d := state.diagnosis) is not None), key=_certainty, default=None)
        return ServerSummary(
            version=VERSION,
            uptime=now - self._started,
            workers=self._service.num_workers,
            batches_per_second=means["batches_per_second"] or 0.0,
            bytes_per_second=means["bytes_per_second"] or 0.0,
            busy=means["workers_busy"],
            data_wait=means["data_wait"],
            bottleneck=None if best is None else best.bottleneck,
            confidence=0.0 if best is None else best.confidence,
            advice="" if best is None else best.advice[:MAX_TEXT],
            loaders=sorted({state.loader for state in found})[:MAX_LOADERS],
        )

    @staticmethod
    def _missing(what: str) -> Ring:
        raise UnknownSeries(
            f"unknown {what}: the server keeps the history of recently active ones. GET /stats/history lists them"
        )


def _certainty(diagnosis: Diagnosis) -> tuple[bool, float]:
    """Return the key by which diagnoses of training loops are compared: those that explain a wait are larger."""
    return diagnosis.bottleneck not in ("unknown", "idle", "finished"), diagnosis.confidence


def _mean(values: Values) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
