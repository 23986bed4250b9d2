"""Warnings if an iterable-style dataset yields more or fewer samples than its length, or repeats them per shard."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader.fetch.length_check import LengthCheck
from teleloader_shared.codec import End
from tests.client.fake_server import ITERABLE, Request, fake_server
from tests.conftest import need

OVER = (
    "Length of IterableDataset numbers was reported to be {}(when accessing len(dataloader)), but {} samples have "
    "been fetched. "
)
WITH_WORKERS = (
    "For multiprocessing data-loading, this could be caused by not properly configuring the IterableDataset replica "
    "at each worker. Please see https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for "
    "examples."
)
UNDER = "was reported to be {}, but only {} samples have been fetched from its {} shard"
REPEATED = "Each of the {} workers of numbers yielded the whole dataset, so every sample was loaded {} times."


def warned(
    batches: list[Any], ends: list[End], *, num_workers: int = 0, asked: int | None = None, samples: int | None = None,
    may_repeat: bool = True,
) -> list[str]:  # fmt: skip
    """Return the warnings of an epoch with these batches, whose shards end as given."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        lengths = LengthCheck("numbers", num_workers, asked, samples, may_repeat=may_repeat)
        for number, batch in enumerate(batches):
            lengths.yielded(number, batch)
        for number, end in enumerate(ends, len(batches)):
            lengths.ended(number, end)
        lengths.finished()
    assert all(warning.category is UserWarning for warning in given)
    return [str(warning.message) for warning in given]


def whole(samples: int) -> End:
    """Return the end of a shard whose dataset did not use its worker info."""
    return End(samples, replica=True)


def part(samples: int) -> End:
    """Return the end of a shard whose dataset used its worker info."""
    return End(samples, replica=False)


# --- Excess samples -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_too_many_are_warned_of_at_each_further_batch(num_workers: int) -> None:
    """The text is torch's, which compares the batches with the length of the dataset when len(loader) was called."""
    text = OVER + (WITH_WORKERS if num_workers else "")
    said = warned([1, 2, 3, 4], [part(2)] * num_workers, num_workers=num_workers, asked=2)
    assert said == [text.format(2, 3), text.format(2, 4)]


def test_a_length_that_was_not_requested_is_not_exceeded() -> None:
    """Excess batches cause a warning only after len(loader) was called, as with torch."""
    assert warned([1, 2, 3], [part(3)], samples=2) == []


def test_the_right_number_of_samples_causes_no_warning() -> None:
    """The right number of samples causes no warning, in any number of batches."""
    assert warned([1, 2, 3], [part(3)], asked=3, samples=3) == []
    assert warned([[1, 2, 3]], [part(3)], asked=3, samples=3) == []


# --- Missing samples ----------------------------------------------------------------------------------------------


def test_too_few_are_warned_of_at_the_end() -> None:
    """Missing samples, counted over all shards, cause a warning at the end, unlike in torch."""
    (said,) = warned([1, 2], [part(40), part(57)], num_workers=2, samples=98)
    assert said.startswith("Length of IterableDataset numbers " + UNDER.format(98, 97, 2) + "s. ")
    (said,) = warned([1], [part(1)], num_workers=0, samples=2)
    assert UNDER.format(2, 1, 1) + ". " in said


def test_an_empty_dataset_that_says_so_is_right() -> None:
    """A dataset of length 0 without samples causes no warning."""
    assert warned([], [part(0)], samples=0) == []
    assert warned([], [part(0)], samples=None) == []


@pytest.mark.parametrize("given", [10, 11, 20])
def test_enough_are_not_too_few(given: int) -> None:
    """Samples of a batch that drop_last drops count as fetched."""
    assert warned([1], [part(given)], samples=10) == []


def test_without_a_length_nothing_is_missing() -> None:
    """Without a length, and if other ranks have a part of it, no missing samples are reported."""
    assert warned([1], [part(1), part(0)], num_workers=2, samples=None) == []


# --- Every shard the whole ----------------------------------------------------------------------------------------

BATCHES: list[Any] = [
    5,
    "text",
    np.arange(3),
    {"image": np.zeros((2, 2), np.float32), "label": (1, [None, b"x"])},
    [np.float64(1.5), True],
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
@pytest.mark.parametrize("num_workers", [2, 3])
def test_shards_that_each_give_the_whole_are_warned_of(batch: Any, num_workers: int) -> None:
    """Equal first batches of shards that did not use their worker info cause a warning with both remedies."""
    (said,) = warned([batch] * num_workers, [whole(4)] * num_workers, num_workers=num_workers, samples=4)
    assert said.startswith(REPEATED.format(num_workers, num_workers))
    assert "get_worker_info().id" in said
    assert "worker_init_fn" in said


def test_tensors_are_alike_by_their_elements() -> None:
    """Tensors of any dtype are compared by their elements, including views of receive buffers."""
    need("torch")
    import torch

    for batch in (torch.arange(3), torch.ones(2, dtype=torch.bfloat16), [torch.zeros(0)]):
        other = [part.clone() for part in batch] if isinstance(batch, list) else batch.clone()
        assert len(warned([batch, other], [whole(3)] * 2, num_workers=2)) == 1
    assert warned([torch.arange(3), torch.arange(1, 4)], [whole(3)] * 2, num_workers=2) == []


DIFFERENT: list[tuple[Any, Any]] = [
    (1, 2),
    (np.arange(3), np.arange(4)),
    (np.arange(3), np.arange(3.0)),
    (np.zeros(2), np.ones(2)),
    ({"a": 1}, {"b": 1}),
    ([np.zeros(2)], (np.zeros(2),)),
    ([np.zeros(2)], [np.zeros(2), np.zeros(2)]),
    (object(), object()),
]


@pytest.mark.parametrize("pair", DIFFERENT, ids=range(len(DIFFERENT)))
def test_shards_that_begin_differently_are_not_replicas(pair: tuple[Any, Any]) -> None:
    """Any difference between first batches, or values that cannot be compared, prevents the warning."""
    assert warned(list(pair), [whole(4)] * 2, num_workers=2) == []


def test_shards_that_used_their_worker_info_are_not_replicas() -> None:
    """One shard that used its worker info prevents the warning: equal data may then be intended."""
    assert warned([0, 0], [part(4)] * 2, num_workers=2) == []
    assert warned([0, 0], [whole(4), part(4)], num_workers=2) == []


def test_shards_that_may_not_repeat_cause_no_warning() -> None:
    """Nothing is reported if a worker_init_fn may split the data, or after the first warning."""
    assert warned([0, 0], [whole(4)] * 2, num_workers=2, may_repeat=False) == []


@pytest.mark.parametrize("num_workers", [0, 1])
def test_one_shard_repeats_nothing(num_workers: int) -> None:
    """Equal batches of a single shard cause no warning."""
    assert warned([0, 0], [whole(2)], num_workers=num_workers) == []


def test_a_pass_that_goes_on_in_the_middle_compares_nothing() -> None:
    """A resumed epoch has no first batches to compare, as an earlier process received them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lengths = LengthCheck("numbers", 2, None, None, may_repeat=True)
        for number in (4, 5, 6, 7):
            lengths.yielded(number, 0)
        for number in (8, 9):
            lengths.ended(number, whole(4))
        lengths.finished()


def test_shards_that_gave_nothing_repeat_nothing() -> None:
    """Empty shards have no first batch to compare."""
    assert warned([], [whole(0)] * 2, num_workers=2) == []


# --- With a loader ------------------------------------------------------------------------------------------------


def load(sizes: list[int], said: int, batch_size: int = 1) -> None:
    """Run an epoch of shards with these numbers of batches, for a dataset with this length."""

    def answer(request: Request) -> bytes:
        frames = []
        for k in range(request.start, request.stop):
            position, shard = divmod(k, len(sizes))
            size = sizes[shard]
            frames.append(request.frame(k) if position < size else request.end(k, samples=size * batch_size))
        return b"".join(frames)

    with fake_server(answer, {**ITERABLE, "length": said}) as url:
        loader = DataLoader(RemoteDataset(url), batch_size, num_workers=len(sizes), output="numpy")
        assert sum(1 for _ in loader) == sum(sizes)


@pytest.mark.parametrize("sizes", [[1, 5], [5, 1], [0, 3, 1]], ids=str)
def test_unequal_shards_are_counted_once_each(sizes: list[int]) -> None:
    """Each shard's samples are counted once, although an ended shard reports its end in every further round."""
    load(sizes, said=4 * sum(sizes), batch_size=4)


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        pytest.param(100, False, id="under"),
        pytest.param(2, True, id="over"),
    ],
)
def test_the_line_of_the_loop_is_shown(said: int, asked: bool) -> None:
    """The warning shows the line of the user's loop, not of teleloader or of the caller of the user's function."""
    with fake_server(Request.right, {**ITERABLE, "length": said}) as url:
        loader = DataLoader(RemoteDataset(url), output="numpy")
        if asked:
            assert len(loader) == said
        with pytest.warns(UserWarning, match="samples have been fetched") as given:
            for _ in loader:
                pass
    assert {warning.filename for warning in given} == {__file__}
