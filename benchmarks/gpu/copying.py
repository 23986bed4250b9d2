"""Measurement 1: the rate of copies to the device, against a pinned and a pageable ``.to``.

Each copy is timed by a pair of events in its stream. Ours is the copy that a loader with ``device=`` makes, of
tensors that are views of one page-locked block, as a response is received into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, Final

import torch

from benchmarks.gpu.accelerator import Accelerator
from benchmarks.gpu.contenders import copy_batch
from benchmarks.gpu.measuring import Rounds, Setting, cell, interleaved, new_table, row
from benchmarks.parts import Outcome, Step

SIZES: Final = (4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 256 * 2**20)
"""Bytes of all tensors of a copy."""
QUICK_SIZES: Final = SIZES[:3]
COUNTS: Final = (1, 8, 64)
"""Tensors of a copy."""
OURS: Final = "teleloader"
PINNED: Final = "pinned .to"
PAGEABLE: Final = "pageable .to"
MOST_BYTES: Final = 2**29
"""Bytes that a turn copies, at most; it makes at least `LEAST` copies."""
LEAST: Final = 3
MOST: Final = 30

Measure = Callable[[], float]
"""Makes one copy; returns its seconds."""


class Copying:
    """Copies of several sizes."""

    name = "copy"
    weight = 2.0

    def prepare(self, setting: Setting) -> tuple[int, Callable[[Step, Rounds], Outcome]]:
        """Return the steps of a round, one for each size, and the function that measures."""
        sizes = QUICK_SIZES if setting.quick else SIZES if setting.accelerator.is_gpu else SIZES[:-1]
        return len(sizes), partial(self._run, setting, sizes)

    def _run(self, setting: Setting, sizes: Sequence[int], step: Step, rounds: Rounds) -> Outcome:
        found: dict[tuple[int, int], dict[str, list[dict[str, Any]]]] = {
            (size, count): {} for size in sizes for count in COUNTS
        }
        for number in rounds:
            for size in sizes:
                step(f"copy: {_bytes(size)}, round {number + 1} of {rounds.count}")
                for count in COUNTS:
                    _round(setting.accelerator, size, count, number, found[size, count])
        table = new_table(
            f"copy - GB/s of copies to the device, timed by events{rounds.note}",
            "tensors", "bytes", OURS, PINNED, PAGEABLE, f"{OURS} to {PINNED}",
        )  # fmt: skip
        results = []
        for (size, count), kinds in found.items():
            rates = {kind: [each["gigabytes_per_second"] for each in kinds.get(kind, [])] for kind in KINDS}
            ratios = [each.get("to_pinned") for each in kinds[OURS]]
            cells = [cell(rates[kind], ".3g") for kind in KINDS]
            table.add_row(str(count), _bytes(size), *cells, cell(ratios, ".2f"))
            results += [row(kind, taken, bytes=size, tensors=count) for kind, taken in kinds.items()]
        return Outcome([table], results)


KINDS: Final = (OURS, PINNED, PAGEABLE)


def _round(
    accelerator: Accelerator, size: int, count: int, number: int, found: dict[str, list[dict[str, Any]]]
) -> None:
    """Measure each kind once, and form the ratio within the round."""
    turns: dict[str, dict[str, Any]] = {}
    for kind in interleaved(KINDS, number):
        measure = _measure(kind, accelerator, size, count)
        if measure is not None:
            measure()
            copies = max(LEAST, min(MOST, MOST_BYTES // size))
            seconds = [measure() for _ in range(copies)]
            turns[kind] = {"gigabytes_per_second": size / median(seconds) / 1e9, "seconds": seconds}
    if PINNED in turns:
        for turn in turns.values():
            turn["to_pinned"] = turn["gigabytes_per_second"] / turns[PINNED]["gigabytes_per_second"]
    for kind, turn in turns.items():
        found.setdefault(kind, []).append(turn)


def _measure(kind: str, accelerator: Accelerator, size: int, count: int) -> Measure | None:
    """Return the measurement of a kind; None where the device has none."""
    if kind == OURS and accelerator.is_gpu:
        return _ours(accelerator, size, count)
    if kind == PINNED and not accelerator.is_gpu:
        return None
    if kind == OURS:
        tensors = list(torch.empty(size, dtype=torch.uint8).fill_(1).split(size // count))
    else:
        pinned = kind == PINNED
        tensors = [torch.empty(size // count, dtype=torch.uint8, pin_memory=pinned).fill_(1) for _ in range(count)]
    return partial(_seconds, accelerator, accelerator.stream(), tensors)


def _seconds(accelerator: Accelerator, stream: Any, tensors: Sequence[Any]) -> float:
    with accelerator.on(stream):
        start = accelerator.mark()
        copied = copy_batch(accelerator, None, tensors)
        end = accelerator.mark()
    accelerator.wait(end)
    del copied
    return accelerator.milliseconds(start, end) / 1000


def _ours(accelerator: Accelerator, size: int, count: int) -> Measure:
    """Return a copy by the client's own code, from the memory that it receives into."""
    from teleloader.tensors.devices import TorchDevice
    from teleloader.tensors.memory import HostBuffers
    from teleloader.tensors.pinned import process_budget
    from teleloader_shared.buffers import BufferPool

    memory = HostBuffers("torch", BufferPool(), process_budget()).take(size, 1)
    memory.data.fill(1)
    each = size // count
    tensors = [memory.leaf(i * each, "uint8", (each,), "tensor") for i in range(count)]
    if not all(tensor.is_pinned() for tensor in tensors):
        raise AssertionError(f"{size} bytes were not received into page-locked memory")
    device = TorchDevice(accelerator.device)

    def measure() -> float:
        copy = device.copy(tensors)
        copy.done.synchronize()
        seconds = device.seconds(copy)
        assert seconds is not None, "the copy is done"
        return seconds

    return measure


def _bytes(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
