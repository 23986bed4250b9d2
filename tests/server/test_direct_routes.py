"""Direct routes: their parameters are validated as by FastAPI, and requests that wait end with their client."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import Mock, call

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter, ValidationError
from starlette.datastructures import QueryParams

from teleloader_server.dispatch.service import LoaderService
from teleloader_server.limits import Limits
from teleloader_server.loading.datasets import host
from teleloader_server.problems import HttpProblem
from teleloader_server.web.app import create_app
from teleloader_server.web.batches import AHEAD, CONSUMER, EPOCH, RANGES, READY
from teleloader_server.web.direct_routes import Parameter, headers_of, query_of
from teleloader_server.web.guard_transport import MAX_JOINED_BYTES, JoiningTransport, write_joined
from teleloader_server.workers.factory import ObjectPools
from teleloader_shared.codec import BatchId, to_bytes
from teleloader_shared.spec import MAX_EPOCH
from tests.conftest import StartServer, eventually
from tests.raw import HOST, Raw

TEXTS = st.text() | st.integers().map(str) | st.sampled_from(["0", "007", str(MAX_EPOCH - 1), str(MAX_EPOCH), "-0"])
PATH = "/v1/loaders/KEY/epochs/0/batches"


@given(TEXTS)
def test_integers_are_those_of_fastapi(text: str) -> None:
    """FastAPI accepts an accepted integer with the same value, and rejects a decimal number that is rejected."""
    value: int | None = None
    oracle: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(ge=0, lt=MAX_EPOCH)])
    with suppress(ValidationError):
        value = oracle.validate_python(text)
    with suppress(HttpProblem):
        assert EPOCH.of({"epoch": text}) == value
        return
    assert value is None or not (text.isascii() and text.isdigit()) or len(text) > 19


@given(st.text(max_size=5) | st.sampled_from(["true", "TRUE", "True", "1", "0", "off", "No", "y", "t", "f", "2"]))
def test_booleans_are_those_of_fastapi(text: str) -> None:
    """FastAPI accepts the same texts, with the same values."""
    oracle = TypeAdapter(bool)
    try:
        expected = oracle.validate_python(text)
    except ValidationError:
        with pytest.raises(HttpProblem, match=r"query\.ready: expected true or false"):
            READY.of({"ready": text})
        return
    assert READY.of({"ready": text}) is expected


@given(st.text("ab=&%+2C0", max_size=20) | st.binary(max_size=20).map(lambda raw: raw.decode("latin-1")))
def test_a_query_is_parsed_as_by_starlette(text: str) -> None:
    """Names and values are decoded alike, and the last of several equal names counts."""
    assert query_of({"query_string": text.encode("latin-1")}) == dict(QueryParams(text))


def test_the_first_of_equal_headers_counts() -> None:
    """Starlette also returns the first one."""
    assert headers_of({"headers": [(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]}) == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("parameter", "values", "problem"),
    [
        (RANGES, {}, "query.ranges: missing, and required"),
        (AHEAD, {"ahead": "x"}, f"query.ahead: expected an integer in [0, {MAX_EPOCH}), got 'x'"),
        (READY, {"ready": "maybe"}, "query.ready: expected true or false, got 'maybe'"),
        (CONSUMER, {"teleloader-consumer": "x" * 201}, "header.Teleloader-Consumer: expected at most 200 characters"),
    ],
)
def test_an_invalid_parameter_is_named(parameter: Parameter[Any], values: dict[str, str], problem: str) -> None:
    """The message contains the parameter, its value and what is expected."""
    with pytest.raises(HttpProblem) as raised:
        parameter.of(values)
    assert (raised.value.status, raised.value.code) == (422, "InvalidRequest")
    assert problem in raised.value.detail


def test_missing_parameters_have_the_described_defaults() -> None:
    """The OpenAPI description contains the default that a missing parameter has."""
    for parameter in (AHEAD, READY, CONSUMER):
        assert parameter.openapi["schema"]["default"] == parameter.of({})
        assert not parameter.openapi["required"]
    assert RANGES.openapi["required"]


async def test_an_unexpected_exception_has_a_response_and_a_log_entry(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors of direct routes are handled as errors of other routes."""
    limits = Limits()
    service = LoaderService(ObjectPools(lambda: {"x": host([1], name="x")}, limits), limits)

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(service, "batches", fail)
    transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        response = await client.get(f"{PATH}?ranges=0:1&ready=true")
    assert (response.status_code, response.json()["code"]) == (500, "InternalError")
    assert "broken" in caplog.text


@pytest.mark.parametrize("what", ["/0", "?ranges=0:8&ready=true", "?ranges=0:8", "index lists"])
def test_a_request_that_waits_ends_when_its_client_disconnects(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    """The server closes the request, although its batches are never computed."""
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    server = start_server("tests.end_to_end.hosted:slow", "--num-workers", "1")
    spec = {"dataset": "slow", "batch_size": 1}
    with httpx.Client(base_url=server.url, trust_env=False) as client:

        def waiting() -> float:
            """Return the seconds for which requests have waited, which increase while one waits."""
            return sum(float(consumer["waiting"]) for consumer in client.get("/stats").json()["consumers"])

        def is_waiting() -> bool:
            before = waiting()
            time.sleep(0.05)
            return waiting() > before

        if what == "index lists":
            spec |= {"order": "client", "session": "s"}
        key = client.post("/v1/loaders", json=spec).json()["key"]
        path = PATH.replace("KEY", key)
        with Raw(server.url) as other:
            if what == "index lists":
                body = to_bytes(BatchId(key, 0, 0), [1])
                other.send(f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n".encode() + HOST + b"\r\n" + body)
            else:
                other.send_get(path + what)
            eventually(is_waiting)
        eventually(lambda: not is_waiting())


def test_a_small_response_is_one_write(start_server: StartServer) -> None:
    """The head and the frames of a small response arrive together, and those of the next response after them."""
    server = start_server("tests.end_to_end.hosted:numbers", "--num-workers", "1")
    key = httpx.post(f"{server.url}/v1/loaders", json={"dataset": "numbers"}, trust_env=False).json()["key"]
    path = f"{PATH.replace('KEY', key)}?ranges=0:2&ready=true"
    with Raw(server.url) as client:
        for _ in range(2):
            client.send_get(path)
            head, _, body = client.socket.recv(2**16).partition(b"\r\n\r\n")
            assert f"content-length: {len(body)}\r\n".encode() in head
            assert body


def test_only_the_head_of_a_response_is_held() -> None:
    """Data is held once per request to hold it, and written before the data that follows."""
    transport = Mock()
    joining = JoiningTransport(transport)
    joining.write(b"a")
    joining.hold_next()
    joining.write(b"b")
    assert transport.mock_calls == [call.write(b"a")]
    joining.write(b"c")
    joining.write(b"d")
    joining.close()
    assert transport.mock_calls[1:] == [call.writelines([b"b", b"c"]), call.write(b"d"), call.close()]


def test_a_head_is_not_joined_with_large_data() -> None:
    """Joining copies the data on an asyncio event loop."""
    transport = Mock()
    for size in (MAX_JOINED_BYTES, MAX_JOINED_BYTES + 1):
        write_joined(transport, b"head", bytes(size))
    together, *separate = transport.mock_calls
    assert together == call.writelines([b"head", bytes(MAX_JOINED_BYTES)])
    assert separate == [call.write(b"head"), call.write(bytes(MAX_JOINED_BYTES + 1))]
