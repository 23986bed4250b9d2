"""Several servers, and loops that are interrupted: what servers rarely do, and a loader must stand."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from teleloader import DataLoader, ProtocolError, RemoteDataset, ServerUnavailable
from teleloader.fetch import fetcher
from teleloader.fetch.receiver import Receiver
from teleloader.fetch.scheduler import RangeScheduler
from teleloader.transport import http
from teleloader.transport.interface import BatchServer
from teleloader.transport.request import BatchRequest
from tests.client.fake_server import INFO, ITERABLE, Answer, Request, fake_server

RIGHT = [[k, k, k] for k in range(8)]


def load(
    *answers: Answer, info: dict[str, Any] = INFO, reconnect_timeout: float = 30, **arguments: Any
) -> list[list[int]]:
    """An epoch from several fake servers."""
    with ExitStack() as stack:
        urls = [stack.enter_context(fake_server(answer, info)) for answer in answers]
        dataset = RemoteDataset(urls, reconnect_timeout=reconnect_timeout, stall_timeout=0.5)
        return [batch[0].tolist() for batch in DataLoader(dataset, output="numpy", **arguments)]


def test_a_hedge_that_breaks_is_asked_again() -> None:
    """A server is stuck in a batch, and the other one's answer to the same ask fails once."""
    stuck = threading.Event()
    times = itertools.count(1)

    def answer(request: Request) -> bytes | int:
        """Get stuck at the first request for the first batch, fail at the second, and respond to the third."""
        if request.start == 0:
            match next(times):
                case 1:
                    stuck.wait(30)
                case 2:
                    return 503
                case _:
                    stuck.set()
        return request.right()

    assert load(answer, answer, num_workers=1, timeout=20) == RIGHT
    assert stuck.is_set()
    assert next(times) == 4


def test_the_first_request_is_sent_when_all_servers_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the client would prefetch from the first server what is assigned to others."""
    follow, first = Receiver.follow, list[int]()

    def slow_follow(receiver: Receiver, servers: Sequence[BatchServer]) -> None:
        time.sleep(0.2)
        follow(receiver, servers)

    def request(scheduler: RangeScheduler, server: int = 0, now: float = 0.0) -> BatchRequest | None:
        first.append(len(scheduler._servers))
        return next_request(scheduler, server, now)

    next_request = RangeScheduler.next_request
    monkeypatch.setattr(Receiver, "follow", slow_follow)
    monkeypatch.setattr(RangeScheduler, "next_request", request)
    assert load(Request.right, Request.right, Request.right) == RIGHT
    assert first[0] == 3


def test_index_lists_are_sent_whenever_a_batch_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it has come from elsewhere meanwhile: a server that is given none would be blamed for it."""
    monkeypatch.setattr(http, "SILENT_TIMEOUTS", 1)
    lists, going_on = [[k] for k in range(100)], threading.Event()
    bodies: list[Any] = []

    def hanging(request: Request) -> bytes:
        bodies.append(request.listed)
        if request.number == 6:
            going_on.wait(2)  # longer than a silent connection is kept
        return request.right()

    assert load(hanging, Request.right, batch_sampler=lists, num_workers=1) == lists
    assert all(bodies)


def test_a_proxy_whose_server_restarts_is_asked_again() -> None:
    """It answers 502, at a registration too."""
    left = iter([200, 502, 502])
    with fake_server(
        lambda request: 502 if request.number == 2 else request.right(), registering=lambda: next(left, 200)
    ) as url:
        assert [batch[0].tolist() for batch in DataLoader(RemoteDataset(url), output="numpy")] == RIGHT


def said(caplog: pytest.LogCaptureFixture, url: str) -> list[str]:
    """What was logged, in order: that a server is in trouble, and that it is not any more."""
    logged = [record.getMessage() for record in caplog.records if url in record.getMessage()]
    caplog.clear()
    return ["responds again" if line == f"{url} responds again" else "trouble" for line in logged]


def test_a_log_says_when_trouble_began_and_when_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    """Of the only server too, before an epoch and in the middle of one; once each, however often it is asked."""
    caplog.set_level(logging.WARNING, "teleloader")
    registering = iter([503, 503, 200, 503, 503])
    refused = iter([False, True, True, True])

    def answer(request: Request) -> bytes | int:
        return 503 if next(refused, False) else request.right()

    with fake_server(answer, registering=lambda: next(registering, 200)) as url:
        loader = DataLoader(RemoteDataset(url), output="numpy", prefetch_factor=2, num_workers=1)
        assert [batch[0].tolist() for batch in loader] == RIGHT
        assert said(caplog, url) == ["trouble", "responds again"] * 2
        assert [batch[0].tolist() for batch in loader] == RIGHT
        assert said(caplog, url) == []


def test_whoever_is_refused_is_not_asked_whether_a_server_runs() -> None:
    """It says why; that it cannot be reached is another matter."""
    with fake_server(Request.right, registering=lambda: 503) as url, pytest.raises(ServerUnavailable) as refused:
        next(iter(DataLoader(RemoteDataset(url, reconnect_timeout=0.1), output="numpy")))
    assert str(refused.value).endswith("(tried for 0.1 s)")
    with pytest.raises(ServerUnavailable, match=r"\(tried for 0\.1 s\)\. Check that teleloader-server is running"):
        RemoteDataset(url, reconnect_timeout=0.1)


def test_an_end_where_there_are_no_shards_is_damage() -> None:
    """Taken for one, it would be a batch that is silently left out."""
    assert load(lambda request: request.end(request.start) if request.number == 2 else request.right()) == RIGHT


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_loop_that_is_left_does_not_wait_for_a_silent_server(silent: str) -> None:
    """Its thread ends by itself, when the server has not answered."""
    with fake_server(Request.right) as url:
        loader = DataLoader(RemoteDataset([url, silent], stall_timeout=3), output="numpy")
        for _ in range(2):
            batches = iter(loader)
            next(batches)
            began = time.monotonic()
            del batches
            assert time.monotonic() - began < 2


def test_a_silent_server_is_waited_for_once(silent: str) -> None:
    """Not in each epoch: a loader is registered first where it was the last time."""
    with fake_server(Request.right) as url:
        loader = DataLoader(RemoteDataset([silent, url], stall_timeout=1), output="numpy")
        next(iter(loader))
        began = time.monotonic()
        next(iter(loader))
        assert time.monotonic() - began < 0.9


def test_shards_move_at_once_when_a_server_refuses_for_good() -> None:
    """Nobody else is receiving meanwhile; and when all refuse, that is told at once."""
    assert load(lambda request: 400, Request.right, info=ITERABLE, num_workers=1, timeout=4) == RIGHT
    with pytest.raises(ProtocolError, match="responded with 400"):
        load(lambda request: 400, lambda request: 400, info=ITERABLE, num_workers=1, timeout=4)


def test_shards_stay_where_they_are_after_a_damaged_answer() -> None:
    """Elsewhere they would have to be gone through from their beginning."""
    elsewhere: list[int] = []

    def damaged_once(request: Request) -> bytes:
        body = bytearray(request.right())
        if request.number == 3:
            body[-70] ^= 4
        return bytes(body)

    def other(request: Request) -> bytes:
        elsewhere.append(request.start)
        return request.right()

    assert load(damaged_once, other, info=ITERABLE) == RIGHT
    assert elsewhere == []


@pytest.mark.parametrize("servers", [1, 2])
def test_a_loop_that_thinks_is_heard_of(servers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each server where it has a session."""
    monkeypatch.setattr(fetcher, "TOUCH_EVERY", 0.05)
    heard = [threading.Event() for _ in range(servers)]

    def hear(event: threading.Event) -> Callable[[], int]:
        def heard_of() -> int:
            event.set()
            return 200

        return heard_of

    with ExitStack() as stack:
        urls = [stack.enter_context(fake_server(Request.right, touched=hear(event))) for event in heard]
        lists = [[k] for k in range(100)]
        batches = iter(DataLoader(RemoteDataset(urls), batch_sampler=lists, output="numpy", num_workers=1))
        seen = [next(batches)[0].tolist()]
        assert all(event.wait(30) for event in heard)
        assert seen + [batch[0].tolist() for batch in batches] == lists


# --- Loops that are interrupted, or wait twice --------------------------------------------------------------------


class Interrupted:
    """Index lists; the drawing of one of them is interrupted once, as by Ctrl-C."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._next = 0

    def __iter__(self) -> Interrupted:
        return self

    def __next__(self) -> list[int]:
        if self._next == self._at:
            self._at = -1
            raise KeyboardInterrupt
        if self._next == 30:
            raise StopIteration
        self._next += 1
        return [self._next - 1]


@pytest.mark.parametrize("at", [9, 10, 11, 29])
def test_an_interrupted_sampler_loses_nothing(at: int) -> None:
    """Who goes on with the iterator is given every batch."""
    got: list[list[int]] = []
    with fake_server(Request.right) as url:
        lists: Any = Interrupted(at)
        batches = iter(DataLoader(RemoteDataset(url), batch_sampler=lists, num_workers=4, timeout=20, output="numpy"))
        interrupts = 0
        while len(got) < 30:
            try:
                got.append(next(batches)[0].tolist())
            except KeyboardInterrupt:
                interrupts += 1
    assert interrupts == 1
    assert got == [[k] for k in range(30)]


async def test_two_tasks_cannot_wait_for_one_iterator() -> None:
    """As with asynchronous generators; the first one is not disturbed."""
    gate = threading.Event()

    def gated(request: Request) -> bytes:
        gate.wait(30)
        return request.right()

    with fake_server(gated) as url:
        batches: Any = await asyncio.to_thread(iter, DataLoader(RemoteDataset(url), output="numpy"))
        first = asyncio.create_task(batches.__anext__())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="asynchronous iterator is already running"):
            await batches.__anext__()
        gate.set()
        assert (await first)[0].tolist() == [0, 0, 0]
        await asyncio.to_thread(list, batches)


def test_an_event_loop_that_is_closed_under_a_task_breaks_nothing() -> None:
    """Who goes on with the iterator is given every batch."""
    gate = threading.Event()

    def gated(request: Request) -> bytes:
        gate.wait(30)
        return request.right()

    with fake_server(gated) as url:
        batches: Any = iter(DataLoader(RemoteDataset(url), output="numpy"))
        loop = asyncio.new_event_loop()
        task: Any = loop.create_task(batches.__anext__())
        loop.call_later(0.1, loop.stop)
        loop.run_forever()
        loop.close()
        gate.set()
        task._log_destroy_pending = False
        batches._is_awaited = False
        assert [batch[0].tolist() for batch in batches] == RIGHT
