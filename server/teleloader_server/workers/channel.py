"""Messages and file descriptors between the server, its fork server and its workers.

A channel is one end of a Unix stream socket pair. Messages are msgpack values, which frame themselves; a file
descriptor travels beside the message that it belongs to (SCM_RIGHTS). Both ends are processes of the same server, so
nothing here is hostile.
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
    """One end of a channel; blocking or not, as its socket is."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._packer = msgpack.Packer()
        """Reused: each Packer allocates and frees 256 KiB, which the C library may return to the kernel every time."""
        self._unpacker = msgpack.Unpacker(max_buffer_size=2**31 - 1)
        self._fds: deque[int | None] = deque()
        """Received descriptors, in order; None for one that exceeded the limit of open files."""
        self._unsent: deque[memoryview] = deque()
        _open_channels.add(self)

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """Return a channel that never blocks, and the socket of its other end for another process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        return Channel(ours), theirs

    def fileno(self) -> int:
        """Return the file descriptor; -1 if closed."""
        return self._socket.fileno()

    def receive(self) -> list[Any]:
        """Return the messages that have arrived: none if only a part of one has.

        Raises:
            EOFError: If the other end is closed, or its process has ended.
            BlockingIOError: If nothing has arrived and the socket does not block.
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
        """Return the file descriptor that came with the current message; the caller closes it.

        Raises:
            OSError: If the limit of open files prevented its receipt.
        """
        found = self._fds.popleft() if self._fds else None
        if found is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return found

    def put(self, message: Any) -> None:
        """Queue a message for the next `flush`; a large bytes object at the end of a list is not copied."""
        if type(message) is list and message and type(message[-1]) is bytes and len(message[-1]) >= _LARGE_BYTES:
            *items, last = message
            head = self._packer.pack_array_header(len(message)) + b"".join(map(self._packer.pack, items))
            self._unsent.append(memoryview(head + _BIN32_HEAD.pack(_BIN32, len(last))))
            self._unsent.append(memoryview(last))
            return
        self._unsent.append(memoryview(self._packer.pack(message)))

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send queued messages, then this one with its file descriptors, and wait until all are sent."""
        timeout = self._socket.gettimeout()
        self._socket.settimeout(None)
        try:
            if fds:
                # descriptors belong to the first byte of their message, so queued messages must go first
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
        """Send as much as possible; return False if the rest must wait until the socket is writable.

        A message to a process that has ended is dropped: `receive` reports the end.
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
        """Close the connection for both sides, even if a process that user code forked holds a copy."""
        with suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Close the socket and the descriptors that were not taken."""
        _open_channels.discard(self)
        self._socket.close()
        for fd in self._fds:
            if fd is not None:
                os.close(fd)
        self._fds.clear()


def close_inherited(keep: Channel) -> None:
    """Close the parent's other channels and its network sockets, in a forked process.

    A forked process that keeps a client's connection open hides the server's death from that client; one that keeps
    the listening socket accepts connections that nothing serves.
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
