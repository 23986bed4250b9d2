"""Resolution of the `collate_fn` and `worker_init_fn` arguments to names of functions on the server."""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

from teleloader.dataset import RemoteDataset
from teleloader.fetch.direct import DirectDataset
from teleloader_shared import local
from teleloader_shared.messages import DatasetInfo


def name_on_server(
    owner: object,
    argument: str,
    function: Callable[..., Any] | None,
    dataset: RemoteDataset | DirectDataset,
    *,
    batched: bool = True,
) -> str | None:
    """Return the server-side name of a `collate_fn` or `worker_init_fn`, for the loader's spec.

    A result of None selects the server's default function. Only the name is sent to another process, never the
    function. A server in this process reads the function from `owner`, as long as `owner` exists.

    Args:
        owner: The loader, whose attribute `argument` is the function.
        argument: ``collate_fn`` or ``worker_init_fn``.
        function: Value of the argument.
        dataset: Dataset of the loader.
        batched: False if `function` is called with single samples (``batch_size=None``), not lists of samples.

    Raises:
        TypeError: If `function` is not callable.
        ValueError: If the server does not allow a function of that name.
    """
    if function is None:
        return None
    if not callable(function):
        raise TypeError(f"{argument} must be a function, got {function!r:.80}")
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    torchs = argument == "collate_fn" and _is_torchs_default(module, name, batched=batched)
    if torchs and dataset.info.collate == "default":
        return None
    if isinstance(dataset, DirectDataset) or dataset.is_here:
        return local.register_function(owner, argument)
    if not isinstance(function, FunctionType | BuiltinFunctionType | type) or "<" in str(name):
        raise ValueError(
            f"{argument}={name or repr(function)[:80]} runs on the server, but {dataset.url} can import only "
            "module-level functions: define the function in a module that is installed on the server, and allow the "
            "function in the server's configuration"
        )
    found, info = f"{module}:{name}", dataset.info
    if found == (info.collate if argument == "collate_fn" else info.worker_init):
        return None
    _check_allowed(argument, found, info, dataset.url)
    return found


def _check_allowed(argument: str, function: str, info: DatasetInfo, url: str) -> None:
    if argument == "worker_init_fn" and info.kind == "map":
        raise ValueError(
            f"cannot use worker_init_fn={function}: all loaders share the workers of map-style dataset {info.name!r}. "
            f"Set worker_init in the configuration of {url} (now: {info.worker_init or 'none'})"
        )
    if function.startswith("__main__:"):
        name = function.removeprefix("__main__:")
        raise ValueError(
            f"{argument}={function} is defined in this process's main script, which {url} cannot import: move the "
            "function to a module that is installed on the server, and allow the function in the server's "
            f'configuration: functions = ["module:{name}"]'
        )
    if function not in info.functions:
        raise ValueError(
            f"{url} does not allow {argument}={function} for dataset {info.name!r}: add "
            f"functions = [\"{function}\"] to the server's configuration, or omit the argument to use the server's "
            f"default. Allowed functions: {', '.join(info.functions) or 'none'}"
        )


def _is_torchs_default(module: str | None, name: str | None, *, batched: bool) -> bool:
    default = "default_collate" if batched else "default_convert"
    return name == default and str(module).startswith(("torch.", "teleloader_server"))
