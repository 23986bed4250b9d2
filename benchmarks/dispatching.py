"""Cost of scheduling: CPU time of the dispatcher per batch, with 1 to 512 workers.

The dispatcher runs in this process without an event loop. Workers compute nothing: they complete one batch after
another, the oldest first. One consumer requests all batches in order, and prefetches enough to keep all workers busy.
For each batch, the dispatcher stores the frame, records that it was sent, and decides which batches to start. Batches
appear to take 20 ms, so no worker has a queue.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
from rich.table import Table

from benchmarks.measuring import Spread
from benchmarks.parts import Job, Outcome, Setting, Step, counted, interleaved
from teleloader_server.dispatch.dispatcher import Dispatcher
from teleloader_server.dispatch.quotas import Memory, Quota
from teleloader_server.dispatch.records import Batch, Loader, RangeRequest, ReadyFrame
from teleloader_server.loading.tasks import Task
from teleloader_server.workers.health import WorkerHealth
from teleloader_shared.ranges import BatchRanges
from teleloader_shared.spec import LoaderSpec

COUNTS: Final = (1, 32, 128, 512)
BATCHES: Final = 20_000
QUICK_BATCHES: Final = 2_000
TOGETHER: Final = 64
"""Batches per request."""
BATCH_SECONDS: Final = 0.02
PLENTY: Final = 2**40


class _Workers:
    """Dispatcher, and workers that compute nothing."""

    def __init__(self, num_workers: int) -> None:
        self.dispatcher = Dispatcher(Memory(PLENTY))
        self._frame = np.zeros(4096, np.uint8)
        self._queue: deque[tuple[int, Task]] = deque()
        self._tasks: list[dict[int, Task]] = [{} for _ in range(num_workers)]
        for worker, tasks in enumerate(self._tasks):
            self.dispatcher.worker_ready(worker, WorkerHealth(0.0, tasks=tasks))

    def start(self) -> int:
        """Start the batches that the dispatcher selects; return the number of batches in progress."""
        self.dispatcher.decide(self._submit)
        return len(self._queue)

    def complete(self) -> None:
        """Complete the oldest batch."""
        worker, task = self._queue.popleft()
        del self._tasks[worker][id(task)]
        self.dispatcher.finished(worker, task.batch_id, ReadyFrame(self._frame[:], failed=False), BATCH_SECONDS)

    def _submit(self, worker: int, batches: Sequence[Batch]) -> None:
        for batch in batches:
            loader = batch.consumer.loader
            task = Task(loader.spec, loader.length, batch.batch_id)
            self._tasks[worker][id(task)] = task
            self._queue.append((worker, task))


def _cost(num_workers: int, batches: int) -> float:
    """Return CPU seconds per batch.

    Raises:
        RuntimeError: Not all workers are busy.
    """
    workers = _Workers(num_workers)
    spec = LoaderSpec(dataset="data", batch_size=1)
    loader, quota = Loader(spec.key, spec, 10**9, 10**9), Quota("anyone", PLENTY, 10)
    began, sent = 0.0, 0
    for start in range(0, batches, TOGETHER):
        if start == TOGETHER:  # the first request keeps all workers busy
            began, sent = time.thread_time(), 0
        wanted = BatchRanges(range(start, start + TOGETHER))
        request = RangeRequest(consumer="a", key=loader.key, epoch=0, batches=wanted, prefetch=num_workers + TOGETHER)
        pending = workers.dispatcher.add_request(quota, request, loader, 0.0)
        workers.start()
        while pending.next < pending.stop:
            workers.complete()
            while pending.next < pending.stop and pending.consumer.state.frame(pending.next) is not None:
                workers.dispatcher.sent(pending, 0.0)
                sent += 1
            if (busy := workers.start()) < num_workers:
                raise RuntimeError(f"only {busy} of {counted(num_workers, 'worker')} are busy")
        workers.dispatcher.close(pending)
    return (time.thread_time() - began) / sent


class Dispatching:
    """Cost of scheduling."""

    name = "dispatcher"
    hosted: Mapping[str, str] = {}

    def prepare(self, setting: Setting) -> Job:
        """Return the job; nothing needs preparation."""
        return Job(len(COUNTS) * setting.rounds, partial(self._run, setting))

    def _run(self, setting: Setting, step: Step) -> Outcome:
        batches = QUICK_BATCHES if setting.quick else BATCHES

        def take(num_workers: int) -> float:
            return _cost(num_workers, batches)

        costs = interleaved(
            COUNTS, setting.rounds, step, lambda count: f"{self.name}: {counted(count, 'worker')}", take
        )
        return _outcome(costs)


def _outcome(costs: Mapping[int, Sequence[float]]) -> Outcome:
    made = Table(
        title="dispatcher - CPU per batch, without engine, requests and workers",
        title_justify="left",
        title_style="bold",
    )
    made.add_column("number of workers", justify="right")
    made.add_column("CPU of the dispatcher, us/batch", justify="right")
    spreads = {count: Spread.of([1e6 * each for each in seconds]) for count, seconds in costs.items()}
    for count, spread in spreads.items():
        made.add_row(f"{count}", spread.text(".1f"))
    return Outcome(
        [made],
        [{"num_workers": count, "seconds": list(seconds)} for count, seconds in costs.items()],
        {f"dispatcher: us with {counted(count, 'worker')}": spread for count, spread in spreads.items()},
    )
