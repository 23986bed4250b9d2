"""Hugging Face accelerate integration: prevents accelerate from replacing the loader with a torch DataLoader."""

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


def integrate_accelerate(kind: type, skip: Callable[[Any, int], SkippedBatches]) -> None:
    """Patch accelerate, if imported, to leave loaders of class `kind` in place.

    accelerate would build a new torch DataLoader from a loader's `dataset` and `batch_sampler`, and thereby lose the
    order of ``seed=`` and all options of the server; accelerate has no hook to prevent this. Two of its functions are
    therefore wrapped: `skip_first_batches`, in all modules that have imported it, and `Accelerator._prepare_one`.

    Args:
        kind: Class of the loaders.
        skip: Callback that wraps a loader to skip the given number of batches.
    """
    module = sys.modules.get("accelerate.data_loader")
    accelerator = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    original = getattr(module, "skip_first_batches", None)
    if accelerator is None or original is None or hasattr(original, "handles_teleloader"):
        return
    prepare_one = accelerator._prepare_one

    @functools.wraps(original)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        return skip(dataloader, num_batches) if isinstance(dataloader, kind) else original(dataloader, num_batches)

    @functools.wraps(prepare_one)
    def _prepare_one(self: Any, obj: Any, first_pass: bool = False, **options: Any) -> Any:
        if first_pass and isinstance(obj, kind) and self.use_stateful_dataloader:
            obj.use_stateful_dataloader = True  # type: ignore[attr-defined]
            return self.prepare_data_loader(obj)
        return prepare_one(self, obj, first_pass=first_pass, **options)

    skip_first_batches.handles_teleloader = True  # type: ignore[attr-defined]
    accelerator._prepare_one = _prepare_one
    for importing in list(sys.modules.values()):
        if getattr(importing, "__dict__", {}).get("skip_first_batches") is original:
            importing.skip_first_batches = skip_first_batches  # type: ignore[attr-defined, unused-ignore]
