"""The engine between a dispatcher and a pool that the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from teleloader_server.dispatch.counters import Counters, EngineSource
from teleloader_server.dispatch.engine import FORGOTTEN_TOGETHER, BatchStream, Engine
from teleloader_server.dispatch.quotas import Memory, Quota
from teleloader_server.dispatch.records import Loader, RangeRequest
from teleloader_server.dispatch.stragglers import MIN_BATCHES
from teleloader_server.loading.tasks import GroupReport, Task
from teleloader_server.workers.health import WorkerExit, WorkerHealth
from teleloader_server.workers.pool import WorkerState
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.ranges import BatchRanges
from teleloader_shared.spec import MAX_EPOCH, LoaderSpec
from tests.server.dispatching import Tasks

BUDGET = 2**20
SOURCE = EngineSource(None, "--num-workers {}")
REPORT = GroupReport([1], failed=False, stages=[[1.0], [0.0], [0.0]], cpu_wait=0.0, slowest=[None])
QUICK_REPORT = REPORT._replace(stages=[[0.01], [0.0], [0.0]])


class FakePool:
    """Pool of two workers, which keep submitted tasks until the test completes them."""

    num_workers = 2

    def __init__(self) -> None:
        self.tasks: list[tuple[int, Task]] = []
        self.submitted: list[Task] = []

    async def start(self, listener: Any) -> list[DatasetInfo]:
        """Report both workers as ready."""
        for worker in range(self.num_workers):
            listener.worker_ready(worker, WorkerHealth(0.0, tasks=self.queue(worker)))
        return []

    def queue(self, worker: int) -> Tasks:
        """Return the tasks of a worker."""
        return Tasks(lambda: [task.batch_id for other, task in self.tasks if other == worker])

    def submit(self, worker: int, tasks: Sequence[Task]) -> None:
        """Record tasks."""
        self.tasks.extend((worker, task) for task in tasks)
        self.submitted.extend(tasks)

    def workers(self) -> list[WorkerState]:
        """Return no workers: no test uses them."""
        return []

    def pids(self) -> list[int]:
        """Return no PIDs."""
        return []

    def mapped_bytes(self) -> int:
        """Return 0."""
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    async def close(self) -> None:
        """Do nothing: no process runs."""


async def started(
    pool: FakePool, batches: int, *, memory: Memory | None = None, counters: Counters | None = None
) -> tuple[Engine, Loader, RangeRequest]:
    """Start an engine; return it with a loader of 100 batches, and a request for the first `batches` of them."""
    engine = Engine(pool, memory or Memory(BUDGET), counters or Counters(), SOURCE)
    await engine.start()
    spec = LoaderSpec(dataset="data", batch_size=1)
    loader = Loader(spec.key, spec, 100, 100)
    ranges = BatchRanges(range(0, batches))
    return engine, loader, RangeRequest(consumer="a", key=loader.key, epoch=0, batches=ranges)


async def begun() -> None:
    """Run the engine's decisions."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_an_evicted_batch_is_recomputed_from_the_same_indices() -> None:
    """An evicted batch of a client-side sampler is recomputed from the indices that the client sent once."""
    pool = FakePool()
    engine = Engine(pool, Memory(BUDGET), Counters(), SOURCE)
    await engine.start()
    spec = LoaderSpec(dataset="data", batch_size=1, order="client", session="mine")
    loader = Loader(spec.key, spec, 100, MAX_EPOCH)

    def finish(worker: int, task: Task) -> None:
        pool.tasks.remove((worker, task))
        engine.tasks_done(worker, [task], [np.zeros(BUDGET * 3 // 5, np.uint8)], REPORT)

    lists = {k: f"list {k}".encode() for k in range(4)}
    request = RangeRequest(consumer="a", key=loader.key, epoch=0, batches=BatchRanges(range(0, 4)), indices=lists)
    with engine.batches(loader, Quota("anyone", BUDGET, 10), request, lambda: None) as stream:
        await begun()
        assert [(worker, task.batch_id.batch) for worker, task in pool.tasks] == [(0, 0), (1, 1), (0, 2), (1, 3)]
        lost = [pair for pair in pool.tasks if pair[0] == 0]
        for pair in [pair for pair in pool.tasks if pair[0] == 1]:
            finish(*pair)
        await begun()
        pool.tasks.clear()
        engine.worker_lost(0, [task for _, task in lost], WorkerExit("killed"))
        engine.worker_ready(0, WorkerHealth(0.0, tasks=pool.queue(0)))
        taken = 0
        while taken < len(lists):
            await begun()
            if stream.take_ready(1):
                taken += 1
            else:
                finish(*pool.tasks[0])
    submitted = [task.batch_id.batch for task in pool.submitted]
    assert max(submitted.count(1), submitted.count(3)) > 1, "one that was ready went for want of memory"
    assert all(task.indices == lists[task.batch_id.batch] for task in pool.submitted)
    assert not any(consumer.requests for consumer in engine.consumers()), "and nothing is kept of it"


async def test_idle_loaders_are_forgotten_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing thousands at once, with a message to every worker for each, would block the event loop."""
    monkeypatch.setattr("teleloader_server.dispatch.dispatcher.FORGET_AFTER", -1.0)
    pool = FakePool()
    forgotten: list[str] = []
    pool.forget = forgotten.append  # type: ignore[attr-defined]
    engine = Engine(pool, Memory(BUDGET), Counters(), SOURCE)
    await engine.start()
    quota = Quota("anyone", BUDGET, 2 * FORGOTTEN_TOGETHER)
    for seed in range(FORGOTTEN_TOGETHER + 1):
        spec = LoaderSpec(dataset="data", batch_size=1, seed=seed)
        loader = Loader(spec.key, spec, 100, 100)
        request = RangeRequest(consumer="a", key=loader.key, epoch=0, batches=BatchRanges(range(0, 1)))
        with engine.batches(loader, quota, request, lambda: None):
            pass
    engine.forget_idle()
    first = len(forgotten)
    engine.forget_idle()
    assert (first, len(set(forgotten))) == (FORGOTTEN_TOGETHER, FORGOTTEN_TOGETHER + 1)
    await engine.close()


async def test_a_batch_that_is_finished_after_the_end_counts_for_no_memory() -> None:
    """A loading thread cannot be stopped: its last batch may arrive after the engine is closed."""
    pool, memory = FakePool(), Memory(BUDGET)
    engine, loader, request = await started(pool, 1, memory=memory)
    with engine.batches(loader, Quota("anyone", BUDGET, 10), request, lambda: None):
        await begun()
    await engine.close()
    worker, task = pool.tasks[0]
    engine.tasks_done(worker, [task], [np.zeros(1000, np.uint8)], REPORT)
    assert memory.used == 0


@pytest.mark.parametrize(("samples", "nbytes"), [(1, 100), (0, None)])
async def test_only_batches_with_samples_are_estimates(samples: int, nbytes: int | None) -> None:
    """The end of a shard is a batch without samples; its size says nothing about others."""
    pool = FakePool()
    engine, loader, request = await started(pool, 1)
    with engine.batches(loader, Quota("anyone", BUDGET, 10), request, lambda: None):
        await begun()
        ((worker, task),) = pool.tasks
        engine.tasks_done(worker, [task], [np.zeros(100, np.uint8)], REPORT._replace(samples=[samples]))
    assert loader.batch_nbytes == nbytes
    await engine.close()


@pytest.mark.parametrize(("count", "first", "expected"), [(None, 1, 4), (2, 1, 3), (9, 1, 4)])
async def test_a_response_waits_for_a_number_of_batches(count: int | None, first: int, expected: int) -> None:
    """The wait ends with the last of the batches, without a task of its own."""
    pool = FakePool()
    engine, loader, request = await started(pool, 4)
    with engine.batches(loader, Quota("anyone", BUDGET, 10), request, lambda: None) as stream:
        await begun()
        for k, (worker, task) in enumerate(sorted(pool.tasks, key=lambda pair: pair[1].batch_id)):
            if k == first:
                assert stream.take_ready(1)
                lingering = asyncio.create_task(stream.linger(count, 60))
                await begun()
                assert asyncio.all_tasks() == {asyncio.current_task(), lingering}
            if k == expected:
                break
            if k >= first:
                assert not lingering.done()
            pool.tasks.remove((worker, task))
            engine.tasks_done(worker, [task], [np.zeros(100, np.uint8)], REPORT)
        await begun()
        assert lingering.done()
        assert stream.consumer.state.waiters == {}
    await engine.close()


async def test_the_first_result_of_a_batch_with_a_backup_counts() -> None:
    """The result of the slow worker is discarded; its worker computes nothing else until it continues."""
    pool, counters = FakePool(), Counters()
    withdrawn: list[tuple[int, int]] = []
    pool.withdraw = lambda worker, batch_id: withdrawn.append((worker, batch_id.batch))  # type: ignore[attr-defined]
    engine, loader, request = await started(pool, 2, counters=counters)
    for _ in range(MIN_BATCHES):
        loader.times.add(0.01)
    with engine.batches(loader, Quota("anyone", BUDGET, 10), request, lambda: None) as stream:
        await begun()
        (stuck, late), (other, task) = pool.tasks
        pool.tasks.remove((other, task))
        engine.tasks_done(other, [task], [np.zeros(100, np.uint8)], QUICK_REPORT)
        waiting = asyncio.create_task(stream.take())
        while len(pool.tasks) < 2:
            await asyncio.sleep(0.01)
        assert [(worker, task.batch_id) for worker, task in pool.tasks] == [
            (stuck, late.batch_id),
            (other, late.batch_id),
        ]
        assert counters.datasets["data"].backups == 1
        del pool.tasks[1]
        engine.tasks_done(other, [late], [np.ones(100, np.uint8)], QUICK_REPORT)
        assert (await waiting).raw.sum() == 100
    assert withdrawn == [(stuck, 0)]
    await engine.close()


@asynccontextmanager
async def requested() -> AsyncIterator[BatchStream]:
    """Return a request for four batches, none of which is ready, of an engine that is closed at the end."""
    engine, loader, request = await started(FakePool(), 4)
    with engine.batches(loader, Quota("anyone", BUDGET, 10), request, lambda: None) as stream:
        yield stream
    await engine.close()


async def test_a_response_that_has_waited_enough_is_no_longer_notified() -> None:
    """After its wait has ended without the batch, a request is not among those that wait for it."""
    async with requested() as stream:
        await stream.linger(None, 0.0)
        assert stream.consumer.state.waiters == {}


async def test_a_request_that_is_ended_between_two_waits_does_not_wait_again() -> None:
    """The client may disconnect while a response is sent, or before the first wait."""
    async with requested() as stream:
        stream.end(ConnectionError("disconnected"))
        with pytest.raises(ConnectionError, match="disconnected"):
            await asyncio.wait_for(stream.take(), 5)
        assert stream.consumer.state.waiters == {}
