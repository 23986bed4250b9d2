"""Transfer of batches to a GPU compared with torch: copies, overlap, steps, host time, memory and rare waits."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import machine
from benchmarks.gpu.accelerator import Accelerator, find
from benchmarks.gpu.contenders import Config
from benchmarks.gpu.copying import Copying
from benchmarks.gpu.data import LONG, SHORT
from benchmarks.gpu.host_time import HostTime
from benchmarks.gpu.measuring import Measurement, Rounds, Setting
from benchmarks.gpu.memory import Memory
from benchmarks.gpu.overlap import Overlap
from benchmarks.gpu.stepping import Stepping
from benchmarks.gpu.tail import Tail
from benchmarks.gpu.timeline import draw
from benchmarks.gpu.training import Compute
from benchmarks.parts import Outcome, Step, toml
from benchmarks.processes import ROOT, STOP_TIMEOUT, configured, end_forked

_ALL: Final[Sequence[Measurement]] = (Copying(), Overlap(), Stepping(), HostTime(), Memory(), Tail())
MEASUREMENTS: Final = {each.name: each for each in _ALL}
ROUNDS: Final = 5
MINUTES: Final = 8.5
"""Default time limit, which leaves time to install packages within ten minutes."""
TESTS_SHARE: Final = 0.5
"""Fraction of the time limit for the tests."""
OUTPUT: Final = Path("build", "gpu")
TESTS: Final = Path("tests", "gpu")
MAX_WORKERS: Final = 8
EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
FALLBACK: Final = "CPU fallback: no figures of a GPU"
NO_GPU: Final = (
    "NO GPU: torch finds none on this machine. Everything runs on the CPU fallback, where events are readings of the "
    "host's clock and copies are plain copies. This shows that it runs; no figure says anything about a GPU."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    names = ", ".join(MEASUREMENTS)
    parser.add_argument("measurements", nargs="*", metavar="MEASUREMENT", help=f"names among {names} (default: all)")
    parser.add_argument("--rounds", type=int, help=f"turns of each loader (default: {ROUNDS}; with --quick 1)")
    parser.add_argument(
        "--quick", action="store_true", help="short turns: check that everything runs, without meaningful figures"
    )
    parser.add_argument("--tests", action="store_true", help=f"run the tests in {TESTS} first")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="time limit; measurements skip rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="DIR",
        help="folder for results.json and timeline.png (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    unknown = set(options.measurements) - set(MEASUREMENTS)
    if unknown:
        parser.error(f"unknown measurement {', '.join(sorted(unknown))}: expected some of {names}")
    if options.rounds is None:
        options.rounds = 1 if options.quick else ROUNDS
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, was {options.rounds}")
    return options


def _run(options: argparse.Namespace) -> int:
    deadline = time.monotonic() + 60 * options.minutes
    accelerator = find()
    if not accelerator.is_gpu:
        torch.set_num_threads(1)  # leaves the other cores to the loaders
    facts = {**accelerator.facts(), **machine.describe()}
    console = machine.announce(facts, f"$ {shlex.join(['python', '-m', 'benchmarks.gpu', *sys.argv[1:]])}\n")
    _banner(console, accelerator)
    options.output.mkdir(parents=True, exist_ok=True)
    report = Report(options.output, accelerator, facts, options.rounds, quick=options.quick)
    if options.tests:
        report.tests = _test(accelerator, console, TESTS_SHARE * 60 * options.minutes)
        report.write()
    chosen = [MEASUREMENTS[name] for name in options.measurements or MEASUREMENTS]
    _measure(chosen, options, accelerator, console, report, deadline)
    console.print("Medians over the rounds (quartiles). Ratios are computed within each round.", highlight=False)
    console.print(f"All rounds are in {report.path}", highlight=False)
    for failure in report.failures:
        console.print(f"FAILED: {escape(failure)}", style="bold red", highlight=False)
    _banner(console, accelerator)
    return EXIT_FAILED if report.failures else 0


@dataclass(slots=True)
class Report:
    """Content of results.json, written after each measurement, so that an interruption keeps the completed ones."""

    folder: Path
    accelerator: Accelerator
    facts: Mapping[str, str]
    rounds: int
    quick: bool
    tests: dict[str, Any] | None = None
    measurements: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.folder / "results.json"

    @property
    def failures(self) -> list[str]:
        """Return a line for each failure."""
        tests = [] if self.tests is None or self.tests["passed"] else [f"tests: {self.tests['outcome']}"]
        return [*tests, *(f"{name}: {error}" for name, error in self.errors.items())]

    def write(self) -> None:
        """Write the file."""
        content = {
            "command": shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
            "is_gpu": self.accelerator.is_gpu,
            "note": "" if self.accelerator.is_gpu else NO_GPU,
            "machine": self.facts,
            "rounds": self.rounds,
            "quick": self.quick,
            "tests": self.tests,
            "measurements": self.measurements,
            "errors": self.errors,
        }
        self.path.write_text(json.dumps(content, indent=2) + "\n")


def _test(accelerator: Accelerator, console: Console, seconds: float) -> dict[str, Any]:
    """Run the tests; with a GPU, none of them may be skipped."""
    environment = {**os.environ, "TELELOADER_GPU": "1"} if accelerator.is_gpu else dict(os.environ)
    command = [sys.executable, "-m", "pytest", str(TESTS)]
    console.print(f"$ {'TELELOADER_GPU=1 ' if accelerator.is_gpu else ''}python -m pytest {TESTS}", highlight=False)
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        status = process.wait(seconds)
        outcome = f"pytest exited with status {status}"
    except subprocess.TimeoutExpired:
        status, outcome = -1, f"pytest was ended after {seconds:.0f} s"
        process.send_signal(signal.SIGINT)  # lets fixtures end their servers
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT)
    finally:
        process.kill()
        process.wait()
    return {"passed": status == 0, "outcome": outcome, "TELELOADER_GPU": environment.get("TELELOADER_GPU", "")}


def _measure(
    chosen: Sequence[Measurement],
    options: argparse.Namespace,
    accelerator: Accelerator,
    console: Console,
    report: Report,
    deadline: float,
) -> None:
    num_workers = max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // 2))
    hosted = toml({source.name: source.table for source in (LONG, SHORT)})
    # the bar is drawn only between turns, because a refresh thread would take CPU time from the measurements
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with (
        Progress(*columns, console=console, auto_refresh=False, transient=True) as progress,
        configured(num_workers, hosted) as server,
    ):
        setting = Setting(
            accelerator,
            Compute(accelerator),
            Config(server.url, num_workers, _batch_size(accelerator, quick=options.quick)),
            server.process.pid,
            options.rounds,
            0.1 if options.quick else 1.0 if accelerator.is_gpu else 0.3,
            options.quick,
        )
        for number, measurement in enumerate(chosen):
            weight = measurement.weight / sum(each.weight for each in chosen[number:])
            now = time.monotonic()
            if now > deadline:
                report.errors[measurement.name] = f"not measured: the limit of {options.minutes:g} minutes was over"
                report.write()
                continue
            rounds = Rounds(options.rounds, now + weight * (deadline - now))
            steps, run = measurement.prepare(setting)
            bar = progress.add_task(measurement.name, total=steps * options.rounds)
            outcome = _outcome(measurement.name, run, _stepper(progress, bar), rounds, report)
            progress.remove_task(bar)
            for table in outcome.tables:
                if isinstance(table, Table) and not accelerator.is_gpu:
                    table.caption = FALLBACK
                console.print(table)
            if measurement.name == Overlap.name and outcome.results:
                _draw(outcome, accelerator, report, console)


def _batch_size(accelerator: Accelerator, *, quick: bool) -> int:
    if accelerator.is_gpu:
        return 256
    return 8 if quick else 16


def _outcome(name: str, run: Any, step: Step, rounds: Rounds, report: Report) -> Outcome:
    """Run a measurement; report a failure instead of raising, so that further measurements run."""
    outcome, began = Outcome([], []), time.monotonic()
    try:
        outcome = run(step, rounds)
        report.measurements[name] = {
            "rounds": rounds.taken,
            "seconds": time.monotonic() - began,
            "results": outcome.results,
        }
    except Exception as error:  # noqa: BLE001 - time on a GPU is too rare to lose the other measurements
        traceback.print_exc()
        report.errors[name] = f"{type(error).__name__}: {error}"
    report.write()
    return outcome


def _draw(outcome: Outcome, accelerator: Accelerator, report: Report, console: Console) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no timeline: matplotlib is not installed (pip install --group gpu)")
        return
    path = report.folder / "timeline.png"
    draw(outcome.results, path, is_gpu=accelerator.is_gpu, device=report.facts["gpu"])
    console.print(f"the timeline is in {path}", highlight=False)


def _stepper(progress: Progress, bar: Any) -> Step:
    def step(text: str) -> None:
        progress.update(bar, description=text, advance=1)
        progress.refresh()

    return step


def _banner(console: Console, accelerator: Accelerator) -> None:
    if not accelerator.is_gpu:
        console.print(Panel(NO_GPU, style="bold yellow"))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
