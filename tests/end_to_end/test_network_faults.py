"""Network faults between a client and a real server: every batch arrives exactly once, or one clear error does."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teleloader import DataLoader, ProtocolError, RemoteDataset, ServerUnavailable
from teleloader.api import backoff
from teleloader.fetch import fetcher
from teleloader_shared import codec
from tests.conftest import ServerProcess, StartServer, eventually, examples
from tests.faults import hosted
from tests.faults.proxy import Cut, Fault, FaultProxy, Flip, Line, Omit, Part, Repeat, Reset, Rewrite, Stall

TARGET = "tests.faults.hosted:"
DATASETS = (f"small={TARGET}small", f"large={TARGET}large")
STALL_TIMEOUT = 1.0


def serve(start_server: StartServer, *arguments: str, port: int = 0, workers: int = 1) -> ServerProcess:
    """Run a server with both datasets."""
    return start_server(*DATASETS, "--num-workers", str(workers), *arguments, port=port)


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """Return the URL of a server for all tests with network faults, each of which has its own proxy."""
    server = ServerProcess("--port", "0", *DATASETS, "--num-workers", "1")
    yield server.url
    server.end()


@pytest.fixture
def proxy(server_url: str) -> Iterator[FaultProxy]:
    """Run a proxy in front of that server."""
    with FaultProxy(server_url, seed=4) as proxy:
        yield proxy


class Checked:
    """Batches of an epoch, each compared with the dataset's own samples.

    Args:
        urls: The server's URL, or several.
        name: The dataset.
        batch_size: Samples in a batch.
        options: For the `RemoteDataset`.
    """

    def __init__(self, urls: str | list[str], name: str = "small", batch_size: int = 2, **options: Any) -> None:
        remote = RemoteDataset(urls, name, **{"stall_timeout": STALL_TIMEOUT, **options})
        self.loader = DataLoader(remote, batch_size, shuffle=True, seed=3, output="numpy")
        self._table = getattr(hosted, name).table
        self._epoch = -1
        self._begin_epoch()

    def take(self, count: int | None = None) -> None:
        """Load a number of batches, or all remaining ones, after which no more may arrive."""
        for _ in range(len(self._plan) - self.taken if count is None else count):
            got = next(self.batches)
            expected = self._table[self._plan[self.taken]]
            assert got.dtype == expected.dtype
            assert np.array_equal(got, expected), f"batch {self.taken} of epoch {self._epoch}"
            self.taken += 1
        if count is None:
            assert next(self.batches, None) is None

    def take_until(self, condition: Callable[[], bool]) -> None:
        """Load batches, also of further epochs, until a condition is true."""
        while not condition():
            if self.taken == len(self._plan):
                self.take()
                self._begin_epoch()
            self.take(1)

    def resume(self, state: dict[str, Any], taken: int) -> None:
        """Continue an epoch where another object stopped."""
        self.loader.load_state_dict(state)
        self.batches, self.taken = iter(self.loader), taken

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._plan = self.loader.plan(self._epoch)
        self.batches, self.taken = iter(self.loader), 0


@pytest.fixture
def untiring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry damaged responses without delay and limit, for tests with hundreds of them."""
    monkeypatch.setattr(backoff, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(fetcher, "MAX_DAMAGED", 1000)


# -- connections that break


@pytest.mark.parametrize("fault", [Reset(), Cut(), Reset(0), Cut(0), Reset(1), Cut(1)], ids=repr)
def test_a_connection_that_breaks_in_the_middle_of_a_batch_is_made_again(proxy: FaultProxy, fault: Fault) -> None:
    """N1: after RST or FIN anywhere in a frame, the partial frame is discarded and requested again."""
    epoch = Checked(proxy.url, "large", 4)
    for _ in range(5):
        proxy.arm(fault)
        epoch.take_until(lambda: proxy.armed == 0)
    epoch.take()
    assert proxy.happened[type(fault).__name__] == 5


def test_all_connections_that_break_at_once_are_made_again(proxy: FaultProxy) -> None:
    """N1: all connections break repeatedly during an epoch, and each batch arrives once."""
    epoch = Checked(proxy.url, "large", 2)
    for number in range(10):
        epoch.take(5)
        proxy.drop_all(reset=number % 2 == 0)
    epoch.take()


# -- stalled connections


def test_a_silent_network_is_an_error_in_bounded_time_from_which_a_loop_resumes(proxy: FaultProxy) -> None:
    """N2: after `stall_timeout` a health check detects it; an error follows after `reconnect_timeout`."""
    epoch = Checked(proxy.url, "large", 4, reconnect_timeout=1)
    epoch.take(3)
    proxy.line = Line(silent=True)
    started = time.monotonic()
    with pytest.raises(ServerUnavailable, match=r"batch \d+ of epoch 0"):
        epoch.take()
    assert time.monotonic() - started < 15
    proxy.line = Line()
    again = Checked(proxy.url, "large", 4)
    again.resume(epoch.loader.state_dict(), epoch.taken)
    again.take()


def test_a_network_that_is_silent_for_a_while_costs_that_while(proxy: FaultProxy) -> None:
    """N2: the iteration continues by itself when data flow again."""
    epoch = Checked(proxy.url, "large", 4)
    epoch.take(3)
    proxy.line = Line(silent=True)
    accepted = proxy.accepted
    threading.Thread(target=_heal_after, args=(proxy, lambda: proxy.accepted >= accepted + 2)).start()
    epoch.take()


def _heal_after(proxy: FaultProxy, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    proxy.line = Line()


@pytest.mark.parametrize("fault", [Stall(), Stall(0), Omit()], ids=repr)
def test_a_response_that_stalls_is_requested_again(proxy: FaultProxy, fault: Fault) -> None:
    """N2: this holds although other responses arrive, and the connection stays open."""
    epoch = Checked(proxy.url, "large", 4)
    proxy.arm(fault)
    epoch.take()
    assert proxy.armed == 0


# -- wrong bytes


@pytest.mark.parametrize("kind", [Flip, Cut, Reset], ids=lambda kind: kind.__name__)
@pytest.mark.usefixtures("untiring")
def test_any_damaged_byte_of_a_frame_is_noticed(proxy: FaultProxy, kind: type[Flip | Cut | Reset]) -> None:
    """N3: with a flipped bit or a cut at each byte of a small frame, every batch still arrives exactly."""
    sizes: list[int] = []

    def measure(body: bytes) -> bytes:
        sizes.append(codec.frame_size(body[: codec.PROLOGUE_SIZE]))
        return body

    # with a client-side sampler, a response has few batches: most of it is the first frame
    order = [[index] for index in range(5000)]
    dataset = RemoteDataset(proxy.url, "small", stall_timeout=STALL_TIMEOUT)
    batches = enumerate(DataLoader(dataset, batch_sampler=order, output="numpy"))

    def take_until(condition: Callable[[], bool]) -> None:
        while not condition():
            k, batch = next(batches)
            assert np.array_equal(batch, hosted.small.table[[k]])

    proxy.arm(Rewrite(measure))
    take_until(lambda: bool(sizes))
    for at in range(sizes[0]):
        proxy.arm(Flip(at, at % 8) if kind is Flip else kind(at))
        take_until(lambda: proxy.armed == 0)
    assert proxy.happened[kind.__name__] == sizes[0] > 100


@pytest.mark.parametrize("part", ["request", "head", "body"])
def test_one_damaged_bit_leads_to_the_right_batch(start_server: StartServer, part: Part) -> None:
    """With any single flipped bit in a request's head, a response's head or a frame, each batch arrives exactly.

    A damaged request can be rejected in every way, request something else, or never end; a damaged response can have
    any status, size or version. This test flips one bit of each byte, and each bit of the status and of the version.
    """
    sizes: list[int] = []

    def measure(content: bytes) -> bytes:
        sizes.append(len(content))
        return content

    # a head that does not end is refused soon
    server = serve(start_server, "--limit", "header_timeout=0.5")
    with FaultProxy(server.url, seed=4) as proxy:
        dataset = RemoteDataset(proxy.url, "small", stall_timeout=STALL_TIMEOUT)
        loader = DataLoader(dataset, 4, sampler=range(4), output="numpy")

        def load_epoch() -> None:
            (batch,) = loader
            assert np.array_equal(batch, hosted.small.table[:4])
            assert proxy.armed == 0

        proxy.arm(Rewrite(measure), part=part)
        load_epoch()
        positions = [(at, at % 8) for at in range(sizes[0])]
        if part == "head":
            positions += [(at, bit) for at in range(len("HTTP/1.1 200")) for bit in range(8)]
        for at, bit in positions:
            proxy.arm(Flip(at, bit), part=part)
            load_epoch()
        assert proxy.happened["Flip"] == len(positions) > 200


@pytest.mark.parametrize("part", ["request", "head", "body"])
def test_one_damaged_bit_leads_to_the_right_sample(start_server: StartServer, part: Part) -> None:
    """The same holds for single samples, whose frame and index are checked, too."""
    sizes: list[int] = []

    def measure(content: bytes) -> bytes:
        sizes.append(len(content))
        return content

    with FaultProxy(serve(start_server, "--limit", "header_timeout=0.5").url, seed=4) as proxy:
        dataset = RemoteDataset(proxy.url, "small", stall_timeout=STALL_TIMEOUT)
        proxy.arm(Rewrite(measure), part=part)
        assert np.array_equal(dataset[17], hosted.small.table[17])
        for at in range(0, sizes[0], 3):
            proxy.arm(Flip(at, at % 8), part=part)
            assert np.array_equal(dataset[17], hosted.small.table[17])
            assert proxy.armed == 0


damage = st.one_of(
    st.builds(Flip, bit=st.integers(0, 7)),
    st.builds(Repeat, count=st.sampled_from([1, 64, 1000, 2**16])),
    st.builds(Cut),
    st.builds(Reset),
)


@pytest.mark.usefixtures("untiring")
def test_damage_anywhere_in_large_frames_is_noticed(proxy: FaultProxy) -> None:
    """N3: flipped bits, repeated bytes and cuts are detected in two consecutive responses."""
    epoch = Checked(proxy.url, "large", 3)

    @settings(max_examples=examples(40), suppress_health_check=list(HealthCheck))
    @given(st.lists(damage, min_size=1, max_size=2))
    def every_batch_arrives(faults: list[Fault]) -> None:
        for fault in faults:
            proxy.arm(fault)
        epoch.take_until(lambda: proxy.armed == 0)

    every_batch_arrives()
    epoch.take()


@pytest.mark.usefixtures("untiring")
def test_frames_that_are_swapped_are_not_taken_for_each_other(proxy: FaultProxy) -> None:
    """N3: an intact frame with a valid checksum is rejected if it is not the requested one."""
    swapped = 0

    def swap(body: bytes) -> bytes:
        nonlocal swapped
        size = codec.frame_size(body[: codec.PROLOGUE_SIZE])
        if len(body) < 2 * size or codec.frame_size(body[size : size + codec.PROLOGUE_SIZE]) != size:
            return body
        swapped += 1
        return body[size : 2 * size] + body[:size] + body[2 * size :]

    epoch = Checked(proxy.url, batch_size=1)
    while swapped < 5:
        proxy.arm(Rewrite(swap))
        epoch.take_until(lambda: proxy.armed == 0)
    epoch.take()


@pytest.mark.usefixtures("untiring")
def test_a_frame_that_comes_again_is_not_taken_for_the_next_one(proxy: FaultProxy) -> None:
    """N3: an intact earlier response in place of another one is rejected."""
    bodies: list[bytes] = []
    replayed = 0

    def replay(body: bytes) -> bytes:
        nonlocal replayed
        bodies.append(body)
        before = next((old for old in bodies[:-1] if len(old) == len(body) and old != body), None)
        replayed += before is not None
        return body if before is None else before

    epoch = Checked(proxy.url, "large", 3)
    while replayed < 5:
        proxy.arm(Rewrite(replay))
        epoch.take_until(lambda: proxy.armed == 0)
    epoch.take()


def test_a_network_that_damages_everything_is_a_clear_error(proxy: FaultProxy) -> None:
    """N3: three consecutive damaged responses raise an error."""
    epoch = Checked(proxy.url, "large", 4)
    epoch.take(1)
    proxy.arm(Flip(), times=1000)
    with pytest.raises(ProtocolError, match="3 consecutive damaged responses"):
        epoch.take()


# -- slow networks and slow training loops


def test_a_slow_link_is_slow_and_nothing_else(proxy: FaultProxy) -> None:
    """N4: a batch that takes longer than `stall_timeout` is no fault as long as data arrive."""
    epoch = Checked(proxy.url, "large", 4, reconnect_timeout=0)
    proxy.line = Line(latency=0.1, bandwidth=2**17)  # a batch in 2 s
    accepted = proxy.accepted
    epoch.take(2)
    assert proxy.accepted <= accepted + 3, "connections were given up"
    proxy.line = Line()
    epoch.take()


def test_a_link_that_passes_bytes_one_by_one_passes_all(proxy: FaultProxy) -> None:
    """N4: a frame may arrive in as many pieces as it has bytes."""
    proxy.line = Line(slice=1)
    epoch = Checked(proxy.url, batch_size=1)
    epoch.take(100)
    proxy.line = Line(slice=1, latency=0.1)
    epoch.take(100)
    proxy.line = Line()
    epoch.take()


def test_a_slow_training_step_loses_nothing(start_server: StartServer) -> None:
    """N5: a step may exceed all timeouts of the client; the server keeps only the prefetched batches."""
    with FaultProxy(serve(start_server).url, seed=4) as proxy:
        server = httpx.Client(base_url=proxy.target)
        epoch = Checked(proxy.url, "large", 4, reconnect_timeout=0)
        with server:
            for _ in range(3):
                epoch.take(1)
                time.sleep(2 * STALL_TIMEOUT)
                used = server.get("/stats").json()["server"]["memory_used"]
                # twice the prefetch of a loop whose speed is not known yet; the epoch has 100 batches
                assert used <= 32 * 4 * 2**16
        epoch.take()


# -- servers that come and go


def test_a_hundred_clients_return_to_a_server_that_restarts(start_server: StartServer, free_port: int) -> None:
    """N9: all clients reconnect within ten seconds, and receive each batch once."""
    first = serve(start_server, port=free_port)
    with ThreadPoolExecutor(20) as threads:
        epochs = list(threads.map(lambda _: Checked(first.url, batch_size=250), range(100)))
        list(threads.map(lambda epoch: epoch.take(2), epochs))
        first.kill()
        serve(start_server, port=free_port)
        started = time.monotonic()
        list(threads.map(lambda epoch: epoch.take(), epochs))
        assert time.monotonic() - started < 10


def test_a_host_name_that_moves_to_another_ip_address_is_followed(
    start_server: StartServer, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N12: the host name is resolved again for each connection."""
    addresses = {"loader.test": "127.0.0.1"}
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        return resolve(addresses.get(name, host), *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    first = serve(start_server, port=free_port)
    epoch = Checked(f"http://loader.test:{free_port}", "large", 4)
    epoch.take(3)
    serve(start_server, "--host", "127.0.0.2", port=free_port)
    first.kill()
    addresses["loader.test"] = "127.0.0.2"
    epoch.take()


def test_a_restarted_server_goes_on_with_the_very_next_batch(start_server: StartServer, free_port: int) -> None:
    """S1: this holds after three SIGKILLs during responses; no state of the killed process is needed."""
    server = serve(start_server, port=free_port)
    epoch = Checked(server.url, "large", 2)
    for _ in range(3):
        epoch.take(20)
        workers = server.worker_pids()
        server.kill()
        server = serve(start_server, port=free_port)
        epoch.take(1)
        assert not set(workers) & set(server.worker_pids())
    epoch.take()


def test_a_server_that_stays_away_is_one_error_that_says_where_to_go_on(start_server: StartServer) -> None:
    """S2: the error has server, epoch and batch, comes in bounded time, and the state works elsewhere."""
    server = serve(start_server)
    epoch = Checked(server.url, "large", 4, reconnect_timeout=0.5)
    epoch.take(2)
    server.kill()
    started = time.monotonic()
    with pytest.raises(ServerUnavailable, match=rf"{server.url} did not send batch \d+ of epoch 0"):
        epoch.take()
    assert time.monotonic() - started < 10
    elsewhere = Checked(serve(start_server).url, "large", 4)
    elsewhere.resume(epoch.loader.state_dict(), epoch.taken)
    elsewhere.take()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_one_of_two_servers_that_fails_is_done_without(start_server: StartServer, how: signal.Signals) -> None:
    """S3: the other server sends the remaining batches; a stopped one is ejected after `stall_timeout`."""
    failing, steady = serve(start_server), serve(start_server)
    epoch = Checked([failing.url, steady.url], "large", 2)
    epoch.take(20)
    os.kill(failing.pid, how)
    try:
        started = time.monotonic()
        epoch.take()
        assert time.monotonic() - started < 15
    finally:
        if how is signal.SIGSTOP:
            os.kill(failing.pid, signal.SIGCONT)


@pytest.mark.parametrize("both", [False, True], ids=["one server", "two servers"])
def test_a_server_that_stands_still_for_a_while_doubles_nothing(start_server: StartServer, both: bool) -> None:
    """S5: after it continues, its data belong to connections that are no longer read."""
    standing = serve(start_server)
    urls = [standing.url, *([serve(start_server).url] if both else [])]
    epoch = Checked(urls, "large", 2)
    for _ in range(2):
        epoch.take(10)
        os.kill(standing.pid, signal.SIGSTOP)
        goes_on = threading.Timer(2 * STALL_TIMEOUT, os.kill, (standing.pid, signal.SIGCONT))
        goes_on.start()
        epoch.take(50)
        goes_on.join()
    epoch.take()


# -- reverse proxies


def test_a_proxy_that_buffers_and_cuts_idle_connections_is_unnoticed(proxy: FaultProxy) -> None:
    """N13: responses arrive complete and late; idle connections are closed while the training loop computes."""
    proxy.line = Line(buffered=True, idle_limit=0.3)
    epoch = Checked(proxy.url, "large", 4)
    for _ in range(3):
        epoch.take(5)
        accepted = proxy.accepted
        eventually(lambda: proxy.connections == 0)
    epoch.take()
    assert proxy.accepted > accepted


NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    keepalive_timeout 1s;
    server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass {target}; }} }}
}}
"""


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_nginx_with_its_defaults_is_unnoticed(start_server: StartServer, free_port: int, tmp_path: Path) -> None:
    """N13: nginx's buffering and closing of idle connections have no effect on batches."""
    target = serve(start_server).url
    config = tmp_path / "nginx.conf"
    config.write_text(NGINX.format(folder=tmp_path, port=free_port, target=target))
    with subprocess.Popen(["nginx", "-c", str(config)], stderr=subprocess.DEVNULL) as nginx:
        try:
            epoch = Checked(f"http://127.0.0.1:{free_port}", "large", 4)
            epoch.take(10)
            time.sleep(1.5)
            epoch.take()
        finally:
            nginx.terminate()
