"""Bounded records: the timeline of batches, the history of workers and the error log."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server.dispatch.error_log import MAX_ERRORS, ErrorLog, batch_preview, sample_preview
from teleloader_server.dispatch.timeline import MAX_BATCHES, MAX_CLIENTS, Timeline
from teleloader_server.loading.tasks import GroupReport, Task
from teleloader_server.problems import HttpProblem
from teleloader_server.stats.worker_history import Ring, WorkerHistory
from teleloader_server.web.timings import client_times
from teleloader_shared.codec import BatchId, Failure, Substitution, to_bytes
from teleloader_shared.inspection import ClientTimes, Step
from teleloader_shared.spec import LoaderSpec

SPEC = LoaderSpec(dataset="data", batch_size=4, shuffle=True, seed=5)


def task(k: int, spec: LoaderSpec = SPEC, indices: bytes | None = None, assigned: float = 0.0) -> Task:
    """Return the task of batch k of epoch 3 of a dataset with 100 samples."""
    return Task(spec, 100, BatchId(spec.key, 3, k), indices, assigned=assigned)


def report(count: int, ended: float) -> GroupReport:
    """Return a report on batches whose stages take 3, 2 and 1 s each, of which the first ended at `ended`."""
    stages = [[3.0] * count, [2.0] * count, [1.0] * count]
    return GroupReport([4] * count, False, stages, 0.0, ended=[ended + 6 * place for place in range(count)])


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(0, 700))
def test_the_timeline_keeps_the_last_batches(groups: list[int], since: int) -> None:
    """Of any sequence of groups, the last 512 batches are kept with consecutive numbers; `since` omits earlier ones."""
    timeline, total = Timeline(), 0
    for size in groups:
        tasks = [task(total + place) for place in range(size)]
        timeline.add_computed(float(total), None, 0, tasks, report(size, 0.0))
        total += size
    first = max(0, total - MAX_BATCHES)
    assert [each.number for each in timeline.batches()] == list(range(first, total))
    assert [each.batch for each in timeline.batches()] == list(range(first, total))
    assert [each.number for each in timeline.batches(since)] == list(range(max(first, since), total))
    assert timeline.computed == total


def test_batches_of_a_group_follow_each_other() -> None:
    """Each batch of a group has its own start; all have the same result time, and the number of the first batch."""
    timeline = Timeline()
    timeline.add_computed(100.0, "key", 1, [task(8, assigned=1.0), task(9, assigned=1.0)], report(2, 20.0))
    first, second = timeline.batches()
    assert (first.began_at, second.began_at) == (14.0, 20.0)
    assert (first.ready_at, second.ready_at, first.group, second.group) == (100.0, 100.0, 0, 0)
    assert (first.stages, first.assigned_at, first.pool, first.worker) == ([3.0, 2.0, 1.0], 1.0, "key", 1)
    assert [each.batch for each in timeline.of_worker("key", 1, 20)] == [9, 8]
    assert timeline.of_worker(None, 1, 20) == []


def test_responses_are_bounded() -> None:
    """The last 512 responses are kept with consecutive numbers."""
    timeline = Timeline()
    for number in range(MAX_BATCHES + 10):
        timeline.add_sent((SPEC.key, 3), [number], ("consumer", "token"), 1.0, 2.0, 64)
    assert [each.number for each in timeline.responses()] == list(range(10, MAX_BATCHES + 10))
    assert [each.batches for each in timeline.responses(MAX_BATCHES + 8)] == [[MAX_BATCHES + 8], [MAX_BATCHES + 9]]


def times_of(consumer: str, *steps: Step) -> ClientTimes:
    """Return a report with steps."""
    return ClientTimes(consumer, "token", None, "host", 1, SPEC.key, 3, 0.0, 0.1, [], [], list(steps))


def test_reports_of_clients_are_joined_and_bounded() -> None:
    """Successive reports of a consumer are one; the consumers that reported last are kept."""
    timeline = Timeline()
    timeline.add_client(times_of("a", Step(0, 1.0)))
    timeline.add_client(times_of("a", Step(1, 2.0)))
    (found,) = timeline.clients()
    assert found.steps == [Step(0, 1.0), Step(1, 2.0)]
    for number in range(MAX_CLIENTS):
        timeline.add_client(times_of(f"b{number}"))
    assert len(list(timeline.clients())) == MAX_CLIENTS
    assert all(each.consumer != "a" for each in timeline.clients())


def test_clients_report_only_while_the_timeline_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 64 consumers report, until ten seconds after the last request."""
    timeline, now = Timeline(), 100.0
    monkeypatch.setattr("teleloader_server.dispatch.timeline.clock", lambda: now)
    assert not timeline.wants_client("token", "0")
    timeline.request_clients(now)
    wanted = [timeline.wants_client("token", f"{number}") for number in range(MAX_CLIENTS + 5)]
    assert wanted == [True] * MAX_CLIENTS + [False] * 5
    now = 111.0
    assert not timeline.wants_client("token", "0")
    timeline.request_clients(now)
    assert timeline.wants_client("token", "another"), "each request selects the consumers anew"


def test_later_epochs_report_while_the_timeline_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each epoch is a consumer with a new name: ended epochs do not keep later ones from reporting."""
    timeline, now = Timeline(), 100.0
    monkeypatch.setattr("teleloader_server.dispatch.timeline.clock", lambda: now)
    for epoch in range(3 * MAX_CLIENTS):
        now += 1.0
        timeline.request_clients(now)
        assert timeline.wants_client("token", "other#0"), "a consumer that receives batches keeps its place"
        assert timeline.wants_client("token", f"loop#{epoch}")


VALID = {"host": "h", "pid": 1, "run": "train.py", "seconds": 10.0, "uncertainty": 0.5,
         "received": [[0, 2, 1.0, 2.0, 3.0]], "waits": [[0, 1.0, 2.0]], "steps": [[0, 2.0]]}  # fmt: skip


def test_client_times_are_on_the_clock_of_the_server() -> None:
    """The offset of the clocks is added to each time."""
    found = client_times(VALID, "consumer", "token", "key", 3, 64)
    assert found is not None
    (received,), (wait,), (step,) = found.received, found.waits, found.steps
    assert (received.first_byte_at, received.last_byte_at, received.decoded_at) == (11.0, 12.0, 13.0)
    assert (wait.began_at, wait.ended_at, step.at, found.run) == (11.0, 12.0, 12.0, "train.py")
    largest = {**VALID, "received": [[0, 64, 1.0, 2.0, 3.0]]}
    assert client_times(largest, "consumer", "token", "key", 3, 64) is not None
    assert client_times({}, "consumer", "token", "key", 3, 64) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": 1}, {"host": "h" * 300}, {"pid": -1}, {"run": "\n"}, {"seconds": None}, {"uncertainty": "1"},
        {"received": {}}, {"received": [[0, 2, 3.0, 2.0, 1.0]]}, {"received": [[0, 65, 1.0, 2.0, 3.0]]},
        {"received": [[0, 1]]}, {"waits": [[0, float("nan"), 1.0]]}, {"waits": [["0", 0.0, 1.0]]},
        {"steps": [[0, 1.0]] * 600}, {"steps": [[True, 1.0]]}, {"steps": None},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_client_times_are_rejected(wrong: dict[str, Any]) -> None:
    """Values of other types or ranges, descending times, and long lists get status 422."""
    with pytest.raises(HttpProblem, match="invalid times of batches"):
        client_times({**VALID, **wrong}, "consumer", "token", "key", 3, 64)


# -- workers


@given(st.lists(st.integers(0, 10**12), max_size=40), st.integers(1, 12))
def test_the_ring_has_the_last_samples_in_order(sizes: list[int], length: int) -> None:
    """Of n samples, the ring returns the last ones, oldest first; the first has no CPU use, and is omitted."""
    ring = Ring(length)
    for number, rss in enumerate(sizes):
        ring.add(5.0 * number, 7, rss, 2.5 * number)
    found = ring.records(5.0 * len(sizes))
    kept = sizes[-length:][1:]
    assert [each.rss for each in found] == kept
    assert all(each.cpu == pytest.approx(0.5) for each in found)
    assert [each.age for each in found] == sorted((each.age for each in found), reverse=True)


def test_a_new_process_has_no_cpu_use_of_its_predecessor() -> None:
    """The CPU time of the replaced process is not subtracted from that of its replacement."""
    ring = Ring(8)
    for at, pid, used in ((0.0, 1, 50.0), (5.0, 1, 55.0), (10.0, 2, 1.0), (15.0, 2, 2.0)):
        ring.add(at, pid, 100, used)
    assert [(each.pid, each.cpu) for each in ring.records(15.0)] == [(1, 1.0), (2, 0.2)]


def test_removed_workers_are_forgotten() -> None:
    """Workers that a sample does not contain lose their history."""
    history = WorkerHistory()
    for at in (0.0, 5.0):
        history.sample(at, [((None, 0), 1, 100, at), ((None, 1), 2, 100, at)])
    assert len(history.of((None, 1), 5.0)) == 1
    history.sample(10.0, [((None, 0), 1, 100, 10.0)])
    assert history.of((None, 1), 10.0) == []
    assert len(history.of((None, 0), 10.0)) == 2


# -- errors


def test_the_log_keeps_the_last_hundred_errors() -> None:
    """The records are newest first, with consecutive numbers; long texts are shortened."""
    log = ErrorLog()
    for number in range(MAX_ERRORS + 20):
        log.failed(task(number), Failure("ValueError", "m" * 9000, "t" * 9000, list(range(500)), 2, 7), "run")
    found = log.records(1e12)
    assert found.total == MAX_ERRORS + 20
    assert [each.number for each in found.errors] == list(range(MAX_ERRORS + 20, 20, -1))
    latest = found.errors[0]
    assert (len(latest.message), len(latest.traceback), len(latest.indices)) == (500, 4000, 20)
    assert (latest.sample, latest.handling, latest.run, latest.worker) == (7, "raised", "run", 2)


def test_skipped_and_replaced_samples_are_errors() -> None:
    """The record has the type, the sample and its replacement."""
    log = ErrorLog()
    log.substituted(task(0), 1, Substitution(2, 7, None, "KeyError: 'x'"), None)
    log.substituted(task(0), 1, Substitution(2, 8, 9, "OSError: disk: full"), None)
    replaced, skipped = log.records(0.0).errors
    assert (skipped.type, skipped.message, skipped.sample, skipped.handling) == ("KeyError", "'x'", 7, "skipped")
    assert (replaced.message, replaced.handling, replaced.replacement) == ("disk: full", "replaced", 9)


@given(st.integers(0, 2**64 - 1), st.integers(0, 5), st.sampled_from(["pad", "drop", "uneven"]), st.booleans())
def test_the_preview_in_seeded_order_is_the_same_loader(seed: int, rank: int, tail: Any, is_own: bool) -> None:
    """The preview of a shared loader has the same key, so that the server sends the same batch."""
    spec = LoaderSpec(
        dataset="data", batch_size=4, shuffle=True, seed=seed, rank=rank, world_size=6, tail=tail,
        session="own" if is_own else None,
    )  # fmt: skip
    found = batch_preview(task(9, spec), None)
    assert found is not None
    again = LoaderSpec.from_json(found.spec)
    assert (found.epoch, found.batch, found.indices) == (3, 9, None)
    assert again.session is None
    assert is_own or again.key == spec.key
    assert (again.seed, again.rank, again.tail) == (seed, rank, tail)


CLIENT = LoaderSpec(dataset="data", batch_size=4, order="client", session="s", seed=3)


@given(st.lists(st.integers(-5, 2**40), max_size=50))
def test_the_preview_of_an_index_list_has_the_list(indices: list[int]) -> None:
    """A list of up to 1,000 integers is kept completely."""
    log = ErrorLog()
    listed = to_bytes(BatchId(CLIENT.key, 3, 0), indices, name="indices")
    log.failed(task(0, CLIENT, listed), Failure("ValueError", "", "", indices, 0, 7), None)
    preview = log.records(0.0).errors[0].batch_preview
    assert preview is not None
    assert (preview.indices, preview.is_private) == (indices, True)
    assert "session" not in preview.spec


@pytest.mark.parametrize("listed", [[*range(1001)], ["a", "b"], [1, 2.5], [np.float32(1.0)]], ids=str)
def test_other_index_lists_have_no_preview(listed: Any) -> None:
    """Long lists and other indices than integers have no request for the batch; the sample has one."""
    log = ErrorLog()
    frame = to_bytes(BatchId(CLIENT.key, 3, 0), listed, name="indices")
    log.failed(task(0, CLIENT, frame), Failure("ValueError", "", "", [], 0, 7), None)
    record = log.records(0.0).errors[0]
    assert record.batch_preview is None
    assert record.sample_preview is not None
    assert record.sample_preview.indices == [7]


def test_an_iterable_style_dataset_has_no_preview() -> None:
    """Only the workers of its session can compute the batch."""
    spec = LoaderSpec(dataset="data", batch_size=4, session="s", num_workers=2)
    stream = Task(spec, 0, BatchId(spec.key, 0, 0))
    assert batch_preview(stream, None) is None
    assert sample_preview(stream, None) is None
