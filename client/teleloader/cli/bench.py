"""``teleloader bench``: how fast batches come, and what would make them come faster."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from rich.progress import BarColumn, TextColumn
from rich.text import Text

from teleloader.api.control import Server
from teleloader.cli.showing import print_json, progress_bar, to_people
from teleloader.cli.stats import TIMEOUT, record_of, sentence
from teleloader.dataset import consumers_prefix
from teleloader.loader import DataLoader
from teleloader_shared.errors import Forbidden, ServerUnavailable
from teleloader_shared.stats import Diagnosis, Stats
from teleloader_shared.text import harmless
from teleloader_shared.tree import ArrayLeaf, flatten
from teleloader_shared.units import counted, number, seconds, share, size

MAX_CONSUMERS: Final = 1000
"""Consumers among which this one is looked for."""
SHOWN_EVERY: Final = 0.2
IDLE_GRACE_S: Final = 2.0
"""Seconds after its last ask when a consumer takes nothing of the workers any more."""
DIAGNOSIS_AFTER: Final = 3
"""Seconds after which a server can surely say what holds a loop back: it notes once a second how the loop fares."""


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
    workers: int | None = None
    """Of the server, where the loop waited for them, and nobody else did."""

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

    @property
    def samples_per_second_of_a_worker(self) -> float | None:
        """Mean rate of each worker; None where it was not them that the loop waited for."""
        return self.samples_per_second / self.workers if self.workers else None

    @property
    def shortest_step(self) -> float | None:
        """Seconds that a training step may take with these workers and hardly wait; None likewise."""
        return 1 / self.batches_per_second if self.workers else None


_RATES: Final = (
    "batches_per_second", "samples_per_second", "bytes_per_second", "samples_per_second_of_a_worker", "shortest_step"
)  # fmt: skip


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

    def run(self, url: str) -> tuple[Measured, Diagnosis | None]:
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
        diagnosis, workers = seen_by(url)  # while it is still a consumer
        batches.close()
        waits = np.array(self._waits)
        p50, p95 = np.quantile(waits, (0.5, 0.95)).tolist()
        measured = Measured(
            dataset=self._name, step=self._step, seconds=taken, batches=len(waits), samples=self._samples,
            batch_bytes=self._nbytes / len(waits), first_batch=first, waited=float(waits.sum()),
            wait_p50=p50, wait_p95=p95, wait_max=float(waits.max()), workers=workers,
        )  # fmt: skip
        return measured, diagnosis

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


def seen_by(url: str) -> tuple[Diagnosis | None, int | None]:
    """What the server says of this process, and how many workers it is that hold it back, and it alone.

    Both are None where it does not say.
    """
    try:
        found = record_of(Stats, Server(url, TIMEOUT).stats(MAX_CONSUMERS))
    except Forbidden:
        return None, None  # the token is for batches only
    # those who asked last come first
    mine = next((one for one in found.consumers if one.consumer.startswith(consumers_prefix())), None)
    if mine is None:
        return None, None
    # bench runs follow one another
    others = [
        one for one in found.consumers if one.idle < IDLE_GRACE_S and not one.consumer.startswith(consumers_prefix())
    ]
    own = [worker for worker in found.workers if worker.loader == mine.loader]
    workers = len(own or [worker for worker in found.workers if worker.loader is None])
    return mine.diagnosis, workers if mine.diagnosis.bottleneck == "loader" and not others and workers else None


def show(measured: Measured, diagnosis: Diagnosis | None, *, as_json: bool) -> None:
    """Print it."""
    if as_json:
        rates = {name: getattr(measured, name) for name in _RATES}
        print_json({**asdict(measured), **rates, "diagnosis": None if diagnosis is None else asdict(diagnosis)})
        return
    console = to_people()
    console.print(
        Text(
            harmless(
                f"{measured.dataset}: {counted(measured.batches, 'batch', 'batches')} in {seconds(measured.seconds)}"
            ),
            style="bold",
        )
    )
    rows = [
        ("batches/s", number(measured.batches_per_second)),
        ("samples/s", number(measured.samples_per_second)),
        ("bytes/s", f"{size(measured.bytes_per_second)}/s"),
        ("a batch", size(measured.batch_bytes)),
        ("first batch after", seconds(measured.first_batch)),
        ("the loop waited", f"{share(measured.waited / measured.seconds)} of the time"),
        ("wait for a batch", f"p50 {seconds(measured.wait_p50)}, p95 {seconds(measured.wait_p95)}, "
                             f"max {seconds(measured.wait_max)}"),
    ]  # fmt: skip
    if measured.samples_per_second_of_a_worker is not None:
        rows.insert(2, ("a worker makes", f"{number(measured.samples_per_second_of_a_worker)} samples/s"))
    for name, value in rows:
        console.print(Text(f"{name:<18} {value}"))
    if diagnosis is not None and diagnosis.bottleneck == "unknown" and measured.seconds < DIAGNOSIS_AFTER:
        console.print(Text(f"diagnosis: none after so short a time, --seconds {DIAGNOSIS_AFTER} is enough"))
    elif diagnosis is not None:
        console.print(sentence("diagnosis", diagnosis))
    if not measured.step:
        console.print(Text(_without_step(measured)))


def _without_step(measured: Measured) -> str:
    """How to read what was measured of a loop that takes no time."""
    read = "The loop did nothing with the batches; --step S has it take S seconds, as training does."
    if measured.shortest_step is None or measured.workers is None:
        return read
    step, workers = measured.shortest_step, measured.workers
    return (
        f"{read} {counted(workers, 'worker')} keep{'' if workers > 1 else 's'} up with steps of "
        f"{seconds(step)}; for other steps, the number of workers is {seconds(workers * step)} / step."
    )
