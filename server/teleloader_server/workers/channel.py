"""Channels for messages and file descriptors between the server, its fork server and its workers.

A channel is one end of a Unix stream socket pair. Messages are self-delimiting msgpack values; a file descriptor is
sent together with its message (SCM_RIGHTS). Both ends are processes of the same server, so input is trusted.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
import struct
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgpack

_MAX_FDS = 64
_MAX_PIECES = 64
"""Maximum number of message pieces that are sent by one system call."""
_LARGE_BYTES = 64 * 1024
"""Minimum size of bytes objects that are sent without a copy: copying megabytes would block the event loop."""
_BIN32_HEAD = struct.Struct(">BI")
_BIN32 = 0xC6
_open_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


class Channel:
    """One end of a message channel between two processes of the server; blocking if its socket is blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._packer = msgpack.Packer()
        """Reused for all messages: a new Packer allocates 256 KiB, which the C library may return to the kernel."""
        self._unpacker = msgpack.Unpacker(max_buffer_size=2**31 - 1)
        self._fds: deque[int | None] = deque()
        """Received file descriptors, in order; None for a descriptor dropped because of the limit on open files."""
        self._unsent: deque[memoryview] = deque()
        _open_channels.add(self)

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """Create a non-blocking channel for this process, and the socket of the other end for another process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        return Channel(ours), theirs

    def fileno(self) -> int:
        """Return the file descriptor of the socket, or -1 if the channel is closed."""
        return self._socket.fileno()

    def receive(self) -> list[Any]:
        """Receive data once, and return the messages that are complete; the list can be empty.

        Raises:
            EOFError: If the other end is closed, or its process has exited.
            BlockingIOError: If no data is available, and the socket is non-blocking.
        """
        # forked processes share O_NONBLOCK with this one: the flag of the call, and not of the socket, holds
        no_wait = 0 if self._socket.gettimeout() is None else socket.MSG_DONTWAIT
        try:
            data, fds, flags, _ = socket.recv_fds(self._socket, 1 << 16, _MAX_FDS, no_wait)
        except ConnectionResetError:
            data, fds, flags = b"", [], 0
        if not data:
            raise EOFError
        self._fds.extend(fds)
        if (
            flags & socket.MSG_CTRUNC
        ):  # a descriptor was dropped: its message must not get the next message's descriptor
            self._fds.append(None)
        self._unpacker.feed(data)
        return list(self._unpacker)

    def take_fd(self) -> int:
        """Return the file descriptor received with the current message; the caller must close it.

        Raises:
            OSError: If the descriptor was dropped because of the limit on open files.
        """
        found = self._fds.popleft() if self._fds else None
        if found is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return found

    def put(self, message: Any) -> None:
        """Queue a message for the next `flush`. A large bytes object is not copied if it is the last item of a list."""
        if type(message) is list and message and type(message[-1]) is bytes and len(message[-1]) >= _LARGE_BYTES:
            *items, last = message
            head = self._packer.pack_array_header(len(message)) + b"".join(map(self._packer.pack, items))
            self._unsent.append(memoryview(head + _BIN32_HEAD.pack(_BIN32, len(last))))
            self._unsent.append(memoryview(last))
            return
        self._unsent.append(memoryview(self._packer.pack(message)))

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send all queued messages, then this message with its file descriptors, and wait until all are sent."""
        if fds:
            # descriptors are attached to the first byte of their message, so queued messages must be sent first
            self.send_all()
            data = self._packer.pack(message)
            sent = 0
            while not sent:
                try:
                    sent = socket.send_fds(self._socket, [data], list(fds), socket.MSG_DONTWAIT)
                except BlockingIOError:
                    self._await_writable()
                except (BrokenPipeError, ConnectionResetError):
                    return
            if sent < len(data):
                self._unsent.append(memoryview(data)[sent:])
        else:
            self.put(message)
        self.send_all()

    def send_all(self) -> None:
        """Send all queued messages, and wait until they are sent."""
        while not self.flush():
            self._await_writable()

    def _await_writable(self) -> None:
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        writable.poll()

    def flush(self) -> bool:
        """Send queued messages; return False if messages remain until the socket is writable.

        Messages to a process that has exited are not sent, and cause no error: `receive` reports the exit.
        """
        try:
            while self._unsent:
                sent = self._socket.sendmsg(list(islice(self._unsent, _MAX_PIECES)), (), socket.MSG_DONTWAIT)
                while sent:
                    first = self._unsent.popleft()
                    if sent < len(first):
                        self._unsent.appendleft(first[sent:])
                    sent -= min(sent, len(first))
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            self._unsent.clear()
        return True

    def hang_up(self) -> None:
        """Shut down both directions, including copies of the socket in forked processes; then close the socket."""
        with suppress(OSError):  # already closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Close the socket, and all received file descriptors that were not taken with `take_fd`."""
        _open_channels.discard(self)
        self._socket.close()
        for fd in self._fds:
            if fd is not None:
                os.close(fd)
        self._fds.clear()


def close_inherited(keep: Channel) -> None:
    """Close inherited channels and network sockets in a forked process, except the channel `keep`.

    Otherwise the forked process would keep client connections open after the server's exit, and the listening socket
    would accept connections that no process serves.
    """
    for channel in list(_open_channels):
        if channel is not keep:
            channel._socket.close()
    nothing = os.open(os.devnull, os.O_RDWR)
    for entry in list(Path("/proc/self/fd").iterdir()):
        fd = int(entry.name)
        with suppress(OSError):  # the descriptor of the directory listing itself is already closed
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and _family(fd) in (socket.AF_INET, socket.AF_INET6):
                # replaced and not closed: inherited Python objects still refer to this descriptor, and would later
                # close another file that reuses its number
                os.dup2(nothing, fd)
    os.close(nothing)


def _family(fd: int) -> int:
    probe = socket.socket(fileno=os.dup(fd))
    try:
        return probe.family
    finally:
        probe.close()
