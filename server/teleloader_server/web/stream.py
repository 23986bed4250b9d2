"""WebSocket endpoint for batches: the client sends requests, and the server responds with frames (docs/protocol.md).

Compared with HTTP, a request needs no headers. Flow control is credit-based: open requests are the credit, and no batch
is computed before it is requested.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from typing import Final

import msgpack
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from teleloader_server.dispatch.engine import BatchStream
from teleloader_server.dispatch.quotas import BodyBudget
from teleloader_server.dispatch.records import RangeRequest
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.limits import ClientLimits
from teleloader_server.loading.index_lists import Rules
from teleloader_server.permissions import READ, needs
from teleloader_server.problems import HttpProblem
from teleloader_server.web.authentication import caller_of, enter
from teleloader_server.web.batches import address_of, joined, ready_frames, service_of
from teleloader_server.web.index_bodies import split
from teleloader_server.web.problem_responses import REFUSED, problem_of
from teleloader_shared.errors import AccessDenied, InvalidSpec, ServerUnavailable, TeleloaderError, UnknownLoader
from teleloader_shared.messages import CONSUMER_HEADER, LOADERS_PATH, STREAM_PATH
from teleloader_shared.ranges import MAX_RANGES, BatchRanges
from teleloader_shared.spec import MAX_EPOCH

POLICY_VIOLATION: Final = 1008
"""WebSocket close code after a rejected request."""
MAX_RANGES_BYTES: Final = 9 * (2 * MAX_RANGES + 1) + 3
"""Maximum size in bytes of a message that requests ranges: an integer takes up to 9 bytes in msgpack."""
SERVICE_RESTART: Final = 1012
"""WebSocket close code of a server that is stopping or cannot compute batches."""


def parse_ranges(message: bytes, limits: ClientLimits, consumer: str, loader: str) -> RangeRequest:
    """Parse a WebSocket message that requests ranges of batches in seeded order.

    Raises:
        InvalidSpec: If the message is not a valid request.
    """
    expected = "expected a msgpack array of epoch, start, stop, start, stop, ..."
    if len(message) > MAX_RANGES_BYTES:
        raise InvalidSpec(f"request too long ({len(message):,} bytes, limit: {MAX_RANGES_BYTES:,}): {expected}")
    try:
        epoch, *bounds = numbers = msgpack.unpackb(message)
    except (ValueError, TypeError, msgpack.UnpackException):
        raise InvalidSpec(f"invalid request: {expected}") from None
    if any(type(number) is not int or not 0 <= number < MAX_EPOCH for number in numbers):
        raise InvalidSpec(f"invalid request {numbers!r:.200}: {expected}, integers in [0, 2**62)")
    batches = BatchRanges.between(bounds)
    if (count := len(batches)) > (most := limits.max_batches_per_request):
        raise InvalidSpec(f"invalid request for {count:,} batches: the limit is {most:,} (max_batches_per_request)")
    return RangeRequest(consumer=consumer, key=loader, epoch=epoch, batches=batches)


async def parse_lists(message: bytes, rules: Rules, consumer: str, loader: str) -> RangeRequest:
    """Parse a WebSocket message that requests batches by their index lists (client-side sampler).

    Raises:
        InvalidSpec: If the message is not a valid request.
    """
    first, indices = await split(_pieces(message), rules)
    if first.loader != loader:
        raise InvalidSpec(f"invalid request for loader {first.loader[:64]!r}: this connection is for loader {loader!r}")
    batches = BatchRanges.of(indices)
    return RangeRequest(consumer=consumer, key=loader, epoch=first.epoch, batches=batches, indices=indices)


async def _pieces(message: bytes) -> AsyncIterator[bytes]:
    yield message


class Conversation:
    """Handler of one WebSocket connection; sends batches in request order.

    Args:
        socket: Accepted WebSocket.
        service: Loader service that computes the batches.
        loader: Key of the connection's loader.
        body_budget: Memory budget of received bytes; index lists count until their batches are sent.
    """

    def __init__(self, socket: WebSocket, service: LoaderService, loader: str, body_budget: BodyBudget) -> None:
        self._socket = socket
        self._service = service
        self._loader = loader
        self._body_budget = body_budget
        self._consumer = socket.headers.get(CONSUMER_HEADER, "")[:200] or address_of(socket)
        self._caller = caller_of(socket)
        self._denied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future whose exception is set once the caller is no longer authorized."""
        self._streams: asyncio.Queue[tuple[BatchStream, ExitStack] | None] = asyncio.Queue()
        """Streams to be sent, each with the stack that closes the stream; None after the last stream."""
        self._outstanding = 0
        """Number of batches that were requested and not sent yet."""
        self._index_bytes = 0
        """Memory of the index lists of outstanding batches, in bytes."""
        self._sent = asyncio.Event()

    async def run(self) -> None:
        """Serve requests until the client disconnects or sends an invalid request, or until the server stops."""
        try:
            self._service.refuse_when_draining()
            spec = self._service.loader(self._caller, self._loader, 0).spec
            with self._service.grants.hold(self._caller, READ, spec.datasets, self._deny):
                await self._converse(lists=spec.order == "client")
        except WebSocketDisconnect:
            pass
        except (TeleloaderError, HttpProblem) as error:
            await self._refuse(error)

    def _deny(self, error: AccessDenied | ServerUnavailable) -> None:
        if not self._denied.done():
            self._denied.set_exception(error)

    async def _converse(self, *, lists: bool) -> None:
        reading, sending = asyncio.create_task(self._read(lists=lists)), asyncio.create_task(self._send())
        drained = asyncio.create_task(self._service.draining.wait())
        drained.add_done_callback(lambda _: reading.cancel())
        ends: set[asyncio.Future[None]] = {self._denied, reading, sending}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if reading.cancelled():
                self._streams.put_nowait(None)
                await asyncio.wait({self._denied, sending}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
                    await self._socket.close(SERVICE_RESTART)
            for end in ends:
                if end.done() and not end.cancelled():
                    end.result()
        finally:
            for task in (reading, sending, drained):
                task.cancel()
            self._denied.cancel()
            await asyncio.gather(reading, sending, drained, return_exceptions=True)
            while not self._streams.empty():
                if (unsent := self._streams.get_nowait()) is not None:
                    unsent[1].close()

    async def _read(self, *, lists: bool) -> None:
        limits = self._service.client_limits
        while True:
            message = await self._message()
            await enter(self._socket, READ)
            if lists:
                rules = self._service.index_rules(self._caller, self._loader, 0)
                request = await parse_lists(message, rules, self._consumer, self._loader)
            else:
                request = parse_ranges(message, limits, self._consumer, self._loader)
            count = len(request.batches)
            index_bytes = sum(map(len, request.indices.values())) if request.indices else 0
            owner = self._caller.authorize(READ).name
            while self._outstanding + count > limits.max_batches_per_request or (
                self._index_bytes and not self._body_budget.has_room(owner, index_bytes)
            ):
                self._sent.clear()
                await self._sent.wait()
            ending = ExitStack()
            self._keep(owner, index_bytes, ending)
            self._outstanding += count
            try:
                stream = ending.enter_context(self._service.batches(self._caller, request))
            except BaseException:
                ending.close()
                raise
            self._streams.put_nowait((stream, ending))

    def _keep(self, name: str, nbytes: int, ending: ExitStack) -> None:
        """Count the bytes of index lists toward the memory budget until their request ends."""

        def release() -> None:
            self._index_bytes -= nbytes
            self._sent.set()

        ending.enter_context(self._body_budget.hold(name, nbytes))
        self._index_bytes += nbytes
        ending.callback(release)

    async def _message(self) -> bytes:
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect
        if REFUSED in message:
            raise message[REFUSED]
        content: bytes | None = message.get("bytes")
        if content is None:
            raise InvalidSpec("invalid request: expected a binary message, got text")
        return content

    async def _send(self) -> None:
        while (item := await self._streams.get()) is not None:
            stream, ending = item
            with ending:
                while not stream.exhausted:
                    frames = await ready_frames(stream)
                    with self._service.sending(sum(map(len, frames)), stream):
                        for piece in joined(frames):
                            await self._socket.send({"type": "websocket.send", "bytes": piece})
                    self._outstanding -= len(frames)
                    self._sent.set()

    async def _refuse(self, error: TeleloaderError | HttpProblem) -> None:
        """Report an error to the client, and close the WebSocket."""
        try:
            await self._socket.send_text(bytes(problem_of(error).body).decode())
            await self._socket.close(SERVICE_RESTART if isinstance(error, ServerUnavailable) else POLICY_VIOLATION)
        except WebSocketDisconnect:
            pass  # the client has disconnected


def make_stream_router() -> APIRouter:
    """Create the router of the WebSocket endpoint.

    The endpoint uses `service` and `body_budget` of the application's state.
    """
    router = APIRouter()

    @router.websocket(LOADERS_PATH + "/{key}" + STREAM_PATH)
    @needs(READ)
    async def stream(socket: WebSocket, key: str) -> None:
        try:
            # authorize before accepting the WebSocket: messages of unauthenticated clients are never read
            await enter(socket, READ)
            with suppress(UnknownLoader):  # later reported by a message, after which the client registers it again
                service_of(socket).loader(caller_of(socket), key, 0)
        except (TeleloaderError, HttpProblem) as error:
            await socket.send_denial_response(problem_of(error))
            return
        await socket.accept()  # later errors are reported by messages
        await Conversation(socket, service_of(socket), key, socket.app.state.body_budget).run()

    return router
