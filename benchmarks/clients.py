"""Minimal protocol clients, many in one process, for benchmarks with more clients than `DataLoader` objects can run.

They follow docs/protocol.md, and read each response completely without decoding it. Each has its own loader of `small`.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import resource
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final
from urllib.parse import urlsplit

from benchmarks.workloads import SMALL
from teleloader_shared.codec import PROLOGUE_SIZE, frame_size

HOSTED: Final = [f"{SMALL.name}=benchmarks.workloads:SMALL.dataset"]
"""Dataset of the servers."""
AT_ONCE: Final = 50
"""Number of clients that connect or take their first batches at the same time."""


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

    async def take(self, count: int, ahead: int | None = None) -> int:
        """Request the next `count` batches and prefetch as many or `ahead`; return the number of received batches."""
        prefetched = count if ahead is None else ahead
        query = f"ranges={self._next}:{self._next + count}&ahead={prefetched}&ready=true"
        answer = await self._exchange("GET", f"/v1/loaders/{self._key}/epochs/0/batches?{query}")
        start = came = 0
        while start < len(answer):
            start += frame_size(answer[start : start + PROLOGUE_SIZE])
            came += 1
        self._next += came
        return came

    def restart(self) -> None:
        """Continue with batch 0."""
        self._next = 0

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    async def _exchange(self, method: str, path: str, body: bytes = b"") -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        answer = await self._reader.readexactly(int(headers["content-length"]))
        if first.split()[1] != "200":
            raise RuntimeError(f"the server responded to {path} with {first}: {answer[:200]!r}")
        return answer


async def _opened(url: str, numbers: range) -> list[Consumer]:
    consumers = [Consumer(number) for number in numbers]
    await _for_each(consumers, lambda consumer: consumer.open(url))
    return consumers


async def _for_each(consumers: list[Consumer], act: Callable[[Consumer], Awaitable[Any]]) -> None:
    for start in range(0, len(consumers), AT_ONCE):
        await asyncio.gather(*map(act, consumers[start : start + AT_ONCE]))


def _serve(commands: Connection, url: str, numbers: range) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_obey(commands, url, numbers))


async def _obey(commands: Connection, url: str, numbers: range) -> None:
    consumers: list[Consumer] = []
    while True:
        command, arguments = await asyncio.to_thread(commands.recv)
        answer: Any = None
        if command == "open":
            consumers = await _opened(url, numbers)
            for _ in range(*arguments):
                await _for_each(consumers, lambda consumer: consumer.take(1))
        elif command == "run":
            answer = await _run(consumers, *arguments)
        elif command == "pace":
            answer = await _pace(consumers, *arguments)
        elif command == "close":
            for consumer in consumers:
                consumer.close()
        else:
            return
        commands.send(answer)


async def _run(consumers: list[Consumer], seconds: float, together: int) -> tuple[int, float]:
    """Let all consumers load `together` batches per request for some time; return their batches and the duration."""
    began = time.perf_counter()
    counts = [0] * len(consumers)

    async def take(number: int) -> None:
        while time.perf_counter() < began + seconds:
            counts[number] += await consumers[number].take(together)

    await asyncio.gather(*(take(number) for number in range(len(consumers))))
    return sum(counts), time.perf_counter() - began


async def _pace(consumers: list[Consumer], seconds: float, interval: float) -> list[float]:
    """Let each consumer load one batch per interval, at evenly distributed times; return all waits in seconds."""
    loop, waits = asyncio.get_running_loop(), []
    began = loop.time()

    async def take(number: int) -> None:
        due = began + interval * number / len(consumers)
        while due < began + seconds:
            await asyncio.sleep(due - loop.time())
            requested = loop.time()
            await consumers[number].take(1)
            waits.append(loop.time() - requested)
            due = max(due + interval, loop.time())

    await asyncio.gather(*(take(number) for number in range(len(consumers))))
    return waits


Tell = Callable[..., Any]


@contextmanager
def consumers(url: str, numbers: range) -> Iterator[Tell]:
    """Run consumers in a process; yield a function that sends it a command and returns the result."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, url, numbers), daemon=True)
    process.start()
    theirs.close()

    def tell(command: str, *arguments: Any) -> Any:
        ours.send((command, arguments))
        return ours.recv()

    try:
        yield tell
    finally:
        if process.is_alive():
            ours.send(("end", ()))
        process.join()
