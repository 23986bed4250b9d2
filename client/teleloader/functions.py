"""collate_fn and worker_init_fn run on the server: under which name a function of the trainer's is found there."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

from teleloader.dataset import RemoteDataset
from teleloader.fetch.direct import DirectDataset
from teleloader_shared import local


def name_on_server(
    owner: object,
    argument: str,
    function: Callable[..., Any] | None,
    dataset: RemoteDataset | DirectDataset,
    *,
    batched: bool = True,
) -> str | None:
    """What a loader's spec says of `function`; None is the server's usual one.

    Args:
        owner: The loader, whose attribute `argument` is the function.
        argument: ``collate_fn`` or ``worker_init_fn``.
        function: What it was given.
        dataset: The dataset.
        batched: Whether `function` gets lists of samples, not single ones (``batch_size=None``).

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
    if (
        argument == "collate_fn"
        and _is_torchs_rule(module, name, batched=batched)
        and dataset.info.collate == "default"
    ):
        return None
    if isinstance(dataset, DirectDataset) or dataset.is_here:
        return local.lend(owner, argument)
    found, info = f"{module}:{name}", dataset.info
    if not isinstance(function, FunctionType | BuiltinFunctionType | type) or "<" in str(name):
        raise ValueError(
            f"{argument}={name or repr(function)[:80]} runs on the server, and has no name under which {dataset.url} "
            "could find it: make it a function of a module that is installed there too, "
            "and name that in the server's configuration"
        )
    if found == (info.collate if argument == "collate_fn" else info.worker_init):
        return None
    if argument == "worker_init_fn" and info.kind == "map":
        raise ValueError(
            f"worker_init_fn={found}: the workers of map-style dataset {dataset.name!r} run already and are shared, so "
            f"a loader cannot choose it: name it as worker_init on {dataset.url} (now: {info.worker_init or 'none'})"
        )
    if module == "__main__":
        raise ValueError(
            f"{argument}={found} is defined in the script that runs here, which {dataset.url} cannot import: move it "
            "to a module that is installed there too, and allow it in the server's configuration as functions = "
            f'["module:{name}"]'
        )
    if found not in info.functions:
        raise ValueError(
            f"{argument}={found} runs on the server, and {dataset.url} allows no such function for dataset "
            f'{dataset.name!r}: name it there as functions = ["{found}"] (it must be importable on the server), '
            f"or leave it out here to use the server's own. Allowed are: {', '.join(info.functions) or 'none'}"
        )
    return found


def _is_torchs_rule(module: str | None, name: str | None, *, batched: bool) -> bool:
    """Whether the function is the one that torch uses by itself."""
    usual = "default_collate" if batched else "default_convert"
    return name == usual and str(module).startswith(("torch.", "teleloader_server"))
