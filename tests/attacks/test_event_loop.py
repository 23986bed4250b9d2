"""No message of a client blocks the event loop: each callback takes less CPU time than adding 500,000 integers.

That is about 10 ms on a fast core. The server runs in a thread of this process, on an event loop whose callbacks are
measured by `time.thread_time`. Even this time grows if other processes share the core and its caches, so the limit is
measured at the same time, in the same way.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import httpx
import msgpack
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from teleloader_server.auth.authenticator import Authenticator
from teleloader_server.config import DatasetConfig
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.limits import Limits
from teleloader_server.stats.collector import MARK_EVERY
from teleloader_server.web.app import Server, bind, url_of
from teleloader_server.workers.factory import ConfiguredPools
from teleloader_shared import codec
from teleloader_shared.codec import BatchId
from teleloader_shared.tree import Tensor
from tests.end_to_end.test_websocket import stream
from tests.raw import HOST, Raw

REFERENCE: Final = 500_000
"""Integers whose addition takes as much CPU time as a callback may."""
ATTEMPTS: Final = 5
"""Attempts per message; the fastest counts, because other work in this process only adds time."""
KIB: Final = 1024


class Measured:
    """Server with the datasets `numbers` and `anything`, and durations of its event loop's callbacks.

    Args:
        authenticator: The server's authenticator; None disables authentication.
    """

    def __init__(self, authenticator: Authenticator | None = None) -> None:
        self._authenticator = authenticator
        self.longest = 0.0
        self.what = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.url = ""

    def __enter__(self) -> Measured:
        self._run = asyncio.Handle._run

        def run(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            self._run(handle)
            taken = time.thread_time() - began
            if taken > self.longest and threading.current_thread() is self._thread:
                task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
                self.longest, self.what = taken, f"{handle} of {task}"

        asyncio.Handle._run = run  # type: ignore[method-assign,assignment]
        self._thread.start()
        self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._thread.join()
        asyncio.Handle._run = self._run  # type: ignore[method-assign]

    async def _serve(self) -> None:
        limits = Limits(num_workers=1)
        numbers = DatasetConfig(name="numbers", factory="tests.end_to_end.hosted:numbers")
        anything = DatasetConfig(name="anything", factory="tests.end_to_end.hosted:numbers", indices="any")
        service = LoaderService(ConfiguredPools([numbers, anything], limits), limits)
        listening = bind("127.0.0.1", 0)
        server = Server(service, "127.0.0.1", 0, grace=1, authenticator=self._authenticator)
        await service.start()
        serving = asyncio.create_task(server.serve([listening]))
        await server.listening.wait()
        self._loop = loop = asyncio.get_running_loop()
        self._stop: Callable[[], object] = lambda: loop.call_soon_threadsafe(setattr, server, "should_exit", True)
        self.url = url_of(listening)
        self._ready.set()
        await serving
        await service.close()

    def register(self, **spec: Any) -> str:
        """Return the key of a new loader."""
        answer = httpx.post(f"{self.url}/v1/loaders", json={"batch_size": 4, **spec}, trust_env=False)
        key: str = answer.raise_for_status().json()["key"]
        return key

    def blocked(self, attempt: Callable[[], object]) -> float:
        """Return the CPU time of the longest callback relative to that of the reference; the best of some attempts."""
        found = []
        gc.collect()
        gc.disable()  # a collection would traverse all objects of the tests
        try:
            for _ in range(ATTEMPTS):
                self.longest = 0.0
                attempt()
                for _ in range(5):
                    # a response may arrive before the callback that has sent it ends, and others follow
                    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(60)
                longest, began = self.longest, time.thread_time()
                sum(range(REFERENCE))
                found.append(longest / (time.thread_time() - began))
        finally:
            gc.enable()
        return min(found)


@pytest.fixture(scope="module")
def server() -> Iterator[Measured]:
    """Run one server for all tests."""
    with Measured() as measured:
        yield measured


# -- requests

LONG: Final = 60 * KIB
HEADS: Final[dict[str, bytes]] = {
    "labels of a host": b"GET /v1/datasets HTTP/1.1\r\nHost: " + b"a." * (LONG // 2) + b"\r\n\r\n",
    "colons of a host": b"GET /v1/datasets HTTP/1.1\r\nHost: " + b":" * LONG + b"\r\n\r\n",
    "parameters": b"GET /stats?" + b"a&" * (LONG // 2) + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "escapes of a path": b"GET /" + b"%41" * (LONG // 3) + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "parts of a path": b"GET " + b"/v1/loaders" * (LONG // 11) + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "digits of a batch": b"GET /v1/loaders/x/epochs/0/batches/" + b"9" * LONG + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    **{
        f"{name.decode()} {value[:3].decode()}": b"GET %b HTTP/1.1\r\n%b%b: %b\r\n\r\n"
        % (path, HOST, name, value * (LONG // len(value)))
        for path, name, value in [
            (b"/stats", b"Cookie", b";"), (b"/stats", b"Cookie", b"a=b; "), (b"/stats", b"Cookie", b" ="),
            (b"/stats", b"Authorization", b"a "), (b"/stats", b"Origin", b"://"), (b"/metrics", b"Accept", b"a,"),
            (b"/metrics", b"Accept", b"a;q=1,"), (b"/metrics", b"Accept", b";"), (b"/", b"If-None-Match", b'"a",'),
            (b"/stats", b"X-Request-ID", b"a"), (b"/stats", b"traceparent", b"0-"),
            (b"/v1/loaders/x/epochs/0/batches/0", b"Teleloader-Report", b"elapsed=1,"),
            (b"/v1/loaders/x/epochs/0/batches/0", b"Teleloader-Consumer", b"#"),
        ]
    },
}  # fmt: skip
"""Requests with a head of almost 64 KiB."""


@pytest.mark.parametrize("name", HEADS)
def test_a_head_does_not_hold_the_event_loop(server: Measured, name: str) -> None:
    """Parsing a large request head stays below the limit, whether the request is accepted or rejected."""

    def attempt() -> None:
        with Raw(server.url) as client:
            client.send(HEADS[name])
            client.receive()

    assert server.blocked(attempt) < 1, server.what


@pytest.mark.parametrize("size", [1, 16, 64])
@pytest.mark.parametrize("path", ["/v1/loaders", "/session", "/v1/datasets"])
def test_chunks_of_a_body_do_not_hold_the_event_loop(server: Measured, path: str, size: int) -> None:
    """Each chunk calls the parser, and a read of a quarter of a megabyte may contain 43,000 chunks."""
    chunk = b"%x\r\n%b\r\n" % (size, b" " * size)
    head = f"POST {path} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n".encode() + HOST + b"\r\n"

    def attempt() -> None:
        with Raw(server.url) as client:
            client.send(head + chunk * (1000 * KIB // len(chunk)))
            client.receive()

    assert server.blocked(attempt) < 1, server.what


MANY: Final = 1000 * KIB
SPECS: Final[dict[str, bytes]] = {
    "ints": b"[" + b"1," * (MANY // 2) + b"1]",
    "lists": b"[" + b"[]," * (MANY // 3) + b"1]",
    "floats": b"[" + b"1e1," * (MANY // 4) + b"1]",
    "fields": b"{" + b",".join(b'"%x":1' % number for number in range(MANY // 9)) + b"}",
    "strings": b"[" + b'"",' * (MANY // 3) + b'""]',
    "nested": b"[" * MANY,
    "open string": b'"' + b"\\" * MANY,
    "open strings": b'["' * (MANY // 2),
    "one string": json.dumps({"dataset": "x" * MANY}).encode(),
    "other letters": json.dumps({"dataset": "\u0101" * (MANY // 2)}, ensure_ascii=False).encode(),
    "escapes": json.dumps({"dataset": "\u0101" * (MANY // 6)}).encode(),
    "quotes": json.dumps({"dataset": '"' * (MANY // 2)}).encode(),
    "states": json.dumps({
        "dataset": "numbers", "session": "s", "num_workers": 15, "shard_states": ["\u0101" * (MANY // 90)] * 15,
    }).encode(),
    "many states": json.dumps({
        "dataset": "numbers", "session": "s", "num_workers": 1024, "shard_states": ["x" * 768] * 1024,
    }).encode(),
    "digits": b'{"dataset": "numbers", "seed": ' + b"9" * MANY + b"}",
}  # fmt: skip
"""Bodies of registrations, of almost 1 MiB."""


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_does_not_hold_the_event_loop(server: Measured, name: str) -> None:
    """Rejecting a large spec of any content with 4xx stays below the limit."""

    def attempt() -> None:
        answer = httpx.post(f"{server.url}/v1/loaders", content=SPECS[name], trust_env=False)
        assert 400 <= answer.status_code < 500, answer.text

    assert server.blocked(attempt) < 1, server.what


# -- index lists


def listed(key: str, indices: Any, k: int = 0, **options: Any) -> bytes:
    """Return the frame of an index list."""
    return codec.to_bytes(BatchId(key, 0, k), indices, **options)


def packed(count: int) -> Any:
    """Return integers as a client packs them."""
    return np.arange(count).view(Tensor) % 50


HEADER: Final[dict[str, Any]] = {"loader": "", "epoch": 0, "batch": 0, "tree": [1]}

LISTS: Final[dict[str, Callable[[str], bytes]]] = {
    "8 of 900,000": lambda key: b"".join(listed(key, packed(900_000), k) for k in range(8)),
    "one of 2**20": lambda key: listed(key, packed(2**20)),
    "7 of 2**20": lambda key: b"".join(listed(key, packed(2**20), k) for k in range(7)),
    "4,096 short ones": lambda key: b"".join(listed(key, packed(4), k) for k in range(4096)),
    "4,096 of 1,024": lambda key: b"".join(listed(key, packed(1024), k) for k in range(4096)),
    "4,096 without checksums": lambda key: b"".join(listed(key, packed(4), k, checksum=False) for k in range(4096)),
    "plain integers": lambda key: listed(key, [1] * (500 * KIB)),
    "empty lists": lambda key: listed(key, [[]] * (500 * KIB)),
    "some empty lists": lambda key: listed(key, [[]] * (15 * KIB)),
    "empty dicts": lambda key: listed(key, [{}] * (100 * KIB)),
    "strings": lambda key: listed(key, ["x"] * (250 * KIB)),
    "a long number": lambda key: listed(key, [10**4000] * 100),
    "a range": lambda key: listed(key, range(2**40)),
    "an empty array of very many rows": lambda key: listed(key, np.empty((2**40, 0)).view(Tensor)),
    "a compressed list": lambda key: listed(key, packed(2**20) * 0, compression="zstd"),
    "classes": lambda key: in_frame(
        {**HEADER, "loader": key, "tree": [{"dataclass": ["m", f"K{k}", ["a" * 100], [1]]} for k in range(500)]}
    ),
    "a header that is too long": lambda key: listed(key, [b"x" * 600 * KIB]),
    "damaged": lambda key: listed(key, packed(2**20))[:-1] + b"x",
    "many fields": lambda key: in_frame({**HEADER, "loader": key, **dict.fromkeys(map(str, range(10**5)), 0)}),
    "a long field": lambda key: in_frame({**HEADER, "loader": key, "padding": [[]] * (500 * KIB)}),
    "a name that is a list": lambda key: in_frame({**HEADER, "loader": [[]] * (500 * KIB)}),
    "nested": lambda key: in_frame(None, msgpack.packb(HEADER)[:-1] + b"\x91" * (500 * KIB)),
}
"""Functions that return a body with an index list, valid or not, for a loader's key."""


def in_frame(header: Any, raw: bytes | None = None) -> bytes:
    """Return a frame with this header and no arrays."""
    content = msgpack.packb(header) if raw is None else raw
    writer = codec.FrameWriter(BatchId("", 0, 0), [1], checksum=False)
    writer._number = b""
    writer._layout = codec._lay_out(BatchId("", 0, 0), content, [], 2**30)._replace(before=content, after=b"")
    buffer = np.empty(writer._layout.nbytes, np.uint8)
    writer.write(buffer)
    return buffer.tobytes()


@contextmanager
def own_order(server: Measured, dataset: str) -> Iterator[str]:
    """Return the key of a loader with a client-side sampler."""
    key = server.register(dataset=dataset, order="client", session=dataset)
    try:
        yield key
    finally:
        httpx.delete(f"{server.url}/v1/loaders/{key}", trust_env=False)


@pytest.mark.parametrize("dataset", ["numbers", "anything"])
@pytest.mark.parametrize("name", LISTS)
def test_index_lists_do_not_hold_the_event_loop(server: Measured, name: str, dataset: str) -> None:
    """Processing a long index list over HTTP stays below the limit; its response may be the failure of a batch."""
    with own_order(server, dataset) as key:
        body = LISTS[name](key)

        def attempt() -> None:
            path = f"{server.url}/v1/loaders/{key}/epochs/0/batches"
            answer = httpx.post(path, content=body, timeout=60, trust_env=False)
            assert answer.status_code in (200, 422), answer.text

        assert server.blocked(attempt) < 1, server.what


@pytest.mark.parametrize("dataset", ["numbers", "anything"])
@pytest.mark.parametrize("name", [name for name in LISTS if len(LISTS[name]("0" * 32)) < 700 * KIB])
def test_messages_do_not_hold_the_event_loop(server: Measured, name: str, dataset: str) -> None:
    """Parsing a WebSocket message of the maximum size stays below the limit of CPU time."""
    with own_order(server, dataset) as key:
        body = LISTS[name](key)[: 256 * KIB]

        def attempt() -> None:
            with stream(server.url, key) as socket, ExitStack():
                socket.send(body)
                _rest(socket)

        assert server.blocked(attempt) < 1, server.what


@pytest.mark.parametrize("value", [[[]] * (250 * KIB), [1] * (250 * KIB), [0, 0, "x" * 250 * KIB], {"a": 1}])
def test_a_range_does_not_hold_the_event_loop(server: Measured, value: object) -> None:
    """Processing a WebSocket message that is not a valid range of three ints stays below the limit."""
    key = server.register(dataset="numbers")

    def attempt() -> None:
        with stream(server.url, key) as socket:
            socket.send(msgpack.packb(value))
            _rest(socket)

    assert server.blocked(attempt) < 1, server.what


# -- consumers


@pytest.fixture(scope="module")
def crowded() -> Iterator[Measured]:
    """Run a server with 1,500 consumers."""
    with Measured() as measured:
        key = measured.register(dataset="numbers", batch_size=1)
        with httpx.Client(base_url=measured.url, trust_env=False) as client:
            for number in range(1500):
                headers = {"Teleloader-Consumer": f"consumer-{number}"}
                client.get(f"/v1/loaders/{key}/epochs/0/batches/0", headers=headers).raise_for_status()
        yield measured


@pytest.mark.parametrize("path", ["/stats", "/stats?limit=1000", "/metrics"])
def test_many_consumers_do_not_hold_the_event_loop(crowded: Measured, path: str) -> None:
    """Statistics of 1,500 consumers, and the totals of each second, stay below the limit."""

    def attempt() -> None:
        assert httpx.get(crowded.url + path, trust_env=False).status_code == 200
        time.sleep(MARK_EVERY)  # the totals are noted once in this time

    assert crowded.blocked(attempt) < 1, crowded.what


def _rest(socket: Any) -> None:
    """Receive until one batch has arrived or the connection is closed."""
    try:
        while isinstance(socket.recv(30), str):
            pass
    except ConnectionClosed:
        pass
