"""Batches reach the device ahead of use, and their memory is kept until they have: on a fake one, and a real one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset, TeleloaderError
from teleloader.staging import Copy, Staging
from teleloader_server import serve
from teleloader_shared.codec import Address, End, Failure, Frame
from tests.conftest import need


class FakeAccelerator:
    """Says what it was told to do; copies are done when the test says so."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.done: set[int] = set()

    def begin(self, batch: Any) -> Copy:
        """A batch that is a negative number cannot be transformed."""
        self.log.append(f"begin {batch}")
        if batch < 0:
            raise ZeroDivisionError
        return Copy(batch, f"device {batch}", batch)

    def use(self, copy: Copy) -> None:
        """The loop's stream waits."""
        self.log.append(f"use {copy.source}")

    def is_done(self, copy: Copy) -> bool:
        """As the test says."""
        return copy.done in self.done

    def wait(self, copy: Copy) -> None:
        """The host waits."""
        self.log.append(f"wait {copy.source}")


def frame(k: int, content: Any = None) -> Frame:
    """Batch k, which holds its number unless told otherwise."""
    return Frame(Address("key", 0, k), k if content is None else content, padding=0, nbytes=0)


def test_what_has_arrived_is_copied_ahead_of_use() -> None:
    """As many batches as it is told; each is copied once."""
    fake = FakeAccelerator()
    staging = Staging(fake, ahead=2)
    assert staging.take(frame(0), [frame(1), frame(2), frame(3)]) == "device 0"
    assert staging.take(frame(1), [frame(2), frame(3)]) == "device 1"
    assert fake.log == ["begin 0", "use 0", "begin 1", "begin 2", "use 1", "begin 3"]


def test_what_comes_late_is_copied_when_it_is_asked_for() -> None:
    """A loader that does not keep up copies at once."""
    fake = FakeAccelerator()
    staging = Staging(fake)
    assert [staging.take(frame(k), []) for k in range(3)] == ["device 0", "device 1", "device 2"]
    assert fake.log == ["begin 0", "use 0", "begin 1", "use 1", "begin 2", "use 2"]


def test_errors_and_ends_are_not_copied() -> None:
    """They are no batches."""
    fake = FakeAccelerator()
    failure = Failure("ValueError", "", "", [], 0)
    Staging(fake).take(frame(0), [frame(1, failure), frame(2, End(0, replica=False))])
    assert fake.log == ["begin 0", "use 0"]


def test_a_transform_that_fails_is_an_error_at_its_batch() -> None:
    """Not at the one before, while which it was tried ahead."""
    staging = Staging(FakeAccelerator())
    assert staging.take(frame(0), [frame(1, -1), frame(2)]) == "device 0"
    with pytest.raises(ZeroDivisionError):
        staging.take(frame(1, -1), [frame(2)])
    assert staging.take(frame(2), []) == "device 2"


def test_memory_is_kept_until_its_copy_is_done() -> None:
    """In the order of the copies; at the end the host waits for those on their way."""
    fake = FakeAccelerator()
    staging = Staging(fake)
    for k in range(3):
        staging.take(frame(k), [])
    fake.done = {0, 1}
    staging.take(frame(3), [])
    staging.close()
    assert fake.log[-2:] == ["wait 2", "wait 3"]


def test_main_memory_needs_no_copy() -> None:
    """device='cpu' is what is given without it."""
    need("torch")
    with serve(list(range(6)), num_workers=1) as url:
        assert [batch.tolist() for batch in DataLoader(RemoteDataset(url), 3, device="cpu")] == [[0, 1, 2], [3, 4, 5]]


def test_a_device_must_be_there() -> None:
    """And must be torch's."""
    need("torch")
    with serve(list(range(6)), num_workers=1) as url:
        dataset = RemoteDataset(url)
        with pytest.raises(TeleloaderError, match="device='meta' needs an accelerator of that type, with streams"):
            DataLoader(dataset, device="meta")
        with pytest.raises(TeleloaderError, match="device='cuda' needs torch tensors"):
            DataLoader(dataset, output="numpy", device="cuda")
        with pytest.raises(ValueError, match="device_transform needs a device"):
            DataLoader(dataset, device_transform=lambda batch: batch)


def test_batches_on_a_gpu() -> None:
    """Nested, cast there, kept by the loop: every value is right."""
    need("torch")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    rows = np.random.default_rng(0).integers(0, 256, (64, 1000), np.uint8)
    dataset = [{"image": row, "more": (i, f"name {i}")} for i, row in enumerate(rows)]

    def cast(batch: Any) -> Any:
        batch["image"] = batch["image"].float() / 255
        return batch

    with serve(dataset, num_workers=1) as url:
        kept = list(DataLoader(RemoteDataset(url), 4, device="cuda", device_transform=cast))
    images = torch.cat([batch["image"] for batch in kept])
    assert images.device.type == "cuda"
    assert torch.equal(images.cpu(), torch.from_numpy(rows).float() / 255)
    assert torch.cat([batch["more"][0] for batch in kept]).tolist() == list(range(64))
