"""Loader as `accelerate.Accelerator.prepare` returns it; imported only if accelerate is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler, get_sampler
from accelerate.state import PartialState
from torch.utils.data import BatchSampler

from teleloader.frameworks.plan_sampler import PlanSampler
from teleloader_shared.orders.seeding import derive_seed


class PreparedLoader(DataLoaderShard):  # type: ignore[misc, unused-ignore]
    """accelerate's own loader class, which iterates a teleloader DataLoader in place of torch's.

    accelerate's code therefore reads one batch ahead, reports the end and the remainder of the epoch to
    `accelerate.state.GradientState`, and copies batches to the device.

    Args:
        shard: accelerate's loader, whose torch DataLoader is replaced.
        loader: Loader of this process's batches, with the methods of `teleloader.DataLoader`.
    """

    def __init__(self, shard: DataLoaderShard, loader: Any) -> None:
        self.__dict__.update(shard.__dict__)
        self.base_dataloader = loader
        self._update_state_dict()

    def skip(self, num_batches: int, skip: Callable[[Any, int], Any]) -> PreparedLoader:
        """Return a prepared loader that skips the first batches of each epoch."""
        return PreparedLoader(self, skip(self.base_dataloader, num_batches))

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch of the next ``iter()``; each ``iter()`` calls this method, as accelerate does."""
        super().set_epoch(epoch)
        self.base_dataloader.set_epoch(epoch)
        self._update_state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch that was yielded last, not after the one that was read ahead."""
        state: dict[str, Any] = self.base_dataloader._state_at(self._position)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved position: the next ``iter()`` begins with the batch after this position."""
        self.base_dataloader.load_state_dict(state_dict)
        self.iteration = state_dict["epoch"]
        self._update_state_dict()

    def _update_state_dict(self) -> None:
        # called for each batch, in place of accelerate's method, which stores a whole state
        self._position = self.base_dataloader._position()


def prepare(original: Callable[..., DataLoaderShard], loader: Any, *arguments: Any, **options: Any) -> PreparedLoader:
    """Prepare a loader as ``accelerate.data_loader.prepare_data_loader`` prepares torch's.

    With several processes, batch k of the loader's order belongs to process k modulo their number, as with torch. A
    loader with `rank` or `world_size`, or with an iterable-style dataset, divides the epoch itself: accelerate then
    knows no remainder, and `gather_for_metrics` removes no samples.

    Args:
        original: accelerate's function.
        loader: The `teleloader.DataLoader`.
        arguments: Further positional arguments of accelerate's function.
        options: Keyword arguments of accelerate's function.

    Raises:
        ValueError: If accelerate's options are not supported for this loader, or the loader has `balance` or
            `packing`.
    """
    if loader.balance is not None or loader.packing is not None:
        raise ValueError(
            "accelerate cannot prepare a DataLoader with balance or packing, whose order no sampler of torch has: pass "
            "rank= and world_size= to the DataLoader, and use the loader without prepare()"
        )
    given = inspect.signature(original).bind(loader, *arguments, **options).arguments
    processes, divides_epoch = PartialState().num_processes, loader._divides_epoch
    _check(loader, given, processes)
    if divides_epoch:
        given["num_processes"], given["process_index"] = 1, 0
    # the torch DataLoader that accelerate constructs need not be torchdata's
    is_stateful = given.pop("use_stateful_dataloader", False)
    shard = original(**{**given, "dataloader": _view(loader), "dispatch_batches": False})
    shard.use_stateful_dataloader = is_stateful
    shard._drop_last |= divides_epoch  # no remainder
    sampler = get_sampler(shard)
    if isinstance(sampler, SeedableRandomSampler) and sampler.generator is None:
        sampler.generator = torch.Generator()  # else created by the first iteration, and states would differ before
    if processes > 1 and not divides_epoch:
        loader = loader._with_sampler(shard.sampler, shard.batch_sampler, _generator(loader))
    return PreparedLoader(shard, loader)


def _view(loader: Any) -> Any:
    """Return the attributes from which accelerate constructs a torch DataLoader, which `PreparedLoader` replaces."""
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    if loader._seed is not None and batch_sampler is not None:
        sampler = PlanSampler(loader.dataset, replace(loader.spec, rank=0, world_size=1), distributed=False)
        batch_sampler = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    return SimpleNamespace(
        dataset=loader.dataset, sampler=sampler, batch_sampler=batch_sampler, batch_size=loader.batch_size,
        drop_last=loader.drop_last, generator=loader.generator, prefetch_factor=None,
    )  # fmt: skip


def _generator(loader: Any) -> Any:
    """Return the generator of the base seeds of this process."""
    if loader._seed is None:
        return loader.generator
    return torch.Generator().manual_seed(derive_seed("base", loader._seed, PartialState().process_index))


def _check(loader: Any, given: dict[str, Any], processes: int) -> None:
    """Refuse options of accelerate that the loader cannot support."""
    if given.get("dispatch_batches"):
        raise ValueError(
            "dispatch_batches=True is not supported with a teleloader DataLoader: each process receives its own "
            "batches from the server. Remove dispatch_batches"
        )
    if processes == 1:
        return
    if given.get("split_batches") and loader._divides_epoch:
        raise ValueError(
            "split_batches=True is not supported with an iterable-style dataset or rank=: the loader divides the epoch "
            "itself. Remove split_batches, and divide batch_size by the number of processes"
        )
    if loader._divides_epoch and loader.num_workers == 0 and loader.batch_sampler is None:
        raise ValueError(
            "num_workers=0 gives each process the whole iterable-style dataset: pass num_workers=1 or more, the number "
            "of shards of each process"
        )
