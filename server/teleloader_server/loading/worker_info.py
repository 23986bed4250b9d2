"""Implementation of ``get_worker_info()`` without torch; if torch is imported, torch's function returns the same."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Information about the current worker, with the same fields as torch's ``WorkerInfo``."""

    id: int
    """Worker ID, from 0; for an iterable-style dataset the shard ID, which is unique among all ranks."""
    num_workers: int
    """Number of workers; for an iterable-style dataset, the number of shards of all ranks."""
    seed: int
    """Seed of the worker's random generators."""
    dataset: Any
    """The worker's replica of the dataset."""
    rng: Any = None
    worker_method: str = "multiprocessing"

    def __getattribute__(self, name: str) -> Any:
        _record_access(name)
        return object.__getattribute__(self, name)


_current: WorkerInfo | None = None
_was_read = False
_SHARD_FIELDS: Final = ("id", "num_workers", "seed", "dataset")


def get_worker_info() -> WorkerInfo | None:
    """Return information about the current worker, or None outside worker processes and with ``num_workers=0``.

    Use this function in datasets that must work without torch. With torch, ``torch.utils.data.get_worker_info()``
    returns the same information.
    """
    return _current


def set_worker_info(id_: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Set the worker information that `get_worker_info` and, if torch is imported, torch's function return."""
    global _current, _was_read
    _current = WorkerInfo(id_, num_workers, seed, dataset)
    if sys.modules.get("torch") is not None:
        from torch.utils.data._utils import worker

        worker._worker_info = _recording_info()(id=id_, num_workers=num_workers, seed=seed, dataset=dataset)
    _was_read = False


class WorkerScope:
    """Context manager that sets this process's worker information, for loading without worker processes.

    Args:
        id_: Worker ID.
        num_workers: Number of workers.
        seed: Seed of the worker's random generators.
        dataset: The worker's replica of the dataset.
    """

    def __init__(self, id_: int, num_workers: int, seed: int, dataset: Any) -> None:
        self._info = (id_, num_workers, seed, dataset)
        self._was_read = False

    def __enter__(self) -> None:
        global _was_read
        set_worker_info(*self._info)
        _was_read = self._was_read

    def __exit__(self, *_: object) -> None:
        global _current, _was_read
        self._was_read, _current, _was_read = _was_read, None, False
        if sys.modules.get("torch") is not None:
            from torch.utils.data._utils import worker

            worker._worker_info = None


@cache
def _recording_info() -> Any:
    """Return a subclass of torch's ``WorkerInfo`` that records which fields user code reads."""
    from torch.utils.data._utils import worker

    class RecordingInfo(worker.WorkerInfo):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            _record_access(name)
            return super().__getattribute__(name)

    return RecordingInfo


def was_read() -> bool:
    """Return True if user code has read a field of its worker information that may differ between workers."""
    return _was_read


def _record_access(name: str) -> None:
    global _was_read
    if name in _SHARD_FIELDS:
        _was_read = True
