"""A batch is described by msgpack's own types and its arrays in order; nothing else is described, or believed."""

from __future__ import annotations

import contextlib
import enum
import json
import subprocess
import sys
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from teleloader_shared import dtypes
from teleloader_shared.errors import EncodeError, ProtocolError
from teleloader_shared.tree import MAX_DEPTH, Tensor, flatten, unflatten
from tests.conftest import need
from tests.shared.trees import Columns, Nothing, Point, assert_same, keep, plain_trees, trees

fixed = settings(derandomize=True, deadline=None, max_examples=150)


def no_leaf(name: str, shape: tuple[int, ...], kind: str) -> Any:
    """For descriptions that must be refused before an array is made."""
    raise AssertionError(f"an array of {name} was made, with {len(shape)} dimensions and kind {kind!r}")


def described(batch: object) -> Any:
    """The description alone, as it comes out of msgpack on the other side."""
    return msgpack.unpackb(msgpack.packb(flatten(batch)[0]))


# --- Each kind of node --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "node"),
    [
        (None, None),
        (True, True),
        (7, 7),
        (-(2**63), -(2**63)),
        (2**64 - 1, 2**64 - 1),
        (2**64, {"int": "18446744073709551616"}),
        (-(2**63) - 1, {"int": "-9223372036854775809"}),
        (0.5, 0.5),
        (1 - 2j, {"complex": [1.0, -2.0]}),
        ("text", "text"),
        (b"\x00\xff", b"\x00\xff"),
        ([], []),
        ([1, "a"], [1, "a"]),
        ((), {"tuple": []}),
        ((1, (2,)), {"tuple": [1, {"tuple": [2]}]}),
        ({}, {"dict": []}),
        ({"b": 1, "a": [2]}, {"dict": [["b", 1], ["a", [2]]]}),
        ({1: 0, None: 0, (1, b"k"): 0}, {"dict": [[1, 0], [None, 0], [{"tuple": [1, b"k"]}, 0]]}),
        (OrderedDict(z=1), {"ordereddict": [["z", 1]]}),
        (Point(1, y=None), {"namedtuple": ["Point", ["x", "y"], [1, None]]}),
        (Nothing(), {"namedtuple": ["Nothing", [], []]}),
        (Columns(1, 2), {"namedtuple": ["Columns", ["_0", "id"], [1, 2]]}),
        ({"array": 1}, {"dict": [["array", 1]]}),
    ],
    ids=repr,
)
def test_a_plain_value_is_described_and_built_again(value: object, node: object) -> None:
    """Each kind of node, as docs/protocol.md has it; no dict of a user's can be taken for a node."""
    assert described(value) == node
    assert_same(unflatten(node, no_leaf), value)


@pytest.mark.parametrize(
    ("value", "node"),
    [
        (np.zeros((2, 3), np.float32), ["float32", [2, 3], "ndarray"]),
        (np.zeros((0, 4), ">i2"), ["int16", [0, 4], "ndarray"]),
        (np.array(1 + 1j), ["complex128", [], "ndarray"]),
        (np.zeros(2, ml_dtypes.bfloat16), ["bfloat16", [2], "ndarray"]),
        (np.zeros(2, np.uint8).view(Tensor), ["uint8", [2], "tensor"]),
        (np.float64(1), ["float64", [], "scalar"]),
        (np.bool_(1), ["bool", [], "scalar"]),
        (ml_dtypes.float8_e5m2(1), ["float8_e5m2", [], "scalar"]),
    ],
    ids=repr,
)
def test_an_array_is_described_by_type_shape_and_kind(value: Any, node: list[Any]) -> None:
    """A leaf stands in the description as [dtype, shape, kind], whatever its byte order."""
    description, leaves = flatten(value)
    assert description == {"array": node}
    assert [(leaf.dtype_name, list(leaf.shape), leaf.kind) for leaf in leaves] == [tuple(node)]


def test_every_dtype_has_a_name_that_leads_back_to_it() -> None:
    """Each of the 19 types goes by the name that NumPy, torch and ml_dtypes give it."""
    assert len(dtypes.NAMES) == 19
    for name in dtypes.NAMES:
        dtype = np.dtype(name) if name in dtypes.NUMPY else dtypes.extended_numpy(name)
        assert flatten(np.zeros(1, dtype))[0] == {"array": [name, [1], "ndarray"]}
        assert dtypes.storage(name).itemsize == dtype.itemsize


def test_arrays_come_in_the_order_in_which_they_stand() -> None:
    """Leaves are numbered by walking the description from its beginning, keys before values."""
    batch = {"a": [np.array(0), (np.array(1), {"b": np.array(2)})], "c": Point(np.array(3), np.int64(4))}
    node, leaves = flatten(batch)
    numbers = iter(range(5))
    built = unflatten(node, lambda name, shape, kind: next(numbers))
    assert built == {"a": [0, (1, {"b": 2})], "c": (3, 4)}
    for number, leaf in enumerate(leaves):
        out = np.empty((), np.int64)
        leaf.write(out)
        assert out == number


@fixed
@given(trees)
def test_any_batch_survives(batch: Any) -> None:
    """Container types, element types and bits are kept, through msgpack and back."""
    node, leaves = flatten(batch)
    waiting = iter(leaves)

    def make(name: str, shape: tuple[int, ...], kind: str) -> Any:
        leaf = next(waiting)
        assert (leaf.dtype_name, leaf.shape, leaf.kind) == (name, shape, kind)
        out: NDArray[Any] = np.empty(shape, dtypes.storage(name))
        leaf.write(out)
        return keep(out, name, kind)

    assert_same(unflatten(msgpack.unpackb(msgpack.packb(node)), make), batch)
    assert next(waiting, None) is None


@fixed
@given(plain_trees)
def test_a_description_is_made_of_msgpacks_own_types(batch: Any) -> None:
    """Every map of a description has one string key and no extension type occurs: any language can walk it."""

    def walk(node: Any) -> None:
        assert type(node) in (dict, list, str, bytes, int, float, bool, type(None))
        if isinstance(node, dict):
            ((kind, content),) = node.items()
            assert kind in ("tuple", "dict", "ordereddict", "namedtuple", "complex", "int")
            walk(content)
        for item in node if isinstance(node, list) else ():
            walk(item)

    walk(described(batch))


def test_numpys_strings_travel_as_pythons() -> None:
    """np.str_ and np.bytes_ become str and bytes, as a batch that torch collates has them."""
    assert_same(unflatten(described([np.str_("a"), np.bytes_(b"b")]), no_leaf), ["a", b"b"])


def test_tensors_of_torch_are_leaves() -> None:
    """A dense tensor in main memory travels, detached, however it lies there; others are refused by name."""
    need("torch")
    import torch

    assert flatten(torch.zeros(2, requires_grad=True))[0] == {"array": ["float32", [2], "tensor"]}
    assert flatten(torch.zeros(2, 1, dtype=torch.bfloat16))[0] == {"array": ["bfloat16", [2, 1], "tensor"]}
    assert flatten(torch.nn.Parameter(torch.zeros(())))[0] == {"array": ["float32", [], "tensor"]}
    for tensor, named in (
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2).to_sparse(), "layout torch.sparse_coo"),
        (torch.zeros(2, dtype=torch.float8_e8m0fnu), "dtype float8_e8m0fnu"),
    ):
        with pytest.raises(EncodeError, match=rf"^batch\['t'\] is a tensor .*{named}"):
            flatten({"t": tensor})


@pytest.mark.parametrize("name", ["float128", "complex32", "str96", ""])
def test_an_array_that_is_yet_to_be_written_must_be_of_a_known_type(name: str) -> None:
    """What a collate function promises to write is checked like an array: the error has its path."""

    @dataclass
    class Promise:
        dtype_name: str
        shape: tuple[int, ...] = (2,)
        kind: str = "tensor"

        def write(self, out: NDArray[Any]) -> None:
            out[...] = 0

    assert flatten(Promise("int8"))[0] == {"array": ["int8", [2], "tensor"]}
    with pytest.raises(EncodeError, match=r"^batch\['a'\]\[1\] .*" + name):
        flatten({"a": [0, Promise(name)]})


# --- What cannot travel -------------------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    """An int that is more than an int."""

    RED = 1


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (object(), "batch is a object, which cannot travel"),
        ({"meta": [0, 1, {2}]}, "batch['meta'][2] is a set, which cannot travel"),
        ({"meta": (0, Colour.RED)}, "batch['meta'][1] is a tests.shared.test_tree.Colour, which cannot travel"),
        ([defaultdict(list)], "batch[0] is a collections.defaultdict, which cannot travel"),
        ({4: {b"k": range(3)}}, "batch[4][b'k'] is a range, which cannot travel"),
        (Point(1, lambda: 0), "batch[1] is a function, which cannot travel"),
        ([np.array(["a"])], "batch[0] is an array of dtype <U1, which cannot travel"),
        ([np.array([None])], "batch[0] is an array of dtype object, which cannot travel"),
        ({"t": np.array([0], "M8[s]")}, "batch['t'] is an array of dtype datetime64[s], which cannot travel"),
        ({"t": np.zeros(1, [("a", "i4")])}, "batch['t'] is an array of dtype [('a', '<i4')], which cannot travel"),
        ({"t": np.zeros(1, ml_dtypes.int4)}, "batch['t'] is an array of dtype int4, which cannot travel"),
        ({"a": {Colour.RED: 1}}, "a key of batch['a'] is a tests.shared.test_tree.Colour, which cannot travel"),
        ({"a": {1j: 1}}, "a key of batch['a'] is a complex, and only str, bytes, numbers and tuples travel"),
        ({"a": {frozenset(): 1}}, "a key of batch['a'] is a frozenset, and only str, bytes, numbers and tuples"),
        ({"a": {(1, object): 1}}, "a key of batch['a'][1] is a type, which cannot travel"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_travel_is_refused_with_its_path(batch: object, sentence: str) -> None:
    """The error says where in the batch it is and what it is."""
    with pytest.raises(EncodeError) as caught:
        flatten(batch)
    assert str(caught.value).startswith(sentence)
    assert isinstance(caught.value, TypeError)


def test_what_cannot_travel_is_told_what_can() -> None:
    """The error says what to do."""
    with pytest.raises(EncodeError, match="Convert it in the dataset or the collate function"):
        flatten({"a": object()})
    with pytest.raises(EncodeError, match=r"bool, int8, .* float8_e5m2fnuz can"):
        flatten(np.array(["a"]))


def nested(depth: int, kind: str) -> Any:
    """A value inside `depth` containers of a kind."""
    batch: Any = 0
    for _ in range(depth):
        batch = {"list": [batch], "tuple": (batch,), "dict": {"k": batch}, "namedtuple": Point(0, batch)}[kind]
    return batch


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "namedtuple"])
def test_containers_may_be_nested_so_deep_and_no_deeper(kind: str) -> None:
    """128 containers inside each other travel, on both sides and through msgpack; 129 are refused on both sides."""
    assert_same(unflatten(described(nested(MAX_DEPTH, kind)), no_leaf), nested(MAX_DEPTH, kind))
    with pytest.raises(EncodeError, match=r"batch[\['k10\]]*\.\.\. is nested more than 128 deep, or holds itself"):
        flatten(nested(MAX_DEPTH + 1, kind))
    node: Any = 0
    for _ in range(MAX_DEPTH + 1):
        node = {
            "list": [node],
            "tuple": {"tuple": [node]},
            "dict": {"dict": [["k", node]]},
            "namedtuple": {"namedtuple": ["Point", ["x", "y"], [0, node]]},
        }[kind]
    with pytest.raises(ProtocolError, match="nested more than 128 deep"):
        unflatten(node, no_leaf)


def test_a_batch_that_holds_itself_is_refused() -> None:
    """A cycle is found, not followed for ever."""
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    with pytest.raises(EncodeError, match=r"^batch\[1\]\['again'\]\[1\].*holds itself"):
        flatten(cycle)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_whole_number_may_have_4300_digits(sign: int) -> None:
    """So many digits does Python read by default; a longer number is an error on this side, with its path."""
    for value in (sign * 10**4299, sign * (10**4300 - 1)):
        assert unflatten(described([value]), no_leaf) == [value]
    with pytest.raises(EncodeError, match=r"^batch\['n'\]"):
        flatten({"n": sign * 10**4300})


# --- What is not believed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"tuple": [], "dict": []},
        {"set": []},
        {"": []},
        {b"tuple": []},
        {"tuple": None},
        {"tuple": "ab"},
        {"tuple": {"tuple": []}},
        {"dict": {}},
        {"dict": [1]},
        {"dict": ["ab"]},
        {"dict": [["k"]]},
        {"dict": [["k", 1, 2]]},
        {"dict": [[[], 1]]},
        {"dict": [[{"dict": []}, 1]]},
        {"dict": [[{"tuple": [[]]}, 1]]},
        {"ordereddict": [[{"ordereddict": []}, 1]]},
        {"complex": [1, 2]},
        {"complex": [1.0]},
        {"complex": ["1", "2"]},
        {"int": 5},
        {"int": ""},
        {"int": "-"},
        {"int": "--5"},
        {"int": "1_0"},
        {"int": " 1"},
        {"int": "0x10"},
        {"int": "9" * 5000},
        {"array": []},
        {"array": ["int8", [1]]},
        {"array": ["int8", 1, "ndarray"]},
        {"array": ["int8", [-1], "ndarray"]},
        {"array": ["int8", [1.0], "ndarray"]},
        {"array": ["int8", [True], "ndarray"]},
        {"array": ["int8", [None], "ndarray"]},
        {"array": ["int8", ["1"], "ndarray"]},
        {"array": [8, [1], "ndarray"]},
        {"array": ["int8", [1], None]},
        {"array": ["int8", [1], "pickle"]},
        {"array": ["int8", [1] * 65, "ndarray"]},
        {"array": ["int8", [2**63] * 300, "ndarray"]},
        {"array": {"int8": [1]}},
        msgpack.ExtType(5, b"data"),
        msgpack.Timestamp(0, 0),
        [0, msgpack.ExtType(5, b"data")],
    ],
    ids=lambda node: repr(node)[:40],
)
def test_a_description_that_is_none_is_refused(node: object) -> None:
    """Whatever is not one of the documented nodes is a ProtocolError, before an array is made."""
    with pytest.raises(ProtocolError):
        unflatten(node, no_leaf)


@pytest.mark.parametrize(
    ("name", "names", "items"),
    [
        ("A", ["x"], []),
        ("A", ["x"], [1, 2]),
        ("A", "x", [1]),
        ("A", ["x"], {"x": 1}),
        (1, ["x"], [1]),
        ("A", [1], [1]),
        ("A", [None], [1]),
        ("A", [["x"]], [1]),
        ("A", [{"tuple": []}], [1]),
        ("A", [b"x"], [1]),
        ("", ["x"], [1]),
        ("a b", ["x"], [1]),
        ("class", ["x"], [1]),
        ("A", [""], [1]),
        ("A", ["x y"], [1]),
        ("A", ["x", "x"], [1, 2]),
        ("A", ["lambda"], [1]),
        ("A", ["x=print('forged')"], [1]),
        ("A", ["__class__"], [1]),
        ("A", ["_make"], [1]),
        ("A", ["_1"], [1]),
        # one identifier to Python's parser, which normalises names
        ("A", ["ﬁ", "fi"], [1, 2]),
    ],
)
def test_a_forged_namedtuple_is_refused(name: object, names: object, items: object) -> None:
    """Names that Python cannot have, or that could mean something, never reach a type."""
    with pytest.raises(ProtocolError):
        unflatten({"namedtuple": [name, names, items]}, no_leaf)


def test_a_namedtuple_gets_a_type_of_its_own_name_and_nothing_is_imported() -> None:
    """Two equal nodes share one new type; the class of that name on the reading side is not looked for."""
    node = described([Point(1, 2), Point(3, 4)])
    one, two = unflatten(node, no_leaf)
    assert type(one) is type(two)
    assert type(one) is not Point
    assert (one.x, two.y) == (1, 4)


def test_reading_imports_nothing() -> None:
    """Building a batch, whatever it names, loads no module."""
    code = (
        "import json, sys; from teleloader_shared.tree import unflatten; before = set(sys.modules);"
        "unflatten({'namedtuple': ['antigravity', ['os', 'this'], [{'dict': [['wave', 1]]}, {'int': '99'}]]}, None);"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


node_kinds = st.sampled_from(["array", "tuple", "dict", "ordereddict", "namedtuple", "complex", "int", "list", "", "k"])
hostile_leaves = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=3)
    | st.sampled_from([*dtypes.NAMES, "ndarray", "scalar", "x", "ﬁ", "fi", "12", "-", "_x", "def"])
)  # fmt: skip
hostile_nodes: st.SearchStrategy[Any] = st.recursive(
    hostile_leaves,
    lambda nodes: (
        st.lists(nodes, max_size=4)
        | st.dictionaries(node_kinds | st.binary(max_size=3), nodes, max_size=2)
        | node_kinds.flatmap(lambda kind: st.lists(nodes, max_size=3).map(lambda items: {kind: items}))
        | st.builds(lambda pairs: {"dict": pairs}, st.lists(st.tuples(nodes, nodes).map(list), max_size=3))
        | st.builds(
            lambda name, parts: {"namedtuple": [name, [a for a, _ in parts], [b for _, b in parts]]},
            st.sampled_from(["A", "def", "ﬁ", ""]),
            st.lists(st.tuples(nodes, nodes), max_size=3),
        )
        | st.builds(
            lambda name, shape: {"array": [name, shape, "ndarray"]},
            st.sampled_from(dtypes.NAMES),
            st.lists(st.integers(-1, 2**64 - 1) | nodes, max_size=3),
        )
    ),
    max_leaves=20,
)


@settings(fixed, max_examples=500)
@given(hostile_nodes)
def test_whatever_is_described_is_built_or_refused(node: Any) -> None:
    """A description out of any of msgpack's types makes a batch or a ProtocolError, and no other error."""
    with contextlib.suppress(ProtocolError):
        unflatten(node, lambda name, shape, kind: (name, shape, kind))
