"""Requests for batches in the calling thread, over connections that stay open between requests."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Final

from teleloader.tensors.memory import HostBuffers
from teleloader.tensors.output import choose_output
from teleloader.transport.interface import BatchServer, Connection, TransportError
from teleloader.transport.request import BatchRequest
from teleloader.transport.response import decode
from teleloader_shared.buffers import BufferPool
from teleloader_shared.codec import DEFAULT_MAX_BATCH_BYTES, BatchId, Frame
from teleloader_shared.errors import CorruptFrame, ServerUnavailable
from teleloader_shared.messages import READY_BYTES, ConsumerReport
from teleloader_shared.ranges import MAX_RANGES, BatchRanges
from teleloader_shared.text import sentence

_NO_REPORT: Final = ConsumerReport(elapsed=0.0, waited=0.0, taken=0, reconnects=0, hedges=0)
"""Report of a request without a training loop."""


class ConnectionPool:
    """Pool of connections to one server for the batches of one epoch; thread-safe.

    Concurrent calls use separate connections. Idle connections are closed when the pool is garbage-collected. A pool
    belongs to the process that created it: a forked child must create another one.

    Args:
        server: Server to connect to.
        key: Key of a loader that is registered with the server, without a client-side sampler or shards.
        epoch: Epoch number.
        consumer: Name of the consumer in the server's statistics.
    """

    def __init__(self, server: BatchServer, key: str, epoch: int, consumer: str) -> None:
        self.server: Final = server
        self._key = key
        self._epoch = epoch
        self._consumer = consumer
        self._buffers = HostBuffers(choose_output(None), BufferPool())
        self._pid = os.getpid()
        # no lock: append and pop are atomic, and a lock could be held by another thread while the process forks
        self._idle: list[Connection] = []
        weakref.finalize(self, _close, self._idle)

    @property
    def is_own(self) -> bool:
        """False in a forked child of the process that created the pool."""
        return self._pid == os.getpid()

    def fetch(self, numbers: BatchRanges) -> list[Frame]:
        """Fetch batches with as few requests as possible.

        Args:
            numbers: Batches to fetch.

        Raises:
            ServerUnavailable: If the connection broke, or a response was damaged.
            UnknownLoader: If the loader is not registered with the server.
        """
        frames: list[Frame] = []
        connection: Connection | None = None
        try:
            connection = self._take()
            while len(frames) < len(numbers):
                missing = BatchRanges.of(numbers[len(frames) :])
                wanted = BatchRanges(*missing.ranges[:MAX_RANGES])
                connection.send(BatchRequest(wanted))
                memory = connection.receive(self._buffers, len(wanted), DEFAULT_MAX_BATCH_BYTES + READY_BYTES)
                frames += decode(
                    memory, BatchId(self._key, self._epoch, 0), wanted, DEFAULT_MAX_BATCH_BYTES,
                    verified=connection.verified, has_shards=False,
                )  # fmt: skip
        except BaseException as error:
            if connection is not None:
                connection.close()
            if not isinstance(error, TransportError | CorruptFrame):
                raise
            number, why = numbers[len(frames)], sentence(str(error)) or type(error).__name__
            raise ServerUnavailable(f"{self.server.url} did not send batch {number}: {why}") from error
        self._idle.append(connection)
        return frames

    def _take(self) -> Connection:
        """Return an idle connection that is usable, else a new connection."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread has taken the last one
                break
            if connection.is_usable:
                return connection
            connection.close()
        return self.server.connect(self._key, self._epoch, self._consumer, lambda: _NO_REPORT)


def _close(connections: Iterable[Connection]) -> None:
    for connection in connections:
        connection.close()
