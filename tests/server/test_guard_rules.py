"""Limits of one connection, as functions of bytes, counts and times."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from teleloader_server.limits import ClientLimits
from teleloader_server.problems import HttpProblem
from teleloader_server.web.guard_rules import (
    MAX_URL_BYTES,
    MIN_CHUNK_BYTES,
    WEBSOCKET,
    ArrivalRate,
    Head,
    Phase,
    RequestProgress,
    SlowReader,
    check_head,
    check_pipelined,
    check_url_size,
)

LIMITS = dataclasses.replace(
    ClientLimits(),
    max_header_bytes=2000,
    max_body_bytes=10_000,
    header_timeout=10.0,
    body_timeout=5.0,
    min_body_rate=100.0,
    max_pipelined=3,
    send_timeout=60.0,
    pressure_send_timeout=2.0,
    pressure_min_send_rate=1000.0,
    lingering_time=2.0,
)
HOST = (b"host", b"localhost")
STREAM = b"/v1/loaders/KEY/stream?x=1"


def in_body() -> RequestProgress:
    """Return the progress of a request whose body begins at time 0."""
    progress = RequestProgress(LIMITS, 0.0)
    progress.enter(Phase.BODY, 0.0)
    return progress


def test_headers_determine_how_a_request_is_read() -> None:
    """Framing, Expect and Upgrade are read whatever their case; other fields are ignored."""
    headers = [HOST, (b"transfer-encoding", b"chunked"), (b"expect", b"100-Continue"), (b"x", b"y")]
    assert check_head("1.1", b"/", headers, LIMITS) == Head(is_chunked=True, expects_continue=True)
    assert check_head("1.1", STREAM, [HOST, (b"upgrade", b"WebSocket")], LIMITS).upgrade == WEBSOCKET
    assert check_head("1.0", b"/", [], LIMITS) == Head(), "HTTP/1.0 needs no Host"


REFUSED = {
    "version": ("2.0", b"/", [HOST], 505, "send HTTP/1.1"),
    "no host": ("1.1", b"/", [], 400, "0 Host headers"),
    "two hosts": ("1.0", b"/", [HOST, HOST], 400, "2 Host headers"),
    "empty host": ("1.1", b"/", [(b"host", b" ")], 400, "Host header is empty"),
    "large body": ("1.1", b"/", [HOST, (b"content-length", b"10001")], 413, "10,000 bytes .max_body_bytes."),
    "compressed": ("1.1", b"/", [HOST, (b"content-encoding", b"gzip")], 415, "'gzip' is not supported"),
    "WebSocket": ("1.1", b"/stats?/stream", [HOST, (b"upgrade", b"websocket")], 400, "/v1/loaders/KEY/stream"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_requests_that_are_not_accepted(name: str) -> None:
    """The problem has the status of the rule, the value, and what to send instead."""
    version, url, headers, status, text = REFUSED[name]
    with pytest.raises(HttpProblem, match=text) as caught:
        check_head(version, url, headers, LIMITS)
    assert caught.value.status == status


def test_a_url_has_a_limit() -> None:
    """A URL of exactly the limit is accepted."""
    check_url_size(MAX_URL_BYTES)
    with pytest.raises(HttpProblem, match="and the limit is 8,192"):
        check_url_size(MAX_URL_BYTES + 1)


def test_pipelined_requests_have_a_limit() -> None:
    """With `max_pipelined` requests pending, one more is rejected."""
    check_pipelined(2, LIMITS)
    with pytest.raises(HttpProblem, match="the connection has 3 pending requests"):
        check_pipelined(3, LIMITS)


def test_the_allowance_of_framing_is_renewed_by_content() -> None:
    """A head and the framing between two pieces of content may each have `max_header_bytes`."""
    progress = RequestProgress(LIMITS, 0.0)
    progress.add_framing(1500)
    assert progress.allowance == 500
    progress.enter(Phase.BODY, 0.0)
    assert progress.allowance == 2000
    progress.add_framing(2000)
    assert progress.allowance == 0
    progress.add_content(1)
    assert progress.allowance == 2000


@pytest.mark.parametrize(
    ("phase", "is_request_line", "status"),
    [(Phase.HEAD, False, 431), (Phase.HEAD, True, 414), (Phase.BODY, False, 431)],
)
def test_too_much_framing_names_the_limit(phase: Phase, is_request_line: bool, status: int) -> None:
    """The status distinguishes a URL from headers and trailers."""
    progress = RequestProgress(LIMITS, 0.0)
    progress.enter(phase, 0.0)
    problem = progress.too_much_framing(is_request_line=is_request_line)
    assert problem.status == status
    assert "2,000 bytes (max_header_bytes)" in problem.detail


def test_a_request_begins_with_its_first_byte() -> None:
    """A request begins with its first byte: a connection that has sent nothing has no request in progress."""
    fresh, begun = RequestProgress(LIMITS, 0.0), RequestProgress(LIMITS, 0.0)
    begun.add_framing(1)
    assert [fresh.has_begun, begun.has_begun, in_body().has_begun] == [False, True, True]


def test_content_has_a_limit() -> None:
    """A body without a Content-Length is refused at the first byte beyond `max_body_bytes`."""
    progress = in_body()
    progress.add_content(10_000)
    with pytest.raises(HttpProblem, match="max_body_bytes"):
        progress.add_content(1)


@pytest.mark.parametrize(("size", "accepted"), [(1, 260), (MIN_CHUNK_BYTES, 1000)])
def test_small_chunks_have_a_limit(size: int, accepted: int) -> None:
    """256 chunks may have any size, and each 64 bytes of content allow one more."""
    progress = RequestProgress(dataclasses.replace(LIMITS, max_body_bytes=2**20), 0.0)
    count = 0
    with contextlib.suppress(HttpProblem):
        while count < 1000:
            progress.add_content(size)
            count += 1
    assert count == accepted


def test_a_head_has_a_deadline() -> None:
    """`header_timeout` counts from the connection or the last restart; an idle connection has no deadline."""
    progress = RequestProgress(LIMITS, 100.0)
    assert progress.problem(110.0) is None
    late = progress.problem(110.1)
    assert late is not None
    assert (late.status, "10 s (header_timeout)" in late.detail) == (408, True)
    progress.restart(110.0)
    assert progress.problem(120.0) is None
    progress.enter(Phase.IDLE, 120.0)
    assert progress.problem(1000.0) is None


def test_a_body_has_a_rate() -> None:
    """Each interval of `body_timeout` needs `min_body_rate`; a fast interval does not excuse a slow one."""
    progress = in_body()
    progress.add_content(1000)
    assert progress.problem(5.0) is None, "the interval has not ended"
    assert progress.problem(5.1) is None
    progress.add_content(400)
    slow = progress.problem(10.2)
    assert slow is not None
    assert (slow.status, "100 bytes/s (min_body_rate)" in slow.detail) == (408, True)


def test_a_rate_is_not_measured_while_the_server_does_not_read() -> None:
    """A restart begins an interval."""
    rate = ArrivalRate(LIMITS, 0.0)
    rate.restart(5.0)
    assert rate.problem(10.0, "a message") is None
    assert rate.problem(10.1, "a message") is not None


def test_a_refused_client_has_time_to_read_the_response() -> None:
    """The connection is closed after `lingering_time`."""
    progress = in_body()
    assert not progress.has_lingered(100.0)
    progress.enter(Phase.REFUSED, 100.0)
    assert progress.problem(1000.0) is None
    assert not progress.has_lingered(102.0)
    assert progress.has_lingered(102.1)


def test_a_reader_must_read_something_in_time() -> None:
    """Any change of the unread bytes restarts the clock; without unread bytes there is none."""
    reader = SlowReader(LIMITS)
    assert not reader.is_too_slow(0.0, 0, 60.0)
    assert not reader.is_too_slow(1000.0, 5000, 60.0)
    assert not reader.is_too_slow(1060.0, 5000, 60.0)
    assert not reader.is_too_slow(1060.1, 4999, 60.0)
    assert reader.is_too_slow(1120.2, 4999, 60.0)
    assert not reader.is_too_slow(1121.0, 0, 60.0)


@pytest.mark.parametrize(("read", "is_too_slow"), [(1900, True), (2100, False)])
def test_a_reader_has_a_rate_under_pressure(read: int, is_too_slow: bool) -> None:
    """Under pressure, a client must read at `pressure_min_send_rate` over each `pressure_send_timeout`."""
    reader = SlowReader(LIMITS)
    assert not reader.is_too_slow(100.0, 50_000, 2.0)
    assert not reader.is_too_slow(101.0, 50_000 - read // 2, 2.0)
    assert reader.is_too_slow(102.0, 50_000 - read, 2.0) == is_too_slow


def test_a_reader_has_no_rate_without_pressure() -> None:
    """While its principal leaves little unread, a client may read as slowly as `send_timeout` allows."""
    reader = SlowReader(LIMITS)
    for second in range(100):
        assert not reader.is_too_slow(100.0 + second, 50_000 - second, 60.0)
