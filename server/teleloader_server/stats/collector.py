"""Collection of the ``/stats`` statistics, computed from counters on request.

Totals are sampled once a second, for recent rates and for the history of the last hour (`recorder`). All other work is
done on request.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Final, NamedTuple, TypeVar

from teleloader_server.dispatch.counters import BatchSeconds, ConsumerCounters, DatasetCounters, LoopCounters
from teleloader_server.dispatch.engine import Engine
from teleloader_server.dispatch.rates import RateWindow, as_share
from teleloader_server.dispatch.records import Consumer, Loader, training_loop
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.dispatch.versions import Version
from teleloader_server.limits import default_num_workers
from teleloader_server.loading.replay import Replayed
from teleloader_server.loading.stages import STAGES
from teleloader_server.loading.tasks import SLOW_FROM
from teleloader_server.stats.bottleneck import diagnose
from teleloader_server.stats.demand import ConsumerLoad, demand, is_saturated
from teleloader_server.stats.evidence import (
    IDLE_GRACE_S,
    ConsumerRates,
    Machine,
    MainProcess,
    PoolLoad,
    Receiving,
    Straggler,
    total_demand,
)
from teleloader_server.stats.links import measure
from teleloader_server.stats.machine import MachineUse, MainThread
from teleloader_server.stats.recorder import LoopKey, Recorder, Tick
from teleloader_server.stats.worker_history import WorkerHistory
from teleloader_server.workers import procfs
from teleloader_server.workers.pool import WorkerState
from teleloader_server.workers.procfs import NO_MEMORY, CpuUse, Memory
from teleloader_shared.codec import BatchId
from teleloader_shared.histogram import Histogram
from teleloader_shared.history import History
from teleloader_shared.inspection import WorkerDetail, WorkerStack, WorkerTask
from teleloader_shared.lengths import padding_fraction
from teleloader_shared.messages import PREVIEW, DatasetInfo, ReceivingTotals
from teleloader_shared.server_summary import ServerSummary
from teleloader_shared.spec import MAX_EPOCH
from teleloader_shared.stats import (
    WINDOW,
    ConsumerStats,
    DatasetStats,
    ServerStats,
    Stats,
    TokenStats,
    VersionStats,
    WorkerStats,
)
from teleloader_shared.version import VERSION

DEFAULT_CONSUMERS: Final = 100
"""Default number of consumers in a response of ``/stats``."""
RECENT_BATCHES: Final = 20
"""Number of batches in the details of a worker."""
MARK_EVERY: Final = 1.0
"""Seconds between two samples of the totals; the delay of samples measures the event loop lag."""
MARKS_PER_CPU: Final = 5
"""Number of samples of the totals for each sample of the CPU times, which reads one file per process."""
MAX_ERROR: Final = 4000
"""Maximum number of characters of the error of a publication."""
SLICE: Final = 64
"""Number of consumers processed per iteration of the event loop; each takes about 10 us."""
MEMORY_SHARE: Final = 0.01
"""Maximum fraction of one CPU for measuring memory: a measurement takes long in the kernel, so results are cached."""

_Item = TypeVar("_Item")


class EngineSnapshot(NamedTuple):
    """Snapshot of an engine: its workers with their recent load, and its stage times."""

    engine: Engine
    workers: list[tuple[WorkerState, bool]]
    busy_fractions: dict[int, float]
    cpu_wait: float
    """Recent mean number of busy workers that had no CPU."""
    cpu_share: float | None
    """Fraction of their recent completed tasks for which the workers computed; None if they completed none."""
    cpu_wait_share: float
    """Fraction of their recent completed tasks for which the workers had no CPU."""
    memory_full: float
    """Recent fraction of time for which batches were not started because memory was full."""
    batch_seconds: dict[str, BatchSeconds]
    """Mean times per batch by loader key."""

    @property
    def busy(self) -> float:
        """Recent mean number of busy workers."""
        return sum(self.busy_fractions.values())

    @property
    def load(self) -> float:
        """Recent mean number of workers that computed or were blocked."""
        return self.busy - self.cpu_wait


class StatsCollector:
    """Collector of the ``/stats`` statistics, which runs in the server's event loop.

    Args:
        service: Loader service whose limits, engines and counters are read.
    """

    def __init__(self, service: LoaderService) -> None:
        self._service = service
        self._counters = service.counters
        self._started = now = time.monotonic()
        self._lag_window = RateWindow(now, 0, 0.0)
        self._num_samples = 0
        self._total_lag = 0.0
        self.lag: Final = Histogram()
        """Delays of the event loop's timer."""
        self._cpu = CpuUse()
        self._machine = MachineUse()
        self._workers = WorkerHistory()
        self._main = MainThread(now)
        self._measuring: asyncio.Task[dict[int | None, Memory]] | None = None
        self._measured_for: set[int | None] = set()
        self._measure_again = 0.0
        self._recorder = Recorder(service, now)

    # -- sampling

    async def run(self) -> None:
        """Sample the totals of all counters periodically, until cancelled."""
        self._main = MainThread(
            time.monotonic()
        )  # the thread of the event loop, which may not have created this object
        for number in itertools.count():
            due = time.monotonic() + MARK_EVERY
            await asyncio.sleep(MARK_EVERY)
            now = time.monotonic()
            lag = max(0.0, now - due)
            self._num_samples += 1
            self._total_lag += lag
            self.lag.observe((lag,))
            await self._mark(now, lag)
            if number % MARKS_PER_CPU == 0:
                self._cpu.sample(self._pids(self._service.engines.started()))
                self._sample_workers(now)
                self._machine.sample()
                self._recorder.set_machine_cpu(self._cpu.idle_fraction())
                await self._diagnose(now)

    def _sample_workers(self, now: float) -> None:
        found = [
            ((engine.source.pool, state.worker), state.pid)
            for engine in self._service.engines.started()
            for state in engine.pool.workers()
            if state.pid is not None
        ]
        used = [(key, pid, procfs.resident_bytes(pid), self._cpu.last(pid)) for key, pid in found]
        self._workers.sample(now, used)

    async def _mark(self, now: float, lag: float) -> None:
        self._lag_window.mark(now, self._num_samples, self._total_lag)
        engines = self._service.engines.started()
        busy = [share for engine in engines for share in engine.mark_workers(now)]
        self._recorder.record(now, engines, Tick(lag, self._main.mark(now), busy))
        marked = [*self._counters.marked(), *itertools.chain.from_iterable(engine.tally.marked() for engine in engines)]
        async for counters in _in_slices(marked):
            counters.mark(now)
        self._counters.keep_recent(now)

    async def _diagnose(self, now: float) -> None:
        """Diagnose the active training loops whose history is kept."""
        self._recorder.begin_diagnoses()
        if self._counters.num_active(now):
            snapshots = [self._snapshot(engine, now) for engine in self._service.engines.started()]
            server = self._server(snapshots, {}, now)
            samples = await self._samples(snapshots, now)
            loads = self._loads(snapshots, samples, server, now)
            async for engine, sample in _in_slices(samples):
                if sample.is_latest and sample.recent.idle <= WINDOW:
                    self._record_diagnosis(sample, loads[engine], now)
        self._recorder.end_diagnoses()

    def _record_diagnosis(self, sample: _ConsumerSample, by: PoolLoad, now: float) -> None:
        consumer, loop = sample.consumer, sample.tally.loop
        name = training_loop(consumer.name)
        key = LoopKey(consumer.principal_share.quota.name, name, consumer.loader.spec.dataset)
        state = self._recorder.keeps(key, loop, consumer.loader.key, sample.tally.run, now)
        if state is not None:
            link = measure(loop.connections, now)
            found = diagnose(sample.recent._replace(link=link), by)
            self._recorder.diagnosed(state, found, None if link is None else link.rtt)

    @staticmethod
    def _pids(engines: Iterable[Engine]) -> set[int | None]:
        """Return the process IDs of all workers, and None for this process."""
        return {None, *(pid for engine in engines for pid in engine.pool.pids())}

    async def _memory(self, pids: set[int | None]) -> dict[int | None, Memory]:
        """Return the memory of processes; concurrent and later requests share a cached measurement."""
        known = self._measuring
        if known is None or (known.done() and (pids != self._measured_for or time.monotonic() > self._measure_again)):
            known = self._measuring = asyncio.create_task(self._measure(pids))
        return await asyncio.shield(known)

    async def _measure(self, pids: set[int | None]) -> dict[int | None, Memory]:
        began = time.monotonic()
        found = await asyncio.to_thread(procfs.memory, pids)
        ended = time.monotonic()
        self._measured_for = pids
        self._measure_again = ended + (ended - began) / MEMORY_SHARE
        return found

    def cpu_seconds(self) -> dict[str, float]:
        """Return the total CPU seconds of the server process and of its workers, with their fork server."""
        own, others = self._cpu.totals(self._pids(self._service.engines.started()))
        return {"server": own, "workers": others}

    # -- requests

    def worker(self, pool: str | None, worker: int) -> WorkerDetail | None:
        """Return the details of a worker; None if its pool or ID is unknown.

        Args:
            pool: Name of the pool, as of `WorkerStats.loader`.
            worker: Worker ID.
        """
        found = self._found(pool, worker)
        if found is None:
            return None
        engine, state, busy = found
        now, task = time.monotonic(), state.task
        return WorkerDetail(
            worker=worker,
            pid=state.pid,
            loader=pool,
            state="starting" if not state.ready else "busy" if busy else "idle",
            task=None
            if task is None
            else WorkerTask(task.spec.dataset, *task.batch_id, state.working_for, engine.pool.current_sample(worker)),
            batches=engine.tally.workers[worker].batches,
            restarts=state.restarts.count,
            recycled=state.restarts.recycled,
            last_exit=state.restarts.last_exit,
            history=self._workers.of((pool, worker), now),
            stages=[stage.name for stage in STAGES],
            recent=self._counters.timeline.of_worker(pool, worker, RECENT_BATCHES),
        )

    async def stack(self, pool: str | None, worker: int) -> WorkerStack | None:
        """Return the current stacks of a worker; None if its pool or ID is unknown. Arguments as of `worker`."""
        found = self._found(pool, worker)
        if found is None:
            return None
        engine, state, _ = found
        return WorkerStack(worker, state.pid, await engine.pool.stacks(worker))

    def _found(self, pool: str | None, worker: int) -> tuple[Engine, WorkerState, bool] | None:
        """Return the engine and the state of a worker, and whether it is busy."""
        engines = (engine for engine in self._service.engines.started() if engine.source.pool == pool)
        workers = ((engine, *known) for engine in engines for known in engine.workers())
        return next((known for known in workers if known[1].worker == worker), None)

    def history(
        self,
        *,
        since: int | None = None,
        until: int | None = None,
        step: int = 1,
        dataset: str | None = None,
        consumer: str | None = None,
    ) -> History:
        """Return the content of ``/stats/history``; see `Recorder.history`."""
        now = time.monotonic()
        return self._recorder.history(now, since=since, until=until, step=step, dataset=dataset, consumer=consumer)

    def summary(self) -> ServerSummary:
        """Return the figures for the announcements of this server."""
        return self._recorder.summary(time.monotonic())

    async def stats(self, limit: int = DEFAULT_CONSUMERS, offset: int = 0) -> Stats:
        """Return the content of ``/stats``, with up to `limit` consumers starting at `offset`."""
        memory = await self._memory(self._pids(self._service.engines.started()))
        datasets = self._service.datasets
        now = time.monotonic()
        snapshots = [self._snapshot(engine, now) for engine in self._service.engines.started()]
        server = self._server(snapshots, memory, now)
        samples = await self._samples(snapshots, now)
        loads = self._loads(snapshots, samples, server, now)
        active = [sample.load for _, sample in samples if sample.is_latest and sample.recent.is_active]
        workers = demand(active, sum(snapshot.load for snapshot in snapshots))
        page, loaders = samples[offset : offset + limit], self._service.loaders_by_version()
        return Stats(
            replace(server, demand=workers.total, demand_unmeasured=workers.unmeasured),
            datasets=[
                dataset_stats(info, self._counters.datasets[info.name], now, self._versions(info.name, loaders, now))
                for info in datasets.values()
            ],
            workers=[
                self._worker(snapshot, state, memory.get(state.pid, NO_MEMORY), busy=busy)
                for snapshot in snapshots
                for state, busy in snapshot.workers
            ],
            consumers=[self._record(sample, loads[engine], now) async for engine, sample in _in_slices(page)],
            consumers_total=len(samples),
            tokens=[
                TokenStats(token, used.batches, used.nbytes, used.busy, used.cpu)
                for token, used in sorted(self._counters.principals.items())
            ],
        )

    @staticmethod
    def _snapshot(engine: Engine, now: float) -> EngineSnapshot:
        workers = engine.workers()
        shares = {}
        cpu_wait = total_wait = total_cpu = completed = 0.0
        for state, _ in workers:
            tally = engine.tally.workers[state.worker]
            busy, waiting, computing, done = tally.window.rates(now, *tally.totals(state.working_for))
            shares[state.worker] = as_share(busy)
            cpu_wait += min(as_share(waiting), shares[state.worker])
            total_wait, total_cpu, completed = total_wait + waiting, total_cpu + computing, completed + done
        full = engine.tally.memory_window.rates(now, engine.tally.memory_full.until(now))[0]
        seconds = {key: loader.batch_seconds(now) for key, loader in engine.tally.loaders.items()}
        cpu_share = as_share(total_cpu / completed) if completed > 0 else None
        wait_share = as_share(total_wait / completed) if completed > 0 else 0.0
        return EngineSnapshot(engine, workers, shares, cpu_wait, cpu_share, wait_share, as_share(full), seconds)

    def _server(self, snapshots: list[EngineSnapshot], memory: Mapping[int | None, Memory], now: float) -> ServerStats:
        load = sum(snapshot.load for snapshot in snapshots)
        busy = sum(snapshot.busy for snapshot in snapshots)
        left = [tally.sent_window.rates(now, tally.sent, tally.nbytes) for tally in self._counters.datasets.values()]
        samples, lag = self._lag_window.rates(now, self._num_samples, self._total_lag)
        return ServerStats(
            version=VERSION,
            host=socket.gethostname(),
            pid=os.getpid(),
            uptime=now - self._started,
            cpus=default_num_workers(),
            cpu=self._cpu.rate(self._pids(snapshot.engine for snapshot in snapshots)),
            num_workers=self._service.num_workers,
            memory_budget=self._service.limits.memory_budget,
            memory_used=sum(snapshot.engine.memory_used for snapshot in snapshots),
            memory_mapped=sum(snapshot.engine.pool.mapped_bytes() for snapshot in snapshots),
            memory_sending=self._service.quotas.sending,
            pss=sum(found.pss for found in memory.values()),
            event_loop_lag=lag / samples if samples else 0.0,
            connections=self._service.connections(),
            worker_restarts=self._counters.worker_restarts,
            batches_per_second=sum(batches for batches, _ in left),
            bytes_per_second=sum(nbytes for _, nbytes in left),
            draining=self._service.draining.is_set(),
            load=load,
            saturated=is_saturated(busy, load, self._cpu.idle_fraction()),
            ports=self._service.ports,
            memory_lent=self._service.quotas.lent,
            publication_error=(self._service.publisher.last_error or "")[-MAX_ERROR:] or None,
        )

    def _loads(
        self,
        snapshots: Iterable[EngineSnapshot],
        samples: Iterable[tuple[Engine, _ConsumerSample]],
        server: ServerStats,
        now: float,
    ) -> dict[Engine, PoolLoad]:
        """Return the loads of the worker pools, with the demand of all their training loops."""
        loops: dict[Engine, list[_ConsumerSample]] = {snapshot.engine: [] for snapshot in snapshots}
        for engine, sample in samples:
            if sample.is_latest:
                loops[engine].append(sample)
        machine = self._machine.current(server.cpus, server.cpu, self._cpu.idle_fraction())
        main = self._main.current(now, server.event_loop_lag)
        return {each.engine: _load(each, loops[each.engine], server, machine, main) for each in snapshots}

    def _record(self, sample: _ConsumerSample, by: PoolLoad, now: float) -> ConsumerStats:
        consumer, tally, recent, _, _ = sample
        recent = recent._replace(link=measure(tally.loop.connections, now))
        loader = consumer.loader
        batches, nbytes = tally.window.rates(now, tally.batches, tally.nbytes)
        consumed = tally.loop.consumed_rate(now)
        if consumed is not None:
            batches = 0.0 if tally.finished else consumed
        return ConsumerStats(
            consumer=consumer.name,
            token=consumer.principal_share.quota.name,
            dataset=loader.spec.dataset,
            loader=loader.key,
            rank=loader.spec.rank,
            world_size=loader.spec.world_size,
            epoch=consumer.epoch[1],
            position=tally.position(consumer),
            batches=None if loader.batches == MAX_EPOCH else loader.batches,
            batches_sent=tally.batches,
            bytes_sent=tally.nbytes,
            batches_per_second=batches,
            bytes_per_second=nbytes,
            waiting=tally.waiting.until(now),
            starved_fraction=recent.starved_fraction,
            sending_fraction=recent.sending_fraction,
            data_wait_fraction=recent.data_wait_fraction,
            reconnects=None if tally.report is None else tally.report.reconnects,
            hedges=None if tally.report is None else tally.report.hedges,
            idle=max(0.0, now - max(consumer.last_seen, tally.last_request)),
            diagnosis=diagnose(recent, by),
            batches_lent=tally.lent,
            run=tally.run,
            finished=tally.finished,
            version=self._service.version_of(loader),
        )

    @staticmethod
    def _worker(snapshot: EngineSnapshot, state: WorkerState, memory: Memory, *, busy: bool) -> WorkerStats:
        tally = snapshot.engine.tally.workers[state.worker]
        task = state.task
        return WorkerStats(
            worker=state.worker,
            pid=state.pid,
            loader=snapshot.engine.source.pool,
            state="starting" if not state.ready else "busy" if busy else "idle",
            current_task=None if task is None else _shown(task.batch_id, task.spec.dataset, state.replayed),
            current_task_seconds=None if task is None else state.working_for,
            batches=tally.batches,
            busy=tally.busy,
            busy_fraction=snapshot.busy_fractions[state.worker],
            restarts=state.restarts.count,
            recycled=state.restarts.recycled,
            last_exit=state.restarts.last_exit,
            last_restart=state.restarts.last_duration,
            rss=memory.rss,
            pss=memory.pss,
        )

    def _versions(self, dataset: str, loaders: Mapping[Version, int], now: float) -> list[VersionStats]:
        versions = self._service.versions
        return [
            VersionStats(
                version=version.info.version,
                fingerprint=version.info.fingerprint,
                revision=version.revision,
                newest=versions.is_newest(version),
                loaders=loaders.get(version, 0),
                idle=max(0.0, now - version.last_used),
            )
            for version in versions.available(dataset)
        ]

    @staticmethod
    async def _samples(snapshots: list[EngineSnapshot], now: float) -> list[tuple[Engine, _ConsumerSample]]:
        """Return all consumers with their engines, most recently active first.

        Earlier iterations of a training loop are listed only while they have open requests: with short epochs, there
        are hundreds of iterations per minute.
        """
        # all consumers are looked up before the first await, during which consumers may be removed
        known = [
            (snapshot, consumer, snapshot.engine.tally.of(consumer))
            for snapshot in snapshots
            for consumer in snapshot.engine.consumers()
            if consumer.name != PREVIEW
        ]
        # at the end of an epoch, a training loop is listed with that epoch, not with the next one that it prefetches
        known.sort(key=lambda found: (found[1].is_background, -found[1].last_seen))
        latest: dict[LoopCounters, tuple[ConsumerRates, ConsumerLoad]] = {}
        found: list[tuple[Engine, _ConsumerSample]] = []
        async for snapshot, consumer, tally in _in_slices(known):
            later = latest.get(tally.loop)
            if later is not None and (consumer.is_background or not consumer.requests):
                continue
            rates = latest[tally.loop] = later or _rates(snapshot, consumer, tally, now)
            found.append((snapshot.engine, _ConsumerSample(consumer, tally, *rates, is_latest=later is None)))
        return found


def dataset_stats(
    info: DatasetInfo, tally: DatasetCounters, now: float, versions: Sequence[VersionStats] = ()
) -> DatasetStats:
    """Return the statistics of a dataset at the time `now`, by ``time.monotonic()``."""
    samples, _ = tally.computed_window.rates(now, tally.samples, tally.failed)
    return DatasetStats(
        dataset=info.name,
        kind=info.kind,
        length=info.length,
        batches_computed=tally.computed,
        batches_sent=tally.sent,
        batches_failed=tally.failed,
        batches_retried=tally.retried,
        samples_computed=tally.samples,
        samples_per_second=samples,
        stages={stage: histogram.latency() for stage, histogram in tally.stages.items()},
        slowest=tally.slowest(),
        errors=tally.errors(now),
        samples_substituted=tally.substituted,
        cache_hits=tally.cache_hits,
        cache_misses=tally.cache_misses,
        cache_saved=tally.cache_saved,
        samples_slow=tally.slow_samples,
        batches_early=tally.early,
        batches_backed_up=tally.backups,
        tokens=tally.tokens,
        tokens_padded=tally.tokens_padded,
        padding_fraction=padding_fraction(tally.tokens, tally.tokens_padded),
        versions=list(versions),
    )


async def _in_slices(items: Sequence[_Item]) -> AsyncIterator[_Item]:
    """Yield all items, and yield to the event loop after each `SLICE` of them."""
    for number, item in enumerate(items, 1):
        yield item
        if number % SLICE == 0:
            await asyncio.sleep(0)


class _ConsumerSample(NamedTuple):
    """Snapshot of a consumer."""

    consumer: Consumer
    tally: ConsumerCounters
    recent: ConsumerRates
    """Rates of the consumer's training loop, over all its iterations."""
    load: ConsumerLoad
    """Load of the training loop, for the demand."""
    is_latest: bool
    """True for the latest iteration of the training loop."""


def _rates(
    snapshot: EngineSnapshot, latest: Consumer, tally: ConsumerCounters, now: float
) -> tuple[ConsumerRates, ConsumerLoad]:
    """Return the rates and the load of a training loop, given the consumer of its latest iteration."""
    loop = tally.loop
    # without open requests, the period ends at the last request: since then the consumer has waited for nothing
    last_active = max(latest.last_seen, loop.last_request)
    recent = loop.recent(now if latest.requests else min(now, last_active))
    seconds = snapshot.batch_seconds.get(latest.loader.key, BatchSeconds({}, 0.0))
    rates = ConsumerRates(
        known_for=recent.span,
        idle=0.0 if latest.requests else now - last_active,
        batch_rate=recent.batches,
        byte_rate=recent.nbytes,
        starved_fraction=recent.waiting,
        sending_fraction=recent.sending,
        data_wait_fraction=recent.data_wait,
        stages=seconds.stages,
        step=recent.step,
        receiving=_receiving(recent.receiving, recent.data_wait),
        straggler=_straggler(snapshot, latest.loader, now),
        typical=latest.loader.times.typical,
        p99=latest.loader.times.p99,
        window=max(0, latest.ahead_stop - latest.position),
        is_compressed=latest.loader.spec.compression is not None,
        has_checksum=latest.loader.spec.checksum,
        is_finished=_is_finished(latest, now) if tally.finished is None else tally.finished,
    )
    return rates, ConsumerLoad(latest.epoch, recent.batches, recent.data_wait, recent.step, recent.span, seconds.work)


def _receiving(totals: ReceivingTotals | None, data_wait: float | None) -> Receiving | None:
    """Return the rates of a client's receiving threads, given the rates of its totals and its data wait."""
    if totals is None:
        return None
    late = as_share(totals.late / totals.wakeups) if totals.wakeups else 0.0
    waits = (as_share(totals.pending), as_share(totals.reading), as_share(totals.elsewhere))
    process = totals.process / data_wait if data_wait else 0.0
    return Receiving(*waits, totals.busy, totals.cpu, process, totals.wakeups, late)


def _is_finished(consumer: Consumer, now: float) -> bool:
    """Return True if all batches of an epoch were sent, for a consumer that does not report its position."""
    is_sent = not consumer.requests and consumer.position >= consumer.loader.batches
    return is_sent and now - consumer.last_seen > IDLE_GRACE_S


def _load(
    snapshot: EngineSnapshot, loops: list[_ConsumerSample], server: ServerStats, machine: Machine, main: MainProcess
) -> PoolLoad:
    """Return the load of an engine's workers, including the demand of its active training loops."""
    active = [sample for sample in loops if sample.recent.is_active]
    busy = snapshot.busy
    return PoolLoad(
        workers=snapshot.engine.pool.num_workers,
        busy=busy / max(1, len(snapshot.busy_fractions)),
        demand=total_demand((sample.consumer.epoch, sample.recent.demand) for sample in active),
        consumers=len(active),
        setting=snapshot.engine.source.setting,
        machine=machine,
        main=main,
        cpu=None if snapshot.cpu_share is None else busy * snapshot.cpu_share,
        cpu_wait=busy * snapshot.cpu_wait_share,
        memory_full=snapshot.memory_full,
        memory_budget=server.memory_budget,
        servers=len(server.ports) if server.ports and snapshot.engine.source.session is None else 1,
    )


def _straggler(snapshot: EngineSnapshot, loader: Loader, now: float) -> Straggler | None:
    """Return the slowest recent batch of a loader, which may not be completed."""
    counters = snapshot.engine.tally.loaders.get(loader.key)
    recent = [] if counters is None else counters.recent_slow(now)
    found = [(slow.seconds, slow.batch, slow.sample) for slow in recent]
    for state, _ in snapshot.workers:
        if state.task is not None and state.task.batch_id.loader == loader.key and state.working_for > SLOW_FROM:
            found.append((state.working_for, state.task.batch_id.batch, None))
    if not found:
        return None
    seconds, batch, sample = max(found, key=itemgetter(0))
    return Straggler(batch, sample, seconds, as_share(sum(each for each, _, _ in found) / WINDOW))


def _shown(batch_id: BatchId, dataset: str, replayed: Replayed | None) -> str:
    text = f"batch {batch_id.batch} of epoch {batch_id.epoch} of {dataset}"
    return text if replayed is None else f"{text}, after {replayed.batches:,} of {replayed.total:,} replayed batches"
