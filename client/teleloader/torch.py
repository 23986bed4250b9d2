"""`DataLoader` as a subclass of torch's, for frameworks that check ``isinstance``; requires torch."""

from __future__ import annotations

from typing import Any

import torch.utils.data

import teleloader
from teleloader.frameworks.plan_sampler import PlanSampler
from teleloader.sampling import make_samplers


class DataLoader(teleloader.DataLoader, torch.utils.data.DataLoader):  # type: ignore[misc, unused-ignore]
    """`teleloader.DataLoader` that is also an instance of ``torch.utils.data.DataLoader``.

    Arguments, batches and errors are those of `teleloader.DataLoader`; torch's constructor and iterators are not used.
    Use this class where a framework requires an instance of torch's DataLoader, as Lightning Fabric and Keras do.

    Such frameworks may construct the loader anew, with another sampler and otherwise the same arguments: for several
    processes with a DistributedSampler, as they do for torch's DataLoader. A loader with `seed`, `rank` or `world_size`
    divides the epoch itself, so its `sampler` is a DistributedSampler, which frameworks do not replace. The loader
    starts the next epoch with each ``iter()``: ``set_epoch`` of this sampler has no effect on the loader.

    Example:
        >>> from teleloader.torch import DataLoader  # doctest: +SKIP
        >>> loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=256, shuffle=True))  # doctest: +SKIP
    """

    def _make_samplers(self, *, shuffle: bool) -> tuple[Any, Any]:
        if self.balance is not None or self.packing is not None:
            raise ValueError(
                "teleloader.torch.DataLoader does not support balance and packing: no sampler of torch has this order. "
                "Use teleloader.DataLoader"
            )
        if self._divides_epoch or self._seed is not None:
            sampler = PlanSampler(self.dataset, self._spec, distributed=self._distributed)
            return make_samplers(
                self.dataset, self.batch_size, False, self.drop_last, sampler, None, None, as_torch=True
            )  # fmt: skip
        return super()._make_samplers(shuffle=shuffle)

    def _init_state(self) -> None:
        super()._init_state()
        # frameworks read the arguments for a new loader from public attributes. Those that determine the order are
        # missing: the new sampler replaces them
        missing = {name: value for name, value in self._other_arguments.items() if name not in vars(self)}
        self.__dict__.update(missing)
