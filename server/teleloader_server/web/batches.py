"""HTTP endpoints for datasets, loaders and batches, as specified in docs/protocol.md."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final, Literal, TypedDict, cast

import numpy as np
from fastapi import APIRouter, Header, Path, Query, Request, Response
from numpy.typing import NDArray
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from teleloader_server.dispatch.engine import BatchStream
from teleloader_server.dispatch.quotas import BodyBudget
from teleloader_server.dispatch.records import RangeRequest
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.dispatch.timeline import clock
from teleloader_server.dispatch.tracing import RequestTrace
from teleloader_server.limits import ClientLimits
from teleloader_server.permissions import READ, needs
from teleloader_server.problems import HttpProblem
from teleloader_server.web.authentication import GuardedRoute, caller_of
from teleloader_server.web.direct_routes import DirectRoute, Parameter, boolean, headers_of, integer, query_of, string
from teleloader_server.web.guard import JOINED, Exchange, calling_on_disconnect
from teleloader_server.web.guard_rules import check_body_size
from teleloader_server.web.handoff import Channel, channel_of
from teleloader_server.web.index_bodies import split
from teleloader_server.web.moderation import linger_for
from teleloader_server.web.problem_responses import DOCUMENTED
from teleloader_server.web.small_bodies import read_object
from teleloader_server.web.timings import MAX_TIMINGS_BYTES, client_times
from teleloader_server.workers.lendable import is_lendable
from teleloader_server.workers.pool import Lease
from teleloader_shared.buffers import BufferPool
from teleloader_shared.errors import InvalidSpec, TeleloaderError
from teleloader_shared.handoff import GIVE_BACK, LOAN_MEDIA_TYPE
from teleloader_shared.messages import (
    BACKGROUND_PRIORITY,
    CONSUMER_HEADER,
    DATASETS_PATH,
    FRAME_MEDIA_TYPE,
    LOADERS_PATH,
    PRIORITY_HEADER,
    PROTOCOL_HEADER,
    READY_BYTES,
    REPORT_HEADER,
    TIMELINE_HEADER,
    ConsumerReport,
    DatasetInfo,
    Registration,
    select_protocol,
)
from teleloader_shared.ranges import BatchRanges
from teleloader_shared.spec import MAX_EPOCH, LoaderSpec
from teleloader_shared.tracing import TRACE_HEADER

WRITE_BYTES: Final = 128 * 1024
"""Size of frames that are written alone. Smaller frames are joined: a write costs more than copying their bytes."""
COPIED_BYTES: Final = 2**20
"""Maximum size of a write that is copied: by TLS, by asyncio's event loop, and by uvicorn to prefix a chunk's size."""

MAX_STRINGS: Final = 2048
"""Maximum number of strings in a spec: its fields, and the states of up to 1,024 shards."""
MAX_BESIDES_STRINGS: Final = 16 * 1024
"""Maximum size of a spec without its strings, in bytes."""
LARGE_SPEC_BYTES: Final = 64 * 1024
"""Size above which a spec is parsed in a thread: specs with the states of many shards."""
MAX_ESCAPES: Final = 16 * 1024
"""Maximum number of backslashes in a spec: escapes take many times as long to parse as other characters."""
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)

SMALL_BYTES: Final = 64 * 1024
"""Size of a response in bytes above which `send` may wait for the client to read: asyncio's high-water mark."""

_TIMELINE: Final = [(TIMELINE_HEADER.lower().encode(), b"1")]
_CONTENT_TYPE: Final = (b"content-type", FRAME_MEDIA_TYPE.encode())
MUTABLE: Final = [(b"cache-control", b"no-store")]
"""Headers of failed batches and of partial ranges: a repeated request may get a different response."""

_NUMBER: Final = {"type": "integer", "minimum": 0, "exclusiveMaximum": MAX_EPOCH}
KEY: Final = Parameter("path", "key", {"type": "string"}, str)
EPOCH: Final = Parameter("path", "epoch", _NUMBER, integer(MAX_EPOCH))
NUMBER: Final = Parameter("path", "k", _NUMBER, integer(MAX_EPOCH))
RANGES: Final = Parameter(
    "query", "ranges", {"type": "string", "examples": ["0:8,24:32"]}, str,
    description="START:STOP,START:STOP,... in ascending order",
)  # fmt: skip
AHEAD: Final = Parameter(
    "query", "ahead", _NUMBER, integer(MAX_EPOCH), 0, "number of batches after the requested ones to prefetch"
)
READY: Final = Parameter(
    "query", "ready", {"type": "boolean"}, boolean, default=False,
    description="return only the first batches that are ready, at least one, with Content-Length",
)  # fmt: skip
MAX_CONSUMER: Final = 200
"""Maximum length of a consumer's name in characters."""
CONSUMER: Final = Parameter(
    "header", CONSUMER_HEADER, {"type": "string", "maxLength": MAX_CONSUMER}, string(MAX_CONSUMER), "",
    "name of the client, for /stats and fair sharing",
)  # fmt: skip
REPORT: Final = Parameter(
    "header", REPORT_HEADER, {"type": "string"}, str, "",
    "measurements of the client, for /stats: see docs/protocol.md",
)  # fmt: skip
PRIORITY: Final = Parameter(
    "header", PRIORITY_HEADER, {"type": "string", "examples": [BACKGROUND_PRIORITY]}, str, "",
    "`u=7` (RFC 9218) for batches of an epoch that the training loop has not started",
)  # fmt: skip


class FrameResponse:
    """HTTP response with a sequence of frames as body, written from shared memory without a copy."""

    def __init__(
        self, service: LoaderService, stream: BatchStream, frames: list[Lease], headers: Sequence[tuple[bytes, bytes]]
    ) -> None:
        self._service = service
        self._stream = stream
        self._frames = frames
        self._size = sum(map(len, frames))
        self._headers = [(b"content-length", b"%d" % self._size), _CONTENT_TYPE, *headers]
        self._timeline: Sequence[tuple[bytes, bytes]] = ()
        consumer = stream.consumer
        if service.counters.timeline.wants_client(consumer.principal_share.quota.name, consumer.name):
            self._timeline = _TIMELINE
            self._headers += _TIMELINE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers and all frames."""
        with self._service.sending(self._size, self._stream):
            await send({"type": "http.response.start", "status": 200, "headers": self._headers, JOINED: True})
            if self._size < SMALL_BYTES:
                piece = next(joined(self._frames))
                await send({"type": "http.response.body", "body": piece, "more_body": False})
                return
            # uvloop copies nothing, and is faster if frames are not split
            copies = scope["scheme"] == "https" or isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop)
            for piece in joined(self._frames, COPIED_BYTES if copies else None):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            # waits until the client has read most of the response, which counts as unread until then
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class LoanResponse(FrameResponse):
    """HTTP response that lends the slot of its only frame to the client, or sends the frame if that is impossible."""

    def __init__(self, channel: Channel, service: LoaderService, stream: BatchStream, frame: Lease) -> None:
        super().__init__(service, stream, [frame], MUTABLE)
        self._channel = channel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the descriptor on the channel, then the response with the number of the loan."""
        number = self._channel.lend(self._frames[0], self._stream)
        if number is None:
            await super().__call__(scope, receive, send)
            return
        body = GIVE_BACK.pack(number)
        content = [(b"content-length", b"%d" % len(body)), (b"content-type", LOAN_MEDIA_TYPE.encode())]
        headers = [*content, *MUTABLE, *self._timeline]
        with self._service.sending(len(body), self._stream):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": False})


class StreamResponse:
    """HTTP response that streams the requested batches as they become ready, at the client's read rate."""

    def __init__(self, service: LoaderService, start: Callable[[], BatchStream]) -> None:
        self._service = service
        self._start = start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers, then each frame as soon as it is ready."""
        with self._start() as stream, until_disconnect(scope, stream) as exchange:
            await send({"type": "http.response.start", "status": 200, "headers": [_CONTENT_TYPE]})
            with suppress(ClientDisconnect, TeleloaderError):  # a response that has begun can only be aborted
                while not (stream.exhausted or exchange.is_disconnected):
                    await self._send_frames(await ready_frames(stream), stream, send)
                    await asyncio.sleep(0)  # other requests run, also if all batches are ready
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_frames(self, frames: list[Lease], stream: BatchStream, send: Send) -> None:
        with self._service.sending(sum(len(frame) for frame in frames), stream):
            for piece in joined(frames, COPIED_BYTES):
                await send({"type": "http.response.body", "body": piece, "more_body": True})


def until_disconnect(scope: Scope, stream: BatchStream) -> AbstractContextManager[Exchange]:
    """Return a context manager that makes a wait for a batch raise `ClientDisconnect` when the client disconnects."""
    return calling_on_disconnect(scope, lambda: stream.end(ClientDisconnect()))


async def ready_response(scope: Scope, service: LoaderService, stream: BatchStream) -> FrameResponse:
    """Wait for the first batch of a request; return a response with this batch and the ready batches after it."""
    channel = channel_of(scope)
    # a client may keep the batches of an epoch that has not started for long, and the server's memory must not wait
    if channel is not None and (not channel.confirm(stream) or stream.consumer.is_background):
        channel = None
    with stream, until_disconnect(scope, stream) as exchange:
        if exchange.transport is not None:
            stream.tally.loop.add_connection(exchange.transport)
        frames = await ready_frames(stream, lends=channel is not None)
        if channel is not None and is_lendable(frames[0]):
            return LoanResponse(channel, service, stream, frames[0])
        return FrameResponse(service, stream, frames, MUTABLE)


async def ready_frames(stream: BatchStream, *, lends: bool = False) -> list[Lease]:
    """Wait for the next frame of a stream; return it and the frames after it that are ready soon (see `linger_for`).

    With `lends`, return a first frame that can be lent alone.
    """
    first = (await stream.take()).raw
    if len(first) >= READY_BYTES or stream.exhausted or (lends and is_lendable(first)):
        return [first]
    await stream.linger(*linger_for(stream.open_requests, stream.batch_rate))
    return [first, *(frame.raw for frame in stream.take_ready(READY_BYTES - len(first)))]


def joined(frames: list[Lease], piece_bytes: int | None = None) -> Iterator[memoryview | bytes]:
    """Yield the bytes of frames in few pieces, one piece per write.

    Small frames are joined; large frames are not copied, but split into pieces of at most `piece_bytes` if it is given.
    """
    small: list[NDArray[np.uint8]] = []
    gathered = 0
    for frame in frames:
        if len(frame) >= WRITE_BYTES:
            if small:
                yield _concatenated(small)
            small, gathered = [], 0
            step = piece_bytes or len(frame)
            for start in range(0, len(frame), step):
                yield frame[start : start + step].data
            continue
        small.append(frame)
        gathered += len(frame)
        if gathered >= WRITE_BYTES:
            yield _concatenated(small)
            small, gathered = [], 0
    if small:
        yield _concatenated(small)


_writes: Final = BufferPool(free_bytes=16 * 2**20)


def _concatenated(frames: list[Lease]) -> memoryview:
    if len(frames) == 1:
        return frames[0].data
    return np.concatenate(frames, out=_writes.take(sum(map(len, frames)))).data


def service_of(connection: HTTPConnection) -> LoaderService:
    """Return the application's `LoaderService`.

    Endpoints get their state from the application and not from a closure: FastAPI keeps endpoint functions in
    module-level caches, which outlive the server, so a closure would keep the hosted dataset in memory.
    """
    return cast("LoaderService", connection.app.state.service)


PROTOCOLS: Final = Header(alias=PROTOCOL_HEADER, description="protocol versions of the client, separated by commas")


def make_router() -> APIRouter:
    """Create the router of the endpoints for datasets and loaders.

    The endpoints use `service` and `body_budget` of the application's state.
    """
    router = APIRouter(route_class=GuardedRoute)

    @router.get(DATASETS_PATH, summary="All hosted datasets")
    @needs(READ)
    async def datasets(request: Request) -> list[DatasetInfo]:
        return service_of(request).datasets_for(caller_of(request))

    @router.get(DATASETS_PATH + "/{name}", summary="One dataset: by default its newest version")
    @needs(READ)
    async def dataset(
        request: Request,
        name: str,
        version: Annotated[str | None, Query(description="version as in the configuration")] = None,
        fingerprint: Annotated[str | None, Query(description="fingerprint of a version")] = None,
    ) -> DatasetInfo:
        return service_of(request).dataset(caller_of(request), name, version, fingerprint)

    @router.post(
        LOADERS_PATH,
        summary="Register a loader (idempotent: equal specs have equal keys)",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": TypeAdapter(LoaderSpec).json_schema()}},
            }
        },
    )
    @needs(READ)
    async def register(
        request: Request,
        epoch: Annotated[int | None, Query(ge=0, lt=MAX_EPOCH, description="epoch to load, for `batch_rate`")] = None,
        protocol: Annotated[str | None, PROTOCOLS] = None,
    ) -> Registration:
        selected = select_protocol(protocol)
        async with body_reader_of(request).read(request, "max_spec_bytes") as body:
            content = b"".join([piece async for piece in body])
            large = len(content) > LARGE_SPEC_BYTES
            spec = await asyncio.to_thread(parsed_spec, content) if large else parsed_spec(content)
        return replace(await service_of(request).register(spec, caller_of(request), epoch), protocol=selected)

    @router.get(
        LOADERS_PATH + "/{key}",
        summary="Get the registration of a loader, and keep the loader's session alive",
    )
    @needs(READ)
    async def registration(
        request: Request, key: str, protocol: Annotated[str | None, PROTOCOLS] = None
    ) -> Registration:
        selected = select_protocol(protocol)
        return replace(service_of(request).registration(key, caller_of(request)), protocol=selected)

    @router.delete(
        LOADERS_PATH + "/{key}",
        status_code=204,
        summary="End the session of a loader and the workers of the session",
    )
    @needs(READ)
    async def end(request: Request, key: str) -> None:
        await service_of(request).end_session_of(key, caller_of(request))

    @router.put(
        LOADERS_PATH + "/{key}/epochs/{epoch}/progress",
        status_code=204,
        summary="Report the progress of a consumer that sends no requests for batches",
    )
    @needs(READ)
    async def progress(
        request: Request,
        key: str,
        epoch: Annotated[int, Path(ge=0, lt=MAX_EPOCH)],
        consumer: Annotated[str, Header(alias=CONSUMER_HEADER, max_length=MAX_CONSUMER)],
        report: Annotated[str, Header(alias=REPORT_HEADER, description=REPORT.description)],
    ) -> None:
        found = ConsumerReport.from_header(report)
        service_of(request).progressed(caller_of(request), key, epoch, consumer, found)

    @router.put(
        LOADERS_PATH + "/{key}/epochs/{epoch}/timings",
        summary="Report the client's part of the timeline of batches",
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {}}}},
    )
    @needs(READ)
    async def timings(
        request: Request,
        key: str,
        epoch: Annotated[int, Path(ge=0, lt=MAX_EPOCH)],
        consumer: Annotated[str, Header(alias=CONSUMER_HEADER, max_length=MAX_CONSUMER)],
    ) -> dict[str, float]:
        received_at = clock()
        service, caller = service_of(request), caller_of(request)
        service.loader(caller, key, epoch)
        times = await read_object(request, MAX_TIMINGS_BYTES)
        token = caller.authorize(READ).name
        most = service.client_limits.max_batches_per_request
        service.timed(caller, key, client_times(times, consumer, token, key, epoch, most))
        return {"received_at": received_at, "sent_at": clock()}

    return router


@needs(READ)
async def batch(request: Request) -> ASGIApp:
    """Return the response with one batch, or with status 304 if the client has the batch."""
    service, caller, headers = service_of(request), caller_of(request), headers_of(request.scope)
    key, epoch, k = request.path_params["key"], EPOCH.of(request.path_params), NUMBER.of(request.path_params)
    ahead, client = AHEAD.of(query_of(request.scope)), client_of(request, headers)
    service.loader(caller, key, epoch, k)
    etag = f'"{key}-{epoch}-{k}"'
    # batches are immutable, so a client that has this one need not receive it again
    shared = "private" if request.app.state.authenticator.has_tokens else "public"
    immutable = {"etag": etag, "cache-control": f"{shared}, max-age=31536000, immutable"}
    if etag in headers.get("if-none-match", ""):
        return Response(status_code=304, headers=immutable)
    wanted = BatchRanges(range(k, k + 1))
    asked = RangeRequest(**client, key=key, epoch=epoch, batches=wanted, prefetch=ahead)
    with service.batches(caller, asked) as stream, until_disconnect(request.scope, stream):
        frame = await stream.take()
        encoded = [(name.encode(), value.encode()) for name, value in immutable.items()]
        return FrameResponse(service, stream, [frame.raw], MUTABLE if frame.failed else encoded)


@needs(READ)
async def batches(request: Request) -> ASGIApp:
    """Return the response with ranges of batches: all of them, or those that are ready."""
    service, caller, query = service_of(request), caller_of(request), query_of(request.scope)
    key, epoch = request.path_params["key"], EPOCH.of(request.path_params)
    ranges, ahead, is_ready = RANGES.of(query), AHEAD.of(query), READY.of(query)
    client = client_of(request, headers_of(request.scope))
    if not is_ready and request.scope["http_version"] == "1.0":
        raise HttpProblem(
            426, "UpgradeRequired", "HTTP/1.0 requires responses with Content-Length: use ready=true, or HTTP/1.1"
        )
    asked = RangeRequest(**client, key=key, epoch=epoch, batches=BatchRanges.parse(ranges), prefetch=ahead)
    if is_ready:
        return await ready_response(request.scope, service, service.batches(caller, asked))
    return StreamResponse(service, partial(service.batches, caller, asked))


@needs(READ)
async def listed_batches(request: Request) -> ASGIApp:
    """Return the response with the batches whose indices the request body lists, and which are ready."""
    service, caller = service_of(request), caller_of(request)
    key, epoch = request.path_params["key"], EPOCH.of(request.path_params)
    client = client_of(request, headers_of(request.scope))
    rules = service.index_rules(caller, key, epoch)
    async with body_reader_of(request).read(request, "max_body_bytes") as body:
        first, indices = await split(body, rules)
        if first[:2] != (key, epoch):
            raise InvalidSpec(
                f"invalid body: the first index list is for {first}, expected epoch {epoch} of loader {key[:64]!r}"
            )
        asked = RangeRequest(**client, key=key, epoch=epoch, batches=BatchRanges.of(indices), indices=indices)
        return await ready_response(request.scope, service, service.batches(caller, asked))


def batch_routes() -> list[DirectRoute]:
    """Return the routes of the endpoints for batches.

    The endpoints use `service`, `body_budget` and `authenticator` of the application's state.
    """
    path = LOADERS_PATH + "/{key}/epochs/{epoch}/batches"
    frames: dict[int | str, dict[str, Any]] = {200: {"content": {FRAME_MEDIA_TYPE: {}}}}
    unchanged = {304: {"description": "the client has a valid copy"}}
    options: dict[str, Any] = {"response_class": Response}
    return [
        DirectRoute(
            path, batches, methods=["GET"], summary="Get ranges of batches as concatenated frames",
            parameters=(KEY, EPOCH, RANGES, AHEAD, READY, CONSUMER, REPORT, PRIORITY),
            responses={**DOCUMENTED, **frames}, **options,
        ),
        DirectRoute(
            path, listed_batches, methods=["POST"], parameters=(KEY, EPOCH, CONSUMER, REPORT, PRIORITY),
            summary="Compute the batches whose indices the body lists, and get those that are ready as frames",
            openapi_extra={"requestBody": {"required": True, "content": {FRAME_MEDIA_TYPE: {}}}},
            responses={**DOCUMENTED, **frames}, **options,
        ),
        DirectRoute(
            path + "/{k}", batch, methods=["GET"], summary="Get one batch as a frame",
            parameters=(KEY, EPOCH, NUMBER, AHEAD, CONSUMER, REPORT, PRIORITY),
            responses={**DOCUMENTED, **frames, **unchanged}, **options,
        ),
    ]  # fmt: skip


class BodyReader:
    """Reader of request bodies that limits the size of each body and the total memory of all bodies."""

    def __init__(self, limits: ClientLimits, body_budget: BodyBudget) -> None:
        self._limits = limits
        self._body_budget = body_budget

    @asynccontextmanager
    async def read(
        self, request: Request, name: Literal["max_body_bytes", "max_spec_bytes"]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Context manager that yields the request body in pieces; they count toward the memory budget until its exit.

        Args:
            request: The request.
            name: Field of `ClientLimits` that limits the body's size.

        Raises:
            HttpProblem: If the body exceeds its size limit.
            ServerUnavailable: If the bodies of all principals, or of this principal, exceed the budget.
        """
        check_body_size(int(request.headers.get("content-length", 0)), self._limits, name)
        owner = caller_of(request).authorize(READ).name

        async def pieces() -> AsyncIterator[bytes]:
            held = 0
            async for piece in request.stream():
                held += len(piece)
                check_body_size(held, self._limits, name)
                count(len(piece))
                yield piece

        with self._body_budget.hold(owner) as count:
            yield pieces()


def body_reader_of(request: Request) -> BodyReader:
    """Return a `BodyReader` with the application's limits and memory budget."""
    state = request.app.state
    return BodyReader(state.service.client_limits, state.body_budget)


def parsed_spec(body: bytes) -> LoaderSpec:
    """Parse a request body that contains a loader spec in JSON.

    Raises:
        InvalidSpec: If the body is not a valid loader spec.
    """
    return LoaderSpec.from_json(_parsed_json(body))


def _parsed_json(body: bytes) -> object:
    """Parse JSON of limited complexity.

    A spec consists of a few fields and one string per shard. Parsing JSON with many more values would block the event
    loop, so its strings are counted first, and the size of the rest is checked.

    Raises:
        InvalidSpec: If the text is not JSON, or has more values than a spec.
    """
    rest, strings = _STRING.subn(b"", body, MAX_STRINGS)
    if strings == MAX_STRINGS or len(rest) > MAX_BESIDES_STRINGS:
        raise InvalidSpec(
            f"the body is too large for a loader spec: expected at most {MAX_STRINGS - 1:,} strings and "
            f"{MAX_BESIDES_STRINGS:,} bytes of other values, got at least {strings:,} strings and {len(rest):,} bytes"
        )
    if (escapes := body.count(b"\\")) > MAX_ESCAPES:
        raise InvalidSpec(f"the body has {escapes:,} backslashes, and the limit is {MAX_ESCAPES:,}: do not escape text")
    try:
        parsed: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidSpec(f"invalid request body: expected JSON ({error})") from None
    return parsed


class _Client(TypedDict):
    """Fields of a `RangeRequest` that describe its client."""

    consumer: str
    report: ConsumerReport | None
    trace: RequestTrace | None
    is_background: bool


def client_of(request: Request, headers: Mapping[str, str]) -> _Client:
    """Return the `RangeRequest` fields that describe the client of an HTTP request.

    Args:
        request: The HTTP request.
        headers: Its headers, by name in lower case.
    """
    return {
        "consumer": CONSUMER.of(headers) or address_of(request),
        "report": ConsumerReport.from_header(REPORT.of(headers)),
        "trace": RequestTrace.begin(headers.get(TRACE_HEADER, "")),
        "is_background": any(item.strip() == BACKGROUND_PRIORITY for item in PRIORITY.of(headers).split(",")),
    }


def address_of(connection: HTTPConnection) -> str:
    """Return the default consumer name of a client: its IP address and port."""
    client = connection.client
    return f"{client.host}:{client.port}" if client else "unknown"
