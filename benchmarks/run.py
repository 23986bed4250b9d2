"""The command ``python -m benchmarks``: runs the parts of the suite one after another and prints their tables."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rich.console import Console, RenderableType

from benchmarks import goals, machine
from benchmarks.contenders import has_torch
from benchmarks.crowd import Crowd
from benchmarks.dispatching import Dispatching
from benchmarks.first_batch import Resume, Start
from benchmarks.measuring import Spread
from benchmarks.memory import Memory
from benchmarks.parts import Part, Setting, toml
from benchmarks.peers import PEERS, missing
from benchmarks.processes import Servers, end_forked
from benchmarks.publishing import publish
from benchmarks.response import Response
from benchmarks.sharing import Share
from benchmarks.sleeping import Sleeping
from benchmarks.throughput import Throughput
from benchmarks.workloads import WORKLOADS

ROUNDS: Final = 7
SECONDS: Final = 0.8
QUICK_SECONDS: Final = 0.15
EXIT_INTERRUPTED: Final = 130
QUIET: Final = 15.0
"""Minimum seconds between two lines of progress in a file."""

_ALL: Final[Sequence[Part]] = (
    *map(Throughput, WORKLOADS.values()),
    Crowd(),
    Share(),
    Response(),
    Dispatching(),
    Sleeping(),
    Memory(),
    Start(),
    Resume(),
)
PARTS: Final = {part.name: part for part in _ALL}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options = _parse(arguments)
    chosen = [PARTS[name] for name in options.workloads or PARTS]
    if options.config:
        print(_config(chosen))
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return _run(options, chosen)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        end_forked()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=f"names among {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help=f"approximate duration of a turn (default: {SECONDS})")
    parser.add_argument(
        "--quick", action="store_true", help="short turns: check that everything runs, without meaningful figures"
    )
    parser.add_argument("--large", action="store_true", help="include contenders that need minutes and gigabytes")
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=[], metavar="PEER",
        help=f"peers that take part in the same rounds, among {', '.join(PEERS)}; name them after the workloads",
    )  # fmt: skip
    parser.add_argument(
        "--publish", action="store_true", help="write the tables to benchmarks/README.md and the plot to docs"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every turn and all figures to a file")
    parser.add_argument(
        "--server", metavar="URL", help="measure a running server that has the configuration printed by --config"
    )
    parser.add_argument("--config", action="store_true", help="print the configuration for --server, and exit")
    options = parser.parse_args(arguments)
    unknown = set(options.workloads) - set(PARTS)
    if unknown:
        parser.error(f"there is no workload {', '.join(sorted(unknown))}; there is {', '.join(PARTS)}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, was {options.rounds}")
    if options.seconds is None:
        options.seconds = QUICK_SECONDS if options.quick else SECONDS
    return options


def _run(options: argparse.Namespace, chosen: Sequence[Part]) -> int:
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    facts = machine.describe()
    console = machine.announce(facts, f"$ {command}\n")
    console.print()
    if not has_torch():
        console.print("torch is not installed: torch's local DataLoader is left out\n")
    for name in options.peers:
        if modules := missing(name):
            console.print(f"{', '.join(modules)} not installed: {name} is left out (pip install --group peers)\n")
    if options.server is not None:
        console.print(f"the servers' side is {options.server}: there is no floor, which is loopback's\n")
    peers = [name for name in options.peers if not missing(name)]
    results: dict[str, Any] = {}
    tables: list[RenderableType] = []
    figures: dict[str, Spread] = {}
    with ExitStack() as stack:
        servers = Servers(stack, _config(chosen), options.server)
        is_local = options.server is None
        setting = Setting(servers, is_local, options.rounds, options.seconds, peers, options.quick, options.large)
        jobs = {part.name: part.prepare(setting) for part in chosen}
        progress = Steps(console, sum(job.steps for job in jobs.values()))
        for name, job in jobs.items():
            outcome = job.run(progress.step)
            progress.clear()
            for table in outcome.tables:
                console.print(table)
            tables += outcome.tables
            results[name] = outcome.results
            figures |= outcome.figures
    if figures:
        tables.insert(0, goals.table(figures))
        console.print(tables[0])
    console.print("Medians over the rounds (quartiles). Ratios are computed within each round.")
    content = {"command": command, "machine": facts, "workloads": results, "figures": figures}
    if options.json is not None:
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    if options.publish:
        publish(tables, content)
    return 0


class Steps:
    """Progress of a run: the current measurement and the estimated time left.

    A line is written only between turns: a progress bar with a thread would take CPU time from the measurements.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._done = 0
        self._began = self._written = time.monotonic()

    def step(self, text: str) -> None:
        """Report the start of the next measurement; outside a terminal, at most once per `QUIET` seconds."""
        now, done = time.monotonic(), self._done
        self._done += 1
        left = f"about {(now - self._began) / done * (self._total - done) / 60:.0f} min left" if done else "started"
        line = f"{self._done}/{self._total} {text}, {left}"
        if self._console.is_terminal:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
        elif now - self._written > QUIET:
            self._written = now
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Clear the line."""
        if self._console.is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _config(chosen: Sequence[Part]) -> str:
    hosted: dict[str, str] = {}
    for part in chosen:
        hosted |= part.hosted
    return toml(hosted)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
