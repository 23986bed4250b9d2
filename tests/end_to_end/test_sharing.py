"""Several consumers of one epoch: each batch is computed once."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from tests.conftest import StartServer, eventually
from tests.end_to_end import hosted
from tests.end_to_end.compare import assert_same


def _epoch(url: str) -> list[Any]:
    """Load an epoch with a seed, since otherwise a loader of the serving process has private workers."""
    return list(DataLoader(RemoteDataset(url), 4, True, seed=0, output="numpy"))


def test_two_consumers_share_the_work_and_a_late_one_gets_it_all() -> None:
    """Two concurrent clients and a later one get the whole epoch, and each batch is computed once."""
    with serve(hosted.Samples(hosted.SAMPLES["dict"], 200), num_workers=2) as url:
        with ThreadPoolExecutor(2) as threads:
            first, second = threads.map(_epoch, [url, url])
        late = _epoch(url)

        def finished() -> Any:
            found = httpx.get(f"{url}/stats").json()
            return found if all(consumer["finished"] for consumer in found["consumers"]) else None

        stats = eventually(finished)
    assert_same(first, second)
    assert_same(first, late)
    (dataset,) = stats["datasets"]
    assert len(first) == dataset["batches_computed"] == 50
    assert dataset["batches_sent"] == 150
    assert sum(worker["batches"] for worker in stats["workers"]) == 50
    assert [consumer["batches_sent"] for consumer in stats["consumers"]] == [50, 50, 50]
    assert all(consumer["position"] == consumer["batches"] == 50 for consumer in stats["consumers"])


def test_without_a_seed_each_iteration_has_workers_of_its_own() -> None:
    """As in torch, workers are not shared and end with the iteration; equal orders give equal batches."""
    with serve(hosted.Samples(hosted.SAMPLES["dict"], 40), num_workers=2) as url:
        loader = DataLoader(RemoteDataset(url), 4, True, output="numpy")
        first, second = iter(loader), iter(loader)
        loader.set_epoch(0)
        third = iter(loader)
        for batches in (first, second, third):
            next(batches)
        loaders = [worker["loader"] for worker in httpx.get(f"{url}/stats").json()["workers"]]
        assert len(loaders) == 6
        assert len(set(loaders)) == 3
        assert_same(list(first), list(third))
        del second
        gc.collect()
        stats = httpx.get(f"{url}/stats").json()
    assert stats["workers"] == []
    assert stats["datasets"][0]["batches_computed"] >= 20


def test_loaders_of_other_processes_share(start_server: StartServer) -> None:
    """With or without a seed, loaders of other processes use the server's workers for map-style datasets."""
    server = start_server("tests.end_to_end.hosted:numbers", "--num-workers", "2")
    first, second = (list(DataLoader(RemoteDataset(server.url, "numbers"), 4, output="numpy")) for _ in range(2))
    assert_same(first, second)
    stats = server.stats()
    assert stats["datasets"][0]["batches_computed"] == 25
    assert [worker["loader"] for worker in stats["workers"]] == [None, None]


def test_what_is_no_longer_kept_is_computed_again() -> None:
    """With memory for only a few batches, a later consumer gets the whole epoch, bit for bit."""
    import numpy as np

    dataset = hosted.Samples(lambda i: np.full((64, 1024), i, np.float32), 80)
    with serve(dataset, num_workers=2, memory_budget=4 * 2**20) as url:
        first, late = _epoch(url), _epoch(url)
        stats = httpx.get(f"{url}/stats").json()
    assert_same(first, late)
    assert stats["datasets"][0]["batches_computed"] > 20
    assert stats["server"]["memory_used"] <= stats["server"]["memory_budget"]


def test_a_slow_consumer_costs_a_fast_one_nothing_but_memory() -> None:
    """One client stops after its first batch; the other receives its whole epoch, within the memory budget."""
    import numpy as np

    dataset = hosted.Samples(lambda i: np.full((64, 1024), i, np.float32), 400)
    with serve(dataset, num_workers=2, memory_budget=8 * 2**20) as url:
        stopped = iter(DataLoader(RemoteDataset(url), 4, True, seed=0, output="numpy"))
        first = next(stopped)
        whole = _epoch(url)
        assert len(whole) == 100
        assert_same([first, *stopped], whole)


def test_memory_is_shared_by_the_workers(start_server: StartServer) -> None:
    """Four workers of a dataset of 256 MiB use little more than 256 MiB in total."""
    target = "large=tests.end_to_end.hosted:large"
    server = start_server(target, "--num-workers", "4")
    loader = DataLoader(RemoteDataset(server.url, "large"), 8, output="numpy")
    assert sum(int(batch.sum()) for batch in loader) == 256 * 2**20
    pss = server.stats()["server"]["pss"]
    assert 256 * 2**20 < pss < 1.8 * 256 * 2**20, f"{pss / 2**20:.0f} MiB"
