"""The diagnosis is right in cases with a known bottleneck."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from teleloader import DataLoader, RemoteDataset
from teleloader.api.credentials import Credentials
from teleloader.cli.stats import TIMEOUT, read_all, total
from teleloader.transport.selection import server_at
from teleloader_server import serve
from teleloader_shared.stats import Stats
from tests.conftest import StartServer
from tests.faults.proxy import FaultProxy, Line


class Rows:
    """Dataset of rows of `width` bytes, each of which takes `seconds`."""

    def __init__(self, seconds: float = 0.0, width: int = 8, length: int = 1_000_000) -> None:
        self._seconds = seconds
        self._width = width
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        time.sleep(self._seconds)
        return np.full(self._width, index % 256, np.uint8)


def endless(loader: DataLoader) -> Iterator[Any]:
    """Yield the batches of one epoch after another."""
    while True:
        yield from loader


def diagnoses(url: str, loader: DataLoader, step: float) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Train with `step` seconds per step; yield the consumer's record and all statistics once there is a diagnosis."""
    with httpx.Client() as client:  # one client for all requests, since creating one takes as long as several steps
        for number, _ in enumerate(endless(loader)):
            time.sleep(step)
            if number % max(1, round(0.3 / step)) == 0:
                stats = client.get(f"{url}/stats").json()
                consumer = stats["consumers"][0]
                if consumer["diagnosis"]["bottleneck"] != "unknown":
                    yield consumer, stats


def told(url: str, loader: DataLoader, step: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first diagnosis that equals the one before, with all statistics."""
    found = diagnoses(url, loader, step)
    for (first, _), (again, stats) in itertools.pairwise(found):
        if first["diagnosis"]["bottleneck"] == again["diagnosis"]["bottleneck"]:
            return again, stats
    raise AssertionError("the loop is endless")


@pytest.mark.parametrize(("seconds", "step", "num_workers"), [(0.15, 0.05, 1), (0.25, 0.05, 2)])
def test_workers_that_sleep_are_called_blocked(seconds: float, step: float, num_workers: int) -> None:
    """The advice has the number of workers that would meet the demand, within 1.5."""
    with serve(Rows(seconds), num_workers=num_workers) as url:
        loader = DataLoader(RemoteDataset(url), 1, seed=0)
        consumer, stats = told(url, loader, step)
        mine = loader.stats()
    found = consumer["diagnosis"]
    assert found["bottleneck"] == "io", consumer
    # what the machine made of the steps and the batches, if it had other things to do
    needed = stats["datasets"][0]["stages"]["fetch"]["mean"] / ((mine.elapsed - mine.waited) / mine.steps)
    assert needed > num_workers
    assert found["workers"] == pytest.approx(needed, abs=1.5), (consumer, mine)
    assert f"(num_workers={found['workers']} of serve())" in found["advice"]
    assert "speed up the stage 'fetch'" in found["advice"]
    assert consumer["data_wait_fraction"] == pytest.approx(mine.waited_share, abs=0.1)


@pytest.mark.parametrize("seed", [0, None], ids=["shared workers", "workers of each epoch"])
def test_epochs_that_are_over_at_once_are_one_training_loop(seed: int | None) -> None:
    """Short iterations are diagnosed as one loop, also if each has its own session."""
    with serve(Rows(0.1, length=6), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 1, num_workers=1, seed=seed)
        consumer, _ = told(url, loader, 0.02)
        assert consumer["epoch"] >= 2
    assert consumer["diagnosis"]["bottleneck"] == "io", consumer
    assert consumer["consumer"].rpartition("#")[0].endswith("/rank0/loader" + str(loader._number))


def test_a_loop_is_in_the_list_once() -> None:
    """A loop is listed with its current epoch and the batches sent in it; different loops are separate."""
    with serve(Rows(length=4), num_workers=1) as url:
        training, validation = (DataLoader(RemoteDataset(url), 1, seed=0) for _ in range(2))
        for _ in range(3):
            list(training)
        list(validation)
        stats = httpx.get(f"{url}/stats").json()
    found = [(consumer["epoch"], consumer["batches_sent"]) for consumer in stats["consumers"]]
    assert found == [(0, 4), (2, 4)]
    assert stats["consumers_total"] == 2


def test_short_epochs_of_a_slow_loop_are_limited_by_training() -> None:
    """The diagnosis is right although one request fetches a whole short epoch."""
    with serve(Rows(0.002, length=10), num_workers=2) as url:
        consumer, _ = told(url, DataLoader(RemoteDataset(url), 1, seed=0), 0.15)
    assert consumer["diagnosis"]["bottleneck"] == "training", consumer


def test_workers_of_its_own_are_set_where_the_loader_is_made() -> None:
    """The advice for a loader of a local object names the loader's num_workers."""
    with serve(Rows(0.2)) as url:
        consumer, _ = told(url, DataLoader(RemoteDataset(url), 1, num_workers=1, shuffle=True), 0.05)
    assert consumer["diagnosis"]["bottleneck"] == "io", consumer
    assert "of the DataLoader)" in consumer["diagnosis"]["advice"]


def test_slow_training_is_the_bottleneck() -> None:
    """The advice states that fewer workers would suffice."""
    with serve(Rows(0.01), num_workers=3) as url:
        consumer, _ = told(url, DataLoader(RemoteDataset(url), 1, seed=0), 0.05)
    assert consumer["diagnosis"]["bottleneck"] == "training", consumer
    assert consumer["diagnosis"]["workers"] == 1
    assert "training is the bottleneck: 1 worker would suffice." in consumer["diagnosis"]["advice"]
    assert consumer["data_wait_fraction"] < 0.05


def test_a_narrow_network_is_the_bottleneck(start_server: StartServer) -> None:
    """Batches are ready, but arrive slowly."""
    server = start_server("tests.faults.hosted:large", "--num-workers", "2")
    with FaultProxy(server.url) as proxy:
        proxy.line = Line(bandwidth=4e6)
        loader = DataLoader(RemoteDataset(proxy.url), 4, seed=0, checksum=False)
        consumer, _ = told(server.url, loader, 0.01)
    assert consumer["diagnosis"]["bottleneck"] == "network", consumer
    assert "although batches are ready: they arrive at" in consumer["diagnosis"]["advice"]
    evidence = {each["name"]: each["value"] for each in consumer["diagnosis"]["evidence"]}
    assert evidence["batches in transit"] != "0 %"


def test_the_slow_one_of_two_servers_explains_the_wait() -> None:
    """The other server reports that the training loop waits elsewhere, although it sends the most batches."""
    with serve(Rows(0.4)) as slow, serve(Rows()) as quick:
        loader = DataLoader(RemoteDataset([slow, quick]), 1, seed=0)
        servers = [server_at(url, TIMEOUT, Credentials()) for url in (slow, quick)]
        for number, _ in enumerate(endless(loader)):
            time.sleep(0.02)
            if number % 50 == 49:
                readings = read_all(servers, 100)
                found = total(readings).consumers[0].diagnosis
                if found.bottleneck == "io":
                    break
        quick_stats = readings[1].stats
    assert isinstance(quick_stats, Stats)
    of_quick = quick_stats.consumers[0]
    assert of_quick.diagnosis.bottleneck == "unknown", of_quick
    assert "mostly for other servers" in of_quick.diagnosis.advice


def test_a_loop_that_has_stopped_gets_no_diagnosis() -> None:
    """A consumer without requests has no bottleneck that the server could see."""
    with serve(Rows(), num_workers=1) as url:
        iterator = iter(DataLoader(RemoteDataset(url), 1, seed=0))
        next(iterator)
        (consumer,) = httpx.get(f"{url}/stats").json()["consumers"]
        assert consumer["diagnosis"]["bottleneck"] == "unknown"
        assert consumer["diagnosis"]["advice"] == "A diagnosis needs 2 s of loading."


def test_what_the_client_says_is_what_the_server_shows() -> None:
    """The data wait and broken connections of /stats equal the client's."""
    with serve(Rows(0.02), num_workers=1) as url, FaultProxy(url) as proxy:
        loader = DataLoader(RemoteDataset(proxy.url), 1, seed=0)
        found = diagnoses(url, loader, 0.02)
        next(found)
        proxy.drop_all()
        consumer = next(consumer for consumer, _ in found if consumer["reconnects"])
        mine = loader.stats()
    assert mine.reconnects >= consumer["reconnects"] >= 1
    assert consumer["hedges"] == mine.hedges == 0
    assert consumer["batches_sent"] >= mine.steps
    assert 0 < mine.waited_share < 1
