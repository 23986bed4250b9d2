"""The endpoints that tell how the server does: records, their stream, Prometheus metrics and probes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated, Any, Final, cast

from fastapi import APIRouter, Query, Request, Response
from prometheus_client.exposition import choose_encoder
from pydantic import TypeAdapter
from starlette.types import Receive, Scope, Send

from teleloader_server.auth.authenticator import RequestCaller
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.permissions import STATS, UNCHECKED, needs
from teleloader_server.stats.collector import DEFAULT_CONSUMERS, StatsCollector
from teleloader_server.stats.prometheus import exposed
from teleloader_server.web.authentication import GuardedRoute, caller_of
from teleloader_server.web.batches import departure, service_of
from teleloader_server.web.problem_responses import Problem
from teleloader_shared.errors import AccessDenied, ServerUnavailable
from teleloader_shared.messages import HEALTH_PATH, STATS_PATH
from teleloader_shared.stats import Stats

MAX_CONSUMERS: Final = 1000
"""Consumers in one answer, which has 1 MB then."""
MAX_ACCEPT: Final = 1000
"""Characters of the header Accept that are looked at: it is taken apart type by type."""
MAX_WATCHERS: Final = 16
"""Streams of records at a time: each costs the server what as many requests would."""

Limit = Annotated[int, Query(ge=0, le=MAX_CONSUMERS, description="how many consumers to list")]
Offset = Annotated[int, Query(ge=0, description="after how many, those who asked last being the first")]

_records: Final = TypeAdapter(Stats)


class StatsStream(Response):
    """The records again and again, as server-sent events, until the client goes or the server is told to stop."""

    media_type = "text/event-stream"

    def __init__(
        self,
        service: LoaderService,
        collector: StatsCollector,
        watchers: dict[StatsStream, str],
        caller: RequestCaller,
        limit: int,
        offset: int,
        every: float,
    ) -> None:
        # a proxy that gathers answers would hold the events back
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._service = service
        self._collector = collector
        self._watchers = watchers
        self._caller = caller
        self._page = limit, offset
        self._every = every

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send head, then events."""
        self._watchers[self] = self._caller.authorize(STATS).name
        revoked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        drained = asyncio.create_task(self._service.drained())

        def revoke(_: AccessDenied) -> None:
            if not revoked.done():
                revoked.set_result(None)

        try:
            with self._service.grants.hold(self._caller, STATS, None, revoke):
                async with departure(receive) as gone:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    with suppress(AccessDenied):  # an answer that has begun can only be broken off
                        await self._send_events(send, {gone, drained, revoked})
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            drained.cancel()
            self._watchers.pop(self, None)

    async def _send_events(self, send: Send, ends: set[asyncio.Future[None]]) -> None:
        """Send events until one of `ends` is done."""
        while not any(end.done() for end in ends):
            records = _records.dump_json(await _stats_for(self._collector, self._caller, *self._page))
            event = b"event: stats\ndata: %b\n\n" % records
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.wait(ends, timeout=self._every, return_when=asyncio.FIRST_COMPLETED)


def make_status_router() -> APIRouter:
    """Return the endpoints for statistics and probes.

    They use the `service` and the `collector` of the application's state, and its `stats_streams`: the open streams of
    ``/stats``, with the names of their principals.
    """
    router = APIRouter(route_class=GuardedRoute)
    _add_stats(router)
    _add_probes(router)
    return router


def _add_stats(router: APIRouter) -> None:
    @router.get(STATS_PATH, summary="What the server does: a record for each worker, dataset and consumer")
    @needs(STATS)
    async def stats(request: Request, limit: Limit = DEFAULT_CONSUMERS, offset: Offset = 0) -> Stats:
        return await _stats_for(_collector_of(request), caller_of(request), limit, offset)

    @router.get(
        STATS_PATH + "/stream",
        summary="The same again and again, as server-sent events: `event: stats`, `data:` what /stats answers",
        response_class=Response,
        responses={200: {"content": {StatsStream.media_type: {}}}},
    )
    @needs(STATS)
    async def stream(
        request: Request,
        interval: Annotated[float, Query(ge=0.5, le=60, description="seconds between two events")] = 1.0,
        limit: Limit = DEFAULT_CONSUMERS,
        offset: Offset = 0,
    ) -> Response:
        caller = caller_of(request)
        name = caller.authorize(STATS).name
        watchers: dict[StatsStream, str] = request.app.state.stats_streams
        most = MAX_WATCHERS // 2 if request.app.state.authenticator.has_tokens else MAX_WATCHERS
        if len(watchers) >= MAX_WATCHERS or list(watchers.values()).count(name) >= most:
            raise ServerUnavailable(
                f"{len(watchers)} streams of /stats are open, and no more than {MAX_WATCHERS} are allowed, {most} of "
                "them to one principal: ask for /stats now and then"
            )
        return StatsStream(service_of(request), _collector_of(request), watchers, caller, limit, offset, interval)

    @router.get(
        "/metrics",
        summary="The same for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}},
    )
    @needs(STATS)
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", "")[:MAX_ACCEPT])
        collector = _collector_of(request)
        records = await _stats_for(collector, caller_of(request), MAX_CONSUMERS, 0)
        return Response(encode(exposed(records, collector.datasets)), media_type=content_type)


async def _stats_for(collector: StatsCollector, caller: RequestCaller, limit: int, offset: int) -> Stats:
    """Return the records, unless the caller has lost its scope while they were collected.

    Raises:
        AccessDenied: If the caller may not see them.
    """
    records = await collector.stats(limit, offset)
    caller.authorize(STATS)
    return records


def _collector_of(request: Request) -> StatsCollector:
    return cast("StatsCollector", request.app.state.collector)


def _add_probes(router: APIRouter) -> None:
    @router.get(HEALTH_PATH, summary="The process answers")
    @needs(UNCHECKED)
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/readyz", summary="Batches can be had", response_model=dict[str, str])
    @needs(UNCHECKED)
    async def readyz(request: Request) -> Any:
        service = service_of(request)
        if service.ready:
            return {"status": "ready"}
        return Problem(503, "NotReady", "the server is stopping" if service.draining else "no worker is ready yet")
