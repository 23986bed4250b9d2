"""WebSocket connections: uvicorn's, held to the limits of connections.py, which send frames without copying them."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame as WebSocketFrame
from websockets.frames import Opcode

from teleloader_server.accounts import account_of
from teleloader_server.connections import Unread, Watch, break_off, last_answer
from teleloader_server.problems import Refusal

MAX_MESSAGE_BYTES: Final = 256 * 1024
"""Of what a client sends: connections are many, and each may send one."""
MAX_FRAGMENTS: Final = 64
"""In which it may come; an empty one takes memory too."""
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
        """It is no more."""
        self._watch.leave(self)
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
        super().data_received(data)
        if not self.handshake_initiated:
            self._refuse(f"the WebSocket cannot be opened: {self.conn.handshake_exc or 'its head is not complete'}")

    def _refuse(self, why: str) -> None:
        self._watch.count("400 BadRequest")
        self.handshake_complete = self.close_sent = True
        self.transport.write(last_answer(Refusal(400, "BadRequest", why), self.default_headers))
        self.transport.close()

    def handle_cont(self, event: WebSocketFrame) -> None:
        """A further fragment of a message."""
        self._fragments += 1
        if self._fragments == MAX_FRAGMENTS:
            self._watch.count("WebSocket message in too many fragments")
            self.conn.fail(_MESSAGE_TOO_BIG, f"more than {MAX_FRAGMENTS} fragments")
            self.handle_parser_exception()
            return
        super().handle_cont(event)
        if event.fin:
            self._fragments = 0

    def handle_ping(self) -> None:
        """Answer, unless the peer reads no answers: whoever sends pings and reads nothing would fill the memory."""
        if self._takes_more.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    # -- what the application sends

    async def send(self, message: Any) -> None:
        """Send; the bytes of a message are written from where they are."""
        content = message.get("bytes")
        if message["type"] != "websocket.send" or content is None or self.close_sent or self.transport.is_closing():
            await super().send(message)
            return
        self.transport.writelines([_head(len(content)), content])
        await self._takes_more.wait()

    # -- what the watch calls

    @property
    def answering(self) -> bool:
        """Whether the conversation goes on: the application ends it when the server is told to stop."""
        return not self.close_sent or self.transport.get_write_buffer_size() > 0

    @property
    def has_asked(self) -> bool:
        """Whether it can be closed by another than the application, which is never so."""
        return False

    def check(self, now: float) -> None:
        """Break the connection when its peer does not read."""
        # there is no scope where the request was refused
        if self._unread.too_much(now, account_of(getattr(self, "scope", {}))):
            self._watch.count("WebSocket not read")
            self.break_off()

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
