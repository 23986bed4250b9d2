"""The command: contenders take turns in rounds, and a table of ratios is printed.

One contender runs at a time, and all of them in each round, because on a shared machine what is measured at another
time is measured on another machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import machine
from benchmarks.contenders import WORKERS, Contender, contenders, has_torch
from benchmarks.measuring import Turn, calibrate, measure
from benchmarks.processes import end_forked, server
from benchmarks.report import evaluate, orders, table
from benchmarks.workloads import WORKLOADS, Workload

ROUNDS: Final = 7
SECONDS: Final = 0.8
QUICK_SECONDS: Final = 0.15
EXIT_INTERRUPTED: Final = 130

Step = Callable[[str], None]
"""Says what is being measured, one step further."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    options = _parse(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return _run(options)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        end_forked()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"some of {', '.join(WORKLOADS)}; default all")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help=f"about how long a turn counts (default: {SECONDS})")
    parser.add_argument("--quick", action="store_true", help="short turns: shows that it runs, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every turn and all figures to a file")
    options = parser.parse_args(arguments)
    unknown = set(options.workloads) - set(WORKLOADS)
    if unknown:
        parser.error(f"there is no workload {', '.join(sorted(unknown))}; there is {', '.join(WORKLOADS)}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, was {options.rounds}")
    if options.seconds is None:
        options.seconds = QUICK_SECONDS if options.quick else SECONDS
    return options


def _run(options: argparse.Namespace) -> int:
    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    facts = machine.describe()
    console = machine.announce(facts, f"$ {command}\n")
    console.print()
    if not has_torch():
        console.print("torch is not installed: torch's local DataLoader is left out\n")
    chosen = [WORKLOADS[name] for name in options.workloads or WORKLOADS]
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        # the bar is drawn between turns only: a thread of its own would take time from what is measured
        progress = stack.enter_context(Progress(*_columns(), console=console, auto_refresh=False, transient=True))
        bar = progress.add_task("starting servers", total=None)
        progress.refresh()
        urls = {num_workers: stack.enter_context(server(num_workers, chosen)) for num_workers in WORKERS}
        taking_part = {workload: contenders(workload, urls) for workload in chosen}
        progress.update(bar, total=sum(map(len, taking_part.values())) * (options.rounds + 1))

        def step(text: str) -> None:
            progress.update(bar, description=text, advance=1)
            progress.refresh()

        for workload, found in taking_part.items():
            turns = _turns(workload, found, options.rounds, options.seconds, step)
            figures = evaluate(workload, found, turns)
            console.print(table(workload, figures))
            if (beside := orders(figures)) is not None:
                console.print(beside)
            results[workload.name] = [
                {**dataclasses.asdict(row), "turns": [dataclasses.asdict(turn) for turn in taken]}
                for row, taken in zip(figures, turns, strict=True)
            ]
    console.print("Medians over the rounds (least..most). A ratio is formed within each round. floor: 1 worker.")
    if options.json is not None:
        _write(options.json, {"command": command, "machine": facts, "workloads": results})
    return 0


def _turns(workload: Workload, found: Sequence[Contender], rounds: int, seconds: float, step: Step) -> list[list[Turn]]:
    """The turns of each contender, one a round; every other round goes through them backwards."""
    counts = []
    for contender in found:
        step(f"{workload.name}: {contender.name}, first batches")
        counts.append(calibrate(contender, workload, seconds))
    turns: list[list[Turn]] = [[] for _ in found]
    for number in range(rounds):
        order = list(range(len(found)))
        for i in order if number % 2 == 0 else reversed(order):
            step(f"{workload.name}: {found[i].name}, round {number + 1} of {rounds}")
            turns[i].append(measure(found[i], counts[i]))
    return turns


def _columns() -> tuple[TextColumn, BarColumn, TimeElapsedColumn]:
    return TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
