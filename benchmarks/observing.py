"""Cost of statistics, request IDs and an open dashboard for the server: ``python -m benchmarks.observing``.

Two servers are compared: an unmodified one, and one in which counters per batch and request, the timeline, the totals
of each second with their history, and request IDs are replaced by no-ops before it starts. One loader takes batches of
`small`, the smallest ones, from both servers in turn at full speed; then from the first while a client reads
``/stats/stream``. Ratios are computed within each round.

The benchmark compares the CPU time of the server's own process per batch, which limits small batches. Unlike batches
per second, it is meaningful on a machine that runs other programs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from rich.table import Table

from benchmarks import machine
from benchmarks.clients import HOSTED
from benchmarks.contenders import Teleloader
from benchmarks.measuring import Spread
from benchmarks.processes import Hosting, LoaderServer, cpu_seconds, end
from benchmarks.workloads import SMALL

BLIND: Final = (sys.executable, "-c", "from benchmarks.observing import serve_blindly; serve_blindly()")


def serve_blindly() -> None:
    """Run ``teleloader-server`` without statistics and request IDs."""
    from teleloader_server.cli import main
    from teleloader_server.dispatch import counters, timeline
    from teleloader_server.dispatch.rates import Stopwatch
    from teleloader_server.stats import collector
    from teleloader_server.web import app
    from teleloader_shared.messages import ConsumerReport

    def nothing(*_arguments: Any) -> Any:
        return None

    async def rest(_observer: collector.StatsCollector) -> None:
        await asyncio.Event().wait()

    for owner, names in (
        (counters.ConsumerCounters, ("sent", "requested")),
        (counters.PoolCounters, ("computed",)),
        (timeline.Timeline, ("add_computed", "add_sent")),
        (Stopwatch, ("begin", "end")),
    ):
        for name in names:
            getattr(owner, name)  # fails if it was renamed, instead of replacing nothing
            setattr(owner, name, nothing)
    setattr(counters.ConsumerCounters, "waiting_for_batch", lambda _: nullcontext())  # noqa: B010
    setattr(ConsumerReport, "from_header", nothing)  # noqa: B010 - mypy would not have it assigned
    setattr(collector.StatsCollector, "run", rest)  # noqa: B010
    setattr(app, "Identified", lambda application: application)  # noqa: B010
    main()


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a loader."""

    cpu: float
    """CPU seconds per batch of the server's main process."""
    rate: float
    """Batches per second."""


class Contender:
    """Loader of one server, and the CPU time of that server."""

    def __init__(self, server: LoaderServer) -> None:
        self.url = server.url
        self._pid = server.process.pid
        self._loader = Teleloader(SMALL, Hosting(server.url))

    def turn(self, batches: int) -> Turn:
        """Load `batches` batches, after a warm-up with a tenth of them."""
        with self._loader.open() as coming:
            for _ in islice(coming, batches // 10):
                pass
            cpu, began = cpu_seconds(self._pid), time.perf_counter()
            for _ in islice(coming, batches):
                pass
            took = time.perf_counter() - began
            return Turn((cpu_seconds(self._pid) - cpu) / batches, batches / took)


@contextmanager
def watched(url: str) -> Iterator[None]:
    """Read the server's event stream meanwhile, as a dashboard does."""
    begun, over = threading.Event(), threading.Event()

    def read() -> None:
        with urllib.request.urlopen(f"{url}/stats/stream?interval=1", timeout=60) as events:
            while not over.is_set():
                events.readline()
                begun.set()

    watching = threading.Thread(target=read)
    watching.start()
    begun.wait(60)  # the first event is more expensive than further events
    try:
        yield
    finally:
        over.set()
        watching.join()


@contextmanager
def both() -> Iterator[tuple[Contender, Contender]]:
    """Run both servers."""
    servers = [LoaderServer(HOSTED, 1), LoaderServer(HOSTED, 1, command=BLIND)]
    for server in servers:
        server.start()
    try:
        for server in servers:
            server.await_ready()
        seeing, blind = map(Contender, servers)
        yield seeing, blind
    finally:
        for server in servers:
            end(server.process)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observing", description=__doc__.partition(":")[0])
    parser.add_argument("--batches", type=int, default=20_000, help="batches per turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of three turns each (default: %(default)s)")
    options = parser.parse_args(arguments)
    console = machine.announce(machine.describe())
    with both() as (seeing, blind):
        turns: dict[str, list[Turn]] = {"blind": [], "as it is": [], "watched": []}

        def watched_turn() -> Turn:
            with watched(seeing.url):
                return seeing.turn(options.batches)

        takers: dict[str, Callable[[], Turn]] = {
            "blind": lambda: blind.turn(options.batches),
            "as it is": lambda: seeing.turn(options.batches),
            "watched": watched_turn,
        }
        for number in range(options.rounds):
            # the first one would benefit from an idle machine
            for name in sorted(takers, reverse=number % 2 == 1):
                turns[name].append(takers[name]())
    console.print(_table(turns))
    return 0


def _table(turns: dict[str, list[Turn]]) -> Table:
    made = Table(title="main process of the server; median (quartiles)", title_justify="left")
    for heading in ("server", "us of processor time a batch", "to the blind one", "batches/s"):
        made.add_column(heading, justify="left" if heading == "server" else "right")
    for name, taken in turns.items():
        ratios = [turn.cpu / blind.cpu for turn, blind in zip(taken, turns["blind"], strict=True)]
        made.add_row(
            name,
            Spread.of([1e6 * turn.cpu for turn in taken]).text(".1f"),
            Spread.of(ratios).text(".3f"),
            Spread.of([turn.rate for turn in taken]).text(",.0f"),
        )
    return made


if __name__ == "__main__":
    sys.exit(main())
