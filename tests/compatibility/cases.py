"""Loaders whose saved states are recorded, and digests of the batches that follow a state."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from teleloader import DataLoader, LengthBalance, Mixture, Packing, RemoteDataset
from teleloader_server import get_worker_info, serve

LENGTH: Final = 200
BEFORE: Final = 3
"""Batches before a state is saved, so that it is in the middle of the epoch."""


class Numbers:
    """Dataset of arrays with the index and random numbers."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        return self.sample(index)

    def sample(self, index: int) -> Any:
        """Return the values that the built-in collate function stacks."""
        drawn = [np.random.randint(2**31), random.getrandbits(31)]
        return {
            "x": np.array([self.offset + index, *drawn]),
            "y": [float(index), f"sample {index}"],
            "z": index % 2 == 0,
        }


class Large(Numbers):
    """Dataset with more samples than the permutation sorts (`permutation.SORTED_UP_TO`)."""

    def __len__(self) -> int:
        return 5000


class Fragile(Numbers):
    """Dataset that fails for every ninth sample."""

    def __getitem__(self, index: int) -> Any:
        """Return a sample, or raise."""
        if index % 9 == 3:
            raise ValueError(f"sample {index} is damaged")
        return self.sample(index)


class Texts(Numbers):
    """Dataset of documents with lengths."""

    sample_lengths: Any = (np.arange(LENGTH) * 7919) % 61 + 1

    def __getitem__(self, index: int) -> Any:
        """Return the tokens of a document."""
        return 1000 * index + np.arange(int(self.sample_lengths[index]))


class Padded(Texts):
    """Dataset of documents with padding."""

    def __getitem__(self, index: int) -> Any:
        """Return a sample of a fixed length."""
        return np.pad(super().__getitem__(index), (0, 61 - int(self.sample_lengths[index])))


class Stream:
    """Iterable-style dataset, divided among the workers."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, LENGTH, step):
            yield np.array([number, random.getrandbits(31)])


DATASETS: Final[dict[str, type[Any]]] = {
    "numbers": Numbers, "more": Numbers, "fragile": Fragile, "large": Large, "text": Texts, "padded": Padded,
    "stream": Stream,
}  # fmt: skip
SHUFFLED: Final[dict[str, Any]] = {"batch_size": 4, "shuffle": True, "seed": 7}

CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "sequential": ("numbers", {"batch_size": 4, "seed": 7}),
    "shuffled": ("numbers", SHUFFLED),
    "shuffled-large": ("large", {**SHUFFLED, "batch_size": 64}),
    "single-samples": ("numbers", {"batch_size": None, "shuffle": True, "seed": 7}),
    "drop-last": ("numbers", {**SHUFFLED, "batch_size": 7, "drop_last": True}),
    "rank-pad": ("numbers", {**SHUFFLED, "rank": 1, "world_size": 3}),
    "rank-uneven": ("numbers", {**SHUFFLED, "rank": 2, "world_size": 3, "tail": "uneven"}),
    "rank-drop": ("numbers", {**SHUFFLED, "rank": 0, "world_size": 3, "tail": "drop"}),
    "mixture": ("mixture", {**SHUFFLED, "samples": 120}),
    "rank-mixture": ("mixture", {**SHUFFLED, "samples": 120, "rank": 1, "world_size": 2}),
    "rank-balance": ("padded", {**SHUFFLED, "rank": 1, "world_size": 2, "balance": LengthBalance(window=40)}),
    "rank-max-tokens": (
        "padded",
        {
            "shuffle": True,
            "seed": 7,
            "rank": 1,
            "world_size": 2,
            "balance": LengthBalance(max_tokens=256, window=48, group=2),
        },
    ),
    "rank-packing": (
        "text",
        {**SHUFFLED, "rank": 1, "world_size": 2, "packing": Packing(sequence_length=32, window=60)},
    ),
    "skip": ("fragile", {**SHUFFLED, "on_error": "skip", "max_errors": 0.5}),
    "replace": ("fragile", {**SHUFFLED, "on_error": "replace", "max_errors": 0.5}),
    "balance": ("padded", {**SHUFFLED, "balance": LengthBalance(window=40)}),
    "max-tokens": ("padded", {"shuffle": True, "seed": 7, "balance": LengthBalance(max_tokens=256, window=48)}),
    "packing": ("text", {**SHUFFLED, "packing": Packing(sequence_length=32, window=60)}),
    "iterable": ("stream", {"batch_size": 4, "num_workers": 2}),
    "shuffle-buffer": ("stream", {"batch_size": 4, "num_workers": 2, "shuffle_buffer_size": 16, "seed": 7}),
    "sampler": ("numbers", {"batch_size": 4, "sampler": list(range(LENGTH - 1, -1, -1))}),
    "random-sampler": ("numbers", {"batch_size": 4, "shuffle": True, "generator": None}),
}
"""Dataset and loader arguments; each order and each algorithm occurs at least once."""


@contextmanager
def hosted() -> Iterator[str]:
    """Start a server with all datasets."""
    made = {name: kind(10**6) if name == "more" else kind() for name, kind in DATASETS.items()}
    with serve(made, num_workers=2) as url:
        yield url


def loader_of(case: str, url: str) -> DataLoader:
    """Create the loader of a case."""
    name, options = CASES[case]
    options = {"output": "numpy", **options}
    if "generator" in options:
        options["generator"] = torch.Generator().manual_seed(11)
    if name != "mixture":
        return DataLoader(RemoteDataset(url, name), **options)
    samples = options.pop("samples")
    sources = {each: RemoteDataset(url, each) for each in ("numbers", "more")}
    return DataLoader(Mixture(sources, weights={"numbers": 3, "more": 1}, samples=samples), **options)


def algorithms_of(loader: DataLoader) -> frozenset[str]:
    """Return the names of the algorithms that determine a loader's batches."""
    return loader._order.algorithms(loader.spec)


def digest(loader: DataLoader) -> str:
    """Return a digest of the rest of the epoch and of the first batches of the next one, bit for bit."""
    hasher = hashlib.sha256()
    for batch in loader:
        _add(hasher, batch)
    for _, batch in zip(range(BEFORE), loader, strict=False):
        _add(hasher, batch)
    return hasher.hexdigest()


def _add(hasher: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        for name, each in value.items():
            hasher.update(f"{name}:".encode())
            _add(hasher, each)
    elif isinstance(value, list | tuple):
        hasher.update(f"[{len(value)}]".encode())
        for each in value:
            _add(hasher, each)
    elif isinstance(value, np.ndarray):
        hasher.update(f"{value.dtype.str}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    else:
        hasher.update(repr(value).encode())
