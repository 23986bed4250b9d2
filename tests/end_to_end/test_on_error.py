"""Samples that fail: skipped, replaced or raised, with real servers, workers and in the training process."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from teleloader import DataLoader, InvalidSpec, LoaderTimeout, RemoteDataset, TooManyErrors, WorkerDied
from teleloader_server import serve

LENGTH = 400
BROKEN = {17, 301}


class Fragile:
    """Dataset with samples that fail; a sample is its index and a random number."""

    def __init__(self, broken: set[int] | None = None) -> None:
        self.broken = BROKEN if broken is None else broken

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        drawn = np.random.randint(2**31)
        if index in self.broken:
            raise ValueError(f"sample {index} is damaged")
        return np.array([index, drawn])


@contextmanager
def remote(dataset: Any, **options: Any) -> Iterator[RemoteDataset]:
    """Host a dataset with two workers, as on another machine."""
    with serve(dataset, **{"num_workers": 2, **options}) as url:
        yield RemoteDataset(url)


def epoch(loader: DataLoader) -> list[Any]:
    """Return the batches of an epoch as lists."""
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_batches_are_the_same_on_a_server_and_in_the_training_process(on_error: Any) -> None:
    """With workers, without, and shared by two loaders: replaced samples and random numbers too."""
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 3, "output": "numpy", "on_error": on_error}
    with remote(Fragile()) as dataset:
        loader = DataLoader(dataset, **options)
        batches = epoch(loader)
        assert epoch(DataLoader(dataset, **options)) == batches
        plan = loader.plan(0)
    assert epoch(DataLoader(Fragile(), **options)) == batches
    indices = [[index for index, _ in batch] for batch in batches]
    for k, listed in enumerate(indices):
        kept = [index for index in plan[k].tolist() if index not in BROKEN]
        assert len(listed) == (8 if on_error == "replace" else len(kept))
        assert set(kept) <= set(listed)
    assert not BROKEN & {index for listed in indices for index in listed}
    assert loader.stats().errors == len(BROKEN)


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_visits_are_those_of_the_received_samples(on_error: Any) -> None:
    """Skipped samples are not counted, replacements are; also for batches before a restored state."""
    options: dict[str, Any] = {
        "batch_size": 8, "shuffle": True, "seed": 3, "world_size": 2, "output": "numpy", "on_error": on_error
    }  # fmt: skip
    received = np.zeros(LENGTH, np.int64)
    counted = np.zeros(LENGTH, np.int64)
    with remote(Fragile()) as dataset:
        for rank in range(2):
            loader = DataLoader(dataset, **options, rank=rank)
            assert not loader.visits().any()
            batches = iter(loader)
            for batch in itertools.islice(batches, 20):
                np.add.at(received, batch[:, 0], 1)
            resumed = DataLoader(dataset, **options, rank=rank)
            resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
            assert np.array_equal(resumed.visits(), loader.visits())
            for batch in resumed:
                np.add.at(received, batch[:, 0], 1)
            counted += resumed.visits()
    assert np.array_equal(counted, received)
    assert not counted[list(BROKEN)].any()
    with pytest.raises(TypeError, match="has no plan"):
        DataLoader(Fragile(), 8, sampler=range(8), output="numpy").visits()


@contextmanager
def in_process(dataset: Any) -> Iterator[Any]:
    """Load the dataset in the training process."""
    yield dataset


@pytest.mark.parametrize("hosting", [remote, in_process])
def test_batches_that_raised_were_not_visited(hosting: Any) -> None:
    """Whether the dataset, the limit of failed samples or the transform raised; also after a resume."""
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 3, "output": "numpy"}

    def transform(batch: Any) -> Any:
        if 200 in batch[:, 0]:
            raise ValueError("sample 200 is unknown")
        return batch

    cases: list[tuple[dict[str, Any], type[Exception], int]] = [
        ({}, ValueError, 2),
        ({"on_error": "skip", "max_errors": 0}, TooManyErrors, 2),
        ({"on_error": "replace", "max_errors": 0.0025}, TooManyErrors, 1),
        ({"on_error": "replace", "device_transform": transform}, ValueError, 1),
    ]
    with hosting(Fragile()) as dataset:
        for case, error, raised in cases:
            loader = DataLoader(dataset, **options, **case)
            received = np.zeros(LENGTH, np.int64)
            batches, failed = iter(loader), 0
            for number in range(50):
                try:
                    np.add.at(received, next(batches)[:, 0], 1)
                except error:
                    failed += 1
                if number == 47:
                    state = json.loads(json.dumps(loader.state_dict()))
            assert failed == raised
            assert np.array_equal(loader.visits(), received)
            resumed = DataLoader(dataset, **options, **case)
            resumed.load_state_dict(state)
            assert len(list(resumed)) == 2
            assert np.array_equal(resumed.visits(), received)


def test_an_interrupted_batch_is_visited_if_the_next_call_returns_it() -> None:
    """Ctrl-C in the transform, or a lack of device memory, loses no batch."""
    errors = (KeyboardInterrupt, torch.cuda.OutOfMemoryError)
    interruptions = iter(errors)

    def transform(batch: Any) -> Any:
        if 200 in batch[:, 0] and (error := next(interruptions, None)) is not None:
            raise error
        return batch

    loader = DataLoader(Fragile(set()), 8, shuffle=True, seed=3, output="numpy", device_transform=transform)
    batches, interrupted = iter(loader), 0
    received = np.zeros(LENGTH, np.int64)
    while True:
        try:
            np.add.at(received, next(batches)[:, 0], 1)
        except errors:
            interrupted += 1
        except StopIteration:
            break
    assert interrupted == 2
    assert np.array_equal(loader.visits(), received)


def test_samples_of_batches_that_raised_count_towards_max_errors() -> None:
    """A training loop that handles TooManyErrors and continues gets it again at the next failed sample."""
    broken = {0, 9, 18, 27}  # in four batches
    with remote(Fragile(broken)) as dataset:
        loader = DataLoader(dataset, 8, seed=0, output="numpy", on_error="skip", max_errors=0.005)
        batches, raised = iter(loader), []
        for number in range(50):
            try:
                next(batches)
            except TooManyErrors:
                raised.append(number)
        assert raised == [2, 3]
        assert loader.stats().errors == 4


def test_all_ranks_have_as_many_batches() -> None:
    """Also the rank whose samples were skipped."""
    with remote(Fragile()) as dataset:
        counts = [
            len(epoch(DataLoader(dataset, 8, seed=0, rank=rank, world_size=2, output="numpy", on_error="skip")))
            for rank in range(2)
        ]
    assert counts == [25, 25]


@pytest.mark.parametrize("options", [{"seed": 1}, {"sampler": range(LENGTH)}, {}], ids=str)
def test_more_failures_than_max_errors_raise(options: dict[str, Any]) -> None:
    """In place of the batch that exceeds the limit, and again after a resume: the state contains the count."""
    options = {"batch_size": 8, "output": "numpy", "on_error": "skip", **options}
    with remote(Fragile({17, 18, 19, 20, 333})) as dataset:
        loader = DataLoader(dataset, **options)  # 1 % of 400 samples
        batches = iter(loader)
        for _ in range(41):
            next(batches)
        state = loader.state_dict()
        with pytest.raises(TooManyErrors, match=r"^5 samples of epoch 0 failed, of 400 samples: .*max_errors=0\.01"):
            next(batches)
        next(batches)
        resumed = DataLoader(dataset, **options)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        with pytest.raises(TooManyErrors):
            epoch(resumed)
        assert len(epoch(DataLoader(dataset, **options, max_errors=0.0125))) == 50
        with pytest.raises(TooManyErrors):
            epoch(DataLoader(dataset, **options, max_errors=0))


class Ten(Fragile):
    """Dataset of ten samples."""

    def __len__(self) -> int:
        return 10


def test_one_failure_is_permitted_however_small_the_dataset() -> None:
    """Otherwise the default would be useless for less than 100 samples."""
    assert len(epoch(DataLoader(Ten({3}), 5, output="numpy", on_error="skip"))) == 2
    with pytest.raises(TooManyErrors):
        epoch(DataLoader(Ten({3, 4}), 5, output="numpy", on_error="skip"))


def test_a_short_last_batch_does_not_lower_the_limit() -> None:
    """The limit is a fraction of the samples of the epoch."""
    options: dict[str, Any] = {"batch_size": 48, "output": "numpy", "on_error": "skip"}  # the last batch has 16 samples
    broken = {3, LENGTH - 2, LENGTH - 1}
    with remote(Fragile(broken)) as dataset:
        assert len(epoch(DataLoader(dataset, **options))) == 9
        with pytest.raises(TooManyErrors, match="3 samples of epoch 0 failed, of 432 samples"):
            epoch(DataLoader(dataset, **options, max_errors=0.005))


def test_replacements_of_a_sampler_are_samples_of_the_sampler() -> None:
    """A sample of the validation split must not replace one of the training split."""
    training = [index for index in range(LENGTH) if index % 5]
    with remote(Fragile()) as dataset:
        loader = DataLoader(dataset, 8, sampler=training, output="numpy", on_error="replace")
        found = {int(index) for batch in epoch(loader) for index, _ in batch}
    assert found == set(training) - BROKEN


def test_errors_of_the_collate_function_are_raised() -> None:
    """They are not errors of a sample."""
    with remote([1, 2, object(), 4]) as dataset, pytest.raises(TypeError, match="default_collate"):
        list(DataLoader(dataset, 2, output="numpy", on_error="skip"))


def test_invalid_arguments_are_refused() -> None:
    """The error states what to do."""
    stream = iter_only()
    for dataset, options, error, text in (
        (stream, {"on_error": "skip"}, ValueError, "requires a map-style dataset"),
        ([1], {"on_error": "ignore"}, InvalidSpec, "on_error must be one of"),
        ([1], {"on_error": "skip", "batch_size": None}, InvalidSpec, "requires batch_size"),
        ([1], {"max_errors": 2}, ValueError, "max_errors must be a fraction"),
        ([1], {"error_retries": -1}, InvalidSpec, "error_retries must be an integer"),
    ):
        with pytest.raises(error, match=text):
            DataLoader(dataset, output="numpy", **options)


def iter_only() -> Any:
    """Return an iterable-style dataset."""

    class Stream:
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    return Stream()


class Recovering(Fragile):
    """Dataset whose broken sample can be fetched later, as after an outage of a disk."""

    def __init__(self) -> None:
        super().__init__({17})
        self.recovered = multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> Any:
        """Return a large sample."""
        if self.recovered.is_set():
            self.broken = set()
        return np.tile(super().__getitem__(index), 4096)


def test_a_server_keeps_its_decision_for_the_epoch() -> None:
    """A batch that is computed again, because it was evicted, has the same samples as before."""
    dataset = Recovering()
    with remote(dataset, memory_budget=2**21, num_workers=1) as hosted:
        options: dict[str, Any] = {"batch_size": 8, "seed": 0, "output": "numpy", "on_error": "replace"}

        def computed() -> int:
            return int(httpx.get(f"{hosted.url}/stats").json()["datasets"][0]["batches_computed"])

        steady = iter(DataLoader(hosted, **options))
        first = [next(steady).tolist() for _ in range(40)]
        dataset.recovered.set()
        before = computed()
        other = iter(DataLoader(hosted, **options))
        assert [next(other).tolist() for _ in range(3)] == first[:3]
        assert computed() > before


def test_failed_samples_are_counted_and_named() -> None:
    """In /stats: the number of skipped and replaced samples, and the last one with each type of exception."""
    with remote(Fragile()) as dataset:
        epoch(DataLoader(dataset, 8, output="numpy", on_error="skip"))
        found = httpx.get(f"{dataset.url}/stats").json()["datasets"][0]
        assert found["samples_substituted"] == 2
        assert (found["errors"][0]["type"], found["errors"][0]["sample"]) == ("ValueError", 301)
        assert found["slowest"][0]["sample"] is None or found["slowest"][0]["sample"] < LENGTH
        metrics = httpx.get(f"{dataset.url}/metrics").text
        assert 'teleloader_samples_substituted_total{dataset="dataset"} 2.0' in metrics
        with pytest.raises(ValueError, match="The error occurred at sample index 17 in batch 2 of epoch 0") as caught:
            epoch(DataLoader(dataset, 8, output="numpy"))
    assert "damaged" in str(caught.value)


def test_a_sample_that_fails_in_the_training_process_is_named_in_a_note() -> None:
    """The exception itself is unchanged, as in torch."""
    with pytest.raises(ValueError, match="sample 17 is damaged") as caught:
        epoch(DataLoader(Fragile(), 8, output="numpy"))
    assert str(caught.value) == "sample 17 is damaged"
    assert caught.value.__notes__ == ["The error occurred at sample index 17."]


class Deadly(Fragile):
    """Dataset with a sample that kills or hangs its worker."""

    def __init__(self, *, hangs: bool) -> None:
        super().__init__(set())
        self.hangs = hangs

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        if index == 42 and self.hangs:
            threading.Event().wait()
        elif index == 42:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize(("hangs", "error"), [(False, WorkerDied), (True, LoaderTimeout)], ids=["kills", "hangs"])
def test_a_sample_that_ends_its_worker_is_named(hangs: bool, error: type[Exception]) -> None:
    """The server reads the sample from memory that the worker shares with it."""
    text = "The error occurred at sample index 42 in batch 5 of epoch 0"
    with remote(Deadly(hangs=hangs), batch_timeout=1) as dataset, pytest.raises(error, match=text):
        epoch(DataLoader(dataset, 8, output="numpy"))
