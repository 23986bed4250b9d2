"""Shuffle buffer: shards of an iterable-style dataset in a seeded order, which any interruption leaves unchanged."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset, StateMismatch
from teleloader_server import get_worker_info, serve
from tests.conftest import StartServer
from tests.end_to_end.test_worker_faults import count, shared_counter

LENGTH = 50
KINDS = ["stateful", "generator"]
PLACES = ["in this process", "local workers", "server", "server without shards"]


class Generator:
    """Dataset of numbers with a random number each, divided among the workers; without a state."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.position = 0
        self.dies_at: int | None = None
        self.died = shared_counter()

    def __iter__(self) -> Iterator[tuple[int, float]]:
        self.position = 0
        return self._from_here()

    def _from_here(self) -> Iterator[tuple[int, float]]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first + self.position * step, self.length, step):
            if number == self.dies_at and count(self.died) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            self.position += 1
            yield number, random.random()


class Stateful(Generator):
    """The same with a state."""

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return self._from_here()

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from the position."""
        self.position = state["position"]


def augment(samples: list[tuple[int, float]]) -> tuple[list[int], list[float], float]:
    """Collate with a random number of the batch."""
    numbers, drawn = zip(*samples, strict=True)
    return list(numbers), list(drawn), float(np.random.random())


def dataset_of(kind: str) -> Generator:
    """Return a dataset of this kind."""
    return Stateful() if kind == "stateful" else Generator()


@contextmanager
def loaders(place: str, kind: str) -> Iterator[Any]:
    """Yield a function that creates a loader of a new dataset at this place."""
    with ExitStack() as stack:

        def make(size: int | None = 12, seed: int | None = 7, **more: Any) -> DataLoader:
            dataset: Any = dataset_of(kind)
            shards = {"in this process": 0, "server without shards": 0}.get(place, 2)
            if "server" in place:
                dataset = RemoteDataset(stack.enter_context(serve(dataset, num_workers=2)))
            arguments = {"batch_size": 4, "num_workers": shards, "collate_fn": augment, "output": "numpy", **more}
            return DataLoader(dataset, shuffle_buffer_size=size, seed=seed, **arguments)

        yield make


def numbers_of(batches: list[Any]) -> list[int]:
    """Return the samples of batches, in order."""
    return [number for numbers, _, _ in batches for number in numbers]


@pytest.mark.parametrize("place", PLACES)
def test_each_sample_is_in_an_epoch_once(place: str) -> None:
    """The order is that of seed, epoch and number of shards; epochs and seeds differ."""
    with loaders(place, "generator") as make:
        loader = make()
        epochs = [numbers_of(list(loader)) for _ in range(2)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(LENGTH))] * 2
        assert epochs[0] != epochs[1]
        assert numbers_of(list(make(seed=8))) != epochs[0]
        again = make()
        assert [numbers_of(list(again)) for _ in range(2)] == epochs
        assert numbers_of(list(make(size=None))) != epochs[0]


def test_random_numbers_of_batches_differ() -> None:
    """Dataset and collate function draw random numbers that are not repeated from batch to batch."""
    with loaders("server", "generator") as make:
        batches = list(make())
    drawn = [number for _, each, _ in batches for number in each]
    of_batches = [number for _, _, number in batches]
    assert len(set(of_batches)) == len(batches)
    assert len(set(drawn)) > LENGTH // 2


@pytest.mark.parametrize("seed", [7, None])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_each_state_resumes_the_order(place: str, kind: str, seed: int | None) -> None:
    """From the state after any batch, batches are equal, with all random numbers, and so is the next epoch."""
    with loaders(place, kind) as make:
        loader = make(seed=seed)
        expected, states = [], [loader.state_dict()]
        for batch in loader:
            expected.append(batch)
            states.append(json.loads(json.dumps(loader.state_dict())))
        following = list(loader)
        for done in (0, 1, 5, len(expected) - 1):
            resumed = make(seed=seed)
            resumed.load_state_dict(states[done])
            if done and seed is None and place == "in this process":
                # random numbers come from the process's generators, as in torch, and are drawn again
                assert numbers_of(list(resumed)) == numbers_of(expected[done:])
            elif done or (seed is not None and place != "in this process"):
                assert list(resumed) == expected[done:]
            if seed is not None and place != "in this process":
                assert list(resumed) == following


def test_a_state_does_not_contain_the_samples() -> None:
    """Its size depends neither on the size of the buffer nor on the position."""
    with loaders("server", "stateful") as make:
        sizes = []
        for size in (2, 8):
            loader = make(size)
            for _ in zip(range(9), loader, strict=False):
                pass
            sizes.append(len(json.dumps(loader.state_dict())))
    assert max(sizes) - min(sizes) < 100


@pytest.mark.parametrize("dies_at", [3, 34, 41])
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_dies_changes_nothing(kind: str, dies_at: int) -> None:
    """The replacement restores the buffer; batches are equal."""
    arguments: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "collate_fn": augment, "output": "numpy"}
    arguments |= {"shuffle_buffer_size": 8, "seed": 7, "prefetch_factor": 1}
    with serve(dataset_of(kind), num_workers=2) as url:
        expected = list(DataLoader(RemoteDataset(url), **arguments))
    dying = dataset_of(kind)
    dying.dies_at = dies_at
    with serve(dying, num_workers=2) as url:
        if dies_at == 3 and kind == "generator":  # before the first batch: nothing shows where it was
            with pytest.raises(Exception, match="no delivered batch or state shows its position"):
                list(DataLoader(RemoteDataset(url), **arguments))
            return
        assert list(DataLoader(RemoteDataset(url), **arguments)) == expected
    assert count(dying.died) == 3


def test_a_server_that_restarts_changes_nothing(start_server: StartServer, free_port: int) -> None:
    """The client's record restores the shards on the new server."""

    def start() -> Any:
        return start_server("data=tests.end_to_end.hosted:long_stream", "--num-workers", "1", port=free_port)

    server = start()
    arguments: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 1, "output": "numpy"}
    arguments |= {"shuffle_buffer_size": 100, "seed": 3}
    loader = DataLoader(RemoteDataset(server.url, "data"), 2, **arguments)
    expected = [batch.tolist() for batch in loader]
    assert sorted(chain.from_iterable(expected)) == list(range(1000))
    loader.set_epoch(0)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(60)]
    server.kill()
    start()
    assert seen + [batch.tolist() for batch in batches] == expected


class Unhurried(Generator):
    """Dataset whose samples take time."""

    def __iter__(self) -> Iterator[tuple[int, float]]:
        for sample in super().__iter__():
            time.sleep(0.03)
            yield sample


@pytest.mark.parametrize("done", [0, 5])
def test_no_timeout_ends_the_filling_of_a_buffer(done: int) -> None:
    """Each sample that is read counts as progress of the batch, at the start and after a resume."""
    with serve(Unhurried(), num_workers=1, batch_timeout=0.7) as url:  # the buffer is filled in 1.5 s
        arguments: dict[str, Any] = {"shuffle_buffer_size": LENGTH, "seed": 7, "output": "numpy"}
        loader = DataLoader(RemoteDataset(url), 5, num_workers=1, **arguments)
        expected = [numbers for numbers, _ in loader]
        assert sorted(np.concatenate(expected).tolist()) == list(range(LENGTH))
        loader.set_epoch(0)
        batches = iter(loader)
        for _ in range(done):
            next(batches)
        resumed = DataLoader(RemoteDataset(url), 5, num_workers=1, **arguments)
        resumed.load_state_dict(loader.state_dict())
        assert np.array_equal([numbers for numbers, _ in resumed], expected[done:])


def test_a_buffer_stays_within_the_memory_limit_of_workers(start_server: StartServer) -> None:
    """A shard with a larger buffer ends with an error; the limit ends no shard without a buffer."""
    limits = ("--num-workers", "1", "--max-worker-memory", "300MiB")
    server = start_server("data=tests.end_to_end.hosted:wide_stream", *limits)

    def loader_of(**options: Any) -> DataLoader:
        return DataLoader(RemoteDataset(server.url, "data"), 10, num_workers=1, output="numpy", **options)

    batches = iter(loader_of(shuffle_buffer_size=500, seed=7))
    with pytest.raises(MemoryError, match=r"a shuffle buffer of 500 samples of dataset 'data'.*--max-worker-memory"):
        next(batches)
    assert list(batches) == []
    for options in ({"shuffle_buffer_size": 20, "seed": 7}, {}):
        assert sum(len(batch) for batch in loader_of(**options)) == 600


@pytest.mark.parametrize(("name", "value"), [("size", 13), ("size", None), ("seed", 8)])
def test_a_state_of_another_order_is_refused(name: str, value: int | None) -> None:
    """It would lose some samples and repeat others."""
    with loaders("server", "stateful") as make:
        loader = make()
        next(iter(loader))
        with pytest.raises(StateMismatch, match=r"the state was saved with (shuffle_buffer_size|seed) = "):
            make(**{name: value}).load_state_dict(loader.state_dict())
        unshuffled = make(size=None)
        next(iter(unshuffled))
        with pytest.raises(StateMismatch, match="the state was saved with shuffle_buffer_size = None"):
            make().load_state_dict(unshuffled.state_dict())


def test_the_buffer_requires_a_stream() -> None:
    """A map-style dataset is shuffled as a whole, and the error for shuffle=True names the option for a stream."""
    with pytest.raises(ValueError, match="shuffle_buffer_size=5 requires an iterable-style dataset: pass shuffle=True"):
        DataLoader(list(range(9)), shuffle_buffer_size=5)
    with pytest.raises(ValueError, match=r"shuffle_buffer_size must be an integer in \[1, 16777216\], got 0"):
        DataLoader(Generator(), shuffle_buffer_size=0)
    with pytest.raises(ValueError, match="expected unspecified shuffle option") as caught:
        DataLoader(Generator(), shuffle=True)
    assert "shuffle_buffer_size=" in str(caught.value.__notes__)
