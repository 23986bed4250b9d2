"""Execution of a dispatcher's decisions by a pool of workers; requests wait here for their frames."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from teleloader_server import request_ids
from teleloader_server.dispatch.counters import ConsumerCounters, Counters, PoolCounters
from teleloader_server.dispatch.dispatcher import Dispatcher
from teleloader_server.dispatch.quotas import Memory, Quota
from teleloader_server.dispatch.records import Consumer, Loader, PendingRange, RangeRequest, ReadyFrame
from teleloader_server.dispatch.tracing import Made, RequestTrace
from teleloader_server.loading.tasks import Report, Task, indices_of
from teleloader_server.workers.health import WorkerExit
from teleloader_server.workers.pool import Lease, Pool, WorkerState
from teleloader_shared import tracing
from teleloader_shared.codec import Address, Failure, to_bytes
from teleloader_shared.errors import LoaderTimeout, TeleloaderError, UnknownLoader, WorkerDied
from teleloader_shared.messages import DatasetInfo

FORGOTTEN_TOGETHER: Final = 256
"""Idle loaders that are forgotten in one turn of the event loop: each one costs a message to every worker."""
LONG_SECONDS: Final = 5.0
"""Seconds of computation after which the worker of a batch may be preempted."""


@dataclass(slots=True, eq=False)
class BatchStream:
    """Batches [start, stop) of one request, in order, each when it is ready."""

    _engine: Engine
    _ask: PendingRange
    tally: ConsumerCounters
    """Counters of the consumer."""
    trace: RequestTrace | None
    """Spans of the request; None if it is not traced."""
    authorize: Callable[[], object]
    """Raises an error if the request's caller may not have the batches any more."""
    request_id: str | None
    _arrived: asyncio.Future[None] | None = None
    """Done when the batch that the request waits for is ready."""

    def end(self, error: TeleloaderError) -> None:
        """Make the pending wait for a batch raise `error`, if one is pending."""
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_exception(error)

    def wake(self) -> None:
        """Continue: the batch that is waited for is ready."""
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    @property
    def consumer(self) -> Consumer:
        """Consumer that sent the request."""
        return self._ask.consumer

    @property
    def exhausted(self) -> bool:
        """True once all batches of the request were taken."""
        return self._ask.next >= self._ask.stop

    async def take(self) -> ReadyFrame:
        """Wait for the next batch, and return its frame."""
        return await self._engine._take(self)

    def take_ready(self) -> ReadyFrame | None:
        """Return the next batch's frame if it is ready."""
        return None if self.exhausted else self._engine._take_ready(self)

    async def linger(self, seconds: float) -> None:
        """Wait until the last batch of the request is ready, but at most `seconds`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._engine._arrival(self._ask.stop - 1, self), seconds)


class Engine:
    """A pool of workers with its dispatcher. Lives in one event loop.

    Args:
        pool: The workers.
        memory: Memory budget, shared with other engines.
        metrics: Counters of the server.
        in_turn: Number of workers that compute batches in turn; 0 if any worker may compute any batch.
    """

    def __init__(self, pool: Pool, memory: Memory, metrics: Counters, in_turn: int = 0) -> None:
        self._last_used = time.monotonic()
        self._end: TeleloaderError | None = None
        """Reason why no more batches follow; None while the engine runs."""
        self._pool = pool
        self.tally: Final[PoolCounters] = metrics.pool()
        """Counters of this pool."""
        self._dispatcher = Dispatcher(memory, in_turn)
        self._loaders: set[str] = set()
        """Keys of the loaders that workers may know."""
        self._decision_due = False
        self._context = Context()
        """Context of decisions, which concern all requests: log lines name none of them."""
        self._traces = tracing.is_on()
        self._streams: set[BatchStream] = set()
        """Streams of open requests."""

    # -- life

    async def start(self) -> list[DatasetInfo]:
        """Build the datasets and start the workers.

        Raises:
            ConfigError: When a dataset cannot be built.
        """
        return await self._pool.start(self)

    def give_up(self, error: TeleloaderError) -> None:
        """Raise an error in all requests that wait for a batch."""
        for stream in self._streams:
            stream.end(error)

    async def close(self) -> None:
        """End the workers."""
        self._end = UnknownLoader("the session was ended")
        self.give_up(self._end)
        await self._pool.close()
        # a lease that is kept keeps the pool, whose memory it is
        self._dispatcher.release()

    # -- requests

    @asynccontextmanager
    async def batches(
        self, loader: Loader, quota: Quota, request: RangeRequest, authorize: Callable[[], object]
    ) -> AsyncIterator[BatchStream]:
        """Start computing the batches of a request, and those that it lets prefetch; stream those that it requests.

        Args:
            loader: One of this engine's.
            quota: The quota of the client's principal.
            request: The request.
            authorize: Raises an error if the request's caller may not have the batches any more.

        Raises:
            ServerUnavailable: If the principal has too many consumers.
        """
        now = time.monotonic()
        ask = self._dispatcher.ask(quota, request, loader, now)
        self._loaders.add(loader.key)
        self._decide_soon()
        tally = self.tally.consumer(ask.consumer, loader.spec.dataset)
        tally.asks(now, request.report)
        stream = BatchStream(self, ask, tally, request.trace, authorize, request_ids.current())
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.remove(stream)
            if request.trace is not None:
                request.trace.end()
            self._last_used = time.monotonic()
            self._dispatcher.close(ask)

    async def _take(self, stream: BatchStream) -> ReadyFrame:
        frame = self._take_ready(stream)
        if frame is not None:
            return frame
        stream.tally.waits()
        try:
            while frame is None:
                await self._arrival(stream._ask.next, stream)
                frame = self._take_ready(stream)
        finally:
            stream.tally.has_waited()
        return frame

    async def _arrival(self, k: int, stream: BatchStream) -> None:
        state = stream.consumer.state
        if state.frame(k) is None:
            if self._end is not None:
                raise self._end
            stream._arrived = asyncio.get_running_loop().create_future()
            waiters = state.waiters.setdefault(k, [])
            waiters.append(stream.wake)
            try:
                await stream._arrived
            except BaseException:  # also when this request alone was cancelled or ended
                waiters.remove(stream.wake)
                if not waiters and state.waiters.get(k) is waiters:
                    del state.waiters[k]
                raise

    def _take_ready(self, stream: BatchStream) -> ReadyFrame | None:
        ask = stream._ask
        frame = ask.consumer.state.frame(ask.next)
        if frame is None:
            return None
        if stream.trace is not None:
            stream.trace.made(ask.next, frame.made)
        stream.tally.sent(len(frame.raw))
        self._dispatcher.sent(ask, time.monotonic())
        self._decide_soon()
        return frame

    # -- events of the pool

    def worker_ready(self, worker: int) -> None:
        """Make a worker available."""
        self._dispatcher.worker_ready(worker)
        self._decide_soon()

    def task_done(self, worker: int, task: Task, lease: Lease, report: Report) -> None:
        """Store a finished batch."""
        if self._end is not None:
            return
        if report.failed:
            with request_ids.on_behalf_of(self._request_for(task.address)):
                self.tally.computed(worker, task, lease, report)
        else:
            self.tally.computed(worker, task, lease, report)
        made = Made(time.time_ns(), worker, report) if self._traces else None
        self._dispatcher.finished(worker, task.address, ReadyFrame(lease, report.failed, made), report.seconds)
        self._decide_soon()

    def _request_for(self, address: Address) -> str | None:
        """Return the ID of a request for the batch; None if it is prefetched."""
        loader, epoch, k = address
        wanting = (
            stream.request_id
            for stream in self._streams
            if stream.consumer.run == (loader, epoch) and stream._ask.next <= k < stream._ask.stop
        )
        return next(wanting, None)

    def worker_recycling(self, worker: int) -> None:
        """Give a worker nothing more."""
        self._dispatcher.worker_recycling(worker)

    def worker_stalled(self, worker: int, tasks: Sequence[Task]) -> bool:
        """Give the batches that wait behind a slow one to other workers."""
        self._decide_soon()
        return self._dispatcher.worker_stalled(worker, [task.address for task in tasks])

    def worker_resumed(self, worker: int) -> None:
        """Make a stalled worker available again."""
        self._dispatcher.worker_resumed(worker)
        self._decide_soon()

    def worker_lost(self, worker: int, tasks: Sequence[Task], loss: WorkerExit) -> None:
        """Requeue the batches of a worker that died; one that hung or killed several workers becomes an error."""
        self.tally.worker_lost()
        given_up = self._dispatcher.worker_lost(worker, loss.attribution, loss.overdue)
        for task in tasks:
            if task.address not in given_up:
                self.tally.retried(task.spec.dataset)
                continue
            indices = indices_of(task)
            kind, message = _told_of(loss)
            failure = Failure(f"{kind.__module__}.{kind.__name__}", message, "", indices, worker)
            self.tally.given_up(task.spec.dataset, failure)
            frame = to_bytes(task.address, failure, checksum=task.spec.checksum)
            self._dispatcher.finished(None, task.address, ReadyFrame(np.frombuffer(frame, np.uint8), failed=True))
        self._decide_soon()

    def no_worker_starts(self, reason: str) -> None:
        """Raise an error in all requests that wait: workers die before they can take a batch."""
        self.give_up(WorkerDied(f"no worker of the server can start: {reason}. Its log has the details"))

    # -- execution

    def _decide_soon(self) -> None:
        """Let the dispatcher decide once after the events at hand, not once for each."""
        if not self._decision_due:
            self._decision_due = True
            asyncio.get_running_loop().call_soon(self._decide, context=self._context)

    def _decide(self) -> None:
        self._decision_due = False
        if self._end is not None:
            return
        for worker, batch in self._dispatcher.decide():
            loader, indices = batch.consumer.loader, batch.consumer.index_list(batch.address.batch)
            self._pool.submit(worker, Task(loader.spec, loader.length, batch.address, indices))

    def forget_idle(self) -> None:
        """Forget idle consumers, and some of the loaders that no consumer uses."""
        self._dispatcher.forget_idle(time.monotonic())
        in_use = {consumer.run[0] for consumer in self._dispatcher.consumers()}
        for key in list(islice(self._loaders - in_use, FORGOTTEN_TOGETHER)):
            self._loaders.remove(key)
            self.forget_loader(key)
        self.tally.keep(self._dispatcher.consumers(), self._loaders)
        self._decide_soon()

    def forget_loader(self, key: str) -> None:
        """Have the workers forget a loader; consumers may remain."""
        self._pool.forget(key)

    def wake(self) -> None:
        """Decide again: memory or a limit may be available now."""
        self._decide_soon()

    def preempt(self) -> None:
        """End a worker of a consumer or principal with several slow batches, if another one waits without any."""
        working = {
            state.worker: (state.task.address, state.working_for)
            for state in self._pool.workers()
            if state.ready and state.task is not None and state.working_for >= LONG_SECONDS
        }
        taken = self._dispatcher.preempt(working)
        if taken is not None:
            self._pool.take(taken, "what it made took long, while another client had no worker")

    def touch(self) -> None:
        """Record that the client is alive without a request."""
        self._last_used = time.monotonic()

    # -- state

    def consumers(self) -> Iterable[Consumer]:
        """Return the known consumers."""
        return self._dispatcher.consumers()

    def workers(self) -> list[tuple[WorkerState, bool]]:
        """Return the state of each worker, and True if it has a batch to compute."""
        return [(state, self._dispatcher.is_busy(state.worker)) for state in self._pool.workers()]

    def mark_workers(self, now: float) -> None:
        """Mark the totals of workers; called about once a second."""
        for state in self._pool.workers():
            place = self.tally.workers[state.worker]
            place.window.mark(now, place.busy + state.working_for)

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._pool.num_workers

    def pids(self) -> list[int]:
        """Return the PIDs of all processes of the pool."""
        return self._pool.pids()

    @property
    def idle(self) -> float:
        """Seconds since the last request or `touch`; 0 while a request is open."""
        waited_for = any(consumer.asks for consumer in self._dispatcher.consumers())
        return 0.0 if waited_for else time.monotonic() - self._last_used

    @property
    def memory_used(self) -> int:
        """Bytes of kept frames, and estimates of those being computed."""
        return self._dispatcher.store.used

    @property
    def memory_mapped(self) -> int:
        """Bytes of shared memory that is mapped for frames, used or free."""
        return self._pool.mapped_bytes()


def _told_of(loss: WorkerExit) -> tuple[type[TeleloaderError], str]:
    """Return class and message of the error in place of a batch that is given up."""
    if isinstance(loss.attribution, Address):
        return LoaderTimeout, f"DataLoader {loss.reason}. It was at:\n{loss.stack}"
    if loss.attribution == "machine":
        return WorkerDied, f"DataLoader {loss.reason}. The batch was computed again until its time was over"
    return WorkerDied, f"DataLoader {loss.reason}; this batch ended every worker that tried to load it"
