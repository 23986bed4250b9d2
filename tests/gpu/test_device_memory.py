"""With device=, a thread copies batches in advance; they can be used immediately, kept or dropped without waiting."""

from __future__ import annotations

import gc
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader.tensors import devices
from teleloader_server import serve
from teleloader_shared import dtypes
from teleloader_shared.tree import Tensor
from tests.conftest import eventually
from tests.gpu.test_host_memory import SIZES, rows


def bytes_of(samples: list[np.ndarray[Any, Any]]) -> bytes:
    """Return all samples, concatenated."""
    return b"".join(sample.tobytes() for sample in samples)


def sample_of_every_type(i: int) -> dict[str, Any]:
    """Return nested containers with tensors of all dtypes, empty and 0-d ones, arrays, and other values."""
    generator = np.random.default_rng(i)

    def array(name: str, shape: tuple[int, ...]) -> Any:
        dtype = dtypes.NUMPY[name] if name in dtypes.NUMPY else np.dtype(getattr(ml_dtypes, name))
        bits = generator.integers(0, 2 if name == "bool" else 100, shape)
        return bits.astype(dtype).view(Tensor)

    return {
        "types": {name: array(name, (3, 5)) for name in dtypes.NAMES},
        "shapes": [array("float32", ()), array("int64", (0, 4)), (array("bfloat16", (2, 1, 2)),)],
        "array": np.full(4, i),
        "name": f"sample {i}",
        "number": i,
    }


def test_every_type_arrives_on_the_device(gpu: Any) -> None:
    """All values of 200 kept batches are right: tensors are on the device, and other values unchanged."""
    dataset = [sample_of_every_type(i) for i in range(200)]
    kept = list(DataLoader(dataset, 1, num_workers=1, device=gpu.name, collate_fn=list))
    assert len(kept) == 200
    for (got,), sent in zip(kept, dataset, strict=True):
        pairs = [(got["types"][name], sent["types"][name]) for name in dtypes.NAMES]
        pairs += [
            (got["shapes"][0], sent["shapes"][0]),
            (got["shapes"][1], sent["shapes"][1]),
            (got["shapes"][2][0], sent["shapes"][2][0]),
        ]
        for tensor, array in pairs:
            assert tuple(tensor.shape) == array.shape
            assert gpu.is_on_device(tensor)
            shot = gpu.snapshot(tensor)
            gpu.finish()
            assert gpu.host(shot) == array.tobytes()
        assert type(got["array"]) is np.ndarray
        assert (got["array"].tolist(), got["name"], got["number"]) == (
            sent["array"].tolist(),
            sent["name"],
            sent["number"],
        )


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("size", SIZES)
def test_memory_is_not_reused_while_the_loop_computes_on_it(gpu: Any, size: str, compression: Any) -> None:
    """Later copies do not overwrite dropped batches that the loop's stream still uses."""
    samples = rows(100, SIZES[size] // 3)
    with serve(samples, num_workers=1) as url:
        seen = []
        for batch in DataLoader(RemoteDataset(url), 2, device=gpu.name, compression=compression):
            gpu.delay()
            seen.append(gpu.snapshot(batch))
            del batch
        gpu.finish()
    assert b"".join(map(gpu.host, seen)) == bytes_of(samples)


def test_a_batch_can_be_used_at_once(gpu: Any) -> None:
    """The stream that calls next() waits for the copy, however late that is."""
    import torch

    module: Any = torch.get_device_module(gpu.name)
    samples = rows(20, 50_000)
    with serve(samples, num_workers=1) as url:
        batches = iter(DataLoader(RemoteDataset(url), 2, device=gpu.name))
        seen = [gpu.snapshot(next(batches))]
        with module.stream(devices._copy_stream(torch.device(gpu.name, module.current_device()))):
            gpu.delay()
        seen += [gpu.snapshot(batch) for batch in batches]
        gpu.finish()
    assert b"".join(map(gpu.host, seen)) == bytes_of(samples)


def test_each_step_may_use_another_stream(gpu: Any) -> None:
    """The stream that is current in next() is used, not that of iter() or of the previous step."""
    import torch

    module: Any = torch.get_device_module(gpu.name)
    streams = [module.Stream(torch.device(gpu.name, 0)) for _ in range(3)]
    samples = rows(60, 50_000)
    with serve(samples, num_workers=1) as url:
        batches, seen = iter(DataLoader(RemoteDataset(url), 2, device=gpu.name)), []
        for k in range(30):
            with module.stream(streams[k % 3]):
                batch = next(batches)
                if k % 3:  # a stream other than that of the first step, so that waiting for the latter is insufficient
                    gpu.delay()
                seen.append(gpu.snapshot(batch))
                del batch
        gpu.finish()
    assert b"".join(map(gpu.host, seen)) == bytes_of(samples)


def test_another_thread_may_go_on(gpu: Any) -> None:
    """next() may be called in a thread other than that of iter()."""
    samples = rows(20, 50_000)
    seen: list[Any] = []
    with serve(samples, num_workers=1) as url:
        batches = iter(DataLoader(RemoteDataset(url), 2, device=gpu.name))
        seen.append(gpu.snapshot(next(batches)))
        thread = threading.Thread(target=lambda: seen.extend(gpu.snapshot(batch) for batch in batches))
        thread.start()
        thread.join()
        gpu.finish()
    assert b"".join(map(gpu.host, seen)) == bytes_of(samples)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_device_ahead_is_the_number_of_prefetched_batches(simulated_gpu: Any, ahead: int) -> None:
    """Exactly device_ahead batches are on the device before the loop requests them."""
    with serve(rows(20, 5_000), num_workers=1) as url:
        loader = DataLoader(
            RemoteDataset(url), 2, device=simulated_gpu.name, device_ahead=ahead, prefetch_factor=20, num_workers=1
        )
        batches: Any = iter(loader)
        first = next(batches)
        eventually(lambda: loader.stats().batches == 10 and len(batches._iteration.stager._copies) == ahead)
        assert loader.stats().late_copies == 1, "the first was waited for"
        assert len(list(batches)) == 9
        del first
        if ahead:
            assert loader.stats().late_copies < 10
        else:
            assert loader.stats().late_copies == 10


def test_a_dropped_batch_leaves_the_device(simulated_gpu: Any) -> None:
    """The loader keeps no batch that the loop dropped, neither until the next step nor after the epoch."""
    machine = simulated_gpu.machine

    def on_device() -> int:
        return sum(block.stream is not None for block in machine.blocks.values())

    with serve(rows(12, 5_000), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 2, device=simulated_gpu.name, device_ahead=0)
        for batch in loader:
            assert on_device() == 1
            del batch
            assert on_device() == 0
        iterator = iter(DataLoader(RemoteDataset(url), 2, device=simulated_gpu.name, device_ahead=2))
        next(iterator)
        del iterator
        gc.collect()
    simulated_gpu.finish()
    assert not machine.blocks


def test_copies_are_measured(gpu: Any) -> None:
    """stats() contains the duration of copies on the device and their memory use."""
    with serve(rows(20, 500_000), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 2, device=gpu.name)
        for batch in loader:
            gpu.finish()
            del batch
        stats = loader.stats()
    assert stats.copy > 0
    assert stats.pin > 0
    assert stats.unpinned == 0


@pytest.mark.parametrize("size", SIZES)
def test_batches_of_the_calling_thread_are_copied(gpu: Any, size: str) -> None:
    """Without workers, a batch is copied in next(), and can be used immediately and dropped."""
    samples = rows(20, SIZES[size] // 3)
    loader = DataLoader(samples, 2, device=gpu.name, device_transform=lambda batch: {"batch": batch})
    seen = []
    for batch in loader:
        assert gpu.is_on_device(batch["batch"])
        gpu.delay()
        seen.append(gpu.snapshot(batch["batch"]))
        del batch
    gpu.finish()
    assert b"".join(map(gpu.host, seen)) == bytes_of(samples)
    assert loader.stats().copy > 0


def test_devices_are_named_in_any_way(gpu: Any) -> None:
    """A device is a string, torch.device or index; "cpu" and None mean main memory; it may change between epochs."""
    import torch

    with serve(rows(4, 100), num_workers=1) as url:
        dataset = RemoteDataset(url)
        for device in (gpu.name, f"{gpu.name}:0", torch.device(gpu.name), torch.device(gpu.name, 0), 0):
            assert gpu.is_on_device(next(iter(DataLoader(dataset, 2, device=device))))
        loader = DataLoader(dataset, 2, device="cpu:0")
        for device in ("cpu", torch.device("cpu"), None, gpu.name, None):
            loader.device = device
            assert gpu.is_on_device(next(iter(loader))) == (device == gpu.name)
        with pytest.raises(ValueError, match="invalid device='gpu': "):
            loader.device = "gpu"
        gpu.finish()


def test_the_device_is_the_current_one_at_iter(simulated_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader may be created before its process selects a device; a rank on another rank's device gets a warning."""
    import torch

    module: Any = torch.get_device_module(simulated_gpu.name)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with serve(rows(4, 100), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 2, device=simulated_gpu.name)
        assert not simulated_gpu.machine.contexts, "the constructor starts no driver"
        with pytest.warns(UserWarning, match=r"device='simulated' is simulated:0 in the process with LOCAL_RANK=1"):
            next(iter(loader))
        module.set_device(1)
        assert next(iter(loader)).simulated_device.index == 1
        pinned = DataLoader(RemoteDataset(url), 2, device=f"{simulated_gpu.name}:0")
        assert next(iter(pinned)).simulated_device.index == 0
    simulated_gpu.finish()
