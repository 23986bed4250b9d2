"""A hostile server can only make a client raise an error, soon and within the memory bound of docs/limits.md."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import lz4.block
import msgpack
import numpy as np
import pytest
import zstandard

from teleloader import DataLoader, ProtocolError, RemoteDataset, RemoteError, ServerUnavailable, TeleloaderError
from teleloader.api.control import Server
from teleloader_shared import codec
from teleloader_shared.codec import ALIGNMENT, PROLOGUE_SIZE, BatchId, Failure, to_bytes
from tests.client.fake_server import INFO, Answer, Request, fake_server
from tests.conftest import ROOT

MIB = 2**20
SOON = 30.0
"""Time limit in seconds for each error on a busy machine; without an error, a test would run forever."""
CONTROL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e"
"""Control characters that change a terminal's title and color, clear it, and reverse the following text."""


def iterate(answer: Answer, info: dict[str, Any] = INFO, **options: Any) -> BaseException:
    """Return the exception that a client raises when it iterates over the server's responses."""
    with fake_server(answer, info) as url:
        dataset = RemoteDataset(url, reconnect_timeout=0.3, stall_timeout=0.4)
        loader = DataLoader(dataset, 1, seed=0, output="numpy", **options)
        began = time.monotonic()
        with pytest.raises(Exception) as raised:
            for _ in loader:
                pass
        assert time.monotonic() - began < SOON
        assert is_harmless(str(raised.value))
        return raised.value


def is_harmless(text: str) -> bool:
    """Return True if a text contains no control characters for a terminal except newlines."""
    return all(letter.isprintable() or letter == "\n" for letter in text)


def write(*pieces: bytes) -> Callable[[socket.socket], None]:
    """Return a function that sends some bytes."""
    return lambda to: to.sendall(b"".join(pieces))


def endless(piece: bytes, start: bytes = b"") -> Callable[[socket.socket], None]:
    """Send data until the client disconnects."""

    def send(to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            to.sendall(start)
            while True:
                to.sendall(piece)

    return send


def dripping(text: bytes) -> Callable[[socket.socket], None]:
    """Send one byte at a time, each just before the client's timeout would expire."""

    def send(to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for _ in range(100_000):
                for byte in text:
                    to.sendall(bytes([byte]))
                    time.sleep(0.05)

    return send


OK = b"HTTP/1.1 200 OK\r\n"

# --- HTTP ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attack",
    [
        endless(b"X: y\r\n", OK), endless(b"x" * 1000, OK + b"X: "), endless(b"HTTP/1.1 100 Continue\r\n\r\n"),
        endless(b"x" * 1000), endless(b"\0" * 1000), dripping(OK), dripping(b"X: y\r\n"),
        endless(b"\0" * MIB, OK + b"\r\n"), endless(b"10000\r\n" + b"\0" * 65536 + b"\r\n", OK + b"Transfer-Encoding: "
        b"chunked\r\n\r\n"), write(OK, b"Content-Length: 1000000000000000\r\n\r\n"),
        write(OK, b"Content-Length: -1\r\n\r\n"), write(OK, b"Content-Length: 99999999999999999999\r\n\r\n"),
        write(OK, b"Content-Length: 0\r\n\r\n"), write(OK, b"Content-Length: 1e3\r\n\r\n"),
        write(b"HTTP/9.9 200 OK\r\n\r\n"), write(b"HTTP/1.1 -5 OK\r\n\r\n"), write(b"HTTP/1.1 2e2\r\n\r\n"),
        write(f"HTTP/1.1 {CONTROL}\r\n\r\n".encode()), write(), write(OK, b"Content-Length: 1000\r\n\r\n", b"x" * 500),
        dripping(OK + b"Content-Length: 100000\r\n\r\n" + b"x" * 100_000),
        endless(b"X: y\r\n", b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"),
        endless(b"x" * 1000, b"HTTP/1.1 404 No\r\n\r\n"),
    ],
    ids=[
        "headers", "header", "continue", "status line", "nulls", "drip", "drip header", "no size", "chunks",
        "huge",
        "negative", "overflowing", "empty", "no number", "version", "negative status", "no status", "control",
        "nothing", "cut", "drip body", "trailers", "endless problem",
    ],
)  # fmt: skip
def test_an_invalid_response_ends_in_an_error(attack: Callable[[socket.socket], None]) -> None:
    """A response with an invalid head, size or pace results in an error, without a batch and without hanging."""
    assert isinstance(iterate(lambda _: attack), ServerUnavailable | ProtocolError)


@pytest.mark.parametrize("to", ["http://{other}/v1/datasets", "file:///etc/passwd", "//{other}/", "gopher://x"])
def test_redirects_are_not_followed(to: str) -> None:
    """The client follows no redirects: another host must receive neither requests nor the token."""
    asked: list[str] = []

    def elsewhere(connection: socket.socket, path: str) -> None:
        asked.append(path)

    with raw_server(elsewhere) as other:
        location = to.replace("{other}", other.removeprefix("http://"))
        redirect = f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()
        assert "302" in str(iterate(lambda _: write(redirect)))
        with (
            raw_server(lambda connection, _: connection.sendall(redirect)) as url,
            pytest.raises(ProtocolError, match="302"),
        ):
            RemoteDataset(url, reconnect_timeout=0)
        assert asked == []


# --- What it says of itself ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def raw_server(handle: Callable[[socket.socket, str], object]) -> Iterator[str]:
    """Run a server on which `handle` writes the response for a path; each connection is closed afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                head = connection.recv(65536)
                handle(connection, head.split(b" ")[1].decode("latin-1") if b" " in head else "")

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def answered(body: bytes, head: bytes = b"") -> bytes:
    """Return a response with status 200."""
    return OK + head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    "attack",
    [
        endless(b"X: y\r\n", OK), endless(b"HTTP/1.1 100 Continue\r\n\r\n"), dripping(OK),
        endless(b" " * MIB, OK + b"\r\n"), dripping(OK + b"Content-Length: 100000\r\n\r\n" + b" " * 100_000),
        write(answered(b"[" * 100_000)), write(answered(b"[" * 8 * MIB)), write(answered(b"9" * 5000)),
        write(answered(b"\x1f\x8b" + b"\0" * 100, b"Content-Encoding: gzip\r\n")),
        write(answered(b"[[]" + b",[]" * MIB + b"]")), write(answered(json.dumps(["x" * 8 * MIB]).encode())),
        write(answered(b"{}")), write(answered(b"[1]")), write(),
    ],
    ids=["headers", "continue", "drip", "endless", "drip body", "nested", "deep", "number", "gzip", "lists", "long",
         "object", "number list", "nothing"],
)  # fmt: skip
def test_a_list_of_datasets_that_is_none_ends_in_an_error(attack: Callable[[socket.socket], None]) -> None:
    """An invalid list of datasets results in an error, whatever its content."""
    began = time.monotonic()
    with raw_server(lambda connection, _: attack(connection)) as url, pytest.raises(TeleloaderError) as raised:
        RemoteDataset(url, "data", reconnect_timeout=0, stall_timeout=0.4)
    assert len(str(raised.value)) < 10_000
    assert time.monotonic() - began < SOON


REGISTERED = json.dumps([INFO]).encode()


@pytest.mark.parametrize("media_type", ["application/vnd.teleloader.frame+msgpack", "application/json", ""])
@pytest.mark.parametrize(("path", "limit"), [("/v1/datasets", 4 * MIB), ("/v1/loaders", MIB), ("/healthz", MIB)])
def test_a_response_is_bounded_by_what_was_requested(path: str, limit: int, media_type: str) -> None:
    """The size of a control response is limited to what the client expects, whatever its media type.

    A list of datasets may have 4 MiB, a registration 1 MiB, and the body of a health check is discarded. The error for
    a longer response is short, and the connection is closed.
    """
    sent: list[int] = []
    closed = threading.Event()

    def answer(connection: socket.socket, requested: str) -> None:
        if requested.partition("?")[0] != path:
            connection.sendall(answered(REGISTERED))
            return
        count = 0
        try:
            connection.sendall(OK + f"Content-Type: {media_type}\r\n\r\n".encode())
            while count < 256 * MIB:
                connection.sendall(b"\0" * 2**16)
                count += 2**16
        except OSError:
            pass
        sent.append(count)
        closed.set()

    with raw_server(answer) as url:
        if path == "/healthz":
            assert Server(url, 10).is_alive()
        else:
            with pytest.raises(ProtocolError, match=f"exceeds {limit:,} bytes") as raised:
                next(iter(DataLoader(RemoteDataset(url, reconnect_timeout=0), output="numpy")))
            assert len(str(raised.value)) < 500
        assert closed.wait(30)
    assert max(sent) < limit + 32 * MIB, "what is beyond the limit is in the buffers of the kernel"


@pytest.mark.parametrize(
    "field",
    [("name", f"fake{CONTROL}"), ("type", CONTROL), ("version", "x" * 100_000), ("fingerprint", "a\nb"), ("length", -1),
     ("length", 2**63), ("length", 10**100), ("length", True), ("cpus", -1), ("functions", ["x"] * 100_000),
     ("functions", [CONTROL]), ("kind", "other"), ("collate", None)],
    ids=lambda field: f"{field[0]}={field[1]!r:.12}",
)  # fmt: skip
def test_a_dataset_that_cannot_be_is_refused(field: tuple[str, Any]) -> None:
    """Names of datasets must be short and printable, and numbers must be valid for a dataset."""
    info = {**INFO, field[0]: field[1]}
    with (
        fake_server(lambda request: request.right(), info) as url,
        pytest.raises(ProtocolError, match=field[0]) as raised,
    ):
        RemoteDataset(url, reconnect_timeout=0)
    assert is_harmless(str(raised.value))


def test_texts_of_problems_are_harmless() -> None:
    """Error messages contain the server's reason as short text without control characters."""
    for status in (404, 422, 500, 503):
        body = json.dumps({"code": "InvalidSpec", "detail": f"no {CONTROL} such\nthing" + "x" * 10**5}).encode()
        problem = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        said = write(problem)
        with (
            raw_server(lambda connection, _, said=said: said(connection)) as url,  # type: ignore[misc]
            pytest.raises(TeleloaderError, match=r"no .* such thing") as raised,
        ):
            RemoteDataset(url, reconnect_timeout=0)
        assert is_harmless(str(raised.value))
        assert len(str(raised.value)) < 6000


# --- Frames -------------------------------------------------------------------------------------------------------


def failing(type_name: str, text: str = "it broke") -> Answer:
    """Return a function that sends a failure."""

    def answer(request: Request) -> bytes:
        address = BatchId(request.key, request.epoch, request.start)
        return to_bytes(address, Failure(type_name, text, f"Traceback\n{text}", [1], 0))

    return answer


@pytest.mark.parametrize(
    "name",
    ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "BaseException", "BaseExceptionGroup", "os.system", "eval",
     "subprocess.Popen", "teleloader.annotations", "teleloader.__builtins__", "", CONTROL,
     "asyncio.CancelledError", "bdb.BdbQuit", "x" * 100_000],
    ids=lambda name: name[:20].encode().hex() if not name[:20].isprintable() else name[:20],
)  # fmt: skip
def test_exceptions_that_would_end_a_program_are_not_raised(name: str) -> None:
    """Only ordinary builtin exceptions and those of teleloader are raised; nothing is called or imported."""
    assert type(iterate(failing(name))) is RemoteError


@pytest.mark.parametrize("name", ["StopIteration", "StopAsyncIteration", "UnicodeDecodeError", "ExceptionGroup"])
def test_exceptions_that_would_end_the_loop_silently_are_runtime_errors(name: str) -> None:
    """Exceptions such as StopIteration become RuntimeError, since a truncated epoch would go unnoticed."""
    assert type(iterate(failing(name))) is RuntimeError


def test_texts_of_failures_are_harmless_and_short() -> None:
    """A traceback of megabytes is truncated, and has no control characters."""
    error = iterate(failing("ValueError", CONTROL * 1000 + "x" * MIB))
    assert type(error) is ValueError
    assert len(str(error)) < 200_000


def crafted(request: Request, header: bytes, rest: bytes = b"", values: int = 7) -> bytes:
    """Return a frame of batch `start` with the given header and subsequent bytes, padded to whole blocks."""
    size = -(-(PROLOGUE_SIZE + len(header) + len(rest)) // ALIGNMENT) * ALIGNMENT
    body = (header + rest).ljust(size - PROLOGUE_SIZE, b"\0")
    prologue = codec._PROLOGUE.pack(
        0xDD, values, 0xA4, codec.MAGIC, 0xCF, size, 0xC2, 0xCF, 0, 0xCE, len(header)
    )  # fmt: skip
    return prologue + body


def described(request: Request, tree: object, **fields: Any) -> bytes:
    """Return the header of a frame with that tree."""
    address = {"loader": request.key, "epoch": request.epoch, "batch": request.start, "padding": 0}
    packed: bytes = msgpack.packb({**address, "tree": tree, **fields})
    return packed


def nested(request: Request) -> bytes:
    """Return a header with the maximum nesting for its length."""
    return crafted(request, b"\x91" * 100_000)


def heavy(request: Request) -> bytes:
    """Return a header whose objects would use a hundred times its size."""
    return crafted(request, b"\xdd\x02\x00\x00\x00" + b"\x90" * (2**25 + 2**20))


def bomb(compression: str) -> Answer:
    """Return a small frame whose array unpacks to more bytes than it declares, or than the limit."""

    def answer(request: Request) -> bytes:
        zeros = bytes(64 * MIB)
        packed = zstandard.ZstdCompressor().compress(zeros) if compression == "zstd" else lz4.block.compress(zeros)
        header = described(request, {"array": ["uint8", [16 * MIB], "ndarray"]}, compression=compression)
        start = -(-(PROLOGUE_SIZE + len(header) + 7) // ALIGNMENT) * ALIGNMENT
        pad = bytes(start - 5 - PROLOGUE_SIZE - len(header))
        return crafted(request, header, pad + b"\xc6" + len(packed).to_bytes(4, "big") + packed, 9)

    return answer


def declaring(dtype: str, shape: list[Any]) -> Answer:
    """Return a frame that declares an array of the given type and shape."""
    return lambda request: crafted(request, described(request, {"array": [dtype, shape, "ndarray"]}), bytes(200), 9)


ARRAY = {"array": ["uint8", [1], "ndarray"]}
FRAMES: dict[str, Answer] = {
    "nested": nested,
    "heavy": heavy,
    "zstd": bomb("zstd"),
    "lz4": bomb("lz4"),
    "object": declaring("object", [1]),
    "O8": declaring("|O", [1]),
    "records": declaring("i4,O", [1]),
    "overflow": declaring("float64", [2**32, 2**32, 2**32]),
    "negative": declaring("float64", [-1]),
    "huge": declaring("uint8", [2**40]),
    "zeros": declaring("uint8", [0, 2**62, 2**62]),
    "dimensions": declaring("uint8", [1] * 100_000),
    "no number": declaring("uint8", ["1"]),
    "unpickling": lambda request: crafted(request, described(request, ARRAY, compression="pickle"), bytes(99), 9),
    "pickle": lambda request: crafted(request, described(request, {"pickle": b"cos\nsystem\n(S'id'\ntR."})),
    "extension": lambda request: crafted(request, msgpack.packb(msgpack.ExtType(42, b"cos\nsystem\n"))),
    "another epoch": lambda request: request.frame(request.start, epoch=7),
    "another batch": lambda request: request.frame(request.start + 1),
    "another loader": lambda request: request.frame(request.start, key="0" * 32),
    "millions": lambda request: b"".join(request.frame(k) for k in range(request.start, request.start + 9000)),
    "garbage": lambda request: os.urandom(1000),
    "cut": lambda request: request.frame(request.start)[:-64],
    "end of a map": lambda request: request.end(request.start),
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames_that_are_none_end_in_an_error(name: str) -> None:
    """The client requests a batch with an invalid frame a few times again, then raises an error."""
    error = iterate(FRAMES[name], max_batch_bytes=64 * MIB)
    assert isinstance(error, ServerUnavailable | ProtocolError), repr(error)


# --- Memory -------------------------------------------------------------------------------------------------------

CLIENT = """
import resource, sys, threading
from teleloader import DataLoader, RemoteDataset
url, most, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dataset = RemoteDataset(url, reconnect_timeout=0.3, stall_timeout=2)
loader = DataLoader(dataset, 1, seed=0, output="numpy", max_batch_bytes=most, prefetch_factor=64, num_workers=64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
iterator = iter(loader)
try:
    next(iterator)
    if mode == "pause":
        sys.stdin.readline()  # the loop does something else
    else:
        for _ in range(3): next(iterator)
except Exception as error:
    print(type(error).__name__, file=sys.stderr)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
iterator.close() if hasattr(iterator, "close") else None
"""
MOST = 8 * MIB
BOUND = 4 + 3 * 2 + 8
"""Bound in docs/limits.md, in multiples of `max_batch_bytes`: batches held, in transit and being decoded."""


def grown(answer: Answer, mode: str, settled: Callable[[], bool] = lambda: True) -> int:
    """Return the memory growth in bytes of a client that iterates over the server's responses."""
    info = {**INFO, "length": 10**6}
    with fake_server(answer, info, num_workers=10**6) as url:
        command = [sys.executable, "-W", "ignore", "-c", CLIENT, url, str(MOST), mode]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            while client.poll() is None and not settled():
                time.sleep(0.05)
            said, _ = client.communicate("go on\n", 120)
    return int(said) * MIB


def test_a_loop_that_pauses_is_not_filled_up() -> None:
    """A client that pauses stops requesting batches, whatever their size and the server's number of workers."""
    sent: list[float] = []

    def answer(request: Request) -> bytes:
        sent.append(time.monotonic())
        address = BatchId(request.key, request.epoch, request.start)
        return to_bytes(address, np.zeros(MOST - 2**16, np.uint8), checksum=False)

    def settled() -> bool:
        return bool(sent) and time.monotonic() - sent[-1] > 2

    assert grown(answer, "pause", settled) < BOUND * MOST
    assert len(sent) < BOUND


def test_batches_that_unpack_to_much_are_counted_unpacked() -> None:
    """The limit applies to the unpacked size of batches, even if they are compressed without being requested so."""
    sent: list[float] = []
    packed = zstandard.ZstdCompressor().compress(bytes(MOST - 2**16))

    def answer(request: Request) -> bytes:
        sent.append(time.monotonic())
        header = described(request, {"array": ["uint8", [MOST - 2**16], "ndarray"]}, compression="zstd")
        start = -(-(PROLOGUE_SIZE + len(header) + 7) // ALIGNMENT) * ALIGNMENT
        pad = b"\xc4" + bytes([start - 5 - PROLOGUE_SIZE - len(header) - 2])
        pad += bytes(start - 5 - PROLOGUE_SIZE - len(header) - 2)
        end = start + len(packed)
        size = -(-(end + 2) // ALIGNMENT) * ALIGNMENT
        tail = b"\xc4" + bytes([size - end - 2])
        return crafted(request, header, pad + b"\xc6" + len(packed).to_bytes(4, "big") + packed + tail, 9)

    assert grown(answer, "pause", lambda: bool(sent) and time.monotonic() - sent[-1] > 2) < BOUND * MOST
    assert len(sent) > 1, "these were right frames"


def test_headers_that_become_many_objects_are_bounded() -> None:
    """The largest accepted header needs bounded memory, whatever its content."""
    count = 2**20 - 300
    lists = b"\xa4tree\xdd" + count.to_bytes(4, "big") + b"\x90" * count

    def answer(request: Request) -> bytes:
        return crafted(request, described(request, None).replace(b"\xa4tree\xc0", lists))

    assert grown(answer, "go") < 3 * 130 * MIB
