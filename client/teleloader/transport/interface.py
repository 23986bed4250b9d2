"""Client-side interface of transports: a `BatchServer` connects to a server, a `Connection` receives batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from typing import Final, Protocol

from teleloader.api.control import Server, confirmed
from teleloader.tensors.memory import HostBuffers
from teleloader.tensors.output import choose_output
from teleloader.transport.request import BatchRequest
from teleloader.transport.response import decode
from teleloader.transport.tracing import RequestTrace
from teleloader_shared.buffers import BufferPool
from teleloader_shared.codec import DEFAULT_MAX_BATCH_BYTES, BatchId, Frame, Memory
from teleloader_shared.errors import CorruptFrame, ServerUnavailable
from teleloader_shared.messages import READY_BYTES, ConsumerReport
from teleloader_shared.ranges import MAX_RANGES, BatchRanges
from teleloader_shared.text import sentence

_NO_REPORT: Final = ConsumerReport(elapsed=0.0, waited=0.0, taken=0, reconnects=0, hedges=0)
"""Report of a request without a training loop."""


class TransportError(Exception):
    """A connection broke or received an invalid response; the request is retried on another connection."""


class SilentConnection(TransportError):
    """A connection received no data although the server is available; only the connection is replaced."""


class Connection(Protocol):
    """Interface of a connection for the batches of one epoch, with one request at a time."""

    trace: RequestTrace | None
    """Span of the last request; None if tracing is disabled."""
    first_byte: int
    """Arrival time of the first byte of the last response, as ``time.time_ns()``."""

    verified: int
    """Size of the frames at the start of the last response whose checksums need not be verified: they were verified
    while they arrived, or they are in shared memory and were not transmitted."""

    @property
    def is_usable(self) -> bool:
        """False if the connection is known to be broken or closed, for example after an idle timeout."""

    def send(self, wanted: BatchRequest, trace: RequestTrace | None = None) -> None:
        """Send a request for batches; `receive` returns the response.

        Args:
            wanted: Batches to request.
            trace: Span of this request; None if tracing is disabled.

        Raises:
            TransportError: If the connection broke.
        """

    def receive(self, buffers: HostBuffers, batches: int, max_bytes: int) -> Memory:
        """Receive the response: the frames of one or more of the first requested batches.

        Args:
            buffers: Allocator of the memory to receive into.
            batches: Number of requested batches.
            max_bytes: Maximum size of the response.

        Raises:
            TransportError: If the connection broke, or the response is truncated or malformed.
            SilentConnection: If no data arrives for a long time although the server is available.
            ServerUnavailable: If no data arrives and the server does not respond to a health check, or if the server
                temporarily refused the request; `retry_after` is the wait that it requested.
            TeleloaderError: If the server refused the request for another reason.
        """

    def shut_down(self) -> None:
        """Shut the connection down; may be called from any thread, and waiting calls raise `TransportError`."""

    def close(self) -> None:
        """Release the resources of the connection; may be called again."""


class BatchServer(Server, ABC):
    """Base class of loader server clients with a batch transport; inherits the control requests of `Server`."""

    @confirmed
    def batches(self, key: str, epoch: int, numbers: BatchRanges, *, consumer: str) -> list[Frame]:
        """Fetch batches in the calling thread, over one connection with as few requests as possible.

        Args:
            key: Key of the loader, which must not have a client-side sampler or shards.
            epoch: Epoch number.
            numbers: Batches to fetch.
            consumer: Name of the consumer in the server's statistics.

        Raises:
            ServerUnavailable: If the connection broke, or a response was damaged.
            UnknownLoader: If the loader is not registered with the server.
        """
        frames: list[Frame] = []
        buffers = HostBuffers(choose_output(None), BufferPool())
        try:
            with closing(self.connect(key, epoch, consumer, lambda: _NO_REPORT)) as connection:
                while len(frames) < len(numbers):
                    missing = BatchRanges.of(numbers[len(frames) :])
                    wanted = BatchRanges(*missing.ranges[:MAX_RANGES])
                    connection.send(BatchRequest(wanted))
                    memory = connection.receive(buffers, len(wanted), DEFAULT_MAX_BATCH_BYTES + READY_BYTES)
                    frames += decode(
                        memory, BatchId(key, epoch, 0), wanted, DEFAULT_MAX_BATCH_BYTES,
                        verified=connection.verified, has_shards=False,
                    )  # fmt: skip
        except (TransportError, CorruptFrame) as error:
            number, why = numbers[len(frames)], sentence(str(error)) or type(error).__name__
            raise ServerUnavailable(f"{self.url} did not send batch {number}: {why}") from error
        return frames

    @abstractmethod
    def connect(self, key: str, epoch: int, consumer: str, report: Callable[[], ConsumerReport]) -> Connection:
        """Open a connection for the batches of one epoch.

        Args:
            key: Key of the loader.
            epoch: Epoch number.
            consumer: Name of the iterator in the server's statistics.
            report: Returns the `ConsumerReport` to send with each request.

        Raises:
            TransportError: If the server is unreachable.
            TlsError: If the server's certificate cannot be verified.
        """
