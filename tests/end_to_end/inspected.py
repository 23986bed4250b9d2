"""Datasets for tests of errors, slow samples and stacks."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import numpy as np

DAMAGED = 7
SLOW = 100


class Damaged:
    """Map-style dataset whose sample 7 raises an exception."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index == DAMAGED:
            raise ValueError(f"sample {index} is damaged")
        return np.full(4, index)


class Slow:
    """Map-style dataset with one slow sample."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.3 if index == SLOW else 1e-4)  # of faster samples, only the time of the batch is measured
        return np.full(4, index)


class Stuck:
    """Map-style dataset that hangs: in Python, in a blocked read, or in C code that holds the GIL."""

    def __init__(self, how: str) -> None:
        self._how = how

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return getattr(self, f"hang_in_{self._how}")()

    def hang_in_sleep(self) -> None:
        """Hang in Python."""
        time.sleep(1000)

    def hang_in_read(self) -> None:
        """Hang in a system call."""
        os.read(os.pipe()[0], 1)

    def hang_in_c(self) -> None:
        """Hang in C code that holds the GIL: a deadlock of a mutex."""
        library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        for _ in range(2):
            library.pthread_mutex_lock(mutex)


class OwnSignal:
    """Map-style dataset that sets its own handler for the signal of stacks, in the process that constructs it."""

    def __init__(self, when: str) -> None:
        self._when = when
        self.calls = 0
        if when == "init":
            self._take()

    def _take(self) -> None:
        def count(*_: Any) -> None:
            self.calls += 1

        signal.signal(signal.SIGRTMIN + 13, count if self._when != "default" else signal.SIG_DFL)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if self._when != "init":
            self._take()
        return self.calls


def own_signal_in_init() -> OwnSignal:
    """Set the handler when the dataset is constructed."""
    return OwnSignal("init")


def own_signal_in_getitem() -> OwnSignal:
    """Set the handler while a sample is fetched."""
    return OwnSignal("getitem")


def default_signal() -> OwnSignal:
    """Reset the signal to its default action, which would end the process."""
    return OwnSignal("default")
