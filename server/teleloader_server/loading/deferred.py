"""Datasets that each worker constructs itself (``start_method="spawn"``)."""

from __future__ import annotations

from dataclasses import dataclass

from teleloader_server.config import ConfigError, DatasetConfig
from teleloader_server.loading.datasets import HostedDataset, open_dataset
from teleloader_server.loading.source_files import SourceFiles
from teleloader_shared.messages import DatasetInfo


@dataclass(frozen=True, slots=True)
class DeferredDataset:
    """Dataset that a worker constructs before its first batch, so that the worker is not forked with it."""

    info: DatasetInfo
    """Description from another process that has constructed the dataset."""
    config: DatasetConfig
    code: SourceFiles
    """Files of the dataset's code."""

    def open(self) -> HostedDataset:
        """Construct the dataset in this process. Exceptions raised by user code propagate unchanged.

        Raises:
            ConfigError: If the dataset differs from its description, or its code has changed.
        """
        if self.code.changed:
            raise ConfigError(
                f"the code of dataset {self.config.name!r} changed after version {self.config.version!r} was "
                "published: restore the files, or publish the changed code as another version"
            )
        hosted = open_dataset(self.config)
        if hosted.info.fingerprint != self.info.fingerprint:
            raise ConfigError(
                f"dataset {self.config.name!r} has changed since the server started: constructed with "
                f"{_shape(hosted.info)} in a worker, with {_shape(self.info)} before. Restart the server"
            )
        return hosted


def _shape(info: DatasetInfo) -> str:
    return f"{info.kind} style and length {info.length}"
