"""Derivation of random seeds by hashing, so that different (seed, epoch, ...) tuples get independent seeds."""

from __future__ import annotations

import hashlib
import struct
from functools import cache

import numpy as np
from numpy.typing import NDArray


def derive(purpose: str, *coordinates: int) -> int:
    """Derive a 64-bit seed from `coordinates` (each in [0, 2**64)), independent for each `purpose`.

    A sum such as ``seed + epoch``, as in ``torch.utils.data.DistributedSampler``, would give (seed 5, epoch 1) and
    (seed 6, epoch 0) the same order; a hash does not.
    """
    packed = struct.pack(f"<{len(coordinates)}Q", *coordinates)
    hasher = _hasher(purpose).copy()  # takes half the time of a new one, and workers derive a seed per batch
    hasher.update(packed)
    return int.from_bytes(hasher.digest(), "little")


@cache
def _hasher(purpose: str) -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=8, person=purpose.encode())


def derive_seed(purpose: str, *coordinates: int) -> int:
    """Derive a random generator seed in [0, 2**63), which fits into int64 as torch requires."""
    return derive(purpose, *coordinates) >> 1


def random_below(numbers: NDArray[np.int64], key: int, below: int) -> NDArray[np.int64]:
    """Return a pseudo-random number in [0, below) for each number, int64 of the same shape; `below` is up to 2**32."""
    mixed = (numbers.view(np.uint64) + np.uint64(key)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    return ((mixed >> np.uint64(32)) * np.uint64(below) >> np.uint64(32)).astype(np.int64)
