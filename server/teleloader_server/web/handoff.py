"""Unix socket on which the server lends shared-memory slots to clients on the same machine (docs/protocol.md).

Requests stay on HTTP, with authentication, limits and statistics. A request that names a channel gets a response
without a frame: the descriptor of the frame's slot is sent on the channel before the response. The socket has a random
abstract name, so that the processes that can connect to it are those that can connect to the loopback address: the
processes in the server's network namespace. A channel lends nothing until an authenticated request names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
import time
import weakref
from itertools import count
from typing import Final

from starlette.types import Scope

from teleloader_server.dispatch.engine import BatchStream
from teleloader_server.dispatch.lending import Lender, Loan
from teleloader_server.dispatch.quotas import Quota
from teleloader_server.web.guard_manager import ConnectionManager
from teleloader_server.workers.lendable import is_supported
from teleloader_server.workers.pool import Lease
from teleloader_shared.forks import after_fork_in_child
from teleloader_shared.handoff import (
    CHANNEL_HEADER,
    GIVE_BACK,
    HELLO,
    LOAN,
    WELCOME,
    channel_name,
    server_proof,
)

BACKLOG: Final = 128
MAX_MESSAGES: Final = 64
"""Maximum number of messages, or of new connections, that are processed per iteration of the event loop."""
RETRY_S: Final = 1.0
"""Delay in seconds before further connections are accepted, after the server ran out of file descriptors."""
_HEADER: Final = CHANNEL_HEADER.lower().encode()
_PEER: Final = struct.Struct("3i")

logger = logging.getLogger(__name__)

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Sockets of this module, which forked processes must not keep open."""


class Channels:
    """Listener and open channels of a server.

    Args:
        lender: Registry of the loans.
        manager: Manager of all connections of the server.
    """

    def __init__(self, lender: Lender, manager: ConnectionManager) -> None:
        self.lender = lender
        self.manager = manager
        self.by_name: dict[str, Channel] = {}
        """Channels that have completed the handshake, by name."""
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Listen on the Unix socket; do nothing if the system cannot lend slots, or the limits disable it."""
        if not self.lender.limits.max_lent_slots or not is_supported():
            return
        name = f"teleloader-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _sockets.add(listener)
        try:
            listener.setblocking(False)
            listener.bind(f"\0{name}")
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            logger.warning("cannot listen on a Unix socket, so clients on this machine use TCP: %s", error.strerror)
            return
        self._listener = listener
        self.lender.socket_name = name
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop listening; the manager closes the channels."""
        self.lender.socket_name = None
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        listener, loop = self._listener, asyncio.get_running_loop()
        if listener is None:
            return
        for _ in range(MAX_MESSAGES):
            try:
                connected, _address = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # out of file descriptors
                loop.remove_reader(listener)
                loop.call_later(RETRY_S, self._resume, listener)
                return
            Channel(self, connected)

    def _resume(self, listener: socket.socket) -> None:
        if self._listener is listener:
            asyncio.get_running_loop().add_reader(listener, self._accept)


def channel_of(scope: Scope) -> Channel | None:
    """Return the open channel that a request names, or None."""
    channels: Channels | None = scope["app"].state.channels
    if channels is None:
        return None
    name = next((value for header, value in scope["headers"] if header == _HEADER), b"")
    return channels.by_name.get(name.decode("latin-1"))


class Channel:
    """Connection of one client, on which it receives descriptors and gives slots back; a `ManagedConnection`."""

    def __init__(self, channels: Channels, connected: socket.socket) -> None:
        self._channels = channels
        self._socket = connected
        self._loans: dict[int, Loan] = {}
        """Loans by number, oldest first."""
        self._numbers = count(1)
        self._name: str | None = None
        """Name of the channel; None before the handshake."""
        self._principal = ""
        self.quota: Quota | None = None
        """Quota of the client's principal; None until an authenticated request names the channel."""
        self._opened = asyncio.get_running_loop().time()
        connected.setblocking(False)
        _sockets.add(connected)
        pid = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0]
        self.address = f"process {pid}"
        """Process of the client, in place of an IP address."""
        asyncio.get_running_loop().add_reader(connected, self._receive)
        if channels.manager.admit(self) is not None:
            self.abort()

    @property
    def is_responding(self) -> bool:
        """False, because responses are sent over HTTP."""
        return False

    @property
    def has_requested(self) -> bool:
        """False, so that pending responses can use the channel until the server has stopped."""
        return False

    def check(self, now: float) -> None:
        """Close the channel if no request named it in time, or if a slot is lent for too long."""
        limits = self._channels.lender.limits
        if self.quota is None and now - self._opened > limits.header_timeout:
            self._close("handshake timeout")
        oldest = next(iter(self._loans.values()), None)
        if oldest is not None and time.monotonic() - oldest.began > limits.max_lent_time:
            self._close("slot lent for too long")

    def shutdown(self) -> None:
        """Do nothing: `abort` closes the channel at the end of the shutdown."""

    def abort(self) -> None:
        """Close the channel, and end its loans; memory that the client maps stays valid."""
        if self._socket.fileno() == -1:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._channels.manager.leave(self)
        if self._name is not None:
            self._channels.by_name.pop(self._name, None)
        while self._loans:
            self._end(next(iter(self._loans)))

    def confirm(self, stream: BatchStream) -> bool:
        """Record that an authenticated request named this channel; return False if its principal is another one."""
        quota = stream.consumer.principal_share.quota
        if quota.name != self._principal:
            return False
        self.quota = quota
        return True

    def lend(self, frame: Lease, stream: BatchStream) -> int | None:
        """Send the descriptor of a frame's slot.

        Args:
            frame: Frame of the response.
            stream: Stream of the request that `confirm` accepted; it authorizes the client.

        Returns:
            The number of the loan; None if the frame cannot be lent, and must be sent.

        Raises:
            AccessDenied: If the client is no longer authorized.
        """
        stream.authorize()
        quota = self.quota
        if quota is None or self._socket.fileno() == -1:
            return None
        number = next(self._numbers)
        head = LOAN.pack(number, len(frame))
        loan = self._channels.lender.lend(
            frame,
            quota,
            stream.consumer.loader.spec.content,
            lambda descriptor: socket.send_fds(self._socket, [head], [descriptor], socket.MSG_DONTWAIT),
        )
        if loan is None:
            return None
        self._loans[number] = loan
        stream.tally.lent += 1
        return number

    def _receive(self) -> None:
        for _ in range(MAX_MESSAGES):
            try:
                message = self._socket.recv(HELLO.size + 1)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self.abort()
                return
            if self._name is None and len(message) == HELLO.size:
                self._greet(*HELLO.unpack(message))
            elif self._name is not None and len(message) == GIVE_BACK.size:
                self._give_back(*GIVE_BACK.unpack(message))
            else:
                self._close("invalid message")
            if self._socket.fileno() == -1:
                return

    def _greet(self, identifier: bytes, nonce: bytes) -> None:
        account = self._channels.lender.account(identifier)
        if account is None:
            self._close("unknown client")
            return
        own_nonce = secrets.token_bytes(16)
        nonces, key = nonce + own_nonce, account.offer.key
        self._principal, self._name = account.principal, channel_name(key, nonces)
        self._channels.by_name[self._name] = self
        with contextlib.suppress(OSError):  # the client has disconnected
            self._socket.send(WELCOME.pack(own_nonce, server_proof(key, nonces)))

    def _give_back(self, number: int) -> None:
        if number in self._loans:
            self._end(number)
        else:
            self._close("slot given back that was not lent")

    def _end(self, number: int) -> None:
        loan = self._loans.pop(number)
        self._channels.lender.end(loan)

    def _close(self, reason: str) -> None:
        self._channels.manager.count(reason)
        self.abort()


def _close_copies() -> None:
    for inherited in list(_sockets):
        with contextlib.suppress(OSError):
            os.close(inherited.detach())


after_fork_in_child(_close_copies)
