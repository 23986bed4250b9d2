"""Client side of TLS over a TCP socket, with large reads from the kernel."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from typing import Any, Final, cast

READ_BYTES: Final = 256 * 1024
"""Size of a read from the kernel, in bytes: small enough to be decrypted from the processor's cache."""


class TlsSocket(socket.socket):
    """TLS connection to a server; `recv_into` and `sendall` transfer decrypted bytes, as those of ``ssl.SSLSocket``.

    ``ssl.SSLSocket`` receives each TLS record (16 KiB) with its own system calls and returns it alone. This class
    receives many records with one call, and decrypts as many of them as fit into the caller's buffer.

    Args:
        plain: Connected TCP socket, which is detached.
        context: Settings, and certificates to verify the server with.
        server_hostname: Name that the server's certificate must contain.

    Raises:
        OSError: If the handshake fails; an ``ssl.SSLError`` unless the connection broke.
    """

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, server_hostname: str) -> None:
        timeout = plain.gettimeout()
        super().__init__(plain.family, plain.type, plain.proto, fileno=plain.detach())
        try:
            self.settimeout(timeout)
            self._encrypted = memoryview(bytearray(READ_BYTES))
            self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=server_hostname)
            self._shake_hands()
        except BaseException:
            self.close()
            raise

    @property
    def has_received(self) -> bool:
        """True if bytes have been received from the kernel that `recv_into` has not returned."""
        return self._incoming.pending > 0 or self._tls.pending() > 0

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive up to ``len(buffer)`` decrypted bytes; return their number, which is 0 at the end of the stream.

        A connection that ends without TLS's closing message counts as ended: the length of the HTTP response shows
        whether bytes are missing.

        Raises:
            ssl.SSLWantReadError: If the socket is non-blocking and no decrypted byte has arrived.
            TimeoutError: If no bytes arrive within the socket's timeout.
            ssl.SSLError: If the received bytes are not valid.
        """
        view = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(view):
            try:
                got = cast("int", self._tls.read(len(view) - filled, view[filled:]))  # one record at most
            except ssl.SSLWantReadError:
                if filled:
                    break
                self._receive()
                continue
            except ssl.SSLEOFError:
                break
            if not got:
                break
            filled += got
        return filled

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Encrypt and send all bytes."""
        self._tls.write(data)
        self._flush()

    def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._receive()
            except ssl.SSLError:
                with suppress(OSError):
                    self._flush()  # the alert that tells the server the reason
                raise
        self._flush()

    def _receive(self) -> None:
        """Receive encrypted bytes from the kernel, after sending those that wait to be sent."""
        self._flush()
        try:
            got = super().recv_into(self._encrypted)
        except BlockingIOError:
            raise ssl.SSLWantReadError from None
        if got:
            self._incoming.write(self._encrypted[:got])
        else:
            self._incoming.write_eof()

    def _flush(self) -> None:
        if self._outgoing.pending:
            super().sendall(self._outgoing.read())
