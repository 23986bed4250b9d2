"""Cost of attacks on a server for other clients: ``python -m benchmarks.attacks``.

A client loads batches, for each of which a worker sleeps 4 ms, at full speed. In every other turn a second process
attacks the server with another token, that is, as another principal. Each turn under attack is compared with the mean
of the turns before and after it. An attacker also takes CPU time on the same machine: `control` only computes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import multiprocessing
import os
import socket
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.processes import await_idle, running
from teleloader import DataLoader, RemoteDataset

CLIENT, ATTACKER = "the-token-of-the-client", "the-token-of-the-attacker"
TOKENS: Final = f"""
[client]
token = "{CLIENT}"
memory_share = 0.5
scopes = ["read", "stats"]

[attacker]
token = "{ATTACKER}"
memory_share = 0.5
scopes = ["read", "stats"]
"""
HEAD: Final = f"Host: localhost\r\nAuthorization: Bearer {ATTACKER}\r\n".encode()
OPTIONS: Final = ("--memory-budget", "256MiB", "--batch-timeout", "30")

# --- Datasets -----------------------------------------------------------------------------------------------------


class Waited:
    """Dataset whose batches take a worker 4 ms of sleep, independent of the machine's load."""

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> Any:
        return self.__getbatch__([index])

    def __getbatch__(self, indices: Any) -> Any:
        time.sleep(0.004)
        return np.zeros(1024, np.float32)


class Large(Waited):
    """Dataset of 8 MB batches."""

    def __getbatch__(self, indices: Any) -> Any:
        return np.zeros(2**21, np.float32)


class Hanging(Waited):
    """Dataset whose batches hang."""

    def __getbatch__(self, indices: Any) -> Any:
        time.sleep(1000)


class Deadly(Waited):
    """Dataset whose batches end their worker."""

    def __getbatch__(self, indices: Any) -> Any:
        os._exit(1)


class Stream:
    """An iterable-style dataset that keeps its workers busy."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield sum(range(100))


# --- The server ---------------------------------------------------------------------------------------------------


@contextmanager
def server(workers: int) -> Iterator[str]:
    """Run a server with two tokens."""
    datasets = (Waited, Large, Hanging, Deadly, Stream)
    hosted = [f"{dataset.__name__.lower()}={__spec__.name}:{dataset.__name__}" for dataset in datasets]
    with TemporaryDirectory() as folder:
        tokens = Path(folder, "tokens.toml")
        tokens.touch(0o600)
        tokens.write_text(TOKENS)
        with running(hosted, workers, *OPTIONS, "--tokens", str(tokens)) as started:
            os.environ["TELELOADER_TOKEN"] = CLIENT
            yield started.url
            del os.environ["TELELOADER_TOKEN"]


# --- The attacks --------------------------------------------------------------------------------------------------


class _Connection(asyncio.Protocol):
    """Connection of an attacker: sends the next request after each response, if it reads at all."""

    def __init__(self, ask: bytes, *, reads: bool) -> None:
        self._ask = ask
        self._reads = reads

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if not self._reads:
            transport.pause_reading()
        transport.write(self._ask)

    def data_received(self, data: bytes) -> None:
        self._transport.write(self._ask)


async def _connections(url: str, count: int, ask: Callable[[int], bytes], *, reads: bool = True) -> None:
    """Keep `count` connections open: replace each one that closes."""
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    live: dict[int, Any] = {}
    while True:
        for number in range(count):
            if number not in live or live[number].is_closing():
                with contextlib.suppress(OSError):
                    sock = socket.socket()
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**21 if reads else 4096)
                    sock.setblocking(False)
                    await loop.sock_connect(sock, (host, int(port)))
                    protocol = functools.partial(_Connection, ask(number), reads=reads)
                    live[number], _ = await loop.create_connection(protocol, sock=sock)
        await asyncio.sleep(0.2)


def _key(url: str, **spec: Any) -> str:
    body = json.dumps({"batch_size": 1, **spec}).encode()
    request = urllib.request.Request(f"{url}/v1/loaders", body, {"Authorization": f"Bearer {ATTACKER}"})
    with urllib.request.urlopen(request) as answer:
        key: str = json.load(answer)["key"]
    return key


def _get(path: str, consumer: str = "") -> bytes:
    return b"GET %b HTTP/1.1\r\n%bTeleloader-Consumer: %b\r\n\r\n" % (path.encode(), HEAD, consumer.encode())


def _of(url: str, dataset: str, stop: int = 10**6) -> Callable[[int], bytes]:
    """Return the requests of a connection, each connection being one consumer with maximum prefetch."""
    path = f"/v1/loaders/{_key(url, dataset=dataset)}/epochs/0/batches"
    return lambda number: _get(f"{path}?ranges={number * 1000}:{number * 1000 + 900}&ahead=4000", f"a{number}")


async def _control(url: str) -> None:
    while True:
        sum(range(10**6))


async def _flood(url: str) -> None:
    await _connections(url, 200, lambda _: _get("/v1/datasets"))


async def _pipelined(url: str) -> None:
    await _connections(url, 50, lambda _: _get("/healthz") * 50)


async def _registering(url: str) -> None:
    def ask(number: int) -> bytes:
        body = json.dumps({"dataset": "waited", "seed": time.monotonic_ns() + number}).encode()
        return b"POST /v1/loaders HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (HEAD, len(body)) + body

    await _connections(url, 64, ask)


async def _dripping(url: str) -> None:
    await _connections(url, 500, lambda _: b"GET / HTTP/1.1\r\nX: ")


async def _greedy(url: str) -> None:
    await _connections(url, 100, _of(url, "waited"))


async def _unread(url: str) -> None:
    await _connections(url, 60, _of(url, "large"), reads=False)


async def _hanging(url: str) -> None:
    await _connections(url, 30, _of(url, "hanging"))


async def _deadly(url: str) -> None:
    await _connections(url, 30, _of(url, "deadly"))


async def _sessions(url: str) -> None:
    def ask(number: int) -> bytes:
        spec = {"dataset": "stream", "session": f"s{number}", "num_workers": 4}
        body = json.dumps(spec).encode()
        return b"POST /v1/loaders HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (HEAD, len(body)) + body

    await _connections(url, 16, ask)


ATTACKS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "control": (_control, "a process computes and sends no requests"),
    "requests": (_flood, "200 connections ask as fast as they are answered"),
    "pipelined": (_pipelined, "50 connections, each with 50 requests under way"),
    "registering": (_registering, "64 connections register loaders"),
    "drip": (_dripping, "500 connections whose headers do not end"),
    "greedy": (_greedy, "100 consumers want all that workers make"),
    "unread": (_unread, "60 consumers of 8 MB batches read nothing"),
    "hanging": (_hanging, "30 consumers of batches that hang"),
    "deadly": (_deadly, "30 consumers of batches that kill workers"),
    "sessions": (_sessions, "16 sessions with 4 workers each are started"),
}


def _attack(name: str, url: str) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(ATTACKS[name][0](url))


# --- The measured client ------------------------------------------------------------------------------------------


def measured(url: str, seconds: float) -> float:
    """Return the throughput of a loop that only consumes batches, in batches/s."""
    loader = DataLoader(RemoteDataset(url, "waited"), 1, seed=time.monotonic_ns(), shuffle=True, output="numpy")
    batches = iter(loader)
    for _ in range(20):
        next(batches)
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        next(batches)
        count += 1
    rate = count / (time.monotonic() - began)
    del batches
    return rate


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__.partition("\n")[0])
    parser.add_argument("attacks", nargs="*", help=f"names among {', '.join(ATTACKS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of a turn, after 3 s of attack")
    parser.add_argument("--workers", type=int, default=2, help="number of the server's workers")
    options = parser.parse_args()
    table = Table("attack", "what", "without, batches/s", "beside, batches/s", "ratio", box=None)
    for name in options.attacks or ATTACKS:
        with server(options.workers) as url:
            turns = [measured(url, options.seconds)]
            for _ in range(options.rounds):
                turns += [_beside(name, url, options.seconds), measured(url, options.seconds)]
        alone, beside = turns[::2], turns[1::2]
        means = [(a + b) / 2 for a, b in pairwise(alone)]
        ratio = statistics.median(b / a for a, b in zip(means, beside, strict=True))
        table.add_row(
            name,
            ATTACKS[name][1],
            f"{statistics.median(alone):,.0f}",
            f"{statistics.median(beside):,.0f}",
            f"{ratio:.2f}",
        )
    Console().print(table)


def _beside(name: str, url: str, seconds: float) -> float:
    attacker = multiprocessing.get_context("spawn").Process(target=_attack, args=(name, url))
    attacker.start()
    time.sleep(3)
    try:
        return measured(url, seconds)
    finally:
        attacker.kill()
        attacker.join()
        with contextlib.suppress(RuntimeError):
            await_idle(url)


if __name__ == "__main__":
    main()
