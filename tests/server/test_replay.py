"""Repeated iteration of an iterable-style dataset: the same batches or an error, and never other samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from teleloader_server.loading.passes import Began
from teleloader_server.loading.replay import Reached
from teleloader_shared import delivered
from teleloader_shared.codec import End, Failure
from teleloader_shared.delivered import Delivered
from tests.server.bench import Bench, Cursor, KeptCursor

STREAM: dict[str, Any] = {"session": "mine", "batch_size": 2}


class Ordered:
    """Dataset of twenty numbers in the same order each time."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class Unordered:
    """Dataset of twenty numbers in another order each time."""

    _iterations = itertools.count()

    def __iter__(self) -> Iterator[int]:
        return iter(np.roll(range(20), next(self._iterations)).tolist())


class Drawn:
    """Dataset of twenty numbers in an order that depends on the worker's generators."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(20).tolist())


class Kept:
    """Dataset of twenty numbers in a random order, which is part of its state."""

    _instances = itertools.count()

    def __init__(self) -> None:
        self.order: list[int] = np.roll(range(20), next(self._instances)).tolist()
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < len(self.order):
            self.position += 1
            yield self.order[self.position - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return the order and the position."""
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the order and the position."""
        self.order, self.position = state["order"], state["position"]


class Unkeepable(Kept):
    """Dataset whose state contains values that cannot be saved."""

    def state_dict(self) -> dict[str, Any]:
        """Return a function."""
        return {"order": lambda: 0}


class Consumed:
    """Dataset of twenty numbers, each of which is yielded once."""

    left: list[int]

    def __iter__(self) -> Iterator[int]:
        while Consumed.left:
            yield Consumed.left.pop()


Make = Callable[[], Any]


def replaced(old: Bench, make: Make) -> Bench:
    """Return a worker that replaces another one, with a new replica of the dataset."""
    new = Bench(make())
    reached = old.loading.passes.reached
    began = old.began[-1] if old.began else None
    new.loading.passes.replace(None if began is None else Began(*began), None if reached is None else Reached(*reached))
    return new


def taken(bench: Bench, numbers: range, **spec: Any) -> list[int]:
    """Return the samples of these batches."""
    return [sample for k in numbers for sample in bench.batch(k, **{**STREAM, **spec}).tolist()]


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("make", [Ordered, Drawn, Kept])
@pytest.mark.parametrize("done", [1, 4, 9])
def test_a_replacement_continues_where_the_worker_was(make: Make, done: int, checksum: bool) -> None:
    """A replacement uses the last state, or iterates with the first random state: no sample is lost or repeated."""
    first = Bench(make())
    before = taken(first, range(done), checksum=checksum)
    again = replaced(first, make)
    assert sorted(before + taken(again, range(done, 10), checksum=checksum)) == list(range(20))
    assert isinstance(again.batch(10, **STREAM), End)


@pytest.mark.parametrize("make", [Unordered, Unkeepable])
@pytest.mark.parametrize("done", [1, 4, 9])
def test_a_replacement_that_gives_other_samples_is_an_error(make: Make, done: int) -> None:
    """The loop gets an error that states what to do, and no wrong sample; the shard ends there."""
    first = Bench(make())
    taken(first, range(done))
    again = replaced(first, make)
    failure = again.failure(done, **STREAM)
    assert failure.type == "teleloader.WorkerDied"
    assert "a second iteration yielded different samples" in failure.message
    assert "torchdata's Stateful" in failure.message
    assert isinstance(again.batch(done + 1, **STREAM), End)


@pytest.mark.parametrize("done", [5, 9, 10])
def test_a_replacement_that_gives_fewer_samples_is_an_error(done: int) -> None:
    """Samples that the previous worker took from a queue are lost, so that the epoch must not end normally."""
    Consumed.left = list(range(20))
    first = Bench(Consumed())
    taken(first, range(done))
    again = replaced(first, Consumed)
    failure = again.failure(done, **STREAM)
    assert failure.type == "teleloader.WorkerDied"
    assert "a second iteration yielded different samples" in failure.message
    assert isinstance(again.batch(done + 1, **STREAM), End)


class Interrupted:
    """Dataset whose first iteration raises after three samples, which are consumed."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[int]:
        for sample, _ in zip(self.dataset, range(3), strict=False):
            yield sample
        raise ConnectionError


def interrupted(make: Make) -> Bench:
    """Return a worker that has fetched samples for its first batch without delivering it."""
    bench = Bench(Interrupted(make()))
    bench.failure(0, **STREAM_OF_FOUR)
    assert bench.loading.passes.reached is None
    return bench


STREAM_OF_FOUR = {**STREAM, "batch_size": 4}


def test_samples_of_a_worker_that_delivered_nothing_are_an_error() -> None:
    """A second iteration cannot be compared with anything, and a queue does not yield its samples again."""
    Consumed.left = list(range(20))
    again = replaced(interrupted(Consumed), Consumed)
    failure = again.failure(0, **STREAM_OF_FOUR)
    assert failure.type == "teleloader.WorkerDied"
    assert "no delivered batch or state shows its position" in failure.message
    assert isinstance(again.batch(1, **STREAM_OF_FOUR), End)
    assert again.failure(0, **STREAM_OF_FOUR).type == "teleloader.WorkerDied", "it may be requested again"


def test_a_replacement_ends_an_empty_shard_of_which_the_end_was_delivered() -> None:
    """An ended shard ends again, since all workers get requests until the last shard has ended."""
    first = Bench(Nothing())
    assert isinstance(first.batch(0, **STREAM), End)
    again = replaced(first, Nothing)
    assert isinstance(again.batch(1, **STREAM), End)


class Nothing:
    """Empty dataset."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


def test_a_stateful_dataset_starts_again_if_nothing_was_delivered() -> None:
    """Without delivered batches, the dataset's first state is restored."""
    again = replaced(interrupted(Kept), Kept)
    assert sorted(taken(again, range(5), batch_size=4)) == list(range(20))


@pytest.mark.parametrize(("make", "fails"), [(Ordered, True), (Kept, False)])
def test_a_new_session_knows_which_batches_were_requested(make: Make, fails: bool) -> None:
    """A restarted server may have fetched samples of requested batches before."""
    spec = {**STREAM, "delivered": delivered.pack(0, [Delivered(0, 0, 0, None)])}
    if fails:
        assert "no delivered batch or state shows" in Bench(make()).failure(0, **spec).message
    else:
        assert sorted(taken(Bench(make()), range(10), **spec)) == list(range(20))


@pytest.mark.parametrize("done", [2, 5])
def test_an_iterator_continues_in_the_next_epoch_where_a_worker_left_it(done: int) -> None:
    """With persistent workers, this holds whether the epoch was abandoned or complete."""
    first = Bench(KeptCursor())
    for k in range(done + (done == 5)):
        first.frame(k, **STREAM)
    expected = list(range(2 * done + 1 + (done == 5), 2 * done + 5 + (done == 5)))
    again = replaced(first, KeptCursor)
    assert [sample for k in range(2) for sample in again.batch(k, 1, **STREAM).tolist()] == expected
    assert [sample for k in range(2) for sample in first.batch(k, 1, **STREAM).tolist()] == expected


def test_an_iterator_without_a_state_is_an_error_in_the_next_epoch() -> None:
    """A replacement would repeat the delivered samples."""
    first = Bench(Cursor())
    taken(first, range(2))
    again = replaced(first, Cursor)
    assert again.failure(0, 1, **STREAM).type == "teleloader.WorkerDied"
    assert isinstance(again.batch(1, 1, **STREAM), End)


def test_a_new_session_starts_an_iterator_from_its_state_in_the_previous_epoch() -> None:
    """The client knows it, and a server that was restarted does not."""
    first = Bench(KeptCursor())
    taken(first, range(2))
    assert first.loading.passes.reached is not None
    state = first.loading.passes.reached.shard.state
    for epoch in (0, 1):  # record of the previous epoch, or of this one after its first request
        again = Bench(KeptCursor())
        spec = {**STREAM, "delivered": delivered.pack(epoch, [Delivered(0, 0, 0, state)])}
        assert again.batch(0, 1, **spec).tolist() == [5, 6]
        assert again.batch(0, 2, **spec).tolist() == [7, 8], "from here on, the worker has iterated the dataset itself"


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_new_session_does_not_repeat_an_iterator_without_a_state(epoch: int) -> None:
    """Its position in the previous epoch is unknown after a restart of the server."""
    spec = {**STREAM, "delivered": delivered.pack(epoch, [Delivered(0, 0, 0, None)])}
    assert Bench(Cursor()).failure(0, 1, **spec).type == "teleloader.WorkerDied"
    assert Bench(Ordered()).frame(0, 2, **spec).content.tolist() == [0, 1], "others start each epoch anew"


def in_new_session(old: Bench, make: Make, *, epoch: int = 0) -> tuple[Bench, dict[str, Any]]:
    """Return a worker of a server that has lost the session, and the spec with which a client registers it."""
    assert old.loading.passes.reached is not None
    return Bench(make()), {**STREAM, "delivered": delivered.pack(epoch, [old.loading.passes.reached.shard])}


@pytest.mark.parametrize("make", [Ordered, Kept])
def test_a_session_that_is_registered_again_continues(make: Make) -> None:
    """From the state of the last batch that arrived, or by iterating again."""
    first = Bench(make())
    before = taken(first, range(4))
    again, spec = in_new_session(first, make)
    after = [sample for k in range(4, 10) for sample in again.batch(k, **spec).tolist()]
    assert sorted(before + after) == list(range(20))


@pytest.mark.parametrize("make", [Unordered, Consumed])
def test_a_session_that_cannot_be_repeated_is_an_error(make: Make) -> None:
    """A restarted server that cannot reproduce the batches that the client states as delivered raises an error."""
    Consumed.left = list(range(20))
    first = Bench(make())
    taken(first, range(4))
    again, spec = in_new_session(first, make)
    assert again.failure(4, **spec).type == "teleloader.WorkerDied"
    assert isinstance(again.batch(5, **spec), End)


def test_what_was_delivered_of_one_epoch_is_nothing_to_others() -> None:
    """The record applies to one epoch, while persistent workers serve several under one spec."""
    first = Bench(Unordered())
    taken(first, range(4))
    again, spec = in_new_session(first, Unordered, epoch=7)
    assert sorted(sample for k in range(10) for sample in again.batch(k, **spec).tolist()) == list(range(20))


def test_a_damaged_record_of_deliveries_is_an_error() -> None:
    """A damaged record raises an error, because ignoring it would skip the verification."""
    failure = Bench(Ordered()).failure(1, **STREAM, delivered='[0,["x",1,2,null]]')
    assert failure.type == "teleloader.StateMismatch"
    assert "invalid record of delivered batches" in failure.message


def test_a_record_of_deliveries_may_name_a_state_that_could_not_be_kept() -> None:
    """Then the replay is verified by the digest alone."""
    first = Bench(Ordered())
    taken(first, range(2))
    assert first.loading.passes.reached is not None
    shard = first.loading.passes.reached.shard._replace(state="no state")
    spec = {**STREAM, "delivered": delivered.pack(0, [shard])}
    assert Bench(Ordered()).batch(2, **spec).tolist() == [4, 5]


def test_a_replacement_can_be_replaced() -> None:
    """Each replacement continues from its predecessor, even if that delivered nothing."""
    bench, found = Bench(Kept()), []
    for k in range(10):
        found += taken(bench, range(k, k + 1))
        bench = replaced(replaced(bench, Kept), Kept)
    assert sorted(found) == list(range(20))


def test_going_back_is_checked_like_a_replacement() -> None:
    """A batch that was lost in transit is recomputed by a worker that has continued, and verified."""
    bench = Bench(Ordered())
    whole = taken(bench, range(8))
    assert taken(bench, range(5, 10)) == [*whole[10:], 16, 17, 18, 19]
    bench = Bench(Unordered())
    taken(bench, range(8))
    contents = [bench.frame(k, **STREAM).content for k in range(5, 8)]
    assert any(isinstance(content, Failure) for content in contents)


def test_a_resumed_pass_is_checked_from_its_first_batch_on() -> None:
    """Batches before the resume are not compared, because none was delivered."""
    first = Bench(Ordered())
    assert taken(first, range(4, 6)) == [8, 9, 10, 11]
    assert taken(replaced(first, Ordered), range(6, 8)) == [12, 13, 14, 15]
    first = Bench(Unordered())
    taken(first, range(4, 6))
    assert replaced(first, Unordered).failure(6, **STREAM).type.endswith("WorkerDied")


def test_a_state_of_the_session_is_older_than_that_of_the_worker() -> None:
    """A replacement in a resumed session continues from the delivered batches, not from the session's state."""
    saved = Bench(dataset := Kept())
    before = taken(saved, range(2))
    state = saved.frame(2, **STREAM).shard_state
    before += dataset.order[4:6]
    session: dict[str, Any] = {"shard_states": [state], "resumed_epoch": 0}
    first = Bench(Kept())
    before += taken(first, range(3, 6), **session)
    assert sorted(before + taken(replaced(first, Kept), range(6, 10), **session)) == list(range(20))


def test_failed_batches_are_not_compared() -> None:
    """Failures are not compared, because their text may differ each time."""

    class Failing:
        def __iter__(self) -> Iterator[Any]:
            return (i if i != 5 else object() for i in range(20))

    first = Bench(Failing())
    assert taken(first, range(2)) == [0, 1, 2, 3]
    assert first.failure(2, **STREAM)
    assert taken(first, range(3, 5)) == [6, 7, 8, 9]
    assert taken(replaced(first, Failing), range(5, 7)) == [10, 11, 12, 13]


def test_collate_functions_draw_again_too() -> None:
    """Skipped batches are collated as well, so that later random numbers are the same."""

    def noisy(samples: list[int]) -> Any:
        return np.array(samples) + np.random.random()

    def bench_of() -> Bench:
        return Bench(Drawn(), collate=noisy)

    np.random.seed(1)
    whole, first = bench_of(), bench_of()
    expected = [whole.batch(k, **STREAM).tolist() for k in range(6)]
    np.random.seed(1)
    assert [first.batch(k, **STREAM).tolist() for k in range(3)] == expected[:3]
    again = bench_of()
    again.loading.passes.replace(Began(*first.began[-1]), first.loading.passes.reached)
    assert [again.batch(k, **STREAM).tolist() for k in range(3, 6)] == expected[3:]


def test_another_epoch_begins_at_its_beginning() -> None:
    """A replacement starts the next epoch from its beginning, whatever the previous epoch's position."""
    first = Bench(Ordered())
    taken(first, range(4))
    again = replaced(first, Ordered)
    assert again.batch(0, 1, **STREAM).tolist() == [0, 1]
