"""device_transform runs in the training loop: in its thread, stream, modes and generators, once per batch."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from tests.conftest import need
from tests.gpu.test_device_memory import bytes_of
from tests.gpu.test_host_memory import rows


def numbers(count: int) -> list[Any]:
    """Return samples that equal their index."""
    return [np.int64(i) for i in range(count)]


def number_of(gpu: Any, batch: Any) -> int:
    """Return the index in a batch on the device."""
    shot = gpu.snapshot(batch)
    gpu.finish()
    return int(np.frombuffer(gpu.host(shot), np.int64)[0])


def test_a_transform_runs_on_the_stream_and_in_the_thread_of_next(gpu: Any) -> None:
    """The transform runs once per batch, in order, and not before the loop requests the batch."""
    import torch

    module: Any = torch.get_device_module(gpu.name)
    stream = module.Stream(torch.device(gpu.name, 0))
    calls: list[int] = []
    asked = 0

    def transform(batch: Any) -> Any:
        assert threading.current_thread() is threading.main_thread()
        assert module.current_stream() == stream
        assert len(calls) == asked
        calls.append(number_of(gpu, batch))
        return batch

    with serve(numbers(30), num_workers=1) as url, module.stream(stream):
        batches = iter(DataLoader(RemoteDataset(url), 1, device=gpu.name, device_transform=transform, device_ahead=3))
        for _ in batches:
            asked += 1
    assert calls == list(range(30))


def test_a_transform_sees_what_the_loop_has_written(real_gpu: Any) -> None:
    """The transform uses weights that an earlier kernel of the loop has yet to write."""
    import torch

    weights = torch.zeros(1, device="cuda", dtype=torch.int64)
    with serve(numbers(20), num_workers=1) as url:
        seen = []
        for k, batch in enumerate(
            DataLoader(RemoteDataset(url), 1, device="cuda", device_transform=lambda batch: batch + weights)
        ):
            seen.append(batch)
            real_gpu.delay()
            weights.fill_(100 * (k + 1))
    assert [int(batch) for batch in seen] == [101 * k for k in range(20)]


def test_a_transform_may_return_a_buffer_of_its_own(real_gpu: Any) -> None:
    """The loop's work on a batch runs before the next batch overwrites the buffer."""
    import torch

    samples = rows(20, 100_000)
    buffer = torch.empty(1, 100_000, dtype=torch.uint8, device="cuda")
    with serve(samples, num_workers=1) as url:
        seen = []
        for batch in DataLoader(
            RemoteDataset(url), 1, device="cuda", device_transform=lambda batch: buffer.copy_(batch), device_ahead=3
        ):
            real_gpu.delay()
            seen.append(real_gpu.snapshot(batch))
        real_gpu.finish()
    assert b"".join(map(real_gpu.host, seen)) == bytes_of(samples)


def test_what_a_transform_returns_may_hold_tensors_anywhere(real_gpu: Any) -> None:
    """The memory of tensors in objects and sets is also recorded for the loop's stream."""

    class Holder:
        """Batch of a user-defined class."""

        def __init__(self, tensor: Any) -> None:
            self.tensors = {tensor}

    samples = rows(60, 200_000)
    with serve(samples, num_workers=1) as url:
        seen = []
        for holder in DataLoader(
            RemoteDataset(url), 1, device="cuda", device_transform=lambda batch: Holder(batch + 1), device_ahead=3
        ):
            real_gpu.delay()
            seen.append(real_gpu.snapshot(next(iter(holder.tensors)) - 1))
            del holder
        real_gpu.finish()
    assert b"".join(map(real_gpu.host, seen)) == bytes_of(samples)


@pytest.mark.parametrize("ahead", [0, 3])
def test_modes_of_one_step_are_not_those_of_the_next(gpu: Any, ahead: int) -> None:
    """Inference mode around one next() does not make inference tensors of batches that are copied in advance."""
    import torch

    with serve([np.float32(i) for i in range(8)], num_workers=1) as url:
        batches = iter(DataLoader(RemoteDataset(url), 1, device=gpu.name, device_ahead=ahead, prefetch_factor=8,
                                  num_workers=1))  # fmt: skip
        with torch.inference_mode(), torch.autocast("cpu"):
            next(batches)
        for batch in batches:
            assert not batch.is_inference()
            batch.requires_grad_()
        gpu.finish()


def test_random_transforms_draw_in_the_order_of_batches(gpu: Any) -> None:
    """The same seed gives the same augmentation and dropout, whatever the order of arrival and the prefetching."""
    import torch

    def draws(ahead: int) -> list[float]:
        torch.manual_seed(5)
        found = []

        def transform(batch: Any) -> Any:
            found.append(float(torch.rand(())))
            return batch

        with serve(numbers(20), num_workers=2) as url:
            loader = DataLoader(
                RemoteDataset(url), 1, seed=0, device=gpu.name, device_transform=transform, device_ahead=ahead
            )
            for batch in loader:
                transform(batch)  # as dropout would, draws from the same generator
        gpu.finish()
        return found

    assert draws(0) == draws(3)


def test_an_exception_of_a_transform_takes_the_place_of_its_batch(gpu: Any) -> None:
    """The exception is raised in place of its own batch; the next batch follows, and the transform is not repeated."""
    calls = []

    def transform(batch: Any) -> Any:
        calls.append(k := number_of(gpu, batch))
        if k == 3:
            raise ZeroDivisionError
        return k

    with serve(numbers(6), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 1, device=gpu.name, device_transform=transform)
        batches = iter(loader)
        assert [next(batches) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ZeroDivisionError):
            next(batches)
        assert list(batches) == [4, 5]
    assert calls == list(range(6))


def test_stop_iteration_of_a_transform_is_not_the_end_of_the_epoch(gpu: Any) -> None:
    """StopIteration in a transform becomes a RuntimeError, as in a generator."""

    def transform(_: Any) -> Any:
        raise StopIteration

    with serve(numbers(3), num_workers=1) as url:
        batches = iter(DataLoader(RemoteDataset(url), 1, device=gpu.name, device_transform=transform))
        for _ in range(3):
            with pytest.raises(RuntimeError, match="device_transform raised StopIteration"):
                next(batches)
        assert next(batches, None) is None


def test_a_transform_runs_without_a_device_too() -> None:
    """Without a device, the transform also runs, so that a script needs no change for machines without one."""
    need("torch")
    with serve(numbers(3), num_workers=1) as url:
        for device in (None, "cpu"):
            loader = DataLoader(RemoteDataset(url), 1, device=device, device_transform=lambda batch: int(batch) * 2)
            assert list(loader) == [0, 2, 4]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, "out of memory"])
def test_an_interruption_loses_no_batch(gpu: Any, error: Any) -> None:
    """After Ctrl-C, or out of device memory, the same batch is next, even if the transform changed it."""
    import torch

    error = torch.cuda.OutOfMemoryError if error == "out of memory" else error
    failures = [2, 2, 5]

    def transform(batch: Any) -> Any:
        k = number_of(gpu, batch["k"])
        batch["k"] = None
        if k in failures:
            failures.remove(k)
            raise error
        return k

    with serve([{"k": np.int64(k)} for k in range(7)], num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 1, device=gpu.name, device_transform=transform, device_ahead=3)
        batches = iter(loader)
        seen: list[int] = []
        while len(seen) < 7:
            try:
                seen.append(next(batches))
            except error:
                assert loader.state_dict()["samples"] == len(seen), "the position is that of the batch"
        assert seen == list(range(7))
        assert next(batches, None) is None
    assert not failures


def test_out_of_memory_ahead_ends_working_ahead(simulated_gpu: Any) -> None:
    """If a copy in advance runs out of memory, it is repeated when its batch is due, with one warning."""
    with serve(numbers(12), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 1, device=simulated_gpu.name, prefetch_factor=12, num_workers=1)
        batches = iter(loader)
        seen: list[int] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen.append(number_of(simulated_gpu, next(batches)))
            with batches._iteration.reorder_buffer.changed:  # type: ignore[attr-defined]
                simulated_gpu.machine.memory_errors = 1
            seen += [number_of(simulated_gpu, batch) for batch in batches]
        assert seen == list(range(12))
        assert all(w.filename == __file__ for w in caught)
        assert sum("out of device memory while prefetching a batch" in str(w.message) for w in caught) == 1


def test_a_warning_that_is_an_error_loses_nothing(simulated_gpu: Any) -> None:
    """With -W error, next() raises the warning once, and the batch follows."""
    with serve(numbers(12), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 1, device=simulated_gpu.name, prefetch_factor=12, num_workers=1)
        simulated_gpu.machine.memory_errors_ahead = 1
        batches = iter(loader)
        seen: list[int] = []
        raised = 0
        while len(seen) < 12:
            try:
                seen.append(number_of(simulated_gpu, next(batches)))
            except UserWarning:
                raised += 1
        assert seen == list(range(12))
        assert raised == 1


def test_out_of_memory_at_a_batch_is_its_error_until_memory_is_free(simulated_gpu: Any) -> None:
    """The loop gets the error, may free memory, and then gets the batch."""
    import torch

    with serve(numbers(4), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 1, device=simulated_gpu.name, device_ahead=0)
        batches = iter(loader)
        assert number_of(simulated_gpu, next(batches)) == 0
        simulated_gpu.machine.memory_errors = 2
        for _ in range(2):
            with pytest.raises(torch.cuda.OutOfMemoryError):
                next(batches)
        assert [number_of(simulated_gpu, batch) for batch in batches] == [1, 2, 3]
