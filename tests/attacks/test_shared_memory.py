"""Attacks on shared memory: what a client can read, change and occupy with a lent slot, and a server with its offer."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from teleloader.tensors.memory import HostBuffers
from teleloader.transport import handoff
from teleloader.transport.interface import TransportError
from teleloader_server.workers.lendable import SEALS, LendableSlot
from teleloader_shared.buffers import BufferPool
from teleloader_shared.errors import ProtocolError
from teleloader_shared.handoff import (
    CHANNEL_HEADER,
    GIVE_BACK,
    HELLO,
    LOAN,
    LOAN_MEDIA_TYPE,
    WELCOME,
    Offer,
    channel_name,
    server_proof,
)
from teleloader_shared.messages import PROTOCOL_HEADER, batches_path
from teleloader_shared.spec import LoaderSpec
from tests.conftest import ServerProcess, eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="requires memfd")

SLOT = 3 * 2**20
TOKENS = {name: f"the-token-of-{name}-in-tests" for name in ("alice", "bob")}
PUNCH_HOLE = 0x03
"""FALLOC_FL_PUNCH_HOLE with FALLOC_FL_KEEP_SIZE."""


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Return a token file with two tokens."""
    path = tmp_path / "tokens.toml"
    path.touch(0o600)
    path.write_text("".join(
        f'[{name}]\ntoken = "{token}"\nscopes = ["read", "stats"]\n' for name, token in TOKENS.items()
    ))  # fmt: skip
    return path


@contextmanager
def running(tokens: Path, *options: str) -> Iterator[ServerProcess]:
    """Run a server with one worker and a memory budget of a few slots."""
    server = ServerProcess(
        "--port", "0", "images=tests.end_to_end.hosted:images", "small=tests.end_to_end.hosted:small_images",
        "tiny=tests.end_to_end.hosted:numbers",
        "--num-workers", "1", "--memory-budget", "32MiB",
        "--tokens", str(tokens), *options,
    )  # fmt: skip
    try:
        yield server
    finally:
        server.end()


@pytest.fixture
def server(tokens: Path) -> Iterator[ServerProcess]:
    """Run a server."""
    with running(tokens) as found:
        yield found


class Lent(NamedTuple):
    """Loan of an attacker."""

    number: int
    nbytes: int
    descriptor: int

    def read(self) -> bytes:
        """Return the content of the slot."""
        return os.pread(self.descriptor, self.nbytes, 0)


OPEN: list[socket.socket | httpx.Client] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close the connections of all attackers."""
    yield
    while OPEN:
        OPEN.pop().close()


class Attacker:
    """Client with a valid token that sends any messages.

    Args:
        url: URL of the server.
        name: Name of the token.
        dataset: Name of the dataset.
    """

    def __init__(self, url: str, name: str = "alice", dataset: str = "images") -> None:
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKENS[name]}"})
        OPEN.append(self.http)
        info = self.http.get(f"/v1/datasets/{dataset}").raise_for_status().json()
        spec = LoaderSpec(dataset=info["name"], batch_size=1, seed=0, fingerprint=info["fingerprint"])
        registered = self.http.post("/v1/loaders", json=spec.to_json(), headers={PROTOCOL_HEADER: "1"}).json()
        self._path = batches_path(registered["key"], 0)
        offer = Offer.parse(registered["handoff"])
        assert offer is not None
        self.offer = offer
        self.channel, self.name = self.connect()

    def connect(self) -> tuple[socket.socket, str]:
        """Open a channel; return its socket and name."""
        channel = self.open()
        nonce = secrets.token_bytes(16)
        channel.send(HELLO.pack(self.offer.identifier, nonce))
        server_nonce, proof = WELCOME.unpack(channel.recv(100))
        assert proof == server_proof(self.offer.key, nonce + server_nonce)
        return channel, channel_name(self.offer.key, nonce + server_nonce)

    def open(self) -> socket.socket:
        """Connect to the Unix socket, without a handshake."""
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        OPEN.append(channel)
        channel.settimeout(10)
        channel.connect(f"\0{self.offer.socket_name}")
        return channel

    def request(self, k: int, name: str | None = None) -> httpx.Response:
        """Request a batch on a channel."""
        return self.http.get(
            self._path,
            params={"ranges": f"{k}:{k + 1}", "ready": "true"},
            headers={CHANNEL_HEADER: self.name if name is None else name},
        )

    def borrow(self, k: int) -> Lent:
        """Request a batch, and receive its slot."""
        response = self.request(k).raise_for_status()
        assert response.headers["content-type"] == LOAN_MEDIA_TYPE
        data, (descriptor,), _, _ = socket.recv_fds(self.channel, LOAN.size, 1)
        assert response.content == data[: GIVE_BACK.size]
        number, nbytes = LOAN.unpack(data)
        return Lent(number, nbytes, descriptor)

    def give_back(self, loan: Lent) -> None:
        """Give a slot back, and keep the descriptor."""
        self.channel.send(GIVE_BACK.pack(loan.number))

    def is_disconnected(self) -> bool:
        """Wait until the server closes the channel."""
        with suppress(ConnectionResetError):
            while self.channel.recv(100):
                pass
        return True

    def lent(self) -> int:
        """Return the size of all lent slots."""
        return int(self.http.get("/stats").json()["server"]["memory_lent"])


def test_a_lent_slot_cannot_be_changed(server: ServerProcess) -> None:
    """A descriptor permits reading only, even if it is opened again for writing by the same user."""
    loan = Attacker(server.url).borrow(0)
    before = loan.read()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    assert fcntl.fcntl(loan.descriptor, fcntl.F_GETFL) & os.O_ACCMODE == 0
    path = f"/proc/self/fd/{loan.descriptor}"
    opened = [loan.descriptor]
    with suppress(PermissionError):
        opened.append(os.open(path, os.O_RDWR))
    with suppress(PermissionError):
        opened.append(os.open(path, os.O_WRONLY))
    for descriptor in opened:
        for change in (
            lambda fd: os.write(fd, b"x"),
            lambda fd: os.pwrite(fd, b"x", 0),
            lambda fd: os.ftruncate(fd, 0),
            lambda fd: os.ftruncate(fd, 2**30),
            lambda fd: mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
            lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
            lambda fd: os.posix_fallocate(fd, 0, 2**30),
        ):
            with pytest.raises((OSError, ValueError)):
                change(descriptor)
        assert libc.fallocate(descriptor, PUNCH_HOLE, 0, 4096) == -1
        assert ctypes.get_errno() in (errno.EPERM, errno.EBADF)
    with pytest.raises(OSError, match=r"Operation not permitted|Permission denied|Text file busy"):
        os.truncate(path, 0)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for descriptor in opened[:2]:
        mapped = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        assert libc.mprotect(mapped, 4096, mmap.PROT_READ | mmap.PROT_WRITE) == -1
    assert loan.read() == before


def test_a_kept_descriptor_shows_nothing_later(server: ServerProcess) -> None:
    """A slot whose descriptor was kept is not written again, and counts until the descriptor is closed."""
    attacker, other = Attacker(server.url), Attacker(server.url, "bob")
    loans = [attacker.borrow(k) for k in range(3)]
    before = [loan.read() for loan in loans]
    for loan in loans:
        attacker.give_back(loan)
    for k in range(3, 40):
        for client in (other, attacker):
            loan = client.borrow(k)
            os.close(loan.descriptor)
            client.give_back(loan)
    assert [loan.read() for loan in loans] == before
    eventually(lambda: attacker.lent() >= 3 * SLOT)
    for loan in loans:
        os.close(loan.descriptor)
    eventually(lambda: attacker.lent() == 0)


def test_slots_of_one_token_are_not_reused_for_another(server: ServerProcess) -> None:
    """Pages that a client pinned without a descriptor, in a pipe, never contain batches of another token."""
    attacker, other = Attacker(server.url), Attacker(server.url, "bob")
    loan = attacker.borrow(0)
    read, write = os.pipe()
    assert os.splice(loan.descriptor, write, 4096, offset_src=8192) == 4096
    expected = os.pread(loan.descriptor, 4096, 8192)
    os.close(loan.descriptor)
    attacker.give_back(loan)
    for k in range(1, 40):
        taken = other.borrow(k)
        os.close(taken.descriptor)
        other.give_back(taken)
    assert os.read(read, 4096) == expected
    os.close(read)
    os.close(write)


def test_a_descriptor_that_was_passed_on_keeps_its_content(server: ServerProcess) -> None:
    """A slot that another process has open is not reused, even after the borrower has died."""
    loan_read, loan_write = os.pipe()
    borrower = os.fork()
    if borrower == 0:
        attacker = Attacker(server.url)
        attacker.borrow(5)
        holder = os.fork()
        if holder == 0:
            attacker.channel.close()
            os.write(loan_write, b"%d\n" % os.getpid())
            time.sleep(600)
        time.sleep(600)
        os._exit(0)
    holder = int(os.read(loan_read, 100))
    os.kill(borrower, signal.SIGKILL)
    os.waitpid(borrower, 0)
    try:
        other = Attacker(server.url, "bob")
        for k in range(40):
            loan = other.borrow(k)
            assert bytes([1 + k % 251]) * 4096 == os.pread(loan.descriptor, 4096, 8192)
            os.close(loan.descriptor)
            other.give_back(loan)
        eventually(lambda: other.lent() >= SLOT)
    finally:
        os.kill(holder, signal.SIGKILL)
    eventually(lambda: other.lent() == 0)


def test_a_client_cannot_signal_the_server() -> None:
    """The server survives if a client opens a slot while the server checks whether the slot is open."""
    check = os.fork()
    if check == 0:
        slot = LendableSlot(sealed(4096), 4096)
        lent = slot.open()
        hidden = os.open(f"/proc/self/fd/{lent}", os.O_PATH)
        os.close(lent)
        close = os.close

        def open_then_close(descriptor: int) -> None:
            with suppress(BlockingIOError):
                close(os.open(f"/proc/self/fd/{hidden}", os.O_RDONLY | os.O_NONBLOCK))
            close(descriptor)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "close", open_then_close)
            os._exit(42 if not slot.is_held() else 1)
    _, status = os.waitpid(check, 0)
    assert os.waitstatus_to_exitcode(status) == 42


@pytest.mark.parametrize("kind", ["never lent", "twice", "of another client", "malformed", "flood"])
def test_an_invalid_message_closes_the_channel(server: ServerProcess, kind: str) -> None:
    """The channel of a client that gives back what it does not hold is closed; other clients are not affected."""
    attacker, victim = Attacker(server.url), Attacker(server.url)
    held = victim.borrow(1)
    loan = attacker.borrow(0)
    before = held.read()
    with suppress(BrokenPipeError, ConnectionResetError):
        match kind:
            case "never lent":
                attacker.channel.send(GIVE_BACK.pack(10**6))
            case "twice":
                attacker.give_back(loan)
                attacker.give_back(loan)
            case "of another client":
                attacker.give_back(loan)
                attacker.channel.send(GIVE_BACK.pack(held.number))
            case "malformed":
                attacker.channel.send(b"x" * 1000)
            case "flood":
                for number in range(2, 20_000):
                    attacker.channel.send(GIVE_BACK.pack(number))
    assert attacker.is_disconnected()
    os.close(loan.descriptor)
    for k in range(2, 20):
        other = victim.borrow(k)
        os.close(other.descriptor)
        victim.give_back(other)
    assert held.read() == before
    os.close(held.descriptor)
    victim.give_back(held)
    eventually(lambda: victim.lent() == 0)


def test_slots_that_are_held_for_ever_count_toward_the_limit(tokens: Path) -> None:
    """A client cannot occupy more than the limit, even if it opens new channels, and others are not affected."""
    limit = 4 * SLOT + 2**20
    options = ("--limit", f"max_lent_bytes={limit}", "--limit", "max_lent_time=0.5")
    with running(tokens, *options) as server:
        attacker, other = Attacker(server.url), Attacker(server.url, "bob")
        held = []
        for k in range(40):
            if attacker.request(k).headers["content-type"] == LOAN_MEDIA_TYPE:
                _, descriptors, _, _ = socket.recv_fds(attacker.channel, LOAN.size, 1)
                held += descriptors
            if k % 4 == 3:
                attacker.channel.close()
                attacker.channel, attacker.name = attacker.connect()
        assert 0 < len(held) <= 4
        assert attacker.lent() <= limit
        os.close(other.borrow(0).descriptor)
        for descriptor in held:
            os.close(descriptor)
        eventually(lambda: attacker.lent() <= limit // 4)
        assert attacker.request(50).headers["content-type"] == LOAN_MEDIA_TYPE


def test_a_channel_of_another_token_lends_nothing(server: ServerProcess) -> None:
    """A request that names the channel of another token, or no channel, gets the frame."""
    attacker, victim = Attacker(server.url, "bob"), Attacker(server.url)
    for name in (victim.name, "0" * 32, "x", ""):
        response = attacker.request(0, name)
        assert response.headers["content-type"] != LOAN_MEDIA_TYPE
        assert len(response.content) > SLOT
    victim.channel.setblocking(False)
    with pytest.raises(BlockingIOError):
        victim.channel.recv(1)


def test_a_slot_contains_nothing_of_earlier_batches(server: ServerProcess) -> None:
    """A slot that contained a larger batch of another dataset does not show the rest of it."""
    for k in range(20):  # sent, because the request names no channel
        Attacker(server.url, "bob").request(k, "none").raise_for_status()
    attacker = Attacker(server.url, dataset="small")
    loans = [attacker.borrow(k) for k in range(8)]
    sizes = [os.fstat(loan.descriptor).st_size for loan in loans]
    assert max(sizes) >= SLOT, "no slot of a larger batch was reused"
    for loan, size in zip(loans, sizes, strict=True):
        assert not any(os.pread(loan.descriptor, size, loan.nbytes))


def test_a_revoked_token_gets_no_loan(server: ServerProcess, tokens: Path) -> None:
    """The channel of a revoked token lends nothing, and its slots are not reused, even for a token of this name."""
    attacker = Attacker(server.url)
    loan = attacker.borrow(0)
    read, write = os.pipe()
    assert os.splice(loan.descriptor, write, 4096, offset_src=8192) == 4096  # pages that the kernel does not report
    expected = os.pread(loan.descriptor, 4096, 8192)
    os.close(loan.descriptor)
    before = tokens.read_text()
    tokens.write_text(before.replace(TOKENS["alice"], "another-token-of-alice"))
    eventually(lambda: attacker.request(1, "none").status_code == httpx.codes.UNAUTHORIZED)
    assert attacker.request(1).status_code == httpx.codes.UNAUTHORIZED
    attacker.channel.setblocking(False)
    with pytest.raises(BlockingIOError):
        attacker.channel.recv(1)
    attacker.give_back(loan)  # now, because batches that were computed before may reuse the slot
    tokens.write_text(before)
    eventually(lambda: attacker.http.get("/v1/datasets").is_success)
    again = Attacker(server.url)
    for k in range(1, 40):
        taken = again.borrow(k)
        os.close(taken.descriptor)
        again.give_back(taken)
    assert os.read(read, 4096) == expected
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("message", [b"x", b"x" * 32, b"x" * 5000, None])
def test_a_channel_without_handshake_is_closed(tokens: Path, message: bytes | None) -> None:
    """A process without a key gets nothing, and its connection is closed."""
    with running(tokens, "--limit", "header_timeout=0.5") as server:
        attacker = Attacker(server.url)
        attacker.channel.close()
        attacker.channel = attacker.open()
        if message is not None:
            attacker.channel.send(message)
        assert attacker.is_disconnected()


def test_a_channel_on_which_nothing_was_lent_yet_stays_open(tokens: Path) -> None:
    """Batches that are too small to be lent also confirm the channel of their request."""
    with running(tokens, "--limit", "header_timeout=0.5") as server:
        client, silent = Attacker(server.url, dataset="tiny"), Attacker(server.url)
        assert client.request(0).raise_for_status().headers["content-type"] != LOAN_MEDIA_TYPE
        assert silent.is_disconnected()
        client.channel.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.channel.recv(1)


# --- A malicious server -------------------------------------------------------------------------------------------

KEY = "ab" * 32


@pytest.mark.parametrize(
    "text",
    ["", "/run/docker.sock", f"/tmp/x:{'0' * 32}:{KEY}", f"@dbus:{'0' * 32}:{KEY}", f"teleloader-x:{'0' * 32}:{KEY}",
     f"teleloader-{'0' * 32}/../x:{'0' * 32}:{KEY}", f"teleloader-{'0' * 32}:{'0' * 32}:{KEY}\n", "a" * 4096],
)  # fmt: skip
def test_a_server_selects_no_other_socket(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client connects only to abstract sockets with the name of a loader server."""
    monkeypatch.setattr(socket, "socket", None)
    assert handoff.connect(text) is None


@contextmanager
def impostor(welcome: bytes | None) -> Iterator[str]:
    """Listen like a server that responds to a client with the given bytes; yield its offer."""
    name = f"teleloader-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"\0{name}")
        listening.listen()
        child = os.fork()
        if child == 0:
            connected, _ = listening.accept()
            connected.recv(100)
            connected.send(welcome or b"")
            time.sleep(600)
        try:
            yield f"{name}:{'0' * 32}:{KEY}"
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.mark.parametrize("welcome", [b"x", b"x" * WELCOME.size])
def test_a_process_without_the_key_is_no_server(welcome: bytes) -> None:
    """A process that took the name of a dead server cannot lend anything."""
    with impostor(welcome) as offer:
        assert handoff.connect(offer) is None


def lent_by_impostor(descriptor: int, nbytes: int, record: bytes = GIVE_BACK.pack(1)) -> Any:
    """Return what a client receives of a loan with any descriptor, in pageable memory."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        socket.send_fds(ours, [LOAN.pack(1, nbytes)], [descriptor])
        channel = handoff.LoanChannel(theirs, "0" * 32)
        try:
            return channel.receive(record, HostBuffers("numpy", BufferPool()), 2**20)
        finally:
            channel.close()


def sealed(nbytes: int, seals: int = SEALS) -> int:
    """Return the descriptor of a memfd."""
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def test_an_unsealed_slot_is_rejected(tmp_path: Path) -> None:
    """A slot that the server could shrink, which would kill the client with SIGBUS, is not mapped."""
    file = tmp_path / "file"
    file.write_bytes(b"x" * 4096)
    for descriptor in (os.open(file, os.O_RDONLY), os.open("/dev/zero", os.O_RDONLY), sealed(4096, fcntl.F_SEAL_GROW)):
        with pytest.raises(ProtocolError, match="sealed memfd"):
            lent_by_impostor(descriptor, 4096)
        os.close(descriptor)


@pytest.mark.parametrize("nbytes", [0, 4097, 2**20 + 1, 2**63])
def test_a_loan_beyond_its_slot_is_rejected(nbytes: int) -> None:
    """The size of a frame is that of the slot at most."""
    descriptor = sealed(4096)
    with pytest.raises(ProtocolError, match="sealed memfd"):
        lent_by_impostor(descriptor, nbytes)
    os.close(descriptor)


def test_a_loan_that_does_not_belong_to_the_response_is_rejected() -> None:
    """The number in the response selects the loan."""
    descriptor = sealed(4096)
    with pytest.raises(ProtocolError):
        lent_by_impostor(descriptor, 4096, GIVE_BACK.pack(2))
    os.close(descriptor)


def test_a_missing_loan_is_a_broken_connection() -> None:
    """A response without a loan makes the client request the batch again, and does not block it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = handoff.LoanChannel(theirs, "0" * 32)
    with ours, pytest.raises(TransportError):
        channel.receive(GIVE_BACK.pack(1), HostBuffers("numpy", BufferPool()), 2**20)
    channel.close()
