"""A server that says what a test wants, for what a real one never does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from teleloader_shared.codec import Address, to_bytes
from teleloader_shared.spec import LoaderSpec

INFO = {
    "name": "fake", "kind": "map", "length": 8, "version": "", "fingerprint": "f", "collate": "default",
    "seeding": "batch", "a_field_of_the_future": 1,
}  # fmt: skip

Answer = Callable[["Request"], bytes | int]
"""The body for a request for batches; a number is a status instead."""


class Request:
    """One request for batches."""

    def __init__(self, path: str, number: int) -> None:
        parts = urlsplit(path)
        query = parse_qs(parts.query)
        _, _, _, self.key, _, epoch, _ = parts.path.split("/")
        self.epoch = int(epoch)
        self.start, self.stop = int(query["start"][0]), int(query["stop"][0])
        self.number = number
        """How many such requests came before it."""

    def frame(self, k: int, *, epoch: int | None = None, key: str | None = None) -> bytes:
        """The right frame of batch k, or a wrong one."""
        address = Address(key or self.key, self.epoch if epoch is None else epoch, k)
        return to_bytes(address, [np.full(3, k, np.int64)])

    def right(self) -> bytes:
        """The right answer."""
        return b"".join(self.frame(k) for k in range(self.start, self.stop))


@contextmanager
def fake_server(answer: Answer) -> Iterator[str]:
    """A server with one dataset of 8 samples whose batches `answer` makes; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        requests = 0

        def do_GET(self) -> None:
            if self.path == "/v1/datasets":
                self.reply(200, json.dumps([INFO]).encode())
                return
            said = answer(Request(self.path, Handler.requests))
            Handler.requests += 1
            if isinstance(said, int):
                self.reply(said, b'{"code": "X", "detail": "not now"}')
            else:
                self.reply(200, said)

        def do_POST(self) -> None:
            fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
            key = LoaderSpec.from_json(fields).key
            registered: dict[str, Any] = {
                "key": key, "batches": 8, "length": 8, "fingerprint": "f", "num_workers": 1,
                "max_batch_bytes": 2**20, "protocol": 1,
            }  # fmt: skip
            self.reply(200, json.dumps(registered).encode())

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Silent."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: Any) -> None:
            """Silent: clients that were told nonsense leave in the middle of it."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
