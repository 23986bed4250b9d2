"""Throughput of each contender for a workload, in batches per second.

One contender runs at a time, and each runs in every round, because the load of a shared machine changes over time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import RenderableType

from benchmarks.contenders import contenders
from benchmarks.measuring import Contender, calibrate, measure
from benchmarks.parts import Job, Outcome, Setting, Step, interleaved
from benchmarks.report import evaluate, figures, orders, table
from benchmarks.workloads import Workload


@dataclass(frozen=True, slots=True)
class Throughput:
    """Throughput of one workload."""

    workload: Workload

    @property
    def name(self) -> str:
        """Return the name of the workload."""
        return self.workload.name

    @property
    def hosted(self) -> Mapping[str, str]:
        """Return the dataset of the workload."""
        return {} if self.workload.missing else {self.workload.name: self.workload.table}

    def prepare(self, setting: Setting) -> Job:
        """Select the contenders."""
        if self.workload.missing:
            missing = ", ".join(self.workload.missing)
            return Job(0, lambda _: Outcome([f"{self.name} is left out: {missing} is not installed"], []))
        found = contenders(self.workload, setting)
        return Job(len(found) * (setting.rounds + 1), partial(self._run, found, setting))

    def _run(self, found: Sequence[Contender], setting: Setting, step: Step) -> Outcome:
        counts = {}
        for contender in found:
            step(f"{self.name}: {contender.name}, first batches")
            counts[contender.name] = calibrate(contender, self.workload, setting.seconds)
        turns = interleaved(
            found,
            setting.rounds,
            step,
            lambda contender: f"{self.name}: {contender.name}",
            lambda contender: measure(contender, counts[contender.name]),
        )
        rows = evaluate(self.workload, turns)
        beside = orders(rows)
        tables: list[RenderableType] = [table(self.workload, rows), *([] if beside is None else [beside])]
        results = [
            {**dataclasses.asdict(row), "turns": [dataclasses.asdict(turn) for turn in taken]}
            for row, taken in zip(rows, turns.values(), strict=True)
        ]
        return Outcome(tables, results, figures(self.workload, turns))
