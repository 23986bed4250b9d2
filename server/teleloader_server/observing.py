"""The records of ``/stats``, made of what was counted when somebody asks for them.

Once a second the totals are noted, so that rates are recent ones; nothing else is done while nobody looks.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from teleloader_server import processes
from teleloader_server.config import Limits, default_num_workers
from teleloader_server.demand import Consumer
from teleloader_server.engine import Engine, Loader
from teleloader_server.metrics import ConsumerTally, LoopTally, Metrics
from teleloader_server.pool import WorkerState
from teleloader_server.processes import NO_MEMORY, CpuUse, Memory
from teleloader_server.verdict import Consumption, Workforce, total_demand, verdict
from teleloader_server.windows import Window, as_share
from teleloader_shared.codec import Address
from teleloader_shared.messages import LOOKING, DatasetInfo
from teleloader_shared.spec import MAX_EPOCH
from teleloader_shared.stats import ConsumerStats, DatasetStats, ServerStats, Stats, WorkerStats
from teleloader_shared.version import VERSION

MARK_EVERY: Final = 1.0
"""Seconds between the moments whose totals are noted. How late that is shows how late the event loop is."""
MARKS_PER_CPU: Final = 5
"""The processes' times are looked at more seldom: each is a file to be read."""
MEMORY_SHARE: Final = 0.01
"""Share of one processor that may go into measuring memory, which takes the kernel long: a measurement is used again
for as long as that needs."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where workers come from."""

    session: str | None
    """The loader whose own they are; None when all share them."""
    setting: str
    """What sets their number: ``{}`` stands for it."""


@dataclass(frozen=True, slots=True)
class Whole:
    """What the server is besides its engines."""

    datasets: Mapping[str, DatasetInfo]
    memory_sending: int
    connections: int
    draining: bool


class _Look(NamedTuple):
    """One engine at one moment."""

    engine: Engine
    place: Place
    workers: list[tuple[WorkerState, bool]]
    busy_shares: dict[int, float]
    stages: dict[str, dict[str, float]]
    """What a batch takes, by loader and stage."""


class Observer:
    """See the module. Lives in one event loop.

    Args:
        limits: What the server may take.
        engines: Says which there are, and where their workers come from.
    """

    def __init__(self, limits: Limits, engines: Callable[[], dict[Engine, Place]]) -> None:
        self.metrics = Metrics()
        self._limits = limits
        self._engines = engines
        self._started = now = time.monotonic()
        self._late = Window(now, 0, 0.0)
        self._looks = 0
        self._lateness = 0.0
        self._cpu = CpuUse()
        self._measuring: asyncio.Task[dict[int | None, Memory]] | None = None
        self._measured_for: set[int | None] = set()
        self._measure_again = 0.0

    # -- all the time

    async def run(self) -> None:
        """Note what is needed to say what is recent, until cancelled."""
        for number in itertools.count():
            due = time.monotonic() + MARK_EVERY
            await asyncio.sleep(MARK_EVERY)
            now = time.monotonic()
            self._looks += 1
            self._lateness += max(0.0, now - due)
            self._mark(now)
            if number % MARKS_PER_CPU == 0:
                self._cpu.look(self._pids(self._engines()))

    def _mark(self, now: float) -> None:
        self._late.mark(now, self._looks, self._lateness)
        self.metrics.mark(now)
        for engine in self._engines():
            engine.mark(now)

    @staticmethod
    def _pids(engines: Iterable[Engine]) -> set[int | None]:
        """All processes; None is this one."""
        return {None, *(pid for engine in engines for pid in engine.pids())}

    async def _memory(self, pids: set[int | None]) -> dict[int | None, Memory]:
        """What the processes use now. All who ask meanwhile, and soon after, get one answer."""
        known = self._measuring
        if known is None or (known.done() and (pids != self._measured_for or time.monotonic() > self._measure_again)):
            known = self._measuring = asyncio.create_task(self._measure(pids))
        return await asyncio.shield(known)

    async def _measure(self, pids: set[int | None]) -> dict[int | None, Memory]:
        began = time.monotonic()
        found = await asyncio.to_thread(processes.memory, pids)
        ended = time.monotonic()
        self._measured_for = pids
        self._measure_again = ended + (ended - began) / MEMORY_SHARE
        return found

    # -- when somebody asks

    async def stats(self, whole: Whole, limit: int, offset: int) -> Stats:
        """The records, with `limit` of the consumers after the first `offset`."""
        memory = await self._memory(self._pids(self._engines()))
        now = time.monotonic()
        looks = [self._look(engine, place, now) for engine, place in self._engines().items()]
        server = self._server(whole, looks, memory, now)
        consumers = self._consumers(looks, server, now)
        return Stats(
            server,
            datasets=[self._dataset(info, now) for info in whole.datasets.values()],
            workers=[
                self._worker(look, state, memory.get(state.pid, NO_MEMORY), busy=busy)
                for look in looks
                for state, busy in look.workers
            ],
            consumers=[_record(seen, by, now) for seen, by in consumers[offset : offset + limit]],
            consumers_total=len(consumers),
        )

    @staticmethod
    def _look(engine: Engine, place: Place, now: float) -> _Look:
        workers = engine.workers()
        shares = {}
        for state, _ in workers:
            tally = engine.tally.workers[state.worker]
            shares[state.worker] = as_share(tally.window.rates(now, tally.busy + state.working_for)[0])
        seconds = {key: loader.batch_seconds(now) for key, loader in engine.tally.loaders.items()}
        return _Look(engine, place, workers, shares, seconds)

    def _server(self, whole: Whole, looks: list[_Look], memory: Mapping[int | None, Memory], now: float) -> ServerStats:
        left = [tally.left.rates(now, tally.sent, tally.nbytes) for tally in self.metrics.datasets.values()]
        looked, late = self._late.rates(now, self._looks, self._lateness)
        return ServerStats(
            version=VERSION,
            host=socket.gethostname(),
            pid=os.getpid(),
            uptime=now - self._started,
            cpus=default_num_workers(),
            cpu=self._cpu.rate(self._pids(look.engine for look in looks)),
            num_workers=self._limits.num_workers,
            memory_budget=self._limits.memory_budget,
            memory_used=sum(look.engine.memory_used for look in looks),
            memory_mapped=sum(look.engine.memory_mapped for look in looks),
            memory_sending=whole.memory_sending,
            pss=sum(found.pss for found in memory.values()),
            loop_lag=late / looked if looked else 0.0,
            connections=whole.connections,
            worker_restarts=self.metrics.worker_restarts,
            batches_per_second=sum(batches for batches, _ in left),
            bytes_per_second=sum(nbytes for _, nbytes in left),
            draining=whole.draining,
        )

    @staticmethod
    def _worker(look: _Look, state: WorkerState, memory: Memory, *, busy: bool) -> WorkerStats:
        tally = look.engine.tally.workers[state.worker]
        task = state.task
        return WorkerStats(
            worker=state.worker,
            pid=state.pid,
            loader=look.place.session,
            state="starting" if not state.ready else "busy" if busy else "idle",
            doing=None if task is None else _shown(task.address, task.spec.dataset),
            doing_for=None if task is None else state.working_for,
            batches=tally.batches,
            busy=tally.busy,
            busy_share=look.busy_shares[state.worker],
            restarts=state.restarts,
            recycled=state.recycled,
            last_exit=state.last_exit,
            last_restart=state.last_restart,
            rss=memory.rss,
            pss=memory.pss,
        )

    def _dataset(self, info: DatasetInfo, now: float) -> DatasetStats:
        tally = self.metrics.dataset(info.name)
        stages = {stage: histogram.latency() for stage, histogram in tally.stages.items()}
        (samples,) = tally.made.rates(now, tally.samples)
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
            **stages,
            slowest=tally.slowest(),
            errors=tally.errors(now),
        )

    @staticmethod
    def _consumers(looks: list[_Look], server: ServerStats, now: float) -> list[tuple[_Seen, Workforce]]:
        """All that train, with who makes their batches; those who asked last come first.

        Of a training loop there is the latest pass, and those before it only while they ask for something: with short
        epochs a minute has hundreds.
        """
        known = [(look, *pair) for look in looks for pair in look.engine.consumers() if pair[0].name != LOOKING]
        known.sort(key=lambda found: found[1].last_seen, reverse=True)
        latest: dict[LoopTally, _Seen] = {}
        found: list[tuple[Engine, _Seen]] = []
        for look, consumer, loader in known:
            tally = look.engine.tally.of(consumer)
            later = latest.get(tally.loop)
            if later is not None and not consumer.asks:
                continue
            recent = _consumption(look, consumer, loader, tally.loop, now) if later is None else later.recent
            seen = _Seen(consumer, loader, tally, recent)
            latest.setdefault(tally.loop, seen)
            found.append((look.engine, seen))
        loops: dict[Engine, list[_Seen]] = {look.engine: [] for look in looks}
        for engine, seen in found:
            if latest[seen.tally.loop] is seen:
                loops[engine].append(seen)
        forces = {look.engine: _workforce(look, loops[look.engine], server) for look in looks}
        return [(seen, forces[engine]) for engine, seen in found]


class _Seen(NamedTuple):
    """One consumer at one moment."""

    consumer: Consumer
    loader: Loader
    tally: ConsumerTally
    recent: Consumption
    """Of its training loop, in this pass and those before."""


def _consumption(look: _Look, latest: Consumer, loader: Loader, loop: LoopTally, now: float) -> Consumption:
    """What is seen of a training loop, of whose passes this is the latest."""
    # of one that asks for nothing now, over the time before: it is not held back by anything since
    recent = loop.recent(now if latest.asks else min(now, latest.last_seen))
    return Consumption(
        known_for=recent.span,
        idle=0.0 if latest.asks else now - latest.last_seen,
        pace=recent.batches,
        nbytes=recent.nbytes,
        waiting=recent.waiting,
        sending=recent.sending,
        loop_waiting=recent.loop_waiting,
        stages=look.stages.get(loader.key, {}),
    )


def _workforce(look: _Look, loops: list[_Seen], server: ServerStats) -> Workforce:
    """The workers of an engine, and what those of its training loops that go on want of them."""
    shares = look.busy_shares.values()
    asking = [seen for seen in loops if seen.recent.goes_on]
    return Workforce(
        workers=look.engine.num_workers,
        busy=sum(shares) / len(shares) if shares else 0.0,
        demand=total_demand((seen.consumer.run, seen.recent.demand) for seen in asking),
        consumers=len(asking),
        setting=look.place.setting,
        cpus=server.cpus,
        cpu=server.cpu,
        loop_lag=server.loop_lag,
    )


def _record(seen: _Seen, by: Workforce, now: float) -> ConsumerStats:
    consumer, loader, tally, recent = seen
    batches, nbytes = tally.window.rates(now, tally.batches, tally.nbytes)
    return ConsumerStats(
        consumer=consumer.name,
        token=consumer.holder.account.name,
        dataset=loader.spec.dataset,
        loader=loader.key,
        rank=loader.spec.rank,
        world_size=loader.spec.world_size,
        epoch=consumer.run[1],
        position=consumer.position,
        batches=None if loader.batches == MAX_EPOCH else loader.batches,
        batches_sent=tally.batches,
        bytes_sent=tally.nbytes,
        batches_per_second=batches,
        bytes_per_second=nbytes,
        waiting=tally.waiting.until(now),
        waiting_share=recent.waiting,
        sending_share=recent.sending,
        loop_waiting_share=recent.loop_waiting,
        reconnects=None if tally.report is None else tally.report.reconnects,
        hedges=None if tally.report is None else tally.report.hedges,
        idle=max(0.0, now - consumer.last_seen),
        verdict=verdict(recent, by),
    )


def _shown(address: Address, dataset: str) -> str:
    return f"batch {address.batch} of epoch {address.epoch} of {dataset}"
