"""WebSocket connections: uvicorn's protocol with limits, which sends frames without copying them.

It remains a subclass. Limits on fragments, unfinished messages and pongs need the events of uvicorn's parser, and a
parser in front of it, as in `guard`, would parse and mask every frame twice. `uvicorn_members` checks at start-up that
all members exist that this class overrides or uses.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame as WebSocketFrame
from websockets.frames import Opcode

from teleloader_server.dispatch.quotas import Quota, quota_of
from teleloader_server.problems import HttpProblem
from teleloader_server.web.guard_manager import ConnectionManager
from teleloader_server.web.guard_rules import ArrivalRate, SlowReader
from teleloader_server.web.guard_transport import break_off, final_response, unread_bytes
from teleloader_server.web.problem_responses import REFUSED
from teleloader_shared.errors import ServerUnavailable

MAX_MESSAGE_BYTES: Final = 256 * 1024
"""Size of a message from a client: each of many connections may send one."""
MAX_FRAGMENTS: Final = 64
"""Number of fragments of a message: an empty one takes memory too."""
PIECE_BYTES: Final = 4096
"""Bytes that are parsed at a time: up to 680 frames, which take the event loop some milliseconds."""
_BINARY: Final = 0x80 | Opcode.BINARY
_LENGTH_16: Final = 126
_LENGTH_64: Final = 127
_MESSAGE_TOO_BIG: Final = 1009


class WebSocketConnection(WebSocketsSansIOProtocol):
    """Protocol of one connection, which takes over from the `Connection` that received the request.

    Args:
        manager: Manages all connections of the server.
        of_uvicorn: Arguments of uvicorn.
    """

    def __init__(self, manager: ConnectionManager, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        # the library's debug lines show all headers, and with them tokens and cookies
        self.conn.debug = False
        self._manager = manager
        self._fragments = 0
        self._assembled = 0
        """Bytes of the fragments of an unfinished message."""
        self._counted = ("", 0)
        """Principal and bytes of an unfinished message that count in the server's limit."""
        self._unparsed = bytearray()
        """Received bytes that wait until the application has taken the messages before them: one read at most."""
        self._is_scheduled = False
        self._is_unfinished = False
        """True if a message or frame has begun and is incomplete."""
        self._rate = ArrivalRate(manager.limits, 0.0)
        """Rate of the unfinished message."""
        self._slow_reader = SlowReader(manager.limits)
        self._is_writable = asyncio.Event()
        self._is_writable.set()

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over the connection."""
        super().connection_made(transport)
        self.address = "" if self.client is None else self.client[0]
        self._manager.admit(self)  # there is room: the `Connection` has just left

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the memory of the connection."""
        self._manager.leave(self)
        self._unparsed.clear()
        self._manager.unfinished.give_back(*self._counted)
        self._counted = ("", 0)
        self._is_writable.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Hold back what the application sends."""
        self._is_writable.clear()

    def resume_writing(self) -> None:
        """Continue to send."""
        self._is_writable.set()

    def data_received(self, data: bytes) -> None:
        """Parse received data; the first of it is the head of the request, which the library may refuse."""
        if self.transport.is_closing():
            return
        if self.handshake_initiated:
            self._unparsed += data
            self._parse()
            return
        super().data_received(data)
        if not self.handshake_initiated:
            self._refuse(f"cannot open a WebSocket: {self.conn.handshake_exc or 'the head is incomplete'}")
        # nothing more is read until the application has authenticated the client and accepts the WebSocket
        self._continue()

    # -- messages from the client

    async def receive(self) -> Any:
        """Return the next event for the application."""
        message = await self.queue.get()
        self._continue()
        return message

    def _parse(self) -> None:
        """Parse a piece, unless messages wait for the application.

        uvicorn parses all data of a read: 256 KiB can hold 40,000 messages, which block the event loop for half a
        second and take 60 times their size in memory.
        """
        self._is_scheduled = False
        if self._unparsed and self._is_taken and not self.transport.is_closing():
            piece = bytes(self._unparsed[:PIECE_BYTES])
            del self._unparsed[:PIECE_BYTES]
            super().data_received(piece)
            self._limit_unfinished()
            self._measure(len(piece))
        self._continue()

    @property
    def _is_taken(self) -> bool:
        """True if no message waits for the application, or the application takes none any more."""
        return self.queue.empty() or self.close_sent

    def _continue(self) -> None:
        """Schedule the next piece; read more data when nothing is left of the last read."""
        if self.transport.is_closing():
            return
        if self._unparsed and self._is_taken and not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._parse)
        pause = bool(self._unparsed) or not self._is_taken
        if pause and not self.read_paused:
            self.transport.pause_reading()
        elif self.read_paused and not pause:
            self.transport.resume_reading()
        self.read_paused = pause

    def _limit_unfinished(self) -> None:
        """Count an unfinished message, and refuse it when the server holds too much of such messages."""
        nbytes = self._assembled + len(self.conn.reader.buffer)
        held = self._manager.unfinished
        held.give_back(*self._counted)
        self._counted = ("", 0)
        if nbytes <= PIECE_BYTES:
            return  # no more than the connection itself takes
        name = "" if self.quota is None else self.quota.name
        if held.has_room(name, nbytes):
            held.take(name, nbytes)
            self._counted = (name, nbytes)
            return
        self._manager.count("WebSocket message refused for lack of memory")
        if self.close_sent:
            self.break_off()
            return
        self._refuse_message(
            ServerUnavailable(
                f"no memory for {nbytes:,} bytes of an unfinished message: such messages may take a quarter of "
                "max_buffered_request_bytes together. Try again later, or send smaller messages"
            )
        )

    def _refuse_message(self, error: ServerUnavailable | HttpProblem) -> None:
        """Let the application refuse the message that is being received, and close."""
        self._unparsed.clear()
        message: Any = {"type": "websocket.receive", REFUSED: error}
        self.queue.put_nowait(message)

    def _measure(self, nbytes: int) -> None:
        """Measure the rate of an unfinished message or frame, from its first bytes on."""
        was_unfinished = self._is_unfinished
        self._is_unfinished = bool(self.frames or self.conn.reader.buffer)
        if was_unfinished:
            self._rate.add(nbytes)
        elif self._is_unfinished:
            self._rate.restart(self.loop.time())

    def _refuse(self, reason: str) -> None:
        self._manager.count("400 BadRequest")
        self.handshake_complete = self.close_sent = True
        self.transport.write(final_response(HttpProblem(400, "BadRequest", reason), self.default_headers))
        self.transport.close()

    def handle_text(self, event: WebSocketFrame) -> None:
        """Drop the text, so that it need not be UTF-8: the application refuses the message."""
        self._manager.count("WebSocket text message")
        self._begin()
        super().handle_text(dataclasses.replace(event, data=b""))

    def handle_bytes(self, event: WebSocketFrame) -> None:
        """Begin a message."""
        self._begin()
        self._assembled = 0 if event.fin else len(event.data)
        super().handle_bytes(event)

    def _begin(self) -> None:
        self._fragments = self._assembled = 0

    def handle_cont(self, event: WebSocketFrame) -> None:
        """Add a fragment to a message."""
        self._fragments += 1
        if self._fragments == MAX_FRAGMENTS:
            self._manager.count("WebSocket message in too many fragments")
            self.conn.fail(_MESSAGE_TOO_BIG, f"more than {MAX_FRAGMENTS} fragments")
            self.handle_parser_exception()
            return
        if self.curr_msg_data_type == "text":
            event = dataclasses.replace(event, data=b"")
        self._assembled = 0 if event.fin else self._assembled + len(event.data)
        super().handle_cont(event)

    def handle_ping(self) -> None:
        """Send a pong, unless the client does not read: pongs would fill the memory."""
        if self._is_writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    # -- messages from the application

    async def send(self, message: Any) -> None:
        """Send a message; its bytes are not copied."""
        if message["type"] == "websocket.http.response.start":  # uvicorn omits the server's headers here
            message = {**message, "headers": [*self.default_headers, *message["headers"]]}
        content = message.get("bytes")
        if message["type"] != "websocket.send" or content is None or self.close_sent or self.transport.is_closing():
            await super().send(message)
            self._continue()
            return
        self.transport.writelines([_frame_head(len(content)), content])
        await self._is_writable.wait()

    # -- called by the manager

    @property
    def is_responding(self) -> bool:
        """True if the WebSocket is open: the application closes it when the server stops."""
        return not self.close_sent or self.transport.get_write_buffer_size() > 0

    @property
    def quota(self) -> Quota | None:
        """Quota of the principal; None until the client is authenticated."""
        return quota_of(getattr(self, "scope", {}))  # a request that the library refused has no scope

    @property
    def has_requested(self) -> bool:
        """True if the manager may close the connection: never, the application does."""
        return False

    def check(self, now: float) -> None:
        """Enforce the limits of time and rate."""
        quota, limits = self.quota, self._manager.limits
        patience = limits.send_timeout if quota is None else quota.patience(limits)
        if self._slow_reader.is_too_slow(now, unread_bytes(self.transport), patience):
            self._manager.count("WebSocket not read")
            self.break_off()
        elif not (self.transport.is_closing() or self.close_sent):
            self._check_rate(now)

    def _check_rate(self, now: float) -> None:
        """Refuse a message that arrives too slowly; the limits are those of a request's body."""
        if self.read_paused:
            self._rate.restart(now)
        elif self._is_unfinished and (problem := self._rate.problem(now, "a message")) is not None:
            self._manager.count("408 RequestTimeout")
            self._refuse_message(problem)
            self._continue()

    def break_off(self) -> None:
        """Close and discard what was not sent."""
        break_off(self.transport)


def _frame_head(size: int) -> bytes:
    """Return the head of a frame with a binary message (RFC 6455, section 5.2)."""
    if size < _LENGTH_16:
        return bytes([_BINARY, size])
    if size < 2**16:
        return bytes([_BINARY, _LENGTH_16]) + size.to_bytes(2)
    return bytes([_BINARY, _LENGTH_64]) + size.to_bytes(8)
