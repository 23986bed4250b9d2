"""Small batches that a worker computes as a group: faults, states and limits hold for each batch of it."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from teleloader_server.dispatch.engine import Engine
from tests.conftest import eventually
from tests.end_to_end.hosted import Stream
from tests.end_to_end.test_websocket import frames, register, send_range, stream

BATCHES = 400
MEMORY = 2**20
"""Memory budget of a server in bytes, less than an epoch of rows of `WIDE` numbers."""
WIDE = 1024


class Rows:
    """Dataset of small samples; at some, a worker misbehaves."""

    def __init__(self, *, kills: int = -1, fails: int = -1, hangs: int = -1, width: int = 4) -> None:
        context = get_context("fork")
        self._kills, self._fails, self._hangs = kills, fails, hangs
        self._width = width
        self._killed = context.Event()
        self.hanging = context.Event()
        self.opened = context.RawValue("b", False)  # an Event does not survive the death of a process that waits for it

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        if index == self._kills and not self._killed.is_set():
            self._killed.set()
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self._fails:
            raise ValueError(f"sample {index}")
        if index == self._hangs:
            self.hanging.set()
            while not self.opened.value:
                time.sleep(0.01)
        return np.full(self._width, index), index


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """Numbers of the batches that workers reported together."""
    found: list[list[int]] = []
    tasks_done = Engine.tasks_done

    def record(engine: Engine, worker: int, tasks: Any, *rest: Any) -> None:
        found.append([task.batch_id.batch for task in tasks])
        tasks_done(engine, worker, tasks, *rest)

    monkeypatch.setattr(Engine, "tasks_done", record)
    yield found
    assert any(len(group) > 1 for group in found), "no batches were computed together"


def index_of(batch: Any) -> int:
    """Return the index of a batch's only sample, after a check of its content."""
    row, index = batch
    assert row.tolist() == [[int(index[0])] * row.shape[1]]
    return int(index[0])


def loader_of(url: str, **arguments: Any) -> DataLoader:
    """Return a loader of single samples as NumPy arrays, whose seed makes it use the shared workers."""
    return DataLoader(RemoteDataset(url), output="numpy", **{"seed": 3, **arguments})


def test_a_worker_killed_within_a_group_costs_no_batch(groups: list[list[int]]) -> None:
    """The batches of the group are computed again, each by itself, and arrive once and in order."""
    with serve(Rows(kills=237), num_workers=2) as url:
        assert [index_of(batch) for batch in loader_of(url)] == list(range(BATCHES))


def received(url: str, key: str, start: int) -> list[int]:
    """Request the batches [start, BATCHES) over a WebSocket; return their numbers and check their content."""
    numbers = []
    with stream(url, key) as socket:
        send_range(socket, 0, start, BATCHES)
        for frame in frames(socket, BATCHES - start):
            numbers.append(frame.batch_id.batch)
            assert index_of(frame.content) == numbers[-1]
    return numbers


def test_a_worker_killed_within_a_group_costs_no_batch_of_a_websocket(groups: list[list[int]]) -> None:
    """The batches arrive once and in order, as over HTTP."""
    with serve({"rows": Rows(kills=237)}, num_workers=2) as url:
        assert received(url, register(url, dataset="rows", batch_size=1), 0) == list(range(BATCHES))


def test_a_websocket_continues_at_any_batch_of_a_group(groups: list[list[int]]) -> None:
    """The memory is too small for an epoch, so that the batches are computed in other groups each time."""
    with serve({"rows": Rows(width=WIDE)}, num_workers=2, memory_budget=MEMORY) as url:
        key = register(url, dataset="rows", batch_size=1)
        for start in [0, *range(100, 170, 7)]:
            assert received(url, key, start) == list(range(start, BATCHES))


def test_memory_that_is_full_within_a_group_costs_no_batch(groups: list[list[int]]) -> None:
    """A consumer that pauses at any batch of a group receives the others once and in order."""
    with serve(Rows(width=WIDE), num_workers=2, memory_budget=MEMORY) as url:
        batches = iter(loader_of(url))
        for k in range(BATCHES):
            if k % 37 == 0:
                computed = -1
                while computed != (computed := sum(map(len, groups))):
                    time.sleep(0.1)
            assert index_of(next(batches)) == k
        assert next(batches, None) is None


def test_a_failure_within_a_group_is_raised_in_place_of_its_batch(groups: list[list[int]]) -> None:
    """All other batches of the group arrive."""
    arrived, errors = [], []
    with serve(Rows(fails=237), num_workers=1) as url:
        batches = iter(loader_of(url))
        while True:
            try:
                arrived.append(index_of(next(batches)))
            except StopIteration:
                break
            except ValueError as error:
                errors.append(error)
                arrived.append(-1)
    assert arrived == [*range(237), -1, *range(238, BATCHES)]
    assert "sample 237" in str(errors[0])


def test_batches_before_one_that_hangs_arrive(groups: list[list[int]]) -> None:
    """They do not wait for the rest of the group, and other workers compute the batches after it."""
    dataset = Rows(hangs=237)
    with serve(dataset, num_workers=2) as url:
        batches = iter(loader_of(url))
        assert [index_of(next(batches)) for _ in range(237)] == list(range(237))
        assert dataset.hanging.wait(60)
        eventually(lambda: any(238 in group for group in groups))
        dataset.opened.value = True
        assert [index_of(batch) for batch in batches] == list(range(237, BATCHES))


def test_a_state_within_a_group_continues_with_the_next_batch(groups: list[list[int]]) -> None:
    """At each batch of several groups, also with a shuffled order."""
    with serve(Rows(), num_workers=2) as url:
        loader = loader_of(url, shuffle=True)
        order, states = [], []
        for batch in loader:
            order.append(index_of(batch))
            states.append(loader.state_dict())
        assert sorted(order) == list(range(BATCHES))
        for taken in range(100, 170, 3):
            resumed = loader_of(url, shuffle=True)
            resumed.load_state_dict(states[taken - 1])
            again = iter(resumed)
            assert [index_of(next(again)) for _ in range(20)] == order[taken : taken + 20]


def test_consumers_that_share_groups_get_every_batch(groups: list[list[int]]) -> None:
    """One that lags behind gets the batches of a group that another one has already received."""
    with serve(Rows(), num_workers=2, memory_budget=2**20) as url:
        quick, slow = iter(loader_of(url)), iter(loader_of(url))
        got: list[int] = []
        for k in range(BATCHES):
            assert index_of(next(quick)) == k
            if k % 3 == 0:
                got.append(index_of(next(slow)))
        got += [index_of(batch) for batch in slow]
    assert got == list(range(BATCHES))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_groups_of_an_iterable_style_dataset_keep_the_order_of_shards(
    groups: list[list[int]], num_workers: int
) -> None:
    """Each worker computes every `num_workers`-th batch, until its shard ends."""
    with serve(Stream(BATCHES), num_workers=num_workers) as url:
        loader = loader_of(url, seed=None, num_workers=num_workers, prefetch_factor=32)
        batches = [batch.tolist() for batch in loader]
    assert sorted(itertools.chain(*batches)) == list(range(BATCHES))
    steps = {after - before for group in groups for before, after in itertools.pairwise(group)}
    assert steps == {num_workers}


def test_lists_of_a_sampler_reach_the_right_batch(groups: list[list[int]]) -> None:
    """A group's index lists travel together."""
    order = np.random.default_rng(0).permutation(BATCHES).tolist()
    with serve(Rows(), num_workers=2) as url:
        assert [index_of(batch) for batch in loader_of(url, seed=None, sampler=order)] == order


def test_results_are_reported_while_the_worker_computes_on(groups: list[list[int]]) -> None:
    """A group that lasts longer than a few milliseconds is reported in parts."""

    class Uneven(Rows):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.05 if index == 300 else 0)
            return super().__getitem__(index)

    with serve(Uneven(), num_workers=1) as url:
        assert [index_of(batch) for batch in loader_of(url)] == list(range(BATCHES))
        eventually(lambda: any(300 in group for group in groups))
    (group,) = [group for group in groups if 300 in group]
    assert group[-1] == 300, "its own report ends with the slow batch"
