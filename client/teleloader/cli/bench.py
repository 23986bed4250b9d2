"""Command ``teleloader bench``: measures data loading throughput and reports the bottleneck."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from rich.progress import BarColumn, TextColumn
from rich.text import Text

from teleloader.cli.showing import print_json, progress_bar, results_console
from teleloader.cli.stats import OF_ONE_SERVER, Reading, read_all, sentence, total
from teleloader.dataset import RemoteDataset, consumers_prefix
from teleloader.loader import DataLoader
from teleloader_shared.errors import ServerUnavailable, TeleloaderError
from teleloader_shared.lengths import padding_of
from teleloader_shared.orders.packing import audit_tokens
from teleloader_shared.stats import ConsumerStats, Diagnosis, Stats
from teleloader_shared.text import printable
from teleloader_shared.tree import ArrayLeaf, flatten
from teleloader_shared.units import counted, number, seconds, share, size

MAX_CONSUMERS: Final = 1000
"""Maximum number of consumers to request from the server, large enough to include those of this process."""
SHOWN_EVERY: Final = 0.2
"""Seconds between updates of the progress bar."""
IDLE_GRACE_S: Final = 2.0
"""Time after a consumer's latest request during which the consumer counts as active, in seconds."""
PADDED_BATCHES: Final = 4096
"""Maximum number of batches for which the padding is computed."""
DIAGNOSIS_AFTER: Final = 3
"""Seconds of loading that a diagnosis requires: the server samples the rates of a consumer once a second."""


class BatchFailed(Exception):
    """The dataset raised an exception for a batch; the error message describes the exception."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Benchmark result, measured after the first batch. Times are in seconds, sizes in bytes."""

    dataset: str
    step: float
    """Simulated duration of a training step."""
    seconds: float
    batches: int
    samples: int
    batch_bytes: float
    """Mean size of a batch's arrays."""
    first_batch: float
    """Time until the first batch arrived; the other fields exclude it."""
    waited: float
    """Total data wait."""
    wait_p50: float
    """Median data wait per batch; `wait_p95` is its 95th percentile, `wait_max` its maximum."""
    wait_p95: float
    wait_max: float
    workers: int | None = None
    """Number of workers, if they were the bottleneck and served no other active consumer; else None."""
    busy_per_sample: float | None = None
    """Mean time for which a worker was busy per sample of the dataset; None if no sample was computed."""
    servers: int = 1
    padding_fraction: float | None = None
    """Fraction of padding in the batches, 1 - sum of lengths / (samples x longest sample); None without lengths."""

    @property
    def batches_per_second(self) -> float:
        """Mean throughput in batches per second."""
        return self.batches / self.seconds

    @property
    def samples_per_second(self) -> float:
        """Mean throughput in samples per second."""
        return self.samples / self.seconds

    @property
    def bytes_per_second(self) -> float:
        """Mean throughput in bytes of decoded arrays per second."""
        return self.batches_per_second * self.batch_bytes

    @property
    def samples_per_second_of_a_worker(self) -> float | None:
        """Samples per second of a busy worker; None if no sample was computed during the measurement."""
        return 1 / self.busy_per_sample if self.busy_per_sample else None

    @property
    def shortest_step(self) -> float | None:
        """Shortest training step, in seconds, with which the workers keep up; None if they were not the bottleneck."""
        return 1 / self.batches_per_second if self.workers else None


_RATES: Final = (
    "batches_per_second", "samples_per_second", "bytes_per_second", "samples_per_second_of_a_worker", "shortest_step"
)  # fmt: skip


class Bench:
    """Simulated training loop that benchmarks a loader, over as many epochs as needed.

    Args:
        loader: The loader to measure.
        remote: Dataset of the loader.
        duration: Seconds to measure after the first batch.
        step: Duration of a simulated training step, in seconds.
    """

    def __init__(self, loader: DataLoader, remote: RemoteDataset, duration: float, step: float) -> None:
        self._loader = loader
        self._remote = remote
        self._name = remote.name
        self._duration = duration
        self._step = step
        self._waits: list[float] = []
        self._samples = 0
        self._nbytes = 0

    def run(self) -> tuple[Measured, Diagnosis | None]:
        """Run the benchmark; return the result and the servers' diagnosis of this process (None if unavailable).

        Raises:
            BatchFailed: If the dataset raises an exception for a batch.
            ValueError: If an epoch has no batches.
        """
        batches = self._batches()
        began = time.perf_counter()
        next(batches)
        first = time.perf_counter() - began
        before = work_of(read_all(self._remote.servers.known, 0), self._name)
        began = time.perf_counter()
        for elapsed in self._with_progress(began):
            if elapsed >= self._duration:
                break
            requested = time.perf_counter()
            batch = next(batches)
            self._waits.append(time.perf_counter() - requested)
            self._count(batch)
            if self._step:
                time.sleep(self._step)
        taken = time.perf_counter() - began
        # before close(), while the servers still list this consumer
        readings = read_all(self._remote.servers.known, MAX_CONSUMERS)
        diagnosis, workers = own_diagnosis(readings)
        after = work_of(readings, self._name)
        batches.close()
        waits = np.array(self._waits)
        p50, p95 = np.quantile(waits, (0.5, 0.95)).tolist()
        measured = Measured(
            dataset=self._name, step=self._step, seconds=taken, batches=len(waits), samples=self._samples,
            batch_bytes=self._nbytes / len(waits), first_batch=first, waited=float(waits.sum()),
            wait_p50=p50, wait_p95=p95, wait_max=float(waits.max()), workers=workers,
            busy_per_sample=after.per_sample_since(before), servers=len(readings),
            padding_fraction=self._padding(),
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
            except Exception as error:  # noqa: BLE001 - any exception of the dataset
                raise BatchFailed(f"{type(error).__name__}: {error}") from None
            if empty:
                raise ValueError(
                    f"an epoch of dataset {self._name!r} has no batches: check that the dataset has samples, and use a "
                    "smaller --batch-size, or omit --drop-last"
                )

    def _count(self, batch: Any) -> None:
        _, leaves = flatten(batch)
        arrays = [leaf.array for leaf in leaves if isinstance(leaf, ArrayLeaf)]
        self._nbytes += sum(array.nbytes for array in arrays)
        self._samples += next((len(array) for array in arrays if array.ndim), self._loader.batch_size or 1)

    def _padding(self) -> float | None:
        if self._remote.info.lengths is None:
            return None
        plan = self._loader.plan(0)
        numbers = range(min(len(plan), 1 + len(self._waits), PADDED_BATCHES))
        if (packing := self._loader.spec.packing) is not None:
            batches = (plan.pieces(k) for k in numbers)
            return audit_tokens(batches, self._remote.lengths(), packing.sequence_length).padding_fraction
        return padding_of((plan[k] for k in numbers), self._remote.lengths())

    def _with_progress(self, began: float) -> Iterator[float]:
        """Yield the seconds since `began` repeatedly, and update the progress bar."""
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


class Work(NamedTuple):
    """Total work on a dataset since the start of the servers."""

    samples: int
    busy: float
    """Time for which workers computed batches, in seconds."""

    def per_sample_since(self, before: Work) -> float | None:
        """Return the mean time per sample in seconds since `before`; None if no sample was computed."""
        samples, busy = self.samples - before.samples, self.busy - before.busy
        return busy / samples if samples > 0 and busy > 0 else None


def work_of(readings: Sequence[Reading], dataset: str) -> Work:
    """Return the work of all servers on a dataset; servers that return no statistics are omitted."""
    found = [reading.stats for reading in readings if isinstance(reading.stats, Stats)]
    parts = [part for stats in found for part in stats.datasets if part.dataset == dataset]
    latencies = [latency for part in parts for latency in part.stages.values()]
    return Work(sum(part.samples_computed for part in parts), sum(each.count * each.mean for each in latencies))


def own_diagnosis(readings: Sequence[Reading]) -> tuple[Diagnosis | None, int | None]:
    """Return the servers' diagnosis of this process, and the number of workers that limit its batch rate.

    The diagnosis is None if no server lists this process, or no server returns its statistics. The number is None
    if the workers are not the bottleneck, or also serve other consumers.
    """
    try:
        found = total(readings)
    except TeleloaderError:  # the measurement is complete without them
        return None, None
    # consumers are sorted by their last request, the latest first
    mine = next((consumer for consumer in found.consumers if _is_own(consumer)), None)
    return (None, None) if mine is None else (mine.diagnosis, _limiting_workers(found, mine))


def _is_own(consumer: ConsumerStats) -> bool:
    return consumer.consumer.startswith(consumers_prefix())


def _limiting_workers(found: Stats, mine: ConsumerStats) -> int | None:
    # earlier runs of bench may still be listed
    others = any(consumer.idle < IDLE_GRACE_S and not _is_own(consumer) for consumer in found.consumers)
    if others or mine.diagnosis.bottleneck not in ("workers", "io", "machine"):
        return None
    loaders = [worker.loader for worker in found.workers]
    return loaders.count(mine.loader) or loaders.count(None) or None


def show(measured: Measured, diagnosis: Diagnosis | None, *, as_json: bool) -> None:
    """Print a benchmark result, as text or JSON."""
    if as_json:
        rates = {name: getattr(measured, name) for name in _RATES}
        print_json({**asdict(measured), **rates, "diagnosis": None if diagnosis is None else asdict(diagnosis)})
        return
    console = results_console()
    batches = counted(measured.batches, "batch", "batches")
    heading = f"{measured.dataset}: {batches} in {seconds(measured.seconds)}"
    console.print(Text(printable(heading), style="bold"))
    rows = [
        ("batches/s", number(measured.batches_per_second)),
        ("samples/s", number(measured.samples_per_second)),
        ("bytes/s", f"{size(measured.bytes_per_second)}/s"),
        ("batch size", size(measured.batch_bytes)),
        ("first batch after", seconds(measured.first_batch)),
        ("data wait", f"{share(measured.waited / measured.seconds)} of the time"),
        ("wait per batch", f"p50 {seconds(measured.wait_p50)}, p95 {seconds(measured.wait_p95)}, "
                           f"max {seconds(measured.wait_max)}"),
    ]  # fmt: skip
    if measured.samples_per_second_of_a_worker is not None:
        rows.insert(2, ("per busy worker", f"{number(measured.samples_per_second_of_a_worker)} samples/s"))
    if measured.padding_fraction is not None:
        rows.append(("padding", f"{share(measured.padding_fraction)} of the padded batches"))
    for name, value in rows:
        console.print(Text(f"{name:<18} {value}"))
    if diagnosis is not None and diagnosis.bottleneck == "unknown" and measured.seconds < DIAGNOSIS_AFTER:
        console.print(Text(f"diagnosis: unavailable, the run was too short. Use --seconds {DIAGNOSIS_AFTER} or more"))
    elif diagnosis is not None:
        console.print(sentence("diagnosis", diagnosis))
        if measured.servers > 1:
            console.print(Text(OF_ONE_SERVER))
    if not measured.step:
        console.print(Text(_without_step(measured)))


def _without_step(measured: Measured) -> str:
    """Explain the result of a benchmark that did not simulate training steps."""
    read = "The command discarded the batches; --step S simulates training steps of S seconds."
    if measured.shortest_step is None or measured.workers is None:
        return read
    step, workers = measured.shortest_step, measured.workers
    return (
        f"{read} {counted(workers, 'worker')} keep{'' if workers > 1 else 's'} up with steps of "
        f"{seconds(step)}; for other steps, the number of workers needed is {seconds(workers * step)} / step."
    )
