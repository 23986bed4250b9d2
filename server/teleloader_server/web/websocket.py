"""WebSocket connections: uvicorn's, held to the limits of connections.py, which send frames without copying them."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame as WebSocketFrame
from websockets.frames import Opcode

from teleloader_server.dispatch.quotas import Account, account_of
from teleloader_server.problems import HttpProblem
from teleloader_server.web.guard import Unread, Watch, break_off, last_answer
from teleloader_server.web.problem_responses import REFUSED
from teleloader_shared.errors import ServerUnavailable

MAX_MESSAGE_BYTES: Final = 256 * 1024
"""Of what a client sends: connections are many, and each may send one."""
MAX_FRAGMENTS: Final = 64
"""In which it may come; an empty one takes memory too."""
PIECE_BYTES: Final = 4096
"""Bytes that are parsed at a time: up to 680 frames, which take the event loop some milliseconds."""
_BINARY: Final = 0x80 | Opcode.BINARY
_LENGTH_16: Final = 126
_LENGTH_64: Final = 127
_MESSAGE_TOO_BIG: Final = 1009


class WebSocketConnection(WebSocketsSansIOProtocol):
    """One connection; see the module. A `Connection` that is asked for a WebSocket makes it."""

    def __init__(self, watch: Watch, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        # the lines of the library for debugging show all headers, and with them tokens and cookies
        self.conn.debug = False
        self._watch = watch
        self._fragments = 0
        self._assembled = 0
        """Bytes of the fragments of an unfinished message."""
        self._counted = ("", 0)
        """Principal and bytes of an unfinished message that count in the server's limit."""
        self._unparsed = bytearray()
        """Received bytes that wait until the application has taken the messages before them: one read at most."""
        self._is_scheduled = False
        self._since: float | None = None
        """The time from which the rate of an unfinished message is measured; None where no message is unfinished."""
        self._received = 0
        """Bytes received since then."""
        self._takes_more = asyncio.Event()
        self._takes_more.set()

    # -- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection over."""
        super().connection_made(transport)
        self.address = "" if self.client is None else self.client[0]
        self._unread = Unread(self.transport, self._watch.limits)
        self._watch.admit(self)  # it takes the place of the connection that it was

    def connection_lost(self, exc: Exception | None) -> None:
        """Release what the connection holds."""
        self._watch.leave(self)
        self._unparsed.clear()
        self._watch.unfinished.give_back(*self._counted)
        self._counted = ("", 0)
        self._takes_more.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Enough waits to be sent."""
        self._takes_more.clear()

    def resume_writing(self) -> None:
        """Most of it was sent."""
        self._takes_more.set()

    # -- what a client sends

    def data_received(self, data: bytes) -> None:
        """Parse what came; the first of it is the head of the request, which the library may not take."""
        if self.transport.is_closing():
            return
        if self.handshake_initiated:
            self._unparsed += data
            self._parse()
            return
        super().data_received(data)
        if not self.handshake_initiated:
            self._refuse(f"the WebSocket cannot be opened: {self.conn.handshake_exc or 'its head is not complete'}")
        # nothing more is read until the application has authenticated the client and accepts
        self._read_on()

    async def receive(self) -> Any:
        """Return the next event for the application."""
        message = await self.queue.get()
        self._read_on()
        return message

    def _parse(self) -> None:
        """Parse a piece, unless the application has messages to take.

        uvicorn parses all that a read brings: a quarter of a megabyte can hold 40,000 messages, which block the event
        loop for half a second and take 60 times their bytes of memory.
        """
        self._is_scheduled = False
        if self._unparsed and self._is_taken and not self.transport.is_closing():
            piece = bytes(self._unparsed[:PIECE_BYTES])
            del self._unparsed[:PIECE_BYTES]
            super().data_received(piece)
            self._limit_unfinished()
            self._measure(len(piece))
        self._read_on()

    @property
    def _is_taken(self) -> bool:
        """Whether no message waits for the application, or it takes none any more."""
        return self.queue.empty() or self.close_sent

    def _read_on(self) -> None:
        """Continue with what was received; read more when nothing of it is left."""
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
        """Count an unfinished message, and have it refused where the server holds too much of such messages."""
        nbytes = self._assembled + len(self.conn.reader.buffer)
        held = self._watch.unfinished
        held.give_back(*self._counted)
        self._counted = ("", 0)
        if nbytes <= PIECE_BYTES:
            return  # no more than the connection itself takes: no reason to refuse a client
        name = "" if self.account is None else self.account.name
        if held.has_room(name, nbytes):
            held.take(name, nbytes)
            self._counted = (name, nbytes)
            return
        self._watch.count("WebSocket message refused for want of memory")
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
        """Have the application refuse the message that is being received, and close."""
        self._unparsed.clear()
        message: Any = {"type": "websocket.receive", REFUSED: error}
        self.queue.put_nowait(message)

    def _measure(self, nbytes: int) -> None:
        """Measure the rate of an unfinished message or frame, from its first bytes on."""
        if not (self.frames or self.conn.reader.buffer):
            self._since = None
        elif self._since is None:
            self._mark(self.loop.time())
        else:
            self._received += nbytes

    def _mark(self, now: float) -> None:
        """Measure from here on."""
        self._since = now
        self._received = 0

    def _check_rate(self, now: float) -> None:
        """Have a message refused that arrives too slowly: the limits are those of a request's body."""
        limits = self._watch.limits
        if self._since is None or self.close_sent:
            return
        if self.read_paused:
            self._mark(now)  # the server does not read
            return
        seconds = now - self._since
        if seconds <= limits.body_timeout:
            return
        if self._received < seconds * limits.min_body_rate:
            self._watch.count("408 RequestTimeout")
            self._refuse_message(
                HttpProblem(
                    408,
                    "RequestTimeout",
                    f"a message arrived at less than {limits.min_body_rate:,.0f} bytes a second (min_body_rate): send "
                    "whole messages",
                )
            )
            self._read_on()
        self._mark(now)

    def _refuse(self, why: str) -> None:
        self._watch.count("400 BadRequest")
        self.handshake_complete = self.close_sent = True
        self.transport.write(last_answer(HttpProblem(400, "BadRequest", why), self.default_headers))
        self.transport.close()

    def handle_text(self, event: WebSocketFrame) -> None:
        """Drop the text, for which the application refuses the message: what is not read need not be UTF-8."""
        self._watch.count("WebSocket text message")
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
            self._watch.count("WebSocket message in too many fragments")
            self.conn.fail(_MESSAGE_TOO_BIG, f"more than {MAX_FRAGMENTS} fragments")
            self.handle_parser_exception()
            return
        if self.curr_msg_data_type == "text":
            event = dataclasses.replace(event, data=b"")
        self._assembled = 0 if event.fin else self._assembled + len(event.data)
        super().handle_cont(event)

    def handle_ping(self) -> None:
        """Answer, unless the peer reads no answers: whoever sends pings and reads nothing would fill the memory."""
        if self._takes_more.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    # -- what the application sends

    async def send(self, message: Any) -> None:
        """Send; the bytes of a message are written from where they are."""
        if message["type"] == "websocket.http.response.start":  # uvicorn leaves the server's headers out here
            message = {**message, "headers": [*self.default_headers, *message["headers"]]}
        content = message.get("bytes")
        if message["type"] != "websocket.send" or content is None or self.close_sent or self.transport.is_closing():
            await super().send(message)
            self._read_on()
            return
        self.transport.writelines([_head(len(content)), content])
        await self._takes_more.wait()

    # -- what the watch calls

    @property
    def answering(self) -> bool:
        """Whether the conversation goes on: the application ends it when the server is told to stop."""
        return not self.close_sent or self.transport.get_write_buffer_size() > 0

    @property
    def account(self) -> Account | None:
        """Account of the principal, None until the client is authenticated."""
        return account_of(getattr(self, "scope", {}))  # there is no scope where the request was refused

    @property
    def has_asked(self) -> bool:
        """Whether it can be closed by another than the application, which is never so."""
        return False

    def check(self, now: float) -> None:
        """Hold the connection to its limits."""
        if self._unread.too_much(now, self.account):
            self._watch.count("WebSocket not read")
            self.break_off()
        elif not self.transport.is_closing():
            self._check_rate(now)

    def break_off(self) -> None:
        """Close without sending what is left."""
        break_off(self.transport)


def _head(size: int) -> bytes:
    """What stands before a binary message of so many bytes (RFC 6455, section 5.2)."""
    if size < _LENGTH_16:
        return bytes([_BINARY, size])
    if size < 2**16:
        return bytes([_BINARY, _LENGTH_16]) + size.to_bytes(2)
    return bytes([_BINARY, _LENGTH_64]) + size.to_bytes(8)
