"""Windows of an order: every position is in one window, and every group is found by its number."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader_shared.orders.windows import CHUNK_SAMPLES, Groups, Windows, first_groups
from tests.conftest import examples

COUNTS = st.lists(st.integers(0, 5), max_size=40)


def groups_of(counts: list[int]) -> Groups[tuple[int, int]]:
    """Return groups that are pairs of their window and their number in the window."""
    starts = np.cumsum([0, *counts])
    return Groups(starts, lambda window: [(window, within) for within in range(counts[window])])


@given(st.integers(0, 200), st.integers(1, 50))
@settings(max_examples=examples(200))
def test_each_position_is_in_one_window(samples: int, size: int) -> None:
    """The windows cover all positions in order, and all but the last have the same size."""
    windows = Windows(samples, size)
    bounds = [windows.bounds(window) for window in range(len(windows))]
    assert [position for start, stop in bounds for position in range(start, stop)] == list(range(samples))
    assert all(stop - start == size for start, stop in bounds[:-1])
    assert all(start < stop for start, stop in bounds)


@given(COUNTS)
@settings(max_examples=examples(200))
def test_groups_by_number_are_those_of_a_full_listing(counts: list[int]) -> None:
    """Group k is the k-th group of all windows in succession, also if windows have no groups, and in any order of k."""
    groups = groups_of(counts)
    listed = [(window, within) for window, count in enumerate(counts) for within in range(count)]
    assert len(groups) == len(listed)
    for k in [*range(len(listed)), *reversed(range(len(listed)))]:
        assert groups[k] == groups.locate(k) == listed[k]


@given(COUNTS)
@settings(max_examples=examples(50))
def test_groups_out_of_range_raise_an_error(counts: list[int]) -> None:
    """Numbers below 0, and from the number of groups on, are not those of groups."""
    groups = groups_of(counts)
    for k in (-1, sum(counts), sum(counts) + 1):
        with pytest.raises(IndexError, match=f"group {k} is out of range: there are {sum(counts)} groups"):
            groups[k]


@given(st.integers(0, 300), st.integers(1, 40))
@settings(max_examples=examples(100))
def test_the_preparation_counts_each_window_once(samples: int, size: int) -> None:
    """The chunks of the preparation cover all windows, and the result is the sum of the counts before each window."""
    windows, counted = Windows(samples, size), Counter[int]()

    def count(start: int, stop: int) -> np.ndarray:
        counted.update(range(start, stop))
        return np.arange(start, stop) % 3

    starts = first_groups(windows, count)
    assert counted == Counter(range(len(windows)))
    assert starts.tolist() == list(itertools.accumulate((window % 3 for window in range(len(windows))), initial=0))


def test_chunks_of_the_preparation_are_bounded() -> None:
    """A chunk has at most CHUNK_SAMPLES positions, and at least one window."""
    for size in (1000, 2 * CHUNK_SAMPLES):
        chunks: list[int] = []

        def count(start: int, stop: int, chunks: list[int] = chunks) -> np.ndarray:
            chunks.append(stop - start)
            return np.ones(stop - start, np.int64)

        first_groups(Windows(10 * CHUNK_SAMPLES, size), count)
        assert max(chunks) == max(1, CHUNK_SAMPLES // size)


def test_a_wrong_number_of_counts_is_an_error() -> None:
    """The function must return one non-negative number per window."""
    with pytest.raises(ValueError, match="must return 3 non-negative numbers"):
        first_groups(Windows(30, 10), lambda start, stop: np.ones(2, np.int64))
    with pytest.raises(ValueError, match="must return 3 non-negative numbers"):
        first_groups(Windows(30, 10), lambda start, stop: np.full(3, -1))


def test_windows_with_equal_numbers_of_groups_need_no_memory() -> None:
    """A range of starts addresses 10**15 groups."""
    groups = Groups(range(0, 10**15 + 1, 1000), lambda window: range(window * 1000, (window + 1) * 1000))
    assert len(groups) == 10**15
    assert groups[123_456_789_012_345] == 123_456_789_012_345


def test_successive_groups_divide_each_window_once() -> None:
    """Reading the groups in order, each together with the one before it, divides no window again."""
    divided = Counter[int]()

    def divide(window: int) -> range:
        divided[window] += 1
        return range(10)

    groups = Groups(range(0, 101, 10), divide)
    for k in range(100):
        groups[k]
        groups[max(0, k - 1)]
    assert divided == Counter(range(10))


@pytest.mark.parametrize(("samples", "size"), [(-1, 1), (1, 0), (0, -3)])
def test_invalid_windows_are_rejected(samples: int, size: int) -> None:
    """Windows have at least one position, and an order no negative number of them."""
    with pytest.raises(ValueError, match="windows require samples >= 0 and size >= 1"):
        Windows(samples, size)


def test_windows_out_of_range_raise_an_error() -> None:
    """The numbers of the windows are 0 to len(windows) - 1."""
    with pytest.raises(IndexError, match="window 2 is out of range: there are 2 windows"):
        Windows(15, 10).bounds(2)
