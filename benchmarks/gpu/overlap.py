"""Measurement 2: the share of copy time that lies within computation.

Copies and computation are marked by events on one timeline. The loop waits for the device after each step, as one that
reads its loss does, so that only copies ahead of use can overlap. The control has ``device_ahead=0``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from benchmarks.gpu.contenders import NOT_AHEAD, Contender, Copies, Teleloader, usual
from benchmarks.gpu.data import LONG
from benchmarks.gpu.measuring import Rounds, Setting, cell, interleaved, new_table, row
from benchmarks.parts import Outcome, Step

COMPUTE: Final = 20.0
"""Milliseconds of computation of a step."""
NO_GPU: Final = "overlap: not measured: copies and computation do not run at the same time without a GPU"
Span = tuple[float, float]
"""Begin and end in milliseconds."""


class Overlap:
    """Copies and computation on one timeline."""

    name = "overlap"
    weight = 2.0

    def prepare(self, setting: Setting) -> tuple[int, Callable[[Step, Rounds], Outcome]]:
        """Return the steps of a round, one for each contender, and the function that measures."""
        control = Teleloader(setting.accelerator, setting.config, ahead=0)
        contenders = [*usual(setting.accelerator, setting.config), control]
        return len(contenders), partial(self._run, setting, contenders)

    def _run(self, setting: Setting, contenders: Sequence[Contender], step: Step, rounds: Rounds) -> Outcome:
        found: dict[str, list[dict[str, Any]]] = {each.name: [] for each in contenders}
        for number in rounds:
            for contender in interleaved(contenders, number):
                step(f"overlap: {contender.name}, round {number + 1} of {rounds.count}")
                found[contender.name].append(_turn(setting, contender, number))
        table = new_table(
            f"overlap - {COMPUTE:g} ms of computation, the host waits after each step{rounds.note}",
            "contender", "copy time within computation", "copy, ms", "copies",
        )  # fmt: skip
        for name, turns in found.items():
            table.add_row(
                f"{name} (control)" if name == NOT_AHEAD else name,
                cell([turn["overlap"] for turn in turns], ".1%"),
                cell([turn["copy_ms"] for turn in turns], ".2f"),
                cell([turn["copies"] for turn in turns], ".0f"),
            )
        notes = [] if setting.accelerator.is_gpu else [NO_GPU]
        results = [row(name, turns) for name, turns in found.items()]
        return Outcome([table, *notes], [*results, *({"note": note} for note in notes)])


def _turn(setting: Setting, contender: Contender, seed: int) -> dict[str, Any]:
    accelerator, compute = setting.accelerator, setting.compute
    products, count = compute.products(COMPUTE), setting.steps(COMPUTE)
    copies: Copies = []
    computed: Copies = []
    accelerator.synchronize()
    origin = accelerator.mark()  # before all copies: the time between events must not be negative
    with contender.open(LONG, copies=copies) as begin:
        batches = begin(seed)
        for _ in range(count):
            batch = next(batches)
            start = accelerator.mark()
            compute.run(products)
            end = accelerator.mark()
            accelerator.wait(end)
            computed.append((start, end))
            del batch
        del batches
    accelerator.synchronize()
    first = len(computed) // 3  # warm-up
    compute_spans = _spans(setting, origin, computed)[first:]
    began, ended = compute_spans[0][0], compute_spans[-1][1]
    copy_spans = [span for span in _spans(setting, origin, copies) if span[0] >= began and span[1] <= ended]
    total = sum(end - start for start, end in copy_spans)
    share = within(copy_spans, compute_spans) / total if total else None
    return {
        "overlap": share if accelerator.is_gpu else None,
        "copy_ms": total / len(copy_spans) if copy_spans else None,
        "copies": len(copy_spans),
        "copy_spans_ms": copy_spans,
        "compute_spans_ms": compute_spans,
    }


def within(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """Return the time of spans that lies within others, which do not overlap one another."""
    return sum(max(0.0, min(end, high) - max(start, low)) for start, end in spans for low, high in others)


def _spans(setting: Setting, origin: Any, marks: Copies) -> list[Span]:
    milliseconds = setting.accelerator.milliseconds
    return sorted((milliseconds(origin, start), milliseconds(origin, end)) for start, end in tuple(marks))
