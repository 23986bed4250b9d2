"""Derivation of random seeds by hashing, so that different (seed, epoch, ...) tuples get independent seeds."""

from __future__ import annotations

import hashlib
import struct


def derive(purpose: str, *coordinates: int) -> int:
    """Derive a 64-bit seed from `coordinates` (each in [0, 2**64)), independent for each `purpose`.

    A sum such as ``seed + epoch``, as in ``torch.utils.data.DistributedSampler``, would give (seed 5, epoch 1) and
    (seed 6, epoch 0) the same order; a hash does not.
    """
    packed = struct.pack(f"<{len(coordinates)}Q", *coordinates)
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little")


def derive_seed(purpose: str, *coordinates: int) -> int:
    """Derive a random generator seed in [0, 2**63), which fits into int64 as torch requires."""
    return derive(purpose, *coordinates) >> 1
