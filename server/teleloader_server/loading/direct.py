"""Entry point ``teleloader.load``: loading of a dataset object in the calling thread, without a server or workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from teleloader_server.config import ConfigError
from teleloader_server.loading.collate import default_collate
from teleloader_server.loading.datasets import HostedDataset, host, is_factory
from teleloader_server.loading.pipeline import Loading
from teleloader_server.loading.random_state import OwnRandomState, seed_worker
from teleloader_server.loading.shards import state_of_beginning
from teleloader_server.loading.stages import STAGES, Encode, Fetch
from teleloader_server.loading.tasks import Task
from teleloader_server.loading.worker_info import WorkerScope
from teleloader_shared import local
from teleloader_shared.codec import DEFAULT_MAX_BATCH_BYTES, BatchId, Substituted
from teleloader_shared.lengths import Lengths
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.spec import LoaderSpec


class DirectLoader:
    """Loader of a dataset object in the calling thread, without a server or workers.

    Args:
        dataset: A map-style or iterable-style dataset, or a function or class that returns one.
        name: Name of the dataset in `info`.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self._dataset = dataset() if is_factory(dataset) else dataset
        self._name = name

    @property
    def info(self) -> DatasetInfo:
        """Description of the dataset, including the current length."""
        return self._hosted.info

    @property
    def lengths(self) -> Lengths | None:
        """Lengths of the samples; None if the dataset states none."""
        return self._hosted.lengths

    @property
    def _hosted(self) -> HostedDataset:
        return host(self._dataset, name=self._name)

    def beginning(self, epoch: int) -> str | None:
        """Return the dataset's current state in serialized form, for resuming at the start of an epoch.

        Returns None for a map-style dataset, and for a dataset without a state.
        """
        return None if self.info.kind == "map" else state_of_beginning(self._dataset, epoch)

    def begin(self, spec: LoaderSpec, epoch: int, *, seeded: bool, torch: bool) -> DirectEpoch:
        """Start an iteration over an epoch.

        Args:
            spec: Specification of the loader.
            epoch: The epoch.
            seeded: True to seed random generators per batch, as in a worker, and to restore the generators of this
                process after each batch. False to use the generators of this process, as torch with ``num_workers=0``.
            torch: True to collate with torch's ``default_collate`` and ``default_convert``, False to use the functions
                of this package.
        """
        hosted = replace(self._hosted, functions={} if spec.collate is None else {spec.collate: _lent(spec.collate)})
        if torch:
            from torch.utils.data import default_collate as torchs_collate
            from torch.utils.data import default_convert as torchs_convert

            hosted = replace(hosted, default_collate=torchs_collate, default_convert=torchs_convert)
        else:
            hosted = replace(hosted, default_collate=default_collate)
        return DirectEpoch(hosted, spec, epoch, seeded=seeded)

    def workers(self, spec: LoaderSpec, functions: Mapping[str, Callable[..., Any]]) -> DirectWorkers:
        """Create the workers of a loader spec, which compute batches in the calling thread; for tests without a server.

        Args:
            spec: Specification of the loader.
            functions: Collate and worker-init functions, by their names in specs.
        """
        return DirectWorkers(replace(self._hosted, functions=functions), spec)


class DirectEpoch:
    """Iteration over one epoch of a dataset, loaded in the calling thread."""

    def __init__(self, hosted: HostedDataset, spec: LoaderSpec, epoch: int, *, seeded: bool) -> None:
        self._spec = spec
        self._epoch = epoch
        self._length = hosted.info.length or 0
        stages = STAGES[STAGES.index(Fetch) : STAGES.index(Encode)]  # the other stages handle frames
        self._loading = Loading({spec.dataset: hosted}, -1, max_batch_bytes=sys.maxsize, seeds=seeded, stages=stages)
        self._random_state: AbstractContextManager[None] = OwnRandomState() if seeded else nullcontext()
        if seeded:
            with self._random_state:
                seed_worker(spec.seed, 0)

    def batch(self, number: int, indices: Any) -> tuple[Any, str | None, Substituted | None]:
        """Load a batch; return the batch, the shard state after it, and the skipped and replaced samples.

        The shard state is None if the dataset is map-style or not stateful. After the last batch of an iterable-style
        dataset, an `End` replaces the batch.

        Args:
            number: Batch number in the epoch.
            indices: Indices of the batch; a single index with ``batch_size=None`` and a sampler; empty for an
                iterable-style dataset.

        Raises:
            BaseException: If the dataset or the collate function raises an exception; it is raised unchanged.
        """
        task = Task(self._spec, self._length, BatchId("", self._epoch, number))
        if self._spec.order == "client" and self._spec.batch_size is None:
            indices = [indices]
        with self._random_state:
            batch = self._loading.run(task, indices)
        return batch.content, batch.state, batch.substituted

    def close(self) -> None:
        """Close the dataset's iterator, so that ``finally`` blocks of generators run."""
        self._loading.passes.close()


class DirectWorkers:
    """Workers of one loader in the calling thread, one per shard of an iterable-style dataset."""

    def __init__(self, hosted: HostedDataset, spec: LoaderSpec) -> None:
        self._spec = spec
        self._length = 0 if hosted.info.kind == "iterable" else hosted.info.length or 0
        self._workers = [_DirectWorker(hosted, spec, shard) for shard in range(spec.shards)]

    def frame(self, batch_id: BatchId, indices: bytes | None, error: BaseException | None) -> NDArray[np.uint8]:
        """Load a batch and return its frame, or a failure frame if loading fails.

        Args:
            batch_id: ID of the batch.
            indices: Frame with the index list of a client-side sampler; None in seeded order.
            error: Exception to write as a failure frame in place of the batch; None to load the batch.
        """
        task = Task(self._spec, self._length, batch_id, indices)
        return self._workers[batch_id.batch % len(self._workers)].frame(task, error)

    def close(self) -> None:
        """Close the dataset's iterators, so that ``finally`` blocks of generators run."""
        for worker in self._workers:
            worker.close()


class _DirectWorker:
    def __init__(self, hosted: HostedDataset, spec: LoaderSpec, shard: int) -> None:
        self._contexts: list[AbstractContextManager[None]] = [OwnRandomState()]
        if hosted.info.kind == "iterable":
            hosted = hosted.copied()
            shard += spec.num_workers * spec.rank
        seed = (spec.seed + shard) % 2**63
        if hosted.info.kind == "iterable" and spec.num_workers > 0:
            self._contexts.append(WorkerScope(shard, spec.num_workers * spec.world_size, seed, hosted.dataset))
        self._loading = Loading({spec.dataset: hosted}, -1, DEFAULT_MAX_BATCH_BYTES)
        self._init_failure: Exception | None = None
        """Exception of the worker-init function, reported in place of each batch; None if it succeeded."""
        with self._inside():
            seed_worker(spec.seed, shard)
            try:
                if (worker_init := hosted.worker_init_of(spec.worker_init)) is not None:
                    worker_init(shard)
            except Exception as error:  # noqa: BLE001 - an exception of the user's
                self._init_failure = error

    def frame(self, task: Task, error: BaseException | None) -> NDArray[np.uint8]:
        with self._inside():
            return self._loading.frame(task, error or self._init_failure)[0]

    def close(self) -> None:
        with self._inside():
            self._loading.passes.close()

    def _inside(self) -> ExitStack:
        stack = ExitStack()
        for context in self._contexts:
            stack.enter_context(context)
        return stack


def load(dataset: Any, name: str) -> DirectLoader:
    """Create a loader of a dataset object that loads in the calling thread.

    Args:
        dataset: A map-style or iterable-style dataset, or a function or class that returns one.
        name: Name of the dataset in error messages.

    Raises:
        ConfigError: If the dataset defines neither ``__getitem__`` nor ``__iter__``.
    """
    loader = DirectLoader(dataset, name)
    loader.info  # noqa: B018 - raises an error for an object that is not a dataset
    return loader


def _lent(name: str) -> Callable[..., Any]:
    function = local.registered_function(name)
    if function is None:
        raise ConfigError(f"unknown function {name!r} in this process: pass the function to the loader again")
    return function
