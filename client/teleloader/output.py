"""What a batch's arrays become: torch tensors or NumPy arrays. The only module that knows torch."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from teleloader.buffers import Buffer
from teleloader_shared import dtypes
from teleloader_shared.codec import MakeArray
from teleloader_shared.errors import TeleloaderError

Output = Literal["torch", "numpy"]


def choose_output(output: Output | None) -> Output:
    """The kind of arrays to make: what was asked for, else torch's where torch is installed.

    Raises:
        ValueError: When it is neither ``"torch"`` nor ``"numpy"``.
        TeleloaderError: When torch is asked for and not installed.
    """
    installed = importlib.util.find_spec("torch") is not None
    if output is None:
        return "torch" if installed else "numpy"
    if output not in ("torch", "numpy"):
        raise ValueError(f"output must be 'torch', 'numpy' or None, was {output!r}")
    if output == "torch" and not installed:
        raise TeleloaderError("output='torch' needs torch, which is not installed: pip install 'teleloader[torch]'")
    return output


def array_maker(output: Output, *, pin_memory: bool) -> MakeArray:
    """The function that makes the leaves of a batch."""
    return _torch_maker(pin_memory=pin_memory) if output == "torch" else _make_numpy


def pinned_memory(output: Output) -> Callable[[int], Buffer] | None:
    """An allocator of page-locked memory, from which copies to an accelerator are fastest; None where there is none.

    Raises:
        TeleloaderError: When batches are NumPy arrays: only torch can pin.
    """
    if output != "torch":
        raise TeleloaderError("pin_memory=True needs torch tensors: pip install 'teleloader[torch]' or output='torch'")
    import torch

    if not torch.cuda.is_available():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, "
            "then device pinned memory won't be used.",
            stacklevel=3,
        )
        return None

    def allocate(size: int) -> Buffer:
        pinned: Buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned

    return allocate


def _make_numpy(bits: NDArray[Any], dtype_name: str, kind: str) -> Any:
    array = bits.view(dtypes.extended_numpy(dtype_name)) if dtype_name in dtypes.EXTENDED else bits
    return array[()] if kind == "scalar" else array


def _torch_maker(*, pin_memory: bool) -> MakeArray:
    import torch

    def make(bits: NDArray[Any], dtype_name: str, kind: str) -> Any:
        if kind != "tensor":
            return _make_numpy(bits, dtype_name, kind)
        if dtype_name in dtypes.EXTENDED:
            integers = bits.view(np.int16 if bits.itemsize == 2 else np.uint8)
            tensor = torch.from_numpy(integers).view(getattr(torch, dtype_name))
        else:
            tensor = torch.from_numpy(bits)
        # already pinned unless the array came compressed, and then this copies it
        return tensor.pin_memory() if pin_memory else tensor

    return make
