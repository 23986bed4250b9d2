"""Interface of the GPU measurements: settings, rounds and the time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rich.table import Table

from benchmarks.gpu.accelerator import Accelerator
from benchmarks.gpu.contenders import Config
from benchmarks.gpu.training import Compute
from benchmarks.measuring import Spread
from benchmarks.parts import Outcome, Step

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that are the same for all measurements."""

    accelerator: Accelerator
    compute: Compute
    config: Config
    server: int
    """PID of the loader server."""
    rounds: int
    turn_seconds: float
    """Approximate duration of a turn."""
    quick: bool
    """True if the run only checks that everything runs."""

    def steps(self, milliseconds: float, *, least: int = 6) -> int:
        """Return the number of steps per turn, for steps with `milliseconds` ms of computation."""
        return max(least, min(60, round(1000 * self.turn_seconds / max(milliseconds, 15))))

    @property
    def window(self) -> int:
        """Number of batches that loaders prefetch."""
        return 2 * self.config.num_workers + 4


class Rounds:
    """The rounds of a measurement; ends early, after a whole round, when there is no time for another one.

    Args:
        count: How many.
        deadline: By ``time.monotonic``.
    """

    def __init__(self, count: int, deadline: float) -> None:
        self.count = count
        self.taken = 0
        self._deadline = deadline

    def __iter__(self) -> Iterator[int]:
        longest = 0.0
        for number in range(self.count):
            began = time.monotonic()
            if number and began + longest > self._deadline:
                return
            yield number
            self.taken = number + 1
            longest = max(longest, time.monotonic() - began)

    @property
    def note(self) -> str:
        """Return the number of completed rounds as a text if the time was too short for all rounds."""
        return "" if self.taken == self.count else f"; {self.taken} of {self.count} rounds, the time was over"


def interleaved(items: Sequence[T], number: int) -> Sequence[T]:
    """Return items in order for even rounds, in reverse for odd ones."""
    return items if number % 2 == 0 else items[::-1]


class Measurement(Protocol):
    """One of the measurements."""

    @property
    def name(self) -> str:
        """The name on the command line."""

    @property
    def weight(self) -> float:
        """Approximate duration relative to other measurements."""

    def prepare(self, setting: Setting) -> tuple[int, Callable[[Step, Rounds], Outcome]]:
        """Return the number of steps that each round reports, and the function that measures."""


def new_table(title: str, *headings: str) -> Table:
    """Return a table with a first column for names and others for figures."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for i, heading in enumerate(headings):
        made.add_column(heading, justify="left" if i == 0 else "right", no_wrap=True)
    return made


def cell(values: Sequence[float | None], form: str) -> str:
    """Return the median and the range of a figure for a table; "-" where it was not measured."""
    measured = [value for value in values if value is not None]
    return Spread.of(measured).text(form) if measured else "-"


def row(name: str, rounds: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return the JSON of a contender: medians over the rounds, and all rounds."""
    medians = {
        key: Spread.of(values).middle
        for key in rounds[0]
        if (values := [each[key] for each in rounds if isinstance(each[key], int | float)])
    }
    return {"contender": name, **more, "median": medians, "rounds": list(rounds)}
