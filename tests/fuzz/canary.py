"""Classes whose code must not run, whatever a frame contains: their code records each call."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, Final

TOUCHED: Final[list[str]] = []
"""Names of the methods that ran."""
NAMES: Final = ("Made", "Kept", "Guarded", "Watching", "Subscribed", "Plain", "Pair", "Counting.Inner", "TOUCHED")
FIELDS: Final[tuple[list[str], ...]] = (["x"], ["y"], ["x", "y"], ["y", "x"], [])

Pair = namedtuple("Pair", ["x", "y"])


class Made(Pair):
    """Namedtuple with its own constructor and hash."""

    def __new__(cls, *args: Any) -> Made:  # noqa: D102
        TOUCHED.append("Made.__new__")
        return super().__new__(cls, *args)

    def __hash__(self) -> int:
        TOUCHED.append("Made.__hash__")
        return 0


@dataclass
class Plain:
    """Dataclass that checks its arguments in a method that readers must not call."""

    x: Any
    y: Any = 0

    def __post_init__(self) -> None:
        TOUCHED.append("Plain.__post_init__")


@dataclass(eq=False)
class Kept(Plain):
    """Dataclass with a finalizer."""

    def __del__(self) -> None:
        TOUCHED.append("Kept.__del__")


@dataclass
class Guarded:
    """Dataclass with a property in place of a field."""

    x: Any

    def __setattr__(self, name: str, value: Any) -> None:
        TOUCHED.append("Guarded.__setattr__")


def _set_y(self: Guarded, value: Any) -> None:
    TOUCHED.append("Guarded.y")


Guarded.y = property(lambda self: None, _set_y)  # type: ignore[attr-defined]


class _Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        if name != "__class__":
            TOUCHED.append(f"_Meta.{name}")
        return super().__getattribute__(name)


class Watching(metaclass=_Meta):
    """Class whose metaclass records accesses."""

    x = 0


class Counting:
    """Class with a nested class."""

    @dataclass
    class Inner:
        """Class with a qualified name."""

        x: Any

        def __new__(cls, *args: Any) -> Any:  # noqa: D102
            TOUCHED.append("Counting.Inner.__new__")
            return super().__new__(cls)


class Subscribed(tuple[Any, ...]):
    """Class that resembles a namedtuple."""

    _fields = ("x", "y")

    def __class_getitem__(cls, item: Any) -> Any:
        TOUCHED.append("Subscribed.__class_getitem__")
        return cls


TOUCHED.clear()  # calls during the definition of these classes
