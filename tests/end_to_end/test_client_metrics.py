"""Prometheus metrics of the loaders in a training process."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from teleloader.metrics import LoaderCollector


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Run a server with 40 rows of 1,000 numbers; return its URL."""
    with serve([np.full(1000, number) for number in range(40)], num_workers=1) as address:
        yield address


def scraped(run: str) -> dict[str, float]:
    """Return the values of a training run with one loader, by name of the metric."""
    registry = CollectorRegistry()
    registry.register(LoaderCollector())
    found = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        sample.name.removeprefix("teleloader_loader_"): sample.value
        for family in found
        for sample in family.samples
        if sample.labels["run"] == run
    }


def test_counters_are_totals_over_epochs(url: str) -> None:
    """No counter decreases when the next epoch starts; epoch and position are those of the current epoch."""
    loader = DataLoader(RemoteDataset(url), 4, seed=0, name="epochs")
    assert scraped("epochs")["steps_total"] == 0
    list(loader)
    first = scraped("epochs")
    assert (first["steps_total"], first["batches_received_total"]) == (10, 10)
    assert (first["epoch"], first["position"]) == (0, 10)
    assert first["received_bytes_total"] == loader.stats().bytes_received
    assert 0 < first["data_wait_seconds_total"] <= first["elapsed_seconds_total"]
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    second = scraped("epochs")
    assert (second["steps_total"], second["epoch"], second["position"]) == (13, 1, 3)
    assert all(second[name] >= value for name, value in first.items() if name.endswith("_total"))


def test_a_loader_of_this_process_has_metrics_too() -> None:
    """The training loop's thread loads the batches."""
    loader = DataLoader(list(range(8)), 2, name="direct")
    list(loader)
    list(loader)
    found = scraped("direct")
    assert (found["steps_total"], found["epoch"], found["position"]) == (8, 1, 4)


def test_metrics_end_with_their_loader(url: str) -> None:
    """The collector keeps no loader alive."""
    loader = DataLoader(RemoteDataset(url), 4, name="ending")
    assert scraped("ending")
    del loader
    gc.collect()
    assert not scraped("ending")


def test_the_exporter_does_not_need_torch() -> None:
    """Neither does `teleloader` need the exporter's library."""
    code = (
        "import sys, teleloader\nassert 'prometheus_client' not in sys.modules\n"
        "import teleloader.metrics\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
