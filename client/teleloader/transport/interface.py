"""Interface of a transport: a `BatchServer` opens each `Connection`, on which ranges of batches are received."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from teleloader.api.control import Server
from teleloader.tensors.memory import HostBuffers
from teleloader.transport.range import Range
from teleloader.transport.tracing import RequestTrace
from teleloader_shared.codec import Memory
from teleloader_shared.messages import ConsumerReport


class TransportError(Exception):
    """A connection broke, or delivered anything but a response: the request is repeated on another connection."""


class SilentConnection(TransportError):
    """A connection delivers nothing although the server is available: only the connection is replaced."""


class Connection(Protocol):
    """Connection to a server, for the batches of one epoch of one loader. Requests do not overlap."""

    trace: RequestTrace | None
    """Trace of the last request; None without tracing."""
    first_byte: int
    """Arrival of the first byte of its response, as ``time.time_ns()``."""

    @property
    def is_usable(self) -> bool:
        """False if the connection is known to be broken or closed, for example because it was idle."""

    def send(self, wanted: Range, trace: RequestTrace | None = None) -> None:
        """Send the request for a range; `receive` returns the response.

        Args:
            wanted: The range.
            trace: Trace of this request; None without tracing.

        Raises:
            TransportError: If the connection broke.
        """

    def receive(self, buffers: HostBuffers, batches: int, max_bytes: int) -> Memory:
        """Return the frames of the response: the first batches of the range, at least one.

        Args:
            buffers: Provides the memory to receive into.
            batches: Batches in the range.
            max_bytes: Limit of the response, in bytes.

        Raises:
            TransportError: If the connection broke, or the response is truncated or malformed.
            SilentConnection: If nothing arrives for long although the server is available.
            ServerUnavailable: If nothing arrives and the server does not respond to a health check, or if the server
                refused the request for now; `retry_after` is the wait that it requested.
            TeleloaderError: If the server refused the request for another reason.
        """

    def shut_down(self) -> None:
        """Break the connection, from any thread: a thread that waits on it gets a `TransportError`."""

    def close(self) -> None:
        """Release the resources of the connection; may be called again."""


class BatchServer(Server, ABC):
    """Loader server with a transport for batches. Control requests are those of `Server`, unless overridden."""

    @abstractmethod
    def connect(self, key: str, epoch: int, consumer: str, report: Callable[[], ConsumerReport]) -> Connection:
        """Return a new connection.

        Args:
            key: Key of the loader.
            epoch: Number of the epoch.
            consumer: Name of the iterator in the server's statistics.
            report: Returns the report on the iterator that is sent with each request.

        Raises:
            TransportError: If the server is unreachable.
            TlsError: If the server's certificate cannot be verified.
        """
