"""What is asked for, and how far ahead; no socket, no thread, no clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader.fetch.scheduler import (
    COVERED_BYTES,
    HEDGE_UNKNOWN,
    MAX_AHEAD,
    MAX_WINDOW,
    RESPONSES_AHEAD,
    RangeScheduler,
)
from teleloader.transport.request import BatchRequest
from teleloader_shared.messages import READY_BYTES
from teleloader_shared.ranges import BatchRanges
from tests.conftest import examples

FOR_EVER = 2**62


def request(start: int, stop: int, ahead: int) -> BatchRequest:
    """Return a request for the batches [start, stop)."""
    return BatchRequest(BatchRanges(range(start, stop)), ahead)


fixed = settings(max_examples=examples(60))


def ranges(scheduler: RangeScheduler) -> list[BatchRequest]:
    """All that may be asked for now."""
    found = []
    while (wanted := scheduler.next_request()) is not None:
        found.append(wanted)
    return found


def spans(scheduler: RangeScheduler) -> list[tuple[int, int]]:
    """The same, without what is wanted ahead of it."""
    return [(wanted.batches.start, wanted.batches.stop) for wanted in ranges(scheduler)]


def fast_loop(scheduler: RangeScheduler) -> None:
    """A small batch arrives, and the loop takes 2,000 of them a second."""
    scheduler.next_request()
    scheduler.arrived(1, 4096)
    scheduler.paced(0.0)
    scheduler.taken = 200
    scheduler.paced(0.1)


# --- How many batches to an answer --------------------------------------------------------------------------------


def test_the_first_answers_are_single_batches() -> None:
    """Until the size of a batch is known, it may be large."""
    scheduler = RangeScheduler(0, 100, prefetch_factor=2, num_workers=2)
    assert ranges(scheduler) == [request(0, 1, 2), request(1, 2, 2), request(2, 3, 2), request(3, 4, 2)]


def test_small_batches_travel_together() -> None:
    """Once they are known to be small."""
    scheduler = RangeScheduler(0, 10_000, prefetch_factor=100)
    scheduler.next_request()
    scheduler.arrived(1, 4096)
    scheduler.taken = 1
    assert ranges(scheduler)[0] == request(1, 101, 100)


def test_large_batches_travel_alone() -> None:
    """One to an answer, so that several connections carry several."""
    scheduler = RangeScheduler(0, 100, prefetch_factor=4)
    scheduler.next_request()
    scheduler.arrived(1, READY_BYTES)
    scheduler.taken = 1
    assert [len(wanted.batches) for wanted in ranges(scheduler)] == [1, 1, 1, 1]


def test_after_a_break_what_has_not_arrived_is_asked_for_again() -> None:
    """And nothing that has."""
    scheduler = RangeScheduler(0, 100, prefetch_factor=5)
    before = spans(scheduler)
    scheduler.arrived(1, 2000)
    scheduler.arrived(1, 2000)
    scheduler.disconnected(0)
    assert spans(scheduler) == before[2:]


# --- How far ahead ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_workers", "window"), [(0, 3), (1, 3), (4, 12)])
def test_so_many_batches_are_held_ready_for_each_worker(num_workers: int, window: int) -> None:
    """prefetch_factor times the server's workers, as with torch; a server without workers counts as one.

    Nearly so many: asking for each batch singly would cost more than it brings.
    """
    scheduler = RangeScheduler(0, 100, prefetch_factor=3, num_workers=num_workers)
    assert scheduler.window == window
    assert 0.75 * window < len(spans(scheduler)) <= window


def test_a_fast_loop_is_given_more() -> None:
    """Enough for a quarter of a second at its pace, so that it does not feel the network's delay."""
    scheduler = RangeScheduler(0, 10**6, prefetch_factor=2)
    fast_loop(scheduler)
    assert scheduler.window == 500


@pytest.mark.parametrize(
    ("batch_bytes", "ahead"),
    [(2048, MAX_AHEAD), (READY_BYTES // 8, RESPONSES_AHEAD * 7), (READY_BYTES // 2 + 1, 3), (READY_BYTES, 3)],
)
def test_small_batches_are_computed_several_responses_ahead(batch_bytes: int, ahead: int) -> None:
    """Workers stay busy while responses and requests travel; of batches that travel alone, each worker has one."""
    scheduler = RangeScheduler(0, 10**6, prefetch_factor=2, num_workers=3)
    scheduler.next_request()
    scheduler.arrived(1, batch_bytes)
    scheduler.paced(0.0)
    scheduler.taken = 2000
    scheduler.paced(0.1)
    assert ranges(scheduler)[0].ahead == min(ahead, scheduler.window)


def test_a_slow_loop_has_at_most_its_prefetch_window_computed_ahead() -> None:
    """It does not fill the server's memory, however small its batches are."""
    scheduler = RangeScheduler(0, 10**6, prefetch_factor=2, num_workers=3)
    scheduler.next_request()
    scheduler.arrived(1, 4096)
    scheduler.taken = 1
    assert ranges(scheduler)[0].ahead == scheduler.window == 6


def test_a_fast_loop_of_large_batches_is_not_given_all_memory() -> None:
    """The window covers so many bytes at most."""
    scheduler = RangeScheduler(0, 10**6, prefetch_factor=2)
    scheduler.next_request()
    scheduler.arrived(1, COVERED_BYTES // 3)
    scheduler.paced(0.0)
    scheduler.taken = 1000
    scheduler.paced(0.1)
    assert scheduler.window == 4, "as many as begin within the limit"


def test_what_may_look_at_the_training_is_not_fetched_further_ahead() -> None:
    """Not adaptive: the window is prefetch_factor * num_workers however fast the loop is, and no work goes beyond."""
    scheduler = RangeScheduler(0, 10**6, prefetch_factor=2, num_workers=3, adaptive=False)
    assert ranges(scheduler) == [request(k, k + 1, 0) for k in range(6)]
    fast_loop(scheduler)
    assert scheduler.window == 6
    assert [wanted.ahead for wanted in ranges(scheduler)] == [0]


def test_shards_are_asked_one_range_after_another() -> None:
    """Two requests may overtake each other, and no shard goes back; what the window allows is made ahead instead."""
    scheduler = RangeScheduler(0, FOR_EVER, prefetch_factor=2, num_workers=3, adaptive=False, shards=3)
    assert scheduler.connections == 1
    assert scheduler.next_request() == request(0, 1, 5)
    assert RangeScheduler(0, 9, prefetch_factor=2, num_workers=3).connections == 2


def test_no_batch_is_requested_above_the_memory_limit_but_those_that_are_needed() -> None:
    """A saved state may need the first batch of each shard, which the training loop does not take meanwhile."""
    scheduler = RangeScheduler(0, 100, 2, 4, adaptive=True, shards=4)
    scheduler.over_memory = True
    assert scheduler.next_request() is None
    scheduler.needed = 4
    for batch in range(4):
        assert scheduler.next_request() == request(batch, batch + 1, 7 - batch)
        scheduler.arrived(1, 2**30)
    assert scheduler.next_request() is None


def test_needed_batches_may_exceed_the_prefetch_window() -> None:
    """It counts workers, of which a server may have fewer than the loader has shards."""
    scheduler = RangeScheduler(0, 100, 1, 2, adaptive=False, shards=8)
    scheduler.needed = 8
    for _ in range(8):
        assert scheduler.next_request() is not None
        scheduler.arrived(1, 2**30)
    assert scheduler.received == 8
    assert scheduler.next_request() is None


# --- An end that shows on the way ---------------------------------------------------------------------------------


def test_what_becomes_known_is_asked_for() -> None:
    """The order of a sampler is drawn bit by bit: until then there is nothing to ask for."""
    scheduler = RangeScheduler(3, 3, prefetch_factor=4)
    assert (ranges(scheduler), scheduler.finished) == ([], True)
    scheduler.extend(5)
    assert (spans(scheduler), scheduler.finished) == ([(3, 4), (4, 5)], False)
    scheduler.extend(6)
    assert (spans(scheduler), scheduler.finished) == ([(5, 6)], False)
    for _ in range(3):
        scheduler.arrived(1, 10)
    assert (spans(scheduler), scheduler.finished) == ([], True)


def test_work_ahead_does_not_go_beyond_what_is_known() -> None:
    """Nobody can make a batch of indices that are not drawn yet."""
    scheduler = RangeScheduler(0, 0, prefetch_factor=2, num_workers=4)
    scheduler.extend(2)
    assert ranges(scheduler) == [request(0, 1, 1), request(1, 2, 0)]


def test_the_epoch_ends_when_each_shard_has_ended() -> None:
    """In the place of the last one's next batch; it is not known before."""
    scheduler = RangeScheduler(0, FOR_EVER, prefetch_factor=2, num_workers=3, shards=3)
    ends = [7, 11, 9]  # shard 1 has one batch less than shard 2, and two less than shard 0
    for k in sorted(ends):
        assert scheduler.stop == FOR_EVER
        scheduler.shard_ended(k)
    assert scheduler.stop == 12


def test_a_shard_ends_once() -> None:
    """It answers to each later batch of its own that it has no more; the others are still waited for."""
    scheduler = RangeScheduler(0, FOR_EVER, prefetch_factor=2, num_workers=2, shards=2)
    for k in (0, 2, 4):
        scheduler.shard_ended(k)
        assert scheduler.stop == FOR_EVER
    scheduler.shard_ended(5)
    assert scheduler.stop == 6
    scheduler.shard_ended(7)  # it was asked for before that was known
    assert scheduler.stop == 6


def test_without_shards_no_answer_ends_the_epoch() -> None:
    """The end of a map-style epoch is the plan's, whatever a server says."""
    scheduler = RangeScheduler(0, 10, prefetch_factor=2)
    scheduler.shard_ended(3)
    assert scheduler.stop == 10


# --- However it goes ----------------------------------------------------------------------------------------------

Figures = tuple[int, int, bool]

figures = st.tuples(st.integers(1, 8), st.integers(0, 8), st.booleans())
"""prefetch_factor, num_workers, adaptive."""


def made(start: int, stop: int, figures: Figures, shards: int = 0, servers: int = 1) -> RangeScheduler:
    """A scheduler with those figures."""
    prefetch_factor, num_workers, adaptive = figures
    scheduler = RangeScheduler(start, stop, prefetch_factor, num_workers, adaptive=adaptive, shards=shards)
    for _ in range(servers - 1):
        scheduler.joined(scheduler.add_server(), num_workers)
    return scheduler


class Game:
    """Answers come, the loop takes, servers are lost, in an order that hypothesis draws."""

    def __init__(
        self, scheduler: RangeScheduler, figures: Figures, data: st.DataObject, *, shards: int = 0, servers: int = 1
    ) -> None:
        self.scheduler = scheduler
        self._shards = shards
        self.arrived: set[int] = set()
        self._figures = figures
        self._data = data
        self._in_flight: list[list[BatchRequest]] = [[] for _ in range(servers)]
        self._now = 0.0

    def step(self) -> list[int]:
        """Something happens; which batches arrived that had not before."""
        prefetch_factor, num_workers, adaptive = self._figures
        scheduler = self.scheduler
        self._now += self._data.draw(st.floats(0, 0.1))
        for server, in_flight in enumerate(self._in_flight):
            while (
                len(in_flight) < scheduler.connections
                and (wanted := scheduler.next_request(server, self._now)) is not None
            ):
                in_flight.append(wanted)
            if self._shards and len(self._in_flight) > 1:
                numbers = [k for wanted in in_flight for k in wanted.batches]
                assert all(k % self._shards % len(self._in_flight) == server for k in numbers)
        least = prefetch_factor * max(1, num_workers) * len(self._in_flight)
        least *= 2 if adaptive and len(self._in_flight) > 1 else 1
        least = max(least, 2 * prefetch_factor * self._shards)
        assert scheduler.window <= (max(MAX_WINDOW, least) if adaptive else least)
        asked = [server for server, in_flight in enumerate(self._in_flight) if in_flight]
        if not asked:
            assert scheduler.taken < scheduler.received, "nothing is asked for, and nothing is left to take: a deadlock"
            scheduler.taken += 1
            return []
        server = self._data.draw(st.sampled_from(asked))
        if self._data.draw(st.integers(0, 9)) == 9:
            self._in_flight[server].clear()
            scheduler.disconnected(server, self._now)
            scheduler.joined(server, num_workers, now=self._now)
            return []
        return self._answer(server)

    def _answer(self, server: int) -> list[int]:
        scheduler, in_flight = self.scheduler, self._in_flight[server]
        first = in_flight[0]
        is_divided = self._shards > 0 and len(self._in_flight) > 1
        if not is_divided:  # otherwise the end may have become known after the request
            assert first.batches.stop + first.ahead <= scheduler.stop
        if len(self._in_flight) > 1 or not (scheduler.adaptive or self._shards):
            assert first.ahead == 0
        came = list(first.batches)[: self._data.draw(st.integers(1, len(first.batches)))]
        new = [k for k in came if scheduler.is_missing(k)]
        assert not self.arrived.intersection(new)
        self.arrived.update(new)
        nbytes = len(came) * self._data.draw(st.sampled_from([100, 10**5, 10**7]))
        rest = scheduler.arrived(len(came), nbytes, server, self._now)
        scheduler.paced(self._now)
        if rest is None:
            in_flight.pop(0)
        else:
            assert came[-1] < rest.batches.start < rest.batches.stop
            assert is_divided or rest.batches.stop <= first.batches.stop
            in_flight[0] = rest
        assert all(k in self.arrived for k in range(scheduler.taken, scheduler.received))
        scheduler.taken += self._data.draw(st.integers(0, scheduler.received - scheduler.taken))
        return new


@fixed
@given(start=st.integers(0, 50), length=st.integers(0, 100), servers=st.integers(1, 4), figures=figures, data=st.data())
def test_every_batch_arrives_exactly_once(
    start: int, length: int, servers: int, figures: Figures, data: st.DataObject
) -> None:
    """However answers and the loop interleave, and however connections break."""
    scheduler = made(start, start + length, figures, servers=servers)
    game = Game(scheduler, figures, data, servers=servers)
    while not scheduler.finished:
        game.step()
    assert game.arrived == set(range(start, start + length))


@fixed
@given(start=st.integers(0, 50), parts=st.lists(st.integers(1, 20), max_size=10), figures=figures, data=st.data())
def test_every_batch_that_becomes_known_is_asked_for(
    start: int, parts: list[int], figures: Figures, data: st.DataObject
) -> None:
    """Whenever further ones do."""
    scheduler = made(start, start, figures)
    game = Game(scheduler, figures, data)
    for part in parts:
        scheduler.extend(scheduler.stop + part)
        for _ in range(data.draw(st.integers(0, 5))):
            if not scheduler.finished:
                game.step()
    while not scheduler.finished:
        game.step()
    assert game.arrived == set(range(start, start + sum(parts)))


@fixed
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    groups=st.integers(1, 4),
    figures=figures,
    data=st.data(),
)
def test_shards_of_any_sizes_come_to_an_end(
    sizes: list[int], groups: int, figures: Figures, data: st.DataObject
) -> None:
    """Every batch of each was asked for, on the server of its shard, and none after the last shard's end."""
    shards, groups = len(sizes), min(groups, len(sizes))
    scheduler = made(0, FOR_EVER, figures, shards)
    if groups > 1:
        scheduler.divide(groups)
        for server in range(1, groups):
            scheduler.joined(server, figures[1])
    game = Game(scheduler, figures, data, shards=shards, servers=groups)
    ends = []
    while not scheduler.finished:
        for k in game.step():
            if k // shards >= sizes[k % shards]:
                ends.append(k)
                scheduler.shard_ended(k)
    assert scheduler.stop == max(size * shards + shard for shard, size in enumerate(sizes)) + 1
    assert {k % shards for k in ends} == set(range(shards))


@fixed
@given(length=st.integers(1, 100), servers=st.integers(2, 4), figures=figures, data=st.data())
def test_a_server_that_never_answers_holds_nobody_up(
    length: int, servers: int, figures: Figures, data: st.DataObject
) -> None:
    """Though its connections stay: the others give all batches."""
    scheduler = made(0, length, figures, servers=servers)
    now = 0.0
    while not scheduler.finished:
        now += 2 * HEDGE_UNKNOWN
        assert now < 1000 * HEDGE_UNKNOWN * length, "nothing comes any more"
        scheduler.next_request(0, now)
        server = data.draw(st.integers(1, servers - 1))
        wanted = scheduler.next_request(server, now)
        if wanted is not None:
            while wanted is not None:
                wanted = scheduler.arrived(1, READY_BYTES, server, now)
        scheduler.taken = scheduler.received
    assert scheduler.received == length


# --- The next epoch -----------------------------------------------------------------------------------------------


def test_the_window_extends_over_two_epochs() -> None:
    """Batches of the next epoch are requested in the part of the window that the current epoch does not need."""
    scheduler = RangeScheduler(0, 100, prefetch_factor=2, is_background=True)
    scheduler.joined(0, num_workers=2)
    scheduler.over_memory = False
    scheduler.approach(3)
    assert spans(scheduler) == [(0, 1)]
    scheduler.approach(1)
    assert spans(scheduler) == [(1, 2), (2, 3)]
    scheduler.approach(0)
    assert spans(scheduler) == [(3, 4)]
    scheduler.begin(now=0.0)
    assert spans(scheduler) == []
    scheduler.taken = 1
    assert spans(scheduler) == [(4, 5)]


def test_the_end_of_the_epoch_before_does_not_enlarge_the_window() -> None:
    """The window grows with the rate of the training loop only after the epoch has started."""
    scheduler = RangeScheduler(0, 1000, prefetch_factor=2, is_background=True)
    scheduler.joined(0, num_workers=2)
    scheduler.over_memory = False
    scheduler.approach(3)
    for preceding, now in ((3, 0.0), (2, 1.0), (0, 1.1)):
        scheduler.approach(preceding)
        assert scheduler.next_request() is not None
        scheduler.arrived(1, 10**7)
        scheduler.paced(now)
    assert scheduler.window == 4


def test_nothing_is_computed_beyond_the_window_before_the_epoch_starts() -> None:
    """The server computes the window, no request is hedged, and there is one connection, until the epoch starts."""
    scheduler = RangeScheduler(0, 4, prefetch_factor=2, is_background=True)
    scheduler.joined(0, num_workers=2)
    scheduler.over_memory = False
    assert ranges(scheduler) == [request(k, k + 1, 3 - k) for k in range(4)]
    assert scheduler.connections == 1
    other = scheduler.add_server()
    scheduler.joined(other, num_workers=2)
    assert not scheduler.has_work(other, now=1000 * HEDGE_UNKNOWN)
    scheduler.begin(now=1000 * HEDGE_UNKNOWN)
    assert scheduler.connections == 2
    assert not scheduler.has_work(other, now=1000 * HEDGE_UNKNOWN)
    assert scheduler.has_work(other, now=1002 * HEDGE_UNKNOWN)


def test_an_epoch_that_has_started_is_not_moved_back() -> None:
    """A late call for the epoch before changes nothing."""
    scheduler = RangeScheduler(5, 100, prefetch_factor=2, is_background=True)
    scheduler.begin(now=0.0)
    scheduler.approach(1)
    assert scheduler.taken == 5
