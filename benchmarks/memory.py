"""Memory of both sides while `tokens` are loaded from a server without torch.

PSS (proportional set size) of the server, its fork server and its workers, plus the growth of a client over a process
that has only imported torch: ``python -m benchmarks.memory URL BATCHES`` is this client.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Final

import psutil
from rich.table import Table

from benchmarks.measuring import Spread
from benchmarks.parts import Job, Outcome, Setting, Step, interleaved, toml
from benchmarks.processes import ROOT, configured
from benchmarks.workloads import TOKENS

NAME: Final = "memory"
CONFIG: Final = toml({NAME: TOKENS.table.replace("padding:pad", "padding:pad_arrays")})
CLIENT: Final = "client, growth over import torch"
BATCHES: Final = 2_000
QUICK_BATCHES: Final = 100
_MB: Final = 10**6


class Memory:
    """Memory of both sides."""

    name = NAME
    hosted: Mapping[str, str] = {}

    def prepare(self, setting: Setting) -> Job:
        """Return the job, which starts a server for each turn."""
        return Job(setting.rounds, partial(self._run, setting))

    def _run(self, setting: Setting, step: Step) -> Outcome:
        count = QUICK_BATCHES if setting.quick else BATCHES
        (rows,) = interleaved([NAME], setting.rounds, step, str, lambda _: _measured(count)).values()
        made = Table(
            title=f"{NAME} - PSS while tokens are loaded, without torch in the server",
            title_justify="left",
            title_style="bold",
        )
        made.add_column("process", no_wrap=True)
        made.add_column("MB", justify="right", no_wrap=True)
        figures = {name: Spread.of([row[name] / _MB for row in rows]) for name in rows[0]}
        for name, spread in figures.items():
            made.add_row(name, spread.text(",.0f"))
        return Outcome([made], list(rows), {f"{NAME}: {name}": spread for name, spread in figures.items()})


def _measured(count: int) -> dict[str, int]:
    """Return PSS in bytes, by process and in total."""
    with configured(1, CONFIG) as server:
        command = [sys.executable, "-m", "benchmarks.memory", server.url, str(count)]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            before, after = (int(client.stdout.readline()) for _ in range(2)) if client.stdout else (0, 0)
            found = {name: _pss(pid) for name, pid in server.pids().items()}
            client.communicate()
        found[CLIENT] = after - before
        return found | {"total": sum(found.values())}


def _pss(pid: int | None = None) -> int:
    found: int = psutil.Process(pid).memory_full_info().pss
    return found


def main() -> None:
    """Print the PSS in bytes before and after loading batches, and keep the loader until the input ends."""
    if importlib.util.find_spec("torch") is not None:
        import torch  # noqa: F401
    print(_pss(), flush=True)
    from teleloader import DataLoader, RemoteDataset

    url, count = sys.argv[1], int(sys.argv[2])
    batches = iter(DataLoader(RemoteDataset(url, NAME), TOKENS.batch_size, seed=0))
    for _ in islice(batches, count):
        pass
    print(_pss(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
