"""The HTTP endpoints; docs/protocol.md describes them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Annotated, Any, Final, Literal, TypedDict, TypeVar, cast

import numpy as np
from fastapi import APIRouter, Header, Path, Query, Request, Response
from numpy.typing import NDArray
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import Receive, Scope, Send

from teleloader_server.config import ClientLimits
from teleloader_server.dispatch.engine import BatchStream
from teleloader_server.dispatch.quotas import BodyBudget
from teleloader_server.dispatch.records import RangeRequest
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.dispatch.tracing import RequestTrace
from teleloader_server.permissions import READ, needs
from teleloader_server.problems import HttpProblem
from teleloader_server.web.authentication import GuardedRoute, caller_of
from teleloader_server.web.index_bodies import split
from teleloader_server.workers.pool import Lease
from teleloader_shared.buffers import BufferPool
from teleloader_shared.errors import InvalidSpec, TeleloaderError, VersionMismatch
from teleloader_shared.messages import (
    CONSUMER_HEADER,
    DATASETS_PATH,
    FRAME_MEDIA_TYPE,
    LOADERS_PATH,
    PROTOCOL_HEADER,
    PROTOCOL_VERSION,
    READY_BYTES,
    REPORT_HEADER,
    ConsumerReport,
    DatasetInfo,
    Registration,
)
from teleloader_shared.spec import MAX_EPOCH, LoaderSpec
from teleloader_shared.tracing import TRACE_HEADER

_Result = TypeVar("_Result")

LINGER: Final = 0.005
"""Seconds in which an answer of several small batches waits to be complete: an answer costs more than the batches."""
WRITE_BYTES: Final = 512 * 1024
"""Small frames are joined into writes of about this size: one write costs more than copying it."""

MAX_STRINGS: Final = 2048
"""A spec has fewer strings: its fields, and the states of up to 1,024 shards."""
MAX_BESIDES_STRINGS: Final = 16 * 1024
"""Bytes of a spec outside of its strings."""
LARGE_SPEC_BYTES: Final = 64 * 1024
"""Specs with the states of many shards, which are larger, are parsed in a thread."""
MAX_ESCAPES: Final = 16 * 1024
"""Backslashes in a spec: escapes take many times as long to parse as other characters."""
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)

MUTABLE: Final = {"cache-control": "no-store"}
"""A failure, or a part of a range: the next answer may be another one."""

Number = Annotated[int, Path(ge=0, lt=MAX_EPOCH)]
Ahead = Annotated[int, Query(ge=0, description="how many batches will be wanted after these")]
Consumer = Annotated[
    str, Header(alias=CONSUMER_HEADER, max_length=200, description="who asks, for /stats and fair sharing")
]
Report = Annotated[str, Header(alias=REPORT_HEADER, description="how it fares, for /stats: see docs/protocol.md")]


class FrameResponse(Response):
    """Frames as the body, written from where they are: shared memory goes to the socket without a copy."""

    def __init__(
        self, service: LoaderService, stream: BatchStream, frames: list[Lease], headers: dict[str, str]
    ) -> None:
        self._service = service
        self._stream = stream
        self._frames = frames
        self._size = sum(len(frame) for frame in frames)
        super().__init__(headers={**headers, "content-length": str(self._size)}, media_type=FRAME_MEDIA_TYPE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send head and frames."""
        with self._service.sending(self._size, self._stream):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # what is encrypted is a copy, and there is one of each piece
            for piece in joined(self._frames, split=scope["scheme"] == "https"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class StreamResponse(Response):
    """All batches of a request, each sent when it is ready. The connection's flow control holds it back."""

    def __init__(self, service: LoaderService, batches: AbstractAsyncContextManager[BatchStream]) -> None:
        super().__init__(media_type=FRAME_MEDIA_TYPE)
        del self.headers["content-length"]
        self._service = service
        self._batches = batches

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send head, then frames as they come."""
        async with self._batches as stream, departure(receive) as gone:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(ClientDisconnect, TeleloaderError):  # an answer that has begun can only be broken off
                while not stream.exhausted:
                    frames = await unless(gone, ready_frames(stream))
                    await self._send_frames(frames, stream, send)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_frames(self, frames: list[Lease], stream: BatchStream, send: Send) -> None:
        with self._service.sending(sum(len(frame) for frame in frames), stream):
            for piece in joined(frames, split=True):
                await send({"type": "http.response.body", "body": piece, "more_body": True})


@asynccontextmanager
async def departure(receive: Receive) -> AsyncIterator[asyncio.Task[None]]:
    """A task that ends when the client closes the connection; uvicorn lets one send into the void without a word."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.create_task(wait())
    try:
        yield gone
    finally:
        gone.cancel()


async def unless(gone: asyncio.Task[None], work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`, which is given up when the client has gone.

    Raises:
        ClientDisconnect: When it has.
    """
    working = asyncio.create_task(work)
    try:
        await asyncio.wait({gone, working}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        # nobody else will look at how it ended
        working.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


async def ready_answer(
    request: Request, service: LoaderService, batches: AbstractAsyncContextManager[BatchStream]
) -> FrameResponse:
    """The first of `batches` that are ready, at least one."""
    async with batches as stream, departure(request.receive) as gone:
        return FrameResponse(service, stream, await unless(gone, ready_frames(stream)), MUTABLE)


async def ready_frames(stream: BatchStream) -> list[Lease]:
    """The next frame, waiting for it, and those after it that are ready soon after."""
    frames = [(await stream.take()).raw]
    size = len(frames[0])
    if size < READY_BYTES and not stream.exhausted:
        await stream.linger(LINGER)
    while size < READY_BYTES and (frame := stream.take_ready()) is not None:
        frames.append(frame.raw)
        size += len(frame.raw)
    return frames


def joined(frames: list[Lease], *, split: bool = False) -> Iterator[memoryview | bytes]:
    """The frames' bytes in few writes.

    Large frames are passed on as they are; small ones are joined. With `split`, large ones come in pieces of 1 MiB:
    uvicorn copies each piece of a chunked body to put its size before it.
    """
    small: list[NDArray[np.uint8]] = []
    gathered = 0
    for frame in frames:
        if len(frame) >= WRITE_BYTES:
            if small:
                yield _concatenated(small)
            small, gathered = [], 0
            step = 2**20 if split else len(frame)
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
    """Return the service of the application that handles a request.

    Endpoints find their state here and not in a closure: FastAPI keeps endpoint functions in caches of its modules,
    which outlive the server, and a closure would keep the hosted dataset in memory with them.
    """
    return cast("LoaderService", connection.app.state.service)


def make_router() -> APIRouter:
    """Return the endpoints for loaders and batches; they use `service` and `body_budget` of the application's state."""
    router = APIRouter(route_class=GuardedRoute)
    _add_loaders(router)
    _add_batches(router)
    _add_listed_batches(router)
    return router


def _add_loaders(router: APIRouter) -> None:

    @router.get(DATASETS_PATH, summary="The datasets that are hosted")
    @needs(READ)
    async def datasets(request: Request) -> list[DatasetInfo]:
        return service_of(request).datasets_for(caller_of(request))

    @router.get(DATASETS_PATH + "/{name}", summary="One dataset")
    @needs(READ)
    async def dataset(request: Request, name: str) -> DatasetInfo:
        return service_of(request).dataset(caller_of(request), name)

    @router.post(
        LOADERS_PATH,
        summary="Register a loader; the same spec has the same key, however often",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": TypeAdapter(LoaderSpec).json_schema()}},
            }
        },
    )
    @needs(READ)
    async def register(
        request: Request, protocol: Annotated[int | None, Header(alias=PROTOCOL_HEADER)] = None
    ) -> Registration:
        if protocol not in (None, PROTOCOL_VERSION):
            raise VersionMismatch(
                f"the client speaks protocol version {protocol} and this server {PROTOCOL_VERSION}: install the same "
                "release of teleloader on both sides"
            )
        async with body_reader_of(request).read(request, "max_spec_bytes") as body:
            content = b"".join([piece async for piece in body])
            large = len(content) > LARGE_SPEC_BYTES
            spec = await asyncio.to_thread(parsed_spec, content) if large else parsed_spec(content)
        return await service_of(request).register(spec, caller_of(request))

    @router.get(
        LOADERS_PATH + "/{key}",
        summary="What was answered when the loader was registered; a session that is asked for is not idle",
    )
    @needs(READ)
    async def registration(request: Request, key: str) -> Registration:
        return service_of(request).registration(key, caller_of(request))

    @router.delete(
        LOADERS_PATH + "/{key}",
        status_code=204,
        summary="End a session: the workers that were its own end; for any other loader nothing happens",
    )
    @needs(READ)
    async def end(request: Request, key: str) -> None:
        await service_of(request).end_session_of(key, caller_of(request))


def _add_batches(router: APIRouter) -> None:
    @router.get(
        LOADERS_PATH + "/{key}/epochs/{epoch}/batches/{k}",
        summary="One batch, as a frame",
        response_class=Response,
        responses={200: {"content": {FRAME_MEDIA_TYPE: {}}}, 304: {"description": "the client has it already"}},
    )
    @needs(READ)
    async def batch(
        request: Request, key: str, epoch: Number, k: Number, ahead: Ahead = 0,
        consumer: Consumer = "", report: Report = "",
    ) -> Response:  # fmt: skip
        service, caller = service_of(request), caller_of(request)
        service.loader(caller, key, epoch, k)
        etag = f'"{key}-{epoch}-{k}"'
        # what an address stands for never changes, so a client that has it needs nothing of us
        shared = "private" if request.app.state.authenticator.has_tokens else "public"
        immutable = {"etag": etag, "cache-control": f"{shared}, max-age=31536000, immutable"}
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=immutable)
        asked = service.batches(
            caller,
            RangeRequest(
                **client_of(request, consumer, report), key=key, epoch=epoch, start=k, stop=k + 1, prefetch=ahead
            ),
        )
        async with asked as stream, departure(request.receive) as gone:
            frame = await unless(gone, stream.take())
            return FrameResponse(service, stream, [frame.raw], MUTABLE if frame.failed else immutable)

    @router.get(
        LOADERS_PATH + "/{key}/epochs/{epoch}/batches",
        summary="The batches [start, stop) as frames, one after another",
        response_class=Response,
        responses={200: {"content": {FRAME_MEDIA_TYPE: {}}}},
    )
    @needs(READ)
    async def batches(
        request: Request,
        key: str,
        epoch: Number,
        start: Annotated[int, Query(ge=0, lt=MAX_EPOCH)],
        stop: Annotated[int, Query(ge=0, lt=MAX_EPOCH)],
        ahead: Ahead = 0,
        ready: Annotated[
            bool, Query(description="answer with the batches from start that are ready, at least one, and their size")
        ] = False,
        consumer: Consumer = "",
        report: Report = "",
    ) -> Response:
        if stop <= start:
            raise InvalidSpec(f"stop must be greater than start, was {stop} with start {start}")
        if not ready and request.scope["http_version"] == "1.0":
            raise HttpProblem(426, "UpgradeRequired", "an answer of no stated size needs HTTP/1.1: ask with ready=true")
        service = service_of(request)
        asked = service.batches(
            caller_of(request),
            RangeRequest(
                **client_of(request, consumer, report), key=key, epoch=epoch, start=start, stop=stop, prefetch=ahead
            ),
        )
        return await ready_answer(request, service, asked) if ready else StreamResponse(service, asked)


def _add_listed_batches(router: APIRouter) -> None:
    @router.post(
        LOADERS_PATH + "/{key}/epochs/{epoch}/batches",
        summary="The ready ones of the batches [start, ...) whose indices the body lists, a frame for each",
        response_class=Response,
        responses={200: {"content": {FRAME_MEDIA_TYPE: {}}}},
        openapi_extra={"requestBody": {"required": True, "content": {FRAME_MEDIA_TYPE: {}}}},
    )
    @needs(READ)
    async def listed(
        request: Request,
        key: str,
        epoch: Number,
        start: Annotated[int, Query(ge=0, lt=MAX_EPOCH)],
        consumer: Consumer = "",
        report: Report = "",
    ) -> Response:
        service, caller = service_of(request), caller_of(request)
        rules = service.index_rules(caller, key, epoch, start)
        async with body_reader_of(request).read(request, "max_body_bytes") as body:
            first, indices = await split(body, rules)
            if first != (key, epoch, start):
                raise InvalidSpec(f"the body lists the indices of {first} in the place of batch {start}")
            asked = service.batches(
                caller,
                RangeRequest(
                    **client_of(request, consumer, report), key=key, epoch=epoch, start=start,
                    stop=start + len(indices), indices=indices,
                ),
            )  # fmt: skip
            return await ready_answer(request, service, asked)


class BodyReader:
    """Reads the bodies of requests, which together have a limit: each connection may send one."""

    def __init__(self, limits: ClientLimits, body_budget: BodyBudget) -> None:
        self._limits = limits
        self._body_budget = body_budget

    @asynccontextmanager
    async def read(
        self, request: Request, name: Literal["max_body_bytes", "max_spec_bytes"]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The pieces of a body, which count as held until the context ends.

        Args:
            request: Whose it is.
            name: Of the limit that it has.

        Raises:
            HttpProblem: When it is larger.
            ServerUnavailable: When all bodies together are too large, or those of the same principal.
        """
        limit = getattr(self._limits, name)
        too_large = HttpProblem(
            413, "BodyTooLarge", f"the body is larger than the {limit:,} bytes that are allowed ({name})"
        )
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_large
        owner = caller_of(request).authorize(READ).name
        held = 0

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal held
            async for piece in request.stream():
                if held + len(piece) > limit:
                    raise too_large
                self._body_budget.take(owner, len(piece))
                held += len(piece)
                yield piece

        try:
            yield pieces()
        finally:
            self._body_budget.give_back(owner, held)


def body_reader_of(request: Request) -> BodyReader:
    """Return the reader of request bodies of the application that handles a request."""
    state = request.app.state
    return BodyReader(state.service.client_limits, state.body_budget)


def parsed_spec(body: bytes) -> LoaderSpec:
    """Return the spec that a body holds as JSON.

    Raises:
        InvalidSpec: If it holds none.
    """
    return LoaderSpec.from_json(_parsed_json(body))


def _parsed_json(body: bytes) -> object:
    """Return the value of a JSON text.

    A spec is some fields and a string for each shard. What has more values would hold the event loop while they are
    made: strings are counted, and left out to see how much else there is.

    Raises:
        InvalidSpec: When it is not, or has more values than a spec.
    """
    rest, strings = _STRING.subn(b"", body, MAX_STRINGS)
    if strings == MAX_STRINGS or len(rest) > MAX_BESIDES_STRINGS:
        raise InvalidSpec(
            f"the body has more values than a loader spec: {MAX_STRINGS - 1:,} strings and {MAX_BESIDES_STRINGS:,} "
            "bytes besides them are allowed"
        )
    if (escapes := body.count(b"\\")) > MAX_ESCAPES:
        raise InvalidSpec(f"the body has {escapes:,} backslashes, and a loader spec has at most {MAX_ESCAPES:,}")
    try:
        parsed: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidSpec(f"the body is not JSON: {error}") from None
    return parsed


class _Client(TypedDict):
    """Fields of a `RangeRequest` that describe its client."""

    consumer: str
    report: ConsumerReport | None
    trace: RequestTrace | None


def client_of(request: Request, consumer: str, report: str) -> _Client:
    """Return what a request says of its client.

    Args:
        request: The request.
        consumer: Its consumer header, "" if it has none.
        report: Its report header, "" if it has none.
    """
    return {
        "consumer": consumer or address_of(request),
        "report": ConsumerReport.from_header(report),
        "trace": RequestTrace.begin(request.headers.get(TRACE_HEADER, "")),
    }


def address_of(connection: HTTPConnection) -> str:
    """Return the name of a consumer whose client sends none: its IP address and port."""
    client = connection.client
    return f"{client.host}:{client.port}" if client else "unknown"
