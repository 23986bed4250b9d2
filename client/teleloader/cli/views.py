"""Sortable tables of records from the statistics of servers: ``teleloader datasets`` and ``teleloader workers``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

import click
from rich.console import Group
from rich.text import Text

from teleloader.cli.compare import ServerRow, slow_servers
from teleloader.cli.showing import Column, in_order, print_json, results_console, table
from teleloader.cli.stats import (
    CONSUMER_COLUMNS,
    SERVER_COLUMNS,
    WORKER_COLUMNS,
    Reading,
    Source,
    compared_servers,
    datasets_columns,
    stages_legend,
    total,
)
from teleloader_shared.errors import TeleloaderError
from teleloader_shared.stats import Stats, WorkerStats
from teleloader_shared.text import did_you_mean, printable


class Order(NamedTuple):
    """Order of the rows of a table."""

    column: str
    """Title of a column."""
    descending: bool


@dataclass(frozen=True, slots=True)
class View:
    """Table of one kind of record."""

    name: str
    """Name of the records in the plural."""
    columns: Callable[[Sequence[Reading], int], Sequence[Column]]
    """Returns the columns, given the responses of the servers and the width of the screen."""
    records: Callable[[Sequence[Reading]], Sequence[Any]]
    """Returns the records in the responses."""
    order: Order
    """Default order."""
    as_json: Callable[[Any], Any] = asdict
    """Converts a record to a JSON value."""
    legend: Callable[[Sequence[Reading], int], Sequence[Text]] = lambda readings, width: ()
    """Returns the lines below the table."""

    def titles(self, readings: Sequence[Reading]) -> list[str]:
        """Return the titles of the columns by which the table can be sorted."""
        return [column.title for column in self.columns(readings, 0) if column.title]

    def rows(self, readings: Sequence[Reading], order: Order) -> list[Any]:
        """Return the records in the given order."""
        columns = {column.title: column for column in self.columns(readings, 0)}
        if order.column not in columns:  # servers with other loading stages than before
            order = self.order
        return in_order(self.records(readings), columns[order.column], descending=order.descending)

    def shown(self, readings: Sequence[Reading], order: Order, width: int, most: int | None = None) -> Group:
        """Render the table.

        Args:
            readings: Responses of the servers.
            order: Order of the rows.
            width: Width of the screen in characters.
            most: Maximum number of rows on an interactive screen, which also marks the column that determines the
                order; None to render all rows without a mark, which programs may read.
        """
        rows = self.rows(readings, order)
        if most is None:
            return Group(table(self.columns(readings, width), rows, width), *self.legend(readings, width))
        arrow = "\N{BLACK DOWN-POINTING TRIANGLE}" if order.descending else "\N{BLACK UP-POINTING TRIANGLE}"
        columns = [
            replace(column, title=f"{column.title}{arrow}") if column.title == order.column else column
            for column in self.columns(readings, width)
        ]
        omitted = [] if len(rows) <= most else [Text(f"... and {len(rows) - most:,} more", "dim")]
        return Group(table(columns, rows[:most], width, omitted), *self.legend(readings, width))


class _WorkerRow(NamedTuple):
    """Worker of one of several servers."""

    server: str
    """URL of the server."""
    stats: WorkerStats

    def as_json(self) -> dict[str, Any]:
        return {"server": self.server, **asdict(self.stats)}


def _workers(readings: Sequence[Reading]) -> list[_WorkerRow]:
    return [
        _WorkerRow(reading.url, worker)
        for reading in readings
        if isinstance(reading.stats, Stats)
        for worker in reading.stats.workers
    ]


def _workers_columns(readings: Sequence[Reading], width: int) -> list[Column]:
    columns = [
        replace(each, cell=_of_worker(each.cell), key=each.key and _of_worker(each.key)) for each in WORKER_COLUMNS
    ]
    if len(readings) == 1:
        return columns
    return [Column("server", lambda row: row.server, least=22, is_name=True), *columns]


def _of_worker(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda row: function(row.stats)


VIEWS: Final = (
    View(
        "consumers",
        lambda readings, width: CONSUMER_COLUMNS,
        lambda readings: total(readings).consumers,
        Order("waits", descending=True),
    ),
    View("workers", _workers_columns, _workers, Order("worker", descending=False), _WorkerRow.as_json),
    View(
        "datasets",
        lambda readings, width: datasets_columns(total(readings).datasets, width),
        lambda readings: total(readings).datasets,
        Order("dataset", descending=False),
        legend=lambda readings, width: [stages_legend(total(readings).datasets, width)],
    ),
    View(
        "servers",
        lambda readings, width: SERVER_COLUMNS,
        compared_servers,
        Order("skew", descending=True),
        ServerRow.as_json,
        legend=lambda readings, width: [Text(printable(text)) for text in slow_servers(compared_servers(readings))],
    ),
)
CONSUMERS, WORKERS, DATASETS, SERVERS = VIEWS


def chosen_order(view: View, column: str | None, readings: Sequence[Reading], *, reverse: bool) -> Order:
    """Return the order that the options select: numbers descending and text ascending, unless `reverse` is set.

    Args:
        view: The table.
        column: Title of the column; None for the default.
        readings: Responses of the servers.
        reverse: Whether to reverse the order.

    Raises:
        click.UsageError: If the table has no such column.
    """
    if column is None:
        return view.order._replace(descending=view.order.descending ^ reverse)
    found = next((each for each in view.columns(readings, 0) if each.title == column), None)
    if not column or found is None:
        titles = view.titles(readings)
        hint = did_you_mean(column, titles) or f"Available: {', '.join(titles)}"
        raise click.UsageError(f"unknown column {column!r} of {view.name}. {hint}")
    return Order(column, descending=(not found.is_words) ^ reverse)


def once(view: View, source: Source, sort: str | None, *, reverse: bool, as_json: bool) -> None:
    """Request the statistics of servers, and print the records as a table or JSON; report errors to stderr."""
    readings = source.read()
    order = chosen_order(view, sort, readings, reverse=reverse)
    if as_json:
        print_json([view.as_json(row) for row in view.rows(readings, order)])
    else:
        console = results_console()
        console.print(view.shown(readings, order, console.width))
    for problem in problems(readings, source):
        click.echo(f"teleloader: {problem}", err=True)


def problems(readings: Sequence[Reading], source: Source) -> list[str]:
    """Return the errors of servers, and the problems of the directory that lists them."""
    errors = [str(reading.stats) for reading in readings if isinstance(reading.stats, TeleloaderError)]
    return [printable(text).replace("\n", " ") for text in (*errors, *source.problems)]
