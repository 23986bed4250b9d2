"""Time for which a training loop waits after a fault: ``python -m benchmarks.recovery``.

The loop consumes batches at full speed, so no prefetched batches hide the wait. A worker takes 20 ms per batch, so the
two workers of a server compute one every 10 ms. Each batch is verified to be the next one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from threading import Thread
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from benchmarks import machine
from benchmarks.processes import LoaderServer, running

NUM_WORKERS: Final = 2
LENGTH: Final = 10**7
BATCH_SIZE: Final = 2
SAMPLE_SECONDS: Final = 0.01
DRAIN_SECONDS: Final = 0.5
USUAL_SECONDS: Final = 0.5
"""Duration of the measurement of the usual time per batch, before each fault."""
WATCHED_SECONDS: Final = 2.0
"""Observation time after a fault that another worker or server compensates for."""
RETURN_SECONDS: Final = 3.0
"""Time without faults after a restart, in which the client reconnects."""


class Timed:
    """Dataset whose samples take some time; sample i is a row of i."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        time.sleep(SAMPLE_SECONDS)
        return np.full(8192, index)


HOSTED: Final = ["timed=benchmarks.recovery:Timed"]


@dataclass(frozen=True, slots=True)
class Recovery:
    """Cost of one fault, in seconds."""

    usual: float
    """Mean time per batch immediately before the fault."""
    wait: float
    """Longest time between two batches after the fault; for a restart, the time from the kill to the next batch."""
    after_return: float | None = None
    """Time from the end of the restart, when the server listens again, to the next batch."""


class Loop:
    """Training loop that records the arrival time of each batch."""

    def __init__(self, urls: list[str]) -> None:
        from teleloader import DataLoader, RemoteDataset

        loader = DataLoader(RemoteDataset(urls, "timed"), batch_size=BATCH_SIZE, seed=0, output="numpy")
        self._batches: Iterator[Any] = iter(loader)
        self._taken = itertools.count()

    def step(self) -> float:
        """Take the next batch; return its arrival time.

        Raises:
            AssertionError: The batch is not the next one.
        """
        batch = next(self._batches)
        first = next(self._taken) * BATCH_SIZE
        if batch[:, 0].tolist() != list(range(first, first + BATCH_SIZE)):
            raise AssertionError(f"in the place of the samples from {first} on came {batch[:, 0].tolist()}")
        return time.perf_counter()

    def usual(self) -> float:
        """Return the current mean time per batch, after prefetched batches are consumed."""
        self.longest_wait(time.perf_counter(), DRAIN_SECONDS)
        began = ended = self.step()
        taken = 0
        while ended < began + USUAL_SECONDS:
            ended = self.step()
            taken += 1
        return (ended - began) / taken

    def longest_wait(self, since: float, seconds: float) -> float:
        """Return the longest time between two batches in the `seconds` seconds after `since`."""
        came = [since]
        while came[-1] < since + seconds:
            came.append(self.step())
        return max(after - before for before, after in itertools.pairwise(came))


# -- the faults


def worker_killed(server: LoaderServer, loop: Loop, number: int) -> Recovery:
    """Send SIGKILL to one of the workers, in turn."""
    usual = loop.usual()
    os.kill(server.stats()["workers"][number % NUM_WORKERS]["pid"], signal.SIGKILL)
    return Recovery(usual, loop.longest_wait(time.perf_counter(), WATCHED_SECONDS))


def one_server_killed(servers: Sequence[LoaderServer], loop: Loop, number: int) -> Recovery:
    """Send SIGKILL to one of the servers, in turn; restart it after the measurement."""
    usual = loop.usual()
    victim = servers[number % len(servers)]
    _kill(victim)
    killed = time.perf_counter()
    victim.process.wait()
    recovery = Recovery(usual, loop.longest_wait(killed, WATCHED_SECONDS))
    victim.start()
    loop.longest_wait(time.perf_counter(), RETURN_SECONDS)
    victim.await_ready()
    return recovery


def server_restarted(server: LoaderServer, loop: Loop, number: int) -> Recovery:
    """Send SIGKILL to the only server, and restart it immediately on the same port."""
    usual = loop.usual()
    _kill(server)
    killed = time.perf_counter()
    server.process.wait()
    server.start()
    listening: list[float] = []
    watcher = Thread(target=_await_listening, args=(server.port, listening))
    watcher.start()
    came = loop.step()
    while not listening or came < listening[0]:  # batches that arrived before the kill
        came = loop.step()
    watcher.join()
    return Recovery(usual, came - killed, came - listening[0])


def _kill(server: LoaderServer) -> None:
    server.process.send_signal(signal.SIGKILL)


def _await_listening(port: int, found: list[float]) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionError:
            time.sleep(0.002)
        else:
            found.append(time.perf_counter())
            return


# -- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__.partition(":")[0])
    parser.add_argument("--times", type=int, default=20, help="number of faults of each kind (default: %(default)s)")
    times = parser.parse_args(arguments).times
    console = machine.announce(machine.describe())
    table = Table(title=f"from a fault to the next batch, {times} times each", title_justify="left")
    table.add_column("fault")
    for heading in ("median, ms", "worst, ms", "after restart: median, ms", "worst, ms", "usual time per batch, ms"):
        table.add_column(heading, justify="right")
    with ExitStack() as stack:
        servers = [stack.enter_context(running(HOSTED, NUM_WORKERS)) for _ in range(2)]
        first, urls = servers[0], [server.url for server in servers]
        kinds: list[tuple[str, list[str], Callable[[Loop, int], Recovery]]] = [
            ("worker killed", urls[:1], partial(worker_killed, first)),
            ("one of two servers killed", urls, partial(one_server_killed, servers)),
            ("only server killed and restarted", urls[:1], partial(server_restarted, first)),
        ]
        for name, where, fault in kinds:
            loop = Loop(where)
            loop.usual()
            table.add_row(name, *_figures([fault(loop, number) for number in range(times)]))
    console.print(table)
    return 0


def _figures(recoveries: list[Recovery]) -> list[str]:
    waits = [recovery.wait for recovery in recoveries]
    returns = [recovery.after_return for recovery in recoveries if recovery.after_return is not None]
    usual = [recovery.usual for recovery in recoveries]
    after = (_ms(median(returns)), _ms(max(returns))) if returns else ("-", "-")
    return [_ms(median(waits)), _ms(max(waits)), *after, _ms(median(usual))]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}" if seconds < 1 else f"{1000 * seconds:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
