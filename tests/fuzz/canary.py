"""Classes of which no code may run, whatever a frame names: their code writes down that it did."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, Final

TOUCHED: Final[list[str]] = []
"""What ran."""
NAMES: Final = ("Made", "Kept", "Guarded", "Watching", "Subscribed", "Plain", "Pair", "Counting.Inner", "TOUCHED")
FIELDS: Final[tuple[list[str], ...]] = (["x"], ["y"], ["x", "y"], ["y", "x"], [])

Pair = namedtuple("Pair", ["x", "y"])


class Made(Pair):
    """A namedtuple with a constructor and a hash of its own."""

    def __new__(cls, *args: Any) -> Made:  # noqa: D102
        TOUCHED.append("Made.__new__")
        return super().__new__(cls, *args)

    def __hash__(self) -> int:
        TOUCHED.append("Made.__hash__")
        return 0


@dataclass
class Plain:
    """Checks what it is given, which a reader leaves alone."""

    x: Any
    y: Any = 0

    def __post_init__(self) -> None:
        TOUCHED.append("Plain.__post_init__")


@dataclass(eq=False)
class Kept(Plain):
    """Says goodbye."""

    def __del__(self) -> None:
        TOUCHED.append("Kept.__del__")


@dataclass
class Guarded:
    """Has a property in the place of a field."""

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
    """Its class has code that runs when the class is looked at."""

    x = 0


class Counting:
    """Holds another class."""

    @dataclass
    class Inner:
        """Which is found by a qualified name."""

        x: Any

        def __new__(cls, *args: Any) -> Any:  # noqa: D102
            TOUCHED.append("Counting.Inner.__new__")
            return super().__new__(cls)


class Subscribed(tuple[Any, ...]):
    """Looks like a namedtuple."""

    _fields = ("x", "y")

    def __class_getitem__(cls, item: Any) -> Any:
        TOUCHED.append("Subscribed.__class_getitem__")
        return cls


TOUCHED.clear()  # what ran while these classes were made
