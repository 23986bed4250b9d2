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
    """What is the same for all parts of one run."""

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
        """The server with the fewest workers, and how many these are."""
        num_workers = min(self.urls)
        return num_workers, self.urls[num_workers]


class Outcome(NamedTuple):
    """What came out."""

    tables: list[RenderableType]
    """For people."""
    results: list[dict[str, Any]]
    """The same and all that it is made of, as JSON can hold it."""


class Job(NamedTuple):
    """A part that can be run now."""

    steps: int
    """How often it says what it does."""
    run: Callable[[Step], Outcome]


class Part(Protocol):
    """One name that the command takes."""

    @property
    def name(self) -> str:
        """The name."""

    @property
    def hosted(self) -> Mapping[str, str]:
        """The datasets that a server must host: the table of its configuration for each name."""

    def prepare(self, setting: Setting) -> Job:
        """Get ready; the servers run already."""


def toml(hosted: Mapping[str, str]) -> str:
    """The configuration of a server that hosts those datasets."""
    return "\n".join(f"[datasets.{name}]\n{table}" for name, table in hosted.items())


def counted(count: int, noun: str) -> str:
    """Say how many."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
