"""Batches with several slow samples: waiting time per epoch with early starts, and if workers divided such a batch.

    python -m benchmarks.slow_batches

Each batch of 8 samples takes one of four workers 20 ms, and the training loop 20 ms. The samples of one batch take
0.5 s each, and therefore 4 s together. A server that divided this batch among all workers would need 1 s at best.
Samples of 0.125 s measure this limit. Both cases are repeated with early starts turned off.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from typing import Any, Final

import numpy as np

from benchmarks.stragglers import STEP_SECONDS, measure, turned_off
from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve

BATCH_SIZE: Final = 8
SLOW_BATCH: Final = 150
NUM_WORKERS: Final = 4
CASES: Final = {
    "as one batch": (0.5, True),
    "divided among 4 workers, at best": (0.125, True),
    "as one batch, without early starts": (0.5, False),
    "divided among 4 workers, at best, without early starts": (0.125, False),
}


class Samples:
    """Samples that take equally long, except for those of one batch in the order of the dataset.

    Args:
        length: Number of samples.
        slow_seconds: Time of each slow sample.
    """

    def __init__(self, length: int, slow_seconds: float) -> None:
        self._length = length
        self._slow_seconds = slow_seconds

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._slow_seconds if index // BATCH_SIZE == SLOW_BATCH else STEP_SECONDS / BATCH_SIZE)
        return np.full(64, index)


def main() -> None:
    """Print the waiting times of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=400, help="batches per epoch; 400 by default")
    parser.add_argument("--epochs", type=int, default=4, help="number of epochs; 4 by default")
    args = parser.parse_args()
    for case, (seconds, is_treated) in CASES.items():
        print(f"\n{case}", flush=True)
        samples = Samples(args.batches * BATCH_SIZE, seconds)
        with nullcontext() if is_treated else turned_off(), serve(samples, num_workers=NUM_WORKERS) as url:
            loader = DataLoader(RemoteDataset(url), BATCH_SIZE, seed=0, output="numpy")
            measure(loader, args.epochs, stops=False, set_epoch=loader.set_epoch)


if __name__ == "__main__":
    main()
