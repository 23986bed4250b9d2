"""Results of a worker: which frames share a buffer, and when they are reported."""

from __future__ import annotations

import numpy as np
import pytest

from teleloader_server.loading.tasks import GROUP_BYTES, GROUP_SECONDS, GroupReport, Report
from teleloader_server.workers.arena import Arena
from teleloader_server.workers.messages import Done
from teleloader_server.workers.results import INLINE_BYTES, Results

LARGE = INLINE_BYTES
"""Size of a frame of which two do not fit into a message."""


class Computing:
    """Computing thread of a worker; frame k consists of bytes k."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slots: dict[int, int] = {}
        """Sizes of all slots by number."""
        self.arena = Arena(2**30, lambda slot, fd, size: self.slots.update({slot: size}), lambda slot: None)
        self.waited = 0.0
        self.used = 0.0
        self.results = Results(self.arena, lambda: self.waited, lambda: self.used)
        self.now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    def compute(self, task_id: int, nbytes: int, following: int = 9, *, failed: bool = False) -> None:
        """Compute a task, whose stages take 1, 2 and 3 s."""
        self.results.begin(task_id, following)
        self.results.place(nbytes)[:] = task_id
        self.results.add(nbytes, Report(8, failed, [1.0, 2.0, 3.0]), None)

    def frames(self, done: Done) -> list[tuple[int, int]]:
        """Return task ID and size of each frame of a result, and check its content."""
        if isinstance(done.frames, bytes):
            memory = np.frombuffer(done.frames, np.uint8)
        else:
            memory = self.arena._used[done.frames].memory
        end, found = 0, []
        for task_id, size in enumerate(done.sizes, done.task_id):
            assert np.all(memory[end : end + size] == task_id)
            end += size
            found.append((task_id, size))
        return found

    def taken(self, *, at_once: bool = False) -> list[list[tuple[int, int]]]:
        """Take the results; return their frames."""
        return [self.frames(done) for done in self.results.take(at_once=at_once)]


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> Computing:
    """A worker that computes tasks."""
    return Computing(monkeypatch)


@pytest.mark.parametrize("nbytes", [64, LARGE])
def test_small_frames_share_a_buffer(computing: Computing, nbytes: int) -> None:
    """Small ones travel in the message, larger ones in one slot."""
    for task_id in range(3):
        computing.compute(task_id, nbytes, following=2 - task_id)
    assert computing.taken() == [[(0, nbytes), (1, nbytes), (2, nbytes)]]
    assert len(computing.slots) == (nbytes == LARGE)


def test_the_report_has_the_times_of_each_batch(computing: Computing) -> None:
    """The times with and without a CPU are measured once for all of them."""
    computing.waited, computing.used = 5.0, 1.0
    computing.results.resume()
    computing.compute(0, 64, following=1)
    computing.waited, computing.used = 7.0, 4.0
    computing.compute(1, 64, following=0)
    (done,) = computing.results.take(at_once=False)
    assert done.report == GroupReport(
        (8, 8), False, [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)], 2.0, 3.0, [], (None, None), [], (0.0, 0.0)
    )


def test_a_group_ends_where_its_buffer_is_full(computing: Computing) -> None:
    """The next frame starts another one; a frame that is larger than a group has a slot of its own."""
    computing.compute(0, GROUP_BYTES // 2 + 64)
    computing.compute(1, GROUP_BYTES // 2)
    computing.compute(2, GROUP_BYTES // 2)
    computing.compute(3, 2 * GROUP_BYTES)
    sizes = [[size for _, size in frames] for frames in computing.taken(at_once=True)]
    assert sizes == [[GROUP_BYTES // 2 + 64], [GROUP_BYTES // 2] * 2, [2 * GROUP_BYTES]]


def test_a_group_ends_after_some_milliseconds(computing: Computing) -> None:
    """Its first batch does not wait longer for the others."""
    computing.compute(0, 64)
    computing.results.begin(1, 8)
    computing.now = GROUP_SECONDS * 1.1
    computing.results.place(64)[:] = 1
    computing.results.add(64, Report(8, False, [1.0, 2.0, 3.0]), None)
    assert computing.taken() == [[(0, 64), (1, 64)]]


def test_a_failure_ends_its_group(computing: Computing) -> None:
    """Thus, at most the last frame of a result is a failure."""
    computing.compute(0, 64)
    computing.compute(1, 128, failed=True)
    computing.compute(2, 64)
    first, second = computing.results.take(at_once=True)
    assert (computing.frames(first), first.report.failed) == ([(0, 64), (1, 128)], True)
    assert (computing.frames(second), second.report.failed) == ([(2, 64)], False)


def test_complete_frames_can_be_reported_while_the_next_batch_is_computed(computing: Computing) -> None:
    """The batch may hang; but while a frame is written into the same buffer, nothing is reported."""
    computing.compute(0, 64)
    assert computing.taken() == []
    assert computing.results.are_pending
    computing.results.begin(1, 8)
    computing.results.place(64)[:] = 1
    assert computing.taken(at_once=True) == []
    computing.results.add(64, Report(8, False, [1.0, 2.0, 3.0]), None)
    computing.results.begin(2, 7)
    assert computing.taken(at_once=True) == [[(0, 64), (1, 64)]]
    computing.compute(2, 64, following=0)
    assert computing.taken() == [[(2, 64)]]
    assert not computing.results.are_pending


def test_a_group_has_only_successive_tasks(computing: Computing) -> None:
    """The worker skips revoked tasks."""
    computing.compute(0, 64)
    computing.compute(2, 64)
    assert computing.taken(at_once=True) == [[(0, 64)], [(2, 64)]]


@pytest.mark.parametrize("size", [64, 256, 3 * GROUP_BYTES])
def test_a_frame_that_is_replaced_leaves_the_others_intact(computing: Computing, size: int) -> None:
    """A batch that fails while it is written is replaced by its failure, which may be larger."""
    computing.compute(0, 192, following=1)
    computing.results.begin(1, 0)
    computing.results.place(128)[:] = 77
    computing.results.place(size)[:] = 1
    computing.results.add(size, Report(8, True, [1.0, 2.0, 3.0]), None)
    assert [pair for frames in computing.taken() for pair in frames] == [(0, 192), (1, size)]


def test_the_slot_of_a_replaced_frame_is_reused(computing: Computing) -> None:
    """No slot is lost."""
    computing.results.begin(0, 0)
    computing.results.place(2 * LARGE)
    computing.results.place(3 * LARGE)[:] = 0
    computing.results.add(3 * LARGE, Report(8, True, [1.0, 2.0, 3.0]), None)
    assert computing.taken() == [[(0, 3 * LARGE)]]
    assert len(computing.arena._used) == 1


def test_the_arena_sends_messages_without_the_lock_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that reports results holds the lock of the channel, and waits for that of the results."""
    computing = Computing(monkeypatch)
    locked: list[bool] = []
    computing.arena.free_limit = 0
    computing.arena._retract = lambda slot: locked.append(computing.results._lock.locked())
    computing.results.begin(0, 0)
    computing.results.place(2 * LARGE)
    computing.results.place(3 * LARGE)[:] = 0
    computing.results.add(3 * LARGE, Report(8, True, [1.0, 2.0, 3.0]), None)
    assert locked == [False]
