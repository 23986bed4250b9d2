"""The client's part of the timeline: recorded times, and the estimate of a server's clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader.timings import MAX_ENTRIES, ClockEstimate, Timings

SECONDS = st.floats(0, 1e3, allow_nan=False)


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=20))
def test_the_offset_is_within_its_uncertainty(offset: float, exchanges: list[tuple[float, ...]]) -> None:
    """Whatever the network does, the true offset differs from the estimate by at most the stated uncertainty."""
    clock, now = ClockEstimate(), 0.0
    for there, computing, back, pause in exchanges:
        received = now + there
        clock.add(now, received + offset, received + computing + offset, received + computing + back)
        now = received + computing + back + pause
    found = clock.offset
    assert found is not None
    assert abs(found.seconds - offset) <= found.uncertainty + 1e-6
    fastest = min(there + back for there, _, back, _ in exchanges[-8:])
    assert found.uncertainty == pytest.approx(fastest / 2, abs=1e-6)


def test_contradictory_times_are_ignored() -> None:
    """A response that took longer than the whole exchange does not count."""
    clock = ClockEstimate()
    clock.add(0.0, 10.0, 12.0, 1.0)
    clock.add(0.0, 10.0, 9.0, 1.0)
    assert clock.offset is None


def test_times_are_taken_once_and_bounded() -> None:
    """`take` returns what was recorded since its last call, at most the last 512 entries of each kind."""
    timings = Timings()
    timings.request()
    for batch in range(MAX_ENTRIES + 3):
        timings.received("http://a" if batch % 2 else "http://b", batch, 1, (1.0, 2.0, 3.0))
        timings.waited(batch, 1.0, 2.0)
        timings.stepped(batch)
    taken = timings.take()
    assert [batch for batch, _, _ in taken.waits] == list(range(3, MAX_ENTRIES + 3))
    own = taken.for_server("http://a")
    assert all(first % 2 for first, *_ in own["received"])
    assert len(own["steps"]) == MAX_ENTRIES
    assert timings.take().steps == []
    assert timings.is_on


def test_recording_ends_when_no_server_requests_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five seconds after the last request, the next report ends the recording."""
    now = 100.0
    monkeypatch.setattr("teleloader.timings.time.monotonic", lambda: now)
    timings = Timings()
    assert not timings.is_on, "nothing is recorded before the first request"
    timings.request()
    recorded = []
    for later in (104.0, 106.0):
        now = later
        timings.take()
        recorded.append(timings.is_on)
    assert recorded == [True, False]
