"""The constructor rejects the arguments that torch's DataLoader rejects, with its texts and in its order."""

from __future__ import annotations

import inspect
import itertools
import math
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader.arguments import Arguments, check, warn_of_too_many_workers
from tests.conftest import examples, label, need

Outcome = tuple[tuple[type[Exception], str] | None, list[tuple[type[Warning], str]]]

DEFAULTS: dict[str, Any] = {
    "batch_size": 1,
    "shuffle": None,
    "sampler": None,
    "batch_sampler": None,
    "num_workers": 0,
    "drop_last": False,
    "timeout": 0,
    "multiprocessing_context": None,
    "prefetch_factor": None,
    "persistent_workers": False,
}
CPUS = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class Unsized:
    """Map-style dataset without a length."""

    def __getitem__(self, index: int) -> int:
        return index


def arguments(dataset: Any = range(10), *, iterable: bool = False, cpus: int = 2, **changed: Any) -> Arguments:
    """Return torch's default arguments, updated with the given ones."""
    return Arguments(dataset=dataset, iterable=iterable, cpus=cpus, **DEFAULTS | changed)


ITERABLE = "DataLoader with IterableDataset: expected unspecified"
NO_BATCH_SAMPLER = "batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last"
NO_DROP_LAST = "batch_size=None option disables auto-batching and is mutually exclusive with drop_last"
NO_PREFETCH = (
    "prefetch_factor option could only be specified in multiprocessing."
    "let num_workers > 0 to enable multiprocessing, otherwise set prefetch_factor to None."
)
NO_WORKERS = "num_workers option should be non-negative; use num_workers=0 to disable multiprocessing."
NO_PROCESSES = (
    "multiprocessing_context can only be used with multi-process loading (num_workers > 0), but got num_workers=0"
)
NO_METHOD = (
    "multiprocessing_context option should specify a valid start method in "
    f"{multiprocessing.get_all_start_methods()}, but got multiprocessing_context='x'"
)
NO_CONTEXT = (
    "multiprocessing_context option should be a valid context object or a string specifying the start method, but got "
    "multiprocessing_context=3"
)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"num_workers": -1}, NO_WORKERS),
        ({"timeout": -0.5}, "timeout option should be non-negative"),
        ({"prefetch_factor": 2}, NO_PREFETCH),
        ({"prefetch_factor": -1}, NO_PREFETCH),
        ({"num_workers": 1, "prefetch_factor": -1}, "prefetch_factor option should be non-negative"),
        ({"persistent_workers": True}, "persistent_workers option needs num_workers > 0"),
        ({"iterable": True, "shuffle": True}, f"{ITERABLE} shuffle option, but got shuffle=True"),
        ({"iterable": True, "sampler": [0]}, f"{ITERABLE} sampler option, but got sampler=[0]"),
        ({"iterable": True, "batch_sampler": [[0]]}, f"{ITERABLE} batch_sampler option, but got batch_sampler=[[0]]"),
        ({"sampler": [0], "shuffle": True}, "sampler option is mutually exclusive with shuffle"),
        ({"batch_sampler": [[0]], "batch_size": 2}, NO_BATCH_SAMPLER),
        ({"batch_sampler": [[0]], "batch_size": None}, NO_BATCH_SAMPLER),
        ({"batch_sampler": [[0]], "shuffle": True}, NO_BATCH_SAMPLER),
        ({"batch_sampler": [[0]], "sampler": [0]}, NO_BATCH_SAMPLER),
        ({"batch_sampler": [[0]], "drop_last": True}, NO_BATCH_SAMPLER),
        ({"batch_size": None, "drop_last": True}, NO_DROP_LAST),
        ({"batch_size": 0}, "batch_size should be a positive integer value, but got batch_size=0"),
        ({"batch_size": -1}, "batch_size should be a positive integer value, but got batch_size=-1"),
        ({"batch_size": 2.0}, "batch_size should be a positive integer value, but got batch_size=2.0"),
        ({"batch_size": True}, "batch_size should be a positive integer value, but got batch_size=True"),
        ({"drop_last": 1}, "drop_last should be a boolean value, but got drop_last=1"),
        ({"dataset": [], "shuffle": True}, "num_samples should be a positive integer value, but got num_samples=0"),
        ({"multiprocessing_context": "fork"}, NO_PROCESSES),
        ({"num_workers": 1, "multiprocessing_context": "x"}, NO_METHOD),
    ],
    ids=label,
)
def test_what_is_refused(changed: dict[str, Any], text: str) -> None:
    """The exception is a ValueError with torch's text."""
    with pytest.raises(ValueError) as refused:
        check(arguments(**changed))
    assert str(refused.value) == text


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"num_workers": 1, "multiprocessing_context": 3}, NO_CONTEXT),
        ({"dataset": Unsized(), "shuffle": True}, "object of type 'Unsized' has no len()"),
        ({"num_workers": None}, "'<' not supported between instances of 'NoneType' and 'int'"),
        ({"timeout": "1"}, "'<' not supported between instances of 'str' and 'int'"),
    ],
    ids=label,
)
def test_what_has_a_wrong_type(changed: dict[str, Any], text: str) -> None:
    """The exception is a TypeError with torch's or Python's text."""
    with pytest.raises(TypeError) as refused:
        check(arguments(**changed))
    assert str(refused.value) == text


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"dataset": []},
        {"dataset": Unsized()},
        {"num_workers": 1, "prefetch_factor": 0},
        {"num_workers": 2, "persistent_workers": True},
        {"timeout": 1},
        {"iterable": True, "shuffle": False, "batch_size": 4, "drop_last": True},
        {"sampler": [0], "shuffle": False},
        {"batch_sampler": [[0]], "batch_size": 1},
        {"batch_size": None, "drop_last": 0},
        {"num_workers": 1, "multiprocessing_context": multiprocessing.get_all_start_methods()[0]},
        {"num_workers": 1, "multiprocessing_context": multiprocessing.get_context()},
    ],
    ids=label,
)
def test_what_is_accepted(changed: dict[str, Any]) -> None:
    """Arguments that torch accepts are accepted, including those that only fail in iter()."""
    check(arguments(**changed))


def make_loader(num_workers: int) -> None:
    """Call the check of the constructor."""
    check(arguments(num_workers=num_workers))


def iterate(num_workers: int) -> None:
    """Call the check of ``__iter__``."""
    warn_of_too_many_workers(num_workers, cpus=2)


@pytest.mark.parametrize("user", [lambda: make_loader(40), lambda: iterate(40)], ids=["constructor", "iter"])
def test_too_many_workers(user: FunctionType) -> None:
    """More workers than the server's CPUs cause a warning that shows the user's line."""
    with pytest.warns(UserWarning, match="excessive worker creation") as given:
        user()
    assert [str(warning.message) for warning in given] == [
        "This DataLoader will create 40 worker processes in total. Our suggested max number of worker in current "
        "system is 2, which is smaller than what this DataLoader is going to create. Please be aware that excessive "
        "worker creation might get DataLoader running slow or even freeze, lower the worker number to avoid potential "
        "slowness/freeze if necessary."
    ]
    assert (given[0].filename, given[0].lineno) == (__file__, user.__code__.co_firstlineno)


def test_as_many_workers_as_cpus() -> None:
    """As many workers as CPUs cause no warning."""
    make_loader(2)


def outcome(make: Callable[[], object]) -> Outcome:
    """Return the exception that a call raises, and its warnings."""
    raised = None
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            make()
        except (ValueError, TypeError, RuntimeError) as error:
            raised = (type(error), str(error))
    return raised, [(warning.category, str(warning.message)) for warning in given]


def datasets() -> list[tuple[Any, bool]]:
    """Return datasets of several lengths and without one, and True for the iterable-style ones."""
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset):  # type: ignore[misc, unused-ignore]
        def __init__(self, length: int) -> None:
            self.length = length

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.length))

        def __len__(self) -> int:
            return self.length

    styles = [(range, False), (Stream, True)]
    return [(Unsized(), False), *((make(length), iterable) for make, iterable in styles for length in (0, 1, 10))]


def values() -> list[tuple[str, Any]]:
    """Return valid values, invalid values and values of wrong types for each argument."""
    import torch
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

    values_of: dict[str, Sequence[Any]] = {
        "batch_size": (1, 2, None, 0, -1, 1.0, 2.0, True, "2", torch.tensor([1, 2])),
        "shuffle": (True, False, None, 0, 1, "yes", [], torch.tensor([1, 2])),
        "sampler": (None, [0], range(3), (), 0, SequentialSampler(range(3)), RandomSampler([5])),
        "batch_sampler": (None, [[0]], [], BatchSampler(SequentialSampler(range(3)), 2, False)),
        "num_workers": (0, 1, CPUS, CPUS + 1, -1, True, 0.5, math.nan, None, "1"),
        "collate_fn": (None, list, 3),
        "pin_memory": (True, "cpu"),
        "drop_last": (False, True, 0, 1, None, "no", torch.tensor([1, 2])),
        "timeout": (0, 1.5, -1, -0.5, True, math.nan, None, "1"),
        "worker_init_fn": (None, print, 3),
        "multiprocessing_context": (None, "spawn", "x", "", 3, multiprocessing, multiprocessing.get_context("spawn")),
        "generator": (None, torch.Generator(), 3),
        "prefetch_factor": (None, 2, 0, -1, 2.5, True, math.nan, "2"),
        "persistent_workers": (True, False, None, "no"),
        "pin_memory_device": ("", "cuda:0", 3),
        "in_order": (True, False, None),
    }
    return [(name, value) for name, several in values_of.items() for value in several]


def assert_as_torch(dataset: Any, iterable: bool, changed: dict[str, Any]) -> None:
    """Assert that error, or none, and warnings equal torch's."""
    from torch.utils.data import DataLoader

    checked = {name: value for name, value in changed.items() if name in DEFAULTS}
    ours = outcome(lambda: check(arguments(dataset, iterable=iterable, cpus=CPUS, **checked)))
    assert ours == outcome(lambda: DataLoader(dataset, **changed)), (dataset, changed)


def test_any_arguments_end_as_in_torch() -> None:
    """However many are wrong at once."""
    need("torch")

    @settings(max_examples=examples(1000))
    @given(st.sampled_from(datasets()), st.lists(st.sampled_from(values()), max_size=8).map(dict))
    def compare(dataset: tuple[Any, bool], changed: dict[str, Any]) -> None:
        assert_as_torch(*dataset, changed)

    compare()


def test_of_two_errors_torchs_comes_first() -> None:
    """For any two arguments, with workers and without."""
    need("torch")
    pairs = list(itertools.combinations(values(), 2))
    for dataset, iterable in datasets():
        for workers, pair in itertools.product((0, 1), pairs):
            assert_as_torch(dataset, iterable, {"num_workers": workers, **dict(pair)})


def test_no_argument_of_torchs_is_forgotten() -> None:
    """The comparison tries each of its signature."""
    need("torch")
    from torch.utils.data import DataLoader

    assert {"dataset", *dict(values())} == set(inspect.signature(DataLoader).parameters)
