"""collate_fn and worker_init_fn run on the server: under which name a function of the trainer's is found there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from teleloader.remote import RemoteDataset
from teleloader_shared import local

_TORCHS_RULE = ("default_collate", "default_convert")


def name_on_server(
    owner: object, argument: str, function: Callable[..., Any] | None, dataset: RemoteDataset
) -> str | None:
    """What a loader's spec says of `function`; None is the server's usual one.

    A server in this process is given the function itself, for as long as `owner` lives.

    Raises:
        TypeError: When it cannot be called.
        ValueError: When the server does not allow a function of that name; nothing is ever sent to be run there.
    """
    if function is None:
        return None
    if not callable(function):
        raise TypeError(f"{argument} must be a function, was {function!r:.80}")
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if argument == "collate_fn" and name in _TORCHS_RULE and str(module).startswith(("torch.", "teleloader_server")):
        return None
    if local.is_served_here(dataset.url):
        lent = local.lend(function)
        weakref.finalize(owner, local.take_back, lent).atexit = False
        return lent
    found = f"{module}:{name}"
    info = dataset.info
    if found == (info.collate if argument == "collate_fn" else info.worker_init):
        return None
    if argument == "worker_init_fn" and info.kind == "map":
        raise ValueError(
            f"worker_init_fn={found}: the workers of map-style dataset {dataset.name!r} run already and are shared, so "
            f"a loader cannot choose it: name it as worker_init on {dataset.url} (now: {info.worker_init or 'none'})"
        )
    if found not in info.functions:
        raise ValueError(
            f"{argument}={found} runs on the server, and {dataset.url} allows no such function for dataset "
            f'{dataset.name!r}: name it there as functions = ["{found}"] (it must be importable on the server), '
            f"or leave it out here to use the server's own. Allowed are: {', '.join(info.functions) or 'none'}"
        )
    return found
