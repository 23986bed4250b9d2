"""CPU profile of one batch on both sides: ``python -m benchmarks.profile small``.

The first half of the time only reads counters: the cost of a batch in each process. In the second half py-spy samples
500 times per second which function holds the GIL of each process. Sampling slows the processes, so only the shares are
meaningful.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.contenders import Teleloader
from benchmarks.parts import toml
from benchmarks.processes import Hosting, LoaderServer, configured
from benchmarks.throughput import Throughput
from benchmarks.workloads import WORKLOADS

SECONDS: Final = 10.0
WARM_UP: Final = 1.0
RATE: Final = 500
"""Samples of py-spy per second."""
FUNCTIONS: Final = 20
PY_SPY: Final = Path(sysconfig.get_path("scripts"), "py-spy")
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Counts:
    """Resources that a process has used so far."""

    user: float
    """CPU seconds in user mode."""
    system: float
    """CPU seconds in the kernel."""
    faults: int
    """Page faults."""
    waits: int
    """Voluntary context switches, without those of threads that have exited."""
    preemptions: int
    """Involuntary context switches, without those of threads that have exited."""

    @classmethod
    def of(cls, pid: int) -> Counts:
        """Read the counters of a process, all threads included."""
        process = Path("/proc", str(pid))
        fields = process.joinpath("stat").read_text().rpartition(")")[2].split()  # from the third one on
        minor, major, user, system = (int(fields[number - 3]) for number in (10, 12, 14, 15))
        switches: Counter[str] = Counter()
        for status in process.glob("task/*/status"):
            with suppress(FileNotFoundError):  # the thread has exited
                for line in status.read_text().splitlines():
                    name, _, value = line.partition(":")
                    if name.endswith("voluntary_ctxt_switches"):
                        switches[name] += int(value)
        return cls(
            user / _TICKS,
            system / _TICKS,
            minor + major,
            switches["voluntary_ctxt_switches"],
            switches["nonvoluntary_ctxt_switches"],
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__.partition(":")[0])
    parser.add_argument("workload", choices=WORKLOADS, help="workload to load")
    parser.add_argument("--num-workers", type=int, default=1, help="worker processes (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="duration (default: %(default)s)")
    parser.add_argument("--flame", type=Path, metavar="FOLDER", help="write flame graphs (SVG) as well")
    options = parser.parse_args(arguments)
    console = machine.announce(machine.describe())
    with configured(options.num_workers, toml(Throughput(WORKLOADS[options.workload]).hosted)) as server:
        _profile(server, options, console)
    return 0


def _profile(server: LoaderServer, options: argparse.Namespace, console: Console) -> None:
    pids = {"client": os.getpid(), **server.pids()}
    pids = {name: pid for name, pid in pids.items() if not name.startswith("forkserver")}  # fork servers are idle
    seconds = options.seconds / 2
    with Teleloader(WORKLOADS[options.workload], Hosting(server.url)).open() as batches:
        _take(batches, WARM_UP)
        console.print(_costs(batches, pids, seconds))
        if not PY_SPY.exists():
            console.print("no functions: py-spy is not installed (pip install --group bench)")
            return
        for table in _functions(batches, pids, seconds):
            console.print(table)
        if options.flame is not None:
            _draw(batches, pids, seconds, options.flame, console)


def _take(batches: Iterator[Any], seconds: float) -> int:
    """Load batches for `seconds` seconds; return their number."""
    deadline, taken = time.perf_counter() + seconds, 0
    while time.perf_counter() < deadline:
        taken += sum(1 for _ in islice(batches, 10))
    return taken


# -- cost of a batch


def _costs(batches: Iterator[Any], pids: Mapping[str, int], seconds: float) -> Table:
    before = {name: Counts.of(pid) for name, pid in pids.items()}
    began = time.perf_counter()
    taken = _take(batches, seconds)
    took = time.perf_counter() - began
    made = Table(title=f"each batch: {1e6 * took / taken:,.1f} us, {taken / took:,.1f} a second", title_justify="left")
    made.add_column("process")
    headings = ("CPU, us", "user", "system", "page faults", "waits", "preemptions", "share of a core")
    for heading in headings:
        made.add_column(heading, justify="right")
    for name, pid in pids.items():
        now, then = Counts.of(pid), before[name]
        user, system = now.user - then.user, now.system - then.system
        made.add_row(
            name,
            *(f"{1e6 * spent / taken:,.1f}" for spent in (user + system, user, system)),
            f"{(now.faults - then.faults) / taken:,.2f}",
            f"{(now.waits - then.waits) / taken:,.2f}",
            f"{(now.preemptions - then.preemptions) / taken:,.2f}",
            f"{(user + system) / took:.0%}",
        )
    return made


# -- the functions


def _functions(batches: Iterator[Any], pids: Mapping[str, int], seconds: float) -> Iterator[Table | str]:
    with TemporaryDirectory() as folder:
        complaints = _look(batches, pids, seconds, "raw", Path(folder))
        for name in pids:
            file = Path(folder, name)
            if name in complaints:
                yield f"{name}: py-spy could not look at it, it may need root: {complaints[name]}"
            else:
                yield _table(name, file.read_text().splitlines(), seconds)


def _draw(batches: Iterator[Any], pids: Mapping[str, int], seconds: float, folder: Path, console: Console) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    complaints = _look(batches, pids, seconds, "flamegraph", folder, ".svg")
    drawn = [f"{name}.svg" for name in pids if name not in complaints]
    console.print(f"in {folder}: {', '.join(drawn)}")


def _look(
    batches: Iterator[Any], pids: Mapping[str, int], seconds: float, form: str, folder: Path, suffix: str = ""
) -> dict[str, str]:
    """Take batches while py-spy writes a file per process; return its errors."""
    command = [str(PY_SPY), "record", "--gil", "--function", "--rate", str(RATE), "--duration", str(round(seconds))]
    spies = {
        name: subprocess.Popen(
            [*command, "--format", form, "--output", str(folder / f"{name}{suffix}"), "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, pid in pids.items()
    }
    try:
        while any(spy.poll() is None for spy in spies.values()):
            _take(batches, 0.1)
        return {name: spy.communicate()[1].strip() for name, spy in spies.items() if spy.returncode}
    finally:
        for spy in spies.values():
            spy.kill()
            spy.wait()


def _table(name: str, lines: Sequence[str], seconds: float) -> Table:
    """Return a table of lines such as ``main (a.py:1);step (b.py:7) 12``: a stack from its bottom, and its samples."""
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        own[frames[-1]] += int(count)
        total.update(dict.fromkeys(frames, int(count)))
    seen = own.total()
    made = Table(title=f"{name}: holds the GIL {seen / (RATE * seconds):.0%} of the time", title_justify="left")
    for heading in ("own", "total"):
        made.add_column(heading, justify="right")
    made.add_column("function", no_wrap=True)
    for function in sorted(total, key=lambda function: -own[function])[:FUNCTIONS]:
        made.add_row(f"{own[function] / seen:.1%}", f"{total[function] / seen:.1%}", function)
    return made


if __name__ == "__main__":
    sys.exit(main())
