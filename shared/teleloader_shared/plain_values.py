"""Checks of plain values, which a peer chooses, and the description of a registered type.

Plain values may contain instances of any imported dataclass. A function that restores a value therefore compares the
exact types of its parts first: isinstance(), iteration, formatting and most functions of libraries would run methods of
these instances. It also rejects values that would make a library read or write invalid memory, or allocate much more
memory than the frame has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from teleloader_shared.records import is_dunder
from teleloader_shared.text import short

MAX_DIGITS: Final = 4300
"""Maximum number of digits of an integer or Decimal: Python's default limit for parsing."""
ANY: Final = object
"""In the types for `listed`: a value that is only stored, or checked separately."""


class UnsupportedValue(TypeError):
    """Error for a value that a ready-made conversion would change; states which part would be lost."""


@dataclass(frozen=True, slots=True)
class TypeEntry:
    """Conversion of a type to plain values and back."""

    name: str
    """Name of the type in frames."""
    to_plain: Callable[[Any], Any]
    """Convert an instance to a value that a batch can hold; `UnsupportedValue` becomes advice to register the type."""
    from_plain: Callable[[Any], Any]
    """Convert the plain value to an instance; exceptions become a `DecodeError`."""
    subclasses: bool = False
    """True to convert instances of subclasses, too."""
    check_key: Callable[[type], None] = lambda kind: None
    """Raise `TypeError` if instances of a class must not be keys, because their hash would run code of the class."""


def loaded(module: str) -> Any:
    """Return an imported module; nothing is imported for a received value."""
    found = sys.modules.get(module)
    if found is None:
        raise LookupError(f"module {module} is not imported in this process: import it before iterating")
    return found


def listed(plain: Any, *kinds: Any) -> Any:
    """Return the items of a list, which have exactly these types; a tuple of types permits each of them."""
    if type(plain) is not list or len(plain) != len(kinds):
        raise TypeError(f"expected a list of {len(kinds)} values, got {kinds_of(plain)}")
    for item, kind in zip(plain, kinds, strict=True):
        if kind is not ANY and type(item) not in (kind if type(kind) is tuple else (kind,)):
            raise TypeError(f"unexpected types: got {kinds_of(plain)}")
    return plain


def exact(plain: Any, kind: type[Any], longest: int | None = None) -> Any:
    """Return a value that has exactly this type, and at most the length `longest`."""
    if type(plain) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {kinds_of(plain)}")
    if longest is not None and len(plain) > longest:
        raise ValueError(f"expected {kind.__name__} of at most {longest:,} characters or items, got {len(plain):,}")
    return plain


def kinds_of(plain: Any) -> str:
    """Return the type of a plain value, and those of its first items, without calling the items."""
    if type(plain) is not list:
        return type(plain).__name__
    return f"[{', '.join(type(item).__name__ for item in plain[:8])}{', ...' * (len(plain) > 8)}]"


def sizes(plain: Any) -> Any:
    """Return a list of integers that are not negative."""
    if type(plain) is not list or any(type(size) is not int or size < 0 for size in plain):
        raise TypeError("expected a list of sizes")
    return plain


def received_array(plain: Any) -> NDArray[Any]:
    """Return a received array, without the class in which some outputs mark tensors."""
    if not issubclass(type(plain), np.ndarray):
        raise TypeError(f"expected an array, got {kinds_of(plain)}")
    return np.ndarray.view(plain, np.ndarray)


def received_bytes(plain: Any) -> NDArray[np.uint8]:
    """Return a received array of bytes."""
    array = received_array(plain)
    if array.dtype != np.uint8:
        raise TypeError(f"expected an array of uint8, got {array.dtype}")
    return array


def received_tensor(plain: Any) -> Any:
    """Return a received tensor; with other outputs than torch, it arrived as an array."""
    torch = loaded("torch")
    if type(plain) is not torch.Tensor:
        return torch.as_tensor(received_array(plain))
    if plain.layout is not torch.strided or plain.is_nested:
        raise TypeError("expected a dense tensor")
    return plain


def new_attributes(kind: type, plain: Any) -> dict[str, Any]:
    """Return the attributes to set on an instance; an attribute of the class, such as a method, cannot be replaced."""
    for name in exact(plain, dict):
        if type(name) is not str or is_dunder(name) or getattr_static(kind, name, _ABSENT) is not _ABSENT:
            shown = short(name) if type(name) is str else kinds_of(name)
            raise UnsupportedValue(f"attribute {shown} would replace an attribute of the class")
    attributes: dict[str, Any] = plain
    return attributes


_ABSENT: Final = object()


def check_lost(names: Iterable[str]) -> None:
    """Raise UnsupportedValue if an instance has additional attributes."""
    lost = [name for name in names if not is_dunder(name)]
    if lost:
        raise UnsupportedValue(f"attribute {lost[0]!r} would be lost")
