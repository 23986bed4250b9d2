"""Datasets of the tests on Ray: a module of its own, which Ray copies to the nodes."""

from __future__ import annotations

import time


class Numbers:
    """4,000 samples, which are their indices."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> int:
        return index


class Slow(Numbers):
    """Samples that take 20 ms each."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return super().__getitem__(index)
