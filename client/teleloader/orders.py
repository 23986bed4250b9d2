"""Orders of an epoch: the seeded order of a `Plan`, a client-side sampler, or the stream of an iterable-style dataset.

A loader makes one object of each order that its arguments allow. An order owns what only it needs: its length, what
servers are told about it, and the fields of a saved state that must agree when training resumes.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sized
from dataclasses import replace
from typing import Any, ClassVar

from teleloader.fetch.length_check import LengthCheck
from teleloader.sampling import IndexLists, ShownSamplers, end_epoch, initial_state, is_torchs_own
from teleloader.state import Position
from teleloader_shared.orders.plan import Plan
from teleloader_shared.spec import MAX_EPOCH, LoaderSpec


class Order(ABC):
    """Order of the batches of each epoch."""

    name: ClassVar[str]
    """Name in saved states."""
    description: ClassVar[str]
    """Description in error messages."""
    identity: ClassVar[tuple[str, ...]]
    """Arguments of a loader that must be equal in the one that resumes."""
    has_plan: ClassVar[bool] = False
    """True if every process can compute the batches of every epoch, so that servers share them between loaders."""
    is_drawn: ClassVar[bool] = False
    """True if the order of an epoch is drawn from random generators, whose states are saved."""
    has_shards: ClassVar[bool] = False
    """True if batches come from shards, each of which has a position on one server."""
    user_sampler: Any = None
    """The `sampler` or `batch_sampler` argument of the loader."""

    @property
    def adaptive(self) -> bool:
        """Return True if a fast training loop is given more batches ahead than `prefetch_factor`."""
        return self.has_plan

    @abstractmethod
    def length(self, spec: LoaderSpec) -> int:
        """Return the number of batches of an epoch.

        Raises:
            TypeError: If the dataset or the sampler has no length.
        """

    def plan(self, spec: LoaderSpec, epoch: int, length: int | None = None) -> Plan | None:
        """Return the indices of all batches; None unless `has_plan`.

        Args:
            spec: The loader.
            epoch: The epoch.
            length: Samples in the dataset; None takes ``len(dataset)``.
        """
        return None

    def extent(self, spec: LoaderSpec, epoch: int, length: int | None) -> tuple[int | None, int | None]:
        """Return the number of batches of this rank, and the largest number of any rank; None where unknown."""
        return None, None

    def batches(self, stop: int) -> Sized | None:
        """Return an object whose length is that of the iterator; None if it has none.

        Args:
            stop: Number of batches, as far as `extent` knows it.
        """
        return None

    def private_spec(self, spec: LoaderSpec, base_seed: int) -> LoaderSpec:
        """Return `spec` for a pool of workers that serves one loader.

        Args:
            spec: The loader.
            base_seed: Seed of the workers' random generators, drawn for this epoch.
        """
        return replace(spec, seed=base_seed)

    def global_batch_size(self, spec: LoaderSpec) -> int | None:
        """Return the samples in a batch of all ranks; None if positions are counted in batches."""
        return (spec.batch_size or 1) * spec.world_size if self.has_plan else None

    def initial(self, position: Position) -> Position:
        """Return `position`, with the state of a sampler that has one and was not iterated."""
        return position

    def resume(self, position: Position) -> None:  # noqa: B027 - only samplers have a state
        """Bring the sampler to where the epoch before `position` left it."""

    def index_lists(self, position: Position) -> IndexLists | None:
        """Return the index lists of the epoch from `position` on; None if servers compute them."""
        return None

    def length_check(self, num_workers: int, length: int | None) -> LengthCheck | None:
        """Return the check of the length of an iterable-style dataset; None for other datasets.

        Args:
            num_workers: Number of shards; 0 is one pass without workers.
            length: ``len(dataset)``; None if it is unknown, or counts samples of other ranks.
        """
        return None


class PlanOrder(Order):
    """Seeded order, or no shuffling: a function of the seed and the epoch.

    Args:
        dataset: A dataset with a length.
        seeded: Whether `seed` was given.
    """

    name = "plan"
    description = "a plan"
    identity = ("seed", "shuffle")
    has_plan = True

    def __init__(self, dataset: Sized, *, seeded: bool) -> None:
        self._dataset = dataset
        self._seeded = seeded

    def length(self, spec: LoaderSpec) -> int:
        """Return the number of batches of an epoch of this rank."""
        return len(self.plan(spec, 0))

    def plan(self, spec: LoaderSpec, epoch: int, length: int | None = None) -> Plan:
        """Return the indices of all batches."""
        return Plan(spec, len(self._dataset) if length is None else length, epoch)

    def extent(self, spec: LoaderSpec, epoch: int, length: int | None) -> tuple[int, int]:
        """Return the numbers of batches for this rank and for the rank that has the most."""
        # with tail="uneven" rank 0 has the most
        return len(self.plan(spec, epoch, length)), len(self.plan(replace(spec, rank=0), epoch, length))

    def batches(self, stop: int) -> Sized:
        """Return a range of the batch numbers."""
        return range(stop)

    def private_spec(self, spec: LoaderSpec, base_seed: int) -> LoaderSpec:
        """Return `spec`; without a seed and shuffling its workers have the base seed."""
        # a shuffled plan is that of all ranks, which need not have drawn the same base seed
        return spec if self._seeded or spec.shuffle else replace(spec, seed=base_seed)


class SamplerOrder(Order):
    """Client-side sampler of torch or of the user, whose index lists are sent to the server.

    Args:
        sampler: Yields an index list for each batch; with ``batch_size=None`` an index for each sample.
        user_sampler: The `sampler` or `batch_sampler` argument of the loader; None if the loader made `sampler`.
        batched: Whether `sampler` yields lists.
    """

    name = "client"
    description = "that of a sampler"
    identity = ("batch_size",)
    is_drawn = True

    def __init__(self, sampler: Any, user_sampler: Any, *, batched: bool) -> None:
        self._sampler = sampler
        self._batched = batched
        self.user_sampler = user_sampler

    @property
    def adaptive(self) -> bool:
        """Return False for a sampler of the user's, which may depend on the progress of training.

        The user may have replaced the sampler since the last epoch.
        """
        return is_torchs_own(self._sampler)

    def length(self, spec: LoaderSpec) -> int:
        """Return the length of the sampler."""
        return len(self._sampler)

    def batches(self, stop: int) -> Sized:
        """Return the sampler."""
        sampler: Sized = self._sampler
        return sampler

    def private_spec(self, spec: LoaderSpec, base_seed: int) -> LoaderSpec:
        """Return `spec` for index lists that the client sends."""
        size = 1 if self._batched else None
        return replace(spec, seed=base_seed, order="client", shuffle=False, drop_last=False, batch_size=size)

    def initial(self, position: Position) -> Position:
        """Return `position`, with the state of a stateful sampler that was not iterated."""
        return position if position.sampler is not None else position._replace(sampler=initial_state(self._sampler))

    def resume(self, position: Position) -> None:
        """Bring the sampler to where the epoch before `position` left it."""
        if position.sampler is not None:
            end_epoch(self._sampler, position.sampler)

    def index_lists(self, position: Position) -> IndexLists:
        """Return the index lists that the sampler yields from `position` on."""
        return IndexLists(self._sampler, position.batch, position.sampler)


class StreamOrder(Order):
    """Order of an iterable-style dataset: batch j comes from shard j mod `num_workers`.

    Args:
        dataset: The dataset.
        may_repeat: Whether to warn when each shard yields the whole dataset: not if a `worker_init_fn` divides it.
    """

    name = "iterable"
    description = "that of an iterable-style dataset"
    identity = ("batch_size", "num_workers")
    has_shards = True

    def __init__(self, dataset: Any, *, may_repeat: bool) -> None:
        self._dataset = dataset
        self._may_repeat = may_repeat
        self._reported: int | None = None
        """``len(dataset)`` when ``len(loader)`` was last called."""

    def length(self, spec: LoaderSpec) -> int:
        """Return the number of batches in ``len(dataset)`` samples, as torch computes it."""
        length = self._reported = len(self._dataset)
        size = spec.batch_size or 1
        return length // size if spec.drop_last else -(-length // size)

    def extent(self, spec: LoaderSpec, epoch: int, length: int | None) -> tuple[int, None]:
        """Return the most batches that an epoch can have: shards report their ends."""
        return MAX_EPOCH, None

    def length_check(self, num_workers: int, length: int | None) -> LengthCheck:
        """Return the check; only the first one warns of shards that repeat the dataset."""
        may_repeat, self._may_repeat = self._may_repeat, False
        return LengthCheck(self._dataset, num_workers, self._reported, length, may_repeat=may_repeat)


class Orders:
    """Selects the order of each epoch from the arguments of a loader.

    Args:
        dataset: The dataset.
        samplers: `sampler` and `batch_sampler` of the loader, given or made.
        user_sampler: The one that was given; None if none was.
        iterable: Whether the dataset is iterable-style.
        seeded: Whether `seed` was given.
        may_repeat: See `StreamOrder`.
    """

    def __init__(
        self,
        dataset: Any,
        samplers: tuple[Any, Any],
        user_sampler: Any,
        *,
        iterable: bool,
        seeded: bool,
        may_repeat: bool,
    ) -> None:
        sampler, batch_sampler = samplers
        index_sampler = sampler if batch_sampler is None else batch_sampler
        self._drawn = SamplerOrder(index_sampler, user_sampler, batched=batch_sampler is not None)
        self._plan = PlanOrder(dataset, seeded=seeded)
        self._fixed: Order | None = None if user_sampler is None else self._drawn
        if iterable:
            self._fixed = StreamOrder(dataset, may_repeat=may_repeat)
        self._shown = ShownSamplers(*(samplers if self._fixed is None else ()))

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the user's sampler, if it has one."""
        set_epoch = getattr(self._drawn.user_sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def choose(self, spec: LoaderSpec, *, as_torch: bool) -> Order:
        """Return the order of the next epoch: the number of ranks and the samplers may have changed.

        Args:
            spec: The loader.
            as_torch: Whether samplers shuffle, because there is no seed and one rank.

        Raises:
            ValueError: If the user changed a sampler and another order is in force.
        """
        if self._fixed is not None:
            return self._fixed
        change = self._shown.change
        if as_torch:
            return self._drawn if spec.shuffle or change else self._plan
        if change:
            raise ValueError(
                f"{change} was changed, but the order is that of seed={spec.seed}, rank={spec.rank}, "
                f"world_size={spec.world_size}: create another DataLoader with the new arguments"
            )
        return self._plan


def distributed_rank() -> tuple[int, int]:
    """Return rank and world size of torch.distributed where it is initialised, without loading torch; else (0, 1)."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
