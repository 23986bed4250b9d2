"""Counters of datasets, loaders, consumers and workers, from which `stats` computes recent rates.

Updating the counters takes a few additions per batch.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol
from weakref import WeakValueDictionary

from teleloader_server.dispatch.error_log import MAX_MESSAGE, MAX_SHOWN_INDICES, MAX_TRACEBACK, MAX_TYPE, ErrorLog
from teleloader_server.dispatch.rates import RateWindow, Stopwatch, as_share
from teleloader_server.dispatch.records import Consumer, Epoch, training_loop
from teleloader_server.dispatch.timeline import Timeline
from teleloader_server.loading.stages import STAGES, Fetch
from teleloader_server.loading.tasks import SLOW_FROM, GroupReport, Task, indices_of
from teleloader_server.workers.pool import Lease
from teleloader_shared import codec
from teleloader_shared.codec import Failure, Substituted
from teleloader_shared.histogram import Histogram
from teleloader_shared.messages import NO_RECEIVING, ConsumerReport, ReceivingTotals
from teleloader_shared.stats import WINDOW, ErrorCount, SlowBatch

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger(__name__)

SLOWEST: Final = 5
MAX_ERROR_TYPES: Final = 20
OTHER_ERRORS: Final = "other"
"""Key under which all further exception types are counted once the table is full (`MAX_ERROR_TYPES`, with this key).

The table is bounded because datasets can create exception types at run time.
"""
MAX_KEPT_LIST: Final = 64 * 1024
"""Maximum size in bytes of an index list that is kept with a slow batch."""
MAX_PRINCIPALS: Final = 1000
"""Maximum number of principals with counters of their own: an issuer of JWTs may have any number of subjects."""
OTHER_PRINCIPALS: Final = "(others)"
MAX_KEPT_LOOPS: Final = 4096
OVERTAKEN: Final = 2.0
"""Seconds after a report within which an older one is ignored: requests on several connections can overtake each other.

A smaller elapsed time after this period is the report of a new client process.
"""
FETCH: Final = STAGES.index(Fetch)
"""Position of the `Fetch` stage in `GroupReport.stages`."""
MIN_STALL: Final = 0.5
"""Minimum time in seconds to fetch a batch whose slow samples are logged."""
RECENT_SLOW: Final = 64
"""Maximum number of recent batches that took long to fetch, by loader."""
KEEP_LOOPS: Final = 60.0
"""Seconds for which the counters of a training loop are kept after its last request."""


@dataclass(frozen=True, slots=True)
class EngineSource:
    """Owner of an engine's workers, and the setting for the worker count."""

    session: str | None
    """Key of the loader to which the workers belong; None for shared workers."""
    setting: str
    """Setting for the number of workers as shown to users, such as ``--num-workers {}``; ``{}`` stands for the number.
    """
    revision: int = 1
    """Number of the revision whose datasets the workers have (`versions`)."""

    @property
    def pool(self) -> str | None:
        """Name of the pool in statistics: the key of the loader, or ``revision N``; None for the first shared pool."""
        return self.session or (f"revision {self.revision}" if self.revision > 1 else None)


@dataclass(slots=True)
class _Error:
    count: int = 0
    failure: Failure | None = None
    when: float = 0.0


class _Slow(NamedTuple):
    seconds: float
    task: Task
    sample: int | None

    def record(self) -> SlowBatch:
        """Convert to a `SlowBatch` record of ``/stats``."""
        batch_id = self.task.batch_id
        return SlowBatch(
            batch_id.batch, batch_id.epoch, batch_id.loader, self.seconds, _shown_indices(self.task), self.sample
        )


class DatasetCounters:
    """Counters of one dataset, summed over all loaders."""

    def __init__(self, now: float) -> None:
        self.computed = 0
        self.sent = 0
        self.nbytes = 0
        self.failed = 0
        self.retried = 0
        self.substituted = 0
        self.reconnects = 0
        self.hedges = 0
        """Reconnects and hedges that clients report: a client reports all of them to each of its servers."""
        self.early = 0
        """Batches that were started earlier because they contain slow samples."""
        self.backups = 0
        """Batches that a second worker computed, too, because the first one took unusually long."""
        self.slow_samples = 0
        """Samples that were found to be slow."""
        self.stall_from = MIN_STALL
        """Time in seconds to fetch a batch from which its slow samples are logged."""
        self.cache_hits = 0
        self.cache_misses = 0
        self.cache_saved = 0.0
        """Total seconds that reading samples from caches saved."""
        self.tokens = 0
        self.tokens_padded = 0
        self.samples = 0
        self.waiting = 0.0
        """Total seconds for which consumers waited for batches that were not ready."""
        self.computed_window = RateWindow(now, 0, 0)
        """Sliding window of the numbers of computed samples and failed batches."""
        self.sent_window = RateWindow(now, 0, 0)
        """Sliding window of the numbers of sent batches and bytes."""
        self.slow_from = 0.0
        """Fetch time in seconds above which a batch is one of the `SLOWEST` slowest batches."""
        self._slowest: list[_Slow] = []
        self._errors: dict[str, _Error] = {}
        self.stages = {stage.name: Histogram() for stage in STAGES}
        """Histogram of the time per batch, by stage."""

    def mark(self, now: float) -> None:
        """Record the current totals in the rate windows."""
        self.computed_window.mark(now, self.samples, self.failed)
        self.sent_window.mark(now, self.sent, self.nbytes)

    def latest(self, now: float) -> tuple[float, ...]:
        """Return the sent batches/s and bytes/s, computed samples/s and failed batches/s since the latest sample."""
        sent = self.sent_window.latest(now, self.sent, self.nbytes)
        return *sent, *self.computed_window.latest(now, self.samples, self.failed)

    def slow(self, seconds: float, task: Task, sample: int | None) -> None:
        """Record a batch with its fetch time in seconds and its slowest sample; keep only the `SLOWEST` slowest."""
        if task.indices is not None and len(task.indices) > MAX_KEPT_LIST:
            task = task._replace(indices=None)
        self._slowest.append(_Slow(seconds, task, sample))
        self._slowest.sort(key=lambda slow: slow.seconds, reverse=True)
        del self._slowest[SLOWEST:]
        if len(self._slowest) == SLOWEST:
            self.slow_from = self._slowest[-1].seconds

    def slowest(self) -> list[SlowBatch]:
        """Return the batches with the longest fetch times, slowest first."""
        return [slow.record() for slow in self._slowest]

    def fail(self, failure: Failure) -> bool:
        """Count a failed batch by exception type; return True for the first failure with this type."""
        self.failed += 1
        return self.count_error(failure)

    def count_error(self, failure: Failure) -> bool:
        """Count an exception by type; return True for the first one of this type."""
        known = self._errors
        name = failure.type[:MAX_TYPE]
        if name not in known and len(known) >= MAX_ERROR_TYPES - 1:
            name = OTHER_ERRORS
        is_first = name not in known
        error = known.setdefault(name, _Error())
        error.count += 1
        error.failure = failure
        error.when = time.monotonic()
        return is_first

    def errors(self, now: float) -> list[ErrorCount]:
        """Return the error counts by exception type, most recent first."""
        latest = sorted(self._errors.items(), key=lambda item: item[1].when, reverse=True)
        return [
            ErrorCount(
                type=name,
                count=error.count,
                last=error.failure.message[:MAX_MESSAGE],
                traceback=error.failure.traceback[-MAX_TRACEBACK:],
                indices=error.failure.indices[:MAX_SHOWN_INDICES],
                sample=error.failure.sample,
                age=max(0.0, now - error.when),
            )
            for name, error in latest
            if error.failure is not None
        ]


class BatchSeconds(NamedTuple):
    """Mean times of a worker per batch in seconds; all 0 before the first batch."""

    stages: Mapping[str, float]
    """Time by stage, including the time without a CPU."""
    work: float
    """Time that the worker computes or is blocked, without the time for which it has no CPU."""


class SlowFetch(NamedTuple):
    """Batch that took long to fetch."""

    when: float
    """Time of its result."""
    seconds: float
    """Fetch time in seconds."""
    batch: int
    sample: int | None
    """Index of the sample that took longest; None if it is unknown."""


class LoaderCounters:
    """Counters of one loader: computed batches, and time per stage."""

    __slots__ = ("_slow", "batches", "cpu_wait", "dataset", "seconds", "window")

    def __init__(self, dataset: DatasetCounters, now: float) -> None:
        self.dataset = dataset
        self.batches = 0
        self.seconds = [0.0] * len(STAGES)
        self.cpu_wait = 0.0
        """Part of `seconds` for which workers had no CPU."""
        self._slow: deque[SlowFetch] = deque(maxlen=RECENT_SLOW)
        self.window = RateWindow(now, *self._totals())

    def _totals(self) -> tuple[float, ...]:
        return self.batches, self.cpu_wait, *self.seconds

    def mark(self, now: float) -> None:
        """Record the current totals in the rate window."""
        self.window.mark(now, *self._totals())

    def slow(self, slow: SlowFetch) -> None:
        """Record a batch that took long to fetch."""
        self._slow.append(slow)

    def recent_slow(self, now: float) -> list[SlowFetch]:
        """Return the batches of the last `WINDOW` seconds that took long to fetch, slowest first."""
        recent = (slow for slow in self._slow if now - slow.when <= WINDOW)
        return sorted(recent, key=lambda slow: slow.seconds, reverse=True)

    def batch_seconds(self, now: float) -> BatchSeconds:
        """Return the mean times per batch: of recent batches or, if there are none, of all batches."""
        batches, cpu_wait, *seconds = self.window.rates(now, *self._totals())
        if not batches:
            batches, cpu_wait, seconds = self.batches or 1, self.cpu_wait, self.seconds
        stages = {stage: spent / batches for stage, spent in zip(self.dataset.stages, seconds, strict=True)}
        return BatchSeconds(stages, (sum(seconds) - cpu_wait) / batches)


@dataclass(slots=True)
class WorkerCounters:
    """Counters of one worker ID, over all processes with this ID."""

    window: RateWindow
    """Sliding window of `totals`."""
    batches: int = 0
    busy: float = 0.0
    """Total time of completed tasks in seconds."""
    cpu_wait: float = 0.0
    """Part of `busy` for which the worker had no CPU."""
    cpu: float = 0.0
    """Part of `busy` for which the worker computed."""

    def totals(self, working_for: float) -> tuple[float, float, float, float]:
        """Return the time with a task, and its parts without a CPU, with a CPU, and of completed tasks.

        Args:
            working_for: Time spent on the current task so far in seconds.
        """
        return self.busy + working_for, self.cpu_wait, self.cpu, self.busy


class Recent(NamedTuple):
    """Recent rates of a training loop, all measured over the same time window."""

    span: float
    """Length of the time window in seconds."""
    batches: float
    """Sent batches/s."""
    nbytes: float
    """Sent bytes/s."""
    waiting: float
    """Fraction of `span` during which a requested batch was not ready."""
    sending: float
    """Fraction of `span` during which a response was being sent."""
    data_wait: float | None
    """Fraction of `span` during which the training loop waited for data; None if the client does not report it."""
    step: float
    """Seconds per batch of the training loop without its data wait; 0 if unknown."""
    receiving: ReceivingTotals | None = None
    """Rates per second of the client's totals; None if the client does not report them."""


class Latest(NamedTuple):
    """Rates of a training loop since the latest sample of its totals."""

    batches: float
    """Consumed batches/s; sent batches/s if the client does not report them."""
    nbytes: float
    """Sent bytes/s."""
    waiting: float
    """Fraction of the time during which a requested batch was not ready."""
    sending: float
    """Fraction of the time during which a response was being sent."""
    data_wait: float
    """Fraction of the time during which the training loop waited for data; NaN without a new report."""


class LoopCounters:
    """Counters of one training loop over all its iterations, because a single epoch may be too short for rates.

    If the client sends reports, recent rates are computed over the elapsed time in these reports. The client's and the
    server's fractions then refer to the same period, and time between two iterations (validation, for example) does not
    count.
    """

    def __init__(self, now: float) -> None:
        self.last_request = now
        """Time of the last request or heartbeat."""
        self.faults: tuple[int, int] | None = None
        """Reconnects and hedges in the last report; None before the first one, which may follow a longer pause."""
        self.batches = 0
        self.nbytes = 0
        self.waiting = Stopwatch()
        """Time during which a requested batch was not ready."""
        self.sending = Stopwatch()
        """Time during which a response was being sent."""
        self.connections: dict[asyncio.BaseTransport, RateWindow | None] = {}
        """Connections of the client, each with the window of its measurements; None before the first one."""
        self._since = now
        self._window = RateWindow(now, *self._totals(now))
        self._reported: RateWindow | None = None
        """Sliding window of data wait, consumed batches and the server's totals, by the client's clock.

        None before the first report.
        """
        self._last_reported: tuple[float, ...] = ()
        self._reports_receiving = False
        self._reported_at: float | None = None
        self._taken = 0
        """Batches that the training loop consumed since the first report."""
        self._last_taken: int | None = None
        self._taken_window = RateWindow(now, 0)

    def add_connection(self, transport: asyncio.BaseTransport) -> None:
        """Add a connection of the client, and forget closed ones."""
        if transport not in self.connections:
            kept = {one: window for one, window in self.connections.items() if not one.is_closing()}
            self.connections = {**kept, transport: None}

    def add_report(self, report: ConsumerReport, now: float) -> bool:
        """Record the report that the client sends with each request.

        Reports from before the training loop's first batch are not used for rates: workers and caches are still
        starting.

        Returns:
            False if the report is ignored, because it is older than the previous one (see `OVERTAKEN`).
        """
        if self._reported is not None and report.elapsed < self._last_reported[0]:
            if self._reported_at is not None and now - self._reported_at < OVERTAKEN:
                return False
            self._reported = None  # another client process with the same name starts to count at 0
        self._reported_at = now
        if self._last_taken is not None:
            self._taken += max(0, report.taken - self._last_taken)
        self._last_taken = report.taken
        if not report.taken:
            return True
        receiving = report.receiving or NO_RECEIVING
        last = (report.elapsed, report.waited, report.taken, *receiving, *self._totals(now))
        self._reports_receiving = report.receiving is not None
        if self._reported is None:
            self._reported = RateWindow(*last)
        self._last_reported = last
        return True

    def _totals(self, now: float) -> tuple[float, ...]:
        return self.batches, self.nbytes, self.waiting.until(now), self.sending.until(now)

    def mark(self, now: float) -> None:
        """Record the current totals in the rate windows."""
        self._window.mark(now, *self._totals(now))
        self._taken_window.mark(now, self._taken)
        if self._reported is not None:
            self._reported.mark(*self._last_reported)

    def latest(self, now: float) -> Latest:
        """Return the rates since the latest call of `mark`."""
        sent, nbytes, waiting, sending = self._window.latest(now, *self._totals(now))
        wait = math.nan
        if self._reported is not None:
            elapsed, *last = self._last_reported
            wait = self._reported.latest(elapsed, *last)[0]
        taken = sent if self._reported_at is None else self._taken_window.latest(now, self._taken)[0]
        return Latest(taken, nbytes, as_share(waiting), as_share(sending), wait if math.isnan(wait) else as_share(wait))

    def recent(self, now: float) -> Recent:
        """Return the recent rates of the training loop.

        Args:
            now: Time of the last request; the current time while a request is open.
        """
        if self._reported_at is not None and now - self._reported_at <= WINDOW:
            return self._recent_as_reported()
        batches, nbytes, waiting, sending = self._window.rates(now, *self._totals(now))
        span = max(0.0, now - self._since)
        return Recent(span, batches, nbytes, as_share(waiting), as_share(sending), None, 0.0)

    def _recent_as_reported(self) -> Recent:
        if self._reported is None:
            return Recent(0.0, 0.0, 0.0, 0.0, 0.0, None, 0.0)
        elapsed, *last = self._last_reported
        span = self._reported.span(elapsed)
        waited, taken, *received, batches, nbytes, waiting, sending = self._reported.rates(elapsed, *last)
        data_wait = as_share(waited) if span > 0 else None
        step = max(0.0, 1 - waited) / taken if taken > 0 else 0.0
        receiving = ReceivingTotals(*received) if self._reports_receiving and span > 0 else None
        return Recent(span, batches, nbytes, as_share(waiting), as_share(sending), data_wait, step, receiving)

    def consumed_rate(self, now: float) -> float | None:
        """Return the recent batches/s that the training loop consumed, from all servers; None without reports."""
        if self._reported_at is None:
            return None
        (rate,) = self._taken_window.rates(now, self._taken)
        return rate


@dataclass(slots=True)
class PrincipalCounters:
    """Resources that a principal has used."""

    batches: int = 0
    """Sent batches."""
    nbytes: int = 0
    """Size of the sent batches in bytes."""
    busy: float = 0.0
    """Time of workers for batches that were started for the principal, in seconds."""
    cpu: float = 0.0
    """CPU time of workers for these batches, in seconds."""


class ConsumerCounters:
    """Counters of one consumer, that is, of one iteration of a training loop over an epoch."""

    __slots__ = (
        "batches", "began", "consumer", "dataset", "last_request", "lent", "loop", "nbytes", "principal", "report",
        "waiting", "window",
    )  # fmt: skip

    def __init__(
        self,
        consumer: Consumer,
        principal: PrincipalCounters,
        dataset: DatasetCounters,
        loop: LoopCounters,
        now: float,
    ) -> None:
        self.consumer = consumer
        self.principal = principal
        self.began = now
        self.dataset = dataset
        self.loop = loop
        self.batches = 0
        self.nbytes = 0
        self.lent = 0
        """Batches that the consumer received in shared memory."""
        self.waiting = Stopwatch()
        """Time during which a requested batch was not ready."""
        self.window = RateWindow(now, 0, 0)
        self.report: ConsumerReport | None = None
        """Most recent report of the client."""
        self.last_request = now
        """Time of the last request or heartbeat."""

    def sent(self, count: int, nbytes: int) -> None:
        """Count the frames sent to the consumer in one response, and their bytes."""
        self.batches += count
        self.nbytes += nbytes
        loop, dataset, principal = self.loop, self.dataset, self.principal
        principal.batches += count
        principal.nbytes += nbytes
        loop.batches += count
        loop.nbytes += nbytes
        dataset.sent += count
        dataset.nbytes += nbytes

    @contextmanager
    def waiting_for_batch(self) -> Iterator[None]:
        """Context manager that measures the consumer's wait for a batch that is not ready."""
        now = time.monotonic()
        self.waiting.begin(now)
        self.loop.waiting.begin(now)
        try:
            yield
        finally:
            now = time.monotonic()
            self.loop.waiting.end(now)
            self.dataset.waiting += self.waiting.end(now)

    def requested(self, now: float, report: ConsumerReport | None) -> None:
        """Record a request or heartbeat, and the client's report if it includes one."""
        self.last_request = self.loop.last_request = now
        if report is not None and self.loop.add_report(report, now):
            self._count_faults(report)
            self.report = report

    def _count_faults(self, report: ConsumerReport) -> None:
        """Add the reconnects and hedges since the training loop's previous report to those of the dataset."""
        before, now = self.loop.faults, (report.reconnects, report.hedges)
        self.loop.faults = now
        if before is not None and before != now:
            self.dataset.reconnects += max(0, now[0] - before[0])
            self.dataset.hedges += max(0, now[1] - before[1])

    def position(self, consumer: Consumer) -> int:
        """Return the number of the first batch that was not consumed or, if it is not reported, not sent."""
        reported = None if self.report is None else self.report.position
        return consumer.position if reported is None else min(reported, consumer.loader.batches)

    @property
    def finished(self) -> bool | None:
        """True if the epoch is finished; None if the client does not report its position."""
        return None if self.report is None or self.report.position is None else self.report.finished

    @property
    def run(self) -> str | None:
        """Name of the training run; None if it is unknown."""
        return None if self.report is None else self.report.run

    def mark(self, now: float) -> None:
        """Record the current totals in the rate window."""
        self.window.mark(now, self.batches, self.nbytes)


class Marked(Protocol):
    """Interface of counters whose totals are sampled to compute recent rates."""

    def mark(self, now: float) -> None:
        """Record the current totals in the rate windows; called about once a second."""


_Key = tuple[str, str, Epoch]


class PoolCounters:
    """Counters of one worker pool, by worker, loader and consumer."""

    def __init__(self, metrics: Counters) -> None:
        self._metrics = metrics
        self.timeline: Final = metrics.timeline
        self.workers: defaultdict[int, WorkerCounters] = defaultdict(
            lambda: WorkerCounters(RateWindow(time.monotonic(), 0.0, 0.0, 0.0, 0.0))
        )
        self.lacks_memory = False
        """True while a worker has no batch because memory is full."""
        self.memory_full = Stopwatch()
        """Time for which `lacks_memory` was true."""
        self.memory_window = RateWindow(time.monotonic(), 0.0)
        self.loaders: dict[str, LoaderCounters] = {}
        self._consumers: dict[_Key, ConsumerCounters] = {}

    # -- events

    def consumer(self, consumer: Consumer, dataset: str) -> ConsumerCounters:
        """Return the counters of a consumer, creating them if necessary."""
        key = _key(consumer)
        known = self._consumers.get(key)
        if known is None:
            self._loader(consumer.epoch[0], dataset)
            loop = self._metrics.loop(consumer, dataset)
            principal, counters = self._metrics.principal(key[0]), self._metrics.datasets[dataset]
            known = self._consumers[key] = ConsumerCounters(consumer, principal, counters, loop, time.monotonic())
        known.consumer = consumer  # it may have been forgotten meanwhile
        return known

    def knows(self, consumer: Consumer) -> bool:
        """Return True if there are counters of a consumer."""
        return _key(consumer) in self._consumers

    def memory_changed(self, now: float) -> None:
        """Record that batches are not started from now on because memory is full, or that they are started again."""
        self.lacks_memory = not self.lacks_memory
        if self.lacks_memory:
            self.memory_full.begin(now)
        else:
            self.memory_full.end(now)

    def _loader(self, key: str, dataset: str) -> LoaderCounters:
        if key not in self.loaders:
            self.loaders[key] = LoaderCounters(self._metrics.datasets[dataset], time.monotonic())
        return self.loaders[key]

    def computed(
        self,
        worker: int,
        tasks: Sequence[Task],
        frames: Sequence[Lease],
        report: GroupReport,
        principal: str,
        run: str | None = None,
        *,
        is_preview: bool = False,
    ) -> None:
        """Count the batches of an epoch that a worker has computed.

        Args:
            worker: Worker ID.
            tasks: Tasks of the batches.
            frames: Frames of the batches.
            report: Report of the worker.
            principal: Name of the principal for which the batches were started.
            run: Name of the training run for which the last batch was computed, for the log of its failure.
            is_preview: Whether the last batch is computed only for display.
        """
        first, count = tasks[0], len(tasks)
        counters = self.workers[worker]
        loader = self.loaders.get(first.batch_id.loader) or self._loader(first.batch_id.loader, first.spec.dataset)
        dataset, total = loader.dataset, 0.0
        for stage, (histogram, times) in enumerate(zip(dataset.stages.values(), report.stages, strict=True)):
            seconds = sum(times)
            loader.seconds[stage] += seconds
            total += seconds
            histogram.observe(times)
        counters.batches += count
        counters.busy += total
        cpu_wait = min(report.cpu_wait, total)
        counters.cpu_wait += cpu_wait
        counters.cpu += min(report.cpu, total - cpu_wait)
        used = self._metrics.principal(principal)
        used.busy += total
        used.cpu += report.cpu
        loader.batches += count
        loader.cpu_wait += cpu_wait
        dataset.computed += count
        dataset.samples += sum(report.samples)
        dataset.cache_hits += report.cache.hits
        dataset.cache_misses += report.cache.misses
        dataset.cache_saved += report.cache.saved
        dataset.tokens += report.lengths[0]
        dataset.tokens_padded += report.lengths[1]
        fetched = report.stages[FETCH]
        longest = max(fetched)
        if longest > SLOW_FROM:
            place = fetched.index(longest)
            loader.slow(SlowFetch(time.monotonic(), longest, tasks[place].batch_id.batch, report.slowest[place]))
        if longest > dataset.slow_from:
            for task, fetch, sample in zip(tasks, fetched, report.slowest, strict=True):
                if fetch > dataset.slow_from:
                    dataset.slow(fetch, task, sample)
        if report.failed:
            content = codec.read(codec.Bits(frames[-1])).content
            if isinstance(content, Failure):
                self._metrics.errors.failed(tasks[-1], content, run, is_preview=is_preview)
                if dataset.fail(content):
                    _log(tasks[-1], content, run)

    def substituted(self, task: Task, substituted: Substituted, worker: int = -1, run: str | None = None) -> None:
        """Count the skipped and replaced samples of a batch, and log the first one with each type of exception.

        Args:
            task: Task of the batch.
            substituted: The samples.
            worker: Worker ID.
            run: Name of a training run that requested the batch; None if unknown.
        """
        counters = self._metrics.datasets[task.spec.dataset]
        for found in substituted.substitutions:
            position, index, replacement, error = found
            if task.substituted is None:  # otherwise the batch is computed again
                self._metrics.errors.substituted(task, worker, found, run)
            counters.substituted += 1
            kind, _, message = error.partition(": ")
            number = index if isinstance(index, int) else None
            listed = [] if number is None else [number]
            if counters.count_error(Failure(kind, message, "", listed, -1, number)):
                done = "skipped" if replacement is None else f"replaced by sample {replacement!r}"
                sample = f"sample {index!r}" if index is not None else f"the sample at position {position}"
                logger.warning("%s of dataset %s failed, and was %s: %r", sample, task.spec.dataset, done, error)

    def slow_samples(
        self, task: Task, new: Sequence[int], typical: float | None, fetch: float, measured: Sequence[tuple[int, float]]
    ) -> None:
        """Count slow samples that were not known; log those that take twice as long as all that were logged before.

        Args:
            task: Task of the batch that contains the samples.
            new: Indices of the samples.
            typical: Median time of a batch in seconds; None if it is unknown.
            fetch: Time to fetch the batch in seconds.
            measured: Indices and times in seconds of its slow samples; empty if only the time of the batch is known.
        """
        dataset = self._metrics.datasets[task.spec.dataset]
        dataset.slow_samples += len(new)
        if fetch < dataset.stall_from:
            return
        dataset.stall_from = 2 * fetch
        loader, epoch, batch = task.batch_id
        usual = "" if typical is None else f"; the median of all batches is {typical:.2g} s"
        samples = ", ".join(f"sample {index} took {seconds:.3f} s" for index, seconds in measured)
        logger.warning(
            "batch %d of epoch %d of dataset %s was slow: %s%s. In later epochs in seeded order, batches with slow "
            "samples are started earlier",
            batch, epoch, task.spec.dataset, samples or f"its samples took {fetch:.3f} s together", usual,
            extra={"loader": loader, "epoch": epoch, "batch": batch, "dataset": task.spec.dataset},
        )  # fmt: skip

    def backup_started(self, task: Task) -> None:
        """Count a backup."""
        self._metrics.datasets[task.spec.dataset].backups += 1

    def started_early(self, dataset: str) -> None:
        """Count a batch that was started earlier because it contains slow samples."""
        self._metrics.datasets[dataset].early += 1

    def retried(self, dataset: str) -> None:
        """Count a batch that is recomputed after the exit of its worker."""
        self._metrics.datasets[dataset].retried += 1

    def batch_failed(self, task: Task, failure: Failure) -> None:
        """Count a batch that is not retried, because it hung or ended its workers; the exit was already logged."""
        self._metrics.datasets[task.spec.dataset].fail(failure)
        self._metrics.errors.failed(task, failure, None)

    def worker_lost(self) -> None:
        """Count a worker exit that was not a planned replacement."""
        self._metrics.worker_restarts += 1

    def keep(self, consumers: Iterable[Consumer], loaders: Container[str]) -> list[ConsumerCounters]:
        """Keep only the counters of the given consumers and loaders; return those of all other consumers."""
        known = set(map(_key, consumers))
        ended = [tally for key, tally in self._consumers.items() if key not in known]
        self._consumers = {key: tally for key, tally in self._consumers.items() if key in known}
        self.loaders = {key: tally for key, tally in self.loaders.items() if key in loaders}
        return ended

    # -- reading

    def progressed(self, principal: str, consumer: str, epoch: Epoch, report: ConsumerReport | None) -> None:
        """Record a heartbeat with the progress of a consumer; do nothing if the consumer is unknown.

        Args:
            principal: Name of the consumer's principal.
            consumer: Name of the consumer.
            epoch: Epoch of the loader.
            report: Report of the client; None if it is invalid.
        """
        known = self._consumers.get((principal, consumer, epoch))
        if known is not None:
            known.requested(time.monotonic(), report)

    def run_of(self, consumer: Consumer) -> str | None:
        """Return the name of a consumer's training run; None if it is unknown."""
        known = self._consumers.get(_key(consumer))
        return None if known is None else known.run

    def of(self, consumer: Consumer) -> ConsumerCounters:
        """Return the counters of a consumer that was passed to `consumer` before."""
        return self._consumers[_key(consumer)]

    def marked(self) -> list[Marked]:
        """Return all counters of consumers and loaders, to sample their totals."""
        return [*self._consumers.values(), *self.loaders.values()]


class Counters:
    """All counters of a server."""

    def __init__(self) -> None:
        self.datasets: defaultdict[str, DatasetCounters] = defaultdict(lambda: DatasetCounters(time.monotonic()))
        self.principals: Final[dict[str, PrincipalCounters]] = {}
        """Counters by name of the principal, also of revoked tokens; those beyond `MAX_PRINCIPALS` have one counter."""
        self.errors: Final = ErrorLog()
        self.timeline: Final = Timeline()
        self.worker_restarts = 0
        """Number of worker exits other than planned replacements."""
        self._loops: WeakValueDictionary[tuple[str, str, str], LoopCounters] = WeakValueDictionary()
        """Counters of training loops, by principal, common prefix of the consumers' names (see `loop`), and dataset.

        The references are weak, because each consumer keeps the counters of its training loop alive.
        """
        self._kept: list[LoopCounters] = []
        """Counters of recently active training loops, kept alive between two sessions: a session ends with its epoch.
        """

    def principal(self, name: str) -> PrincipalCounters:
        """Return the counters of a principal, creating them if necessary."""
        if name not in self.principals and len(self.principals) >= MAX_PRINCIPALS:
            name = OTHER_PRINCIPALS
        return self.principals.setdefault(name, PrincipalCounters())

    def loop(self, consumer: Consumer, dataset: str) -> LoopCounters:
        """Return the counters of a consumer's training loop, creating them if necessary.

        Clients use a new consumer name for each iteration. The part of the name before the last ``#`` is the same for
        all iterations of a training loop.
        """
        key = consumer.principal_share.quota.name, training_loop(consumer.name), dataset
        known = self._loops.get(key)
        if known is None:
            known = self._loops[key] = LoopCounters(time.monotonic())
            self._kept.append(known)
        return known

    def marked(self) -> list[Marked]:
        """Return all counters of datasets and training loops, to sample their totals."""
        return [*self.datasets.values(), *self._loops.values()]

    def keep_recent(self, now: float) -> None:
        """Retain the counters of recently active training loops, even if they have no consumer.

        These are the training loops with a request in the last `KEEP_LOOPS` seconds, at most `MAX_KEPT_LOOPS`. The
        counters of other training loops are freed with their last consumer.
        """
        recent = sorted(
            (c for c in self._loops.values() if now - c.last_request <= KEEP_LOOPS), key=lambda c: c.last_request
        )
        self._kept = recent[-MAX_KEPT_LOOPS:]

    def num_active(self, now: float) -> int:
        """Return the number of training loops with a request in the last `WINDOW` seconds."""
        return sum(now - loop.last_request <= WINDOW for loop in self._kept)

    def pool(self) -> PoolCounters:
        """Create the counters of a new worker pool."""
        return PoolCounters(self)


def _key(consumer: Consumer) -> _Key:
    """Return a unique key of a consumer: clients choose names, which are unique only within a principal."""
    return consumer.principal_share.quota.name, consumer.name, consumer.epoch


def _log(task: Task, failure: Failure, run: str | None) -> None:
    loader, epoch, batch = task.batch_id
    what = f"{failure.type[:MAX_TYPE]}: {failure.message[:MAX_MESSAGE]}"
    # repr: the text may contain line breaks, which would forge log lines
    logger.warning(
        "batch %d of epoch %d of dataset %s failed: %r (see /stats for the traceback and the number of failures)",
        batch, epoch, task.spec.dataset, what,
        extra={
            "loader": loader, "epoch": epoch, "batch": batch, "dataset": task.spec.dataset, "worker": failure.worker,
            **({} if run is None else {"run": run}),
        },
    )  # fmt: skip


def _shown_indices(task: Task) -> list[int]:
    if task.spec.order == "client" and task.indices is None:
        return []  # the index list was too long to be kept
    return indices_of(task, MAX_SHOWN_INDICES)
