"""Search for the reason why a recomputed batch differs, for ``teleloader-server check``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import numpy as np

from teleloader_server.loading.generators import find, kind_of, reachable
from teleloader_shared.registry import Unrestored
from teleloader_shared.tree import ArrayLeaf

_WITHOUT_USER_CODE: Final = sys.stdlib_module_names | {"numpy", "torch"}


def path_of_difference(one: Any, other: Any, are_equal: Callable[[Any, Any], bool], path: str = "batch") -> str:
    """Return the path of the first value in which two batches differ, such as ``batch['image']``."""
    pairs: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(one, Unrestored) and isinstance(other, Unrestored) and one.name == other.name:
        return path_of_difference(one.plain, other.plain, are_equal, path)
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        pairs = ((key, one[key], other[key]) for key in one)
    elif _is_sequence(one) and _is_sequence(other) and len(one) == len(other):
        pairs = ((place, *both) for place, both in enumerate(zip(one, other, strict=True)))
    for key, first, second in pairs:
        if not are_equal(first, second):
            return path_of_difference(first, second, are_equal, f"{path}[{key!r}]")
    return path


def _is_sequence(part: Any) -> bool:
    return isinstance(part, list | tuple) and not isinstance(part, ArrayLeaf)


def unseeded_generators(dataset: Any, modules: Iterable[str], compute: Callable[[], object]) -> list[str]:
    """Return descriptions of generators from which batches are drawn, and which workers do not seed.

    These are variables of the modules that define the dataset and its transforms, and attributes that do not exist
    before the first sample. A generator is included if its state changes while a batch is computed in this process.

    Args:
        dataset: A dataset of which no sample was fetched in this process.
        modules: Names of further modules, such as the one of the factory.
        compute: Computes a batch.
    """
    seen = {id(found.holder) for found in find(dataset)}
    with suppress(Exception):  # whatever user code raises; workers have computed the batch before
        compute()
    candidates = [
        (f"dataset{found.path} ({kind_of(found.holder)}), created after the first sample", found.holder)
        for found in find(dataset)
        if id(found.holder) not in seen
    ]
    seen |= {id(holder) for _, holder in candidates}
    for name, variable, value in _variables({*modules, *(type(each).__module__ for _, each in reachable(dataset))}):
        for found in find(value):
            if id(found.holder) not in seen:
                seen.add(id(found.holder))
                text = f"{name}.{variable}{found.path} ({kind_of(found.holder)}), a variable of a module"
                candidates.append((text, found.holder))
    before = [_state(holder) for _, holder in candidates]
    with suppress(Exception):
        compute()
    return [
        text
        for (text, holder), state in zip(candidates, before, strict=True)
        if state is None or _state(holder) != state
    ]


def _state(holder: Any) -> str | None:
    """Return the state of a generator as text; None if it is unknown, as of an object that defines ``__seed__``."""
    if isinstance(holder, np.random.Generator):
        return repr(holder.bit_generator.state)
    for name in ("getstate", "get_state"):  # of random.Random, and of np.random.RandomState and torch.Generator
        with suppress(Exception):  # random.SystemRandom has no state
            state = getattr(holder, name)()
            return repr(state.tolist() if hasattr(state, "tolist") else state)
    return None


def _variables(modules: Iterable[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield module name, name and value of the variables of modules that may belong to the user."""
    for name in sorted(modules):
        if name.partition(".")[0] not in _WITHOUT_USER_CODE and name in sys.modules:
            yield from ((name, variable, value) for variable, value in list(vars(sys.modules[name]).items()))
