"""Every seed is a hash of its coordinates, so that no two coordinates share one."""

from __future__ import annotations

import hashlib
import struct


def derive(purpose: str, *coordinates: int) -> int:
    """A 64-bit seed for `coordinates` (each in [0, 2**64)), independent for each `purpose`.

    A sum such as ``seed + epoch`` would make (seed 5, epoch 1) equal to (seed 6, epoch 0), as it is in
    ``torch.utils.data.DistributedSampler``; a hash does not.
    """
    packed = struct.pack(f"<{len(coordinates)}Q", *coordinates)
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "little")


def derive_seed(purpose: str, *coordinates: int) -> int:
    """A seed in [0, 2**63) for random number generators, from `derive`: torch's are int64 as well."""
    return derive(purpose, *coordinates) >> 1
