"""Cost of several consumers of one epoch: the server should compute each batch once.

One, two and four consumers run with the same arguments, each a `DataLoader` in its own process. All start together. In
a further case, one consumer starts when the other one has loaded half of the epoch. It receives the batches that the
server still has buffered, and the server recomputes the others.

CPUs that share caches and execution units are slower when all are busy, so the same work takes more CPU time beside
three more consumers. The row of one consumer beside a process that only copies memory shows this effect.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, Final

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.table import Table

from benchmarks.measuring import Spread, ratios
from benchmarks.parts import Job, Outcome, Setting, Step, counted, interleaved
from benchmarks.processes import START_TIMEOUT, consumers, shared_here, stats

NAME: Final = "worked"
BATCHES: Final = 2000
BATCH_SIZE: Final = 8
QUICK_SHARE: Final = 10
"""World size with ``--quick``: the consumers load the shard of one rank."""


class Worked:
    """Dataset whose samples take CPU time: noise drawn from the index, 36 KiB in about 0.1 ms.

    An epoch has 600 MB, more than a server keeps for later consumers, so only consumers side by side share all batches.
    """

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[int, NDArray[np.float32]]:
        return index, np.random.default_rng(index).standard_normal((96, 96), np.float32)


@dataclass(frozen=True, slots=True)
class Case:
    """Number and start of the consumers."""

    count: int
    late: int = 0
    """Number of consumers that start after half of the epoch."""
    disturbed: bool = False
    """True if another process, which only copies memory, keeps one core busy."""

    @property
    def name(self) -> str:
        """Name in tables."""
        late = f", {self.late} starting half an epoch later" if self.late else ""
        return f"{counted(self.count, 'consumer')}{late}{', with concurrent memory copies' if self.disturbed else ''}"


CASES: Final = (Case(1), Case(1, disturbed=True), Case(2), Case(4), Case(2, late=1))


@dataclass(frozen=True, slots=True)
class Turn:
    """Measurement of one epoch."""

    batches: int
    """Number of batches that the workers computed."""
    cpu: float
    """CPU seconds of the workers."""
    seconds: float
    """Time from the start to the last batch of the last consumer."""


class Share:
    """One epoch with several consumers."""

    name = "share"
    hosted: Mapping[str, str] = {NAME: f'factory = "{__name__}:{Worked.__name__}"\n'}

    def prepare(self, setting: Setting) -> Job:
        """Return the job; nothing needs preparation."""
        if not setting.is_local:
            return Job(0, lambda _: Outcome(["share is left out: another machine's workers cannot be looked at"], []))
        return Job(1 + len(CASES) * setting.rounds, partial(self._run, setting))

    def _run(self, setting: Setting, step: Step) -> Outcome:
        url, world_size = setting.servers.get(1).url, QUICK_SHARE if setting.quick else 1
        step(f"{self.name}: first batches")
        _turn(url, CASES[0], world_size)
        rows = interleaved(
            CASES, setting.rounds, step, lambda case: f"share: {case.name}", lambda case: _turn(url, case, world_size)
        )
        results = [{**asdict(case), "turns": [asdict(turn) for turn in row]} for case, row in rows.items()]
        alone, four = ([turn.cpu for turn in rows[case]] for case in (Case(1), Case(4)))
        figures = {"share: worker CPU of 4 consumers to 1": ratios(four, alone)}
        return Outcome([_table(rows, BATCHES // world_size)], results, figures)


def _turn(url: str, case: Case, world_size: int) -> Turn:
    """Measure an epoch that was not loaded before."""
    context = get_context("forkserver")
    together, half_over = context.Barrier(case.count, timeout=START_TIMEOUT), context.Event()
    arguments = {"shuffle": True, "seed": secrets.randbits(63), "rank": 0, "world_size": world_size}
    with consumers(case.count, together, half_over) as processes, _disturbance(case):
        batches, cpu = _batches_made(url), _worker_cpu(url)
        seconds = _consume_together(processes, case, url, arguments)
        return Turn(_batches_made(url) - batches, _worker_cpu(url) - cpu, seconds)


@contextmanager
def _disturbance(case: Case) -> Iterator[None]:
    if not case.disturbed:
        yield
        return
    process = get_context("forkserver").Process(target=_copy_memory, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _copy_memory() -> None:
    source, target = np.ones(2**23), np.empty(2**23)
    while True:
        np.copyto(target, source)


def _consume_together(processes: ProcessPoolExecutor, case: Case, url: str, arguments: Mapping[str, Any]) -> float:
    late = [number < case.late for number in range(case.count)]
    begun = [processes.submit(consume, url, arguments, each) for each in late]
    spans = [future.result() for future in as_completed(begun)]  # the first error aborts the measurement
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


def consume(url: str, arguments: Mapping[str, Any], late: bool) -> tuple[float, float]:
    """Load the epoch when all consumers are ready; return start and end by the system's clock.

    Raises:
        AssertionError: The epoch is incomplete or in the wrong order.
    """
    from teleloader import DataLoader, RemoteDataset

    together, half_over = shared_here()
    loader = DataLoader(RemoteDataset(url, NAME), BATCH_SIZE, **arguments)
    plan, seen = loader.plan(0), []
    together.wait()
    if late:
        half_over.wait()
    began = time.monotonic()
    for numbers, _ in loader:
        seen.append(np.asarray(numbers))
        if len(seen) == len(plan) // 2:
            half_over.set()
    ended = time.monotonic()
    if len(seen) != len(plan) or not all(np.array_equal(numbers, plan[k]) for k, numbers in enumerate(seen)):
        raise AssertionError(f"a consumer got {len(seen)} batches, which are not the {len(plan)} of its plan")
    return began, ended


def _batches_made(url: str) -> int:
    made: int = next(each["batches_computed"] for each in stats(url)["datasets"] if each["dataset"] == NAME)
    return made


def _worker_cpu(url: str) -> float:
    times = [psutil.Process(worker["pid"]).cpu_times() for worker in stats(url)["workers"] if worker["pid"]]
    return sum(each.user + each.system for each in times)


def _table(rows: Mapping[Case, list[Turn]], batches: int) -> Table:
    made = Table(
        title=f"share - several consumers load the same epoch of {batches:,} batches",
        title_justify="left",
        title_style="bold",
    )
    made.add_column("consumers", no_wrap=True)
    for heading in ("batches computed", "worker CPU, s", "to 1 consumer", "epoch, s"):
        made.add_column(heading, justify="right", no_wrap=True)
    alone = rows[CASES[0]]
    for case, row in rows.items():
        made.add_row(
            case.name,
            Spread.of([turn.batches for turn in row]).text(",.0f"),
            Spread.of([turn.cpu for turn in row]).text(".2f"),
            ratios([turn.cpu for turn in row], [turn.cpu for turn in alone]).text(".3f"),
            Spread.of([turn.seconds for turn in row]).text(".2f"),
        )
    return made
