"""Iterators release their resources when they end, are dropped, are interrupted, or fail."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from itertools import islice
from typing import Any

import httpx
import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset, TeleloaderError
from teleloader_server import serve
from tests.conftest import eventually
from tests.gpu.test_device_memory import bytes_of
from tests.gpu.test_host_memory import rows
from tests.gpu.test_transforms import number_of, numbers


def stagers() -> list[threading.Thread]:
    """Return the threads that copy batches."""
    return [thread for thread in threading.enumerate() if thread.name == "teleloader-stager"]


@pytest.mark.parametrize("end", ["exhausted", "left", "collected in another thread"])
def test_a_stager_ends_with_its_iterator(gpu: Any, end: str) -> None:
    """The thread ends soon after its iterator ends in any way, without waiting for the device."""
    with serve(rows(20, 50_000), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 2, device=gpu.name)
        for _ in range(3):
            holder = [iter(loader)]
            gpu.delay()
            if end == "exhausted":
                assert len(list(holder[0])) == 10
            else:
                next(holder[0])
                assert stagers()
            if end == "collected in another thread":
                thread = threading.Thread(target=holder.clear)
                thread.start()
                thread.join()
            holder.clear()
            gc.collect()
            eventually(lambda: not stagers())
        gpu.finish()


def test_epochs_follow_each_other_while_copies_are_under_way(gpu: Any) -> None:
    """Batches are right after many loops that ended early while copies were in progress."""
    samples = rows(20, 50_000)
    with serve(samples, num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 2, seed=0, shuffle=False, device=gpu.name)
        seen = []
        for _ in range(5):
            for k, batch in enumerate(loader):
                gpu.delay()
                seen.append((k, gpu.snapshot(batch)))
                if k == 4:
                    break
        complete = [gpu.snapshot(batch) for batch in loader]
        gpu.finish()
    assert all(gpu.host(shot) == bytes_of(samples[2 * k : 2 * k + 2]) for k, shot in seen)
    assert b"".join(map(gpu.host, complete)) == bytes_of(samples)


def test_a_device_that_fails_is_an_error_at_once_and_ends_what_the_server_holds(simulated_gpu: Any) -> None:
    """After a device-side assertion, next() raises the driver's error, and dropping the iterator ends its threads."""
    with serve(numbers(50), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 1, num_workers=1, device=simulated_gpu.name, worker_init_fn=None)
        batches = iter(loader)
        assert number_of(simulated_gpu, next(batches)) == 0
        simulated_gpu.machine.broken = True
        with pytest.raises(RuntimeError, match="device-side assert"):
            for _ in batches:
                pass
        simulated_gpu.machine.broken = False
        del batches
        gc.collect()
        eventually(lambda: not stagers())


@pytest.mark.parametrize("pinned", [False, True])
def test_a_device_that_cannot_be_used_is_an_error_and_no_hang(simulated_gpu: Any, pinned: bool) -> None:
    """If a thread cannot set its device, for example for lack of memory for a context, next() raises the error."""
    with serve(numbers(50), num_workers=1) as url:
        where: dict[str, Any] = {"pin_memory": True} if pinned else {"device": simulated_gpu.name}
        loader = DataLoader(RemoteDataset(url), 1, **where)
        simulated_gpu.machine.broken = True
        with pytest.raises(RuntimeError, match="device-side assert"):
            next(iter(loader))


def test_an_asynchronous_loop_uses_the_device_of_its_thread(simulated_gpu: Any) -> None:
    """aiter() resolves the device, because its worker threads have another current device."""
    import torch

    module: Any = torch.get_device_module(simulated_gpu.name)
    module.set_device(1)

    async def loop(loader: DataLoader) -> list[int]:
        return [batch.simulated_device.index async for batch in loader]

    with serve(numbers(4), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 1, device=simulated_gpu.name)
        assert asyncio.run(loop(loader)) == [1, 1, 1, 1]
    assert simulated_gpu.machine.contexts == {1}


def test_a_device_side_assertion_ends_the_process_with_its_own_error(real_gpu: Any) -> None:
    """The process exits within seconds, and its session on the server ends."""
    with serve(numbers(1000), num_workers=1) as url:
        code = f"""
            import torch
            from teleloader import DataLoader, RemoteDataset
            loader = DataLoader(RemoteDataset({url!r}), 4, shuffle=True, num_workers=1, device="cuda")
            for k, batch in enumerate(loader):
                if k == 5:
                    torch.zeros(1, device="cuda")[batch + 10_000]
        """
        began = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode != 0
        assert "device-side assert" in ended.stderr
        assert time.monotonic() - began < 50
        eventually(lambda: not httpx.get(f"{url}/stats").json()["consumers"])


def test_a_fork_keeps_what_belongs_to_its_parent(gpu: Any) -> None:
    """A forked process does not free its parent's device memory, since the driver does not work there."""
    with serve(numbers(10), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 1, device=gpu.name)
        batches = iter(loader)
        first = next(batches)  # kept: torch cannot free a tensor with recorded streams in a forked process
        pid = os.fork()
        if pid == 0:
            try:
                del batches, loader
                gc.collect()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert [number_of(gpu, batch) for batch in batches] == list(range(1, 10))
        del first


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("end", ["exhausted", "left"])
def test_an_ended_iterator_leaves_nothing_of_the_device_to_the_garbage_collector(
    simulated_gpu: Any, monkeypatch: pytest.MonkeyPatch, num_workers: int, pin_memory: bool, end: str
) -> None:
    """Events, and memory of both sides, are freed at once, because the collector may run in a forked process."""
    from tests.gpu import simulated

    monkeypatch.setattr(simulated.Event, "query", lambda event: False)  # copies are in progress until the end
    samples = rows(20, 50_000)
    with serve(samples, num_workers=1) if num_workers else nullcontext(samples) as source:
        dataset: Any = RemoteDataset(str(source)) if num_workers else source
        loader = DataLoader(dataset, 2, device=None if pin_memory else simulated_gpu.name, pin_memory=pin_memory)
        others = set(stagers())
        gc.collect()
        gc.disable()
        try:
            batches = iter(loader)
            for batch in batches if end == "exhausted" else islice(batches, 3):
                del batch
            del batches
            eventually(lambda: others.issuperset(stagers()))
            simulated_gpu.finish()
            assert not simulated_gpu.machine.blocks
            assert not any(type(each) is simulated.Event for each in gc.get_objects())
        finally:
            gc.enable()


def test_a_graph_is_captured_while_batches_arrive(real_gpu: Any) -> None:
    """capture_error_mode="thread_local" allows it, as with torch's own pinning thread."""
    import torch

    samples = rows(200, 100_000)
    total = torch.zeros(1, device="cuda", dtype=torch.int64)
    with serve(samples, num_workers=1) as url:
        batches = iter(DataLoader(RemoteDataset(url), 1, device="cuda"))
        static = next(batches).clone()
        for _ in range(20):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                total += static.sum()
        seen = 0
        for batch in batches:
            static.copy_(batch)
            graph.replay()
            seen += 1
        real_gpu.finish()
    assert seen == 199
    assert int(total) == sum(int(sample.sum()) for sample in samples[1:])


class Interruption(BaseException):
    """Exception of a signal handler."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # exceptions that hit a finalizer
@pytest.mark.parametrize("where", ["device", "host", "sampler", "iterable"])
def test_exceptions_of_signal_handlers_lose_no_batch(gpu: Any, where: str) -> None:
    """After hundreds of exceptions at any point in next(), each batch still comes once and in order."""
    enabled, interruptions = False, 0

    def interrupt(*_: object) -> None:
        nonlocal interruptions, enabled
        if enabled:
            interruptions += 1
            enabled = False
            raise Interruption

    class Stream:
        """Iterable-style dataset."""

        def __iter__(self) -> Any:
            return iter(numbers(600))

    dataset: Any = Stream() if where == "iterable" else numbers(600)
    options: dict[str, Any] = {"device": gpu.name} if where == "device" else {}
    if where == "sampler":
        options["sampler"] = list(range(600))
    with serve(dataset, num_workers=2) as url:
        loader = DataLoader(RemoteDataset(url), 1, num_workers=1, **options)
        batches, seen = iter(loader), []
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            while True:
                try:
                    # a for loop: between next() and a variable a call could be interrupted, and the value lost
                    enabled = True
                    for batch in batches:
                        enabled = False
                        seen.append(batch)
                        enabled = True
                    enabled = False
                    break
                except Interruption:
                    continue
                except TeleloaderError as error:  # a sampler that was interrupted is over
                    enabled = False
                    if "interrupted the sampler" not in str(error):
                        raise
                    loader.load_state_dict(loader.state_dict())
                    batches = iter(loader)
        finally:
            enabled = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert [number_of(gpu, batch) if where == "device" else int(batch) for batch in seen] == list(range(600))
    assert interruptions > 0


def test_several_threads_share_an_iterator(gpu: Any) -> None:
    """Each batch is returned to one of the threads, and all threads see the end."""
    seen: list[int] = []
    errors: list[Exception] = []

    def take(batches: Any) -> None:
        try:
            seen.extend(int(batch) for batch in batches)
        except Exception as error:  # noqa: BLE001 - whatever it is
            errors.append(error)

    with serve(numbers(300), num_workers=2) as url:
        batches = iter(DataLoader(RemoteDataset(url), 1, pin_memory=True))
        threads = [threading.Thread(target=take, args=(batches,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert sorted(seen) == list(range(300))
    gpu.finish()


def test_kept_batches_hold_little_more_than_themselves() -> None:
    """27 batches of 0.1 MB, each from another response, do not keep the responses."""
    import tracemalloc

    samples = [np.full(100_000, i % 251, np.uint8) for i in range(400)]
    with serve(samples, num_workers=1) as url:
        kept, held = [], 0
        tracemalloc.start()
        try:
            loader = DataLoader(RemoteDataset(url), 1, output="numpy", seed=0, shuffle=False)
            for k, batch in enumerate(loader):
                if k % 15 == 0:
                    kept.append(batch)
            del batch, loader
            gc.collect()
            held = sum(size.size for size in tracemalloc.take_snapshot().statistics("filename"))
        finally:
            tracemalloc.stop()
    assert len(kept) == 27
    assert held < 8 * 27 * 100_000
