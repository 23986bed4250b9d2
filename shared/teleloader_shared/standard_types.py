"""Conversions of types of the standard library to plain values and back."""

from __future__ import annotations

import enum
import operator
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, reduce
from inspect import getattr_static
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

from teleloader_shared.plain_values import MAX_DIGITS, TypeEntry, UnsupportedValue, exact, kinds_of, listed
from teleloader_shared.records import class_dict, find_class
from teleloader_shared.text import short

MAX_COMBINATIONS: Final = 4096
"""Maximum number of combinations of a Flag that have no name: each stays in memory as long as the class."""

_MAX_MOMENT: Final = 64
"""Maximum length of a date or time in ISO 8601, in characters."""
_MAX_ZONE: Final = 255
_ZONE_NAME: Final = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")
"""Names of time zones: without dots, no name selects another file or module."""


def zone_to_plain(zone: tzinfo | None) -> Any:
    """Return None, the name of a time zone, or ``[offset in us]`` or ``[offset in us, name]``."""
    if zone is None:
        return None
    if isinstance(zone, timezone):
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined] # what pickle uses
        return [offset // timedelta(microseconds=1), *name]
    if type(zone) is ZoneInfo:
        try:
            zone.__reduce__()
        except Exception as error:  # a PicklingError: the zone is that of a file
            raise UnsupportedValue(f"time zone {zone.key!r} would be replaced by the installed one") from error
        return zone.key
    raise UnsupportedValue(f"time zone {zone!r:.80} must be a datetime.timezone or a zoneinfo.ZoneInfo")


def zone_from_plain(plain: Any) -> tzinfo | None:
    """Return a time zone."""
    if plain is None:
        return None
    if type(plain) is str:
        if len(plain) > _MAX_ZONE or not _ZONE_NAME.fullmatch(plain):
            raise ValueError(f"invalid name {short(plain)} of a time zone")
        return ZoneInfo(plain)
    microseconds, *name = listed(plain, int, str) if type(plain) is list and len(plain) == 2 else listed(plain, int)
    return timezone(timedelta(microseconds=microseconds), *name)


def _moment_to_plain(moment: datetime | time) -> list[Any]:
    return [moment.replace(tzinfo=None, fold=0).isoformat(), moment.fold, zone_to_plain(moment.tzinfo)]


def _moment_from_plain(kind: type[datetime] | type[time]) -> Callable[[Any], datetime | time]:
    def restore(plain: Any) -> datetime | time:
        text, fold, zone = listed(plain, str, int, (type(None), str, list))
        return kind.fromisoformat(exact(text, str, _MAX_MOMENT)).replace(fold=fold, tzinfo=zone_from_plain(zone))

    return restore


def _decimal_to_plain(number: Decimal) -> str:
    text = str(number)
    if len(text) > MAX_DIGITS:
        raise UnsupportedValue(f"the Decimal has {len(text):,} characters, more than {MAX_DIGITS:,}")
    return text


_PATHS: Final[dict[str, type[pathlib.PurePath]]] = {
    kind.__name__: kind
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}


def _path_to_plain(path: pathlib.PurePath) -> list[str]:
    kind = type(path)
    if _PATHS.get(kind.__name__) is not kind:
        raise UnsupportedValue(f"the class {kind.__qualname__} would be replaced by pathlib's")
    return [kind.__name__, str(path)]


def _path_from_plain(plain: Any) -> pathlib.PurePath:
    name, text = listed(plain, str, str)
    try:
        return _PATHS[name](text)
    except NotImplementedError:  # a path of another operating system
        return _PATHS[f"Pure{name}"](text)


def integers(plain: Any) -> tuple[int, int]:
    """Return numerator and denominator; a text such as 1e999999999 would take memory and time without limit."""
    numerator, denominator = listed(plain, int, int)
    return numerator, denominator


def rational_to_plain(number: Any) -> list[Any]:
    """Return numerator and denominator."""
    parts = [number.numerator, number.denominator]
    if not all(type(part) is int for part in parts):
        raise UnsupportedValue("numerator and denominator must be integers")
    return parts


# -- enums: only classes of the enum module run when a member is found, or flags are combined


def _enum_to_plain(member: enum.Enum) -> list[Any]:
    kind = type(member)
    path = f"{kind.__module__}.{kind.__qualname__}"
    if type(kind) is not enum.EnumType:
        raise UnsupportedValue(f"the metaclass {type(kind).__qualname__} of the enum could run code in the receiver")
    if find_class(str(kind.__module__), kind.__qualname__, enum.EnumType) is not kind:
        raise UnsupportedValue(f"the enum cannot be found as {path}, because it is not an attribute of its module")
    members = class_dict(kind)["_member_map_"]
    if members.get(member._name_) is member:
        names = [member._name_]
    elif isinstance(member, enum.Flag):
        _check_combinable(kind)
        names = _parts_of(members, member._value_)
        if _combined(members, names) != member._value_:
            raise UnsupportedValue(f"flag {member._value_!r} has undefined bits")
    else:
        raise UnsupportedValue(f"value {member._value_!r:.80} is not a named member of the enum")
    return [str(kind.__module__), kind.__qualname__, names]


def _enum_from_plain(plain: Any) -> Any:
    module, qualname, names = listed(plain, str, str, list)
    found = find_class(module, qualname, enum.EnumType)
    if found is None:
        path = f"{module:.100}.{qualname:.100}"
        raise LookupError(f"enum {path} is not imported in this process: import it before iterating")
    members = class_dict(found)["_member_map_"]
    for name in names:
        if type(name) is not str or name not in members:
            shown = short(name) if type(name) is str else kinds_of(name)
            raise ValueError(f"{found.__qualname__} has no member {shown}")
    if len(names) == 1:
        return members[names[0]]
    if enum.Flag not in found.__mro__:
        raise ValueError(f"expected the name of one member of {found.__qualname__}, got {len(names)}")
    _check_combinable(found)
    return _combination(found, members, _combined(members, names))


@lru_cache(maxsize=256)
def _check_combinable(flag: type) -> None:
    """Raise UnsupportedValue if combinations of a Flag may have more than the value that their members define."""
    members = class_dict(flag)["_member_map_"].values()
    if (
        getattr_static(flag, "_missing_") is not getattr_static(enum.Flag, "_missing_")
        or getattr_static(flag, "_member_type_") not in (object, int)
        or not all(type(_value(member)) is int for member in members)
    ):
        raise UnsupportedValue(
            f"combinations of {flag.__qualname__} cannot be restored: the Flag must have integer values, and must not "
            "override _missing_"
        )


def _value(member: Any) -> Any:
    return object.__getattribute__(member, "_value_")


def _combined(members: Mapping[str, Any], names: Iterable[str]) -> int:
    return reduce(operator.or_, (_value(members[name]) for name in names), 0)


def _parts_of(members: Mapping[str, Any], value: int) -> list[str]:
    """Return the names of the members that a value combines: single bits, and others if bits have no member."""
    parts = {
        name: part
        for name, one in members.items()
        if (part := _value(one)) and part & value == part and object.__getattribute__(one, "_name_") == name
    }
    names = [name for name, part in parts.items() if part & (part - 1) == 0]
    return names if _combined(members, names) == value else [*names, *(name for name in parts if name not in names)]


def _combination(flag: type, members: Mapping[str, Any], value: int) -> Any:
    """Return the combination of members, which is created as Flag does, but without calling the class."""
    known: dict[int, Any] = class_dict(flag)["_value2member_map_"]
    if value not in known:
        if len(known) >= len(members) + MAX_COMBINATIONS:
            raise ValueError(f"more than {MAX_COMBINATIONS:,} combinations of {flag.__qualname__}: send its value")
        made = int.__new__(flag, value) if issubclass(flag, int) else object.__new__(flag)
        object.__setattr__(made, "_value_", value)
        object.__setattr__(made, "_name_", "|".join(_parts_of(members, value)) or None)
        known.setdefault(value, made)
    return known[value]


@lru_cache(maxsize=256)
def _check_enum_key(kind: type) -> None:
    """Raise UnsupportedValue if hashing or comparing members would run code of the class."""
    for name in ("__hash__", "__eq__"):
        found = getattr_static(kind, name)
        if not any(found is getattr_static(base, name) for base in (enum.Enum, int, float, str, bytes)):
            raise UnsupportedValue(
                f"{kind.__qualname__} must not define {name}: keys and elements of sets would run it"
            )


_ENUM: Final = TypeEntry("enum.Enum", _enum_to_plain, _enum_from_plain, subclasses=True, check_key=_check_enum_key)
_PATH: Final = TypeEntry("pathlib.Path", _path_to_plain, _path_from_plain, subclasses=True)

STANDARD: Final[dict[str, TypeEntry]] = {
    "datetime.datetime": TypeEntry("datetime.datetime", _moment_to_plain, _moment_from_plain(datetime)),
    "datetime.time": TypeEntry("datetime.time", _moment_to_plain, _moment_from_plain(time)),
    "datetime.date": TypeEntry(
        "datetime.date", date.isoformat, lambda plain: date.fromisoformat(exact(plain, str, _MAX_MOMENT))
    ),
    "datetime.timedelta": TypeEntry(
        "datetime.timedelta",
        lambda duration: [duration.days, duration.seconds, duration.microseconds],
        lambda plain: timedelta(*listed(plain, int, int, int)),
    ),
    "decimal.Decimal": TypeEntry(
        "decimal.Decimal", _decimal_to_plain, lambda plain: Decimal(exact(plain, str, MAX_DIGITS))
    ),
    "fractions.Fraction": TypeEntry("fractions.Fraction", rational_to_plain, lambda plain: Fraction(*integers(plain))),
    "uuid.UUID": TypeEntry("uuid.UUID", lambda value: value.bytes, lambda plain: UUID(bytes=exact(plain, bytes))),
    "enum.Enum": _ENUM,
    "pathlib.PurePath": _PATH,
    "pathlib._local.PurePath": _PATH,  # Python 3.13
}
"""Entries by the module and qualified name of the class."""
