"""Summary of a batch's structure: path, type, shape and value range of each array and plain value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, Final

from teleloader_shared.dtypes import EXTENDED
from teleloader_shared.errors import EncodeError
from teleloader_shared.registry import Unrestored
from teleloader_shared.tree import ArrayLeaf, flatten

MAX_PARTS: Final = 200
"""Maximum number of parts in a summary: a batch of ragged lists may have very many."""
_SHOWN: Final = 90


@dataclass(frozen=True, slots=True)
class Part:
    """Summary of one array or plain value in a batch."""

    path: str
    """Python expression for the position in the batch, e.g. ``batch['image']``; within the plain value of a registered
    type that was not restored, the position in the plain value."""
    type: str
    """Element type of an array; name of the class for a plain value, and for a container with a class of its own."""
    shape: tuple[int, ...] | None
    """Shape of an array; None for a plain value."""
    value: str
    """Range of an array's elements, or the beginning of a plain value's repr."""


def summarize(batch: object) -> list[Part]:
    """Summarize the arrays and plain values in `batch`, up to the first `MAX_PARTS`."""
    parts: list[Part] = []
    for part in _parts(batch, "batch"):
        if len(parts) == MAX_PARTS:
            break
        parts.append(part)
    return parts


def _parts(value: Any, path: str) -> Iterator[Part]:
    leaf = value if isinstance(value, ArrayLeaf) else _leaf_of(value)
    if leaf is not None:
        yield Part(path, leaf.dtype_name, leaf.shape, _span(leaf))
        return
    if isinstance(value, Unrestored):
        yield Part(path, value.name, None, "")
        # the ready-made conversions of mappings, such as BatchEncoding and TensorDict, have the items first
        has_items = isinstance(value.plain, list) and value.plain and isinstance(value.plain[0], dict)
        yield from _parts(value.plain[0] if has_items else value.plain, path)
        return
    if isinstance(value, Mapping) and not isinstance(value, dict):
        yield Part(path, type(value).__name__, None, "")
    inner = list(_inner(value))
    if not inner:
        text = repr(value)
        yield Part(path, type(value).__name__, None, text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...")
    for step, item in inner:
        yield from _parts(item, path + step)


def _inner(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path step, item) for each item of a container; nothing for plain values and lists of plain values."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", item) for name, item in zip(value._fields, value, strict=True))
    elif isinstance(value, list | tuple):
        if not all(isinstance(item, str | bytes | int | float | complex | None) for item in value):
            yield from ((f"[{i}]", item) for i, item in enumerate(value))
    elif is_dataclass(value):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in dataclass_fields(value))


def _leaf_of(value: Any) -> ArrayLeaf | None:
    """Return `value` as an array leaf, or None if it is not an array."""
    if isinstance(value, str | bytes | int | float | Mapping | list | tuple | Unrestored):
        return None  # never an array: do not walk a whole container to find out
    try:
        _, leaves = flatten(value)
    except EncodeError:
        return None
    return leaves[0] if len(leaves) == 1 and isinstance(leaves[0], ArrayLeaf) and not is_dataclass(value) else None


def _span(leaf: ArrayLeaf) -> str:
    array = leaf.array
    if not array.size or array.dtype.kind not in "biuf" or leaf.dtype_name in EXTENDED:
        return ""
    return f"{array.min():.6g} to {array.max():.6g}"
