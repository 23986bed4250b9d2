"""Statistics of batches, and records of slow and failed ones."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import fields

import numpy as np
import pytest

from teleloader_server.dispatch.counters import (
    KEEP_LOOPS,
    MAX_ERROR_TYPES,
    MAX_KEPT_LIST,
    MIN_STALL,
    OTHER_ERRORS,
    SLOWEST,
    Counters,
    DatasetCounters,
    LoopCounters,
    PoolCounters,
    Recent,
)
from teleloader_server.dispatch.error_log import MAX_MESSAGE, MAX_SHOWN_INDICES, MAX_TRACEBACK
from teleloader_server.dispatch.quotas import Quota
from teleloader_server.dispatch.records import Consumer, EpochState, Loader, PrincipalShare
from teleloader_server.loading.stages import STAGES
from teleloader_server.loading.tasks import GroupReport, Task
from teleloader_server.stats.collector import dataset_stats
from teleloader_shared.codec import BatchId, Failure, to_bytes
from teleloader_shared.histogram import BLOCK
from teleloader_shared.messages import ConsumerReport, DatasetInfo, ReceivingTotals
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.stats import WINDOW

SPEC = LoaderSpec(dataset="data", batch_size=50)
RUN = (SPEC.key, 0)
NOTHING = np.empty(0, np.uint8)


def task(k: int, *, indices: bytes | None = None, spec: LoaderSpec = SPEC) -> Task:
    """Return a task for a batch of a dataset of 10,000 samples."""
    return Task(spec, 10_000, BatchId(spec.key, 0, k), indices)


def report(
    fetch: float = 0.01, *, failed: bool = False, cpu_wait: float = 0.0, cpu: float = 0.0, sample: int | None = None
) -> GroupReport:
    """Return the report of a batch."""
    known = {"fetch": fetch, "collate": 0.002, "encode": 0.001}
    stages = [[known.get(stage.name, 0.0)] for stage in STAGES]
    return GroupReport([50], failed=failed, stages=stages, cpu_wait=cpu_wait, cpu=cpu, slowest=[sample])


def fail(pool: PoolCounters, kind: str, message: str = "", traceback: str = "", indices: tuple[int, ...] = ()) -> None:
    """Record a failed batch."""
    frame = to_bytes(task(0).batch_id, Failure(kind, message, traceback, list(indices), 0))
    pool.computed(0, [task(0)], [np.frombuffer(frame, np.uint8)], report(failed=True), "anyone")


def test_each_count_of_a_dataset_is_reported() -> None:
    """Statistics contain a value for each field with a default, which only servers of earlier releases omit."""
    counters = DatasetCounters(0.0)
    numbers = [name for name, value in vars(counters).items() if type(value) in (int, float)]
    for number, name in enumerate(numbers, 1):
        setattr(counters, name, number)
    info = DatasetInfo("data", "map", "Data", 1, "1", "f", "default", None, [], "batch", 1)
    found = dataset_stats(info, counters, 1.0)
    assert [field.name for field in fields(found) if getattr(found, field.name) == field.default] == []


def test_batches_are_counted_where_they_belong() -> None:
    """Batches are counted per worker, loader, dataset and stage, also before they are in the histograms."""
    metrics = Counters()
    pool = metrics.pool()
    for k in range(BLOCK + 5):
        pool.computed(k % 2, [task(k)], [NOTHING], report(), "anyone")
    dataset = metrics.datasets["data"]
    assert (dataset.computed, dataset.samples, dataset.failed) == (BLOCK + 5, 50 * (BLOCK + 5), 0)
    assert [pool.workers[number].batches for number in (0, 1)] == [BLOCK // 2 + 3, BLOCK // 2 + 2]
    counts = {stage: histogram.count for stage, histogram in dataset.stages.items()}
    assert counts == {stage.name: BLOCK + 5 for stage in STAGES}
    seconds = pool.loaders[SPEC.key].batch_seconds(0.0).stages
    assert [round(seconds[stage], 6) for stage in ("fetch", "collate", "encode")] == [0.01, 0.002, 0.001]


def test_work_is_the_time_without_that_for_which_workers_had_no_cpu() -> None:
    """It is never negative, and 0 before the first batch."""
    pool = Counters().pool()
    pool.consumer(consumer("a"), "data")
    assert pool.loaders[SPEC.key].batch_seconds(0.0).work == 0.0
    pool.computed(0, [task(0)], [NOTHING], report(0.297, cpu_wait=0.2), "anyone")
    pool.computed(1, [task(1)], [NOTHING], report(0.097, cpu_wait=5.0), "anyone")
    assert pool.loaders[SPEC.key].batch_seconds(0.0).work == pytest.approx((0.1 + 0.0) / 2)
    assert [pool.workers[number].cpu_wait for number in (0, 1)] == pytest.approx([0.2, 0.1])


def test_the_time_of_a_worker_has_parts() -> None:
    """The CPU time of all its threads together is no longer than its time without that for which it had no CPU."""
    pool = Counters().pool()
    pool.computed(0, [task(0)], [NOTHING], report(0.097, cpu_wait=0.02, cpu=0.05), "anyone")
    pool.computed(0, [task(1)], [NOTHING], report(0.097, cpu_wait=0.02, cpu=5.0), "anyone")
    assert pool.workers[0].totals(0.3) == pytest.approx((0.5, 0.04, 0.13, 0.2))


def test_the_slow_recent_batches_of_a_loader_are_known() -> None:
    """A batch that took long is forgotten after some seconds."""
    pool = Counters().pool()
    for k, fetch in enumerate((0.01, 0.7, 0.2)):
        pool.computed(0, [task(k)], [NOTHING], report(fetch, sample=100 + k), "anyone")
    loader = pool.loaders[SPEC.key]
    found = loader.recent_slow(time.monotonic())
    assert [(slow.batch, slow.sample, slow.seconds) for slow in found] == [(1, 101, 0.7), (2, 102, 0.2)]
    assert loader.recent_slow(time.monotonic() + WINDOW + 1) == []


def test_the_time_with_full_memory_is_measured() -> None:
    """It includes the time until now."""
    pool = Counters().pool()
    pool.memory_changed(10.0)
    assert pool.memory_full.until(12.0) == 2.0
    pool.memory_changed(13.0)
    assert pool.memory_full.until(20.0) == 3.0
    pool.memory_changed(20.0)
    assert pool.memory_full.until(21.0) == 4.0


def test_the_measurements_of_receiving_threads_are_rates() -> None:
    """A client that stops to report them reports none."""
    loop = LoopCounters(0.0)
    for second in range(5):
        totals = ReceivingTotals(*(rate * second for rate in (0.5, 0.25, 0.0, 0.1, 0.05, 0.2, 10, 1)))
        loop.add_report(ConsumerReport(second, 0.75 * second, 1 + second, 0, 0, receiving=totals), second)
    assert loop.recent(4.0).receiving == pytest.approx((0.5, 0.25, 0.0, 0.1, 0.05, 0.2, 10, 1))
    loop.add_report(ConsumerReport(5.0, 3.75, 6, 0, 0), 5.0)
    assert loop.recent(5.0).receiving is None


def test_a_step_is_the_time_per_batch_without_the_data_wait() -> None:
    """It counts all batches of the training loop, which receives some of them from other servers."""
    loop = LoopCounters(0.0)
    for second in range(20):
        loop.add_report(ConsumerReport(second, 0.75 * second, 1 + 5 * second, 0, 0), second)
        loop.batches += 1
        loop.mark(second)
    assert loop.recent(19.0).step == pytest.approx(0.05)
    assert loop.recent(19.0).batches == pytest.approx(1.0)


def test_the_slowest_batches_are_kept() -> None:
    """The five batches with the longest fetch times are recorded with their indices, slowest first."""
    metrics = Counters()
    pool = metrics.pool()
    for k in range(100):
        pool.computed(0, [task(k)], [NOTHING], report((k * 37) % 100 / 1000), "anyone")
    found = metrics.datasets["data"].slowest()
    assert len(found) == SLOWEST
    assert [slow.seconds for slow in found] == [0.099, 0.098, 0.097, 0.096, 0.095]
    assert [slow.batch * 37 % 100 for slow in found] == [99, 98, 97, 96, 95]
    assert found[0].indices == [50 * found[0].batch + j for j in range(MAX_SHOWN_INDICES)]


def test_a_clients_list_is_kept_with_a_slow_batch_unless_it_is_long() -> None:
    """A long list of a client is omitted from the record."""
    spec = LoaderSpec(dataset="data", batch_size=4, order="client", session="mine")
    metrics = Counters()
    pool = metrics.pool()
    batch_id = BatchId(spec.key, 0, 0)
    pool.computed(0, [task(0, indices=to_bytes(batch_id, [9, 8, 7]), spec=spec)], [NOTHING], report(0.2), "anyone")
    long = to_bytes(batch_id, list(range(MAX_KEPT_LIST)))
    pool.computed(0, [task(0, indices=long, spec=spec)], [NOTHING], report(0.1), "anyone")
    assert [slow.indices for slow in metrics.datasets["data"].slowest()] == [[9, 8, 7], []]


def test_slow_samples_are_counted_and_the_slowest_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The log names a batch only if it takes twice as long as those that were logged before, and long at all."""
    metrics = Counters()
    pool = metrics.pool()
    for fetch in (MIN_STALL / 2, 3.0, 4.0, 7.0):
        pool.slow_samples(task(3), [42], 0.02, fetch, [(42, fetch)])
    pool.slow_samples(task(4), [1, 2], None, 20.0, [])
    assert metrics.datasets["data"].slow_samples == 6
    assert [record.getMessage().partition(". In later")[0] for record in caplog.records] == [
        "batch 3 of epoch 0 of dataset data was slow: sample 42 took 3.000 s; the median of all batches is 0.02 s",
        "batch 3 of epoch 0 of dataset data was slow: sample 42 took 7.000 s; the median of all batches is 0.02 s",
        "batch 4 of epoch 0 of dataset data was slow: its samples took 20.000 s together",
    ]


def test_failures_are_counted_by_type() -> None:
    """The latest type comes first, with its last message."""
    metrics = Counters()
    pool = metrics.pool()
    fail(pool, "ValueError", "first")
    fail(pool, "KeyError")
    fail(pool, "ValueError", "x" * 10_000, "a" * 10_000 + "b", tuple(range(100)))
    tally = metrics.datasets["data"]
    first, second = tally.errors(1e9)
    assert (tally.failed, first.type, first.count, second.type) == (3, "ValueError", 2, "KeyError")
    assert first.last == "x" * MAX_MESSAGE
    assert len(first.traceback) == MAX_TRACEBACK
    assert first.traceback.endswith("b"), "the end of a traceback says what happened"
    assert first.indices == list(range(MAX_SHOWN_INDICES))


def test_a_dataset_that_makes_types_fills_no_memory() -> None:
    """Further types are counted together, and no counter ever decreases."""
    metrics = Counters()
    pool = metrics.pool()
    counts: dict[str, int] = {}
    for number in range(100):
        fail(pool, f"made.Error{number}" + "x" * 10_000)
        now = {error.type: error.count for error in metrics.datasets["data"].errors(1e9)}
        assert len(now) <= MAX_ERROR_TYPES
        assert all(now[kind] >= count for kind, count in counts.items())
        counts = now
    assert counts[OTHER_ERRORS] == 100 - (MAX_ERROR_TYPES - 1)
    assert all(len(kind) < 300 for kind in counts)


def test_of_each_type_the_first_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The log line has the batch's fields; further failures are only counted."""
    pool = Counters().pool()
    for _ in range(10):
        fail(pool, "ValueError", "two\nlines")
    fail(pool, "KeyError")
    first, second = caplog.records
    assert first.getMessage().startswith("batch 0 of epoch 0 of dataset data failed: 'ValueError: two\\nlines'")
    assert "KeyError" in second.getMessage()
    about = vars(first)
    assert (about["dataset"], about["loader"], about["epoch"], about["batch"]) == ("data", SPEC.key, 0, 0)


def test_a_batch_that_is_given_up_is_a_failure() -> None:
    """A batch that the server itself fails is counted as a failure."""
    metrics = Counters()
    pool = metrics.pool()
    pool.batch_failed(task(0), Failure("teleloader.WorkerDied", "worker 0 died", "", [1], 0))
    pool.retried("data")
    pool.worker_lost()
    tally = metrics.datasets["data"]
    assert (tally.failed, tally.retried, metrics.worker_restarts) == (1, 1, 1)
    assert tally.errors(1e9)[0].last == "worker 0 died"


def test_removed_loaders_are_forgotten() -> None:
    """A batch that is completed after its loader was removed still counts for its dataset."""
    metrics = Counters()
    pool = metrics.pool()
    pool.computed(0, [task(0)], [NOTHING], report(), "anyone")
    pool.keep((), ())
    assert pool.loaders == {}
    pool.computed(0, [task(1)], [NOTHING], report(), "anyone")
    assert metrics.datasets["data"].computed == 2


# -- training loops


def report_at(elapsed: float, waited: float) -> ConsumerReport:
    """Return a client's report."""
    return ConsumerReport(elapsed, waited, 1, 0, 0)


def consumer(name: str, epoch: int = 0, principal: str = "anyone", loader: str = SPEC.key) -> Consumer:
    """Return the identity of an iteration through an epoch."""
    share = PrincipalShare(Quota(principal, 2**20, 10), 0.0)
    return Consumer(share, name, Loader(loader, SPEC, 0, 1), (loader, epoch), EpochState(), 0, 0.0, 0.0)


def _mark(metrics: Counters, now: float) -> None:
    """Mark all totals, as the collector does each second."""
    for counters in metrics.marked():
        counters.mark(now)
    metrics.keep_recent(now)


def test_short_passes_of_a_loop_are_one_loop() -> None:
    """Iterations of 0.1 s with 1 s of validation between them are one loop, whose time excludes the validation."""
    metrics = Counters()
    pool = metrics.pool()
    now = 0.0
    for epoch in range(50):
        tally = pool.consumer(consumer(f"host:1/rank0/loader0#{epoch}", epoch), "data")
        for ask in range(2):
            elapsed = 0.1 * epoch + 0.05 * ask
            tally.requested(now, report_at(elapsed, 0.4 * elapsed))
            tally.sent(1, 1000)
            now += 0.05
        now += 1.0
        _mark(metrics, now)
    recent = tally.loop.recent(now)
    assert recent.span == pytest.approx(4.95)
    assert recent.data_wait == pytest.approx(0.4)
    assert recent.batches == pytest.approx(20, rel=0.02)
    assert recent.nbytes == pytest.approx(20_000, rel=0.02)


def test_loops_are_distinguished() -> None:
    """A loop has one principal, process, rank, loader and dataset; without iteration numbers all are one loop."""
    pool = Counters().pool()

    def loop(name: str, epoch: int = 0, dataset: str = "data") -> LoopCounters:
        return pool.consumer(consumer(name, epoch), dataset).loop

    assert loop("host:1/rank0/loader0#1") is loop("host:1/rank0/loader0#2", 1)
    assert loop("10.0.0.7:5000") is loop("10.0.0.7:5000", 1)
    assert loop("job#a#1") is loop("job#a#2")
    different = [
        loop("host:1/rank0/loader0#1"), loop("host:1/rank0/loader1#3"), loop("host:1/rank1/loader0#1"),
        loop("host:2/rank0/loader0#1"), loop("#1"), loop("#2"), loop(""), loop("other#1"),
        pool.consumer(consumer("host:1/rank0/loader0#1", loader="other"), "other").loop,
        pool.consumer(consumer("host:1/rank0/loader0#1", principal="another"), "data").loop,
    ]  # fmt: skip
    assert len(set(different)) == len(different)


def test_a_loop_is_remembered_between_two_passes_and_not_for_ever() -> None:
    """The next epoch's session belongs to the same loop if it starts within a limited time."""
    metrics = Counters()

    def loop(epoch: int) -> LoopCounters:
        return metrics.pool().consumer(consumer(f"host:1/rank0/loader0#{epoch}", epoch), "data").loop

    first = weakref.ref(loop(0))
    began = time.monotonic()
    _mark(metrics, began + KEEP_LOOPS - 1)
    assert loop(1) is first()
    _mark(metrics, began + KEEP_LOOPS + 1)
    gc.collect()
    assert first() is None


def test_a_loop_whose_pass_is_known_is_kept_however_long_it_is_silent() -> None:
    """A loop with an open iteration is kept however long its steps take."""
    metrics = Counters()
    pool = metrics.pool()
    tally = pool.consumer(consumer("host:1/rank0/loader0#0"), "data")
    _mark(metrics, time.monotonic() + 10 * KEEP_LOOPS)
    gc.collect()
    assert pool.consumer(consumer("host:1/rank0/loader0#1", 1), "data").loop is tally.loop


def test_the_consumed_rate_is_that_of_the_servers_clock() -> None:
    """Batches before the first report do not count, and neither does the restart of a client."""
    loop = LoopCounters(0.0)
    assert loop.consumed_rate(1.0) is None
    for second in range(5):
        loop.add_report(ConsumerReport(second, 0.0, 1000 + 5 * second, 0, 0), second)
        loop.mark(second)
    assert loop.consumed_rate(4.0) == pytest.approx(5.0)
    loop.add_report(ConsumerReport(0.0, 0.0, 0, 0, 0), 8.0)
    assert loop.consumed_rate(8.0) == pytest.approx(20 / 8)
    for second in range(8, 20):
        loop.mark(second)
    assert loop.consumed_rate(20.0) == 0.0


def test_a_report_that_another_has_overtaken_says_nothing_new() -> None:
    """Reports may arrive out of order, because requests use several connections."""
    loop = LoopCounters(0.0)
    assert all(loop.add_report(report_at(second, 0.5 * second), second) for second in range(4))
    assert not loop.add_report(report_at(2.9, 1.45), 3.0)
    assert loop.recent(3.0) == Recent(3.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.0)


def test_a_client_that_counts_anew_begins_anew() -> None:
    """After a restart of a client with the same name, no rate spans both processes, and none is negative."""
    loop = LoopCounters(0.0)
    for second in range(5):
        loop.add_report(report_at(second, 0.5 * second), second)
        loop.mark(second)
    assert loop.recent(4.0).data_wait == pytest.approx(0.5)
    loop.add_report(report_at(0.0, 0.0), 7.0)
    assert loop.recent(7.0).data_wait is None
    loop.add_report(report_at(3.0, 0.3), 10.0)
    assert loop.recent(10.0).data_wait == pytest.approx(0.1)


def test_a_loop_is_not_judged_by_its_start() -> None:
    """The wait for the first batch, for which workers fork and open files, does not count."""
    loop = LoopCounters(0.0)
    loop.add_report(ConsumerReport(0.0, 0.0, 0, 0, 0), 0.0)
    loop.add_report(ConsumerReport(5.0, 5.0, 0, 0, 0), 5.0)
    loop.add_report(ConsumerReport(5.1, 5.1, 1, 0, 0), 5.1)
    loop.add_report(ConsumerReport(8.1, 5.1, 60, 0, 0), 8.1)
    assert loop.recent(8.1).data_wait == 0.0


def test_old_reports_of_a_client_are_not_recent() -> None:
    """Old reports of a client that now waits for one slow batch are not recent."""
    loop = LoopCounters(0.0)
    for second in range(5):
        loop.add_report(report_at(second, 0.0), second)
        loop.mark(second)
    loop.waiting.begin(4.0)
    for second in range(5, 20):
        loop.mark(second)
    recent = loop.recent(19.5)
    assert recent.data_wait is None
    assert recent.waiting == pytest.approx(1.0)
    assert recent.batches == 0.0


def test_of_a_client_that_says_nothing_the_server_knows_its_own_part() -> None:
    """Without reports, the server's rates of waiting and sending are known, since the start if that is recent."""
    loop = LoopCounters(100.0)
    loop.waiting.begin(101.0)
    loop.waiting.end(103.0)
    loop.sending.begin(103.0)
    loop.sending.end(104.0)
    loop.batches += 8
    recent = loop.recent(104.0)
    assert recent == Recent(4.0, 2.0, 0.0, 0.5, 0.25, None, 0.0)
