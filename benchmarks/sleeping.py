"""Many workers that only wait, as for storage: throughput as a fraction of the ideal rate of the workers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from benchmarks.measuring import Spread
from benchmarks.parts import Job, Outcome, Setting, Step, counted, interleaved
from benchmarks.processes import running

COUNTS: Final = (1, 32, 128)
BATCH_SECONDS: Final = 0.02
NAME: Final = "sleeping"
WARM_UP: Final = 8
"""Batches per worker before each turn, in which the prefetch window grows."""


class Waiting:
    """Dataset of samples that take `BATCH_SECONDS` and no CPU time."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        time.sleep(BATCH_SECONDS)
        return np.full(1024, index, np.float32)


class Sleeping:
    """Workers that wait."""

    name = NAME
    hosted: Mapping[str, str] = {}

    def prepare(self, setting: Setting) -> Job:
        """Return the job, which starts servers with many workers of its own."""
        return Job(len(COUNTS) * (setting.rounds + 1), partial(self._run, setting))

    def _run(self, setting: Setting, step: Step) -> Outcome:
        with ExitStack() as stack:
            urls = {}
            for count in COUNTS:
                step(f"{self.name}: {counted(count, 'worker')} start")
                urls[count] = stack.enter_context(running([f"{NAME}={__name__}:Waiting"], count)).url
            shares = interleaved(
                COUNTS,
                setting.rounds,
                step,
                lambda count: f"{self.name}: {counted(count, 'worker')}",
                lambda count: _share(urls[count], count, setting.seconds),
            )
        made = Table(
            title=f"{NAME} - 4 KB batches that take {1000 * BATCH_SECONDS:g} ms without CPU time",
            title_justify="left",
            title_style="bold",
        )
        for heading in ("number of workers", "batches/s", "fraction of the ideal rate"):
            made.add_column(heading, justify="right", no_wrap=True)
        for count, row in shares.items():
            spread = Spread.of(row)
            made.add_row(f"{count}", f"{spread.middle * count / BATCH_SECONDS:,.0f}", spread.text(".2f"))
        results = [{"num_workers": count, "fractions": row} for count, row in shares.items()]
        return Outcome(
            [made], results, {f"{NAME}: {counted(count, 'worker')}": Spread.of(row) for count, row in shares.items()}
        )


def _share(url: str, num_workers: int, seconds: float) -> float:
    """Return the throughput of one epoch, as a fraction of the ideal rate.

    Raises:
        AssertionError: A batch has the wrong content.
    """
    from teleloader import DataLoader, RemoteDataset

    loader = DataLoader(RemoteDataset(url, NAME), batch_size=1, seed=time.monotonic_ns())
    batches = iter(loader)
    for k, batch in enumerate(islice(batches, WARM_UP * num_workers)):
        if np.asarray(batch)[0, 0] != k:
            raise AssertionError(f"batch {k} of {NAME} differs from the dataset")
    began, taken = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds:
        next(batches)
        taken += 1
    return taken / took * BATCH_SECONDS / num_workers
