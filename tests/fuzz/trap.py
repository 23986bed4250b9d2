"""Dataclass each of whose methods records that it ran: decoding must call none of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

TOUCHED: Final[list[str]] = []
"""Names of the methods that ran."""
_METHODS: Final = (
    "__getattribute__", "__iter__", "__len__", "__contains__", "__getitem__", "__reversed__", "__next__", "__repr__",
    "__str__", "__format__", "__bytes__", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__round__",
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__add__", "__radd__", "__sub__",
    "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__floordiv__", "__rfloordiv__", "__mod__",
    "__rmod__", "__or__", "__ror__", "__and__", "__rand__", "__neg__", "__abs__", "__call__", "__array__",
    "__array_ufunc__", "__array_function__", "__torch_function__", "__buffer__", "__fspath__", "__copy__",
    "__deepcopy__", "__reduce_ex__", "__enter__", "__exit__", "__dir__", "__sizeof__",
)  # fmt: skip


@dataclass(eq=False, repr=False)
class Trap:
    """Dataclass with one field; the methods above are replaced below."""

    value: Any


def _recording(name: str) -> Any:
    original = getattr(object, name, None)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        TOUCHED.append(name if name != "__getattribute__" else f"{name}({args[0]!r})")
        if original is None:
            raise TypeError(name)
        return original(self, *args, **options)

    return method


for _name in _METHODS:
    setattr(Trap, _name, _recording(_name))
