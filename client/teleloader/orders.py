"""Sample orders of a loader: seeded order (`Plan`), client-side sampler, or stream of an iterable-style dataset.

A loader creates an object for each order that its arguments allow. An order implements the behaviour that is specific
to it: the number of batches, the loader spec for servers, and the values that must be equal when training resumes.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sized
from dataclasses import replace
from typing import Any, ClassVar

from teleloader.fetch.length_check import LengthCheck
from teleloader.forecast import MAX_MISSES, MAX_SAMPLES, Forecast
from teleloader.sampling import (
    IndexLists,
    ShownSamplers,
    batched_sampler,
    end_epoch,
    initial_state,
    is_torchs_own,
    nested_samplers,
)
from teleloader.state import Position
from teleloader_shared.lengths import Lengths
from teleloader_shared.orders.plan import Plan
from teleloader_shared.spec import MAX_EPOCH, LoaderSpec


class Order(ABC):
    """Interface of sample orders; an order determines the sequence in which a loader yields the samples of an epoch."""

    name: ClassVar[str]
    """Name in saved states."""
    description: ClassVar[str]
    """Description in error messages."""
    identity: ClassVar[tuple[str, ...]]
    """Arguments that must be equal in a loader that resumes from a saved state."""
    has_plan: ClassVar[bool] = False
    """True if every process can compute the indices of every batch, so that servers share batches between loaders."""
    is_drawn: ClassVar[bool] = False
    """True if the order of an epoch is drawn from random generators, whose states are saved."""
    has_shards: ClassVar[bool] = False
    """True if the dataset is iterable-style: its batches come from shards, and one server iterates each shard."""
    user_sampler: Any = None
    """Value of the loader's `sampler` or `batch_sampler` argument; None if neither was given."""
    _misses = 0
    """Number of consecutive wrong forecasts."""

    @property
    def adaptive(self) -> bool:
        """True if a fast training loop may extend the prefetch window beyond `prefetch_factor`."""
        return self.has_plan

    def algorithms(self, spec: LoaderSpec) -> frozenset[str]:
        """Return the names of the algorithms that determine the batches, see `teleloader_shared.algorithms`."""
        return spec.algorithms

    @abstractmethod
    def length(self, spec: LoaderSpec, epoch: int) -> int:
        """Return the number of batches of an epoch, for ``len(loader)``.

        Raises:
            TypeError: If the dataset or the sampler has no length.
        """

    def plan(self, spec: LoaderSpec, epoch: int, length: int | None = None) -> Plan | None:
        """Return the plan with the sample indices of each batch in an epoch, or None if `has_plan` is False.

        Args:
            spec: Parameters of the loader.
            epoch: Epoch number.
            length: Number of samples in the dataset; None uses ``len(dataset)``.
        """
        return None

    def extent(self, spec: LoaderSpec, epoch: int, length: int | None) -> tuple[int | None, int | None]:
        """Return the batch count of this rank and the maximum batch count of all ranks, each None if unknown."""
        return None, None

    def batches(self, stop: int) -> Sized | None:
        """Return a sized object that provides ``len()`` of the iterator, or None if the iterator has no length.

        Args:
            stop: Number of batches, as far as `extent` knows it.
        """
        return None

    def private_spec(self, spec: LoaderSpec, base_seed: int) -> LoaderSpec:
        """Adapt a loader's spec to a private worker pool.

        Args:
            spec: Parameters of the loader.
            base_seed: Seed of the workers' random generators, drawn for this epoch.
        """
        return replace(spec, seed=base_seed)

    def global_batch_size(self, spec: LoaderSpec) -> int | None:
        """Return the number of samples per step of all ranks, or None if saved positions count batches of this rank.

        With `max_tokens`, the number of batches per step: saved positions count the batches of all ranks. With
        `packing`, the number of sequences per step.
        """
        if spec.has_token_batches:
            return spec.world_size
        return (spec.batch_size or 1) * spec.world_size if self.has_plan else None

    def initial(self, position: Position) -> Position:
        """Return `position`; if it lacks a sampler state, add the initial state of a stateful sampler."""
        return position

    def resume(self, position: Position) -> None:  # noqa: B027 - only samplers have a state
        """Advance a stateful sampler to its state at the end of the epoch before `position`."""

    def index_lists(self, position: Position) -> IndexLists | None:
        """Return the index lists to send to servers, starting at `position`, or None if servers compute the indices."""
        return None

    @property
    def can_forecast(self) -> bool:
        """True if the base seed and the index lists of the next epoch can be forecast."""
        return False

    def forecast_ended(self, is_right: bool) -> None:
        """Record whether the epoch that started was the one that was forecast."""
        self._misses = 0 if is_right else self._misses + 1

    def forecast(self, generator: Any, *, draws_base_seed: bool, skip: int) -> Forecast:
        """Forecast the index lists of the next epoch; arguments as of `Forecast`."""
        raise NotImplementedError

    def length_check(self, num_workers: int, length: int | None) -> LengthCheck | None:
        """Return the sample count check of an iterable-style dataset, or None for a map-style dataset.

        Args:
            num_workers: Number of shards; 0 for one pass without workers.
            length: ``len(dataset)``; None if unknown, or if it includes samples of other ranks.
        """
        return None


class PlanOrder(Order):
    """Seeded or sequential order, computed from the seed and the epoch.

    Args:
        dataset: Dataset with a length.
        seeded: Whether the `seed` argument was given.
        lengths: Function that returns the lengths of the samples; called only for orders that depend on them.
    """

    name = "plan"
    description = "a plan"
    identity = ("seed", "shuffle")
    has_plan = True

    def __init__(self, dataset: Sized, *, seeded: bool, lengths: Callable[[], Lengths]) -> None:
        self._dataset = dataset
        self._seeded = seeded
        self._lengths = lengths

    def length(self, spec: LoaderSpec, epoch: int) -> int:
        """Return the number of batches of the epoch on this rank; epochs differ only with `max_tokens` or `packing`."""
        return self._batches(spec, epoch, None)

    def plan(self, spec: LoaderSpec, epoch: int, length: int | None = None) -> Plan:
        """Return the plan with the sample indices of each batch in an epoch."""
        lengths = None if spec.required_lengths is None else self._lengths()
        return Plan(spec, len(self._dataset) if length is None else length, epoch, lengths)

    def extent(self, spec: LoaderSpec, epoch: int, length: int | None) -> tuple[int, int]:
        """Return the batch count of this rank and the maximum batch count of all ranks."""
        # with tail="uneven", rank 0 has the most batches
        return self._batches(spec, epoch, length), self._batches(replace(spec, rank=0), epoch, length)

    def _batches(self, spec: LoaderSpec, epoch: int, length: int | None) -> int:
        if spec.is_prepared:
            return len(self.plan(spec, epoch, length))
        return len(Plan(spec, len(self._dataset) if length is None else length, epoch))

    def batches(self, stop: int) -> Sized:
        """Return the range of batch numbers, which provides ``len()`` of the iterator."""
        return range(stop)

    def private_spec(self, spec: LoaderSpec, base_seed: int) -> LoaderSpec:
        """Adapt a loader's spec to a private worker pool: set the base seed if no other seed determines the batches."""
        # all ranks must shuffle with the same seed, and need not have drawn the same base seed
        return spec if self._seeded or spec.shuffle else replace(spec, seed=base_seed)


class SamplerOrder(Order):
    """Order of a client-side sampler (torch's or the user's), whose index lists are sent to the server.

    Args:
        sampler: Yields an index list for each batch; with ``batch_size=None`` an index for each sample.
        user_sampler: Value of the loader's `sampler` or `batch_sampler` argument; None if the loader created `sampler`.
        batched: Whether `sampler` yields lists.
    """

    name = "client"
    description = "determined by a sampler"
    identity = ("batch_size",)
    is_drawn = True

    def __init__(self, sampler: Any, user_sampler: Any, *, batched: bool) -> None:
        self._sampler = sampler
        self._batched = batched
        self.user_sampler = user_sampler
        self._epochs: dict[int, tuple[int, int]] = {}
        """For each sampler with an `epoch` attribute, by ``id()``: its value at the last start of an epoch, and by how
        much it had changed since the start before."""

    @property
    def adaptive(self) -> bool:
        """True if the prefetch window may grow beyond `prefetch_factor`: only for torch's own samplers.

        The order of a user's sampler may depend on the progress of training, so on each server, index lists are not
        drawn further ahead than in torch. Not cached, because the user can replace the sampler between epochs.
        """
        return is_torchs_own(self._sampler)

    def length(self, spec: LoaderSpec, epoch: int) -> int:
        """Return the length of the sampler, which is the number of batches per epoch."""
        return len(self._sampler)

    def batches(self, stop: int) -> Sized:
        """Return the sampler, which provides ``len()`` of the iterator."""
        sampler: Sized = self._sampler
        return sampler

    def algorithms(self, spec: LoaderSpec) -> frozenset[str]:
        """Return the names of the algorithms that determine the batches; those of the sampler run in this process."""
        return spec.algorithms - {"permutation", "partition"} | {"sampling"}

    def private_spec(self, spec: LoaderSpec, base_seed: int) -> LoaderSpec:
        """Adapt a loader's spec to a private worker pool that receives index lists from the client."""
        size = 1 if self._batched else None
        return replace(spec, seed=base_seed, order="client", shuffle=False, drop_last=False, batch_size=size)

    def initial(self, position: Position) -> Position:
        """Return `position`; if it lacks a sampler state, add the initial state of a stateful sampler."""
        return position if position.sampler is not None else position._replace(sampler=initial_state(self._sampler))

    def resume(self, position: Position) -> None:
        """Advance a stateful sampler to its state at the end of the epoch before `position`."""
        if position.sampler is not None:
            end_epoch(self._sampler, position.sampler)

    def index_lists(self, position: Position) -> IndexLists:
        """Create the index lists to draw from the sampler, starting at `position`."""
        for sampler in self._samplers_with_epoch:
            last, _ = self._epochs.get(id(sampler), (sampler.epoch - 1, 1))
            self._epochs[id(sampler)] = (sampler.epoch, sampler.epoch - last)
        return IndexLists(self._sampler, position.batch, position.sampler)

    @property
    def can_forecast(self) -> bool:
        """True if the next epoch can be forecast: only for torch's own samplers, of up to `MAX_SAMPLES` samples.

        A user's sampler may have side effects, and its order may depend on the progress of training.
        """
        source = batched_sampler(self._sampler)
        return self._misses < MAX_MISSES and is_torchs_own(source) and len(source) <= MAX_SAMPLES

    def forecast(self, generator: Any, *, draws_base_seed: bool, skip: int) -> Forecast:
        """Forecast the index lists of the next epoch; arguments as of `Forecast`."""
        epochs = {}
        for sampler in self._samplers_with_epoch:
            # unless set_epoch was called for the next epoch: changed as before the current one
            last, change = self._epochs.get(id(sampler), (sampler.epoch, 0))
            epochs[id(sampler)] = sampler.epoch + change if sampler.epoch == last else sampler.epoch
        return Forecast(
            self._sampler, generator, draws_base_seed=draws_base_seed, skip=skip, epochs=epochs,
            ended=self.forecast_ended,
        )  # fmt: skip

    @property
    def _samplers_with_epoch(self) -> list[Any]:
        if not is_torchs_own(batched_sampler(self._sampler)):
            return []
        return [each for each in nested_samplers(self._sampler) if isinstance(getattr(each, "epoch", None), int)]


class StreamOrder(Order):
    """Order of an iterable-style dataset: batch j comes from shard j mod `num_workers`.

    Args:
        dataset: Iterable-style dataset, remote or an object of this process.
        may_repeat: Whether to warn if each shard yields the whole dataset; False if a `worker_init_fn` may divide the
            dataset.
    """

    name = "iterable"
    description = "determined by an iterable-style dataset"
    identity = ("batch_size", "num_workers", "shuffle_buffer_size")
    has_shards = True

    def __init__(self, dataset: Any, *, may_repeat: bool) -> None:
        self._dataset = dataset
        self._may_repeat = may_repeat
        self._reported: int | None = None
        """``len(dataset)`` when ``len(loader)`` was last called."""

    def length(self, spec: LoaderSpec, epoch: int) -> int:
        """Return the number of batches for ``len(dataset)`` samples, computed as in torch."""
        length = self._reported = len(self._dataset)
        size = spec.batch_size or 1
        return length // size if spec.drop_last else -(-length // size)

    def extent(self, spec: LoaderSpec, epoch: int, length: int | None) -> tuple[int, None]:
        """Return an upper bound of the batch count, and None: each shard reports its end only during the epoch."""
        return MAX_EPOCH, None

    @property
    def can_forecast(self) -> bool:
        """True if the base seed can be forecast."""
        return self._misses < MAX_MISSES

    def length_check(self, num_workers: int, length: int | None) -> LengthCheck:
        """Create the sample count check; only the first check of a loader warns of shards that repeat the dataset."""
        may_repeat, self._may_repeat = self._may_repeat, False
        return LengthCheck(self._dataset, num_workers, self._reported, length, may_repeat=may_repeat)


class Orders:
    """Selector of a loader's sample order for each epoch.

    Args:
        dataset: Dataset of the loader.
        samplers: `sampler` and `batch_sampler` attributes of the loader.
        user_sampler: Value of the loader's `sampler` or `batch_sampler` argument; None if neither was given.
        iterable: Whether the dataset is iterable-style.
        seeded: Whether the `seed` argument was given.
        may_repeat: See `StreamOrder`.
        lengths: See `PlanOrder`.
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
        lengths: Callable[[], Lengths],
    ) -> None:
        sampler, batch_sampler = samplers
        index_sampler = sampler if batch_sampler is None else batch_sampler
        self._drawn = SamplerOrder(index_sampler, user_sampler, batched=batch_sampler is not None)
        self._plan = PlanOrder(dataset, seeded=seeded, lengths=lengths)
        self._fixed: Order | None = None if user_sampler is None else self._drawn
        if iterable:
            self._fixed = StreamOrder(dataset, may_repeat=may_repeat)
        self._shown = ShownSamplers(*(samplers if self._fixed is None else ()))

    def set_epoch(self, epoch: int) -> None:
        """Call the ``set_epoch`` method of the user's sampler, if available."""
        set_epoch = getattr(self._drawn.user_sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def choose(self, spec: LoaderSpec, *, as_torch: bool) -> Order:
        """Return the sample order of the next epoch, which may differ if the world size or a sampler changed.

        Args:
            spec: Parameters of the loader.
            as_torch: Whether samplers determine the order, as in torch; False with `seed` or several ranks.

        Raises:
            ValueError: If the user changed a sampler although the samplers do not determine the order.
        """
        if self._fixed is not None:
            return self._fixed
        change = self._shown.change
        if as_torch:
            return self._drawn if spec.shuffle or change else self._plan
        if change:
            raise ValueError(
                f"cannot change {change}: seed={spec.seed}, rank={spec.rank} and world_size={spec.world_size} "
                "determine the order. Create another DataLoader with the new arguments"
            )
        return self._plan


def distributed_rank() -> tuple[int, int]:
    """Return rank and world size of torch.distributed if it is initialised, else (0, 1); never imports torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
