"""Sample cache: seconds per epoch in two successive runs, against other caches and no cache.

    python -m benchmarks.caching --plot docs/sample_cache.svg

Pillow decodes a JPEG file of 500 x 375 pixels and resizes a crop to 224 x 224; a random flip follows the cache. Two
workers load. The first run has three epochs, and the second one two. torch's loader runs without a cache, with a
dictionary in the memory of each worker, and with a .npy file for each sample. The plot needs matplotlib: pip install
--group bench.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import psutil
from numpy.typing import NDArray
from torch.utils.data import DataLoader as TorchLoader

from benchmarks.workloads import Photographs
from teleloader import DataLoader, RemoteDataset
from teleloader_server import CachedDataset, serve

SAMPLES: Final = 1_000
BATCH_SIZE: Final = 50
NUM_WORKERS: Final = 2
RUNS: Final = (3, 2)
"""Epochs of each run."""


class Decoded(Photographs):
    """Decoded images, contiguous in memory."""

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        return np.ascontiguousarray(super().__getitem__(index))


class Flipped:
    """Images of a dataset, of which a random half is flipped."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        image = self.images[index]
        return image[:, :, ::-1].copy() if np.random.random() < 0.5 else image


class InMemory:
    """Cache in a dictionary, of which each worker has its own."""

    def __init__(self, images: Any) -> None:
        self.images = images
        self.known: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.known:
            self.known[index] = self.images[index]
        return self.known[index]


class InFiles:
    """Cache with a .npy file for each sample."""

    def __init__(self, images: Any, folder: Path) -> None:
        self.images, self.folder = images, folder

    def __getitem__(self, index: int) -> Any:
        path = self.folder / f"{index}.npy"
        if not path.exists():
            image = self.images[index]
            np.save(path, image)
            return image
        return np.load(path)


@contextmanager
def by_torch(dataset: Any) -> Iterator[Any]:
    """Context manager that yields torch's loader of a dataset."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        yield TorchLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS, persistent_workers=True)


@contextmanager
def by_server(dataset: Any) -> Iterator[Any]:
    """Context manager that yields a loader whose server hosts a dataset."""
    with serve(dataset, num_workers=NUM_WORKERS) as url:
        yield DataLoader(RemoteDataset(url), BATCH_SIZE, shuffle=True, seed=7)


def contenders(folder: Path) -> dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """Return by name how a contender loads a dataset, and how it caches one."""
    (folder / "files").mkdir()
    cached = partial(CachedDataset, directory=folder / "cache", version="1", max_bytes=2**30)
    return {
        "torch": (by_torch, lambda images: images),
        "torch, memory of each worker": (by_torch, InMemory),
        "torch, file for each sample": (by_torch, partial(InFiles, folder=folder / "files")),
        "teleloader": (by_server, lambda images: images),
        "teleloader, CachedDataset": (by_server, cached),
    }


def measure(load: Callable[[Any], Any], cache: Callable[[Any], Any]) -> tuple[list[float], float]:
    """Return the seconds of each epoch of both runs, and the private memory of all worker processes in MiB."""
    seconds, memory = [], 0.0
    for epochs in RUNS:
        with load(Flipped(cache(Decoded(SAMPLES)))) as loader:
            for _ in range(epochs):
                began = time.perf_counter()
                samples = sum(len(images) for images in loader)
                seconds.append(time.perf_counter() - began)
                if samples != SAMPLES:
                    raise AssertionError(f"the epoch has {samples} samples in place of {SAMPLES}")
            children = psutil.Process().children(recursive=True)
            memory = max(memory, sum(child.memory_full_info().uss for child in children) / 2**20)
            del loader
    return seconds, memory


def draw(path: Path, found: dict[str, list[float]]) -> None:
    """Write the plot of the seconds per epoch."""
    import matplotlib as mpl

    from benchmarks.fleet_plots import COLORS, INK, STYLE, save  # selects the Agg backend

    plt = mpl.pyplot
    styles = ((COLORS[1], ":"), (COLORS[1], "--"), (COLORS[1], "-"), (COLORS[0], ":"), (COLORS[0], "-"))
    with mpl.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(9.5, 3.6))
        for (color, line), (name, seconds) in zip(styles, found.items(), strict=True):
            axis.plot(seconds, line, marker="o", color=color, label=name)
        axis.axvline(RUNS[0] - 0.5, color=INK, linewidth=0.8, linestyle=":")
        axis.text(RUNS[0] - 0.45, 1, "second run", va="top", transform=axis.get_xaxis_transform())
        axis.set(ylim=(0, None), xticks=range(sum(RUNS)))
        axis.set_xlabel("epoch")
        axis.set_ylabel("seconds per epoch")
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
        save(figure, path)


def main() -> None:
    """Print the seconds per epoch, and draw the plot if its path is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds, whose median is reported; 3 by default")
    parser.add_argument("--plot", type=Path, help="path of the plot, an SVG file")
    options = parser.parse_args()
    rounds: list[dict[str, tuple[list[float], float]]] = []
    for _ in range(options.rounds):
        with TemporaryDirectory() as folder:
            rounds.append({name: measure(*each) for name, each in contenders(Path(folder)).items()})
            size = sum(path.stat().st_size for path in Path(folder, "cache").iterdir()) / 2**20
    found = {
        name: [median(epoch) for epoch in zip(*(each[name][0] for each in rounds), strict=True)] for name in rounds[0]
    }
    print(f"seconds per epoch of {SAMPLES:,} samples, in runs of {RUNS} epochs; file of CachedDataset: {size:.0f} MiB")
    for name, seconds in found.items():
        memory = median(each[name][1] for each in rounds)
        print(f"{name:<30} {'  '.join(f'{each:5.2f}' for each in seconds)}   memory of the processes {memory:5.0f} MiB")
    if options.plot is not None:
        draw(options.plot, found)


if __name__ == "__main__":
    main()
