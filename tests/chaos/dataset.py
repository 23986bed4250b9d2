"""Hosted dataset, in which every byte of a sample is a function of its index and of the seed of its batch."""

from __future__ import annotations

import random
import time
import zlib
from typing import Any, Final

import numpy as np

LENGTH: Final = 3000
MAX_SIZE: Final = 8192
DELAY: Final = 0.0005
"""Seconds per hosted sample, so that workers are busy when they are killed."""


class Samples:
    """Dataset of arrays of 1 to 8,192 bytes.

    Args:
        augmented: Whether random numbers change them.
        delay: Seconds that each takes.
    """

    def __init__(self, *, augmented: bool, delay: float = 0) -> None:
        self._augmented = augmented
        self._delay = delay

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._delay:
            time.sleep(self._delay)
        values = ((np.arange(1 + index * 7919 % MAX_SIZE) * 31 + index) % 251).astype(np.uint8)
        if not self._augmented:
            return {"index": index, "values": values}
        values ^= np.random.randint(0, 256, len(values), np.uint8)
        return {"index": index, "values": values, "weight": random.random()}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate arrays of different sizes."""
    batch: dict[str, Any] = {
        "index": np.array([sample["index"] for sample in samples]),
        "size": np.array([len(sample["values"]) for sample in samples]),
        "values": np.concatenate([sample["values"] for sample in samples]),
    }
    if "weight" in samples[0]:
        batch["weight"] = np.array([sample["weight"] for sample in samples])
    return batch


def digest(batch: dict[str, Any]) -> int:
    """Return the CRC-32 of names, types, shapes and bytes."""
    crc = 0
    for name, array in batch.items():
        crc = zlib.crc32(f"{name} {array.dtype.str} {array.shape}".encode(), crc)
        crc = zlib.crc32(array.tobytes(), crc)
    return crc


plain = Samples(augmented=False, delay=DELAY)
augmented = Samples(augmented=True, delay=DELAY)
