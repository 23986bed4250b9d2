"""Samples that fail are retried, then skipped or replaced, and the batch has the same content if computed again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server.loading.substitutes import MAX_REPLACEMENTS, Substitutes
from teleloader_server.loading.tasks import Task
from teleloader_shared.codec import BatchId, Failure, Substituted
from teleloader_shared.errors import ProtocolError
from teleloader_shared.orders.replacement import replacement
from teleloader_shared.spec import LoaderSpec
from tests.server.bench import Bench

LENGTH = 1000
LISTED = list(range(40, 48))


class Fragile:
    """Dataset whose samples fail, some of them only at first; a sample is its index and a random number."""

    def __init__(self, *broken: int, transient: dict[int, int] | None = None) -> None:
        self.broken = set(broken)
        self.transient = Counter(transient or {})
        self.fetched: Counter[int] = Counter()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        drawn = np.random.randint(2**31)
        self.fetched[index] += 1
        if index in self.broken:
            raise ValueError(f"sample {index} is damaged")
        if self.transient[index] > 0:
            self.transient[index] -= 1
            raise OSError("the disk is busy")
        return np.array([index, drawn])


class Batched(Fragile):
    """The same with bulk access."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return several samples."""
        return [self[index] for index in indices]


class Whole(Fragile):
    """The same with whole batches."""

    def __getbatch__(self, indices: Any) -> Any:
        """Return a batch."""
        return np.stack([self[index] for index in indices.tolist()])


@pytest.fixture(params=[Fragile, Batched, Whole])
def kind(request: pytest.FixtureRequest) -> Any:
    """Return a class of datasets."""
    return request.param


def plan(**spec: Any) -> dict[str, Any]:
    """Return the fields of a spec in seeded order; batch 5 has the samples 40 to 47."""
    return {"batch_size": 8, **spec}


def test_a_failing_sample_is_skipped(kind: Any) -> None:
    """The batch is shorter; the frame has position, index and exception."""
    frame = Bench(kind(42)).frame(5, **plan(on_error="skip"))
    assert frame.content[:, 0].tolist() == [40, 41, 43, 44, 45, 46, 47]
    assert frame.substituted == (8, [(2, 42, None, "ValueError: sample 42 is damaged")])


def test_a_failing_sample_is_replaced(kind: Any) -> None:
    """By a sample that depends on seed, epoch, rank, batch and position alone."""
    other = replacement(0, 0, 0, 5, 2, 0, LENGTH)
    frame = Bench(kind(42)).frame(5, **plan(on_error="replace"))
    assert frame.content[:, 0].tolist() == [40, 41, other, 43, 44, 45, 46, 47]
    assert frame.substituted == (8, [(2, 42, other, "ValueError: sample 42 is damaged")])
    following = replacement(0, 0, 0, 5, 2, 1, LENGTH)
    frame = Bench(kind(42, other)).frame(5, **plan(on_error="replace"))
    assert frame.content[:, 0].tolist() == [40, 41, following, 43, 44, 45, 46, 47]


def test_a_transient_failure_changes_nothing(kind: Any) -> None:
    """The batch is the same, random numbers included, as if the sample had not failed."""
    undisturbed = Bench(kind()).batch(5, **plan())
    for on_error in ("skip", "replace"):
        dataset = kind(transient={42: 2, 45: 1})
        frame = Bench(dataset).frame(5, **plan(on_error=on_error, error_retries=2))
        assert np.array_equal(frame.content, undisturbed)
        assert frame.substituted is None


def test_a_sample_is_given_up_after_its_retries(kind: Any) -> None:
    """Without retries, the first failure counts; with more, the sample is fetched more often."""
    counts = {}
    for retries in (0, 1, 4):
        dataset = kind(42)
        Bench(dataset).frame(5, **plan(on_error="skip", error_retries=retries))
        counts[retries] = dataset.fetched[42]
    assert counts == {0: 2, 1: 4, 4: 10}, "in the batch, and alone"


def test_a_batch_that_is_computed_again_has_the_same_substitutions(kind: Any) -> None:
    """Even if the sample does not fail any more: the frame is equal, byte for byte."""
    bench = Bench(kind(42))
    first = bench.frame(5, **plan(on_error="replace"))
    raw = bench.places[-1].copy()
    bench = Bench(kind())
    task = Task(LoaderSpec(**{"dataset": "data", **plan(on_error="replace")}), LENGTH, first.batch_id)
    bench.places.clear()
    bench.loading.load(task._replace(substituted=first.substituted), bench._place)
    assert bench.places[-1].tobytes() == raw.tobytes()


def test_a_batch_without_samples_fails(kind: Any) -> None:
    """The exception of a sample is raised; also if no replacement is left."""
    failure = Bench(kind(*LISTED)).failure(5, **plan(on_error="skip"))
    assert failure.type == "ValueError"
    assert failure.message in [f"sample {index} is damaged" for index in LISTED]
    chain = [replacement(0, 0, 0, 5, 2, attempt, LENGTH) for attempt in range(MAX_REPLACEMENTS)]
    failure = Bench(kind(42, *chain)).failure(5, **plan(on_error="replace", error_retries=0))
    assert failure.type == "ValueError"


def test_a_failure_of_no_single_sample_is_raised() -> None:
    """A dataset that fails only for several samples at once, after the retries."""

    class Crowded(Batched):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            self.fetched.update(indices)
            if len(indices) > 1:
                raise MemoryError("too many")
            return super().__getitems__(indices)

    dataset = Crowded()
    failure = Bench(dataset).failure(5, **plan(on_error="skip", error_retries=1))
    assert (failure.type, failure.message) == ("MemoryError", "too many")


def test_padding_counts_the_samples_that_are_left() -> None:
    """Padding is at the end of the batch."""
    spec: dict[str, Any] = {"batch_size": 4, "world_size": 3, "rank": 2, "on_error": "skip"}
    last = 1000 // 3 // 4
    bench = Bench(Fragile())
    whole = bench.frame(last, **spec)
    assert whole.padding > 0
    repeated = int(whole.content[-1, 0])
    assert Bench(Fragile(repeated)).frame(last, **spec).padding == whole.padding - 1


def test_the_failing_sample_is_named() -> None:
    """In the failure of the batch, for a dataset that returns single samples."""
    assert Bench(Fragile(42)).failure(5, **plan()).sample == 42
    assert Bench(Fragile(42)).failure(indices=[7, 42]).sample == 42
    assert Bench(Batched(42)).failure(5, **plan()).sample is None

    def collate(samples: Any) -> Any:
        raise TypeError

    assert Bench(Fragile(), collate=collate).failure(5, **plan()).sample is None, "the samples were fetched"


def test_the_slowest_sample_is_reported_if_samples_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing each sample of a fast dataset would take a noticeable part of the time."""
    now = 0.0

    class Clocked(Fragile):
        def __getitem__(self, index: int) -> Any:
            nonlocal now
            now += 2.0 if index == 42 else seconds
            return super().__getitem__(index)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    seconds = 1.0
    bench = Bench(Clocked())
    bench.frame(5, **plan())
    assert bench.report is not None
    assert bench.report.slowest == 42
    seconds = 0.0
    bench.frame(0, **plan())
    bench.frame(5, **plan())
    assert bench.report.slowest is None, "the batch before was fast"


@given(
    st.sets(st.integers(0, 7)), st.sampled_from(["skip", "replace"]), st.integers(0, 3), st.booleans(),
)  # fmt: skip
def test_decisions_depend_only_on_what_failed(broken: set[int], on_error: Any, retries: int, as_array: bool) -> None:
    """Whatever fails: every other sample keeps its order, and the record explains every difference."""
    spec = LoaderSpec(dataset="d", batch_size=8, on_error=on_error, error_retries=retries)
    listed = np.array(LISTED) if as_array else LISTED
    found = Substitutes(Task(spec, LENGTH, BatchId("k", 0, 5)), listed)
    bad = {LISTED[position] for position in broken}
    for _ in range(100):
        failed = {place: ValueError() for place, index in enumerate(list(found.indices)) if index in bad}
        if not failed:
            break
        try:
            found.failed(failed, KeyError())
        except KeyError:
            assert on_error == "skip"
            assert len(broken) == 8
            return
    record = found.record()
    assert (record is None) == (not broken)
    assert sorted(each.position for each in (() if record is None else record.substitutions)) == sorted(broken)
    if on_error == "skip":
        assert list(found.indices) == [index for index in LISTED if index not in bad]
    assert len(found.indices) == (8 if on_error == "replace" else 8 - len(broken))


def test_a_forged_record_is_refused() -> None:
    """A peer cannot make the decoder accept other types."""
    for fields in (None, [], [8], [0, [[0, 1, 2, "x"]]], [8, []], [8, [[0, "1", 2, "x"]]], [8, [[0, 1, 2]]]):
        with pytest.raises(ProtocolError, match="invalid frame: expected"):
            Substituted.read(fields)
    assert Substituted.read([8, [[0, None, None, "x"]]]).substitutions[0].error == "x"
    assert Failure("E", "", "", [], 0).sample is None
