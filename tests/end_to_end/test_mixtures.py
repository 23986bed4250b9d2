"""Mixtures of hosted datasets and of objects of the training process, with real servers and workers."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from teleloader import (
    DataLoader,
    DatasetChanged,
    InvalidSpec,
    Mixture,
    RemoteDataset,
    StateMismatch,
    UnknownDataset,
)
from teleloader.testing import FakeServer
from teleloader_server import serve
from tests.conftest import StartServer

NOISY = "tests.end_to_end.augmenting:Noisy"
WEB, CODE = 90, 40
SCHEDULE = {0: {"web": 3, "code": 1}, 60: {"web": 1, "code": 1}}


class Numbers:
    """Dataset of tensors: the index plus an offset, the epoch, and a random number."""

    def __init__(self, length: int, offset: int) -> None:
        self.length, self.offset, self.epoch = length, offset, -1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        return torch.tensor([self.offset + index, self.epoch, int(np.random.randint(2**31))])

    def set_epoch(self, epoch: int) -> None:
        """Store the epoch."""
        self.epoch = epoch


class Together(Numbers):
    """Dataset that returns the samples of a batch with one call, and the number of samples in the call."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples."""
        return [torch.tensor([self.offset + index, self.epoch, len(indices)]) for index in indices]


class Fragile(Numbers):
    """Dataset that fails for every tenth sample."""

    def __getitem__(self, index: int) -> Any:
        """Return a sample, or raise."""
        if index % 10 == 3:
            raise ValueError("damaged")
        return super().__getitem__(index)


def datasets() -> dict[str, Any]:
    """Return the datasets; the samples of ``code`` follow those of ``web``, as their indices in the mixture do."""
    return {"web": Numbers(WEB, 0), "code": Numbers(CODE, WEB)}


@contextmanager
def hosted(hosts: dict[str, Any], **options: Any) -> Iterator[dict[str, RemoteDataset]]:
    """Host datasets with two workers, as on another machine."""
    with serve(hosts, num_workers=2, **options) as url:
        yield {name: RemoteDataset(url, name) for name in hosts}


def batches(loader: DataLoader) -> list[Any]:
    """Return the batches of an epoch as lists."""
    return [batch.tolist() for batch in loader]


def indices_of(found: list[Any]) -> list[list[int]]:
    """Return the indices in the batches of an epoch."""
    return [[sample[0] for sample in batch] for batch in found]


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_those_of_the_plan_for_each_rank_and_epoch(shuffle: bool) -> None:
    """Two workers, two ranks, two epochs: each element is that of the plan, and set_epoch reaches each source."""
    with hosted(datasets()) as sources:
        mixture = Mixture(sources, SCHEDULE, samples=100)
        for rank in range(2):
            loader = DataLoader(mixture, batch_size=8, shuffle=shuffle, seed=7, rank=rank, world_size=2)
            for epoch in range(2):
                found = batches(loader)
                assert indices_of(found) == [batch.tolist() for batch in loader.plan(epoch)]
                assert {sample[1] for batch in found for sample in batch} == {epoch}


def test_each_batch_has_the_weights_of_its_stage() -> None:
    """Received counts of each source deviate by less than 1 from the weights after each batch."""
    with hosted(datasets()) as sources:
        loader = DataLoader(Mixture(sources, SCHEDULE, samples=100), batch_size=5, seed=7, shuffle=True)
        received = np.array([index >= WEB for batch in indices_of(batches(loader)) for index in batch])
    expected = np.cumsum(np.where(np.arange(100) < 60, 0.25, 0.5))
    assert np.abs(np.cumsum(received) - expected).max() < 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_objects_of_the_training_process_are_mixed_as_on_a_server(num_workers: int) -> None:
    """Without a server, and with workers of the loader, all elements are equal, random numbers too."""
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 7}
    with hosted(datasets()) as sources:
        expected = batches(DataLoader(Mixture(sources, SCHEDULE, samples=100), **options))
    loader = DataLoader(Mixture(datasets(), SCHEDULE, samples=100), num_workers=num_workers, **options)
    found = batches(loader)
    assert indices_of(found) == indices_of(expected)
    if num_workers == 0:
        assert found == expected


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_run_resumes_at_any_batch_on_any_world_size(world_size: int) -> None:
    """The samples of each global batch after the saved position are those of the uninterrupted run."""
    options: dict[str, Any] = {"shuffle": True, "seed": 7, "tail": "uneven"}
    with hosted(datasets()) as sources:
        mixture = Mixture(sources, SCHEDULE, samples=100)
        alone = DataLoader(mixture, batch_size=8, rank=0, world_size=1, **options)
        whole = indices_of(batches(alone))
        for k in (0, 5, 11):
            alone = DataLoader(mixture, batch_size=8, rank=0, world_size=1, **options)
            for _ in itertools.islice(alone, k):
                pass
            state = json.dumps(alone.state_dict())
            assert len(state) < 300
            found: list[list[int]] = [[] for _ in whole]
            for rank in range(world_size):
                loader = DataLoader(mixture, batch_size=8 // world_size, rank=rank, world_size=world_size, **options)
                loader.load_state_dict(json.loads(state))
                for place, batch in enumerate(indices_of(batches(loader))):
                    found[k + place] += batch
            assert [sorted(batch) for batch in found[k:]] == [sorted(batch) for batch in whole[k:]]


def test_a_copy_of_a_loader_yields_the_same_batches() -> None:
    """Loaders of mixtures can be pickled, as those of other hosted datasets."""
    with hosted(datasets()) as sources:
        loader = DataLoader(Mixture(sources, SCHEDULE, samples=100), batch_size=8, seed=7, shuffle=True)
        copied = pickle.loads(pickle.dumps(loader))
        assert batches(copied) == batches(loader)


def test_a_state_of_other_weights_is_refused() -> None:
    """A position is meaningless in another order: resuming names the argument that differs."""
    objects = datasets()
    state = DataLoader(Mixture(objects, {"web": 3, "code": 1}), batch_size=8, seed=7).state_dict()
    other = DataLoader(Mixture(objects, {"web": 1, "code": 1}), batch_size=8, seed=7)
    with pytest.raises(StateMismatch, match="saved with mixture ="):
        other.load_state_dict(state)


@pytest.mark.parametrize("seeding", ["batch", "sample"])
def test_batches_do_not_depend_on_the_workers(tmp_path: Path, start_server: StartServer, seeding: str) -> None:
    """Forked workers, and workers that build each source themselves, draw the same numbers, generators too."""
    epochs = []
    for start_method, workers in (("fork", "1"), ("spawn", "2")):
        config = tmp_path / f"{start_method}.toml"
        settings = f'factory = "{NOISY}"\nseeding = "{seeding}"\nstart_method = "{start_method}"\n'
        config.write_text("".join(f"[datasets.{name}]\n{settings}" for name in ("web", "code")))
        server = start_server("--config", str(config), "--num-workers", workers)
        sources = {name: RemoteDataset(server.url, name) for name in ("web", "code")}
        loader = DataLoader(
            Mixture(sources, {"web": 3, "code": 1}, samples=40), 4, output="numpy", shuffle=True, seed=2
        )
        epochs.append([np.array(batch).tolist() for batch in loader])
    assert epochs[0] == epochs[1]
    values = [str(sample) for batch in epochs[0] for sample in batch]
    assert len(set(values)) == len(values)


def test_large_batches_are_lent_in_shared_memory() -> None:
    """A client on the server's machine receives the batches of a mixture in shared memory, as those of its sources."""
    hosts = {name: [np.full(2**18, value) for value in range(8)] for name in ("web", "code")}
    with hosted(hosts) as sources:
        mixture = DataLoader(Mixture(sources, {"web": 1, "code": 1}), batch_size=2, seed=7)
        lent: list[int] = []
        for loader in (mixture, DataLoader(sources["web"], batch_size=2, seed=7), mixture):
            plan = loader.plan(len(lent) // 2)
            for k, batch in enumerate(loader):
                assert (batch == torch.from_numpy(plan[k] % 8)[:, None]).all()
            consumers = httpx.get(f"{sources['web'].url}/stats").json()["consumers"]
            lent.append(sum(consumer["batches_lent"] for consumer in consumers))
    assert lent[0] > 0


def test_the_epoch_of_a_source_is_that_of_each_batch() -> None:
    """A loader of one source in another epoch, on the same workers, does not change the epoch of the mixture."""
    with hosted(datasets()) as sources:
        mixture = DataLoader(Mixture(sources, {"web": 1, "code": 1}, samples=40), batch_size=4, seed=7)
        web = DataLoader(sources["web"], batch_size=4, seed=7)
        web.set_epoch(3)
        for mixed, single in zip(mixture, web, strict=False):
            assert mixed[:, 1].tolist() == [0] * 4
            assert single[:, 1].tolist() == [3] * 4


def test_a_source_that_returns_samples_together_is_called_once_per_batch() -> None:
    """``__getitems__`` gets the indices of its source; the other source returns its samples one by one."""
    with hosted({"web": Together(WEB, 0), "code": Numbers(CODE, WEB)}) as sources:
        loader = DataLoader(Mixture(sources, {"web": 3, "code": 1}, samples=80), batch_size=8, seed=7, shuffle=True)
        found = batches(loader)
        assert indices_of(found) == [batch.tolist() for batch in loader.plan(0)]
        for batch in found:
            web = [sample for sample in batch if sample[0] < WEB]
            assert {sample[2] for sample in web} == {len(web)}


@pytest.mark.parametrize("is_remote", [True, False])
def test_failed_samples_are_replaced_by_samples_of_the_same_source(is_remote: bool) -> None:
    """With on_error="replace", the source of each position stays that of the plan."""
    objects = {"web": Fragile(WEB, 0), "code": Fragile(CODE, WEB)}
    with hosted(objects) as sources:
        mixture = Mixture(sources if is_remote else objects, SCHEDULE, samples=100)
        options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 7, "on_error": "replace", "max_errors": 1}
        loader = DataLoader(mixture, **options)
        found = batches(loader)
        for k, batch in enumerate(indices_of(found)):
            assert [index >= WEB for index in batch] == loader.plan(0).sources(k).astype(bool).tolist()
        assert loader.stats().errors > 0


def test_an_exception_names_the_source_of_the_sample() -> None:
    """The note of the exception has the index in the source, because the user knows no index in the mixture."""
    with hosted({"web": Numbers(WEB, 0), "code": Fragile(CODE, WEB)}) as sources:
        loader = DataLoader(Mixture(sources, {"code": 1}), batch_size=8, seed=7)
        with pytest.raises(ValueError, match="damaged") as caught:
            batches(loader)
    assert "number 3 of source 'code'" in str(caught.value) + str(getattr(caught.value, "__notes__", ""))


def test_another_dataset_under_the_name_of_a_source_is_refused() -> None:
    """The fingerprints of all sources are part of the loader."""
    hosts = datasets()
    with hosted(hosts) as sources:
        mixture = Mixture(sources, {"web": 1, "code": 1})
        hosts["code"].length += 1
        loader = DataLoader(mixture, batch_size=8, seed=7)
        with pytest.raises((DatasetChanged, InvalidSpec)):
            batches(loader)


def test_a_source_of_another_server_is_refused() -> None:
    """All sources must be hosted by the same servers; the message names the missing one."""
    with hosted({"web": Numbers(WEB, 0)}) as first, hosted({"code": Numbers(CODE, WEB)}) as second:
        loader = DataLoader(Mixture({**first, **second}, {"web": 1, "code": 1}), batch_size=8, seed=7)
        with pytest.raises(UnknownDataset, match="unknown dataset 'code'"):
            batches(loader)


def test_a_fake_server_has_no_mixtures() -> None:
    """The message names the alternative."""
    with FakeServer({"web": [1, 2], "code": [3]}) as fake:
        sources = {name: RemoteDataset(fake.url, name) for name in ("web", "code")}
        with pytest.raises(InvalidSpec, match="use teleloader_server"):
            batches(DataLoader(Mixture(sources, {"web": 1, "code": 1}), seed=7))


def test_invalid_mixtures_are_refused() -> None:
    """Each message states the reason."""
    objects = datasets()
    weights = {"web": 1, "code": 1}
    with pytest.raises(ValueError, match="a Mixture requires seed="):
        DataLoader(Mixture(objects, weights), batch_size=8)
    with pytest.raises(ValueError, match="a Mixture excludes sampler"):
        DataLoader(Mixture(objects, weights), sampler=[1, 2])
    with pytest.raises(TypeError, match=r"must be a mapping from names to datasets, such as .*, got list"):
        Mixture([[1], [2]], {"web": 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="source 'code' of a mixture must be a map-style dataset"):
        Mixture({"web": objects["web"], "code": iter([1])}, weights)
    with pytest.raises(ValueError, match="unknown source 'books'"):
        Mixture(objects, {"books": 1})
    with hosted(objects) as sources:
        with pytest.raises(TypeError, match="either all RemoteDataset or all objects"):
            Mixture({"web": sources["web"], "code": objects["code"]}, weights)
        with pytest.raises(ValueError, match="source 'books' is dataset 'code' on the server"):
            Mixture({"web": sources["web"], "books": sources["code"]}, {"web": 1})
