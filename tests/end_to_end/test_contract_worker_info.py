"""The contract's rules on workers' information and random numbers: get_worker_info(), seeds, augmentation."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.end_to_end.contract import (
    Made,
    Numbers,
    assert_same,
    both,
    get_worker_info,
    ours,
    seed_everything,
    torch,
    torch_is_there,
)

__all__ = ["torch_is_there"]


def _flat(batches: Any) -> list[Any]:
    return [number for batch in batches for number in batch.tolist()]


def test_worker_info_is_torchs() -> None:
    """A9: torch's own get_worker_info() has torch's attributes in a worker, and is None in the training process."""
    assert get_worker_info() is None

    class Told(Numbers):
        def __getitem__(self, index: int) -> Any:
            info = get_worker_info()
            assert isinstance(info, torch.utils.data._utils.worker.WorkerInfo)
            with pytest.raises((RuntimeError, AttributeError)):
                info.id = 7
            return (
                info.id, info.num_workers, info.seed, str(info.rng), info.worker_method, info.dataset is self,
                torch.get_num_threads(),
            )  # fmt: skip

    both(Told(6), num_workers=2, batch_size=2)
    both(Told(6), num_workers=3, fresh=lambda: {"generator": torch.Generator().manual_seed(3)})


def test_worker_info_without_torch() -> None:
    """A9: a server without torch has the same record in ``teleloader_server.get_worker_info``."""
    program = """
import sys
sys.modules["torch"] = None
from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from teleloader_server.loading.worker_info import get_worker_info

class Told:
    def __len__(self): return 4
    def __getitem__(self, index):
        info = get_worker_info()
        return info.id, info.num_workers, info.seed, info.rng is None, info.worker_method, info.dataset is self

with serve(Told()) as url:
    samples = list(DataLoader(RemoteDataset(url), batch_size=None, num_workers=2, output="numpy"))
seed = samples[0][2]
print([[number, count, one_seed - seed, *rest] for number, count, one_seed, *rest in samples])
print(get_worker_info())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [[number, 2, number, True, "multiprocessing", True] for number in (0, 1)]
    assert done.stdout.splitlines() == [str(told * 2), "None"]


class Seeds(Numbers):
    """Dataset in which each sample is its worker's seed."""

    def __getitem__(self, index: int) -> Any:
        return get_worker_info().seed


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_seeds_are_the_base_seed_and_the_id(persistent_workers: bool) -> None:
    """A10: worker i has base seed + i; each epoch draws another base seed, unless workers persist."""
    epochs = both(Seeds(6), num_workers=3, persistent_workers=persistent_workers, epochs=2)
    first, second = ([int(seed) for seed in epoch[:3]] for epoch in epochs)
    assert first == [first[0], first[0] + 1, first[0] + 2]
    assert (first == second) is persistent_workers


def test_seeds_are_reproducible_under_a_generator() -> None:
    """A10: the loader's generator determines the base seed, and torch's global one is not used."""

    def fresh() -> dict[str, Any]:
        return {"generator": torch.Generator().manual_seed(5)}

    first, second = (_flat(both(Seeds(4), num_workers=2, fresh=fresh, epochs=1)[0]) for _ in range(2))
    assert first == second
    assert len(set(first)) == 2


@pytest.mark.parametrize("library", ["random", "numpy", "torch"])
def test_what_init_draws_is_what_torchs_workers_draw(library: str) -> None:
    """A10: Python's, NumPy's and torch's generators in each worker yield the same numbers as in torch."""
    drawn = 0.0
    draws: dict[str, Callable[[], float]] = {
        "random": random.random,
        "numpy": np.random.random,
        "torch": lambda: float(torch.rand(())),
    }
    draw = draws[library]

    def init(_: int) -> None:
        nonlocal drawn
        drawn = draw()

    epochs = both(Made(lambda _: drawn, 4), num_workers=2, worker_init_fn=init)
    assert len(set(_flat(epochs[0] + epochs[1]))) == 4


def test_init_that_seeds_torch_is_obeyed() -> None:
    """A10: a worker_init_fn that seeds torch determines the dataset's random numbers, as in torch."""

    def init(worker: int) -> None:
        torch.manual_seed(123456 + worker)

    both(Made(lambda _: torch.rand(1), 6), num_workers=2, worker_init_fn=init)


def test_augmentation_is_reproducible_and_never_repeats() -> None:
    """A10: the same seed gives the same random numbers per sample; samples and epochs differ."""

    def draw(_: int) -> tuple[float, float, Any]:
        return random.random(), np.random.random(), torch.rand((), dtype=torch.float64)

    def two_epochs() -> Any:
        seed_everything()
        with ours(Made(draw, 20), num_workers=2) as loader:
            return [torch.stack(sample) for _ in range(2) for sample in loader]

    first = two_epochs()
    assert_same(two_epochs(), first)
    assert len(torch.cat(first).unique()) == 20 * 2 * 3
