"""Endpoints about single events: errors, slow samples, workers with their stacks, and the timeline of batches."""

from __future__ import annotations

import os
import socket
import time
from typing import Annotated, Final, cast

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import TypeAdapter

from teleloader_server.dispatch.counters import Counters
from teleloader_server.dispatch.timeline import clock
from teleloader_server.loading.stages import STAGES
from teleloader_server.permissions import ADMIN, STATS, needs
from teleloader_server.problems import HttpProblem
from teleloader_server.stats.collector import StatsCollector
from teleloader_server.web.authentication import GuardedRoute, caller_of, refuse_remote_without_token
from teleloader_server.web.batches import service_of
from teleloader_shared.inspection import Errors, SlowSampleList, Timeline, WorkerDetail, WorkerStack
from teleloader_shared.messages import ERRORS_PATH, SLOW_SAMPLES_PATH, TIMELINE_PATH, WORKERS_PATH

MAX_SLOW: Final = 1000
"""Maximum number of slow samples in a response."""

WorkerId = Annotated[int, Path(ge=0, lt=2**31, description="worker ID")]
PoolKey = Annotated[
    str | None,
    Query(max_length=64, description="key of the loader that the worker is private to; none for the shared pool"),
]
_timelines: Final = TypeAdapter(Timeline)


def make_inspection_router() -> APIRouter:
    """Create the router of the endpoints about single events.

    The endpoints use `service` and `collector` of the application's state.
    """
    router = APIRouter(route_class=GuardedRoute)

    @router.get(ERRORS_PATH, summary="The last hundred errors, each with the request that computes its batch again")
    @needs(STATS)
    async def errors(request: Request) -> Errors:
        return _counters_of(request).errors.records(time.monotonic())

    @router.get(SLOW_SAMPLES_PATH, summary="Samples that took unusually long, slowest first")
    @needs(STATS)
    async def slow_samples(
        request: Request, limit: Annotated[int, Query(ge=1, le=MAX_SLOW, description="number of samples")] = 100
    ) -> SlowSampleList:
        return service_of(request).slow_samples(limit)

    @router.get(WORKERS_PATH + "/{worker}", summary="One worker: current batch, memory over time, last batches")
    @needs(STATS)
    async def worker(request: Request, worker: WorkerId, loader: PoolKey = None) -> WorkerDetail:
        found = _collector_of(request).worker(loader, worker)
        if found is None:
            raise _unknown(worker, loader)
        return found

    @router.get(WORKERS_PATH + "/{worker}/stack", summary="Stacks of a worker's threads, also while it hangs")
    @needs(ADMIN)
    async def stack(request: Request, worker: WorkerId, loader: PoolKey = None) -> WorkerStack:
        refuse_remote_without_token(request)
        found = await _collector_of(request).stack(loader, worker)
        if found is None:
            raise _unknown(worker, loader)
        caller_of(request).authorize(ADMIN)  # again: the token may have been revoked meanwhile
        return found

    @router.get(TIMELINE_PATH, summary="Times of the last batches, from the queue to the training loop")
    @needs(STATS)
    async def timeline(
        request: Request,
        computed: Annotated[int, Query(ge=0, description="number of the first computed batch to return")] = 0,
        sent: Annotated[int, Query(ge=0, description="number of the first response to return")] = 0,
        clients: Annotated[bool, Query(description="make clients report their part for ten seconds")] = False,
    ) -> Response:
        kept, now = _counters_of(request).timeline, clock()
        if clients:
            kept.request_clients(now)
        found = Timeline(
            now=now,
            unix_time=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            stages=[stage.name for stage in STAGES],
            computed=kept.batches(computed),
            sent=kept.responses(sent),
            clients=list(kept.clients()),
            computed_total=kept.computed,
            sent_total=kept.sent,
        )
        return Response(_timelines.dump_json(found), media_type="application/json")

    return router


def _unknown(worker: int, loader: str | None) -> HttpProblem:
    pool = "the shared pool" if loader is None else f"the private workers of loader {loader[:64]!r}"
    return HttpProblem(404, "UnknownWorker", f"unknown worker {worker} of {pool}: GET /stats lists the workers")


def _collector_of(request: Request) -> StatsCollector:
    return cast("StatsCollector", request.app.state.collector)


def _counters_of(request: Request) -> Counters:
    return service_of(request).counters
