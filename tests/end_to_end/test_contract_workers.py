"""The contract's rules on workers: number, information, sharing and lifetime."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader.transport.http import HttpConnection
from teleloader_server import serve
from tests.conftest import ROOT, StartServer, eventually
from tests.end_to_end.contract import (
    IterableDataset,
    Made,
    Numbers,
    ProcessIds,
    both,
    both_raise,
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


def _stats(url: str) -> Any:
    return httpx.get(f"{url}/stats").json()


def _flat(batches: Any) -> list[Any]:
    return [number for batch in batches for number in batch.tolist()]


# -- number and location


def test_without_workers_a_server_loads_in_its_own_process() -> None:
    """A1: with ``num_workers=0`` no process is started, and get_worker_info() is None."""

    def sample(_: int) -> tuple[int, bool]:
        return os.getpid(), get_worker_info() is None

    before = len(workers_alive())
    with ours(Made(sample), serve_with={"num_workers": 0}) as loader:
        for pids, nowhere in loader:
            assert pids.tolist() == [os.getpid()]
            assert nowhere.tolist() == [True]
            assert len(workers_alive()) == before


def test_without_workers_timeout_and_prefetching_fail_as_in_torch() -> None:
    """A1: options that require workers raise torch's errors."""
    both_raise(ValueError, lambda make, data: make(data, prefetch_factor=2), Numbers())
    both_raise(AssertionError, lambda make, data: iter(make(data, timeout=3)), Numbers())


def test_a_server_without_workers_needs_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A2: with ``num_workers=0`` nothing is mapped, also for large batches, and no file descriptor is left open."""

    def refuse(*_: object) -> int:
        raise OSError("there is no shared memory here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with serve(Made(lambda i: np.full((256, 1024), i, np.float32)), num_workers=0) as url:
        loader = DataLoader(RemoteDataset(url), 4)
        descriptors = set()
        for batch in loader:
            assert batch.nbytes > 2**20
            descriptors.add(psutil.Process().num_fds())
            assert _stats(url)["server"]["memory_mapped"] == 0
        assert max(descriptors) - min(descriptors) < 8


@pytest.mark.parametrize("num_workers", [0, 2])
def test_small_data_cost_no_more_than_one_message_each(monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    """A2: a client sends at most one request per batch; for small ones, far fewer."""
    sent = []
    send = HttpConnection.send

    def counting(self: HttpConnection, *arguments: Any) -> None:
        sent.append(arguments)
        send(self, *arguments)

    monkeypatch.setattr(HttpConnection, "send", counting)
    with ours(Numbers(2000), batch_size=2, serve_with={"num_workers": num_workers}) as loader:
        assert len(list(loader)) == 1000
    assert len(sent) <= 1000


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_as_many_processes_as_requested(num_workers: int) -> None:
    """A4: ``num_workers=N`` starts N processes, each of which loads its part; none of them is this one."""
    with few_cpus_are_fine(), ours(ProcessIds(64), num_workers=num_workers) as loader:
        pids = set(_flat(loader))
        assert len(pids) == num_workers
        assert os.getpid() not in pids


def test_a_server_has_its_configured_number_of_workers(start_server: StartServer) -> None:
    """A4: a shared server has its configured number of workers, whatever clients request."""
    server = start_server("--num-workers", "2", "pids=tests.end_to_end.contract:ProcessIds")
    with few_cpus_are_fine():
        pids = set(_flat(DataLoader(RemoteDataset(server.url), num_workers=3)))
    assert pids <= set(server.worker_pids())
    assert len(server.worker_pids()) == 2


def test_more_workers_than_cpus_are_warned_of_as_in_torch() -> None:
    """A4: construction and each ``iter()`` cause torch's warning."""
    many = len(os.sched_getaffinity(0)) + 1
    texts = []
    with serve(Numbers(2)) as url:
        for make, dataset in ((torchs, Numbers(2)), (DataLoader, RemoteDataset(url))):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loader = make(dataset, num_workers=many)
                list(loader)
            texts.append([str(warning.message) for warning in caught if "worker" in str(warning.message)])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 2


# -- lifetime


class Counting(Numbers):
    """Dataset that counts requests; each worker has its own copy."""

    def __init__(self, length: int = 4) -> None:
        super().__init__(length)
        self.asked = 0
        self.inits = 0

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return self.asked, self.inits


def _count_init(_: int) -> None:
    get_worker_info().dataset.inits += 1


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_each_iterator_has_workers_with_a_fresh_dataset(persistent_workers: bool) -> None:
    """A5: an epoch starts with a new copy of the dataset and a call of worker_init_fn, unless workers persist."""
    epochs = both(
        Counting(), num_workers=1, worker_init_fn=_count_init, persistent_workers=persistent_workers, epochs=3
    )
    assert [int(asked) for epoch in epochs for asked, _ in epoch] == (
        [*range(1, 13)] if persistent_workers else [1, 2, 3, 4] * 3
    )
    assert {int(inits) for epoch in epochs for _, inits in epoch} == {1}


def test_persistent_workers_are_the_same_processes() -> None:
    """A5: with ``persistent_workers`` the second epoch has no start-up to pay; without, its workers are others."""
    for persistent in (True, False):
        with ours(ProcessIds(16), num_workers=2, persistent_workers=persistent) as loader:
            assert (set(_flat(loader)) == set(_flat(loader))) is persistent


def test_shared_workers_outlive_epochs() -> None:
    """A5: workers that loaders with a seed share continue across epochs and loaders."""
    with serve(ProcessIds(16)) as url:
        first, second = DataLoader(RemoteDataset(url), seed=1), DataLoader(RemoteDataset(url), seed=2)
        pids = [set(_flat(loader)) for loader in (first, first, second)]
        assert set.union(*pids) <= {worker["pid"] for worker in _stats(url)["workers"]}
        assert len(set.union(*pids)) <= 2


def test_init_runs_once_per_worker_after_seeding_before_the_first_sample() -> None:
    """A6: worker_init_fn is called once, with the id, when the generators are seeded as in torch."""
    found: Any = None

    def init(worker: int) -> None:
        nonlocal found
        assert found is None, "called a second time"
        info = get_worker_info()
        found = (worker, info.id, info.num_workers, random.random(), np.random.normal(), float(torch.rand(1)))

    epochs = both(Made(lambda _: found, 6), num_workers=2, worker_init_fn=init)
    ids = {tuple(int(part) for part in sample[:3]) for sample in epochs[0]}
    assert ids == {(0, 0, 2), (1, 1, 2)}


def test_init_given_to_the_server_runs_there_too() -> None:
    """A6: arguments of ``serve`` apply to every loader that does not override them."""
    found = -1

    def init(worker: int) -> None:
        nonlocal found
        found = worker

    with ours(Made(lambda _: found, 6), num_workers=2, serve_with={"worker_init_fn": init}) as loader:
        assert set(_flat(loader)) == {0, 1}


def test_collating_happens_in_the_workers() -> None:
    """A7: dataset and collate_fn run in the same worker process; the batch arrives complete."""

    def collate(samples: list[int]) -> tuple[int, int]:
        return os.getpid(), samples[0]

    with ours(ProcessIds(8), batch_size=2, num_workers=2, collate_fn=collate) as loader:
        for in_collate, in_dataset in loader:
            assert in_collate == in_dataset != os.getpid()


def test_ranks_of_a_node_share_one_pool(start_server: StartServer) -> None:
    """A8: N ranks use the same workers, whose memory exists once."""
    server = start_server("--num-workers", "2", "large=tests.end_to_end.hosted:large")
    loaders = [DataLoader(RemoteDataset(server.url), rank=rank, world_size=4, batch_size=8) for rank in range(4)]
    assert [len(list(loader)) for loader in loaders] == [8] * 4
    stats = server.stats()
    assert len(stats["workers"]) == 2
    assert all(worker["rss"] > worker["pss"] > 0 for worker in stats["workers"])
    # 256 MiB of data, once, and the processes' own memory
    assert stats["server"]["pss"] < 2 * 256 * 2**20


@pytest.mark.parametrize("seed", [None, 1])
def test_workers_are_forked_after_a_freeze(seed: int | None) -> None:
    """A8: a worker's garbage collector ignores the parent's objects, so that their pages stay shared."""
    with ours(Made(lambda _: gc.get_freeze_count()), seed=seed, num_workers=1) as loader:
        assert min(_flat(loader)) > 1000


# -- several iterators


def test_iterators_are_independent() -> None:
    """A20: two iterators of one loader are two iterations, each with its own order and workers."""
    found: list[Any] = []
    for loader_of in (torchs, None):
        seed_everything()
        if loader_of is not None:
            loader = loader_of(Numbers(), batch_size=2, shuffle=True, num_workers=2)
            found.append([[one.tolist(), two.tolist()] for one, two in zip(loader, loader, strict=True)])
            continue
        with ours(Numbers(), batch_size=2, shuffle=True, num_workers=2) as mine:
            assert iter(mine) is not iter(mine)
            seed_everything()
            found.append([[one.tolist(), two.tolist()] for one, two in zip(mine, mine, strict=True)])
    assert found[0] == found[1]


def test_persistent_workers_have_one_iterator() -> None:
    """A20: with ``persistent_workers`` iter() restarts the same object, which stays exhausted at its end."""
    for loader_of in (torchs, None):
        arguments: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
        if loader_of is not None:
            _check_one_iterator(loader_of(Numbers(4), **arguments))
            continue
        with ours(Numbers(4), **arguments) as mine:
            _check_one_iterator(mine)


def _check_one_iterator(loader: Any) -> None:
    first = iter(loader)
    assert [next(first).item(), next(first).item()] == [0, 1]
    second = iter(loader)
    assert second is first
    assert _flat(first) == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(second)
    assert _flat(loader) == [0, 1, 2, 3]


def test_iterators_are_kept_only_with_persistent_workers() -> None:
    """A21: an unreferenced iterator ends with its workers; persistent ones stay until the loader is dropped."""
    with serve(Numbers(1000)) as url:
        before = len(workers_alive())
        loader = DataLoader(RemoteDataset(url), num_workers=2)
        iterator = iter(loader)
        next(iterator)
        assert len(workers_alive()) > before
        del iterator
        eventually(lambda: len(workers_alive()) == before)
        keeping = DataLoader(RemoteDataset(url), num_workers=2, persistent_workers=True)
        list(keeping)
        assert len(workers_alive()) >= before + 2
        del keeping
        eventually(lambda: len(workers_alive()) == before)


def test_consumers_do_not_mix_up_their_batches() -> None:
    """A23: several loaders of one dataset in turn receive their own batches, whichever worker computed them."""
    with serve(Numbers(30)) as url:
        dataset = RemoteDataset(url)
        arguments: list[dict[str, Any]] = [
            {"batch_size": 3}, {"batch_size": 3, "sampler": range(29, -1, -1)}, {"batch_size": 3, "seed": 1},
            {"batch_size": 3, "seed": 1, "shuffle": True},
        ]  # fmt: skip
        alone = [_flat(DataLoader(dataset, **each)) for each in arguments]
        loaders = [DataLoader(dataset, **each) for each in arguments]
        together: list[list[int]] = [[] for _ in loaders]
        for batches in zip(*loaders, strict=True):
            for found, batch in zip(together, batches, strict=True):
                found += batch.tolist()
        assert together == alone


# -- scripts


_UNGUARDED = """
print("the script runs")
from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve

class Local:
    def __len__(self): return 4
    def __getitem__(self, index): return index

def collate(samples):
    return ("collated", *samples)

if {serves}:
    with serve(Local()) as url:
        print(list(DataLoader(RemoteDataset(url), 2, num_workers=2, collate_fn=lambda samples: collate(samples))))
else:
    import sys
    print([batch.tolist() for batch in DataLoader(RemoteDataset(sys.argv[1]), 5, num_workers=2)])
    import multiprocessing
    print(multiprocessing.active_children(), multiprocessing.get_start_method(allow_none=True))
"""


def test_a_script_without_a_main_guard_serves(tmp_path: Path) -> None:
    """A26: nothing imports the user's script once more, so it needs no ``if __name__ == "__main__"``."""
    script = tmp_path / "script.py"
    script.write_text(_UNGUARDED.format(serves=True))
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the script runs", "[('collated', 0, 1), ('collated', 2, 3)]"]


def test_a_training_process_needs_no_multiprocessing(start_server: StartServer, tmp_path: Path) -> None:
    """A40: the training process starts no process, so that no rule of start methods applies to the script."""
    server = start_server("numbers=tests.end_to_end.contract:Numbers")
    script = tmp_path / "script.py"
    script.write_text(_UNGUARDED.format(serves=False))
    done = subprocess.run([sys.executable, script, server.url], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the script runs", "[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]", "[] None"]


def test_start_methods_are_accepted_without_effect() -> None:
    """A40: a valid ``multiprocessing_context`` is kept as an attribute, as in torch; nothing has to be pickled."""
    hidden = {"a lambda": lambda i: i}
    for context in ("spawn", "fork", multiprocessing.get_context("forkserver")):
        with ours(Made(hidden["a lambda"]), num_workers=1, multiprocessing_context=context) as loader:
            assert _flat(loader) == [*range(10)]
            assert isinstance(loader.multiprocessing_context, multiprocessing.context.BaseContext)


# -- resources


def test_stats_show_where_the_time_goes() -> None:
    """A30: statistics have the times of fetch, collate and encode, busy workers and data wait."""
    with serve(Made(lambda i: np.full(10_000, i), 40)) as url:
        loader = DataLoader(RemoteDataset(url), 4, seed=0)
        list(loader)
        stats = _stats(url)
    (dataset,), (consumer,) = stats["datasets"], stats["consumers"]
    stages = [dataset["stages"][stage] for stage in ("fetch", "collate", "encode")]
    assert all(0 < stage["p50"] <= stage["max"] for stage in stages)
    assert sum(worker["busy"] for worker in stats["workers"]) == pytest.approx(
        sum(stage["mean"] * stage["count"] for stage in stages)
    )
    assert consumer["waiting"] >= 0
    assert consumer["batches_sent"] == 10
    assert consumer["bytes_sent"] > 40 * 80_000


def test_batches_that_are_kept_need_no_file_descriptors() -> None:
    """A44: torch's loader passes a descriptor for each tensor; here a loop may keep any number of batches."""
    with ours(Made(lambda i: [np.full(3, i)] * 20, 400), num_workers=2) as loader:
        iterator = iter(loader)
        kept = [next(iterator)]
        before = psutil.Process().num_fds()
        kept += iterator
        assert len(kept) == 400
        assert psutil.Process().num_fds() <= before + 8


def test_little_shared_memory_is_enough() -> None:
    """A44: batches wait for memory instead of failing, whatever the size of an epoch."""
    dataset = Made(lambda i: np.full(2**18, i, np.float32), 64)
    with ours(dataset, batch_size=2, num_workers=2, serve_with={"memory_budget": 6 * 2**20}) as loader:
        assert [int(batch[1, 0]) for batch in loader] == [*range(1, 64, 2)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_that_does_not_fit_is_an_error_with_the_figures(num_workers: int) -> None:
    """A44: a batch above the limit fails with its size and the limit; others arrive."""
    dataset = Made(lambda i: np.zeros(1000 if i != 2 else 2**20, np.uint8), 4)
    served = {"max_batch_bytes": 2**19, "num_workers": num_workers}
    with ours(dataset, serve_with=served) as loader:
        iterator = iter(loader)
        assert [next(iterator).shape[1], next(iterator).shape[1]] == [1000, 1000]
        with pytest.raises(ValueError, match=r"has 1,04\d,\d{3} bytes, and the limit is 524,288"):
            next(iterator)
        assert next(iterator).shape[1] == 1000


class Endless(IterableDataset):  # type: ignore[misc]
    """Infinite dataset."""

    def __iter__(self) -> Any:
        while True:
            yield os.getpid()


def test_workers_of_a_stream_that_is_left_end() -> None:
    """A21: after a loop breaks off an infinite stream, its workers exit."""
    before = len(workers_alive())
    with ours(Endless(), num_workers=2) as loader:
        for i, _ in enumerate(loader):
            if i == 5:
                break
        eventually(lambda: len(workers_alive()) <= before)
