"""Registry of types that travel as plain values, on both sides.

An encoder converts an instance of a registered type to a plain value, and names the type. A decoder looks the name up
in its own registry: the sender of a frame selects one of the conversions that this process has registered, never a
module or a class.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from teleloader_shared.array_types import ARRAY, NESTED, SPARSE
from teleloader_shared.errors import DecodeError
from teleloader_shared.library_types import ENTRIES
from teleloader_shared.plain_values import TypeEntry
from teleloader_shared.text import short

MAX_NAME: Final = 256
"""Maximum length of a registered name, in characters."""
MAX_REASON: Final = 500
"""Maximum length of the reason in the error for a value that cannot be restored, in characters: peers can choose it."""
_MAX_FOUND: Final = 1024


@dataclass(frozen=True, slots=True)
class Unrestored:
    """Value of a registered type as its plain value, for programs that only show or measure batches."""

    name: str
    """Name of the type in frames."""
    plain: Any


_keeps_unrestored = False
"""True inside of `keeping_unrestored`."""

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
    thread that receives batches. A registration replaces an earlier one of the same type, and the ready-made conversion
    of a library's type. Instances of subclasses are converted only if the replaced ready-made conversion converts them,
    as for ``PIL.Image.Image``.

    A server can send any value for any registered name. `from_plain` must therefore check the value before it calls the
    value's methods, if servers are not trusted.

    Args:
        type: The class; not a built-in type, np.ndarray, a NumPy scalar or torch.Tensor.
        name: Name in frames, the same on both sides: 1 to 256 characters. Names of ready-made conversions, such as
            ``decimal.Decimal``, are reserved for their classes.
        to_plain: Converts an instance to a value that a batch can hold: numbers, strings, bytes, arrays, tensors,
            containers, and instances of other registered types.
        from_plain: Converts such a value to an instance. torch tensors arrive as arrays of the loader's ``output=``.

    Raises:
        TypeError: If `type` is not a class, or a conversion is not callable.
        ValueError: If `type` is a built-in type, or `name` is empty, too long, or registered for another class.

    Example:
        >>> register(Sample, "my_package.Sample", Sample.to_dict, Sample.from_dict)  # doctest: +SKIP
    """
    if not isinstance(type, _TYPE):
        raise TypeError(f"cannot register {type!r:.80}: expected a class. Pass the class, not an instance or its name")
    if _is_built_in(type):
        raise ValueError(
            f"cannot register {type.__qualname__}: batches can contain its instances without registration. Remove the "
            "call, or register a subclass"
        )
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise ValueError(
            f"cannot register {type.__qualname__}: name must have 1 to {MAX_NAME} characters, got {name!r:.80}. Pass a "
            f"name such as {_path(type)!r:.{MAX_NAME}}"
        )
    for argument, function in (("to_plain", to_plain), ("from_plain", from_plain)):
        if not callable(function):
            raise TypeError(
                f"cannot register {type.__qualname__}: {argument} must be callable, got {function!r:.80}. Pass a "
                "function"
            )
    owner = _owner(name)
    if owner is not None and _path(type) not in owner:
        raise ValueError(
            f"cannot register {_path(type)} as {name!r}: the name is registered for {' or '.join(owner)}. Pass another "
            f"name, such as {_path(type)!r}"
        )
    _by_type[type] = _by_name[name] = TypeEntry(name, to_plain, from_plain)
    _found.clear()


_TYPE: Final = type
_BUILT_IN: Final = (
    type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, deque, range, slice,
    OrderedDict, defaultdict, Counter, np.ndarray,
)  # fmt: skip


def _is_built_in(kind: type) -> bool:
    is_scalar = issubclass(kind, np.generic) and kind is not np.record
    return kind in _BUILT_IN or is_scalar or _path(kind) in ("torch.Tensor", "torch.Size")


def _owner(name: str) -> list[str] | None:
    """Return the paths of the classes that may be registered with a name; None if the name is not taken."""
    ready_made = [path for path, entry in ENTRIES.items() if entry.name == name]
    if ready_made or name in (ARRAY.name, SPARSE.name, NESTED.name):
        return ready_made or ["arrays and tensors"]
    return next(([_path(kind)] for kind, entry in _by_type.items() if entry.name == name), None)


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
    for base in kind.__mro__:
        entry = ENTRIES.get(_path(base))
        if base is kind or (entry is not None and entry.subclasses):
            found = _by_type.get(base, entry)
            if found is not None:
                return found
    return None


@contextmanager
def keeping_unrestored() -> Iterator[None]:
    """Let `restore` return an `Unrestored` for a value that it cannot restore, in all threads of this process.

    Command-line tools cannot import the library of a type that they do not know.
    """
    global _keeps_unrestored  # not a context variable: a loader's receiver threads decode batches
    before, _keeps_unrestored = _keeps_unrestored, True
    try:
        yield
    finally:
        _keeps_unrestored = before


def restore(name: str, plain: object, *, hashed: bool = False) -> Any:
    """Convert a plain value to an instance of the type with a registered name.

    Args:
        name: The registered name.
        plain: The plain value.
        hashed: Whether the instance becomes a dict key or an element of a set.

    Returns:
        The instance; inside of `keeping_unrestored`, possibly an `Unrestored`.

    Raises:
        DecodeError: If no type of that name is registered, or the value cannot be converted.
    """
    entry = _by_name.get(name)
    if entry is None:
        if _keeps_unrestored and not hashed:
            return Unrestored(name, plain)
        raise DecodeError(
            f"cannot restore a value of type {short(name)}: this process has not registered the type. Call "
            f"teleloader.register(TYPE, {short(name)}, to_plain, from_plain) before iterating, as on the server"
        )
    try:
        value = entry.from_plain(plain)
        if hashed:
            entry.check_key(type(value))
    except Exception as error:
        if _keeps_unrestored and not hashed:
            return Unrestored(name, plain)
        raise DecodeError(f"cannot restore a value of type {short(name)}: {_reason(error)}") from error
    return value


def _reason(error: Exception) -> str:
    """Return the type and the beginning of the message of an exception, which a user's class may fail to format."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - the batch has an error in any case
        message = "(no message)"
    return f"{type(error).__name__}: {message}"[:MAX_REASON]
