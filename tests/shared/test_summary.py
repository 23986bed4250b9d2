"""Summary with one line for each part of a batch."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from teleloader_shared.registry import Unrestored
from teleloader_shared.summary import MAX_PARTS, Part, summarize
from teleloader_shared.tree import ArrayLeaf
from tests.conftest import need

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Record:
    """A dataclass."""

    image: Any
    name: str


def test_an_array_has_type_shape_and_range() -> None:
    """The summary of an array has dtype, shape and range, whatever contains the array."""
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    for batch, path in (
        (array, "batch"), ({"a": array}, "batch['a']"), ([{"a": array}], "batch[0]['a']"), ((array,), "batch[0]"),
        (Point(array, None), "batch.x"), (Record(array, "n"), "batch.image"),
    ):  # fmt: skip
        assert summarize(batch)[0] == Part(path, "int16", (2, 3), "0 to 5")


def test_a_plain_value_has_its_class_and_what_it_is() -> None:
    """The summary of a plain value, or of a list of such values, has class and value; long lists are truncated."""
    parts = summarize({"a": 5, "b": ["x", "y"], "c": None, "d": "z" * 500})
    assert [(part.path, part.type, part.shape, part.value[:6]) for part in parts] == [
        ("batch['a']", "int", None, "5"), ("batch['b']", "list", None, "['x', "),
        ("batch['c']", "NoneType", None, "None"), ("batch['d']", "str", None, "'zzzzz"),
    ]  # fmt: skip
    assert len(parts[3].value) == 90


def test_types_that_numpy_does_not_have_keep_their_names() -> None:
    """Dtypes that NumPy lacks have a name but no range, since that of their bits would be wrong."""
    leaf = ArrayLeaf("bfloat16", "tensor", np.zeros(3, np.uint16))
    assert summarize([leaf]) == [Part("batch[0]", "bfloat16", (3,), "")]


def test_a_tensor_is_an_array() -> None:
    """The summary of a tensor has torch's name of its dtype."""
    need("torch")
    import torch

    assert summarize(torch.ones(2, dtype=torch.bfloat16)) == [Part("batch", "bfloat16", (2,), "")]


def test_a_mapping_with_a_class_of_its_own_has_its_class_and_its_items() -> None:
    """A mapping with a single array keeps the key of the array."""
    parts = summarize([UserDict(a=np.ones(2))])
    assert parts == [Part("batch[0]", "UserDict", None, ""), Part("batch[0]['a']", "float64", (2,), "1 to 1")]


def test_an_unrestored_value_has_its_name_and_its_plain_value() -> None:
    """If the plain value begins with the items of a mapping, their paths are those in the mapping."""
    array = np.arange(3)
    assert summarize([Unrestored("a.Image", ["RGB", array]), Unrestored("a.Batch", [{"x": array}, None])]) == [
        Part("batch[0]", "a.Image", None, ""), Part("batch[0][0]", "str", None, "'RGB'"),
        Part("batch[0][1]", "int64", (3,), "0 to 2"),
        Part("batch[1]", "a.Batch", None, ""), Part("batch[1]['x']", "int64", (3,), "0 to 2"),
    ]  # fmt: skip


@pytest.mark.parametrize("batch", [np.empty((0, 3)), np.array([1 + 2j])])
def test_what_has_no_range_has_none(batch: Any) -> None:
    """Empty arrays and complex numbers have no range."""
    assert summarize(batch)[0].value == ""


def test_the_parts_of_a_very_long_batch_end_somewhere() -> None:
    """The number of parts is limited, since a batch of ragged lists may have one or more for each sample."""
    assert len(summarize([np.zeros(1)] * 10_000)) == MAX_PARTS
