"""Statistics and tables of measured turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.contenders import FLOOR, TORCH
from benchmarks.measuring import Contender, Spread, Turn, ratios
from benchmarks.workloads import Workload, sizes

Turns = Mapping[Contender, Sequence[Turn]]
"""Turns of each contender, one per round."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Result of one contender; ratios are computed within a round, before the median."""

    contender: str
    batches_per_second: Spread
    microseconds_per_batch: Spread
    bytes_per_second: Spread
    cpu_per_gb: Spread
    """CPU seconds of the consumer process per 10**9 bytes."""
    server_cpu_per_gb: Spread | None
    """CPU seconds of the server's main process per 10**9 bytes; None without a server that can be inspected."""
    to_floor: Spread | None
    """Throughput relative to the floor; None if not measured."""
    to_torch: Spread | None
    """Throughput relative to torch's local DataLoader with the same number of workers; None if not measured."""
    beside: str | None
    """Name of the contender that loads the same batches in the seeded order; None without comparison."""
    cost_beside: Spread | None
    """Time per batch relative to that of `beside`."""


def evaluate(workload: Workload, turns: Turns) -> list[Figures]:
    """Return the figures of each contender."""
    rates, nbytes = _rates(turns), sizes(workload)[1]
    floor = rates.get(FLOOR)
    return [
        Figures(
            contender=contender.name,
            batches_per_second=Spread.of(rate := rates[contender.name]),
            microseconds_per_batch=Spread.of([1e6 / each for each in rate]),
            bytes_per_second=Spread.of([each * nbytes for each in rate]),
            cpu_per_gb=Spread.of([turn.cpu / (turn.batches * nbytes) * 1e9 for turn in row]),
            server_cpu_per_gb=_server_cpu(row, nbytes),
            to_floor=None if floor is None else ratios(rate, floor),
            to_torch=None if TORCH not in rates else ratios(rate, rates[TORCH]),
            beside=contender.beside,
            cost_beside=None if contender.beside is None else ratios(rates[contender.beside], rate),
        )
        for contender, row in turns.items()
    ]


def figures(workload: Workload, turns: Turns) -> dict[str, Spread]:
    """Return the throughput relative to each other contender of the workload, and CPU times, by name.

    The names are "table: teleloader to floor", "wire: client CPU of teleloader to floor" and so on.
    """
    found = {}
    rates, cpu = (
        _rates(turns),
        {contender.name: [turn.cpu / turn.batches for turn in row] for contender, row in turns.items()},
    )
    for name in rates:
        for base in rates:
            if name != base:
                found[f"{workload.name}: {name} to {base}"] = ratios(rates[name], rates[base])
                found[f"{workload.name}: client CPU of {name} to {base}"] = ratios(cpu[name], cpu[base])
    for row in evaluate(workload, turns):
        found[f"{workload.name}: client CPU of {row.contender}"] = row.cpu_per_gb
        if row.server_cpu_per_gb is not None:
            found[f"{workload.name}: server CPU of {row.contender}"] = row.server_cpu_per_gb
    return found


def table(workload: Workload, figures: Sequence[Figures]) -> Table:
    """Return a table of the figures: medians with quartiles."""
    made = Table(title=f"{workload.name} - {workload.about}", title_justify="left", title_style="bold")
    made.add_column("contender", no_wrap=True)
    for heading in ("batches/s", "MB/s", "to floor", "to torch local", "client CPU, s/GB", "server CPU, s/GB"):
        made.add_column(heading, justify="right", no_wrap=True)
    for found in figures:
        made.add_row(
            found.contender,
            found.batches_per_second.text(",.0f" if found.batches_per_second.middle >= 100 else ",.1f"),
            f"{found.bytes_per_second.middle / 1e6:,.0f}",
            _cell(found.to_floor),
            _cell(found.to_torch),
            found.cpu_per_gb.text(".2f"),
            _cell(found.server_cpu_per_gb),
        )
    return made


def orders(figures: Sequence[Figures]) -> Table | None:
    """Return the cost per batch of index lists beside the seeded order; None if no such contender took part."""
    made = Table(title="sampling order: seeded, or drawn by the client", title_justify="left", title_style="bold")
    made.add_column("contender", no_wrap=True)
    for heading in ("seeded, us/batch", "client, us/batch", "client to seeded"):
        made.add_column(heading, justify="right", no_wrap=True)
    by_name = {found.contender: found for found in figures}
    for found in figures:
        if found.beside is not None and found.cost_beside is not None:
            made.add_row(
                found.beside,
                by_name[found.beside].microseconds_per_batch.text(",.0f"),
                found.microseconds_per_batch.text(",.0f"),
                found.cost_beside.text(".2f"),
            )
    return made if made.row_count else None


def _rates(turns: Turns) -> dict[str, list[float]]:
    return {contender.name: [turn.rate for turn in row] for contender, row in turns.items()}


def _server_cpu(row: Sequence[Turn], nbytes: float) -> Spread | None:
    measured = [turn.server_cpu / (turn.batches * nbytes) * 1e9 for turn in row if turn.server_cpu is not None]
    return Spread.of(measured) if measured else None


def _cell(spread: Spread | None) -> str:
    return "-" if spread is None else spread.text(".2f" if spread.middle < 10 else ".1f")
