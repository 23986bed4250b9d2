"""The contract's rules on ``num_workers=0`` for a local object, which is loaded in the calling thread."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import random
import sqlite3
import sys
import threading
import traceback
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import psutil
import pytest

from teleloader import DataLoader
from teleloader_shared.errors import TeleloaderError
from tests.end_to_end.contract import (
    IterableDataset,
    Made,
    Noisy,
    Numbers,
    TorchLoader,
    assert_same,
    few_cpus_are_fine,
    random_states,
    seed_everything,
    torch,
    torch_is_there,
    workers_alive,
)

__all__ = ["torch_is_there"]

BOTH = pytest.mark.parametrize("loader_of", [TorchLoader, DataLoader], ids=["torch", "teleloader"])
"""Runs a test with torch's loader too, to verify that torch follows the rule."""


class Forward(IterableDataset):  # type: ignore[misc]
    """Dataset that calls a function for each of the numbers [0, length)."""

    def __init__(self, make: Callable[[int], Any], length: int = 4) -> None:
        self.make = make
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(self.length))


def _outcomes(loader: Any) -> list[Any]:
    """Return the result or exception of each next() until the end, at most ten."""
    iterator, found = iter(loader), []
    for _ in range(10):
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except BaseException as error:  # noqa: BLE001 - also SystemExit and KeyboardInterrupt
            found.append((type(error), error.args))
    return found


# -- settings of the calling thread apply to the dataset

_variable: contextvars.ContextVar[str] = contextvars.ContextVar("_variable", default="unset")
_local = threading.local()


def _in_force() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._len_torch_function_stack(),  # a default device
        _variable.get(),
        getattr(_local, "value", None),
        threading.get_ident(),
        torch.utils.data.get_worker_info(),
    )


@BOTH
@pytest.mark.parametrize("style", ["map", "iterable", "collate_fn"])
@pytest.mark.parametrize("mode", ["none", "no_grad", "inference_mode", "autocast", "default device"])
def test_the_state_of_the_calling_thread_is_in_force(loader_of: Any, style: str, mode: str) -> None:
    """no_grad, inference mode, autocast, default device, context variables and thread-locals apply to user code."""
    seen: list[tuple[Any, ...]] = []

    def note(value: Any) -> Any:
        seen.append(_in_force())
        return value

    arguments: dict[str, Any] = {"collate_fn": note} if style == "collate_fn" else {}
    dataset = {"map": Made(note, 2), "iterable": Forward(note, 2), "collate_fn": Numbers(2)}[style]
    context: Any = {
        "none": nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu"), "default device": lambda: torch.device("cpu"),
    }[mode]()  # fmt: skip
    token = _variable.set("set by the loop")
    _local.value = "of the loop's thread"
    try:
        with context:
            expected = _in_force()
            list(loader_of(dataset, **arguments))
    finally:
        _variable.reset(token)
        del _local.value
    assert seen == [expected] * 2


@BOTH
def test_a_connection_of_the_calling_thread_can_be_used(loader_of: Any) -> None:
    """SQLite rejects connections in other threads than the one that opened them."""
    connection = sqlite3.connect(":memory:")
    dataset = Made(lambda i: connection.execute("select ? * 2", (i,)).fetchone()[0], 4)
    assert torch.cat(list(loader_of(dataset, 2))).tolist() == [0, 2, 4, 6]
    connection.close()


@BOTH
def test_a_breakpoint_stops_in_the_calling_thread(loader_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``breakpoint()`` in ``__getitem__`` opens the debugger in the terminal, below the loop's own frames."""
    stacks: list[list[str]] = []

    def hook() -> None:
        stacks.append([frame.name for frame in traceback.extract_stack(sys._getframe(1))])

    monkeypatch.setattr(sys, "breakpointhook", hook)

    def sample(index: int) -> int:
        breakpoint()
        return index

    list(loader_of(Made(sample, 1)))
    (stack,) = stacks
    assert stack[-1] == "sample"
    assert "test_a_breakpoint_stops_in_the_calling_thread" in stack


def test_nothing_is_started() -> None:
    """The default uses no server, process, thread or descriptor, as in torch."""
    process = psutil.Process()
    list(DataLoader(Numbers()))  # imports
    before = threading.active_count(), process.num_fds(), len(workers_alive())
    iterator = iter(DataLoader(Numbers()))
    next(iterator)
    assert (threading.active_count(), process.num_fds(), len(workers_alive())) == before


# -- batches and errors


class Outer:
    """Class with a nested class."""

    Point = namedtuple("Point", ["x", "y"])


class Opaque:
    """Object that cannot be encoded."""


@pytest.mark.parametrize(
    "sample",
    [
        lambda i: Outer.Point(i, np.float32(i)),
        lambda i: "a\udc80b",
        lambda i: {"deep": [(i, {"er": i * 0.5})], "\udcff": b"bytes"},
        lambda i: torch.ones(2, requires_grad=True) * i,
        lambda i: torch.nn.Parameter(torch.ones(2)),
        lambda i: np.zeros((2, 0), ">i4"),
        lambda i: (i, None),
        lambda i: torch.arange(i % 2),
    ],
    ids=["nested namedtuple", "surrogate", "containers", "gradient", "subclass", "big-endian", "None", "ragged"],
)
@pytest.mark.parametrize("batch_size", [2, None])
def test_batches_and_errors_of_collation_are_torchs(sample: Any, batch_size: int | None) -> None:
    """The collate functions are those of torch, without copies: classes, gradients and errors are the same."""
    dataset = Made(sample, 4)
    expected, got = (_outcomes(make(dataset, batch_size)) for make in (TorchLoader, DataLoader))
    assert repr(got) == repr(expected)
    assert [type(batch) for batch in got] == [type(batch) for batch in expected]


@BOTH
def test_a_collate_functions_batch_is_the_very_object(loader_of: Any) -> None:
    """The result of the collate function is returned without encoding."""
    made: list[Any] = []

    def collate(samples: list[Any]) -> Any:
        made.append([Opaque(), {"set": {1, 2}, "function": collate}, torch.eye(2).to_sparse(), samples])
        return made[-1]

    for i, batch in enumerate(loader_of(Made(lambda i: Opaque(), 4), 2, collate_fn=collate)):
        assert batch is made[i]


def test_our_collate_function_in_the_users_gives_tensors() -> None:
    """Columns of `teleloader_server.default_collate` are torch tensors, as from a server."""
    from teleloader_server import default_collate

    def collate(samples: list[Any]) -> Any:
        return {"x": [default_collate(samples)], "n": "a"}

    (batch,) = DataLoader(Made(np.float32, 2), 2, collate_fn=collate)
    assert_same(batch, {"x": [torch.tensor([0.0, 1.0])], "n": "a"})


def test_numpy_arrays_on_request() -> None:
    """With ``output="numpy"``, tensors and columns are NumPy arrays."""
    dataset = Made(lambda i: (i, torch.ones(2) * i, "text"), 2)
    ((numbers, tensors, texts),) = DataLoader(dataset, 2, output="numpy")
    assert type(numbers) is type(tensors) is np.ndarray
    assert numbers.tolist() == [0, 1]
    assert tensors.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert list(texts) == ["text", "text"]


def test_indices_reach_the_dataset_as_the_sampler_gave_them() -> None:
    """Tensors and NumPy integers reach the dataset unchanged, as in torch."""
    for sampler in (torch.tensor([2, 1]), np.array([2, 1]), [(1, 2)], [slice(1, 2)]):
        expected, got = (list(make(Made(repr), None, sampler=sampler)) for make in (TorchLoader, DataLoader))
        assert got == expected


@pytest.mark.parametrize("num_workers", [True, np.int64(1), False, np.int64(0)], ids=repr)
def test_a_number_of_workers_of_any_integer_type(num_workers: Any) -> None:
    """num_workers may have any type that torch accepts."""
    for dataset in (Numbers(4), Forward(int)):
        loader = DataLoader(dataset, 2, num_workers=num_workers)
        assert torch.cat(list(loader)).tolist() == [0, 1, 2, 3]
        assert loader.num_workers is num_workers


def test_the_number_of_workers_can_be_changed() -> None:
    """The new number applies from the next ``iter()``, as in torch; functions of the constructor stay in use."""

    def sample(_: int) -> int:
        return os.getpid()

    loader = DataLoader(Made(sample, 2), 2, collate_fn=set)
    found = []
    for num_workers in (0, 1, 0):
        loader.num_workers = num_workers
        (pids,) = loader
        found.append(pids == {os.getpid()})
    assert found == [True, False, True]


# -- errors


class LocalError(Exception):
    """Exception whose constructor takes no message."""

    def __init__(self, code: int, hint: str) -> None:
        super().__init__(code, hint)
        self.code = code


@BOTH
@pytest.mark.parametrize("style", ["map", "iterable", "collate_fn"])
@pytest.mark.parametrize(
    "error", [ValueError("damaged"), KeyError("k"), LocalError(7, "a"), SystemExit(3), KeyboardInterrupt()], ids=repr
)
def test_an_exception_is_the_very_object_with_its_traceback(loader_of: Any, style: str, error: BaseException) -> None:
    """The exception is neither wrapped nor copied, so that it keeps type, attributes and frames."""

    def user_code(_: Any) -> Any:
        raise error

    arguments: dict[str, Any] = {"collate_fn": user_code} if style == "collate_fn" else {}
    dataset = {"map": Made(user_code), "iterable": Forward(user_code), "collate_fn": Numbers()}[style]
    with pytest.raises(type(error)) as raised:
        next(iter(loader_of(dataset, **arguments)))
    assert raised.value is error
    assert traceback.extract_tb(error.__traceback__)[-1].name == "user_code"
    error.__traceback__ = None


@pytest.mark.parametrize("style", ["map", "generator", "iterator", "collate_fn"])
def test_the_iterator_survives_an_exception_as_torchs_does(style: str) -> None:
    """Map-style datasets and iterators of classes continue after an exception; generators end."""

    def user_code(value: Any) -> Any:
        if 2 in (value if isinstance(value, list) else [value]):
            raise LocalError(7, "a")
        return value

    class Generator(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            for i in range(5):
                yield user_code(i)

    arguments: dict[str, Any] = {"collate_fn": user_code} if style == "collate_fn" else {}
    dataset = {"map": Made(user_code, 5), "generator": Generator(), "iterator": Forward(user_code, 5)}.get(
        style, Numbers(5)
    )
    for batch_size in (1, 2):
        expected, got = (_outcomes(make(dataset, batch_size, **arguments)) for make in (TorchLoader, DataLoader))
        assert repr(got) == repr(expected)
        assert (LocalError, (7, "a")) in got


@pytest.mark.parametrize("style", ["map", "collate_fn"])
def test_stop_iteration_does_not_end_the_epoch(style: str) -> None:
    """The rest of the epoch follows, whereas torch loses it silently."""

    def user_code(value: Any) -> Any:
        raise StopIteration

    arguments: dict[str, Any] = {"collate_fn": user_code} if style == "collate_fn" else {}
    outcomes = _outcomes(DataLoader(Made(user_code, 2) if style == "map" else Numbers(2), **arguments))
    assert [kind for kind, _ in outcomes] == [RuntimeError] * 2
    assert "raised StopIteration" in outcomes[0][1][0]


def test_an_interrupted_batch_is_loaded_anew() -> None:
    """After Ctrl-C during a batch, the state has this batch as the next one, and the next call loads it."""
    presses = iter([False, False, True, False, False, False])

    def sample(index: int) -> int:
        if next(presses):
            raise KeyboardInterrupt
        return index

    loader = DataLoader(Made(sample, 4), 2)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert loader.state_dict()["samples"] == 2
    assert next(iterator).tolist() == [2, 3]


def test_an_interrupted_stream_says_so() -> None:
    """Samples of an iterable-style dataset that an interruption lost cause an error."""
    presses = iter([False, False, True])

    def sample(index: int) -> int:
        if next(presses, False):
            raise KeyboardInterrupt
        return index

    loader = DataLoader(Forward(sample), 2)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    for _ in range(2):
        with pytest.raises(TeleloaderError, match=r"KeyboardInterrupt interrupted the iterable-style .* in batch 1"):
            next(iterator)
    loader.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in loader] == [[2, 3]]


# -- random numbers


def _drawn(index: int) -> tuple[int, float, float, Any]:
    return index, random.random(), float(np.random.rand()), torch.rand(2)


@pytest.mark.parametrize("arguments", [{}, {"shuffle": True}, {"sampler": [3, 1, 2]}], ids=str)
def test_a_loop_and_its_dataset_draw_from_the_same_generators(arguments: dict[str, Any]) -> None:
    """Random numbers of the loop and of the dataset, and the final states, equal those with torch."""

    def loop(loader: Any) -> list[Any]:
        found = []
        for _ in range(2):
            for batch in loader:
                found += [batch, torch.rand(1), random.random(), np.random.rand()]
        return [found, random_states()]

    results = []
    for make in (TorchLoader, DataLoader):
        seed_everything()
        results.append(loop(make(Made(_drawn, 5), 2, **arguments)))
    assert_same(results[1], results[0])


def test_a_stream_draws_from_the_generators_of_the_process() -> None:
    """An iterable-style dataset also uses the process's generators."""
    results = []
    for make in (TorchLoader, DataLoader):
        seed_everything()
        loader = make(Noisy(5), 2)
        results.append([[(batch, torch.rand(1)) for _ in range(2) for batch in loader], random_states()])
    assert_same(results[1], results[0])


@pytest.mark.parametrize("iterable", [False, True])
def test_a_seed_decides_all_random_numbers_and_leaves_those_of_the_loop(iterable: bool) -> None:
    """Batches do not depend on the number of workers, and the loop's random numbers not on the loader."""
    results: list[Any] = []
    for num_workers in (0, 0, 1):
        dataset: Any = Forward(_drawn) if iterable else Made(_drawn, 4)
        loader = DataLoader(dataset, 2, not iterable, seed=5, num_workers=num_workers)
        seed_everything(len(results))
        before = torch.rand(3).tolist()
        seed_everything(len(results))
        drawn, found = [], []
        for batch in loader:
            found.append(batch)
            drawn += torch.rand(1).tolist()
        found += list(loader)
        assert drawn == before[: len(drawn)]
        results.append(found)
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


# -- iterators


@BOTH
def test_a_generator_is_closed_when_the_loop_is_left(loader_of: Any) -> None:
    """The generator's ``finally`` block runs when the iterator is dropped."""
    ended = []

    class Stream(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(10)
            finally:
                ended.append(threading.get_ident())

    iterator = iter(loader_of(Stream(), 2))
    next(iterator)
    assert ended == []
    del iterator
    assert ended == [threading.get_ident()]


@BOTH
@pytest.mark.parametrize("iterable", [False, True])
def test_several_iterators_at_once(loader_of: Any, iterable: bool) -> None:
    """Each iterator has its own epoch, whatever other iterators do."""
    loader = loader_of(Forward(int, 6) if iterable else Numbers(6), 2)
    one, other = iter(loader), iter(loader)
    found = [next(one).tolist(), next(other).tolist(), next(other).tolist(), next(one).tolist()]
    assert found == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in one] == [[4, 5]]


@BOTH
def test_indices_are_drawn_and_samples_loaded_only_on_request(loader_of: Any) -> None:
    """Nothing is prefetched, so that a sampler can use all results of the training."""
    happened: list[str] = []

    def sampler() -> Iterator[int]:
        for i in range(3):
            happened.append(f"draw {i}")
            yield i

    class Sampler:
        def __iter__(self) -> Iterator[int]:
            return sampler()

    def sample(i: int) -> int:
        happened.append(f"load {i}")
        return i

    for i, _ in enumerate(loader_of(Made(sample, 3), sampler=Sampler())):
        happened.append(f"train {i}")
    assert happened == [f"{what} {i}" for i in range(3) for what in ("draw", "load", "train")]


@BOTH
def test_an_iterator_can_be_used_in_a_fork(loader_of: Any) -> None:
    """The iterator has no threads or connections, which a fork would lack."""
    iterator = iter(loader_of(Numbers(4), 2))
    next(iterator)
    with few_cpus_are_fine():
        pid = os.fork()
    if pid == 0:
        code = 1
        with suppress(BaseException):
            code = 0 if [batch.tolist() for batch in iterator] == [[2, 3]] else 2
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert next(iterator).tolist() == [2, 3]


async def test_async_iteration_leaves_the_event_loop_free() -> None:
    """Another thread loads samples; a task that is cancelled meanwhile loses no batch."""
    gate, entered = threading.Event(), threading.Event()
    threads = set()

    def sample(index: int) -> int:
        threads.add(threading.get_ident())
        entered.set()
        assert gate.wait(60)
        return index

    batches = aiter(DataLoader(Made(sample, 4), 2))
    waiting = asyncio.ensure_future(anext(batches))
    while not entered.is_set():
        await asyncio.sleep(0.001)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    assert [batch.tolist() async for batch in batches] == [[0, 1], [2, 3]]
    assert threading.get_ident() not in threads


async def test_async_iteration_raises_what_the_dataset_raises() -> None:
    """The same exception object is raised in place of its batch."""
    error = LocalError(7, "a")

    def sample(index: int) -> int:
        if index == 1:
            raise error
        return index

    batches = aiter(DataLoader(Made(sample, 3)))
    assert (await anext(batches)).tolist() == [0]
    with pytest.raises(LocalError) as raised:
        await anext(batches)
    assert raised.value is error
    assert [batch.tolist() async for batch in batches] == [[2]]


def test_loading_is_data_wait() -> None:
    """stats() counts time in the dataset as data wait, and each batch as a step."""
    clock = threading.Event()
    loader = DataLoader(Made(lambda i: int(clock.wait(0.01)), 4), 2)
    list(loader)
    stats = loader.stats()
    assert (stats.steps, stats.batches, stats.epoch) == (2, 2, 0)
    assert 0.04 <= stats.waited <= stats.elapsed


def test_a_transform_is_called_in_the_calling_thread() -> None:
    """`device_transform` receives each batch, and its errors take the batch's place."""

    def transform(batch: Any) -> Any:
        assert batch.tolist() != [2, 3]
        return batch.float() + 1

    outcomes = _outcomes(DataLoader(Numbers(6), 2, device_transform=transform))
    assert outcomes[0].tolist() == [1.0, 2.0]
    assert outcomes[1][0] is AssertionError
    assert outcomes[2].tolist() == [5.0, 6.0]


# -- states


class Counting(IterableDataset):  # type: ignore[misc]
    """Dataset that continues from its saved state."""

    def __init__(self) -> None:
        self.next = 0
        self.begun_at: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        self.begun_at.append(self.next)
        while self.next < 9:
            self.next += 1
            yield self.next, torch.rand(1)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


RESUMED: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "in sequence": lambda: (Made(_drawn, 9), {}),
    "shuffled": lambda: (Made(_drawn, 9), {"shuffle": True}),
    "a generator": lambda: (Made(_drawn, 9), {"shuffle": True, "generator": torch.Generator().manual_seed(3)}),
    "seeded": lambda: (Made(_drawn, 9), {"shuffle": True, "seed": 3}),
    "a stream": lambda: (Forward(int, 9), {}),
    "a stateful stream": lambda: (Counting(), {}),
    "a seeded stream": lambda: (Forward(_drawn, 9), {"seed": 3}),
}


@pytest.mark.parametrize("taken", range(6))
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_one(name: str, taken: int) -> None:
    """The rest of the epoch and the next one are equal after a resume from any batch."""

    def loader() -> Any:
        dataset, arguments = RESUMED[name]()
        return DataLoader(dataset, 2, **arguments)

    def run(loader: Any, start: int) -> list[Any]:
        iterator = iter(loader)
        found = [next(iterator) for _ in range(start)]
        states.append(loader.state_dict())
        return found + list(iterator) + list(loader)

    states: list[Any] = []
    seed_everything()
    expected = run(loader(), taken)
    resumed = loader()
    seed_everything(1)
    resumed.load_state_dict(states[0])
    rest = expected[taken:]
    # with a seed, the loader knows that this was the last batch: the run continues with the next epoch
    assert_same((list(resumed) + list(resumed))[: len(rest)], rest)
    if name == "a stateful stream" and 0 < taken < 5:
        assert resumed.dataset.begun_at == [taken * 2, 0]


# -- memory


@pytest.mark.parametrize("iterable", [False, True])
def test_an_exception_keeps_no_dataset_in_memory(iterable: bool) -> None:
    """After the exception is handled and the loader dropped, the dataset is freed without garbage collection."""

    def sample(index: int) -> int:
        raise ValueError("damaged")

    dataset: Any = Forward(sample) if iterable else Made(sample)
    released = weakref.ref(dataset)
    loader = DataLoader(dataset)
    gc.collect()
    gc.disable()
    try:
        with suppress(ValueError):
            next(iter(loader))
        del dataset, loader
        assert released() is None
    finally:
        gc.enable()
