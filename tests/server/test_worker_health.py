"""Decisions about workers: each cause in docs/faults.md for the loss of one, and random sequences of events."""

from __future__ import annotations

import os
import signal
from itertools import count
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server.dispatch.dispatcher import MAX_ATTEMPTS
from teleloader_server.limits import Limits
from teleloader_server.loading.tasks import Task
from teleloader_server.workers.health import (
    CHECK_INTERVAL,
    MAX_BACKOFF,
    MAX_FAILED_STARTS,
    MIN_BACKOFF,
    MIN_CHECK_INTERVAL,
    STOP_TIMEOUT,
    Action,
    Restarts,
    Shortages,
    StopTimer,
    WorkerExit,
    WorkerHealth,
    backoff,
    check_interval,
    exit_reason,
)
from teleloader_shared.codec import BatchId
from teleloader_shared.spec import LoaderSpec
from tests.server.dispatching import QUICK, TRAIN, Service, numbers

START: Final = 1000.0
LIMITS: Final = Limits(batch_timeout=10)
UNLIMITED: Final = Limits(batch_timeout=0)
LOST: Final = WorkerExit("worker 0 was killed")
LACKING: Final = WorkerExit("worker 0 cannot be started: no descriptor", "machine")


def task(batch: int) -> Task:
    """Return the task of a batch."""
    return Task(LoaderSpec(dataset="data"), 100, BatchId("key", 0, batch))


def busy() -> WorkerHealth:
    """Return a worker that has just started one of two tasks."""
    return WorkerHealth(START, ready=True, tasks={0: task(0), 1: task(1)})


def decide(health: WorkerHealth, now: float, *, is_stopped: bool = False, limits: Limits = LIMITS) -> list[Action]:
    """Check a worker as the pool does, and carry out RECLAIM."""
    interval = check_interval(limits)
    if not health.is_overdue(interval, now):
        return []
    actions = health.actions(limits, now, is_stopped=is_stopped, has_queued=len(health.tasks) > 1)
    if Action.RECLAIM in actions:
        health.stalled = True
        health.tasks = dict(list(health.tasks.items())[:1])
    return actions


def killed(health: WorkerHealth, stops: list[bool], limits: Limits = LIMITS) -> float | None:
    """Return the time after which a worker without progress is killed; None if it survives these checks."""
    interval = check_interval(limits)
    for check, is_stopped in enumerate(stops, start=1):
        now = START + check * interval
        if {Action.KILL_STOPPED, Action.INSPECT} & set(decide(health, now, is_stopped=is_stopped, limits=limits)):
            return now - START
    return None


# --- A worker hangs or is stopped --------------------------------------------------------------------------------


def test_time_counts_from_the_last_progress() -> None:
    """Time counts only while progress is expected."""
    health = WorkerHealth(START, ready=True, tasks={0: task(0)})
    assert health.is_overdue(4, START + 5)
    assert not health.is_overdue(5, START + 5)
    health.progress(START + 5)
    assert not health.is_overdue(4, START + 5)
    health.tasks.clear()
    assert not health.is_overdue(4, START + 10)
    health.stalled = True
    assert health.is_overdue(4, START + 10), "it works on a task that was reclaimed"
    health.stalled = health.ready = False
    assert health.is_overdue(4, START + 10), "it does not start"


def test_time_in_which_the_server_did_not_run_does_not_count() -> None:
    """Time in which the server did not run neither counts nor is credited later."""
    health = busy()
    health.excuse(3, START + 5)
    assert health.is_overdue(1.5, START + 5)
    assert not health.is_overdue(2.5, START + 5)
    health.excuse(100, START + 5)
    assert health.is_overdue(1, START + 6.5)


def test_a_stop_is_timed_from_the_first_observation_to_the_last() -> None:
    """The time restarts if the process runs between two stops."""
    timer = StopTimer()
    assert timer.observe(100, is_stopped=True) == 0
    assert timer.observe(103, is_stopped=True) == 3
    assert timer.observe(104, is_stopped=False) == 0
    assert timer.observe(105, is_stopped=True) == 0
    assert timer.observe(106, is_stopped=True) == 1
    timer.reset()
    assert timer.observe(107, is_stopped=True) == 0


@given(timeout=st.floats(0.01, 1e4), ready=st.booleans())
def test_an_unresponsive_worker_is_killed_in_bounded_time(timeout: float, *, ready: bool) -> None:
    """A worker is killed at most one check after `batch_timeout`, and not before, also if it does not start."""
    limits = Limits(batch_timeout=timeout)
    health, interval = WorkerHealth(START, ready=ready, tasks={0: task(0)} if ready else {}), check_interval(limits)
    assert decide(health, START + timeout * 0.999, limits=limits) == []
    late = START + timeout + interval
    assert decide(health, late + 1e-6, limits=limits) == [Action.INSPECT]
    assert decide(health, late + interval, limits=limits) == [], "its stacks are being read"


@given(limits=st.sampled_from([LIMITS, UNLIMITED, Limits(batch_timeout=0.05)]))
def test_a_stopped_worker_is_killed_although_its_batch_has_no_timeout(limits: Limits) -> None:
    """The reason is the stop, even if the batch has a shorter timeout."""
    health, interval = busy(), check_interval(limits)
    for check in count(1):
        assert check * interval < STOP_TIMEOUT + 4 * interval
        actions = decide(health, START + check * interval, is_stopped=True, limits=limits)
        assert Action.INSPECT not in actions
        if Action.KILL_STOPPED in actions:
            break


@given(stops=st.lists(st.booleans(), max_size=60))
def test_no_pattern_of_stops_keeps_an_unresponsive_worker(stops: list[bool]) -> None:
    """Each run of checks that find it stopped ends by the stop timeout, and each other check counts."""
    interval = check_interval(LIMITS)
    longest = round(STOP_TIMEOUT / interval) + 2
    checks = longest * (round(LIMITS.batch_timeout / interval) + 3)
    repeated = (stops or [False]) * (checks // max(1, len(stops)) + 1)
    assert killed(busy(), repeated) is not None


def test_a_worker_without_work_is_never_killed() -> None:
    """An idle worker is never killed, even if it is stopped."""
    for is_stopped in (False, True):
        assert killed(WorkerHealth(START, ready=True), [is_stopped] * 1000) is None


def test_queued_tasks_are_reclaimed_once() -> None:
    """Tasks are reclaimed when a check finds no progress since the last one, long before the timeout."""
    health = busy()
    assert decide(health, START + CHECK_INTERVAL) == []
    assert decide(health, START + 2 * CHECK_INTERVAL) == [Action.RECLAIM]
    health.tasks[2] = task(2)
    assert decide(health, START + 3 * CHECK_INTERVAL) == [], "it is stalled already"


@pytest.mark.parametrize(
    ("timeout", "expected"), [(0, CHECK_INTERVAL), (600, CHECK_INTERVAL), (1, 0.1), (0.01, MIN_CHECK_INTERVAL)]
)
def test_a_short_timeout_is_checked_more_often(timeout: float, expected: float) -> None:
    """The interval is a tenth of the timeout, within limits."""
    assert check_interval(Limits(batch_timeout=timeout)) == expected


# --- A worker exceeds a limit of its life ------------------------------------------------------------------------


def test_a_worker_is_recycled_after_its_last_batch() -> None:
    """The worker is recycled once, for one reason."""
    limits = Limits(max_batches_per_worker=2)
    health = busy()
    health.room = 1
    assert health.reason_to_recycle(limits, 0) is None
    health.room = 0
    assert health.reason_to_recycle(limits, 0) == "has reached the limit of 2 batches (--max-batches-per-worker)"
    health.recycling = True
    assert health.reason_to_recycle(limits, 0) is None


def test_a_worker_with_too_much_memory_is_recycled_once_it_has_completed_something() -> None:
    """Otherwise a worker that is too large from its start would never compute a batch."""
    limits = Limits(max_worker_memory=2**20)
    health = busy()
    assert health.reason_to_recycle(limits, 2**21) is None
    health.completed = 1
    assert health.reason_to_recycle(limits, 2**20) is None
    reason = health.reason_to_recycle(limits, 2**21)
    assert reason == "has 2 MiB of resident memory, and the limit is 1 MiB (--max-worker-memory)"
    assert health.reason_to_recycle(LIMITS, 2**40) is None


# --- A worker exits ----------------------------------------------------------------------------------------------


def test_the_reason_of_an_exit_names_signal_code_and_memory() -> None:
    """Lack of memory is assumed only of SIGKILL."""
    assert exit_reason(3 << 8) == "exited with code 3"
    assert exit_reason(signal.SIGSEGV, out_of_memory=True) == "was killed by signal SIGSEGV (Segmentation fault)"
    assert exit_reason(signal.SIGKILL) == "was killed by signal SIGKILL (Killed)"
    assert "out of memory" in exit_reason(signal.SIGKILL, out_of_memory=True)
    realtime = signal.SIGRTMIN + 5
    assert exit_reason(realtime).startswith(f"was killed by signal {realtime} (")
    assert os.WIFSIGNALED(realtime)


def test_a_useful_worker_is_replaced_at_once_and_a_useless_one_ever_later() -> None:
    """Backoff doubles up to its limit."""
    restarts = Restarts()
    assert restarts.exited(LOST, WorkerHealth(START, ready=True, completed=1), START) == 0
    delays = [restarts.exited(LOST, WorkerHealth(START, ready=True), START) for _ in range(12)]
    assert delays[:3] == [MIN_BACKOFF, 2 * MIN_BACKOFF, 4 * MIN_BACKOFF]
    assert delays[-1] == MAX_BACKOFF
    assert restarts.exited(LOST, WorkerHealth(START, ready=True, completed=1), START) == 0
    assert restarts.count == 14
    assert restarts.last_exit == LOST.reason


@given(failures=st.integers(1, 10**6))
def test_backoff_is_bounded(failures: int) -> None:
    """The backoff has an upper limit for any number of failures."""
    assert MIN_BACKOFF <= backoff(failures) <= backoff(failures + 1) <= MAX_BACKOFF


def test_the_time_until_a_replacement_is_ready_is_measured_once() -> None:
    """The time starts at the exit; the first process of a pool replaces none."""
    restarts = Restarts()
    assert not restarts.record_ready(START)
    restarts.exited(LOST, busy(), START)
    assert restarts.record_ready(START + 2)
    assert restarts.last_duration == 2
    assert not restarts.record_ready(START + 3)


starts = st.sampled_from(["exits", "lacks a resource", "fails to fork"])


@given(events=st.lists(st.tuples(starts, st.floats(0, 3)), max_size=60), limits=st.sampled_from([LIMITS, UNLIMITED]))
def test_a_worker_that_does_not_start_is_reported_in_bounded_time(
    events: list[tuple[str, float]], limits: Limits
) -> None:
    """The report follows three exits, or once the machine has lacked a resource for `batch_timeout`."""
    restarts, now, exits, lacking_since = Restarts(), START, 0, None
    for event, seconds in events:
        now += seconds
        if event == "exits":
            exits += 1
            restarts.exited(LOST, WorkerHealth(now), now)
        elif event == "lacks a resource":
            restarts.exited(LACKING, WorkerHealth(now), now)
        else:
            restarts.start_failed()
        lacks = event != "exits"
        reported = restarts.must_report(limits, now, lacks_resource=lacks, has_substitute=False)
        if not lacks:
            assert reported == (exits >= MAX_FAILED_STARTS)
            continue
        if lacking_since is None:
            lacking_since = now
        assert reported == (0 < limits.batch_timeout < now - lacking_since)
        if reported:
            lacking_since = now


def test_a_start_that_succeeded_ends_a_row_of_failed_ones() -> None:
    """Also if the machine then lacked a resource for the worker's batches."""
    restarts = Restarts()
    for _ in range(MAX_FAILED_STARTS - 1):
        restarts.exited(LOST, WorkerHealth(START), START)
    restarts.record_ready(START)
    restarts.exited(LACKING, WorkerHealth(START, ready=True), START)
    restarts.exited(LOST, WorkerHealth(START), START)
    assert not restarts.must_report(LIMITS, START, lacks_resource=False, has_substitute=False)


@pytest.mark.parametrize("lacks_resource", [False, True])
def test_nothing_is_reported_while_another_worker_can_compute_the_batches(*, lacks_resource: bool) -> None:
    """A worker that does not start is not reported, since no batch waits for it."""
    restarts = Restarts()
    for second in range(100):
        restarts.exited(LACKING if lacks_resource else LOST, WorkerHealth(START), START)
        assert not restarts.must_report(LIMITS, START + second, lacks_resource=lacks_resource, has_substitute=True)


# --- Batches of exited workers -----------------------------------------------------------------------------------


@given(times=st.lists(st.floats(0, 30), min_size=1, max_size=50))
def test_a_fault_of_the_machine_is_retried_for_the_batch_timeout(times: list[float]) -> None:
    """Counted from the first loss; restarted if the batch was abandoned or the resource was available again."""
    shortages, batch_id, now, first = Shortages(), BatchId("key", 0, 0), START, None
    for seconds in times:
        now += seconds
        first = now if first is None else first
        is_overdue = now - first > LIMITS.batch_timeout
        assert shortages.overdue([batch_id], LIMITS, now) == ({batch_id} if is_overdue else set())
        first = None if is_overdue else first
    assert shortages.overdue([batch_id], UNLIMITED, now + 1e9) == frozenset()
    shortages.ended()
    assert shortages.overdue([batch_id], LIMITS, now + 1e9) == frozenset()


events = st.sampled_from(["unknown", "machine", "timeout", "completes"])


@given(queue=st.integers(1, 5), sequence=st.lists(st.tuples(events, st.floats(0.01, 4)), max_size=80))
def test_no_sequence_of_exits_retries_a_batch_for_ever(queue: int, sequence: list[tuple[str, float]]) -> None:
    """At most three exits count for a batch; exits caused by the machine end after `batch_timeout`."""
    service, shortages, now = Service(), Shortages(), START
    service.warm_up(TRAIN, seconds=QUICK)
    request = service.request("a", TRAIN, 0, queue)
    attempts = dict.fromkeys(range(queue), 0)
    first_lost: dict[int, float] = {}
    for event, seconds in [*sequence, *[("unknown", 1.0)] * (MAX_ATTEMPTS + 1) * queue]:
        service.decide()
        tasks = list(service.queues[0])
        if not tasks:
            break
        now += seconds
        if event == "completes":
            shortages.ended()
            first_lost.clear()
            service.finish(seconds=QUICK)
            continue
        overdue: frozenset[BatchId] = frozenset()
        if event == "machine":
            overdue = shortages.overdue(tasks, LIMITS, now)
            for batch in numbers(tasks):
                since = first_lost.setdefault(batch, now)
                assert (BatchId(*TRAIN, batch) in overdue) == (now - since > LIMITS.batch_timeout)
        failed = service.lose_worker(0, tasks[0] if event == "timeout" else event, overdue)  # type: ignore[arg-type]
        assert set(failed) >= overdue
        if event == "timeout":
            assert failed == tasks[:1]
        if event == "unknown":
            for batch in numbers(tasks):
                attempts[batch] += len(tasks) == 1
                assert (BatchId(*TRAIN, batch) in failed) == (attempts[batch] == MAX_ATTEMPTS)
        service.worker_ready(0)
    service.send_ready(request)
    assert request.next == queue, "each batch was computed, or an error is in its place"
    assert MAX_ATTEMPTS == 3, "as docs/faults.md says"
