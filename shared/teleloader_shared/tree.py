"""Conversion of batches (trees of containers, plain values and arrays) to msgpack types and back.

`flatten` converts a batch into a tree of msgpack's own types and the list of its arrays, in tree order; `unflatten` is
the inverse. docs/protocol.md ("Tree encoding") specifies the encoding of each node.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sized
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from functools import cached_property, lru_cache
from inspect import getattr_static
from itertools import repeat
from types import MappingProxyType, MemberDescriptorType
from typing import Any, Final, NamedTuple, NoReturn, Protocol, SupportsIndex

import msgpack
import numpy as np
from numpy.typing import NDArray

from teleloader_shared import dtypes, registry
from teleloader_shared.array_types import ARRAY, NESTED, SPARSE, is_describable
from teleloader_shared.errors import DecodeError, EncodeError, ProtocolError
from teleloader_shared.plain_values import MAX_DIGITS, TypeEntry, UnsupportedValue
from teleloader_shared.records import RecordTypes, instance, is_dunder, is_name, last_name
from teleloader_shared.text import short

MAX_DEPTH: Final = 128
"""Maximum nesting depth of containers, checked by encoder and decoder."""
MAX_DIMENSIONS: Final = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
"""Maximum number of dimensions of a NumPy array."""
MAX_NODES: Final = 2**22
"""Maximum number of nodes in a tree: decoding takes up to 2 us per node."""
MAX_SAME_HASH: Final = 256
"""Maximum number of dict keys or set elements with equal hashes: inserting each compares it with all the others."""


class Tensor(np.ndarray[Any, np.dtype[Any]]):
    """NumPy array that clients with torch receive as a torch tensor.

    `teleloader_server.default_collate` returns this type, because torch's default_collate returns tensors. A plain
    array from a user's collate function stays an array, as it does with torch.
    """


class Leaf(Protocol):
    """Interface of an encodable array with known type and shape, which writes its elements into a buffer.

    `FrameWriter` reads `dtype_name` and `shape` to compute the layout of the frame, and calls `write` afterwards. An
    implementation may compute the elements as late as in `write`.
    """

    @property
    def dtype_name(self) -> str:
        """Element type, one of `dtypes.NAMES`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""

    @property
    def kind(self) -> str:
        """Kind of the array: ``tensor``, ``ndarray``, or ``scalar`` for a NumPy scalar."""

    def write(self, out: NDArray[Any], first: int | None = None) -> None:
        """Write the elements to `out`, an array of shape `shape` and NumPy type `dtypes.storage(dtype_name)`.

        Args:
            out: Array to write to.
            first: Row of this leaf that becomes the first row of `out`, which may then have fewer rows than `shape`;
                None to write all rows.
        """


class ArrayLeaf(NamedTuple):
    """Leaf for an existing array; `array` holds the raw bits (uint16 for bfloat16)."""

    dtype_name: str
    kind: str
    array: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.array.shape

    def write(self, out: NDArray[Any], first: int | None = None) -> None:
        """Copy the array to `out`; all strides and byte orders are supported."""
        out[...] = self.array if first is None else self.array[first : first + len(out)]


MakeLeaf = Callable[[str, tuple[int, ...], str], Any]
"""Callback of the decoder for each array: (dtype name, shape, kind) -> array or tensor for the user."""


def flatten(batch: object, name: str = "batch") -> tuple[Any, list[Leaf]]:
    """Convert a batch to a tree of msgpack types and a list of arrays.

    Args:
        batch: Any value that a batch can hold.
        name: Name of the batch in error messages.

    Raises:
        EncodeError: If the batch holds a value that cannot be encoded; the message contains the value's path.
    """
    describer = _Describer()
    return describer.describe(batch, name, 0), describer.leaves


def layout(batch: object, leaves: list[Leaf], depth: int = 0) -> Hashable | None:
    """Return a key of the tree of a batch without creating the tree: batches with equal keys have equal trees.

    Args:
        batch: Any value that a batch can hold.
        leaves: List to which the arrays of the batch are appended, in the order of `flatten`.
        depth: Nesting level of `batch`.

    Returns:
        None if the tree does not depend on structure, shapes and dtypes alone, is large, or cannot be encoded.
    """
    exact = type(batch)
    if exact is dict or exact is list or exact is tuple:
        container: Any = batch
        if len(container) > _MAX_ITEMS or depth == _MAX_LEVELS:
            return None
        key: list[Hashable] = [exact]
        if exact is dict:
            if not all(type(name) is str for name in container):
                return None
            key += container
            container = container.values()
        for item in container:
            found = layout(item, leaves, depth + 1)
            if found is None:
                return None
            key.append(found)
        return tuple(key)
    try:
        leaf = _leaf(batch, "")
    except EncodeError:  # `flatten` raises it with the path of the value
        return None
    if leaf is None or isinstance(leaf, TypeEntry):
        return None
    leaves.append(leaf)
    return leaf.dtype_name, leaf.shape, leaf.kind


def unflatten(node: object, make_leaf: MakeLeaf, *, generate_classes: bool = True) -> Any:
    """Reconstruct a batch from a tree of msgpack types; `make_leaf` is called for each array, in order.

    Args:
        node: The tree.
        make_leaf: Returns the array with the given dtype, shape and kind.
        generate_classes: Whether classes of namedtuples and dataclasses that this process lacks are generated.

    Raises:
        DecodeError: If a value cannot be restored.
        ProtocolError: If `node` is not a valid tree.
    """
    return _Builder(make_leaf, RecordTypes(generate=generate_classes), _Budget()).build(node, 0)


class _Budget:
    """Counter of the nodes that a tree may still have, `MAX_NODES` at first."""

    def __init__(self) -> None:
        self._left = MAX_NODES

    def spend(self, count: int) -> bool:
        """Count additional nodes; return False if the tree exceeds the node limit."""
        self._left -= count
        return self._left >= 0


# -- encoding

_MAX_ITEMS: Final = 16
_MAX_LEVELS: Final = 3
"""`layout` returns None for containers with more items or levels, which take longer to compare than to encode."""
_MSGPACK_TYPES: Final = (bool, float, str, bytes)
_DICTS: Final[dict[type, str]] = {
    dict: "dict",
    OrderedDict: "ordereddict",
    defaultdict: "defaultdict",
    Counter: "counter",
}
_KEYS: Final = (str, bytes, int, float, complex, np.generic, type(None))
_BUILTINS: Final[dict[type, Callable[[Any], Any]]] = {
    str: str.__str__, bytes: bytes.__bytes__, int: int.__int__, float: float.__float__, complex: complex.__complex__,
    list: list.copy, dict: dict.copy, tuple: lambda value: tuple.__getitem__(value, slice(None)), set: set,
    frozenset: frozenset, deque: lambda value: deque(value, value.maxlen), UserDict: lambda value: dict(value.data),
    MappingProxyType: dict,
}  # fmt: skip
"""Conversions of instances of subclasses to the types that batches can hold."""


class _Describer:
    """Encoder of one batch; collects its arrays."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self._types = RecordTypes()
        self._budget = _Budget()

    def describe(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise EncodeError(
                f"cannot encode {path[:80]}...: reference cycle, or more than {MAX_DEPTH} nesting levels. Return a "
                "less nested value"
            )
        exact = type(value)
        if value is None or exact in _MSGPACK_TYPES:
            return value
        if exact in (int, complex, range, slice):
            return _describe_numbers(value, path)
        if exact is np.str_ or exact is np.bytes_:
            return value.item()
        if exact is list:
            return self._items(value, path, depth)
        if exact in _DICTS:
            return {_DICTS[exact]: self._pairs(value, path, depth)}
        if exact is set or exact is frozenset:
            return {exact.__name__: self._elements(value, path, depth)}
        if exact is deque:
            return {"deque": [value.maxlen, self._items(value, path, depth)]}
        if exact is tuple or is_nameless_tuple(exact):
            return {"tuple": self._items(value, path, depth)}
        return self._leaf_or_record(value, path, depth)

    def _leaf_or_record(self, value: Any, path: str, depth: int) -> Any:
        leaf = _leaf(value, path)
        if isinstance(leaf, TypeEntry):
            return self._registered(leaf, value, path, depth)
        if leaf is not None:
            self.leaves.append(leaf)
            return {"array": [leaf.dtype_name, list(leaf.shape), leaf.kind]}
        if isinstance(value, registry.Unrestored):
            self._count((value.plain,), path)
            return {"registered": [value.name, self.describe(value.plain, path, depth + 1)]}
        if _is_namedtuple(value):
            return {"namedtuple": self._record(value, value._fields, value, path, depth)}
        base = next((base for base in _BUILTINS if isinstance(value, base)), None)
        if base is not None:
            _check_attributes(value, ("data",) if base is UserDict else (), path)
            return self.describe(_BUILTINS[base](value), path, depth)
        if is_dataclass(value) and not isinstance(value, type):
            names = tuple(field.name for field in dataclass_fields(value))
            return {"dataclass": self._record(value, names, _field_values(value, names, path), path, depth)}
        raise EncodeError(
            f"cannot encode {path}: unsupported type {_type_name(value)}. Convert the value to arrays, numbers, "
            f"strings or containers of these, or register the type in the server and in the client:\n{_lines(value)}"
        )

    def _registered(self, entry: TypeEntry, value: Any, path: str, depth: int) -> Any:
        try:
            plain = entry.to_plain(value)
        except UnsupportedValue as error:
            raise EncodeError(
                f"cannot encode {path} of type {_type_name(value)}: {error}. Convert the value in the collate "
                f"function, or register the type in the server and in the client:\n{_lines(value)}"
            ) from error
        except Exception as error:
            raise EncodeError(f"cannot encode {path} of type {_type_name(value)}: {error}") from error
        self._count((plain,), path)
        return {"registered": [entry.name, self.describe(plain, path, depth + 1)]}

    def _count(self, items: Sized, path: str, nodes: int = 1) -> None:
        """Count the nodes of a container; raise EncodeError if the batch has too many."""
        if not self._budget.spend(nodes * len(items)):
            raise EncodeError(
                f"cannot encode {path[:80]}: more than {MAX_NODES:,} values outside of arrays in total. Convert "
                "numbers to arrays, or use a smaller batch_size"
            )

    def _items(self, items: Collection[Any], path: str, depth: int) -> list[Any]:
        self._count(items, path)
        return [self.describe(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(items)]

    def _elements(self, value: Collection[Any], path: str, depth: int) -> list[Any]:
        """Return the nodes of a set, sorted: the order of iteration differs between processes (PYTHONHASHSEED)."""
        self._count(value, path)
        start = len(self.leaves)
        found = []
        for item in value:
            node = self._key(item, f"an element of {path}", depth)
            leaves = self.leaves[start:]
            del self.leaves[start:]
            # lone surrogates are rejected later, together with those outside of sets
            packed = msgpack.packb(node, unicode_errors="surrogatepass")
            found.append((packed, [_bytes(leaf) for leaf in leaves], node, leaves))
        found.sort(key=operator.itemgetter(0, 1))
        self.leaves.extend(leaf for *_, leaves in found for leaf in leaves)
        return [node for _, _, node, _ in found]

    def _pairs(self, value: dict[Any, Any], path: str, depth: int) -> list[list[Any]]:
        self._count(value, path, 2)
        return [
            [self._key(key, f"a key of {path}", depth), self.describe(item, f"{path}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]

    def _key(self, key: Any, path: str, depth: int) -> Any:
        _check_key(key, path)
        return self.describe(key, path, depth + 1)

    def _record(self, value: Any, names: tuple[str, ...], items: Iterable[Any], path: str, depth: int) -> list[Any]:
        exact = type(value)
        _check_attributes(value, names, path)
        if not all(map(is_name, (last_name(exact.__qualname__), *names))):
            raise EncodeError(
                f"cannot encode {path}: the class name and the field names of {_type_name(value)} must be identifiers"
            )
        if not self._types.has_room_for(exact, names):
            raise EncodeError(
                f"cannot encode {path} of type {_type_name(value)}: more than {RecordTypes.LIMIT}. Return dicts or "
                "tuples instead"
            )
        self._count(names, path)
        nodes = [self.describe(item, f"{path}.{name}", depth + 1) for name, item in zip(names, items, strict=True)]
        return [str(exact.__module__), exact.__qualname__, list(names), nodes]


def _bytes(leaf: Leaf) -> bytes:
    out: NDArray[Any] = np.empty(leaf.shape, dtypes.storage(leaf.dtype_name))
    leaf.write(out)
    return out.tobytes()


def _describe_numbers(value: Any, path: str) -> Any:
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, slice):
        return {"slice": [_describe_bound(part, path) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, range):
        return {"range": [_describe_numbers(number, path) for number in (value.start, value.stop, value.step)]}
    return value if -(2**63) <= value < 2**64 else {"int": _digits(value, path)}


def _describe_bound(value: Any, path: str) -> Any:
    if value is not None and not isinstance(value, SupportsIndex):
        raise EncodeError(f"cannot encode {path}: slice indices must be integers or None, got {_type_name(value)}")
    return None if value is None else _describe_numbers(operator.index(value), path)


def _digits(value: int, path: str) -> str:
    try:
        digits = str(value)
    except ValueError:  # Python's own limit on digits, which may be set lower than MAX_DIGITS
        digits = ""
    if not 0 < len(digits.removeprefix("-")) <= MAX_DIGITS:
        raise EncodeError(f"cannot encode {path}: the integer has more than {MAX_DIGITS:,} digits. Return a string")
    return digits


def is_nameless_tuple(exact: type) -> bool:
    """Return True for torch.Size and the tuples that C functions return, such as torch.return_types.max."""
    torch = sys.modules.get("torch")
    return issubclass(exact, tuple) and (
        hasattr(exact, "n_sequence_fields") or (torch is not None and exact is torch.Size)
    )


def _is_namedtuple(value: Any) -> bool:
    fields = getattr(value, "_fields", None)
    return isinstance(value, tuple) and isinstance(fields, tuple) and len(fields) == len(value)


def _check_key(key: Any, path: str) -> None:
    """Reject keys whose hash could run code of a user's class in the receiver."""
    if type(key) is str:
        return
    entry = registry.find(type(key))
    if entry is not None:
        try:
            entry.check_key(type(key))
        except UnsupportedValue as error:
            raise EncodeError(
                f"cannot encode {path}: {error}. Use other keys, or register the type in the server and in the client:"
                f"\n{_lines(key)}"
            ) from error
    elif isinstance(key, tuple | frozenset):
        for item in key:
            _check_key(item, path)
    elif not isinstance(key, _KEYS):
        raise EncodeError(
            f"cannot encode {path}: unsupported type {_type_name(key)}. Supported types: None, str, bytes, numbers, "
            "tuples and frozensets of these, and registered types"
        )


def _field_values(value: Any, names: tuple[str, ...], path: str) -> list[Any]:
    try:
        return [getattr(value, name) for name in names]
    except AttributeError as error:
        raise EncodeError(f"cannot encode {path}: a field of the {_type_name(value)} is not set: {error}") from None


def _check_attributes(value: Any, names: tuple[str, ...], path: str) -> None:
    """Reject attributes that would be lost silently; cached properties are exempt, since they can be recomputed."""
    for name in _attributes(value, names):
        computed = isinstance(getattr_static(type(value), name, None), cached_property)
        # the typing module sets __orig_class__ on instances of generic classes
        if not computed and not is_dunder(name):
            raise EncodeError(
                f"cannot encode {path}: attribute {name!r} of the {_type_name(value)} would be lost. Declare the "
                "attribute as a field of a dataclass, remove it in the collate function, or register the type in the "
                f"server and in the client:\n{_lines(value)}"
            )


def _attributes(value: Any, names: tuple[str, ...]) -> list[str]:
    """Return the attributes of an instance in its ``__dict__`` and in slots, except those that `names` refers to."""
    found = [name for name in getattr(value, "__dict__", ()) if name not in names]
    kind: type = type(value)
    for slot in _slots(kind):
        if slot.__name__ in names and getattr_static(kind, slot.__name__) is slot:
            continue
        try:
            slot.__get__(value)
        except AttributeError:  # not set
            continue
        found.append(slot.__name__)
    return found


@lru_cache(maxsize=256)
def _slots(kind: type) -> tuple[MemberDescriptorType, ...]:
    """Return the slots of a class and its bases; ``__slots__`` may be an iterator, and subclasses may hide slots."""
    return tuple(
        slot
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for slot in vars(base).values()
        if type(slot) is MemberDescriptorType
    )


def _lines(value: object) -> str:
    """Return the lines that register a type; instead of torch.Tensor, a subclass must be registered."""
    name, full_name = type(value).__qualname__, _type_name(value)
    lines = ""
    if full_name == "torch.Tensor":
        name, full_name = "MyTensor", "my_package.MyTensor"
        lines = "class MyTensor(torch.Tensor): ...\n"
    return (
        f"{lines}from teleloader_shared import register\n"
        f"register({name}, {full_name!r}, to_plain=lambda value: ..., from_plain=lambda plain: {name}(...))"
    )


def _leaf(value: Any, path: str) -> Leaf | TypeEntry | None:
    """Return the leaf of an array, the entry of a registered type, or None for other values."""
    entry = registry.find(type(value))
    if entry is not None:
        return entry
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
    return None


def _array_leaf(array: NDArray[Any], kind: str, path: str) -> ArrayLeaf | TypeEntry:
    if type(array) not in (np.ndarray, Tensor, np.memmap):
        if isinstance(array, np.ma.MaskedArray):
            raise EncodeError(
                f"cannot encode {path}: masked arrays are not supported. Return data and mask as two arrays"
            )
        _check_array_class(array, path)
    name = dtypes.name_of(array.dtype)
    if name not in dtypes.NUMPY and name not in dtypes.EXTENDED:
        if array.dtype.type is np.record:
            _reject_array(array, "np.record", path)
        if is_describable(array.dtype):
            return ARRAY
        raise EncodeError(_no_dtype(path, "an array", array.dtype))
    return ArrayLeaf(name, kind, array if name in dtypes.NUMPY else dtypes.bits_of(array))


def _check_array_class(array: NDArray[Any], path: str) -> None:
    """Reject np.recarray, np.chararray, np.matrix, and attributes; instances of other subclasses become arrays."""
    for base in type(array).__mro__:
        if base.__module__.partition(".")[0] == "numpy" and base.__name__ in ("recarray", "chararray", "matrix"):
            _reject_array(array, f"np.{base.__name__}", path)
    _check_attributes(array, (), path)


def _reject_array(array: NDArray[Any], lost: str, path: str) -> NoReturn:
    raise EncodeError(
        f"cannot encode {path}: the class {lost} would be lost. Return an np.ndarray with the dtype of its fields, or "
        f"register the type in the server and in the client:\n{_lines(array)}"
    )


def _tensor_leaf(torch: Any, tensor: Any, path: str) -> ArrayLeaf | TypeEntry:
    if tensor.device.type != "cpu":
        raise EncodeError(
            f"cannot encode {path}: expected a tensor on the CPU, got device {tensor.device}. Return CPU tensors, and "
            "pass device= to the DataLoader to copy batches to a device"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        return NESTED if tensor.is_nested else SPARSE
    if type(tensor) is not torch.Tensor or tensor.__dict__:
        _check_attributes(tensor, (), path)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in dtypes.NUMPY:
        return ArrayLeaf(name, "tensor", tensor.numpy())
    if name in dtypes.EXTENDED:
        bits = torch.int16 if tensor.element_size() == 2 else torch.uint8
        return ArrayLeaf(name, "tensor", tensor.view(bits).numpy().view(dtypes.EXTENDED[name]))
    raise EncodeError(_no_dtype(path, "a tensor", name))


def _no_dtype(path: str, what: str, dtype: object) -> str:
    return f"cannot encode {path}: unsupported dtype {dtype} of {what}. Supported dtypes: {', '.join(dtypes.NAMES)}"


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


# -- decoding


class _Builder:
    """Decoder of one tree; with `hashed=True`, of keys of a dict or elements of a set."""

    def __init__(self, make_leaf: MakeLeaf, types: RecordTypes, budget: _Budget, *, hashed: bool = False) -> None:
        self._make_leaf = make_leaf
        self._types = types
        self._budget = budget
        self._hashed = hashed

    def build(self, node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ProtocolError(f"invalid frame: the tree has more than {MAX_DEPTH} nesting levels")
        exact = type(node)
        if exact is dict:
            if len(node) != 1:
                raise ProtocolError(f"invalid frame: a tree node must have one entry, got {len(node)}")
            ((kind, content),) = node.items()
            return _build_leaf(content, self._make_leaf) if kind == "array" else self._tagged(kind, content, depth)
        if exact is list:
            return self._nodes(node, depth)
        if node is None or exact in (str, bytes, int, float, bool):
            return node
        raise ProtocolError(f"invalid frame: unknown tree node {short(node)}")

    def _tagged(self, kind: str, content: Any, depth: int) -> Any:
        match kind, content:
            case "tuple", list(nodes):
                return tuple(self._nodes(nodes, depth))
            case (("dict" | "ordereddict" | "defaultdict" | "counter"), list(pairs)):
                self._count(2 * len(pairs))
                items = [self._pair(pair, depth) for pair in pairs]
                _check_hashes([key for key, _ in items])
                return _compared(_DICT_OF[kind], items)
            case (("set" | "frozenset"), list(nodes)):
                self._count(len(nodes))
                keys = [self._key(node, depth) for node in nodes]
                _check_hashes(keys)
                return _compared(set if kind == "set" else frozenset, keys)
            case "deque", [maxlen, list(nodes)] if maxlen is None or _is_size(maxlen, len(nodes)):
                return deque(self._nodes(nodes, depth), maxlen)
            case "namedtuple", [str(module), str(name), list(fields), list(nodes)] if _are_names(name, fields, nodes):
                values = self._nodes(nodes, depth)
                return tuple.__new__(self._types.namedtuple(module, name, tuple(fields), hashed=self._hashed), values)
            case "dataclass", [str(module), str(name), list(fields), list(nodes)] if (
                _are_names(name, fields, nodes) and not self._hashed
            ):
                values = self._nodes(nodes, depth)
                return instance(self._types.dataclass(module, name, tuple(fields)), fields, values)
            case "registered", [str(name), plain]:
                self._count(1)
                # not as part of a key: only the restored value must be hashable
                builder = _Builder(self._make_leaf, self._types, self._budget) if self._hashed else self
                return registry.restore(name, builder.build(plain, depth + 1), hashed=self._hashed)
        return _build_number(kind, content)

    def _nodes(self, nodes: list[Any], depth: int) -> list[Any]:
        self._count(len(nodes))
        return [self.build(node, depth + 1) for node in nodes]

    def _count(self, nodes: int) -> None:
        if not self._budget.spend(nodes):
            raise ProtocolError(f"invalid frame: the tree has more than {MAX_NODES:,} nodes")

    def _pair(self, pair: Any, depth: int) -> tuple[Any, Any]:
        match pair:
            case [key, value]:
                return self._key(key, depth), self.build(value, depth + 1)
        raise ProtocolError(f"invalid frame: a dict entry must be [key, value], got {short(pair)}")

    def _key(self, node: Any, depth: int) -> Any:
        if type(node) is str:
            return node
        # created on demand, not kept: a reference cycle would keep the frame in memory until the next collection
        keys = self if self._hashed else _Builder(self._make_leaf, self._types, self._budget, hashed=True)
        key = keys.build(node, depth + 1)
        try:
            hash(key)
        except TypeError:
            raise ProtocolError(f"invalid frame: the key {short(node)} is not hashable") from None
        except Exception as error:
            raise DecodeError(f"cannot hash the key {short(node)}: {type(error).__name__}") from error
        return key


def _compared(build: Callable[[list[Any]], Any], items: list[Any]) -> Any:
    """Return a dict or set; keys with equal hashes are compared, which registered types may reject."""
    try:
        return build(items)
    except Exception as error:
        raise DecodeError(f"cannot compare the keys of a dict or set: {type(error).__name__}") from error


def _check_hashes(keys: list[Any]) -> None:
    """Reject keys with too many equal hashes, which would take quadratic time (hash flooding)."""
    if len(keys) > MAX_SAME_HASH and max(Counter(map(hash, keys)).values()) > MAX_SAME_HASH:
        raise ProtocolError(f"invalid frame: a dict or set has more than {MAX_SAME_HASH} keys with the same hash")


def is_columnar(node: Any) -> bool:
    """Return True if a valid tree consists of lists, tuples, dicts with string keys, arrays and msgpack values."""
    if type(node) is list:
        return all(map(is_columnar, node))
    if type(node) is not dict:
        return True
    ((kind, content),) = node.items()
    if kind == "dict":
        return all(type(key) is str and is_columnar(value) for key, value in content)
    return kind == "array" or (kind == "tuple" and is_columnar(content))


def unflatten_columns(node: Any, columns: Iterable[Iterable[Any]], count: int) -> list[Any]:
    """Reconstruct `count` batches with the same tree.

    Args:
        node: Valid tree for which `is_columnar` returns True.
        columns: For each array of the tree, in order, the array in each batch.
        count: Number of batches.
    """
    return list(_column(node, iter(columns), count))


def _column(node: Any, columns: Iterator[Iterable[Any]], count: int) -> Iterable[Any]:
    if type(node) is list:
        return map(list, _tuples(node, columns, count))
    if type(node) is not dict:
        return repeat(node, count)
    ((kind, content),) = node.items()
    if kind == "array":
        return next(columns)
    if kind == "tuple":
        return _tuples(content, columns, count)
    keys = [key for key, _ in content]
    return [dict(zip(keys, values, strict=True)) for values in _tuples([value for _, value in content], columns, count)]


def _tuples(nodes: list[Any], columns: Iterator[Iterable[Any]], count: int) -> Iterable[tuple[Any, ...]]:
    # created in order, because each takes its arrays from `columns`
    values = [_column(node, columns, count) for node in nodes]
    return zip(*values, strict=True) if values else repeat((), count)


_DICT_OF: Final[dict[str, Callable[[list[tuple[Any, Any]]], Any]]] = {
    "dict": dict,
    "ordereddict": OrderedDict,
    "defaultdict": lambda pairs: defaultdict(None, pairs),
    "counter": lambda pairs: Counter(dict(pairs)),
}


def _build_leaf(content: Any, make_leaf: MakeLeaf) -> Any:
    # called for each array of each batch; a sequence pattern takes twice as long
    if type(content) is list and len(content) == 3:
        name, shape, kind = content
        if type(name) is str and type(shape) is list and _is_shape(shape) and kind in ("tensor", "ndarray", "scalar"):
            return make_leaf(name, tuple(shape), kind)
    raise ProtocolError(f"invalid frame: an array node must be [dtype, shape, kind], got {short(content)}")


def _is_shape(sizes: list[Any]) -> bool:
    if len(sizes) > MAX_DIMENSIONS:  # checked before the sizes are multiplied
        return False
    for size in sizes:  # noqa: SIM110 - called for each array of each batch; all() of a generator takes twice as long
        if type(size) is not int or size < 0:
            return False
    return True


def _is_size(size: Any, least: int) -> bool:
    return type(size) is int and least <= size < 2**63


def _are_names(qualname: str, fields: list[Any], nodes: list[Any]) -> bool:
    return len(fields) == len(nodes) and all(map(is_name, (last_name(qualname), *fields)))


def _build_number(kind: Any, content: Any) -> Any:
    match kind, content:
        case "complex", [float(real), float(imaginary)]:
            return complex(real, imaginary)
        case "int", str(digits) if (
            len(digits.removeprefix("-")) <= MAX_DIGITS and digits.isascii() and digits.removeprefix("-").isdecimal()
        ):
            return int(digits)
        case "slice", [start, stop, step]:
            return slice(*(None if part is None else _build_whole_number(part) for part in (start, stop, step)))
        case "range", [start, stop, step]:
            return _build_range([_build_whole_number(node) for node in (start, stop, step)])
    raise ProtocolError(f"invalid frame: unknown tree node {short(kind)} with content {short(content)}")


def _build_whole_number(node: Any) -> int:
    match node:
        case {"int": _, **rest} if not rest:
            return int(_build_number("int", node["int"]))
    if type(node) is not int:
        raise ProtocolError(f"invalid frame: expected integers in a range or slice, got {short(node)}")
    return node


def _build_range(numbers: list[int]) -> range:
    if numbers[2] == 0:
        raise ProtocolError("invalid frame: the step of a range must not be 0")
    return range(*numbers)
