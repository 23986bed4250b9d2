"""Mixtures: deviation of the counts from the weights, and cost of the order, compared with other libraries.

    python -m benchmarks.mixtures --plot docs/mixtures.svg

The first figures and the plot compare a mixture with a random choice of the source of each sample. The table compares
it with ``datasets``, Grain, WebDataset and MosaicML Streaming, if they are installed: pip install --group peers.
mosaicml-streaming requires an environment of its own. The plot needs matplotlib: pip install --group bench.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from benchmarks.peers.mixing import BATCH_SIZE, FIRST, MIXING_PEERS, NAMES, SEED, MixingPeer, state_bytes
from teleloader_shared.orders.mixture import Interleaving
from teleloader_shared.orders.plan import Plan
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.weights import MixtureSpec

SAMPLES: Final = 20_000
STAGES: Final = ((0, (70, 25, 5)), (8_000, (40, 40, 20)), (14_000, (20, 30, 50)))
PERIODS: Final = {"weights with 1 digit": (7, 2, 1), "3 digits": (701, 203, 96), "6 digits": (700_001, 200_003, 99_996)}

COMPARED: Final = ((0.7, 0.25, 0.05), (0.61, 0.27, 0.12))
"""Weights with which the libraries are compared; the first ones also for the costs."""
COMPARED_SAMPLES: Final = 1_000 * BATCH_SIZE
"""Samples whose sources are counted."""
EPOCH: Final = 10**7
"""Samples in the epoch that is resumed."""


def expected() -> Any:
    """Return the sums of the weights after 1 to `SAMPLES` samples, of shape (samples, sources)."""
    weights = np.empty((SAMPLES, len(NAMES)))
    for start, each in STAGES:
        weights[start:] = np.array(each) / sum(each)
    return weights, np.cumsum(weights, axis=0)


def deviations() -> tuple[Any, Any]:
    """Return the differences of the counts from the weights: of the interleaving, and of a random choice."""
    weights, sums = expected()
    sources, _ = Interleaving(STAGES).at(np.arange(SAMPLES))
    drawn = (np.random.default_rng(SEED).random(SAMPLES)[:, None] > np.cumsum(weights, axis=1)).sum(axis=1)
    counts = [np.cumsum(each[:, None] == np.arange(len(NAMES)), axis=0) for each in (sources, drawn)]
    return counts[0] - sums, counts[1] - sums


def measure(whole: tuple[int, ...]) -> tuple[float, float]:
    """Return seconds to prepare an order of 10**9 samples, and seconds per batch of 256 at random places."""
    mixture = MixtureSpec(tuple((name, 10**9) for name in NAMES), ((0, whole),), 10**9)
    spec = LoaderSpec(dataset="web", batch_size=256, shuffle=True, seed=SEED, mixture=mixture)
    began = time.perf_counter()
    plan = Plan(spec, mixture.length, 0)
    plan[0]
    prepared = time.perf_counter() - began
    places = np.random.default_rng(SEED).integers(0, len(plan), 200).tolist()
    began = time.perf_counter()
    for k in places:
        plan[k]
    return prepared, (time.perf_counter() - began) / len(places)


def worst(samples: Any, weights: Sequence[float]) -> tuple[float, float]:
    """Return the largest differences of the counts from the weights: after any sample, and in any window of a batch."""
    sources = np.searchsorted(FIRST, samples, side="right")[:, None] == np.arange(1, 1 + len(FIRST))
    excess = np.vstack([np.zeros(len(FIRST)), np.cumsum(sources - np.array(weights), axis=0)])
    return float(np.abs(excess).max()), float(np.abs(excess[BATCH_SIZE:] - excess[:-BATCH_SIZE]).max())


def first_batch(start: Callable[[], Iterator[Any]]) -> float:
    """Return the CPU seconds to the first batch, with the construction of the mixture."""
    began = time.process_time()
    next(start())
    return time.process_time() - began


def row(kind: type[MixingPeer], folder: Path) -> str:
    """Return the row of a library in the table."""
    deviations: list[float] = []
    rates = []
    for weights in COMPARED:
        batches = kind(weights, EPOCH, folder).start()
        found = list(next(batches))
        began = time.process_time()
        while len(found) < COMPARED_SAMPLES:
            found += next(batches)
        rates.append((COMPARED_SAMPLES - BATCH_SIZE) / (time.process_time() - began))
        deviations += worst(np.array(found), weights)
    place = int(np.random.default_rng(SEED).integers(EPOCH // BATCH_SIZE))
    peer = kind(COMPARED[0], EPOCH, folder)
    state = peer.state(place)
    figures = "".join(f"{each:>9.2f}" for each in deviations)
    size = "none" if state is None else f"{state_bytes(state):,}"
    start, resume = first_batch(peer.start), first_batch(lambda: peer.resume(state, place))
    return f"{kind.name:<26}{figures}{max(rates):>13,.0f}{1e3 * start:>12,.1f}{size:>10}{1e3 * resume:>13,.1f}"


def compare() -> None:
    """Print the table of the libraries."""
    print(
        f"\ndeviation of {COMPARED_SAMPLES:,} samples with the weights {COMPARED[0]} and {COMPARED[1]}: after any "
        f"sample, and in any {BATCH_SIZE} successive ones;\nsamples per CPU second; in an epoch of {EPOCH:,} samples: "
        "CPU ms to the first batch, bytes of the state\nat a random place, CPU ms to the first batch after a resume"
    )
    headings = ("any", "window", "any", "window")
    print(
        f"{'':<26}{''.join(f'{each:>9}' for each in headings)}{'samples/s':>13}{'first':>12}{'state':>10}{'resume':>13}"
    )
    for kind in MIXING_PEERS:
        if missing := kind.missing():
            print(f"{kind.name:<26}skipped: {', '.join(missing)} is not installed")
            continue
        with TemporaryDirectory() as folder:
            print(row(kind, Path(folder)), flush=True)


def draw(path: Path) -> None:
    """Write the plot of the deviations."""
    import matplotlib as mpl

    from benchmarks.fleet_plots import COLORS, STYLE, save  # selects the Agg backend

    plt = mpl.pyplot

    ours, random = deviations()
    with mpl.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.6))
        whole, change = slice(0, SAMPLES, 40), slice(7_950, 8_050)
        for axis, rows, part, title in (
            (panels[0], random, whole, "Random choice"),
            (panels[1], ours, change, "Mixture, where the weights change"),
        ):
            for color, name, column in zip(COLORS, NAMES, rows.T, strict=True):
                positions = np.arange(1, SAMPLES + 1)[part]
                axis.step(positions, column[part], where="post", color=color, linewidth=1, label=name)
            axis.set_xlabel("samples")
            axis.set_title(title)
            axis.xaxis.set_major_locator(plt.MaxNLocator(5))
        panels[0].set_ylabel("count minus sum of weights")
        panels[1].set_ylim(-1.5, 1.5)
        panels[0].legend()
        save(figure, path)


def main() -> None:
    """Print the figures, and draw the plot if its path is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="path of the plot, an SVG file")
    path = parser.parse_args().plot
    ours, random = deviations()
    print(
        f"largest deviation of {SAMPLES:,} samples: mixture {np.abs(ours).max():.2f}, random {np.abs(random).max():.0f}"
    )
    for name, whole in PERIODS.items():
        prepared, batch = measure(whole)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{name}: {1e3 * prepared:.1f} ms to the first batch of 10**9 samples, then {1e6 * batch:.0f} µs per batch "
            f"of 256 at random places; peak memory of the process {peak:.0f} MiB"
        )
    compare()
    if path is not None:
        draw(path)


if __name__ == "__main__":
    main()
