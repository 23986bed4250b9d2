"""Throughput of each contender for a workload, in batches per second.

One contender runs at a time, and each runs in every round, because the load of a shared machine changes over time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import RenderableType

from benchmarks.contenders import Contender, contenders
from benchmarks.measuring import Turn, calibrate, measure
from benchmarks.parts import Job, Outcome, Setting, Step
from benchmarks.report import evaluate, orders, table
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
        return {self.workload.name: self.workload.table}

    def prepare(self, setting: Setting) -> Job:
        """Select the contenders."""
        found = contenders(self.workload, setting)
        return Job(len(found) * (setting.rounds + 1), partial(self._run, found, setting))

    def _run(self, found: Sequence[Contender], setting: Setting, step: Step) -> Outcome:
        turns = self._turns(found, setting, step)
        figures = evaluate(self.workload, found, turns)
        beside = orders(figures)
        tables: list[RenderableType] = [table(self.workload, figures), *([] if beside is None else [beside])]
        results = [
            {**dataclasses.asdict(row), "turns": [dataclasses.asdict(turn) for turn in taken]}
            for row, taken in zip(figures, turns, strict=True)
        ]
        return Outcome(tables, results)

    def _turns(self, found: Sequence[Contender], setting: Setting, step: Step) -> list[list[Turn]]:
        """Return the turns of each contender, one per round; every other round is in reverse order."""
        counts = []
        for contender in found:
            step(f"{self.name}: {contender.name}, first batches")
            counts.append(calibrate(contender, self.workload, setting.seconds))
        turns: list[list[Turn]] = [[] for _ in found]
        for number in range(setting.rounds):
            order = list(range(len(found)))
            for i in order if number % 2 == 0 else reversed(order):
                step(f"{self.name}: {found[i].name}, round {number + 1} of {setting.rounds}")
                turns[i].append(measure(found[i], counts[i]))
        return turns
