"""The collate functions return torch's results, with NumPy alone.

The reference is torch's own functions, in the same process. Samples of NumPy and Python objects use the code of a
server without torch; tensors have their own.
"""

from __future__ import annotations

import copy
import enum
import gc
import importlib.util
import subprocess
import sys
import types
import warnings
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from teleloader_server.loading.collate import (
    Stack,
    TensorStack,
    default_collate,
    default_convert,
    lazy_collate,
    path_to_uncollatable,
)
from teleloader_shared import dtypes
from teleloader_shared.tree import Tensor
from tests.conftest import examples, need

Point = namedtuple("Point", ["x", "y"])
Collate = Callable[[Any], Any]

fixed = settings(max_examples=examples(150))


@pytest.fixture(scope="module")
def torch_collate() -> Collate:
    """Return torch's own default_collate."""
    need("torch")
    from torch.utils.data import default_collate

    return default_collate  # type: ignore[no-any-return, unused-ignore]


@pytest.fixture(scope="module")
def torch_convert() -> Collate:
    """Return torch's own default_convert."""
    need("torch")
    from torch.utils.data import default_convert

    return default_convert  # type: ignore[no-any-return, unused-ignore]


# --- Comparison ---------------------------------------------------------------------------------------------------


def outcome(function: Collate, argument: Any) -> Any:
    """Return the result of a function in comparable form: its error, or the described value."""
    try:
        return described(function(argument))
    except Exception as error:  # noqa: BLE001 - whatever it raises is what is compared
        return type(error), str(error)


def described(value: Any) -> Any:
    """Return containers by type and content, and arrays by kind, dtype, shape and bits."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return described_tensor(torch, value)
    if isinstance(value, Stack | TensorStack):
        return "tensor", value.dtype_name, tuple(value.shape), bits(written(value))
    if isinstance(value, np.ndarray):
        return "tensor" if isinstance(value, Tensor) else "array", value.dtype.name, value.shape, bits(value)
    if isinstance(value, Mapping):
        return type(value), [(key, described(item)) for key, item in value.items()]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return type(value), [described(item) for item in value]
    return type(value), repr(value)


def described_tensor(torch: Any, tensor: Any) -> Any:
    """Return a torch tensor by kind, dtype, shape and bits."""
    name = str(tensor.dtype).removeprefix("torch.")
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if name in dtypes.EXTENDED:
        plain = plain.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)
    return "tensor", name, tuple(tensor.shape), bits(plain.numpy())


def bits(array: NDArray[Any]) -> bytes:
    """Return the elements' bits with a single NaN, because the NaN that arithmetic returns depends on the processor."""
    array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C", subok=False)
    if array.dtype.kind in "fc":
        parts = array.reshape(-1).view(array.real.dtype)
        parts[np.isnan(parts)] = np.nan
    return array.tobytes()


def written(stack: Stack | TensorStack) -> NDArray[Any]:
    """Return the array that a stack writes."""
    out = np.empty(stack.shape, dtypes.storage(stack.dtype_name))
    stack.write(out)
    return out


# --- Samples ------------------------------------------------------------------------------------------------------

Samples = st.SearchStrategy[Any]

DTYPES = [np.dtype(name) for name in dtypes.NUMPY]
"""All dtypes that can be sent."""
int64s = st.integers(-(2**63), 2**63 - 1)
strings = st.text(max_size=4)


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array as a read-only one."""
    array.flags.writeable = False
    return array


LAYOUTS: list[Callable[[NDArray[Any]], NDArray[Any]]] = [
    lambda array: array,
    np.asfortranarray,
    read_only,
    lambda array: np.repeat(array, 2, axis=0)[::2] if array.ndim else array,
    lambda array: array[::-1] if array.ndim else array,
    lambda array: array.astype(array.dtype.newbyteorder(">")),
]
"""Memory layouts of an array."""


def arrays(dtype: np.dtype[Any], shape: tuple[int, ...] | st.SearchStrategy[Any]) -> Samples:
    """Return a strategy for arrays of a dtype and shape in any memory layout."""
    return st.builds(lambda array, laid_out: laid_out(array), hnp.arrays(dtype, shape), st.sampled_from(LAYOUTS))


def tensors(dtype: np.dtype[Any], shape: tuple[int, ...] | st.SearchStrategy[Any]) -> Samples:
    """Return torch tensors of a dtype and shape, with bfloat16 in place of float16."""

    def made(array: NDArray[Any]) -> Any:
        import torch

        tensor = torch.from_numpy(np.array(array))
        return tensor.to(torch.bfloat16) if dtype == np.float16 else tensor

    return hnp.arrays(dtype, shape).map(made)


def for_torch(value: Any) -> Any:
    """Return the sample with arrays that torch accepts: native byte order, no negative strides, writable."""
    if isinstance(value, np.ndarray):
        return np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
    if isinstance(value, Mapping):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = for_torch(item)  # type: ignore[index]
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(for_torch, value))
    if isinstance(value, list | tuple | deque | UserList):
        return type(value)([for_torch(item) for item in value])
    return value


def scalars(dtype: np.dtype[Any]) -> Samples:
    """Return NumPy scalars of a dtype, except uint64, which torch rejects."""
    return hnp.from_dtype(np.dtype(np.uint32) if dtype == np.uint64 else dtype)


@st.composite
def leaves(draw: st.DrawFn) -> Samples:
    """Return one kind of leaf: a strategy whose values can be in one column."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    kinds = [int64s, st.booleans(), st.floats(), strings, st.binary(max_size=3), scalars(dtype), arrays(dtype, shape)]
    if importlib.util.find_spec("torch") is not None:
        kinds.append(tensors(dtype, shape))
    return draw(st.sampled_from(kinds))


def containers(kinds: st.SearchStrategy[Samples]) -> st.SearchStrategy[Samples]:
    """Return a strategy for containers of these kinds."""
    several = st.lists(kinds, max_size=3)
    named = st.dictionaries(strings | st.integers() | st.tuples(st.booleans()), kinds, max_size=3)
    return st.one_of(
        several.map(lambda items: st.tuples(*items)),
        several.map(lambda items: st.tuples(*items).map(list)),
        several.map(lambda items: st.tuples(*items).map(deque)),
        several.map(lambda items: st.tuples(*items).map(UserList)),
        st.tuples(kinds, kinds).map(lambda pair: st.builds(Point, *pair)),
        named.map(st.fixed_dictionaries),
        named.map(lambda items: st.fixed_dictionaries(items).map(OrderedDict)),
        named.map(lambda items: st.fixed_dictionaries(items).map(partial(defaultdict, list))),
    )


kinds_of_samples = st.recursive(leaves(), containers, max_leaves=5)
samples = kinds_of_samples.flatmap(lambda kind: kind)
batches = kinds_of_samples.flatmap(lambda kind: st.lists(kind, min_size=1, max_size=4))


# --- default_collate ----------------------------------------------------------------------------------------------


@fixed
@given(batch=batches)
def test_a_batch_is_what_torch_makes_of_the_samples(torch_collate: Collate, batch: list[Any]) -> None:
    """Containers, dtypes, shapes and values equal torch's for samples of any structure."""
    assert outcome(default_collate, batch) == outcome(torch_collate, for_torch(batch))


@fixed
@given(batch=batches)
def test_a_lazy_batch_is_the_same_once_it_is_written(torch_collate: Collate, batch: list[Any]) -> None:
    """The collate function of workers, which determines shapes and dtypes in advance, writes the same elements."""
    assert outcome(lazy_collate, batch) == outcome(torch_collate, for_torch(batch))


small_floats = st.floats(width=32)


@fixed
@given(
    batch=st.one_of(
        st.lists(st.booleans() | int64s, min_size=1, max_size=5),
        st.tuples(st.floats(), st.lists(st.booleans() | int64s | st.floats(), max_size=4)).map(lambda t: [t[0], *t[1]]),
        st.tuples(st.booleans() | int64s, st.lists(st.booleans() | int64s | small_floats, max_size=4)).map(
            lambda t: [t[0], *t[1]]
        ),
    )
)
def test_a_column_of_python_numbers_has_torchs_type(torch_collate: Collate, batch: list[Any]) -> None:
    """Bools and ints become int64; floats become float64 if the first is one, otherwise float32."""
    for collate in (default_collate, lazy_collate):
        assert outcome(collate, batch) == outcome(torch_collate, batch)


@fixed
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_ragged_arrays_are_refused_in_torchs_words(torch_collate: Collate, data: st.DataObject, dtype: Any) -> None:
    """The message has the index of the first entry that differs, and both shapes."""
    shapes = hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3)
    batch = data.draw(st.lists(arrays(dtype, shapes), min_size=2, max_size=4))
    for collate in (default_collate, lazy_collate):
        assert outcome(collate, batch) == outcome(torch_collate, for_torch(batch))


@fixed
@given(batch=st.lists(st.lists(int64s, max_size=2) | st.tuples(int64s) | st.tuples(int64s, int64s), min_size=2))
def test_ragged_sequences_are_refused_in_torchs_words(torch_collate: Collate, batch: list[Any]) -> None:
    """Lists and tuples of different lengths raise torch's error."""
    for collate in (default_collate, lazy_collate):
        assert outcome(collate, batch) == outcome(torch_collate, batch)


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(batch, id=name)
        for name, batch in {
            "none": [None],
            "object": [object],
            "complex": [1j, 2j],
            "set": [{1}],
            "generator": [iter(())],
            "nested": [{"a": [1, (2, {"b": None})]}] * 2,
            "array of strings": [np.array(["a"])],
            "array of bytes": [np.array([b"a"])],
            "array of objects": [np.array([None])],
            "set in a list": [[{1}], [{2}]],
            "missing key": [{"a": 1, "b": 1}, {"a": 2}],
            "no mapping": [{"a": 1}, 5],
            "no sequence": [[1], 5],
            "nothing": [],
        }.items()
    ],
)
def test_what_cannot_be_collated_is_refused_in_torchs_words(torch_collate: Collate, batch: list[Any]) -> None:
    """The error has torch's type and text."""
    wanted = outcome(torch_collate, batch)
    assert issubclass(wanted[0], Exception)
    for collate in (default_collate, lazy_collate):
        assert outcome(collate, batch) == wanted


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(batch, id=name)
        for name, batch in {
            "more keys than the first": [{"a": 1}, {"a": 2, "b": 3}],
            "other order of keys": [OrderedDict(b=1, a=2), {"a": 1, "b": 2}],
            "list then tuple": [[1, 2], (3, 4)],
            "tuple then list": [(1, 2), [3, 4]],
            "range": [range(2), range(2)],
            "bytearray": [bytearray(b"ab"), bytearray(b"cd")],
            "read-only mapping": [types.MappingProxyType({"a": 1})] * 2,
            "strings, then not": ["a", 1, None],
            "numpy strings": [np.str_("a"), np.str_("b")],
            "numpy bytes": [np.bytes_(b"a")],
            "empty lists": [[], []],
            "empty tuples": [(), ()],
            "empty dicts": [{}, {}],
            "arrays without elements": [np.zeros((2, 0))] * 2,
        }.items()
    ],
)
def test_containers_follow_the_first_sample(torch_collate: Collate, batch: list[Any]) -> None:
    """The first sample determines keys, order and type; a type that cannot be rebuilt becomes a plain one."""
    for collate in (default_collate, lazy_collate):
        assert outcome(collate, batch) == outcome(torch_collate, batch)


class Scaled(namedtuple("Scaled", ["pixels"])):
    """Namedtuple whose constructor changes its argument."""

    def __new__(cls, pixels: Any) -> Scaled:
        """Create an instance with half the values."""
        return super().__new__(cls, pixels / 2)


class Summed(UserDict[str, Any]):
    """Mapping that computes with its arguments."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value + 1)


@pytest.mark.parametrize(
    "batch",
    [[Scaled(np.ones(2)), Scaled(np.ones(2))], [Summed(a=np.ones(2))] * 2, [Counter(a=1), Counter(a=5)]],
    ids=["namedtuple", "mapping", "counter"],
)
def test_a_container_that_reckons_is_given_arrays(torch_collate: Collate, batch: list[Any]) -> None:
    """Values in containers whose constructor computes with them are written immediately, not lazily."""
    for collate in (default_collate, lazy_collate):
        assert outcome(collate, batch) == outcome(torch_collate, batch)


MIXED: dict[str, list[Any]] = {
    "int, then NumPy float": [1, np.float32(2.5)],
    "int, then NumPy double": [1, np.float64(2.5)],
    "int, then NumPy complex": [1, np.complex64(1j)],
    "int, then complex": [1, 1j],
    "bool, then NumPy bool": [True, np.bool_(False)],
    "bool, then NumPy int": [True, np.int8(5)],
    "NumPy float, then float": [np.float32(1), 2.5],
    "NumPy float, then int": [np.float32(1), 2],
    "NumPy int, then float": [np.int64(1), 2.5],
    "NumPy int, then NumPy float": [np.int64(1), np.float32(0.5)],
}
"""Columns of mixed number types, for which torch has its own promotion rules."""


@pytest.mark.parametrize("batch", [pytest.param(batch, id=name) for name, batch in MIXED.items()])
def test_a_column_of_mixed_numbers_is_promoted_as_torch_does(torch_collate: Collate, batch: list[Any]) -> None:
    """No number loses digits, and the dtype is torch's."""
    for collate in (default_collate, lazy_collate):
        assert outcome(collate, batch) == outcome(torch_collate, batch)


@pytest.mark.parametrize("first", dtypes.NUMPY)
def test_arrays_of_mixed_types_are_promoted_as_torch_does(torch_collate: Collate, first: str) -> None:
    """Integer arrays do not widen a float dtype, and combinations that torch rejects are rejected.

    NumPy would make float64 of uint64 and int64, and lose digits.
    """
    for second in dtypes.NUMPY:
        batch = [np.ones(2, first), np.ones(2, second)]
        for collate in (default_collate, lazy_collate):
            assert outcome(collate, batch) == outcome(torch_collate, batch), second


def several_kinds() -> Samples:
    """Return a strategy for numbers of dtypes that torch accepts, and for values that are not numbers."""
    names = ("int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64")
    dtype = st.sampled_from([np.dtype(name) for name in names])
    shape = st.sampled_from([(), (2,)])
    lists = st.lists(st.integers(0, 3), max_size=2) | st.lists(small_floats, min_size=2, max_size=2)
    others = st.sampled_from([None, "a", b"a", {1}, {"a": 1}])
    some_arrays = dtype.flatmap(lambda kind: hnp.arrays(kind, shape) | tensors(kind, shape))
    return st.booleans() | int64s | small_floats | dtype.flatmap(scalars) | some_arrays | lists | others


@settings(fixed, max_examples=examples(500))
@given(first=several_kinds(), second=several_kinds())
@example(first=np.array(65520, np.int32), second=np.float16(0))
def test_a_column_of_two_kinds_is_what_torch_makes_of_it(torch_collate: Collate, first: Any, second: Any) -> None:
    """Dtype and numbers are torch's, or the error has torch's type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch finds some of these lists slow
        wanted = outcome(torch_collate, [first, second])
    for collate in (default_collate, lazy_collate):
        got = outcome(collate, [first, second])
        assert got == wanted or (is_error(got) and got[0] is wanted[0])


class Grade(enum.IntEnum):
    """Subclass of int, as labels often are."""

    GOOD = 3


class Celsius(float):
    """Subclass of float."""


class Marked(np.ndarray[Any, Any]):
    """Subclass of NumPy's array."""


def numbers() -> Samples:
    """Return a strategy for numbers and zero-dimensional arrays that one column may mix.

    Except for bool, which torch rejects beside arrays.
    """
    names = ("int8", "int32", "int64", "uint8", "uint16", "float16", "float32", "float64", "complex64")
    dtype = st.sampled_from([np.dtype(name) for name in names])
    points = dtype.flatmap(lambda kind: hnp.arrays(kind, ()))
    floats = small_floats | st.sampled_from([float("nan"), float("inf"), -0.0, 1e300])
    others = st.sampled_from([np.longlong(5), Grade.GOOD, Celsius(21.5)])
    subclasses = points.map(lambda array: array.view(Marked))
    return int64s | floats | dtype.flatmap(hnp.from_dtype) | points | subclasses | others


outliers = st.sampled_from([2**63, -(2**63) - 1, 2**64, 2**70, 10**400, None, "1", b"1", [1], np.str_("a"), 1j, True])
"""Values that are not numbers of 64 bits."""


@settings(fixed, max_examples=examples(500))
@given(batch=st.lists(numbers(), min_size=2, max_size=6) | st.tuples(numbers(), numbers() | outliers).map(list))
@example(batch=[Grade.GOOD, Grade.GOOD])
@example(batch=[Celsius(1), Celsius(2.5)])
@example(batch=[np.longlong(5), np.longlong(6)])
@example(batch=[np.float64(1), 2.5, np.float64(3)])
@example(batch=[True, 5, 2**63])
@example(batch=[2.5, np.array(1j)])
@example(batch=[np.array(1), 2**63])
def test_a_column_of_many_kinds_is_what_torch_makes_of_it(torch_collate: Collate, batch: list[Any]) -> None:
    """Dtype and numbers are torch's for any mixture of types, or the error has torch's type."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both warn of complex numbers beside floats, and torch of lists of arrays
        wanted = outcome(torch_collate, batch)
        for collate in (default_collate, lazy_collate):
            got = outcome(collate, batch)
            assert got == wanted or (is_error(got) and got[0] is wanted[0])


def is_error(found: Any) -> bool:
    """Return True if an outcome is an error."""
    return isinstance(found[0], type) and issubclass(found[0], Exception)


NO_NUMBERS: dict[str, list[Any]] = {
    "string": [1, "a"],
    "digits": [1, "2"],
    "none": [1, None],
    "string after float": [1.0, "a"],
    "digits after float": [1.0, "2.5"],
    "none after float": [1.0, None],
    "none after NumPy number": [np.int64(1), None],
    "array of none after float": [1.0, np.array(None)],
    "date after float": [1.0, np.datetime64("2020")],
    "too large": [2**63],
    "too small": [0, -(2**63) - 1],
    "none in a namedtuple": [Point(1, 2), Point(None, 2)],
    "shorter namedtuple": [Point(1, 2), (3,)],
}


@pytest.mark.parametrize("batch", [pytest.param(batch, id=name) for name, batch in NO_NUMBERS.items()])
def test_what_is_no_number_is_not_taken_for_one(torch_collate: Collate, batch: list[Any]) -> None:
    """A column of numbers with another value raises torch's type of error."""
    wanted = outcome(torch_collate, batch)[0]
    assert issubclass(wanted, Exception)
    for collate in (default_collate, lazy_collate):
        assert outcome(collate, batch)[0] is wanted


@pytest.mark.parametrize(
    "sample",
    [np.timedelta64(1, "s"), np.array(["2020"], "M8[s]"), np.zeros(2, [("a", "i4")]), np.array(["a"])],
    ids=["timedelta", "datetimes", "records", "strings"],
)
def test_what_has_no_tensor_is_a_type_error_like_torchs(torch_collate: Collate, sample: Any) -> None:
    """Values without a tensor raise TypeError, also where torch's own text is about conversion."""
    batch = [np.zeros(1), sample] if sample.dtype.kind == "U" else [sample]
    assert outcome(torch_collate, batch)[0] is TypeError
    for collate in (default_collate, lazy_collate):
        error, text = outcome(collate, batch)
        assert error is TypeError
        assert text.startswith("default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists")


@pytest.mark.parametrize("sample", [np.datetime64("2020"), np.void(b"ab")], ids=["datetime", "void"])
def test_a_numpy_scalar_that_is_no_number_is_refused_in_torchs_words(torch_collate: Collate, sample: Any) -> None:
    """The error has torch's type and text."""
    for collate in (default_collate, lazy_collate):
        assert outcome(collate, [sample]) == outcome(torch_collate, [sample])


@pytest.mark.parametrize("collate", [default_collate, lazy_collate])
def test_arrays_that_torch_cannot_take_over_are_collated_all_the_same(collate: Collate) -> None:
    """Foreign byte order, negative strides and uint64 scalars, which torch rejects, are stacked by value."""
    swapped = np.arange(3, dtype=">i4")
    assert described(collate([swapped, swapped])) == described(np.array([[0, 1, 2]] * 2, np.int32).view(Tensor))
    backwards = np.arange(3, dtype=np.int16)[::-1]
    assert described(collate([backwards])) == described(np.array([[2, 1, 0]], np.int16).view(Tensor))
    largest = np.uint64(2**64 - 1)
    assert described(collate([largest])) == described(np.array([largest]).view(Tensor))


@pytest.mark.parametrize("name", dtypes.EXTENDED)
def test_types_that_numpy_has_not_keep_their_bits(name: str) -> None:
    """Arrays of ml_dtypes types are stacked without torch."""
    need("ml_dtypes")
    array = np.array([[1, 2.5, -4]], dtypes.extended_numpy(name))
    stack = lazy_collate([array, array[:, ::-1]])
    assert (stack.dtype_name, stack.shape) == (name, (2, 1, 3))
    raw = array.view(dtypes.EXTENDED[name])
    assert np.array_equal(written(stack), [raw, raw[:, ::-1]])


@pytest.mark.parametrize("first", ["bfloat16", "float32"])
def test_types_that_numpy_has_not_are_promoted_by_their_value(first: str) -> None:
    """A bfloat16 array beside float32 becomes float32, with the same numbers."""
    need("ml_dtypes")
    values = [1, 2.5, -4]
    batch = [np.array(values, np.float32), np.array(values, dtypes.extended_numpy("bfloat16"))]
    stack = lazy_collate(batch if first == "float32" else batch[::-1])
    assert stack.dtype_name == "float32"
    assert written(stack).tolist() == [values, values]


def test_a_stack_knows_itself_before_it_is_written() -> None:
    """Shape and dtype are known immediately; elements are read when they are written to the caller's buffer."""
    first, second = np.zeros(3, np.float32), np.ones(3, np.float32)
    stack = lazy_collate([first, second])
    assert isinstance(stack, Stack)
    assert (stack.dtype_name, stack.shape, stack.kind) == ("float32", (2, 3), "tensor")
    first[:] = 7
    place = np.zeros((4, 3), np.float32)
    stack.write(place[1:3])
    assert place.tolist() == [[0] * 3, [7] * 3, [1] * 3, [0] * 3]


@pytest.mark.parametrize("width", [0, 1, 255, 256, 257, 5000])
@pytest.mark.parametrize("kind", ["contiguous", "strided", "one strided", "big-endian"])
def test_arrays_of_any_size_are_stacked(width: int, kind: str) -> None:
    """Small and large arrays are copied in different ways, which depend on their memory layout as well."""
    rows = np.arange(8 * width, dtype=np.float64).reshape(4, width, 2)
    rows = rows.astype(">f8") if kind == "big-endian" else rows
    strided = {"strided": {0, 1, 2, 3}, "one strided": {2}}.get(kind, set())
    batch = [row[:, 0] if k in strided else row[:, 0].copy() for k, row in enumerate(rows)]
    for collate in (default_collate, lazy_collate):
        assert described(collate(batch)) == described(rows[:, :, 0].astype(np.float64).view(Tensor))


def test_a_batch_is_its_own() -> None:
    """A batch is a copy, even of one sample, so that samples may change after collation."""
    sample = np.zeros(3)
    batch = default_collate([sample])
    sample[:] = 1
    assert not batch.any()


def steps(collate: Collate, batch: list[Any]) -> int:
    """Return the number of bytecode instructions that collating a batch and writing its arrays takes."""
    count = 0

    def trace(frame: types.FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # hypothesis has a callback there
    sys.settrace(trace)
    try:
        collated = collate(batch)
        if isinstance(collated, Stack | TensorStack):
            written(collated)
    finally:
        sys.settrace(before)
        gc.enable()
    return count


COMMON: dict[str, Callable[[int], Any]] = {
    "array": lambda i: np.full(3, i, np.float32),
    "array without dimensions": lambda i: np.array(i),
    "memory-mapped array": lambda i: np.full(3, i).view(np.memmap),
    "arrays of two types": lambda i: np.full(3, i, ("float32", "float64")[i % 2]),
    "NumPy int": np.int64,
    "NumPy float": np.float32,
    "NumPy bool": lambda i: np.bool_(i % 2),
    "int": int,
    "float": float,
    "bool": lambda i: i % 2 == 0,
    "enum": lambda i: Grade.GOOD,
    "int and float": lambda i: (1, 2.5)[i % 2],
    "float and int": lambda i: (2.5, 1)[i % 2],
    "int and NumPy int": lambda i: (1, np.int64(2))[i % 2],
    "str": str,
    "tuple": lambda i: (np.full(3, i), i),
    "list": lambda i: [np.full(3, i), i],
    "dict": lambda i: {"image": np.full(3, i), "label": np.int64(i), "weight": i / 2, "name": str(i)},
    "namedtuple": lambda i: Point(np.full(3, i), i),
    "nested": lambda i: {"a": (np.full(3, i), {"b": [i, (i / 2,)]})},
}
"""Samples of common types, as functions of their index."""


@pytest.mark.parametrize("sample", [pytest.param(made, id=name) for name, made in COMMON.items()])
def test_no_python_code_runs_per_sample(sample: Callable[[int], Any]) -> None:
    """A hundred times as many samples take the same number of interpreter instructions."""
    few, many = ([sample(i) for i in range(count)] for count in (10, 1000))
    for collate in (default_collate, lazy_collate):
        steps(collate, few)  # fills caches
        assert steps(collate, many) == steps(collate, few)


@pytest.mark.parametrize("shape", [(), (3,)], ids=["scalar", "row"])
def test_no_python_code_runs_per_tensor(shape: tuple[int, ...]) -> None:
    """Torch tensors, with or without dimensions, are stacked without a Python loop as well."""
    need("torch")
    import torch

    few, many = ([torch.zeros(shape)] * count for count in (10, 1000))
    for collate in (default_collate, lazy_collate):
        steps(collate, few)
        assert steps(collate, many) == steps(collate, few)


# --- default_convert ----------------------------------------------------------------------------------------------


@fixed
@given(sample=samples)
def test_a_single_sample_is_what_torch_makes_of_it(torch_convert: Collate, sample: Any) -> None:
    """Arrays and NumPy scalars become tensors, and tuples become lists; other values stay unchanged."""
    assert outcome(default_convert, sample) == outcome(torch_convert, for_torch(sample))


@pytest.mark.parametrize(
    "sample",
    [
        *(None, 1, 2.5, True, 1j, "ab", b"ab", {1}, np.str_("a"), range(3), bytearray(b"ab"), deque([np.float32(1)])),
        types.MappingProxyType({"a": np.int8(1)}),
        Point(1, (np.zeros(2), "s")),
        (1, (2.5, [np.float64(3)])),
    ],
    ids=repr,
)
def test_what_is_no_array_is_left_alone(torch_convert: Collate, sample: Any) -> None:
    """Numbers, strings and objects are unchanged, and containers are rebuilt."""
    assert outcome(default_convert, sample) == outcome(torch_convert, sample)


@pytest.mark.parametrize(
    "sample", [np.array(["a"]), np.array([None]), np.array([b"a"])], ids=["str", "object", "bytes"]
)
def test_an_array_of_strings_or_objects_stays_an_array(torch_convert: Collate, sample: Any) -> None:
    """Arrays of strings or objects have no tensor."""
    assert outcome(default_convert, sample) == outcome(torch_convert, sample)


def test_what_others_derive_from_numpys_types_stays_what_it_is(torch_convert: Collate) -> None:
    """Subclasses are unchanged: a masked array, for example, keeps its mask."""
    own = type("Own", (np.ndarray,), {})
    others: list[Any] = [np.ma.masked_equal(np.arange(2), 1), np.ones(2).view(own)]
    for foreign in others:
        assert default_convert(foreign) is foreign is torch_convert(foreign)
    for sample in (np.ones((1, 2)).view(np.matrix), np.ones((1, 2)).view(np.recarray)):
        assert outcome(default_convert, sample) == outcome(torch_convert, sample)


@pytest.mark.parametrize("sample", [np.datetime64("2020"), np.array(["2020"], "M8[s]"), np.zeros(1, [("a", "i4")])])
def test_an_array_that_cannot_be_a_tensor_is_not_converted(sample: Any) -> None:
    """The array is unchanged; torch raises an error."""
    assert default_convert({"a": [sample]})["a"][0] is sample


# --- torch tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", dtypes.NAMES)
@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 3)])
def test_tensors_are_stacked_as_torch_does(torch_collate: Collate, name: str, shape: tuple[int, ...]) -> None:
    """Tensors of each supported dtype, including bfloat16 and float8, are stacked."""
    import torch

    batch = [(torch.arange(24)[: int(np.prod(shape))].reshape(shape) - i).to(getattr(torch, name)) for i in range(3)]
    assert isinstance(lazy_collate(batch), TensorStack)
    for collate in (default_collate, lazy_collate):
        assert outcome(collate, batch) == outcome(torch_collate, batch)


@pytest.mark.parametrize("case", ["transposed", "with gradient", "conjugate", "negated", "parameter", "expanded"])
def test_views_and_leaves_of_a_graph_are_stacked_as_plain_tensors(torch_collate: Collate, case: str) -> None:
    """The elements are written, whatever their storage."""
    import torch

    complex_ = torch.tensor([1 + 2j, 3 - 4j])
    tensor = {
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "with gradient": torch.ones(2, requires_grad=True),
        "conjugate": complex_.conj(),
        "negated": complex_.conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "expanded": torch.ones(1).expand(5),
    }[case]
    for collate in (default_collate, lazy_collate):
        assert outcome(collate, [tensor, tensor]) == outcome(torch_collate, [tensor, tensor])


@pytest.mark.parametrize(
    "case", ["ragged", "promoted", "nested containers", "array after tensor", "tensor after array"]
)
def test_unequal_tensors_are_promoted_or_refused_as_torch_does(torch_collate: Collate, case: str) -> None:
    """Results and error texts are torch's own."""
    import torch

    batch: list[Any] = {
        "ragged": [torch.zeros(1), torch.zeros(2)],
        "promoted": [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64), torch.zeros(2)],
        "nested containers": [{"a": (torch.zeros(2), 1)}, {"a": (torch.ones(2), 2)}],
        "array after tensor": [{"a": torch.zeros(2)}, {"a": np.zeros(2)}],
        "tensor after array": [np.zeros(2), torch.ones(2, dtype=torch.float64)],
    }[case]
    for collate in (default_collate, lazy_collate):
        assert outcome(collate, batch) == outcome(torch_collate, batch)


def test_a_number_among_tensors_is_refused_in_torchs_words(torch_collate: Collate) -> None:
    """The error is a TypeError that names the element."""
    import torch

    batch = [torch.tensor(1), 2]
    assert outcome(lazy_collate, batch) == outcome(torch_collate, batch)


@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_nested_tensors_are_refused_in_torchs_words(torch_collate: Collate, layout: str) -> None:
    """A batch of nested tensors requires a user's collate function."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own remark that they are a prototype
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=getattr(torch, layout))
    wanted = outcome(torch_collate, [nested])
    assert wanted[0] is RuntimeError
    for collate in (default_collate, lazy_collate):
        assert outcome(collate, [nested]) == wanted


class Angle:
    """Type that torch can collate only with a registered function."""

    def __init__(self, degrees: float) -> None:
        self.degrees = degrees


def test_what_is_registered_with_torch_is_collated_by_it(
    torch_collate: Collate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions in torch's default_collate_fn_map, the documented extension point, are used."""
    import torch
    from torch.utils.data._utils.collate import default_collate_fn_map

    def collate_angles(batch: Sequence[Angle], *, collate_fn_map: object) -> Any:
        assert collate_fn_map is default_collate_fn_map
        return torch.tensor([angle.degrees for angle in batch])

    batch = [{"a": Angle(1)}, {"a": Angle(2)}]
    for collate in (default_collate, lazy_collate):
        assert is_error(outcome(collate, batch))
    monkeypatch.setitem(default_collate_fn_map, Angle, collate_angles)
    monkeypatch.setitem(default_collate_fn_map, str, lambda batch, **_: "".join(batch))
    others: list[list[Any]] = [[("x", 1), ("y", 2)], [[type("Steep", (Angle,), {})(90)]]]
    for registered in (batch, *others):
        for collate in (default_collate, lazy_collate):
            assert outcome(collate, registered) == outcome(torch_collate, registered)


@pytest.mark.parametrize("collate", [default_collate, lazy_collate])
def test_sparse_tensors_are_refused_in_torchs_words(torch_collate: Collate, collate: Collate) -> None:
    """A batch of sparse tensors requires a user's collate function."""
    import torch

    batch = [torch.zeros(2).to_sparse()] * 2
    wanted = outcome(torch_collate, batch)
    assert wanted[0] is RuntimeError
    with pytest.raises(RuntimeError) as raised:
        collate(batch)
    assert str(raised.value) == wanted[1]


def test_tensors_of_a_single_sample_are_left_alone(torch_convert: Collate) -> None:
    """default_convert returns the same tensor."""
    import torch

    tensor = torch.zeros(2)
    converted = default_convert({"a": (tensor,)})
    assert outcome(torch_convert, {"a": (tensor,)}) == described(converted)
    assert converted["a"][0] is tensor


# --- Without torch ------------------------------------------------------------------------------------------------


def test_collating_neither_needs_nor_loads_torch() -> None:
    """Without torch, arrays and numbers are collated, and torch is not imported."""
    program = """
import sys
import numpy as np
from teleloader_server.loading.collate import default_collate, default_convert, lazy_collate
samples = [{"a": np.ones(2, np.float32), "b": (i, 2.5, True, "s"), "c": np.int8(i)} for i in range(3)]
for collate in (default_collate, lazy_collate):
    batch = collate(samples)
    assert batch["a"].shape == (3, 2)
    assert [x.dtype for x in batch["b"][:3]] == [np.int64, np.float64, bool]
default_convert(samples[0])
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


@pytest.mark.parametrize(
    ("sample", "path"),
    [
        ({"meta": [1, "a", object()]}, "sample['meta'][2]"),
        ((np.zeros(2), {"x": None}), "sample[1]['x']"),
        (object(), "sample"),
        ({"a": [np.array(["text"])]}, "sample['a'][0]"),
        ({"a": [1, 2.5, "x", b"y", np.float32(1), np.zeros(3)]}, None),
    ],
    ids=["object", "none", "the sample itself", "strings", "nothing"],
)
def test_where_in_a_sample_something_is_refused(sample: object, path: str | None) -> None:
    """The error has torch's text and the path within the sample."""
    assert path_to_uncollatable(sample) == path


def test_of_several_types_that_cannot_be_stacked_the_first_is_named() -> None:
    """The error names the first type, as torch's does, and is the same in every run."""
    words = [np.array(word) for word in ("cat", "horse", "hippopotamus", "ox", "mouse")]
    with pytest.raises(TypeError, match=r"found <U3$"):
        default_collate(words)
