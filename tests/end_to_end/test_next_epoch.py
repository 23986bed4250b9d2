"""Prefetching of the next epoch: in time, with the lowest priority, and never of more than one prefetch window."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from teleloader import DataLoader, LengthBalance, RemoteDataset
from teleloader.fetch.receiver import MEMORY_LIMIT_FACTOR
from teleloader.orders import PlanOrder
from teleloader_server import serve
from teleloader_shared.messages import BACKGROUND_PRIORITY, CONSUMER_HEADER, PRIORITY_HEADER, batches_path
from teleloader_shared.spec import MAX_EPOCH
from tests.conftest import eventually

SIZE = 4
BATCHES = 8
WORKERS = 2
WINDOW = 2 * WORKERS


class Logged:
    """Map-style dataset that appends the epoch and the indices of each batch to a file.

    Args:
        path: The file.
        width: Number of values of a sample: its epoch and its index, repeatedly.
    """

    def __init__(self, path: Path, width: int = 2) -> None:
        self.path = path
        self.width = width
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which each sample contains."""
        self.epoch = epoch

    def __len__(self) -> int:
        return SIZE * BATCHES

    def __getitems__(self, indices: list[int]) -> list[Any]:
        with self.path.open("a") as log:
            log.write(f"{self.epoch} {indices[0]}\n")
        return [np.resize([self.epoch, index], self.width) for index in indices]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def computed(self, epoch: int) -> int:
        """Return the number of batches of an epoch that workers have computed."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return sum(line.startswith(f"{epoch} ") for line in lines)

    def has_computed(self, epoch: int, count: int) -> bool:
        """Return True if workers have computed at least `count` batches of an epoch."""
        return self.computed(epoch) >= count


@pytest.fixture
def dataset(tmp_path: Path) -> Logged:
    """Return a dataset that logs its samples."""
    return Logged(tmp_path / "log")


@pytest.fixture
def url(dataset: Logged) -> Iterator[str]:
    """Host the dataset."""
    with serve(dataset, num_workers=WORKERS) as url:
        yield url


def loader(url: str, **options: Any) -> Any:
    """Return a loader in seeded order that prefetches the next epoch."""
    options = {"prefetch_next_epoch": True, **options}
    return DataLoader(RemoteDataset(url), SIZE, True, num_workers=WORKERS, seed=7, output="numpy", **options)


def expected(of: Any, epoch: int) -> list[list[list[int]]]:
    """Return the batches of an epoch according to the plan."""
    return [[[epoch, index] for index in batch.tolist()] for batch in of.plan(epoch)]


def stats(url: str) -> Any:
    """Return the current /stats."""
    return httpx.get(f"{url}/stats").raise_for_status().json()


def received(batches: Any) -> list[list[list[int]]]:
    """Return batches as lists."""
    return [batch.tolist() for batch in batches]


def test_the_next_epoch_is_computed_before_the_current_one_ends(dataset: Logged, url: str) -> None:
    """Its first batches are computed while the training loop has the last batch but one."""
    loading = loader(url)
    batches = iter(loading)
    for _ in range(BATCHES - 1):
        next(batches)
    eventually(lambda: dataset.computed(1) >= 1)
    assert dataset.computed(1) < WINDOW, "the window includes the last batch of the current epoch"


def test_at_most_one_prefetch_window_is_computed_in_vain(dataset: Logged, url: str) -> None:
    """After the last epoch, workers compute as many batches as the loader prefetches for two epochs together."""
    loading = loader(url)
    for _ in range(3):
        assert len(list(loading)) == BATCHES
    eventually(lambda: dataset.computed(3) == WINDOW)
    list(loader(url, prefetch_next_epoch=False))  # further time for the workers
    assert [dataset.computed(epoch) for epoch in range(5)] == [BATCHES, BATCHES, BATCHES, WINDOW, 0]


def test_two_epochs_together_stay_within_the_memory_limit(tmp_path: Path) -> None:
    """Batches of the current epoch that the training loop has not received count towards the limit of the next one."""
    dataset = Logged(tmp_path / "log", 2**16 + 2**10)  # one batch per response
    with serve(dataset, num_workers=WORKERS) as url:
        largest = SIZE * 9 * dataset.width  # a batch has 8 bytes per value
        loading = loader(url, max_batch_bytes=largest, prefetch_factor=BATCHES)
        batches = iter(loading)
        for _ in range(BATCHES - 2):
            next(batches)
        for number, kept in enumerate((2, 0), 1):
            expected_sent = BATCHES * number + MEMORY_LIMIT_FACTOR + 1 - kept
            eventually(lambda least=expected_sent: stats(url)["datasets"][0]["batches_sent"] >= least)  # type: ignore[misc]
            list(loader(url, prefetch_next_epoch=False))  # further time for the server
            assert stats(url)["datasets"][0]["batches_sent"] == expected_sent + BATCHES
            assert len(list(batches)) == kept
        assert [batch[:, :2].tolist() for batch in loading] == expected(loading, 1)


def test_prefetched_batches_are_not_lent(tmp_path: Path) -> None:
    """The training loop may keep them for long, so they occupy no shared memory of the server."""
    dataset = Logged(tmp_path / "log", 2**16)
    with serve(dataset, num_workers=WORKERS) as url:
        loading = loader(url)
        assert len(list(loading)) == BATCHES
        eventually(lambda: dataset.computed(1) == WINDOW)
        eventually(lambda: stats(url)["datasets"][0]["batches_sent"] == BATCHES + WINDOW)
        eventually(lambda: stats(url)["server"]["memory_lent"] == 0)


def test_several_servers_share_the_prefetched_batches(tmp_path: Path) -> None:
    """Both prefetch the next epoch; when it starts, each sends at most one pending request again."""
    dataset = Logged(tmp_path / "log")
    with serve(dataset, num_workers=1) as first, serve(dataset, num_workers=1) as second:
        remote = RemoteDataset([first, second])
        loading = DataLoader(remote, SIZE, True, seed=7, output="numpy", prefetch_next_epoch=True)
        for epoch in range(3):
            assert received(loading) == expected(loading, epoch)
            eventually(partial(dataset.has_computed, epoch + 1, WINDOW))
        assert all(BATCHES <= dataset.computed(epoch) <= BATCHES + 2 for epoch in range(3))


def test_an_iterator_alone_does_not_prefetch_the_next_epoch(dataset: Logged, url: str) -> None:
    """Without the loader, no other epoch can start."""
    batches = iter(loader(url))
    assert len(list(batches)) == BATCHES
    list(loader(url, prefetch_next_epoch=False))  # further time for the workers
    assert dataset.computed(1) == 0


def test_a_single_pass_prefetches_nothing_by_default(dataset: Logged, url: str) -> None:
    """A second epoch may not follow. Once one has started, further epochs are prefetched."""
    loading = loader(url, prefetch_next_epoch=None)
    assert received(loading) == expected(loading, 0)
    assert len(list(loader(url, prefetch_next_epoch=False))) == BATCHES  # further time for the workers
    assert dataset.computed(1) == 0
    assert received(loading) == expected(loading, 1)
    eventually(lambda: dataset.computed(2) == WINDOW)
    assert received(loading) == expected(loading, 2)


def test_by_default_set_epoch_announces_further_epochs(dataset: Logged, url: str) -> None:
    """A training loop that selects epochs has more than one."""
    loading = loader(url, prefetch_next_epoch=None)
    loading.set_epoch(0)
    assert received(loading) == expected(loading, 0)
    eventually(lambda: dataset.computed(1) == WINDOW)


def test_training_processes_share_the_prefetched_batches(dataset: Logged, url: str) -> None:
    """Each batch of each epoch is computed once for all of them."""
    loaders = [loader(url) for _ in range(3)]
    for epoch in range(3):
        iterators = [iter(each) for each in loaders]
        rows = [[next(iterator).tolist() for iterator in iterators] for _ in range(BATCHES)]
        assert all(len(list(iterator)) == 0 for iterator in iterators)
        assert [list(batches) for batches in zip(*rows, strict=True)] == 3 * [expected(loaders[0], epoch)]
        eventually(lambda following=epoch + 1: dataset.computed(following) == WINDOW)  # type: ignore[misc]
        assert dataset.computed(epoch) == BATCHES


def test_a_full_memory_budget_delays_no_current_epoch(tmp_path: Path) -> None:
    """Batches of the next epoch are not computed while memory is full, and are evicted before others."""
    dataset = Logged(tmp_path / "log", 2**15)
    nbytes = SIZE * 8 * dataset.width
    with serve(dataset, num_workers=WORKERS, memory_budget=3 * nbytes) as url:
        ending, running = loader(url), DataLoader(RemoteDataset(url), SIZE, True, seed=9, output="numpy")
        current = iter(running)
        next(current)
        for epoch in range(3):
            assert [batch[:, :2].tolist() for batch in ending] == expected(ending, epoch)
        assert [batch[:, :2].tolist() for batch in current] == expected(running, 0)[1:]


def test_another_number_of_ranks_continues_while_the_next_epoch_is_prefetched(url: str) -> None:
    """A state that two ranks save among their last batches is loaded by one rank."""
    ranks = [loader(url, rank=rank, world_size=2) for rank in range(2)]
    iterators = [iter(each) for each in ranks]
    for _ in range(BATCHES // 2 - 1):
        for iterator in iterators:
            next(iterator)
    state = ranks[0].state_dict()
    alone = DataLoader(
        RemoteDataset(url), 2 * SIZE, True, num_workers=WORKERS, seed=7, output="numpy", prefetch_next_epoch=True
    )
    alone.load_state_dict(state)
    rest = sorted(index for iterator in iterators for batch in iterator for _, index in batch.tolist())
    assert sorted(index for batch in alone for _, index in batch.tolist()) == rest
    assert received(alone) == expected(alone, 1)


def test_prefetching_can_be_disabled(dataset: Logged, url: str) -> None:
    """With ``prefetch_next_epoch=False``, each epoch is computed only after its start."""
    loading = loader(url, prefetch_next_epoch=False)
    assert len(list(loading)) == BATCHES
    assert len(list(loader(url, prefetch_next_epoch=False))) == BATCHES
    assert dataset.computed(1) == 0
    assert received(loading) == expected(loading, 1)


def test_each_epoch_has_its_batches(url: str) -> None:
    """The batches of all epochs are those of the plan, whether they were prefetched or not."""
    loading = loader(url)
    for epoch in range(6):
        assert received(loading) == expected(loading, epoch)


@pytest.mark.parametrize("epochs", [[0, 1, 2], [3, 4, 5], [0, 2, 4, 1], [5, 5, 5]])
def test_set_epoch_replaces_the_prefetched_epoch(url: str, epochs: list[int]) -> None:
    """The batches are those of the selected epoch; each of them sees that epoch in the dataset."""
    loading = loader(url)
    for epoch in epochs:
        loading.set_epoch(epoch)
        assert received(loading) == expected(loading, epoch)


def test_an_epoch_that_set_epoch_announces_is_prefetched(dataset: Logged, url: str) -> None:
    """``set_epoch`` during an epoch selects the epoch that is prefetched at its end."""
    loading = loader(url)
    batches = iter(loading)
    next(batches)
    loading.set_epoch(9)
    assert len(list(batches)) == BATCHES - 1
    eventually(lambda: dataset.computed(9) == WINDOW)
    assert dataset.computed(1) == 0
    assert received(loading) == expected(loading, 9)


def test_load_state_dict_starts_to_prefetch(dataset: Logged, url: str) -> None:
    """The batches after the saved position are computed before ``iter()``."""
    saved = loader(url)
    batches = iter(saved)
    next(batches)
    state = saved.state_dict()
    del batches
    resumed = loader(url)
    resumed.load_state_dict({**state, "epoch": 6})
    eventually(lambda: dataset.computed(6) == WINDOW)
    assert resumed.state_dict() == {**state, "epoch": 6}
    assert received(resumed) == expected(resumed, 6)[1:]
    assert received(resumed) == expected(resumed, 7)


def test_a_state_is_independent_of_prefetching(url: str) -> None:
    """A state that is saved at any batch continues with the next batch, in another loader too."""
    loading = loader(url)
    order = [batch for epoch in range(3) for batch in expected(loading, epoch)]
    position = 0
    for _ in range(2):
        for batch in loading:
            assert batch.tolist() == order[position]
            position += 1
            resumed = loader(url)
            resumed.load_state_dict(loading.state_dict())
            assert received(resumed) == (
                order[position : -(-position // BATCHES) * BATCHES] or order[position:][:BATCHES]
            )


def test_no_epoch_follows_the_last_one(url: str) -> None:
    """The last epoch number is iterated as any other one."""
    loading = loader(url)
    loading.set_epoch(MAX_EPOCH - 1)
    assert received(loading) == expected(loading, MAX_EPOCH - 1)


class Measured(Logged):
    """Dataset with lengths, all of which are 1."""

    sample_lengths = np.ones(SIZE * BATCHES, np.int64)


class Preparations:
    """Record of the epochs whose number of batches is computed; those after the first one wait for an event.

    Args:
        monkeypatch: Replaces the computation.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        self.gate = threading.Event()
        compute = PlanOrder.extent

        def extent(order: PlanOrder, spec: Any, epoch: int, length: int | None) -> Any:
            if epoch and not self.gate.is_set():
                assert threading.current_thread() is not threading.main_thread(), "the training loop would wait"
                self.begun.append(epoch)
                assert self.gate.wait(60)
            return compute(order, spec, epoch, length)

        monkeypatch.setattr(PlanOrder, "extent", extent)


@pytest.fixture
def preparations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Preparations]:
    """Return the record, and let all threads end after the test."""
    record = Preparations(monkeypatch)
    yield record
    record.gate.set()


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[Any]:
    """Yield a function that returns a loader of single tokens, whose prefetch window has one batch for each worker."""
    with serve(Measured(tmp_path / "log"), num_workers=WORKERS) as url:
        yield lambda: DataLoader(
            RemoteDataset(url), shuffle=True, seed=7, output="numpy", num_workers=WORKERS, prefetch_factor=1,
            prefetch_next_epoch=True, balance=LengthBalance(max_tokens=SIZE, window=SIZE),
        )  # fmt: skip


def test_the_training_loop_does_not_wait_for_a_preparation(measured: Any, preparations: Preparations) -> None:
    """With `max_tokens`, another thread prepares the next epoch from the middle of the current one on."""
    loading = measured()
    batches = iter(loading)
    for _ in range(BATCHES // 2 + 1):
        next(batches)
    eventually(lambda: preparations.begun == [1])
    assert len(list(batches)) == BATCHES // 2 - 1
    threading.Timer(0.1, preparations.gate.set).start()  # while iter() waits
    assert received(loading) == expected(loading, 1)


def test_a_preparation_that_is_not_needed_delays_no_epoch(measured: Any, preparations: Preparations) -> None:
    """Neither another epoch nor the end of the loader waits for it."""
    loading = measured()
    assert len(list(loading)) == BATCHES
    eventually(lambda: preparations.begun == [1])
    loading.set_epoch(0)
    assert received(loading) == expected(loading, 0)
    del loading
    preparations.gate.set()
    eventually(lambda: not threads("teleloader-receiver"))


def test_the_first_batch_of_a_prepared_epoch_is_computed_early(measured: Any, tmp_path: Path) -> None:
    """The server prepares the epoch for it, from the middle of the current epoch on."""
    dataset = Measured(tmp_path / "log")
    loading = measured()
    batches = iter(loading)
    for _ in range(BATCHES // 2 + 1):
        next(batches)
    eventually(lambda: dataset.computed(1) == 1)
    assert len(list(batches)) == BATCHES // 2 - 1
    eventually(lambda: dataset.computed(1) == WORKERS)


def test_abandoned_epochs_do_not_change_the_next_ones(url: str) -> None:
    """An epoch that the training loop leaves early, also at its end, is followed by the next epoch."""
    loading = loader(url)
    for epoch, count in enumerate((1, BATCHES - 1, BATCHES, 3, BATCHES - 2)):
        batches = iter(loading)
        assert [next(batches).tolist() for _ in range(count)] == expected(loading, epoch)[:count]
    assert received(loading) == expected(loading, 5)


def test_changed_arguments_discard_prefetched_batches(url: str) -> None:
    """Batches are collated with the loader's current function."""
    loading = loader(url)
    assert len(list(loading)) == BATCHES
    loading.prefetch_factor = 5
    assert received(loading) == expected(loading, 1)


def test_a_server_that_restarted_between_two_epochs_is_no_error(tmp_path: Path) -> None:
    """Prefetched batches of a stopped server are used, and the others are requested from its successor."""
    dataset = Logged(tmp_path / "log")
    with serve(dataset, num_workers=WORKERS) as url:
        loading = loader(url)
        assert len(list(loading)) == BATCHES
        eventually(lambda: dataset.computed(1) == WINDOW)
        port = int(url.rpartition(":")[2])
    with serve(dataset, num_workers=WORKERS, port=port):
        assert received(loading) == expected(loading, 1)


def test_a_forked_child_does_not_use_the_parents_batches(url: str) -> None:
    """Parent and child continue with the same epoch, each over its own connections."""
    loading = loader(url)
    assert len(list(loading)) == BATCHES
    pid = os.fork()
    if not pid:
        os._exit(0 if received(loading) == expected(loading, 1) else 1)
    assert received(loading) == expected(loading, 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_prefetching_ends_with_the_loader(url: str) -> None:
    """A deleted loader leaves no threads and no connections."""
    loading = loader(url)
    assert len(list(loading)) == BATCHES
    eventually(lambda: threads("teleloader-receiver"))
    del loading
    eventually(lambda: not threads("teleloader-receiver"))
    eventually(lambda: not [c for c in stats(url)["consumers"] if c["waiting"] and not c["idle"]])


def threads(name: str) -> list[threading.Thread]:
    """Return the threads of this process with a name."""
    return [thread for thread in threading.enumerate() if thread.name == name]


class Gated:
    """Map-style dataset that logs each index, and whose sample 0 waits until a file exists."""

    def __init__(self, folder: Path) -> None:
        self.gate = folder / "gate"
        self.log = folder / "log"

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        with self.log.open("a") as log:
            log.write(f"{index}\n")
        if index == 0:
            eventually(self.gate.exists)
        return index


def test_a_request_with_the_lowest_urgency_goes_last(tmp_path: Path) -> None:
    """The server computes a batch of ``Priority: u=7`` after the batches of all other requests."""
    dataset = Gated(tmp_path)
    with serve(dataset, num_workers=1) as url:
        remote = RemoteDataset(url)
        key = _registered(remote)
        responses: list[httpx.Response] = []

        def request(batch: int, **headers: str) -> threading.Thread:
            headers = {CONSUMER_HEADER: f"consumer {batch}", **headers}
            path = f"{url}{batches_path(key, 0)}/{batch}"
            thread = threading.Thread(target=lambda: responses.append(httpx.get(path, headers=headers, timeout=60)))
            thread.start()
            return thread

        def are_open(count: int) -> Callable[[], bool]:
            return lambda: len(stats(url)["consumers"]) == count

        requests = [request(0)]
        eventually(are_open(1))
        requests.append(request(1, **{PRIORITY_HEADER: f"{BACKGROUND_PRIORITY}, i"}))
        eventually(are_open(2))
        requests.append(request(2))
        eventually(are_open(3))
        dataset.gate.touch()
        for thread in requests:
            thread.join()
        assert [response.status_code for response in responses] == [200] * 3
    assert dataset.log.read_text().split() == ["0", "2", "1"]


def test_a_pending_request_becomes_urgent_when_the_epoch_starts(tmp_path: Path) -> None:
    """The server counts a wait for the batch only from then on."""
    dataset = Gated(tmp_path)
    with serve(dataset, num_workers=1) as url:
        blocking = DataLoader(RemoteDataset(url), 1, seed=0, output="numpy")
        blocked = iter(blocking)  # the only worker is busy with batch 0
        eventually(lambda: dataset.log.exists())
        loading = DataLoader(RemoteDataset(url), 1, seed=0, output="numpy", prefetch_next_epoch=True)
        loading.load_state_dict({**loading.state_dict(), "epoch": 1, "samples": 3})

        def waiting() -> list[float]:
            return [c["waiting"] for c in stats(url)["consumers"] if c["epoch"] == 1]

        eventually(waiting)
        assert waiting() == [0.0]
        batches = iter(loading)
        eventually(lambda: waiting()[0] > 0)
        dataset.gate.touch()
        assert next(batches).tolist() == [3]
        assert next(blocked).tolist() == [0]


def _registered(remote: RemoteDataset) -> str:
    spec = DataLoader(remote, 1, seed=0, output="numpy").spec
    return remote.register(spec, 0)[1].key


def test_waits_of_prefetching_are_not_those_of_the_training_loop(url: str) -> None:
    """The server counts no wait of a consumer whose training loop has not started the epoch."""
    loading = loader(url)
    assert len(list(loading)) == BATCHES
    eventually(lambda: stats(url)["datasets"][0]["batches_sent"] == BATCHES + WINDOW)
    waits = {c["epoch"]: c["waiting"] for c in stats(url)["consumers"]}
    assert waits.get(1, 0.0) == 0.0
    assert loading.stats().epoch == 0
    assert loading.stats().steps == BATCHES
