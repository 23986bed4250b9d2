"""Selection of memory and device for batches, based on a loader's arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

from teleloader.tensors.devices import (
    Device,
    JaxDevice,
    TorchDevice,
    check_sharding,
    current_accelerator,
    is_initialized,
    parse_device,
    warn_of_shared_device,
    with_index,
)
from teleloader.tensors.memory import HostBuffers
from teleloader.tensors.output import Output
from teleloader.tensors.pinned import process_budget
from teleloader_shared.buffers import BufferPool
from teleloader_shared.errors import TeleloaderError


class Placement(NamedTuple):
    """Array library, host memory and device for the batches of one iteration."""

    output: Output
    pool: BufferPool
    """Pool of pageable memory."""
    device: Device | None
    """Accelerator to copy batches to, or to page-lock memory for; None for pageable memory without copies."""
    copies: bool
    """True if batches are copied to `device`."""

    @property
    def target(self) -> Device | None:
        """Accelerator to copy batches to; None if batches stay in host memory."""
        return self.device if self.copies else None

    @property
    def pins(self) -> bool:
        """True if copies are faster from page-locked memory."""
        return self.device is not None and self.device.pins

    @property
    def memory(self) -> tuple[Output, Device | None]:
        """Array library, and accelerator that host memory is page-locked for: equal if the host memory is equal."""
        return self.output, self.device if self.pins else None

    def buffers(self) -> HostBuffers:
        """Create the allocator of host memory for batches, page-locked if `pins`."""
        return HostBuffers(self.output, self.pool, process_budget() if self.pins else None)


def place(output: Output, pool: BufferPool, device: Any, sharding: Any, *, pin_memory: bool) -> Placement:
    """Select memory and device for batches, based on a loader's arguments and the calling thread's current device.

    Args:
        output: The loader's `output` argument.
        pool: Pool of pageable memory.
        device: The loader's `device` argument.
        sharding: The loader's `sharding` argument.
        pin_memory: The loader's `pin_memory` argument.
    """
    if output == "jax":
        return Placement(output, pool, JaxDevice(sharding), copies=True)
    if device is not None:
        warn_of_shared_device(device, stacklevel=4)  # the caller of iter(loader)
    named = parse_device(device)
    copies = named is not None
    if named is None and pin_memory:
        named = current_accelerator()
    return Placement(output, pool, None if named is None else TorchDevice(with_index(named)), copies)


def initializes_device(device: Any, *, pin_memory: bool) -> bool:
    """Return True if `place` would initialize an accelerator, which selects a device and prevents forks."""
    named = parse_device(device) or (current_accelerator() if pin_memory else None)
    return named is not None and not is_initialized(named)


def check_placement(output: Output, name: str, value: Any) -> None:
    """Validate a loader argument that determines the memory or device of batches.

    Args:
        output: The loader's `output` argument.
        name: `device`, `device_ahead`, `sharding` or `pin_memory`; other names are ignored.
        value: Value of the argument.

    Raises:
        ValueError: If the value is invalid, or `sharding` is set and `output` is not ``"jax"``.
        TeleloaderError: If the argument requires torch tensors, or the device is not available.
    """
    if name == "device_ahead":
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"device_ahead must be a non-negative integer, got {value!r}")
    elif name == "pin_memory" and value:
        _check_torch(output, name, value)
    elif name == "device" and value is not None:
        _check_torch(output, name, value, "; for JAX, pass sharding=" if output == "jax" else "")
        parse_device(value)
    elif name == "sharding" and value is not None:
        if output != "jax":
            raise ValueError(f"sharding requires JAX arrays, got output={output!r}: pass output='jax'")
        check_sharding(value)


def _check_torch(output: Output, option: str, value: Any, hint: str = "") -> None:
    if output != "torch":
        raise TeleloaderError(
            f"{option}={value!r} requires torch tensors, got output={output!r}: pip install 'teleloader[torch]', or "
            f"pass output='torch'{hint}"
        )
