"""Strategies for batches of every kind, and a bitwise comparison of batches."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from teleloader_shared import dtypes
from teleloader_shared.codec import Bits
from teleloader_shared.tree import Tensor


class Point(NamedTuple):
    """A namedtuple of the usual kind."""

    x: Any
    y: Any


Nothing = namedtuple("Nothing", [])
# rename=True replaces an invalid name, such as a column "class", by _0
Columns = namedtuple("Columns", ["class", "id"], rename=True)


@dataclass
class Box:
    """A dataclass of the usual kind."""

    low: Any
    high: Any = 0


@dataclass(frozen=True, slots=True)
class Frozen:
    """Frozen dataclass with slots; its constructor does not set one field."""

    name: Any
    size: Any = field(init=False, default=0)

    @staticmethod
    def of(name: Any, size: Any) -> Frozen:
        """Return an instance with both fields."""
        made = Frozen(name)
        object.__setattr__(made, "size", size)
        return made


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype `name` of NumPy, or of ml_dtypes."""
    return dtypes.NUMPY[name] if name in dtypes.NUMPY else np.dtype(getattr(ml_dtypes, name))


def keep(bits: NDArray[Any], name: str, kind: str) -> Any:
    """Return a reader's leaf: the array with its dtype and kind."""
    array = bits if name in dtypes.NUMPY else bits.view(numpy_dtype(name))
    if kind == "scalar":
        return array[()]
    return array.view(Tensor) if kind == "tensor" else array


class KeptMemory(Bits):
    """Memory of a frame whose leaves are created by `keep`."""

    __slots__ = ()

    def leaf(self, offset: int, dtype_name: str, shape: tuple[int, ...], kind: str) -> Any:
        """Return the array."""
        return keep(super().leaf(offset, dtype_name, shape, kind), dtype_name, kind)


# --- The same, to the bit -----------------------------------------------------------------------------------------


def assert_same(got: Any, expected: Any, path: str = "batch") -> None:
    """Assert that containers, types and bits are equal; classes with fields may differ but must have equal fields."""
    if hasattr(expected, "_fields") or is_dataclass(expected):
        assert type(got).__name__ == type(expected).__name__, path
        assert_same(items_by_field(got), items_by_field(expected), path)
        return
    assert type(got) is type(expected), f"{path}: {type(got)} is not {type(expected)}"
    if isinstance(expected, dict):
        assert_same(list(got.items()), list(expected.items()), path)
    elif isinstance(expected, list | tuple | deque):
        assert getattr(got, "maxlen", None) == getattr(expected, "maxlen", None), path
        assert len(got) == len(expected), path
        for i, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_same(one, other, f"{path}[{i}]")
    elif isinstance(expected, np.ndarray | np.generic):
        assert (got.dtype, got.shape) == (expected.dtype.newbyteorder("<"), expected.shape), path
        assert bits_of(got) == bits_of(expected), path
    elif isinstance(expected, float | complex):
        assert struct.pack("<2d", got.real, got.imag) == struct.pack("<2d", expected.real, expected.imag), path
    else:
        assert got == expected, path


def items_by_field(record: Any) -> dict[str, Any]:
    """Return the values of a namedtuple or dataclass by field."""
    if isinstance(record, tuple):
        return dict(zip(record._fields, record, strict=True))  # type: ignore[attr-defined]
    return {field.name: getattr(record, field.name) for field in fields(record)}


def bits_of(array: Any) -> bytes:
    """Return the elements' bytes in C order, little-endian."""
    return np.asarray(array).astype(array.dtype.newbyteorder("<")).tobytes()


# --- Batches ------------------------------------------------------------------------------------------------------


def _laid_out(array: NDArray[Any], layout: str) -> NDArray[Any]:
    match layout:
        case "fortran":
            return np.asfortranarray(array)
        case "big-endian":
            return array.astype(array.dtype.newbyteorder(">"))
        case "transposed":
            return array.T
        case "reversed":
            return array[..., ::-1] if array.ndim else array
        case "strided":
            return np.repeat(array, 2, axis=0)[::2] if array.ndim else array
        case "broadcast":
            return np.broadcast_to(array, (2, *array.shape))
        case "tensor":
            return array.view(Tensor)
        case _:
            return array


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    """Return a strategy for small arrays of every dtype, with any bits and memory layout."""
    dtype = numpy_dtype(draw(st.sampled_from(dtypes.NAMES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.frombuffer(np.random.default_rng(draw(st.integers(0, 2**32))).bytes(size), np.uint8)
    array = (raw & 1 if dtype == np.bool_ else raw).view(dtype).reshape(shape)
    layouts = ["c", "fortran", "big-endian", "transposed", "reversed", "strided", "broadcast", "tensor"]
    return _laid_out(array, draw(st.sampled_from(layouts)))


scalars = arrays().filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0])
ranges = st.builds(range, *[st.integers(-(2**80), 2**80)] * 2, st.integers(1, 2**80) | st.integers(-(2**80), -1))
numbers = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.integers(-(2**300), 2**300) | st.floats()
plain = (
    st.none()
    | ranges
    | numbers
    | st.complex_numbers(allow_subnormal=True)
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
# equal only to themselves, so that a recreated set equals the original
_elements = st.integers(-(2**300), 2**300) | st.text(max_size=8) | st.binary(max_size=8)
_key = st.none() | numbers | st.text(max_size=8) | st.binary(max_size=8)
keys = _key | st.tuples(_key, _key) | st.builds(Point, _key, _key) | st.frozensets(_elements, max_size=2)


def containers(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for each kind of container of such items."""
    return (
        st.lists(items, max_size=4)
        | st.lists(items, max_size=4).map(tuple)
        | st.dictionaries(keys, items, max_size=4)
        | st.dictionaries(keys, items, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, items, max_size=4).map(lambda pairs: defaultdict(None, pairs))
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
        | st.sets(_elements | st.tuples(_elements), max_size=4)
        | st.frozensets(_elements, max_size=4)
        | st.lists(items, max_size=4).map(deque)
        | st.lists(items, max_size=4).map(lambda several: deque(several, 4))
        | st.builds(Box, items, items)
        | st.builds(Frozen.of, items, items)
        | st.builds(Point, items, items)
        | st.builds(Columns, items, items)
        | st.just(Nothing())
    )


trees: st.SearchStrategy[Any] = st.recursive(plain | arrays() | scalars, containers, max_leaves=10)
"""Strategy for batches."""
plain_trees: st.SearchStrategy[Any] = st.recursive(plain, containers, max_leaves=10)
"""Strategy for batches without arrays."""
