"""Server with fabricated statistics, for tests of pages and tools that show them."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter

from teleloader_server.web.app import bind, url_of
from teleloader_server.web.dashboard import add_dashboard
from teleloader_shared.history import (
    CONSUMER_SERIES,
    SERVER_SERIES,
    History,
    LabelChange,
    LoopId,
    Mark,
    Series,
)
from teleloader_shared.inspection import ErrorRecord, Errors, SlowSampleList, Timeline
from teleloader_shared.stats import (
    ConsumerStats,
    DatasetStats,
    Diagnosis,
    ErrorCount,
    Latency,
    Measurement,
    ServerStats,
    SlowBatch,
    Stats,
    WorkerStats,
)

MIB = 2**20
HOUR = 3600

SERVER = ServerStats(
    version="1.2.3",
    host="cpu-box",
    pid=4242,
    uptime=7384.2,
    cpus=16,
    cpu=6.5,
    num_workers=4,
    memory_budget=2048 * MIB,
    memory_used=512 * MIB,
    memory_mapped=640 * MIB,
    memory_sending=12 * MIB,
    pss=1536 * MIB,
    event_loop_lag=0.0004,
    connections=12,
    worker_restarts=1,
    batches_per_second=125.0,
    bytes_per_second=64.5 * MIB,
    draining=False,
    load=3.5,
    demand=7.5,
    demand_unmeasured=0.5,
    saturated=False,
    memory_lent=77 * MIB,
)

WORKER = WorkerStats(
    worker=0,
    pid=5000,
    loader=None,
    state="busy",
    current_task="batch 12 of epoch 0 of train",
    current_task_seconds=0.25,
    batches=1234,
    busy=100.0,
    busy_fraction=0.93,
    restarts=0,
    recycled=0,
    last_exit=None,
    last_restart=None,
    rss=300 * MIB,
    pss=120 * MIB,
)

DATASET = DatasetStats(
    dataset="train",
    kind="map",
    length=50_000,
    batches_computed=4000,
    batches_sent=4100,
    batches_failed=3,
    batches_retried=1,
    samples_computed=128_000,
    samples_per_second=4000.0,
    stages={
        "fetch": Latency(4000, 0.03, 0.025, 0.08, 0.12, 0.4),
        "collate": Latency(4000, 0.002, 0.002, 0.004, 0.006, 0.01),
        "encode": Latency(4000, 0.0005, 0.0004, 0.0009, 0.001, 0.002),
    },
    slowest=[SlowBatch(77, 1, "0f1e2d3c4b5a69788796a5b4c3d2e1f0", 0.4, list(range(20)))],
    errors=[ErrorCount("ValueError", 3, "sample 17 is damaged", "Traceback ...\nValueError: ...", [16, 17], 5.0)],
)

CONSUMER = ConsumerStats(
    consumer="trainer-0",
    token="anyone",
    dataset="train",
    loader="0f1e2d3c4b5a69788796a5b4c3d2e1f0",
    rank=0,
    world_size=1,
    epoch=2,
    position=120,
    batches=400,
    batches_sent=920,
    bytes_sent=480 * MIB,
    batches_per_second=12.5,
    bytes_per_second=6.25 * MIB,
    waiting=31.5,
    starved_fraction=0.6,
    sending_fraction=0.05,
    data_wait_fraction=0.62,
    reconnects=1,
    hedges=0,
    idle=0.1,
    diagnosis=Diagnosis(
        "workers",
        8,
        "The loop waits 62 % of the time: 8 workers instead of 4 would keep up.",
        0.85,
        [Measurement("data wait", "62 %"), Measurement("workers computing", "3.9 of 4")],
    ),
)

BUSY = Diagnosis("training", 4, "The loop hardly waits, and the workers are hardly idle.", 0.7)
TRAINER = Diagnosis("training", 1, "Batches wait for the training loop: 1 worker would suffice.", 1.0)
NETWORK = Diagnosis("network", None, "Batches arrive too slowly: use compression or a faster network.", 0.9)
FINISHED = Diagnosis("finished", None, "The epoch is finished.", 1.0)
UNKNOWN = Diagnosis("unknown", None, "It has not asked for long enough.")


def made_up(consumers: int = 1) -> Stats:
    """Return statistics of a server with this number of consumers: the first waits for workers, others train."""
    others = [
        dataclasses.replace(CONSUMER, consumer=f"trainer-{n}", data_wait_fraction=0.01, diagnosis=BUSY)
        for n in range(1, consumers)
    ]
    return Stats(
        server=SERVER,
        datasets=[DATASET],
        workers=[dataclasses.replace(WORKER, worker=n, pid=5000 + n) for n in range(4)],
        consumers=[CONSUMER, *others][:consumers],
        consumers_total=consumers,
    )


def made_up_history(now: int = HOUR, since: int = 0, until: int | None = None, consumer: str | None = None) -> History:
    """Return series that are constant but for a pause from second 3,400 to 3,410, and a spike in second 1,000."""
    until = now if until is None else min(until, now)
    step = max(1, -(-(until - since) // 600))
    starts = range(since, until, step)

    def constant(value: float) -> Series:
        listed = [None if 3400 <= second < 3410 else value for second in starts]
        if step == 1:
            return Series(listed)
        return Series(listed, listed, [8 * value if start <= 1000 < start + step else value for start in starts])

    values = dict.fromkeys(SERVER_SERIES if consumer is None else CONSUMER_SERIES, 0.5)
    values |= {"batches_per_second": 125.0 if consumer is None else 12.5, "bytes_per_second": 64.5 * MIB}
    changes = (
        [LabelChange(3500, "workers")] if since >= 3500 else [LabelChange(0, "training"), LabelChange(3500, "workers")]
    )
    marks = [Mark(0, "start", "Server process 4242 started"), Mark(3550, "restart", "worker 1 (pid 5001) exited")]
    return History(
        pid=SERVER.pid,
        started=1.7e9,
        now=now,
        since=since,
        step=step,
        series={name: constant(value) for name, value in values.items()},
        diagnoses=[LabelChange(max(since, change.second), change.bottleneck) for change in changes],
        marks=[mark for mark in marks if mark.second >= since],
        datasets=["train"],
        consumers=[LoopId("c0ffee", "trainer-0", "anyone", "train", "resnet.py")],
    )


class MadeUpServer:
    """Server that responds with `stats`, which may be replaced at any time."""

    def __init__(self) -> None:
        self.url = ""
        """URL of the server while it runs."""
        self.stats = made_up()
        self.refusing = False
        """True to reject streams with 503."""
        self.listed: list[dict[str, Any]] = []
        """Servers that announced themselves to this one; "own" is its own instance."""
        self.watchers = 0
        """Number of started streams."""
        self.pid = SERVER.pid
        """Process ID in its history."""
        self.queries: list[tuple[int, int | None]] = []
        """Seconds that were requested of its history."""
        self._started = time.monotonic()
        self._cuts = 0
        self.app = FastAPI()
        self.app.get("/stats")(self._page)
        self.app.get("/stats/stream")(self._stream)
        self.app.get("/stats/history")(self._history)
        self.app.get("/v1/datasets")(self._datasets)
        self.app.get("/v1/errors")(self._errors)
        self.app.get("/v1/slow-samples")(self._slow_samples)
        self.app.get("/v1/timeline")(self._timeline)
        self.app.get("/stats/servers")(self._servers)
        self.app.get("/session")(self._session)
        add_dashboard(self.app)

    def cut(self) -> None:
        """Close all open streams."""
        self._cuts += 1

    async def _page(self, limit: int = 100, offset: int = 0) -> Any:
        page = dataclasses.replace(self.stats, consumers=self.stats.consumers[offset : offset + limit])
        return TypeAdapter(Stats).dump_python(page, mode="json")

    async def _history(self, since: int = 0, until: int | None = None, consumer: str | None = None) -> Any:
        self.queries.append((since, until))
        now = HOUR + int(time.monotonic() - self._started)
        found = made_up_history(now, min(since, now), until, consumer)
        if self.pid != SERVER.pid:  # a process that has just started
            found = dataclasses.replace(made_up_history(5, min(since, 5), until, consumer), started=found.started + now)
        return TypeAdapter(History).dump_python(dataclasses.replace(found, pid=self.pid), mode="json")

    async def _stream(self) -> Response:
        if self.refusing:
            return Response(status_code=503)
        self.watchers += 1
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        cuts = self._cuts
        while cuts == self._cuts:
            page = dataclasses.replace(self.stats, consumers=self.stats.consumers[:100])
            yield b"event: stats\ndata: %b\n\n" % TypeAdapter(Stats).dump_json(page)
            await asyncio.sleep(0.1)

    async def _session(self) -> dict[str, Any]:
        return {"required": False, "name": None, "scopes": []}

    async def _servers(self) -> dict[str, Any]:
        return {"instance": "own", "servers": [{"lost_for": None, "summary": None, **server} for server in self.listed]}

    async def _errors(self) -> Errors:
        found = [(dataset.dataset, error) for dataset in self.stats.datasets for error in dataset.errors]
        return Errors(len(found), [record_of(number, *each) for number, each in enumerate(found, 1)])

    async def _timeline(self) -> Timeline:
        return Timeline(0.0, 0.0, "cpu-box", 4242, ["fetch", "collate", "encode"], [], [], [], 0, 0)

    async def _slow_samples(self) -> SlowSampleList:
        return SlowSampleList(0, [])

    async def _datasets(self) -> list[dict[str, str]]:
        return [{"name": dataset.dataset, "kind": dataset.kind} for dataset in self.stats.datasets]


def record_of(number: int, dataset: str, error: ErrorCount) -> ErrorRecord:
    """Return an error in a dataset, without links."""
    return ErrorRecord(
        number, 0.0, error.age, dataset, "key", 0, 1, 0, None, error.type, error.last, error.traceback, error.sample,
        error.indices, "raised", None, None, None,
    )  # fmt: skip


@contextmanager
def serving(server: MadeUpServer) -> Iterator[MadeUpServer]:
    """Run the server in a thread."""
    listening = bind("127.0.0.1", 0)
    runner = uvicorn.Server(
        uvicorn.Config(server.app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=runner.run, args=([listening],))
    thread.start()
    try:
        server.url = url_of(listening)
        yield server
    finally:
        runner.should_exit = True
        server.cut()
        thread.join()
