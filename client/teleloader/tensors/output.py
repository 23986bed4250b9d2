"""The array library of a loader's batches: torch, NumPy or JAX."""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args

from teleloader_shared.errors import TeleloaderError
from teleloader_shared.records import instance

Output = Literal["torch", "numpy", "jax"]


def choose_output(output: Output | None) -> Output:
    """Return `output`, or for None torch if it is installed, else NumPy.

    Raises:
        ValueError: If `output` is none of the three.
        TeleloaderError: If the library is not installed.
    """
    installed = importlib.util.find_spec("torch") is not None
    if output is None:
        return "torch" if installed else "numpy"
    if output not in get_args(Output):
        raise ValueError(f"output must be 'torch', 'numpy', 'jax' or None, was {output!r}")
    if output == "jax" and importlib.util.find_spec("jax") is None:
        raise TeleloaderError("output='jax' needs JAX, which is not installed: pip install jax")
    if output == "torch" and not installed:
        raise TeleloaderError("output='torch' needs torch, which is not installed: pip install 'teleloader[torch]'")
    return output


def map_leaves(batch: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return a decoded batch with `function` applied to its leaves of type `kind`; containers are rebuilt.

    Covers every container that a frame can describe. Keys and the elements of sets hold no arrays.
    """
    if isinstance(batch, kind):
        return function(batch)
    if isinstance(batch, Mapping):
        return _refilled(batch, {key: map_leaves(value, kind, function) for key, value in batch.items()})
    if isinstance(batch, list):
        return [map_leaves(value, kind, function) for value in batch]
    if isinstance(batch, tuple):
        return tuple.__new__(type(batch), [map_leaves(value, kind, function) for value in batch])
    if isinstance(batch, deque):
        return deque([map_leaves(value, kind, function) for value in batch], batch.maxlen)
    if is_dataclass(batch):
        names = [field.name for field in fields(batch)]
        values = [map_leaves(getattr(batch, name), kind, function) for name in names]
        return instance(type(batch), names, values)
    return batch


def _refilled(mapping: Any, items: dict[Any, Any]) -> Any:
    """Return a copy of a mapping of any type with other values under the same keys."""
    other = mapping.copy()
    other.update(items) if type(mapping).__name__ != "Counter" else dict.update(other, items)
    return other
