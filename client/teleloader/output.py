"""What a batch's arrays become: torch tensors, NumPy or JAX arrays."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from teleloader_shared import dtypes
from teleloader_shared.buffers import Buffer
from teleloader_shared.codec import MakeArray
from teleloader_shared.errors import TeleloaderError
from teleloader_shared.tree import ArrayLeaf, Tensor, flatten, unflatten

Output = Literal["torch", "numpy", "jax"]


def choose_output(output: Output | None) -> Output:
    """The kind of arrays to make: what was asked for, else torch's where torch is installed.

    Raises:
        ValueError: When it is none of the three.
        TeleloaderError: When what is asked for is not installed.
    """
    installed = importlib.util.find_spec("torch") is not None
    if output is None:
        return "torch" if installed else "numpy"
    if output not in get_args(Output):
        raise ValueError(f"output must be 'torch', 'numpy', 'jax' or None, was {output!r}")
    if output == "jax" and importlib.util.find_spec("jax") is None:
        raise TeleloaderError("output='jax' needs JAX, which is not installed: pip install jax")
    if output == "torch" and not installed:
        raise TeleloaderError("output='torch' needs torch, which is not installed: pip install 'teleloader[torch]'")
    return output


def array_maker(output: Output, *, pin_memory: bool) -> MakeArray:
    """The function that makes the leaves of a batch."""
    if output == "torch":
        return _torch_maker(pin_memory=pin_memory)
    return _make_marked if output == "jax" else _make_numpy


def accelerator_found() -> bool:
    """Whether torch has a device that copies from page-locked memory."""
    import torch

    found: bool = torch.accelerator.is_available() if hasattr(torch, "accelerator") else torch.cuda.is_available()
    return found


def allocate_pinned(size: int) -> Buffer:
    """Page-locked memory, from which copies to an accelerator are fastest."""
    import torch

    pinned: Buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return pinned


def _make_numpy(bits: NDArray[Any], dtype_name: str, kind: str) -> Any:
    array = bits.view(dtypes.extended_numpy(dtype_name)) if dtype_name in dtypes.EXTENDED else bits
    return array[()] if kind == "scalar" else array


def _make_marked(bits: NDArray[Any], dtype_name: str, kind: str) -> Any:
    array = _make_numpy(bits, dtype_name, kind)
    return array.view(Tensor) if kind == "tensor" else array


def to_jax(batch: Any) -> Any:
    """The batch with JAX arrays in the place of those that stand for tensors.

    JAX's settings (``enable_x64``, ``default_device``) belong to a thread, so this is done in the training loop's.
    """
    import jax.numpy

    def make(bits: NDArray[Any], dtype_name: str, kind: str) -> Any:
        array = _make_numpy(bits, dtype_name, kind)
        # copied: JAX arrays never change, and the memory of this one is used again
        return jax.numpy.array(array) if kind == "tensor" else array

    return remade(batch, make)


def remade(batch: Any, make: MakeArray) -> Any:
    """The batch with what `make` makes of its arrays."""
    tree, leaves = flatten(batch)
    arrays = iter([leaf.array for leaf in leaves if isinstance(leaf, ArrayLeaf)])
    return unflatten(tree, lambda dtype_name, _shape, kind: make(next(arrays), dtype_name, kind))


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
