"""Safe reconstruction of the namedtuples and dataclasses in received frames.

If a class that a frame names is already imported in this process, the decoder creates an instance of it. It never
imports a module, calls the class or runs any other code of it: the sender of a frame must not be able to choose code
that runs in the receiver. Classes are therefore inspected through their ``__dict__``, and instances are created
without their constructors.
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

from teleloader_shared.errors import DecodeError, ProtocolError
from teleloader_shared.text import short


def is_dunder(name: str) -> bool:
    """Return True for a name that Python reserves, with two underscores at the beginning and the end."""
    return name.startswith("__") and name.endswith("__")


def is_name(name: object) -> bool:
    """Return True for a valid class or field name: an identifier that is neither a keyword nor reserved by Python."""
    return type(name) is str and name.isidentifier() and not iskeyword(name) and not is_dunder(name)


def last_name(qualname: str) -> str:
    """Return the last component of a qualified name: the ``__name__`` of the class."""
    return qualname.rpartition(".")[2]


class_dict: Final = type.__dict__["__dict__"].__get__
"""Returns the ``__dict__`` of a class, even if the metaclass overrides attribute access."""


def find_class(module: str, qualname: str, *metaclasses: type) -> type | None:
    """Return a class of an imported module, without running code of the module or the class.

    Args:
        module: Name of the module.
        qualname: Qualified name of the class.
        metaclasses: Permitted types of the class; any other metaclass could run code on attribute access.

    Returns:
        The class; None if the module is not imported, or has no such class.
    """
    holder = sys.modules.get(module)
    # subclasses of ModuleType may run code on attribute access (lazy loading)
    if type(holder) is not ModuleType:
        return None
    first, *rest = qualname.split(".")
    found = holder.__dict__.get(first)
    for name in rest:
        if not issubclass(type(found), type):
            return None
        found = class_dict(found).get(name)
    return found if type(found) in metaclasses else None


class RecordTypes:
    """Cache of the namedtuple and dataclass types in one batch, with limits on the number of types and of their fields.

    The limits bound the time that a peer can make the decoder spend. The methods `namedtuple` and `dataclass` raise
    `ProtocolError` if a limit is exceeded or a name is invalid.

    Args:
        generate: Whether a class is generated if it is not imported or does not match; otherwise, the methods raise
            `DecodeError`.
    """

    MOST: Final = 64
    """Maximum number of types in a batch: creating a class takes up to 0.7 ms."""
    MOST_FIELDS: Final = 1024
    """Maximum total number of fields of these types: each field adds 0.1 ms."""
    LIMIT: Final = f"{MOST} namedtuple and dataclass types, or {MOST_FIELDS:,} fields in total"

    def __init__(self, *, generate: bool = True) -> None:
        self._generate = generate
        self._known: dict[Any, Any] = {}
        self._fields = 0

    def has_room_for(self, kind: object, fields: tuple[str, ...]) -> bool:
        """Count a class and its fields, once per class; return False if the batch has too many classes or fields."""
        if kind not in self._known:
            self._known[kind] = None
            self._fields += len(fields)
        return len(self._known) <= self.MOST and self._fields <= self.MOST_FIELDS

    def namedtuple(self, module: str, qualname: str, fields: tuple[str, ...], *, hashed: bool) -> type[tuple[Any, ...]]:
        """Return the namedtuple type with the given name and fields, from the cache or from `namedtuple_type`."""
        found: type[tuple[Any, ...]] = self._type(
            namedtuple_type, module, qualname, fields, hashed=hashed, generate=self._generate
        )
        return found

    def dataclass(self, module: str, qualname: str, fields: tuple[str, ...]) -> type:
        """Return the dataclass with the given name and fields, from the cache or from `dataclass_type`."""
        found: type = self._type(dataclass_type, module, qualname, fields, generate=self._generate)
        return found

    def _type(self, find: Callable[..., Any], *wanted: Any, **options: Any) -> Any:
        key = (find, wanted, *options.values())
        found = self._known.get(key)
        if found is None:
            if not self.has_room_for(key, wanted[-1]):
                raise ProtocolError(f"invalid frame: the tree has more than {self.LIMIT}")
            found = self._known[key] = find(*wanted, **options)
        return found


def namedtuple_type(
    module: str, qualname: str, fields: tuple[str, ...], *, hashed: bool, generate: bool = True
) -> type[tuple[Any, ...]]:
    """Return the namedtuple type with the given name and fields: the imported class if it matches, else a new class.

    Args:
        module: Module of the sender's class.
        qualname: Qualified name of the sender's class.
        fields: Names of its fields.
        hashed: Whether instances become dict keys or set elements, so that a ``__hash__`` of the class would run.
        generate: Whether a new class is allowed.

    Raises:
        DecodeError: If a new class is necessary and not allowed.
        ProtocolError: If the names are not valid for a namedtuple.
    """
    found = find_class(module, qualname, type, ABCMeta)
    if found is not None and _is_namedtuple_type(found, fields, hashed=hashed):
        return found
    if not generate:
        raise _not_found(module, qualname)
    return _make_namedtuple(last_name(qualname), fields)


@lru_cache(maxsize=256)
def _is_namedtuple_type(found: type, fields: tuple[str, ...], *, hashed: bool) -> bool:
    """Return True for a namedtuple type with these fields, if creating (and hashing) instances runs no code of it."""
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
    """Create a namedtuple type that does not refer to the frame's module: pickle would import this module."""
    try:
        # accepts fields such as _0, which the sender's rename=True produced; changed names are rejected below
        made = namedtuple(name, fields, rename=True)  # type: ignore[misc]
    except (TypeError, ValueError, SyntaxError) as error:
        raise ProtocolError(f"invalid namedtuple {short(name)} with fields {short(fields)}: {error}") from None
    if made._fields != fields:
        raise ProtocolError(f"invalid field names {short(fields)} of namedtuple {short(name)}")
    return made


def dataclass_type(module: str, qualname: str, fields: tuple[str, ...], *, generate: bool = True) -> type:
    """Return the dataclass with the given name and fields: the imported class if it matches, else a new class.

    Raises:
        DecodeError: If a new class is necessary and `generate` is False.
        ProtocolError: If the names are not valid for a dataclass.
    """
    found = find_class(module, qualname, type, ABCMeta)
    if found is not None and _is_dataclass_type(found, fields):
        return found
    if not generate:
        raise _not_found(module, qualname)
    return _make_dataclass(last_name(qualname), fields)


@lru_cache(maxsize=256)
def _is_dataclass_type(found: type, fields: tuple[str, ...]) -> bool:
    """Return True for a dataclass with these fields, if creating and filling instances runs no code of it."""
    if type(getattr_static(found, "__dataclass_fields__", None)) is not dict or _has_finalizer(found):
        return False
    if tuple(field.name for field in dataclass_fields(found)) != fields:
        return False
    if not all(_can_be_set(found, field) for field in fields):
        return False
    try:
        instance(found, fields, [None] * len(fields))
    except (TypeError, AttributeError):  # an abstract class, a base class in C, or slots that lack a field
        return False
    return True


def _can_be_set(found: type, field: str) -> bool:
    """Return True if setting the attribute runs no code: the class has a default value or slot for it, or nothing."""
    attribute = getattr_static(found, field, None)
    return type(attribute) is MemberDescriptorType or getattr_static(type(attribute), "__set__", None) is None


@lru_cache(maxsize=256)
def _make_dataclass(name: str, fields: tuple[str, ...]) -> type:
    """Create a dataclass that does not refer to the frame's module: pickle would import this module."""
    try:
        made: type = make_dataclass(name, fields)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ProtocolError(f"invalid dataclass {short(name)} with fields {short(fields)}: {error}") from None
    return made


def _not_found(module: str, qualname: str) -> DecodeError:
    return DecodeError(
        f"cannot restore an instance of {short(f'{module}.{qualname}')}: the class is not imported in this process, or "
        "differs from that of the sender. Define the class at the top level of a module, and import this module"
    )


def instance(kind: type, fields: Iterable[str], values: Iterable[Any]) -> Any:
    """Create an instance of a dataclass, frozen or not, without calling its constructor."""
    made: Any = object.__new__(kind)
    for field, value in zip(fields, values, strict=True):
        object.__setattr__(made, field, value)
    return made


def _has_finalizer(found: type) -> bool:
    """Return True if code of the class runs when an instance is deleted."""
    return getattr_static(found, "__del__", None) is not None
