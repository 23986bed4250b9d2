"""Batches on one machine: a plain TCP socket, teleloader over HTTP, and teleloader with shared memory.

``python -m benchmarks.same_host --rounds 7``. All contenders take part in each round, and each round divides by its own
plain socket whose producer computes the batches. ``DataLoader(object)`` runs its server in the client's process, whose
CPU time is therefore that of both. A batch has 256 images of 3x224x224 bytes.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final

from benchmarks.contenders import InProcess, Socket, Teleloader
from benchmarks.processes import Hosting, running
from benchmarks.workloads import WIRE

BATCH_BYTES: Final = 256 * 3 * 224 * 224
WARM_UP: Final = 16
"""Batches before each measurement, while workers and buffers start."""


def measure(opened: AbstractContextManager[Iterator[Any]], batches: int) -> tuple[float, float]:
    """Return bytes/s, and CPU seconds of this process per GB."""
    with opened as stream:
        for _ in itertools.islice(stream, WARM_UP):
            pass
        began, cpu = time.perf_counter(), time.process_time()
        for _ in itertools.islice(stream, batches):
            pass
        seconds, used = time.perf_counter() - began, time.process_time() - cpu
        del stream
    nbytes = batches * BATCH_BYTES
    return nbytes / seconds, used / nbytes * 1e9


def main() -> None:
    """Print the median and the quartiles of the ratios, and the median CPU seconds per GB."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=60)
    options = parser.parse_args()
    with ExitStack() as stack:
        hosted = [f"{WIRE.name}=benchmarks.workloads:{WIRE.name.upper()}.dataset"]
        lending = stack.enter_context(running(hosted, 1))
        sending = stack.enter_context(running(hosted, 1, "--limit", "max_lent_slots=0"))
        contenders: dict[str, Any] = {
            "plain socket, prepared": Socket(WIRE, 0),
            "plain socket, computing": Socket(WIRE, 1),
            "HTTP": Teleloader(WIRE, Hosting(sending.url)),
            "shared memory": Teleloader(WIRE, Hosting(lending.url)),
            "shared memory, no checksum": Teleloader(WIRE, Hosting(lending.url), checksum=False),
            "DataLoader(object)": InProcess(WIRE),
        }
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for number in range(options.rounds):
            order = list(contenders)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                results[name].append(measure(contenders[name].open(), options.batches))
    floors = [rate for rate, _ in results["plain socket, computing"]]
    for name, measured in results.items():
        ratios = [rate / floor for (rate, _), floor in zip(measured, floors, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        rate = statistics.median(rate for rate, _ in measured)
        cpu = statistics.median(cpu for _, cpu in measured)
        print(f"{name:28} {rate / 1e9:5.2f} GB/s  ratio {middle:4.2f} ({low:4.2f} to {high:4.2f})  CPU {cpu:5.3f} s/GB")


if __name__ == "__main__":
    main()
