"""What is asked for, and how far ahead; no socket, no thread, no clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from teleloader.session import COVERED_BYTES, MAX_WINDOW, Range, Session
from teleloader_shared.messages import READY_BYTES


def ranges(session: Session) -> list[Range]:
    """All that may be asked for now."""
    found = []
    while (wanted := session.next_range()) is not None:
        found.append(wanted)
    return found


def test_the_first_answers_are_single_batches() -> None:
    """Until the size of a batch is known, it may be large."""
    session = Session(0, 100, prefetch_factor=2)
    session.num_workers = 2
    assert ranges(session) == [Range(0, 1, 2), Range(1, 2, 2), Range(2, 3, 2), Range(3, 4, 2)]


def test_small_batches_travel_together() -> None:
    """Once they are known to be small."""
    session = Session(0, 10_000, prefetch_factor=100)
    session.next_range()
    session.arrived(1, 4096)
    session.taken = 1
    assert ranges(session)[0] == Range(1, 101, 1)


def test_large_batches_travel_alone() -> None:
    """One to an answer, so that several connections carry several."""
    session = Session(0, 100, prefetch_factor=4)
    session.next_range()
    session.arrived(1, READY_BYTES)
    session.taken = 1
    assert [wanted.stop - wanted.start for wanted in ranges(session)] == [1, 1, 1, 1]


def test_a_fast_loop_is_given_more() -> None:
    """Enough for a quarter of a second at its pace, so that it does not feel the network's delay."""
    session = Session(0, 10**6, prefetch_factor=2)
    session.arrived(1, 4096)
    session.paced(0.0)
    session.taken = 200
    session.paced(0.1)
    assert session.window == 500


def test_a_fast_loop_of_large_batches_is_not_given_all_memory() -> None:
    """The window covers so many bytes at most."""
    session = Session(0, 10**6, prefetch_factor=2)
    session.arrived(1, COVERED_BYTES // 3)
    session.paced(0.0)
    session.taken = 1000
    session.paced(0.1)
    assert session.window == 4, "as many as begin within the limit"


def test_after_a_break_what_has_not_arrived_is_asked_for_again() -> None:
    """And nothing that has."""
    session = Session(0, 100, prefetch_factor=5)
    ranges(session)
    session.arrived(2, 2000)
    session.rewind()
    assert ranges(session)[0].start == 2


@given(
    start=st.integers(0, 50),
    length=st.integers(0, 300),
    prefetch_factor=st.integers(1, 8),
    num_workers=st.integers(0, 8),
    data=st.data(),
)
def test_every_batch_is_asked_for_exactly_once_in_order(
    start: int, length: int, prefetch_factor: int, num_workers: int, data: st.DataObject
) -> None:
    """However answers and the loop interleave, and however the connection breaks."""
    stop = start + length
    session = Session(start, stop, prefetch_factor)
    session.num_workers = num_workers
    lanes: list[Range] = []
    arrived = start
    now = 0.0
    while not session.finished:
        now += data.draw(st.floats(0, 0.1))
        lanes += ranges(session)
        assert session.window <= max(MAX_WINDOW, prefetch_factor * max(1, num_workers))
        if not lanes:
            assert session.taken < arrived, "nothing is asked for, and nothing is left to take: a deadlock"
            session.taken += 1
            continue
        if data.draw(st.integers(0, 9)) == 0:
            lanes.clear()
            session.rewind()
            continue
        first = lanes.pop(0)
        assert first.start == arrived
        assert first.stop <= stop
        count = data.draw(st.integers(1, first.stop - first.start))
        session.arrived(count, count * data.draw(st.sampled_from([100, 10**5, 10**7])))
        session.paced(now)
        arrived += count
        if count < first.stop - first.start:
            lanes.insert(0, first._replace(start=arrived))
        session.taken += data.draw(st.integers(0, arrived - session.taken))
    assert arrived == stop
