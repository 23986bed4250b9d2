"""Function calls and memory per batch, counted and not timed. `python -m tests.costs` prints them as JSON.

The command is a process of its own, because counts depend on which packages are imported.
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, Final

import numpy as np

from teleloader_server.dispatch.dispatcher import Dispatcher
from teleloader_server.dispatch.quotas import Memory, Quota
from teleloader_server.dispatch.records import Batch, Loader, PendingRequest, RangeRequest, ReadyFrame
from teleloader_server.loading.collate import lazy_collate
from teleloader_server.loading.tasks import Task
from teleloader_server.workers.health import WorkerHealth
from teleloader_shared import codec
from teleloader_shared.codec import BatchId, FrameWriter
from teleloader_shared.memory import NumpyMemory
from teleloader_shared.ranges import BatchRanges
from teleloader_shared.spec import LoaderSpec

BATCHES: Final = 256

SPEC: Final = LoaderSpec(dataset="data")
SAMPLES: Final = [(np.full(32, k, np.float32), np.int64(k)) for k in range(256)]


def collated(samples: int) -> None:
    """Collate a batch of rows with labels."""
    lazy_collate(SAMPLES[:samples])


def encoded() -> None:
    """Encode batches of rows with labels."""
    buffer = np.empty(2**16, np.uint8)
    for k in range(BATCHES):
        FrameWriter(BatchId("loader", 0, k), lazy_collate(SAMPLES)).write(buffer)


def response(sizes: list[int]) -> NumpyMemory:
    """Return a response whose frames have an array of each of these sizes."""
    frames = [codec.to_bytes(BatchId("loader", 0, k), np.zeros(size, np.int32)) for k, size in enumerate(sizes)]
    return NumpyMemory(np.frombuffer(bytearray(b"".join(frames)), np.uint8))


def decoder(sizes: list[int]) -> Callable[[], None]:
    """Return a function that decodes a response."""
    memory = response(sizes)

    def decode() -> None:
        assert sum(1 for _ in codec.read_all(memory)) == BATCHES

    return decode


class Serving:
    """Dispatcher whose workers compute batches for consumers that receive each at once.

    Args:
        workers: Number of workers.
        consumers: Number of consumers, each with an epoch of its own.
        seconds: Computing time of a batch.
    """

    def __init__(self, workers: int, consumers: int = 1, seconds: float = 0.02) -> None:
        self._seconds = seconds
        self._dispatcher = Dispatcher(Memory(2**30))
        self._health = [WorkerHealth(0.0) for _ in range(workers)]
        for worker, health in enumerate(self._health):
            self._dispatcher.worker_ready(worker, health)
        self._started: list[tuple[int, int]] = []
        """Worker and task of each started batch, in order."""
        self._ids = count()
        self._frame = ReadyFrame(np.zeros(4096, np.uint8), failed=False)
        self._requests: dict[str, PendingRequest] = {}
        for number in range(consumers):
            key = f"loader {number}"
            loader = Loader(key, SPEC, 0, 10**9, batch_seconds=seconds, batch_nbytes=4096.0)
            wanted = RangeRequest(consumer=key, key=key, epoch=0, batches=BatchRanges(range(10**8)))
            quota = Quota("anyone", 2**30, 10**6)
            self._requests[key] = self._dispatcher.add_request(quota, wanted, loader, 0.0)
        self._dispatcher.decide(self._submit)

    def _submit(self, worker: int, batches: Any) -> None:
        for batch in batches:
            task_id = next(self._ids)
            self._health[worker].tasks[task_id] = Task(SPEC, 0, batch.batch_id)
            self._started.append((worker, task_id))

    def serve(self) -> None:
        """Complete batches, and send those that are ready."""
        for _ in range(BATCHES):
            worker, task_id = self._started.pop(0)
            batch_id = self._health[worker].tasks.pop(task_id).batch_id
            self._dispatcher.finished(worker, batch_id, self._frame, self._seconds)
            request = self._requests[batch_id.loader]
            ready = self._ready(request)
            if ready:
                self._dispatcher.sent(request, 0.0, ready)
            self._dispatcher.decide(self._submit)

    def _ready(self, request: PendingRequest) -> int:
        batches: dict[int, Batch] = request.consumer.state.batches
        return next(n for n in count() if (b := batches.get(request.next + n)) is None or b.frame is None)


CASES: Final[dict[str, tuple[Callable[[], Callable[[], object]], int]]] = {
    "collate, 128 rows with labels": (lambda: partial(collated, 128), 1),
    "collate, 256 rows with labels": (lambda: partial(collated, 256), 1),
    "collate and encode, 256 rows with labels": (lambda: encoded, BATCHES),
    "decode, equal layouts": (lambda: decoder([1000] * BATCHES), BATCHES),
    "decode, different layouts": (lambda: decoder([1000 + 4 * (k % 7) for k in range(BATCHES)]), BATCHES),
    "dispatch, 1 worker": (lambda: Serving(1).serve, BATCHES),
    "dispatch, 512 workers": (lambda: Serving(512).serve, BATCHES),
    "dispatch, 500 consumers": (lambda: Serving(512, 500).serve, BATCHES),
    "dispatch, small batches": (lambda: Serving(2, 10, 0.0001).serve, BATCHES),
}
"""Preparation of each case, which returns the function to count, and the number of batches that the function has."""


def calls(case: str) -> float:
    """Return the number of calls per batch, of Python and C functions."""
    prepare, batches = CASES[case]
    run = prepare()
    run()  # caches are filled
    return _calls_of(run) / batches


def _calls_of(run: Callable[[], object]) -> int:
    total = 0

    def note(_: FrameType, event: str, __: Any) -> None:
        nonlocal total
        total += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return total


def peak_bytes(case: str) -> float:
    """Return the peak memory per batch that a second run allocates, in bytes."""
    prepare, batches = CASES[case]
    run = prepare()
    run()
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1] / batches
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    counted = {case: [round(calls(case), 1), round(peak_bytes(case))] for case in CASES}
    print(json.dumps(counted, indent=4))
