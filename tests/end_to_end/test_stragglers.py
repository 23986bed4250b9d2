"""Slow samples and stopped workers, with processes: order of computation, equal batches, and statistics."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from typing import Any

import httpx
import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from teleloader_server.workers import health
from tests.conftest import eventually
from tests.end_to_end.hosted import Samples

LENGTH = 800
BATCH_SIZE = 4
SEED = 3
SLOW = 37
"""Index of the slow sample, whose batch is late in epoch 1 with this seed."""
DISTANCE = 60
"""Number of batches that the prefetch window of this loader does not reach."""


class Recorded:
    """Dataset of random numbers that records the order in which samples are fetched, with one slow sample."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._order = context.Array("q", 4 * LENGTH)
        self._count = context.Value("q", 0)
        self._epoch = 0

    def __len__(self) -> int:
        return LENGTH

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose samples are fetched next."""
        self._epoch = epoch

    def __getitem__(self, index: int) -> Any:
        with self._count.get_lock():
            self._count.value += 1
            self._order[self._epoch * LENGTH + index] = self._count.value
        time.sleep(1.0 if index == SLOW else 0.005)
        return np.concatenate([[index], np.random.random(4)])

    def order(self, epoch: int, index: int) -> int:
        """Return the place of a sample in the order in which samples were fetched."""
        return int(self._order[epoch * LENGTH + index])


class RecordedTogether(Recorded):
    """Dataset that fetches the samples of a batch together."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def loader_of(url: str) -> DataLoader:
    """Return a loader in seeded order."""
    return DataLoader(RemoteDataset(url), BATCH_SIZE, shuffle=True, seed=SEED, output="numpy")


def dataset_stats(url: str) -> Any:
    """Return the statistics of the dataset."""
    return httpx.get(f"{url}/stats").raise_for_status().json()["datasets"][0]


@pytest.mark.parametrize("kind", [Recorded, RecordedTogether])
def test_a_slow_sample_starts_early_from_the_second_epoch_on(
    kind: type[Recorded], caplog: pytest.LogCaptureFixture
) -> None:
    """The batches are those of one worker, in the same order; the log names the slow sample after the first epoch."""
    with serve(kind(), num_workers=1) as url:
        one = loader_of(url)
        expected = [[batch.tolist() for batch in one] for _ in range(2)]
    dataset = kind()
    caplog.clear()
    with caplog.at_level(logging.WARNING), serve(dataset, num_workers=4) as url:
        loader = loader_of(url)
        plan = loader.plan(1)
        (late,) = [k for k in range(len(plan)) if SLOW in plan[k]]
        assert late > 2 * DISTANCE, "choose another seed"
        found = [[batch.tolist() for batch in loader] for _ in range(2)]
        stats = dataset_stats(url)
    assert found == expected
    before = plan[late - DISTANCE].tolist()
    assert dataset.order(1, SLOW) < min(dataset.order(1, index) for index in before)
    assert stats["samples_slow"] >= 1
    assert stats["batches_early"] >= 1
    text = next(text for record in caplog.records if "was slow" in (text := record.getMessage()))
    assert (f"sample {SLOW} took 1." in text) == (kind is Recorded)


def test_the_batch_of_a_stopped_worker_is_computed_by_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch does not wait for the stopped worker, whose result is discarded when it continues."""
    monkeypatch.setattr(health, "STOP_TIMEOUT", 1e9)
    stopped = multiprocessing.get_context("fork").Value("q", 0)

    def sample(index: int) -> Any:
        with stopped.get_lock():
            is_first = index == 101 and not stopped.value
            if is_first:
                stopped.value = os.getpid()
        if is_first:
            os.kill(os.getpid(), signal.SIGSTOP)
        return np.concatenate([[index], np.random.random(4)])

    with serve(Samples(sample, LENGTH), num_workers=3) as url:
        loader = DataLoader(RemoteDataset(url), BATCH_SIZE, seed=SEED, output="numpy")
        found = [batch.tolist() for batch in loader]
        assert stopped.value
        assert dataset_stats(url)["batches_backed_up"] >= 1
        loader.set_epoch(0)
        os.kill(stopped.value, signal.SIGCONT)
        assert [batch.tolist() for batch in loader] == found

        def states() -> list[str]:
            workers = httpx.get(f"{url}/stats").raise_for_status().json()["workers"]
            assert not any(worker["restarts"] for worker in workers)
            return [worker["state"] for worker in workers]

        assert eventually(lambda: states() == ["idle"] * 3)
    assert [int(row[0]) for batch in found for row in batch] == list(range(LENGTH))


def test_a_slow_batch_is_not_computed_for_others_to_wait() -> None:
    """A backup of a batch that is slow on both workers ends if another consumer has no worker."""
    context = multiprocessing.get_context("fork")
    opened, tries = context.Value("b", 0), context.Value("q", 0)

    def sample(index: int) -> int:
        if index == 30:
            with tries.get_lock():
                tries.value += 1
            while not opened.value:  # waiting for an event would block its `set` after the worker is killed
                time.sleep(0.01)
        return index

    with serve({"slow": Samples(sample, 40), "other": Samples(lambda index: index, 100)}, num_workers=2) as url:
        slow = iter(DataLoader(RemoteDataset(url, "slow"), 1, seed=SEED, output="numpy"))
        found = [next(slow).tolist() for _ in range(30)]
        eventually(lambda: tries.value == 2)
        other = DataLoader(RemoteDataset(url, "other"), 1, seed=SEED, output="numpy")
        for epoch in range(3):
            other.set_epoch(epoch)
            assert [batch.tolist() for batch in other] == [[k] for k in range(100)]
            assert tries.value == 2, "there is no second backup"
        opened.value = 1
        found += [batch.tolist() for batch in slow]
    assert found == [[k] for k in range(40)]
