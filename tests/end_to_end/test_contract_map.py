"""The contract's rules on map-style datasets: constructor, order, and the loop that a loader replaces."""

from __future__ import annotations

import inspect
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader.transport.http import HttpConnection
from teleloader_server import serve
from tests.conftest import eventually
from tests.end_to_end.contract import (
    Dataset,
    Made,
    Numbers,
    Range,
    TorchLoader,
    assert_same,
    both,
    both_raise,
    few_cpus_are_fine,
    ours,
    torch,
    torch_is_there,
    torchs,
)

__all__ = ["torch_is_there"]


def _flat(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


def _collate(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples)


# -- the constructor


def test_the_constructor_is_torchs() -> None:
    """A33: the arguments have torch's order, defaults and keyword-only part, followed by teleloader's own."""
    theirs = list(inspect.signature(TorchLoader.__init__).parameters.values())
    mine = list(inspect.signature(DataLoader.__init__).parameters.values())
    assert [(p.name, p.kind, p.default) for p in mine[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in mine[len(theirs) :])


ATTRIBUTES = (
    "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [{}, {"batch_size": 3, "drop_last": True}, {"batch_size": None}, {"num_workers": 2}, {"batch_sampler": [[1]]},
     {"num_workers": 1, "prefetch_factor": 5, "persistent_workers": True, "timeout": 2.5, "in_order": False}],
)  # fmt: skip
def test_attributes_are_torchs(arguments: dict[str, Any]) -> None:
    """A33: a loader has torch's attributes, with None where torch has None, except the collate function."""
    expected = torchs(Numbers(), **arguments)
    with ours(Numbers(), **arguments) as loader:
        for name in ATTRIBUTES:
            if name != "collate_fn":
                assert getattr(loader, name) == getattr(expected, name), name
        assert type(loader.sampler) is type(expected.sampler)
        assert type(loader.batch_sampler) is type(expected.batch_sampler)


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers", "num_workers"]
)
def test_attributes_are_fixed_as_in_torch(name: str) -> None:
    """A33: attributes that cannot be set in torch after construction cannot be set here; others can."""

    class Mine(DataLoader):
        """Subclass whose name is in the message."""

    class Theirs(TorchLoader):  # type: ignore[misc]
        """Subclass of torch's loader whose name is in the message."""

    Theirs.__name__ = "Mine"
    with serve(Numbers()) as url:
        outcomes = []
        for loader in (Theirs(Numbers()), Mine(RemoteDataset(url))):
            try:
                setattr(loader, name, 1)
            except ValueError as error:
                outcomes.append(str(error))
            else:
                outcomes.append("set")
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"sampler": [1], "shuffle": True}, {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_sampler": [[1]], "shuffle": True}, {"batch_sampler": [[1]], "sampler": [1]},
        {"batch_sampler": [[1]], "drop_last": True}, {"batch_size": None, "drop_last": True}, {"batch_size": 0},
        {"batch_size": -1}, {"batch_size": 2.0}, {"batch_size": True}, {"drop_last": 1}, {"num_workers": -1},
        {"timeout": -1}, {"prefetch_factor": 2}, {"num_workers": 1, "prefetch_factor": -1},
        {"persistent_workers": True}, {"multiprocessing_context": "fork"},
        {"num_workers": 1, "multiprocessing_context": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_exclusions_are_torchs(arguments: dict[str, Any]) -> None:
    """A34: arguments that exclude each other or are out of range raise torch's errors."""
    both_raise(ValueError, lambda make, data: make(data, **arguments), Numbers())


def test_an_empty_dataset() -> None:
    """A34: shuffling an empty dataset raises torch's error; in sequence it has no batches."""
    both_raise(ValueError, lambda make, data: make(data, shuffle=True), Numbers(0))
    assert both(Numbers(0), batch_size=2) == [[], []]


# -- the order


def test_samplers_run_on_the_client() -> None:
    """A11: a sampler runs in this process and thread, and sees the results of the training loop."""
    asked = []

    class Hardest:
        """Sampler that yields the samples with the highest loss."""

        def __init__(self) -> None:
            self.hard = [1, 2, 3]

        def __iter__(self) -> Iterator[int]:
            for index in self.hard:
                asked.append((os.getpid(), threading.current_thread() is threading.main_thread()))
                yield index

    sampler = Hardest()
    with ours(Numbers(), sampler=sampler, num_workers=2) as loader:
        assert _flat(loader) == [1, 2, 3]
        sampler.hard = [7, 7]
        assert _flat(loader) == [7, 7]
    assert set(asked) == {(os.getpid(), True)}


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_plan_is_known_on_both_sides(shuffle: bool) -> None:
    """A11: with a seed, the client's plan equals the batches that the server loads."""
    with ours(Numbers(23), batch_size=4, shuffle=shuffle, seed=9) as loader:
        for epoch in range(2):
            plan = [indices.tolist() for indices in loader.plan(epoch)]
            assert [batch.tolist() for batch in loader] == plan
            assert sorted(itertools.chain(*plan)) == [*range(23)]


@pytest.mark.parametrize("in_order", [True, False])
def test_batches_come_in_order_whatever_the_worker(in_order: bool) -> None:
    """A12: the loop waits for batches of a slow worker; each index comes once, as ``tensor([i])``."""
    context = multiprocessing.get_context("fork")
    later = context.Event()

    def sample(index: int) -> int:
        if index == 0:
            later.wait()  # for a batch that comes after it
        if index == 3:
            later.set()
        return index

    with ours(Made(sample, 20), num_workers=2, in_order=in_order) as loader:
        batches = list(loader)
    assert_same(batches, [torch.tensor([i]) for i in range(20)])


def test_batches_alternate_between_workers() -> None:
    """A12: batch j is loaded by worker j mod W, as torch assigns them."""

    def number(_: int) -> int:
        return int(torch.utils.data.get_worker_info().id)

    (epoch,) = both(Made(number, 12), num_workers=3, epochs=1, serve_with={"num_workers": 3})
    assert _flat(epoch) == [0, 1, 2] * 4


@pytest.mark.parametrize("num_workers", [2, 4])
def test_workers_that_wait_for_each_other(num_workers: int) -> None:
    """A12: each worker gets one of the first W batches, so that samples may wait until all workers have one."""
    barrier = multiprocessing.get_context("fork").Barrier(num_workers)

    def sample(index: int) -> int:
        barrier.wait(20)
        return index

    with few_cpus_are_fine(), ours(Made(sample, num_workers), num_workers=num_workers, timeout=30) as loader:
        assert _flat(loader) == [*range(num_workers)]


# -- kinds of dataset


def test_the_server_reports_both_kinds() -> None:
    """A18: the server reports kind and length; a map-style dataset needs no base class."""

    class Plain:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> int:
            return index * 2

    with serve({"map": Plain(), "list": [7, 8, 9], "stream": Range(0, 3)}) as url:
        found = {name: RemoteDataset(url, name) for name in ("map", "list", "stream")}
        assert {name: (each.info.kind, each.info.length) for name, each in found.items()} == {
            "map": ("map", 5), "list": ("map", 3), "stream": ("iterable", None),
        }  # fmt: skip
        assert _flat(DataLoader(found["map"])) == [0, 2, 4, 6, 8]
        assert _flat(DataLoader(found["list"], 2)) == [7, 8, 9]
        assert _flat(DataLoader(found["stream"], 2)) == [0, 1, 2]
        with pytest.raises(TypeError):
            len(found["stream"])


def test_torchs_own_datasets() -> None:
    """A18: nested TensorDataset, ConcatDataset, Subset, StackDataset and random_split work."""
    from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, random_split

    tensors = TensorDataset(torch.arange(12).reshape(6, 2), torch.linspace(0, 1, 6))
    subset = Subset(ConcatDataset([tensors, tensors]), [11, 0, 5, 6])
    first, _ = random_split(tensors, [4, 2], generator=torch.Generator().manual_seed(1))
    for dataset in (tensors, subset, first, StackDataset(tensors, Numbers(6)), StackDataset(a=tensors, b=Numbers(6))):
        both(dataset, batch_size=3, shuffle=True)


# -- prefetching and its limits


def test_no_index_is_loaded_twice() -> None:
    """A22: without faults, each index is loaded exactly once per epoch."""
    counts = multiprocessing.get_context("fork").Array("i", 50)

    def sample(index: int) -> int:
        with counts.get_lock():
            counts[index] += 1
        return index

    with ours(Made(sample, 50), batch_size=4, shuffle=True, num_workers=2) as loader:
        assert sorted(_flat(loader)) == [*range(50)]
        assert counts[:] == [1] * 50
        list(loader)
        assert counts[:] == [2] * 50


def test_a_batch_that_is_made_again_is_identical() -> None:
    """A22: a batch recomputed after its worker exited is identical, random numbers included."""
    context = multiprocessing.get_context("fork")

    def epoch(dies: bool) -> list[Any]:
        died = context.Event()

        def sample(index: int) -> Any:
            drawn = torch.rand(3)
            if dies and index == 9 and not died.is_set():
                died.set()
                os.kill(os.getpid(), signal.SIGKILL)
            return index, drawn

        torch.manual_seed(1)
        with ours(Made(sample, 20), batch_size=2, shuffle=True, num_workers=2) as loader:
            return list(loader)

    assert_same(epoch(dies=True), epoch(dies=False))


def test_a_loop_that_stops_holds_up_the_work() -> None:
    """A24: at most ``prefetch_factor * num_workers`` batches beyond the consumed ones are requested."""
    drawn = []

    class Watched:
        def __iter__(self) -> Iterator[int]:
            for i in range(1000):
                drawn.append(i)
                yield i

    with ours(Numbers(1000), sampler=Watched(), num_workers=2, prefetch_factor=3) as loader:
        iterator = iter(loader)
        for taken in range(1, 50):
            next(iterator)
            assert len(drawn) <= taken + 2 * 3


def test_memory_is_bounded_while_a_loop_stops() -> None:
    """A24: the client's queue and the server's prefetched batches are bounded."""
    made = multiprocessing.get_context("fork").Value("i", 0)

    def sample(_: int) -> Any:
        with made.get_lock():
            made.value += 1
        return np.zeros(2**20, np.uint8)

    with serve(Made(sample, 5000), num_workers=2, memory_budget=64 * 2**20) as url:
        iterator = iter(DataLoader(RemoteDataset(url), num_workers=2))
        next(iterator)
        import httpx

        def rests() -> bool:
            before = made.value
            workers = httpx.get(f"{url}/stats").json()["workers"]
            return all(worker["state"] == "idle" for worker in workers) and before == made.value

        eventually(lambda: rests() and rests() and rests())
        assert made.value < 400


def test_indices_are_pythons_numbers() -> None:
    """A27: user code receives ints, whatever the sampler yields; ``torch.is_tensor(idx)`` works."""

    def sample(index: Any) -> str:
        return f"{torch.is_tensor(index)} {type(index).__name__}"

    for sampler in (None, torch.utils.data.RandomSampler(Numbers(4)), [0, 1, 2, 3]):
        both(Made(sample, 4), sampler=sampler)
    with ours(Made(sample, 4), sampler=torch.tensor([1, 2])) as loader:
        assert list(loader) == [["False int"], ["False int"]]


def test_a_batch_is_one_workers_work() -> None:
    """A28: one worker computes and collates all samples of a batch."""
    dataset = Made(lambda _: os.getpid(), 40)
    with ours(dataset, batch_size=5, num_workers=2, collate_fn=lambda pids: {os.getpid(), *pids}) as loader:
        assert all(len(pids) == 1 for pids in loader)


# -- the loop


class Bulk(Numbers):
    """Dataset that reads several samples at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [{"index": index, "root": index**0.5} for index in indices]


@pytest.mark.parametrize("batch_size", [1, 4, 23])
@pytest.mark.parametrize("seed", [None, 3])
def test_the_loop_that_a_loader_stands_for(seed: int | None, batch_size: int) -> None:
    """A35: ``for indices in batch_sampler: yield collate_fn([dataset[i] for i in indices])``."""
    dataset = Made(lambda i: {"index": i, "root": i**0.5, "name": f"n{i}", "row": np.arange(i, i + 3)}, 23)
    torch.manual_seed(3)
    with ours(dataset, batch_size=batch_size, shuffle=True, seed=seed) as loader:
        got = list(loader)
        orders = [batch["index"].tolist() for batch in got]
        assert_same(got, [_collate([dataset[i] for i in indices]) for indices in orders])
        if seed is not None:
            assert orders == [indices.tolist() for indices in loader.plan(0)]


def test_the_loop_with_bulk_reading() -> None:
    """A35: ``__getitems__`` is called if it exists."""
    dataset = Bulk()
    with ours(dataset, batch_size=4) as loader:
        assert_same(list(loader), [_collate(dataset.__getitems__(i)) for i in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])])


@pytest.mark.parametrize("collate_fn", [None, lambda sample: (sample, "converted")])
def test_the_loop_without_batches(collate_fn: Any) -> None:
    """A36: ``for index in sampler: yield collate_fn(dataset[index])``, with default_convert if there is none."""
    dataset = Made(lambda i: (i, float(i), np.float32(i), np.arange(i), [str(i)], {"a": np.bool_(i % 2)}), 7)
    both(dataset, batch_size=None, collate_fn=collate_fn)


def test_single_samples_travel_in_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A36: one response contains many samples, because one message per sample would be slow."""
    answers = []
    receive = HttpConnection.receive

    def counting(self: HttpConnection, *arguments: Any) -> Any:
        answers.append(1)
        return receive(self, *arguments)

    monkeypatch.setattr(HttpConnection, "receive", counting)
    with ours(Numbers(5000), batch_size=None, num_workers=2) as loader:
        assert list(loader) == [*range(5000)]
    assert len(answers) < 2500


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9])
def test_lengths_and_tails_are_torchs(length: int, drop_last: bool) -> None:
    """A41: the length is rounded up, or down with drop_last; the last batch is smaller."""
    arguments: dict[str, Any] = {"batch_size": 4, "drop_last": drop_last}
    with ours(Numbers(length), **arguments) as loader:
        assert len(loader) == len(torchs(Numbers(length), **arguments)) == len(list(loader))
    both(Numbers(length), **arguments)


@pytest.mark.parametrize("tail", ["pad", "drop", "uneven"])
def test_tails_of_ranks(tail: Any) -> None:
    """A41: each rank has its own tail; together they follow the rule."""
    with serve(Numbers(11)) as url:
        ranks = [
            DataLoader(RemoteDataset(url), 2, rank=rank, world_size=4, tail=tail, seed=0) for rank in range(4)
        ]  # fmt: skip
        sizes = [[len(batch) for batch in loader] for loader in ranks]
        assert [len(loader) for loader in ranks] == [len(each) for each in sizes]
    assert sizes == {
        "pad": [[2, 1]] * 4, "drop": [[2]] * 4, "uneven": [[2, 1], [2, 1], [2, 1], [2]],
    }[tail]  # fmt: skip


def test_samplers_say_how_long_an_epoch_is() -> None:
    """A41: the length is that of the sampler or batch sampler; TypeError if it has none."""

    class Endless:
        def __iter__(self) -> Iterator[int]:
            return iter(range(10**9))

    with serve(Numbers()) as url:
        remote = RemoteDataset(url)
        for arguments in (
            {"sampler": range(7), "batch_size": 3}, {"batch_sampler": [[1], [2]]}, {"sampler": [1], "batch_size": None}
        ):  # fmt: skip
            assert len(DataLoader(remote, **arguments)) == len(torchs(Numbers(), **arguments))
    both_raise(TypeError, lambda make, data: len(make(data, sampler=Endless())), Numbers())


class Unused(Dataset):  # type: ignore[misc]
    """Dataset whose samples are not requested."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        raise AssertionError("nobody asked")


def test_nothing_is_loaded_before_an_iterator_is_made() -> None:
    """A5: constructing a loader starts no worker and loads nothing."""
    with ours(Unused(), num_workers=2) as loader:
        assert len(loader) == 3


# -- samplers that are changed after construction


def _resized(loader: Any) -> None:
    loader.batch_sampler.batch_size = 3


def _dropping(loader: Any) -> None:
    loader.batch_sampler.drop_last = True


def _sampled(loader: Any) -> None:
    loader.batch_sampler.sampler = [5, 3, 1, 0, 2]


def _sourced(loader: Any) -> None:
    loader.sampler.data_source = range(7)


CHANGES = [_resized, _dropping, _sampled, _sourced]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"num_workers": 2}], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_samplers_decide_the_next_epoch(change: Any, options: dict[str, Any]) -> None:
    """A loader has torch's sampler attributes: changing them changes its length and subsequent batches."""

    def epochs(loader: Any) -> list[Any]:
        torch.manual_seed(3)
        found = [[batch.tolist() for batch in loader]]
        change(loader)
        return [*found, len(loader), *([batch.tolist() for batch in loader] for _ in range(2))]

    with few_cpus_are_fine():
        expected = epochs(TorchLoader(list(range(10)), 4, **options))
        assert epochs(DataLoader(list(range(10)), 4, **options)) == expected


def test_a_replaced_sampler_is_drawn_as_far_ahead_as_by_torch() -> None:
    """A user's sampler may depend on the training, so that indices are not drawn early in groups."""

    def drawn_by_each_batch(loader: Any) -> list[int]:
        drawn: list[int] = []

        class Recorded:
            def __iter__(self) -> Iterator[int]:
                for index in range(300):
                    drawn.append(index)
                    yield index

        loader.batch_sampler.sampler = Recorded()
        return [len(drawn) for _ in loader]

    dataset = list(range(300))
    with few_cpus_are_fine():
        expected = drawn_by_each_batch(TorchLoader(dataset, 1, num_workers=2))
        assert drawn_by_each_batch(DataLoader(dataset, 1, num_workers=2)) == expected


@pytest.mark.parametrize("options", [{"seed": 5}, {"shuffle": True, "seed": 5}, {"rank": 1, "world_size": 2}], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_samplers_are_an_error_where_they_cannot_decide(change: Any, options: dict[str, Any]) -> None:
    """With a seed or several ranks, servers compute the order, so that a changed sampler would have no effect."""
    loader = DataLoader(list(range(10)), 4, **options)
    expected = [batch.tolist() for batch in loader]
    assert len(expected) == len(loader)
    change(loader)
    for use in (iter, len, DataLoader.state_dict):
        with pytest.raises(ValueError, match=r"cannot change \w*Sampler\.\w+: .* Create another DataLoader"):
            use(loader)


def test_several_threads_share_an_iterator_to_its_end() -> None:
    """All threads receive the end, and together they have each batch once."""
    batches = iter(DataLoader(list(range(500)), 2, num_workers=2))
    with ThreadPoolExecutor(5) as threads:
        found = list(threads.map(_flat, itertools.repeat(batches, 5)))
    assert sorted(itertools.chain(*found)) == list(range(500))
