"""Cost of an idle server and of idle consumers: ``python -m benchmarks.idle``.

The first part measures a server that was used once: first without a consumer, then with a `DataLoader` that holds its
first batch and requests nothing.

The second part measures 1,000 idle consumers, each with its own loader and an open connection that has received some
batches, beside 200 consumers that load at full speed. Rounds without and with the idle consumers alternate.

These consumers are not `DataLoader` objects: the threads of a thousand of those would dominate the measurement on a
small machine. They are connections in two processes, one for the idle and one for the active consumers, which follow
docs/protocol.md and read each response completely without decoding it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import os
import resource
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final
from urllib.parse import urlsplit

import psutil
from rich.table import Table

from benchmarks import machine
from benchmarks.measuring import Spread
from benchmarks.processes import LoaderServer, await_idle, running
from benchmarks.workloads import SMALL

HOSTED: Final = [f"{SMALL.name}=benchmarks.workloads:SMALL.dataset"]
NUM_WORKERS: Final = 1
USED_BATCHES: Final = 10_000
"""Batches that the server sends before the idle measurement."""
RANGE: Final = 16
"""Batches per request."""
AT_ONCE: Final = 50
_FRAME_SIZE: Final = struct.Struct(">11xQ")


class Consumer:
    """Connection that loads batches of its own loader.

    Args:
        number: Selects the loader.
    """

    def __init__(self, number: int) -> None:
        self._spec = {"dataset": SMALL.name, "batch_size": SMALL.batch_size, "shuffle": True, "seed": number}
        self._next = 0
        self._size = 0

    async def open(self, url: str) -> None:
        """Connect and register."""
        parts = urlsplit(url)
        self._reader, self._writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**20)
        answer = await self._exchange("POST", "/v1/loaders", json.dumps(self._spec).encode())
        self._key = json.loads(answer)["key"]

    async def take(self, count: int = RANGE) -> int:
        """Request the next `count` batches and prefetch as many; return the number of received batches."""
        query = f"ranges={self._next}:{self._next + count}&ahead={count}&ready=true"
        answer = await self._exchange("GET", f"/v1/loaders/{self._key}/epochs/0/batches?{query}")
        start = came = 0
        while start < len(answer):
            (size,) = _FRAME_SIZE.unpack_from(answer, start)
            start += size
            came += 1
        self._next += came
        return came

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    async def _exchange(self, method: str, path: str, body: bytes = b"") -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nHost: server\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        answer = await self._reader.readexactly(int(headers["content-length"]))
        if first.split()[1] != "200":
            raise RuntimeError(f"{path} was answered with {first}: {answer[:200]!r}")
        return answer


async def _opened(url: str, numbers: range) -> list[Consumer]:
    consumers = [Consumer(number) for number in numbers]
    await _for_each(consumers, lambda consumer: consumer.open(url))
    return consumers


async def _for_each(consumers: list[Consumer], act: Callable[[Consumer], Awaitable[Any]]) -> None:
    for start in range(0, len(consumers), AT_ONCE):
        await asyncio.gather(*map(act, consumers[start : start + AT_ONCE]))


# -- consumer process: executes commands and sends their results


def _serve(commands: Connection, url: str, numbers: range) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_obey(commands, url, numbers))


async def _obey(commands: Connection, url: str, numbers: range) -> None:
    consumers: list[Consumer] = []
    while True:
        command, argument = await asyncio.to_thread(commands.recv)
        answer: Any = None
        if command == "open":
            consumers = await _opened(url, numbers)
            for _ in range(argument):
                await _for_each(consumers, lambda consumer: consumer.take(1))
        elif command == "run":
            answer = await _run(consumers, argument)
        elif command == "close":
            for consumer in consumers:
                consumer.close()
        else:
            return
        commands.send(answer)


async def _run(consumers: list[Consumer], seconds: float) -> float:
    """Let all consumers load for some time; return their total batches per second."""
    began = time.perf_counter()
    counts = [0] * len(consumers)

    async def take(number: int) -> None:
        while time.perf_counter() < began + seconds:
            counts[number] += await consumers[number].take()

    await asyncio.gather(*(take(number) for number in range(len(consumers))))
    return sum(counts) / (time.perf_counter() - began)


Tell = Callable[..., Any]


@contextmanager
def consumers(url: str, numbers: range) -> Iterator[Tell]:
    """Run consumers in a process; yield a function that sends it a command and returns the result."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, url, numbers), daemon=True)
    process.start()
    theirs.close()

    def tell(command: str, argument: Any = None) -> Any:
        ours.send((command, argument))
        return ours.recv()

    try:
        yield tell
    finally:
        if process.is_alive():
            ours.send(("end", None))
        process.join()


# -- an idle server


@dataclasses.dataclass(frozen=True, slots=True)
class Rest:
    """Cost of one process."""

    cpu: float
    """CPU seconds."""
    pss: int
    """PSS in bytes at the end of the measurement."""


def at_rest(seconds: float) -> tuple[dict[str, Rest], dict[str, Rest]]:
    """Return the cost of a server's processes without a consumer, and with one that requests nothing."""
    from teleloader import DataLoader, RemoteDataset

    with running(HOSTED, NUM_WORKERS) as server:
        loader = DataLoader(RemoteDataset(server.url), shuffle=True, seed=0)
        batches = iter(loader)
        for _ in range(USED_BATCHES):
            next(batches)
        del batches
        await_idle(server.url)
        alone = _rest(server.pids(), seconds)
        batches = iter(loader)
        next(batches)
        await_idle(server.url)
        beside = _rest(server.pids() | {"consumer": os.getpid()}, seconds)
        del batches
        return alone, beside


def _rest(pids: Mapping[str, int], seconds: float) -> dict[str, Rest]:
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    before = {name: _cpu(process) for name, process in processes.items()}
    time.sleep(seconds)
    return {
        name: Rest(_cpu(process) - before[name], process.memory_full_info().pss) for name, process in processes.items()
    }


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _rest_table(seconds: float) -> Table:
    made = Table(title=f"a server that has nothing to do, {seconds:g} s", title_justify="left")
    made.add_column("process")
    for heading in ("CPU, s", "PSS, MiB", "CPU beside an idle consumer, s", "PSS, MiB"):
        made.add_column(heading, justify="right")
    alone, beside = at_rest(seconds)
    for name, found in beside.items():
        rest = alone.get(name)
        without = ("-", "-") if rest is None else (f"{rest.cpu:.2f}", f"{rest.pss / 2**20:,.1f}")
        made.add_row(name, *without, f"{found.cpu:.2f}", f"{found.pss / 2**20:,.1f}")
    return made


# -- the command


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Memory use in bytes."""

    server: int
    """PSS of the server's main process."""
    batches: int
    """Size of the batch buffer."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle", description=__doc__.partition(":")[0])
    parser.add_argument("--idle", type=int, default=1000, help="consumers without requests (default: %(default)s)")
    parser.add_argument("--active", type=int, default=200, help="consumers that load batches (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of two turns each (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each turn (default: %(default)s)")
    parser.add_argument(
        "--rest", type=float, default=20.0, help="seconds of the measurement at rest (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    console = machine.announce(machine.describe())
    console.print(_rest_table(options.rest))
    with (
        running(HOSTED, NUM_WORKERS) as server,
        consumers(server.url, range(options.idle)) as idle,
        consumers(server.url, range(options.idle, options.idle + options.active)) as active,
    ):
        active("open", 1)
        active("run", options.seconds)  # the server allocates for active consumers before the measurement
        before = _memory(server)
        idle("open", 3)
        after = _memory(server)
        idle("close")
        alone, beside = [], []
        for _ in range(options.rounds):
            alone.append(active("run", options.seconds))
            idle("open", 3)
            beside.append(active("run", options.seconds))
            idle("close")
        active("close")
    console.print(_table(options, before, after, alone, beside))
    return 0


def _memory(server: LoaderServer) -> Memory:
    return Memory(psutil.Process(server.process.pid).memory_full_info().pss, server.stats()["server"]["memory_used"])


def _table(
    options: argparse.Namespace, before: Memory, after: Memory, alone: list[float], beside: list[float]
) -> Table:
    made = Table(title=f"{options.idle:,} idle consumers beside {options.active:,} active ones", title_justify="left")
    made.add_column("measurement")
    made.add_column("median (minimum..maximum)", justify="right")
    ratios = Spread.of([with_idle / without for with_idle, without in zip(beside, alone, strict=True)])
    for name, rates in (("without", alone), ("with", beside)):
        spread = Spread.of(rates)
        made.add_row(
            f"throughput {name} idle consumers, batches/s",
            f"{spread.middle:,.0f} ({spread.low:,.0f}..{spread.high:,.0f})",
        )
    made.add_row("ratio of with to without", f"{ratios.middle:.2f} ({ratios.low:.2f}..{ratios.high:.2f})")
    grown = (after.server - before.server) / 1024
    made.add_row(
        "server memory without and with idle consumers, MiB", f"{before.server / 2**20:.1f}, {after.server / 2**20:.1f}"
    )
    made.add_row("  per idle consumer, KiB", f"{grown / options.idle:.1f}")
    made.add_row(
        "batch buffer without and with idle consumers, MiB",
        f"{before.batches / 2**20:.1f}, {after.batches / 2**20:.1f}",
    )
    return made


if __name__ == "__main__":
    sys.exit(main())
