"""Shards that are iterated again: progress is visible, no timeout ends them, and their length can be limited."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from teleloader import DataLoader, RemoteDataset, StateMismatch
from teleloader_server import serve
from tests.conftest import eventually
from tests.end_to_end.test_worker_faults import stats_of

LENGTH = 40


class Slow:
    """Dataset of numbers without a state, which takes a while for each."""

    def __init__(self, seconds: float = 0.05) -> None:
        self._seconds = seconds

    def __iter__(self) -> Iterator[int]:
        for number in range(LENGTH):
            time.sleep(self._seconds)
            yield number


def loader_of(url: str, **options: Any) -> DataLoader:
    """Return a loader of single samples with one shard."""
    return DataLoader(RemoteDataset(url, **options), None, num_workers=1, output="numpy")


def interrupted(url: str, batches: int) -> dict[str, Any]:
    """Return the state after a number of batches."""
    loader = loader_of(url)
    for _ in zip(range(batches), loader, strict=False):
        pass
    return loader.state_dict()


def test_the_progress_of_a_replay_is_visible(caplog: pytest.LogCaptureFixture) -> None:
    """/stats shows it, the server logs its start, the client its progress, and no timeout ends it."""
    with caplog.at_level(logging.INFO), serve(Slow(), num_workers=1, batch_timeout=0.7) as url:
        state = interrupted(url, 30)
        # 1.5 s, twice the timeout of a batch; the host is not served in this process for the client, so that it checks
        # the health of the server
        resumed = loader_of(url, stall_timeout=0.2)
        resumed.load_state_dict(state)
        batches = iter(resumed)
        eventually(
            lambda: any(
                "of 30 replayed batches" in (worker["current_task"] or "") for worker in stats_of(url)["workers"]
            )
        )
        assert [int(sample) for sample in batches] == list(range(30, LENGTH))
        assert not any("replayed" in (worker["current_task"] or "") for worker in stats_of(url)["workers"])
    assert "iterates its shard of loader" in caplog.text
    assert "of 30 batches so far, because no state of the dataset" in caplog.text
    assert f"{url} iterates a shard again: " in caplog.text


def test_short_replays_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A replay that ends at once is not worth a message."""
    with caplog.at_level(logging.INFO), serve(Slow(0), num_workers=1) as url:
        resumed = loader_of(url)
        resumed.load_state_dict(interrupted(url, 5))
        assert len(list(resumed)) == LENGTH - 5
    assert "iterates its shard" not in caplog.text


def test_the_length_of_replays_can_be_limited() -> None:
    """Beyond max_replay, the shard fails with an error that states what to do, and ends."""
    with serve(Slow(0), num_workers=1, max_replay=20) as url:
        allowed, refused = loader_of(url), loader_of(url)
        allowed.load_state_dict(interrupted(url, 20))
        assert [int(sample) for sample in allowed] == list(range(20, LENGTH))
        refused.load_state_dict(interrupted(url, 21))
        batches = iter(refused)
        with pytest.raises(StateMismatch, match=r"21 batches would have to be iterated again.*--max-replay"):
            next(batches)
        assert list(batches) == []
