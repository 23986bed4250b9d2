"""Generators that a dataset and its transforms hold are seeded for each batch, like the global ones."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader
from teleloader_server.loading.generators import MAX_DEPTH, MAX_ITEMS, MAX_OBJECTS, find, kind_of
from teleloader_shared.orders.seeding import derive_seed
from tests.conftest import need
from tests.server.bench import Bench, Seeding


class Holder:
    """Object with attributes."""

    draw: Any

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    """Object without a dictionary; one slot is empty."""

    __slots__ = ("empty", "rng")

    def __init__(self, rng: Any) -> None:
        self.rng = rng


class Drawing(Holder):
    """Dataset of 12 samples that `draw` draws."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return float(self.draw())


def torchs() -> Any:
    """Return a generator of torch, or skip the test."""
    need("torch")
    import torch

    return torch.Generator()


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "default": (np.random.default_rng, lambda rng: rng.random()),
    "dxsm": (lambda: np.random.Generator(np.random.PCG64DXSM()), lambda rng: rng.random()),
    "philox": (lambda: np.random.Generator(np.random.Philox()), lambda rng: rng.random()),
    "sfc": (lambda: np.random.Generator(np.random.SFC64()), lambda rng: rng.random()),
    "mersenne": (lambda: np.random.Generator(np.random.MT19937()), lambda rng: rng.random()),
    "legacy": (np.random.RandomState, lambda rng: rng.normal()),
    "python": (random.Random, lambda rng: rng.gauss(0, 1)),
    "torch": (torchs, lambda rng: __import__("torch").rand(1, generator=rng).item()),
}
PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "the dataset": lambda rng: {"rng": rng},
    "a transform": lambda rng: {"transform": Holder(rng=rng)},
    "a list": lambda rng: {"transform": Holder(transforms=[int, Holder(rng=rng)])},
    "a tuple": lambda rng: {"transforms": (Holder(rng=rng),)},
    "a dictionary": lambda rng: {"transforms": {"train": OrderedDict(flip=Holder(rng=rng))}},
    "slots": lambda rng: {"transform": Slotted(rng)},
    "a wrapped dataset": lambda rng: {"dataset": Holder(dataset=Holder(transforms=[Holder(ops=[Holder(rng=rng)])]))},
}


def batches(dataset: Any, numbers: list[int], seeding: Seeding = "batch", **spec: Any) -> dict[int, list[float]]:
    """Return the samples of batches, computed in this order by one worker."""
    bench = Bench(dataset, seeding=seeding)
    return {number: bench.batch(number, batch_size=4, **spec).tolist() for number in numbers}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeding", ["batch", "sample"])
def test_each_kind_of_generator(kind: str, seeding: Seeding) -> None:
    """A batch is a function of its ID: not of the generator's state, the worker and earlier batches."""
    make, draw = KINDS[kind]

    def dataset() -> Drawing:
        rng = make()
        return Drawing(rng=rng, draw=lambda: draw(rng))

    first = batches(dataset(), [0, 1, 2], seeding)
    assert batches(dataset(), [2, 0, 1], seeding) == first
    assert len({value for values in first.values() for value in values}) == 12
    assert batches(dataset(), [0], seeding, seed=1)[0] != first[0]
    if seeding == "sample":
        shuffled = batches(dataset(), [0, 1, 2], seeding, shuffle=True)
        assert shuffled != first
        assert sorted(chain(*shuffled.values())) == sorted(chain(*first.values()))


@pytest.mark.parametrize("place", PLACES)
def test_each_place_of_a_generator(place: str) -> None:
    """Attributes and items are searched, down to the transforms of wrapped datasets."""

    def dataset() -> Drawing:
        rng = np.random.default_rng()
        return Drawing(**PLACES[place](rng), draw=rng.random)

    assert batches(dataset(), [0, 1]) == batches(dataset(), [1, 0])


def test_a_generator_of_the_class() -> None:
    """A generator that all instances share is seeded (MONAI's transforms have one)."""

    class Shared(Drawing):
        rng = np.random.RandomState()

        def draw(self) -> float:
            return float(self.rng.random())

    assert batches(Shared(), [0, 1]) == batches(Shared(), [1, 0])


def test_each_generator_has_its_own_numbers() -> None:
    """Two transforms do not draw the same numbers; a generator that two of them share is seeded once."""
    shared = np.random.default_rng()
    both = [np.random.default_rng(), np.random.default_rng()]
    dataset = Drawing(a=Holder(rng=both[0]), b=Holder(rng=both[1]), c=Holder(rng=shared), d=Holder(rng=shared))
    assert [found.path for found in find(dataset)] == [".a.rng", ".b.rng", ".c.rng"]
    dataset.draw = lambda: both[0].random() - both[1].random()
    assert 0 not in batches(dataset, [0])[0]


def test_numbers_do_not_depend_on_other_attributes() -> None:
    """A worker that has filled a cache draws the same numbers as a new one."""
    rng = np.random.default_rng()
    cache: dict[str, Any] = {}
    dataset = Drawing(cache=cache, rng=rng, draw=rng.random)
    first = batches(dataset, [0])
    cache["a"] = Holder(rng=random.Random())
    assert batches(dataset, [0]) == first


def test_the_global_generators_are_seeded_only_once() -> None:
    """A dataset that refers to the global generators draws the same numbers as one that does not."""
    same = batches(Drawing(draw=random.random), [0]), batches(Drawing(draw=np.random.random), [0])
    held = Holder(a=random.random.__self__, b=np.random.mtrand._rand)  # type: ignore[attr-defined]
    assert find(held) == []
    assert batches(Drawing(held=held, draw=random.random), [0]) == same[0]
    assert batches(Drawing(held=held, draw=np.random.random), [0]) == same[1]


def test_a_generator_that_set_epoch_creates() -> None:
    """The dataset is searched again after each call of `set_epoch`."""

    class Epochs(Drawing):
        def set_epoch(self, epoch: int) -> None:
            self.rng = np.random.default_rng()

        def draw(self) -> float:
            return self.rng.random()

    def batch(epoch: int) -> list[float]:
        bench = Bench(Epochs())
        bench.batch(0, epoch=5)
        found: list[float] = bench.batch(2, epoch=epoch, batch_size=4).tolist()
        return found

    assert batch(0) == batch(0) != batch(1) == batch(1)


# --- __seed__ -----------------------------------------------------------------------------------------------------


class Seeded(Drawing):
    """Dataset that seeds itself."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.rng = random.Random(5)

    def __seed__(self, seed: int) -> None:
        self.seeds.append(seed)

    def draw(self) -> float:
        """Draw from a generator that is not seeded."""
        return self.rng.random()


def test_a_dataset_that_seeds_itself() -> None:
    """`__seed__` is called with the seed of the batch, or of the sample, and nothing else is seeded."""
    dataset = Seeded()
    values = batches(dataset, [0, 1], seed=3)
    assert dataset.seeds == [derive_seed("batch", 3, 0, 0, batch) for batch in (0, 1)]
    expected = random.Random(5)
    assert values[0] + values[1] == [expected.random() for _ in range(8)]
    dataset = Seeded()
    batches(dataset, [1], "sample", seed=3)
    assert dataset.seeds == [derive_seed("sample", 3, 0, index) for index in range(4, 8)]


def test_transforms_that_seed_themselves() -> None:
    """Each gets its own seed, a function of the batch."""
    transforms = [Seeded(), Seeded()]
    bench = Bench(Drawing(transforms=transforms, draw=int))
    for batch in (0, 1, 0):
        bench.batch(batch, batch_size=4)
    one, other = (transform.seeds for transform in transforms)
    assert one[0] == one[2] != one[1]
    assert not set(one) & set(other)
    assert all(0 <= seed < 2**63 for seed in one + other)


def test_an_exception_in_seed_fails_the_batch() -> None:
    """The client gets the exception, as from `__getitem__`."""

    class Fails(Seeded):
        def __seed__(self, seed: int) -> None:
            raise ValueError("no such seed")

    failure = Bench(Fails()).failure()
    assert (failure.type, failure.message) == ("ValueError", "no such seed")


# --- Limits of the search -----------------------------------------------------------------------------------------


def test_data_are_not_searched() -> None:
    """Long containers, deep attributes and what comes after the maximum number of objects are not searched."""
    rng = np.random.default_rng()
    assert find(Holder(data=[rng] * (MAX_ITEMS + 1))) == []
    assert find(Holder(data={str(i): rng for i in range(MAX_ITEMS + 1)})) == []
    deep: Any = rng
    for _ in range(MAX_DEPTH):
        deep = Holder(a=deep)
    assert len(find(deep)) == 1
    assert find(Holder(a=deep)) == []
    many = [[Holder() for _ in range(MAX_ITEMS)] for _ in range(MAX_OBJECTS // MAX_ITEMS)]
    assert find(Holder(many=many, last=Holder(a=Holder(b=Holder(rng=rng))))) == []


def test_the_search_runs_no_user_code() -> None:
    """Properties, `__getattr__` and the class that a proxy pretends to have are not read."""

    class Trap:
        @property
        def rng(self) -> Any:
            raise AssertionError("read")

        @property  # type: ignore[misc]
        def __class__(self) -> Any:
            raise AssertionError("read")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    assert find(Holder(trap=Trap(), modules=[random, np], function=find, kind=Trap)) == []


def test_other_bit_generators_are_left_alone() -> None:
    """A bit generator of another package may have another constructor."""

    class Own(np.random.PCG64):
        def __init__(self) -> None:
            super().__init__(1)

    assert find(Holder(rng=np.random.Generator(Own()))) == []


def test_names_of_generators() -> None:
    """Messages name the public type."""
    kinds = [np.random.default_rng(), np.random.RandomState(), random.Random()]
    assert list(map(kind_of, kinds)) == ["numpy.random.Generator", "numpy.random.RandomState", "random.Random"]


# --- What is not seeded, as in torch ------------------------------------------------------------------------------


def test_iterable_datasets_continue_their_generators() -> None:
    """A pass is one sequence of random numbers."""

    class Stream:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(3)

        def __iter__(self) -> Iterator[float]:
            return iter([self.rng.random() for _ in range(8)])

    values = Bench(Stream()).batch(0, batch_size=8, session="mine")
    assert values.tolist() == np.random.default_rng(3).random(8).tolist()


def test_loading_without_workers_continues_generators() -> None:
    """Without `seed`, the training process draws as with torch; with `seed`, it draws what workers draw."""

    def loaded(**arguments: Any) -> list[float]:
        rng = np.random.default_rng(3)
        dataset = Drawing(rng=rng, draw=rng.random)
        return [float(value) for value in DataLoader(dataset, batch_size=None, output="numpy", **arguments)]

    assert loaded() == np.random.default_rng(3).random(12).tolist()
    assert loaded(seed=3) == loaded(seed=3) != loaded(seed=4)
