"""Length-balanced batches: padding and imbalance of the ranks on real text, and cost of the preparation.

    python -m benchmarks.lengths --plot docs/length_balancing.svg

The samples are the .py, .md, .txt and .rst files of the installed packages, truncated to 4,096 tokens. A step takes as
long as the rank with the most tokens, padding included. The plot needs matplotlib: pip install --group bench.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sysconfig
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import BatchSampler

from teleloader_shared.balance import BalanceSpec
from teleloader_shared.lengths import Lengths
from teleloader_shared.orders.balance import prepared
from teleloader_shared.orders.plan import Plan
from teleloader_shared.spec import LoaderSpec

BATCH_SIZE: Final = 16
RANKS: Final = 8
MAX_TOKENS: Final = 16_384
LONGEST: Final = 4096
SEED: Final = 7
PREPARED: Final = 10**7
"""Samples for which the preparation is measured."""

Batches = list[list[list[int]]]
"""Batches of each rank."""


def corpus() -> Any:
    """Return the numbers of tokens (words and signs) of the text files of the installed packages."""
    root = Path(sysconfig.get_path("purelib"))
    paths = [path for path in sorted(root.rglob("*")) if path.suffix in (".py", ".md", ".txt", ".rst")]
    texts = (path.read_bytes()[: 8 * LONGEST] for path in paths if path.is_file())
    found = [len(re.findall(rb"\w+|[^\w\s]", text)) for text in texts if text]
    return np.array(found).clip(1, LONGEST)


def planned(spec: LoaderSpec, lengths: Lengths) -> Batches:
    """Return the batches of the loader's ranks."""
    plans = [Plan(replace(spec, rank=rank), len(lengths), 0, lengths) for rank in range(spec.world_size)]
    return [[batch.tolist() for batch in plan] for plan in plans]


def in_turn(batches: list[list[int]]) -> Batches:
    """Distribute batches over the ranks in turn, without the last ones if their number is no multiple."""
    whole = len(batches) // RANKS * RANKS
    return [batches[rank:whole:RANKS] for rank in range(RANKS)]


class ByLength(BatchSampler):  # type: ignore[misc, unused-ignore]
    """Sampler of batches as users write it: samples sorted by length, cut into batches, and the batches shuffled."""

    def __init__(self, lengths: Any, batch_size: int) -> None:
        super().__init__(range(len(lengths)), batch_size, drop_last=False)
        self.lengths = lengths

    def __iter__(self) -> Iterator[list[int]]:
        order = np.argsort(self.lengths, kind="stable").tolist()
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        return (batches[place] for place in torch.randperm(len(batches)).tolist())


def length_grouped(values: Any) -> Batches:
    """Return the batches of ``DistributedLengthGroupedSampler`` of Hugging Face transformers (``group_by_length``)."""
    order = torch.randperm(len(values)).tolist()
    size = 50 * BATCH_SIZE
    grouped = [
        sorted(order[start : start + size], key=lambda index: -values[index]) for start in range(0, len(order), size)
    ]
    indices = list(itertools.chain.from_iterable(grouped))
    found = []
    for rank in range(RANKS):
        own = indices[rank::RANKS]
        found.append([own[start : start + BATCH_SIZE] for start in range(0, len(own), BATCH_SIZE)])
    return [each[: min(map(len, found))] for each in found]


def costs(found: Batches, values: Any) -> tuple[Any, Any]:
    """Return the tokens, and the tokens with padding, of each batch: arrays of shape (ranks, steps)."""
    tokens = [[int(values[batch].sum()) for batch in own] for own in found]
    padded = [[len(batch) * int(values[batch].max()) for batch in own] for own in found]
    return np.array(tokens), np.array(padded)


def specs(lengths: Lengths) -> dict[str, LoaderSpec]:
    """Return the loaders that are compared, by name."""
    step = BATCH_SIZE * RANKS
    plain = LoaderSpec(
        dataset="text", batch_size=BATCH_SIZE, shuffle=True, seed=SEED, world_size=RANKS, tail="drop", drop_last=True
    )
    limited = replace(plain, batch_size=1, drop_last=False)
    return {
        "random": plain,
        "LengthBalance()": replace(plain, balance=BalanceSpec(lengths.digest, 64 * step, step)),
        "LengthBalance(max_tokens=16384)": replace(
            limited, balance=BalanceSpec(lengths.digest, 8192, RANKS, MAX_TOKENS)
        ),
    }


def compared(lengths: Lengths) -> dict[str, Batches]:
    """Return the batches of each method, by its name."""
    values = lengths.values
    ours = {name: planned(spec, lengths) for name, spec in specs(lengths).items()}
    order = np.argsort(values, kind="stable").tolist()
    torch.manual_seed(SEED)
    return {
        "random": ours.pop("random"),
        "sorted": in_turn([order[k : k + BATCH_SIZE] for k in range(0, len(order), BATCH_SIZE)]),
        "BatchSampler by length": in_turn(list(ByLength(values, BATCH_SIZE))),
        "transformers group_by_length": length_grouped(values),
        **ours,
    }


def report(found: dict[str, Batches], values: Any) -> None:
    """Print a table of the methods."""
    print(f"{len(values):,} texts, {int(values.sum()):,} tokens, mean {values.mean():.0f}, longest {values.max()}")
    print(f"{'method':<34} {'padding':>8} {'imbalance':>10} {'time':>6} {'largest batch':>14}")
    for name, batches in found.items():
        tokens, padded = costs(batches, values)
        slowest = padded.max(axis=0)
        print(
            f"{name:<34} {1 - tokens.sum() / padded.sum():>8.1%} {(slowest / padded.mean(axis=0)).mean() - 1:>10.1%} "
            f"{slowest.sum() * RANKS / tokens.sum():>6.2f} {padded.max():>14,}"
        )


def measure() -> None:
    """Print the time and memory of the preparation, and the time per batch."""
    values = np.random.default_rng(SEED).lognormal(5.5, 1.2, PREPARED).astype(np.int32).clip(1, LONGEST)
    began = time.perf_counter()
    lengths = Lengths(values, PREPARED)
    print(f"digest of {PREPARED:,} lengths: {time.perf_counter() - began:.2f} s")
    for name, spec in specs(lengths).items():
        if spec.balance is None:
            continue
        began = time.perf_counter()
        starts = prepared(spec.balance, lengths, 0, SEED) if spec.has_token_batches else np.empty(0, np.int64)
        seconds = time.perf_counter() - began
        tracemalloc.start()
        if spec.has_token_batches:
            prepared.__wrapped__(spec.balance, lengths, 0, SEED)
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        plan = Plan(spec, PREPARED, 0, lengths)
        middle = len(plan) // 2
        first, rest = timed(plan, range(middle, middle + 1)), timed(plan, range(1000))
        print(
            f"{name}: prepared in {seconds:.2f} s, {starts.nbytes:,} bytes kept, {peak:.1f} MiB meanwhile; first "
            f"batch of a window {1e3 * first:.1f} ms, then {1e3 * rest:.2f} ms per batch in order"
        )


def timed(plan: Plan, numbers: range) -> float:
    """Return the seconds per batch to compute batches in succession."""
    began = time.perf_counter()
    for k in numbers:
        plan[k]
    return (time.perf_counter() - began) / len(numbers)


def draw(path: Path, lengths: Lengths) -> None:
    """Write the plot of successive batches."""
    import matplotlib as mpl

    from benchmarks.fleet_plots import COLORS, STYLE, save  # selects the Agg backend

    plt = mpl.pyplot
    shown = 6 * RANKS
    with mpl.rc_context(STYLE):
        figure, panels = plt.subplots(1, 3, figsize=(9.5, 3.4), sharey=True)
        for axis, (name, spec) in zip(panels, specs(lengths).items(), strict=True):
            tokens, padded = costs([own[:6] for own in planned(spec, lengths)], lengths.values)
            places = np.arange(shown) + np.arange(shown) // RANKS
            axis.bar(places, padded.T.ravel() / 1000, width=1, color="#d0d4da", label="padding")
            axis.bar(places, tokens.T.ravel() / 1000, width=1, color=COLORS[0], label="tokens")
            axis.set_title(name.replace("LengthBalance(max", "LengthBalance(\nmax"), fontsize=10)
            axis.set_xticks([place * (RANKS + 1) + RANKS / 2 - 0.5 for place in range(6)], range(6))
            axis.set_xlabel("step")
        panels[0].set_ylabel("thousand tokens per batch")
        panels[0].set_ylim(0, 1.25 * panels[0].get_ylim()[1])  # room for the legend
        panels[0].legend(loc="upper left", ncols=2)
        save(figure, path)


def main() -> None:
    """Print the figures, and draw the plot if its path is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="path of the plot, an SVG file")
    path = parser.parse_args().plot
    values = corpus()
    lengths = Lengths(values, len(values))
    report(compared(lengths), values)
    measure()
    if path is not None:
        draw(path, lengths)


if __name__ == "__main__":
    main()
