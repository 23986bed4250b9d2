"""Seeded order of a loader as a sampler of torch, for frameworks that inspect samplers; imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import replace

from torch.utils.data import DistributedSampler

from teleloader.orders import distributed_rank
from teleloader_shared.orders.plan import Plan
from teleloader_shared.spec import LoaderSpec


class PlanSampler(DistributedSampler):  # type: ignore[misc, unused-ignore]
    """Sample indices of one rank in a loader's seeded order.

    Frameworks replace samplers that do not divide the epoch among ranks by a DistributedSampler; this one does.

    Args:
        dataset: Dataset of the loader.
        spec: Parameters of the loader, with rank and world size.
        distributed: Whether rank and world size are those of torch.distributed, if it is initialised.
    """

    def __init__(self, dataset: Sized, spec: LoaderSpec, *, distributed: bool) -> None:
        self.dataset = dataset
        self.epoch = 0
        self.shuffle = spec.shuffle
        self.seed = spec.seed
        self._spec = replace(spec, drop_last=False)
        self._distributed = distributed

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return distributed_rank()[0] if self._distributed else self._spec.rank

    @property
    def num_replicas(self) -> int:
        """Number of processes among which the epoch is divided."""
        return distributed_rank()[1] if self._distributed else self._spec.world_size

    @property
    def _plan(self) -> Plan:
        return Plan(replace(self._spec, rank=self.rank, world_size=self.num_replicas), len(self.dataset), self.epoch)

    def __iter__(self) -> Iterator[int]:
        return (index for batch in self._plan for index in batch.tolist())

    def __len__(self) -> int:
        return self._plan.samples
