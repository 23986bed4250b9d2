"""Samples of a remote dataset that are fetched together: ``RemoteDataset.__getitems__``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from teleloader import DatasetChanged, RemoteDataset
from teleloader.testing import FakeServer


class Squares:
    """Arrays of squares; sample 7 raises an error."""

    def __init__(self, length: int = 400) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 7:
            raise ValueError(f"sample {index} is damaged")
        return {"square": np.array([index**2]), "index": index}


@pytest.fixture
def dataset() -> Iterator[RemoteDataset]:
    """Return a remote dataset of squares."""
    with FakeServer({"squares": Squares()}) as fake:
        yield RemoteDataset(fake.url)


def plain(samples: list[Any]) -> list[tuple[int, int]]:
    """Return samples as comparable values."""
    return [(int(sample["square"][0]), sample["index"]) for sample in samples]


@pytest.mark.parametrize(
    "indices",
    [
        [],
        [3],
        [5, 3, 5, -1, -400],
        [*range(8, 200)],
        [*range(399, 9, -2)],
        np.array([2, 1]),
        (np.int32(4), np.uint8(4)),
    ],
    ids=["none", "one", "repeated and negative", "a range", "more than 128 ranges", "array", "NumPy integers"],
)
def test_samples_are_those_of_single_requests(dataset: RemoteDataset, indices: Any) -> None:
    """The result equals ``[dataset[index] for index in indices]`` for any integers in any order."""
    expected = [(i**2, i) for i in (int(index) % 400 for index in indices)]
    assert plain(dataset.__getitems__(indices)) == expected
    if len(indices) < 8:
        assert plain([dataset[index] for index in indices]) == expected


def test_repeated_samples_are_separate_objects(dataset: RemoteDataset) -> None:
    """A caller that changes a sample in place does not change another one."""
    first, second = dataset.__getitems__([3, 3])
    first["square"][0] = -1
    assert plain([second]) == [(9, 3)]


@pytest.mark.parametrize("index", [400, -401])
def test_an_index_out_of_range_is_an_index_error(dataset: RemoteDataset, index: int) -> None:
    """The error names the index and the length."""
    with pytest.raises(IndexError, match=f"index {index} is out of range: dataset 'squares' has 400 samples"):
        dataset.__getitems__([1, index])
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        dataset.__getitems__([1.5])  # type: ignore[list-item]


def test_the_error_of_a_sample_names_its_index(dataset: RemoteDataset) -> None:
    """The exception of a sample is that of a single request, with the index of the sample."""
    messages = []
    for fetch in (lambda: dataset.__getitems__([6, 8, 7]), lambda: dataset[7]):
        with pytest.raises(ValueError, match=r"sample 7 is damaged[\s\S]*with the indices \[7\]") as caught:
            fetch()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_an_iterable_style_dataset_has_no_samples_by_index() -> None:
    """The error says what to do instead."""
    with FakeServer({"stream": iter([1, 2])}) as fake, pytest.raises(TypeError, match="iterate over a DataLoader"):
        RemoteDataset(fake.url).__getitems__([0])


def test_samples_of_changed_data_are_refused() -> None:
    """Indices refer to the data that the dataset described at construction."""
    squares = Squares()
    with FakeServer({"squares": squares}) as fake:
        dataset = RemoteDataset(fake.url)
        squares.length = 300
        with pytest.raises(DatasetChanged, match="has fingerprint"):
            dataset.__getitems__([1, 2])
