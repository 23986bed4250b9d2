"""A TCP proxy that injects network faults into connections between clients and servers under test.

It has two kinds of faults:

- A `Line` sets latency, bandwidth, slicing or a stall in both directions, until it is replaced.
- A fault is armed for one response, and affects its body once: `Cut`, `Reset`, `Stall`, `Flip`, `Omit`,
  `Repeat`, `Rewrite`. If it does not specify a byte, the proxy's seed does. A `Flip` or a `Rewrite` can be armed
  for another part too: the head of a response, or the head of a request.

::

    with FaultProxy(server.url, seed=7) as proxy:
        proxy.line = Line(latency=0.1)
        proxy.arm(Reset(at=1000))
        loader = DataLoader(RemoteDataset(proxy.url, "train"), 32)

The proxy runs in its own thread; all public methods may be called from any thread.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

_CHUNK: Final = 2**16
_QUEUED_CHUNKS: Final = 64
_STEPS_PER_SECOND: Final = 50
"""Number of pieces per second over a line with limited bandwidth."""
_BATCHES: Final = "/batches"

_REQUEST = re.compile(rb"(?:GET|POST|DELETE) (\S+) HTTP/1\.1\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Line:
    """Properties of the flow of bytes, in each direction."""

    latency: float = 0.0
    """Delay in seconds."""
    bandwidth: float | None = None
    """Bytes per second."""
    slice: int | None = None
    """Maximum size in bytes of a piece."""
    silent: bool = False
    """Accept connections and keep them open, but pass nothing."""
    buffered: bool = False
    """Pass a response only when it is complete, as some reverse proxies do."""
    idle_limit: float | None = None
    """Seconds without data after which a connection is closed, as by reverse proxies and firewalls."""


class After(Enum):
    """Action after the bytes that a fault passes."""

    MORE = auto()
    """Continue with the next response."""
    FIN = auto()
    RST = auto()
    SILENCE = auto()


Part = Literal["body", "head", "request"]
"""Part that a fault affects: the body of a response, its head, or the head of a request."""


class Fault(Protocol):
    """Fault of one response."""

    def apply(self, body: bytes, rng: random.Random) -> tuple[bytes, After]:
        """Return the bytes of the body to pass, and the action after them."""


def _place(at: int | None, body: bytes, rng: random.Random) -> int:
    if at is None:
        return rng.randrange(max(1, len(body)))
    if not 0 <= at <= len(body):
        raise ValueError(f"a fault at byte {at} of an answer that has {len(body)}")
    return at


@dataclass(frozen=True)
class Cut:
    """Close the connection by FIN after `at` bytes of the body."""

    at: int | None = None

    def apply(self, body: bytes, rng: random.Random) -> tuple[bytes, After]:
        """Return the bytes before the cut."""
        return body[: _place(self.at, body, rng)], After.FIN


@dataclass(frozen=True)
class Reset:
    """Reset the connection by RST after `at` bytes of the body."""

    at: int | None = None

    def apply(self, body: bytes, rng: random.Random) -> tuple[bytes, After]:
        """Return the bytes before the reset."""
        return body[: _place(self.at, body, rng)], After.RST


@dataclass(frozen=True)
class Stall:
    """Stop sending after `at` bytes of the body, and keep the connection open."""

    at: int | None = None

    def apply(self, body: bytes, rng: random.Random) -> tuple[bytes, After]:
        """Return the bytes before the stall."""
        return body[: _place(self.at, body, rng)], After.SILENCE


@dataclass(frozen=True)
class Flip:
    """Flip bit `bit` of byte `at` of the body."""

    at: int | None = None
    bit: int = 0

    def apply(self, body: bytes, rng: random.Random) -> tuple[bytes, After]:
        """Return the body with one flipped bit."""
        at = _place(self.at, body, rng)
        return body[:at] + bytes([body[at] ^ 1 << self.bit]) + body[at + 1 :], After.MORE


@dataclass(frozen=True)
class Omit:
    """Omit `count` bytes from byte `at` of the body; the subsequent bytes follow."""

    at: int | None = None
    count: int = 1

    def apply(self, body: bytes, rng: random.Random) -> tuple[bytes, After]:
        """Return the body without the omitted bytes."""
        at = _place(self.at, body, rng)
        return body[:at] + body[at + self.count :], After.MORE


@dataclass(frozen=True)
class Repeat:
    """Send `count` bytes from byte `at` of the body twice."""

    at: int | None = None
    count: int = 64

    def apply(self, body: bytes, rng: random.Random) -> tuple[bytes, After]:
        """Return the body with the repeated bytes."""
        at = _place(self.at, body, rng)
        return body[: at + self.count] + body[at:], After.MORE


@dataclass(frozen=True)
class Rewrite:
    """Replace the body by the result of `change`; the head still declares the original size."""

    change: Callable[[bytes], bytes]

    def apply(self, body: bytes, rng: random.Random) -> tuple[bytes, After]:
        """Return the replacement of the body."""
        return self.change(body), After.MORE


class FaultProxy:
    """Proxy for one server, used as a context manager.

    Args:
        target: URL of the server, ``http://host:port``; can be changed if the server moves.
        seed: Seed of positions that faults do not specify.
        http: True if the protocol is HTTP; faults and buffering need the boundaries of responses.
    """

    def __init__(self, target: str, *, seed: int = 0, http: bool = True) -> None:
        self.target = target
        self.happened: Counter[str] = Counter()
        """Number of injected faults by class name."""
        self.accepted = 0
        """Total number of accepted connections."""
        self._http = http
        self._rng = random.Random(seed)
        self._line = Line()
        self._armed: deque[tuple[Part, str, Fault]] = deque()
        self._connections: set[_Connection] = set()
        self._runner = asyncio.Runner()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._ready = threading.Event()

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    # -- what tests use

    @property
    def url(self) -> str:
        """URL for clients."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def line(self) -> Line:
        """Current properties of the flow; setting them also affects open connections."""
        return self._line

    @line.setter
    def line(self, line: Line) -> None:
        def change() -> None:
            self._line = line
            self._flows.clear() if line.silent else self._flows.set()

        self._call(change)

    def arm(self, fault: Fault, *, path: str = _BATCHES, times: int = 1, part: Part = "body") -> None:
        """Apply `fault` to this part of the next responses, or requests, whose path contains `path`."""
        self._call(lambda: self._armed.extend([(part, path, fault)] * times))

    def disarm(self) -> None:
        """Remove all armed faults."""
        self._call(self._armed.clear)

    @property
    def armed(self) -> int:
        """Number of faults that have not happened yet."""
        return len(self._armed)

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    def drop_all(self, *, reset: bool = True) -> int:
        """Close all connections at once by RST or FIN; return their number."""

        def drop() -> int:
            dropped = list(self._connections)
            for connection in dropped:
                connection.end(reset=reset)
            return len(dropped)

        return self._call(drop)

    # -- in the proxy's own thread

    def take(self, path: str, part: Part = "body") -> Fault | None:
        """Remove and return the fault that is armed for this part of the next response, or request, for `path`."""
        for position, (place, wanted, fault) in enumerate(self._armed):
            if place == part and wanted in path:
                del self._armed[position]
                self.happened[type(fault).__name__] += 1
                return fault
        return None

    @property
    def rng(self) -> random.Random:
        """Random generator for positions that faults do not specify."""
        return self._rng

    @property
    def http(self) -> bool:
        """True if the protocol is HTTP."""
        return self._http

    async def flows(self) -> None:
        """Wait while the line is silent."""
        await self._flows.wait()

    def _call(self, action: Callable[[], _Result]) -> _Result:
        """Run a function in the proxy's thread, and wait for its result."""

        async def run() -> _Result:
            return action()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _run(self) -> None:
        with self._runner as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over, self._flows = asyncio.Event(), asyncio.Event()
        self._flows.set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024)
        self.port: int = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        # asyncio's server does not close the sockets that it has accepted just before `close`
        self._loop.remove_reader(server.sockets[0])
        await asyncio.sleep(0)
        server.close()
        handlers = [connection.task for connection in self._connections]
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        await asyncio.sleep(0)  # the transports close their sockets

    # not a coroutine: its task could be cancelled before its first step, and would leave the connection open
    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self._over.is_set():
            _reset(writer)
            return
        connection = _Connection(self, reader, writer)
        self._connections.add(connection)
        connection.task.add_done_callback(lambda _: self._ended(connection))

    def _ended(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        # at the end of the proxy, nobody writes what a peer has not read
        connection.end(reset=self._over.is_set())
        if not connection.task.cancelled():
            connection.task.result()


class _Connection:
    """Connection of a client, and the matching connection to the server."""

    def __init__(self, proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._loop = asyncio.get_running_loop()
        self._client = (reader, writer)
        self._writers = [writer]
        self._asked = ""
        """Path of the last request."""
        self._active = self._loop.time()
        self.task = self._loop.create_task(self.run())

    def end(self, *, reset: bool) -> None:
        """Close both sides."""
        for writer in self._writers:
            end = _reset if reset else asyncio.StreamWriter.close
            end(writer)

    async def run(self) -> None:
        """Pass bytes until one side ends."""
        await self._proxy.flows()
        target = urlsplit(self._proxy.target)
        try:
            server = await asyncio.open_connection(target.hostname, target.port)
        except OSError:
            _reset(self._client[1])
            return
        self._writers.append(server[1])
        ways: list[Coroutine[Any, Any, None]] = [
            self._way(self._client[1], lambda to: self._answers(server[0], to)),
            self._way(server[1], lambda to: self._requests(self._client[0], to)),
            self._watch(),
        ]
        tasks = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _way(
        self, writer: asyncio.StreamWriter, source: Callable[[asyncio.Queue[_Parcel]], Coroutine[Any, Any, After]]
    ) -> None:
        """Pass the bytes of one direction."""
        parcels: asyncio.Queue[_Parcel] = asyncio.Queue(_QUEUED_CHUNKS)
        delivering = asyncio.ensure_future(self._deliver(parcels, writer))
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                after = await source(parcels)
                await parcels.put(_Parcel(self._due, b"", after))
                await delivering
                return
            await parcels.put(_Parcel(self._due, b"", After.FIN))
            await delivering
        finally:
            delivering.cancel()

    @property
    def _due(self) -> float:
        return self._loop.time() + self._proxy.line.latency

    async def _requests(self, reader: asyncio.StreamReader, to: asyncio.Queue[_Parcel]) -> After:
        while chunk := await reader.read(_CHUNK):
            if request := _REQUEST.match(chunk):
                self._asked = request[1].decode()
                head, end, rest = chunk.partition(b"\r\n\r\n")
                chunk = self._damaged(head + end, "request") + rest
            await self._put(to, chunk)
        return After.FIN

    async def _answers(self, reader: asyncio.StreamReader, to: asyncio.Queue[_Parcel]) -> After:
        while self._proxy.http:
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            head = self._damaged(head, "head")
            if length is None:
                await self._put(to, head)
                if b" 204 " in head[:16]:
                    continue
                break  # the rest of the connection is the body
            fault = self._proxy.take(self._asked)
            if fault is None and not self._proxy.line.buffered:
                await self._put(to, head)
                await self._copy(reader, to, int(length[1]))
                continue
            body = await reader.readexactly(int(length[1]))
            after = After.MORE
            if fault is not None:
                body, after = fault.apply(body, self._proxy.rng)
            await self._put(to, head + body)
            if after is not After.MORE:
                return after
        await self._copy(reader, to, None)
        return After.FIN

    def _damaged(self, head: bytes, part: Part) -> bytes:
        """Return the head after applying the fault that is armed for it."""
        fault = self._proxy.take(self._asked, part)
        return head if fault is None else fault.apply(head, self._proxy.rng)[0]

    async def _copy(self, reader: asyncio.StreamReader, to: asyncio.Queue[_Parcel], count: int | None) -> None:
        """Pass a number of bytes, or all until the end."""
        while count is None or count > 0:
            chunk = await reader.read(_CHUNK if count is None else min(_CHUNK, count))
            if not chunk:
                return
            count = None if count is None else count - len(chunk)
            await self._put(to, chunk)

    async def _put(self, to: asyncio.Queue[_Parcel], content: bytes) -> None:
        self._active = self._loop.time()
        await to.put(_Parcel(self._due, content, After.MORE))

    async def _deliver(self, parcels: asyncio.Queue[_Parcel], writer: asyncio.StreamWriter) -> None:
        while True:
            parcel = await parcels.get()
            await asyncio.sleep(parcel.due - self._loop.time())
            await self._proxy.flows()
            try:
                await self._write(parcel.content, writer)
            except OSError:
                return
            match parcel.after:
                case After.RST:
                    _reset(writer)
                    return
                case After.FIN:
                    return
                case After.SILENCE:
                    await asyncio.Event().wait()

    async def _write(self, content: bytes, writer: asyncio.StreamWriter) -> None:
        start = 0
        while start < len(content):
            line = self._proxy.line
            size = min(
                len(content),
                line.slice or len(content),
                max(1, int(line.bandwidth / _STEPS_PER_SECOND)) if line.bandwidth else len(content),
            )
            await asyncio.sleep(size / line.bandwidth if line.bandwidth else 0)
            await self._proxy.flows()
            writer.write(content[start : start + size])
            await writer.drain()
            start += size
            self._active = self._loop.time()

    async def _watch(self) -> None:
        """Close the connection when it is idle for longer than the line allows."""
        while True:
            limit = self._proxy.line.idle_limit
            if limit is not None and self._loop.time() - self._active >= limit:
                return
            await asyncio.sleep(0.02 if limit is None else limit / 10)


@dataclass(frozen=True)
class _Parcel:
    """Bytes in transit."""

    due: float
    content: bytes
    after: After


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as a process that died with unread bytes, or a machine that restarted, does."""
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
