"""Cached samples on real servers: equal batches, shared by servers and runs, and counted in the statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np

from teleloader import DataLoader, RemoteDataset
from teleloader_server import CachedDataset, serve


class Images:
    """Deterministic images."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return np.full((64, 64), index, np.uint8)


class Augmented:
    """Images with random offsets."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        return self.images[index] + np.random.randint(100, dtype=np.uint8)


def epoch(dataset: Any, number: int = 0) -> tuple[list[Any], dict[str, Any]]:
    """Return the batches of an epoch on a server with two workers, and the statistics of the dataset."""
    with serve(dataset, num_workers=2) as url:
        loader = DataLoader(RemoteDataset(url), 10, shuffle=True, seed=1, output="numpy")
        loader.set_epoch(number)
        batches = [batch.tolist() for batch in loader]
        metrics = httpx.get(f"{url}/metrics").text
        found = httpx.get(f"{url}/stats").json()["datasets"][0]
        hits = f'teleloader_cache_hits_total{{dataset="dataset"}} {found["cache_hits"]:.1f}'
        assert hits in metrics
        return batches, found


def test_batches_are_equal_without_and_with_a_cache(tmp_path: Path) -> None:
    """Random augmentation included, with an empty and a full cache; the second server reads what the first wrote."""
    uncached = [epoch(Augmented(Images()), number)[0] for number in (0, 0, 1)]
    counts = []
    for number, expected in zip((0, 0, 1), uncached, strict=True):
        batches, stats = epoch(Augmented(CachedDataset(Images(), tmp_path, version="1", max_bytes=2**24)), number)
        assert batches == expected
        counts.append((stats["cache_hits"], stats["cache_misses"]))
        assert stats["cache_saved"] >= 0
    (_, first), *others = counts
    assert first >= 100  # a batch is computed twice if its worker is slow
    assert all(hits >= 100 and misses == 0 for hits, misses in others)
