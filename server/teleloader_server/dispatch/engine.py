"""Execution of dispatcher decisions by a worker pool, and delivery of frames to waiting requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from contextvars import Context
from dataclasses import dataclass
from itertools import islice
from typing import Final, Self

import numpy as np

from teleloader_server import audit, request_ids
from teleloader_server.dispatch.counters import FETCH, ConsumerCounters, Counters, EngineSource, PoolCounters
from teleloader_server.dispatch.dispatcher import Dispatcher
from teleloader_server.dispatch.quotas import Memory, Quota
from teleloader_server.dispatch.rates import as_share
from teleloader_server.dispatch.records import Batch, Consumer, Loader, PendingRequest, RangeRequest, ReadyFrame
from teleloader_server.dispatch.stragglers import MAX_SUSPECTS
from teleloader_server.dispatch.tracing import Made, RequestTrace
from teleloader_server.loading.tasks import SLOW_FROM, GroupReport, Task, indices_of
from teleloader_server.workers.health import WorkerExit, WorkerHealth
from teleloader_server.workers.pool import Lease, Pool, WorkerState
from teleloader_shared import tracing
from teleloader_shared.codec import BatchId, Failure, Substituted, to_bytes
from teleloader_shared.errors import LoaderTimeout, TeleloaderError, UnknownLoader, WorkerDied
from teleloader_shared.messages import PREVIEW, DatasetInfo

logger = logging.getLogger(__name__)

FORGOTTEN_TOGETHER: Final = 256
"""Maximum number of idle loaders that one call of `Engine.forget_idle` removes: each costs a message per worker."""
CHECK_INTERVAL: Final = 0.05
"""Seconds between two checks of the workers for batches that take unusually long."""
LONG_SECONDS: Final = 5.0
"""Computing time of a batch in seconds after which its worker may be preempted."""


@dataclass(slots=True, eq=False)
class BatchStream:
    """Ordered stream of the batches in one request, each available as soon as it is computed.

    A context manager, whose exit closes the request.
    """

    _engine: Engine
    _pending: PendingRequest
    tally: ConsumerCounters
    """Counters of the consumer."""
    trace: RequestTrace | None
    """Spans of the request; None if it is not traced."""
    authorize: Callable[[], object]
    """Function that raises an error if the request's caller is no longer authorized."""
    request_id: str | None
    on_close: Callable[[], object] | None = None
    """Function that is called when the request is closed."""
    _arrived: asyncio.Future[None] | None = None
    """Future of the batch for which the request waits; None before the first wait."""
    _error: Exception | None = None
    """Error of `end`; None if it was not called."""
    _recorded: int = 0
    """Number of batches that `sent_since_last` returned."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine._close(self)
        if self.on_close is not None:
            self.on_close()

    def end(self, error: Exception) -> None:
        """Make the pending call of `take`, and each further call that would have to wait, raise an error."""
        self._error = error
        self.interrupt(error)

    def interrupt(self, error: Exception) -> None:
        """Make the pending call of `take` raise an error; do nothing if the request does not wait for a batch."""
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_exception(error)

    def wake(self) -> None:
        """Wake the request that waits for a batch, because the batch is ready."""
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    @property
    def consumer(self) -> Consumer:
        """Consumer that sent the request."""
        return self._pending.consumer

    @property
    def exhausted(self) -> bool:
        """True once all batches of the request were returned by `take` or `take_ready`."""
        return self._pending.next >= self._pending.stop

    async def take(self) -> ReadyFrame:
        """Wait for the next batch and return its frame, or raise the error that was passed to `end`."""
        return await self._engine._take(self)

    def take_ready(self, nbytes: int) -> list[ReadyFrame]:
        """Return the frames of the next batches that are ready, up to the frame with which they have `nbytes` bytes."""
        return [] if self.exhausted else self._engine._take_ready(self, nbytes)

    def sent_since_last(self) -> Sequence[int]:
        """Return the numbers of the batches that were taken since the previous call."""
        first, self._recorded = self._recorded, self._pending.sent
        return self._pending.batches[first : self._recorded]

    @property
    def open_requests(self) -> int:
        """Number of open requests to the engine, including this one."""
        return len(self._engine._streams)

    @property
    def batch_rate(self) -> float:
        """Batches/s of the loader that the workers of the engine can compute; 0 before the first batch."""
        seconds = self.consumer.loader.batch_seconds
        return max(1, self._engine.pool.num_workers) / seconds if seconds else 0.0

    async def linger(self, count: int | None, seconds: float) -> None:
        """Wait up to `seconds` for the next `count` batches of the request, or for all of them if `count` is None."""
        pending = self._pending
        last = len(pending.batches) if count is None else min(pending.sent + count, len(pending.batches))
        timer = asyncio.get_running_loop().call_later(seconds, self.wake)
        try:
            await self._engine._arrival(pending.batches[last - 1], self)
        finally:
            timer.cancel()


class Engine:
    """Worker pool with its dispatcher, used in one event loop.

    Args:
        pool: Worker pool.
        memory: Memory budget, shared with other engines.
        metrics: Counters of the server.
        source: Owner of the pool's workers, for statistics.
        in_turn: Number of workers that compute batches in turn; 0 if any worker may compute any batch.
    """

    def __init__(self, pool: Pool, memory: Memory, metrics: Counters, source: EngineSource, in_turn: int = 0) -> None:
        self._last_used = time.monotonic()
        self._end: TeleloaderError | None = None
        """Error of all further requests; None while the engine runs."""
        self.pool: Final = pool
        self.source: Final = source
        self.tally: Final[PoolCounters] = metrics.pool()
        """Counters of the worker pool."""
        self._dispatcher = Dispatcher(memory, in_turn)
        self._loaders: set[str] = set()
        """Keys of the loaders whose state workers may keep."""
        self._decision_due = False
        self._waiting = 0
        """Number of requests that wait for a batch."""
        self._check_due = in_turn > 0
        """True if a check of the workers is scheduled, or none is necessary."""
        self._context = Context()
        """Empty context in which decisions run: they concern all requests, so log lines contain no request ID."""
        self._traces = tracing.is_on()
        self._streams: set[BatchStream] = set()
        """Streams of open requests."""

    # -- life

    async def start(self) -> list[DatasetInfo]:
        """Start the worker pool, which constructs the datasets, and return the dataset descriptions.

        Raises:
            ConfigError: If a dataset cannot be constructed.
        """
        return await self.pool.start(self)

    def give_up(self, error: TeleloaderError) -> None:
        """Raise an error in all requests that wait for a batch."""
        for stream in self._streams:
            stream.interrupt(error)

    def end_loader(self, key: str, error: TeleloaderError) -> None:
        """Raise an error in all open requests of a loader."""
        for stream in self._streams:
            if stream.consumer.loader.key == key:
                stream.end(error)

    async def close(self) -> None:
        """Stop all workers, and raise an error in all waiting requests."""
        self._end = UnknownLoader("the session has ended: register the loader again")
        self.give_up(self._end)
        self._record_ended(self.tally.keep((), ()))
        await self.pool.close()
        # a kept lease would keep the whole pool in memory
        self._dispatcher.release()

    # -- requests

    def batches(
        self, loader: Loader, quota: Quota, request: RangeRequest, authorize: Callable[[], object]
    ) -> BatchStream:
        """Start a request, and return a stream of the requested batches, whose exit closes the request.

        Args:
            loader: A loader of this engine.
            quota: Quota of the client's principal.
            request: The request.
            authorize: Function that raises an error if the request's caller is no longer authorized.

        Raises:
            ServerUnavailable: If the principal has too many consumers with open requests.
        """
        now = time.monotonic()
        pending = self._dispatcher.add_request(quota, request, loader, now)
        self._loaders.add(loader.key)
        self._decide_soon()
        is_new = not self.tally.knows(pending.consumer)
        tally = self.tally.consumer(pending.consumer, loader.spec.dataset)
        tally.requested(now, request.report)
        if is_new:
            audit.record("read_started", **_read(tally), first_batch=request.batches.start)
        stream = BatchStream(self, pending, tally, request.trace, authorize, request_ids.current())
        self._streams.add(stream)
        return stream

    def _close(self, stream: BatchStream) -> None:
        self._streams.remove(stream)
        if stream.trace is not None:
            stream.trace.end()
        self._last_used = time.monotonic()
        self._dispatcher.close(stream._pending)

    async def _take(self, stream: BatchStream) -> ReadyFrame:
        frames = self._take_ready(stream, 1)
        if not frames:
            # the training loop does not wait for a batch of the next epoch
            with nullcontext() if stream.consumer.is_background else stream.tally.waiting_for_batch():
                while not frames:
                    await self._arrival(stream._pending.next, stream)
                    frames = self._take_ready(stream, 1)
        return frames[0]

    async def _arrival(self, k: int, stream: BatchStream) -> None:
        """Wait until batch k is ready, or until `wake` or `end` of the stream is called."""
        state = stream.consumer.state
        if state.frame(k) is None:
            ended = self._end or stream._error
            if ended is not None:
                raise ended
            stream._arrived = asyncio.get_running_loop().create_future()
            waiters = state.waiters.setdefault(k, [])
            waiters.append(stream.wake)
            self._waiting += 1
            self._check_soon()
            try:
                await stream._arrived
            finally:
                self._waiting -= 1
                if state.waiters.get(k) is waiters:  # the batch is not ready
                    waiters.remove(stream.wake)
                    if not waiters:
                        del state.waiters[k]

    def _take_ready(self, stream: BatchStream, nbytes: int) -> list[ReadyFrame]:
        pending, frames, size = stream._pending, [], 0
        batches = pending.consumer.state.batches
        for k in pending.unsent():
            batch = batches.get(k)
            if batch is None or batch.frame is None:
                break
            frames.append(batch.frame)
            size += len(batch.frame.raw)
            if stream.trace is not None:
                stream.trace.made(k, batch.frame.made)
            if size >= nbytes:
                break
        if frames:
            stream.tally.sent(len(frames), size)
            self._dispatcher.sent(pending, time.monotonic(), len(frames))
            self._decide_soon()
        return frames

    # -- events of the pool

    def worker_ready(self, worker: int, health: WorkerHealth) -> None:
        """Add a worker to the dispatcher."""
        self._dispatcher.worker_ready(worker, health)
        self._decide_soon()

    def worker_removed(self, worker: int) -> None:
        """Remove a worker from the dispatcher."""
        self._dispatcher.worker_removed(worker)
        self._decide_soon()

    def tasks_done(self, worker: int, tasks: Sequence[Task], frames: Sequence[Lease], report: GroupReport) -> None:
        """Store the frames of computed batches, and wake the requests that wait for one of them."""
        if self._end is not None:
            return
        stream = self._stream_for(tasks[-1].batch_id) if report.failed else None
        with nullcontext() if stream is None else request_ids.on_behalf_of(stream.request_id):
            self._count(worker, tasks, frames, report)
        self.tally.timeline.add_computed(time.monotonic(), self.source.pool, worker, tasks, report)
        now, last = time.time_ns(), len(tasks) - 1
        batches = [self._dispatcher.store.batch(task.batch_id) for task in tasks] if report.substituted else []
        for place, (task, raw, *stages) in enumerate(zip(tasks, frames, *report.stages, strict=True)):
            made = Made(now, worker, stages) if self._traces else None
            if stages[FETCH] > SLOW_FROM and not (report.failed and place == last):
                self._learn(task, report, place)
            frame = ReadyFrame(raw, report.failed and place == last, made)
            is_beyond = not frame.failed and report.samples[place] == 0
            other = self._dispatcher.finished(worker, task.batch_id, frame, sum(stages), is_beyond=is_beyond)
            if other is not None:
                self.pool.withdraw(other, task.batch_id)
        for place, fields in report.substituted:
            found = Substituted.read(fields)
            self._dispatcher.substituted(tasks[place].batch_id, found)
            self.tally.substituted(tasks[place], found, worker, self.tally.run_of(batches[place].consumer))
        self._decide_soon()

    def _count(self, worker: int, tasks: Sequence[Task], frames: Sequence[Lease], report: GroupReport) -> None:
        """Count computed batches, and log a failure of the last one."""
        consumer = self._dispatcher.store.batch(tasks[-1].batch_id).consumer
        principal = consumer.principal_share.quota.name
        if not report.failed:
            self.tally.computed(worker, tasks, frames, report, principal)
            return
        is_preview = consumer.name == PREVIEW
        self.tally.computed(
            worker, tasks, frames, report, principal, self.tally.run_of(consumer), is_preview=is_preview
        )

    def _learn(self, task: Task, report: GroupReport, place: int) -> None:
        """Update the slow samples of a dataset from a batch that took long to fetch."""
        if task.length == 0:
            return
        # without __getitem__, only the time of the whole batch is known; batches of a sampler may have any size
        fetch, measured = report.stages[FETCH][place], dict(report.slow).get(place, ())
        suspects: Sequence[int] = ()
        if report.slowest[place] is None and task.spec.order == "plan":
            suspects = indices_of(task, MAX_SUSPECTS + 1)
        if len(suspects) == 1:
            measured, suspects = [(suspects[0], fetch)], ()
        learned = self._dispatcher.learn(
            task.batch_id, fetch, measured, suspects if len(suspects) <= MAX_SUSPECTS else ()
        )
        if learned.new:
            self.tally.slow_samples(task, learned.new, learned.typical, fetch, measured)

    def _stream_for(self, batch_id: BatchId) -> BatchStream | None:
        """Return the stream of a request for the batch, or None if the batch is only prefetched."""
        loader, epoch, k = batch_id
        wanting = (
            stream
            for stream in self._streams
            if stream.consumer.epoch == (loader, epoch) and stream._pending.distance(k) is not None
        )
        return next(wanting, None)

    def worker_stalled(self, tasks: Sequence[Task]) -> bool:
        """Reassign the batches queued behind a slow batch; return False if they must stay queued."""
        self._decide_soon()
        return self._dispatcher.worker_stalled([task.batch_id for task in tasks])

    def worker_resumed(self, worker: int) -> None:
        """Resume assigning batches to a worker that had stalled."""
        self._dispatcher.worker_resumed(worker)
        self._decide_soon()

    def worker_lost(self, worker: int, tasks: Sequence[Task], worker_exit: WorkerExit) -> None:
        """Requeue the batches of an exited worker; store a failure for each batch that is not retried."""
        self.tally.worker_lost()
        failed = self._dispatcher.worker_lost(worker, [task.batch_id for task in tasks], worker_exit)
        for task in tasks:
            if task.batch_id not in failed:
                self.tally.retried(task.spec.dataset)
                continue
            indices = indices_of(task)
            kind, message = _error_of(worker_exit)
            sample = worker_exit.sample if task.batch_id == worker_exit.batch_id else None
            failure = Failure(f"{kind.__module__}.{kind.__name__}", message, "", indices, worker, sample)
            self.tally.batch_failed(task, failure)
            frame = to_bytes(task.batch_id, failure, checksum=task.spec.checksum)
            self._dispatcher.finished(None, task.batch_id, ReadyFrame(np.frombuffer(frame, np.uint8), failed=True))
        self._decide_soon()

    def no_worker_starts(self, reason: str) -> None:
        """Raise an error in all waiting requests, because no worker can be started."""
        self.give_up(WorkerDied(f"the server cannot start a worker: {reason}. See the log of the server"))

    # -- execution

    def _decide_soon(self) -> None:
        """Schedule one decision of the dispatcher for all events of this iteration of the event loop."""
        if not self._decision_due:
            self._decision_due = True
            asyncio.get_running_loop().call_soon(self._decide, context=self._context)

    def _check_soon(self) -> None:
        """Schedule a check of the workers for batches that take unusually long, while requests wait for batches."""
        if not self._check_due:
            self._check_due = True
            asyncio.get_running_loop().call_later(CHECK_INTERVAL, self._check_workers, context=self._context)

    def _check_workers(self) -> None:
        self._check_due = False
        if self._end is not None or not self._waiting:
            return
        now = time.monotonic()
        for task, (worker, other, seconds) in self._dispatcher.start_backups(
            now, self._submit_backup, self.pool.reassign_queued
        ):
            self.tally.backup_started(task)
            loader, epoch, batch = task.batch_id
            logger.info(
                "worker %d has had no result for %.3f s: worker %d computes batch %d of epoch %d of dataset %s, too",
                worker, seconds, other, batch, epoch, task.spec.dataset,
                extra={
                    "loader": loader, "epoch": epoch, "batch": batch, "dataset": task.spec.dataset, "worker": worker,
                },
            )  # fmt: skip
        ended = self._dispatcher.backup_to_end(now)
        if ended is not None:
            self.pool.take(ended, "the backup took long, too, and another client had no worker")
        self._check_soon()

    def _submit_backup(self, worker: int, task: Task) -> None:
        self.pool.submit(worker, [task])

    def _decide(self) -> None:
        self._decision_due = False
        if self._end is None:
            self._dispatcher.decide(self._submit)
            if self._dispatcher.lacks_memory is not self.tally.lacks_memory:
                self.tally.memory_changed(time.monotonic())

    def _submit(self, worker: int, batches: Sequence[Batch]) -> None:
        consumer, kept = batches[0].consumer, batches[0].state.substituted
        spec, length = consumer.loader.spec, consumer.loader.length
        index_list = consumer.index_list if spec.order == "client" else lambda k: None
        owner = consumer.principal_share.quota.owners.get(spec.content, 0)
        ids = [batch.batch_id for batch in batches]
        now = time.monotonic()
        tasks = [Task(spec, length, each, index_list(each.batch), owner, kept.get(each.batch), now) for each in ids]
        if batches[0].is_early:
            self.tally.started_early(spec.dataset)
        self.pool.submit(worker, tasks)

    def forget_idle(self) -> None:
        """Remove idle consumers, and up to `FORGOTTEN_TOGETHER` loaders that no consumer uses."""
        self._dispatcher.forget_idle(time.monotonic())
        in_use = {consumer.epoch[0] for consumer in self._dispatcher.consumers()}
        for key in list(islice(self._loaders - in_use, FORGOTTEN_TOGETHER)):
            self._loaders.remove(key)
            self.pool.forget(key)
        self._record_ended(self.tally.keep(self._dispatcher.consumers(), self._loaders))
        self._decide_soon()

    @staticmethod
    def _record_ended(ended: Iterable[ConsumerCounters]) -> None:
        """Add what consumers have read to the audit log."""
        for tally in ended:
            seconds = round(tally.last_request - tally.began, 3)
            audit.record("read_ended", **_read(tally), batches=tally.batches, bytes=tally.nbytes, seconds=seconds)

    def wake(self) -> None:
        """Schedule a dispatcher decision, because memory or a quota may be available again."""
        self._decide_soon()

    def preempt(self) -> None:
        """Preempt a worker if a client uses several workers for slow batches, and another client waits for a worker."""
        working = {
            state.worker: (state.task.batch_id, state.working_for)
            for state in self.pool.workers()
            if state.ready and state.task is not None and state.working_for >= LONG_SECONDS
        }
        taken = self._dispatcher.preempt(working)
        if taken is not None:
            self.pool.take(taken, "the batch was slow, and another client had no worker")

    def touch(self) -> None:
        """Record a client heartbeat, which postpones the end of an idle session."""
        self._last_used = time.monotonic()

    # -- state

    def consumers(self) -> Iterable[Consumer]:
        """Return the current consumers of the engine."""
        return self._dispatcher.consumers()

    def workers(self) -> list[tuple[WorkerState, bool]]:
        """Return a pair for each worker: its state, and True if a batch is assigned to the worker."""
        return [(state, self._dispatcher.is_busy(state.worker)) for state in self.pool.workers()]

    def mark_workers(self, now: float) -> list[float]:
        """Sample the busy time of workers; called about once per second.

        Returns:
            The busy fraction of each worker since the latest sample.
        """
        busy = []
        for state in self.pool.workers():
            place = self.tally.workers[state.worker]
            totals = place.totals(state.working_for)
            busy.append(as_share(place.window.latest(now, *totals)[0]))
            place.window.mark(now, *totals)
        self.tally.memory_window.mark(now, self.tally.memory_full.until(now))
        return busy

    @property
    def idle(self) -> float:
        """Seconds since the last request or heartbeat; 0 while a request is open."""
        is_awaited = any(consumer.requests for consumer in self._dispatcher.consumers())
        return 0.0 if is_awaited else time.monotonic() - self._last_used

    @property
    def prefetched(self) -> int:
        """Number of batches, computed or in progress, that a consumer has not received."""
        return self._dispatcher.store.num_wanted

    @property
    def memory_used(self) -> int:
        """Memory used by computed batches plus the estimated memory of batches in progress, in bytes."""
        return self._dispatcher.store.used


def _read(tally: ConsumerCounters) -> dict[str, object]:
    """Return the fields of the audit log about the data that a consumer reads."""
    consumer = tally.consumer
    spec = consumer.loader.spec
    return {
        "principal": consumer.principal_share.quota.name,
        "run": tally.run,
        "consumer": consumer.name,
        "datasets": list(spec.datasets),
        "fingerprint": spec.fingerprint,
        "loader": consumer.epoch[0],
        "epoch": consumer.epoch[1],
    }


def _error_of(worker_exit: WorkerExit) -> tuple[type[TeleloaderError], str]:
    """Return class and message of the error that replaces a batch that is not retried."""
    if isinstance(worker_exit.attribution, BatchId):
        return LoaderTimeout, f"DataLoader {worker_exit.reason}. Stack of the worker:\n{worker_exit.stack}"
    if worker_exit.attribution == "machine":
        return (
            WorkerDied,
            f"DataLoader {worker_exit.reason}. Retries of the batch exceeded the timeout (--batch-timeout)",
        )
    return WorkerDied, f"DataLoader {worker_exit.reason}; every worker that loaded the batch exited"
