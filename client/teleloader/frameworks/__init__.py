"""Integration of Hugging Face accelerate and Lightning, without importing them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any


class SkippedBatches:
    """Loader wrapper that skips the first batches of each epoch; result of ``accelerate.skip_first_batches``.

    All attributes, including `set_epoch` and `state_dict`, are those of the wrapped loader.

    Args:
        loader: The loader to wrap.
        num_batches: Number of batches to skip.
        begin: Callback that returns an iterator of the loader's next epoch, starting at the given batch number.
    """

    def __init__(self, loader: Any, num_batches: int, begin: Callable[[int], Iterator[Any]]) -> None:
        self._loader = loader
        self._num_batches = num_batches
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin(self._num_batches)

    def __len__(self) -> int:
        return max(0, len(self._loader) - self._num_batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not yet set while copy or pickle creates this object
            raise AttributeError(name)
        return getattr(self._loader, name)


def is_lightnings_seeding(function: Any) -> bool:
    """Return True for the `worker_init_fn` by which Lightning's ``seed_everything`` seeds the workers of a loader.

    Loaders ignore it: servers cannot import it, and seed the random generators before each batch.
    """
    return getattr(getattr(function, "func", None), "__name__", None) == "pl_worker_init_function"


def integrate_accelerate(kind: type, skip: Callable[[Any, int], SkippedBatches]) -> None:
    """Patch accelerate, if imported, to prepare loaders of class `kind`.

    accelerate would ignore a loader that is not torch's, or build a torch DataLoader from its `dataset` and
    `batch_sampler`, and thereby lose all options of the server; accelerate has no hook to prevent this. Three of its
    functions are therefore wrapped: `prepare_data_loader` and `skip_first_batches`, in all modules that have imported
    them, and `Accelerator._prepare_one`.

    Args:
        kind: Class of the loaders.
        skip: Callback that wraps a loader to skip the given number of batches.
    """
    module = sys.modules.get("accelerate.data_loader")
    accelerator = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    if accelerator is None or module is None or hasattr(module.skip_first_batches, "handles_teleloader"):
        return
    from teleloader.frameworks.accelerate import PreparedLoader, prepare

    prepare_one, original_prepare, original_skip = (
        accelerator._prepare_one, module.prepare_data_loader, module.skip_first_batches,
    )  # fmt: skip

    @functools.wraps(original_skip)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if type(dataloader) is PreparedLoader:
            return dataloader.skip(num_batches, skip)
        return skip(dataloader, num_batches) if isinstance(dataloader, kind) else original_skip(dataloader, num_batches)

    @functools.wraps(original_prepare)
    def prepare_data_loader(dataloader: Any, *arguments: Any, **options: Any) -> Any:
        function = functools.partial(prepare, original_prepare) if isinstance(dataloader, kind) else original_prepare
        return function(dataloader, *arguments, **options)

    @functools.wraps(prepare_one)
    def _prepare_one(self: Any, obj: Any, first_pass: bool = False, device_placement: bool | None = None) -> Any:
        if first_pass and isinstance(obj, kind):
            return self.prepare_data_loader(obj, device_placement=device_placement)
        return prepare_one(self, obj, first_pass=first_pass, device_placement=device_placement)

    skip_first_batches.handles_teleloader = True  # type: ignore[attr-defined]
    accelerator._prepare_one = _prepare_one
    for name, original, replacement in (
        ("skip_first_batches", original_skip, skip_first_batches),
        ("prepare_data_loader", original_prepare, prepare_data_loader),
    ):
        for importing in list(sys.modules.values()):
            if getattr(importing, "__dict__", {}).get(name) is original:
                setattr(importing, name, replacement)
