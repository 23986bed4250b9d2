"""Implementation of torch's default_collate and default_convert that works without torch.

Containers, dtypes and error messages are the same as in ``torch.utils.data.default_collate`` (2.13). Arrays are stacked
lazily: a `Stack` knows its shape and dtype, and writes its arrays once a buffer is available (in a worker, shared
memory). No Python code runs per sample of a common type, because a batch may have many small samples: columns are
examined with `map`, `set` and `zip`, and Python loops run per field or per type.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import suppress
from functools import reduce
from operator import attrgetter, itemgetter, methodcaller
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from teleloader_shared import dtypes
from teleloader_shared.tree import Tensor

UNSUPPORTED: Final = "default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found {}"
"""Message of torch for a value of another type."""
_UNSUPPORTED_TENSORS: Final = (
    "Batches of {} tensors are not currently supported by the default collate_fn; "
    "please provide a custom collate_fn to handle them appropriately."
)

_TORCH_NAMES: Final = {
    "bool": "Bool", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long",
    "uint8": "Byte", "uint16": "UInt16", "uint32": "UInt32", "uint64": "UInt64",
    "complex64": "ComplexFloat", "complex128": "ComplexDouble",
}  # fmt: skip
"""Names of dtypes in torch's error messages about type promotion."""

_DTYPES: Final[dict[type, np.dtype[Any]]] = {
    **{np.dtype(name).type: np.dtype(name) for name in dtypes.NUMPY},
    bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64),
}  # fmt: skip
"""Dtypes of columns whose numbers all have the same type."""

_JOINED_BYTES: Final = 2048
"""Maximum size of an array that is joined as bytes: `np.concatenate` takes 60 ns per array, and a second copy less."""

_KEEP_WHAT_THEY_HOLD: Final = (dict, OrderedDict, defaultdict, list, tuple, deque)
"""Containers that only store their items, and may therefore contain `Stack` objects; other types may compute with their
items, and get arrays.
"""


class Stack:
    """Lazy stack of arrays with equal shapes: an array of shape (number of arrays, *shape of each array)."""

    kind = "tensor"

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        types = dict.fromkeys(map(attrgetter("dtype"), arrays))
        for dtype in types:
            _check_is_numeric(dtype)
        shape = arrays[0].shape
        if len(set(map(attrgetter("shape"), arrays))) > 1:
            entry, other = next((k, array.shape) for k, array in enumerate(arrays) if array.shape != shape)
            raise RuntimeError(
                f"stack expects each tensor to be equal size, but got {list(shape)} at entry 0 "
                f"and {list(other)} at entry {entry}"
            )
        dtype = _promoted(types)
        if len(types) > 1:
            with np.errstate(over="ignore"):  # torch converts large numbers to infinity without a warning
                arrays = list(map(methodcaller("astype", dtype, copy=False), arrays))
        self._arrays = arrays
        self._dtype = dtype
        self.shape = (len(arrays), *shape)
        self.dtype_name = dtypes.name_of(dtype)

    def write(self, out: NDArray[Any], first: int | None = None) -> None:
        """Stack the arrays into the buffer `out`, from the array with the number `first` on (`Leaf.write`)."""
        arrays: Sequence[Any] = self._arrays if first is None else self._arrays[first : first + len(out)]
        if self.dtype_name in dtypes.EXTENDED:
            arrays = [dtypes.bits_of(array) for array in arrays]
        if arrays[0].nbytes <= _JOINED_BYTES:
            with suppress(TypeError):  # an array is not contiguous
                out[...] = np.frombuffer(b"".join(arrays), arrays[0].dtype).reshape(out.shape)
                return
        if out.ndim == 1:
            out[...] = arrays
        else:  # not np.stack, which creates a view of each array first
            np.concatenate(arrays, out=out.reshape(out.shape[0] * out.shape[1], *out.shape[2:]))

    def materialize(self) -> Tensor:
        """Stack the arrays into a new array."""
        stacked = np.empty(self.shape, self._dtype.newbyteorder("="))
        self.write(dtypes.bits_of(stacked))
        return stacked.view(Tensor)


class TensorStack:
    """Lazy stack of torch tensors with equal shape, dtype and layout."""

    kind = "tensor"

    def __init__(self, torch: Any, tensors: Sequence[Any]) -> None:
        self._torch = torch
        self._tensors = tensors
        self.dtype_name = str(tensors[0].dtype).removeprefix("torch.")
        self.shape = (len(tensors), *tensors[0].shape)

    def write(self, out: NDArray[Any], first: int | None = None) -> None:
        """Stack the tensors into the buffer `out`, from the tensor with the number `first` on (`Leaf.write`)."""
        tensors = self._tensors if first is None else self._tensors[first : first + len(out)]
        target = self._torch.from_numpy(out)
        if self.dtype_name in dtypes.EXTENDED:
            target = target.view(getattr(self._torch, self.dtype_name))
        with self._torch.no_grad():  # tensors that require gradients cannot be written to `out` otherwise
            self._torch.stack(tensors, out=target)


def default_collate(samples: Sequence[Any]) -> Any:
    """Collate samples into a batch as ``torch.utils.data.default_collate`` does, without requiring torch.

    NumPy arrays are stacked to a `Tensor`, a NumPy array that clients receive as a torch tensor. Torch tensors are
    stacked to a torch tensor. Python numbers become a `Tensor` of dtype int64, float64, bool or complex64. Strings are
    not collated. The items of mappings, sequences and namedtuples are collated separately, and the result has the same
    type, except that tuples become lists.

    Args:
        samples: Samples with the same structure; not empty.

    Raises:
        RuntimeError: If arrays or lists differ in size.
        TypeError: If a sample contains a value of another type.
    """
    return _collate(samples, _NOW)


def lazy_collate(samples: Sequence[Any]) -> Any:
    """Collate samples like `default_collate`, with a `Stack` or `TensorStack` in place of each stacked array.

    Arrays in containers other than `_KEEP_WHAT_THEY_HOLD` are stacked immediately.
    """
    return _collate(samples, _LATER)


def path_to_uncollatable(sample: Any, path: str = "sample") -> str | None:
    """Find the first value that default_collate rejects.

    Args:
        sample: A sample, or a part of it.
        path: Path of this part.

    Returns:
        Path of the value, such as ``sample['meta'][2]``, or None if default_collate accepts all values.
    """
    if isinstance(sample, str | bytes | int | float):
        return None
    if isinstance(sample, Mapping):
        found = (path_to_uncollatable(sample[key], f"{path}[{key!r}]") for key in sample)
    elif isinstance(sample, Sequence):
        found = (path_to_uncollatable(item, f"{path}[{i}]") for i, item in enumerate(sample))
    else:
        try:
            default_collate([sample])
        except TypeError:
            return path
        return None
    return next((place for place in found if place is not None), None)


def default_convert(sample: Any) -> Any:
    """Convert a single sample (``batch_size=None``) as ``torch.utils.data.default_convert`` does.

    NumPy arrays and scalars become tensors, tuples become lists, and other values are unchanged.
    """
    # torch does not convert subclasses of NumPy's types either, such as masked arrays
    if isinstance(sample, np.ndarray | np.generic) and type(sample).__module__ == "numpy":
        return np.asarray(sample).view(Tensor) if dtypes.name_of(sample.dtype) in dtypes.NAMES else sample
    if isinstance(sample, Mapping):
        return _like_mapping(sample, {key: default_convert(sample[key]) for key in sample})
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return type(sample)(*(default_convert(item) for item in sample))
    if isinstance(sample, tuple):
        return [default_convert(item) for item in sample]
    if isinstance(sample, Sequence) and not isinstance(sample, str | bytes):
        return _like_sequence(sample, [default_convert(item) for item in sample])
    return sample


class _Stacking(NamedTuple):
    """Functions that stack the values of one field of all samples: NumPy arrays, or torch tensors."""

    arrays: Callable[[Sequence[NDArray[Any]]], Any]
    tensors: Callable[[Any, Sequence[Any]], Any]


def _collate(samples: Sequence[Any], stacking: _Stacking) -> Any:
    first = samples[0]
    torch = sys.modules.get("torch")
    registered = _registered(type(first), first)
    if registered is not None:
        return registered(samples)
    if torch is not None and isinstance(first, torch.Tensor):
        return stacking.tensors(torch, samples)
    if isinstance(first, str | bytes):
        return samples
    if isinstance(first, np.ndarray | np.generic | float | int):
        return _collate_numbers(samples, torch, stacking)
    if isinstance(first, Mapping | Sequence):
        return _collate_container(samples, stacking)
    raise TypeError(UNSUPPORTED.format(type(first)))


def _registered(kind: type, value: Any) -> Callable[[Sequence[Any]], Any] | None:
    """Return the function that user code registered in torch's ``default_collate_fn_map`` for a type, or None."""
    torchs = sys.modules.get("torch.utils.data._utils.collate")
    if torchs is None:
        return None
    functions = torchs.default_collate_fn_map
    found = functions.get(kind) or next((functions[key] for key in functions if isinstance(value, key)), None)
    if found is None or getattr(found, "__module__", None) == torchs.__name__:
        return None
    return lambda samples: found(samples, collate_fn_map=functions)


def _collate_numbers(samples: Sequence[Any], torch: Any, stacking: _Stacking) -> Any:
    first = samples[0]
    kinds = set(map(type, samples))
    dtype = _DTYPES.get(type(first)) if len(kinds) == 1 else None
    if dtype is not None:
        return _array(samples, dtype)
    if torch is not None and any(issubclass(kind, torch.Tensor) for kind in kinds):
        return torch.utils.data.default_collate(list(samples))
    if isinstance(first, np.ndarray):
        if kinds != {np.ndarray}:
            are_numpys = all(issubclass(kind, np.ndarray | np.generic) for kind in kinds)
            samples = list(map(np.asarray if are_numpys else _as_array, samples))
        return stacking.arrays(samples)
    return _floats(samples) if isinstance(first, float) and not isinstance(first, np.generic) else _numbers(samples)


def _collate_container(samples: Sequence[Any], stacking: _Stacking) -> Any:
    first = samples[0]
    kind = type(first)
    is_namedtuple = isinstance(first, tuple) and hasattr(first, "_fields")
    # a subclass of a namedtuple may have a constructor of its own
    if kind not in _KEEP_WHAT_THEY_HOLD and not (is_namedtuple and kind.__bases__ == (tuple,)):
        stacking = _NOW
    if isinstance(first, Mapping):
        return _like_mapping(first, {key: _collate(list(map(itemgetter(key), samples)), stacking) for key in first})
    if is_namedtuple:
        return kind(*(_collate(column, stacking) for column in zip(*samples, strict=False)))
    if not all(map(len(first).__eq__, map(len, samples))):
        raise RuntimeError("each element in list of batch should be of equal size")
    columns = [_collate(column, stacking) for column in zip(*samples, strict=True)]
    return columns if isinstance(first, tuple) else _like_sequence(first, columns)


def _stack_now(torch: Any, tensors: Sequence[Any]) -> Any:
    first = tensors[0]
    if first.is_nested:
        raise RuntimeError(_UNSUPPORTED_TENSORS.format("nested"))
    if "sparse" in str(first.layout):
        raise RuntimeError(_UNSUPPORTED_TENSORS.format("sparse"))
    return torch.stack(list(tensors))


def _stack_later(torch: Any, tensors: Sequence[Any]) -> Any:
    if all(issubclass(kind, torch.Tensor) for kind in set(map(type, tensors))):
        plain = {(tensors[0].dtype, torch.strided, True, False)}
        # shapes last, because nested tensors have none
        if set(map(_STORAGE, tensors)) == plain and len(set(map(attrgetter("shape"), tensors))) == 1:
            return TensorStack(torch, tensors)
    return _stack_now(torch, tensors)  # torch itself promotes or rejects all other cases


_STORAGE: Final = attrgetter("dtype", "layout", "is_cpu", "is_nested")

_NOW: Final = _Stacking(lambda arrays: Stack(arrays).materialize(), _stack_now)
_LATER: Final = _Stacking(Stack, _stack_later)


def _as_array(value: Any) -> NDArray[Any]:
    return np.asarray(value) if isinstance(value, np.ndarray | np.generic) else _array_of(value)


def _check_is_numeric(dtype: np.dtype[Any]) -> None:
    if dtype.kind in "SUOMmV" and dtypes.name_of(dtype) not in dtypes.EXTENDED:
        raise TypeError(UNSUPPORTED.format(dtype))


def _array_of(value: Any) -> NDArray[Any]:
    """Convert Python numbers, or a list of them, to an array of the dtype that torch infers."""
    numbers = np.array(value, dtype=object)
    dtype = _promoted(map(_type_of_number, numbers.flat)) if numbers.size else np.dtype(np.float32)
    with np.errstate(over="ignore"):
        return _array(numbers, dtype)


def _floats(column: Sequence[Any]) -> Tensor:
    """Convert numbers, the first of which is a Python float, to a float64 array, as torch does."""
    for number in _representatives(column):
        if isinstance(number, np.ndarray) and number.ndim:
            raise TypeError("only 0-dimensional arrays can be converted to Python scalars")
        if isinstance(number, str | bytes) or (not hasattr(number, "__float__") and not hasattr(number, "__index__")):
            raise TypeError(f"must be real number, not {type(number).__name__}")
        if isinstance(number, np.ndarray | np.generic):
            float(number)  # rejects what np.array would convert: dates, None, and the real part of complex arrays
    return np.array(column, np.float64).view(Tensor)


def _numbers(column: Sequence[Any]) -> Tensor:
    """Convert Python and NumPy numbers to an array of the dtype that torch infers."""
    dtype = _promoted(list(map(_type_of_number, _representatives(column))))
    if dtype == np.int64:
        return _array(column, dtype)
    with np.errstate(over="ignore"):
        return np.array(column).astype(dtype).view(Tensor)


def _array(column: Sequence[Any] | NDArray[Any], dtype: np.dtype[Any]) -> Tensor:
    try:
        return np.array(column, dtype).view(Tensor)
    except OverflowError:
        raise ValueError(
            "Overflow when unpacking long long"
        ) from None  # torch's message, like all messages in this module


def _representatives(column: Sequence[Any]) -> Collection[Any]:
    """Return one value of each type, in order of first occurrence, or all values if NumPy arrays are among them.

    The dtype of a number depends on its type alone, while that of an array does not.
    """
    found = dict(zip(map(type, column), column, strict=True))
    return column if any(issubclass(kind, np.ndarray) for kind in found) else found.values()


def _type_of_number(number: Any) -> np.dtype[Any]:
    if isinstance(number, np.generic | np.ndarray):
        if np.ndim(number):
            raise TypeError("only 0-dimensional arrays can be converted to Python scalars")
        if number.dtype.kind not in "biufc":
            raise TypeError(UNSUPPORTED.format(type(number)))
        return number.dtype
    for kind, dtype in ((bool, np.bool_), (int, np.int64), (float, np.float32), (complex, np.complex64)):
        if isinstance(number, kind):
            return np.dtype(dtype)
    if isinstance(number, str | bytes | Sequence):
        raise TypeError(f"new(): invalid data type {type(number).__name__!r}")
    raise RuntimeError(f"Could not infer dtype of {type(number).__name__}")


def _promoted(types: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    return reduce(_promote, types)


def _promote(one: np.dtype[Any], other: np.dtype[Any]) -> np.dtype[Any]:
    """Promote two dtypes by torch's rule: the wider dtype of the higher category (bool, integer, float, complex)."""
    order = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}
    if one.kind not in order or other.kind not in order:
        return np.result_type(one, other)
    both = {one.name: one, other.name: other}
    if len(both) == 2 and {"uint16", "uint32", "uint64"} & both.keys() and "f" not in (one.kind, other.kind):
        # NumPy would promote uint64 and int64 to float64, and lose digits
        names = " and ".join(_TORCH_NAMES.get(name, name) for name in both)
        raise RuntimeError(f"Promotion for uint16, uint32, uint64 types is not supported, attempted to promote {names}")
    lower, higher = sorted((one, other), key=lambda dtype: order[dtype.kind])
    if order[lower.kind] == order[higher.kind] or (lower.kind, higher.kind) == ("f", "c"):
        return np.result_type(lower, higher)
    return higher


def _like_mapping(model: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(model) is dict:
        return items
    try:
        if isinstance(model, MutableMapping):
            clone = copy.copy(model)
            clone.update(items)
            return clone
        return type(model)(items)  # type: ignore[call-arg]
    except TypeError:  # a mapping that cannot be constructed or modified in this way
        return items


def _like_sequence(model: Sequence[Any], items: list[Any]) -> Any:
    if type(model) is list:
        return items
    try:
        if isinstance(model, MutableSequence):
            clone = copy.copy(model)
            for i, item in enumerate(items):
                clone[i] = item
            return clone
        return type(model)(items)  # type: ignore[call-arg]
    except TypeError:  # a sequence that cannot be constructed or modified in this way, such as range
        return items
