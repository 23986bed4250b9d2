"""Measurement 3: the time of a training step with 0, 5, 20 and 80 ms of computation.

The upper bound is a loop whose batches are already on the device. With 256 images per batch, 80 ms correspond to 3,200
images/s, about the training throughput of ResNet-50 on one data center GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from benchmarks.gpu.contenders import LOCAL, Contender, Local, usual
from benchmarks.gpu.data import LONG, SAMPLE_BYTES
from benchmarks.gpu.foreign import installed
from benchmarks.gpu.measuring import Rounds, Setting, cell, interleaved, new_table, row
from benchmarks.gpu.training import check, first_rows, take_steps
from benchmarks.parts import Outcome, Step

COMPUTE: Final = (0.0, 5.0, 20.0, 80.0)
QUICK_COMPUTE: Final = (0.0, 5.0)
WARM_UP_SHARE: Final = 0.5
"""Maximum duration of the warm-up, as a fraction of a turn."""


class Stepping:
    """Steps of all loaders."""

    name = "step"
    weight = 9.0

    def prepare(self, setting: Setting) -> tuple[int, Callable[[Step, Rounds], Outcome]]:
        """Return the steps of a round, one for each contender, and the function that measures."""
        accelerator, config = setting.accelerator, setting.config
        others, absent = installed(accelerator, config)
        contenders = [Local(accelerator, config), *usual(accelerator, config), *others]
        return len(contenders) + 1, partial(self._run, setting, contenders, absent)

    def _run(
        self, setting: Setting, contenders: Sequence[Contender], absent: Sequence[str], step: Step, rounds: Rounds
    ) -> Outcome:
        computes = QUICK_COMPUTE if setting.quick else COMPUTE
        step("step: values")
        contenders, failed = _checked(setting, contenders)
        found: dict[tuple[str, float], list[dict[str, Any]]] = {
            (each.name, compute): [] for compute in computes for each in contenders
        }
        for number in rounds:
            turns = {}
            for contender in interleaved(contenders, number):
                step(f"step: {contender.name}, round {number + 1} of {rounds.count}")
                turns[contender.name] = _turn(setting, contender, computes, number)
            for (name, compute), taken in found.items():
                milliseconds, ceiling = turns[name][compute], turns[LOCAL][compute]
                wait = 1 - ceiling / milliseconds
                taken.append({"step_ms": milliseconds, "data_wait": wait, "to_ceiling": milliseconds / ceiling})
        table = new_table(
            f"step - {setting.config.batch_size} images of 3x224x224, "
            f"{setting.config.batch_size * SAMPLE_BYTES / 1e6:.1f} MB; median (quartiles){rounds.note}",
            "contender", "compute, ms", "step, ms", "images/s", "of the step, waits for data",
        )  # fmt: skip
        for (name, compute), taken in found.items():
            steps = [turn["step_ms"] for turn in taken]
            table.add_row(
                name,
                f"{compute:g}",
                cell(steps, ".2f"),
                f"{1000 * setting.config.batch_size / sorted(steps)[len(steps) // 2]:,.0f}",
                "-" if name == LOCAL else cell([turn["data_wait"] for turn in taken], ".1%"),
            )
        notes = [*(f"{name}: not installed" for name in absent), *failed]
        results = [row(name, taken, compute_ms=compute) for (name, compute), taken in found.items()]
        return Outcome([table, *notes], [*results, *({"note": note} for note in notes)])


def _checked(setting: Setting, contenders: Sequence[Contender]) -> tuple[list[Contender], list[str]]:
    """Compare the first batches of each contender with the dataset; return those that take part, and why others do not.

    Raises:
        AssertionError: If a batch is not equal.
    """
    fit, failed = [], []
    expected = first_rows(0, LONG, setting.config.batch_size)
    for contender in contenders:
        try:
            with contender.open(LONG) as begin:
                check(begin(0), expected if contender.has_torchs_order else None, setting.accelerator)
        except AssertionError as error:
            raise AssertionError(f"{contender.name}: {error}") from None
        except Exception as error:
            if contender.name not in ("FFCV", "DALI"):
                raise
            failed.append(f"{contender.name}: does not run here: {type(error).__name__}: {error}")
        else:
            fit.append(contender)
    return fit, failed


def _turn(setting: Setting, contender: Contender, computes: Sequence[float], seed: int) -> dict[float, float]:
    """Return the milliseconds of a step for each time of computation."""
    found = {}
    with contender.open(LONG) as begin:
        batches = begin(seed)
        for milliseconds in interleaved(computes, seed):
            products, count = setting.compute.products(milliseconds), setting.steps(milliseconds)
            train = partial(take_steps, batches, products=products, compute=setting.compute)
            most = max(4, round(WARM_UP_SHARE * count))
            train(min(setting.window, most) if milliseconds >= 15 else setting.window, accelerator=setting.accelerator)
            began = time.perf_counter()
            train(count, accelerator=setting.accelerator)
            found[milliseconds] = 1000 * (time.perf_counter() - began) / count
        del batches, train
    return found
