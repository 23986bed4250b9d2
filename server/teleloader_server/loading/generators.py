"""Random generators that a dataset or its transforms hold: search, and seeding per batch.

Libraries such as albumentations and MONAI do not draw from the global generators, but from generators that each
transform holds. In torch, each worker continues its copies from batch to batch, so that a batch depends on the batches
before it, and workers forked from one process draw the same numbers. Here, workers seed these generators like the
global ones, because a batch must be a function of its ID.

Seeding what the dataset did not ask to be seeded could surprise: a generator that a dataset seeded itself loses its
position. This is accepted, because that position depends on which batches the worker computed before, and so differs
between runs. To seed other generators, or none, an object defines ``__seed__(seed)``, which replaces the search below
this object. The name is not ``seed`` or ``set_seed``, because datasets and transforms have methods of these names with
other arguments and meanings.

The search follows attributes and small containers. It does not follow variables of modules and closures, because a
worker cannot tell whose they are, and it reads no properties, which could run user code. It takes up to some
milliseconds, and is repeated only after a call of ``set_epoch``, which may create generators. Seeding takes 3 to 10 µs
per generator.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import numpy as np

SEED_METHOD: Final = "__seed__"

MAX_DEPTH: Final = 8
"""Maximum number of attributes and items in a path; ``.dataset.transform.transforms[0].random_generator`` has 5."""
MAX_ITEMS: Final = 100
"""Maximum length of containers that are searched: longer ones contain data, and not transforms."""
MAX_OBJECTS: Final = 2000
"""Maximum number of searched objects, nearest first; limits the time of a search to some milliseconds."""

_LEAVES: Final = (str, bytes, bytearray, int, float, complex, type(None), np.ndarray, type, FunctionType, ModuleType)


class Found(NamedTuple):
    """Object that can be seeded, found by `find`."""

    path: str
    """Path from the dataset, such as ``.transform.transforms[0].random_generator``; empty for the dataset itself."""
    holder: Any
    """The generator, or the object that defines ``__seed__``."""
    seed: Callable[[int], object]
    """Function that seeds the holder with an integer in [0, 2**63)."""


class Generators:
    """Seeds the generators of one dataset, each with its own seed.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: Any) -> None:
        # the salt depends on the path and not on the position: a cache that grows must not change other seeds
        self._found = [(found.seed, _salt(found.path)) for found in find(dataset)]

    def seed(self, seed: int) -> None:
        """Seed all generators for a batch or sample; exceptions of ``__seed__`` methods propagate."""
        for set_seed, salt in self._found:
            set_seed(seed ^ salt)


def find(dataset: Any) -> list[Found]:
    """Return the objects reachable from `dataset` that can be seeded, nearest first."""
    seeded = {id(each) for each in _global_generators()}
    return [
        Found(path, each, seed)
        for path, each in reachable(dataset, lambda each: _seed_function(each) is not None)
        if id(each) not in seeded and (seed := _seed_function(each)) is not None
    ]


def reachable(root: Any, is_end: Callable[[Any], bool] = lambda each: False) -> Iterator[tuple[str, Any]]:
    """Yield the objects reachable from `root` with their paths, nearest first, within the limits of the search.

    Args:
        root: Object with the path "".
        is_end: Function that returns True for an object whose attributes and items are not searched.
    """
    seen: set[int] = set()
    queue = deque([("", 0, root)])
    while queue and len(seen) < MAX_OBJECTS:
        path, depth, each = queue.popleft()
        if issubclass(type(each), _LEAVES) or id(each) in seen:
            continue
        seen.add(id(each))
        yield path, each
        if depth < MAX_DEPTH and not is_end(each):
            queue.extend((path + step, depth + 1, part) for step, part in _parts(each))


def kind_of(generator: Any) -> str:
    """Return the type of a generator for messages, such as ``numpy.random.Generator``."""
    kind = type(generator)
    module = "numpy.random" if kind.__module__.startswith("numpy.random") else kind.__module__.partition(".")[0]
    return f"{module}.{kind.__qualname__}"


def _global_generators() -> Iterator[Any]:
    """Yield the global generators, which `seed_all` seeds."""
    yield random.random.__self__  # type: ignore[attr-defined]
    yield np.random.mtrand._rand
    torch = sys.modules.get("torch")
    if torch is not None:
        yield torch.default_generator


def _seed_function(each: Any) -> Callable[[int], object] | None:
    """Return the function that seeds an object; None if it is neither a generator nor defines ``__seed__``."""
    kind, torch = type(each), sys.modules.get("torch")  # not isinstance, which proxies answer with user code
    function: Callable[[int], object] | None = None
    if callable(getattr(kind, SEED_METHOD, None)):
        function = getattr(each, SEED_METHOD)
    elif issubclass(kind, np.random.Generator):
        function = _seed_state(each.bit_generator)
    elif issubclass(kind, np.random.RandomState):
        function = lambda seed: each.seed(seed & 0xFFFFFFFF)  # noqa: E731
    elif issubclass(kind, random.Random):
        function = each.seed
    elif torch is not None and issubclass(kind, torch.Generator) and each.device.type == "cpu":
        function = each.manual_seed
    return function


def _seed_state(bits: Any) -> Callable[[int], object] | None:
    """Return the function that seeds a bit generator in place, because other objects may hold it, too."""
    kind = type(bits)
    if kind is np.random.PCG64 or kind is np.random.PCG64DXSM:
        return partial(_seed_pcg64, bits)
    if kind.__module__.startswith("numpy.random."):
        return lambda seed: setattr(bits, "state", kind(seed).state)
    return None


def _seed_pcg64(bits: Any, seed: int) -> None:
    """Seed NumPy's default bit generator: with a hash, in 6 µs, because its constructor takes 35 µs."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=32).digest()
    state, increment = int.from_bytes(digest[:16], "little"), int.from_bytes(digest[16:], "little") | 1
    bits.state = {
        "bit_generator": type(bits).__name__, "state": {"state": state, "inc": increment}, "has_uint32": 0,
        "uinteger": 0,
    }  # fmt: skip


def _parts(each: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes and items of an object, with the text by which code refers to them."""
    kind = type(each)
    if issubclass(kind, list | tuple) and len(each) <= MAX_ITEMS:
        yield from ((f"[{place}]", item) for place, item in enumerate(each))
    elif issubclass(kind, dict) and len(each) <= MAX_ITEMS:
        yield from ((f"[{key!r}]", item) for key, item in each.items() if isinstance(key, str | int))
    for name, value in _attributes(each):
        yield f".{name}", value


def _attributes(each: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that an object stores, and the generators among those of its class."""
    try:
        stored = object.__getattribute__(each, "__dict__")
    except AttributeError:
        stored = {}
    yield from list(stored.items())
    for kind in type(each).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            try:
                yield name, object.__getattribute__(each, name)
            except AttributeError:  # the slot is empty, or its name is mangled
                continue
        for name, value in list(kind.__dict__.items()):
            if isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
                yield name, value


def _salt(path: str) -> int:
    """Return an integer in [0, 2**63) that is added to the seed; 0 for the dataset itself."""
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little") >> 1 if path else 0
