"""What the tools share to show things: consoles, and texts of others made harmless."""

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

from teleloader_shared.text import harmless

PIPE_WIDTH: Final = 1000
"""Columns of what is no terminal: nothing is cut or wrapped there."""


def to_people() -> Console:
    """What results are written to: coloured in a terminal, and plain in a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def progress_bar(*columns: ProgressColumn, **options: Any) -> Progress:
    """A bar that is gone in the end, apart from the result; none where nobody looks."""
    console = Console(stderr=True, highlight=False)
    console.quiet = not console.is_terminal  # a bar that is disabled ends with an empty line before rich 14.3
    return Progress(*columns, console=console, disable=console.quiet, transient=True, **options)


def print_json(value: Any) -> None:
    """One line, for programs."""
    print(json.dumps(value), flush=True)


def shortened(name: str, room: int) -> str:
    """A name in so many characters: of most names the end tells which it is, so more is kept of it."""
    if len(name) <= room:
        return name
    head = (room - 1) // 3
    return f"{name[:head]}\N{HORIZONTAL ELLIPSIS}{name[len(name) - (room - 1 - head) :]}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table of records."""

    title: str
    cell: Callable[[Any], str | Text | ProgressBar]
    """What stands there for a record; text is made harmless."""
    is_words: bool = False
    """Whether it stands at the left, and is cut where the screen is too narrow; numbers are not."""
    from_width: int = 0
    """Columns that a screen must have for it to be shown."""


def table(columns: Iterable[Column], records: Iterable[Any], width: int = PIPE_WIDTH) -> Table:
    """A table without lines, for a screen of `width` columns."""
    shown = [column for column in columns if column.from_width <= width]
    made = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", show_edge=False, pad_edge=False)
    made.show_header = any(column.title for column in shown)
    for column in shown:
        # rich narrows those columns first that may wrap; their cells do not
        side: Literal["left", "right"] = "left" if column.is_words else "right"
        made.add_column(Text(column.title), justify=side, no_wrap=not column.is_words, min_width=len(column.title))
    for record in records:
        made.add_row(*(_harmless_cell(column.cell(record)) for column in shown))
    return made


def _harmless_cell(cell: str | Text | ProgressBar) -> Text | ProgressBar:
    if isinstance(cell, str):
        return Text(harmless(cell).replace("\n", " "), no_wrap=True, overflow="ellipsis")
    return cell
