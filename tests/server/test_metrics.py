"""What is counted of batches, and what is kept of the slow and the failed ones."""

from __future__ import annotations

import numpy as np
import pytest

from teleloader_server.loading import Report, Task
from teleloader_server.metrics import (
    MAX_ERROR_TYPES,
    MAX_KEPT_LIST,
    MAX_MESSAGE,
    MAX_SHOWN_INDICES,
    MAX_TRACEBACK,
    OTHER_ERRORS,
    SLOWEST,
    Metrics,
    PoolTally,
)
from teleloader_shared.codec import Address, Failure, to_bytes
from teleloader_shared.histogram import BLOCK
from teleloader_shared.spec import LoaderSpec

SPEC = LoaderSpec(dataset="data", batch_size=50)
RUN = (SPEC.key, 0)
NOTHING = np.empty(0, np.uint8)


def task(k: int, *, indices: bytes | None = None, spec: LoaderSpec = SPEC) -> Task:
    """A batch to be made, of a dataset of 10,000."""
    return Task(spec, 10_000, Address(spec.key, 0, k), indices)


def report(fetch: float = 0.01, *, failed: bool = False) -> Report:
    """How it went."""
    return Report(50, failed=failed, fetch=fetch, collate=0.002, encode=0.001)


def fail(pool: PoolTally, kind: str, message: str = "", traceback: str = "", indices: tuple[int, ...] = ()) -> None:
    """A batch has failed."""
    frame = to_bytes(task(0).address, Failure(kind, message, traceback, list(indices), 0))
    pool.computed(0, task(0), np.frombuffer(frame, np.uint8), report(failed=True))


def test_batches_are_counted_where_they_belong() -> None:
    """With their worker, loader, dataset and stages, also while their times are not in the histograms yet."""
    metrics = Metrics()
    pool = metrics.pool()
    for k in range(BLOCK + 5):
        pool.computed(k % 2, task(k), NOTHING, report())
    dataset = metrics.datasets["data"]
    assert (dataset.computed, dataset.samples, dataset.failed) == (BLOCK + 5, 50 * (BLOCK + 5), 0)
    assert [pool.workers[number].batches for number in (0, 1)] == [BLOCK // 2 + 3, BLOCK // 2 + 2]
    assert {stage: histogram.count for stage, histogram in dataset.stages.items()} == {
        "fetch": BLOCK + 5, "collate": BLOCK + 5, "encode": BLOCK + 5,
    }  # fmt: skip
    seconds = pool.loaders[SPEC.key].batch_seconds(0.0)
    assert [round(seconds[stage], 6) for stage in ("fetch", "collate", "encode")] == [0.01, 0.002, 0.001]


def test_the_slowest_batches_are_kept() -> None:
    """Five by fetch time, the slowest first, with what they hold."""
    metrics = Metrics()
    pool = metrics.pool()
    for k in range(100):
        pool.computed(0, task(k), NOTHING, report((k * 37) % 100 / 1000))
    found = metrics.datasets["data"].slowest()
    assert len(found) == SLOWEST
    assert [slow.seconds for slow in found] == [0.099, 0.098, 0.097, 0.096, 0.095]
    assert [slow.batch * 37 % 100 for slow in found] == [99, 98, 97, 96, 95]
    assert found[0].indices == [50 * found[0].batch + j for j in range(MAX_SHOWN_INDICES)]


def test_a_clients_list_is_kept_with_a_slow_batch_unless_it_is_long() -> None:
    """What is not known of it is not guessed."""
    spec = LoaderSpec(dataset="data", batch_size=4, order="client", session="mine")
    metrics = Metrics()
    pool = metrics.pool()
    address = Address(spec.key, 0, 0)
    pool.computed(0, task(0, indices=to_bytes(address, [9, 8, 7]), spec=spec), NOTHING, report(0.2))
    long = to_bytes(address, list(range(MAX_KEPT_LIST)))
    pool.computed(0, task(0, indices=long, spec=spec), NOTHING, report(0.1))
    assert [slow.indices for slow in metrics.datasets["data"].slowest()] == [[9, 8, 7], []]


def test_failures_are_counted_by_type() -> None:
    """The latest type first, with what the last one said."""
    metrics = Metrics()
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
    """Beyond the first ones they count together, and no count ever falls."""
    metrics = Metrics()
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
    """With what it is about; the others are counted."""
    pool = Metrics().pool()
    for _ in range(10):
        fail(pool, "ValueError", "two\nlines")
    fail(pool, "KeyError")
    first, second = caplog.records
    assert first.getMessage().startswith("batch 0 of epoch 0 of dataset data failed: 'ValueError: two\\nlines'")
    assert "KeyError" in second.getMessage()
    about = vars(first)
    assert (about["dataset"], about["loader"], about["epoch"], about["batch"]) == ("data", SPEC.key, 0, 0)


def test_a_batch_that_is_given_up_is_a_failure() -> None:
    """The server itself put it in the batch's place."""
    metrics = Metrics()
    pool = metrics.pool()
    pool.given_up("data", Failure("teleloader_shared.errors.WorkerDied", "worker 0 died", "", [1], 0))
    pool.retried("data")
    pool.worker_lost()
    tally = metrics.datasets["data"]
    assert (tally.failed, tally.retried, metrics.worker_restarts) == (1, 1, 1)
    assert tally.errors(1e9)[0].last == "worker 0 died"


def test_what_nobody_asks_for_any_more_is_forgotten() -> None:
    """A batch that is finished later still counts with its dataset."""
    metrics = Metrics()
    pool = metrics.pool()
    pool.computed(0, task(0), NOTHING, report())
    pool.keep((), ())
    assert pool.loaders == {}
    pool.computed(0, task(1), NOTHING, report())
    assert metrics.datasets["data"].computed == 2
