"""Invalid loader states, and responses that no loader server sends."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from teleloader import state
from teleloader.api.control import MAX_JSON_BYTES, Server
from teleloader.api.responses import error_of
from teleloader_shared.errors import Forbidden, ProtocolError, ServerUnavailable, StateMismatch, Unauthorized
from teleloader_shared.spec import LoaderSpec
from tests.client.fake_server import INFO

IDENTITY = {"dataset": "f", "order": "iterable"}
SAVED = {"version": 2, "epoch": 3, **IDENTITY, "batch": 17}
REGISTERED = {
    "key": LoaderSpec(dataset="fake", fingerprint="f").key,
    "batches": 8, "length": 8, "fingerprint": "f", "num_workers": 1, "max_batch_bytes": 2**20,
    "protocol": 1,
}  # fmt: skip


def nested() -> Any:
    """Return lists nested more deeply than Python's recursion limit."""
    value: list[Any] = []
    for _ in range(sys.getrecursionlimit()):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shard_states", -1),
        ("shard_states", "ab"),
        ("random", [1]),
        ("generators", [1]),
        ("base_seed", "5"),
        ("errors", 3),
        ("errors", [[1]]),
        ("errors", [[1, 2.5]]),
        ("failed_batches", 3),
        ("failed_batches", ["3"]),
        ("failed_batches", [-1]),
        ("batch", None),
        ("epoch", nested()),
        ("order", nested()),
        ("version", ["x" * 100] * 1000),
    ],
    ids=lambda value: repr(value)[:10] if not isinstance(value, list) else "list",
)
def test_a_state_with_another_value_is_refused_in_a_sentence(name: str, value: Any) -> None:
    """The error names the entry, and is short even if the value is long or deeply nested."""
    assert state.load(SAVED, IDENTITY, None)[0].batch == 17
    with pytest.raises(StateMismatch, match=name) as caught:
        state.load({**SAVED, name: value}, IDENTITY, None)
    assert len(str(caught.value)) < 500


class Saying(Server):
    """Server connection that returns one value for every request."""

    def __init__(self, answer: Any) -> None:
        super().__init__("http://server", 1)
        self._answer = answer

    def _request(self, method: str, path: str, **options: Any) -> Any:
        return self._answer


@pytest.mark.parametrize("answer", [None, 5, "x", {}, [5], [{}], [[INFO]], nested()], ids=lambda answer: type(answer))
def test_a_list_of_datasets_that_is_none_is_refused(answer: Any) -> None:
    """The error suggests that the URL is not that of a loader server."""
    with pytest.raises(ProtocolError, match="Check that http://server is the URL of a loader server"):
        Saying(answer).datasets()


@pytest.mark.parametrize("name", [name for name in INFO if name != "a_field_of_the_future"])
def test_a_dataset_with_a_value_of_another_type_is_refused(name: str) -> None:
    """An invalid value is rejected when it is read, not when it is used."""
    assert Saying(INFO).dataset("fake").name == "fake"
    with pytest.raises(ProtocolError, match=rf"invalid {name} = .*\. Check that http://server is the URL"):
        Saying({**INFO, name: [[name]]}).dataset("fake")


@pytest.mark.parametrize("name", REGISTERED)
def test_a_registration_with_a_value_of_another_type_is_refused(name: str) -> None:
    """An invalid value in the response to a registration raises a ProtocolError that names it."""
    assert Saying(REGISTERED).register(LoaderSpec(dataset="fake"), 0).batches == 8
    with pytest.raises(ProtocolError, match=f"invalid {name} = "):
        Saying({**REGISTERED, name: [1]}).register(LoaderSpec(dataset="fake"), 0)


@pytest.mark.parametrize("body", [b"[" * 100_000, json.dumps({"code": [1], "detail": {}}).encode(), b"\xff", b""])
def test_an_error_without_a_sense_is_a_protocol_error(body: bytes) -> None:
    """An invalid body raises ProtocolError, or ServerUnavailable if a retry may succeed after its 5xx status."""
    assert {type(error_of(status, body, "http://server")) for status in (400, 501, 505)} == {ProtocolError}
    assert {type(error_of(status, body, "http://server")) for status in (500, 502, 599)} == {ServerUnavailable}


@contextmanager
def answering(body: bytes, **headers: str) -> Iterator[Server]:
    """Run a server that responds to a GET with this body, as far as the client reads it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            with suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        yield Server(f"http://127.0.0.1:{server.server_address[1]}", 5)
        thread.join()


def test_what_is_compressed_unasked_is_not_unpacked() -> None:
    """Compressed responses are not unpacked, as a megabyte may unpack to a gigabyte."""
    for body in (gzip.compress(json.dumps([INFO]).encode()), b"not gzip"):
        with answering(body, Content_Encoding="gzip") as server, pytest.raises(ProtocolError, match="is not JSON"):
            server.datasets()


def test_the_size_of_a_response_is_limited() -> None:
    """An endless response is not read beyond a limit."""
    with (
        answering(b" " * (MAX_JSON_BYTES + 2**20)) as server,
        pytest.raises(ProtocolError, match="exceeds 4,194,304 bytes"),
    ):
        server.datasets()


def test_what_a_server_refuses_names_the_server() -> None:
    """Errors name the server, since only one of several may reject a request; a known code implies a loader server."""
    for kind in (Unauthorized, Forbidden, ServerUnavailable):
        body = json.dumps({"code": kind.__name__, "detail": "why"}).encode()
        error = error_of(401, body, "http://server", "/v1/datasets")
        assert type(error) is kind
        assert str(error) == "http://server refused the request: why"
    failed = error_of(500, json.dumps({"code": "InternalError", "detail": "why"}).encode(), "http://server", "/v1/x")
    assert str(failed) == "http://server/v1/x responded with 500: why"
    for body in (b"why", json.dumps({"code": "NotFound", "detail": "why"}).encode()):
        doubtful = error_of(404, body, "http://server", "/v1/x")
        assert str(doubtful).startswith("http://server/v1/x responded with 404: why. Check that http://server is")
