"""Measurements of a loader: `stats()`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader, LoaderTimeout, RemoteDataset
from teleloader.stats import LATE_S, Arrival, Measures
from teleloader_server import serve
from tests.client.fake_server import ITERABLE, Request, fake_server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Run a server with 40 rows of 1,000 numbers; return its URL."""
    with serve([np.full(1000, number) for number in range(40)], num_workers=1) as address:
        yield address


def test_a_pass_is_measured(url: str) -> None:
    """stats() counts steps, received batches and decoding time; no memory is pinned and no connection breaks."""
    loader = DataLoader(RemoteDataset(url), 4, seed=0)
    list(loader)
    found = loader.stats()
    assert (found.epoch, found.steps, found.batches) == (0, 10, 10)
    assert found.bytes_received > 40 * 8000
    assert found.decode > 0
    assert (found.pin, found.reconnects, found.hedges) == (0.0, 0, 0)
    assert found.wait.count == 10, "the first one at least had to be waited for"
    assert 0 < found.wait.max <= found.waited <= found.elapsed
    assert found.waited_share == pytest.approx(found.waited / found.elapsed)


def test_the_figures_for_progress_bars_are_numbers_with_short_names(url: str) -> None:
    """The keys are identifiers, for keyword arguments, and both values follow from the statistics."""
    loader = DataLoader(RemoteDataset(url), 4, seed=0)
    assert loader.stats().postfix() == {"wait_pct": 0.0, "mb_s": 0.0}
    list(loader)
    found = loader.stats()
    assert found.postfix() == {
        "wait_pct": pytest.approx(100 * found.waited / found.elapsed),
        "mb_s": pytest.approx(found.bytes_received / found.elapsed / 1e6),
    }
    assert all(name.isidentifier() and len(name) <= 8 for name in found.postfix())


def test_each_pass_is_measured_for_itself(url: str) -> None:
    """Each iteration has its own figures, from 0; those of a finished iteration are final."""
    loader = DataLoader(RemoteDataset(url), 4, seed=0)
    before = loader.stats()
    assert (before.epoch, before.steps, before.waited, before.wait.count) == (None, 0, 0.0, 0)
    list(loader)
    assert loader.stats() == loader.stats()
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    second = loader.stats()
    assert (second.epoch, second.steps) == (1, 2)
    assert second.elapsed < loader.stats().elapsed, "it goes on"
    del iterator


def test_a_batch_that_is_there_is_not_waited_for(url: str) -> None:
    """Steps whose batch is available count as waits of zero time."""
    loader = DataLoader(RemoteDataset(url), 4, seed=0, prefetch_factor=10, num_workers=1)
    iterator = iter(loader)
    next(iterator)
    with loader._measures.waiting():
        while loader.stats().batches < 10:
            pass
    waited = loader.stats().waited
    list(iterator)
    found = loader.stats()
    assert (found.steps, found.wait.p50) == (10, 0.0)
    assert found.waited == pytest.approx(waited, rel=0.5)


def test_a_wait_in_progress_is_measured() -> None:
    """The data wait grows during a wait, as another thread can see; a wait that times out counts too."""
    gate = threading.Event()

    def answer(request: Request) -> bytes:
        gate.wait()
        return request.right()

    with fake_server(answer) as url:
        loader = DataLoader(RemoteDataset(url), output="numpy", timeout=0.3, num_workers=1)
        iterator = iter(loader)
        seen: list[float] = []
        looking = threading.Thread(target=lambda: seen.append(_growing(loader)))
        looking.start()
        with pytest.raises(LoaderTimeout):
            next(iterator)
        looking.join()
        after = loader.stats()
        gate.set()
        next(iterator)
    assert 0 < seen[0] <= after.waited
    assert after.steps == 0
    assert after.waited >= 0.3


def _growing(loader: DataLoader) -> float:
    """Return the data wait as soon as it is not zero."""
    while not (waited := loader.stats().waited):
        pass
    return waited


class Clock:
    """Clock that tests set."""

    now = 0.0
    used = 0.0
    """CPU time of the process."""


def test_a_wait_is_attributed_to_the_response_that_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts are the time until the first byte and until the last one; for another server, it is elsewhere."""
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    monkeypatch.setattr("time.process_time", lambda: clock.used)
    measures = Measures(0)
    clock.now = 10.0
    with measures.waiting():
        clock.now = 11.0
        assert measures.report("a").receiving is None, "nothing was received"
        measures.arrived("b", Arrival(10.5, 10.6, 0.01), 10.7, is_awaited=False)
        found = measures.report("a").receiving
        assert found is not None
        assert found.pending == pytest.approx(1.0), "the wait in progress"
        measures.arrived("a", Arrival(12.0, 15.0, 0.5), 16.0, is_awaited=True)
        clock.now, clock.used = 16.0 + LATE_S, 3.0
        measures.arrived("a", Arrival(16.0, 17.0, 0.1), 17.0, is_awaited=True)
    assert measures.report("a").receiving == pytest.approx((2.0, 3.0, 0.0, 5.2, 0.61, 3.0, 1, 1))
    assert measures.report("b").receiving == pytest.approx((0.0, 0.0, 5.0, 5.2, 0.61, 3.0, 1, 1))
    following = Measures(1, before=measures)
    assert following.report("a").receiving == measures.report("a").receiving


def test_what_arrived_before_the_wait_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the part of a response counts that arrives during the wait."""
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    monkeypatch.setattr("time.process_time", lambda: clock.used)
    measures = Measures(0)
    clock.now = 10.0
    with measures.waiting():
        measures.arrived("a", Arrival(8.0, 11.0, 0.0), 12.0, is_awaited=True)
        clock.now = 12.001
    found = measures.report("a").receiving
    assert found is not None
    assert (found.pending, found.reading, found.wakeups, found.late) == pytest.approx((0.0, 1.0, 1, 0))


def test_the_wait_of_a_loop_for_a_server_is_reported(url: str) -> None:
    """The parts are no longer than the wait, and each response is counted."""
    loader = DataLoader(RemoteDataset(url), 4, seed=0)
    list(loader)
    report = loader._measures.report(url)
    assert report.receiving is not None
    assert report.receiving.wakeups >= 1
    assert 0 < report.receiving.pending + report.receiving.reading <= report.waited
    assert report.receiving.cpu > 0
    assert report.receiving.busy > 0


async def test_asynchronous_loops_wait_too(url: str) -> None:
    """Waits of asynchronous loops are measured in the same way."""
    loader = DataLoader(RemoteDataset(url), 4, seed=0)
    async for _ in loader:
        await asyncio.sleep(0)
    found = loader.stats()
    assert found.steps == found.wait.count == 10
    assert found.waited > 0


def test_ends_of_shards_are_no_steps() -> None:
    """Ends of shards do not count as steps: the loop does not receive them."""
    with fake_server(Request.right, ITERABLE) as url:
        loader = DataLoader(RemoteDataset(url), num_workers=2, output="numpy")
        taken: list[Any] = list(loader)
        assert loader.stats().steps == len(taken) == 8


def test_broken_connections_are_counted() -> None:
    """Each connection that broke and was replaced is counted, whatever the cause."""

    def answer(request: Request) -> bytes | int:
        return 503 if request.number in (2, 4) else request.right()

    with fake_server(answer) as url:
        loader = DataLoader(RemoteDataset(url), output="numpy")
        assert len(list(loader)) == 8
        assert 1 <= loader.stats().reconnects <= 2
