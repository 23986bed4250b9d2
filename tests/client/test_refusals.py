"""Responses that are not batches: rejections, overload, and responses of proxies."""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from teleloader import (
    DataLoader,
    DatasetChanged,
    Forbidden,
    InvalidSpec,
    ProtocolError,
    RemoteDataset,
    ServerUnavailable,
    TeleloaderError,
    Unauthorized,
)
from teleloader.api.control import Server
from teleloader.api.responses import parse_retry_after
from teleloader.fetch.reorder import ReorderBuffer
from tests.attacks.test_hostile_server import raw_server
from tests.client.fake_server import Answer, Raw, Request, fake_server

RIGHT = [[k, k, k] for k in range(8)]
PAGE = b"<html>\x1b[31m gateway \xff\x00 page</html>"


def response(status: int, body: bytes = PAGE, head: str = "") -> bytes:
    """Return a complete HTTP response."""
    return f"HTTP/1.1 {status} X\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def problem(status: int, code: str) -> bytes:
    """Return the response of a loader server that rejects a request."""
    return response(status, json.dumps({"code": code, "detail": "the reason"}).encode())


def sending(content: bytes) -> Raw:
    """Return a function that sends the bytes and closes the connection."""
    return lambda connection: connection.sendall(content)


def epoch(url: str, **options: float) -> list[list[int]]:
    """Return the batches of one epoch."""
    return [batch[0].tolist() for batch in DataLoader(RemoteDataset(url, **options), output="numpy")]  # type: ignore[arg-type]


REFUSALS = {
    "404 with a code": (problem(404, "UnknownDataset"), TeleloaderError),
    "401": (problem(401, "Unauthorized"), Unauthorized),
    "403": (problem(403, "Forbidden"), Forbidden),
    "409": (problem(409, "DatasetChanged"), DatasetChanged),
    "422": (problem(422, "InvalidSpec"), InvalidSpec),
    "400 of a proxy": (response(400), ProtocolError),
    "302 of a proxy": (response(302), ProtocolError),
    "201 of a proxy": (response(201), ProtocolError),
    "200 without a size": (b"HTTP/1.1 200 OK\r\n\r\n" + PAGE, ProtocolError),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_batch_is_requested_once_more_and_then_raised(name: str) -> None:
    """A rejection is confirmed by one further request on a new connection, even without a reconnect timeout.

    A single rejection can be caused by a damaged bit, and is followed by the right batches. A second one is raised: the
    batch is not requested a third time.
    """
    refusal, error = REFUSALS[name]
    with fake_server(lambda request: sending(refusal) if request.number == 1 else request.right()) as url:
        assert epoch(url, reconnect_timeout=0) == RIGHT
    asked: list[int] = []

    def refuse(request: Request) -> Raw:
        asked.append(request.start)
        return sending(refusal)

    with fake_server(refuse) as url, pytest.raises(error):
        epoch(url, reconnect_timeout=30)
    assert asked.count(0) == 2


def test_a_refused_registration_is_sent_once_more_and_then_raised() -> None:
    """A rejected registration is confirmed in the same way, at the start of an epoch and after a disconnection."""
    statuses = iter([422, 200, 403, 200])

    def broken_once(request: Request) -> bytes | Raw:
        return sending(b"") if request.number == 1 else request.right()

    with fake_server(broken_once, registering=lambda: next(statuses, 200)) as url:
        assert epoch(url, reconnect_timeout=30) == RIGHT
    assert next(statuses, None) is None
    asked: list[int] = []

    def refuse() -> int:
        asked.append(422)
        return 422

    with (
        fake_server(Request.right, registering=refuse) as url,
        pytest.raises(ProtocolError, match="responded with 422"),
    ):
        epoch(url, reconnect_timeout=30)
    assert len(asked) == 2


TRANSIENT = (404, 408, 425, 429, 500, 502, 503, 504)


@pytest.mark.parametrize("status", TRANSIENT)
def test_what_a_proxy_refuses_for_a_while_is_requested_again(status: int) -> None:
    """A response without a loader server's error code is retried with backoff, since the server may recover.

    That holds for batches and for registrations, for longer than one attempt, and until `reconnect_timeout` is over.
    """
    registering = iter([200, status, status, status, 200])

    def answer(request: Request) -> bytes | Raw:
        return sending(response(status)) if 1 <= request.number <= 4 else request.right()

    with fake_server(answer, registering=lambda: next(registering, 200)) as url:
        assert epoch(url, reconnect_timeout=30) == RIGHT
    with (
        fake_server(lambda _: sending(response(status))) as url,
        pytest.raises(ServerUnavailable, match=rf"did not send batch 0 of epoch 0: .* {status}: <html>.* gateway "),
    ):
        epoch(url, reconnect_timeout=0.2)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_what_a_loader_server_cannot_do_now_is_requested_again(status: int) -> None:
    """Statuses that mean "not now" are also retried with a loader server's error code."""
    overloaded: Answer = lambda request: (  # noqa: E731
        sending(problem(status, "RequestTimeout")) if 1 <= request.number <= 4 else request.right()
    )
    with fake_server(overloaded) as url:
        assert epoch(url, reconnect_timeout=30) == RIGHT


@pytest.mark.parametrize("asked", ["7", "5000"])
def test_the_client_waits_as_long_as_retry_after(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits as long as Retry-After states, but no longer than `reconnect_timeout` has left."""
    waits: list[float] = []
    monkeypatch.setattr(ReorderBuffer, "sleep", lambda _, seconds: waits.append(seconds))
    refusal = response(503, head=f"Retry-After: {asked}\r\n")
    with fake_server(lambda request: sending(refusal) if request.number == 0 else request.right()) as url:
        assert epoch(url, reconnect_timeout=100) == RIGHT
    assert len(waits) == 1
    assert 7 <= waits[0] <= 8 if asked == "7" else 99 < waits[0] <= 100


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("", 0), ("0", 0), ("120", 120), ("-1", 0), ("1.5", 0), ("9" * 5000, 0), ("\u0663", 0), ("soon", 0),
     ("Sun, 06 Nov 1994 08:49:37 GMT", 0), ("Sun, 06 Nov 1994 08:49:37 -0000", 0)],
    ids=lambda value: str(value)[:10],
)  # fmt: skip
def test_a_retry_after_header_is_a_number_or_a_date(header: str, seconds: float) -> None:
    """A number of seconds is returned; a date in the past and every other value result in 0."""
    assert parse_retry_after(header) == seconds


def test_a_retry_after_header_may_be_a_date_in_the_future() -> None:
    """A date is returned as the seconds until then."""
    assert parse_retry_after("Fri, 01 Jan 2100 00:00:00 GMT") > 10**9


# --- First contact ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [*TRANSIENT, 400, 302])
def test_at_first_contact_another_server_is_an_error_at_once(status: int) -> None:
    """Before a loader server has responded, a response that no loader server sends is raised without a retry.

    The error has the status and a harmless part of what was received: the URL is probably wrong.
    """
    asked: list[str] = []

    def answer(connection: socket.socket, path: str) -> None:
        asked.append(path)
        connection.sendall(response(status, PAGE + b"x" * 10**6))

    with raw_server(answer) as url, pytest.raises(ProtocolError) as raised:
        RemoteDataset(url, reconnect_timeout=30)
    assert len(asked) == 1
    text = str(raised.value)
    assert text.startswith(f"{url}/v1/datasets responded with {status}: <html>")
    assert text.endswith(f"Check that {url} is the URL of a loader server")
    assert " gateway " in text
    assert text.isprintable()
    assert len(text) < 500


def test_at_first_contact_a_page_is_an_error_that_shows_it() -> None:
    """A response with status 200 that is not JSON also raises an error with a harmless excerpt."""
    with (
        raw_server(lambda connection, _: connection.sendall(response(200, PAGE))) as url,
        pytest.raises(ProtocolError, match=r"is not JSON: <html>.* gateway ") as raised,
    ):
        RemoteDataset(url, reconnect_timeout=30)
    assert str(raised.value).isprintable()


def test_at_first_contact_a_loader_server_that_starts_is_waited_for() -> None:
    """A 503 with a loader server's code is not the response of another server."""
    asked: list[str] = []

    def answer(connection: socket.socket, path: str) -> None:
        asked.append(path)
        content = json.dumps([]).encode()
        connection.sendall(problem(503, "ServerUnavailable") if len(asked) < 3 else response(200, content))

    with raw_server(answer) as url, pytest.raises(TeleloaderError, match="hosts no datasets"):
        RemoteDataset(url, reconnect_timeout=30)
    assert len(asked) == 3


def test_at_first_contact_another_server_of_several_is_left_out() -> None:
    """A dataset is loaded from the servers that respond as loader servers do; a warning names the others."""
    with (
        raw_server(lambda connection, _: connection.sendall(response(502))) as other,
        fake_server(Request.right) as url,
    ):
        dataset = RemoteDataset([other, url], reconnect_timeout=30)
        assert [batch[0].tolist() for batch in DataLoader(dataset, output="numpy")] == RIGHT
    with raw_server(lambda connection, _: connection.sendall(response(502))) as other, pytest.raises(ProtocolError):
        RemoteDataset([other, f"{other}/"], reconnect_timeout=30)


# --- Slow servers -------------------------------------------------------------------------------------------------

STALL_TIMEOUT = 2.0
SLOW = 0.6 * STALL_TIMEOUT
"""Response time of a health check, longer than half of `stall_timeout`."""


class Slow:
    """Server on a busy machine.

    Args:
        registers_slowly: Whether it has been slow since the loader was registered.
    """

    def __init__(self, *, registers_slowly: bool) -> None:
        self._registers_slowly = registers_slowly
        self._checked = threading.Semaphore(0)

    def delay(self) -> None:
        """Wait as long as a busy machine needs for a small response."""
        threading.Event().wait(SLOW)

    def check(self) -> None:
        """Respond to a health check."""
        self.delay()
        self._checked.release()

    def register(self) -> int:
        """Respond to a registration."""
        if self._registers_slowly:
            self.delay()
        return 200

    def batches(self, request: Request) -> bytes:
        """Send a batch to a client that has waited for a health check and longer."""
        if request.start == 0:
            while self._checked.acquire(blocking=False):
                pass
            self._checked.acquire(timeout=30)
            self.delay()
        return request.right()


@pytest.mark.parametrize("registers_slowly", [True, False])
def test_the_client_waits_for_a_server_with_slow_health_checks(registers_slowly: bool) -> None:
    """A server whose health checks take longer than half of `stall_timeout` is not repeatedly taken for unavailable.

    The client waits for a response at least twice as long as recent responses took. It therefore never disconnects from
    a server that has always been slow, and at most once from one that becomes slow, whose batch then arrives at the
    second attempt.
    """
    slow = Slow(registers_slowly=registers_slowly)
    with fake_server(slow.batches, registering=slow.register, checked=slow.check) as url:
        timeout = 0 if registers_slowly else 20
        assert epoch(url, stall_timeout=STALL_TIMEOUT, reconnect_timeout=timeout) == RIGHT


@pytest.mark.parametrize(
    ("content", "expected"),
    [(response(200, b"{}"), True), (response(404), True), (response(429), True), (response(401), True),
     (response(502), False), (response(503), False), (b"", False), (response(200, b"x" * 10**6), True)],
    ids=["200", "404", "429", "401", "502", "503", "nothing", "page"],
)  # fmt: skip
def test_a_server_is_alive_unless_a_proxy_says_that_it_is_not(content: bytes, expected: bool) -> None:
    """Every response shows that the server is alive, except a 5xx, with which a proxy reports that it is not."""
    with raw_server(lambda connection, _: connection.sendall(content)) as url:
        assert Server(url, 5).is_alive() is expected


def test_a_batch_that_begins_during_the_health_check_is_received() -> None:
    """A failed health check is ignored if the batch has started to arrive in the meantime."""
    sent = threading.Event()
    checks: list[None] = []

    def unhealthy() -> None:
        checks.append(None)
        sent.wait(30)
        threading.Event().wait(1.5)  # longer than the client waits before it notices the batch

    def late(request: Request) -> bytes | Callable[[socket.socket], object]:
        if request.start > 0:
            return request.right()

        def send(connection: socket.socket) -> None:
            while not checks:
                threading.Event().wait(0.01)
            connection.sendall(response(200, request.right()))
            sent.set()

        return send

    with fake_server(late, checked=unhealthy) as url:
        assert epoch(url, stall_timeout=1.0, reconnect_timeout=0) == RIGHT


def test_a_request_without_a_file_descriptor_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has no file descriptor left for a moment retries, as after a broken connection."""
    stream, failures = httpx.Client.stream, iter([OSError(errno.EMFILE, "Too many open files")])

    def without_descriptors(self: httpx.Client, *arguments: Any, **options: Any) -> Any:
        for error in failures:
            raise error
        return stream(self, *arguments, **options)

    with fake_server(Request.right) as url:
        dataset = RemoteDataset(url, reconnect_timeout=30)
        monkeypatch.setattr(httpx.Client, "stream", without_descriptors)
        assert [batch[0].tolist() for batch in DataLoader(dataset, output="numpy")] == RIGHT
    assert next(failures, None) is None
