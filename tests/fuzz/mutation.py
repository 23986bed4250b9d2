"""Mutations of inputs: of bytes, and of trees of JSON or msgpack values."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

Slot = tuple[Any, Any]
"""Container, and index or key of a value in it."""

INTERESTING: Final = (0, 1, 0x7F, 0x80, 0xFF, 0xC0, 0xC1, 0xC4, 0xC6, 0xC9, 0xD4, 0xDC, 0xDD, 0xDE, 0xDF)
"""Bytes at the boundaries of msgpack's types."""
MOST_BYTES: Final = 2**16
"""Maximum length of inputs, so that an execution stays short."""
MOST_STEPS: Final = 4
DEEPEST: Final = 300
MOST_SLOTS: Final = 1000
"""Maximum number of positions of a tree to visit, so that large trees do not take longer."""


def mutate_bytes(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Return `data` after a few mutations that ignore its structure."""
    changed = bytearray(data)
    for _ in range(random.randint(1, MOST_STEPS)):
        random.choice(_STEPS)(random, changed)
    if random.random() < 0.1:
        other = random.choice(others)
        cut = random.randint(0, len(other))
        changed[random.randint(0, len(changed)) :] = other[cut:]
    return bytes(changed[:MOST_BYTES])


def _flip(random: Random, data: bytearray) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _set(random: Random, data: bytearray) -> None:
    if data:
        data[random.randrange(len(data))] = random.choice(INTERESTING)


def _insert(random: Random, data: bytearray) -> None:
    at = random.randint(0, len(data))
    data[at:at] = random.randbytes(random.randint(1, 9))


def _remove(random: Random, data: bytearray) -> None:
    at = random.randint(0, len(data))
    del data[at : at + random.choice((1, 2, 5, 64, 1000))]


def _cut(random: Random, data: bytearray) -> None:
    del data[random.randint(0, len(data)) :]


def _repeat(random: Random, data: bytearray) -> None:
    at = random.randint(0, len(data))
    piece = data[at : at + random.choice((1, 5, 64, 500))]
    data[at:at] = piece * random.choice((1, 2, 30))


def _forge_length(random: Random, data: bytearray) -> None:
    """Overwrite a position with the start of a very long value."""
    length = random.choice((2**16, 2**20, 2**24, 2**31 - 1, 2**31, 2**32 - 1))
    head = struct.pack(">BI", random.choice((0xC6, 0xC9, 0xDB, 0xDD, 0xDF)), length)
    at = random.randint(0, len(data))
    data[at : at + len(head)] = head * random.choice((1, 1, 1, 50))


_STEPS: Final[tuple[Callable[[Random, bytearray], None], ...]] = (
    *(_flip, _set, _insert, _remove, _cut, _repeat, _forge_length),
)


def mutate_tree(random: Random, tree: Any, others: Sequence[Any], hostile: Sequence[Any]) -> Any:
    """Return a copy of `tree` in which a few values are replaced, moved, repeated, wrapped or removed.

    Args:
        random: Random generator of the mutations.
        tree: Lists, dicts and plain values.
        others: Trees whose parts may be inserted.
        hostile: Values to try at any position.
    """
    holder = [copy.deepcopy(tree)]
    for _ in range(random.randint(1, MOST_STEPS)):
        container, key = random.choice(slots(holder))
        old = container[key]
        match random.randrange(8):
            case 0 | 1 | 2:
                container[key] = copy.deepcopy(random.choice(hostile))
            case 3:
                container[key] = _part(random, random.choice(others))
            case 4:
                container[key] = _wrapped(random, old)
            case 5:
                container[key] = _next_to(random, old)
            case 6 if isinstance(old, list) and old:
                container[key] = random.sample(old, len(old)) * random.choice((1, 1, 2, 20))
            case 7 if container is not holder:
                del container[key]
    return holder[0]


def slots(root: Any) -> list[Slot]:
    """Return every position of a value in a tree."""
    found: list[Slot] = []
    waiting = [root]
    while waiting and len(found) < MOST_SLOTS:
        container = waiting.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], dict | list):
                waiting.append(container[key])
    return found


def _part(random: Random, tree: Any) -> Any:
    container, key = random.choice(slots([tree]))
    return copy.deepcopy(container[key])


def _wrapped(random: Random, value: Any) -> Any:
    kind = random.choice(("list", "tuple", "dict", "set", "deque"))
    for _ in range(random.choice((1, 1, 2, 127, 128, 129, DEEPEST))):
        match kind:
            case "list":
                value = [value]
            case "dict":
                value = {"dict": [["k", value]]}
            case "deque":
                value = {"deque": [None, [value]]}
            case _:
                value = {kind: [value]}
    return value


def _next_to(random: Random, value: Any) -> Any:
    """Return a value that is nearly equal."""
    match value:
        case bool():
            return not value
        case int():
            return value + random.choice((-1, 1, -value, -2 * value, 2**31, 2**32, 2**62, 2**63 - 1 - value))
        case float():
            return -value
        case str():
            return (
                value[:-1] if random.random() < 0.5 else value + random.choice(("\0", "é", "\ud800", "x" * 1000, "."))
            )
        case bytes():
            return value + b"\0"
    return None
