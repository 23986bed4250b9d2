"""Shuffle buffer: displacement of samples, samples read again after a resume, and time, against a classical buffer.

    python -m benchmarks.shuffle_buffer

The reference is the buffer of torchdata's ``Shuffler``, WebDataset's ``shuffle`` and Hugging Face's ``shuffle``: each
yielded sample is drawn from all samples of the buffer, and the next sample takes its place.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Iterator
from typing import Final

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


def blocks(samples: Iterable[int], size: int, seed: int) -> Iterator[int]:
    """Yield the samples from the shuffle buffer of a shard."""
    return ShuffleBuffer(iter(samples), ShuffleSettings(size, seed), lambda block: {})


def read_again(order: NDArray[np.int64], size: int) -> int:
    """Return the largest number of samples to read again: from the oldest sample of the buffer to the last one read."""
    last = np.minimum(np.arange(len(order)) + size, len(order))
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    # the oldest sample that is not yielded before place k: the first one whose place is not less than k
    oldest = np.searchsorted(np.maximum.accumulate(places), np.arange(len(order)))
    return int((last - oldest).max())


def main() -> None:
    """Print the figures of both buffers."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, shuffle in (("blocks", blocks), ("classical", classical)):
        began = time.perf_counter()
        order = np.fromiter(shuffle(range(SAMPLES), SIZE, SEED), np.int64, SAMPLES)
        seconds = (time.perf_counter() - began) / SAMPLES
        displaced = (np.arange(SAMPLES) - order)[SIZE:-SIZE]
        mean = np.abs(displaced - displaced.mean()).mean() / SIZE
        print(
            f"{name}: mean displacement {mean:.2f} of the buffer, longest {np.abs(displaced).max() / SIZE:.1f}; up to "
            f"{read_again(order, SIZE) / SIZE:.1f} buffers to read again; {1e6 * seconds:.2f} µs per sample"
        )


if __name__ == "__main__":
    main()
