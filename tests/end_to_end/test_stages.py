"""Stages of loading: an added stage is measured under its own name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader.cli.stats import datasets_columns
from teleloader_server import serve
from teleloader_server.loading.stages import STAGES, Batch, Collate, Stage
from teleloader_shared.stats import Latency
from tests.end_to_end.made_up import DATASET

SECONDS = 0.02


class Doubling(Stage):
    """Stage that doubles each sample, slowly."""

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
    """/stats and /metrics have its time, in the order of the stages."""
    with serve(range(20), num_workers=num_workers) as url:
        batches = list(DataLoader(RemoteDataset(url), 5, seed=0, output="numpy"))
        (dataset,) = httpx.get(f"{url}/stats").json()["datasets"]
        metrics = httpx.get(f"{url}/metrics").text
    assert [batch.tolist() for batch in batches] == [[2 * (5 * k + i) for i in range(5)] for k in range(4)]
    assert list(dataset["stages"]) == [stage.name for stage in STAGES]
    assert dataset["stages"]["doubling"]["p50"] >= SECONDS > dataset["stages"]["fetch"]["p50"]
    assert 'teleloader_stage_seconds_count{dataset="dataset",stage="doubling"} 4' in metrics


@pytest.mark.usefixtures("_doubling")
def test_an_added_stage_runs_without_a_server() -> None:
    """The stage runs with ``DataLoader(object, num_workers=0)``, too."""
    assert next(iter(DataLoader(range(20), 5, output="numpy"))).tolist() == [0, 2, 4, 6, 8]


class Cache(Stage):
    """Stage that keeps frames in files."""

    name = "cache"
    folder: Path

    def run(self, batch: Batch) -> None:
        """Read the frame from its file, or write the frame to it."""
        file = self.folder / "-".join(map(str, batch.task.batch_id))
        if file.exists():
            found = np.fromfile(file, np.uint8)
            batch.frame = batch.place(len(found))[: len(found)]
            batch.frame[:] = found
        else:
            batch.run_remaining()
            time.sleep(SECONDS)
            batch.frame.tofile(file)


class Recorded:
    """Dataset of squares, which logs each read sample in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __len__(self) -> int:
        """Return 20."""
        return 20

    def __getitem__(self, index: int) -> int:
        """Return a square."""
        with self._file.open("a") as lines:
            lines.write(f"{index}\n")
        return index**2


@pytest.fixture
def _cache(tmp_path: Path) -> Iterator[None]:
    Cache.folder = tmp_path / "cache"
    Cache.folder.mkdir()
    STAGES.insert(0, Cache)
    yield
    STAGES.remove(Cache)


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_cache_is_one_stage(num_workers: int, tmp_path: Path) -> None:
    """On a hit no other stage runs; on a miss the stage stores the frame; its time is measured separately."""
    read, passes, stages = tmp_path / "read", [], []
    for _ in range(2):
        with serve(Recorded(read), num_workers=num_workers) as url:
            passes.append([batch.tolist() for batch in DataLoader(RemoteDataset(url), 5, seed=0, output="numpy")])
            stages.append(httpx.get(f"{url}/stats").json()["datasets"][0]["stages"])
            metrics = httpx.get(f"{url}/metrics").text
    assert passes[0] == passes[1] == [[i**2 for i in range(5 * k, 5 * k + 5)] for k in range(4)]
    assert list(map(int, read.read_text().split())) == list(range(20))
    first, second = stages
    assert list(first) == list(second) == [stage.name for stage in STAGES]
    assert first["cache"]["p50"] >= SECONDS
    assert first["fetch"]["max"] > 0
    assert second["fetch"]["max"] == second["encode"]["max"] == 0 < second["cache"]["p50"]
    assert 'teleloader_stage_seconds_count{dataset="dataset",stage="cache"} 4' in metrics


@pytest.mark.usefixtures("_cache")
def test_a_cache_of_frames_does_not_run_without_a_server() -> None:
    """The stage is skipped by ``DataLoader(object, num_workers=0)``, which has no frames."""
    assert [batch.tolist() for batch in DataLoader(range(4), 2, output="numpy")] == [[0, 1], [2, 3]]
    assert not list(Cache.folder.iterdir())


class Unplaced(Stage):
    """Stage that sets the frame to its own memory."""

    name = "unplaced"

    def run(self, batch: Batch) -> None:
        """Replace the frame of batch 1."""
        batch.run_remaining()
        if batch.task.batch_id.batch == 1:
            batch.frame = batch.frame.copy()


class UnplacedHit(Unplaced):
    """Stage that sets the frame without a call of `Batch.place`."""

    def run(self, batch: Batch) -> None:
        """Set the frame of batch 1."""
        if batch.task.batch_id.batch == 1:
            batch.frame = np.ones(100, np.uint8)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("stage", [Unplaced, UnplacedHit])
def test_a_frame_outside_of_its_buffer_fails_the_batch(num_workers: int, stage: type[Stage]) -> None:
    """A frame outside of its buffer fails its batch, and the next batch follows."""
    STAGES.insert(0, stage)
    try:
        with serve(range(15), num_workers=num_workers) as url:
            batches = iter(DataLoader(RemoteDataset(url), 5, output="numpy", num_workers=1, timeout=5))
            assert next(batches).tolist() == [0, 1, 2, 3, 4]
            with pytest.raises(RuntimeError, match="outside of the buffer"):
                next(batches)
            assert next(batches).tolist() == [10, 11, 12, 13, 14]
    finally:
        STAGES.remove(stage)


def test_the_table_of_datasets_has_a_column_per_stage() -> None:
    """Columns come from the statistics, not from a list in the client."""
    datasets = [replace(DATASET, stages={"doubling": Latency(1, 0.1, 0.1, 0.1, 0.1, 0.1)})]
    assert "doubling" in [column.title for column in datasets_columns(datasets, 200)]
