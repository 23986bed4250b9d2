"""Statistics and tables of measured turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.contenders import Contender
from benchmarks.measuring import Spread, Turn
from benchmarks.workloads import Workload


@dataclass(frozen=True, slots=True)
class Figures:
    """Result of one contender; ratios are computed within a round, before the median."""

    contender: str
    num_workers: int
    batches_per_second: Spread
    microseconds_per_batch: Spread
    bytes_per_second: Spread
    cpu_per_gb: Spread
    """CPU seconds of the consumer process per 10**9 bytes."""
    to_floor: Spread | None
    """Throughput relative to plain sockets with the same number of producers; None if not measured."""
    to_torch: Spread | None
    """Throughput relative to torch's local DataLoader with the same number of workers; None if not measured."""
    beside: str | None
    """Name of the contender that loads the same batches in the seeded order; None without comparison."""
    cost_beside: Spread | None
    """Time per batch relative to that of `beside`."""


def evaluate(workload: Workload, contenders: Sequence[Contender], turns: Sequence[Sequence[Turn]]) -> list[Figures]:
    """Return the figures of each contender; `turns` has a row per contender with one turn per round."""
    by_name = {contender.name: row for contender, row in zip(contenders, turns, strict=True)}
    floor, torch = (
        {
            contender.num_workers: row
            for contender, row in zip(contenders, turns, strict=True)
            if contender.name.startswith(kind)
        }
        for kind in ("floor", "torch")
    )
    return [
        Figures(
            contender=contender.name,
            num_workers=contender.num_workers,
            batches_per_second=Spread.of([turn.rate for turn in row]),
            microseconds_per_batch=Spread.of([1e6 / turn.rate for turn in row]),
            bytes_per_second=Spread.of([turn.rate * workload.batch_bytes for turn in row]),
            cpu_per_gb=Spread.of([turn.cpu / (turn.batches * workload.batch_bytes) * 1e9 for turn in row]),
            to_floor=_ratio(row, floor[contender.num_workers]) if contender.num_workers in floor else None,
            to_torch=_ratio(row, torch[contender.num_workers]) if contender.num_workers in torch else None,
            beside=contender.beside,
            cost_beside=None if contender.beside is None else _ratio(by_name[contender.beside], row),
        )
        for contender, row in zip(contenders, turns, strict=True)
    ]


def table(workload: Workload, figures: Sequence[Figures]) -> Table:
    """Return a table of the figures: medians with minimum and maximum."""
    made = Table(title=f"{workload.name} - {workload.about}", title_justify="left", title_style="bold")
    made.add_column("contender", no_wrap=True)
    for heading in ("batches/s", "MB/s", "to floor", "to torch local", "client CPU s/GB"):
        made.add_column(heading, justify="right", no_wrap=True)
    for found in figures:
        made.add_row(
            found.contender,
            found.batches_per_second.text(",.0f" if found.batches_per_second.middle >= 100 else ",.1f"),
            f"{found.bytes_per_second.middle / 1e6:,.0f}",
            "-" if found.to_floor is None else found.to_floor.text(".2f"),
            "-" if found.to_torch is None else found.to_torch.text(".2f" if found.to_torch.middle < 10 else ".1f"),
            found.cpu_per_gb.text(".2f"),
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


def _ratio(row: Sequence[Turn], base: Sequence[Turn]) -> Spread:
    return Spread.of([turn.rate / other.rate for turn, other in zip(row, base, strict=True)])
