"""Terminal output of the commands: console, progress bar, tables, and control character removal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from teleloader_shared.text import printable

PIPE_WIDTH: Final = 1000
"""Assumed width of an output that is not a terminal, in characters, so that lines are neither cut nor wrapped."""


def results_console() -> Console:
    """Return a rich console for stdout: with colors in a terminal, plain in a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def progress_bar(*columns: ProgressColumn, **options: Any) -> Progress:
    """Return a transient progress bar on stderr, disabled if stderr is not a terminal."""
    console = Console(stderr=True, highlight=False)
    console.quiet = not console.is_terminal  # before rich 14.3 a disabled bar ends with an empty line
    return Progress(*columns, console=console, disable=console.quiet, transient=True, **options)


def print_json(value: Any) -> None:
    """Print a value on stdout as one line of JSON."""
    print(json.dumps(value), flush=True)


def shortened(name: str, room: int) -> str:
    """Shorten a name to `room` characters with an ellipsis; keep more of the end, where most names differ."""
    if len(name) <= room:
        return name
    head = (room - 1) // 3
    return f"{name[:head]}\N{HORIZONTAL ELLIPSIS}{name[len(name) - (room - 1 - head) :]}"


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table with one row per record."""

    title: str
    cell: Callable[[Any], str | Text | ProgressBar]
    """Formats the cell for a record; control characters of the result are removed."""
    is_words: bool = False
    """True if cells are text: left-aligned, and truncated if the screen is too narrow. Numbers are never truncated."""
    from_width: int = 0
    """Minimum width of the screen on which the column is shown, in characters."""


def table(columns: Iterable[Column], records: Iterable[Any], width: int = PIPE_WIDTH) -> Table:
    """Create a borderless table with the columns that fit into `width` characters."""
    shown = [column for column in columns if column.from_width <= width]
    made = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", show_edge=False, pad_edge=False)
    made.show_header = any(column.title for column in shown)
    for column in shown:
        # rich first narrows columns that may wrap; their cells are truncated instead of wrapped
        side: Literal["left", "right"] = "left" if column.is_words else "right"
        made.add_column(
            _printable_cell(column.title), justify=side, no_wrap=not column.is_words, min_width=len(column.title)
        )
    for record in records:
        made.add_row(*(_printable_cell(column.cell(record)) for column in shown))
    return made


def _printable_cell(cell: str | Text | ProgressBar) -> Text | ProgressBar:
    if isinstance(cell, str):
        return Text(printable(cell).replace("\n", " "), no_wrap=True, overflow="ellipsis")
    return cell
