"""Worker pool factories, for configured datasets and for dataset objects of the calling process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from teleloader_server.config import DatasetConfig, IndexKind
from teleloader_server.limits import Limits
from teleloader_server.loading.datasets import HostedDataset, open_datasets
from teleloader_server.workers.forkserver import ForkServer
from teleloader_server.workers.inprocess import InProcessPool
from teleloader_server.workers.isolation import NO_ISOLATION, Isolation
from teleloader_server.workers.pool import Pool
from teleloader_server.workers.processes import ProcessPool
from teleloader_shared import local
from teleloader_shared.errors import InvalidSpec
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.spec import LoaderSpec


class PoolFactory(Protocol):
    """Interface of worker pool factories."""

    setting: str
    """Setting for the number of shared workers as shown to users, with ``{}`` in place of the number."""
    configs: Sequence[DatasetConfig]
    """Configurations of the datasets; empty for dataset objects."""

    def infos(self) -> list[DatasetInfo] | None:
        """Return the dataset descriptions, or None if only the started shared pool can provide them."""

    def index_kind(self, dataset: str) -> IndexKind:
        """Return the kind of indices that client-side samplers may send for a dataset."""

    def shared_pool(self) -> Pool:
        """Create the pool shared by all loaders without private workers."""

    def own_pool(self, spec: LoaderSpec, info: DatasetInfo) -> Pool | None:
        """Create a pool of private workers for a loader, or return None if the loader uses the shared pool.

        Raises:
            InvalidSpec: If the spec requests a function or a loading mode that the server does not allow.
        """


class ConfiguredPools:
    """Worker pool factory for configured datasets, which a fork server constructs once for all workers.

    Args:
        configs: The datasets.
        limits: Limits of each pool.
        isolation: Restrictions of the fork server and its workers.
        make_forkserver: Function that returns a fork server for the shared pool; None to start one for this server.
        is_reloaded: True if this process may have imported previous code of the datasets, so that it must not load
            batches itself.
    """

    setting = "--num-workers {}"

    def __init__(
        self,
        configs: Sequence[DatasetConfig],
        limits: Limits,
        isolation: Isolation = NO_ISOLATION,
        make_forkserver: Callable[[], ForkServer] | None = None,
        *,
        is_reloaded: bool = False,
    ) -> None:
        self.configs = configs
        self.isolation = isolation
        self._limits = limits
        self._is_reloaded = is_reloaded
        self._make_forkserver = make_forkserver or (lambda: ForkServer.spawn(configs, isolation))
        self._processes: ProcessPool | None = None

    def infos(self) -> None:
        """Return None, because `Pool.start` of the shared pool returns the dataset descriptions."""

    def index_kind(self, dataset: str) -> IndexKind:
        """Return the configured kind of indices for a dataset."""
        return next(config.indices for config in self.configs if config.name == dataset)

    def shared_pool(self) -> Pool:
        """Create the shared pool, whose workers are forked from a new process that constructs the datasets."""
        if self._limits.num_workers == 0:
            return InProcessPool(lambda: open_datasets(self.configs), self._limits)
        self._processes = ProcessPool(self._make_forkserver, self._limits)
        return self._processes

    def own_pool(self, spec: LoaderSpec, info: DatasetInfo) -> Pool | None:
        """Create the pool of a loader with private workers; return None if the loader uses the shared pool.

        A loader of an iterable-style dataset gets one worker process per shard, or a thread if neither the server nor
        the loader has workers. A loader with `in_process` gets a thread. Other loaders use the shared pool.
        """
        for name in spec.functions:
            if name not in info.functions:
                raise InvalidSpec(
                    f"function {name!r} is not allowed for dataset {info.name!r}: add it to functions in the server's "
                    f"configuration. Allowed functions: {', '.join(info.functions) or 'none'}"
                )
        mine = [config for config in self.configs if config.name in spec.datasets]
        if spec.in_process:
            if not self._limits.debug:
                raise InvalidSpec("loading in the server process is disabled: start the server with --debug")
            if self._is_reloaded:
                raise InvalidSpec(
                    f"cannot load version {info.version!r} of dataset {info.name!r} in the server process, which may "
                    "have imported the code of a previous version: restart the server"
                )
            return InProcessPool(lambda: open_datasets(mine), self._limits)
        if info.kind == "map":
            if spec.worker_init is not None:
                raise InvalidSpec(
                    f"cannot use worker_init_fn {spec.worker_init!r}: all loaders share the running workers of dataset "
                    f"{info.name!r}. Set worker_init in the server's configuration"
                )
            return None
        if self._processes is None and spec.num_workers == 0:
            return InProcessPool(lambda: open_datasets(mine), self._limits)
        # never recycled: a new worker would have to iterate its shard from the start
        limits = dataclasses.replace(self._limits, num_workers=spec.shards, max_batches_per_worker=0)
        if self._processes is None:
            return ProcessPool(lambda: ForkServer.spawn(mine, self.isolation), limits, spec)
        return ProcessPool(self._processes.split_forkserver, limits, spec)


class ObjectPools:
    """Worker pool factory for dataset objects of the calling process.

    Workers are forked from this process, and see the objects in their state at the time of the fork.

    Args:
        datasets: Function that returns the hosted datasets; their lengths may change between two calls.
        limits: Limits of each pool.
    """

    setting = "num_workers={} of serve()"
    configs: Sequence[DatasetConfig] = ()

    def __init__(self, datasets: Callable[[], Mapping[str, HostedDataset]], limits: Limits) -> None:
        self._datasets = datasets
        self._limits = limits

    def infos(self) -> list[DatasetInfo]:
        """Return the current descriptions of the dataset objects."""
        return [hosted.info for hosted in self._datasets().values()]

    def index_kind(self, dataset: str) -> IndexKind:
        """Return ``any``, because samplers may yield any index for a dataset object of this process, as in torch."""
        return "any"

    def shared_pool(self) -> Pool:
        """Create the shared pool, with the datasets that the server currently hosts."""
        return self._pool(self._datasets(), self._limits, None)

    def own_pool(self, spec: LoaderSpec, info: DatasetInfo) -> Pool | None:
        """Create a pool of private workers for a loader with a session; return None for other loaders.

        If the loader requests 0 workers, the pool has the server's number of workers (at most 1 for an iterable-style
        dataset). With `in_process`, the pool is a thread.
        """
        datasets = self._datasets()
        mine = {name: datasets[name] for name in spec.datasets}
        functions = {name: mine[spec.dataset].functions[name] for name in info.functions}
        for name in spec.functions:
            # only private workers: shared ones may have been forked before the function was passed
            function = None if spec.session is None else local.registered_function(name)
            if function is not None:
                functions[name] = function
            elif name not in functions:
                raise InvalidSpec(
                    f"unknown function {name!r}: pass the function to serve(), or create the loader in the process "
                    "that called serve()"
                )
        if spec.session is None:
            return None
        count = spec.num_workers or (
            self._limits.num_workers if info.kind == "map" else min(1, self._limits.num_workers)
        )
        if spec.in_process:
            count = 0
        mine = {name: dataclasses.replace(hosted, functions=functions) for name, hosted in mine.items()}
        return self._pool(mine, dataclasses.replace(self._limits, num_workers=count), spec)

    def _pool(self, hosted: Mapping[str, HostedDataset], limits: Limits, session: LoaderSpec | None) -> Pool:
        if limits.num_workers == 0:
            return InProcessPool(lambda: hosted, limits)
        return ProcessPool(lambda: ForkServer.fork(hosted), limits, session)
