"""Windows of an order: consecutive positions whose samples are divided into groups, with random access to the groups.

An order that depends on the samples, and not only on their number, cannot compute batch k from k alone. It is therefore
cut into windows of `Windows.size` positions (the last one may be shorter), and each window is divided into groups
independently of all others: batches of samples of similar length, or sequences that are packed from documents. The
number of groups may differ from window to window.

The *preparation* counts the groups of each window (`first_groups`), in chunks of successive windows, and stores one
integer per window: the number of groups before the window. Group k is then located by a binary search, and its window
is divided again (`Groups`); the last divided windows are kept, because successive groups are in the same window.

Groups must be functions of the windows' numbers alone, computed with integers and stable sorts, so that all processes
on all platforms compute the same ones. The module knows nothing of lengths, padding or packing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Group = TypeVar("Group")

CHUNK_SAMPLES: Final = 2**18
"""Positions per chunk of the preparation, which bounds its temporary memory to a few MiB."""
KEPT_WINDOWS: Final = 2
"""Number of divided windows that `Groups` keeps: a batch may contain the end of one and the start of the next."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Division of the positions [0, samples) into windows.

    Raises:
        ValueError: If `samples` is negative, or `size` is not positive.
    """

    samples: int
    """Number of positions."""
    size: int
    """Positions per window; the last window may have fewer."""

    def __post_init__(self) -> None:
        """Validate the fields."""
        if self.samples < 0 or self.size < 1:
            raise ValueError(f"windows require samples >= 0 and size >= 1, got {self.samples} and {self.size}")

    def __len__(self) -> int:
        return -(-self.samples // self.size)

    def bounds(self, window: int) -> tuple[int, int]:
        """Return the first position of a window, and the end of its positions.

        Raises:
            IndexError: If there is no such window.
        """
        if not 0 <= window < len(self):
            raise IndexError(f"window {window} is out of range: there are {len(self)} windows")
        return window * self.size, min((window + 1) * self.size, self.samples)


def first_groups(windows: Windows, count: Callable[[int, int], Ints]) -> Ints:
    """Prepare an order: count the groups of all windows.

    Takes 8 bytes of memory per window, and the memory of `count` for chunks of `CHUNK_SAMPLES` positions.

    Args:
        windows: Windows of the order.
        count: Function of two window numbers, start and stop, that returns the number of groups in each window from
            start to stop as an int64 array of shape (stop - start,).

    Returns:
        Number of the first group of each window, and the number of all groups: int64 of shape (windows + 1,).

    Raises:
        ValueError: If `count` returns an array of another shape, or a negative number.
    """
    starts = np.zeros(len(windows) + 1, np.int64)
    step = max(1, CHUNK_SAMPLES // windows.size)
    for start in range(0, len(windows), step):
        stop = min(start + step, len(windows))
        counts = count(start, stop)
        if counts.shape != (stop - start,) or (counts < 0).any():
            raise ValueError(f"count({start}, {stop}) must return {stop - start} non-negative numbers, got {counts!r}")
        starts[start + 1 : stop + 1] = counts
    return np.cumsum(starts, out=starts)


class Groups(Generic[Group]):
    """Random access to the groups of all windows by number. Not thread-safe, because it keeps divided windows.

    Args:
        starts: Number of the first group of each window, ascending, and the number of all groups: the result of
            `first_groups`, or a range if each window has the same number of groups.
        divide: Function that returns the groups of a window, in their order.
    """

    def __init__(self, starts: Sequence[int] | Ints, divide: Callable[[int], Sequence[Group]]) -> None:
        self._starts = starts
        self._divide = divide
        self._kept: OrderedDict[int, Sequence[Group]] = OrderedDict()
        self._count = int(starts[-1])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Group:
        """Return a group by its number.

        Raises:
            IndexError: If there is no such group.
        """
        window, within = self.locate(number)
        return self.of(window)[within]

    def locate(self, number: int) -> tuple[int, int]:
        """Return the window of a group, and the group's number in the window.

        Raises:
            IndexError: If there is no such group.
        """
        if not 0 <= number < self._count:
            raise IndexError(f"group {number} is out of range: there are {self._count} groups")
        window = bisect_right(self._starts, number) - 1  # the last of those with equal starts, which is not empty
        return window, number - int(self._starts[window])

    def of(self, window: int) -> Sequence[Group]:
        """Return the groups of a window."""
        groups = self._kept.get(window)
        if groups is None:
            groups = self._kept[window] = self._divide(window)
            if len(self._kept) > KEPT_WINDOWS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(window)
        return groups
