"""The loader service: what the dispatcher decides is carried out here, and requests wait here for their batches."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from teleloader_server import processes
from teleloader_server.config import Limits
from teleloader_server.dispatcher import Ask, Consumer, Dispatcher, Evict
from teleloader_server.loading import Report, Task
from teleloader_server.metrics import Metrics
from teleloader_server.pool import Lease, Pool
from teleloader_shared.codec import Address, Failure, to_bytes
from teleloader_shared.errors import DatasetChanged, TeleloaderError, UnknownDataset, UnknownLoader, WorkerDied
from teleloader_shared.messages import DatasetInfo, Registration
from teleloader_shared.plan import Plan
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.stats import ConsumerStats, ServerStats, Stats
from teleloader_shared.version import VERSION

MAX_LOADERS: Final = 4096
"""Loaders that are known at once; the one that was asked longest ago is forgotten, and registers again by itself."""
HOUSEKEEPING_INTERVAL: Final = 5.0


@dataclass(slots=True)
class _Loader:
    spec: LoaderSpec
    info: DatasetInfo
    batches: int


class ReadyFrame(NamedTuple):
    """A frame that can be sent."""

    raw: Lease
    failed: bool
    """Whether it holds an exception in place of the batch: that may go better when it is asked for later."""


@dataclass(slots=True)
class BatchStream:
    """The answer to one request: the batches [start, stop), in order, each when it is ready."""

    _service: LoaderService
    _ask: Ask

    @property
    def exhausted(self) -> bool:
        """Whether all batches of the request were taken."""
        return self._ask.next >= self._ask.stop

    async def take(self) -> ReadyFrame:
        """The next batch's frame, waiting for it."""
        return await self._service._take(self._ask)

    def take_ready(self) -> ReadyFrame | None:
        """The next batch's frame if it is there."""
        return None if self.exhausted else self._service._take_ready(self._ask)

    async def linger(self, seconds: float) -> None:
        """Wait until the last batch of the request is there, or so long."""
        last = Address(*self._ask.consumer.run, self._ask.stop - 1)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._service._arrival(last), seconds)


class LoaderService:
    """Everything that the endpoints offer, without HTTP. Lives in one event loop.

    Args:
        pool: Where batches are made.
        limits: What may be taken.
    """

    def __init__(self, pool: Pool, limits: Limits) -> None:
        self.limits = limits
        self.datasets: dict[str, DatasetInfo] = {}
        self.draining = False
        self._pool = pool
        self._dispatcher = Dispatcher(limits.memory_budget)
        self._loaders: OrderedDict[str, _Loader] = OrderedDict()
        self._frames: dict[Address, ReadyFrame] = {}
        self._waiting: dict[Address, list[asyncio.Future[None]]] = {}
        self._decision_due = False
        self._started = time.monotonic()
        self._metrics = Metrics()
        self._plan = lru_cache(maxsize=256)(Plan)

    # -- life

    async def start(self) -> None:
        """Build the datasets and start the workers.

        Raises:
            ConfigError: When a dataset cannot be built.
        """
        infos = await self._pool.start(self)
        self.datasets = {info.name: info for info in infos}
        self._housekeeping = asyncio.create_task(self._keep_house())

    def give_up(self, error: TeleloaderError) -> None:
        """Tell those who wait for a batch that it will not come."""
        for waiting in self._waiting.values():
            for arrived in waiting:
                if not arrived.done():
                    arrived.set_exception(error)
        self._waiting.clear()

    async def close(self) -> None:
        """End the workers."""
        self._housekeeping.cancel()
        with suppress(asyncio.CancelledError):
            await self._housekeeping
        await self._pool.close()
        # a lease that is kept keeps the pool, whose memory it is
        self._frames.clear()

    @property
    def ready(self) -> bool:
        """Whether a worker can take a batch now."""
        return not self.draining and any(state.ready for state in self._pool.workers())

    # -- what clients ask

    def register(self, spec: LoaderSpec) -> Registration:
        """Make a loader known, however often.

        Raises:
            UnknownDataset: When the spec names none that is hosted.
            DatasetChanged: When it insists on another fingerprint than that of the hosted one.
        """
        info = self.dataset(spec.dataset)
        if spec.fingerprint is not None and spec.fingerprint != info.fingerprint:
            raise DatasetChanged(
                f"dataset {info.name!r} has fingerprint {info.fingerprint} (length {info.length}, version "
                f"{info.version!r}), and the loader was made for {spec.fingerprint}: the data, their version or how "
                "they are collated changed. Start a new run, or host what the loader was made for"
            )
        spec = replace(spec, fingerprint=info.fingerprint)
        length = info.length or 0
        plan = self._plan(spec, length, 0)
        self._loaders[spec.key] = _Loader(spec, info, len(plan))
        self._loaders.move_to_end(spec.key)
        if len(self._loaders) > MAX_LOADERS:
            self._forget_a_loader()
        return Registration(
            key=spec.key, batches=len(plan), length=length, fingerprint=info.fingerprint,
            num_workers=self.limits.num_workers, max_batch_bytes=self.limits.max_batch_bytes,
        )  # fmt: skip

    def _forget_a_loader(self) -> None:
        in_use = {consumer.run[0] for consumer in self._dispatcher.consumers()}
        for key in list(self._loaders)[:-1]:
            if key not in in_use:
                del self._loaders[key]
                self._dispatcher.forget_loader(key)
                return

    def dataset(self, name: str) -> DatasetInfo:
        """What is known of a dataset.

        Raises:
            UnknownDataset: When it is not hosted.
        """
        if name not in self.datasets:
            hosted = ", ".join(repr(known) for known in self.datasets)
            raise UnknownDataset(f"no dataset {name[:200]!r} is hosted here; there is {hosted}")
        return self.datasets[name]

    def plan(self, key: str, epoch: int) -> Plan:
        """What the batches of an epoch hold.

        Raises:
            UnknownLoader: When no loader of that key is known.
        """
        loader = self._loaders.get(key)
        if loader is None:
            raise UnknownLoader(
                f"no loader {key[:64]!r} is known here (the server may have restarted): POST its spec to /v1/loaders "
                "and go on"
            )
        self._loaders.move_to_end(key)
        return self._plan(loader.spec, loader.info.length or 0, epoch)

    @asynccontextmanager
    async def batches(
        self, consumer: str, key: str, epoch: int, start: int, stop: int, ahead: int
    ) -> AsyncIterator[BatchStream]:
        """The batches [start, stop) of an epoch; work on them, and `ahead` more, begins now.

        Raises:
            UnknownLoader: When no loader of that key is known.
            BatchOutOfRange: When the epoch has no such batches.
        """
        plan = self.plan(key, epoch)
        for k in (start, stop - 1):
            plan.check(k)
        ask = self._dispatcher.ask(consumer, (key, epoch), len(plan), start, stop, ahead, time.monotonic())
        self._decide_soon()
        try:
            yield BatchStream(self, ask)
        finally:
            self._dispatcher.close(ask)

    async def _take(self, ask: Ask) -> ReadyFrame:
        frame = self._take_ready(ask)
        if frame is not None:
            return frame
        address = Address(*ask.consumer.run, ask.next)
        began = time.monotonic()
        try:
            while frame is None:
                await self._arrival(address)
                frame = self._take_ready(ask)
        finally:
            self._metrics.waited(ask.consumer, time.monotonic() - began)
        return frame

    async def _arrival(self, address: Address) -> None:
        if address not in self._frames:
            arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting = self._waiting.setdefault(address, [])
            waiting.append(arrived)
            try:
                await arrived
            except asyncio.CancelledError:
                waiting.remove(arrived)
                if not waiting and self._waiting.get(address) is waiting:
                    del self._waiting[address]
                raise

    def _take_ready(self, ask: Ask) -> ReadyFrame | None:
        frame = self._frames.get(Address(*ask.consumer.run, ask.next))
        if frame is None:
            return None
        self._metrics.sent(ask.consumer, self._loaders[ask.consumer.run[0]].spec.dataset, len(frame.raw))
        self._dispatcher.sent(ask, time.monotonic())
        self._decide_soon()
        return frame

    # -- what the pool says

    def worker_ready(self, worker: int) -> None:
        """The worker can take batches."""
        self._dispatcher.worker_ready(worker)
        self._decide_soon()

    def task_done(self, worker: int, task: Task, lease: Lease, report: Report) -> None:
        """A batch is a frame now."""
        self._metrics.computed(worker, task.spec.dataset, report)
        self._dispatcher.finished(worker, task.address, len(lease), report.seconds, failed=report.failed)
        self._arrived(task.address, ReadyFrame(lease, report.failed))

    def worker_lost(self, worker: int, tasks: Sequence[Task], reason: str) -> None:
        """What the worker had is done by others; a batch that has killed several workers becomes an error."""
        given_up = self._dispatcher.worker_lost(worker)
        for task in tasks:
            if task.address not in given_up:
                self._metrics.retried(task.spec.dataset)
                continue
            self._metrics.given_up(task.spec.dataset)
            indices: list[int] = Plan(task.spec, task.length, task.address.epoch)[task.address.batch].tolist()
            message = f"DataLoader {reason}; this batch ended every worker that tried to load it"
            failure = Failure(f"{WorkerDied.__module__}.{WorkerDied.__name__}", message, "", indices[:1000], worker)
            frame = to_bytes(task.address, failure, checksum=task.spec.checksum)
            self._dispatcher.finished(None, task.address, len(frame), failed=True)
            self._arrived(task.address, ReadyFrame(np.frombuffer(frame, np.uint8), failed=True))
        self._decide_soon()

    def no_worker_starts(self, reason: str) -> None:
        """Workers die again and again before they can take anything: whoever waits must know."""
        self.give_up(WorkerDied(f"no worker of the server can start: {reason}. Its log has the details"))

    # -- carrying out

    def _arrived(self, address: Address, frame: ReadyFrame) -> None:
        self._frames[address] = frame
        for arrived in self._waiting.pop(address, ()):
            if not arrived.done():
                arrived.set_result(None)
        self._decide_soon()

    def _decide_soon(self) -> None:
        """Let the dispatcher decide once after the events at hand, not once for each."""
        if not self._decision_due:
            self._decision_due = True
            asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        self._decision_due = False
        for action in self._dispatcher.decide():
            if isinstance(action, Evict):
                del self._frames[action.address]
                continue
            loader = self._loaders[action.address.loader]
            self._pool.submit(action.worker, Task(loader.spec, loader.info.length or 0, action.address))

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_INTERVAL)
            for gone in self._dispatcher.forget_idle(time.monotonic()):
                self._metrics.forget(gone)
            self._decide_soon()

    # -- what can be seen

    async def stats(self) -> Stats:
        """The records of ``/stats``."""
        states = self._pool.workers()
        memory = await asyncio.to_thread(processes.memory, [*self._pool.pids(), None])
        server = ServerStats(
            version=VERSION,
            uptime=time.monotonic() - self._started,
            num_workers=self.limits.num_workers,
            memory_budget=self.limits.memory_budget,
            memory_used=self._dispatcher.memory_used,
            memory_mapped=self._pool.mapped_bytes(),
            pss=sum(found.pss for found in memory.values()),
            worker_restarts=sum(state.restarts for state in states),
            draining=self.draining,
        )
        return Stats(
            server,
            datasets=[self._metrics.dataset_stats(name) for name in self.datasets],
            workers=[
                self._metrics.worker_stats(state, memory, busy=self._dispatcher.is_busy(state.worker))
                for state in states
            ],
            consumers=[self._consumer_stats(consumer) for consumer in self._dispatcher.consumers()],
        )

    def _consumer_stats(self, consumer: Consumer) -> ConsumerStats:
        loader = self._loaders[consumer.run[0]]
        return self._metrics.consumer_stats(consumer, loader.spec, loader.batches, time.monotonic())
