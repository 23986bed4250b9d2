"""Datasets with what users run into."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.docs.my_package.data import Images


class Broken:
    """Sample 17 is made by a function that fails."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return self._make(index) if index == 17 else np.zeros(4, np.float32)


class DamagedImage(Exception):
    """An exception that is no builtin one."""


def _value_error(index: int) -> None:
    raise ValueError(f"no label for sample {index}")


def _damaged_image(index: int) -> None:
    raise DamagedImage(f"sample {index} is no JPEG")


raising = Broken(_value_error)
raising_its_own = Broken(_damaged_image)
uneven = Broken(lambda index: np.zeros(5, np.float32))
unsendable = Broken(lambda index: {"lock": threading.Lock()})
deadly = Broken(lambda index: os.kill(os.getpid(), signal.SIGKILL))
stuck = Broken(lambda index: threading.Event().wait())
large = Broken(lambda index: np.zeros(2**20, np.float32))
no_dataset = object()


def cannot_be_built() -> Images:
    """A factory whose data are not there."""
    with open("/data/train.tar", "rb"):
        return Images()
