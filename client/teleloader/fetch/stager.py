"""Background thread that copies received batches to a device before the training loop requests them.

Each iterator that copies to a device has one such thread. Settings of the training loop's thread (current device and
stream, autocast, inference mode, default device) do not apply in it, so the content of a batch does not depend on the
time of its copy. No user code runs in it: transforms run in the training loop's thread and on its stream.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any, Final

from teleloader.fetch.reorder import ReorderBuffer
from teleloader.tensors.devices import Copy, CopyTimes, Device, is_out_of_memory
from teleloader_shared.codec import End, Failure, Frame

_IN_NEXT: Final = 4
"""Stack level of the training loop in `Stager.warn`, which `LoaderIterator` calls."""
CLOSE_TIMEOUT: Final = 5.0
"""Maximum wait for the end of the thread, in seconds; a device driver may block the thread."""


class Stager:
    """Background thread that copies received batches to a device before the training loop requests them.

    A copied batch stays in the reorder buffer, so that it can be copied again after an interruption.

    Args:
        reorder_buffer: Source of the batches.
        device: Destination of the copies.
        ahead: Maximum number of copies that the training loop has not received. With 0, a batch is copied when the
            training loop waits for it.
    """

    def __init__(self, reorder_buffer: ReorderBuffer, device: Device, ahead: int) -> None:
        self._reorder_buffer = reorder_buffer
        self._device = device
        self._ahead = ahead
        self._copies: dict[int, Copy | Exception] = {}
        """Copies that the training loop has not received, or exceptions in their place, by batch number."""
        self._times = CopyTimes(device)
        self._late: int | None = None
        """Number of the last batch that was counted as a late copy."""
        self._warning: str | None = None
        """Text of a warning to issue in the training loop's thread."""
        reorder_buffer.stage(self.is_ready)
        self._thread = threading.Thread(target=self._run, name="teleloader-stager", daemon=True)
        self._thread.start()

    # -- in the training loop's thread

    def is_ready(self, frame: Frame) -> bool:
        """Return True if the copy of a batch has started or failed, or if the frame contains no batch."""
        return isinstance(frame.content, Failure | End) or frame.batch_id.batch in self._copies

    def warn(self) -> None:
        """Issue the pending warning of the copying thread, if any, in the training loop's thread."""
        if self._warning is not None:
            text, self._warning = self._warning, None
            warnings.warn(text, stacklevel=_IN_NEXT)

    def use(self, frame: Frame) -> Any:
        """Return the copy of a batch on the device, for use on the current stream.

        Raises:
            Exception: If the copy failed.
        """
        copy = self._copies[frame.batch_id.batch]
        if isinstance(copy, Exception):
            raise copy
        return self._device.use(copy)

    def discard(self, frame: Frame) -> None:
        """Release the copy of a batch, because the training loop received it or needs a new copy."""
        with self._reorder_buffer.lock:
            self._copies.pop(frame.batch_id.batch, None)
            self._reorder_buffer.changed.notify_all()

    def close(self) -> None:
        """Stop the thread; do not wait for copies in progress, because torch's allocators keep their memory valid."""
        with self._reorder_buffer.lock:
            self._reorder_buffer.changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT)
        self._copies.clear()
        self._times.clear()

    # -- in the stager's thread

    def _run(self) -> None:
        entered = False
        while (frame := self._next()) is not None:
            try:
                if not entered:
                    self._device.enter_thread()
                    entered = True
                copy: Copy | Exception = self._device.copy(frame.content)
            except Exception as error:  # noqa: BLE001 - raised in the training loop, in place of the batch
                if self._ahead and is_out_of_memory(error):
                    self._stop_ahead(error)
                    del frame
                    continue
                copy = error
            self._put(frame, copy)
            if isinstance(copy, Copy):
                self._times.add(copy)
            self._reorder_buffer.measures.copy += self._times.collect()
            del frame, copy  # a waiting thread must not keep a batch in memory

    def _next(self) -> Frame | None:
        """Wait for a batch to copy; return None if the iterator was closed."""
        with self._reorder_buffer.changed:
            while self._reorder_buffer.closed is None:
                frame = self._find()
                if frame is not None:
                    return frame
                self._reorder_buffer.changed.wait()
        return None

    def _find(self) -> Frame | None:
        for i, frame in enumerate(self._reorder_buffer.arrived()):
            is_awaited = i == 0 and self._reorder_buffer.starved
            if not is_awaited and len(self._copies) >= self._ahead:
                return None
            if not self.is_ready(frame):
                if is_awaited and frame.batch_id.batch != self._late:
                    self._late = frame.batch_id.batch
                    self._reorder_buffer.measures.late_copies += 1
                return frame
        return None

    def _put(self, frame: Frame, copy: Copy | Exception) -> None:
        with self._reorder_buffer.changed:
            if self._reorder_buffer.closed is None:
                self._copies[frame.batch_id.batch] = copy
                self._reorder_buffer.staged()

    def _stop_ahead(self, error: Exception) -> None:
        """Copy each further batch only when the training loop waits for it, and so has freed memory."""
        self._ahead = 0
        self._warning = (
            f"out of device memory while prefetching a batch to the device ({str(error).splitlines()[0]}): the loader "
            "copies one batch at a time for the rest of the epoch. Set device_ahead=0 or 1, or use smaller batches"
        )
