"""Objects of the calling process behave as with torch's own workers, and leave no resources behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from teleloader_server.workers import worker
from tests.conftest import eventually
from tests.end_to_end.contract import (
    IterableDataset,
    Made,
    Numbers,
    assert_same,
    few_cpus_are_fine,
    get_worker_info,
    ours,
    seed_everything,
    torch,
    torch_is_there,
    torchs,
    workers_alive,
)

__all__ = ["torch_is_there"]

Loop = Callable[[Any, Any], list[Any]]


def _flat(batches: Any) -> list[Any]:
    return [number for batch in batches for number in batch.tolist()]


def _compare(make_dataset: Callable[[], Any], loop: Loop, **arguments: Any) -> list[Any]:
    """Assert that `loop(loader, dataset)` has the same result with both loaders; return it."""
    dataset = make_dataset()
    seed_everything()
    with few_cpus_are_fine():
        expected = loop(torchs(dataset, **arguments), dataset)
        dataset = make_dataset()
        seed_everything()
        with ours(dataset, **arguments) as loader:
            got = loop(loader, dataset)
    assert_same(got, expected, "found")
    return got


class Settings(Numbers):
    """Dataset in which every sample is the current value of an attribute."""

    value = 0

    def __getitem__(self, index: int) -> Any:
        return self.value


@pytest.mark.parametrize("num_workers", [0, 2])
def test_mutations_between_epochs_are_seen(num_workers: int) -> None:
    """Changes of the dataset by the training script apply from the next ``iter()``."""

    def loop(loader: Any, dataset: Any) -> list[Any]:
        found = []
        for value in (3, 4, 5):
            dataset.value = value
            found.append(_flat(loader))
        return found

    assert _compare(lambda: Settings(2), loop, num_workers=num_workers) == [[3, 3], [4, 4], [5, 5]]


def test_mutations_are_not_seen_by_persistent_workers() -> None:
    """Persistent workers continue with the dataset as it was when they started."""

    def loop(loader: Any, dataset: Any) -> list[Any]:
        found = []
        for value in (3, 4):
            dataset.value = value
            found.append(_flat(loader))
        return found

    assert _compare(lambda: Settings(2), loop, num_workers=2, persistent_workers=True) == [[3, 3], [3, 3]]


def test_mutations_within_an_epoch_are_not_seen() -> None:
    """Workers have the dataset as of ``iter()``; their changes are not visible elsewhere."""

    def loop(loader: Any, dataset: Any) -> list[Any]:
        iterator = iter(loader)
        found = [next(iterator).tolist()]
        dataset.value = 9
        return found + [batch.tolist() for batch in iterator] + [dataset.value]

    assert _compare(lambda: Settings(8), loop, num_workers=1, prefetch_factor=1) == [[0]] * 8 + [9]


def test_mutations_of_streams_are_seen() -> None:
    """Changes of an iterable-style dataset apply from the next ``iter()``, too."""

    class Stream(IterableDataset):  # type: ignore[misc]
        end = 2

        def __iter__(self) -> Iterator[int]:
            return iter(range(get_worker_info().id, self.end, 2))

    def loop(loader: Any, dataset: Any) -> list[Any]:
        found = []
        for end in (2, 5, 3):
            dataset.end = end
            found.append(_flat(loader))
        return found

    assert _compare(Stream, loop, num_workers=2) == [[0, 1], [0, 1, 2, 3, 4], [0, 1, 2]]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_lengths_follow_the_dataset(num_workers: int, shuffle: bool) -> None:
    """``len(loader)`` and the next epoch have the dataset's current length."""

    def loop(loader: Any, dataset: Any) -> list[Any]:
        found = []
        for length in (4, 9, 1):
            dataset.length = length
            found.append([len(loader), _flat(loader)])
        return found

    _compare(lambda: Numbers(3), loop, num_workers=num_workers, shuffle=shuffle, batch_size=2)


def test_shared_objects_of_multiprocessing() -> None:
    """An Event, a Semaphore, a Value and a Queue of the parent work in dataset, collate_fn and worker_init_fn."""
    context = multiprocessing.get_context("fork")
    started, allowed, count, said = context.Event(), context.Semaphore(0), context.Value("i", 0), context.SimpleQueue()

    def init(worker: int) -> None:
        started.set()

    def sample(index: int) -> int:
        allowed.acquire()
        with count.get_lock():
            count.value += 1
        return index

    def collate(samples: list[int]) -> list[int]:
        said.put(os.getpid())
        return samples

    with ours(Made(sample, 6), num_workers=2, worker_init_fn=init, collate_fn=collate, batch_size=2) as loader:
        iterator = iter(loader)
        assert started.wait(20)
        assert count.value == 0
        for _ in range(6):
            allowed.release()
        assert list(iterator) == [[0, 1], [2, 3], [4, 5]]
        assert count.value == 6
        assert all(said.get() != os.getpid() for _ in range(3))


def test_datasets_may_have_released_locks() -> None:
    """A dataset may have locks, lambdas, open files and generators, which only the start method fork supports."""
    lock = threading.Lock()
    with open(__file__) as file:
        generator = iter([5, 6, 7])

        def sample(index: int) -> Any:
            with lock:
                return index, next(generator), file.name

        with ours(Made(sample, 3), num_workers=1) as loader:
            assert [(int(a), int(b)) for a, b, _ in loader] == [(0, 5), (1, 6), (2, 7)]


def test_functions_are_taken_as_they_are() -> None:
    """A closure has the variables of the time at which an iteration starts."""
    offset = 0

    def collate(samples: list[int]) -> list[int]:
        return [sample + offset for sample in samples]

    with ours(Numbers(2), num_workers=1, collate_fn=collate) as loader:
        for offset in (10, 20):
            assert list(loader) == [[offset], [offset + 1]]


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("left", ["finished", "in the middle", "never begun", "untouched iterator"])
def test_nothing_is_left_of_a_dropped_loader(arguments: dict[str, Any], left: str) -> None:
    """A loader without references leaves no process, thread or open file, while its server continues."""
    with serve(Numbers(100)) as url:
        list(DataLoader(RemoteDataset(url), 50))  # warm-up: resources that a server creates for its first client stay
        processes, threads = {p.pid for p in workers_alive()}, _threads()
        loader = DataLoader(RemoteDataset(url), **arguments)
        iterator: Any = None
        if left == "finished":
            list(loader)
        elif left != "never begun":
            iterator = iter(loader)
            if left == "in the middle":
                next(iterator)
        del iterator, loader
        gc.collect()
        eventually(lambda: {p.pid for p in workers_alive()} <= processes)
        eventually(lambda: _threads() <= threads)
        assert httpx.get(f"{url}/stats").json()["workers"] == []
    eventually(lambda: not workers_alive())


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("teleloader-")}


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_workers_end_by_themselves(monkeypatch: pytest.MonkeyPatch, persistent_workers: bool) -> None:
    """Workers that are no longer needed exit with code 0."""
    codes = multiprocessing.get_context("fork").SimpleQueue()
    main = worker.main

    def observed(*arguments: Any, **options: Any) -> int:
        code = main(*arguments, **options)
        codes.put(code)
        return code

    monkeypatch.setattr(worker, "main", observed)
    with serve(Numbers(4)) as url:
        loader = DataLoader(RemoteDataset(url), num_workers=2, persistent_workers=persistent_workers)
        list(loader)
        del loader
        assert [codes.get(), codes.get()] == [0, 0]


def test_a_dropped_loader_with_many_epochs_keeps_nothing() -> None:
    """The numbers of file descriptors and processes do not grow over epochs."""
    import psutil

    me = psutil.Process()
    with ours(Numbers(6), num_workers=2, batch_size=2) as loader:
        for _ in range(3):
            list(loader)
        eventually(lambda: not workers_alive())
        before = me.num_fds()
        for _ in range(10):
            list(loader)
            next(iter(loader))
        eventually(lambda: not workers_alive())
        assert eventually(lambda: me.num_fds() <= before + 2)


def test_loaders_in_several_threads() -> None:
    """Loaders in several threads of one process do not affect each other."""
    from concurrent.futures import ThreadPoolExecutor

    with serve(Numbers(40)) as url:

        def epoch(size: int) -> list[int]:
            return _flat(DataLoader(RemoteDataset(url), size, num_workers=1))

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(epoch, [1, 2, 3, 7])) == [[*range(40)]] * 4


def test_a_loader_in_a_workers_dataset_is_not_the_parents() -> None:
    """A forked worker that drops its copy of the parent's loader does not end the parent's session."""
    held: list[Any] = []

    def sample(index: int) -> int:
        held.clear()
        gc.collect()
        return index

    with ours(Made(sample, 6), num_workers=1) as loader:
        iterator = iter(loader)
        held.append(iterator)
        first = next(iterator).item()
        assert [first, *(batch.item() for batch in iterator)] == [*range(6)]


def test_threads_of_torch_in_the_parent_do_no_harm() -> None:
    """A parent that has used torch's thread pools can still fork workers that compute with torch."""
    torch.rand(300, 300) @ torch.rand(300, 300)
    with ours(Made(lambda i: (torch.ones(200, 200) @ torch.ones(200, 200)).sum() + i, 4), num_workers=2) as loader:
        assert _flat(loader) == [200.0**3 + i for i in range(4)]
