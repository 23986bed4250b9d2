"""Contract of transports: each follows the rules of `teleloader.transport.interface`."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from teleloader.api.credentials import Credentials
from teleloader.sampling import index_frame
from teleloader.tensors.memory import HostBuffers
from teleloader.testing import FakeServer
from teleloader.transport import http
from teleloader.transport.interface import BatchServer, Connection, TransportError
from teleloader.transport.request import BatchRequest
from teleloader.transport.selection import server_at
from teleloader.transport.tracing import RequestTrace
from teleloader_server import serve
from teleloader_shared import codec
from teleloader_shared.buffers import BufferPool
from teleloader_shared.codec import BatchId, Frame
from teleloader_shared.errors import ProtocolError, TeleloaderError, UnknownLoader
from teleloader_shared.messages import ConsumerReport
from teleloader_shared.ranges import BatchRanges
from teleloader_shared.spec import LoaderSpec
from tests.conftest import need

SPEC = LoaderSpec(dataset="dataset", batch_size=2)
REPORT = ConsumerReport(0, 0, 0, 0, 0)
MAX_BYTES = 2**20


class Held(list[int]):
    """Dataset that waits before sample 4."""

    def __init__(self) -> None:
        super().__init__(range(8))
        self.reached, self.going_on = threading.Event(), threading.Event()

    def __getitem__(self, index: Any) -> Any:
        if index == 4:
            self.reached.set()
            self.going_on.wait(30)
        return super().__getitem__(index)


@contextmanager
def hosted(transport: str, dataset: Any) -> Iterator[BatchServer]:
    """Run a server that hosts a dataset, with a transport."""
    if transport == "http":
        with serve(dataset, num_workers=0) as url:
            yield server_at(url, 10, Credentials())
    else:
        with FakeServer({"dataset": dataset}) as fake:
            yield server_at(fake.url, 10, Credentials())


@pytest.fixture(params=["http", "fake"])
def transport(request: pytest.FixtureRequest) -> str:
    """Return a transport."""
    return str(request.param)


def connected(server: BatchServer, spec: LoaderSpec = SPEC) -> Connection:
    """Open a connection for a registered loader."""
    return server.connect(server.register(spec, 0).key, 0, "test", lambda: REPORT)


def received(connection: Connection, wanted: BatchRequest, max_bytes: int = MAX_BYTES) -> list[Frame]:
    """Return the frames of the response to one request."""
    connection.send(wanted)
    buffers = HostBuffers("numpy", BufferPool())
    return list(codec.read_all(connection.receive(buffers, len(wanted.batches), max_bytes)))


@pytest.mark.parametrize("batches", [BatchRanges(range(3)), BatchRanges(range(1), range(2, 4))], ids=str)
def test_a_response_has_the_first_batches_of_its_request(transport: str, batches: BatchRanges) -> None:
    """A response has at least one batch, and only requested ones; further requests use the same connection."""
    with hosted(transport, list(range(8))) as server:
        connection = connected(server)
        found: list[Frame] = []
        while len(found) < 3:
            frames = received(connection, BatchRequest(batches.within(batches[len(found)], batches.stop)))
            assert 0 < len(frames) <= 3 - len(found)
            assert connection.first_byte > 0
            found += frames
            assert connection.is_usable
        connection.close()
    assert [frame.batch_id.batch for frame in found] == list(batches)
    assert [frame.content.tolist() for frame in found] == [[2 * k, 2 * k + 1] for k in batches]


def test_the_indices_of_a_client_side_sampler_are_sent(transport: str) -> None:
    """The request contains one frame of indices for each batch of the range."""
    spec = replace(SPEC, order="client", session="s", batch_size=1)
    lists = {1: [7, 5], 2: [0, 0], 9: [1]}
    with hosted(transport, list(range(8))) as server:
        connection = connected(server, spec)
        listed = b"".join(index_frame(BatchId(server.register(spec, 0).key, 0, k), lists[k]) for k in lists)
        frames = received(connection, BatchRequest(BatchRanges.of(lists), listed=listed))
        assert [frame.content.tolist() for frame in frames] == list(lists.values())[: len(frames)]
        connection.close()
        server.end_session(server.register(spec, 0).key)


def test_a_tls_connection_does_not_load_the_cas_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TLS connection uses the TLS context of the dataset's credentials, and creates none."""
    monkeypatch.setattr(ssl, "_create_default_https_context", None)
    connection = http._SecureConnection("a", server_at("https://a", 1.0, Credentials()))
    assert (connection.host, connection.port) == ("a", 443)


def test_a_connection_that_another_thread_breaks_raises(transport: str) -> None:
    """The thread that waits for a response gets the error, as does each further request."""
    dataset = Held()
    with hosted(transport, dataset) as server:
        connection = connected(server)

        def abort() -> None:
            dataset.reached.wait(30)
            connection.shut_down()
            dataset.going_on.set()

        thread = threading.Thread(target=abort)
        thread.start()
        with pytest.raises(TransportError):
            received(connection, BatchRequest(BatchRanges(range(2, 3))))
        thread.join()
        assert not connection.is_usable
        with pytest.raises(TransportError):
            received(connection, BatchRequest(BatchRanges(range(0, 1))))
        connection.close()
        connection.close()
        other = connected(server)
        assert received(other, BatchRequest(BatchRanges(range(2, 3))))[0].content.tolist() == [4, 5]
        other.close()


def test_a_response_beyond_the_limit_is_refused(transport: str) -> None:
    """The error, which names the setting, is raised before memory is allocated for the response."""
    with hosted(transport, [np.zeros(1000)] * 2) as server:
        connection = connected(server)
        with pytest.raises(ProtocolError, match="increase max_batch_bytes"):
            received(connection, BatchRequest(BatchRanges(range(0, 1))), 1000)
        connection.close()


def test_a_large_response_is_hashed_while_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are hashed piece by piece, from the processor's cache, and not once the response is complete."""
    steps: list[int] = []
    advance = codec.ArrivingFrame.advance

    def recorded(arriving: codec.ArrivingFrame, filled: int) -> None:
        steps.append(filled - sum(steps))
        advance(arriving, filled)

    monkeypatch.setattr(codec.ArrivingFrame, "advance", recorded)
    with serve([np.zeros(2**21, np.uint8)] * 2, num_workers=0) as url:
        connection = connected(server_at(url, 10, Credentials()))
        (frame,) = received(connection, BatchRequest(BatchRanges(range(0, 1))), 2**23)
        assert connection.verified == frame.nbytes
        connection.close()
    assert sum(steps) == frame.nbytes
    assert max(steps) <= http.PIECE_BYTES


def test_an_unknown_loader_is_refused(transport: str) -> None:
    """An unknown loader raises an error of teleloader, not a connection error."""
    with hosted(transport, [1, 2]) as server:
        connection = server.connect("0" * 32, 0, "test", lambda: REPORT)
        with pytest.raises(UnknownLoader) as raised:
            received(connection, BatchRequest(BatchRanges(range(0, 1))))
        assert isinstance(raised.value, TeleloaderError)
        connection.close()


def test_a_closed_server_is_unreachable(transport: str) -> None:
    """A new connection to a closed server raises the same error as a broken connection."""
    with hosted(transport, [1, 2]) as server:
        pass
    with pytest.raises(TransportError):
        server.connect("0" * 32, 0, "test", lambda: REPORT)


def test_an_http_connection_that_fails_to_open_has_a_cause_and_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds if it is refused, and if the system rejects a socket option."""
    with hosted("http", list(range(8))) as server:
        key = server.register(SPEC, 0).key
        before = http._open.copy()
        monkeypatch.setattr(http, "KEEPALIVE_OPTIONS", (("TCP_KEEPCNT", -1),))
        with pytest.raises(TransportError) as caught:
            server.connect(key, 0, "test", lambda: REPORT)
        assert isinstance(caught.value.__cause__, OSError)
        assert http._open == before
    with pytest.raises(TransportError) as caught:
        server.connect(key, 0, "test", lambda: REPORT)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_the_span_of_a_broken_request_records_the_cause() -> None:
    """The span has the socket's exception, whose type users search for, or the error itself without a cause."""
    need("opentelemetry")
    cause = ConnectionResetError("connection reset by peer")
    broken = TransportError("connection reset by peer")
    broken.__cause__ = cause
    for error, recorded in ((broken, cause), (TransportError("ended early"), None)):
        span = Mock()
        RequestTrace(span).broke(error)
        span.record_exception.assert_called_once_with(recorded or error)
        span.end.assert_called_once()
