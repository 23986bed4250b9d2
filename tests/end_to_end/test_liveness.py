"""Liveness: servers that do not respond, clients without requests, and forked processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from teleloader import DataLoader, RemoteDataset, ServerUnavailable, TeleloaderError
from teleloader.api.control import Server
from teleloader.fetch import fetcher
from teleloader.transport import http
from teleloader_server import serve
from tests.conftest import StartServer, eventually
from tests.end_to_end import hosted

TARGET = "tests.end_to_end.hosted:"


def in_a_fork(function: Callable[[], bool]) -> bool:
    """Return the result of `function` in a fork of this process, which then exits."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if function() else 1
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def test_a_server_that_stands_still_is_unavailable(start_server: StartServer) -> None:
    """The kernel of a stopped server still acknowledges data, so only a health check detects it."""
    server = start_server(f"{TARGET}many", "--num-workers", "1")
    dataset = RemoteDataset(server.url, "many", reconnect_timeout=0.2, stall_timeout=0.4)
    batches = iter(DataLoader(dataset, 10, output="numpy"))
    seen = next(batches).tolist()
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(ServerUnavailable, match=r"did not send batch \d+ of epoch 0"):
        seen.extend(i for batch in batches for i in batch.tolist())
    os.kill(server.pid, signal.SIGCONT)
    assert seen == list(range(len(seen)))


def test_a_server_that_stood_still_goes_on(start_server: StartServer) -> None:
    """After a stop for less than reconnect_timeout, the client continues with the next batch."""
    server = start_server(f"{TARGET}many", "--num-workers", "1")
    batches = iter(DataLoader(RemoteDataset(server.url, "many", stall_timeout=0.4), 100, output="numpy"))
    seen = next(batches).tolist()
    os.kill(server.pid, signal.SIGSTOP)
    going_on = threading.Timer(1.5, os.kill, (server.pid, signal.SIGCONT))
    going_on.start()
    for batch in batches:
        seen += batch.tolist()
    going_on.join()
    assert seen == list(range(100_000))


def test_a_batch_may_take_as_long_as_it_takes(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a slow batch is computed, a health check on another connection shows that the server is alive."""
    gate = tmp_path_factory.mktemp("gate") / "gate"
    monkeypatch.setenv("GATE", str(gate))
    made: list[object] = []
    monkeypatch.setattr(http, "_open", _Watched(made, lambda: gate.touch() if len(made) > 2 else None))
    server = start_server(f"slow={TARGET}slow", "--num-workers", "1")
    dataset = RemoteDataset(server.url, "slow", reconnect_timeout=0, stall_timeout=0.3)
    batches = DataLoader(dataset, 4, output="numpy")
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]


class _Watched(set[object]):
    """Open connections, with an event for new ones."""

    def __init__(self, made: list[object], then: Callable[[], object]) -> None:
        super().__init__()
        self._made = made
        self._then = then

    def add(self, connection: object) -> None:
        self._made.append(connection)
        self._then()
        super().add(connection)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_that_thinks_for_long_keeps_its_workers(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, persistent: bool
) -> None:
    """Heartbeats keep a session without requests alive, within an epoch and between two epochs."""
    touched = threading.Semaphore(0)
    touch = Server.touch

    def counted(server: Server, key: str) -> None:
        touch(server, key)
        touched.release()

    monkeypatch.setattr(fetcher, "TOUCH_EVERY", 0.05)
    monkeypatch.setattr(Server, "touch", counted)
    server = start_server(f"{TARGET}stream", "--num-workers", "1")
    loader = DataLoader(
        RemoteDataset(server.url, "stream"), 2, num_workers=2, prefetch_factor=1, persistent_workers=persistent,
        output="numpy",
    )  # fmt: skip
    batches = iter(loader)
    seen = next(batches).tolist()
    for _ in range(3):
        assert touched.acquire(timeout=30)
    seen += [i for batch in batches for i in batch.tolist()]
    assert sorted(seen) == list(range(25))
    if persistent:
        while touched.acquire(blocking=False):
            pass
        assert touched.acquire(timeout=30)
        assert sorted(i for batch in loader for i in batch.tolist()) == list(range(25))


def test_an_idle_connection_that_the_server_closed_is_made_anew(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The client reconnects without a warning after a long step, in which servers and proxies close connections."""
    server = start_server(f"{TARGET}many", "--num-workers", "1")
    dataset = RemoteDataset(server.url, "many", reconnect_timeout=0)
    batches = iter(DataLoader(dataset, 10, prefetch_factor=1, num_workers=1, output="numpy"))
    seen = next(batches).tolist()
    eventually(lambda: server.stats()["consumers"][0]["batches_sent"] == 2)  # then no request is pending
    for connection in list(http._open):
        connection.shut_down()  # as it looks when the other side has closed it
    seen += [i for _ in range(50) for i in next(batches).tolist()]
    assert seen == list(range(510))


# --- Forks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def url() -> Iterator[str]:
    """Run a server with 100 samples; return its URL."""
    with serve(hosted.Samples(int, 100), num_workers=1) as url:
        yield url


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_iterates_for_itself(start_server: StartServer) -> None:
    """After a fork, as by Lightning, notebooks and torch, child and parent use separate connections."""
    server = start_server(f"{TARGET}many", "--num-workers", "1")
    loader = DataLoader(RemoteDataset(server.url, "many"), 1000, output="numpy")
    batches = iter(loader)
    seen = next(batches).tolist()
    assert in_a_fork(lambda: [i for batch in loader for i in batch.tolist()] == list(range(100_000)))
    for batch in batches:
        seen += batch.tolist()
    assert seen == list(range(100_000))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_cannot_go_on_with_an_iterator(url: str) -> None:
    """An iterator in a fork raises an error instead of hanging, since its thread belongs to the parent."""
    batches = iter(DataLoader(RemoteDataset(url), 10, output="numpy"))
    next(batches)

    def goes_on() -> bool:
        try:
            next(batches)
        except TeleloaderError as error:
            return f"an iterator of process {os.getppid()} in forked process {os.getpid()}" in str(error)
        return False

    assert in_a_fork(goes_on)
    assert len(list(batches)) == 9


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_keeps_no_connection_open(start_server: StartServer) -> None:
    """The server notices that the parent closed a connection, even while the child runs."""
    server = start_server(f"{TARGET}many", "--num-workers", "1")
    loader = DataLoader(RemoteDataset(server.url, "many"), 1, output="numpy")
    batches = iter(loader)
    next(batches)
    files = {os.readlink(f"/proc/self/fd/{connection._socket.fileno()}") for connection in http._open}
    assert files

    def has_none() -> bool:
        mine = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                mine.add(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:
                continue  # the descriptor of the listing itself
        return not files & mine

    assert in_a_fork(has_none)
    next(batches)
