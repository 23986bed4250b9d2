"""Classes that frames name: of namedtuples and dataclasses.

A reader that has the class at hand makes an instance of it, and never imports it, calls it, or runs any other code of
it: whoever writes frames must not be able to choose what runs here. So classes are looked at through dicts, and
instances are made without their constructors.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections import namedtuple
from collections.abc import Callable, Iterable
from dataclasses import fields as dataclass_fields
from dataclasses import make_dataclass
from functools import lru_cache
from inspect import getattr_static
from keyword import iskeyword
from types import MemberDescriptorType, ModuleType
from typing import Any, Final

from teleloader_shared.errors import ProtocolError
from teleloader_shared.text import short


def is_dunder(name: str) -> bool:
    """Return True if the name has a meaning for Python."""
    return name.startswith("__") and name.endswith("__")


def is_name(name: object) -> bool:
    """Return True if a class or field may have that name: an identifier without a meaning for Python."""
    return type(name) is str and name.isidentifier() and not iskeyword(name) and not is_dunder(name)


def last_name(qualname: str) -> str:
    """A class's own name."""
    return qualname.rpartition(".")[2]


_class_dict: Final = type.__dict__["__dict__"].__get__
"""A class's own attributes, past whatever its metaclass makes of `__dict__`."""


def _find_class(module: str, qualname: str) -> type | None:
    """The class of that name, if its module is loaded already, in plain steps through dicts."""
    holder = sys.modules.get(module)
    # subclasses of ModuleType may load themselves at a touch
    if type(holder) is not ModuleType:
        return None
    first, *rest = qualname.split(".")
    found = holder.__dict__.get(first)
    for name in rest:
        if not issubclass(type(found), type):
            return None
        found = _class_dict(found).get(name)
    # the metaclass of any other class may have code that runs when the class is looked at
    return found if type(found) in (type, ABCMeta) else None


class RecordTypes:
    """The classes of one batch. Each is looked for once, and there is a limit to what making them takes."""

    MOST: Final = 64
    """Making a class takes up to 0.7 ms."""
    MOST_FIELDS: Final = 1024
    """Each takes 0.1 ms more."""
    LIMIT: Final = f"than {MOST} classes of namedtuples and dataclasses, or than {MOST_FIELDS:,} fields of them"

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._fields = 0

    def has_room_for(self, kind: object, fields: tuple[str, ...]) -> bool:
        """Count a class; return False if the batch has too many of them."""
        if kind not in self._known:
            self._known[kind] = None
            self._fields += len(fields)
        return len(self._known) <= self.MOST and self._fields <= self.MOST_FIELDS

    def namedtuple(self, module: str, qualname: str, fields: tuple[str, ...], *, hashed: bool) -> type[tuple[Any, ...]]:
        """Return the cached result of `namedtuple_type`."""
        found: type[tuple[Any, ...]] = self._type(namedtuple_type, module, qualname, fields, hashed=hashed)
        return found

    def dataclass(self, module: str, qualname: str, fields: tuple[str, ...]) -> type:
        """Return the cached result of `dataclass_type`."""
        found: type = self._type(dataclass_type, module, qualname, fields)
        return found

    def _type(self, find: Callable[..., Any], *wanted: Any, **options: Any) -> Any:
        key = (find, wanted, *options.values())
        found = self._known.get(key)
        if found is None:
            if not self.has_room_for(key, wanted[-1]):
                raise ProtocolError(f"the tree of a frame has more {self.LIMIT}")
            found = self._known[key] = find(*wanted, **options)
        return found


def namedtuple_type(module: str, qualname: str, fields: tuple[str, ...], *, hashed: bool) -> type[tuple[Any, ...]]:
    """The namedtuple type of that name and these fields: that of this process, else one made on the spot.

    Args:
        module: Where the writer's class is.
        qualname: What it is called there.
        fields: Its fields.
        hashed: Whether an instance will be a key, so that the class's own hash would run.

    Raises:
        ProtocolError: When nothing can be called so.
    """
    found = _find_class(module, qualname)
    if found is not None and _is_namedtuple_type(found, fields, hashed=hashed):
        return found
    return _make_namedtuple(last_name(qualname), fields)


@lru_cache(maxsize=256)
def _is_namedtuple_type(found: type, fields: tuple[str, ...], *, hashed: bool) -> bool:
    """Return True if a tuple can become an instance without running code of the class, now or when it is hashed."""
    declared = getattr_static(found, "_fields", None)
    inherited = ("__hash__", "__eq__") if hashed else ()
    return (
        issubclass(found, tuple)
        and type(declared) is tuple
        and all(type(field) is str for field in declared)
        and declared == fields
        and not _has_finalizer(found)
        and all(getattr_static(found, name) is getattr_static(tuple, name) for name in inherited)
    )


@lru_cache(maxsize=256)
def _make_namedtuple(name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """A namedtuple type of that name, whose module is not the one that a frame names: pickle would import that."""
    try:
        # rename=True made fields such as _0 in the first place; here it may change nothing
        made = namedtuple(name, fields, rename=True)  # type: ignore[misc]
    except (TypeError, ValueError, SyntaxError) as error:
        raise ProtocolError(f"{short(name)} with fields {short(fields)} cannot be a namedtuple: {error}") from None
    if made._fields != fields:
        raise ProtocolError(f"{short(name)} with fields {short(fields)} cannot be a namedtuple")
    return made


def dataclass_type(module: str, qualname: str, fields: tuple[str, ...]) -> type:
    """The dataclass of that name and these fields: that of this process, else one made on the spot.

    Raises:
        ProtocolError: When nothing can be called so.
    """
    found = _find_class(module, qualname)
    if found is not None and _is_dataclass_type(found, fields):
        return found
    return _make_dataclass(last_name(qualname), fields)


@lru_cache(maxsize=256)
def _is_dataclass_type(found: type, fields: tuple[str, ...]) -> bool:
    """Return True if an instance can be made, and its fields set, without running code of the class."""
    if type(getattr_static(found, "__dataclass_fields__", None)) is not dict or _has_finalizer(found):
        return False
    if tuple(field.name for field in dataclass_fields(found)) != fields:
        return False
    if not all(_can_be_set(found, field) for field in fields):
        return False
    try:
        instance(found, fields, [None] * len(fields))
    except (TypeError, AttributeError):  # an abstract class, one with a base in C, slots that do not hold the fields
        return False
    return True


def _can_be_set(found: type, field: str) -> bool:
    """Return True if setting the attribute runs no code: the class lacks it, or it is a default value or a slot."""
    attribute = getattr_static(found, field, None)
    return type(attribute) is MemberDescriptorType or getattr_static(type(attribute), "__set__", None) is None


@lru_cache(maxsize=256)
def _make_dataclass(name: str, fields: tuple[str, ...]) -> type:
    """A dataclass of that name, whose module is not the one that a frame names: pickle would import that."""
    try:
        made: type = make_dataclass(name, fields)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ProtocolError(f"{short(name)} with fields {short(fields)} cannot be a dataclass: {error}") from None
    return made


def instance(kind: type, fields: Iterable[str], values: Iterable[Any]) -> Any:
    """An instance of a dataclass, frozen or not, without its constructor."""
    made: Any = object.__new__(kind)
    for field, value in zip(fields, values, strict=True):
        object.__setattr__(made, field, value)
    return made


def _has_finalizer(found: type) -> bool:
    """Return True if code of the class runs when an instance is deleted."""
    return getattr_static(found, "__del__", None) is not None
