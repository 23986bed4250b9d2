"""Search for growth of memory, files and threads: ``python -m benchmarks.soak --minutes 30``.

Two consumers load one epoch after another: one in the seeded order, one with a sampler, which needs a session for each
epoch. Each consumer aborts some epochs early. The benchmark records memory, open files and threads of the server, its
fork server, its workers and the consumers every second. If a process grows by more than the limit after the warm-up,
the benchmark prints its name and exits with status 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import machine
from benchmarks.processes import LoaderServer, running

NUM_WORKERS: Final = 2
LENGTH: Final = 20_000
BATCH_SIZE: Final = 64
STEP_SECONDS: Final = 0.005
"""Time that a consumer sleeps per batch."""
LEFT_EARLY: Final = 0.2
"""Fraction of the epochs that a consumer aborts early."""
WARM_UP: Final = 0.5
"""Fraction of the run that is a warm-up, in which shared memory reaches its peak."""
MAY_GAIN: Final = 16 * 2**20
"""Maximum growth of a process in bytes after the warm-up."""
MAY_GAIN_SHARE: Final = 0.05
"""Maximum growth as a fraction of the process's memory; the larger limit applies."""
MAY_GAIN_FILES: Final = 4
"""Maximum growth of the numbers of open files and of threads."""
PICTURE: Final = Path(__file__).with_name("soak.png")


class Images:
    """Dataset of small images; sample i is filled with i."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[NDArray[np.uint8], int]:
        return np.full((3, 64, 64), index % 256, np.uint8), index


HOSTED: Final = ["images=benchmarks.soak:Images"]


def consume(url: str, number: int, batches: Any) -> None:
    """Load epochs until the process is killed; the second consumer uses a sampler.

    Raises:
        AssertionError: A batch has the wrong content.
    """
    from teleloader import DataLoader, RemoteDataset

    order: dict[str, Any] = {"seed": 0} if number == 0 else {"sampler": Shuffled()}
    if number == 0:
        order["shuffle"] = True
    loader = DataLoader(RemoteDataset(url, "images"), batch_size=BATCH_SIZE, output="numpy", **order)
    leaving = random.Random(number)
    while True:
        most = leaving.randrange(len(loader)) if leaving.random() < LEFT_EARLY else None
        for images, labels in islice(loader, most):
            if not np.array_equal(images[:, 0, 0, 0], np.asarray(labels) % 256):
                raise AssertionError(f"consumer {number} received images that do not match their labels")
            with batches.get_lock():
                batches.value += 1
            time.sleep(STEP_SECONDS)


class Shuffled:
    """Client-side sampler."""

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Any:
        return iter(np.random.default_rng().permutation(LENGTH).tolist())


# -- samples


@dataclass(frozen=True, slots=True)
class Sample:
    """State of one process at one time."""

    seconds: float
    rss: int
    pss: int
    files: int
    threads: int


@dataclass(slots=True)
class History:
    """States of one process over time; a replacement worker continues the series of its worker ID."""

    samples: list[Sample] = field(default_factory=list)

    def gain(self, of: Callable[[Sample], int]) -> float:
        """Return the growth over the second half: the difference of medians over its first and last tenth."""
        counted = self.samples[int(len(self.samples) * WARM_UP) :]
        part = max(1, len(counted) // 10)
        return median(map(of, counted[-part:])) - median(map(of, counted[:part]))

    def slope(self, of: Callable[[Sample], int]) -> float:
        """Return the growth per hour: the slope of a linear fit over the second half."""
        counted = self.samples[int(len(self.samples) * WARM_UP) :]
        times = np.array([sample.seconds for sample in counted])
        if len(times) < 2:
            return 0.0
        return float(np.polyfit(times - times[0], [of(sample) for sample in counted], 1)[0] * 3600)

    @property
    def complaint(self) -> str:
        """Return the names of the resources that grow beyond the limits, or an empty string."""
        may = max(MAY_GAIN, MAY_GAIN_SHARE * self.samples[-1].pss)
        found = [
            *(["memory"] if self.gain(lambda sample: sample.pss) > may else []),
            *(["open files"] if self.gain(lambda sample: sample.files) > MAY_GAIN_FILES else []),
            *(["threads"] if self.gain(lambda sample: sample.threads) > MAY_GAIN_FILES else []),
        ]
        return ", ".join(found)


def processes(server: LoaderServer, consumers: Sequence[BaseProcess]) -> dict[str, int]:
    """Return the observed processes by name."""
    ours = {f"consumer {number}": consumer.pid for number, consumer in enumerate(consumers) if consumer.pid}
    return server.pids() | ours


def look(pid: int, seconds: float) -> Sample:
    """Return the current state of a process."""
    process = psutil.Process(pid)
    memory = process.memory_full_info()
    return Sample(seconds, memory.rss, memory.pss, process.num_fds(), process.num_threads())


# -- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.partition(":")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="duration (default: %(default)s)")
    parser.add_argument(
        "--plot", type=Path, default=PICTURE, metavar="FILE", help="write a plot to this file (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    console = machine.announce(machine.describe())
    context = multiprocessing.get_context("spawn")
    batches = context.Value("Q", 0)
    with running(HOSTED, NUM_WORKERS) as server:
        consumers = [context.Process(target=consume, args=(server.url, number, batches)) for number in range(2)]
        for consumer in consumers:
            consumer.start()
        try:
            histories = _watch(server, consumers, 60 * options.minutes, console)
        finally:
            ended = [consumer.exitcode for consumer in consumers if consumer.exitcode is not None]
            for consumer in consumers:
                consumer.terminate()
                consumer.join()
    console.print(_table(histories, batches.value, options.minutes))
    _draw(histories, options.plot, console)
    if ended:
        console.print(f"[bold]a consumer ended by itself, with exit status {ended[0]}")
    growing = {name: history.complaint for name, history in histories.items() if history.complaint}
    for name, complaint in growing.items():
        console.print(f"[bold]grows: {complaint} of {name}")
    if not growing and not ended:
        console.print("nothing grows")
    return 1 if growing or ended else 0


def _watch(
    server: LoaderServer, consumers: Sequence[BaseProcess], seconds: float, console: Console
) -> dict[str, History]:
    histories: dict[str, History] = {}
    began = time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("sampling", total=seconds)
        while (now := time.monotonic() - began) < seconds and all(consumer.is_alive() for consumer in consumers):
            for name, pid in processes(server, consumers).items():
                with suppress(psutil.NoSuchProcess):  # the process may have been replaced
                    histories.setdefault(name, History()).samples.append(look(pid, now))
            progress.update(bar, completed=now)
            time.sleep(max(0.0, 1 - (time.monotonic() - began - now)))
    return histories


def _table(histories: Mapping[str, History], batches: int, minutes: float) -> Table:
    made = Table(
        title=f"{minutes:g} minutes, {batches:,} batches; the first {WARM_UP:.0%} are not counted", title_justify="left"
    )
    made.add_column("process")
    for heading in (
        "RSS, MiB",
        "PSS, MiB",
        "PSS gained, MiB",
        "PSS slope, MiB/hour",
        "open files",
        "threads",
        "diagnosis",
    ):
        made.add_column(heading, justify="right")
    for name, history in histories.items():
        last = history.samples[-1]
        made.add_row(
            name,
            f"{last.rss / 2**20:,.1f}",
            f"{last.pss / 2**20:,.1f}",
            f"{history.gain(lambda sample: sample.pss) / 2**20:+.1f}",
            f"{history.slope(lambda sample: sample.pss) / 2**20:+.1f}",
            f"{last.files} ({history.gain(lambda sample: sample.files):+.0f})",
            f"{last.threads} ({history.gain(lambda sample: sample.threads):+.0f})",
            history.complaint or "steady",
        )
    return made


def _draw(histories: Mapping[str, History], path: Path, console: Console) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no picture: matplotlib is not installed (pip install --group bench)")
        return
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(10, 10), sharex=True)
    kinds: tuple[tuple[str, Callable[[Sample], float]], ...] = (
        ("PSS, MiB", lambda sample: sample.pss / 2**20),
        ("open files", lambda sample: sample.files),
        ("threads", lambda sample: sample.threads),
    )
    for axis, (label, of) in zip(axes, kinds, strict=True):
        for name, history in histories.items():
            times = [sample.seconds / 60 for sample in history.samples]
            axis.plot(times, [of(sample) for sample in history.samples], label=name, linewidth=1)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[0].legend(ncols=3, fontsize="small")
    axes[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    console.print(f"the picture is in {path}")


if __name__ == "__main__":
    sys.exit(main())
