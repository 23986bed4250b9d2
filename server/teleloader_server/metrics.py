"""What is counted: a few additions for each batch. What is recent, and what it means, is found out when asked for."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from teleloader_server.dispatcher import Consumer, Run
from teleloader_server.loading import Report, Task, indices_of
from teleloader_server.pool import Lease
from teleloader_server.windows import Ongoing, Window
from teleloader_shared import codec
from teleloader_shared.codec import Failure
from teleloader_shared.histogram import Histogram
from teleloader_shared.messages import ConsumerReport
from teleloader_shared.stats import ErrorCount, SlowBatch

logger = logging.getLogger(__name__)

SLOWEST: Final = 5
MAX_ERROR_TYPES: Final = 20
OTHER_ERRORS: Final = "other"
"""What counts errors of further types: a dataset can make types as it goes."""
MAX_TYPE: Final = 200
MAX_MESSAGE: Final = 500
MAX_TRACEBACK: Final = 4000
MAX_SHOWN_INDICES: Final = 20
MAX_KEPT_LIST: Final = 64 * 1024
"""Bytes of a client's index list that are kept with a slow batch."""
STAGES: Final = ("fetch", "collate", "encode")


@dataclass(slots=True)
class _Error:
    count: int = 0
    failure: Failure | None = None
    when: float = 0.0


class _Slow(NamedTuple):
    seconds: float
    task: Task

    def record(self) -> SlowBatch:
        """The batch as it is shown."""
        address = self.task.address
        return SlowBatch(address.batch, address.epoch, address.loader, self.seconds, _shown_indices(self.task))


class DatasetTally:
    """What was done for all loaders of one dataset."""

    def __init__(self, now: float) -> None:
        self.computed = 0
        self.sent = 0
        self.nbytes = 0
        self.failed = 0
        self.retried = 0
        self.samples = 0
        self.waiting = 0.0
        """Seconds for which consumers, together, have waited for batches that were not ready."""
        self.made = Window(now, 0)
        """Of samples."""
        self.left = Window(now, 0, 0)
        """Of batches and bytes that were sent."""
        self.slow_from = 0.0
        """What a batch must have taken to be among the slowest."""
        self._slowest: list[_Slow] = []
        self._errors: dict[str, _Error] = {}
        self.stages = {stage: Histogram() for stage in STAGES}
        """How long batches took, by stage."""

    def mark(self, now: float) -> None:
        """Note the totals."""
        self.made.mark(now, self.samples)
        self.left.mark(now, self.sent, self.nbytes)

    def slow(self, seconds: float, task: Task) -> None:
        """A batch took longer to be fetched than the slowest ones, or than some of them."""
        if task.indices is not None and len(task.indices) > MAX_KEPT_LIST:
            task = task._replace(indices=None)
        self._slowest.append(_Slow(seconds, task))
        self._slowest.sort(key=lambda slow: slow.seconds, reverse=True)
        del self._slowest[SLOWEST:]
        if len(self._slowest) == SLOWEST:
            self.slow_from = self._slowest[-1].seconds

    def slowest(self) -> list[SlowBatch]:
        """The batches that took longest to be fetched, the slowest first."""
        return [slow.record() for slow in self._slowest]

    def fail(self, failure: Failure) -> bool:
        """An exception was put in a batch's place; whether it is the first of its type."""
        self.failed += 1
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
        """The failures by type, the latest first."""
        latest = sorted(self._errors.items(), key=lambda item: item[1].when, reverse=True)
        return [
            ErrorCount(
                type=name,
                count=error.count,
                last=error.failure.message[:MAX_MESSAGE],
                traceback=error.failure.traceback[-MAX_TRACEBACK:],
                indices=error.failure.indices[:MAX_SHOWN_INDICES],
                age=max(0.0, now - error.when),
            )
            for name, error in latest
            if error.failure is not None
        ]


class LoaderTally:
    """What was done for one loader."""

    __slots__ = ("batches", "dataset", "seconds", "window")

    def __init__(self, dataset: DatasetTally, now: float) -> None:
        self.dataset = dataset
        self.batches = 0
        self.seconds = [0.0] * len(STAGES)
        self.window = Window(now, 0, *self.seconds)

    def mark(self, now: float) -> None:
        """Note the totals."""
        self.window.mark(now, self.batches, *self.seconds)

    def batch_seconds(self, now: float) -> dict[str, float]:
        """What a batch took in each stage, on average: lately, or when there was one last."""
        made, *seconds = self.window.rates(now, self.batches, *self.seconds)
        if not made:
            made, seconds = self.batches, self.seconds
        return {stage: spent / made if made else 0.0 for stage, spent in zip(STAGES, seconds, strict=True)}


@dataclass(slots=True)
class WorkerTally:
    """What one place of a pool did."""

    window: Window
    """Of the time at work."""
    batches: int = 0
    busy: float = 0.0


class ConsumerTally:
    """What one consumer was given."""

    __slots__ = ("batches", "dataset", "nbytes", "report", "reports", "sending", "since", "waiting", "window")

    def __init__(self, dataset: DatasetTally, now: float) -> None:
        self.dataset = dataset
        self.since = now
        self.batches = 0
        self.nbytes = 0
        self.waiting = Ongoing()
        """What it had asked for was not ready."""
        self.sending = Ongoing()
        """An answer to it was being sent."""
        self.window = Window(now, 0, 0, 0.0, 0.0)
        self.report: ConsumerReport | None = None
        """What its client said last."""
        self.reports: Window | None = None
        """Of how long its loop waited, by the client's clock."""

    def sent(self, nbytes: int) -> None:
        """A frame was handed to its connection."""
        self.batches += 1
        self.nbytes += nbytes
        self.dataset.sent += 1
        self.dataset.nbytes += nbytes

    def waits(self) -> None:
        """It waits for a batch that is not ready."""
        self.waiting.begin(time.monotonic())

    def has_waited(self) -> None:
        """It waits no more."""
        self.dataset.waiting += self.waiting.end(time.monotonic())

    def reported(self, report: ConsumerReport) -> None:
        """Its client says how it fares."""
        if self.reports is None or (self.report is not None and report.elapsed < self.report.elapsed):
            self.reports = Window(report.elapsed, report.waited)
        self.report = report

    def totals(self, now: float) -> tuple[float, ...]:
        """What the window is of: batches, bytes, and the seconds of waiting and of sending."""
        return self.batches, self.nbytes, self.waiting.until(now), self.sending.until(now)

    def mark(self, now: float) -> None:
        """Note the totals."""
        self.window.mark(now, *self.totals(now))
        if self.reports is not None and self.report is not None:
            self.reports.mark(self.report.elapsed, self.report.waited)

    @property
    def loop_waiting_share(self) -> float | None:
        """Recent share of the time for which its loop waited; None where the client has not said it twice."""
        if self.reports is None or self.report is None or not self.reports.span(self.report.elapsed):
            return None
        (share,) = self.reports.rates(self.report.elapsed, self.report.waited)
        return min(1.0, max(0.0, share))


class PoolTally:
    """What the workers of one pool did, and for whom."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.workers: defaultdict[int, WorkerTally] = defaultdict(lambda: WorkerTally(Window(time.monotonic(), 0.0)))
        self.loaders: dict[str, LoaderTally] = {}
        self._consumers: dict[tuple[str, Run], ConsumerTally] = {}

    # -- what happened

    def consumer(self, name: str, run: Run, dataset: str) -> ConsumerTally:
        """The counts of a consumer, which may be new."""
        known = self._consumers.get((name, run))
        if known is None:
            self._loader(run[0], dataset)
            known = ConsumerTally(self._metrics.dataset(dataset), time.monotonic())
            self._consumers[name, run] = known
        return known

    def _loader(self, key: str, dataset: str) -> LoaderTally:
        if key not in self.loaders:
            self.loaders[key] = LoaderTally(self._metrics.dataset(dataset), time.monotonic())
        return self.loaders[key]

    def computed(self, worker: int, task: Task, lease: Lease, report: Report) -> None:
        """A worker finished a batch."""
        _, _, fetch, collate, encode = report
        place = self.workers[worker]
        place.batches += 1
        place.busy += fetch + collate + encode
        loader = self.loaders.get(task.address.loader) or self._loader(task.address.loader, task.spec.dataset)
        loader.batches += 1
        seconds = loader.seconds
        seconds[0] += fetch
        seconds[1] += collate
        seconds[2] += encode
        dataset = loader.dataset
        dataset.computed += 1
        dataset.samples += report.samples
        stages = dataset.stages
        stages["fetch"].note(fetch)
        stages["collate"].note(collate)
        stages["encode"].note(encode)
        if fetch > dataset.slow_from:
            dataset.slow(fetch, task)
        if report.failed:
            content = codec.read(lease, _no_array).content
            if isinstance(content, Failure) and dataset.fail(content):
                _log(task, content)

    def retried(self, dataset: str) -> None:
        """A batch is begun again because its worker died."""
        self._metrics.dataset(dataset).retried += 1

    def given_up(self, dataset: str, failure: Failure) -> None:
        """An error was put in the place of a batch that killed its workers, or hung, as the log says already."""
        self._metrics.dataset(dataset).fail(failure)

    def worker_lost(self) -> None:
        """A worker died."""
        self._metrics.worker_restarts += 1

    def keep(self, consumers: Iterable[Consumer], loaders: Container[str]) -> None:
        """Forget all consumers and loaders but these."""
        known = {(consumer.name, consumer.run) for consumer in consumers}
        self._consumers = {who: tally for who, tally in self._consumers.items() if who in known}
        self.loaders = {key: tally for key, tally in self.loaders.items() if key in loaders}

    # -- what is recent

    def of(self, consumer: Consumer) -> ConsumerTally:
        """The counts of a consumer that is known."""
        return self._consumers[consumer.name, consumer.run]

    def mark(self, now: float) -> None:
        """Note all totals but those of the workers."""
        for consumer in self._consumers.values():
            consumer.mark(now)
        for loader in self.loaders.values():
            loader.mark(now)


class Metrics:
    """All that is counted."""

    def __init__(self) -> None:
        self.datasets: dict[str, DatasetTally] = {}
        self.worker_restarts = 0
        """Workers that died."""

    def dataset(self, name: str) -> DatasetTally:
        """The counts of a dataset, which may be new."""
        known = self.datasets.get(name)
        if known is None:
            known = self.datasets[name] = DatasetTally(time.monotonic())
        return known

    def pool(self) -> PoolTally:
        """Counts for the workers of a new pool."""
        return PoolTally(self)


def _log(task: Task, failure: Failure) -> None:
    loader, epoch, batch = task.address
    what = f"{failure.type[:MAX_TYPE]}: {failure.message[:MAX_MESSAGE]}"
    # repr: it may hold line breaks, and pass for lines of the log
    logger.warning(
        "batch %d of epoch %d of dataset %s failed: %r (/stats has the traceback, and counts those that follow)",
        batch, epoch, task.spec.dataset, what,
        extra={
            "loader": loader, "epoch": epoch, "batch": batch, "dataset": task.spec.dataset, "worker": failure.worker,
        },
    )  # fmt: skip


def _no_array(bits: NDArray[Any], _dtype: str, _kind: str) -> Any:
    return bits


def _shown_indices(task: Task) -> list[int]:
    if task.spec.order == "client" and task.indices is None:
        return []  # its list was too long to be kept
    return indices_of(task)[:MAX_SHOWN_INDICES]
