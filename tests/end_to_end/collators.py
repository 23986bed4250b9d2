"""Callables that servers and clients under test find by the names of these variables."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


class Padded:
    """Collate function with a setting: pads lists of numbers."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self, samples: list[list[int]]) -> Any:
        """Return the padded samples as an array."""
        return pad(samples, value=self.value)


def pad(samples: list[list[int]], value: int = 0) -> Any:
    """Return the samples as an array, padded with a value."""
    longest = max(map(len, samples))
    return np.array([[*sample, *[value] * (longest - len(sample))] for sample in samples])


instance = Padded(-1)
partial = functools.partial(pad, value=-2)
bound = Padded(-3).__call__
lists = [[1], [1, 2], [1, 2, 3]]
