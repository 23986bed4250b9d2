"""A server that says what a test wants, for what a real one never does."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from teleloader_shared import codec
from teleloader_shared.codec import BatchId, End, to_bytes
from teleloader_shared.messages import DATASETS_PATH, HEALTH_PATH, LOADERS_PATH
from teleloader_shared.ranges import BatchRanges
from teleloader_shared.spec import LoaderSpec


class IndexMemory(codec.Bits):
    """Buffer for index lists, like the server's own, which cannot be imported where the server does not run."""

    def leaf(self, offset: int, dtype_name: str, shape: tuple[int, ...], kind: str) -> Any:
        """Return a tensor as a list of integers, and other arrays unchanged."""
        bits = super().leaf(offset, dtype_name, shape, kind)
        return bits.tolist() if kind == "tensor" else bits


INFO = {
    "name": "fake", "kind": "map", "type": "Fake", "length": 8, "version": "", "fingerprint": "f",
    "collate": "default", "worker_init": None, "functions": [], "seeding": "batch", "cpus": 64,
    "a_field_of_the_future": 1,
}  # fmt: skip
ITERABLE = {**INFO, "kind": "iterable", "length": None}
"""The same as an iterable-style dataset that does not know its length."""
BATCHES = 8
"""After so many, `Request.right` says that every shard has ended."""

Raw = Callable[[socket.socket], object]
"""Writes what it likes to a connection, which is closed then."""
Answer = Callable[["Request"], bytes | int | Raw]
"""The body for a request for batches; a number is a status instead."""


class Request:
    """One request for batches."""

    def __init__(self, path: str, body: bytes, number: int) -> None:
        parts = urlsplit(path)
        query = parse_qs(parts.query)
        _, _, _, self.key, _, epoch, _ = parts.path.split("/")
        self.epoch = int(epoch)
        lists = codec.read_all(IndexMemory(np.frombuffer(body, np.uint8)))
        listed = {frame.batch_id.batch: frame.content for frame in lists}
        self.listed: dict[int, Any] | None = listed or None
        """What the batches hold, where the client says it."""
        self.batches = BatchRanges.of(listed) if listed else BatchRanges.parse(query["ranges"][0])
        self.start, self.stop = self.batches.start, self.batches.stop
        self.number = number
        """How many such requests came before it."""

    def frame(self, k: int, *, epoch: int | None = None, key: str | None = None) -> bytes:
        """The right frame of batch k, or a wrong one."""
        batch_id = BatchId(key or self.key, self.epoch if epoch is None else epoch, k)
        return to_bytes(batch_id, [np.array([k] * 3 if self.listed is None else self.listed.get(k, []))])

    def end(self, k: int, samples: int = 0) -> bytes:
        """A frame that says, in the place of batch k, that its shard has no more."""
        return to_bytes(BatchId(self.key, self.epoch, k), End(samples, replica=False))

    def right(self) -> bytes:
        """The right answer."""
        over = BATCHES if self.listed is None else self.stop
        return b"".join(self.frame(k) if k < over else self.end(k) for k in self.batches)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args: Any) -> None:
        """Silent: clients that were told nonsense leave in the middle of it."""


@contextmanager
def fake_server(
    answer: Answer,
    info: dict[str, Any] = INFO,
    session_ended: Callable[[str], object] = lambda key: None,
    *,
    registering: Callable[[], int] = lambda: 200,
    touched: Callable[[], int] = lambda: 200,
    checked: Callable[[], object] = lambda: None,
    num_workers: int = 1,
    environment: str | None = None,
) -> Iterator[str]:
    """A server with one dataset, of 8 samples unless told otherwise; yields its URL.

    Args:
        answer: Makes the batches.
        info: The dataset.
        session_ended: Called with the key of each session that is ended.
        registering: The status of a registration's answer.
        touched: The status of the answer to a session's sign of life.
        checked: Called before each health check is answered.
        num_workers: How many workers it says it has.
        environment: Library versions that it reports.
    """
    server = _Server(
        ("127.0.0.1", 0), _handler(answer, info, session_ended, registering, touched, checked, num_workers, environment)
    )
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(  # noqa: C901 - a class
    answer: Answer,
    info: dict[str, Any],
    session_ended: Callable[[str], object],
    registering: Callable[[], int],
    touched: Callable[[], int],
    checked: Callable[[], object],
    num_workers: int,
    environment: str | None,
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        requests = 0

        def do_GET(self) -> None:
            if self.path == DATASETS_PATH:
                self.reply(200, json.dumps([{**info, "environment": environment}]).encode())
            elif self.path == HEALTH_PATH:
                checked()
                self.reply(200, b"{}")
            elif "/epochs/" not in self.path:
                self.reply(touched(), b"{}")
            else:
                self.answer(b"")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_registration = self.path.partition("?")[0] == LOADERS_PATH
            is_hosted = not is_registration or json.loads(body)["dataset"] == info["name"]
            if not is_hosted:
                self.reply(404, b'{"code": "UnknownDataset", "detail": "unknown dataset"}')
            elif is_registration and (status := registering()) != 200:
                self.reply(status, b"<html>a proxy's page</html>")
            elif is_registration:
                registered = _registered(LoaderSpec.from_json(json.loads(body)), info, num_workers)
                self.reply(200, json.dumps({**registered, "environment": environment}).encode())
            else:
                self.answer(body)

        def do_DELETE(self) -> None:
            session_ended(self.path.removeprefix(f"{LOADERS_PATH}/"))
            self.send_response(204)
            self.end_headers()

        def answer(self, body: bytes) -> None:
            said = answer(Request(self.path, body, Handler.requests))
            Handler.requests += 1
            if isinstance(said, int):
                self.reply(said, b'{"code": "X", "detail": "not now"}')
            elif callable(said):
                self.close_connection = True
                said(self.connection)
            else:
                self.reply(200, said)

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Silent."""

    return Handler


def _registered(spec: LoaderSpec, info: dict[str, Any], num_workers: int) -> dict[str, Any]:
    return {
        "key": spec.key, "batches": info["length"] if spec.order == "plan" else None, "length": info["length"],
        "fingerprint": info["fingerprint"], "num_workers": num_workers, "max_batch_bytes": 2**20, "protocol": 1,
    }  # fmt: skip
