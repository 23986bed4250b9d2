"""Orders that depend on lengths, with several ranks: a worker divides each window once for all of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from teleloader_shared.balance import BalanceSpec
from teleloader_shared.lengths import Lengths
from teleloader_shared.orders import windows
from teleloader_shared.packing import PackingSpec
from tests.server.bench import Bench

RANKS = 8
LENGTHS = Lengths(np.random.default_rng(0).integers(1, 20, 1003), 1003)


class Texts:
    """Dataset of documents, each token of which is the index."""

    sample_lengths = LENGTHS.values

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Any:
        """Return a document."""
        return np.full(LENGTHS.values[index], index)


ORDERS: dict[str, dict[str, Any]] = {
    "fixed size": {"batch_size": 4, "balance": BalanceSpec(LENGTHS.digest, 320, 4 * RANKS)},
    "max_tokens": {"balance": BalanceSpec(LENGTHS.digest, 320, RANKS, max_tokens=80)},
    "packing": {"batch_size": 1, "packing": PackingSpec(LENGTHS.digest, 32, 160)},
}


def listed(batch: Any) -> Any:
    """Return a batch as lists."""
    return {name: np.asarray(value).tolist() for name, value in batch.items()} if isinstance(batch, dict) else batch


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tail", ["pad", "drop", "uneven"])
def test_the_ranks_of_an_epoch_share_divided_windows(monkeypatch: pytest.MonkeyPatch, order: str, tail: str) -> None:
    """The batches are those of a worker for each rank, also if two epochs are computed in turn."""
    spec: dict[str, Any] = {"shuffle": True, "seed": 7, "world_size": RANKS, "tail": tail, **ORDERS[order]}

    def collate(samples: Any) -> list[list[int]]:
        return [sample.tolist() for sample in samples]

    steps, epochs = range(4), range(2)
    alone = [Bench(Texts(), collate=collate) for _ in range(RANKS)]
    expected = [
        listed(alone[rank].batch(k, epoch, rank=rank, **spec))
        for k in steps for epoch in epochs for rank in range(RANKS)
    ]  # fmt: skip
    divided: Counter[tuple[int, int]] = Counter()
    get = windows.Groups.of

    def of(groups: windows.Groups[Any], window: int) -> Any:
        divided[id(groups), window] += window not in groups._kept
        return get(groups, window)

    monkeypatch.setattr(windows.Groups, "of", of)
    worker = Bench(Texts(), collate=collate)
    found = [
        listed(worker.batch(k, epoch, rank=rank, **spec))
        for k in steps for epoch in epochs for rank in range(RANKS)
    ]  # fmt: skip
    assert found == expected
    assert len({groups for groups, _ in divided}) == len(epochs)
    assert set(divided.values()) == {1}
