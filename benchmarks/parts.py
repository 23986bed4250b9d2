"""Interface of the parts of the benchmark suite: each part measures something and prints its own tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rich.console import RenderableType

Step = Callable[[str], None]
"""Says what is being measured, one step further."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that all parts of a run share."""

    urls: Mapping[int, str]
    """Running servers, by their number of workers."""
    is_local: bool
    """Whether they are on this machine, so that their processes can be looked at."""
    rounds: int
    seconds: float
    """About how long a turn of a throughput workload counts."""
    quick: bool
    """Whether it is only to be shown that all runs."""
    large: bool
    """Whether contenders take part where they need minutes, or many gigabytes."""

    @property
    def fewest(self) -> tuple[int, str]:
        """Return the server with the fewest workers, and their number."""
        num_workers = min(self.urls)
        return num_workers, self.urls[num_workers]


class Outcome(NamedTuple):
    """Results of a part."""

    tables: list[RenderableType]
    """For people."""
    results: list[dict[str, Any]]
    """The same and all that it is made of, as JSON can hold it."""


class Job(NamedTuple):
    """Part that is ready to run."""

    steps: int
    """How often it says what it does."""
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
