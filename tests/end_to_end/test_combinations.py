"""Combinations of features: one feature leaves the batches of another one unchanged, after a resume too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.nn.utils.rnn import pad_sequence

from teleloader import DataLoader, LengthBalance, Mixture, Packing, RemoteDataset
from teleloader_server import CachedDataset, get_worker_info, serve
from tests.conftest import eventually
from tests.end_to_end.mesh_rank import MeshShape, device_mesh
from tests.end_to_end.ranks import Ranks

pytestmark = pytest.mark.timeout(300)

LENGTH = 200
LENGTHS = np.random.default_rng(0).integers(1, 60, LENGTH)
WEB, CODE = 90, 40
SLOW = 37
TWO_BY_TWO: MeshShape = ((2, 2), ("dp", "tp"))
PADDING = -1

Host = Callable[[str], str]
"""Function that returns the URL of the server with datasets of a kind."""


class Documents:
    """Deterministic documents: token t of document d is 1000 d + t.

    Args:
        first: Number of the first document.
        length: Number of documents.
    """

    def __init__(self, first: int, length: int) -> None:
        self.first = first
        self.sample_lengths = LENGTHS[first : first + length]

    def __len__(self) -> int:
        return len(self.sample_lengths)

    def __getitem__(self, index: int) -> Any:
        """Return a document."""
        return 1000 * (self.first + index) + np.arange(self.sample_lengths[index])


class Slow(Documents):
    """Documents of which one takes long."""

    def __getitem__(self, index: int) -> Any:
        """Return a document."""
        time.sleep(0.2 if index == SLOW else 0)
        return super().__getitem__(index)


class Fragile(Documents):
    """Documents of which every 25th fails."""

    def __getitem__(self, index: int) -> Any:
        """Return a document, or raise."""
        if index % 25 == 3:
            raise ValueError("damaged")
        return super().__getitem__(index)


class Noisy:
    """Documents with a random number in each token, and the epoch in the first one."""

    def __init__(self, documents: Any) -> None:
        self.documents, self.sample_lengths = documents, documents.sample_lengths
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.documents)

    def set_epoch(self, epoch: int) -> None:
        """Store the epoch."""
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        """Return a document."""
        tokens = self.documents[index] + 10**6 * np.random.randint(0, 1000, self.sample_lengths[index])
        tokens[0] += 10**12 * self.epoch
        return torch.from_numpy(tokens)


class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
    """Stateful stream of numbers, divided among the shards of all ranks."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of a shard."""
        info = get_worker_info()
        assert info is not None
        start, self.position = self.position, 0
        for number in range(start, 120 // info.num_workers):
            self.position = number + 1
            yield torch.tensor([info.id + number * info.num_workers, int(np.random.randint(2**31))])
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a position."""
        self.position = state["position"]


def padded(samples: list[Any]) -> Any:
    """Collate samples of various lengths."""
    return pad_sequence(samples, batch_first=True, padding_value=PADDING)


@pytest.fixture(scope="module")
def url_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Start the server of a kind when a test needs it first; datasets of all kinds have the same names."""
    folder = tmp_path_factory.mktemp("caches")
    urls: dict[str, str] = {}

    def noisy(kind: str, first: int, length: int) -> Noisy:
        name, _, cache = kind.partition(" ")
        documents: Any = {"slow": Slow, "fragile": Fragile}.get(name, Documents)(first, length)
        if cache:
            path = folder / f"{name} {first} {length}"
            documents = CachedDataset(documents, path, version="1", max_bytes=2**24)
        return Noisy(documents)

    with ExitStack() as stack:

        def start(kind: str) -> str:
            if kind not in urls:
                documents = {"text": (0, LENGTH), "web": (0, WEB), "code": (WEB, CODE)}
                hosted = {name: noisy(kind, *place) for name, place in documents.items()}
                server = serve({**hosted, "stream": Stream()}, num_workers=2, collate_fn=padded)
                urls[kind] = stack.enter_context(server)
            return urls[kind]

        yield start


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Start four ranks for the tests of this module."""
    with Ranks(4) as started:
        yield started
        for rank in range(4):
            started.kill(rank)  # workers of `serve` keep the connections open that tell them to exit


ORDERS: dict[str, dict[str, Any]] = {
    "shuffled": {"batch_size": 8},
    "fixed size": {"batch_size": 4, "balance": LengthBalance(window=40)},
    "max_tokens": {"balance": LengthBalance(max_tokens=512, window=48, group=2)},
    "packing": {"batch_size": 3, "packing": Packing(sequence_length=32, window=60, pad_token_id=PADDING)},
    "mixture": {"batch_size": 5},
}
ENDS: dict[str, dict[str, Any]] = {
    "pad": {"tail": "pad"},
    "drop": {"tail": "drop"},
    "uneven": {"tail": "uneven"},
    "drop_last": {"drop_last": True},
}


def loader_of(urls: str | list[str], order: str, **options: Any) -> DataLoader:
    """Return a loader with this order."""
    if order == "stream":
        return DataLoader(RemoteDataset(urls, "stream"), 4, num_workers=2, shuffle_buffer_size=10, seed=7, **options)
    dataset: Any = RemoteDataset(urls, "text")
    if order == "mixture":
        sources = {name: RemoteDataset(urls, name) for name in ("web", "code")}
        dataset = Mixture(sources, {0: {"web": 3, "code": 1}, 60: {"web": 1, "code": 1}}, samples=100)
    return DataLoader(dataset, shuffle=True, seed=7, **ORDERS[order], **options)


def plain(value: Any) -> Any:
    """Return a batch as lists."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def received(batches: Iterable[Any]) -> list[Any]:
    """Return batches as lists."""
    return [plain(batch) for batch in batches]


def documents_of(batch: Any) -> set[int]:
    """Return the documents whose tokens are in a batch."""
    rows = batch["input_ids"] if isinstance(batch, dict) else batch
    return {token % 10**6 // 1000 for row in rows for token in row if token != PADDING}


def history(make: Callable[[], DataLoader]) -> list[list[Any]]:
    """Return the batches of successive, selected, interrupted and resumed epochs."""
    loader = make()
    epochs = [received(loader) for _ in range(3)]
    for epoch in (5, 1, 1):
        loader.set_epoch(epoch)
        epochs.append(received(loader))
    batches = iter(loader)
    head = received(islice(batches, len(epochs[2]) // 2))
    state = loader.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    epochs.append(head + received(resumed))
    assert epochs[2:] == [epochs[2], epochs[3], epochs[1], epochs[1], epochs[2]]
    return [*epochs, received(resumed)]


def history_on_rank(url: str, order: str, **options: Any) -> list[list[Any]]:
    """Return the `history` of a rank of a device mesh."""
    return history(lambda: loader_of(url, order, mesh=device_mesh(TWO_BY_TWO), **options))


@pytest.mark.parametrize("order", ORDERS)
def test_batches_are_those_of_the_plan(url_of: Host, order: str) -> None:
    """The order that the other tests expect, which is tested elsewhere."""
    loader = loader_of(url_of("plain"), order)
    for epoch in range(2):
        for batch, indices in zip(received(loader), loader.plan(epoch), strict=True):
            assert documents_of(batch) == set(indices.tolist())


KINDS = [["plain"], ["plain", "second"], ["plain cached"], ["plain cached", "second"], ["slow"], ["slow", "second"]]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kinds", KINDS, ids=", ".join)
def test_batches_are_those_of_one_server(url_of: Host, order: str, kinds: list[str]) -> None:
    """Several servers, a sample cache, slow samples and prefetching of the next epoch change no batch."""
    urls = [url_of(kind) for kind in kinds]
    expected = history(lambda: loader_of(url_of("plain"), order))
    assert history(lambda: loader_of(urls, order, prefetch_next_epoch=True)) == expected


@pytest.mark.parametrize(
    ("order", "end"), [(order, end) for order in ORDERS for end in ENDS if (order, end) != ("max_tokens", "drop_last")]
)
def test_each_rank_prefetches_its_own_next_epoch(url_of: Host, order: str, end: str) -> None:
    """This holds for all treatments of the last samples, with which ranks can have different numbers of batches."""

    def loader(rank: int, **options: Any) -> DataLoader:
        return loader_of(url_of("plain"), order, rank=rank, world_size=2, **ENDS[end], **options)

    for rank in range(2):
        expected = history(partial(loader, rank))
        assert history(partial(loader, rank, prefetch_next_epoch=True)) == expected


@pytest.mark.parametrize("order", [order for order in ORDERS if order != "packing"])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_failed_samples_are_those_of_one_server(url_of: Host, order: str, on_error: str) -> None:
    """Batches without the failed samples, or with their replacements, do not depend on the other features either."""
    options: dict[str, Any] = {"on_error": on_error, "max_errors": 0.5}
    urls = [url_of("fragile"), url_of("fragile cached")]
    expected = history(lambda: loader_of(urls[0], order, **options))
    assert history(lambda: loader_of(urls, order, prefetch_next_epoch=True, **options)) == expected


SKIPPING: dict[str, Any] = {"on_error": "skip", "max_errors": 0.5}


@pytest.mark.parametrize(
    ("kind", "order", "options"),
    [
        *(("plain", order, {}) for order in [*ORDERS, "stream"]),
        *(("fragile", order, SKIPPING) for order in ("shuffled", "max_tokens")),
    ],
)
def test_a_group_of_ranks_receives_the_batches_of_its_data_rank(
    url_of: Host, ranks: Ranks, kind: str, order: str, options: dict[str, Any]
) -> None:
    """All ranks of a model-parallel group of a device mesh receive the batches of one rank without a mesh."""
    url = url_of(kind)
    found = ranks.each(history_on_rank, url, order, prefetch_next_epoch=True, **options)
    for rank in range(2):
        expected = history(lambda: loader_of(url, order, rank=rank, world_size=2, **options))  # noqa: B023
        assert found[2 * rank] == found[2 * rank + 1] == expected


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_remains_on_the_server(url_of: Host, order: str) -> None:
    """After a training run that prefetched, no request is open, and no worker computes a batch."""
    url = url_of("plain")
    loader = loader_of(url, order, prefetch_next_epoch=True)
    for _ in range(2):
        assert received(loader)
    del loader

    def is_idle() -> bool:
        stats = httpx.get(f"{url}/stats").raise_for_status().json()
        is_open = any(consumer["waiting"] and not consumer["idle"] for consumer in stats["consumers"])
        return not is_open and not any(worker["current_task"] for worker in stats["workers"])

    eventually(is_idle)


@pytest.mark.parametrize(
    ("order", "options", "error"),
    [
        ("packing", {"balance": LengthBalance()}, "balance"),
        ("packing", {"on_error": "skip"}, "on_error"),
        ("mixture", {"balance": LengthBalance()}, "balance excludes a Mixture"),
        ("mixture", {"packing": Packing(sequence_length=32)}, "packing excludes a Mixture"),
        ("stream", {"balance": LengthBalance()}, "balance requires a map-style dataset"),
        ("stream", {"packing": Packing(sequence_length=32)}, "packing requires a map-style dataset"),
        ("stream", {"on_error": "skip"}, "requires a map-style dataset"),
        ("shuffled", {"shuffle_buffer_size": 10}, "requires an iterable-style dataset: pass shuffle=True"),
        ("max_tokens", {"drop_last": True}, "max_tokens excludes"),
    ],
    ids=str,
)
def test_combinations_that_are_refused(url_of: Host, order: str, options: dict[str, Any], error: str) -> None:
    """The constructor raises, and the message states what to do."""
    with pytest.raises(ValueError, match=error):
        loader_of(url_of("plain"), order, **options)
