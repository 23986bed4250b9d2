"""Shards of an iterable-style dataset on one and on two servers of one CPU each.

    python -m benchmarks.divided_shards

A sample takes about 1 ms of CPU time. Each server and its workers run on one CPU, as if each had its own machine.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

from benchmarks.processes import running
from teleloader import DataLoader, RemoteDataset
from teleloader_server import get_worker_info

SAMPLES: Final = 8_000
SHARDS: Final = 4
SAMPLE_SECONDS: Final = 0.001
HOSTED: Final = ["busy=benchmarks.divided_shards:Busy"]


class Busy:
    """Dataset of numbers that take CPU time, divided among the workers."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None  # the loader has shards
        for number in range(info.id, SAMPLES, info.num_workers):
            until = time.thread_time() + SAMPLE_SECONDS
            while time.thread_time() < until:
                pass
            yield number


def measure(urls: list[str]) -> float:
    """Return the samples/s of an epoch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        loader = DataLoader(RemoteDataset(urls, "busy"), 32, num_workers=SHARDS, output="numpy")
        batches = iter(loader)
        next(batches)  # the workers have started
        began = time.perf_counter()
        samples = sum(len(batch) for batch in batches)
    return samples / (time.perf_counter() - began)


def main() -> None:
    """Print the samples/s with one and with two servers."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    cpus = sorted(os.sched_getaffinity(0))[:2]
    with ExitStack() as stack:
        servers = [stack.enter_context(running(HOSTED, 1)) for _ in cpus]
        for server, cpu in zip(servers, cpus, strict=True):
            for pid in server.pids().values():  # the fork server passes the CPU on to the workers of sessions
                os.sched_setaffinity(pid, {cpu})
        rates = [measure([server.url for server in servers[:count]]) for count in range(1, len(servers) + 1)]
    for count, rate in enumerate(rates, 1):
        print(f"{count} server(s) of one CPU, {SHARDS} shards: {rate:,.0f} samples/s, {rate / rates[0]:.2f} times")


if __name__ == "__main__":
    main()
