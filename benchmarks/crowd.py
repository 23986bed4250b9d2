"""Many consumers of small batches: aggregate throughput, the server's CPU time per batch, and fairness.

10, 100 and 500 greedy consumers load `small`, each its own epoch: they request batches as fast as the server sends
them. Beside them, `PACED` consumers each take one batch per second. The consumers are the clients of `clients`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from statistics import quantiles
from typing import Final

from rich.table import Table

from benchmarks.clients import HOSTED, Tell, consumers
from benchmarks.measuring import Spread, ratios
from benchmarks.parts import Job, Outcome, Setting, Step, interleaved
from benchmarks.processes import cpu_seconds, running

COUNTS: Final = (10, 100, 500)
TOGETHER: Final = 64
"""Batches per request; a client prefetches as many."""
PACED: Final = 10
INTERVAL: Final = 1.0
"""Seconds between the batches of a paced consumer."""
TURN: Final = 5.0
"""Duration of a turn in seconds, as a multiple of `Setting.seconds`: hundreds of requests take time to complete."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Measurement of one number of consumers."""

    rate: float
    """Batches per second of all greedy consumers together."""
    cpu: float
    """CPU seconds of the server's main process per batch."""
    waits: Sequence[float]
    """Waits of the paced consumers for a batch, in seconds."""


class Crowd:
    """Many consumers."""

    name = "consumers"
    hosted: Mapping[str, str] = {}

    def prepare(self, setting: Setting) -> Job:
        """Return the job, which starts a server of its own."""
        return Job(len(COUNTS) * (setting.rounds + 1), partial(self._run, setting))

    def _run(self, setting: Setting, step: Step) -> Outcome:
        seconds = TURN * setting.seconds
        with ExitStack() as stack:
            server = stack.enter_context(running(HOSTED, 1))
            first = PACED
            greedy: dict[int, Tell] = {}
            paced = stack.enter_context(consumers(server.url, range(PACED)))
            paced("open", 1)
            executor = stack.enter_context(ThreadPoolExecutor())

            def take(count: int) -> Turn:
                waits = executor.submit(paced, "pace", seconds, INTERVAL)
                before = cpu_seconds(server.process.pid)
                batches, took = greedy[count]("run", seconds, TOGETHER)
                cpu = cpu_seconds(server.process.pid) - before
                return Turn(batches / took, cpu / batches, waits.result())

            for count in COUNTS:
                step(f"{self.name}: {count} connect")
                greedy[count] = stack.enter_context(consumers(server.url, range(first, first + count)))
                greedy[count]("open", 1)
                first += count
                take(count)
            turns = interleaved(COUNTS, setting.rounds, step, lambda count: f"{self.name}: {count}", take)
        results = [{"consumers": count, "turns": [asdict(turn) for turn in row]} for count, row in turns.items()]
        return Outcome([_table(turns)], results, _figures(turns))


def _rates(row: Sequence[Turn]) -> list[float]:
    return [turn.rate for turn in row]


def _p99(row: Sequence[Turn]) -> float:
    """Return the p99 of the waits of all rounds, in seconds."""
    return quantiles([wait for turn in row for wait in turn.waits], n=100, method="inclusive")[-1]


def _figures(turns: Mapping[int, Sequence[Turn]]) -> dict[str, Spread]:
    base = _rates(turns[COUNTS[0]])
    found = {f"consumers: {count} to {COUNTS[0]}": ratios(_rates(row), base) for count, row in turns.items()}
    waits = {f"consumers: p99 wait among {count}": Spread.of([_p99(row)]) for count, row in turns.items()}
    return {**found, **waits}


def _table(turns: Mapping[int, Sequence[Turn]]) -> Table:
    made = Table(
        title=f"consumers - each with its own epoch of 4 KB batches, beside {PACED} that take one batch per second",
        title_justify="left",
        title_style="bold",
    )
    made.add_column("greedy consumers", justify="right", no_wrap=True)
    headings = ("batches/s, all together", "to 10", "server CPU, us/batch", "paced consumers: p99 wait, ms")
    for heading in headings:
        made.add_column(heading, justify="right", no_wrap=True)
    base = _rates(turns[COUNTS[0]])
    for count, row in turns.items():
        made.add_row(
            f"{count}",
            Spread.of(_rates(row)).text(",.0f"),
            ratios(_rates(row), base).text(".2f"),
            Spread.of([1e6 * turn.cpu for turn in row]).text(",.0f"),
            f"{1e3 * _p99(row):,.0f}",
        )
    return made
