"""Stages of loading: one that is added to the list is measured under its own name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader.cli.stats import datasets_table
from teleloader_server import serve
from teleloader_server.loading.stages import STAGES, Batch, Collate, Stage
from teleloader_shared.stats import Latency
from tests.end_to_end.made_up import DATASET

SECONDS = 0.02


class Doubling(Stage):
    """Double each sample, slowly."""

    name = "doubling"

    def run(self, batch: Batch) -> None:
        """Replace the samples."""
        time.sleep(SECONDS)
        assert batch.samples is not None
        batch.samples = [2 * sample for sample in batch.samples]


@pytest.fixture
def _doubling() -> Iterator[None]:
    STAGES.insert(STAGES.index(Collate), Doubling)
    yield
    STAGES.remove(Doubling)


@pytest.mark.usefixtures("_doubling")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_added_stage_is_measured_under_its_own_name(num_workers: int) -> None:
    """Its time is in /stats and /metrics, in the order of the stages."""
    with serve(range(20), num_workers=num_workers) as url:
        batches = list(DataLoader(RemoteDataset(url), 5, seed=0, output="numpy"))
        (dataset,) = httpx.get(f"{url}/stats").json()["datasets"]
        metrics = httpx.get(f"{url}/metrics").text
    assert [batch.tolist() for batch in batches] == [[2 * (5 * k + i) for i in range(5)] for k in range(4)]
    assert list(dataset["stages"]) == ["fetch", "doubling", "collate", "encode"]
    assert dataset["stages"]["doubling"]["p50"] >= SECONDS > dataset["stages"]["fetch"]["p50"]
    assert 'teleloader_stage_seconds_count{dataset="dataset",stage="doubling"} 4' in metrics


@pytest.mark.usefixtures("_doubling")
def test_an_added_stage_runs_without_a_server() -> None:
    """With ``DataLoader(object, num_workers=0)``, too."""
    assert next(iter(DataLoader(range(20), 5, output="numpy"))).tolist() == [0, 2, 4, 6, 8]


def test_the_table_of_datasets_has_a_column_per_stage() -> None:
    """Columns come from the statistics, not from a list in the client."""
    table = datasets_table([replace(DATASET, stages={"doubling": Latency(1, 0.1, 0.1, 0.1, 0.1, 0.1)})], 200)
    assert "doubling" in [str(column.header) for column in table.columns]
