"""Prefetching of the next epoch of torch's samplers: the order and the random generators are those of torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchLoader

from teleloader import DataLoader, RemoteDataset
from tests.conftest import ServerProcess, eventually

LENGTH, SIZE, WORKERS = 42, 4, 2
WINDOW = 2 * WORKERS
EPOCHS = 4


class Noisy:
    """Map-style dataset of (index, epoch, random number)."""

    epoch = -1

    def __len__(self) -> int:
        return LENGTH

    def set_epoch(self, epoch: int) -> None:
        """Store the epoch."""
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return np.array([index, self.epoch, np.random.randint(2**31)])


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Host the dataset in another process, whose workers all loaders share."""
    started = ServerProcess("--port", "0", f"noisy={__name__}:Noisy", "--num-workers", str(WORKERS))
    yield started
    started.end()


Arguments = Callable[[], dict[str, Any]]


def seeded(seed: int) -> Any:
    """Return a torch.Generator."""
    return torch.Generator().manual_seed(seed)


ORDERS: dict[str, Arguments] = {
    "shuffle": lambda: {"batch_size": SIZE, "shuffle": True},
    "generator": lambda: {"batch_size": SIZE, "shuffle": True, "generator": seeded(1)},
    "drop_last": lambda: {"batch_size": SIZE, "shuffle": True, "drop_last": True},
    "no batches": lambda: {"batch_size": None, "shuffle": True},
    "replacement": lambda: {"batch_size": SIZE, "sampler": RandomSampler(range(LENGTH), True, 50, seeded(2))},
    "subset": lambda: {"batch_size": SIZE, "sampler": SubsetRandomSampler(list(range(3, 30)))},
    "weighted": lambda: {"batch_size": SIZE, "sampler": WeightedRandomSampler([1.0, 2.0] * 21, LENGTH)},
    "batch_sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(LENGTH)), SIZE, drop_last=False)},
    "in order": lambda: {"batch_size": SIZE, "sampler": SequentialSampler(range(LENGTH))},
    "persistent_workers": lambda: {
        "batch_size": SIZE, "shuffle": True, "persistent_workers": True, "num_workers": WORKERS,
    },
    "workers": lambda: {"batch_size": SIZE, "shuffle": True, "num_workers": WORKERS},
}  # fmt: skip


def loader(server: ServerProcess, order: str = "shuffle", **options: Any) -> Any:
    """Return a loader that prefetches the next epoch."""
    options = {"prefetch_next_epoch": True, **ORDERS[order](), **options}
    return DataLoader(RemoteDataset(server.url), **options)


def rows(batches: Any) -> list[Any]:
    """Return batches as lists of rows."""
    return [np.atleast_2d(np.asarray(batch)).tolist() for batch in batches]


def indices(batches: list[Any]) -> list[list[int]]:
    """Return the indices of each batch."""
    return [[row[0] for row in batch] for batch in batches]


def run(loading: Any, *, draws: bool = False, epochs: int = EPOCHS) -> list[Any]:
    """Return the batches of several epochs, and the state of the global generator after each of them."""
    torch.manual_seed(5)
    found = []
    for _ in range(epochs):
        found.append(rows(loading))
        if draws:
            torch.rand(1)
    return [*found, torch.get_rng_state().tolist()]


def prefetched(server: ServerProcess, count: int) -> Callable[[], bool]:
    """Return a condition: the server has sent `count` batches more than at the time of this call."""
    before = sent(server)
    return lambda: sent(server) >= before + count


def sent(server: ServerProcess) -> int:
    """Return the number of batches that the server has sent."""
    return int(server.stats()["datasets"][0]["batches_sent"])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("draws", [False, True], ids=["undisturbed", "training draws"])
def test_batches_and_generators_are_those_without_prefetching(server: ServerProcess, order: str, draws: bool) -> None:
    """Also if the training loop draws from the generator after the next epoch was prefetched."""
    assert run(loader(server, order), draws=draws) == run(loader(server, order, prefetch_next_epoch=False), draws=draws)


@pytest.mark.parametrize("order", [order for order in ORDERS if order != "no batches"])
def test_indices_are_those_of_torch(server: ServerProcess, order: str) -> None:
    """The order, and the draws from the global generator, are the same."""
    *found, state = run(loader(server, order))
    with_torch: Any = TorchLoader(Noisy(), **ORDERS[order]())
    *expected, expected_state = run(with_torch)
    assert [indices(epoch) for epoch in found] == [indices(epoch) for epoch in expected]
    assert state == expected_state


@pytest.mark.parametrize("order", ORDERS)
def test_prefetched_batches_are_used(server: ServerProcess, order: str) -> None:
    """The server sends each batch once, and after the last epoch a prefetch window."""
    loading = loader(server, order)
    began = sent(server)
    for epoch in range(1, 4):
        count = len(list(loading))
        eventually(lambda least=began + epoch * count + WINDOW: sent(server) >= least)  # type: ignore[misc]
    list(other := loader(server, prefetch_next_epoch=False))  # further time for the server
    assert sent(server) == began + 3 * count + WINDOW + len(other)


def test_the_next_epoch_is_prefetched_before_the_current_one_ends(server: ServerProcess) -> None:
    """Its first batches arrive while the training loop has the last batch."""
    loading = loader(server)
    batches = iter(loading)
    count = len(loading)
    more = prefetched(server, count + 1)
    for _ in range(count):
        next(batches)
    eventually(more)


def test_prefetching_changes_no_generator(server: ServerProcess) -> None:
    """Neither the global generators nor that of the loader."""
    generator = seeded(3)
    loading = loader(server, "generator", generator=generator)
    batches = iter(loading)
    for _ in range(len(loading) - 1):
        next(batches)
    more = prefetched(server, 1)
    states = [torch.get_rng_state().tolist(), random.getstate(), generator.get_state().tolist()]
    next(batches)
    eventually(more)
    assert states == [torch.get_rng_state().tolist(), random.getstate(), generator.get_state().tolist()]


def test_a_changed_sampler_discards_the_prefetched_batches(server: ServerProcess) -> None:
    """Weights that are changed between two epochs apply to the first batch."""
    sampler = WeightedRandomSampler([1.0] * LENGTH, LENGTH, generator=seeded(4))
    loading = loader(server, sampler=sampler, shuffle=None)
    more = prefetched(server, len(loading) + 1)
    list(loading)
    eventually(more)
    sampler.weights.zero_()[7] = 1
    assert {index for batch in indices(rows(loading)) for index in batch} == {7}


def test_a_changed_generator_discards_the_prefetched_batches(server: ServerProcess) -> None:
    """A seed that is set between two epochs applies."""
    first, second = loader(server), loader(server, prefetch_next_epoch=False)
    found = []
    for loading in (first, second):
        torch.manual_seed(0)
        more = prefetched(server, len(loading) + (loading is first))
        epochs = [rows(loading)]
        eventually(more)
        torch.manual_seed(9)
        found.append([*epochs, rows(loading)])
    assert found[0] == found[1]


@pytest.mark.parametrize("epochs", [[0, 1, 2, 3], [0, 2, 4, 6], [3, 3, 3, 3], [0, 5, 1, 2]])
def test_set_epoch_of_the_sampler_selects_its_order(server: ServerProcess, epochs: list[int]) -> None:
    """An epoch that was not expected is not prefetched wrongly."""
    sampler = DistributedSampler(range(LENGTH), 2, 1)
    loading = loader(server, sampler=sampler, shuffle=None)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        reference = DistributedSampler(range(LENGTH), 2, 1)
        reference.set_epoch(epoch)
        assert [index for batch in indices(rows(loading)) for index in batch] == list(reference)


def test_set_epoch_of_the_loader_selects_the_epoch_of_the_dataset(server: ServerProcess) -> None:
    """Batches that were prefetched for another number are discarded."""
    loading, plain = loader(server, "generator"), loader(server, "generator", prefetch_next_epoch=False)
    for epoch in (0, 1, 7, 8, 3):
        found = []
        for each in (loading, plain):
            torch.manual_seed(epoch)
            each.set_epoch(epoch)
            found.append(rows(each))
        assert found[0] == found[1]
        assert {row[1] for batch in found[0] for row in batch} == {epoch}


def test_a_long_epoch_is_not_forecast(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw of all samples would delay the training loop."""
    monkeypatch.setattr("teleloader.orders.MAX_SAMPLES", LENGTH - 1)
    loading = loader(server)
    began = sent(server)
    count = len(list(loading))
    list(loader(server, prefetch_next_epoch=False))  # further time for the server
    assert sent(server) == began + 2 * count


class Counting:
    """Sampler that counts its iterations."""

    def __init__(self) -> None:
        self.iterations = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        self.iterations += 1
        return iter(range(LENGTH))


def test_a_sampler_of_the_user_is_iterated_only_by_iter(server: ServerProcess) -> None:
    """It may have side effects, or depend on the training."""
    sampler = Counting()
    loading = loader(server, sampler=sampler, shuffle=None)
    for epoch in range(3):
        list(loading)
        assert sampler.iterations == epoch + 1


def test_a_training_loop_that_draws_from_the_generator_stops_the_prefetching(server: ServerProcess) -> None:
    """After two wrong forecasts, nothing is computed in vain."""
    loading = loader(server)
    for _ in range(4):
        list(loading)
        torch.rand(1)
    began = sent(server)
    assert len(list(loading)) == sent(server) - began
    list(loader(server, prefetch_next_epoch=False))  # further time for the server
    assert sent(server) - began == 2 * len(loading)


def test_an_abandoned_epoch_is_followed_by_the_next_one(server: ServerProcess) -> None:
    """Also if it ends among the last batches, while the next epoch is prefetched."""
    for count in (1, len(loader(server)) - 1, len(loader(server))):
        found = []
        for prefetch in (True, False):
            torch.manual_seed(1)
            loading = loader(server, prefetch_next_epoch=prefetch)
            batches = iter(loading)
            head = rows(next(batches) for _ in range(count))
            found.append([head, rows(loading)])
        assert found[0] == found[1]


@pytest.mark.parametrize("order", ["shuffle", "generator", "workers", "persistent_workers", "replacement"])
def test_a_state_is_independent_of_prefetching(server: ServerProcess, order: str) -> None:
    """A state that is saved at any batch continues with the same batches, and prefetches them."""
    torch.manual_seed(2)
    plain = loader(server, order, prefetch_next_epoch=False)
    expected = [rows(plain) for _ in range(3)]
    torch.manual_seed(2)
    loading = loader(server, order)
    for epoch in range(2):
        for count, _ in enumerate(loading, 1):
            if count % 3 and count < len(loading) - 2:
                continue
            state, generator = loading.state_dict(), torch.get_rng_state()
            resumed = loader(server, order)
            resumed.load_state_dict(state)
            rest = expected[epoch][count:]
            found = [rows(resumed)] if rest else []
            found.append(rows(resumed))
            assert found == [*([rest] if rest else []), expected[epoch + 1]]
            torch.set_rng_state(generator)


def test_load_state_dict_starts_to_prefetch(server: ServerProcess) -> None:
    """The batches after the saved position are sent before ``iter()``."""
    torch.manual_seed(2)
    saved = loader(server, prefetch_next_epoch=False)
    batches = iter(saved)
    next(batches)
    state = saved.state_dict()
    rest = rows(batches)
    more = prefetched(server, 2)
    resumed = loader(server)
    resumed.load_state_dict(state)
    eventually(more)
    assert resumed.state_dict() == state
    assert rows(resumed) == rest
