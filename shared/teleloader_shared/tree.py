"""A batch is a tree: containers and plain values, with arrays at its leaves.

`flatten` takes a batch apart into a description made of msgpack's own types and the list of its arrays, in the order
in which they stand in the tree; `unflatten` is its inverse. The description of each kind of node is in
docs/protocol.md ("The tree").
"""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from reprlib import repr as short
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from teleloader_shared import dtypes
from teleloader_shared.errors import EncodeError, ProtocolError

MAX_DEPTH: Final = 128
"""How deep containers may be nested, on both sides."""
MAX_DIMENSIONS: Final = 64
"""How many dimensions an array may have: NumPy's limit."""
MAX_DIGITS: Final = 4300
"""How many decimal digits a whole number may have: what Python reads by default."""


class Tensor(np.ndarray[Any, np.dtype[Any]]):
    """A NumPy array that arrives as a torch tensor where the client has torch.

    `teleloader_server.default_collate` makes its columns so, because torch's own default_collate makes tensors; a
    plain array that a user's collate function returns stays an array, as it does with torch.
    """


class Leaf(Protocol):
    """An array that may not exist yet: its type and shape are known, and it can be written where it is wanted."""

    @property
    def dtype_name(self) -> str:
        """One of `dtypes.NAMES`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""

    @property
    def kind(self) -> str:
        """``tensor``, ``ndarray``, or ``scalar`` for a NumPy scalar."""

    def write(self, out: NDArray[Any]) -> None:
        """Write the elements to `out`, an array of `shape` and of the type that holds the bits of `dtype_name`."""


class ArrayLeaf(NamedTuple):
    """A leaf that is an array already; `array` holds the bits (uint16 for bfloat16)."""

    dtype_name: str
    kind: str
    array: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        return self.array.shape

    def write(self, out: NDArray[Any]) -> None:
        """Copy the array, whatever its strides and byte order."""
        out[...] = self.array


def flatten(batch: object) -> tuple[Any, list[Leaf]]:
    """The description of `batch` and its leaves.

    Raises:
        EncodeError: When something in the batch cannot travel; the message has its path.
    """
    leaves: list[Leaf] = []
    return _describe(batch, "batch", leaves, 0), leaves


def unflatten(node: object, make_leaf: Callable[[str, tuple[int, ...], str], Any]) -> Any:
    """The batch that `node` describes; `make_leaf(dtype name, shape, kind)` is called for its arrays in order.

    Raises:
        ProtocolError: When `node` is no description of a batch.
    """
    return _build(node, make_leaf, 0)


# -- from a batch to its description


def _describe(value: Any, path: str, leaves: list[Leaf], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise EncodeError(f"{path[:80]}... is nested more than {MAX_DEPTH} deep, or holds itself")
    exact = type(value)
    if value is None or exact in (bool, float, str, bytes):
        return value
    if exact is np.str_ or exact is np.bytes_:
        return value.item()
    if exact is int:
        return value if -(2**63) <= value < 2**64 else {"int": _digits(value, path)}
    if exact is list:
        return [_describe(item, f"{path}[{i}]", leaves, depth + 1) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        items = [_describe(item, f"{path}[{i}]", leaves, depth + 1) for i, item in enumerate(value)]
        names = getattr(value, "_fields", None)
        return {"tuple": items} if names is None else {"namedtuple": [exact.__name__, list(names), items]}
    if exact is dict or exact is OrderedDict:
        return {exact.__name__.lower(): _describe_items(value, path, leaves, depth)}
    return _describe_leaf(value, path, leaves)


def _digits(value: int, path: str) -> str:
    try:
        digits = str(value)
    except ValueError:  # Python's own limit, which may be set lower than ours
        digits = ""
    if not 0 < len(digits.removeprefix("-")) <= MAX_DIGITS:
        raise EncodeError(f"{path} is a whole number of more than {MAX_DIGITS:,} digits, which cannot travel")
    return digits


def _describe_items(value: dict[Any, Any], path: str, leaves: list[Leaf], depth: int) -> list[list[Any]]:
    pairs = []
    for key, item in value.items():
        if not isinstance(key, str | bytes | int | float | tuple | None):
            raise EncodeError(f"a key of {path} is a {_type_name(key)}, and only str, bytes, numbers and tuples travel")
        pairs.append(
            [
                _describe(key, f"a key of {path}", leaves, depth + 1),
                _describe(item, f"{path}[{key!r}]", leaves, depth + 1),
            ]
        )
    return pairs


def _describe_leaf(value: Any, path: str, leaves: list[Leaf]) -> Any:
    if isinstance(value, complex) and not isinstance(value, np.generic):
        return {"complex": [value.real, value.imag]}
    leaf = _leaf(value, path)
    leaves.append(leaf)
    return {"array": [leaf.dtype_name, list(leaf.shape), leaf.kind]}


def _leaf(value: Any, path: str) -> Leaf:
    if isinstance(value, np.ndarray):
        return _array_leaf(value, "tensor" if isinstance(value, Tensor) else "ndarray", path)
    if isinstance(value, np.generic):
        return _array_leaf(np.asarray(value), "scalar", path)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor_leaf(torch, value, path)
    if hasattr(value, "write") and hasattr(value, "dtype_name"):
        leaf: Leaf = value
        if leaf.dtype_name not in dtypes.NAMES:
            raise EncodeError(_no_dtype(path, "an array", leaf.dtype_name))
        return leaf
    raise EncodeError(
        f"{path} is a {_type_name(value)}, which cannot travel: a batch may hold arrays, tensors, numbers, str, bytes, "
        "None, lists, tuples, namedtuples and dicts. Convert it in the dataset or the collate function"
    )


def _array_leaf(array: NDArray[Any], kind: str, path: str) -> ArrayLeaf:
    name = dtypes.name_of(array.dtype)
    if name not in dtypes.NAMES:
        raise EncodeError(_no_dtype(path, "an array", array.dtype))
    if isinstance(array, np.ma.MaskedArray):
        raise EncodeError(f"{path} is a masked array, whose mask cannot travel: send data and mask as two arrays")
    return ArrayLeaf(name, kind, dtypes.bits_of(array))


def _tensor_leaf(torch: Any, tensor: Any, path: str) -> ArrayLeaf:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise EncodeError(
            f"{path} is a tensor on {tensor.device} with layout {tensor.layout}; only dense tensors in main memory "
            "travel. Leave the copy to the device to the client: pin_memory=True makes it fast"
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in dtypes.NUMPY:
        return ArrayLeaf(name, "tensor", tensor.numpy())
    if name in dtypes.EXTENDED:
        bits = torch.int16 if tensor.element_size() == 2 else torch.uint8
        return ArrayLeaf(name, "tensor", tensor.view(bits).numpy().view(dtypes.EXTENDED[name]))
    raise EncodeError(_no_dtype(path, "a tensor", name))


def _no_dtype(path: str, what: str, dtype: object) -> str:
    return f"{path} is {what} of dtype {dtype}, which cannot travel; {', '.join(dtypes.NAMES)} can"


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


# -- from a description to the batch


def _build(node: Any, make_leaf: Callable[[str, tuple[int, ...], str], Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ProtocolError(f"the tree of a frame is nested more than {MAX_DEPTH} deep")
    exact = type(node)
    if exact is dict:
        if len(node) != 1:
            raise ProtocolError(f"a node of a frame's tree must have one entry, has {len(node)}")
        ((kind, content),) = node.items()
        if kind == "array":
            return _build_leaf(content, make_leaf)
        return _build_tagged(kind, content, lambda child: _build(child, make_leaf, depth + 1))
    if exact is list:
        return [_build(child, make_leaf, depth + 1) for child in node]
    if node is None or exact in (str, bytes, int, float, bool):
        return node
    raise ProtocolError(f"a node of a frame's tree cannot be read: {short(node)}")


def _build_leaf(content: Any, make_leaf: Callable[[str, tuple[int, ...], str], Any]) -> Any:
    match content:
        case [str(name), list(shape), ("tensor" | "ndarray" | "scalar") as kind] if _is_shape(shape):
            return make_leaf(name, tuple(shape), kind)
    raise ProtocolError(f"an array node must be [dtype, shape, kind], was {short(content)}")


def _is_shape(sizes: list[Any]) -> bool:
    # the number of sizes is bounded before they are multiplied
    return len(sizes) <= MAX_DIMENSIONS and all(type(size) is int and size >= 0 for size in sizes)


def _build_tagged(kind: str, content: Any, build: Callable[[Any], Any]) -> Any:
    match kind, content:
        case "tuple", list(items):
            return tuple(build(item) for item in items)
        case (("dict" | "ordereddict"), list(pairs)):
            return (dict if kind == "dict" else OrderedDict)(_build_pair(pair, build) for pair in pairs)
        case "namedtuple", [str(name), list(fields), list(items)] if len(fields) == len(items) and all(
            type(field) is str for field in fields
        ):
            return _namedtuple_type(name, tuple(fields))(*(build(item) for item in items))
        case "complex", [float(real), float(imaginary)]:
            return complex(real, imaginary)
        case "int", str(digits) if (
            len(digits.removeprefix("-")) <= MAX_DIGITS and digits.isascii() and digits.removeprefix("-").isdecimal()
        ):
            return int(digits)
    raise ProtocolError(f"a node {kind!r:.80} of a frame's tree cannot be read: {short(content)}")


def _build_pair(pair: Any, build: Callable[[Any], Any]) -> tuple[Any, Any]:
    match pair:
        case [key, value]:
            built = build(key)
            try:
                hash(built)
            except TypeError:
                raise ProtocolError(f"a key in a frame's tree cannot be hashed: {short(built)}") from None
            return built, build(value)
    raise ProtocolError(f"an entry of a dict in a frame's tree must be [key, value], was {short(pair)}")


@lru_cache(maxsize=256)
def _namedtuple_type(name: str, fields: Sequence[str]) -> Callable[..., Any]:
    """A namedtuple type of that name; the trainer's own class is not looked for, as nothing is imported here."""
    try:
        # rename=True made fields such as _0 in the first place; here it may change nothing
        made = namedtuple(name, fields, rename=True)  # type: ignore[misc]
    except (TypeError, ValueError, SyntaxError) as error:
        raise ProtocolError(f"{name!r:.80} with fields {short(fields)} cannot be a namedtuple: {error}") from None
    if made._fields != fields:
        raise ProtocolError(f"{name!r:.80} with fields {short(fields)} cannot be a namedtuple")
    return made
