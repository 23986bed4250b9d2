"""Loading pipeline of a worker: runs all stages for a task, and encodes exceptions as failure frames."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from teleloader_server.loading.datasets import HostedDataset, combine
from teleloader_server.loading.failures import describe
from teleloader_server.loading.passes import Began, Passes
from teleloader_server.loading.replay import Replayed
from teleloader_server.loading.sample_cache import take_counts
from teleloader_server.loading.stages import NO_SAMPLE, STAGES, Batch, Context, Place, Stage
from teleloader_server.loading.tasks import Indices, Report, Task, integer_of
from teleloader_shared.codec import FrameWriter
from teleloader_shared.errors import BatchOutOfRange
from teleloader_shared.sources import Sources
from teleloader_shared.spec import LoaderSpec


class Loading:
    """Pipeline that loads batches by running all loading stages.

    Args:
        hosted: Datasets by name.
        worker: ID of the worker; -1 outside of worker processes.
        max_batch_bytes: Maximum size of a frame in bytes.
        torch_loaded: Callback, called if a dataset imports torch while loading a batch.
        skipped: Callback, called for each batch of an iterable-style dataset that is computed only to reach a later
            batch, and for the samples and batches of a shuffle buffer; see `Passes`.
        began: Callback, called when a pass over an iterable-style dataset starts.
        seeds: True to seed random generators as a function of the batch ID; False to seed none.
        stages: Stages of each batch, in order.
        max_replay: Maximum number of batches of a shard to iterate again; 0 for no limit.
    """

    def __init__(
        self,
        hosted: Mapping[str, HostedDataset],
        worker: int,
        max_batch_bytes: int,
        torch_loaded: Callable[[], None] = lambda: None,
        skipped: Callable[[Replayed | None], None] = lambda replayed: None,
        began: Callable[[Began], None] = lambda began: None,
        *,
        seeds: bool = True,
        stages: Sequence[type[Stage]] = STAGES,
        max_replay: int = 0,
    ) -> None:
        self._hosted = hosted
        self._combined = lru_cache(maxsize=64)(lambda names: combine([hosted[name] for name in names]))
        self._worker = worker
        # sys.exit() ends a worker process, but must not end the thread of a server without workers
        self._exits = worker >= 0
        self.passes = Passes(
            max_batch_bytes,
            owns_datasets=self._exits,
            seeds=seeds,
            skipped=skipped,
            began=began,
            max_replay=max_replay,
        )
        self.context = Context(
            self.passes, max_batch_bytes, owns_datasets=self._exits, seeds=seeds, torch_loaded=torch_loaded
        )
        self._stages = [stage(self.context) for stage in stages]

    def load(self, task: Task, place: Place) -> tuple[int, Report]:
        """Load a batch and write its frame to a buffer; exceptions are written as failure frames.

        Args:
            task: Batch to load.
            place: Function that returns a buffer of the requested number of bytes.

        Returns:
            The frame's size in bytes, and a report.
        """
        buffer = _new_buffer(0)

        def placed(nbytes: int) -> NDArray[np.uint8]:
            nonlocal buffer
            buffer = place(nbytes)
            return buffer

        batch = Batch(task, placed, enumerate(self._stages), [0.0] * len(self._stages))
        try:
            batch.hosted = self.hosted(task.spec)
            batch.run_remaining()
            _check_placed(batch, buffer)
        except BaseException as error:  # KeyboardInterrupt too, which only user code can raise here
            if isinstance(error, SystemExit) and self._exits:
                raise
            nbytes = self._write_failure(task, error, batch.indices, place)
            self.context.sample[0] = NO_SAMPLE
            batch.count_time()
            # the server does not know the number of batches, and may prefetch batches beyond the epoch: no fault
            failed = not (task.spec.is_prepared and isinstance(error, BatchOutOfRange))
            return nbytes, Report(batch.count, failed, batch.seconds, cache=take_counts(), ended=batch.ended)
        slowest, slow = self.context.slowest, self.context.slow
        report = Report(
            batch.count, False, batch.seconds, batch.substituted, slowest, slow, _lengths(batch), take_counts(),
            batch.ended,
        )  # fmt: skip
        return len(batch.frame), report

    def hosted(self, spec: LoaderSpec) -> HostedDataset:
        """Return the dataset of a loader; for a mixture of hosted datasets, their combination."""
        found = self._hosted[spec.dataset]
        if spec.mixture is None or isinstance(found.dataset, Sources):
            return found
        return self._combined(spec.datasets)

    def frame(self, task: Task, error: BaseException | None = None) -> tuple[NDArray[np.uint8], Report]:
        """Load a batch into newly allocated memory; return its frame and the report.

        Args:
            task: Batch to load.
            error: Exception to write as a failure frame in place of the batch; None to load the batch.
        """
        buffers: list[NDArray[np.uint8]] = []

        def place(nbytes: int) -> NDArray[np.uint8]:
            buffers.append(np.empty(nbytes, np.uint8))
            return buffers[-1]

        nbytes, report = self.load(task, place) if error is None else self.fail(task, error, place)
        return buffers[-1][:nbytes], report

    def fail(self, task: Task, error: BaseException, place: Place) -> tuple[int, Report]:
        """Write a failure frame in place of a batch; return the frame's size in bytes and a report, as `load` does."""
        nbytes = self._write_failure(task, error, [], place)
        return nbytes, Report(0, True, [0.0] * len(self._stages), ended=time.perf_counter())

    def run(self, task: Task, indices: Indices) -> Batch:
        """Load a batch in the calling thread without encoding it as a frame.

        Args:
            task: Batch to load.
            indices: Indices of the batch's samples; empty for an iterable-style dataset.

        Raises:
            BaseException: If the dataset or the collate function raises an exception; it is raised unchanged.
        """
        batch = Batch(task, _new_buffer, enumerate(self._stages), [0.0] * len(self._stages), indices, has_indices=True)
        batch.hosted = self.hosted(task.spec)
        try:
            batch.run_remaining()
        except Exception as error:
            if self._sample is not None:
                note = f"The error occurred at sample index {self._sample}."
                if note not in getattr(error, "__notes__", ()):  # the dataset may raise the same object again
                    error.add_note(note)
            raise
        finally:
            self.context.sample[0] = NO_SAMPLE
        return batch

    @property
    def _sample(self) -> int | None:
        """Index of the sample that is being fetched, if it is known."""
        return None if self.context.sample[0] == NO_SAMPLE else self.context.sample[0]

    def _write_failure(self, task: Task, error: BaseException, indices: Indices, place: Place) -> int:
        failure = describe(error, indices, self._worker, self._sample)
        writer = FrameWriter(task.batch_id, failure, checksum=task.spec.checksum)
        writer.write(place(writer.nbytes))
        return writer.nbytes


def _lengths(batch: Batch) -> tuple[int, int]:
    """Return `Report.lengths` of a batch."""
    lengths = batch.hosted.lengths
    if batch.pieces is not None and batch.task.spec.packing is not None:
        tokens = int((batch.pieces.stops - batch.pieces.starts).sum())
        return tokens, batch.count * batch.task.spec.packing.sequence_length
    if lengths is None or batch.task.spec.batch_of == "lengths" or not len(batch.indices):
        return 0, 0
    indices = batch.indices if isinstance(batch.indices, np.ndarray) else np.array(list(map(integer_of, batch.indices)))
    if indices.dtype != np.int64 or not -len(lengths) <= indices.min() <= indices.max() < len(lengths):
        return 0, 0  # indices of a client-side sampler can be any values
    found = lengths.of(indices)
    return int(found.sum()), len(found) * int(found.max())


def _new_buffer(nbytes: int) -> NDArray[np.uint8]:
    return np.empty(nbytes, np.uint8)


def _check_placed(batch: Batch, buffer: NDArray[np.uint8]) -> None:
    if not np.may_share_memory(batch.frame, buffer):
        raise RuntimeError(
            f"cannot send {batch.task.batch_id}: its frame is outside of the buffer that Batch.place() returned. A "
            "stage must copy the frame to this buffer, and set Batch.frame to a slice of the buffer"
        )
