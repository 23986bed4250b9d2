"""A run that resumes from a state equals the uninterrupted run: the rest of its epoch, and all later epochs."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset, StateMismatch
from teleloader_server import serve
from tests.end_to_end.contract import (
    IterableDataset,
    Made,
    Noisy,
    Numbers,
    assert_same,
    few_cpus_are_fine,
    get_worker_info,
    seed_everything,
    torch,
    torch_is_there,
    torchs,
)
from tests.end_to_end.test_parity import ORDERS, Shuffling

__all__ = ["torch_is_there"]

EPOCHS = 3
OTHER_SEED = 77

AUGMENTED = Made(lambda i: (i, random.random(), torch.rand(())))


def _numbers(name: str, **more: Any) -> tuple[Any, Callable[[], dict[str, Any]]]:
    return Numbers(), lambda: {**ORDERS[name](), **more}


CASES: dict[str, tuple[Any, Callable[[], dict[str, Any]]]] = {
    **{f"shuffled, {n} workers": _numbers("shuffled", batch_size=4, num_workers=n) for n in range(4)},
    "shuffled, seeded": _numbers("shuffled", seed=5),
    "shuffled by a generator, 0 workers": _numbers("shuffled by a generator"),
    "shuffled by a generator, 2 workers": _numbers("shuffled by a generator", num_workers=2),
    "RandomSampler without a generator": _numbers("RandomSampler"),
    "RandomSampler with a generator of its own": _numbers("RandomSampler with a generator of its own"),
    "a sampler that draws in mid-epoch, 0 workers": _numbers("a sampler of one's own that draws"),
    "a sampler that draws in mid-epoch, 2 workers": _numbers("a sampler of one's own that draws", num_workers=2),
    "a sampler that draws, NumPy": (
        Numbers(), lambda: {"batch_size": 4, "sampler": Shuffling(10), "output": "numpy"}
    ),
    "persistent workers": _numbers("shuffled", num_workers=2, persistent_workers=True),
    "random augmentation": (AUGMENTED, lambda: {"batch_size": 4, "num_workers": 2}),
}  # fmt: skip


class Counter(IterableDataset):  # type: ignore[misc]
    """Shards of numbers and random numbers; the dataset counts samples and iterations."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.place = 0
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number = 0 if info is None else info.id
        while self.place < self.sizes[number]:
            self.place += 1
            yield number, self.place, self.passes, random.random(), np.random.normal(), torch.rand(2)
        self.place = 0
        self.passes += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the number of iterations."""
        return {"place": self.place, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state's position."""
        self.place, self.passes = state["place"], state["passes"]


class OneTime(Counter):
    """Dataset that is its own iterator, and can be iterated once."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        info = get_worker_info()
        number = 0 if info is None else info.id
        if self.place >= self.sizes[number]:
            self.passes += 1
            raise StopIteration
        self.place += 1
        return number, self.place, self.passes, random.random()


class Buffered(IterableDataset):  # type: ignore[misc]
    """Dataset whose iterators have a state: an order drawn at the start of the iteration, and a position."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return _BufferedIterator(self.length)


class _BufferedIterator:
    def __init__(self, length: int) -> None:
        self.order = random.sample(range(length), length)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.order:
            raise StopIteration
        return self.order.pop(), random.random()

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = state["order"]


STREAMS: dict[str, Any] = {
    "iterable-style": Noisy(3, 2, 1),
    "Stateful": Counter(3, 2, 1),
    "own iterator": OneTime(3, 2, 1),
    "Stateful iterator": Buffered(3),
}
CASES.update(
    {
        f"{name}, {n} workers{', persistent' * persistent}": (
            dataset, lambda n=n, persistent=persistent: {  # type: ignore[misc]
                "batch_size": 2, "num_workers": n, "persistent_workers": persistent
            }
        )
        for name, dataset in STREAMS.items() for n in range(4) for persistent in {False, n == 2}
    }
)  # fmt: skip


class DrawsFrom:
    """User-defined sampler with its own generator in an attribute of any name."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Iterator[int]:
        for _ in range(10):
            if hasattr(self._source, "randrange"):
                yield self._source.randrange(10)
            else:
                yield int(self._source.uniform(0, 10))


SOURCES: dict[str, Callable[[], Any]] = {
    "random.Random": lambda: random.Random(3),
    "default_rng": lambda: np.random.default_rng(3),
    "Generator(MT19937)": lambda: np.random.Generator(np.random.MT19937(3)),
    "Generator(SFC64)": lambda: np.random.Generator(np.random.SFC64(3)),
    "RandomState": lambda: np.random.RandomState(3),
}
CASES.update(
    {
        f"a sampler that draws from its own {name}": (
            Numbers(), lambda source=source: {"batch_size": 4, "sampler": DrawsFrom(source())}  # type: ignore[misc]
        )
        for name, source in SOURCES.items()
    }
)  # fmt: skip


class Hidden:
    """Sampler with a hidden generator, which cannot be repeated without a seed but has a state with its order."""

    def __init__(self, seed: int | None = None) -> None:
        source = random.Random(os.urandom(8) if seed is None else seed)
        self._draw: Callable[[], int] = lambda: source.randrange(10)  # no attribute is a generator
        self._state, self._set_state = source.getstate, source.setstate
        self.left = 10

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        while self.left:
            self.left -= 1
            yield self._draw()
        self.left = 10

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state, a tuple, and the number of remaining indices."""
        return {"source": self._state(), "left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state's position."""
        self._set_state(state["source"])
        self.left = state["left"]


class Lists(Hidden):
    """Batch sampler like `Hidden`."""

    def __iter__(self) -> Iterator[Any]:
        for index in super().__iter__():
            yield [index] * 2


class Counted:
    """Sampler that counts its indices, like torchdata's StatefulDistributedSampler."""

    def __init__(self) -> None:
        self.yielded = 0
        self.next_yielded: int | None = None

    def __iter__(self) -> Iterator[int]:
        self.yielded = 0
        if self.next_yielded is not None:
            self.yielded, self.next_yielded = self.next_yielded, None
        for index in range(self.yielded, 10):
            self.yielded += 1
            yield index

    def state_dict(self) -> dict[str, int]:
        """Return the number of indices that the current or last iteration has yielded."""
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Skip as many indices in the next iteration."""
        self.next_yielded = state["yielded"]


class KeepsIterators:
    """Sampler whose iterators have the state."""

    def __init__(self) -> None:
        self._source = Hidden(3)

    def __iter__(self) -> Iterator[int]:
        return _HiddenIterator(self._source)


class _HiddenIterator:
    def __init__(self, source: Hidden) -> None:
        self._source = source
        self._iterator = iter(source)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state)


STATEFUL_SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "sampler": lambda: {"batch_size": 4, "sampler": Hidden()},
    "sampler, 2 workers": lambda: {"batch_size": 4, "sampler": Hidden(), "num_workers": 2},
    "sampler, last batch dropped": lambda: {"batch_size": 4, "sampler": Hidden(), "drop_last": True},
    "sampler, single samples": lambda: {"batch_size": None, "sampler": Hidden()},
    "sampler, NumPy": lambda: {"batch_size": 4, "sampler": Hidden(), "output": "numpy"},
    "sampler that counts": lambda: {"batch_size": 4, "sampler": Counted()},
    "sampler that counts, 2 workers": lambda: {"batch_size": 3, "sampler": Counted(), "num_workers": 2},
    "iterator of a sampler": lambda: {"batch_size": 4, "sampler": KeepsIterators(), "num_workers": 1},
    "batch sampler": lambda: {"batch_sampler": Lists()},
    "sampler, one batch": lambda: {"batch_size": 16, "sampler": Counted()},
}
CASES.update({f"Stateful {name}": (Numbers(), fresh) for name, fresh in STATEFUL_SAMPLERS.items()})


def _run(loader: DataLoader, epochs: range, states: list[tuple[int, str]]) -> list[Any]:
    """Train, with random numbers in the training step, too.

    Returns:
        All batches. `states` receives the loader's state at each position, after the number of batches before it.
    """
    batches: list[Any] = []

    def save() -> None:
        states.append((len(batches), json.dumps(loader.state_dict())))

    for _ in epochs:
        save()
        iterator = iter(loader)
        save()
        for batch in iterator:
            batches.append(batch)
            torch.rand(3)
            save()
    return batches


def assert_resumes(dataset: Any, fresh: Callable[[], dict[str, Any]], epochs: int = EPOCHS) -> None:
    """Assert that a loader resumes from the states of all positions but those within the last epoch.

    The positions are: before `iter()`, between `iter()` and the first batch, after each batch, and after StopIteration.
    """
    with few_cpus_are_fine(), serve(dataset, num_workers=2) as url:
        remote = RemoteDataset(url)
        seed_everything()
        states: list[tuple[int, str]] = []
        whole = _run(DataLoader(remote, **fresh()), range(epochs), states)
        for taken, saved in dict.fromkeys(states):
            state = json.loads(saved)
            if state["epoch"] == epochs - 1 and (state.get("batch") or state.get("samples")):
                break
            seed_everything(OTHER_SEED)
            loader = DataLoader(remote, **fresh())
            loader.load_state_dict(state)
            rest = _run(loader, range(state["epoch"], epochs), [])
            assert_same(rest, whole[taken:], f"epoch {state['epoch']}, {taken} batches before: batches")


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_the_uninterrupted_run(name: str) -> None:
    """From a state of any position, a loader whose process is seeded otherwise yields all remaining batches."""
    dataset, fresh = CASES[name]
    # without random numbers per epoch and persistent workers, all later epochs are equal
    epochs = 2 if dataset in STREAMS.values() and not fresh()["persistent_workers"] else EPOCHS
    assert_resumes(dataset, fresh, epochs)


@pytest.mark.parametrize("name", ["iterable-style", "Stateful iterator"])
def test_a_process_that_loads_by_itself_continues_with_its_random_numbers(name: str) -> None:
    """Iterating to the saved position does not use the training loop's generators."""
    seed_everything()
    states: list[tuple[int, str]] = []
    whole = _run(DataLoader(STREAMS[name], batch_size=2), range(2), states)
    for taken, saved in states[2:6]:
        seed_everything(OTHER_SEED)
        loader = DataLoader(STREAMS[name], batch_size=2)
        loader.load_state_dict(json.loads(saved))
        rest = _run(loader, range(json.loads(saved)["epoch"], 2), [])
        assert_same(rest, whole[taken:], f"{taken} batches before: batches")


@pytest.mark.parametrize("make", [Counter, OneTime])
@pytest.mark.parametrize("is_left", [False, True], ids=["", "after an epoch that was left"])
def test_a_process_that_loads_by_itself_resumes_on_the_same_object(make: type[Counter], is_left: bool) -> None:
    """This holds for a state of any position, even before the first batch, after further iterations."""
    dataset = make(5)
    loader = DataLoader(dataset, batch_size=2)
    if is_left:
        next(iter(loader))
    seed_everything()
    states: list[tuple[int, str]] = []
    whole = _run(loader, range(2), states)
    for taken, saved in states[is_left:]:  # the first one continues the epoch that was left
        state = json.loads(saved)
        seed_everything(OTHER_SEED)
        resumed = DataLoader(dataset, batch_size=2)
        resumed.load_state_dict(state)
        rest = _run(resumed, range(state["epoch"], 2 + is_left), [])
        assert_same(rest, whole[taken:], f"epoch {state['epoch']}, {taken} batches before: batches")


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("make", [Counter, OneTime])
@pytest.mark.parametrize("first_epoch", [0, 1, 4], ids="{} batches of the first epoch".format)
def test_persistent_workers_resume_after_an_epoch_that_was_left(
    first_epoch: int, make: type[Counter], num_workers: int
) -> None:
    """From any position, even before the first batch, each shard continues at its worker's position."""
    arguments: dict[str, Any] = {"batch_size": 2, "num_workers": num_workers, "persistent_workers": True}
    with few_cpus_are_fine(), serve(make(40, 41, 42), num_workers=3) as url:
        remote = RemoteDataset(url)
        loader = DataLoader(remote, **arguments)
        iterator = iter(loader)
        for _ in range(first_epoch):
            next(iterator)
        loader.set_epoch(1)
        seed_everything()
        iterator = iter(loader)
        states, whole = [json.dumps(loader.state_dict())], []
        for batch in iterator:
            whole.append(batch)
            states.append(json.dumps(loader.state_dict()))
        for taken, saved in enumerate(states[: 2 * num_workers]):
            resumed = DataLoader(remote, **arguments)
            resumed.load_state_dict(json.loads(saved))
            assert_same(list(resumed), whole[taken:], f"{taken} batches before: batches")


def test_a_state_waits_for_the_first_batches_although_they_exceed_the_memory_limit() -> None:
    """The limit pauses requests, but the loop waits for the state and would consume no batch."""
    size = 100_000
    dataset = Emitting(size)
    with few_cpus_are_fine(), serve(dataset, num_workers=6) as url:
        loader = DataLoader(
            RemoteDataset(url), 1, num_workers=6, persistent_workers=True, max_batch_bytes=size + 5000, output="numpy"
        )
        next(iter(loader))
        batches = iter(loader)
        states = loader.state_dict()["shard_states"]
        assert all(state is not None for state in states)
        assert next(batches).nbytes == size


class Emitting:
    """Infinite dataset of arrays, whose number is the state."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.number = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.number += 1
        return np.zeros(self.size, np.uint8)

    def state_dict(self) -> dict[str, Any]:
        """Return the number."""
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state's number."""
        self.number = state["number"]


@pytest.mark.parametrize("arguments", [{}, {"seed": 5}, {"shuffle": True}], ids=str)
def test_iterators_have_the_length_of_their_epoch(arguments: dict[str, Any]) -> None:
    """``len(iter(loader))`` is the number of batches of the whole epoch at any position, as with torch."""
    theirs = iter(torchs(Numbers(), batch_size=3, shuffle=arguments.get("shuffle")))
    with serve(Numbers()) as url:
        iterator = iter(DataLoader(RemoteDataset(url), batch_size=3, **arguments))
        for position in range(5):
            assert len(iterator) == len(theirs) == 4, position  # type: ignore[arg-type]
            next(iterator, None), next(theirs, None)


def test_iterators_of_iterable_style_datasets_have_no_length() -> None:
    """len() raises TypeError, as in torch."""
    with pytest.raises(TypeError):
        len(iter(torchs(Noisy(3), batch_size=1)))
    with serve(Noisy(3)) as url, pytest.raises(TypeError, match=r"use len\(loader\)"):
        len(iter(DataLoader(RemoteDataset(url), batch_size=1)))  # type: ignore[arg-type]


class Unkeepable:
    """Iterable-style dataset whose state contains an unsupported value."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def state_dict(self) -> dict[str, Any]:
        """Return a state with an object of a class that only this process knows."""
        return {"position": {"cursor": object()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: no state arrives here."""


def test_a_state_that_cannot_be_kept_is_an_error_when_it_is_saved() -> None:
    """The batches arrive; state_dict() raises and names the value, before anybody relies on the checkpoint."""
    with serve(Unkeepable(), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 2, num_workers=1)
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1]
        with pytest.raises(StateMismatch, match=r"(?s)cannot save the state of .*\['cursor'\]"):
            loader.state_dict()
        assert [batch.tolist() for batch in batches] == [[2, 3], [4, 5], [6, 7]]
