"""Copies and pickles of objects as the arguments of their constructors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

_Built = TypeVar("_Built")


class Construction:
    """Record of a constructor call, from which `copy` and pickle call the constructor again.

    A copy therefore has connections, threads and locks of its own. Its other attributes are those that the user or a
    subclass has set. The constructor of the subclass is not called, as for any object that pickle restores.

    Args:
        owner: The object, at the beginning of its constructor.
        arguments: Arguments of the constructor by name, for example ``locals()``, which also contains `self`.
    """

    def __init__(self, owner: object, arguments: Mapping[str, Any]) -> None:
        self._arguments: Final = {name: value for name, value in arguments.items() if name != "self"}
        self._before: Final = frozenset(vars(owner))
        self._names: frozenset[str] = frozenset()
        """Names of the attributes that the constructor has set."""
        self._public: dict[str, Any] = {}
        """The public ones of these attributes; the others may refer to this object, and would form a cycle."""

    def end(self, owner: object) -> None:
        """Record the attributes that the constructor has set."""
        self._names = frozenset(vars(owner)) - self._before
        self._public = {name: value for name, value in vars(owner).items() if _is_public(name) and name in self._names}

    def set_argument(self, name: str, value: object) -> None:
        """Replace an argument that the constructor has chosen itself, so that copies make the same choice."""
        self._arguments[name] = value

    def arguments(self, owner: object) -> dict[str, Any]:
        """Return the arguments by name, with the current values of the attributes of these names."""
        return {name: getattr(owner, name, value) for name, value in self._arguments.items()}

    def reduce(self, owner: object, constructor: Callable[..., None]) -> tuple[Any, ...]:
        """Return the value of ``owner.__reduce__()``.

        Args:
            owner: The object.
            constructor: The ``__init__`` method that was called.
        """
        # attributes in the second place of the state are set with setattr(), as the user has set them
        return _construct, (constructor, type(owner), self._arguments), (None, self._changes(owner))

    def _changes(self, owner: object) -> dict[str, Any]:
        """Return the public attributes that were reassigned after the constructor, and those that it did not set."""

        def is_own(name: str, value: Any) -> bool:
            return name in self._names and (not _is_public(name) or value is self._public[name])

        return {name: value for name, value in vars(owner).items() if not is_own(name, value)}


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _construct(constructor: Callable[..., None], kind: type[_Built], arguments: Mapping[str, Any]) -> _Built:
    built = kind.__new__(kind)
    constructor(built, **arguments)
    return built
