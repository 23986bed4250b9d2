"""Test double of an engine, for tests of the dispatcher without processes, sockets and clocks.

`Service` executes the decisions of a dispatcher, and asserts that each decision is allowed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence, Sized
from typing import Any

import numpy as np
import pytest

from teleloader_server.dispatch import store
from teleloader_server.dispatch.dispatcher import FORGET_AFTER, Dispatcher
from teleloader_server.dispatch.quotas import Memory, Quota
from teleloader_server.dispatch.records import Batch, Consumer, Epoch, Loader, PendingRequest, RangeRequest, ReadyFrame
from teleloader_server.loading.tasks import Task
from teleloader_server.workers.health import Attribution, WorkerExit, WorkerHealth
from teleloader_shared.codec import BatchId
from teleloader_shared.ranges import BatchRanges
from teleloader_shared.spec import LoaderSpec

TRAIN: Epoch = ("train", 0)
OTHER: Epoch = ("other", 0)
THIRD: Epoch = ("third", 0)
SPEC = LoaderSpec(dataset="data")
PLENTY = 10**9
BATCHES = 10**6
SLOW = 0.1
"""Computing time in seconds of a batch so slow that no further batch is queued for its worker."""
QUICK = 0.0005
"""Computing time in seconds of a batch so fast that several are queued for a worker."""


class Tasks(dict[int, Task]):
    """Tasks of a worker, as a pool reports them."""

    def __init__(self, queue: Callable[[], list[BatchId]]) -> None:
        super().__init__()
        self._queue = queue

    def __len__(self) -> int:
        return len(self._queue())

    def values(self) -> Any:
        """Return the tasks in their order."""
        return [Task(SPEC, 0, batch_id) for batch_id in self._queue()]


class Service:
    """Worker pool that executes the decisions of a dispatcher, and asserts that each decision is allowed."""

    def __init__(self, budget: int = PLENTY, workers: int = 1, in_turn: int = 0) -> None:
        self.memory = Memory(budget)
        self.quotas: dict[str, Quota] = {}
        self.dispatcher = Dispatcher(self.memory, in_turn)
        self.loaders: dict[str, Loader] = {}
        self.queues: dict[int, list[BatchId]] = {}
        self.health: dict[int, WorkerHealth] = {}
        self.ready: dict[BatchId, int] = {}
        self.started: Counter[BatchId] = Counter()
        self.groups: list[list[int]] = []
        """Numbers of the batches that were started together, for each group."""
        self.evicted: list[BatchId] = []
        self.withdrawn: list[int] = []
        """Workers whose batch another worker has completed first."""
        self.now = 0.0
        for worker in range(workers):
            self.worker_ready(worker)

    @property
    def recycling(self) -> set[int]:
        """Workers that are replaced once their assigned batches are completed."""
        return {worker for worker, health in self.health.items() if health.recycling}

    @property
    def stalled(self) -> set[int]:
        """Workers whose current batch is slow."""
        return {worker for worker, health in self.health.items() if health.stalled}

    def quota(self, of: str = "anyone", memory: int | None = None, max_consumers: int = 10**6) -> Quota:
        """Return the quota of a principal, creating it if necessary; its default share is the whole memory budget."""
        if of not in self.quotas:
            self.quotas[of] = Quota(of, self.memory.budget if memory is None else memory, max_consumers)
        return self.quotas[of]

    def loader(self, key: str) -> Loader:
        """Return a loader, creating it if necessary; its measured costs are kept."""
        return self.loaders.setdefault(key, Loader(key, SPEC, 0, BATCHES))

    def request(
        self, who: str, run: Epoch, start: int, stop: int, ahead: int = 0, *, of: str = "anyone",
        batches: int = BATCHES, without: Collection[int] = (), is_background: bool = False,
    ) -> PendingRequest:  # fmt: skip
        """Add a request of a principal's client for the batches [start, stop) that are not in `without`."""
        key, epoch = run
        requested = BatchRanges(range(start, stop))
        if without:
            requested = BatchRanges.of(k for k in requested if k not in without)
        request = RangeRequest(
            consumer=who, key=key, epoch=epoch, batches=requested, prefetch=ahead, is_background=is_background
        )
        loader = self.loader(key)
        loader.batches = batches
        return self.dispatcher.add_request(self.quota(of), request, loader, self.now)

    def decide(self) -> list[BatchId]:
        """Execute the decisions of the dispatcher, and return the started batches in order."""
        started = []

        def begin(worker: int, batches: Sequence[Batch]) -> None:
            assert worker not in self.recycling | self.stalled
            assert len({batch.consumer for batch in batches}) == 1, "a group is of one consumer"
            for batch_id in [batch.batch_id for batch in batches]:
                assert batch_id not in self.ready, f"{batch_id} is already computed"
                assert batch_id not in self.running(), f"{batch_id} is already being computed"
                self.queues[worker].append(batch_id)
                started.append(batch_id)
            self.groups.append([batch.batch_id.batch for batch in batches])

        self.dispatcher.decide(begin)
        self.started.update(started)
        return started

    def running(self) -> list[BatchId]:
        """Return the batches that are assigned to workers."""
        return [batch_id for queue in self.queues.values() for batch_id in queue]

    def finish(self, worker: int = 0, nbytes: int = 1, seconds: float = SLOW) -> BatchId:
        """Complete the first batch of a worker."""
        batch_id = self.queues[worker].pop(0)
        self.health[worker].progress(self.now)
        other = self.dispatcher.finished(worker, batch_id, self.frame(batch_id, nbytes), seconds)
        if other is not None:
            assert batch_id in self.queues[other], "the other worker computes the batch"
            self.withdrawn.append(other)
            self.stall(other, [each for each in self.queues[other] if each != batch_id])
            self.queues[other].remove(batch_id)
        return batch_id

    def back_up(self) -> list[tuple[int, BatchId]]:
        """Start backups, and return the worker and the batch of each."""
        started = []

        def begin(worker: int, task: Task) -> None:
            assert not self.queues[worker], "backups start on idle workers"
            assert worker not in self.recycling | self.stalled
            assert self.running().count(task.batch_id) == 1
            self.queues[worker].append(task.batch_id)
            self.health[worker].progress(self.now)
            started.append((worker, task.batch_id))

        self.dispatcher.start_backups(self.now, begin, lambda worker: self.stall(worker, self.queues[worker][1:]))
        return started

    def frame(self, batch_id: BatchId, nbytes: int) -> ReadyFrame:
        """Return a frame that counts as ready until its memory is released."""
        raw = np.broadcast_to(np.uint8(0), nbytes)
        self.ready[batch_id] = nbytes
        weakref.finalize(raw, self._released, batch_id)
        return ReadyFrame(raw, failed=False)

    def _released(self, batch_id: BatchId) -> None:
        del self.ready[batch_id]
        self.evicted.append(batch_id)

    def finish_all(self, nbytes: int = 1, seconds: float = SLOW) -> int:
        """Complete all assigned batches, and return their number."""
        done = 0
        for worker, queue in self.queues.items():
            while queue:
                self.finish(worker, nbytes, seconds)
                done += 1
        return done

    def send_ready(self, request: PendingRequest, limit: int = BATCHES) -> list[int]:
        """Send the ready batches of a request in order, and return their numbers."""
        sent: list[int] = []
        while (
            request.next < request.stop
            and BatchId(*request.consumer.epoch, request.next) in self.ready
            and len(sent) < limit
        ):
            sent.append(request.next)
            self.dispatcher.sent(request, self.now)
        return sent

    def worker_ready(self, worker: int) -> None:
        """Start a worker with this ID."""
        queue: list[BatchId] = []
        self.queues[worker] = queue
        self.health[worker] = WorkerHealth(0.0, tasks=Tasks(lambda: queue))
        self.dispatcher.worker_ready(worker, self.health[worker])

    def recycle(self, worker: int = 0) -> None:
        """Mark a worker to be replaced once its assigned batches are completed."""
        self.health[worker].recycling = True

    def stall(self, worker: int, waiting: list[BatchId]) -> bool:
        """Report a slow batch of a worker with batches queued behind it; return True if these are reassigned."""
        if not self.dispatcher.worker_stalled(waiting):
            return False
        self.health[worker].stalled = True
        for batch_id in waiting:
            self.queues[worker].remove(batch_id)
        return True

    def resume(self, worker: int) -> None:
        """Report that a worker has completed its slow batch."""
        self.health[worker].stalled = False
        self.dispatcher.worker_resumed(worker)

    def lose_worker(
        self, worker: int = 0, attribution: Attribution = "unknown", overdue: frozenset[BatchId] = frozenset()
    ) -> list[BatchId]:
        """End a worker; store failures for the batches that are not retried, and return these batches."""
        lost = self.queues.pop(worker)
        del self.health[worker]
        failed = self.dispatcher.worker_lost(worker, lost, WorkerExit("killed", attribution, overdue=overdue))
        for batch_id in failed:
            self.dispatcher.finished(None, batch_id, self.frame(batch_id, 1))
        return failed

    def warm_up(self, *runs: Epoch, nbytes: int = 1, seconds: float = SLOW) -> None:
        """Compute and evict one batch of each loader, so that the dispatcher knows size and computing time."""
        for loader, _ in runs:
            request = self.request("teacher", (loader, 99), 0, 1)
            self.decide()
            for worker, queue in self.queues.items():
                if queue:
                    self.finish(worker, nbytes, seconds)
            assert self.send_ready(request) == [0]
            self.dispatcher.close(request)
        self.pass_time(FORGET_AFTER + 1)
        self.empty_cache()
        self.started.clear()
        self.evicted.clear()
        self.groups.clear()

    def empty_cache(self) -> None:
        """Evict all unwanted batches."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "CACHE_SHARE", -1)
            self.decide()

    def pass_time(self, seconds: float) -> list[str]:
        """Advance the time, remove idle consumers, and return their names."""
        self.now += seconds
        return [consumer.name for consumer in self.dispatcher.forget_idle(self.now)]

    def consumer(self, who: str) -> Consumer:
        """Return the record of a consumer."""
        (found,) = [consumer for consumer in self.dispatcher.consumers() if consumer.name == who]
        return found


def numbers(addresses: Iterable[BatchId], run: Epoch = TRAIN) -> list[int]:
    """Return the batch numbers of the batches of one epoch."""
    return [batch_id.batch for batch_id in addresses if (batch_id.loader, batch_id.epoch) == run]


def names(addresses: Iterable[BatchId]) -> list[str]:
    """Return readable names of batches, such as ``train 0``."""
    return [f"{batch_id.loader} {batch_id.batch}" for batch_id in addresses]


def complete(service: Service, request: PendingRequest, nbytes: int = 1) -> list[int]:
    """Compute and send all batches of a request, close it, and return the numbers of the started batches."""
    before = service.started.copy()
    while request.next < request.stop:
        service.decide()
        service.finish_all(nbytes)
        service.send_ready(request)
    service.dispatcher.close(request)
    return sorted(numbers((service.started - before).elements(), request.consumer.epoch))


def containers(dispatcher: Dispatcher) -> dict[str, int]:
    """Return the sizes of the non-empty containers of a dispatcher and its store, by attribute name."""
    attributes = vars(dispatcher) | vars(dispatcher.store)
    held = {name: len(value) for name, value in attributes.items() if isinstance(value, Sized)}
    return {name: size for name, size in held.items() if size}


def release_all(service: Service) -> None:
    """Close all requests, remove all consumers and workers, and evict all batches."""
    for consumer in service.dispatcher.consumers():
        for request in list(consumer.requests):
            service.dispatcher.close(request)
    service.finish_all()
    service.pass_time(FORGET_AFTER + 1)
    service.empty_cache()
    for worker in list(service.queues):
        service.lose_worker(worker)
