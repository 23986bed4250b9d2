"""Shuffle buffer: displacement of samples, samples read again after a resume, and time, against a classical buffer.

    python -m benchmarks.shuffle_buffer --plot docs/shuffle_buffer.svg

The reference is the buffer of torchdata's ``Shuffler``, WebDataset's ``shuffle`` and Hugging Face's ``shuffle``: each
yielded sample is drawn from all samples of the buffer, and the next sample takes its place. The plot needs matplotlib:
pip install --group bench.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from operator import length_hint
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from teleloader_server.loading.shuffle_buffer import ShuffleBuffer, ShuffleSettings

SIZE: Final = 10_000
SAMPLES: Final = 1_000_000
SEED: Final = 7


def classical(samples: Iterable[int], size: int, seed: int) -> Iterator[int]:
    """Yield the samples from a classical shuffle buffer."""
    generator = random.Random(seed)
    buffer: list[int] = []
    for sample in samples:
        if len(buffer) < size:
            buffer.append(sample)
            continue
        place = generator.randrange(size)
        yield buffer[place]
        buffer[place] = sample
    generator.shuffle(buffer)
    yield from buffer


class Shuffled(NamedTuple):
    """Shuffled numbers of the samples, and what a resumed run would read again."""

    order: NDArray[np.int64]
    oldest: NDArray[np.int64]
    """First sample to read again for each place."""
    seconds: float
    """CPU time per sample."""

    @property
    def displaced(self) -> NDArray[np.float64]:
        """By how many buffers each sample is displaced; delays are positive."""
        return (np.arange(SAMPLES) - self.order)[SIZE:-SIZE] / SIZE

    @property
    def read_again(self) -> NDArray[np.float64]:
        """Samples to read again for each place, in buffers: to the last one that was read."""
        return (np.minimum(np.arange(SAMPLES) + SIZE, SAMPLES) - self.oldest) / SIZE


def timed(samples: Iterator[int]) -> tuple[NDArray[np.int64], float]:
    """Return the samples, and the CPU seconds per sample."""
    began = time.process_time()
    order = np.fromiter(samples, np.int64, SAMPLES)
    return order, (time.process_time() - began) / SAMPLES


def shuffled_in_blocks() -> Shuffled:
    """Return the samples from the shuffle buffer of a shard; a resumed run reads from the start of the block."""
    starts: list[int] = []
    reader = iter(range(SAMPLES))

    def snapshot(block: int) -> dict[str, Any]:
        starts.append(SAMPLES - length_hint(reader))
        return {}

    order, seconds = timed(ShuffleBuffer(reader, ShuffleSettings(SIZE, SEED), snapshot))
    blocks = np.searchsorted(starts, np.arange(SAMPLES), side="right") - 1
    return Shuffled(order, np.array(starts)[blocks], seconds)


def shuffled_classically() -> Shuffled:
    """Return the samples from a classical buffer; a resumed run would read from the oldest sample in the buffer."""
    order, seconds = timed(classical(range(SAMPLES), SIZE, SEED))
    places = np.empty(SAMPLES, np.int64)
    places[order] = np.arange(SAMPLES)
    # the oldest sample that is not yielded before place k: the first one whose place is not less than k
    oldest = np.searchsorted(np.maximum.accumulate(places), np.arange(SAMPLES))
    return Shuffled(order, oldest, seconds)


def draw(path: Path, found: Mapping[str, Shuffled]) -> None:
    """Write the plot of the displacements, and of the samples to read again."""
    import matplotlib as mpl

    from benchmarks.fleet_plots import COLORS, STYLE, save  # selects the Agg backend

    plt = mpl.pyplot
    with mpl.rc_context(STYLE):
        figure, (moved, again) = plt.subplots(1, 2, figsize=(9.5, 3.6))
        places = np.arange(0, SAMPLES, SIZE // 8)
        for color, (name, shuffled) in zip(COLORS, found.items(), strict=False):
            moved.hist(
                shuffled.displaced, np.linspace(-2, 6, 81), density=True, histtype="step", color=color, linewidth=1.4,
                label=name,
            )  # fmt: skip
            again.plot(places, shuffled.read_again[places], color=color)
        moved.set(xlim=(-2, 6))
        moved.set_title("Displacement of samples")
        moved.set_xlabel("buffers; delays are positive")
        moved.set_ylabel("density")
        moved.legend()
        again.set(xlim=(0, SAMPLES), ylim=(0, None), xticks=np.linspace(0, SAMPLES, 5))
        again.xaxis.set_major_formatter("{x:,.0f}")
        again.set_title("Samples to read again after a resume")
        again.set_xlabel("sample of the shard")
        again.set_ylabel("buffers")
        save(figure, path)


def main() -> None:
    """Print the figures of both buffers, and draw the plot if its path is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="path of the plot, an SVG file")
    path = parser.parse_args().plot
    found = {"blocks": shuffled_in_blocks(), "classical": shuffled_classically()}
    for name, shuffled in found.items():
        moved, again = np.abs(shuffled.displaced), shuffled.read_again
        print(
            f"{name}: mean displacement {moved.mean():.2f} of the buffer, longest {moved.max():.1f}; "
            f"{again.mean():.1f} buffers to read again on average, up to {again.max():.1f}; "
            f"{1e6 * shuffled.seconds:.2f} µs of CPU time per sample"
        )
    if path is not None:
        draw(path, found)


if __name__ == "__main__":
    main()
