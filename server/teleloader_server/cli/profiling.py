"""Sampling profile of the dataset's code in a worker, for ``teleloader-server check``."""

from __future__ import annotations

import mmap
import struct
import sys
import threading
import time
from dataclasses import replace
from types import FrameType
from typing import Final

from teleloader_server.loading.datasets import HostedDataset
from teleloader_server.loading.stages import Fetch

INTERVAL: Final = 0.001
"""Time between two samples of the worker's stack, in seconds."""
MIN_SECONDS: Final = 0.02
"""Minimum time in seconds that must have been sampled."""

_TIMES: Final = struct.Struct("dd")


class FetchProfile:
    """Profile of the time that a worker spends in the dataset, sampled by a thread of the worker.

    The times are in memory that the worker shares with the process that created this object. A profiler with a hook
    per function call would slow Python code down, and therefore overestimate its share.
    """

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, _TIMES.size)

    def profiled(self, hosted: HostedDataset) -> HostedDataset:
        """Return the dataset with a worker-init function that starts the profile before calling the dataset's own."""

        def start(worker: int) -> None:
            # by default, Python code keeps the GIL for several intervals
            sys.setswitchinterval(INTERVAL / 10)
            threading.Thread(target=self._run, args=[threading.get_ident()], daemon=True).start()
            if hosted.worker_init is not None:
                hosted.worker_init(worker)

        return replace(hosted, worker_init=start)

    def pillow_jpeg_fraction(self) -> float:
        """Return the fraction of the fetch time in which Pillow decoded JPEG files; 0 below `MIN_SECONDS`."""
        fetching, decoding = _TIMES.unpack_from(self._shared)
        return decoding / fetching if fetching >= MIN_SECONDS else 0.0

    def _run(self, thread: int) -> None:
        fetching = decoding = 0.0
        now = time.perf_counter()
        while True:
            before = now
            time.sleep(INTERVAL)
            # the thread gets the GIL when C code that kept it has returned: all of that time belongs to this sample
            now = time.perf_counter()
            frame = sys._current_frames().get(thread)
            decodes = False
            while frame is not None and frame.f_code is not Fetch.run.__code__:
                decodes = decodes or _decodes_jpeg(frame)
                frame = frame.f_back
            if frame is not None:
                fetching += now - before
                decoding += decodes * (now - before)
                _TIMES.pack_into(self._shared, 0, fetching, decoding)


def _decodes_jpeg(frame: FrameType) -> bool:
    """Return True for Pillow's method that decodes an image, if the image is in a JPEG file."""
    is_load = frame.f_code.co_name == "load" and frame.f_globals.get("__name__") == "PIL.ImageFile"
    return is_load and type(frame.f_locals.get("self")).__name__ == "JpegImageFile"
