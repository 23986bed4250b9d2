"""The command ``python -m benchmarks``: runs the parts of the suite one after another and prints their tables."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine
from benchmarks.contenders import has_torch
from benchmarks.crowd import Crowd
from benchmarks.dispatching import Dispatching
from benchmarks.first_batch import Resume, Start
from benchmarks.memory import Memory
from benchmarks.parts import Part, Setting, toml
from benchmarks.processes import Servers, end_forked
from benchmarks.response import Response
from benchmarks.sharing import Share
from benchmarks.sleeping import Sleeping
from benchmarks.throughput import Throughput
from benchmarks.workloads import WORKLOADS

ROUNDS: Final = 7
SECONDS: Final = 0.8
QUICK_SECONDS: Final = 0.15
EXIT_INTERRUPTED: Final = 130

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
    if options.server is not None:
        console.print(f"the servers' side is {options.server}: there is no floor, which is loopback's\n")
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        # the bar is drawn only between turns, because a refresh thread would take CPU time from the measurements
        progress = stack.enter_context(Progress(*_columns(), console=console, auto_refresh=False, transient=True))
        bar = progress.add_task("starting servers", total=None)
        progress.refresh()
        servers = Servers(stack, _config(chosen), options.server)
        setting = Setting(
            servers, options.server is None, options.rounds, options.seconds, options.quick, options.large
        )
        jobs = {part.name: part.prepare(setting) for part in chosen}
        progress.update(bar, total=sum(job.steps for job in jobs.values()))

        def step(text: str) -> None:
            progress.update(bar, description=text, advance=1)
            progress.refresh()

        for name, job in jobs.items():
            outcome = job.run(step)
            for table in outcome.tables:
                console.print(table)
            results[name] = outcome.results
    console.print("Medians over the rounds (quartiles). Ratios are computed within each round.")
    if options.json is not None:
        _write(options.json, {"command": command, "machine": facts, "workloads": results})
    return 0


def _config(chosen: Sequence[Part]) -> str:
    hosted: dict[str, str] = {}
    for part in chosen:
        hosted |= part.hosted
    return toml(hosted)


def _columns() -> tuple[TextColumn, BarColumn, TimeElapsedColumn]:
    return TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
