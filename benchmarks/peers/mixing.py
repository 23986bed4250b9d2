"""Mixtures of other libraries, in the training process: each mixes the same three sources of integers.

A sample is an integer: those of a source are the range from its first sample to that of the next source. Batches are
sequences of samples. The sources are repeated without end.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

LENGTHS: Final = (70_000, 25_000, 5_000)
FIRST: Final = (0, 70_000, 95_000)
"""First sample of each source."""
NAMES: Final = ("web", "code", "books")
BATCH_SIZE: Final = 256
SEED: Final = 7

Batches = Iterator[Sequence[int]]


class MixingPeer(ABC):
    """One way to mix the sources.

    Args:
        weights: Weight of each source.
        samples: Samples in an epoch, a multiple of the batch size.
        folder: Empty folder for files, which are written before anything is measured.
    """

    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]]
    """Modules that it imports."""

    def __init__(self, weights: Sequence[float], samples: int, folder: Path) -> None:
        self.weights, self.samples, self.folder = weights, samples, folder
        self.prepare()

    @classmethod
    def missing(cls) -> list[str]:
        """Return the required modules that are not installed."""
        return [module for module in cls.requires if importlib.util.find_spec(module) is None]

    @abstractmethod
    def prepare(self) -> None:
        """Construct the sources, and write their files."""

    @abstractmethod
    def state(self, batches: int) -> Any:
        """Return the state after a number of batches as a JSON value; None if the library saves no state."""

    @abstractmethod
    def start(self, state: Any = None) -> Batches:
        """Construct the mixture, and return the batches from the start or from a state."""

    def resume(self, state: Any, batches: int) -> Batches:
        """Construct the mixture, and return the batches after a number of batches, whose state is given."""
        return self.start(state)


def source(number: int) -> list[int]:
    """Return the samples of a source."""
    return list(range(FIRST[number], FIRST[number] + LENGTHS[number]))


def loaded(dataset: Any, **options: Any) -> Any:
    """Return the batches of torch's loader in this process, as lists."""
    from torch.utils.data import DataLoader

    return iter(DataLoader(dataset, BATCH_SIZE, collate_fn=list, **options))


class HuggingFaceMap(MixingPeer):
    """``interleave_datasets`` of map-style datasets, which draws the order of the epoch when it is called."""

    name = "datasets, map-style"
    requires = ("datasets", "torch")

    def prepare(self) -> None:
        """Construct tables in memory."""
        import datasets

        self._sources = [datasets.Dataset.from_dict({"sample": source(number)}) for number in range(len(LENGTHS))]

    def state(self, batches: int) -> Any:
        """Return the position, which the training script counts itself."""
        return {"batch": batches}  # the training script counts the batches

    def start(self, state: Any = None) -> Batches:
        """Draw the order of the whole epoch, and yield its batches."""
        import datasets

        # enough repetitions for the random counts of the sources
        repeated = [
            each.repeat(2 + int(1.01 * weight * self.samples / len(each)))
            for each, weight in zip(self._sources, self.weights, strict=True)
        ]
        mixed = datasets.interleave_datasets(repeated, probabilities=list(self.weights), seed=SEED)
        first = 0 if state is None else BATCH_SIZE * state["batch"]
        for batch in loaded(mixed, sampler=range(first, self.samples)):
            yield [sample["sample"] for sample in batch]


class HuggingFaceIterable(MixingPeer):
    """``interleave_datasets`` of iterable-style datasets."""

    name = "datasets, iterable-style"
    requires = ("datasets", "torch")

    def prepare(self) -> None:
        """Construct tables in memory, which are read as streams."""
        import datasets

        made = [datasets.Dataset.from_dict({"sample": source(number)}) for number in range(len(LENGTHS))]
        self._sources = [each.to_iterable_dataset().repeat(None) for each in made]

    def _mixed(self) -> Any:
        import datasets

        return datasets.interleave_datasets(self._sources, probabilities=list(self.weights), seed=SEED)

    def state(self, batches: int) -> Any:
        """Iterate up to the position, because the state contains that of the generator."""
        mixed = self._mixed()
        for _ in itertools.islice(mixed, BATCH_SIZE * batches):
            pass
        return mixed.state_dict()

    def start(self, state: Any = None) -> Batches:
        """Yield the batches of the stream."""
        mixed = self._mixed()
        if state is not None:
            mixed.load_state_dict(state)
        for batch in loaded(mixed):
            yield [sample["sample"] for sample in batch]


class Grain(MixingPeer):
    """``MapDataset.mix``, a deterministic order with random access."""

    name = "grain"
    requires = ("grain",)

    def prepare(self) -> None:
        """Construct the sources."""
        import grain

        self._sources = [grain.MapDataset.source(source(number)) for number in range(len(LENGTHS))]

    def state(self, batches: int) -> Any:
        """Return the state at the start, with another position."""
        iterator = self._iterator()
        next(iterator)
        state = iterator.get_state()
        return {name: batches if name == "next_index" else value for name, value in state.items()}

    def start(self, state: Any = None) -> Batches:
        """Yield the batches."""
        iterator = self._iterator()
        if state is not None:
            iterator.set_state(state)
        yield from iterator

    def _iterator(self) -> Any:
        import grain

        shuffled = [each.shuffle(SEED + number).repeat() for number, each in enumerate(self._sources)]
        mixed = grain.MapDataset.mix(shuffled, self.weights)
        reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        return iter(mixed.batch(BATCH_SIZE, batch_fn=list).to_iter_dataset(reading))


class WebDataset(MixingPeer):
    """``RandomMix`` of iterables in memory, in place of tar files."""

    name = "webdataset"
    requires = ("webdataset", "torch")

    def prepare(self) -> None:
        """Construct the sources."""
        self._sources = [source(number) for number in range(len(LENGTHS))]

    def state(self, batches: int) -> Any:
        """Return None: iterables have no state."""
        return None

    def start(self, state: Any = None) -> Batches:
        """Yield the batches of the stream."""
        import random

        import webdataset

        random.seed(SEED)  # RandomMix draws from the global generator
        endless = [itertools.cycle(samples) for samples in self._sources]
        yield from loaded(webdataset.RandomMix(endless, self.weights))

    def resume(self, state: Any, batches: int) -> Batches:
        """Repeat the epoch from its start up to this place."""
        started = self.start()
        for _ in range(batches):
            next(started)
        return started


class Mosaic(MixingPeer):
    """``StreamingDataset`` with proportions, which shuffles the samples of an epoch when it starts."""

    name = "mosaicml-streaming"
    requires = ("streaming", "torch")

    def prepare(self) -> None:
        """Write the sources as MDS files."""
        from streaming import MDSWriter

        for number, name in enumerate(NAMES):
            if not (self.folder / name).exists():
                # many small shards, because shards are shuffled, too
                columns, out = {"sample": "int"}, str(self.folder / name)
                with MDSWriter(out=out, columns=columns, size_limit=2**14) as writer:
                    for sample in source(number):
                        writer.write({"sample": sample})

    def state(self, batches: int) -> Any:
        """Return the state that ``StreamingDataLoader`` saves."""
        state = self._dataset().state_dict(BATCH_SIZE * batches, from_beginning=True)
        return {**state, "epoch": 0}  # the dataset has not started its first epoch

    def start(self, state: Any = None) -> Batches:
        """Yield the batches, after the order of the whole epoch is drawn."""
        dataset = self._dataset()
        if state is not None:
            dataset.load_state_dict(state)
        try:
            for batch in loaded(dataset):
                yield [sample["sample"] for sample in batch]
        finally:
            dataset._iterator.exit()  # its threads read the files, which will be deleted
            dataset._executor.shutdown()

    def _dataset(self) -> Any:
        from streaming import Stream, StreamingDataset

        streams = [
            Stream(local=str(self.folder / name), proportion=weight)
            for name, weight in zip(NAMES, self.weights, strict=True)
        ]
        return StreamingDataset(
            streams=streams, epoch_size=self.samples, shuffle=True, shuffle_seed=SEED, batch_size=BATCH_SIZE
        )


class Teleloader(MixingPeer):
    """``Mixture`` of this package."""

    name = "teleloader"
    requires = ()

    def prepare(self) -> None:
        """Construct the sources."""
        self._sources = {name: source(number) for number, name in enumerate(NAMES)}

    def state(self, batches: int) -> Any:
        """Return the state at the start, with another position."""
        return {**self._loader().state_dict(), "samples": BATCH_SIZE * batches}

    def start(self, state: Any = None) -> Batches:
        """Return the iterator of a loader."""
        loader = self._loader()
        if state is not None:
            loader.load_state_dict(state)
        return iter(loader)

    def _loader(self) -> Any:
        from teleloader import DataLoader, Mixture

        mixture = Mixture(self._sources, dict(zip(NAMES, self.weights, strict=True)), samples=self.samples)
        return DataLoader(mixture, BATCH_SIZE, shuffle=True, seed=SEED, collate_fn=list)


MIXING_PEERS: Final[tuple[type[MixingPeer], ...]] = (
    Teleloader, Grain, HuggingFaceMap, HuggingFaceIterable, WebDataset, Mosaic,
)  # fmt: skip


def state_bytes(state: Any) -> int:
    """Return the size of a state as JSON."""
    return len(json.dumps(state, default=lambda value: np.asarray(value).tolist()))
