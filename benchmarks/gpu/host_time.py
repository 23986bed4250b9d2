"""Measurement 4: the host's time in next(), and the copies and allocations of a step.

Copies and allocations must not grow: after the warm-up each step makes the same number of copies, and requests no
memory from the driver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.accelerator import Accelerator
from benchmarks.gpu.contenders import Contender, usual
from benchmarks.gpu.data import LONG
from benchmarks.gpu.measuring import Rounds, Setting, cell, interleaved, new_table, row
from benchmarks.gpu.training import Batch, take_steps
from benchmarks.parts import Outcome, Step

COMPUTE: Final = 5.0
"""Milliseconds of computation of a step: long enough for the next batch to arrive."""
BATCH_SIZE: Final = 32
STEPS: Final = 200
QUICK_STEPS: Final = 10
WINDOWS: Final = 3
"""Profiled parts of a turn, one after the other."""
WINDOW_STEPS: Final = 20
COPY_KEYS: Final = ("Memcpy HtoD", "aten::copy_")
"""Prefixes of the profiler's names for copies: on a GPU, and in main memory."""


class HostTime:
    """Time in next()."""

    name = "next"
    weight = 3.0

    def prepare(self, setting: Setting) -> tuple[int, Callable[[Step, Rounds], Outcome]]:
        """Return the steps of a round, one for each contender, and the function that measures."""
        config = replace(setting.config, batch_size=min(BATCH_SIZE, setting.config.batch_size))
        contenders = usual(setting.accelerator, config)
        return len(contenders), partial(self._run, setting, contenders)

    def _run(self, setting: Setting, contenders: Sequence[Contender], step: Step, rounds: Rounds) -> Outcome:
        found: dict[str, list[dict[str, Any]]] = {each.name: [] for each in contenders}
        for number in rounds:
            for contender in interleaved(contenders, number):
                step(f"next: {contender.name}, round {number + 1} of {rounds.count}")
                found[contender.name].append(_turn(setting, contender, number))
        table = new_table(
            f"next - host time in next(), {COMPUTE:g} ms of computation; copies and allocations of a step{rounds.note}",
            "contender", "p50, us", "p99, us", "max, us", "copies", "allocations", "requests to the driver", "constant",
        )  # fmt: skip
        for name, turns in found.items():
            windows = [window for turn in turns for window in turn["windows"]]
            table.add_row(
                name,
                *(cell([turn[key] for turn in turns], ",.0f") for key in ("p50_us", "p99_us", "max_us")),
                cell([window["copies"] for window in windows], ".1f"),
                cell([window["allocations"] for window in windows], ".1f"),
                cell([window["driver_requests"] for window in windows], ".2f"),
                "yes" if all(_is_constant(turn["windows"]) for turn in turns) else "NO",
            )
        notes = []
        if not setting.accelerator.is_gpu:
            notes = [
                "next: without a GPU, allocations are those of main memory, and there is no driver to request from"
            ]
        return Outcome([table, *notes], [row(name, turns) for name, turns in found.items()])


def _turn(setting: Setting, contender: Contender, seed: int) -> dict[str, Any]:
    accelerator, compute = setting.accelerator, setting.compute
    products, seconds = compute.products(COMPUTE), []
    with contender.open(LONG) as begin:
        batches = begin(seed)
        take_steps(batches, setting.window, products, compute, accelerator)
        previous = None
        for _ in range(QUICK_STEPS if setting.quick else STEPS):
            began = time.perf_counter()
            batch = next(batches)
            seconds.append(time.perf_counter() - began)
            compute.run(products)
            del batch
            mark = accelerator.mark()
            if previous is not None:
                accelerator.wait(previous)
            previous = mark
        accelerator.synchronize()
        windows = [_window(setting, batches, products) for _ in range(WINDOWS)]
        del batches
    p50, p99 = np.percentile(seconds, [50, 99])
    return {
        "p50_us": 1e6 * float(p50),
        "p99_us": 1e6 * float(p99),
        "max_us": 1e6 * max(seconds),
        "next_us": [1e6 * each for each in seconds],
        "windows": windows,
    }


def _window(setting: Setting, batches: Iterator[Batch], products: int) -> dict[str, float | None]:
    """Return the copies and allocations of a step."""
    accelerator = setting.accelerator
    count = WINDOW_STEPS if not setting.quick else QUICK_STEPS
    activities = [ProfilerActivity.CUDA] if accelerator.is_gpu else [ProfilerActivity.CPU]
    before = _allocations(accelerator)
    with profile(activities=activities, profile_memory=not accelerator.is_gpu) as profiled:
        take_steps(batches, count, products, setting.compute, accelerator)
    after = _allocations(accelerator)
    averages = profiled.key_averages()
    copies = sum(each.count for each in averages if each.key.startswith(COPY_KEYS[0 if accelerator.is_gpu else 1]))
    if not accelerator.is_gpu:
        allocated = sum(each.count for each in averages if each.key == "[memory]")
        return {"copies": copies / count, "allocations": allocated / count, "driver_requests": None}
    return {
        "copies": copies / count if copies else None,  # a profiler without access to the GPU counts none
        "allocations": (after[0] - before[0]) / count,
        "driver_requests": (after[1] - before[1]) / count,
    }


def _allocations(accelerator: Accelerator) -> tuple[int, int]:
    """Return allocations on the device, and requests to the driver for memory of either side, since the start."""
    if not accelerator.is_gpu:
        return 0, 0
    device = torch.cuda.memory_stats(accelerator.device)
    host = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    requests = device.get("segment.all.allocated", 0) + host.get("num_host_alloc", 0)
    return device.get("allocation.all.allocated", 0), requests


def _is_constant(windows: Sequence[dict[str, float | None]]) -> bool:
    """Return True if counts vary by at most one step's, and the last part requested no memory from the driver.

    Loaders that copy in advance may make one copy more or less within a part, so the difference of one step is allowed.
    """
    for key in ("copies", "allocations"):
        values = [value for window in windows if (value := window[key]) is not None]
        if values and max(values) - min(values) > max(values) / QUICK_STEPS:
            return False
    return not windows[-1]["driver_requests"]
