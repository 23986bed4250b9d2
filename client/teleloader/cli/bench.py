"""``teleloader bench``: how fast batches come, and what would make them come faster."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from rich.progress import BarColumn, TextColumn
from rich.text import Text

from teleloader.cli.showing import print_json, progress_bar, to_people
from teleloader.cli.stats import TIMEOUT, record_of, sentence
from teleloader.control import Server
from teleloader.iterator import consumers_prefix
from teleloader.loader import DataLoader
from teleloader_shared.errors import ServerUnavailable
from teleloader_shared.stats import ConsumerStats, Verdict
from teleloader_shared.text import harmless
from teleloader_shared.tree import ArrayLeaf, flatten
from teleloader_shared.units import number, seconds, share, size

MAX_CONSUMERS: Final = 1000
"""Consumers among which this one is looked for."""
SHOWN_EVERY: Final = 0.2


class BatchFailed(Exception):
    """The dataset raised an exception in place of a batch; the message tells of it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was seen from the first batch on. Times in seconds, sizes in bytes."""

    dataset: str
    step: float
    """What the loop was told to spend with each batch."""
    seconds: float
    batches: int
    samples: int
    batch_bytes: float
    """Mean size of a batch's arrays."""
    first_batch: float
    """Time to the first batch, which is not counted otherwise."""
    waited: float
    """Time in which the loop waited for batches."""
    wait_p50: float
    """Wait for one batch, by quantiles."""
    wait_p95: float
    wait_max: float

    @property
    def batches_per_second(self) -> float:
        """Mean rate."""
        return self.batches / self.seconds

    @property
    def samples_per_second(self) -> float:
        """Mean rate."""
        return self.samples / self.seconds

    @property
    def bytes_per_second(self) -> float:
        """Mean rate."""
        return self.batches_per_second * self.batch_bytes


class Bench:
    """Goes through epoch after epoch for some time, as a training loop does.

    Args:
        loader: What to go through.
        name: The dataset's name.
        duration: Seconds for which to go on after the first batch.
        step: Seconds that the loop spends with each batch, in place of training.
    """

    def __init__(self, loader: DataLoader, name: str, duration: float, step: float) -> None:
        self._loader = loader
        self._name = name
        self._duration = duration
        self._step = step
        self._waits: list[float] = []
        self._samples = 0
        self._nbytes = 0

    def run(self, url: str) -> tuple[Measured, Verdict | None]:
        """What was measured, and what the server says of this loop when it ends; None where it does not say.

        Raises:
            BatchFailed: When a batch is an error.
            ValueError: When an epoch has no batches.
        """
        batches = self._batches()
        began = time.perf_counter()
        next(batches)
        first = time.perf_counter() - began
        began = time.perf_counter()
        for elapsed in self._with_progress(began):
            if elapsed >= self._duration:
                break
            asked = time.perf_counter()
            batch = next(batches)
            self._waits.append(time.perf_counter() - asked)
            self._count(batch)
            if self._step:
                time.sleep(self._step)
        taken = time.perf_counter() - began
        verdict = verdict_of_this_process(url)  # while it is still a consumer
        batches.close()
        waits = np.array(self._waits)
        p50, p95 = np.quantile(waits, (0.5, 0.95)).tolist()
        measured = Measured(
            dataset=self._name, step=self._step, seconds=taken, batches=len(waits), samples=self._samples,
            batch_bytes=self._nbytes / len(waits), first_batch=first, waited=float(waits.sum()),
            wait_p50=p50, wait_p95=p95, wait_max=float(waits.max()),
        )  # fmt: skip
        return measured, verdict

    def _batches(self) -> Generator[Any, None, None]:
        while True:
            empty = True
            try:
                for batch in self._loader:
                    empty = False
                    yield batch
            except ServerUnavailable:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the dataset raises
                raise BatchFailed(f"{type(error).__name__}: {error}") from None
            if empty:
                raise ValueError(f"an epoch of {self._name!r} has no batches: try a smaller --batch-size")

    def _count(self, batch: Any) -> None:
        _, leaves = flatten(batch)
        arrays = [leaf.array for leaf in leaves if isinstance(leaf, ArrayLeaf)]
        self._nbytes += sum(array.nbytes for array in arrays)
        self._samples += next((len(array) for array in arrays if array.ndim), self._loader.batch_size or 1)

    def _with_progress(self, began: float) -> Iterator[float]:
        """The time since `began`, for as long as it is asked for."""
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"))
        with progress_bar(*columns, auto_refresh=False) as progress:
            bar = progress.add_task("loading", total=self._duration, speed="")
            shown = 0.0
            while True:
                elapsed = time.perf_counter() - began
                if elapsed - shown >= SHOWN_EVERY:
                    shown = elapsed
                    speed = f"{number(len(self._waits) / elapsed)} batches/s, {size(self._nbytes / elapsed)}/s"
                    progress.update(bar, completed=elapsed, speed=speed, refresh=True)
                yield elapsed


def verdict_of_this_process(url: str) -> Verdict | None:
    """What the server says of this process: of the consumer that asked last, of those that it knows enough of.

    Each epoch is a consumer of its own, and one that has just begun is not known yet.
    """
    answer = Server(url, TIMEOUT).stats(MAX_CONSUMERS)
    consumers = [record_of(ConsumerStats, found) for found in answer["consumers"]]
    mine = [found for found in consumers if found.consumer.startswith(consumers_prefix())]
    return min(mine, key=lambda found: (found.verdict.bound == "unknown", found.idle)).verdict if mine else None


def show(measured: Measured, verdict: Verdict | None, *, as_json: bool) -> None:
    """Print it."""
    if as_json:
        rates = {
            name: getattr(measured, name) for name in ("batches_per_second", "samples_per_second", "bytes_per_second")
        }
        print_json({**asdict(measured), **rates, "verdict": None if verdict is None else asdict(verdict)})
        return
    console = to_people()
    console.print(
        Text(harmless(f"{measured.dataset}: {measured.batches:,} batches in {seconds(measured.seconds)}"), style="bold")
    )
    rows = (
        ("batches/s", number(measured.batches_per_second)),
        ("samples/s", number(measured.samples_per_second)),
        ("bytes/s", f"{size(measured.bytes_per_second)}/s"),
        ("a batch", size(measured.batch_bytes)),
        ("first batch after", seconds(measured.first_batch)),
        ("the loop waited", f"{share(measured.waited / measured.seconds)} of the time"),
        ("wait for a batch", f"p50 {seconds(measured.wait_p50)}, p95 {seconds(measured.wait_p95)}, "
                             f"max {seconds(measured.wait_max)}"),
    )  # fmt: skip
    for name, value in rows:
        console.print(Text(f"{name:<18} {value}"))
    if verdict is not None:
        console.print(sentence("verdict", verdict))
    if not measured.step:
        console.print(Text("The loop did nothing with the batches; --step S has it take S seconds, as training does."))
