"""What has been counted since the server started; /stats is made of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from teleloader_server.dispatcher import Consumer, Run
from teleloader_server.loading import Report
from teleloader_server.pool import WorkerState
from teleloader_server.processes import NO_MEMORY, Memory
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.stats import ConsumerStats, DatasetStats, WorkerStats


@dataclass(slots=True)
class _Worker:
    batches: int = 0
    busy: float = 0.0


@dataclass(slots=True)
class _Consumer:
    batches: int = 0
    nbytes: int = 0
    waiting: float = 0.0


@dataclass(slots=True)
class _Dataset:
    computed: int = 0
    sent: int = 0
    failed: int = 0
    retried: int = 0
    samples: int = 0
    fetch: float = 0.0
    collate: float = 0.0
    encode: float = 0.0


class Metrics:
    """Counts what happens, and makes the records of it."""

    def __init__(self) -> None:
        self._workers: defaultdict[tuple[str | None, int], _Worker] = defaultdict(_Worker)
        self._datasets: defaultdict[str, _Dataset] = defaultdict(_Dataset)
        self._consumers: defaultdict[tuple[str, Run], _Consumer] = defaultdict(_Consumer)

    # -- what happened

    def computed(self, loader: str | None, worker: int, dataset: str, report: Report) -> None:
        """A worker finished a batch; `loader` is the one whose own it is, if any."""
        tally = self._workers[loader, worker]
        tally.batches += 1
        tally.busy += report.seconds
        counted = self._datasets[dataset]
        counted.computed += 1
        counted.failed += report.failed
        counted.samples += report.samples
        counted.fetch += report.fetch
        counted.collate += report.collate
        counted.encode += report.encode

    def retried(self, dataset: str) -> None:
        """A batch is begun again because its worker died."""
        self._datasets[dataset].retried += 1

    def given_up(self, dataset: str) -> None:
        """An error was put in the place of a batch that killed its workers."""
        self._datasets[dataset].failed += 1

    def sent(self, consumer: Consumer, dataset: str, nbytes: int) -> None:
        """A frame was handed to a consumer's connection."""
        tally = self._consumers[consumer.name, consumer.run]
        tally.batches += 1
        tally.nbytes += nbytes
        self._datasets[dataset].sent += 1

    def waited(self, consumer: Consumer, seconds: float) -> None:
        """A consumer had asked for a batch that was not ready."""
        self._consumers[consumer.name, consumer.run].waiting += seconds

    def forget(self, consumer: Consumer) -> None:
        """The consumer has gone."""
        self._consumers.pop((consumer.name, consumer.run), None)

    # -- the records

    def forget_workers(self, loader: str) -> None:
        """The workers that were the loader's own have ended."""
        for place in [place for place in self._workers if place[0] == loader]:
            del self._workers[place]

    def worker_stats(
        self, loader: str | None, state: WorkerState, memory: Mapping[int | None, Memory], *, busy: bool
    ) -> WorkerStats:
        """The record of one place of a pool."""
        tally = self._workers[loader, state.worker]
        used = memory.get(state.pid, NO_MEMORY)
        return WorkerStats(
            worker=state.worker,
            pid=state.pid,
            loader=loader,
            state="starting" if not state.ready else "busy" if busy else "idle",
            batches=tally.batches,
            busy=tally.busy,
            restarts=state.restarts,
            recycled=state.recycled,
            last_exit=state.last_exit,
            last_restart=state.last_restart,
            rss=used.rss,
            pss=used.pss,
        )

    def dataset_stats(self, name: str) -> DatasetStats:
        """The record of one dataset."""
        tally = self._datasets[name]
        return DatasetStats(
            dataset=name,
            batches_computed=tally.computed,
            batches_sent=tally.sent,
            batches_failed=tally.failed,
            batches_retried=tally.retried,
            samples_computed=tally.samples,
            fetch=tally.fetch,
            collate=tally.collate,
            encode=tally.encode,
        )

    def consumer_stats(self, consumer: Consumer, spec: LoaderSpec, batches: int, now: float) -> ConsumerStats:
        """The record of one consumer, whose epoch has so many batches."""
        key, epoch = consumer.run
        tally = self._consumers[consumer.name, consumer.run]
        return ConsumerStats(
            consumer=consumer.name,
            dataset=spec.dataset,
            loader=key,
            rank=spec.rank,
            world_size=spec.world_size,
            epoch=epoch,
            position=consumer.position,
            batches=batches,
            batches_sent=tally.batches,
            bytes_sent=tally.nbytes,
            waiting=tally.waiting,
            idle=now - consumer.last_seen,
        )
