"""Lifetime of the memory of a dataset that this process hosts: the dataset is released with its last loader."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from fastapi import APIRouter

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from teleloader_server.web.batches import make_router
from teleloader_server.web.sign_in import make_access_router
from teleloader_server.web.status import make_status_router
from teleloader_server.web.stream import make_stream_router

LOADERS = 20
DATASET_BYTES = 50 * 2**20


class Numbers:
    """Map-style dataset of 4 samples with `DATASET_BYTES` of resident memory."""

    def __init__(self) -> None:
        self.array = np.ones(DATASET_BYTES, np.uint8)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return int(self.array[index])


class Stream:
    """Iterable-style dataset with `DATASET_BYTES` of resident memory."""

    def __init__(self) -> None:
        self.array = np.ones(DATASET_BYTES, np.uint8)

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2, 3])


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Leave memory to reference counts, as a program does between two runs of the garbage collector."""
    # the first loader of a process imports modules; an import that fails keeps its frames until the next collection
    list(DataLoader([1], output="numpy"))
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize(
    ("make_dataset", "arguments"),
    [
        (Numbers, {}),
        (Numbers, {"num_workers": 1}),
        (Numbers, {"num_workers": 1, "persistent_workers": True}),
        (Numbers, {"seed": 1}),
        (Numbers, {"num_workers": 1, "seed": 1}),
        (Stream, {}),
        (Stream, {"num_workers": 1}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
@pytest.mark.parametrize("use", ["whole epoch", "one batch", "no batch"])
def test_a_dataset_is_freed_with_its_loader(
    make_dataset: Callable[[], Any], arguments: dict[str, Any], use: str
) -> None:
    """When the last reference to a loader of a local object is dropped, nothing refers to the object any more.

    This holds at once, without the garbage collector, whatever part of an epoch was iterated.
    """
    dataset = make_dataset()
    released = weakref.ref(dataset)
    loader = DataLoader(dataset, batch_size=2, output="numpy", **arguments)
    if use == "whole epoch":
        list(loader)
    elif use == "one batch":
        next(iter(loader))
    del dataset, loader
    assert released() is None


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_memory_does_not_grow_with_the_number_of_loaders(num_workers: int) -> None:
    """20 loaders in turn, each of a dataset of 50 MiB, leave at most one dataset in memory."""
    process = psutil.Process()
    before = process.memory_info().rss
    references = []
    for _ in range(LOADERS):
        dataset = Numbers()
        references.append(weakref.ref(dataset))
        assert sum(map(len, DataLoader(dataset, batch_size=2, num_workers=num_workers, output="numpy"))) == 4
    del dataset
    assert [reference() for reference in references] == [None] * LOADERS
    assert process.memory_info().rss - before < DATASET_BYTES


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_is_freed_with_its_server(num_workers: int) -> None:
    """After the block of `serve`, nothing of the server refers to the object that it hosted."""
    dataset = Numbers()
    released = weakref.ref(dataset)
    with serve(dataset, num_workers=num_workers) as url:
        list(DataLoader(RemoteDataset(url), seed=1, output="numpy"))
        list(DataLoader(RemoteDataset(url), output="numpy"))
    del dataset
    assert released() is None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_function_that_refers_to_its_loader_does_not_keep_it(num_workers: int) -> None:
    """A loader whose `collate_fn` is a method of its owner is part of a reference cycle, which gets collected."""

    class Trainer:
        def __init__(self, dataset: Any) -> None:
            self.loader = DataLoader(
                dataset, 2, num_workers=num_workers, collate_fn=self.collate, worker_init_fn=self.start, output="numpy"
            )

        def collate(self, samples: list[Any]) -> list[Any]:
            return samples

        def start(self, worker: int) -> None:
            pass

    dataset = Numbers()
    released = weakref.ref(dataset)
    assert list(Trainer(dataset).loader) == [[1, 1], [1, 1]]
    del dataset
    gc.collect()
    assert released() is None


@pytest.mark.parametrize("make", [make_access_router, make_router, make_status_router, make_stream_router])
def test_endpoints_have_no_closures(make: Callable[[], APIRouter]) -> None:
    """FastAPI keeps endpoint functions for the life of the process, so they must not refer to the state of a server."""
    routes: list[Any] = list(make().routes)
    assert routes
    assert [route.endpoint.__name__ for route in routes if route.endpoint.__closure__ is not None] == []
