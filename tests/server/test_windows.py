"""Recent rates, computed from totals alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server.dispatch.rates import RateWindow, Stopwatch
from teleloader_shared.stats import WINDOW


def test_a_rate_is_taken_over_the_window() -> None:
    """Increases before the window do not count."""
    window = RateWindow(100.0, 0)
    total = 0
    for second in range(1, 60):
        total += 50 if second <= 30 else 7
        window.mark(100.0 + second, total)
    assert window.rates(159.0, total) == (7.0,)
    assert WINDOW <= window.span(159.0) < WINDOW + 1


def test_a_young_subject_has_a_rate_since_its_beginning() -> None:
    """Time before the start does not count."""
    window = RateWindow(5.0, 10, 0.5)
    assert window.rates(7.0, 14, 1.5) == (2.0, 0.5)
    assert window.rates(5.0, 10, 0.5) == (0.0, 0.0), "before any time has passed there is no rate"


def test_after_a_silence_nothing_is_recent() -> None:
    """A total that does not increase has the rate 0 after the window."""
    window = RateWindow(0.0, 0)
    for second in range(1, 5):
        window.mark(second, 10 * second)
    for second in range(5, 20):
        window.mark(second, 40)
    assert window.rates(19.5, 40) == (0.0,)


@given(st.lists(st.floats(0.001, 30), min_size=1, max_size=50))
def test_the_window_is_as_long_as_it_can_be_and_no_longer_than_it_must(steps: list[float]) -> None:
    """The window starts at the last mark that is old enough."""
    now, marks = 0.0, [0.0]
    window = RateWindow(0.0, 0)
    for step in steps:
        now += step
        marks.append(now)
        window.mark(now, now)
    old_enough = [mark for mark in marks if mark <= now - WINDOW]
    assert window.span(now) == now - max(old_enough, default=0.0)
    assert window.rates(now, now) == pytest.approx((1.0,))


def test_time_that_overlaps_counts_once() -> None:
    """Two concurrent waits of one client count as one."""
    waiting = Stopwatch()
    waiting.begin(1.0)
    waiting.begin(2.0)
    assert waiting.until(4.0) == 3.0, "what goes on counts before it is over"
    assert waiting.end(5.0) == 0.0
    assert waiting.end(6.0) == 5.0
    assert waiting.until(100.0) == 5.0
    waiting.begin(100.0)
    assert waiting.until(101.0) == 6.0
