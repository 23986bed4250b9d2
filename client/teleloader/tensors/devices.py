"""Asynchronous copies of batches to accelerators, with torch or JAX.

Copies run on a separate stream, so that they overlap with computation. The host does not wait for them: the stream that
uses a batch waits for the event of its copy. torch's allocators keep memory valid on both sides: the allocator of
pinned memory records which streams copy from a block, ``record_stream`` records in the device's allocator which stream
uses a tensor, and both reuse memory only after the operations that those streams had queued when it was freed.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol, runtime_checkable

import numpy as np

from teleloader.tensors.output import map_leaves
from teleloader_shared.errors import TeleloaderError
from teleloader_shared.tree import Tensor


@runtime_checkable
class Movable(Protocol):
    """Interface of objects with tensors that are copied as a whole, such as TensorDict and torch_geometric's Data."""

    def to(self, device: Any, *, non_blocking: bool) -> Any:
        """Return the object with its tensors on `device`."""

    def record_stream(self, stream: Any) -> Any:
        """Record that `stream` uses the tensors."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy of a batch to a device, in progress or complete."""

    batch: Any
    tensors: list[Any]
    """Tensors and `Movable` objects in `batch`."""
    started: Any = None
    done: Any = None
    """Events before and after the copy; None if the device has no streams, in which case the copy is complete."""
    seconds: float = 0.0
    """Duration of a copy without events, in seconds."""


class Device(Protocol):
    """Interface of a target device for batch copies."""

    @property
    def pins(self) -> bool:
        """True if copies are faster from page-locked memory."""

    def enter_thread(self) -> None:
        """Make this the current device of the calling thread."""

    def copy(self, batch: Any) -> Copy:
        """Start copying a batch, asynchronously if the device has streams.

        The calling thread must have called `enter_thread`.
        """

    def use(self, copy: Copy) -> Any:
        """Return the copied batch; the calling thread's current stream waits for the copy."""

    def seconds(self, copy: Copy) -> float | None:
        """Return the duration of a completed copy in seconds, 0 if not measured; None while the copy is in progress."""


class TorchDevice:
    """Accelerator that torch copies tensors to.

    Args:
        device: The torch.device, with an index if devices of this type have one.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self._module = _module(device)
        self._has_streams = hasattr(self._module, "Stream")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TorchDevice) and self.device == other.device

    def __hash__(self) -> int:
        return hash(self.device)

    @property
    def pins(self) -> bool:
        """True if copies are faster from page-locked memory, which torch can allocate for all devices but MPS."""
        return bool(self.device.type != "mps")

    def enter_thread(self) -> None:
        """Make this the current device of the calling thread, because the default in a new thread is device 0."""
        if self.device.index is not None and hasattr(self._module, "set_device"):
            self._module.set_device(self.device.index)

    def copy(self, batch: Any) -> Copy:
        """Start copying the tensors of a batch, asynchronously if the device has streams."""
        import torch

        tensors: list[Any] = []

        def put(value: Any) -> Any:
            copies = {"copy": True} if isinstance(value, torch.Tensor) else {}
            # asynchronous only with events, which signal when the host memory can be reused
            tensors.append(value.to(self.device, non_blocking=self._has_streams, **copies))
            return tensors[-1]

        if not self._has_streams:
            began = time.perf_counter()
            copied = map_leaves(batch, (torch.Tensor, Movable), put)
            return Copy(copied, tensors, seconds=time.perf_counter() - began)
        stream = _copy_stream(self.device)
        started, done = (self._module.Event(enable_timing=True) for _ in range(2))
        with self._module.stream(stream):
            started.record(stream)
            copied = map_leaves(batch, (torch.Tensor, Movable), put)
            done.record(stream)
        return Copy(copied, tensors, started, done)

    def use(self, copy: Copy) -> Any:
        """Return the copied batch; the calling thread's current stream waits for the copy.

        ``Tensor.record_stream`` keeps the memory of the copy valid until that stream has used it.
        """
        if copy.done is not None:
            current = self._module.current_stream(self.device)
            current.wait_event(copy.done)
            for tensor in copy.tensors:
                tensor.record_stream(current)
        return copy.batch

    def seconds(self, copy: Copy) -> float | None:
        """Return the duration of a completed copy on the device in seconds, or None while the copy is in progress."""
        if copy.done is None:
            return copy.seconds
        if not copy.done.query():
            return None
        milliseconds: float = copy.started.elapsed_time(copy.done)
        return milliseconds / 1000


class JaxDevice:
    """Device, or several devices, that JAX copies arrays to.

    Settings of JAX may differ between threads; the settings of the thread that creates this object apply to all
    batches.

    Args:
        sharding: A jax.sharding.Sharding that distributes arrays over devices; with several processes, the batches of
            each process are its part of the global batches. None for the default device.
    """

    pins = False

    def __init__(self, sharding: Any) -> None:
        import jax

        self._sharding = sharding
        self._default_device = jax.config.jax_default_device
        self._x64 = jax.config.jax_enable_x64

    def enter_thread(self) -> None:
        """Do nothing: JAX's settings are applied for each copy."""

    def copy(self, batch: Any) -> Copy:
        """Start copying the arrays of type `Tensor` in a batch."""
        import jax

        with jax.default_device(self._default_device), _x64(self._x64):
            return Copy(map_leaves(batch, Tensor, self._put), [])

    def use(self, copy: Copy) -> Any:
        """Return the batch without waiting, because JAX computations wait for their input arrays."""
        return copy.batch

    def seconds(self, copy: Copy) -> float | None:
        """Return 0: JAX does not report the duration of a copy."""
        return 0.0

    def _put(self, array: Any) -> Any:
        import jax

        # copied: a JAX array on the CPU may be a view of host memory, which is recycled
        own = np.array(array)
        if self._sharding is None:
            return jax.numpy.asarray(own)
        return jax.make_array_from_process_local_data(self._sharding, own)


class CopyTimes:
    """Collector of device copy durations.

    Args:
        device: Destination of the copies.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pending: deque[Copy] = deque()
        """Copies in progress, without their batches, so that the batches can be freed."""

    def add(self, copy: Copy) -> None:
        """Track a copy in progress, so that `collect` includes its duration."""
        self._pending.append(replace(copy, batch=None, tensors=[]))

    def collect(self) -> float:
        """Return the total duration of the copies that completed since the last call, in seconds."""
        total = 0.0
        try:
            while self._pending and (seconds := self._device.seconds(self._pending[0])) is not None:
                total += seconds
                self._pending.popleft()
        except Exception:  # noqa: BLE001 - the device failed: the next copy or the training loop raises the error
            self.clear()
        return total

    def clear(self) -> None:
        """Forget the copies in progress.

        Otherwise, the garbage collector of a forked process could free their events, which aborts that process.
        """
        self._pending.clear()


def check_sharding(sharding: Any) -> None:
    """Raise ValueError unless `sharding` is a jax.sharding.Sharding or None."""
    import jax

    if sharding is not None and not isinstance(sharding, jax.sharding.Sharding):
        raise ValueError(
            f"invalid sharding={sharding!r}: expected a jax.sharding.Sharding, for example "
            "jax.sharding.SingleDeviceSharding(device), or None for the default device"
        )


def _x64(enabled: bool) -> AbstractContextManager[Any]:
    """Return a context manager that enables or disables JAX's 64-bit types."""
    import jax

    if jax.config.jax_enable_x64 == enabled:
        return nullcontext()
    if hasattr(jax, "enable_x64"):
        context: AbstractContextManager[Any] = jax.enable_x64(enabled)
        return context
    from jax import experimental

    switch = experimental.enable_x64 if enabled else experimental.disable_x64
    return switch()  # type: ignore[no-any-return]


@cache
def _copy_stream(device: Any) -> Any:
    """Return the copy stream of a device; all loaders of the process share this stream."""
    return _module(device).Stream(device)


def parse_device(device: Any) -> Any:
    """Return the torch.device for a loader's `device` argument, or None for host memory.

    Creates no CUDA context and ignores the current device, so that a loader can be created before
    ``torch.cuda.set_device``.

    Args:
        device: A torch.device, a string such as ``"cuda"`` or ``"cuda:1"``, or the index of an accelerator; None and
            ``"cpu"`` stand for host memory.

    Raises:
        ValueError: If the argument does not name a device.
        TeleloaderError: If torch finds no such device on this machine.
    """
    if device is None:
        return None
    import torch

    try:
        if isinstance(device, bool):
            raise TypeError("unsupported type bool")  # noqa: TRY301
        named = _accelerator_at(device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"invalid device={device!r}: {reason}. Pass a torch.device, 'cuda', 'cuda:1', an index, or None for host "
            "memory"
        ) from None
    if named.type == "cpu":
        return None
    module = _module(named)
    if module is None or not module.is_available():
        raise TeleloaderError(
            f"device={str(device)!r} is not available: torch {torch.__version__} finds no accelerator of type "
            f"{named.type!r} on this machine. Use device=None, or install a build of torch that supports the device"
        )
    count = module.device_count()
    if named.index is not None and named.index >= count:
        raise TeleloaderError(
            f"device={str(device)!r} is not available: the number of visible {named.type!r} devices is {count}. Use a "
            "smaller index, or check CUDA_VISIBLE_DEVICES"
        )
    return named


def with_index(device: Any) -> Any:
    """Return `device`; if it has no index (``"cuda"``), return the current device of the same type."""
    import torch

    module = _module(device)
    if device.index is not None or not hasattr(module, "current_device"):
        return device
    return torch.device(device.type, module.current_device())


def is_initialized(device: Any) -> bool:
    """Return True if this process already uses accelerators of a torch.device's type."""
    module = _module(device)
    return not hasattr(module, "is_initialized") or bool(module.is_initialized())


def warn_of_shared_device(device: Any, *, stacklevel: int) -> None:
    """Warn if several ranks on this machine would use the same device.

    ``device="cuda"`` is device 0 in each process that did not select another device.

    Args:
        device: The loader's `device` argument.
        stacklevel: Stack level of the warning; 1 is this function.
    """
    local_rank, named = os.environ.get("LOCAL_RANK", ""), parse_device(device)
    if named is None or named.index is not None or not local_rank.isdecimal():
        return
    used = with_index(named)
    if used.index is not None and used.index != int(local_rank) < _module(named).device_count():
        warnings.warn(
            f"device={str(named)!r} is {used} in the process with LOCAL_RANK={local_rank}: other ranks may use the "
            f"same device. Call torch.{named.type}.set_device({local_rank}) before iter(loader), or pass "
            f"device='{named.type}:{local_rank}'",
            stacklevel=stacklevel + 1,
        )


def is_out_of_memory(error: Exception) -> bool:
    """Return True if `error` is torch's out-of-memory error for an accelerator."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.cuda.OutOfMemoryError)


def current_accelerator() -> Any:
    """Return the torch.device (without an index) of the accelerator that torch would use, or None without one."""
    import torch

    if not hasattr(torch, "accelerator"):  # before torch 2.6
        return torch.device("cuda") if torch.cuda.is_available() else None
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _module(device: Any) -> Any:
    """Return torch's module for a type of device, such as ``torch.cuda``, or None if torch lacks one."""
    import torch

    module = getattr(torch, device.type, None)
    return module if hasattr(module, "is_available") else None


def _accelerator_at(index: int) -> Any:
    import torch

    accelerator = current_accelerator()
    if accelerator is None:
        raise TypeError("an index requires an accelerator, but torch finds none on this machine")
    return torch.device(accelerator.type, index)
