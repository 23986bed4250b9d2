"""``get_worker_info()``: torch's own function where torch is loaded, and an equal one without it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What user code may know of the worker that it runs in; the fields are those of torch's."""

    id: int
    num_workers: int
    seed: int
    dataset: Any


_current: WorkerInfo | None = None


def get_worker_info() -> WorkerInfo | None:
    """The worker that the caller runs in; None outside a worker process (also with ``num_workers=0``).

    For datasets that must work without torch. With torch, ``torch.utils.data.get_worker_info()`` says the same.
    """
    return _current


def set_worker_info(info: WorkerInfo) -> None:
    """Make this process that worker, for our function and, when torch is loaded, for torch's."""
    global _current
    _current = info
    if "torch" in sys.modules:
        from torch.utils.data._utils import worker

        worker._worker_info = worker.WorkerInfo(
            id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=info.dataset
        )
