"""Replacement of samples that fail: which sample takes the place of a failed one."""

from __future__ import annotations

from teleloader_shared.orders.seeding import derive_seed


def replacement(seed: int, epoch: int, rank: int, batch: int, position: int, attempt: int, length: int) -> int:
    """Return the index of the sample that replaces a failed one; any sample of the dataset with equal probability.

    A function of its arguments alone, so every server chooses the same sample.

    Args:
        seed: Seed of the loader.
        epoch: Epoch number.
        rank: Rank of the consumer.
        batch: Batch number.
        position: Position of the failed sample in the batch.
        attempt: Number of earlier replacements at this position that failed, too.
        length: Length of the dataset.
    """
    return derive_seed("replacement", seed, epoch, rank, batch, position, attempt) % length
