"""``get_worker_info()``: torch's own function where torch is loaded, and an equal one without it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Description of the worker that user code runs in, with the fields of torch's."""

    id: int
    """Number of the worker, from 0; for an iterable-style dataset that of the shard, counted over all ranks."""
    num_workers: int
    """How many there are."""
    seed: int
    """What the worker's random numbers begin with."""
    dataset: Any
    """The worker's replica of the dataset."""
    rng: Any = None
    worker_method: str = "multiprocessing"

    def __getattribute__(self, name: str) -> Any:
        _note(name)
        return object.__getattribute__(self, name)


_current: WorkerInfo | None = None
_asked = False
_TELLS_SHARDS_APART: Final = ("id", "num_workers", "seed", "dataset")


def get_worker_info() -> WorkerInfo | None:
    """The worker that the caller runs in; None outside a worker process (also with ``num_workers=0``).

    For datasets that must work without torch. With torch, ``torch.utils.data.get_worker_info()`` says the same.
    """
    return _current


def set_worker_info(id_: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Make this process that worker, for our function and, when torch is loaded, for torch's."""
    global _current, _asked
    _current = WorkerInfo(id_, num_workers, seed, dataset)
    if sys.modules.get("torch") is not None:
        from torch.utils.data._utils import worker

        worker._worker_info = _noted_info()(id=id_, num_workers=num_workers, seed=seed, dataset=dataset)
    _asked = False


@cache
def _noted_info() -> Any:
    """Torch's record, which tells us when somebody looks at it; made once torch is there."""
    from torch.utils.data._utils import worker

    class NotedInfo(worker.WorkerInfo):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            _note(name)
            return super().__getattribute__(name)

    return NotedInfo


def was_asked() -> bool:
    """Return True if user code has read a field of the worker info that differs between shards."""
    return _asked


def _note(name: str) -> None:
    global _asked
    if name in _TELLS_SHARDS_APART:
        _asked = True
