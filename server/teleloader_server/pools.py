"""Which pool a server has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from teleloader_server.config import DatasetConfig, Limits
from teleloader_server.datasets import HostedDataset, open_datasets
from teleloader_server.pool import Pool
from teleloader_server.pool_inprocess import InProcessPool
from teleloader_server.pool_processes import ProcessPool
from teleloader_server.template import Template


def spawned_pool(configs: Sequence[DatasetConfig], limits: Limits) -> Pool:
    """The pool of a server whose datasets are named in its configuration."""
    if limits.num_workers == 0:
        return InProcessPool(lambda: open_datasets(configs), limits)
    return ProcessPool(lambda: Template.spawn(configs), limits)


def forked_pool(hosted: Mapping[str, HostedDataset], limits: Limits) -> Pool:
    """The pool of a server that hosts objects of this process."""
    if limits.num_workers == 0:
        return InProcessPool(lambda: hosted, limits)
    return ProcessPool(lambda: Template.fork(hosted), limits)
