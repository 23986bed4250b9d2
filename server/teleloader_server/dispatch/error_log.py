"""Log of the latest errors: failed batches, and samples that were skipped or replaced.

Each entry states how to compute the batch again, so that the dashboard and ``teleloader peek --error`` open exactly
this batch. An entry takes up to about 25 KB: 5 KB of text, and the integers of an index list.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from teleloader_server.loading import index_lists
from teleloader_server.loading.tasks import Task, indices_of
from teleloader_shared.codec import MAX_INDICES, Failure, Substitution
from teleloader_shared.inspection import ErrorRecord, Errors, Handling, Preview
from teleloader_shared.spec import LoaderSpec

MAX_ERRORS: Final = 100
"""Number of errors that are kept: the latest ones."""
MAX_MESSAGE: Final = 500
MAX_TRACEBACK: Final = 4000
MAX_TYPE: Final = 200
MAX_SHOWN_INDICES: Final = 20

_OWN_FIELDS: Final = ("session", "num_workers", "in_process", "delivered", "shard_states", "resumed_epoch")
"""Fields of a spec that a preview does not have: they name the workers and the progress of one client."""


class _Entry(NamedTuple):
    number: int
    time: float
    at: float
    """``time.monotonic()``."""
    task: Task
    """Without its index list, which `listed` has."""
    listed: list[int] | None
    failure: Failure
    run: str | None
    handling: Handling
    replacement: int | str | None
    sample: int | str | None

    def is_same(self, task: Task, failure: Failure) -> bool:
        """Return True if a batch failed with the same exception at the same sample."""
        known = self.failure
        return (self.task.spec.dataset, known.type, known.message, known.sample) == (
            task.spec.dataset, failure.type, failure.message[:MAX_MESSAGE], failure.sample,
        )  # fmt: skip

    def record(self, now: float) -> ErrorRecord:
        loader, epoch, batch = self.task.batch_id
        failure = self.failure
        return ErrorRecord(
            number=self.number,
            time=self.time,
            age=max(0.0, now - self.at),
            dataset=self.task.spec.dataset,
            loader=loader,
            epoch=epoch,
            batch=batch,
            worker=failure.worker,
            run=self.run,
            type=failure.type[:MAX_TYPE],
            message=failure.message[:MAX_MESSAGE],
            traceback=failure.traceback[-MAX_TRACEBACK:],
            sample=self.sample,
            indices=failure.indices[:MAX_SHOWN_INDICES],
            handling=self.handling,
            replacement=self.replacement,
            batch_preview=batch_preview(self.task, self.listed),
            sample_preview=sample_preview(self.task, self.sample),
        )


class ErrorLog:
    """Bounded log of the latest errors of a server."""

    def __init__(self) -> None:
        self.total = 0
        """Number of errors since the server started."""
        self._entries: deque[_Entry] = deque(maxlen=MAX_ERRORS)

    def __iter__(self) -> Iterator[_Entry]:
        return iter(self._entries)

    def failed(self, task: Task, failure: Failure, run: str | None, *, is_preview: bool = False) -> None:
        """Add a batch whose exception is sent to clients.

        Args:
            task: Task of the batch.
            failure: Its exception.
            run: Name of a training run that requested it; None if unknown.
            is_preview: Whether the batch is computed only for display: an error that is listed is then not added again.
        """
        if is_preview and any(entry.is_same(task, failure) for entry in self._entries):
            return
        self._add(task, failure, run, "raised", None, failure.sample)

    def substituted(self, task: Task, worker: int, found: Substitution, run: str | None) -> None:
        """Add a sample that was skipped or replaced.

        Args:
            task: Task of the batch.
            worker: Worker ID.
            found: The sample.
            run: Name of a training run that requested the batch; None if unknown.
        """
        kind, _, message = found.error.partition(": ")
        handling: Handling = "skipped" if found.replacement is None else "replaced"
        number = found.sample if isinstance(found.sample, int) else None
        failure = Failure(kind, message, "", indices_of(task, MAX_SHOWN_INDICES), worker, number)
        self._add(task, failure, run, handling, found.replacement, found.sample)

    def _add(
        self,
        task: Task,
        failure: Failure,
        run: str | None,
        handling: Handling,
        replacement: int | str | None,
        sample: int | str | None,
    ) -> None:
        self.total += 1
        # a traceback of 64 KiB would stay in memory although 4,000 characters are shown
        kept = replace(
            failure,
            message=failure.message[:MAX_MESSAGE],
            traceback=failure.traceback[-MAX_TRACEBACK:],
            indices=failure.indices[:MAX_SHOWN_INDICES],
        )
        entry = _Entry(
            self.total, time.time(), time.monotonic(), task._replace(indices=None), _listed(task), kept, run, handling,
            replacement, sample,
        )  # fmt: skip
        self._entries.append(entry)

    def records(self, now: float) -> Errors:
        """Return the errors, newest first."""
        return Errors(self.total, [entry.record(now) for entry in reversed(self._entries)])


def _listed(task: Task) -> list[int] | None:
    """Return the index list of a client-side sampler; None if it is not a short list of integers."""
    if task.indices is None:
        return None
    found = index_lists.first_indices(task.indices, MAX_INDICES + 1)
    if found is None or len(found) > MAX_INDICES or any(type(index) is not int for index in found):
        return None
    return found


def batch_preview(task: Task, listed: list[int] | None) -> Preview | None:
    """Return the request that computes a batch again.

    Args:
        task: Task of the batch.
        listed: Its index list, for a client-side sampler; None if it is unknown.

    Returns:
        The request; None if only the workers of one client can compute the batch.
    """
    spec = task.spec
    is_listed = spec.order == "client"
    if spec.in_process or (task.length == 0 and not is_listed) or (is_listed and listed is None):
        return None
    return _preview(spec, task, listed, is_private=is_listed or spec.worker_init is not None)


def sample_preview(task: Task, sample: object) -> Preview | None:
    """Return the request for a batch with one sample of the same dataset; None if its index is no integer.

    Sources of a mixture have no common index list, so that a request cannot name one of their samples.
    """
    spec = task.spec
    if type(sample) is not int or spec.mixture is not None or spec.in_process or spec.batch_of == "lengths":
        return None
    one = replace(
        spec, order="client", session=spec.session or "preview", batch_size=1, drop_last=False, shuffle=False,
        balance=None, packing=None, rank=0, world_size=1, on_error="raise", num_workers=0,
    )  # fmt: skip
    return _preview(one, task, [sample], is_private=True)


def _preview(spec: LoaderSpec, task: Task, listed: list[int] | None, *, is_private: bool) -> Preview:
    fields = {name: value for name, value in spec.to_json().items() if name not in _OWN_FIELDS}
    return Preview(fields, task.batch_id.epoch, task.batch_id.batch, listed, is_private)
