"""The device of a training loop: a GPU, or main memory if no GPU is available.

On a GPU, CUDA events measure time in the stream to which work is submitted. Main memory is a fallback, which only shows
that everything runs: its marks are host timestamps, and a copy to it is a plain copy.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Accelerator(Protocol):
    """A device, its streams and its clock."""

    @property
    def is_gpu(self) -> bool:
        """Return True if figures are those of a GPU."""

    @property
    def device(self) -> Any:
        """The torch.device."""

    @property
    def dtype(self) -> Any:
        """The torch.dtype to compute with."""

    def mark(self) -> Any:
        """Mark a point of the current stream."""

    def wait(self, mark: Any) -> None:
        """Wait until the stream has reached a mark."""

    def milliseconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks that streams have reached."""

    def synchronize(self) -> None:
        """Wait until all streams are done."""

    def stream(self) -> Any:
        """Return a new stream."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which `stream` is the current one."""

    def join(self, stream: Any, tensors: Iterable[Any]) -> None:
        """Make the current stream wait for another one, and keep tensors that were allocated there until it has."""

    def facts(self) -> Mapping[str, str]:
        """Return properties of the device, by name."""


class Cuda:
    """A GPU that torch uses by ``torch.cuda``: NVIDIA's, or AMD's with a ROCm build.

    Args:
        index: Of the device; taken modulo the number of devices, for ranks that share them.
    """

    is_gpu = True
    dtype = torch.float16  # bfloat16 is slow before Ampere

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index % torch.cuda.device_count())
        torch.cuda.set_device(self.device)

    def mark(self) -> Any:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        """Wait for the event."""
        mark.synchronize()

    def milliseconds(self, start: Any, end: Any) -> float:
        """Return the time between two events on the device, in any streams."""
        elapsed: float = start.elapsed_time(end)
        return elapsed

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def stream(self) -> Any:
        """Return a new stream."""
        return torch.cuda.Stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return torch's context."""
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def join(self, stream: Any, tensors: Iterable[Any]) -> None:
        """Make the current stream wait without blocking the host, and record the tensors' use with the allocator."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(stream)
        for tensor in tensors:
            tensor.record_stream(current)

    def facts(self) -> Mapping[str, str]:
        """Return name, memory, driver and link."""
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "gpu": f"{torch.cuda.device_count()} x {properties.name}",
            "gpu memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "cuda": str(torch.version.cuda or torch.version.hip),
            **_driver(str(getattr(properties, "uuid", ""))),
        }


class Host:
    """Main memory, in place of a GPU."""

    is_gpu = False
    device = torch.device("cpu")
    dtype = torch.float32

    def mark(self) -> float:
        """Read the clock."""
        return time.perf_counter()

    def wait(self, mark: Any) -> None:
        """Return immediately: all operations are synchronous."""

    def milliseconds(self, start: float, end: float) -> float:
        """Return the time between two readings."""
        return 1000 * (end - start)

    def synchronize(self) -> None:
        """Return immediately: all operations are synchronous."""

    def stream(self) -> None:
        """Return None: main memory has no streams."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context without effect."""
        return nullcontext()

    def join(self, stream: Any, tensors: Iterable[Any]) -> None:
        """Return immediately: main memory has no streams."""

    def facts(self) -> Mapping[str, str]:
        """Return the device's description: no GPU."""
        return {"gpu": "none (CPU fallback)"}


def find(index: int = 0) -> Accelerator:
    """Return the GPU of an index, or main memory if torch finds none."""
    return Cuda(index) if torch.cuda.is_available() else Host()


def _driver(uuid: str) -> Mapping[str, str]:
    """Return the driver's version and the link to the host, as nvidia-smi reports them."""
    wanted = ["driver_version", "pcie.link.gen.max", "pcie.link.width.max"]
    # nvidia-smi counts all devices, torch those of CUDA_VISIBLE_DEVICES: the UUID is the same for both
    chosen = [f"--id=GPU-{uuid}"] if uuid else []
    command = ["nvidia-smi", f"--query-gpu={','.join(wanted)}", "--format=csv,noheader", *chosen]
    try:
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
        driver, generation, width = text.splitlines()[0].split(", ")
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {"driver": "unknown (no nvidia-smi)", "link": "unknown"}
    return {"driver": driver, "link": f"PCIe gen {generation} x{width}"}
