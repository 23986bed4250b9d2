"""All connections of a server: their number, the memory of unauthenticated ones, and regular checks of each."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections import Counter
from contextlib import suppress
from typing import Final, Protocol

from teleloader_server.auth.authenticator import Authenticator
from teleloader_server.config import ClientLimits, ConfigError
from teleloader_server.dispatch.quotas import BodyBudget, Quota
from teleloader_shared.units import counted

OWN_FILES: Final = 64
"""Descriptors for the event loop, the files of datasets, and anything else."""
FILES_PER_WORKER: Final = 4
"""Descriptors for a worker's channel and the memory that passes through it."""
MIN_CONNECTIONS: Final = 64
"""Connections without which a server is not useful."""

CONNECTION_BYTES: Final = 16 * 2**10
"""Memory of an idle connection, rounded up: transport, parsers, protocols and the last request."""
REQUEST_BYTES: Final = 8 * 2**10
"""Memory of a request besides its received bytes, rounded up: scope, task and response."""
FIELD_BYTES: Final = 256
"""Memory of a header field besides its bytes, rounded up: a tuple and two bytes objects."""
LOG_INTERVAL_S: Final = 10.0
"""Seconds between two log lines about closed connections."""

logger = logging.getLogger(__name__)


class ManagedConnection(Protocol):
    """Interface of a connection, HTTP or WebSocket, to the `ConnectionManager`."""

    @property
    def is_responding(self) -> bool:
        """True if a response is incomplete."""

    @property
    def has_requested(self) -> bool:
        """True if the client has sent a request; if not, its first request may be in transit."""

    @property
    def address(self) -> str:
        """IP address of the client."""

    @property
    def quota(self) -> Quota | None:
        """Quota of the principal of the last request; None if that request was not authenticated."""

    def check(self, now: float) -> None:
        """Enforce the limits of time and rate."""

    def shutdown(self) -> None:
        """Close once all requests have their responses."""

    def break_off(self) -> None:
        """Close and discard what was not sent."""


class ConnectionManager:
    """Connections of one server.

    Args:
        limits: Limits of the server.
        authenticator: Knows the tokens. On a server without tokens, every request counts as authenticated.
    """

    def __init__(self, limits: ClientLimits, authenticator: Authenticator) -> None:
        self.limits = limits
        self.unfinished = BodyBudget(
            limits.max_buffered_request_bytes // 4, lambda: len(authenticator.tokens.entries) > 1
        )
        """Memory of WebSocket messages that have not been received completely."""
        self._authenticator = authenticator
        self.draining = False
        """True if connections close after their response."""
        self.connections: set[ManagedConnection] = set()
        self._unauthenticated: dict[ManagedConnection, int] = {}
        """Bytes of memory of each connection without an authenticated request, the oldest connection first."""
        self._unauthenticated_bytes = 0
        self._closed: Counter[str] = Counter()
        """Number of connections closed for each reason since the last log line."""
        self._logged_at = -LOG_INTERVAL_S
        self._by_address: Counter[str] = Counter()
        shortest = min(limits.header_timeout, limits.body_timeout, limits.send_timeout, limits.lingering_time)
        self._interval = min(1.0, shortest / 4)
        """Seconds between two checks."""

    def admit(self, connection: ManagedConnection) -> str | None:
        """Manage a new connection; return the reason to refuse it if there is no room."""
        self.connections.add(connection)
        address = connection.address
        self._by_address[address] += 1
        self._unauthenticated[connection] = 0
        self.charge(connection, CONNECTION_BYTES)
        limits = self.limits
        if len(self.connections) > limits.max_connections and not self._evict(connection):
            most = counted(limits.max_connections, "connection")
            return f"the server has {most}, its limit (max_connections): try later"
        if self._by_address[address] > limits.max_connections_per_address and not self._evict(connection, address):
            most = counted(limits.max_connections_per_address, "connection")
            return f"{address} has {most}, its limit on this server (max_connections_per_address): close some"
        return None

    def leave(self, connection: ManagedConnection) -> None:
        """Forget a closed connection."""
        if connection in self.connections:
            self.connections.discard(connection)
            self._stop_counting(connection)
            self._by_address[connection.address] -= 1
            if not self._by_address[connection.address]:
                del self._by_address[connection.address]

    def charge(self, connection: ManagedConnection, nbytes: int) -> None:
        """Count memory of an unauthenticated connection, and close the oldest ones beyond the limit.

        Authenticated connections are not counted here: the quotas of their principals apply.

        Args:
            connection: The connection.
            nbytes: Additional bytes; less than 0 for bytes that were released.
        """
        if connection not in self._unauthenticated:
            return
        if self._is_authenticated(connection):
            self._stop_counting(connection)
            return
        self._unauthenticated[connection] += nbytes
        self._unauthenticated_bytes += nbytes
        while self._unauthenticated_bytes > self.limits.max_unauthenticated_bytes:
            self._evict()

    def settle(self, connection: ManagedConnection, nbytes: int) -> None:
        """Set the memory of an unauthenticated connection to `nbytes`."""
        self.charge(connection, nbytes - self._unauthenticated.get(connection, 0))

    def _is_authenticated(self, connection: ManagedConnection) -> bool:
        quota = connection.quota
        return quota is not None and not (quota.is_alone and self._authenticator.has_tokens)

    def _stop_counting(self, connection: ManagedConnection) -> None:
        self._unauthenticated_bytes -= self._unauthenticated.pop(connection, 0)

    def _evict(self, newcomer: ManagedConnection | None = None, address: str | None = None) -> bool:
        """Close the oldest unauthenticated connection, so that idle strangers cannot keep clients out.

        Args:
            newcomer: The connection that needs room, which is not closed.
            address: IP address whose connections may be closed; None means any.

        Returns:
            False if there is no such connection.
        """
        while found := next(
            (one for one in self._unauthenticated if one is not newcomer and address in (None, one.address)), None
        ):
            if self._is_authenticated(found):
                self._stop_counting(found)
                continue
            self.count("unauthenticated connection closed to make room")
            self.leave(found)  # now: the event loop reports the loss of a connection later
            found.break_off()
            return True
        return False

    async def run(self) -> None:
        """Check all connections regularly, until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            self.check(asyncio.get_running_loop().time())

    def check(self, now: float) -> None:
        """Enforce the limits on all connections, and log how many were closed."""
        for connection in list(self.connections):
            try:
                connection.check(now)
            except Exception:  # the limits of all other connections must be enforced nevertheless
                logger.exception("cannot enforce the limits of a connection: the server closed it")
                connection.break_off()
        if self._closed and now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            reasons = ", ".join(f"{count} x {reason}" for reason, count in self._closed.items())
            logger.warning("connections were closed: %s", reasons)
            self._closed.clear()

    def count(self, reason: str) -> None:
        """Count a closed connection for the log, which has one line for all of them: clients can cause millions."""
        self._closed[reason] += 1

    def drain(self) -> None:
        """Close idle connections, and all others after their responses."""
        self.draining = True
        for connection in list(self.connections):
            if connection.has_requested:
                connection.shutdown()

    async def wait_responded(self, timeout: float) -> bool:
        """Wait for all responses to be sent; return False if `timeout` seconds do not suffice."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while any(connection.is_responding for connection in self.connections):
                    await asyncio.sleep(0.02)
                return True
        return False

    def abort(self) -> None:
        """Break off all connections."""
        for connection in list(self.connections):
            connection.break_off()


def raise_file_limit() -> None:
    """Raise this process' limit of open files to the hard limit: each connection needs a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_for(num_workers: int) -> int:
    """Return the number of connections that leave enough descriptors for the rest of the server.

    Raises:
        ConfigError: The limit of open files is too low.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 2**20
    # sessions have workers of their own: the higher the limit, the more descriptors are reserved
    reserved = max(OWN_FILES + FILES_PER_WORKER * num_workers, limit // 8)
    if limit - reserved < MIN_CONNECTIONS:
        raise ConfigError(
            f"the limit of open files (RLIMIT_NOFILE) is {limit}, and a server with {counted(num_workers, 'worker')} "
            f"needs {reserved + MIN_CONNECTIONS}: raise it with ulimit -n"
        )
    return limit - reserved
