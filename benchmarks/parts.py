"""Interface of the parts of the benchmark suite: each part measures something and prints its own tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rich.console import RenderableType

Step = Callable[[str], None]
"""Reports progress by one step, with the name of the current measurement."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that all parts of a run share."""

    urls: Mapping[int, str]
    """URLs of the running servers, by number of workers."""
    is_local: bool
    """True if the servers run on this machine, so that their processes can be inspected."""
    rounds: int
    seconds: float
    """Approximate duration of a turn of a throughput workload, without warm-up."""
    quick: bool
    """True if the run only checks that everything runs."""
    large: bool
    """True if the run includes contenders with lengths that take minutes or many gigabytes."""

    @property
    def fewest(self) -> tuple[int, str]:
        """Return number of workers and URL of the server with the fewest workers."""
        num_workers = min(self.urls)
        return num_workers, self.urls[num_workers]


class Outcome(NamedTuple):
    """Results of a part."""

    tables: list[RenderableType]
    """Tables to print."""
    results: list[dict[str, Any]]
    """Summaries and raw measurements, as JSON values."""


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


def toml(hosted: Mapping[str, str]) -> str:
    """Return the configuration of a server that hosts the datasets."""
    return "\n".join(f"[datasets.{name}]\n{table}" for name, table in hosted.items())


def counted(count: int, noun: str) -> str:
    """Format a count with its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
