"""Cost of an idle server and of idle consumers: ``python -m benchmarks.idle``.

The first part measures a server that was used once: first without a consumer, then with a `DataLoader` that holds its
first batch and requests nothing.

The second part measures 1,000 idle consumers, each with its own loader and an open connection that has received some
batches, beside 200 consumers that load at full speed. Rounds without and with the idle consumers alternate.

These consumers are not `DataLoader` objects: the threads of a thousand of those would dominate the measurement on a
small machine. They are connections in two processes, one for the idle and one for the active consumers, which follow
docs/protocol.md and read each response completely without decoding it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

import psutil
from rich.table import Table

from benchmarks import machine
from benchmarks.clients import HOSTED, consumers
from benchmarks.measuring import Spread
from benchmarks.processes import LoaderServer, await_idle, running

NUM_WORKERS: Final = 1
USED_BATCHES: Final = 10_000
"""Batches that the server sends before the idle measurement."""
RANGE: Final = 16
"""Batches per request."""


# -- an idle server


@dataclasses.dataclass(frozen=True, slots=True)
class Rest:
    """Cost of one process."""

    cpu: float
    """CPU seconds."""
    pss: int
    """PSS in bytes at the end of the measurement."""


def at_rest(seconds: float) -> tuple[dict[str, Rest], dict[str, Rest]]:
    """Return the cost of a server's processes without a consumer, and with one that requests nothing."""
    from teleloader import DataLoader, RemoteDataset

    with running(HOSTED, NUM_WORKERS) as server:
        loader = DataLoader(RemoteDataset(server.url), shuffle=True, seed=0)
        batches = iter(loader)
        for _ in range(USED_BATCHES):
            next(batches)
        del batches
        await_idle(server.url)
        alone = _rest(server.pids(), seconds)
        batches = iter(loader)
        next(batches)
        await_idle(server.url)
        beside = _rest(server.pids() | {"consumer": os.getpid()}, seconds)
        del batches
        return alone, beside


def _rest(pids: Mapping[str, int], seconds: float) -> dict[str, Rest]:
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    before = {name: _cpu(process) for name, process in processes.items()}
    time.sleep(seconds)
    return {
        name: Rest(_cpu(process) - before[name], process.memory_full_info().pss) for name, process in processes.items()
    }


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _rest_table(seconds: float) -> Table:
    made = Table(title=f"a server that has nothing to do, {seconds:g} s", title_justify="left")
    made.add_column("process")
    for heading in ("CPU, s", "PSS, MiB", "CPU beside an idle consumer, s", "PSS, MiB"):
        made.add_column(heading, justify="right")
    alone, beside = at_rest(seconds)
    for name, found in beside.items():
        rest = alone.get(name)
        without = ("-", "-") if rest is None else (f"{rest.cpu:.2f}", f"{rest.pss / 2**20:,.1f}")
        made.add_row(name, *without, f"{found.cpu:.2f}", f"{found.pss / 2**20:,.1f}")
    return made


# -- the command


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Memory use in bytes."""

    server: int
    """PSS of the server's main process."""
    batches: int
    """Size of the batch buffer."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle", description=__doc__.partition(":")[0])
    parser.add_argument("--idle", type=int, default=1000, help="consumers without requests (default: %(default)s)")
    parser.add_argument("--active", type=int, default=200, help="consumers that load batches (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of two turns each (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each turn (default: %(default)s)")
    parser.add_argument(
        "--rest", type=float, default=20.0, help="seconds of the measurement at rest (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    console = machine.announce(machine.describe())
    console.print(_rest_table(options.rest))
    with (
        running(HOSTED, NUM_WORKERS) as server,
        consumers(server.url, range(options.idle)) as idle,
        consumers(server.url, range(options.idle, options.idle + options.active)) as active,
    ):

        def rate() -> float:
            batches, seconds = active("run", options.seconds, RANGE)
            return float(batches / seconds)

        active("open", 1)
        rate()  # the server allocates for active consumers before the measurement
        before = _memory(server)
        idle("open", 3)
        after = _memory(server)
        idle("close")
        alone, beside = [], []
        for _ in range(options.rounds):
            alone.append(rate())
            idle("open", 3)
            beside.append(rate())
            idle("close")
        active("close")
    console.print(_table(options, before, after, alone, beside))
    return 0


def _memory(server: LoaderServer) -> Memory:
    return Memory(psutil.Process(server.process.pid).memory_full_info().pss, server.stats()["server"]["memory_used"])


def _table(
    options: argparse.Namespace, before: Memory, after: Memory, alone: list[float], beside: list[float]
) -> Table:
    made = Table(title=f"{options.idle:,} idle consumers beside {options.active:,} active ones", title_justify="left")
    made.add_column("measurement")
    made.add_column("median (quartiles)", justify="right")
    ratios = Spread.of([with_idle / without for with_idle, without in zip(beside, alone, strict=True)])
    for name, rates in (("without", alone), ("with", beside)):
        spread = Spread.of(rates)
        made.add_row(
            f"throughput {name} idle consumers, batches/s",
            f"{spread.middle:,.0f} ({spread.low:,.0f}..{spread.high:,.0f})",
        )
    made.add_row("ratio of with to without", f"{ratios.middle:.2f} ({ratios.low:.2f}..{ratios.high:.2f})")
    grown = (after.server - before.server) / 1024
    made.add_row(
        "server memory without and with idle consumers, MiB", f"{before.server / 2**20:.1f}, {after.server / 2**20:.1f}"
    )
    made.add_row("  per idle consumer, KiB", f"{grown / options.idle:.1f}")
    made.add_row(
        "batch buffer without and with idle consumers, MiB",
        f"{before.batches / 2**20:.1f}, {after.batches / 2**20:.1f}",
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
