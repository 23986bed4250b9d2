"""Interface of the parts of the benchmark suite: each part measures something and prints its own tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from rich.console import RenderableType

from benchmarks.measuring import Spread
from benchmarks.processes import Servers

Step = Callable[[str], None]
"""Reports progress by one step, with the name of the current measurement."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that all parts of a run share."""

    servers: Servers
    is_local: bool
    """True if the servers run on this machine, so that their processes can be inspected."""
    rounds: int
    seconds: float
    """Approximate duration of a turn of a throughput workload, without warm-up."""
    peers: Sequence[str]
    """Names of the peers that take part."""
    quick: bool
    """True if the run only checks that everything runs."""
    large: bool
    """True if the run includes contenders with lengths that take minutes or many gigabytes."""


class Outcome(NamedTuple):
    """Results of a part."""

    tables: list[RenderableType]
    """Tables to print."""
    results: list[dict[str, Any]]
    """Summaries and raw measurements, as JSON values."""
    figures: Mapping[str, Spread] = {}
    """Figures for which there are goals (see `goals`), by name."""


class Job(NamedTuple):
    """Part that is ready to run."""

    steps: int
    """Number of progress steps that `run` reports."""
    run: Callable[[Step], Outcome]


class Part(Protocol):
    """Part of the suite, which the command selects by name."""

    @property
    def name(self) -> str:
        """Name on the command line."""

    @property
    def hosted(self) -> Mapping[str, str]:
        """Datasets that a server must host: a configuration table by name."""

    def prepare(self, setting: Setting) -> Job:
        """Prepare the part; the servers are already running."""


Case = TypeVar("Case")
Taken = TypeVar("Taken")


def interleaved(
    cases: Sequence[Case], rounds: int, step: Step, name: Callable[[Case], str], take: Callable[[Case], Taken]
) -> dict[Case, list[Taken]]:
    """Measure each case once per round, because the load of a shared machine changes over time.

    Every other round is in reverse order.
    """
    taken: dict[Case, list[Taken]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in cases if number % 2 == 0 else reversed(cases):
            step(f"{name(case)}, round {number + 1} of {rounds}")
            taken[case].append(take(case))
    return taken


def toml(hosted: Mapping[str, str]) -> str:
    """Return the configuration of a server that hosts the datasets."""
    return "\n".join(f"[datasets.{name}]\n{table}" for name, table in hosted.items())


def counted(count: int, noun: str) -> str:
    """Format a count with its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
