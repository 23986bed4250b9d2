"""The client's TLS socket: large reads, and the same ends, errors and timeouts as those of ``ssl.SSLSocket``."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from teleloader.api.credentials import Credentials
from teleloader.tensors.memory import HostBuffers
from teleloader.transport.request import BatchRequest
from teleloader.transport.selection import server_at
from teleloader.transport.tls import READ_BYTES, TlsSocket
from teleloader_shared.buffers import BufferPool
from teleloader_shared.messages import ConsumerReport
from teleloader_shared.ranges import BatchRanges
from tests.conftest import eventually
from tests.end_to_end.certificates import Files

CONTENT = bytes(range(256)) * 400
"""More than six TLS records, and less than what a socket buffers."""


class Peer:
    """Server side of a TLS connection, which decides what is sent at once."""

    def __init__(self, connection: socket.socket, files: Files) -> None:
        self.connection = connection
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*files.make("server", "127.0.0.1"))
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=True)

    def shake_hands(self) -> None:
        """Complete the handshake, or send an alert."""
        while True:
            with suppress(ssl.SSLWantReadError):
                self.tls.do_handshake()
                self.connection.sendall(self.outgoing.read())
                return
            self.connection.sendall(self.outgoing.read())
            self.receive()

    def receive(self) -> None:
        """Receive bytes from the client, or the end of the stream."""
        self.incoming.write(got := self.connection.recv(2**16))
        if not got:
            self.incoming.write_eof()

    def received(self) -> bytes:
        """Receive and decrypt some bytes."""
        while True:
            with suppress(ssl.SSLWantReadError):
                return bytes(self.tls.read(2**16))
            self.receive()

    def encrypted(self, content: bytes) -> bytes:
        """Encrypt bytes without sending them."""
        self.tls.write(content)
        return self.outgoing.read()

    def goodbye(self) -> bytes:
        """Return TLS's closing message without sending it."""
        with suppress(ssl.SSLWantReadError):
            self.tls.unwrap()
        return self.outgoing.read()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Create a CA."""
    return Files(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def both(files: Files) -> Iterator[tuple[TlsSocket, Peer]]:
    """Return both ends of a TLS connection."""
    ends = socket.socketpair()
    ends[0].settimeout(30)
    peer = Peer(ends[1], files)
    thread = threading.Thread(target=peer.shake_hands)
    thread.start()
    with TlsSocket(ends[0], Credentials(ca=files.ca).context(), "127.0.0.1") as client, ends[1]:
        thread.join()
        yield client, peer


def test_many_records_are_received_at_once(both: tuple[TlsSocket, Peer]) -> None:
    """One call returns everything that has arrived, not one record of 16 KiB."""
    client, peer = both
    peer.connection.sendall(peer.encrypted(CONTENT))
    buffer = bytearray(2 * len(CONTENT))
    assert client.recv_into(buffer) == len(CONTENT)
    assert buffer[: len(CONTENT)] == CONTENT
    assert len(CONTENT) < READ_BYTES


@pytest.mark.parametrize("size", [1, 100, 16 * 1024, 16 * 1024 + 1, 50_000])
def test_reads_of_any_size_return_all_bytes_in_order(both: tuple[TlsSocket, Peer], size: int) -> None:
    """Bytes that do not fit are returned by the next call, and are known to have been received."""
    client, peer = both
    content = CONTENT[:1000] if size == 1 else CONTENT
    peer.connection.sendall(peer.encrypted(content))
    buffer = bytearray(size)
    found = bytearray()
    while len(found) < len(content):
        found += buffer[: client.recv_into(buffer)]
        assert client.has_received == (len(found) < len(content))
    assert found == content


def test_what_is_sent_is_encrypted(both: tuple[TlsSocket, Peer]) -> None:
    """The peer receives all bytes of a large message in order."""
    client, peer = both
    thread = threading.Thread(target=client.sendall, args=(20 * CONTENT,))
    thread.start()
    found = bytearray()
    while len(found) < 20 * len(CONTENT):
        found += peer.received()
    thread.join()
    assert found == 20 * CONTENT


def test_an_incomplete_record_does_not_block_a_non_blocking_socket(both: tuple[TlsSocket, Peer]) -> None:
    """Until a record is complete, a non-blocking read raises SSLWantReadError, and a blocking one its timeout."""
    client, peer = both
    encrypted = peer.encrypted(b"content")
    buffer = bytearray(100)
    client.settimeout(0)
    for part in (b"", encrypted[:3], encrypted[3:-1]):
        peer.connection.sendall(part)
        with pytest.raises(ssl.SSLWantReadError):
            client.recv_into(buffer)
    client.settimeout(0.01)
    with pytest.raises(TimeoutError):
        client.recv_into(buffer)
    peer.connection.sendall(encrypted[-1:])
    assert client.recv_into(buffer) == 7
    assert buffer[:7] == b"content"


@pytest.mark.parametrize("end", ["closing message", "end of the stream", "within a record"])
def test_the_end_of_a_connection_is_no_error(both: tuple[TlsSocket, Peer], end: str) -> None:
    """All complete records are returned, then 0 bytes."""
    client, peer = both
    encrypted = peer.encrypted(b"content")
    cut = peer.encrypted(b"more")[:-1] if end == "within a record" else b""
    peer.connection.sendall(encrypted + (peer.goodbye() if end == "closing message" else cut))
    if end != "closing message":
        peer.connection.shutdown(socket.SHUT_WR)
    buffer = bytearray(100)
    assert client.recv_into(buffer) == 7
    assert [client.recv_into(buffer), client.recv_into(buffer)] == [0, 0]


def test_damaged_records_are_refused(both: tuple[TlsSocket, Peer]) -> None:
    """A changed byte raises SSLError."""
    client, peer = both
    encrypted = bytearray(peer.encrypted(b"content"))
    encrypted[-1] ^= 1
    peer.connection.sendall(encrypted)
    with pytest.raises(ssl.SSLError):
        client.recv_into(bytearray(100))


def test_another_thread_can_shut_the_connection_down(both: tuple[TlsSocket, Peer]) -> None:
    """A waiting read returns 0 bytes."""
    client, _ = both
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(client.recv_into(bytearray(100))))
    thread.start()
    client.shutdown(socket.SHUT_RDWR)
    thread.join(30)
    assert found == [0]


@pytest.mark.parametrize("name", ["localhost", "127.0.0.2"])
def test_a_failed_handshake_closes_the_socket(files: Files, name: str) -> None:
    """The certificate must contain the name; the server is told the reason, and no descriptor stays open."""
    ours, theirs = socket.socketpair()
    descriptor = ours.fileno()
    peer = Peer(theirs, files)
    told: list[ssl.SSLError] = []

    def shake_hands() -> None:
        try:
            peer.shake_hands()
            peer.received()
        except ssl.SSLError as error:
            told.append(error)

    thread = threading.Thread(target=shake_hands)
    thread.start()
    with pytest.raises(ssl.SSLCertVerificationError, match=name):
        TlsSocket(ours, Credentials(ca=files.ca).context(), name)
    thread.join()
    assert "alert" in str(told[0]).lower()
    assert ours.fileno() == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        socket.socket(fileno=descriptor)
    theirs.close()


@contextmanager
def serving(files: Files, last: str) -> Iterator[str]:
    """Answer one request with a response, and with it send TLS's closing message if `last` is so; return the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            peer = Peer(listening.accept()[0], files)
            peer.shake_hands()
            peer.received()
            head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(CONTENT)
            answer = peer.encrypted(head + CONTENT)
            peer.connection.sendall(answer + (peer.goodbye() if last == "closing message" else b""))
            with suppress(OSError, ssl.SSLError):
                peer.received()  # until the client closes the connection
            peer.connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"https://127.0.0.1:{listening.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("last", ["nothing", "closing message"])
def test_a_connection_that_the_server_closes_after_a_response_is_not_used_again(files: Files, last: str) -> None:
    """The closing message may be received together with the response, so it does not make the socket readable."""
    with serving(files, last) as url:
        server = server_at(url, 10, Credentials(ca=files.ca))
        connection = server.connect("key", 0, "test", lambda: ConsumerReport(0, 0, 0, 0, 0))
        connection.send(BatchRequest(BatchRanges(range(1))))
        memory = connection.receive(HostBuffers("numpy", BufferPool()), 1, 2**20)
        assert memory.data.tobytes() == CONTENT
        if last == "nothing":
            assert connection.is_usable
        else:
            eventually(lambda: not connection.is_usable)
        connection.close()
