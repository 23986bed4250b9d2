"""What is asked for, and how far ahead; no socket, no thread, no clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader.session import COVERED_BYTES, MAX_WINDOW, Range, Session
from teleloader_shared.messages import READY_BYTES

FOR_EVER = 2**62

fixed = settings(derandomize=True, deadline=None, max_examples=60)


def ranges(session: Session) -> list[Range]:
    """All that may be asked for now."""
    found = []
    while (wanted := session.next_range()) is not None:
        found.append(wanted)
    return found


def spans(session: Session) -> list[tuple[int, int]]:
    """The same, without what is wanted ahead of it."""
    return [(wanted.start, wanted.stop) for wanted in ranges(session)]


def fast_loop(session: Session) -> None:
    """Small batches arrive, and the loop takes 2,000 of them a second."""
    session.arrived(1, 4096)
    session.paced(0.0)
    session.taken = 200
    session.paced(0.1)


# --- How many batches to an answer --------------------------------------------------------------------------------


def test_the_first_answers_are_single_batches() -> None:
    """Until the size of a batch is known, it may be large."""
    session = Session(0, 100, prefetch_factor=2, num_workers=2)
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


def test_after_a_break_what_has_not_arrived_is_asked_for_again() -> None:
    """And nothing that has."""
    session = Session(0, 100, prefetch_factor=5)
    ranges(session)
    session.arrived(2, 2000)
    session.rewind()
    assert ranges(session)[0].start == 2


# --- How far ahead ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_workers", "window"), [(0, 3), (1, 3), (4, 12)])
def test_so_many_batches_are_held_ready_for_each_worker(num_workers: int, window: int) -> None:
    """prefetch_factor times the server's workers, as with torch; a server without workers counts as one.

    Nearly so many: asking for each batch singly would cost more than it brings.
    """
    session = Session(0, 100, prefetch_factor=3, num_workers=num_workers)
    assert session.window == window
    assert 0.75 * window < len(spans(session)) <= window


def test_a_fast_loop_is_given_more() -> None:
    """Enough for a quarter of a second at its pace, so that it does not feel the network's delay."""
    session = Session(0, 10**6, prefetch_factor=2)
    fast_loop(session)
    assert session.window == 500


def test_a_fast_loop_of_large_batches_is_not_given_all_memory() -> None:
    """The window covers so many bytes at most."""
    session = Session(0, 10**6, prefetch_factor=2)
    session.arrived(1, COVERED_BYTES // 3)
    session.paced(0.0)
    session.taken = 1000
    session.paced(0.1)
    assert session.window == 4, "as many as begin within the limit"


def test_what_may_look_at_the_training_is_not_fetched_further_ahead() -> None:
    """Not adaptive: the window is prefetch_factor * num_workers however fast the loop is, and no work goes beyond."""
    session = Session(0, 10**6, prefetch_factor=2, num_workers=3, adaptive=False)
    assert ranges(session) == [Range(k, k + 1, 0) for k in range(6)]
    fast_loop(session)
    assert session.window == 6
    session.received = 200
    session.rewind()
    assert ranges(session) == [Range(200, 206, 0)]


def test_on_demand_a_batch_is_asked_for_only_while_the_loop_waits() -> None:
    """Then loading is never at the same time as training; a loop that is fast is given no more, and none ahead."""
    session = Session(0, 100, prefetch_factor=2, num_workers=0, on_demand=True)
    assert ranges(session) == []
    for k in range(3):
        session.waiting = True
        assert ranges(session) == [Range(k, k + 1, 0)]
        session.arrived(1, 10)
        session.paced(k / 1000)
        session.waiting = False
        session.taken += 1
        assert ranges(session) == []


def test_shards_are_asked_one_range_after_another() -> None:
    """Two requests may overtake each other, and no shard goes back; what the window allows is made ahead instead."""
    session = Session(0, FOR_EVER, prefetch_factor=2, num_workers=3, adaptive=False, shards=3)
    assert session.connections == 1
    assert session.next_range() == Range(0, 1, 5)
    assert Session(0, 9, prefetch_factor=2, num_workers=3).connections == 2


# --- An end that shows on the way ---------------------------------------------------------------------------------


def test_what_becomes_known_is_asked_for() -> None:
    """The order of a sampler is drawn bit by bit: until then there is nothing to ask for."""
    session = Session(3, 3, prefetch_factor=4)
    assert (ranges(session), session.finished) == ([], True)
    session.extend(5)
    assert (spans(session), session.finished) == ([(3, 4), (4, 5)], False)
    session.extend(6)
    assert (spans(session), session.finished) == ([(5, 6)], False)
    session.arrived(3, 30)
    assert (spans(session), session.finished) == ([], True)


def test_work_ahead_does_not_go_beyond_what_is_known() -> None:
    """Nobody can make a batch of indices that are not drawn yet."""
    session = Session(0, 0, prefetch_factor=2, num_workers=4)
    session.extend(2)
    assert ranges(session) == [Range(0, 1, 1), Range(1, 2, 0)]


def test_the_epoch_ends_when_each_shard_has_ended() -> None:
    """In the place of the last one's next batch; it is not known before."""
    session = Session(0, FOR_EVER, prefetch_factor=2, num_workers=3, shards=3)
    ends = [7, 11, 9]  # shard 1 has one batch less than shard 2, and two less than shard 0
    for k in sorted(ends):
        assert session.stop == FOR_EVER
        session.shard_ended(k)
    assert session.stop == 12


def test_a_shard_ends_once() -> None:
    """It answers to each later batch of its own that it has no more; the others are still waited for."""
    session = Session(0, FOR_EVER, prefetch_factor=2, num_workers=2, shards=2)
    for k in (0, 2, 4):
        session.shard_ended(k)
        assert session.stop == FOR_EVER
    session.shard_ended(5)
    assert session.stop == 6
    session.shard_ended(7)  # it was asked for before that was known
    assert session.stop == 6


def test_without_shards_no_answer_ends_the_epoch() -> None:
    """The end of a map-style epoch is the plan's, whatever a server says."""
    session = Session(0, 10, prefetch_factor=2)
    session.shard_ended(3)
    assert session.stop == 10


# --- However it goes ----------------------------------------------------------------------------------------------

Figures = tuple[int, int, bool, bool]

figures = st.tuples(st.integers(1, 8), st.integers(0, 8), st.booleans(), st.booleans())
"""prefetch_factor, num_workers, adaptive, on_demand."""


def made(start: int, stop: int, figures: Figures, shards: int = 0) -> Session:
    """A session with those figures."""
    prefetch_factor, num_workers, adaptive, on_demand = figures
    return Session(start, stop, prefetch_factor, num_workers, adaptive=adaptive, on_demand=on_demand, shards=shards)


class Game:
    """Answers come, the loop takes, connections break, in an order that hypothesis draws."""

    def __init__(self, session: Session, figures: Figures, data: st.DataObject, shards: int = 0) -> None:
        self.session = session
        self._shards = shards
        self.arrived = session.received
        self._figures = figures
        self._data = data
        self._lanes: list[Range] = []
        self._now = 0.0

    def step(self) -> list[int]:
        """Something happens; which batches arrived."""
        prefetch_factor, num_workers, adaptive, on_demand = self._figures
        session = self.session
        self._now += self._data.draw(st.floats(0, 0.1))
        session.waiting = session.taken == self.arrived
        while len(self._lanes) < session.connections and (wanted := session.next_range()) is not None:
            self._lanes.append(wanted)
        least = prefetch_factor * max(1, num_workers)
        assert session.window <= (1 if on_demand else max(MAX_WINDOW, least) if adaptive else least)
        if not self._lanes:
            assert session.taken < self.arrived, "nothing is asked for, and nothing is left to take: a deadlock"
            session.taken += 1
            return []
        if self._data.draw(st.integers(0, 9)) == 9:
            self._lanes.clear()
            session.rewind()
            return []
        first = self._lanes.pop(0)
        assert first.start == self.arrived
        assert first.stop + first.ahead <= session.stop
        if on_demand or not (adaptive or self._shards):
            assert first.ahead == 0
        count = self._data.draw(st.integers(1, first.stop - first.start))
        came = list(range(first.start, first.start + count))
        session.arrived(count, count * self._data.draw(st.sampled_from([100, 10**5, 10**7])))
        session.paced(self._now)
        self.arrived += count
        if self.arrived < first.stop:
            self._lanes.insert(0, first._replace(start=self.arrived))
        session.taken += self._data.draw(st.integers(0, self.arrived - session.taken))
        return came


@fixed
@given(start=st.integers(0, 50), length=st.integers(0, 100), figures=figures, data=st.data())
def test_every_batch_is_asked_for_exactly_once_in_order(
    start: int, length: int, figures: Figures, data: st.DataObject
) -> None:
    """However answers and the loop interleave, and however the connection breaks."""
    session = made(start, start + length, figures)
    game = Game(session, figures, data)
    while not session.finished:
        game.step()
    assert game.arrived == start + length


@fixed
@given(start=st.integers(0, 50), parts=st.lists(st.integers(1, 20), max_size=10), figures=figures, data=st.data())
def test_every_batch_that_becomes_known_is_asked_for(
    start: int, parts: list[int], figures: Figures, data: st.DataObject
) -> None:
    """Whenever further ones do."""
    session = made(start, start, figures)
    game = Game(session, figures, data)
    for part in parts:
        session.extend(session.stop + part)
        for _ in range(data.draw(st.integers(0, 5))):
            if not session.finished:
                game.step()
    while not session.finished:
        game.step()
    assert game.arrived == start + sum(parts)


@fixed
@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=4), figures=figures, data=st.data())
def test_shards_of_any_sizes_come_to_an_end(sizes: list[int], figures: Figures, data: st.DataObject) -> None:
    """Every batch of each was asked for, and none after the last shard's end."""
    shards = len(sizes)
    session = made(0, FOR_EVER, figures, shards)
    game = Game(session, figures, data, shards)
    ends = []
    while not session.finished:
        for k in game.step():
            if k // shards >= sizes[k % shards]:
                ends.append(k)
                session.shard_ended(k)
    assert session.stop == max(size * shards + shard for shard, size in enumerate(sizes)) + 1
    assert {k % shards for k in ends} == set(range(shards))
