"""Registry of types that travel as plain values, on both sides.

An encoder converts an instance of a registered type to a plain value, and names the type. A decoder looks the name up
in its own registry: the sender of a frame selects one of the conversions that this process has registered, never a
module or a class.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from teleloader_shared.errors import DecodeError
from teleloader_shared.library_types import ARRAY, ENTRIES, NESTED, SPARSE, TypeEntry
from teleloader_shared.text import short

MAX_NAME: Final = 256
"""Maximum length of a registered name, in characters."""
_MAX_FOUND: Final = 1024

_by_type: Final[dict[type, TypeEntry]] = {}
_by_name: Final[dict[str, TypeEntry]] = {entry.name: entry for entry in (ARRAY, SPARSE, NESTED, *ENTRIES.values())}
_found: Final[dict[type, TypeEntry | None]] = {}
"""Results of `find`; cleared when it is full, because it keeps classes alive."""


def register(
    type: Any,  # noqa: A002 - the name that users write
    name: str,
    to_plain: Callable[[Any], Any],
    from_plain: Callable[[Any], Any],
) -> None:
    """Register a type, so that batches can contain its instances.

    Call this function in the server and in the client, for example in a module that the dataset and the training script
    import. The server converts each instance with `to_plain`, and the client calls `from_plain` with the result, in a
    thread that receives batches. Instances of subclasses are not converted. A registration replaces an earlier one of
    the same type.

    Args:
        type: The class; not a built-in type or np.ndarray.
        name: Name in frames, the same on both sides: 1 to 256 characters.
        to_plain: Converts an instance to a value that a batch can hold: numbers, strings, bytes, arrays, tensors,
            containers, and instances of other registered types.
        from_plain: Converts such a value to an instance. torch tensors arrive as arrays of the loader's ``output=``.

    Raises:
        TypeError: If `type` is not a class, or a conversion is not callable.
        ValueError: If `type` is a built-in type, or `name` is empty, too long or registered for another class.

    Example:
        >>> register(Sample, "my_package.Sample", Sample.to_dict, Sample.from_dict)  # doctest: +SKIP
    """
    if not isinstance(type, _TYPE):
        raise TypeError(f"cannot register {type!r:.80}: expected a class")
    if type in _BUILT_IN:
        raise ValueError(f"cannot register {type.__qualname__}: batches can contain its instances without registration")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise ValueError(
            f"cannot register {type.__qualname__}: name must have 1 to {MAX_NAME} characters, got {name!r}"
        )
    for argument, function in (("to_plain", to_plain), ("from_plain", from_plain)):
        if not callable(function):
            raise TypeError(f"cannot register {type.__qualname__}: {argument} must be callable, got {function!r:.80}")
    other = next((kind for kind, entry in _by_type.items() if entry.name == name and _path(kind) != _path(type)), None)
    if other is not None:
        raise ValueError(f"cannot register {_path(type)} as {name!r}: the name is registered for {_path(other)}")
    _by_type[type] = _by_name[name] = TypeEntry(name, to_plain, from_plain)
    _found.clear()


_TYPE: Final = type
_BUILT_IN: Final = (
    type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, deque, range, slice,
    OrderedDict, defaultdict, Counter, np.ndarray,
)  # fmt: skip


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def find(kind: type) -> TypeEntry | None:
    """Return the entry that converts instances of a class, or None."""
    try:
        return _found[kind]
    except KeyError:
        if len(_found) >= _MAX_FOUND:
            _found.clear()
        found = _found[kind] = _search(kind)
        return found


def _search(kind: type) -> TypeEntry | None:
    if kind in _by_type:
        return _by_type[kind]
    for base in kind.__mro__:
        entry = ENTRIES.get(_path(base))
        if entry is not None and (base is kind or entry.subclasses):
            return entry
    return None


def restore(name: str, plain: object) -> Any:
    """Convert a plain value to an instance of the type with a registered name.

    Raises:
        DecodeError: If no type of that name is registered, or the value cannot be converted.
    """
    entry = _by_name.get(name)
    if entry is None:
        raise DecodeError(
            f"cannot restore a value of type {short(name)}: this process has not registered the type. Call "
            f"teleloader.register(TYPE, {short(name)}, to_plain, from_plain) before iterating, as on the server"
        )
    try:
        return entry.from_plain(plain)
    except Exception as error:
        raise DecodeError(f"cannot restore a value of type {short(name)}: {type(error).__name__}: {error}") from error
