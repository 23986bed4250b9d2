"""Comparison of servers: the share of each, and which one is slower than others that serve the same loaders. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final, NamedTuple

from teleloader.cli.aggregate import diagnosis_of
from teleloader_shared.errors import TeleloaderError
from teleloader_shared.stats import Diagnosis, Stats
from teleloader_shared.units import counted, number, seconds

SLOW_WORK: Final = 1.5
"""Time per batch, relative to the median of other servers, from which a server counts as slow."""
SLOW_RATE: Final = 0.5
"""Batches/s, relative to the median of other servers, below which a server counts as slow."""
MIN_RATE: Final = 0.1
"""Batches/s of a server or of the others below which their rates are not compared."""
MAX_SLOW: Final = 3
"""Maximum number of slow servers that are described."""


class Skew(NamedTuple):
    """Rate and latency of a server, relative to the other servers that serve the same loaders."""

    servers: int
    """Number of the other servers."""
    rate: float | None
    """Batches/s, as a multiple of their median; None if they send too few."""
    work: float | None
    """Time of a worker per batch, as a multiple of their median; None if it is unknown."""
    median_work: float | None
    """Median of their times per batch in seconds."""

    @property
    def is_slow(self) -> bool:
        """True if the server is slow by its time per batch or by its rate."""
        return (self.work or 0.0) >= SLOW_WORK or (self.rate is not None and self.rate <= SLOW_RATE)


@dataclass(frozen=True, slots=True)
class ServerRow:
    """A server among others."""

    url: str
    stats: Stats | None
    """Its statistics; None if they are not available."""
    error: str | None = None
    """Reason why they are not."""
    failed_for: float = 0.0
    """Seconds since the first failed request after the last successful one."""
    share: float | None = None
    """Fraction of the batches that all servers send; None if they send none."""
    busy: float | None = None
    """Busy fraction of its workers; None without workers."""
    wait: float | None = None
    """Largest data wait of its consumers; None if none is known."""
    work: float | None = None
    """Time of a worker per batch in seconds; None if no batch was sent recently."""
    diagnosis: Diagnosis | None = None
    """Diagnosis of the consumer that it explains with the largest confidence; None without consumers."""
    skew: Skew | None = None
    """Comparison with other servers; None if no other one serves the same loaders."""

    def as_json(self) -> dict[str, Any]:
        """Return the row as a JSON value, with the figures of the server, and without its lists."""
        kept = ("url", "error", "failed_for", "share", "busy", "wait", "work")
        return {
            **{name: getattr(self, name) for name in kept},
            "diagnosis": None if self.diagnosis is None else asdict(self.diagnosis),
            "skew": None if self.skew is None else {**self.skew._asdict(), "slow": self.skew.is_slow},
            "server": None if self.stats is None else asdict(self.stats.server),
        }

    @property
    def need(self) -> tuple[float, float]:
        """Key that sorts the server that needs attention most first: unreachable, then slow, then waiting ones."""
        if self.stats is None:
            return -2.0, -self.failed_for
        if self.skew is not None and self.skew.is_slow:
            return -1.0, -(self.skew.work or 0.0)
        return 0.0, -(self.wait or 0.0)


def compared(servers: Iterable[tuple[str, Stats | TeleloaderError, float]]) -> list[ServerRow]:
    """Compare servers; the one that needs attention most comes first.

    Args:
        servers: URL, statistics or error, and `ServerRow.failed_for` of each server.
    """
    found = list(servers)
    total = sum(stats.server.batches_per_second for _, stats, _ in found if isinstance(stats, Stats))
    rows = [_row(url, stats, failed_for, total) for url, stats, failed_for in found]
    loaders = {row.url: _loaders(row) for row in rows}
    rows = [_compared(row, [o for o in rows if o is not row and loaders[o.url] & loaders[row.url]]) for row in rows]
    return sorted(rows, key=lambda row: (row.need, row.url))


def slow_servers(rows: Sequence[ServerRow]) -> list[str]:
    """Return a sentence for each server that is slower than others that serve the same loaders."""
    slow = [row for row in rows if row.skew is not None and row.skew.is_slow]
    sentences = [_sentence(row, row.skew) for row in slow[:MAX_SLOW] if row.skew is not None]
    if len(slow) > MAX_SLOW:
        sentences.append(f"Slow as well: {counted(len(slow) - MAX_SLOW, 'more server')}.")
    return sentences


def _sentence(row: ServerRow, skew: Skew) -> str:
    others = f"the median of {counted(skew.servers, 'other server')}"
    parts = []
    if skew.work is not None and row.work is not None and skew.median_work is not None:
        parts.append(
            f"{seconds(row.work)} of a worker's time per batch, {number(skew.work)} times {others} "
            f"({seconds(skew.median_work)})"
        )
    if skew.rate is not None and row.stats is not None:
        rate = number(row.stats.server.batches_per_second)
        parts.append(f"{rate} batches/s, {number(skew.rate)} times {'theirs' if parts else others}")
    return f"{row.url} is slow: {'; '.join(parts)}."


def _row(url: str, stats: Stats | TeleloaderError, failed_for: float, total: float) -> ServerRow:
    if not isinstance(stats, Stats):
        return ServerRow(url, None, str(stats), failed_for)
    rate = stats.server.batches_per_second
    workers = [worker.busy_fraction for worker in stats.workers]
    waits = [each.data_wait_fraction for each in stats.consumers if each.data_wait_fraction is not None]
    active = [each for each in stats.consumers if each.diagnosis.bottleneck not in ("idle", "finished")]
    return ServerRow(
        url,
        stats,
        share=rate / total if total > 0 else None,
        busy=sum(workers) / len(workers) if workers else None,
        wait=max(waits, default=None),
        work=sum(workers) / rate if workers and rate >= MIN_RATE else None,
        diagnosis=diagnosis_of(active or stats.consumers) if stats.consumers else None,
    )


def _loaders(row: ServerRow) -> set[str]:
    """Return the loaders that a server serves at present."""
    if row.stats is None:
        return set()
    return {each.loader for each in row.stats.consumers if each.diagnosis.bottleneck not in ("idle", "finished")}


def _compared(row: ServerRow, others: Sequence[ServerRow]) -> ServerRow:
    if row.stats is None or not others:
        return row
    rates = [other.stats.server.batches_per_second for other in others if other.stats is not None]
    works = [other.work for other in others if other.work is not None]
    rate, work = median(rates), median(works) if works else None
    skew = Skew(
        len(others),
        row.stats.server.batches_per_second / rate if rate >= MIN_RATE else None,
        row.work / work if row.work is not None and work else None,
        work,
    )
    return replace(row, skew=skew)
