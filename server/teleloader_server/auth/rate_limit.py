"""Request rate limits, and fair request scheduling among principals."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter, deque
from typing import Final

from starlette.types import Scope

from teleloader_server.dispatch.quotas import PATIENCE, Quotas, delayed, set_quota
from teleloader_server.permissions import Principal
from teleloader_server.problems import HttpProblem
from teleloader_shared.units import number

TOGETHER: Final = 16
"""Maximum number of requests started per event loop iteration while only one principal is active.

While several principals are active, one request of each principal is started.
"""
MAX_NETWORKS: Final = 4096
"""Maximum number of networks with a counter of their own; all others share one counter, to bound the memory."""
RECENT: Final = 1.0
"""Seconds after its last request for which a principal counts as active, and a network keeps its own counter."""


class RateLimiter:
    """Rate limiter that delays requests above a principal's rate, and schedules principals round-robin.

    Args:
        quotas: Quotas of all principals.
        rate: Maximum requests/s of each principal.
    """

    def __init__(self, quotas: Quotas, rate: float) -> None:
        self._quotas = quotas
        self._rate = rate
        self._turns = FairQueue()

    async def acquire(self, scope: Scope, principal: Principal) -> None:
        """Wait until the rate limit admits a request from a principal.

        Stores the principal's quota in the ASGI scope of the request.

        Raises:
            HttpProblem: If the delay would exceed `PATIENCE` (status 429).
        """
        quota = self._quotas.of(principal)
        set_quota(scope, quota)
        now = time.monotonic()
        await _hold(
            quota.delay(now, self._rate),
            f"too many requests of {quota.name!r}: the limit is {number(self._rate)} requests/s "
            "(max_requests_per_second). Send fewer requests",
        )
        await self._turns.wait_turn(quota.name, now)


class AddressLimit:
    """Rate limiter for requests without a valid token, per IP address (IPv6: per /64 network).

    Args:
        rate: Maximum requests/s of each address.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._due: dict[str, float] = {}
        """Earliest time of the next request of each network; see `delayed`."""
        self._swept = 0.0
        """Time of the last removal of networks without recent requests."""

    async def acquire(self, address: str) -> None:
        """Wait until the rate limit admits a request from an IP address.

        Args:
            address: IP address of the client.

        Raises:
            HttpProblem: If the delay would exceed `PATIENCE` (status 429).
        """
        network = self._network(address)
        now = time.monotonic()
        held, self._due[network] = delayed(self._due.get(network, 0.0), now, self._rate)
        await _hold(
            held,
            f"too many unauthenticated requests from {network}: the limit is {number(self._rate)} requests/s "
            "(max_unauthenticated_requests_per_second). Send a token, or fewer requests",
        )

    def _network(self, address: str) -> str:
        """Return the key of an IP address in `_due`: the address, its /64 network (IPv6), or the shared key."""
        found = address.partition("%")[0]
        if ":" in found:
            # an IPv6 host usually owns a network of 2**64 addresses
            found = str(ipaddress.ip_network((found, 64), strict=False))
        now = time.monotonic()
        if len(self._due) >= MAX_NETWORKS and now - self._swept > RECENT:
            self._swept = now
            self._due = {network: due for network, due in self._due.items() if due > now - RECENT}
        return found if found in self._due or len(self._due) < MAX_NETWORKS else "all other addresses"


async def _hold(seconds: float, sentence: str) -> None:
    """Delay a request that exceeds its rate limit, by at most `PATIENCE`.

    Raises:
        HttpProblem: If `seconds` exceeds `PATIENCE` (status 429); `sentence` is the detail.
    """
    if seconds:
        # rejections are delayed as well: otherwise a client would retry at once
        await asyncio.sleep(min(seconds, PATIENCE))
    if seconds > PATIENCE:
        raise HttpProblem(429, "ServerUnavailable", sentence)


class FairQueue:
    """Round-robin queue of requests: each event loop iteration starts some requests of each principal."""

    def __init__(self) -> None:
        self._started: Counter[str] = Counter()
        """Number of requests started in this iteration, by principal."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._last = ""
        """Name of the principal that sent the last request; empty before the first request."""
        self._several_until = 0.0
        """Time until which several principals count as active."""
        self._most = TOGETHER
        """Maximum number of requests of a principal per iteration."""

    async def wait_turn(self, name: str, now: float) -> None:
        """Wait for a principal's turn to start a request."""
        loop = asyncio.get_running_loop()
        if name != self._last:
            self._several_until = now + RECENT if self._last else 0.0
            self._last = name
        if not self._started:
            loop.call_soon(self._next_round)
        self._most = 1 if now < self._several_until else TOGETHER
        if self._started[name] < self._most and name not in self._waiting:
            self._started[name] += 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(name, deque()).append(turn)
        await turn

    def _next_round(self) -> None:
        self._started.clear()
        for name, turns in list(self._waiting.items()):
            while turns and self._started[name] < self._most:
                turn = turns.popleft()
                if not turn.done():  # otherwise the waiting request was cancelled
                    turn.set_result(None)
                    self._started[name] += 1
            if not turns:
                del self._waiting[name]
        if self._started:
            asyncio.get_running_loop().call_soon(self._next_round)
