"""Measurement 6: rare waits: the first batch, a new epoch, a pause of the data source, and ranks on one host."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any, Final

from benchmarks.gpu.accelerator import find
from benchmarks.gpu.contenders import Config, Contender, Local, Ranks, named, usual
from benchmarks.gpu.data import LONG, SHORT
from benchmarks.gpu.measuring import Rounds, Setting, cell, interleaved, new_table, row
from benchmarks.gpu.training import Compute, take_steps
from benchmarks.parts import Outcome, Step
from benchmarks.processes import START_TIMEOUT, consumers, shared_here

COMPUTE: Final = 20.0
"""Milliseconds of computation of a step."""
PAUSE_SECONDS: Final = 0.2
WATCHED_STEPS: Final = 30
"""Number of observed steps from the start of a pause."""
EPOCHS: Final = 3
RANKS: Final = 2


class Tail:
    """Rare waits."""

    name = "tail"
    weight = 6.0

    def prepare(self, setting: Setting) -> tuple[int, Callable[[Step, Rounds], Outcome]]:
        """Return the steps of a round, two for each contender, and the function that measures."""
        contenders = usual(setting.accelerator, setting.config)
        return 2 * len(contenders) + 1, partial(self._run, setting, contenders)

    def _run(self, setting: Setting, contenders: Sequence[Contender], step: Step, rounds: Rounds) -> Outcome:
        local = Local(setting.accelerator, setting.config)
        found: dict[str, list[dict[str, Any]]] = {each.name: [] for each in (local, *contenders)}
        with consumers(RANKS, get_context("forkserver").Barrier(RANKS, timeout=START_TIMEOUT)) as ranks:
            for number in rounds:
                turns: dict[str, dict[str, float]] = {name: {} for name in found}
                for contender in interleaved(contenders, number):
                    step(f"tail: {contender.name}, round {number + 1} of {rounds.count}")
                    turns[contender.name] |= _turn(setting, contender, number)
                for contender in interleaved([local, *contenders], number):
                    step(f"tail: {contender.name}, {RANKS} ranks, round {number + 1} of {rounds.count}")
                    turns[contender.name]["ranks_step_ms"] = _of_ranks(setting, contender, number, ranks)
                for name, turn in turns.items():
                    found[name].append(turn)
        headings = {
            "first_batch_ms": "first batch, ms",
            "epoch_change_ms": "change of epoch, ms",
            "usual_step_ms": "usual step, ms",
            "paused_step_ms": f"longest step, source paused for {PAUSE_SECONDS * 1000:g} ms",
            "ranks_step_ms": f"step of {RANKS} ranks, ms",
        }
        table = new_table(f"tail - {COMPUTE:g} ms of computation{rounds.note}", "contender", *headings.values())
        for name, taken in found.items():
            table.add_row(name, *(cell([turn.get(key) for turn in taken], ",.1f") for key in headings))
        return Outcome([table], [row(name, taken) for name, taken in found.items()])


def _turn(setting: Setting, contender: Contender, seed: int) -> dict[str, float]:
    began = time.perf_counter()
    with contender.open(LONG) as begin:
        batches = begin(seed)
        next(batches)
        setting.accelerator.synchronize()
        first = time.perf_counter() - began
        usual_step, paused = _pause(setting, contender, batches)
        del batches
    return {
        "first_batch_ms": 1000 * first,
        "epoch_change_ms": 1000 * _epoch_change(setting, contender, seed),
        "usual_step_ms": 1000 * usual_step,
        "paused_step_ms": 1000 * paused,
    }


def _epoch_change(setting: Setting, contender: Contender, seed: int) -> float:
    """Return the median time in seconds from the last batch of an epoch to the first batch of the next epoch."""
    seconds = []
    with contender.open(SHORT) as begin:
        ended = None
        for epoch in range(EPOCHS if not setting.quick else 2):
            batches = begin(seed + epoch)
            next(batches)
            setting.accelerator.synchronize()
            if ended is not None:
                seconds.append(time.perf_counter() - ended)
            for _ in batches:
                setting.accelerator.synchronize()
                ended = time.perf_counter()  # the end of iteration is part of the change
            del batches
    return median(seconds)


def _pause(setting: Setting, contender: Contender, batches: Iterator[Any]) -> tuple[float, float]:
    """Return the median step time before a pause of the data source, and the longest step after its start."""
    products = setting.compute.products(COMPUTE)
    train = partial(take_steps, batches, 1, products, setting.compute, setting.accelerator)
    for _ in range(setting.window):
        train()
    before = [_seconds(train) for _ in range(setting.steps(COMPUTE))]
    with _paused(contender.processes(setting.server)):
        after = [_seconds(train) for _ in range(WATCHED_STEPS)]
    return median(before), max(after)


def _seconds(function: Callable[[], None]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


@contextmanager
def _paused(pids: Sequence[int]) -> Iterator[None]:
    """Stop processes for a while, starting now; resume them on exit at the latest."""

    def resume() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    timer = threading.Timer(PAUSE_SECONDS, resume)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    timer.start()
    try:
        yield
    finally:
        timer.join()


# -- ranks


def _of_ranks(setting: Setting, contender: Contender, seed: int, ranks: ProcessPoolExecutor) -> float:
    """Return the step time of the slowest rank in milliseconds, with one process per rank on this host."""
    count = setting.steps(COMPUTE)
    begun = [
        ranks.submit(
            train_rank, contender.name, setting.config, Ranks(rank, RANKS), setting.compute.unit, seed, count,
            setting.window,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    return max(each.result() for each in begun)


def train_rank(name: str, config: Config, ranks: Ranks, unit: float, seed: int, count: int, window: int) -> float:
    """Train in a separate process, with one device per rank if possible; return milliseconds per step."""
    (together,) = shared_here()
    accelerator = find(ranks.rank)
    compute = Compute(accelerator, unit)
    if not accelerator.is_gpu:
        import torch

        torch.set_num_threads(1)
    contender = named([Local(accelerator, config), *usual(accelerator, config)], name)
    products = compute.products(COMPUTE)
    with ExitStack() as stack:
        batches = stack.enter_context(contender.open(LONG, ranks))(seed)
        take_steps(batches, window, products, compute, accelerator)
        together.wait()
        began = time.perf_counter()
        take_steps(batches, count, products, compute, accelerator)
        seconds = time.perf_counter() - began
        del batches
    return 1000 * seconds / count
