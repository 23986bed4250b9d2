"""What attacks on a server cost a client beside them: ``python -m benchmarks.attacks``.

The client takes batches that take a worker 4 ms of waiting, as fast as they come; in every other turn a process beside
it attacks the server from another address, 127.0.0.2, which is another principal there. So each turn under attack
stands between two without one, and the ratio is to the mean of these. An attacker takes processor time on the same
machine: `control` is one that only computes.
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
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from starlette.types import ASGIApp, Receive, Scope, Send

from benchmarks.processes import ROOT, await_idle, free_port
from teleloader import DataLoader, RemoteDataset

ATTACKER: Final = "127.0.0.2"
START_TIMEOUT: Final = 60.0
OPTIONS: Final = ("--memory-budget", "256MiB", "--batch-timeout", "30", "--log-level", "error")

# --- What is hosted -----------------------------------------------------------------------------------------------


class Waited:
    """Batches that take a worker 4 ms, whatever else the machine does."""

    def __len__(self) -> int:
        return 10**7

    def __getitem__(self, index: int) -> Any:
        return self.__getbatch__([index])

    def __getbatch__(self, indices: Any) -> Any:
        time.sleep(0.004)
        return np.zeros(1024, np.float32)


class Large(Waited):
    """Batches of 8 MB."""

    def __getbatch__(self, indices: Any) -> Any:
        return np.zeros(2**21, np.float32)


class Hanging(Waited):
    """Batches that never come."""

    def __getbatch__(self, indices: Any) -> Any:
        time.sleep(1000)


class Deadly(Waited):
    """Batches that end their worker."""

    def __getbatch__(self, indices: Any) -> Any:
        os._exit(1)


class Stream:
    """An iterable-style dataset that keeps its workers busy."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield sum(range(100))


# --- The server ---------------------------------------------------------------------------------------------------


class _ByAddress(NamedTuple):
    name: str
    memory_share: float = 0.5


def _principals(app: ASGIApp) -> ASGIApp:
    """Each address is a principal."""

    async def by_address(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["principal"] = _ByAddress(scope["client"][0])
        await app(scope, receive, send)

    return by_address


def _serve(arguments: list[str]) -> None:
    from teleloader_server import app
    from teleloader_server.cli import main

    create = app.create_app
    app.create_app = lambda service: _principals(create(service))  # type: ignore[assignment,return-value]
    sys.argv[1:] = arguments
    main()


@contextmanager
def server(workers: int) -> Iterator[str]:
    """One that knows principals by their address."""
    port = free_port()
    hosted = [
        f"{name.lower()}=benchmarks.attacks:{name}" for name in ("Waited", "Large", "Hanging", "Deadly", "Stream")
    ]
    command = [sys.executable, "-m", "benchmarks.attacks", "--serve", *hosted, "--port", str(port), *OPTIONS]
    process = subprocess.Popen([*command, "--num-workers", str(workers)], cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/readyz"):
                break
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait()


# --- The attacks --------------------------------------------------------------------------------------------------


class _Connection(asyncio.Protocol):
    """Asks again whenever something has come, if it reads at all."""

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
    """So many of them, made anew when they are closed."""
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
                    sock.bind((ATTACKER, 0))
                    await loop.sock_connect(sock, (host, int(port)))
                    protocol = functools.partial(_Connection, ask(number), reads=reads)
                    live[number], _ = await loop.create_connection(protocol, sock=sock)
        await asyncio.sleep(0.2)


def _key(url: str, **spec: Any) -> str:
    body = json.dumps({"batch_size": 1, **spec}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/loaders", body)) as answer:
        key: str = json.load(answer)["key"]
    return key


def _get(path: str, consumer: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nTeleloader-Consumer: {consumer}\r\n\r\n".encode()


def _of(url: str, dataset: str, stop: int = 10**6) -> Callable[[int], bytes]:
    """Each connection is a consumer that wants as much as it can."""
    path = f"/v1/loaders/{_key(url, dataset=dataset)}/epochs/0/batches"
    return lambda number: _get(f"{path}?start={number * 1000}&stop={number * 1000 + 900}&ahead=4000", f"a{number}")


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
        return b"POST /v1/loaders HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body

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
        return b"POST /v1/loaders HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    await _connections(url, 16, ask)


ATTACKS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "control": (_control, "a process computes, and asks for nothing"),
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


# --- The client beside them ---------------------------------------------------------------------------------------


def measured(url: str, seconds: float) -> float:
    """Batches a second of a loop that does nothing else."""
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
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__.partition("\n")[0])
    parser.add_argument("attacks", nargs="*", help=f"some of {', '.join(ATTACKS)}; default all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn, after 3 seconds of attack")
    parser.add_argument("--workers", type=int, default=2, help="of the server")
    parser.add_argument("--server", metavar="URL", help="one that runs already and hosts the same")
    options = parser.parse_args()
    print(f"{'attack':<12} {'alone':>7} {'beside':>7} {'ratio':>6}  (batches a second, medians)")
    for name in options.attacks or ATTACKS:
        with contextlib.nullcontext(options.server) if options.server else server(options.workers) as url:
            turns = [measured(url, options.seconds)]
            for _ in range(options.rounds):
                turns += [_beside(name, url, options.seconds), measured(url, options.seconds)]
        alone, beside = turns[::2], turns[1::2]
        ratio = statistics.median(2 * b / (a + c) for b, (a, c) in zip(beside, pairwise(alone), strict=True))
        rates = f"{statistics.median(alone):>7,.0f} {statistics.median(beside):>7,.0f} {ratio:>6.2f}"
        print(f"{name:<12} {rates}  {ATTACKS[name][1]}", flush=True)


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
    if sys.argv[1:2] == ["--serve"]:
        _serve(sys.argv[2:])
    else:
        main()
