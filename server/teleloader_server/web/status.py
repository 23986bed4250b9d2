"""Monitoring endpoints: statistics, server-sent events, Prometheus metrics and health checks."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import Annotated, Any, Final, cast

from fastapi import APIRouter, Query, Request, Response
from prometheus_client.exposition import choose_encoder
from pydantic import TypeAdapter
from starlette.types import Receive, Scope, Send

from teleloader_server.fleet.registry import instance_of
from teleloader_server.permissions import STATS, UNCHECKED, needs
from teleloader_server.problems import HttpProblem
from teleloader_server.stats.collector import DEFAULT_CONSUMERS, StatsCollector
from teleloader_server.stats.prometheus import Sources, exposed
from teleloader_server.stats.recorder import UnknownSeries
from teleloader_server.web.authentication import GuardedRoute, caller_of
from teleloader_server.web.batches import service_of
from teleloader_server.web.guard import calling_on_disconnect
from teleloader_server.web.problem_responses import Problem
from teleloader_shared.errors import AccessDenied, ServerUnavailable
from teleloader_shared.history import HISTORY_S, History
from teleloader_shared.messages import HEALTH_PATH, HISTORY_PATH, STATS_PATH
from teleloader_shared.stats import Stats

MAX_CONSUMERS: Final = 1000
"""Maximum number of consumers in one response; they take about 1 MB."""
MAX_ACCEPT: Final = 1000
"""Number of characters of the Accept header that are parsed."""
MAX_SECOND: Final = 2**53
MAX_WATCHERS: Final = 16
"""Maximum number of open event streams."""

Limit = Annotated[int, Query(ge=0, le=MAX_CONSUMERS, description="maximum number of consumers in the response")]
Offset = Annotated[int, Query(ge=0, description="number of most recently active consumers to skip")]

_records: Final = TypeAdapter(Stats)
_history: Final = TypeAdapter(History)


class StatsStream(Response):
    """HTTP response that streams statistics as server-sent events until the client disconnects or the server stops."""

    media_type = "text/event-stream"

    def __init__(self, request: Request, limit: int, offset: int, every: float) -> None:
        # a proxy that buffers responses would delay the events
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._request = request
        self._page = limit, offset
        self._every = every

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers, then an event per interval."""
        service, caller, watchers = service_of(self._request), caller_of(self._request), _watchers_of(self._request)
        watchers[self] = caller.authorize(STATS).name
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        drained = asyncio.create_task(service.draining.wait())

        def end(_: AccessDenied | ServerUnavailable | None = None) -> None:
            if not ended.done():
                ended.set_result(None)

        try:
            with service.grants.hold(caller, STATS, (None,), end), calling_on_disconnect(scope, end):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                with suppress(AccessDenied, ServerUnavailable):  # a started response can only be truncated
                    await self._send_events(send, {drained, ended})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            drained.cancel()
            watchers.pop(self, None)

    async def _send_events(self, send: Send, ends: set[asyncio.Future[Any]]) -> None:
        """Send the statistics periodically until one of `ends` is done."""
        while not any(end.done() for end in ends):
            records = _records.dump_json(await _stats_for(self._request, *self._page))
            event = b"event: stats\ndata: %b\n\n" % records
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.wait(ends, timeout=self._every, return_when=asyncio.FIRST_COMPLETED)


def make_status_router() -> APIRouter:
    """Create the router with the endpoints for statistics and health checks.

    The endpoints use `service`, `collector` and `instance_key` of the application's state, and `stats_streams`: the
    open event streams with the names of their principals.
    """
    router = APIRouter(route_class=GuardedRoute)
    _add_stats(router)
    _add_probes(router)
    return router


def _add_stats(router: APIRouter) -> None:
    @router.get(STATS_PATH, summary="Statistics: a record for each worker, dataset and consumer", response_model=Stats)
    @needs(STATS)
    async def stats(request: Request, limit: Limit = DEFAULT_CONSUMERS, offset: Offset = 0) -> Response:
        # encoded here: FastAPI would validate all records first
        records = await _stats_for(request, limit, offset)
        return Response(_records.dump_json(records), media_type="application/json")

    @router.get(
        HISTORY_PATH,
        summary="Series of the last hour with one value per second, with events and diagnoses",
        response_model=History,
    )
    @needs(STATS)
    async def history(
        request: Request,
        since: Annotated[int | None, Query(ge=0, le=MAX_SECOND, description="first second; default: all kept")] = None,
        until: Annotated[int | None, Query(ge=0, le=MAX_SECOND, description="second after the last one")] = None,
        step: Annotated[int, Query(ge=1, le=HISTORY_S, description="minimum seconds per point")] = 1,
        dataset: Annotated[str | None, Query(max_length=1000, description="series of this dataset")] = None,
        consumer: Annotated[
            str | None, Query(max_length=64, description="series of the training loop with this id")
        ] = None,
    ) -> Response:
        try:
            found = _collector_of(request).history(
                since=since, until=until, step=step, dataset=dataset, consumer=consumer
            )  # fmt: skip
        except UnknownSeries as error:
            raise HttpProblem(404, "NotFound", str(error)) from None
        return Response(_history.dump_json(found), media_type="application/json")

    @router.get(
        STATS_PATH + "/stream",
        summary="Statistics as server-sent events: `event: stats`, `data:` as /stats",
        response_class=Response,
        responses={200: {"content": {StatsStream.media_type: {}}}},
    )
    @needs(STATS)
    async def stream(
        request: Request,
        interval: Annotated[float, Query(ge=0.5, le=60, description="seconds between events")] = 1.0,
        limit: Limit = DEFAULT_CONSUMERS,
        offset: Offset = 0,
    ) -> Response:
        name, watchers = caller_of(request).authorize(STATS).name, _watchers_of(request)
        most = MAX_WATCHERS // 2 if request.app.state.authenticator.has_tokens else MAX_WATCHERS
        if len(watchers) >= MAX_WATCHERS or list(watchers.values()).count(name) >= most:
            raise ServerUnavailable(
                f"too many event streams of /stats: {len(watchers)} are open, and the limit is {MAX_WATCHERS} in total "
                f"and {most} per token. Close other event streams, or poll /stats"
            )
        return StatsStream(request, limit, offset, interval)

    @router.get(
        "/metrics",
        summary="Statistics as Prometheus metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}},
    )
    @needs(STATS)
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", "")[:MAX_ACCEPT])
        records = await _stats_for(request, MAX_CONSUMERS, 0)
        return Response(encode(exposed(records, _sources_of(request))), media_type=content_type)


async def _stats_for(request: Request, limit: int, offset: int) -> Stats:
    """Collect the statistics for a request, and authorize its caller again afterwards.

    Raises:
        AccessDenied: If the caller's token was revoked, has expired or has lost the scope meanwhile.
    """
    records = await _collector_of(request).stats(limit, offset)
    caller_of(request).authorize(STATS)
    return records


def _sources_of(request: Request) -> Sources:
    """Return what the metrics contain besides statistics."""
    state, collector = request.app.state, _collector_of(request)
    expires = {entry.principal.name: entry.expires for entry in state.authenticator.tokens.entries}
    return Sources(
        datasets=service_of(request).counters.datasets,
        http=state.http,
        lag=collector.lag,
        cpu_seconds=collector.cpu_seconds(),
        token_expiry={name: at for name, at in expires.items() if math.isfinite(at)},
        certificate_expiry=None if state.certificate is None else state.certificate.expires,
    )


def _collector_of(request: Request) -> StatsCollector:
    return cast("StatsCollector", request.app.state.collector)


def _watchers_of(request: Request) -> dict[StatsStream, str]:
    return cast("dict[StatsStream, str]", request.app.state.stats_streams)


def _add_probes(router: APIRouter) -> None:
    @router.get(HEALTH_PATH, summary="Liveness: the process responds")
    @needs(UNCHECKED)
    async def healthz(request: Request) -> dict[str, str]:
        return {"status": "ok", "instance": instance_of(request.app.state.instance_key)}

    @router.get("/readyz", summary="Readiness: the server accepts requests for batches", response_model=dict[str, str])
    @needs(UNCHECKED)
    async def readyz(request: Request) -> Any:
        service = service_of(request)
        if service.ready:
            return {"status": "ready"}
        return Problem(
            503, "NotReady", "the server is stopping" if service.draining.is_set() else "no worker is ready yet"
        )
