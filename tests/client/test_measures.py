"""Measurements of a loader: `stats()`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader, LoaderTimeout, RemoteDataset
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
