"""Terminal output of the commands: console, progress bar, tables, and control character removal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Literal, NoReturn

from rich.console import Console, Group, RenderableType
from rich.progress import Progress, ProgressColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from teleloader_shared.text import printable

PIPE_WIDTH: Final = 1000
"""Assumed width of an output that is not a terminal, in characters, so that lines are neither cut nor wrapped."""
_BAR_WIDTH: Final = 10
"""Width of the progress bars in tables, in characters."""


class _ResultsConsole(Console):
    """Console for stdout. Older versions of rich raise BrokenPipeError, too, instead of an exit with code 1."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


def results_console() -> Console:
    """Return a rich console for stdout: with colors in a terminal, plain in a pipe."""
    console = _ResultsConsole(highlight=False)
    return console if console.is_terminal else _ResultsConsole(highlight=False, width=PIPE_WIDTH)


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
    key: Callable[[Any], Any] | None = None
    """Returns the value by which records are sorted, or None if it is unknown; without a `key`, records are sorted by
    the text of their cells."""
    rank: int = 0
    """Columns of the highest rank are hidden first if the screen is too narrow. Columns of rank 0, which identify a row
    or are the reason to look at the table, are always shown."""
    least: int | None = None
    """Width of shortened cells, in characters; None if the cells are not shortened, such as numbers. Cells are
    shortened before columns are hidden, and below this width only if no more columns can be hidden."""
    is_name: bool = False
    """True if shortened cells keep the end of the text, too."""

    @property
    def is_words(self) -> bool:
        """True if the cells are text, which is left-aligned."""
        return self.least is not None


def figure(title: str, name: str, show: Callable[[Any], str | Text] = str, rank: int = 0) -> Column:
    """Return a column of numbers.

    Args:
        title: Title of the column.
        name: Name of the number's attribute; a dotted name for an attribute of an attribute.
        show: Formats the number; not called for None, which is shown as a dash.
        rank: `Column.rank`.
    """
    number = attrgetter(name)

    def cell(record: Any) -> str | Text:
        value = number(record)
        return "-" if value is None else show(value)

    return Column(title, cell, number, rank)


def in_order(records: Iterable[Any], column: Column, *, descending: bool) -> list[Any]:
    """Sort records by a column; records whose value is unknown come last."""
    keyed = [(_sort_key(column, record), record) for record in records]
    known = [pair for pair in keyed if pair[0] is not None]
    known.sort(key=lambda pair: pair[0], reverse=descending)
    return [record for _, record in known] + [record for key, record in keyed if key is None]


def _sort_key(column: Column, record: Any) -> Any:
    return column.key(record) if column.key is not None else str(column.cell(record)).casefold()


def table(
    columns: Iterable[Column], records: Iterable[Any], width: int = PIPE_WIDTH, notes: Sequence[Text] = ()
) -> Group:
    """Create a borderless table that fits into `width` characters, and a line with the titles of hidden columns.

    Numbers are never shortened: the least important columns are hidden instead.

    Args:
        columns: Columns of the table.
        records: One record per row.
        width: Width of the screen in characters.
        notes: Lines below the table.
    """
    every, rows = list(columns), list(records)
    cells = {column: [_printable_cell(column.cell(record)) for record in rows] for column in every}
    natural = {column: max(len(column.title), *map(_width, cells[column]), 0) for column in every}
    shown, widths = _fitted(every, natural, width)
    made = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", show_edge=False, pad_edge=False)
    made.show_header = any(column.title for column in shown)
    for column in shown:
        side: Literal["left", "right"] = "left" if column.is_words else "right"
        made.add_column(_printable_cell(column.title), justify=side, no_wrap=True, width=widths[column])
    for row in range(len(rows)):
        made.add_row(*(_shortened_cell(cells[column][row], column, widths[column]) for column in shown))
    return Group(made, *notes, *_hint([column.title for column in every if column not in shown and column.title]))


def _fitted(
    columns: Sequence[Column], natural: dict[Column, int], width: int
) -> tuple[list[Column], dict[Column, int]]:
    """Return the columns that fit into `width` characters, and their widths."""
    shown = list(columns)
    least = {
        column: size if column.least is None else min(size, max(column.least, len(column.title)))
        for column, size in natural.items()
    }

    def free() -> int:
        return width - sum(least[column] + 1 for column in shown) + 1

    while free() < 0 and (hideable := [column for column in shown if column.rank]):
        shown.remove(max(reversed(hideable), key=lambda column: column.rank))
    widths = dict(least)
    # the remaining characters: first to the columns of the lowest rank, and among these to the narrowest one
    for _ in range(free()):
        narrow = [column for column in shown if widths[column] < natural[column]]
        if not narrow:
            break
        widths[min(narrow, key=lambda column: (column.rank, widths[column]))] += 1
    # too few characters even for the columns that are always shown
    while sum(widths[column] + 1 for column in shown) - 1 > width:
        longest = max((column for column in shown if column.is_words), key=lambda column: widths[column], default=None)
        if longest is None or widths[longest] <= 1:
            break
        widths[longest] -= 1
    return shown, widths


def _hint(hidden: Sequence[str]) -> list[RenderableType]:
    if not hidden:
        return []
    return [Text(f"hidden columns: {', '.join(hidden)} (wider terminal or -o json)", "dim")]


def _width(cell: Text | ProgressBar) -> int:
    return cell.cell_len if isinstance(cell, Text) else _BAR_WIDTH


def _shortened_cell(cell: Text | ProgressBar, column: Column, width: int) -> Text | ProgressBar:
    if column.is_name and isinstance(cell, Text):
        return Text(shortened(cell.plain, width), no_wrap=True)
    return cell


def _printable_cell(cell: str | Text | ProgressBar) -> Text | ProgressBar:
    if isinstance(cell, str):
        return Text(printable(cell).replace("\n", " "), no_wrap=True, overflow="ellipsis")
    return cell
