"""Selection of the array library for batches (torch, NumPy or JAX), and mapping over arrays in batches."""

from __future__ import annotations

import copy
import importlib.util
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args

from teleloader_shared.errors import TeleloaderError
from teleloader_shared.records import instance

Output = Literal["torch", "numpy", "jax"]


def choose_output(output: Output | None) -> Output:
    """Validate a loader's `output` argument; for None, choose torch if it is installed, otherwise NumPy.

    Raises:
        ValueError: If `output` is not the name of a supported library.
        TeleloaderError: If the library is not installed.
    """
    installed = importlib.util.find_spec("torch") is not None
    if output is None:
        return "torch" if installed else "numpy"
    if output not in get_args(Output):
        raise ValueError(f"invalid output={output!r}: expected 'torch', 'numpy', 'jax' or None")
    if output == "jax" and importlib.util.find_spec("jax") is None:
        raise TeleloaderError("output='jax' requires JAX, which is not installed: pip install jax")
    if output == "torch" and not installed:
        raise TeleloaderError("output='torch' requires torch, which is not installed: pip install 'teleloader[torch]'")
    return output


def map_leaves(batch: Any, kind: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """Apply `function` to all arrays (or other leaves) of type `kind` in a batch; return the resulting batch.

    Rebuilds every container that a frame can encode. Dict keys and elements of sets are not visited, since they cannot
    be arrays.
    """
    if isinstance(batch, kind):
        return function(batch)
    parts = _parts(batch)
    return batch if parts is None else _rebuilt(batch, [map_leaves(part, kind, function) for part in parts])


def has_leaves(batch: Any, kind: type | tuple[type, ...]) -> bool:
    """Return True if a batch contains an array (or other leaf) of type `kind`."""
    return isinstance(batch, kind) or any(has_leaves(part, kind) for part in _parts(batch) or ())


def _parts(batch: Any) -> list[Any] | None:
    """Return the elements of a container (values of a mapping, fields of a dataclass); None for leaves and sets."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, list | tuple | deque):
        return list(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in fields(batch)]
    return None


def _rebuilt(batch: Any, parts: list[Any]) -> Any:
    """Return a copy of a container with `parts` in place of its elements."""
    if isinstance(batch, Mapping):
        other: Any = copy.copy(batch)
        items = dict(zip(batch, parts, strict=True))
        other.update(items) if type(batch).__name__ != "Counter" else dict.update(other, items)
        return other
    if isinstance(batch, list):
        return parts
    if isinstance(batch, tuple):
        return tuple.__new__(type(batch), parts)
    if isinstance(batch, deque):
        return deque(parts, batch.maxlen)
    return instance(type(batch), [field.name for field in fields(batch)], parts)
