"""torch's default_collate and default_convert, with or without torch on the server.

Same containers, same element types and same error texts as ``torch.utils.data.default_collate`` (2.13). Arrays are not
stacked at once: a `Stack` knows its shape and type, and is written when there is a place for it, which in a worker is
shared memory.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from teleloader_shared import dtypes
from teleloader_shared.tree import Tensor

_StackArrays = Callable[[Sequence[NDArray[Any]]], Any]
_StackTensors = Callable[[Any, Sequence[Any]], Any]

_UNSUPPORTED = "default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found {}"


class Stack:
    """Equally shaped arrays, to be written one above the other: shape (number of arrays, *shape of one)."""

    kind = "tensor"

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        first = arrays[0]
        for entry, array in enumerate(arrays):
            if array.shape != first.shape:
                raise RuntimeError(
                    f"stack expects each tensor to be equal size, but got {list(first.shape)} at entry 0 "
                    f"and {list(array.shape)} at entry {entry}"
                )
        self._arrays = arrays
        self._dtype = first.dtype
        if any(array.dtype != first.dtype for array in arrays):
            self._dtype = _promoted(array.dtype for array in arrays)
        self.shape = (len(arrays), *first.shape)

    @property
    def dtype_name(self) -> str:
        """Name of the element type."""
        return dtypes.name_of(self._dtype)

    def write(self, out: NDArray[Any]) -> None:
        """Stack into `out`."""
        same = [array if array.dtype == self._dtype else array.astype(self._dtype) for array in self._arrays]
        np.stack([dtypes.bits_of(array) for array in same], out=out)

    def materialize(self) -> Tensor:
        """The stack as an array of its own."""
        return np.stack(self._arrays, dtype=self._dtype, casting="unsafe").view(Tensor)


class TensorStack:
    """Equally shaped torch tensors, to be written one above the other."""

    kind = "tensor"

    def __init__(self, torch: Any, tensors: Sequence[Any]) -> None:
        self._torch = torch
        self._tensors = [tensor.detach() for tensor in tensors]
        self.dtype_name = str(tensors[0].dtype).removeprefix("torch.")
        self.shape = (len(tensors), *tensors[0].shape)

    def write(self, out: NDArray[Any]) -> None:
        """Stack into `out`."""
        target = self._torch.from_numpy(out)
        if self.dtype_name in dtypes.EXTENDED:
            target = target.view(getattr(self._torch, self.dtype_name))
        self._torch.stack(self._tensors, out=target)


def default_collate(samples: Sequence[Any]) -> Any:
    """A batch of `samples`, as ``torch.utils.data.default_collate`` makes it, for use in collate functions.

    Arrays come back as `Tensor`, NumPy arrays that arrive at a client as torch tensors; torch tensors come back as
    torch tensors. Numbers become int64, float64 or bool, strings stay lists, containers keep their type (a tuple
    becomes a list of columns).

    Raises:
        RuntimeError: When arrays or lists differ in size.
        TypeError: When a sample holds something else.
    """
    return _collate(samples, lambda arrays: Stack(arrays).materialize(), _plain_stack)


def lazy_collate(samples: Sequence[Any]) -> Any:
    """The same, with `Stack` in the place of each array."""
    return _collate(samples, Stack, _stack_tensors)


def default_convert(sample: Any) -> Any:
    """A single sample (``batch_size=None``) as ``torch.utils.data.default_convert`` makes it.

    NumPy arrays and scalars become tensors, tuples lists; everything else stays.
    """
    if isinstance(sample, np.ndarray | np.generic) and not isinstance(sample, np.str_ | np.bytes_):
        array = np.asarray(sample)
        return array if array.dtype.kind in "SUO" else array.view(Tensor)
    if isinstance(sample, Mapping):
        return _like_mapping(sample, {key: default_convert(sample[key]) for key in sample})
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return type(sample)(*(default_convert(item) for item in sample))
    if isinstance(sample, tuple):
        return [default_convert(item) for item in sample]
    if isinstance(sample, Sequence) and not isinstance(sample, str | bytes):
        return _like_sequence(sample, [default_convert(item) for item in sample])
    return sample


def _collate(samples: Sequence[Any], stack: _StackArrays, stack_tensors: _StackTensors) -> Any:
    first = samples[0]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(first, torch.Tensor):
        return stack_tensors(torch, samples)
    if isinstance(first, np.ndarray):
        return stack([_numeric(sample) for sample in samples])
    if isinstance(first, np.generic) and not isinstance(first, np.str_ | np.bytes_):
        return _numbers(samples)
    if isinstance(first, float):
        return _floats(samples)
    if isinstance(first, int):
        return _numbers(samples)
    if isinstance(first, str | bytes):
        return samples
    if isinstance(first, Mapping | Sequence):
        return _collate_container(samples, lambda column: _collate(column, stack, stack_tensors))
    raise TypeError(_UNSUPPORTED.format(type(first)))


def _collate_container(samples: Sequence[Any], collate: Callable[[Sequence[Any]], Any]) -> Any:
    first = samples[0]
    if isinstance(first, Mapping):
        return _like_mapping(first, {key: collate([sample[key] for sample in samples]) for key in first})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(collate(column) for column in zip(*samples, strict=False)))
    if any(len(sample) != len(first) for sample in samples):
        raise RuntimeError("each element in list of batch should be of equal size")
    columns = [collate(column) for column in zip(*samples, strict=True)]
    return columns if isinstance(first, tuple) else _like_sequence(first, columns)


def _plain_stack(torch: Any, tensors: Sequence[Any]) -> Any:
    stacked = _stack_tensors(torch, tensors)
    return torch.stack(list(tensors)) if isinstance(stacked, TensorStack) else stacked


def _stack_tensors(torch: Any, tensors: Sequence[Any]) -> Any:
    first = tensors[0]
    if first.layout is not torch.strided and "sparse" in str(first.layout):
        raise RuntimeError(
            "Batches of sparse tensors are not currently supported by the default collate_fn; "
            "please provide a custom collate_fn to handle them appropriately."
        )
    plain = all(
        isinstance(tensor, torch.Tensor)
        and tensor.shape == first.shape
        and tensor.dtype == first.dtype
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        for tensor in tensors
    )
    # torch itself knows best how the other cases are promoted or refused
    return TensorStack(torch, tensors) if plain else torch.stack(list(tensors))


def _numeric(array: Any) -> NDArray[Any]:
    found = np.asarray(array)
    if found.dtype.kind in "SUOMmV" and dtypes.name_of(found.dtype) not in dtypes.EXTENDED:
        raise TypeError(_UNSUPPORTED.format(found.dtype))
    return found


def _floats(column: Sequence[Any]) -> Tensor:
    """A column of numbers of which the first is a Python float: float64, whatever the others are."""
    for number in column:
        if isinstance(number, str | bytes | complex | None):
            raise TypeError(f"must be real number, not {type(number).__name__}")
    return np.array(column, np.float64).view(Tensor)


def _numbers(column: Sequence[Any]) -> Tensor:
    """A column of numbers, Python's and NumPy's, in the element type that torch finds for them."""
    kinds = set(map(type, column))
    if kinds == {bool}:
        return np.array(column, np.bool_).view(Tensor)
    if kinds == {int}:
        try:
            return np.array(column, np.int64).view(Tensor)
        except OverflowError:
            raise ValueError("Overflow when unpacking long long") from None
    dtype = _promoted({_type_of_number(number): None for number in column})
    if dtype == np.int64 and any(type(number) is int and not -(2**63) <= number < 2**63 for number in column):
        raise ValueError("Overflow when unpacking long long")
    with np.errstate(over="ignore"):
        return np.array(column).astype(dtype).view(Tensor)


def _type_of_number(number: Any) -> np.dtype[Any]:
    if isinstance(number, np.generic | np.ndarray):
        if number.dtype.kind in "biufc" and np.ndim(number) == 0:
            return number.dtype
    elif isinstance(number, bool):
        return np.dtype(np.bool_)
    elif isinstance(number, int):
        return np.dtype(np.int64)
    elif isinstance(number, float):
        return np.dtype(np.float32)
    elif isinstance(number, complex):
        return np.dtype(np.complex64)
    if isinstance(number, np.generic) and number.dtype.kind in "mMV":
        raise TypeError(_UNSUPPORTED.format(type(number)))
    if number is None:
        raise RuntimeError("Could not infer dtype of NoneType")
    raise TypeError(f"new(): invalid data type {type(number).__name__!r}")


def _promoted(types: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """The rule of torch: the widest type of the highest of bool, integers, floats, complex numbers."""
    found = list(types)
    order = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}
    if any(dtype.kind not in order for dtype in found):
        return np.result_type(*found)
    highest = max(order[dtype.kind] for dtype in found)
    kept = [dtype for dtype in found if order[dtype.kind] == highest]
    if highest == 3:  # float64 makes complex64 wider, an integer does not
        kept += [dtype for dtype in found if dtype.kind == "f"]
    return np.result_type(*kept)


def _like_mapping(model: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(model) is dict:
        return items
    try:
        if isinstance(model, MutableMapping):
            clone = copy.copy(model)
            clone.update(items)
            return clone
        return type(model)(items)  # type: ignore[call-arg]
    except TypeError:  # a mapping of a type that cannot be made or changed so
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
    except TypeError:  # a sequence of a type that cannot be made or changed so, such as range
        return items
