"""Resuming in comparison with torchdata: its samplers, and the positions from which its StatefulDataLoader resumes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from teleloader import DataLoader
from tests.end_to_end.contract import (
    IterableDataset,
    Numbers,
    few_cpus_are_fine,
    get_worker_info,
    seed_everything,
    torch,
    torch_is_there,
)
from tests.end_to_end.test_resumed_runs import OTHER_SEED, assert_resumes
from tests.examples.running import need_framework

__all__ = ["torch_is_there"]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", ["RandomSampler", "RandomSampler, replacement", "StatefulDistributedSampler"])
def test_torchdatas_samplers_resume(name: str, num_workers: int) -> None:
    """From a state of any position, all remaining batches are those of the uninterrupted run."""
    need_framework("torchdata")
    from torchdata.stateful_dataloader import sampler

    def fresh() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(3)
        made = {
            "RandomSampler": lambda: sampler.RandomSampler(Numbers(), generator=generator),
            "RandomSampler, replacement": lambda: sampler.RandomSampler(Numbers(), True, 70, generator),
            "StatefulDistributedSampler": lambda: sampler.StatefulDistributedSampler(Numbers(), 2, 1, seed=4),
        }[name]()
        return {"batch_size": 20 if "replacement" in name else 3, "sampler": made, "num_workers": num_workers}

    assert_resumes(Numbers(), fresh)


SIZES = (7, 5, 4)
"""Samples of each shard."""
EPOCHS = 2

BEFORE_ITER = "before iter()"
BEFORE_FIRST = "before the first batch"
MIDDLE = "after a middle batch"
AFTER_LAST = "after the last batch"
AFTER_STOP = "after StopIteration"
POSITIONS = {BEFORE_ITER, BEFORE_FIRST, MIDDLE, AFTER_LAST, AFTER_STOP}


def _shard() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


class Iterated(IterableDataset):  # type: ignore[misc]
    """A dataset that returns an iterator."""

    def __iter__(self) -> Iterator[Any]:
        shard = _shard()
        return iter([(shard, place) for place in range(SIZES[shard])])


class Generated(IterableDataset):  # type: ignore[misc]
    """A dataset whose ``__iter__`` is a generator."""

    def __iter__(self) -> Iterator[Any]:
        shard = _shard()
        for place in range(SIZES[shard]):
            yield shard, place


class Stateful(IterableDataset):  # type: ignore[misc]
    """A dataset that saves its place, and starts over when it has ended."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        shard = _shard()
        while self.place < SIZES[shard]:
            self.place += 1
            yield shard, self.place
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        """Return the place."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue there."""
        self.place = state["place"]


DATASETS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "map-style": (Numbers, lambda: {"batch_size": 3}),
    "map-style, shuffled": (Numbers, lambda: {"batch_size": 3, "shuffle": True}),
    "map-style, shuffled by a generator": (
        Numbers, lambda: {"batch_size": 3, "shuffle": True, "generator": torch.Generator().manual_seed(3)}
    ),
    "iterable-style": (Iterated, lambda: {"batch_size": 2}),
    "generator": (Generated, lambda: {"batch_size": 2}),
    "Stateful": (Stateful, lambda: {"batch_size": 2}),
}  # fmt: skip

TORCHDATA_DIFFERS: dict[tuple[str, int], set[str]] = {
    ("map-style, shuffled by a generator", 0): POSITIONS,
    **{("Stateful", num_workers): {AFTER_LAST} for num_workers in (1, 2, 3)},
}
"""Positions from which torchdata's loader does not continue as the uninterrupted run (docs/differences.md)."""


def _train(loader: Any, first_epoch: int, save: Callable[[int, str], None]) -> list[str]:
    """Return the batches of the remaining epochs, as text; `save` is called at each position with epoch and name."""
    batches: list[str] = []
    for epoch in range(first_epoch, EPOCHS):
        save(epoch, BEFORE_ITER)
        iterator = iter(loader)
        save(epoch, BEFORE_FIRST)
        for batch in iterator:
            batches.append(str(batch))
            save(epoch, MIDDLE)
        save(epoch, AFTER_STOP)
    return batches


def _resume(make: Callable[[], Any]) -> tuple[list[str], set[str]]:
    """Return the batches of the uninterrupted run, and the positions from which a resumed run differs.

    The states are those of the first epoch: of all its batches, the second and the last.
    """
    seed_everything()
    loader = make()
    saved: list[tuple[str, int, int, Any]] = []
    length = 0

    def save(epoch: int, position: str) -> None:
        nonlocal length
        if epoch:
            return
        length += position == MIDDLE
        state = copy.deepcopy(loader.state_dict())
        # torchdata's states have no epoch: the training script keeps it
        saved.append(
            (position, length, state["epoch"] if "epoch" in state else epoch + (position == AFTER_STOP), state)
        )

    whole = _train(loader, 0, save)
    different = set()
    for position, taken, epoch, state in saved:
        if position == MIDDLE and taken not in (2, length):
            continue
        seed_everything(OTHER_SEED)
        loader = make()
        loader.load_state_dict(state)
        if _train(loader, epoch, lambda epoch, position: None) != whole[taken:]:
            different.add(AFTER_LAST if position == MIDDLE and taken == length else position)
    return whole, different


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
@pytest.mark.parametrize("num_workers", range(4))
@pytest.mark.parametrize("name", DATASETS)
def test_positions_from_which_each_loader_resumes(name: str, num_workers: int) -> None:
    """The loader continues from each position as the uninterrupted run; torchdata's does except where listed."""
    need_framework("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    make_dataset, fresh = DATASETS[name]
    with few_cpus_are_fine():
        ours, different = _resume(lambda: DataLoader(make_dataset(), num_workers=num_workers, **fresh()))
        assert different == set()
        fork = {"multiprocessing_context": "fork"} if num_workers else {}
        theirs, different = _resume(
            lambda: StatefulDataLoader(make_dataset(), num_workers=num_workers, **fork, **fresh())
        )
        assert different == TORCHDATA_DIFFERS.get((name, num_workers), set())
    assert (ours == theirs) == ("shuffled" not in name), "the order that torchdata shuffles is its own"
