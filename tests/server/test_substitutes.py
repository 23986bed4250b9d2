"""Samples that fail are retried, then skipped or replaced, and the batch has the same content if computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server.loading.substitutes import MAX_MESSAGE, MAX_MESSAGES, MAX_REPLACEMENTS, Substitutes
from teleloader_server.loading.tasks import MAX_SLOW, SLOW_FROM, Task
from teleloader_shared.codec import BatchId, Failure, Frame, Substituted, Substitution
from teleloader_shared.errors import ProtocolError
from teleloader_shared.orders.replacement import replacement
from teleloader_shared.spec import LoaderSpec
from tests.server.bench import Bench, Made

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


def substitutions(frame: Frame) -> Sequence[Substitution]:
    """Return the skipped and replaced samples of a batch, which has some."""
    assert frame.substituted is not None
    return frame.substituted.substitutions


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
    for on_error in ("skip", "replace"):
        undisturbed = Bench(kind()).batch(5, **plan(on_error=on_error))
        dataset = kind(transient={42: 2, 45: 1})
        # samples of one call are retried together, so that the number of failures of the call counts
        frame = Bench(dataset).frame(5, **plan(on_error=on_error, error_retries=3 if kind is Batched else 2))
        assert np.array_equal(frame.content, undisturbed)
        assert frame.substituted is None


def test_a_sample_is_skipped_after_its_retries(kind: Any) -> None:
    """Only the failing sample is fetched again; if samples are fetched together, all are fetched alone once."""
    for retries in (0, 1, 4):
        dataset = kind(42)
        Bench(dataset).frame(5, **plan(on_error="skip", error_retries=retries))
        # samples before the failing one are fetched in each call for several samples
        calls = {Fragile: 0, Batched: 1 + retries, Whole: 1}[kind]
        assert dataset.fetched.pop(42) == 1 + retries + calls
        fetches = 2 if kind is Whole else 1
        before, after = dict.fromkeys([40, 41], fetches + calls), dict.fromkeys([43, 44, 45, 46, 47], fetches)
        assert dataset.fetched == before | after


class Unlucky(Fragile):
    """Dataset that fails for half of the random numbers."""

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        sample = super().__getitem__(index)
        if sample[1] % 2:
            raise ValueError("this crop is empty")
        return sample


class UnluckyBatched(Unlucky, Batched):
    """The same with bulk access."""


@pytest.fixture(params=[Unlucky, UnluckyBatched])
def unlucky(request: pytest.FixtureRequest) -> Any:
    """Return a class of datasets that fail for some random numbers."""
    return request.param


def test_failures_that_depend_on_random_numbers_do_not_affect_other_samples(unlucky: Any) -> None:
    """Each sample has its own random numbers, the same whether other samples are skipped, replaced or fetched."""
    undisturbed = Bench(Fragile()).batch(5, **plan(on_error="skip"))
    lucky = undisturbed[undisturbed[:, 1] % 2 == 0]
    assert 0 < len(lucky) < 8
    frame = Bench(unlucky()).frame(5, **plan(on_error="skip"))
    assert np.array_equal(frame.content, lucky)
    found = Bench(unlucky(), seeding="sample").frame(5, **plan(on_error="replace")).content
    for index, drawn in found.tolist():
        assert Bench(Fragile(), seeding="sample").batch(indices=[index])[0, 1] == drawn


def drawn_by(batch: Any) -> list[int]:
    """Return the random number of each sample."""
    return [int(drawn) for drawn in batch[:, 1]]


@pytest.mark.parametrize("options", [{}, {"indices": list(range(40, 72))}], ids=["seeded", "sampler"])
def test_a_replacement_has_other_random_numbers(unlucky: Any, options: dict[str, Any]) -> None:
    """A sample that failed because of its random numbers would otherwise never be replaced."""
    undisturbed = Bench(Fragile()).batch(5, **plan(on_error="replace", **options))
    bench = Bench(unlucky())
    frame = bench.frame(5, **plan(on_error="replace", **options))
    assert len(frame.content) == len(undisturbed)
    replaced = {each.position for each in substitutions(frame)}
    assert replaced == {position for position, drawn in enumerate(drawn_by(undisturbed)) if drawn % 2}
    for position in replaced:
        assert drawn_by(frame.content)[position] != drawn_by(undisturbed)[position]


@pytest.mark.parametrize("options", [{}, {"indices": [*range(40, 72), 43]}], ids=["seeded", "sampler"])
def test_replacements_have_the_same_random_numbers_if_computed_again(unlucky: Any, options: dict[str, Any]) -> None:
    """The record of the first computation determines them."""
    bench = Bench(unlucky())
    spec = plan(on_error="replace", **options)
    first = bench.frame(5, **spec)
    raw = bench.places[-1].copy()
    assert substitutions(first)
    again = Bench(unlucky())
    again.frame(5, **spec, substituted=first.substituted)
    assert again.places[-1].tobytes() == raw.tobytes()


def test_names_that_replace_others_have_other_random_numbers() -> None:
    """Also with a seed per sample: a sample without a number is seeded by its place in the index list."""

    class Words:
        def __getitem__(self, word: str) -> Any:
            drawn = np.random.randint(2**31)
            if word == "bad":
                raise KeyError(word)
            return drawn

    first, replaced = Bench(Words(), seeding="sample").batch(indices=["good", "bad"], on_error="replace").tolist()
    assert first == replaced
    first, replaced = Bench(Words()).batch(indices=["good", "bad"], on_error="replace").tolist()
    assert first != replaced


def test_a_batch_that_is_computed_again_has_the_same_substitutions(kind: Any) -> None:
    """Even if the sample does not fail any more: the frame is equal, byte for byte."""
    bench = Bench(kind(42))
    first = bench.frame(5, **plan(on_error="replace"))
    raw = bench.places[-1].copy()
    bench = Bench(kind())
    bench.frame(5, **plan(on_error="replace"), substituted=first.substituted)
    assert bench.places[-1].tobytes() == raw.tobytes()


def test_a_batch_without_samples_fails(kind: Any) -> None:
    """The exception of a sample is raised; also if no replacement is left."""
    failure = Bench(kind(*LISTED)).failure(5, **plan(on_error="skip"))
    assert failure.type == "ValueError"
    assert failure.message in [f"sample {index} is damaged" for index in LISTED]
    chain = [replacement(0, 0, 0, 5, 2, attempt, LENGTH) for attempt in range(MAX_REPLACEMENTS)]
    failure = Bench(kind(42, *chain)).failure(5, **plan(on_error="replace", error_retries=0))
    assert (failure.type, failure.message) == ("ValueError", "sample 42 is damaged")
    assert failure.sample == 42


def test_replacements_of_a_client_side_sampler_are_samples_of_its_batch(kind: Any) -> None:
    """The sampler may exclude the other samples of the dataset, such as those of a validation split."""
    indices = [900, 901, 902]
    for _ in range(5):
        frame = Bench(kind(901)).frame(indices=indices, on_error="replace")
        first, second, third = frame.content[:, 0].tolist()
        assert (first, third) == (900, 902)
        assert second in (900, 902)
    failure = Bench(kind(901)).failure(indices=[901, 901], on_error="replace")
    assert (failure.type, failure.sample) == ("ValueError", 901)
    frame = Bench(kind(*range(900, 912))).frame(indices=[*range(900, 912), 912], on_error="replace")
    assert set(frame.content[:, 0].tolist()) == {912}, "positions that failed are not tried again"


def test_the_only_sample_of_a_batch_is_not_its_own_replacement(kind: Any) -> None:
    """The exception is raised after the retries."""
    dataset = kind(901)
    failure = Bench(dataset).failure(indices=[901], on_error="replace", error_retries=2)
    assert (failure.type, failure.message, failure.sample) == ("ValueError", "sample 901 is damaged", 901)
    assert dataset.fetched[901] == {Fragile: 3, Batched: 6, Whole: 4}[kind]


class Named:
    """Dataset with strings as indices."""

    def __getitem__(self, name: str) -> Any:
        """Return a sample."""
        if "bad" in name:
            raise KeyError(name)
        return len(name)


def test_samples_with_string_indices_are_named_and_replaced() -> None:
    """A record contains strings of up to 500 characters."""
    batch = Bench(Named()).frame(indices=["a", "bad", "ccc"], on_error="replace")
    ((position, sample, other, _),) = substitutions(batch)
    assert (position, sample) == (1, "bad")
    assert other in ("a", "ccc")
    assert batch.content.tolist() == [1, len(str(other)), 3]
    frame = Bench(Named()).frame(indices=["a", "bad" * 200], on_error="skip")
    assert substitutions(frame)[0].sample is None
    failure = Bench(Named()).failure(indices=["bad", ("tuple",)], on_error="replace")
    assert "requires indices that are integers or strings" in failure.traceback


class Unprintable(Exception):
    """Exception without a usable message."""

    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize("error", [Unprintable(), ValueError("\ud800" * 1000), ValueError("x" * 10**7)], ids=repr)
def test_any_message_of_an_exception_can_be_recorded(error: Exception) -> None:
    """Texts are shortened, and characters that UTF-8 cannot encode are escaped."""

    def make(index: int) -> int:
        if index == 42:
            raise error
        return index

    frame = Bench(Made(make, LENGTH)).frame(5, **plan(on_error="skip"))
    (found,) = substitutions(frame)
    assert found.error.startswith(type(error).__name__) or "Unprintable" in found.error
    assert len(found.error) <= MAX_MESSAGE


def test_only_some_substitutions_of_a_batch_have_messages() -> None:
    """A frame's header is small; a batch with many failed samples must not exceed it."""
    dataset = Fragile(*range(1, LENGTH))
    frame = Bench(dataset).frame(0, batch_size=LENGTH, on_error="skip")
    errors = [each.error for each in substitutions(frame)]
    assert len(errors) == LENGTH - 1
    assert errors[:MAX_MESSAGES] == [f"ValueError: sample {index} is damaged" for index in range(1, MAX_MESSAGES + 1)]
    assert set(errors[MAX_MESSAGES:]) == {"ValueError"}


def test_numpy_integers_are_indices_like_others() -> None:
    """They are named, and seeded per sample, by their value."""
    drawn = Bench(Fragile(), seeding="sample").batch(indices=[7, 42])
    listed = [np.int64(7), np.int32(42)]
    bench = Bench(Fragile(), seeding="sample")
    assert np.array_equal(np.stack(bench.run(listed).samples or []), drawn)
    with pytest.raises(ValueError, match="damaged") as caught:
        Bench(Fragile(42)).run(listed)
    assert caught.value.__notes__ == ["The error occurred at sample index 42."]


def test_a_note_is_added_once() -> None:
    """A dataset may raise the same exception object several times."""
    error = OSError("no connection")

    def make(index: int) -> int:
        raise error

    for _ in range(3):
        with pytest.raises(OSError, match="no connection"):
            Bench(Made(make)).run([3])
    assert error.__notes__ == ["The error occurred at sample index 3."]


def test_stop_iteration_does_not_end_the_epoch() -> None:
    """Torch would end it silently; with ``on_error``, it is an exception like any other."""
    make = Made(lambda index: next(iter(())) if index == 42 else index, LENGTH)
    assert Bench(make).failure(5, **plan()).type == "RuntimeError"
    assert len(Bench(make).batch(5, **plan(on_error="skip"))) == 7


def test_a_failure_of_no_single_sample_is_raised() -> None:
    """A dataset that fails only for several samples at once, after the retries; without batches, single samples do."""

    class CrowdedBatch(Whole):
        def __getbatch__(self, indices: Any) -> Any:
            if len(indices) > 1:
                raise MemoryError("too many")
            return super().__getbatch__(indices)

    class Crowded(Batched):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            if len(indices) > 1:
                raise MemoryError("too many")
            return super().__getitems__(indices)

    failure = Bench(CrowdedBatch()).failure(5, **plan(on_error="skip", error_retries=1))
    assert (failure.type, failure.message) == ("MemoryError", "too many")
    frame = Bench(Crowded()).frame(5, **plan(on_error="skip", error_retries=1))
    assert frame.substituted is None
    assert np.array_equal(frame.content, Bench(Fragile()).batch(5, **plan(on_error="skip")))


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


def test_slow_samples_are_reported_with_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest ones come first, and their number is limited."""
    now = 0.0
    seconds: dict[int, float] = {}

    class Clocked(Fragile):
        def __getitem__(self, index: int) -> Any:
            nonlocal now
            now += seconds.get(index, 0.001)
            return super().__getitem__(index)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    bench = Bench(Clocked())
    seconds = {41: 1.0, 44: 3.0, 46: SLOW_FROM / 2}
    bench.frame(5, **plan())
    assert bench.report is not None
    assert [(index, round(took, 6)) for index, took in bench.report.slow] == [(44, 3.0), (41, 1.0)]
    bench.frame(0, **plan())
    assert bench.report.slow == []
    seconds = dict.fromkeys(range(bench.length), 1.0)
    bench.frame(0, **plan(batch_size=MAX_SLOW + 1))
    assert len(bench.report.slow) == MAX_SLOW


@given(
    st.sets(st.integers(0, 7)), st.sampled_from(["skip", "replace"]), st.booleans(),
)  # fmt: skip
def test_decisions_depend_only_on_what_failed(broken: set[int], on_error: Any, as_array: bool) -> None:
    """Whatever fails: every other sample keeps its order, and the record explains every difference."""
    spec = LoaderSpec(dataset="d", batch_size=8, on_error=on_error)
    listed = np.array(LISTED) if as_array else LISTED
    found = Substitutes(Task(spec, LENGTH, BatchId("k", 0, 5)), listed)
    bad = {LISTED[position] for position in broken}
    failing = [position for position, index in enumerate(LISTED) if index in bad]
    for position in failing:
        error = ValueError(position)
        if on_error == "skip" and position == failing[-1] and len(broken) == 8:
            assert not found.substitute(position, error)
            return
        assert found.substitute(position, error)
        while not found.skips(position) and found[position] in bad:
            assert found.substitute(position, error)
    record = found.record()
    assert (record is None) == (not broken)
    assert sorted(each.position for each in (() if record is None else record.substitutions)) == sorted(broken)
    if on_error == "skip":
        assert list(found.indices) == [index for index in LISTED if index not in bad]
    assert len(found.indices) == (8 if on_error == "replace" else 8 - len(broken))


def test_a_forged_record_is_refused() -> None:
    """A peer cannot make the decoder accept other types."""
    entry = [0, 1, 2, "x"]
    for fields in (
        None, [], [8], [0, [entry]], [8, []], [8, [[0, 1.5, 2, "x"]]], [8, [[0, 1, 2]]], [8, [entry, entry]],
        [8, [[8, 1, 2, "x"]]], [8, [[-1, 1, 2, "x"]]], [2**21, [entry]], [8, [[0, "1" * 501, 2, "x"]]],
    ):  # fmt: skip
        with pytest.raises(ProtocolError, match="invalid frame: expected"):
            Substituted.read(fields)
    assert Substituted.read([8, [[0, None, None, "x"]]]).substitutions[0].error == "x"
    assert Failure("E", "", "", [], 0).sample is None
