"""A batch is described by msgpack's own types and its arrays in order; all other descriptions are rejected."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import types
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from teleloader_shared import dtypes, tree
from teleloader_shared.errors import EncodeError, ProtocolError
from teleloader_shared.records import RecordTypes
from teleloader_shared.tree import MAX_DEPTH, MAX_SAME_HASH, Tensor, flatten, unflatten
from tests.conftest import examples, label, need
from tests.shared.trees import Box, Columns, Frozen, Nothing, Point, assert_same, keep, plain_trees, trees

fixed = settings(max_examples=examples(150))


KINDS = (
    *("tuple", "namedtuple", "dataclass", "dict", "ordereddict", "defaultdict", "counter", "set", "frozenset", "deque"),
    *("complex", "int", "range"),
)
"""All kinds of nodes except arrays."""


def no_leaf(name: str, shape: tuple[int, ...], kind: str) -> Any:
    """Fail: descriptions that must be rejected may not reach an array."""
    raise AssertionError(f"an array of {name} was made, with {len(shape)} dimensions and kind {kind!r}")


def described(batch: object) -> Any:
    """Return the description as read from msgpack."""
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
        (defaultdict(None, {"a": 1}), {"defaultdict": [["a", 1]]}),
        (Counter({"a": 2, 1: -1}), {"counter": [["a", 2], [1, -1]]}),
        ({2}, {"set": [2]}),
        (set(), {"set": []}),
        (frozenset([(1, "a")]), {"frozenset": [{"tuple": [1, "a"]}]}),
        ({frozenset([1]): 0, 1j: 1}, {"dict": [[{"frozenset": [1]}, 0], [{"complex": [0.0, 1.0]}, 1]]}),
        (range(1, 9, 2), {"range": [1, 9, 2]}),
        (range(2**64, 0, -1), {"range": [{"int": "18446744073709551616"}, 0, -1]}),
        (deque([1, [2]]), {"deque": [None, [1, [2]]]}),
        (deque([1], 3), {"deque": [3, [1]]}),
        (Point(1, y=None), {"namedtuple": ["tests.shared.trees", "Point", ["x", "y"], [1, None]]}),
        (Nothing(), {"namedtuple": ["tests.shared.trees", "Nothing", [], []]}),
        (Columns(1, 2), {"namedtuple": ["tests.shared.trees", "Columns", ["_0", "id"], [1, 2]]}),
        (Box(1, [2]), {"dataclass": ["tests.shared.trees", "Box", ["low", "high"], [1, [2]]]}),
        (Frozen("a"), {"dataclass": ["tests.shared.trees", "Frozen", ["name", "size"], ["a", 0]]}),
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
    """A leaf is described as [dtype, shape, kind], whatever its byte order."""
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
    """Each map of a description has one string key, without extension types, so that any language can read it."""

    def walk(node: Any) -> None:
        assert type(node) in (dict, list, str, bytes, int, float, bool, type(None))
        if isinstance(node, dict):
            ((kind, content),) = node.items()
            assert kind in KINDS
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
        (torch.zeros(2, dtype=torch.float8_e8m0fnu), "dtype float8_e8m0fnu"),
    ):
        with pytest.raises(EncodeError, match=rf"^cannot encode batch\['t'\]: (?=.*tensor).*{named}"):
            flatten({"t": tensor})


@pytest.mark.parametrize("name", ["float128", "complex32", "str96", ""])
def test_an_array_that_is_yet_to_be_written_must_be_of_a_known_type(name: str) -> None:
    """The dtype that a collate function promises to write is checked like an array's: the error has its path."""

    @dataclass
    class Promise:
        dtype_name: str
        shape: tuple[int, ...] = (2,)
        kind: str = "tensor"

        def write(self, out: NDArray[Any]) -> None:
            out[...] = 0

    assert flatten(Promise("int8"))[0] == {"array": ["int8", [2], "tensor"]}
    with pytest.raises(EncodeError, match=r"^cannot encode batch\['a'\]\[1\]: .*" + name):
        flatten({"a": [0, Promise(name)]})


# --- Unsupported values -------------------------------------------------------------------------------------------


def subclass(base: type, **attributes: object) -> Any:
    """Return an instance of a user-defined subclass."""
    made = type("Own", (base,), {})()
    vars(made).update(attributes)
    return made


class Unit(np.ndarray[Any, np.dtype[Any]]):
    """Array with a unit."""

    unit = "s"

    def __array_finalize__(self, obj: object) -> None:
        """Set the unit."""
        self.unit = "m"


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (object(), "cannot encode batch: unsupported type object"),
        ({"meta": [0, 1, object]}, "cannot encode batch['meta'][2]: unsupported type type"),
        (
            [subclass(dict, extra=1)],
            "cannot encode batch[0]: attribute 'extra' of the tests.shared.test_tree.Own would",
        ),
        ([np.ones(1).view(Unit)], "cannot encode batch[0]: attribute 'unit' of the tests.shared.test_tree.Unit would"),
        ({4: {b"k": iter(())}}, "cannot encode batch[4][b'k']: unsupported type tuple_iterator"),
        (Point(1, lambda: 0), "cannot encode batch.y: unsupported type function"),
        ([Box({"k": Point(object(), 0)})], "cannot encode batch[0].low['k'].x: unsupported type object"),
        (Frozen(object), "cannot encode batch.name: unsupported type type"),
        (deque([0, object]), "cannot encode batch[1]: unsupported type type"),
        (Box, "cannot encode batch: unsupported type type"),
        (
            [type("a b", (Box,), {"__module__": "m"})(1)],
            "cannot encode batch[0]: the class name and the field names of m.a b must",
        ),
        ([np.array([None])], "cannot encode batch[0]: unsupported dtype object of an array"),
        ({"t": np.zeros(1, [("a", "O")])}, "cannot encode batch['t']: unsupported dtype [('a', 'O')] of an array"),
        ({"t": np.zeros(1, ml_dtypes.int4)}, "cannot encode batch['t']: unsupported dtype int4 of an array"),
        ({"a": {object: 1}}, "cannot encode a key of batch['a']: unsupported type type. Supported types: None"),
        ({"a": {(1, range(1)): 1}}, "cannot encode a key of batch['a']: unsupported type range. Supported types: None"),
        ({"a": {(1, object)}}, "cannot encode an element of batch['a']: unsupported type type. Supported types: None"),
        (
            [{Frozen(1)}],
            "cannot encode an element of batch[0]: unsupported type tests.shared.trees.Frozen. Supported types: None",
        ),
    ],
    ids=label,
)
def test_what_cannot_travel_is_refused_with_its_path(batch: object, sentence: str) -> None:
    """The error has the value's path in the batch, and its type."""
    with pytest.raises(EncodeError) as caught:
        flatten(batch)
    assert str(caught.value).startswith(sentence)
    assert isinstance(caught.value, TypeError)


def test_errors_for_unsupported_values_state_what_to_do() -> None:
    """The error for an unsupported value states what to do."""
    with pytest.raises(
        EncodeError, match=r"\nregister\(Unregistered, 'tests\.shared\.test_tree\.Unregistered', to_plain="
    ):
        flatten({"a": Unregistered()})
    with pytest.raises(EncodeError, match=r"Supported dtypes: bool, int8, .* float8_e5m2fnuz$"):
        flatten(np.array([None]))


class Unregistered:
    """Class that no process registers."""


@pytest.mark.parametrize(
    "base",
    [str, bytes, int, float, complex, list, tuple, dict, OrderedDict, defaultdict, Counter, set, frozenset, deque],
)
def test_a_subclass_without_attributes_travels_as_its_base(base: type) -> None:
    """Content is equal and of the built-in type; an attribute of the instance is an error, as it would be lost."""
    builtin = dict if issubclass(base, dict) else base
    assert_same(unflatten(described([subclass(base)]), no_leaf), [builtin()])
    with pytest.raises(EncodeError, match=r"^cannot encode batch\[0\]: attribute 'extra' of the .*Own would be lost"):
        flatten([subclass(base, extra=1)])


def test_other_mappings_travel_as_dicts() -> None:
    """UserDict and mappingproxy have no state besides their items."""
    for mapping in (UserDict(a=1), types.MappingProxyType({"a": 1})):
        assert_same(unflatten(described([mapping]), no_leaf), [{"a": 1}])
    with pytest.raises(EncodeError, match=r"attribute 'extra' of the .*Own would be lost"):
        flatten(subclass(UserDict, extra=1))


def test_a_dataclass_that_is_also_a_builtin_container_is_refused() -> None:
    """Such a dataclass is rejected, because its items as a container are not fields."""
    mapping: Any = make_dataclass("Output", [("loss", Any, 0)], bases=(OrderedDict,))
    with pytest.raises(EncodeError, match=r"^cannot encode batch: attribute 'loss' of the .*Output would be lost"):
        flatten(mapping())


Item = TypeVar("Item")


@dataclass
class Generously(Generic[Item]):
    """Dataclass whose instances may have attributes other than its fields."""

    item: Item

    @cached_property
    def twice(self) -> list[Item]:
        """Return a value that is computed on first access."""
        return [self.item] * 2


def test_what_an_instance_holds_besides_its_fields_is_not_lost_silently() -> None:
    """Attributes other than fields raise an error, except cached properties and those of typing."""
    box = Generously[int](1)
    assert box.twice == [1, 1]
    assert_same(unflatten(described(box), no_leaf), box)
    box.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(
        EncodeError, match=r"^cannot encode batch\[0\]: attribute 'extra' of the .*Generously would be lost"
    ):
        flatten([box])


def test_a_field_that_is_not_set_is_an_error_with_its_path() -> None:
    """A dataclass with an unset field cannot be encoded."""
    box = Box(1)
    del box.low
    with pytest.raises(
        EncodeError, match=r"^cannot encode batch\['b'\]: a field of the tests.shared.trees.Box is not set: .*low"
    ):
        flatten({"b": box})


def nested(depth: int, kind: str) -> Any:
    """Return a value inside `depth` containers of a kind."""
    batch: Any = 0
    for _ in range(depth):
        batch = {
            "list": [batch],
            "tuple": (batch,),
            "dict": {"k": batch},
            "namedtuple": Point(0, batch),
            "dataclass": Box(0, batch),
            "deque": deque([batch]),
        }[kind]
    return batch


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "namedtuple", "dataclass", "deque"])
def test_containers_may_be_nested_so_deep_and_no_deeper(kind: str) -> None:
    """128 containers inside each other travel, on both sides and through msgpack; 129 are refused on both sides."""
    assert_same(unflatten(described(nested(MAX_DEPTH, kind)), no_leaf), nested(MAX_DEPTH, kind))
    with pytest.raises(
        EncodeError, match=r"batch[\['khigy10.\]]*\.\.\.: reference cycle, or more than 128 nesting levels"
    ):
        flatten(nested(MAX_DEPTH + 1, kind))
    node: Any = 0
    for _ in range(MAX_DEPTH + 1):
        node = {
            "list": [node],
            "tuple": {"tuple": [node]},
            "dict": {"dict": [["k", node]]},
            "namedtuple": {"namedtuple": ["m", "Point", ["x", "y"], [0, node]]},
            "dataclass": {"dataclass": ["m", "Box", ["low", "high"], [0, node]]},
            "deque": {"deque": [None, [node]]},
        }[kind]
    with pytest.raises(ProtocolError, match="more than 128 nesting levels"):
        unflatten(node, no_leaf)


def test_a_batch_that_holds_itself_is_refused() -> None:
    """A cycle raises an error instead of endless recursion."""
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    with pytest.raises(EncodeError, match=r"^cannot encode batch\[1\]\['again'\]\[1\].*reference cycle"):
        flatten(cycle)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_whole_number_may_have_4300_digits(sign: int) -> None:
    """Integers up to Python's default limit for reading are sent; the error for longer ones has their path."""
    for value in (sign * 10**4299, sign * (10**4300 - 1)):
        assert unflatten(described([value]), no_leaf) == [value]
    with pytest.raises(EncodeError, match=r"^cannot encode batch\['n'\]"):
        flatten({"n": sign * 10**4300})


# --- Invalid descriptions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "node",
    [
        {},
        {"tuple": [], "dict": []},
        {"bag": []},
        {"set": {}},
        {"set": [[]]},
        {"set": [{"set": []}]},
        {"set": [{"deque": [None, []]}]},
        {"set": [{"dataclass": ["tests.shared.trees", "Frozen", ["name", "size"], [1, 2]]}]},
        {"frozenset": [{"tuple": [[]]}]},
        {"counter": ["a"]},
        {"defaultdict": {"a": 1}},
        {"deque": []},
        {"deque": [1, [1, 2]]},
        {"deque": [True, [1]]},
        {"deque": [-1, []]},
        {"deque": [2**63, []]},
        {"range": [0, 1]},
        {"range": [0, 1, 0]},
        {"range": [0, 1.0, 1]},
        {"range": [0, True, 1]},
        {"range": [0, {"int": "x"}, 1]},
        {"range": [0, {"int": "1", "x": 1}, 1]},
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
    """Nodes other than the documented ones raise ProtocolError before an array is created."""
    with pytest.raises(ProtocolError):
        unflatten(node, no_leaf)


FORGED: list[tuple[object, object, object, object]] = [
    ("m", "A", ["x"], []),
    ("m", "A", ["x"], [1, 2]),
    ("m", "A", "x", [1]),
    ("m", "A", ["x"], {"x": 1}),
    ("m", 1, ["x"], [1]),
    (None, "A", ["x"], [1]),
    (b"m", "A", ["x"], [1]),
    ("m", "A", [1], [1]),
    ("m", "A", [None], [1]),
    ("m", "A", [["x"]], [1]),
    ("m", "A", [{"tuple": []}], [1]),
    ("m", "A", [b"x"], [1]),
    ("m", "", ["x"], [1]),
    ("m", "A.", ["x"], [1]),
    ("m", "a b", ["x"], [1]),
    ("m", "class", ["x"], [1]),
    ("m", "A", [""], [1]),
    ("m", "A", ["x y"], [1]),
    ("m", "A", ["x", "x"], [1, 2]),
    ("m", "A", ["lambda"], [1]),
    ("m", "A", ["x=print('forged')"], [1]),
    ("m", "A", ["__class__"], [1]),
    ("m", "A", ["__dict__"], [{"dict": []}]),
    # the same identifier for Python's parser, which normalizes names
    ("m", "A", ["ﬁ", "fi"], [1, 2]),
]


@pytest.mark.parametrize("kind", ["namedtuple", "dataclass"])
@pytest.mark.parametrize(("module", "name", "names", "items"), FORGED)
def test_a_forged_class_is_refused(kind: str, module: object, name: object, names: object, items: object) -> None:
    """Names that Python cannot have, or that could mean something, never reach a type."""
    with pytest.raises(ProtocolError):
        unflatten({kind: [module, name, names, items]}, no_leaf)


@pytest.mark.parametrize("names", [["_make"], ["_1"], ["_x"]])
def test_a_namedtuple_cannot_have_fields_that_are_methods(names: list[str]) -> None:
    """Field names that begin with an underscore are rejected, except those that rename=True generates."""
    with pytest.raises(ProtocolError):
        unflatten({"namedtuple": ["m", "A", names, [1]]}, no_leaf)


# --- Classes ------------------------------------------------------------------------------------------------------


class Outer:
    """Classes inside a class that record accesses by frames."""

    class Place(NamedTuple):
        """Class with a qualified name."""

        x: Any

    @dataclass
    class Crate:
        """Class with a qualified name."""

        x: Any


class Labelled(Point):
    """Namedtuple with further methods and class attributes."""

    unit = "m"

    def __new__(cls, x: Any, y: Any) -> Labelled:  # noqa: D102
        raise AssertionError("a constructor was run")

    def norm(self) -> Any:
        """Return a norm."""
        return abs(self.x) + abs(self.y)


@dataclass
class Careful:
    """Class that records if its code runs."""

    x: Any
    y: Any = field(default=5)
    total: Any = field(init=False)
    kinds: ClassVar[int] = 2

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Careful:  # noqa: D102
        raise AssertionError("a constructor was run")

    def __post_init__(self) -> None:
        raise AssertionError("a constructor was run")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError("a setter was run")


@pytest.mark.parametrize(
    "value",
    [Point(1, 2), Nothing(), Columns(1, 2), Outer.Place(1), Box(1), Frozen.of("a", 2), Outer.Crate(1), Generously(1)],
    ids=repr,
)
def test_a_class_that_the_reader_has_is_used(value: Any) -> None:
    """An instance of a class that the reader has becomes an equal instance of it, with working methods."""
    got = unflatten(described(value), no_leaf)
    assert type(got) is type(value)
    assert got == value


def test_an_instance_is_made_without_running_code_of_its_class() -> None:
    """Neither __new__, __init__, __post_init__ nor __setattr__ run; fields that no constructor takes are set."""
    labelled = tuple.__new__(Labelled, (3, -4))
    got = unflatten(described(labelled), no_leaf)
    assert type(got) is Labelled
    assert (got.norm(), got.unit) == (7, "m")
    careful: Any = object.__new__(Careful)
    careful.__dict__.update(x=1, y=2, total=3)
    again = unflatten(described(careful), no_leaf)
    assert type(again) is Careful
    assert vars(again) == {"x": 1, "y": 2, "total": 3}


class Hidden(type):
    """Metaclass that records accesses to its class."""

    def __getattribute__(cls, name: str) -> Any:
        raise AssertionError(f"{name} was looked at")


class Proxy:
    """Object that pretends to be a class, as lazy proxies do, and records accesses."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was looked at")


class Setter:
    """Descriptor that records assignments."""

    def __set__(self, instance: object, value: object) -> None:
        raise AssertionError("a descriptor was run")


class LazyModule(types.ModuleType):
    """Module that loads on access."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was looked at")


def with_finalizer() -> type:
    """Return a dataclass with a finalizer."""

    def last_word(self: object) -> None:
        raise AssertionError("a finalizer was run")

    return make_dataclass("Thing", ["x", "y"], namespace={"__del__": last_word})


def abstract() -> type:
    """Return a dataclass that cannot be instantiated."""

    @dataclass
    class Thing(ABC):
        x: Any
        y: Any

        @abstractmethod
        def area(self) -> float:
            """Missing."""

    return Thing


def with_setter() -> type:
    """Return a dataclass in which a field is a descriptor."""
    made = make_dataclass("Thing", ["x", "y"])
    made.x = Setter()  # type: ignore[attr-defined]
    return made


def with_property() -> type:
    """Return a dataclass in which a field is a property."""
    made = make_dataclass("Thing", ["x", "y"])
    made.y = property(lambda self: 0)  # type: ignore[attr-defined]
    return made


UNFIT: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "no class": lambda: Point(1, 2),
    "another class": lambda: Outer,
    "a function": lambda: with_finalizer,
    "other fields": lambda: make_dataclass("Thing", ["x", "z"]),
    "other order": lambda: make_dataclass("Thing", ["y", "x"]),
    "fewer fields": lambda: make_dataclass("Thing", ["x"]),
    "more fields": lambda: namedtuple("Thing", ["x", "y", "z"]),
    "fields that are none": lambda: type("Thing", (tuple,), {"_fields": ["x", "y"]}),
    "no tuple": lambda: type("Thing", (), {"_fields": ("x", "y")}),
    "a metaclass of its own": lambda: Hidden("Thing", (tuple,), {"_fields": ("x", "y")}),
    "a proxy": Proxy,
    "a finalizer": with_finalizer,
    "a namedtuple with a finalizer": lambda: type("Thing", (Point,), {"__del__": Setter.__set__}),
    "an abstract class": abstract,
    "a field that is set by code": with_setter,
    "a field that is a property": with_property,
    "a dict": lambda: make_dataclass("Thing", ["x", "y"], bases=(dict,)),
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """Return a module of the reader that frames may name."""
    made = types.ModuleType("readers_own")
    monkeypatch.setitem(sys.modules, "readers_own", made)
    return made


@pytest.mark.parametrize("kind", ["namedtuple", "dataclass"])
@pytest.mark.parametrize("thing", UNFIT)
def test_a_class_that_does_not_fit_is_left_alone(module: types.ModuleType, kind: str, thing: str) -> None:
    """For a class with other fields, or whose code would run, the reader creates its own class with that name."""
    module.__dict__["Thing"] = UNFIT[thing]()
    got = unflatten({kind: ["readers_own", "Thing", ["x", "y"], [1, 2]]}, no_leaf)
    assert type(got) is not module.__dict__["Thing"]
    assert (type(got).__name__, got.x, got.y) == ("Thing", 1, 2)
    assert isinstance(got, tuple) == (kind == "namedtuple")


def test_a_module_that_is_more_than_a_module_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazy modules are not loaded, and a module's __getattr__ is not called."""
    monkeypatch.setitem(sys.modules, "readers_own", LazyModule("readers_own"))
    node = {"namedtuple": ["readers_own", "Point", ["x"], [1]]}
    assert unflatten(node, no_leaf).x == 1
    asking = types.ModuleType("readers_own")
    asking.__dict__["__getattr__"] = Proxy()
    monkeypatch.setitem(sys.modules, "readers_own", asking)
    assert unflatten(node, no_leaf).x == 1


def test_keys_are_never_hashed_by_code_of_their_class(module: types.ModuleType) -> None:
    """A namedtuple with its own hash arrives as a plain one as a key, and unchanged as a value."""

    class Thing(Point):
        def __hash__(self) -> int:
            raise AssertionError("a hash was run")

    module.__dict__.update(Thing=Thing, Point=Point)
    node = {"namedtuple": ["readers_own", "Thing", ["x", "y"], [1, 2]]}
    (key,) = unflatten({"set": [node]}, no_leaf)
    assert type(key) is not Thing
    assert key == (1, 2)
    assert type(unflatten({"dict": [[1, node]]}, no_leaf)[1]) is Thing
    (key,) = unflatten({"set": [{"namedtuple": ["readers_own", "Point", ["x", "y"], [1, 2]]}]}, no_leaf)
    assert type(key) is Point


def test_a_class_that_the_reader_has_not_is_made_once() -> None:
    """Two equal nodes share one new class, with the usual methods of such classes."""

    @dataclass(frozen=True)
    class Local:
        x: Any

    one, two = unflatten(described([Local(1), Local(2)]), no_leaf)
    assert type(one) is type(two)
    assert type(one) is not Local
    assert (repr(one), [f.name for f in fields(two)]) == ("Local(x=1)", ["x"])
    place = namedtuple("place", ["x", "y"])
    three, four = unflatten(described([place(1, 2), place(3, 4)]), no_leaf)
    assert type(three) is type(four)
    assert repr(four) == "place(x=3, y=4)"


def _keys_of_one_hash(count: int) -> list[Any]:
    """Return tuples with equal hashes, based on the equal hashes of -1 and -2."""
    return [{"tuple": [-1 - (number >> bit & 1) for bit in range(16)]} for number in range(count)]


@pytest.mark.parametrize("kind", ["dict", "ordereddict", "defaultdict", "counter", "set", "frozenset"])
def test_keys_of_one_hash_are_few(kind: str) -> None:
    """The number of keys with equal hashes is limited, as comparing megabytes of them would take hours."""

    def node(count: int) -> Any:
        keys = _keys_of_one_hash(count)
        return {kind: keys if kind.endswith("set") else [[key, 0] for key in keys]}

    assert len(unflatten(node(MAX_SAME_HASH), no_leaf)) == MAX_SAME_HASH
    with pytest.raises(ProtocolError, match="more than 256 keys with the same hash"):
        unflatten(node(MAX_SAME_HASH + 1), no_leaf)


@pytest.mark.parametrize("kind", ["namedtuple", "dataclass"])
def test_classes_and_their_fields_are_few(kind: str) -> None:
    """A batch may have 64 classes, and 1,024 fields of them together, each used any number of times.

    Making a class takes a reader up to a millisecond: thousands of them in a frame of 20 KB would take it seconds.
    """
    most, most_fields = RecordTypes.MOST, RecordTypes.MOST_FIELDS

    def record(name: str, fields: int) -> Any:
        return {kind: ["elsewhere", name, [f"f{i}" for i in range(fields)], [0] * fields]}

    assert len(unflatten([record("C", 3)] * 2 * most, no_leaf)) == 2 * most
    assert len(unflatten([record(f"C{i}", most_fields // most) for i in range(most)], no_leaf)) == most
    too_many = [record("C", most_fields + 1)], [record(f"C{i}", 0) for i in range(most + 1)]
    for nodes in too_many:
        with pytest.raises(ProtocolError, match=r"more than 64 namedtuple and dataclass types, or 1,024 fields"):
            unflatten(nodes, no_leaf)


def test_a_batch_of_too_many_classes_is_refused_where_it_is_made() -> None:
    """A batch with more classes than a reader accepts is rejected by the writer."""
    wide = make_dataclass("Wide", [f"f{i}" for i in range(RecordTypes.MOST_FIELDS)])
    with pytest.raises(EncodeError, match=r"cannot encode batch\[1\] of type .*Wide: more than 64 "):
        flatten([Box(1, 2), wide(*[0] * RecordTypes.MOST_FIELDS)])


TEN = list(range(10))


@pytest.mark.parametrize(
    "batch",
    [
        [TEN] * 10, tuple([TEN] * 10), deque([TEN] * 10), dict.fromkeys(range(10), TEN), [set(TEN)] * 10,
        [frozenset(TEN)] * 10, [OrderedDict.fromkeys(range(5))] * 10, [[Point(1, 2)] * 5] * 8, [[Box(1, 2)] * 5] * 8,
        {tuple(range(i, i + 10)): i for i in range(10)},
    ],
    ids=lambda batch: type(batch).__name__,
)  # fmt: skip
def test_nodes_of_a_tree_are_counted(batch: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree has a limited number of nodes, in containers of every kind and in keys; writer and reader count alike.

    Each byte of a header can be a node that takes a microsecond: without the limit a header of 32 MiB would take half a
    minute to read.
    """
    node = described(batch)
    nodes = next(most for most in range(1000) if _is_read(node, most, monkeypatch))
    assert 80 <= nodes <= 130
    flatten(batch)
    monkeypatch.setattr(tree, "MAX_NODES", nodes - 1)
    with pytest.raises(EncodeError, match=f"more than {nodes - 1} values outside of arrays"):
        flatten(batch)


def _is_read(node: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return True if `node` is read where a tree may have `most` nodes."""
    monkeypatch.setattr(tree, "MAX_NODES", most)
    try:
        unflatten(node, no_leaf)
    except ProtocolError:
        return False
    return True


def test_equal_sets_have_equal_bytes_in_all_processes() -> None:
    """The order in which Python iterates a set depends on the process; the order in frames does not."""
    program = (
        "import numpy as np, pathlib, sys\n"
        "from teleloader_shared import codec; from teleloader_shared.memory import NumpyMemory\n"
        "words = ['one', 'two', 'three', 'four', 'five', 'six']\n"
        "sets = [set(words), frozenset(map(str.encode, words)), {(word, len(word)) for word in words}]\n"
        "sets += [{frozenset((word, None)) for word in words}, {pathlib.PurePosixPath(word) for word in words}]\n"
        "sets += [{(word, np.int8(i)) for i, word in enumerate(words)}, set(map(np.float32, range(6)))]\n"
        "frame = codec.to_bytes(codec.BatchId('', 0, 0), sets)\n"
        "assert codec.read(NumpyMemory(np.frombuffer(frame, np.uint8))).content == sets\n"
        "print(' '.join(map(str, sets)), file=sys.stderr)\n"
        "print(frame.hex())"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
        for seed in ("1", "2")
    ]
    assert [run.returncode for run in runs] == [0, 0], runs
    assert runs[0].stderr != runs[1].stderr, "the order of iteration is the same in both processes"
    assert runs[0].stdout == runs[1].stdout


def test_reading_imports_nothing() -> None:
    """Reading a batch imports no module, whatever names it contains."""
    code = (
        "import json, sys; from teleloader_shared.tree import unflatten; before = set(sys.modules);"
        "[unflatten({kind: ['antigravity', 'os.this', ['os', 'this'], [{'dict': [['wave', 1]]}, {'int': '99'}]]}, None)"
        " for kind in ('namedtuple', 'dataclass')];"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_tuples_that_c_functions_return_arrive_as_tuples() -> None:
    """torch.Size and the results of torch.max and the like are sequences first."""
    assert_same(unflatten(described([time.gmtime(0)]), no_leaf), [(1970, 1, 1, 0, 0, 0, 3, 1, 0)])
    need("torch")
    import torch

    assert described(torch.zeros(2, 3).shape) == {"tuple": [2, 3]}
    assert described(torch.max(torch.zeros(2, 3), 0)) == {
        "tuple": [{"array": ["float32", [3], "tensor"]}, {"array": ["int64", [3], "tensor"]}]
    }


# --- Arbitrary input ----------------------------------------------------------------------------------------------


node_kinds = st.sampled_from([*KINDS, "array", "list", "", "k"])
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
            lambda kind, module, name, parts: {kind: [module, name, [a for a, _ in parts], [b for _, b in parts]]},
            st.sampled_from(["namedtuple", "dataclass"]),
            st.sampled_from(["m", "", "builtins", "sys", "collections", "tests.shared.trees", "enum"]),
            st.sampled_from(["A", "def", "ﬁ", "", "tuple", "Box", "modules", "Enum", "OrderedDict.fromkeys", "a.b.."]),
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


@settings(fixed, max_examples=examples(500))
@given(hostile_nodes)
def test_whatever_is_described_is_built_or_refused(node: Any) -> None:
    """A description out of any of msgpack's types makes a batch or a ProtocolError, and no other error."""
    with contextlib.suppress(ProtocolError):
        unflatten(node, lambda name, shape, kind: (name, shape, kind))
