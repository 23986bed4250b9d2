"""Tasks and reports: the input of loading one batch, its result besides the frame, and functions of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from teleloader_server.loading import index_lists
from teleloader_server.loading.datasets import HostedDataset
from teleloader_shared.codec import MAX_INDICES, Address, FrameWriter
from teleloader_shared.orders.plan import Plan
from teleloader_shared.spec import LoaderSpec

Indices = NDArray[np.int64] | list[Any]
"""The samples of a batch: an array of the plan, or the items of a client-side sampler."""


class Task(NamedTuple):
    """A batch to load. The worker computes the plan, so that no index list travels to it."""

    spec: LoaderSpec
    length: int
    """Samples in the dataset, 0 if it has no length."""
    address: Address
    indices: bytes | None = None
    """The frame with the index list of a client-side sampler."""


class Report(NamedTuple):
    """Outcome of a task."""

    samples: int
    failed: bool
    stages: Sequence[float]
    """Seconds in each stage, in the order of `stages.STAGES`."""

    @property
    def seconds(self) -> float:
        """Seconds in all stages."""
        return sum(self.stages)


def indices_of(task: Task, count: int = MAX_INDICES) -> list[int]:
    """Return those of the first `count` indices of a batch that are integers: [] for an iterable-style dataset."""
    if task.indices is not None:
        return index_lists.first_integers(task.indices, count)
    if task.spec.session is not None and task.length == 0:
        return []
    found: list[int] = Plan(task.spec, task.length, task.address.epoch).first(task.address.batch, count).tolist()
    return found


def collate(hosted: HostedDataset, task: Task, indices: Indices, samples: list[Any]) -> tuple[int, Any]:
    """Return the number of samples of a batch, and the batch."""
    name = task.spec.collate
    if task.spec.batch_size is None:
        return 1, hosted.convert_sample(samples[0], name)
    if hosted.gives_batches(name):
        return len(indices), hosted.convert_sample(samples[0], name)
    return len(samples), hosted.collate_batch(samples, name)


def frame_writer(task: Task, content: object, max_bytes: int, padding: int, shard_state: str | None) -> FrameWriter:
    """Return the writer of a batch's frame."""
    spec = task.spec
    return FrameWriter(
        task.address,
        content,
        padding=padding,
        shard_state=shard_state,
        name="sample" if spec.batch_size is None else "batch",
        checksum=spec.checksum,
        compression=spec.compression,
        max_bytes=max_bytes,
    )
