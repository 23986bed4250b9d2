"""Datasets with errors that users encounter."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from teleloader_shared import register
from tests.docs.my_package.data import Images


class Broken:
    """Dataset whose sample 17 fails."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return self._make(index) if index == 17 else np.zeros(4, np.float32)


class Box:
    """Class that only the server registers."""


class DamagedImage(Exception):
    """Exception that is not builtin."""


def _value_error(index: int) -> None:
    raise ValueError(f"no label for sample {index}")


def _damaged_image(index: int) -> None:
    raise DamagedImage(f"sample {index} is no JPEG")


def _registered_here(index: int) -> Box:
    """Return a value of a type that is registered in this worker, and in no other process."""
    register(Box, "my_package.Box", lambda box: None, lambda plain: Box())
    return Box()


raising = Broken(_value_error)
raising_its_own = Broken(_damaged_image)
uneven = Broken(lambda index: np.zeros(5, np.float32))
unsendable = Broken(lambda index: {"lock": threading.Lock()})
unknown = Broken(_registered_here)
deadly = Broken(lambda index: os.kill(os.getpid(), signal.SIGKILL))
stuck = Broken(lambda index: threading.Event().wait())
large = Broken(lambda index: np.zeros(2**20, np.float32))
no_dataset = object()


def cannot_be_built() -> Images:
    """Fail like a factory whose data are missing."""
    with open("/data/train.tar", "rb"):
        return Images()
