"""`gpu`: a real accelerator, or the simulated one if none is available.

With ``TELELOADER_GPU=1``, tests that require a real accelerator fail without one instead of being skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.conftest import need

MUST_BE_REAL = os.environ.get("TELELOADER_GPU") == "1"


class RealGpu:
    """Real GPU: the current CUDA device."""

    is_real = True
    name = "cuda"

    def delay(self) -> None:
        """Delay the current stream by about 50 ms."""
        import torch

        torch.cuda._sleep(100_000_000)

    def finish(self) -> None:
        """Wait until all work has run."""
        import torch

        torch.cuda.synchronize()

    def snapshot(self, tensor: Any) -> Any:
        """Enqueue a kernel that copies a tensor."""
        return tensor.clone()

    def host(self, snapshot: Any) -> Any:
        """Return the content of a snapshot as bytes; call it after `finish`."""
        import torch

        return snapshot.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()

    def is_on_device(self, tensor: Any) -> bool:
        """Return True if a tensor is on the device."""
        return bool(tensor.is_cuda)


class SimulatedGpu:
    """Simulated GPU: the device of `tests.gpu.simulated`."""

    is_real = False
    name = "simulated"

    def __init__(self, machine: Any) -> None:
        self.machine = machine

    def delay(self) -> None:
        """Delay the current stream until `finish`."""
        self.machine.delay()

    def finish(self) -> None:
        """Run all work."""
        self.machine.finish()

    def snapshot(self, tensor: Any) -> Any:
        """Enqueue a kernel that copies a tensor."""
        return self.machine.snapshot(tensor)

    def host(self, snapshot: np.ndarray[Any, Any]) -> Any:
        """Return the content of a snapshot as bytes; call it after `finish`."""
        return snapshot.tobytes()

    def is_on_device(self, tensor: Any) -> bool:
        """Return True if a tensor is on the device."""
        return hasattr(tensor, "simulated_device")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[RealGpu | SimulatedGpu]:
    """Return an accelerator."""
    need("torch")
    import torch

    if torch.cuda.is_available():
        yield RealGpu()
        return
    if MUST_BE_REAL:
        pytest.fail("TELELOADER_GPU=1, and torch finds no CUDA device")
    from tests.gpu import simulated

    with simulated.machine(monkeypatch) as machine:
        yield SimulatedGpu(machine)


@pytest.fixture
def real_gpu() -> RealGpu:
    """Return a real accelerator; without one, skip the test, or fail it with ``TELELOADER_GPU=1``."""
    need("torch")
    import torch

    if not torch.cuda.is_available():
        (pytest.fail if MUST_BE_REAL else pytest.skip)("needs a CUDA device")
    return RealGpu()


@pytest.fixture
def simulated_gpu(gpu: Any) -> SimulatedGpu:
    """Return the simulated accelerator, for tests that inspect its internals."""
    if gpu.is_real:
        pytest.skip("looks into the simulated device")
    assert isinstance(gpu, SimulatedGpu)
    return gpu


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Fail skipped tests of this folder with ``TELELOADER_GPU=1``, except those that inspect the simulation."""
    outcome: Any = yield
    report = outcome.get_result()
    if MUST_BE_REAL and report.skipped and "simulated_gpu" not in getattr(item, "fixturenames", ()):
        report.outcome = "failed"
        report.longrepr = f"skipped with TELELOADER_GPU=1: {report.longrepr}"
