"""Output of a run, while it runs and at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from tests.chaos.run import Outcome
from tests.chaos.schedule import Kind

LINE_EVERY: Final = 5.0
"""Seconds between two lines if the output is not a terminal."""


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that updates one line, or prints a line each time if the output is not a terminal."""
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda line: status.update(line)
        return
    last = 0.0

    def tell(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY:
            last = time.monotonic()
            console.print(line, highlight=False, soft_wrap=True)

    yield tell


def show(outcome: Outcome, console: Console) -> None:
    """Print the tables of a run."""
    console.print(_faults(outcome), _consumers(outcome), _memory(outcome))
    left = ", ".join(f"{count} {what}" for what, count in outcome.leftovers.items())
    console.print(f"left behind: {left}", highlight=False)
    for problem in outcome.problems:
        console.print(f"[red]violation:[/] {problem}", highlight=False, soft_wrap=True)
    if outcome.failed:
        for number, log in enumerate(outcome.logs):
            console.print(f"the last that server {number} said:\n{log}", markup=False, highlight=False, soft_wrap=True)


def _faults(outcome: Outcome) -> Table:
    table = _table(f"faults, seed {outcome.seed}", "kind", "injected", "target away")
    for kind in Kind:
        table.add_row(kind, f"{outcome.injected[kind]}", f"{outcome.missed[kind] or ''}")
    table.add_row("all", f"{outcome.injected.total()}", f"{outcome.missed.total() or ''}")
    return table


def _consumers(outcome: Outcome) -> Table:
    columns = ("epochs", "batches", "lost", "doubled", "wrong", "misplaced", "resumed", "worst stall")
    table = _table("consumers", "name", *columns)
    for name, found in outcome.verdicts.items():
        numbers = (found.lost, found.doubled, found.wrong, found.misplaced, found.resumed)
        table.add_row(
            name, f"{found.epochs}", f"{found.batches:,}", *map(str, numbers), f"{found.worst_wait:.1f} s"
        )  # fmt: skip
    return table


def _memory(outcome: Outcome) -> Table:
    table = _table("memory without mapped files (PSS)", "process", "peak", "bound")
    for found in outcome.memory:
        table.add_row(found.name, f"{found.peak / 2**20:.0f} MiB", f"{found.bound / 2**20:.0f} MiB")
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
