"""Copies and pickles of loaders and remote datasets: new objects with the same arguments."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from teleloader import DataLoader, RemoteDataset, ServerUnavailable
from teleloader.frameworks import SkippedBatches
from teleloader.testing import FakeServer
from teleloader_shared.secret import Secret
from tests.conftest import need

TOKEN = "a-token-of-24-characters"


def by_pickle(value: Any) -> Any:
    """Return a copy made by pickle."""
    return pickle.loads(pickle.dumps(value))


def by_cloudpickle(value: Any) -> Any:
    """Return a copy made by cloudpickle."""
    return pickle.loads(cloudpickle.dumps(value))


COPIES = [copy.copy, copy.deepcopy, by_pickle, by_cloudpickle]


def collate(samples: list[Any]) -> list[Any]:
    """Return the samples."""
    return samples


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """Return a server with a map-style dataset."""
    with FakeServer({"numbers": [*range(20)]}, functions=[collate]) as running:
        yield running


def loader(fake: FakeServer, **arguments: Any) -> DataLoader:
    """Return a loader of the server's dataset."""
    return DataLoader(RemoteDataset(fake.url, "numbers"), 4, output="numpy", **arguments)


def epoch(loader: Any) -> list[Any]:
    """Return the samples of the next epoch, batch by batch."""
    return [list(map(int, batch)) for batch in loader]


class Named(DataLoader):
    """Loader with an attribute that is set before, and one that is set after the constructor of the base class."""

    def __init__(self, url: str, prefix: str) -> None:
        self.name = prefix
        super().__init__(RemoteDataset(url), 4, output="numpy", seed=1)
        self._title = prefix.title()


@pytest.mark.parametrize("make_copy", COPIES)
def test_a_copy_yields_the_batches_of_a_new_loader(make_copy: Callable[[Any], Any], fake: FakeServer) -> None:
    """A copy has the arguments of the original, and starts with epoch 0 at any position of the original."""
    original = loader(fake, shuffle=True, seed=3, drop_last=True, rank=1, world_size=2)
    expected = epoch(original)
    original.set_epoch(5)
    next(iter(original))
    copied = make_copy(original)
    assert type(copied) is DataLoader
    assert copied.spec == original.spec
    assert epoch(copied) == expected
    assert epoch(copied) != expected, "epoch 1"


@pytest.mark.parametrize("make_copy", COPIES)
def test_a_copy_has_the_current_values_of_attributes(make_copy: Callable[[Any], Any], fake: FakeServer) -> None:
    """Attributes that the user has changed or added after construction are those of the copy."""
    original = loader(fake, num_workers=2, prefetch_factor=3)
    original.collate_fn, original.timeout, original.tag = collate, 5, "mine"
    copied = make_copy(original)
    assert (copied.collate_fn, copied.timeout, copied.tag) == (collate, 5, "mine")
    assert copied.spec.collate == f"{__name__}:collate"
    original.num_workers = 0  # the constructor rejects prefetch_factor=3 with this value, an assignment does not
    assert make_copy(original).num_workers == 0


@pytest.mark.parametrize("make_copy", COPIES)
def test_a_copy_of_a_subclass_has_its_class_and_attributes(make_copy: Callable[[Any], Any], fake: FakeServer) -> None:
    """Attributes of a subclass are copied; the subclass's constructor may take any arguments."""
    copied = make_copy(Named(fake.url, "train"))
    assert type(copied) is Named
    assert (copied.name, copied._title) == ("train", "Train")
    assert epoch(copied) == epoch(Named(fake.url, "train"))


class OfNumbers(DataLoader[int]):
    """Loader that declares the type of its batches."""


@pytest.mark.parametrize("make_copy", COPIES)
@pytest.mark.parametrize("kind", [DataLoader[int], OfNumbers], ids=["subscribed", "subclass"])
def test_the_declared_type_of_batches_has_no_effect(
    kind: Any, make_copy: Callable[[Any], Any], fake: FakeServer
) -> None:
    """Loaders can be created and derived with a type of their batches, as in torch, and copied."""
    made = kind(RemoteDataset(fake.url), 4, output="numpy")
    copied = make_copy(made)
    assert isinstance(copied, DataLoader)
    assert type(copied) is type(made)
    assert epoch(copied) == epoch(made)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, by_pickle, by_cloudpickle])
def test_a_copy_outlives_the_original(make_copy: Callable[[Any], Any], fake: FakeServer) -> None:
    """The original can be deleted: a copy has its own dataset, connections and iterators."""
    original = loader(fake)
    iterator = iter(original)
    next(iterator)
    copied = make_copy(original)
    assert copied.dataset is not original.dataset
    del original, iterator
    gc.collect()
    assert epoch(copied) == [[*range(k, k + 4)] for k in range(0, 20, 4)]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_of_an_object_is_pickled_with_the_object(num_workers: int) -> None:
    """The copy of a loader over an object of this process loads a copy of the object."""
    original = DataLoader([1, 2, 3], 2, num_workers=num_workers, output="numpy")
    copied = by_pickle(original)
    assert copied.dataset == [1, 2, 3]
    assert copied.dataset is not original.dataset
    assert epoch(copied) == [[1, 2], [3]]
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(DataLoader([threading.Lock()], output="numpy"))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, by_pickle])
def test_samplers_and_generators_are_copied_as_by_torch(make_copy: Callable[[Any], Any]) -> None:
    """A copy draws the order that the copy of torch's loader draws, from copies of the sampler and the generator."""
    need("torch")
    import torch
    from torch.utils.data import DataLoader as TorchLoader
    from torch.utils.data import RandomSampler

    def generator() -> Any:
        return torch.Generator().manual_seed(7)

    numbers = [*range(20)]
    makers: list[Callable[[Any], Any]] = [
        lambda kind: kind(numbers, 4, shuffle=True, generator=generator()),
        lambda kind: kind(numbers, 4, sampler=RandomSampler(numbers, generator=generator())),
        lambda kind: kind(numbers, batch_sampler=[[3, 1], [2]]),
    ]
    for make in makers:
        ours, theirs = make(DataLoader), make(TorchLoader)
        epoch(ours)
        epoch(theirs)
        copied, copied_torch = make_copy(ours), make_copy(theirs)
        torch.manual_seed(0)
        expected = epoch(copied_torch)
        torch.manual_seed(0)
        assert epoch(copied) == expected


@pytest.mark.parametrize("make_copy", COPIES)
def test_a_wrapper_that_skips_batches_is_copied_with_its_loader(
    make_copy: Callable[[Any], Any], fake: FakeServer
) -> None:
    """The result of accelerate's `skip_first_batches` is copied like a loader."""
    copied = make_copy(loader(fake)._skip_first_batches(3))
    assert type(copied) is SkippedBatches
    assert epoch(copied) == [[12, 13, 14, 15], [16, 17, 18, 19]]


@pytest.mark.parametrize("make_copy", COPIES)
def test_iterators_are_not_copied(make_copy: Callable[[Any], Any], fake: FakeServer) -> None:
    """The error of a copied iterator says what to copy instead; its type is that of torch."""
    for iterator in (iter(loader(fake)), aiter(loader(fake))):
        with pytest.raises(NotImplementedError, match="pickle or copy the DataLoader and its state_dict"):
            make_copy(iterator)


def test_a_token_is_in_copies_of_this_process_only(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of this process share the token; a pickle has none, and reads that of its environment."""
    original = DataLoader(RemoteDataset(fake.url, token=TOKEN), output="numpy")

    def token(loader: DataLoader) -> str | None:
        found: str | None = loader.dataset.servers.known[0].credentials.token
        return found

    assert token(copy.copy(original)) == token(copy.deepcopy(original)) == TOKEN
    for dumps in (pickle.dumps, cloudpickle.dumps):
        pickled = dumps(original)
        assert TOKEN.encode() not in pickled
        assert token(pickle.loads(pickled)) is None
        monkeypatch.setenv("TELELOADER_TOKEN", "another-token-of-this-process")
        assert token(pickle.loads(pickled)) == "another-token-of-this-process"
        monkeypatch.delenv("TELELOADER_TOKEN")
    assert repr(copy.copy(Secret(TOKEN))) == "Secret(...)"


def test_a_copy_reports_an_unavailable_server(fake: FakeServer) -> None:
    """Unpickling connects to the server, with the errors of the constructor."""
    with FakeServer({"numbers": [1]}) as closing:
        pickled = pickle.dumps(RemoteDataset(closing.url, reconnect_timeout=0))
    with pytest.raises(ServerUnavailable, match="cannot connect"):
        pickle.loads(pickled)


def test_changed_attributes_of_a_dataset_are_copied(fake: FakeServer) -> None:
    """A copied dataset has the current `reconnect_timeout`."""
    dataset = RemoteDataset(fake.url)
    dataset.reconnect_timeout = 7
    assert by_pickle(dataset).reconnect_timeout == 7
    assert copy.copy(dataset).reconnect_timeout == 7
