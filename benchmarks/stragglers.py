"""Stragglers: waiting time per epoch with a slow sample, and with a worker that is stopped.

    python -m benchmarks.stragglers --plot docs/stragglers.svg

Each batch takes a worker 20 ms, and the training loop 20 ms. In the first case, one sample takes 3 s. In the second
case, one worker is stopped for 2 s, and the next one 1 s later. The reference is torch's own loader in this process,
with as many workers. The digest of an epoch shows that the batches are equal with and without the treatment of
stragglers. The plot needs matplotlib: pip install --group bench.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from teleloader_server.dispatch import stragglers

BATCH_SIZE: Final = 4
BATCH_SECONDS: Final = 0.02
STEP_SECONDS: Final = 0.02
SLOW_SAMPLE: Final = 1000
SLOW_SECONDS: Final = 3.0
SEED: Final = 7


class Samples:
    """Random samples that take equally long, except for one.

    Args:
        length: Number of samples.
        slow: Index of the slow sample; None for no slow sample.
    """

    def __init__(self, length: int, slow: int | None) -> None:
        self._length = length
        self._slow = slow

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        time.sleep(SLOW_SECONDS if index == self._slow else BATCH_SECONDS / BATCH_SIZE)
        return np.full(64, index) + np.random.default_rng(index).integers(0, 9, 64)


def train(batches: Any) -> tuple[list[float], str]:
    """Run a training loop; return the times in seconds for which it waited, and a digest of the batches."""
    digest, iterator = hashlib.sha256(), iter(batches)
    waits: list[float] = []
    while True:
        began = time.perf_counter()
        batch = next(iterator, None)
        if batch is None:
            return waits, digest.hexdigest()[:8]
        waits.append(time.perf_counter() - began)
        digest.update(np.asarray(batch).tobytes())
        time.sleep(STEP_SECONDS)


def workers() -> list[int]:
    """Return the PIDs of the processes that load batches: the processes without children below this one."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, pending = [], list(parents.get(os.getpid(), []))
    while pending:
        pid = pending.pop()
        children = parents.get(pid, [])
        pending += children
        if not children:
            found.append(pid)
    return sorted(found)


@contextmanager
def stopping(every: float, duration: float) -> Iterator[None]:
    """Stop one worker for `duration` seconds, again and again, with `every` seconds between."""
    over = threading.Event()

    def stop() -> None:
        number = 0
        while not over.wait(every):
            known = workers()
            pid = known[number % len(known)]
            number += 1
            os.kill(pid, signal.SIGSTOP)
            over.wait(duration)
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(loader: Any, epochs: int, *, stops: bool, set_epoch: Any) -> list[float]:
    """Print the waiting time in each epoch, and return the waits of all epochs."""
    found: list[float] = []
    for epoch in range(epochs):
        set_epoch(epoch)
        with stopping(1.0, 2.0) if stops else nullcontext():
            waits, digest = train(loader)
        print(f"  epoch {epoch}: waited {sum(waits):5.2f} s, longest {max(waits):5.2f} s, digest {digest}", flush=True)
        found += waits
    return found


@contextmanager
def turned_off() -> Iterator[None]:
    """Context manager that turns off early starts, longer prefetch windows and backups."""
    values = {"MAX_LEAD": 0, "MAX_DEPTH": 0, "BACKUP_FACTOR": math.inf}
    before = {name: getattr(stragglers, name) for name in values}
    for name, value in values.items():
        setattr(stragglers, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(stragglers, name, value)


def draw(path: Path, found: dict[str, dict[str, list[float]]], epochs: int) -> None:
    """Write the plot of the accumulated waits of each loader, by case."""
    import matplotlib as mpl

    from benchmarks.fleet_plots import COLORS, STYLE, save  # selects the Agg backend

    plt = mpl.pyplot
    with mpl.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.6))
        for axis, (case, loaders) in zip(panels, found.items(), strict=True):
            for color, (name, waits) in zip(COLORS, loaders.items(), strict=True):
                axis.plot(np.arange(len(waits)) * epochs / len(waits), np.cumsum(waits), color=color, label=name)
            axis.set(xlim=(0, epochs), ylim=(0, None), xticks=range(epochs + 1))
            axis.set_title(case[:1].upper() + case[1:])
            axis.set_xlabel("epochs")
        panels[0].set_ylabel("seconds waited")
        panels[0].legend()
        save(figure, path)


def main() -> None:
    """Print the waiting times with and without the treatment of stragglers, and those of torch's loader."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=400, help="batches per epoch; 400 by default")
    parser.add_argument("--epochs", type=int, default=4, help="number of epochs; 4 by default")
    parser.add_argument("--workers", type=int, default=4, help="number of workers; 4 by default")
    parser.add_argument("--plot", type=Path, help="path of the plot, an SVG file")
    args = parser.parse_args()
    length = args.batches * BATCH_SIZE
    found: dict[str, dict[str, list[float]]] = {}
    for what, slow, stops in (("a sample of 3 s", SLOW_SAMPLE, False), ("a worker stopped for 2 s", None, True)):
        samples = Samples(length, slow)
        waits = found[what] = {}
        for name, is_on in (("teleloader", True), ("teleloader, stragglers not treated", False)):
            print(f"\n{what}: {name}", flush=True)
            with nullcontext() if is_on else turned_off(), serve(samples, num_workers=args.workers) as url:
                dataset = RemoteDataset(url)
                loader = DataLoader(dataset, BATCH_SIZE, shuffle=True, seed=SEED, output="numpy")
                waits[name] = measure(loader, args.epochs, stops=stops, set_epoch=loader.set_epoch)
        print(f"\n{what}: torch", flush=True)
        sampler = torch.utils.data.distributed.DistributedSampler(samples, 1, 0, seed=SEED)
        local = torch.utils.data.DataLoader(
            samples, BATCH_SIZE, sampler=sampler, num_workers=args.workers, persistent_workers=True
        )
        waits["torch"] = measure(local, args.epochs, stops=stops, set_epoch=sampler.set_epoch)
        del local
    if args.plot is not None:
        draw(args.plot, found, args.epochs)


if __name__ == "__main__":
    main()
