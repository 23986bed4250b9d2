"""Connection manager of a server: limits on the number and memory of connections, and periodic checks."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import resource
from collections import Counter
from contextlib import suppress
from typing import Final, Protocol

from teleloader_server.auth.authenticator import Authenticator
from teleloader_server.config import ConfigError
from teleloader_server.dispatch.quotas import BodyBudget, Quota
from teleloader_server.limits import ClientLimits
from teleloader_server.stats.requests import HttpCounters
from teleloader_shared.units import counted

OWN_FILES: Final = 64
"""File descriptors reserved for the event loop, for files of datasets, and for other uses."""
FILES_PER_WORKER: Final = 4
"""File descriptors per worker: its channel, and shared memory that is passed through the channel."""
MIN_CONNECTIONS: Final = 64
"""Minimum number of connections for which file descriptors must be available at start-up."""

CONNECTION_BYTES: Final = 16 * 2**10
"""Estimated memory of an idle connection, rounded up: transport, parsers, protocols and the last request."""
REQUEST_BYTES: Final = 8 * 2**10
"""Estimated memory of a request besides its received bytes, rounded up: scope, task and response."""
FIELD_BYTES: Final = 256
"""Estimated memory of a header field besides its bytes, rounded up: a tuple and two bytes objects."""
LOG_INTERVAL_S: Final = 10.0
"""Minimum seconds between two log lines about closed connections."""

logger = logging.getLogger(__name__)


class ManagedConnection(Protocol):
    """Interface of HTTP and WebSocket connections for the `ConnectionManager`, used in the event loop."""

    @property
    def is_responding(self) -> bool:
        """True while a response is incomplete."""

    @property
    def has_requested(self) -> bool:
        """True if the manager may close the connection at shutdown; False if the first request may be in transit."""

    @property
    def address(self) -> str:
        """IP address of the client."""

    @property
    def quota(self) -> Quota | None:
        """Quota of the last request's principal; None if that request was not authenticated."""

    def check(self, now: float) -> None:
        """Reject the request or close the connection if a timeout or minimum rate is violated.

        Args:
            now: Current time of the event loop's clock.
        """

    def shutdown(self) -> None:
        """Close the connection after responses to all pending requests."""

    def abort(self) -> None:
        """Close the connection immediately, and discard unsent data."""


class ConnectionManager:
    """Manager of all connections of a server; enforces the limits on their number and total memory.

    Args:
        limits: Limits of the server.
        authenticator: Authenticator of the server; without tokens, every request counts as authenticated.
        http: Counters of requests; None creates new ones.
    """

    def __init__(self, limits: ClientLimits, authenticator: Authenticator, http: HttpCounters | None = None) -> None:
        self.limits = limits
        self.http: Final = http or HttpCounters()
        """Counters of requests, refusals and closed connections."""
        self.unfinished = BodyBudget(limits.max_buffered_request_bytes // 4, lambda: authenticator.is_shared)
        """Memory budget of incompletely received WebSocket messages."""
        self._authenticator = authenticator
        self.draining = False
        """True during shutdown: connections close after their response."""
        self.connections: set[ManagedConnection] = set()
        self._unauthenticated: dict[ManagedConnection, int] = {}
        """Estimated memory in bytes of each connection without an authenticated request, oldest connection first."""
        self._unauthenticated_bytes = 0
        self._closed: Counter[str] = Counter()
        """Number of closed connections by reason, since the last log line."""
        self._logged_at = -LOG_INTERVAL_S
        self._by_address: Counter[str] = Counter()
        shortest = min(limits.header_timeout, limits.body_timeout, limits.send_timeout, limits.lingering_time)
        self._interval = min(1.0, shortest / 4)
        """Seconds between two checks of all connections."""

    def admit(self, connection: ManagedConnection) -> str | None:
        """Add a new connection; if a connection limit is reached, return the reason for rejection, else None."""
        self.connections.add(connection)
        address = connection.address
        self._by_address[address] += 1
        self._unauthenticated[connection] = 0
        self.charge(connection, CONNECTION_BYTES)
        limits = self.limits
        if len(self.connections) > limits.max_connections and not self._evict(connection):
            most = counted(limits.max_connections, "connection")
            return f"the server has reached the limit of {most} (max_connections): retry later"
        if self._by_address[address] > limits.max_connections_per_address and not self._evict(connection, address):
            most = counted(limits.max_connections_per_address, "connection")
            return f"{address} has reached the limit of {most} (max_connections_per_address): close unused connections"
        return None

    def leave(self, connection: ManagedConnection) -> None:
        """Remove a closed connection."""
        if connection in self.connections:
            self.connections.discard(connection)
            self._stop_counting(connection)
            self._by_address[connection.address] -= 1
            if not self._by_address[connection.address]:
                del self._by_address[connection.address]

    def charge(self, connection: ManagedConnection, nbytes: int) -> None:
        """Charge memory to an unauthenticated connection; close the oldest unauthenticated connections above the limit.

        Authenticated connections are not counted: the quotas of their principals apply instead.

        Args:
            connection: The connection.
            nbytes: Additional bytes; negative for released memory.
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
        """Close the oldest unauthenticated connection, so that idle unauthenticated peers cannot block clients.

        Args:
            newcomer: New connection that requires the space; it is not closed.
            address: IP address whose connections may be closed; None allows any.

        Returns:
            True if a connection was closed.
        """
        while found := next(
            (one for one in self._unauthenticated if one is not newcomer and address in (None, one.address)), None
        ):
            if self._is_authenticated(found):
                self._stop_counting(found)
                continue
            self.count("limit on unauthenticated connections")
            self.leave(found)  # now, because the event loop calls connection_lost later
            found.abort()
            return True
        return False

    async def run(self) -> None:
        """Check all connections periodically, until cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            self.check(asyncio.get_running_loop().time())

    def check(self, now: float) -> None:
        """Enforce the limits on all connections, and log the number of closed connections."""
        for connection in list(self.connections):
            try:
                connection.check(now)
            except Exception:  # an error in one connection must not disable the limits of all others
                logger.exception("cannot enforce the limits of a connection: closing the connection")
                connection.abort()
        if self._closed and now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            reasons = ", ".join(f"{count} x {reason}" for reason, count in self._closed.items())
            logger.warning("closed connections: %s", reasons)
            self._closed.clear()

    def count(self, reason: str) -> None:
        """Count a closed connection by reason; `check` logs only the counts, because clients can cause millions."""
        self._closed[reason] += 1
        self.http.closed[reason] += 1

    def drain(self) -> None:
        """Close idle connections now, and connections with pending requests after the responses.

        Connections that have sent no request stay open until `abort`, because a request may be in transit.
        """
        self.draining = True
        for connection in list(self.connections):
            if connection.has_requested:
                connection.shutdown()

    @property
    def in_flight(self) -> int:
        """Number of requests whose response is not sent yet."""
        return sum(connection.is_responding for connection in self.connections)

    async def wait_responded(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all responses are sent; return True if all are sent."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.in_flight:
                    await asyncio.sleep(0.02)
                return True
        return False

    def abort(self) -> None:
        """Close all connections immediately, and discard unsent data."""
        for connection in list(self.connections):
            connection.abort()


def raise_file_limit() -> None:
    """Raise the soft limit for open files to the hard limit, because each connection needs a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_for(num_workers: int) -> int:
    """Return the maximum connection count that leaves enough file descriptors for the rest of the server.

    Raises:
        ConfigError: If the limit on open files is too low.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 2**20
    # at least an eighth of the limit, for the workers of sessions
    reserved = max(OWN_FILES + FILES_PER_WORKER * num_workers, limit // 8)
    if limit - reserved < MIN_CONNECTIONS:
        raise ConfigError(
            f"the limit on open files (RLIMIT_NOFILE) is {limit}, but a server with {counted(num_workers, 'worker')} "
            f"requires {reserved + MIN_CONNECTIONS}: increase the limit with ulimit -n"
        )
    return limit - reserved


def limits_for(limits: ClientLimits, num_workers: int) -> ClientLimits:
    """Return limits with the maximum connection count for a number of workers; errors as of `connections_for`."""
    return dataclasses.replace(limits, max_connections=min(limits.max_connections, connections_for(num_workers)))
