"""Rules for accelerate in one or several processes: ``python -m tests.examples.accelerate_rules URL``.

Each rule compares a teleloader DataLoader with torch's in the same processes (see test_accelerate.py).
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration

import teleloader
from teleloader import RemoteDataset

LENGTHS = (3, 16, 23)
"""Fewer samples than two batches of 4, a multiple of them, and an uneven number."""
ACCUMULATED = 3


def both(url: str, length: int, **arguments: Any) -> Iterator[Callable[[], Any]]:
    """Yield functions that construct torch's loader and teleloader's."""
    yield lambda: torch.utils.data.DataLoader(range(length), **arguments)
    yield lambda: teleloader.DataLoader(RemoteDataset(url, str(length)), **arguments)


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


def compare(url: str, arguments: dict[str, Any], **options: Any) -> None:
    """Compare the batches, the gathered samples, the accelerator's state and the optimizer steps with torch's."""
    for length in LENGTHS:
        theirs, ours = (trained(make, **options) for make in both(url, length, batch_size=4, **arguments))
        assert ours == theirs, f"{length} samples, {arguments}, {options}:\n{ours}\nis not\n{theirs}"


def batches_metrics_and_optimizer_steps(url: str) -> None:
    """`accumulate` and `gather_for_metrics` act as with torch, in the same order."""
    for shuffle, drop_last in itertools.product((False, True), repeat=2):
        compare(url, {"shuffle": shuffle, "drop_last": drop_last})


def options_of_accelerate(url: str) -> None:
    """The options of accelerate have the same effect as with torch."""
    for shuffle in (False, True):
        compare(url, {"shuffle": shuffle}, split_batches=True)
        compare(url, {"shuffle": shuffle}, use_seedable_sampler=True)
    # processes have unequal numbers of batches, so none may wait for the others
    for length in LENGTHS:
        theirs, ours = (
            [batch.tolist() for batch in accelerator(even_batches=False).prepare(make())]
            for make in both(url, length, batch_size=4)
        )
        assert ours == theirs, f"{length} samples: {ours} is not {theirs}"


def skipping(url: str) -> None:
    """`skip_first_batches` of a prepared loader skips the batches that it skips of torch's."""
    compare(url, {}, skip=1)
    compare(url, {"shuffle": True}, skip=1, use_seedable_sampler=True)


def seeded(url: str) -> None:
    """The gathered samples of an epoch are the seeded order of one process, each once, for any number of processes."""
    loader = teleloader.DataLoader(RemoteDataset(url, "23"), batch_size=4, shuffle=True, seed=5)
    process = accelerator()
    prepared = process.prepare(loader)
    alone = teleloader.DataLoader(loader.dataset, batch_size=4, shuffle=True, seed=5, rank=0, world_size=1)
    for epoch in (0, 1, 5):
        if epoch == 5:
            prepared.set_epoch(epoch)
        order = [index for indices in alone.plan(epoch) for index in indices.tolist()]
        assert [index for batch in prepared for index in process.gather_for_metrics(batch).tolist()] == order


def resuming(url: str) -> None:
    """A state saved at any batch continues with the next batch, although the loader has read one ahead."""
    for options in ({}, {"shuffle": True}, {"shuffle": True, "seed": 5}):
        torch.manual_seed(0)
        loader, saved = accelerator().prepare(make_23(url, options)), list[Any]()
        whole = [[batch.tolist() for batch in observed(loader, saved)] for _ in range(2)]
        assert len(saved) == sum(map(len, whole))
        for taken, state in enumerate(saved, 1):
            torch.manual_seed(1)
            resumed = accelerator().prepare(make_23(url, options))
            resumed.load_state_dict(state)
            rest = [batch.tolist() for _ in range(2 - state["epoch"]) for batch in resumed]
            assert rest == [batch for epoch in whole for batch in epoch][taken:], (options, taken)


def make_23(url: str, options: dict[str, Any]) -> Any:
    """Construct a loader of 23 samples."""
    return teleloader.DataLoader(RemoteDataset(url, "23"), batch_size=4, **options)


def observed(loader: Any, saved: list[Any]) -> Iterator[Any]:
    """Yield the batches of an epoch, and save the state with each."""
    for batch in loader:
        saved.append(loader.state_dict())
        yield batch


RULES = (batches_metrics_and_optimizer_steps, options_of_accelerate, skipping, seeded, resuming)

if __name__ == "__main__":
    for rule in RULES:
        rule(sys.argv[1])
        print(f"{rule.__name__}: passed on {Accelerator().num_processes} processes", flush=True)
    gc.collect()  # DDP's reference cycles would keep gloo's threads alive, which can abort the exit
    Accelerator().end_training()
