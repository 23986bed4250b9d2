"""Implementation of ``teleloader-server check``: runs `probe` in a child process, and prints the report."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Final

import click

from teleloader_server.cli.probe import Checked, Problem
from teleloader_server.config import DatasetConfig
from teleloader_server.limits import Limits
from teleloader_server.workers.isolation import Isolation
from teleloader_shared.stats import Latency
from teleloader_shared.summary import Part
from teleloader_shared.units import counted, number, seconds, share, size

_COLOURS: Final = {"error": "red", "warning": "yellow", "hint": "cyan"}


def check(
    config: DatasetConfig,
    limits: Limits,
    isolation: Isolation,
    batch_size: int,
    batches: int,
    on_step: Callable[[str], None],
) -> Checked:
    """Check a dataset in a child process, so that a crash in dataset code does not end this process.

    Args:
        config: Configuration of the dataset.
        limits: Worker limits of the server that will host the dataset.
        isolation: Restrictions of the child process.
        batch_size: Samples per batch.
        batches: Batches per pass.
        on_step: Callback, called with the name of each step.

    Returns:
        The report; after a crash, it contains only the problem that the child process exited.
    """
    program = "from teleloader_server.cli.probe import main; main()"
    request = {
        "dataset": asdict(config), "limits": asdict(limits), "path": sys.path, "batch_size": batch_size,
        "batches": batches,
    }  # fmt: skip
    with subprocess.Popen(  # noqa: S603
        isolation.command([sys.executable, "-c", program]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=isolation.environment(os.environ),
    ) as process:  # fmt: skip
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("internal error: Popen returned no pipes")
        step = "starting"
        try:
            with process.stdin:
                json.dump(request, process.stdin)
            for line in process.stdout:
                message = json.loads(line)
                if "checked" in message:
                    return _checked(message["checked"])
                step = message["step"]
                on_step(step)
        finally:
            process.kill()
    return Checked(config.name, problems=[_ended(process.returncode, step)])


def _checked(fields: dict[str, Any]) -> Checked:
    """Decode the report from its JSON fields."""
    parts = [Part(**{**part, "shape": part["shape"] and tuple(part["shape"])}) for part in fields.pop("parts")]
    problems = [Problem(**problem) for problem in fields.pop("problems")]
    sample = fields.pop("sample")
    return Checked(**fields, parts=parts, problems=problems, sample=sample and Latency(**sample))


def _ended(status: int, step: str) -> Problem:
    how = f"exit code {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
    return Problem(
        "error",
        f"the process of the dataset exited during the step {step!r} with {how}",
        "possible causes: a crash in C code, os._exit() or exhausted memory. Run the code alone with "
        "python -X faulthandler",
    )


def _lines(found: Checked) -> Iterator[tuple[str, str]]:
    """Yield the labels and texts of the report's lines; continuation lines have an empty label."""
    if found.kind is not None:
        length = "unknown length" if found.length is None else counted(found.length, "sample")
        yield "dataset", f"{found.kind}-style, {found.type}, {length}"
    if found.built_in is not None and found.memory is not None:
        yield "built in", f"{seconds(found.built_in)}, using {size(found.memory)} of memory including its imports"
        pickled = "no" if found.pickled is None else f"yes, {size(found.pickled)}"
        yield "pickles", f"{pickled} (not required)"
    if found.sample is not None and found.sample.count:
        slow = f"p50 {seconds(found.sample.p50)}, p95 {seconds(found.sample.p95)}"
        yield "time/sample", f"{slow} ({found.sample.count:,} samples, fetched by a worker)"
    if found.batch_bytes is not None:
        yield "batch", f"{found.batch_size} samples, {size(found.batch_bytes)}"
        for part in found.parts:
            shape = "" if part.shape is None else f"{part.shape} "
            yield "", f"{part.path}  {part.type} {shape}{part.value}".rstrip()
    if found.samples_per_second is not None:
        yield "throughput", f"{number(found.samples_per_second)} samples/s per worker, in batches"
    if found.padding is not None and found.balanced_padding is not None:
        yield (
            "padding",
            f"{share(found.padding)} of random batches, {share(found.balanced_padding)} with LengthBalance()",
        )
    if found.repeatable is not None:
        yield "repeatable", "yes, recomputed batches are bit-identical" if found.repeatable else "no"
    if found.unchecked:
        yield "not checked", f"functions {', '.join(found.unchecked)}: each may be a collate_fn or a worker_init_fn"


def progress_of(name: str) -> Callable[[str], None]:
    """Return a callback that shows the current step on one terminal line, overwriting the previous step."""

    def show_step(step: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[2K{name}: {step} ...", nl=False, err=True)

    return show_step


def show(found: Checked) -> None:
    """Print the report on a dataset to stdout."""
    if sys.stderr.isatty():
        click.echo("\r\x1b[2K", nl=False, err=True)
    warnings = sum(problem.severity == "warning" for problem in found.problems)
    diagnosis, colour = (counted(warnings, "warning"), "yellow") if warnings else ("OK", "green")
    if found.failed:
        diagnosis, colour = "failed", "red"
    click.echo(f"{click.style(found.dataset, bold=True)}: {click.style(diagnosis, fg=colour)}")
    for label, text in _lines(found):
        click.echo(f"  {label:<11} {text}")
    for problem in found.problems:
        heading = click.style(problem.severity, fg=_COLOURS[problem.severity])
        what = problem.what.rstrip().replace("\n", "\n    ")
        click.echo(f"  {heading}: {what}\n{_advice(problem)}")
    click.echo()


def _advice(problem: Problem) -> str:
    """Format the advice of a problem, wrapped at the width of the terminal."""
    line = f"-> {problem.advice}"
    width = shutil.get_terminal_size().columns
    return click.wrap_text(line, width, "    ", "       ") if sys.stdout.isatty() else f"    {line}"
