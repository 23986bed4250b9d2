"""Versions of the algorithms that determine the content of batches.

A change of such an algorithm changes the batches of running and saved training runs. Each algorithm therefore has a
version, which loader specs and saved states contain: a release with another version refuses them, instead of continuing
with different batches. Version 1 is omitted, so that most specs and states contain no versions.

To change an algorithm, append a `Change` to its entry in `ALGORITHMS` and record its states again with
``python -m tests.compatibility``; ``tests/compatibility/test_saved_states.py`` fails until both are done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from teleloader_shared.errors import InvalidSpec, StateMismatch, VersionMismatch
from teleloader_shared.text import short


@dataclass(frozen=True, slots=True)
class Change:
    """A version of an algorithm."""

    release: str
    """First release with this version."""
    summary: str
    """Difference from the version before, for error messages: a noun phrase."""


FIRST: Final = (Change("0.1.0", "first release"),)

ALGORITHMS: Final[dict[str, tuple[Change, ...]]] = {
    "permutation": FIRST,
    "partition": FIRST,
    "seeding": FIRST,
    "collate": FIRST,
    "mixture": FIRST,
    "balance": FIRST,
    "packing": FIRST,
    "shuffle_buffer": FIRST,
    "replacement": FIRST,
    "sampling": FIRST,
}
"""All versions of each algorithm, the first one first; this release computes the last one.

``permutation`` is the order of shuffled epochs, ``partition`` the division of an epoch into batches, ranks and shards,
``seeding`` the seeds of random generators, ``collate`` the built-in collate function, ``replacement`` the choice of
samples in place of failed ones, and ``sampling`` the client's samplers. The others are named like their fields.
"""


def current(names: Collection[str]) -> dict[str, int]:
    """Return the versions of algorithms in this release, without those of version 1."""
    return {name: len(ALGORITHMS[name]) for name in sorted(names) if len(ALGORITHMS[name]) > 1}


def check_spec(given: object, names: Collection[str]) -> None:
    """Check that the server computes the same algorithms as the client.

    Args:
        given: Field ``algorithms`` of a spec.
        names: Algorithms that the spec uses.

    Raises:
        InvalidSpec: If the field is not an object of versions.
        VersionMismatch: If a version is different on the server; the message states which side to update.
    """
    found = _difference(given, names)
    if isinstance(found, str):
        raise InvalidSpec(found)
    if found is None:
        return
    name, version, here = found
    if version > here:
        raise VersionMismatch(
            f"the client uses version {version} of algorithm {name!r}, and this server version {here}: batches would "
            "be different. Update the server"
        )
    raise VersionMismatch(
        f"the client uses version {version} of algorithm {name!r}, and this server version {here}, "
        f"{_changes(name, version)}: batches would be different. Update the client, and start a new run"
    )


def check_state(given: object, names: Collection[str]) -> None:
    """Check that this release continues a saved state with the same batches.

    Args:
        given: Entry ``algorithms`` of a state; an empty mapping if it has none.
        names: Algorithms that the loader uses.

    Raises:
        StateMismatch: If the entry is invalid, or a version is different in this release; the message states what
            changed, in which release, and how to continue.
    """
    found = _difference(given, names)
    if isinstance(found, str):
        raise StateMismatch(f"invalid state: {found}")
    if found is None:
        return
    name, version, here = found
    if version > here:
        raise StateMismatch(
            f"the state was saved with version {version} of algorithm {name!r}, but this release has version {here}: "
            "batches would be different. Install the release that saved the state, or a later one"
        )
    earlier = ALGORITHMS[name][version].release
    raise StateMismatch(
        f"the state was saved with version {version} of algorithm {name!r}, but this release has version {here}, "
        f"{_changes(name, version)}: batches would be different. Continue the run with a release before {earlier}, or "
        "start a new run"
    )


def _difference(given: object, names: Collection[str]) -> tuple[str, int, int] | str | None:
    """Return the name of a different algorithm with both versions, a sentence on an invalid value, or None."""
    if not _is_versions(given):
        return f"algorithms must be an object of names and versions of at least 1, got {short(given)}"
    versions: Mapping[str, Any] = given  # type: ignore[assignment]
    for name in sorted({*names, *versions}):
        version, here = versions.get(name, 1), len(ALGORITHMS.get(name, ()))
        if version != here:
            return name, version, here
    return None


def _is_versions(given: object) -> bool:
    return isinstance(given, Mapping) and all(
        isinstance(name, str) and len(name) <= _MAX_NAME and type(version) is int and version >= 1
        for name, version in given.items()
    )


def _changes(name: str, version: int) -> str:
    """Return the changes after a version, with their releases."""
    return "; ".join(f"changed in release {each.release}: {each.summary}" for each in ALGORITHMS[name][version:])


_MAX_NAME: Final = 64
