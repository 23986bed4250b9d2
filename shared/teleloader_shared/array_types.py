"""Conversions of arrays and tensors that a frame cannot hold: other element types, and layouts that are not dense."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from teleloader_shared.plain_values import (
    ANY,
    TypeEntry,
    check_lost,
    exact,
    kinds_of,
    listed,
    loaded,
    received_bytes,
    received_tensor,
    sizes,
)
from teleloader_shared.text import short

# -- NumPy: dtypes that are not element types of frames


_DTYPE: Final = re.compile(r"[<>|=]?(b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[SUV]\d{1,9}|[mM]8(\[\w{1,32}\])?)")


def is_describable(dtype: np.dtype[Any]) -> bool:
    """Return True if `ARRAY` converts arrays of this dtype: strings, bytes, dates, time differences and records."""
    if dtype.hasobject or dtype.kind not in "USMmV" or _has_records(dtype):
        return False
    try:
        return bool(_dtype(_description(dtype)) == dtype)
    except (TypeError, ValueError):  # fields that overlap, or are not in the order of their offsets
        return False


def _has_records(dtype: np.dtype[Any]) -> bool:
    """Return True if elements are instances of np.record, which a description does not contain."""
    fields = (dtype.fields or {}).values()
    return dtype.type is np.record or any(_has_records(field[0].base) for field in fields)


def _description(dtype: np.dtype[Any]) -> Any:
    """Return the dtype as in the header of an .npy file."""
    return dtype.str if dtype.names is None else dtype.descr


def _dtype(description: Any) -> np.dtype[Any]:
    """Return the dtype of a description, of which np.dtype() would accept much more than arrays can have."""
    _check_description(description)
    dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(description)
    if dtype.hasobject or dtype.kind not in "USMmV":
        raise ValueError(f"invalid dtype {dtype!s:.80}")
    return dtype


def _check_description(description: Any) -> None:
    if type(description) is str:
        if not _DTYPE.fullmatch(description):
            raise ValueError(f"invalid dtype {short(description)}")
        return
    for field in exact(description, list):
        if type(field) is not tuple or len(field) not in (2, 3):
            raise TypeError("expected (name, dtype) or (name, dtype, shape) as a field of a dtype")
        name = field[0]
        if type(name) is not str and not (type(name) is tuple and len(name) == 2 and all(type(n) is str for n in name)):
            raise TypeError(f"expected a name of a field, got {kinds_of(name)}")
        if len(field) == 3:
            sizes(list(exact(field[2], tuple)))
        _check_description(field[1])


def _array_to_plain(array: NDArray[Any]) -> list[Any]:
    plain = np.asarray(array, order="C")
    bits = np.ndarray((*plain.shape, plain.itemsize), np.uint8, plain.tobytes())
    return [_description(plain.dtype), isinstance(array, np.generic), bits]


def _array_from_plain(plain: Any) -> Any:
    description, is_scalar, bits = listed(plain, (str, list), bool, ANY)
    dtype, bits = _dtype(description), received_bytes(bits)
    if not bits.ndim or bits.shape[-1] != dtype.itemsize or (is_scalar and bits.ndim != 1):
        raise ValueError(f"bytes of shape {bits.shape} do not match the dtype {dtype!s:.80}")
    array: NDArray[Any] = np.ndarray(bits.shape[:-1], dtype, np.ascontiguousarray(bits))
    return array[()] if is_scalar else array


ARRAY: Final = TypeEntry("numpy.ndarray", _array_to_plain, _array_from_plain)
"""Entry for arrays whose dtype is not an element type of frames."""


# -- torch: layouts that are not dense


def _sparse_to_plain(tensor: Any) -> list[Any]:
    check_lost(vars(tensor))
    layout = str(tensor.layout).removeprefix("torch.")
    tensor = tensor.detach()
    if layout == "sparse_coo":
        parts = [tensor.is_coalesced(), tensor._indices(), tensor._values()]
    elif layout in ("sparse_csr", "sparse_bsr"):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif layout in ("sparse_csc", "sparse_bsc"):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        raise TypeError(f"layout {layout} is not supported: call to_dense()")
    return [layout, list(tensor.shape), *parts]


def _sparse_from_plain(plain: Any) -> Any:
    torch = loaded("torch")
    if type(plain) is list and plain and type(plain[0]) is str and plain[0] == "sparse_coo":
        _, shape, is_coalesced, indices, values = listed(plain, str, list, bool, ANY, ANY)
        return torch.sparse_coo_tensor(
            received_tensor(indices),
            received_tensor(values),
            sizes(shape),
            is_coalesced=is_coalesced,
            check_invariants=True,
        )
    layout, shape, *parts = listed(plain, str, list, ANY, ANY, ANY)
    if layout not in ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"):
        raise ValueError(f"invalid layout {short(layout)}")
    return torch.sparse_compressed_tensor(
        *map(received_tensor, parts), sizes(shape), layout=getattr(torch, layout), check_invariants=True
    )


def _nested_to_plain(tensor: Any) -> list[Any]:
    check_lost(name for name in vars(tensor) if not name.startswith("_"))
    tensor = tensor.detach()
    if tensor.layout is loaded("torch").strided:
        return ["strided", list(tensor.unbind())]
    return ["jagged", tensor._ragged_idx, tensor.values(), tensor.offsets(), tensor.lengths()]


def _nested_from_plain(plain: Any) -> Any:
    nested = loaded("torch").nested
    if type(plain) is list and len(plain) == 2:
        layout, tensors = listed(plain, str, list)
        if layout == "strided":
            return nested.nested_tensor([received_tensor(tensor) for tensor in tensors])
    else:
        layout, dimension, *received, lengths = listed(plain, str, int, ANY, ANY, ANY)
        values, offsets = map(received_tensor, received)
        lengths = None if lengths is None else received_tensor(lengths)
        if layout == "jagged" and 1 <= dimension <= values.dim():
            _check_jagged(values.shape[dimension - 1], offsets, lengths)
            return nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=dimension)
    raise ValueError(f"invalid layout {short(layout)} or dimension of a nested tensor")


def _check_jagged(size: int, offsets: Any, lengths: Any) -> None:
    """Check that the parts of a nested tensor are within its values, which torch does not check."""
    for integers in (offsets, lengths):
        if integers is not None and (integers.dim() != 1 or integers.dtype not in _index_types()):
            raise TypeError("offsets and lengths of a nested tensor must be 1-D tensors of int32 or int64")
    starts = offsets.tolist()
    if lengths is not None and len(lengths) != len(starts) - 1:
        raise ValueError("invalid number of lengths of a nested tensor")
    ends = starts[1:] if lengths is None else [a + n for a, n in zip(starts, lengths.tolist(), strict=False)]
    if not starts or starts[0] < 0 or not all(a <= b for a, b in pairwise(starts)):
        raise ValueError("invalid offsets of a nested tensor")
    if not all(start <= end <= size for start, end in zip(starts, ends, strict=False)):
        raise ValueError("invalid lengths of a nested tensor")


def _index_types() -> tuple[Any, Any]:
    torch = loaded("torch")
    return torch.int32, torch.int64


SPARSE: Final = TypeEntry("torch.sparse", _sparse_to_plain, _sparse_from_plain)
"""Entry for sparse tensors, whose class is that of dense tensors."""
NESTED: Final = TypeEntry("torch.nested", _nested_to_plain, _nested_from_plain)
"""Entry for nested tensors, whose class may be that of dense tensors."""
