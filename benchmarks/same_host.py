"""Batches on one machine: a plain TCP socket, teleloader over HTTP, and teleloader with shared memory.

``python -m benchmarks.same_host --rounds 7``. All contenders take part in each round, and each round divides by its own
plain socket. One worker process each; ``DataLoader(object)`` runs its server in the client's process, whose CPU time
is therefore that of both.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final

from benchmarks.contenders import Floor, Teleloader
from benchmarks.processes import running
from benchmarks.workloads import WIRE, Workload

WARM_UP: Final = 16
"""Batches before each measurement, while workers and buffers start."""


class InThisProcess:
    """``DataLoader(object)`` with one worker."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    @contextmanager
    def open(self) -> Iterator[Iterator[Any]]:
        """Load an epoch."""
        from teleloader import DataLoader

        yield iter(DataLoader(self._workload.dataset(), batch_size=self._workload.batch_size, num_workers=1))


def measure(opened: AbstractContextManager[Iterator[Any]], workload: Workload, batches: int) -> tuple[float, float]:
    """Return bytes/s, and CPU seconds of this process per GB."""
    with opened as stream:
        for _ in itertools.islice(stream, WARM_UP):
            pass
        began, cpu = time.perf_counter(), time.process_time()
        for _ in itertools.islice(stream, batches):
            pass
        seconds, used = time.perf_counter() - began, time.process_time() - cpu
        del stream
    nbytes = batches * workload.batch_bytes
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
            "plain socket": Floor(WIRE, 1),
            "HTTP": Teleloader(WIRE, sending.url, 1),
            "shared memory": Teleloader(WIRE, lending.url, 1),
            "shared memory, no checksum": Teleloader(WIRE, lending.url, 1, checksum=False),
            "DataLoader(object)": InThisProcess(WIRE),
        }
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for number in range(options.rounds):
            order = list(contenders)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                results[name].append(measure(contenders[name].open(), WIRE, options.batches))
    floors = [rate for rate, _ in results["plain socket"]]
    for name, measured in results.items():
        ratios = [rate / floor for (rate, _), floor in zip(measured, floors, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        rate = statistics.median(rate for rate, _ in measured)
        cpu = statistics.median(cpu for _, cpu in measured)
        print(f"{name:28} {rate / 1e9:5.2f} GB/s  ratio {middle:4.2f} ({low:4.2f} to {high:4.2f})  CPU {cpu:5.3f} s/GB")


if __name__ == "__main__":
    main()
