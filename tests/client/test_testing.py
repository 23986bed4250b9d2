"""`FakeServer` against a real server: the same batches, orders, states and errors."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from teleloader import (
    DataLoader,
    DatasetChanged,
    LoaderTimeout,
    RemoteDataset,
    RemoteError,
    ServerUnavailable,
    TeleloaderError,
    UnknownDataset,
)
from teleloader.api.credentials import Credentials
from teleloader.testing import FakeServer
from teleloader.transport.selection import server_at
from teleloader_server import get_worker_info, serve
from teleloader_server.loading.worker_info import was_read
from teleloader_shared.codec import BatchId
from teleloader_shared.errors import UnknownLoader
from teleloader_shared.spec import LoaderSpec
from tests.conftest import ROOT


class Augmented:
    """Dataset with random numbers of the global generators."""

    def __init__(self, length: int = 23) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        return index, random.random(), np.random.random()


class Stream:
    """Iterable-style dataset that divides itself among its shards, and draws random numbers."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, float]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for k in range(first, 24, step):
            yield 100 * self.epoch + k, random.random()


class OwnIterator:
    """Iterable-style dataset that can be iterated once."""

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> OwnIterator:
        return self

    def __next__(self) -> int:
        if self._next == 10:
            raise StopIteration
        self._next += 1
        return self._next


class Alike:
    """Iterable-style dataset whose parts are equal, which must not cause a warning."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter([0] * (10 if info is None else 10 // info.num_workers))


class SampleError(Exception):
    """Exception that is not builtin."""


def first_of(samples: list[Any]) -> list[Any]:
    """Return the first sample: a collate function that is not a lambda."""
    return [sample[0] for sample in samples]


def fail_to_open(worker_id: int) -> None:
    """Raise an exception: a worker-init function."""
    raise KeyError(worker_id)


DATASETS: dict[str, Any] = {"map": Augmented(), "stream": Stream(), "own iterator": OwnIterator(), "alike": Alike()}
ORDERS: dict[str, dict[str, Any]] = {
    "sequential": {"seed": 3},
    "shuffled": {"shuffle": True, "seed": 3},
    "second of two ranks": {"shuffle": True, "seed": 3, "rank": 1, "world_size": 2},
    "client-side sampler": {"sampler": [3, 1, 22, 0, 3]},
    "single samples": {"batch_size": None, "seed": 3},
    "compressed": {"seed": 3, "compression": "zstd", "checksum": False},
    "one shard": {"dataset": "stream", "seed": 3},
    "two shards": {"dataset": "stream", "seed": 3, "num_workers": 2},
    "shards that are alike": {"dataset": "alike", "num_workers": 2},
    "shards of a rank": {"dataset": "stream", "seed": 3, "num_workers": 2, "rank": 1, "world_size": 2},
}


@pytest.fixture(scope="module")
def real() -> Iterator[str]:
    """Run a real server; return its URL."""
    with serve(DATASETS, num_workers=2) as url:
        yield url


def loader(url: str, *, dataset: str = "map", batch_size: int | None = 4, **arguments: Any) -> DataLoader:
    """Return a loader of one of the datasets."""
    return DataLoader(RemoteDataset(url, dataset), batch_size, output="numpy", **arguments)


def plain(batch: Any) -> Any:
    """Return a batch as lists."""
    return [plain(item) for item in batch] if isinstance(batch, list | tuple) else np.asarray(batch).tolist()


@pytest.mark.parametrize("order", ORDERS)
def test_two_epochs_equal_those_of_a_real_server(real: str, order: str) -> None:
    """For each order, random augmentation included; the generators of this process do not change."""
    if order == "compressed":
        pytest.importorskip("zstandard")
    with FakeServer(DATASETS) as fake:
        theirs = loader(real, **ORDERS[order])
        ours = loader(fake.url, **ORDERS[order])
        state = random.getstate()
        for _ in range(2):
            expected = [plain(batch) for batch in theirs]
            assert [plain(batch) for batch in ours] == expected
            assert expected
        assert random.getstate() == state
    assert get_worker_info() is None
    assert not was_read()


def test_each_shard_iterates_a_copy_of_the_dataset(real: str) -> None:
    """Each shard iterates a copy of the dataset in each epoch, as workers do, and repeated data causes a warning."""
    with FakeServer(DATASETS) as fake:
        for url in (real, fake.url):
            loading = loader(url, dataset="own iterator", batch_size=5, num_workers=2)
            with pytest.warns(UserWarning, match="Each of the 2 workers .* yielded the whole dataset"):
                first = [plain(batch) for batch in loading]
            assert first == [plain(batch) for batch in loading] == [[*range(k, k + 5)] for k in (1, 1, 6, 6)]


@pytest.mark.parametrize("order", ["shuffled", "client-side sampler", "two shards"])
@pytest.mark.parametrize("saved_by", ["fake", "real"])
def test_states_are_exchanged_with_a_real_server(real: str, order: str, saved_by: str) -> None:
    """A state that was saved with a fake or real server resumes with the other one at exactly the next batch."""
    arguments = {**ORDERS[order], "batch_size": 2}
    with FakeServer(DATASETS) as fake:
        one, other = (fake.url, real) if saved_by == "fake" else (real, fake.url)
        before = loader(one, **arguments)
        batches = iter(before)
        next(batches)
        next(batches)
        state = before.state_dict()
        resumed = loader(other, **arguments)
        resumed.load_state_dict(state)
        assert [plain(batch) for batch in resumed] == [plain(batch) for batch in batches]
        if order != "client-side sampler":  # a list as a sampler has no epochs
            assert [plain(batch) for batch in resumed] == [plain(batch) for batch in before]


def test_functions_are_allowed_by_name() -> None:
    """`functions` lists them as a server's configuration does; others are refused by the same error."""
    with FakeServer(DATASETS, functions=[first_of]) as fake:
        assert list(loader(fake.url, collate_fn=first_of)) == [[*range(k, min(k + 4, 23))] for k in range(0, 23, 4)]
    with (
        FakeServer(DATASETS) as fake,
        pytest.raises(ValueError, match=r"does not allow collate_fn=.*first_of"),
    ):
        loader(fake.url, collate_fn=first_of)


def test_a_worker_init_function_that_fails_is_reported_in_place_of_a_batch() -> None:
    """The error is raised as from a worker process; the worker ID counts the shards of all ranks."""
    with FakeServer(DATASETS, functions=[fail_to_open]) as fake:
        batches = iter(
            loader(fake.url, dataset="stream", num_workers=2, worker_init_fn=fail_to_open, rank=1, world_size=2)
        )
        for worker_id in (2, 3):
            with pytest.raises(KeyError, match=str(worker_id)):
                next(batches)


def test_single_samples_and_the_length_are_available() -> None:
    """Single samples and len() work as with any RemoteDataset."""
    with FakeServer({"a": [(k, k * k) for k in range(5)]}) as fake:
        dataset = RemoteDataset(fake.url)
        assert (len(dataset), dataset[3], dataset[-1]) == (5, [3, 9], [4, 16])
        with pytest.raises(UnknownDataset, match="hosts 'a'"):
            RemoteDataset(fake.url, "b")


def test_an_exception_takes_the_place_of_a_batch() -> None:
    """An exception is raised as from the dataset: builtin ones keep their type, and the next batch follows."""

    def fail(dataset: str, epoch: int, batch: int) -> None:
        if batch == 2:
            raise ValueError("bad sample")
        if batch == 3:
            raise SampleError("worse")

    with FakeServer(DATASETS, before_batch=fail) as fake:
        batches = iter(loader(fake.url))
        seen = [plain(next(batches))[0], plain(next(batches))[0]]
        with pytest.raises(ValueError, match="bad sample"):
            next(batches)
        with pytest.raises(RemoteError, match="SampleError: worse"):
            next(batches)
        seen += [plain(batch)[0] for batch in batches]
    assert seen == [[*range(k, min(k + 4, 23))] for k in (0, 4, 16, 20)]


def test_a_broken_connection_is_retried() -> None:
    """The batch is requested again on a new connection; each batch arrives once."""
    calls: list[tuple[str, int, int]] = []

    def break_once(dataset: str, epoch: int, batch: int) -> None:
        calls.append((dataset, epoch, batch))
        if batch == 2 and calls.count((dataset, epoch, batch)) == 1:
            raise ConnectionResetError("connection reset by the test")

    with FakeServer(DATASETS, before_batch=break_once) as fake:
        loading = loader(fake.url)
        assert [batch[0].tolist()[0] for batch in loading] == [*range(0, 23, 4)]
        assert loading.stats().reconnects == 1
    assert calls == [("map", 0, k) for k in (0, 1, 2, 2, 3, 4, 5)]


def test_an_outage_ends_in_an_error_from_which_training_resumes() -> None:
    """While connections break, the client retries for `reconnect_timeout`; the saved state continues elsewhere."""

    def fail(dataset: str, epoch: int, batch: int) -> None:
        if batch == 3:
            raise ConnectionError("the cable was cut")

    with FakeServer(DATASETS, before_batch=fail) as fake:
        dataset = RemoteDataset(fake.url, "map", reconnect_timeout=0.1)
        loading = DataLoader(dataset, 4, output="numpy")
        batches = iter(loading)
        seen = [index for _ in range(3) for index in next(batches)[0].tolist()]
        with pytest.raises(ServerUnavailable, match=r"did not send batch 3 of epoch 0: the cable was cut \(tried"):
            next(batches)
        state = loading.state_dict()
    with FakeServer(DATASETS) as other:
        resumed = loader(other.url)
        resumed.load_state_dict(state)
        seen += [index for batch in resumed for index in batch[0].tolist()]
    assert seen == [*range(23)]


def test_a_batch_that_exceeds_the_timeout_of_the_loader_is_not_lost() -> None:
    """`next` raises `LoaderTimeout`, and returns the batch once it has arrived."""
    release = threading.Event()

    def delay(dataset: str, epoch: int, batch: int) -> None:
        assert batch != 1 or release.wait(30)

    with FakeServer(DATASETS, before_batch=delay) as fake:
        batches = iter(loader(fake.url, timeout=1, num_workers=1))
        next(batches)
        with pytest.raises(LoaderTimeout):
            next(batches)
        release.set()
        assert next(batches)[0].tolist() == [4, 5, 6, 7]


def test_a_closed_fake_is_unreachable() -> None:
    """A fake server is unreachable before and after its ``with`` block, also for a loader created in it."""
    fake = FakeServer(DATASETS)
    for _ in range(2):
        with pytest.raises(ServerUnavailable, match="cannot connect to http://fake-"):
            RemoteDataset(fake.url, reconnect_timeout=0)
        with fake:
            loading = DataLoader(RemoteDataset(fake.url, "map", reconnect_timeout=0), 4, output="numpy")
            assert len(list(loading)) == 6
        with pytest.raises(ServerUnavailable, match="the FakeServer was closed"):
            list(loading)


def test_a_dataset_that_changes_is_noticed() -> None:
    """A changed length raises DatasetChanged when a loader is registered, as with a real server."""
    samples = [*range(8)]
    with FakeServer({"samples": samples}) as fake:
        loading = loader(fake.url, dataset="samples")
        samples.append(8)
        with pytest.raises(DatasetChanged, match="the length of the dataset changed"):
            list(loading)


class Collecting(list[int]):
    """Dataset that collects garbage while sample 5 is loaded."""

    collected = 0

    def __getitem__(self, index: Any) -> Any:
        if index == 5:
            gc.collect()
            self.collected += 1
        return super().__getitem__(index)


def test_garbage_collection_during_loading_ends_abandoned_sessions() -> None:
    """The finalizer of an abandoned iterator runs in the thread that loads, and does not wait for this thread."""
    dataset = Collecting(range(8))
    with FakeServer({"collecting": dataset, "stream": Stream()}) as fake:
        gc.collect()
        gc.disable()
        try:
            cycle: list[Any] = [iter(loader(fake.url, dataset="stream", num_workers=1))]
            next(cycle[0])
            cycle.append(cycle)
            del cycle
            began = time.monotonic()
            batches = loader(fake.url, dataset="collecting", num_workers=1, timeout=5)
            assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
            assert time.monotonic() - began < 3
        finally:
            gc.enable()
        assert dataset.collected == 1
        until(lambda: [name for name, _ in fake._loaders.values()] == ["collecting"])


def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, pytest.fail.Exception])
def test_an_exception_that_is_not_an_error_takes_the_place_of_a_batch(error: type[BaseException]) -> None:
    """Such an exception does not end the loading thread, and the next batch follows."""

    def fail(dataset: str, epoch: int, batch: int) -> None:
        if batch == 1:
            raise error("stop")

    with FakeServer(DATASETS, before_batch=fail) as fake:
        batches = iter(loader(fake.url, num_workers=1, timeout=5))
        next(batches)
        with pytest.raises(RemoteError, match="stop"):
            next(batches)
        assert next(batches)[0].tolist() == [8, 9, 10, 11]


def test_no_iterator_of_the_dataset_is_open_after_its_session() -> None:
    """A batch that is requested before the end of the session and loaded after it starts no iterator."""
    opened: list[Stream] = []

    class Opened(Stream):
        def __iter__(self) -> Iterator[tuple[int, float]]:
            opened.append(self)
            return super().__iter__()

    with FakeServer({"stream": Opened()}, before_batch=lambda *_: server.end_session(key)) as fake:
        server = server_at(fake.url, 10, Credentials())
        key = server.register(LoaderSpec(dataset="stream", batch_size=4, num_workers=1, session="s"), 0).key
        with pytest.raises(UnknownLoader):
            server.batch(BatchId(key, 0, 0), consumer="test")
    assert not opened


def test_a_sample_is_requested_again_after_a_disconnection() -> None:
    """A single sample is retried like a batch; an outage raises an error."""
    calls: list[int] = []

    def fail(dataset: str, epoch: int, batch: int) -> None:
        calls.append(batch)
        if batch == 4 or len(calls) == 1:
            raise ConnectionResetError("connection reset by the test")

    with FakeServer({"a": [*range(5)]}, before_batch=fail) as fake:
        assert RemoteDataset(fake.url)[3] == 3
        assert calls == [3, 3]
        with pytest.raises(ServerUnavailable, match="did not send batch 4: connection reset by the test"):
            RemoteDataset(fake.url, reconnect_timeout=0)[4]


def test_a_pickled_dataset_refers_to_its_server_by_url() -> None:
    """A copy uses the same server while it is open, and contains no datasets, as with a real server."""
    with FakeServer({"locks": [threading.Lock()], "a": [*range(5)]}) as fake:
        found = pickle.loads(pickle.dumps(RemoteDataset(fake.url, "a")))
        assert found[2] == 2


def test_a_url_may_end_with_a_slash() -> None:
    """A trailing slash of the URL is ignored, as for a real server."""
    with FakeServer({"a": [*range(5)]}) as fake:
        assert RemoteDataset(fake.url + "/", reconnect_timeout=0)[2] == 2


def test_several_fakes_share_an_epoch() -> None:
    """A client of two fake servers fetches from both, also with a copy of the dataset as frameworks make."""
    used: set[int] = set()

    def seen(number: int) -> Callable[[str, int, int], None]:
        def before_batch(dataset: str, epoch: int, batch: int) -> None:
            used.add(number)
            time.sleep(0.01)

        return before_batch

    samples = {"samples": [*range(400)]}
    with FakeServer(samples, before_batch=seen(1)) as one, FakeServer(samples, before_batch=seen(2)) as other:
        dataset = copy.deepcopy(RemoteDataset([one.url, other.url]))
        loading = DataLoader(dataset, 4, output="numpy")
        assert [index for batch in loading for index in batch.tolist()] == [*range(400)]
    assert used == {1, 2}


def test_no_socket_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither batches nor control requests open a socket."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    with FakeServer(DATASETS) as fake:
        assert len(list(loader(fake.url))) == 6
        assert len(list(loader(fake.url, dataset="stream", num_workers=2))) == 6


def test_what_is_no_dataset_is_refused() -> None:
    """Objects that are not datasets are rejected at construction."""
    with pytest.raises(TeleloaderError, match=r"dataset 'train' must define .* got int"):
        FakeServer({"train": 5})


CLIENT_ONLY = """
import sys

for name in ("click", "fastapi", "prometheus_client", "psutil", "rich", "tomlkit", "torch", "uvicorn", "uvloop",
             "watchfiles", "websockets"):
    sys.modules[name] = None

from teleloader import DataLoader, RemoteDataset
from teleloader.testing import FakeServer

with FakeServer({"train": list(range(10))}) as fake:
    print([batch.tolist() for batch in DataLoader(RemoteDataset(fake.url), 4)])
"""


def test_the_dependencies_of_a_client_suffice() -> None:
    """An installation without the extra ``server`` has all that it needs."""
    done = subprocess.run([sys.executable, "-c", CLIENT_ONLY], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]\n", done.stderr
