"""Messages and file descriptors between the server, its template process and its workers.

A channel is one end of a Unix stream socket pair. Messages are msgpack values, which frame themselves; a file
descriptor travels beside the message that it belongs to (SCM_RIGHTS). Both ends are processes of the same server, so
there is nothing hostile here.
"""

from __future__ import annotations

import errno
import os
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
"""Pieces of messages that are sent by one system call."""
_LARGE_BYTES = 64 * 1024
"""Bytes objects of this size are sent from where they are: copying megabytes would hold the event loop."""
_BIN32_HEAD = struct.Struct(">BI")
_BIN32 = 0xC6
_open_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


class Channel:
    """One end. Blocking or not as its socket is: `setblocking`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._packer = msgpack.Packer()
        """Reused: each Packer allocates and frees 256 KiB, which the C library may return to the kernel every time."""
        self._unpacker = msgpack.Unpacker(max_buffer_size=2**31 - 1)
        self._fds: deque[int | None] = deque()
        """Descriptors that came, in order; None for one that this process had no room for."""
        self._unsent: deque[memoryview] = deque()
        _open_channels.add(self)

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """A channel that never blocks, and the socket of its other end, to be handed to another process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        return Channel(ours), theirs

    def fileno(self) -> int:
        """The file descriptor, to wait on; -1 when closed."""
        return self._socket.fileno()

    def receive(self) -> list[Any]:
        """The messages that have arrived, perhaps none: the first bytes to come may be a part of one.

        Raises:
            EOFError: When the other end is closed, or its process has ended.
            BlockingIOError: When nothing has come and the socket does not block.
        """
        try:
            data, fds, flags, _ = socket.recv_fds(self._socket, 1 << 16, _MAX_FDS)
        except ConnectionResetError:
            data, fds, flags = b"", [], 0
        if not data:
            raise EOFError
        self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:  # or the message would be given the descriptor of the next one
            self._fds.append(None)
        self._unpacker.feed(data)
        return list(self._unpacker)

    def take_fd(self) -> int:
        """The file descriptor that came with the message at hand; the caller closes it.

        Raises:
            OSError: When the system had none to give.
        """
        found = self._fds.popleft() if self._fds else None
        if found is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return found

    def put(self, message: Any) -> None:
        """Keep a message for the next `flush`; a large bytes object at the end of a list is not copied."""
        if type(message) is list and message and type(message[-1]) is bytes and len(message[-1]) >= _LARGE_BYTES:
            *items, last = message
            head = self._packer.pack_array_header(len(message)) + b"".join(map(self._packer.pack, items))
            self._unsent.append(memoryview(head + _BIN32_HEAD.pack(_BIN32, len(last))))
            self._unsent.append(memoryview(last))
            return
        self._unsent.append(memoryview(self._packer.pack(message)))

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message with its file descriptors, and what was put before it, waiting until it is sent."""
        timeout = self._socket.gettimeout()
        self._socket.settimeout(None)
        try:
            if fds:
                # descriptors belong to the first byte of their message, so what stands before it must go first
                self.flush()
                data = self._packer.pack(message)
                with suppress(BrokenPipeError, ConnectionResetError):
                    sent = socket.send_fds(self._socket, [data], list(fds))
                    if sent < len(data):
                        self._unsent.append(memoryview(data)[sent:])
            else:
                self.put(message)
            self.flush()
        finally:
            self._socket.settimeout(timeout)

    def flush(self) -> bool:
        """Send what can be sent; False when some of it must wait until the socket is writable.

        A message to a process that has ended goes nowhere: its end is seen by `receive`.
        """
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._unsent:
                sent = self._socket.sendmsg(list(islice(self._unsent, _MAX_PIECES)))
                while sent:
                    first = self._unsent.popleft()
                    if sent < len(first):
                        self._unsent.appendleft(first[sent:])
                    sent -= min(sent, len(first))
        return not self._unsent

    def hang_up(self) -> None:
        """Close it, and end it for the other side too, whoever else holds a copy: user code may have forked since."""
        with suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Close the socket and the descriptors that nobody took."""
        _open_channels.discard(self)
        self._socket.close()
        for fd in self._fds:
            if fd is not None:
                os.close(fd)
        self._fds.clear()


def close_inherited(keep: Channel) -> None:
    """In a process that was just forked: close the parent's other channels and its network sockets.

    A forked process that keeps a client's connection open hides the server's death from that client; one that keeps
    the listening socket goes on accepting connections that nobody serves.
    """
    for channel in list(_open_channels):
        if channel is not keep:
            channel._socket.close()
    nothing = os.open(os.devnull, os.O_RDWR)
    for entry in list(Path("/proc/self/fd").iterdir()):
        fd = int(entry.name)
        with suppress(OSError):  # the descriptor of the listing itself is gone already
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and _family(fd) in (socket.AF_INET, socket.AF_INET6):
                # not closed but replaced: the parent's Python objects still name this descriptor, and would close
                # whatever had its number next
                os.dup2(nothing, fd)
    os.close(nothing)


def _family(fd: int) -> int:
    probe = socket.socket(fileno=os.dup(fd))
    try:
        return probe.family
    finally:
        probe.close()
