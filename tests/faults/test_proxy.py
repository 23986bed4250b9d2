"""The fault proxy injects exactly the configured faults."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest

from tests.conftest import eventually
from tests.faults.proxy import Cut, Fault, FaultProxy, Flip, Line, Omit, Repeat, Reset, Rewrite, Stall

BODY = bytes(range(100))


class Echo(socketserver.BaseRequestHandler):
    """Server that returns received bytes."""

    def handle(self) -> None:
        """Return bytes until the client disconnects."""
        try:
            while chunk := self.request.recv(2**16):
                self.request.sendall(chunk)
        except OSError:
            pass


class Hundred(BaseHTTPRequestHandler):
    """Server that responds to each request with a hundred bytes."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Send the response in two pieces, the second one with a delay."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[:50])
        if self.path.endswith("slow"):
            time.sleep(0.2)
        self.wfile.write(BODY[50:])

    def log_message(self, *args: object) -> None:
        """Log nothing."""


class Server(socketserver.ThreadingTCPServer):
    """Server whose threads end with the test."""

    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, *args: object) -> None:
        """Ignore errors: tests break connections on purpose."""


@contextmanager
def proxied(handler: type[socketserver.BaseRequestHandler]) -> Iterator[FaultProxy]:
    """Run a server behind a proxy."""
    with Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            with FaultProxy(url, seed=1, http=handler is Hundred) as proxy:
                yield proxy
        finally:
            server.shutdown()
            thread.join()


def connect(proxy: FaultProxy) -> socket.socket:
    """Return a connected socket."""
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=10)


def receive(client: socket.socket, count: int) -> bytes:
    """Receive `count` bytes, or fewer if the connection is closed properly."""
    got = b""
    while len(got) < count and (piece := client.recv(count - len(got))):
        got += piece
    return got


def get(client: socket.socket, path: str = "/batches") -> bytes:
    """Return the body of a response as far as it arrives before the connection closes or stalls."""
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += receive(client, 1)
    return receive(client, len(BODY))


@pytest.mark.parametrize(
    "line", [Line(), Line(slice=1), Line(bandwidth=1e6), Line(latency=0.01), Line(latency=0.01, slice=7)], ids=repr
)
def test_a_line_passes_every_byte_in_order(line: Line) -> None:
    """Slicing, delay and bandwidth do not change the bytes."""
    sent = bytes(range(256)) * 20
    with proxied(Echo) as proxy, connect(proxy) as client:
        proxy.line = line
        client.sendall(sent)
        assert receive(client, len(sent)) == sent


def test_latency_is_on_both_ways() -> None:
    """A round trip takes twice the latency."""
    with proxied(Echo) as proxy, connect(proxy) as client:
        proxy.line = Line(latency=0.1)
        started = time.monotonic()
        client.sendall(b"x")
        assert receive(client, 1) == b"x"
        assert time.monotonic() - started >= 0.2


def test_bandwidth_is_the_bytes_of_a_second() -> None:
    """At 100 kB/s, 20 kB take 0.2 s."""
    with proxied(Echo) as proxy, connect(proxy) as client:
        proxy.line = Line(bandwidth=1e5)
        started = time.monotonic()
        client.sendall(bytes(20_000))
        receive(client, 20_000)
        assert time.monotonic() - started >= 0.19


def test_slices_arrive_one_by_one() -> None:
    """One read returns at most one slice."""
    with proxied(Echo) as proxy, connect(proxy) as client:
        proxy.line = Line(slice=1, latency=0.001)
        client.sendall(b"abcd")
        assert [client.recv(1) for _ in "abcd"] == [b"a", b"b", b"c", b"d"]


def test_a_silent_line_accepts_and_passes_nothing_until_it_flows() -> None:
    """A silent line passes nothing on existing and new connections, and all bytes afterwards."""
    with proxied(Echo) as proxy, connect(proxy) as before:
        before.sendall(b"1")
        assert receive(before, 1) == b"1"
        proxy.line = Line(silent=True)
        with connect(proxy) as after:
            for client in (before, after):
                client.sendall(b"2")
                client.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                client.settimeout(10)
            proxy.line = Line()
            assert [receive(client, 1) for client in (before, after)] == [b"2", b"2"]


def test_an_idle_connection_is_cut_and_a_busy_one_is_not() -> None:
    """An idle connection is closed by FIN after the limit; a busy one is not."""
    with proxied(Echo) as proxy, connect(proxy) as client:
        proxy.line = Line(idle_limit=0.3)
        for _ in range(8):
            time.sleep(0.05)
            client.sendall(b"x")
            assert receive(client, 1) == b"x"
        assert client.recv(1) == b""


@pytest.mark.parametrize("reset", [True, False])
def test_all_connections_are_dropped_at_once(reset: bool) -> None:
    """Connections are closed by RST or by FIN; new ones are accepted."""
    with proxied(Echo) as proxy, connect(proxy) as one, connect(proxy) as other:
        eventually(lambda: proxy.connections == 2)
        for client in (one, other):
            client.sendall(b"x")
            receive(client, 1)
        assert proxy.drop_all(reset=reset) == 2
        for client in (one, other):
            if reset:
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
            else:
                assert client.recv(1) == b""
        eventually(lambda: proxy.connections == 0)
        with connect(proxy) as new:
            new.sendall(b"y")
            assert receive(new, 1) == b"y"
        assert proxy.accepted == 3


def test_a_server_that_is_not_there_is_a_reset() -> None:
    """The proxy resets connections to an unavailable server, and works with a server that starts elsewhere."""
    with proxied(Echo) as proxy:
        there = proxy.target
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            proxy.target = f"http://127.0.0.1:{nobody.getsockname()[1]}"
            with pytest.raises(ConnectionResetError), connect(proxy) as client:
                client.recv(1)
        proxy.target = there
        with connect(proxy) as client:
            client.sendall(b"x")
            assert receive(client, 1) == b"x"


@pytest.mark.parametrize(
    ("fault", "arrives"),
    [
        (Cut(30), BODY[:30]),
        (Flip(30, bit=7), BODY[:30] + bytes([30 ^ 128]) + BODY[31:]),
        (Repeat(30, 10), (BODY[:40] + BODY[30:])[:100]),
        (Rewrite(lambda body: body[::-1]), BODY[::-1]),
    ],
)
def test_a_fault_happens_to_one_response(fault: Fault, arrives: bytes) -> None:
    """A fault changes the body of one response, and not its head."""
    with proxied(Hundred) as proxy, connect(proxy) as client:
        proxy.arm(fault)
        assert get(client) == arrives
        assert proxy.happened == {type(fault).__name__: 1}
        assert proxy.armed == 0
        with connect(proxy) as another:
            assert get(another) == BODY


def test_a_reset_comes_in_the_middle() -> None:
    """The client gets ECONNRESET, after some of the bytes or before it reads them."""
    with proxied(Hundred) as proxy, connect(proxy) as client:
        proxy.arm(Reset(30))
        with pytest.raises(ConnectionResetError):
            get(client)


def test_a_stall_leaves_the_connection_open() -> None:
    """The bytes before it arrive, and nothing after them."""
    with proxied(Hundred) as proxy, connect(proxy) as client:
        proxy.arm(Stall(30))
        client.sendall(b"GET /batches HTTP/1.1\r\nHost: x\r\n\r\n")
        got = b""
        while not got.endswith(BODY[:30]):
            got += client.recv(1)
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(1)


def test_bytes_that_are_omitted_are_never_made_up_for() -> None:
    """The response stays short: its reader waits for the rest."""
    with proxied(Hundred) as proxy, connect(proxy) as client:
        proxy.arm(Omit(30, 10))
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            get(client)


def test_a_fault_waits_for_the_path_that_it_is_armed_for() -> None:
    """Responses for other paths pass unchanged."""
    with proxied(Hundred) as proxy, connect(proxy) as client:
        proxy.arm(Flip(0))
        assert get(client, "/healthz") == BODY
        assert proxy.armed == 1
        assert get(client, "/v1/batches?start=0") != BODY
        proxy.arm(Flip(0), times=3)
        assert proxy.armed == 3
        proxy.disarm()
        assert get(client) == BODY


def test_a_place_that_is_left_open_is_the_seeds() -> None:
    """The same seed selects the same byte."""

    def damaged() -> bytes:
        with proxied(Hundred) as proxy, connect(proxy) as client:
            proxy.arm(Flip())
            return get(client)

    first = damaged()
    assert first != BODY
    assert damaged() == first


def test_a_buffering_proxy_passes_a_response_when_it_is_complete() -> None:
    """The first byte arrives after the server has sent the last one."""

    def first_byte(line: Line) -> float:
        with proxied(Hundred) as proxy, connect(proxy) as client:
            proxy.line = line
            started = time.monotonic()
            client.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
            receive(client, 1)
            return time.monotonic() - started

    assert first_byte(Line(buffered=True)) >= 0.2 > first_byte(Line())
