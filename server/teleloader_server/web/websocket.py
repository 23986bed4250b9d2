"""WebSocket protocol with limits: a subclass of uvicorn's protocol that sends frames without copying.

Why a subclass: limits on fragments, unfinished messages and pongs require the events of uvicorn's parser, and a parser
in front of it, as in `guard`, would parse and unmask every frame twice. `uvicorn_members` checks at start-up that
uvicorn has all members that this class overrides or uses.
"""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import ExitStack
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame as WebSocketFrame
from websockets.frames import Opcode

from teleloader_server.dispatch.quotas import Quota, quota_of
from teleloader_server.problems import HttpProblem
from teleloader_server.web.guard_manager import ConnectionManager
from teleloader_server.web.guard_rules import ArrivalRate, SlowReader
from teleloader_server.web.guard_transport import abort, final_response, unread_bytes, write_joined
from teleloader_server.web.problem_responses import REFUSED
from teleloader_shared.errors import ServerUnavailable

MAX_MESSAGE_BYTES: Final = 256 * 1024
"""Maximum size of a message from a client: small, because each of many connections may send one."""
MAX_FRAGMENTS: Final = 64
"""Maximum number of fragments of a message: even an empty fragment takes memory."""
PIECE_BYTES: Final = 4096
"""Number of bytes parsed per iteration of the event loop: up to 680 frames, which take a few milliseconds to parse."""
_BINARY: Final = 0x80 | Opcode.BINARY
_LENGTH_16: Final = 126
_LENGTH_64: Final = 127
_MESSAGE_TOO_BIG: Final = 1009


class WebSocketConnection(WebSocketsSansIOProtocol):
    """asyncio protocol of one WebSocket; replaces the `Connection` that received the upgrade request.

    Args:
        manager: Manager of all connections of the server.
        of_uvicorn: Keyword arguments that uvicorn passes.
    """

    def __init__(self, manager: ConnectionManager, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        # debug log lines of the websockets library contain all headers, including tokens and cookies
        self.conn.debug = False
        self._manager = manager
        self._fragments = 0
        self._assembled = 0
        """Bytes of the received fragments of an unfinished message."""
        self._counted = ExitStack()
        """Context manager stack that counts the unfinished message in the budget `ConnectionManager.unfinished`."""
        self._unparsed = bytearray()
        """Received bytes of at most one read, not parsed until the application has taken the messages before them."""
        self._is_scheduled = False
        self._is_unfinished = False
        """True if a message or frame is incomplete."""
        self._rate = ArrivalRate(manager.limits, 0.0)
        """Rate at which the unfinished message arrives."""
        self._slow_reader = SlowReader(manager.limits)
        self._is_writable = asyncio.Event()
        self._is_writable.set()

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over an upgraded connection, and add it to the connection manager."""
        super().connection_made(transport)
        self.address = "" if self.client is None else self.client[0]
        self._manager.admit(self)  # never rejected: the `Connection` that it replaces has just been removed

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the closed connection from the connection manager, and release its memory."""
        self._manager.leave(self)
        self._unparsed.clear()
        self._counted.close()
        self._is_writable.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Block `send` until the client reads."""
        self._is_writable.clear()

    def resume_writing(self) -> None:
        """Unblock `send`."""
        self._is_writable.set()

    def data_received(self, data: bytes) -> None:
        """Parse received data: first the upgrade request, which the websockets library may reject, then messages."""
        if self.transport.is_closing():
            return
        if self.handshake_initiated:
            self._unparsed += data
            self._parse()
            return
        super().data_received(data)
        if not self.handshake_initiated:
            self._refuse(f"cannot open a WebSocket: {self.conn.handshake_exc or 'incomplete headers'}")
        # no further data is read until the application has authenticated the client and accepted the WebSocket
        self._continue()

    # -- messages from the client

    async def receive(self) -> Any:
        """Return the next ASGI event for the application."""
        message = await self.queue.get()
        self._continue()
        return message

    def _parse(self) -> None:
        """Parse at most `PIECE_BYTES` of received data, if the application has taken all earlier messages.

        uvicorn would parse all data of a read at once: 256 KiB can contain 40,000 messages, which block the event loop
        for half a second and take 60 times their size in memory.
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
        """True if the application has taken all messages, or the WebSocket is closing and takes no more."""
        return self.queue.empty() or self.close_sent

    def _continue(self) -> None:
        """Schedule parsing of the next piece; read from the socket again once all received data is parsed."""
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
        """Count the memory of an unfinished message; reject the message if all unfinished ones exceed their budget."""
        nbytes = self._assembled + len(self.conn.reader.buffer)
        held = self._manager.unfinished
        self._counted.close()
        if nbytes <= PIECE_BYTES:
            return  # included in the memory that is counted per connection
        name = "" if self.quota is None else self.quota.name
        if held.has_room(name, nbytes):
            self._counted.enter_context(held.hold(name, nbytes))
            return
        self._manager.count("WebSocket message rejected for lack of memory")
        if self.close_sent:
            self.abort()
            return
        self._refuse_message(
            ServerUnavailable(
                f"no memory for {nbytes:,} bytes of an incomplete message: all incomplete messages share a "
                "quarter of max_buffered_request_bytes. Retry later, or send smaller messages"
            )
        )

    def _refuse_message(self, error: ServerUnavailable | HttpProblem) -> None:
        """Make the application report an error for the message that is being received, and close the WebSocket."""
        self._unparsed.clear()
        message: Any = {"type": "websocket.receive", REFUSED: error}
        self.queue.put_nowait(message)

    def _measure(self, nbytes: int) -> None:
        """Measure the rate at which an unfinished message or frame arrives."""
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
        """Discard a text message without decoding its content, because the application rejects text messages."""
        self._manager.count("WebSocket text message")
        self._begin()
        super().handle_text(dataclasses.replace(event, data=b""))

    def handle_bytes(self, event: WebSocketFrame) -> None:
        """Start a binary message, and count its bytes if further fragments follow."""
        self._begin()
        self._assembled = 0 if event.fin else len(event.data)
        super().handle_bytes(event)

    def _begin(self) -> None:
        self._fragments = self._assembled = 0

    def handle_cont(self, event: WebSocketFrame) -> None:
        """Add a fragment to a message; fail the connection if there are more than `MAX_FRAGMENTS`."""
        self._fragments += 1
        if self._fragments == MAX_FRAGMENTS:
            self._manager.count("WebSocket message in too many fragments")
            self.conn.fail(_MESSAGE_TOO_BIG, f"the message has more than {MAX_FRAGMENTS} fragments: send larger ones")
            self.handle_parser_exception()
            return
        if self.curr_msg_data_type == "text":
            event = dataclasses.replace(event, data=b"")
        self._assembled = 0 if event.fin else self._assembled + len(event.data)
        super().handle_cont(event)

    def handle_ping(self) -> None:
        """Respond to a ping, or discard the pong if the client does not read: unsent pongs would fill the memory."""
        if self._is_writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    # -- messages from the application

    async def send(self, message: Any) -> None:
        """Send an ASGI message from the application to the client, without copying its payload."""
        if message["type"] == "websocket.http.response.start":  # uvicorn omits the server's headers here
            message = {**message, "headers": [*self.default_headers, *message["headers"]]}
        content = message.get("bytes")
        if message["type"] != "websocket.send" or content is None or self.close_sent or self.transport.is_closing():
            await super().send(message)
            self._continue()
            return
        write_joined(self.transport, _frame_head(len(content)), content)
        await self._is_writable.wait()

    # -- called by the manager

    @property
    def is_responding(self) -> bool:
        """True until the WebSocket is closed; at shutdown, the application closes the WebSocket."""
        return not self.close_sent or self.transport.get_write_buffer_size() > 0

    @property
    def quota(self) -> Quota | None:
        """Quota of the client's principal; None until the client is authenticated."""
        return quota_of(getattr(self, "scope", {}))  # a request that the websockets library rejected has no scope

    @property
    def has_requested(self) -> bool:
        """Always False, because the application, and not the connection manager, closes the WebSocket at shutdown."""
        return False

    def check(self, now: float) -> None:
        """Close the connection if the client reads too slowly; reject a message that arrives too slowly."""
        quota, limits = self.quota, self._manager.limits
        patience = limits.send_timeout if quota is None else quota.patience(limits)
        if self._slow_reader.is_too_slow(now, unread_bytes(self.transport), patience):
            self._manager.count("WebSocket not read")
            self.abort()
        elif not (self.transport.is_closing() or self.close_sent):
            self._check_rate(now)

    def _check_rate(self, now: float) -> None:
        """Reject a message that arrives too slowly, by the limits for request bodies."""
        if self.read_paused:
            self._rate.restart(now)
        elif self._is_unfinished and (problem := self._rate.problem(now, "a message")) is not None:
            self._manager.count("408 RequestTimeout")
            self._refuse_message(problem)
            self._continue()

    def abort(self) -> None:
        """Close the connection immediately, and discard unsent data."""
        abort(self.transport)


def _frame_head(size: int) -> bytes:
    """Encode the header of a WebSocket frame that contains a whole binary message (RFC 6455, section 5.2)."""
    if size < _LENGTH_16:
        return bytes([_BINARY, size])
    if size < 2**16:
        return bytes([_BINARY, _LENGTH_16]) + size.to_bytes(2)
    return bytes([_BINARY, _LENGTH_64]) + size.to_bytes(8)
