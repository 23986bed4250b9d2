"""Random numbers of a batch: a function of its batch ID, or of the generators' states."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from teleloader_server.loading.random_state import OwnRandomState, seed_all
from tests.conftest import need
from tests.server.bench import Bench, Bulk, Made, Seeding, drawn, draws

# --- Seeds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeding", ["batch", "sample"])
def test_randomness_does_not_depend_on_the_worker_and_the_time(seeding: Seeding) -> None:
    """A batch's random numbers depend on no other batch, and on nothing that was drawn before."""
    random.seed(1)
    first = draws(seeding, [0, 1, 2], batch_size=4)
    random.seed(2)
    np.random.seed(3)
    again = draws(seeding, [2, 0, 1, 0], batch_size=4)
    assert first == again


@pytest.mark.parametrize("seeding", ["batch", "sample"])
@pytest.mark.parametrize("changed", [{"seed": 1}, {"epoch": 1}])
def test_each_seed_and_epoch_has_its_own_randomness(seeding: Seeding, changed: dict[str, int]) -> None:
    """No random number occurs twice."""
    numbers: list[list[float]] = []

    def make(index: int) -> int:
        numbers.append(drawn(index))
        return index

    bench = Bench(Made(make), seeding=seeding)
    for options in ({}, changed):
        for k in range(3):
            bench.batch(k, batch_size=4, **options)
    assert len(numbers) == 24
    for generator in (0, 1):
        assert len({draw[generator] for draw in numbers}) == 24


def test_each_rank_has_its_own_randomness() -> None:
    """Ranks have different random numbers in batches with the same number."""
    first, second = (draws("batch", [0], batch_size=4, rank=rank, world_size=2) for rank in (0, 1))
    assert not {tuple(pair) for pair in first.values()} & {tuple(pair) for pair in second.values()}


def test_randomness_for_each_sample_does_not_depend_on_the_batch() -> None:
    """With seeding per sample, random numbers do not depend on batch size, rank, order and batching."""
    reference = draws("sample", [0, 1, 2], batch_size=4)
    assert draws("sample", [0], batch_size=12) == reference
    assert draws("sample", [0, 1], batch_size=6, shuffle=True) == reference
    assert draws("sample", list(range(12)), batch_size=None) == reference
    for rank in (0, 1):
        shared = draws("sample", [0], batch_size=6, rank=rank, world_size=2)
        assert shared == {index: reference[index] for index in shared}


def test_randomness_for_each_batch_is_that_of_the_batch() -> None:
    """With seeding per batch, samples draw one after another, so that random numbers depend on the batch size."""
    assert draws("batch", [0], batch_size=4) != draws("batch", [0], batch_size=6)


def test_a_bulk_is_seeded_too() -> None:
    """`__getitems__` draws with the seed of its batch."""

    class Random(Bulk):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [random.random() for _ in indices]

    bench = Bench(Random())
    first, second = bench.batch(0, batch_size=4), bench.batch(1, batch_size=4)
    assert first.tolist() == bench.batch(0, batch_size=4).tolist() != second.tolist()


def test_the_collate_function_draws_after_the_same_seed() -> None:
    """The random numbers of padding and mixing depend on the batch's seed."""
    for seeding in ("batch", "sample"):
        bench = Bench(Made(lambda index: 0), collate=lambda samples: random.random(), seeding=seeding)
        assert bench.batch(0) == bench.batch(0) != bench.batch(1)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_every_seed_seeds_every_generator(seed: int) -> None:
    """random, NumPy's and torch's generators are seeded; NumPy and torch use 32 of the 64 bits."""
    need("torch")
    import torch

    def draw() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(()))]

    with OwnRandomState():
        seed_all(seed)
        first = draw()
        seed_all(seed)
        assert draw() == first
        seed_all(seed ^ 2**20)
        assert [a == b for a, b in zip(first, draw(), strict=True)] == [False] * 3
        seed_all(seed ^ 2**40)
        assert draw()[0] != first[0]


def test_the_generators_do_not_draw_the_same_numbers() -> None:
    """A sample that flips by `random` and crops by NumPy does not flip and crop by the same number."""
    with OwnRandomState():
        seed_all(0x0123456789ABCDEF)
        assert random.random() != np.random.random()


def test_seeds_and_samples_are_the_same_in_another_process() -> None:
    """A batch has the same random numbers on every worker and server."""
    program = (
        "from tests.server.bench import draws\n"
        "print(repr([draws(seeding, [1], batch_size=4, seed=9) for seeding in ('batch', 'sample')]))\n"
    )
    said = subprocess.run([sys.executable, "-c", program], check=True, text=True, stdout=subprocess.PIPE).stdout
    assert said == f"{[draws(seeding, [1], batch_size=4, seed=9) for seeding in ('batch', 'sample')]!r}\n"


# --- Loading in a process that draws for itself -------------------------------------------------------------------


def draw() -> tuple[float, float, float, float]:
    """Return a number of each generator of this process."""
    import torch

    return random.random(), float(np.random.random()), float(np.random.normal()), float(torch.rand(()))


def seed(number: int) -> None:
    """Seed all generators, and clear NumPy's stored second normal number."""
    import torch

    random.seed(number)
    np.random.seed(number)
    np.random.normal()
    torch.manual_seed(number)


@pytest.mark.parametrize("fails", [False, True])
def test_loading_leaves_the_callers_randomness_untouched(fails: bool) -> None:
    """The process's generators are restored after loading, also after an error."""
    need("torch")
    seed(5)
    expected = draw()
    seed(5)
    with suppress(ZeroDivisionError), OwnRandomState():
        seed_all(99)
        draw()
        assert 1 / (not fails)
    assert draw() == expected


def test_what_is_drawn_inside_goes_on_from_the_last_time() -> None:
    """Without seeding, a dataset's random numbers continue from the last batch, independent of the process's own."""
    need("torch")
    seed(7)
    expected = [draw() for _ in range(3)]
    seed(7)
    own = OwnRandomState()
    found = []
    for number in range(3):
        with own:
            found.append(draw())
        seed(number)
    assert found == expected


def test_without_seeds_a_batch_draws_as_the_generators_stand() -> None:
    """Without workers, as in torch, the training process's own generators are used."""
    bench = Bench(Made(drawn), collate=list, seeds=False)
    with OwnRandomState():
        for seeding in range(2):
            random.seed(seeding)
            np.random.seed(seeding)
            expected = [drawn(0) for _ in range(4)]
            random.seed(seeding)
            np.random.seed(seeding)
            assert bench.batch(0, batch_size=2) + bench.batch(0, batch_size=2) == expected
