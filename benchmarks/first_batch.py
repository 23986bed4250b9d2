"""Time to the first batch: at the start of an epoch, for datasets of any length, and after a resume.

Each measurement runs in a fresh process that has not loaded anything. The time starts with the construction of the
loader and ends with its first batch. For teleloader, it includes connection, registration and the batch. For a local
loader, it includes generating the order and starting the worker. All orders are shuffled, with a new seed for each
measurement, so that no server has the batches buffered. The batch is compared with the dataset.
"""

from __future__ import annotations

import importlib.util
import resource
import secrets
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pkgutil import resolve_name
from statistics import median
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from benchmarks.measuring import Spread
from benchmarks.parts import Job, Outcome, Setting, Step, interleaved
from benchmarks.processes import await_idle, consumers

BATCH_SIZE: Final = 256
LATER: Final = 3
"""Minimum number of further loaders per process; their median is reported."""
LATER_SECONDS: Final = 0.2
"""Minimum total time of the further loaders."""
RESUMED_AT: Final = 0.9
"""Fraction of the epoch that is complete before the resume."""
START_LENGTHS: Final = (10**5, 10**6, 10**7, 10**8, 10**10)
RESUME_LENGTHS: Final = (10**6, 10**7, 10**8)


class Numbered:
    """Dataset of 32 float32 per sample, computed from the index, so that it needs no memory."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        sample = np.full(32, index % 2**20, np.float32)
        sample[16:] = index // 2**20
        return sample

    @staticmethod
    def numbers(batch: Any) -> NDArray[np.int64]:
        """Return the indices of a batch."""
        rows = np.asarray(batch).astype(np.int64)
        numbers: NDArray[np.int64] = rows[:, 0] + 2**20 * rows[:, 16]
        return numbers


class Contender(Protocol):
    """Way to load; can be sent to another process."""

    @property
    def name(self) -> str:
        """Name in tables."""

    @property
    def longest(self) -> int:
        """Length of the longest dataset to measure."""

    def loader(self, length: int, seed: int) -> Any:
        """Return a shuffled loader of a dataset with `length` samples."""

    def after(self, count: int, length: int, seed: int) -> tuple[Any, NDArray[np.int64]]:
        """Return the loader's state after `count` batches, and the indices of the next batch."""

    def await_idle(self) -> None:
        """Wait until all work for closed loaders has ended."""


@dataclass(frozen=True, slots=True)
class Teleloader:
    """teleloader in seeded order."""

    url: str
    longest: int = 2**62
    name = "teleloader"

    def loader(self, length: int, seed: int) -> Any:
        """Return a loader with a new connection."""
        from teleloader import DataLoader, RemoteDataset

        return DataLoader(RemoteDataset(self.url, _name(length)), BATCH_SIZE, shuffle=True, seed=seed)

    def after(self, count: int, length: int, seed: int) -> tuple[Any, NDArray[np.int64]]:
        """Return a state, which counts samples."""
        loader = self.loader(length, seed)
        return {**loader.state_dict(), "samples": count * BATCH_SIZE}, loader.plan(0)[count]

    def await_idle(self) -> None:
        """Wait for the server's workers, which may still compute prefetched batches."""
        await_idle(self.url)


@dataclass(frozen=True, slots=True)
class Local:
    """Local loader with one worker process."""

    name: str
    loader_class: str
    """``module:name``."""
    sampler_class: str
    longest: int

    def loader(self, length: int, seed: int) -> Any:
        """Return a loader of the same samples."""
        return self._loader(Numbered(length), seed)

    def after(self, count: int, length: int, seed: int) -> tuple[Any, NDArray[np.int64]]:
        """Return state and indices; the samples are only indices, so that the loader reaches this batch faster."""
        loader = self._loader(range(length), seed, collate_fn=list)
        batches = iter(loader)
        for _ in islice(batches, count):
            pass
        return loader.state_dict() if count else None, np.array(next(batches))

    def await_idle(self) -> None:
        """Return immediately: the worker ends with its iterator."""

    def _loader(self, dataset: Any, seed: int, **options: Any) -> Any:
        import torch

        sampler = resolve_name(self.sampler_class)(dataset, generator=torch.Generator().manual_seed(seed))
        with warnings.catch_warnings():  # torchdata calls a deprecated function of torch
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            return resolve_name(self.loader_class)(dataset, BATCH_SIZE, sampler=sampler, num_workers=1, **options)


def torch_local(setting: Setting) -> Local:
    """Return ``torch.utils.data.DataLoader``, which needs seconds and gigabytes to shuffle 10**8 samples."""
    longest = 10**8 if setting.large else 10**7
    return Local("torch local", "torch.utils.data:DataLoader", "torch.utils.data:RandomSampler", longest)


def torchdata(setting: Setting) -> Local:
    """Return torchdata's ``StatefulDataLoader``, whose state requires loading all batches before it."""
    longest = 10**7 if setting.large else 10**6
    module = "torchdata.stateful_dataloader"
    return Local(
        "torchdata's StatefulDataLoader", f"{module}:StatefulDataLoader", f"{module}.sampler:RandomSampler",
        longest,
    )  # fmt: skip


_Turn = TypeVar("_Turn")
Rows = dict[tuple[str, int], list[_Turn]]
"""Measurements of each contender and length, one per round."""


def _name(length: int) -> str:
    return f"numbered-{length}"


def _hosted(lengths: Sequence[int]) -> dict[str, str]:
    factory = f'factory = "{__name__}:{Numbered.__name__}"\n'
    return {_name(length): f"{factory}kwargs = {{ length = {length} }}\n" for length in lengths}


# -- measurements, each in a fresh process


@dataclass(frozen=True, slots=True)
class Started:
    """Measurement of one process, in seconds and bytes."""

    first: float
    """Seconds to the first batch of the first loader of the process, which includes lazy imports."""
    later: list[float]
    """Seconds to the first batch of each further loader."""
    memory: int
    """Growth of the process's peak RSS in bytes, without its workers."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Measurement of one process that already had a loader: seconds to the first batch of each further loader."""

    begun: list[float]
    """Seconds to the first batch of a new epoch."""
    resumed: list[float]
    """Seconds to the first batch after ``load_state_dict``, which is included."""


def start(contender: Contender, length: int) -> Started:
    """Measure one loader after the other."""
    before = _most_memory()
    first, _ = _first_batch(contender, length, _seed())
    later: list[float] = []
    while _goes_on(later):
        seed = _seed()
        seconds, batch = _first_batch(contender, length, seed)
        later.append(seconds)
    memory = _most_memory() - before
    _check(contender, batch, contender.after(0, length, seed)[1])
    return Started(first, later, memory)


def resume(contender: Contender, length: int) -> Resumed:
    """Measure pairs of a loader that starts an epoch and one that resumes, in alternating order."""
    _first_batch(contender, length, _seed())
    turn = Resumed([], [])
    while _goes_on(turn.begun):
        seed = _seed()
        state, expected = contender.after(int(length // BATCH_SIZE * RESUMED_AT), length, seed)
        for resumes in (False, True) if len(turn.begun) % 2 == 0 else (True, False):
            if not resumes:
                turn.begun.append(_first_batch(contender, length, _seed())[0])
                continue
            seconds, batch = _first_batch(contender, length, seed, state)
            turn.resumed.append(seconds)
            _check(contender, batch, expected)
    return turn


def _first_batch(contender: Contender, length: int, seed: int, state: Any = None) -> tuple[float, Any]:
    """Return the time to the first batch in seconds, and the batch."""
    contender.await_idle()
    began = time.perf_counter()
    loader = contender.loader(length, seed)
    if state is not None:
        loader.load_state_dict(state)
    batches = iter(loader)
    batch = next(batches)
    return time.perf_counter() - began, batch


def _goes_on(seconds: Sequence[float]) -> bool:
    return len(seconds) < LATER or sum(seconds) < LATER_SECONDS


def _check(contender: Contender, batch: Any, expected: NDArray[np.int64]) -> None:
    numbers = Numbered.numbers(batch)
    if not np.array_equal(numbers, expected):
        raise AssertionError(f"the first batch of {contender.name} holds {numbers}, and should hold {expected}")


def _seed() -> int:
    return secrets.randbits(63)


def _most_memory() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# -- the parts


class Start:
    """Time to the first batch of an epoch, for datasets of any length."""

    name = "start"
    hosted: Mapping[str, str] = _hosted(START_LENGTHS)

    def prepare(self, setting: Setting) -> Job:
        """Select the contenders."""
        peers = [torch_local(setting)] if _is_installed("torch") else []
        return _job(self.name, START_LENGTHS, peers, setting, start, self._outcome)

    @staticmethod
    def _outcome(rows: Rows[Started]) -> Outcome:
        table = _table(
            f"start - time to the first batch of a shuffled epoch; a batch has {BATCH_SIZE} samples of 32 float32 "
            "values each",
            (
                "first loader, ms",
                "further loaders, ms",
                f"relative to {START_LENGTHS[0]:,} samples",
                "client memory, MiB",
            ),
        )
        for (contender, length), row in rows.items():
            base = rows[contender, START_LENGTHS[0]]
            ratios = [median(turn.later) / median(other.later) for turn, other in zip(row, base, strict=True)]
            table.add_row(
                contender,
                f"{length:,}",
                _ms([turn.first for turn in row]),
                _ms([median(turn.later) for turn in row]),
                _ratio(ratios),
                Spread.of([turn.memory / 2**20 for turn in row]).text("+,.0f"),
            )
        return Outcome([table], _results(rows))


class Resume:
    """Time to the first batch after ``load_state_dict``, compared with the start of an epoch."""

    name = "resume"
    hosted: Mapping[str, str] = _hosted(RESUME_LENGTHS)

    def prepare(self, setting: Setting) -> Job:
        """Select the contenders."""
        peers = [torchdata(setting)] if _is_installed("torchdata") else []
        return _job(self.name, RESUME_LENGTHS, peers, setting, resume, self._outcome)

    @staticmethod
    def _outcome(rows: Rows[Resumed]) -> Outcome:
        table = _table(
            "resume - time to the first batch: "
            f"at the start of a shuffled epoch, and after resuming at {RESUMED_AT:.0%} of it",
            ("new epoch, ms", "resumed epoch, ms", "resumed to new"),
        )
        for (contender, length), row in rows.items():
            table.add_row(
                contender,
                f"{length:,}",
                _ms([median(turn.begun) for turn in row]),
                _ms([median(turn.resumed) for turn in row]),
                _ratio([median(turn.resumed) / median(turn.begun) for turn in row]),
            )
        without = [] if _is_installed("torchdata") else ["torchdata is not installed: skipping its loader"]
        return Outcome([table, *without], _results(rows))


def _job(
    name: str,
    lengths: Sequence[int],
    peers: Sequence[Contender],
    setting: Setting,
    measure: Callable[[Contender, int], _Turn],
    outcome: Callable[[Rows[_Turn]], Outcome],
) -> Job:
    """Return a job that measures each contender with each length that it supports, one after the other per round.

    Args:
        name: Name of the part.
        lengths: Lengths of the datasets.
        peers: Contenders besides teleloader.
        setting: Settings of the run.
        measure: Measures a contender with a length.
        outcome: Returns the results of the measurements.
    """
    found: Sequence[Contender] = (Teleloader(setting.servers.get(1).url), *peers)
    cases = [(contender, length) for contender in found for length in lengths if length <= contender.longest]

    def run(step: Step) -> Outcome:
        step(f"{name}: first batches")  # warm-up of the server
        _apart(measure, *cases[0])
        rows = interleaved(
            cases,
            setting.rounds,
            step,
            lambda case: f"{name}: {case[0].name}, {case[1]:,} samples",
            lambda case: _apart(measure, *case),
        )
        return outcome({(contender.name, length): row for (contender, length), row in rows.items()})

    return Job(1 + len(cases) * setting.rounds, run)


def _apart(measure: Callable[[Contender, int], _Turn], contender: Contender, length: int) -> _Turn:
    with consumers(1) as processes:
        return processes.submit(measure, contender, length).result()


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _results(rows: Rows[Any]) -> list[dict[str, Any]]:
    return [
        {"contender": contender, "length": length, "turns": [asdict(turn) for turn in row]}
        for (contender, length), row in rows.items()
    ]


def _table(title: str, headings: Sequence[str]) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold")
    made.add_column("contender", no_wrap=True)
    for heading in ("samples", *headings):
        made.add_column(heading, justify="right", no_wrap=True)
    return made


def _ms(seconds: list[float]) -> str:
    spread = Spread.of([1000 * each for each in seconds])
    return spread.text(",.1f" if spread.middle < 100 else ",.0f")


def _ratio(ratios: list[float]) -> str:
    spread = Spread.of(ratios)
    return spread.text(".2f" if spread.middle < 10 else ".1f")
