"""Rules for accelerate in one or several processes: ``python -m tests.examples.accelerate_rules URL``.

Each rule compares a teleloader DataLoader with torch's in the same processes (see test_accelerate.py).
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration

import teleloader
from teleloader import RemoteDataset

LENGTHS = (3, 16, 23)
"""Fewer samples than two batches of 4, a multiple of them, and an uneven number."""
ACCUMULATED = 3


def remote(url: str, length: int, **arguments: Any) -> Any:
    """Construct a loader of the numbers below `length`, in batches of 4."""
    return teleloader.DataLoader(RemoteDataset(url, str(length)), batch_size=4, **arguments)


def both(url: str, length: int, **arguments: Any) -> Iterator[Callable[[], Any]]:
    """Yield functions that construct torch's loader and teleloader's."""
    yield lambda: torch.utils.data.DataLoader(range(length), batch_size=4, **arguments)
    yield lambda: remote(url, length, **arguments)


def accelerator(**config: Any) -> Accelerator:
    """Return an accelerator without a state of earlier ones."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(gradient_accumulation_steps=ACCUMULATED, dataloader_config=DataLoaderConfiguration(**config))


def trained(make: Callable[[], Any], *, skip: int = 0, **config: Any) -> list[Any]:
    """Train two epochs; return what a training script can see of the loader, and the number of optimizer steps."""
    torch.manual_seed(0)
    process = accelerator(**config)
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = process.prepare(model, torch.optim.Adam(model.parameters()), make())
    seen: list[Any] = [len(loader), loader.total_batch_size, loader.total_dataset_length]
    for epoch in range(2):
        batches = skip_first_batches(loader, skip) if skip and epoch == 0 else loader
        for batch in batches:
            with process.accumulate(model):
                process.backward(model(batch.float()[:, None]).mean())
                optimizer.step()
                optimizer.zero_grad()
            state = process.gradient_state
            seen.append((batch.tolist(), process.sync_gradients, state.end_of_dataloader))
            if not skip:  # accelerate forgets the remainder of torch's loader, and gathers repeated samples
                seen.append((state.remainder, process.gather_for_metrics(batch).tolist()))
        seen.append(process.gradient_state.in_dataloader)
    steps = [int(values["step"]) for values in optimizer.optimizer.state.values()]
    return [*seen, steps]


def compare(url: str, arguments: dict[str, Any], *lengths: int, **options: Any) -> None:
    """Compare the batches, the gathered samples, the accelerator's state and the optimizer steps with torch's."""
    for length in lengths:
        theirs, ours = (trained(make, **options) for make in both(url, length, **arguments))
        assert ours == theirs, f"{length} samples, {arguments}, {options}:\n{ours}\nis not\n{theirs}"


def batches_metrics_and_optimizer_steps(url: str) -> None:
    """`accumulate` and `gather_for_metrics` act as with torch, in the same order."""
    for shuffle, drop_last in itertools.product((False, True), repeat=2):
        compare(url, {"shuffle": shuffle, "drop_last": drop_last}, *LENGTHS)


def options_of_accelerate(url: str) -> None:
    """The options of accelerate have the same effect as with torch."""
    for shuffle in (False, True):
        compare(url, {"shuffle": shuffle}, 23, split_batches=True)
        compare(url, {"shuffle": shuffle}, 23, use_seedable_sampler=True)
    # processes have unequal numbers of batches, so none may wait for the others
    for length in LENGTHS:
        theirs, ours = (
            [batch.tolist() for batch in accelerator(even_batches=False).prepare(make())] for make in both(url, length)
        )
        assert ours == theirs, f"{length} samples: {ours} is not {theirs}"


def skipping(url: str) -> None:
    """`skip_first_batches` of a prepared loader skips the batches that it skips of torch's."""
    compare(url, {}, 23, skip=1)
    compare(url, {"shuffle": True}, 23, skip=1, use_seedable_sampler=True)


def seeded_order(url: str) -> None:
    """The gathered samples of an epoch are the seeded order of one process, each once, for any number of processes."""
    process, options = accelerator(), {"shuffle": True, "seed": 5}
    prepared = process.prepare(remote(url, 23, **options))
    alone = remote(url, 23, **options, rank=0, world_size=1)
    for epoch in (0, 1, 5):
        if epoch == 5:
            prepared.set_epoch(epoch)
        order = [index for indices in alone.plan(epoch) for index in indices.tolist()]
        assert [index for batch in prepared for index in process.gather_for_metrics(batch).tolist()] == order


def own_ranks(url: str) -> None:
    """A loader with `rank` and `world_size` divides the epoch itself, and no gathered samples are removed."""
    process = accelerator()
    ranks = {"rank": process.process_index, "world_size": process.num_processes, "seed": 5}
    loader = remote(url, 23, **ranks)
    assert [batch.tolist() for batch in process.prepare(loader)] == [indices.tolist() for indices in loader.plan(0)]
    gathered = [index for batch in process.prepare(loader) for index in process.gather_for_metrics(batch).tolist()]
    assert sorted(gathered) == sorted([0] * (len(gathered) - 23) + list(range(23)))


def refusals(url: str) -> None:
    """Options that the loader cannot support are refused."""
    with pytest.raises(ValueError, match=r"^dispatch_batches=True is not supported"):
        accelerator(dispatch_batches=True).prepare(remote(url, 23))
    several, rank = accelerator().num_processes > 1, accelerator().process_index
    with pytest.raises(ValueError, match=r"^split_batches=True is not supported") if several else nullcontext():
        accelerator(split_batches=True).prepare(remote(url, 23, rank=0, world_size=1))
    for workers in (0, 1):
        loader = teleloader.DataLoader(RemoteDataset(url, "stream"), batch_size=4, num_workers=workers)
        fails = several and workers == 0
        with pytest.raises(ValueError, match=r"^num_workers=0 gives each process") if fails else nullcontext():
            samples = [index for batch in accelerator().prepare(loader) for index in batch.tolist()]
            first, last = (10 * process // accelerator().num_processes for process in (rank, rank + 1))
            assert samples == list(range(first, last))


def resuming(url: str) -> None:
    """A state saved at any batch continues with the next batch, although the loader has read one ahead."""
    seedable = {"use_seedable_sampler": True, "data_seed": 7}
    for options, config in (
        ({}, {}), ({"shuffle": True}, {}), ({"shuffle": True}, seedable), ({"shuffle": True, "seed": 5}, {}),
    ):  # fmt: skip
        torch.manual_seed(0)
        loader, saved = accelerator(**config).prepare(remote(url, 23, **options)), list[Any]()
        whole = [batch for _ in range(2) for batch in taken(loader, saved)]
        for batches, state in enumerate(saved, 1):
            torch.manual_seed(1)
            resumed = accelerator(**config).prepare(remote(url, 23, **options))
            resumed.load_state_dict(state)
            rest = [batch for _ in range(2 - state["epoch"]) for batch in taken(resumed, [])]
            assert rest == whole[batches:], (options, config, batches)


def taken(loader: Any, saved: list[Any]) -> list[Any]:
    """Return the batches of an epoch, and save the state after each; the loop draws random numbers."""
    batches = []
    for batch in loader:
        torch.rand(3)
        saved.append(loader.state_dict())
        batches.append(batch.tolist())
    return batches


RULES = (
    batches_metrics_and_optimizer_steps,
    options_of_accelerate,
    skipping,
    seeded_order,
    own_ranks,
    refusals,
    resuming,
)

if __name__ == "__main__":
    for rule in RULES:
        rule(sys.argv[1])
        print(f"{rule.__name__}: passed on {Accelerator().num_processes} processes", flush=True)
    gc.collect()  # DDP's reference cycles would keep gloo's threads alive, which can abort the exit
    Accelerator().end_training()
