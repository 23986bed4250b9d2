"""Waits of a training loop at the start of each epoch.

    python -m benchmarks.epochs --plot docs/next_epoch.svg
    python -m benchmarks.epochs --orders     # 100 epochs of every order, with and without prefetch_next_epoch

A worker takes 10 ms per batch, so two workers compute a batch every 5 ms. A step of the training loop takes 8 ms: the
loop waits only for gaps in the loading. The contenders run in turn, several epochs each; the first epoch of a turn is
not measured. The wait for the first batch includes ``iter()``. Each epoch is verified to have every sample once. The
plot needs matplotlib: pip install --group bench.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from benchmarks import machine
from benchmarks.processes import running
from teleloader_server import get_worker_info

NUM_WORKERS: Final = 2
BATCHES: Final = 20
BATCH_SIZE: Final = 8
BATCH_SECONDS: Final = 0.01
STEP_SECONDS: Final = 0.008
WIDTH: Final = 1024
"""Number of values of a sample."""
EPOCHS: Final = 10
"""Measured epochs of a turn."""
ORDER_EPOCHS: Final = 100
"""Measured epochs of each order."""


class Timed:
    """Dataset whose batches take some time; sample i is a row of i."""

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE

    sample_lengths = np.full(BATCHES * BATCH_SIZE, WIDTH)

    def __getitems__(self, indices: list[int]) -> list[NDArray[np.int64]]:
        time.sleep(BATCH_SECONDS * len(indices) / BATCH_SIZE)
        return [np.full(WIDTH, index) for index in indices]

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self.__getitems__([index])[0]


class Stream:
    """Iterable-style counterpart of `Timed`."""

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        info = get_worker_info()
        assert info is not None, "a worker iterates the dataset"
        timed = Timed()
        for index in range(info.id, len(timed), info.num_workers):
            yield timed[index]


HOSTED: Final = [f"{name}=benchmarks.epochs:{kind}" for name, kind in (
    ("timed", "Timed"), ("other", "Timed"), ("stream", "Stream"),
)]  # fmt: skip
ORDERS: Final[dict[str, dict[str, Any]]] = {
    "seeded": {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 0},
    "sequential": {"batch_size": BATCH_SIZE},
    "mixture": {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 0},
    "length-balanced": {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 0, "balance": {"window": 80}},
    "max_tokens": {"shuffle": True, "seed": 0, "balance": {"window": 80, "max_tokens": BATCH_SIZE * WIDTH}},
    "packed": {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 0, "packing": {"sequence_length": WIDTH}},
    "torch's shuffle=True": {"batch_size": BATCH_SIZE, "shuffle": True},
    "generator=": {"batch_size": BATCH_SIZE, "shuffle": True},
    "DistributedSampler": {"batch_size": BATCH_SIZE},
    "iterable-style": {"batch_size": BATCH_SIZE, "num_workers": NUM_WORKERS, "seed": 0},
}
"""Arguments of the loader of each order."""


class Waits(NamedTuple):
    """Waits of one contender for its batches, in seconds."""

    first: list[float]
    """Wait for the first batch of each epoch."""
    others: list[float]
    """Waits for the other batches, epoch by epoch."""

    def medians(self) -> list[float]:
        """Return the median wait for each batch of an epoch."""
        others = np.reshape(self.others, (-1, BATCHES - 1))
        return [float(np.median(self.first)), *np.median(others, axis=0).tolist()]


def epoch(loader: Any, *, checks: bool = True) -> list[float]:
    """Run one epoch of a training loop, and return its wait for each batch in seconds.

    Args:
        loader: The loader.
        checks: Whether to verify that the epoch has each sample once.
    """
    waits, seen = [], []
    began = time.perf_counter()
    batches = iter(loader)
    while (batch := next(batches, None)) is not None:
        waits.append(time.perf_counter() - began)
        if checks:
            seen += batch[:, 0].tolist()
        time.sleep(STEP_SECONDS)
        began = time.perf_counter()
    if checks and sorted(seen) != list(range(BATCHES * BATCH_SIZE)):
        raise AssertionError(f"the epoch has {len(seen)} samples, and not each of {BATCHES * BATCH_SIZE} once")
    if len(waits) != BATCHES:
        raise AssertionError(f"the epoch has {len(waits)} batches, and not {BATCHES}")
    return waits


def measure(loaders: dict[str, Any], turns: int) -> dict[str, Waits]:
    """Return the waits of each loader; the loaders run in turn."""
    found = {name: Waits([], []) for name in loaders}
    for _ in range(turns):
        for name, loader in loaders.items():
            epoch(loader)
            for _ in range(EPOCHS):
                first, *others = epoch(loader)
                found[name].first.append(first)
                found[name].others.extend(others)
    return found


def contenders(url: str) -> dict[str, Any]:
    """Return the loaders by name."""
    from torch.utils.data import DataLoader as TorchLoader

    from teleloader import DataLoader, RemoteDataset

    def loader(*, prefetch_next_epoch: bool) -> Any:
        return DataLoader(
            RemoteDataset(url, "timed"), BATCH_SIZE, shuffle=True, seed=0, prefetch_next_epoch=prefetch_next_epoch
        )

    dataset: Any = Timed()
    local = TorchLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=NUM_WORKERS, persistent_workers=True)
    return {
        "teleloader, prefetch_next_epoch=True": loader(prefetch_next_epoch=True),
        "teleloader": loader(prefetch_next_epoch=False),
        "torch local, persistent_workers=True": local,
    }


def loader_of(url: str, order: str, *, prefetch_next_epoch: bool) -> Any:
    """Return a loader with an order of `ORDERS`."""
    import torch
    from torch.utils.data import DistributedSampler

    from teleloader import DataLoader, LengthBalance, Mixture, Packing, RemoteDataset

    options = dict(ORDERS[order])
    dataset: Any = RemoteDataset(url, "stream" if order == "iterable-style" else "timed")
    if order == "mixture":
        sources = {name: RemoteDataset(url, name) for name in ("timed", "other")}
        dataset = Mixture(sources, {"timed": 1, "other": 1}, samples=BATCHES * BATCH_SIZE)
    if "balance" in options:
        options["balance"] = LengthBalance(**options["balance"])
    if "packing" in options:
        options["packing"] = Packing(**options["packing"], window=80, pad_token_id=-1)
    if order == "generator=":
        options["generator"] = torch.Generator().manual_seed(0)
    if order == "DistributedSampler":
        options["sampler"] = DistributedSampler(dataset, 1, 0)
    return DataLoader(dataset, **options, prefetch_next_epoch=prefetch_next_epoch)


def measure_orders(url: str, epochs: int) -> dict[str, Waits]:
    """Return the waits in all orders, with and without `prefetch_next_epoch`."""
    found = {}
    for order in ORDERS:
        for prefetch in (True, False):
            loader = loader_of(url, order, prefetch_next_epoch=prefetch)
            waits = found[f"{order}, {'prefetched' if prefetch else 'not prefetched'}"] = Waits([], [])
            for number in range(epochs + 1):
                if order == "DistributedSampler":
                    loader.sampler.set_epoch(number)
                else:
                    loader.set_epoch(number)
                first, *others = epoch(loader, checks=order not in {"mixture", "packed"})
                if number:
                    waits.first.append(first)
                    waits.others.extend(others)
    return found


def table(found: dict[str, Waits]) -> Table:
    """Return the table of the results."""
    epochs = len(next(iter(found.values())).first)
    made = Table(title=f"waits of a training loop in {epochs} epochs of {BATCHES} batches", title_justify="left")
    made.add_column("contender", no_wrap=True)
    for heading in ("first batch, median", "p99", "other batches, median", "p99"):
        made.add_column(f"{heading}, ms", justify="right", no_wrap=True)
    for name, waits in found.items():
        rows = (np.quantile(each, share) for each in waits for share in (0.5, 0.99))
        made.add_row(name, *(f"{1e3 * seconds:.2f}" for seconds in rows))
    return made


def draw(path: Path, found: dict[str, Waits]) -> None:
    """Write the plot: the tail of the waits for the first batch, and the median wait for each batch."""
    import matplotlib as mpl

    from benchmarks.fleet_plots import COLORS, STYLE, save  # selects the Agg backend

    plt = mpl.pyplot
    with mpl.rc_context(STYLE):
        figure, (tail, order) = plt.subplots(1, 2, figsize=(9.5, 3.6))
        for color, (name, waits) in zip(COLORS, found.items(), strict=True):
            first = 1e3 * np.sort(waits.first)
            tail.step(first, 1 - np.arange(len(first)) / len(first), where="post", color=color)
            order.plot([1e3 * wait for wait in waits.medians()], ".-", color=color, label=name.replace(", ", ",\n"))
        tail.set(xscale="log", ylim=(0, 1))
        tail.set_title("First batch")
        tail.set_xlabel("wait, ms")
        tail.set_ylabel("fraction of the epochs that wait longer")
        order.set(ylim=(0, None), xticks=range(0, BATCHES, 5))
        order.set_title("Each batch")
        order.set_xlabel("batch of the epoch")
        order.set_ylabel("median wait, ms")
        order.legend()
        save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.epochs", description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=10, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--orders", action="store_true", help="measure 100 epochs of every order instead")
    parser.add_argument("--plot", type=Path, help="path of the plot, an SVG file")
    options = parser.parse_args(arguments)
    console = machine.announce(machine.describe())
    with running(HOSTED, NUM_WORKERS) as server:
        if options.orders:
            found = measure_orders(server.url, ORDER_EPOCHS)
        else:
            found = measure(contenders(server.url), options.turns)
    console.print(table(found))
    if options.plot is not None:
        draw(options.plot, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
