"""Measurement 5: page-locked, locked and device memory during each loader's training loop."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu.accelerator import Accelerator
from benchmarks.gpu.contenders import Contender, Local, usual
from benchmarks.gpu.data import LONG
from benchmarks.gpu.measuring import Rounds, Setting, cell, interleaved, new_table, row
from benchmarks.gpu.training import take_steps
from benchmarks.parts import Outcome, Step

COMPUTE: Final = 5.0
NO_GPU: Final = "memory: not measured: page-locked and device memory do not exist without a GPU"


class Memory:
    """Peak memory during a training loop."""

    name = "memory"
    weight = 2.0

    def prepare(self, setting: Setting) -> tuple[int, Callable[[Step, Rounds], Outcome]]:
        """Return the steps of a round, one for each contender, and the function that measures."""
        accelerator, config = setting.accelerator, setting.config
        if not accelerator.is_gpu:
            return 0, lambda step, rounds: Outcome([NO_GPU], [{"note": NO_GPU}])
        contenders = [Local(accelerator, config), *usual(accelerator, config)]
        return len(contenders), partial(self._run, setting, contenders)

    def _run(self, setting: Setting, contenders: Sequence[Contender], step: Step, rounds: Rounds) -> Outcome:
        found: dict[str, list[dict[str, Any]]] = {each.name: [] for each in contenders}
        for number in rounds:
            for contender in interleaved(contenders, number):
                step(f"memory: {contender.name}, round {number + 1} of {rounds.count}")
                found[contender.name].append(_turn(setting, contender, number))
        keys = {
            "pinned": "pinned, with torch's cache",
            "locked": "VmLck + VmPin",
            "device_in_use": "device, in use",
            "device_reserved": "device, with torch's cache",
        }
        headings = (f"{heading}, MiB" for heading in keys.values())
        table = new_table(f"memory - the most during a loop{rounds.note}", "contender", *headings)
        for name, turns in found.items():
            cells = ([None if turn[key] is None else turn[key] / 2**20 for turn in turns] for key in keys)
            table.add_row(name, *(cell(values, ",.0f") for values in cells))
        return Outcome([table], [row(name, turns) for name, turns in found.items()])


def _turn(setting: Setting, contender: Contender, seed: int) -> dict[str, int | None]:
    """Return the peak bytes of each kind of memory during a training loop."""
    _release(setting.accelerator)
    with contender.open(LONG) as begin:
        batches = begin(seed)
        count = setting.window + setting.steps(COMPUTE)
        take_steps(batches, count, setting.compute.products(COMPUTE), setting.compute, setting.accelerator)
        locked = _locked()
        del batches
    device = torch.cuda.memory_stats(setting.accelerator.device)
    return {
        "pinned": _pinned(),
        "locked": locked,
        "device_in_use": device.get("allocated_bytes.all.peak", 0),
        "device_reserved": device.get("reserved_bytes.all.peak", 0),
    }


def _release(accelerator: Accelerator) -> None:
    """Return cached memory to the driver, and reset the peak values."""
    gc.collect()
    torch.cuda.synchronize(accelerator.device)
    torch.cuda.empty_cache()
    # public since about torch 2.10; without it, blocks of the previous contender are counted for this one
    accelerators: Any = getattr(torch, "accelerator", None)
    if hasattr(accelerators, "empty_host_cache"):
        accelerators.empty_host_cache()
    elif hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()
    torch.cuda.reset_peak_memory_stats(accelerator.device)
    if hasattr(torch.cuda, "reset_peak_host_memory_stats"):
        torch.cuda.reset_peak_host_memory_stats()


def _pinned() -> int | None:
    """Return the peak bytes that torch has page-locked; None before torch 2.6, which has no such counter.

    The counters of the part in use are not read: torch 2.11 does not decrease them.
    """
    if not hasattr(torch.cuda, "host_memory_stats"):
        return None
    stats: Mapping[str, int] = torch.cuda.host_memory_stats()
    return stats["reserved_bytes.peak" if "reserved_bytes.peak" in stats else "allocated_bytes.peak"]


def _locked() -> int:
    """Return the bytes that this process has locked, by mlock and by drivers, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = [int(line.split()[1]) for line in lines if line.startswith(("VmLck:", "VmPin:"))]
    return 1024 * sum(kib)
