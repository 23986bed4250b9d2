"""Batches in shared memory, lent by a server on the same machine (docs/protocol.md, "Shared memory").

Requests stay on HTTP. The registration of a loader names a Unix socket of the server; if this process can connect to
it and the server proves its identity, requests name the channel. Their responses may then lack the frame, whose
descriptor arrives on the channel. Wherever this is impossible, responses contain the frame.

Frames are mapped copy-on-write: other processes do not see changes. The pages are mapped at once, because a page fault
for each page costs twice as much. A slot is given back when the last array that views it is garbage-collected.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hmac
import mmap
import os
import socket
import sys
import weakref
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from teleloader.tensors.memory import HostBuffers
from teleloader.transport.interface import TransportError
from teleloader_shared.codec import Memory
from teleloader_shared.errors import CorruptFrame, ProtocolError
from teleloader_shared.forks import after_fork_in_child
from teleloader_shared.handoff import (
    CHANNEL_HEADER,
    GIVE_BACK,
    HELLO,
    LOAN,
    WELCOME,
    Offer,
    channel_name,
    server_proof,
)

assert sys.platform == "linux", "other systems have no memfd"  # noqa: S101 - excludes the module from their type checks

HANDSHAKE_TIMEOUT: Final = 5.0
"""Timeout of the handshake in seconds, after which the connection receives frames over HTTP."""
_SEALS: Final = 0x17
"""F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_FUTURE_WRITE: a slot that shrinks would end this process."""
_MADV_POPULATE_READ: Final = 22
_NONCE_BYTES: Final = 16

_channels: weakref.WeakSet[LoanChannel] = weakref.WeakSet()
"""Open channels of this process."""


class LoanChannel:
    """Connection on which a server lends slots to this process, for one HTTP connection at a time.

    Args:
        connected: Socket after the handshake.
        name: Name of the channel.
    """

    def __init__(self, connected: socket.socket, name: str) -> None:
        connected.setblocking(False)
        self.headers: Final = {CHANNEL_HEADER: name}
        """Headers of requests whose responses may lend a slot."""
        self._socket = connected
        self._lent: set[int] = set()
        """Numbers of the loans that were not given back."""
        self._is_closing = False
        _channels.add(self)

    @property
    def is_open(self) -> bool:
        """False if the server has closed the channel."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def receive(self, record: bytes, buffers: HostBuffers, max_bytes: int) -> Memory:
        """Receive the frame of a response without a frame.

        Args:
            record: Body of the response.
            buffers: Allocator of memory; with page-locked memory, the frame is copied to it.
            max_bytes: Maximum size of the frame.

        Raises:
            TransportError: If the channel broke.
            CorruptFrame: If the response was damaged.
            ProtocolError: If the server sent an invalid loan.
        """
        number, nbytes, descriptor = self._next_loan()
        give_back = functools.partial(self._give_back, number)
        try:
            _check_record(record, number)
            _check_slot(descriptor, nbytes, max_bytes)
            if buffers.pinned is None:
                return buffers.pageable(_mapped(descriptor, nbytes, give_back))
            memory = buffers.take(nbytes, 1)
            _read(descriptor, memory.data)
        except BaseException:
            give_back()
            raise
        finally:
            os.close(descriptor)
        give_back()
        return memory

    def _next_loan(self) -> tuple[int, int, int]:
        """Return number, size and descriptor of the next loan, which the server sent before its response."""
        try:
            data, descriptors, _flags, _address = socket.recv_fds(self._socket, LOAN.size, 1)
        except OSError as error:
            raise TransportError(f"the shared-memory channel broke: {error}") from error
        if len(data) != LOAN.size:
            raise TransportError("the server closed the shared-memory channel")
        number, nbytes = LOAN.unpack(data)
        self._lent.add(number)
        if not descriptors:  # the limit on open files is reached
            self._give_back(number)
            raise TransportError("a descriptor for shared memory was not received: increase the limit on open files")
        return number, nbytes, descriptors[0]

    def _give_back(self, number: int) -> None:
        """Give a slot back; runs in finalizers, in any thread and at any moment, so it acquires no lock."""
        if number not in self._lent:
            return
        with suppress(OSError):  # the server has closed the channel, or this is a forked child, which has no channel
            self._socket.send(GIVE_BACK.pack(number))
        self._lent.discard(number)
        if self._is_closing and not self._lent:
            self._socket.close()

    def close(self) -> None:
        """End the channel once all its slots are given back."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)  # the server lends nothing more
        with suppress(TransportError):
            while True:  # loans of responses that were not received
                number, _nbytes, descriptor = self._next_loan()
                os.close(descriptor)
                self._give_back(number)
        self._is_closing = True
        if not self._lent:
            self._socket.close()

    def close_copy(self) -> None:
        """Close a forked child's copy of the socket: the child must not give the parent's slots back."""
        with suppress(OSError):
            os.close(self._socket.detach())


def connect(offer: str | None) -> LoanChannel | None:
    """Open a channel to the server that made an offer in a registration.

    Returns:
        The channel; None if the server is on another machine or in another network namespace, or made no valid offer.
    """
    parsed = None if offer is None else Offer.parse(offer)
    if parsed is None:
        return None
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.settimeout(HANDSHAKE_TIMEOUT)
        connected.connect(f"\0{parsed.socket_name}")
        nonce = os.urandom(_NONCE_BYTES)
        connected.sendall(HELLO.pack(parsed.identifier, nonce))
        welcome = connected.recv(WELCOME.size)
        if len(welcome) == WELCOME.size:
            server_nonce, proof = WELCOME.unpack(welcome)
            nonces = nonce + server_nonce
            if hmac.compare_digest(proof, server_proof(parsed.key, nonces)):
                return LoanChannel(connected, channel_name(parsed.key, nonces))
    except OSError:
        pass  # frames arrive over HTTP
    connected.close()
    return None


def _check_record(record: bytes, number: int) -> None:
    """Check that a response names a loan; raise CorruptFrame if it does not."""
    if record != GIVE_BACK.pack(number):
        raise CorruptFrame(f"the response does not name loan {number} of shared memory")


def _check_slot(descriptor: int, nbytes: int, max_bytes: int) -> None:
    """Check that a descriptor is a memfd of at least `nbytes` bytes whose size cannot change.

    Raises:
        ProtocolError: If it is not, or if `nbytes` is not in [1, max_bytes].
    """
    size = os.fstat(descriptor).st_size
    try:
        is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        is_sealed = False  # the descriptor is not a memfd
    if not is_sealed or not 0 < nbytes <= min(size, max_bytes):
        raise ProtocolError(
            f"invalid shared memory with {nbytes:,} of {size:,} bytes in use: expected a sealed memfd with 1 to "
            f"{max_bytes:,} bytes in use. If batches are larger, increase max_batch_bytes of the DataLoader"
        )


def _read(descriptor: int, into: NDArray[np.uint8]) -> None:
    filled = 0
    while filled < len(into):
        got = os.preadv(descriptor, [into[filled:].data], filled)
        if not got:
            raise TransportError(f"the slot is truncated: expected {len(into):,} bytes, got {filled:,}")
        filled += got


def _mapped(descriptor: int, nbytes: int, released: Any) -> NDArray[np.uint8]:
    """Map the start of a slot copy-on-write; unmap it and call `released` when all views of the array are freed."""
    libc = _libc()
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise TransportError(f"cannot map shared memory: {os.strerror(ctypes.get_errno())}")
    # not MAP_POPULATE, which copies every page of a writable private mapping
    libc.madvise(address, nbytes, _MADV_POPULATE_READ)  # before Linux 5.14, pages are mapped at their first use
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(memory, _unmap, libc, address, nbytes, released).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8)


def _unmap(libc: Any, address: int, nbytes: int, released: Any) -> None:
    libc.munmap(address, nbytes)
    released()


@functools.cache
def _libc() -> Any:
    # not CPython's mmap, whose memory is still mapped when its finalizers run
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _close_copies() -> None:
    for channel in list(_channels):
        channel.close_copy()


after_fork_in_child(_close_copies)
