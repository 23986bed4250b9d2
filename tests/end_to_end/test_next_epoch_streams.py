"""Prefetching of the next epoch of an iterable-style dataset, by other workers than those of the current epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset

from teleloader import DataLoader, RemoteDataset
from teleloader_server import get_worker_info
from tests.conftest import ServerProcess, eventually

LENGTH, SIZE, SHARDS = 50, 4, 2
WINDOW = 2 * SHARDS


class Stream(IterableDataset):  # type: ignore[misc]
    """Stream of (number, epoch, random number), divided among shards of unequal length."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        """Store the epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of a shard."""
        info = get_worker_info() or torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, LENGTH - 7 * first, step):
            yield torch.tensor([number, self.epoch, int(torch.randint(2**31, ()))])


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Host the dataset in another process."""
    started = ServerProcess("--port", "0", f"stream={__name__}:Stream", "--num-workers", "1")
    yield started
    started.end()


OPTIONS: dict[str, dict[str, Any]] = {
    "torch's seeds": {},
    "seed": {"seed": 7},
    "shuffle buffer": {"seed": 7, "shuffle_buffer_size": 10},
    "generator": {},
}


def loader(server: ServerProcess, kind: str = "seed", **options: Any) -> Any:
    """Return a loader that prefetches the next epoch."""
    options = {"prefetch_next_epoch": True, "num_workers": SHARDS, **OPTIONS[kind], **options}
    if kind == "generator":
        options["generator"] = torch.Generator().manual_seed(3)
    return DataLoader(RemoteDataset(server.url), SIZE, **options)


def rows(batches: Any) -> list[Any]:
    """Return batches as lists of rows."""
    return [batch.tolist() for batch in batches]


def sessions(server: ServerProcess) -> int:
    """Return the number of private worker pools."""
    return len({worker["loader"] for worker in server.stats()["workers"]} - {None})


def sent(server: ServerProcess) -> int:
    """Return the number of batches that the server has sent."""
    return int(server.stats()["datasets"][0]["batches_sent"])


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("draws", [False, True], ids=["undisturbed", "training draws"])
def test_batches_and_generators_are_those_without_prefetching(server: ServerProcess, kind: str, draws: bool) -> None:
    """Also if the training loop draws from the generator after the workers were started."""
    found = []
    for prefetch in (True, False):
        torch.manual_seed(5)
        loading = loader(server, kind, prefetch_next_epoch=prefetch)
        epochs = []
        for _ in range(4):
            epochs.append(rows(loading))
            if draws:
                torch.rand(1)
        found.append((epochs, torch.get_rng_state().tolist()))
    assert found[0] == found[1]


def test_numbers_are_those_of_torch(server: ServerProcess) -> None:
    """Shards end at different batches, in both epochs."""
    loading = loader(server, "torch's seeds")
    for _ in range(2):
        with_torch = TorchLoader(Stream(), SIZE, num_workers=SHARDS)
        numbers = [[row[0] for row in batch] for batch in rows(with_torch)]
        assert [[row[0] for row in batch] for batch in rows(loading)] == numbers


def test_other_workers_compute_the_first_batches_of_the_next_epoch(server: ServerProcess) -> None:
    """They are sent before the epoch starts, and used."""
    loading = loader(server)
    before = sent(server)
    count = len(list(loading))
    eventually(lambda: sent(server) > before + count)
    eventually(lambda: sessions(server) == 1)
    assert [row[1] for batch in rows(loading) for row in batch] == [1] * sum(map(len, rows(loader(server))))


@pytest.mark.parametrize("epochs", [[0, 1, 2], [4, 4, 4], [0, 3, 1]])
def test_set_epoch_replaces_the_prefetched_epoch(server: ServerProcess, epochs: list[int]) -> None:
    """The dataset sees the selected number, and the seeds are those of the epoch."""
    loading = loader(server)
    for epoch in epochs:
        loading.set_epoch(epoch)
        plain = loader(server, prefetch_next_epoch=False)
        plain.set_epoch(epoch)
        assert rows(loading) == rows(plain)


def test_sessions_end_with_the_loader(server: ServerProcess) -> None:
    """Neither a prefetched epoch that is not needed nor a replaced one leaves workers."""
    loading = loader(server)
    for epoch in (0, 1, 5):
        loading.set_epoch(epoch)
        list(loading)
    del loading
    eventually(lambda: sessions(server) == 0)


@pytest.mark.parametrize("kind", ["seed", "torch's seeds"])
def test_a_state_is_independent_of_prefetching(server: ServerProcess, kind: str) -> None:
    """A state that is saved at any batch continues with the same samples."""
    torch.manual_seed(2)
    plain = loader(server, kind, prefetch_next_epoch=False)
    expected = [rows(plain) for _ in range(2)]
    torch.manual_seed(2)
    loading = loader(server, kind)
    for count, _ in enumerate(loading, 1):
        state, generator = loading.state_dict(), torch.get_rng_state()
        if count % 4 == 0 or count >= len(expected[0]) - 2:
            resumed = loader(server, kind)
            resumed.load_state_dict(state)
            rest = [[row[0] for row in batch] for batch in expected[0][count:]]
            found = [[row[0] for row in batch] for batch in rows(resumed)]
            assert found == rest or (not rest and found)
        torch.set_rng_state(generator)


def test_persistent_workers_are_not_prefetched(server: ServerProcess) -> None:
    """They are the same in both epochs, and continue from the end of the epoch."""
    counts = []
    for prefetch in (True, False):
        loading = loader(server, persistent_workers=True, prefetch_next_epoch=prefetch)
        before = sent(server)
        list(loading)
        list(loader(server, prefetch_next_epoch=False))  # further time for the server
        counts.append(sent(server) - before)
    assert counts[0] == counts[1]
