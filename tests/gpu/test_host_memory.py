"""Pinned host memory is torch's: no copy reads bytes of a later batch, whatever the training loop does."""

from __future__ import annotations

import importlib.util
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader.tensors.memory import HostBuffers, PinnedMemory
from teleloader.tensors.pinned import PinnedBudget, process_budget
from teleloader_server import serve
from teleloader_shared import codec
from teleloader_shared.buffers import BufferPool
from teleloader_shared.codec import BatchId, to_bytes

SIZES = {"grouped": 300, "small": 40_000, "whole": 1_500_000}
"""Bytes per sample, for many, several and one batch per response."""


def rows(count: int, size: int) -> list[np.ndarray[Any, Any]]:
    """Return samples of random bytes."""
    return list(np.random.default_rng(7).integers(0, 256, (count, size), np.uint8))


def moved_by_hand(batch: Any, device: str) -> Any:
    """Move a batch as training scripts do."""
    return batch.to(device, non_blocking=True)


def moved_by_accelerate(batch: Any, device: str) -> Any:
    """Move a batch as accelerate's prepared loaders do."""
    import torch
    from accelerate.utils import send_to_device

    return send_to_device(batch, torch.device(device), non_blocking=True)


def moved_by_lightning(batch: Any, device: str) -> Any:
    """Move a batch as Lightning's Trainer does."""
    import torch
    from lightning.fabric.utilities import move_data_to_device

    return move_data_to_device(batch, torch.device(device))


def seen_on_device(gpu: Any, loader: DataLoader, move: Callable[[Any, str], Any]) -> bytes:
    """Return the bytes of an epoch whose pinned batches are moved behind queued kernels and dropped immediately."""
    seen = []
    for batch in loader:
        assert batch.is_pinned()
        gpu.delay()
        seen.append(gpu.snapshot(move(batch, gpu.name)))
        del batch
    gpu.finish()
    return b"".join(map(gpu.host, seen))


IDIOMS = [moved_by_hand] + [
    idiom
    for module, idiom in (("accelerate", moved_by_accelerate), ("lightning", moved_by_lightning))
    if importlib.util.find_spec(module)
]


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("move", IDIOMS)
def test_a_copy_may_run_long_after_its_batch_was_dropped(
    gpu: Any, move: Callable[[Any, str], Any], size: str, compression: Any
) -> None:
    """Every byte of non_blocking copies from pinned memory behind queued kernels arrives as it was sent."""
    samples = rows(40, SIZES[size])
    with serve(samples, num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 2, pin_memory=True, compression=compression)
        assert seen_on_device(gpu, loader, move) == b"".join(sample.tobytes() for sample in samples)


@pytest.mark.parametrize("size", SIZES)
def test_batches_of_the_calling_thread_are_pinned(gpu: Any, size: str) -> None:
    """Without workers, copies behind queued kernels also read the right batches, and stats() has the memory."""
    samples = rows(20, SIZES[size])
    loader = DataLoader(samples, 2, pin_memory=True)
    assert seen_on_device(gpu, loader, moved_by_hand) == b"".join(sample.tobytes() for sample in samples)
    assert loader.stats().max_pinned_bytes > 0


@pytest.mark.parametrize("size", SIZES)
def test_batches_that_are_kept_do_not_change(gpu: Any, size: str) -> None:
    """Kept batches do not change on the host either, while all others are dropped."""
    samples = rows(60, SIZES[size])
    with serve(samples, num_workers=1) as url:
        kept = [batch for k, batch in enumerate(DataLoader(RemoteDataset(url), 2, pin_memory=True)) if k % 3 == 0]
    assert [batch.numpy().tobytes() for batch in kept] == [
        samples[i].tobytes() + samples[i + 1].tobytes() for i in range(0, 60, 6)
    ]
    gpu.finish()


@pytest.mark.parametrize("size", ["small", "whole"])
def test_leaving_an_epoch_releases_no_memory_that_is_read(gpu: Any, size: str) -> None:
    """Copies in progress complete correctly if a loop ends early or a batch is an error."""
    samples = rows(24, SIZES[size])

    class Failing:
        """Dataset whose sample 10 fails."""

        def __len__(self) -> int:
            return len(samples)

        def __getitem__(self, index: int) -> Any:
            if index == 10:
                raise ZeroDivisionError
            return samples[index]

    with serve(Failing(), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 2, pin_memory=True)
        seen = []
        for _ in range(4):
            batches = iter(loader)
            for k in range(7):
                gpu.delay()
                if k == 5:
                    with pytest.raises(ZeroDivisionError):
                        next(batches)
                else:
                    seen.append((k, gpu.snapshot(next(batches).to(gpu.name, non_blocking=True))))
            del batches
        gpu.finish()
    assert all(gpu.host(shot) == samples[2 * k].tobytes() + samples[2 * k + 1].tobytes() for k, shot in seen)


def test_tensors_share_the_storage_that_torch_allocated(simulated_gpu: Any) -> None:
    """Each tensor of a batch lies in a block of torch's allocator; nothing but tensors refers to the block."""
    dataset = [{"x": np.full(50_000, i, np.float32), "y": i, "z": (np.float64(i), [np.full(30_000, i, np.int16)])}
               for i in range(12)]  # fmt: skip

    def leaves(batch: Any) -> list[Any]:
        return [batch["x"], batch["y"], batch["z"][0], batch["z"][1][0]]

    with serve(dataset, num_workers=1) as url:
        for compression in (None, "zstd"):
            loader = DataLoader(RemoteDataset(url), 3, pin_memory=True, compression=compression)
            for batch in loader:
                blocks = [simulated_gpu.machine.blocks[t.untyped_storage().data_ptr()] for t in leaves(batch)]
                assert all(block.stream is None for block in blocks)
                assert all(t._base is None for t in leaves(batch)), "views would share a version counter"
            dead = weakref.ref(batch["x"].untyped_storage())
            del batch
            assert dead() is None
            del loader
        assert not simulated_gpu.machine.blocks


def test_numpy_arrays_are_not_pinned(gpu: Any) -> None:
    """An array that a dataset returns as such is in pageable memory: torch could not guard a copy from it."""
    import torch

    samples = rows(20, 100_000)
    seen = []
    for (array,) in DataLoader(samples, 1, num_workers=1, pin_memory=True, collate_fn=list):
        assert type(array) is np.ndarray
        tensor = torch.from_numpy(array)
        assert not tensor.is_pinned()
        gpu.delay()
        seen.append(gpu.snapshot(tensor.to(gpu.name, non_blocking=True)))
        del array, tensor
    gpu.finish()
    assert b"".join(map(gpu.host, seen)) == b"".join(sample.tobytes() for sample in samples)


def test_tensors_of_a_batch_have_version_counters_of_their_own(gpu: Any) -> None:
    """Changing the labels in place does not make autograd reject the images."""
    with serve([(np.float32(i), np.float32(i)) for i in range(4)], num_workers=1) as url:
        images, labels = next(iter(DataLoader(RemoteDataset(url), 4, pin_memory=True)))
    images.requires_grad_()
    loss = (images * images).sum()
    labels.add_(1)
    loss.backward()
    assert images.grad.tolist() == [0, 2, 4, 6]
    gpu.finish()


def test_memory_is_pinned_for_the_device_of_the_training_loop(simulated_gpu: Any) -> None:
    """A receiving thread uses the device that was current at iter(), and creates no context on another one."""
    import torch

    module: Any = torch.get_device_module(simulated_gpu.name)
    module.set_device(1)
    with serve(rows(8, 100_000), num_workers=1) as url:
        list(DataLoader(RemoteDataset(url), 2, pin_memory=True))
        list(DataLoader(RemoteDataset(url), 2, device=simulated_gpu.name))
    assert simulated_gpu.machine.contexts == {1}


def test_pinned_memory_has_a_limit(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit, batches arrive correctly in pageable memory, and stats() counts them."""
    monkeypatch.setattr("teleloader.tensors.pinned._budget", PinnedBudget(4 * 2**20))
    samples = rows(16, 1_000_000)
    with serve(samples, num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 1, pin_memory=True)
        kept = list(loader)
        stats = loader.stats()
        assert (stats.pinned_bytes, stats.max_pinned_bytes, stats.unpinned) == (4 * 2**20, 4 * 2**20, 12)
        assert sum(batch.is_pinned() for batch in kept) == 4
        assert b"".join(batch.numpy().tobytes() for batch in kept) == b"".join(sample.tobytes() for sample in samples)
        del kept
        assert loader.stats().pinned_bytes == 0
    gpu.finish()


def test_the_limit_is_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """TELELOADER_MAX_PINNED_BYTES must be an integer number of bytes."""
    monkeypatch.setattr("teleloader.tensors.pinned._budget", None)
    monkeypatch.setenv("TELELOADER_MAX_PINNED_BYTES", "1000000")
    assert process_budget().limit == 1_000_000
    monkeypatch.setattr("teleloader.tensors.pinned._budget", None)
    monkeypatch.setenv("TELELOADER_MAX_PINNED_BYTES", "1 GB")
    with pytest.raises(Exception, match="invalid TELELOADER_MAX_PINNED_BYTES='1 GB': expected a number of bytes"):
        process_budget()


def test_impossible_shapes_are_refused(gpu: Any) -> None:
    """Pinned memory supports all possible shapes of tensors, and raises the codec's error for others."""
    memory = HostBuffers("torch", BufferPool(), PinnedBudget(2**20)).take(640, 1)
    assert isinstance(memory, PinnedMemory)
    impossible: tuple[tuple[int, ...], ...] = ((2**62, 2**62), (0, 2**62, 2**62), (3,) * 70)
    for shape in impossible:
        with pytest.raises((ValueError, OverflowError, RuntimeError)):
            memory.leaf(0, "float32", shape, "tensor")
    for shape, dtype in itertools.product(
        ((), (0,), (0, 3), (2, 3), (1, 1, 6)), ("float32", "bool", "bfloat16", "int64")
    ):
        tensor = memory.leaf(64, dtype, shape, "tensor")
        assert (tuple(tensor.shape), str(tensor.dtype), tensor.is_contiguous()) == (shape, f"torch.{dtype}", True)
    gpu.finish()


def test_each_of_several_frames_is_copied_to_memory_of_its_own(gpu: Any) -> None:
    """A server may send more batches than were requested; each is decoded before the surplus is refused."""
    frames = [to_bytes(BatchId("key", 0, k), np.full(3, k, np.float32)) for k in range(2)]
    memory = HostBuffers("torch", BufferPool(), PinnedBudget(2**20)).take(sum(map(len, frames)), 1)
    assert isinstance(memory, PinnedMemory)
    memory.data[:] = np.frombuffer(b"".join(frames), np.uint8)
    first, second = codec.read_all(memory, 2**20)
    assert [first.content.tolist(), second.content.tolist()] == [[0, 0, 0], [1, 1, 1]]
    gpu.finish()


def test_memory_stays_flat_over_epochs(gpu: Any) -> None:
    """Pinned memory does not grow after the first of five epochs with batches of varied sizes."""
    import torch

    samples = [row[: 1000 * (1 + 37 * i % 600)] for i, row in enumerate(rows(60, 600_000))]
    with serve(samples, num_workers=1) as url:
        loaders = [DataLoader(RemoteDataset(url), batch_size=None, pin_memory=True, prefetch_factor=2, num_workers=1)
                   for _ in range(3)]  # fmt: skip
        sizes = []
        for _ in range(5):
            for batches in zip(*loaders, strict=True):
                seen = [torch.as_tensor(batch).to(gpu.name, non_blocking=True) for batch in batches]
                gpu.finish()
                del batches, seen
            sizes.append(loaders[0].stats().pinned_bytes)
        assert sizes == [0] * 5
