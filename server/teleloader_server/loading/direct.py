"""Entry point ``teleloader.load``: an object of this process is loaded in the thread that calls, without a server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from teleloader_server.config import ConfigError
from teleloader_server.loading.collate import default_collate
from teleloader_server.loading.datasets import HostedDataset, host, is_factory
from teleloader_server.loading.pipeline import Loading
from teleloader_server.loading.random_state import OwnRandomState, seed_worker
from teleloader_server.loading.shards import state_of_beginning
from teleloader_server.loading.stages import STAGES, Encode, Fetch
from teleloader_server.loading.tasks import Task
from teleloader_shared import local
from teleloader_shared.codec import Address
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.spec import LoaderSpec


class DirectLoader:
    """Loads an object of this process.

    Args:
        dataset: A map-style or iterable-style dataset, or a function or class that makes one.
        name: What `info` calls it.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset = dataset() if is_factory(dataset) else dataset
        self._name = name

    @property
    def info(self) -> DatasetInfo:
        """The dataset as it is now."""
        return self._hosted.info

    @property
    def _hosted(self) -> HostedDataset:
        return host(self._dataset, name=self._name)

    def beginning(self, epoch: int) -> str | None:
        """Return the state of an iterable-style dataset as it is now, for resuming at the beginning of `epoch`.

        None if it keeps none yet.
        """
        return None if self.info.kind == "map" else state_of_beginning(self._dataset, epoch)

    def begin(self, spec: LoaderSpec, epoch: int, *, seeded: bool, torch: bool) -> DirectEpoch:
        """Return what loads the batches of one pass through an epoch.

        Args:
            spec: The loader.
            epoch: The epoch.
            seeded: Whether random numbers are a function of the batch, as in a worker, and the generators of this
                process are left as they are; else they are drawn from these, as with torch's ``num_workers=0``.
            torch: Whether batches are made by torch's ``default_collate`` and ``default_convert``, not by ours.
        """
        hosted = replace(self._hosted, functions={} if spec.collate is None else {spec.collate: _lent(spec.collate)})
        if torch:
            from torch.utils.data import default_collate as torchs_collate
            from torch.utils.data import default_convert as torchs_convert

            hosted = replace(hosted, default_collate=torchs_collate, default_convert=torchs_convert)
        else:
            hosted = replace(hosted, default_collate=default_collate)
        return DirectEpoch(hosted, spec, epoch, seeded=seeded)


class DirectEpoch:
    """One pass through an epoch of a dataset, in the threads that call."""

    def __init__(self, hosted: HostedDataset, spec: LoaderSpec, epoch: int, *, seeded: bool) -> None:
        self._spec = spec
        self._epoch = epoch
        stages = STAGES[STAGES.index(Fetch) : STAGES.index(Encode)]  # others handle frames
        self._loading = Loading({spec.dataset: hosted}, -1, max_batch_bytes=0, seeds=seeded, stages=stages)
        self._random_state: AbstractContextManager[None] = OwnRandomState() if seeded else nullcontext()
        if seeded:
            with self._random_state:
                seed_worker(spec.seed, 0)

    def batch(self, number: int, indices: Any) -> tuple[Any, str | None]:
        """Return a batch and, for an iterable-style dataset that can say it, where it stands after the batch.

        The batch is an `End` after the last one of an iterable-style dataset.

        Args:
            number: Number of the batch.
            indices: What the plan or the sampler gives for it: one index with ``batch_size=None`` and a sampler, else
                those of the batch; empty for an iterable-style dataset.

        Raises:
            BaseException: What the dataset or the collate function raises, unchanged.
        """
        task = Task(self._spec, 0, Address("", self._epoch, number))
        if self._spec.order == "client" and self._spec.batch_size is None:
            indices = [indices]
        with self._random_state:
            batch = self._loading.run(task, indices)
        return batch.content, batch.state

    def close(self) -> None:
        """Release the dataset's iterator, so that ``finally`` blocks of generators run."""
        self._loading.passes.close()


def load(dataset: Any, name: str) -> DirectLoader:
    """Return what loads `dataset` in the thread that calls.

    Raises:
        ConfigError: If `dataset` defines neither __getitem__ nor __iter__.
    """
    loader = DirectLoader(dataset, name)
    loader.info  # noqa: B018 - what is no dataset is refused here
    return loader


def _lent(name: str) -> Callable[..., Any]:
    function = local.borrowed(name)
    if function is None:
        raise ConfigError(f"this process knows no function {name!r}: pass it to the loader again")
    return function
