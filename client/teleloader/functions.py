"""Resolution of the `collate_fn` and `worker_init_fn` arguments to names of functions on the server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

from teleloader.dataset import RemoteDataset
from teleloader.fetch.direct import DirectDataset
from teleloader_shared import local
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.spec import DEFAULT_COLLATE


def name_on_server(
    owner: object,
    argument: str,
    function: Callable[..., Any] | str | None,
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
        function: Value of the argument: a callable, or its name on the server, as ``module:name``. A callable without a
            name of its own, such as an instance of a class, has the name of the variable of a module that refers to it.
        dataset: Dataset of the loader.
        batched: False if `function` is called with single samples (``batch_size=None``), not lists of samples.

    Raises:
        TypeError: If `function` is neither callable nor a name, or is a name and the dataset is hosted in this process.
        ValueError: If the server does not allow a function of that name.
    """
    if function is None:
        return None
    is_local = isinstance(dataset, DirectDataset) or dataset.is_here
    if not (callable(function) or (isinstance(function, str) and ":" in function and not is_local)):
        names = "" if is_local else ", or the name of a function on the server, as 'module:name'"
        raise TypeError(f"{argument} must be a function{names}; got {function!r:.80}")
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if argument == "collate_fn" and _is_torchs_default(module, name, batched=batched):
        return None if dataset.info.collate == DEFAULT_COLLATE else DEFAULT_COLLATE
    if isinstance(dataset, DirectDataset) or dataset.is_here:
        return local.register_function(owner, argument)
    info = dataset.info
    default = info.collate if argument == "collate_fn" else info.worker_init
    found = function if isinstance(function, str) else _variable(function, [default or "", *info.functions])
    if found is None and isinstance(function, FunctionType | BuiltinFunctionType | type) and "<" not in str(name):
        found = f"{module}:{name}"
    if found is None:
        raise _unnamed(argument, function, dataset.url)
    if found == default:
        return None
    _check_allowed(argument, found, info, dataset.url)
    return found


def _variable(function: object, names: list[str]) -> str | None:
    """Return the first of the names that refers to `function` in an imported module of this process, or None.

    The names come from the server. Modules are therefore not imported, and attributes of objects not evaluated.
    """
    for each in names:
        module, _, variable = each.partition(":")
        variables = getattr(sys.modules.get(module), "__dict__", {})
        if module != "__main__" and variable in variables and variables[variable] is function:
            return each
    return None


def _unnamed(argument: str, function: object, url: str) -> ValueError:
    """Create the error for a callable without a name on the server; the text shows how to name the callable."""
    variable, parameter = ("collate", "samples") if argument == "collate_fn" else ("init", "worker_id")
    owner = getattr(function, "__self__", function)  # that of a bound method
    if isinstance(function, FunctionType):
        definition = f"def {variable}({parameter}): ..."
    else:
        method = "" if owner is function else f".{getattr(function, '__name__', '')}"
        definition = f"{variable} = {type(owner).__name__}(...){method}"
    shown, name = getattr(function, "__qualname__", None) or repr(function)[:80], f"my_package.data:{variable}"
    return ValueError(
        f"{argument}={shown} runs on the server, but {url} finds functions only by the names in its configuration. "
        f"Define it in a module that is installed on the server, for example in my_package/data.py: {definition}; add "
        f'functions = ["{name}"] to the server\'s configuration; then pass {argument}="{name}", or import the object '
        "from that module"
    )


def _check_allowed(argument: str, function: str, info: DatasetInfo, url: str) -> None:
    if argument == "worker_init_fn" and info.kind == "map":
        raise ValueError(
            f"cannot use worker_init_fn={function}: all loaders share the workers of map-style dataset {info.name!r}. "
            f"Set worker_init in the configuration of {url} (now: {info.worker_init or 'none'}). A function that only "
            "seeds random generators can be omitted: workers seed them"
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
