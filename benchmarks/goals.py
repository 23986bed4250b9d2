"""Goals for the figures of a run, and the table that compares both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from benchmarks.measuring import Spread


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal for a figure."""

    figure: str
    """Name of the figure, as in `Outcome.figures`."""
    goal: float
    further: float | None = None
    """Goal beyond what was prototyped; None without one."""
    is_maximum: bool = False
    """True if lower figures are better."""

    def is_met(self, found: Spread) -> bool:
        """Return True if the median meets the goal."""
        return found.middle <= self.goal if self.is_maximum else found.middle >= self.goal


def _least(figure: str, goal: float, further: float | None = None) -> Goal:
    return Goal(figure, goal, further)


def _most(figure: str, goal: float, further: float | None = None) -> Goal:
    return Goal(figure, goal, further, is_maximum=True)


def _to_sockets(workload: str, goal: float, further: float | None = None) -> Iterator[Goal]:
    for base in ("floor", "socket, computing"):
        yield _least(f"{workload}: teleloader to {base}", goal, further)


GOALS: Final = (
    *_to_sockets("table", 0.6, 0.75),
    _least("table: teleloader to torch local", 5),
    *_to_sockets("whole", 0.55, 0.7),
    _least("whole: teleloader to Flight", 1.3),
    *_to_sockets("tokens", 0.45),
    _least("tokens: teleloader to Flight", 1),
    *_to_sockets("small", 0.36),
    _least("small: teleloader to Flight", 2),
    *_to_sockets("wire", 0.95),
    _most("wire: client CPU of teleloader to floor", 1.1),
    _least("consumers: 100 to 10", 0.8),
    _least("consumers: 500 to 10", 0.6),
    _most("share: worker CPU of 4 consumers to 1", 1.08),
    _most("response: us per response", 250, 150),
    _most("response: us per batch in a response", 5),
    _most("dispatcher: us with 1 worker", 20),
    _most("dispatcher: us with 128 workers", 20),
    _most("dispatcher: us with 512 workers", 20),
    _least("sleeping: 32 workers", 0.9),
    _least("sleeping: 128 workers", 0.6),
    _least("wire: teleloader, TLS to teleloader", 0.5, 0.6),
    _least("wire: teleloader, same host to floor", 1.3),
    _least("wire: DataLoader(object) to floor", 1.3),
    _least("wire: serve(object) to floor", 1.3),
    _most("wire: client CPU of teleloader, same host", 0.15),
    _least("jpeg: teleloader to socket, computing", 0.95),
    _least("jpeg_native: teleloader to tf.data service", 1.3),
    _most("jpeg: server CPU of teleloader", 0.25),
    _most("memory: total", 200),
)


def table(figures: Mapping[str, Spread]) -> Table:
    """Return a table of all goals with the measured figures, including goals that are not met or not measured."""
    made = Table(title="goals - throughput ratios, unless stated otherwise", title_justify="left", title_style="bold")
    for heading in ("figure", "measured", "goal", "further goal", "met"):
        made.add_column(heading, justify="left" if heading == "figure" else "right", no_wrap=True)
    for goal in GOALS:
        found = figures.get(goal.figure)
        sign = "<=" if goal.is_maximum else ">="
        made.add_row(
            goal.figure,
            "not measured" if found is None else found.text(".2f" if found.middle < 10 else ".0f"),
            f"{sign} {goal.goal:g}",
            "-" if goal.further is None else f"{sign} {goal.further:g}",
            "-" if found is None else "yes" if goal.is_met(found) else "no",
        )
    return made
