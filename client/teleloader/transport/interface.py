"""Client-side interface of transports: a `BatchServer` connects to a server, a `Connection` receives batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol

from teleloader.api.control import Server
from teleloader.tensors.memory import HostBuffers
from teleloader.transport.request import BatchRequest
from teleloader.transport.tracing import RequestTrace
from teleloader_shared.codec import Memory
from teleloader_shared.messages import ConsumerReport


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

    wants_timings: bool
    """True if the last response requests the client's part of the server's timeline."""
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

    computes_in_background: ClassVar[bool] = True
    """True if the server computes batches of low priority without delaying others."""

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
