"""The thread that copies arrived batches to a device, ahead of the training loop.

One thread for each iterator: what a training loop sets for its own thread (current device and stream, autocast,
inference mode, default device) is not in force here, so a batch is the same whenever it was copied. User code does not
run here: transforms run in the training loop's thread and on its stream.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any, Final

from teleloader.fetch.reorder import ReorderBuffer
from teleloader.tensors.devices import Copy, CopyTimes, Device, is_out_of_memory
from teleloader_shared.codec import End, Failure, Frame

_IN_NEXT: Final = 4
"""The line of the training loop, seen from `Stager.warn` through `LoaderIterator`."""
CLOSE_TIMEOUT: Final = 5.0
"""Seconds to wait for the thread to end; it takes long only while a driver blocks it."""


class Stager:
    """Copies up to `ahead` batches before the training loop requests them, each when it has arrived.

    A copy does not remove its batch from the reorder buffer, so a batch can be copied again after an interruption.

    Args:
        reorder_buffer: Where batches arrive.
        device: Where to copy them.
        ahead: Batches on the device, or on their way there, that the loop has not taken. With 0, a batch is copied when
            the loop waits for it.
    """

    def __init__(self, reorder_buffer: ReorderBuffer, device: Device, ahead: int) -> None:
        self._reorder_buffer = reorder_buffer
        self._device = device
        self._ahead = ahead
        self._copies: dict[int, Copy | Exception] = {}
        """By batch number: copies that the loop has not taken, or why there is none."""
        self._times = CopyTimes(device)
        self._late: int | None = None
        """The last batch that was counted as copied late."""
        self._warning: str | None = None
        """For the training loop, whose thread it concerns."""
        reorder_buffer.stage(self.is_ready)
        self._thread = threading.Thread(target=self._run, name="teleloader-stager", daemon=True)
        self._thread.start()

    # -- in the training loop's thread

    def is_ready(self, frame: Frame) -> bool:
        """Return True if the loop can take a batch, or an error in its place."""
        return isinstance(frame.content, Failure | End) or frame.address.batch in self._copies

    def warn(self) -> None:
        """Warn the training loop of what happened in the other thread, once."""
        if self._warning is not None:
            text, self._warning = self._warning, None
            warnings.warn(text, stacklevel=_IN_NEXT)

    def use(self, frame: Frame) -> Any:
        """Return a batch that is ready, on the device, for the current stream.

        Raises:
            Exception: If it could not be copied.
        """
        copy = self._copies[frame.address.batch]
        if isinstance(copy, Exception):
            raise copy
        return self._device.use(copy)

    def discard(self, frame: Frame) -> None:
        """Forget the copy of a batch: the loop took it, or is to be given a fresh one."""
        with self._reorder_buffer.lock:
            self._copies.pop(frame.address.batch, None)
            self._reorder_buffer.changed.notify_all()

    def close(self) -> None:
        """End the thread. Waits for no copy: the allocators keep memory for as long as one uses it."""
        with self._reorder_buffer.lock:
            self._reorder_buffer.changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT)
        self._copies.clear()

    # -- in the stager's thread

    def _run(self) -> None:
        entered = False
        while (frame := self._next()) is not None:
            try:
                if not entered:
                    self._device.enter_thread()
                    entered = True
                copy: Copy | Exception = self._device.copy(frame.content)
            except Exception as error:  # noqa: BLE001 - raised in the training loop, in the place of the batch
                if self._ahead and is_out_of_memory(error):
                    self._stop_ahead(error)
                    del frame
                    continue
                copy = error
            self._put(frame, copy)
            if isinstance(copy, Copy):
                self._times.add(copy)
            self._reorder_buffer.measures.copy += self._times.collect()
            del frame, copy  # while this thread waits it must keep no batch alive

    def _next(self) -> Frame | None:
        """Wait for a batch to copy; None when the iterator was closed."""
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
                if is_awaited and frame.address.batch != self._late:
                    self._late = frame.address.batch
                    self._reorder_buffer.measures.late_copies += 1
                return frame
        return None

    def _put(self, frame: Frame, copy: Copy | Exception) -> None:
        with self._reorder_buffer.changed:
            if self._reorder_buffer.closed is None:
                self._copies[frame.address.batch] = copy
                self._reorder_buffer.staged()

    def _stop_ahead(self, error: Exception) -> None:
        """Copy each batch only when the loop waits for it, from now on: by then it may have freed memory."""
        self._ahead = 0
        self._warning = (
            f"out of device memory while a batch was copied ahead of use ({str(error).splitlines()[0]}): the rest of "
            "this epoch is copied batch by batch. Set device_ahead=0 or 1, or use smaller batches"
        )
