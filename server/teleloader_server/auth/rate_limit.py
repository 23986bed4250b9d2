"""What each request passes through: nobody asks so often that the others are not heard."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter, deque
from typing import Final

from starlette.types import Scope

from teleloader_server.dispatch.quotas import PATIENCE, Quotas, delayed, note
from teleloader_server.permissions import Principal
from teleloader_server.problems import HttpProblem
from teleloader_shared.units import number

TOGETHER: Final = 16
"""Requests that are begun in one round of the event loop while there is one principal; of several, one of each."""
MAX_NETWORKS: Final = 4096
"""Network addresses whose requests are counted one by one, to bound the memory for them."""
RECENT: Final = 1.0
"""Seconds for which a principal counts as there after its last request."""


class RateLimiter:
    """Holds requests beyond their principal's rate, and begins those of all principals in turn.

    Args:
        quotas: What principals have taken.
        rate: Requests a second that each may make.
    """

    def __init__(self, quotas: Quotas, rate: float) -> None:
        self._quotas = quotas
        self._rate = rate
        self._turns = FairQueue()

    async def come(self, scope: Scope, principal: Principal) -> None:
        """Wait until the time of a request has come; its scope has the principal's quota then.

        Raises:
            HttpProblem: When it would have to wait for long.
        """
        quota = self._quotas.of(principal)
        note(scope, quota)
        now = time.monotonic()
        await _hold(
            quota.delay(now, self._rate),
            f"{quota.name!r} makes more requests a second than {number(self._rate)}, its limit on this server "
            "(max_requests_per_second): ask less often",
        )
        await self._turns.come(quota.name, now)


class AddressLimit:
    """Limits the requests without a valid token, by network address. Requests with one are not counted.

    Args:
        rate: Requests a second that each address may make.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._due: dict[str, float] = {}
        """By network, see `delayed`."""
        self._swept = 0.0
        """The time at which networks without a recent request were removed."""

    async def come(self, address: str) -> None:
        """Wait until the time of a request has come.

        Args:
            address: Where it comes from.

        Raises:
            HttpProblem: With 429, if it would have to wait for long.
        """
        network = self._network(address)
        now = time.monotonic()
        held, self._due[network] = delayed(self._due.get(network, 0.0), now, self._rate)
        await _hold(
            held,
            f"{network} makes more than {number(self._rate)} requests a second without a valid token, its limit on "
            "this server (max_unauthenticated_requests_per_second): send a token, or fewer requests",
        )

    def _network(self, address: str) -> str:
        """What an address is counted as: itself, the network of an IPv6 host, or one of too many addresses to count."""
        found = address.partition("%")[0]
        if ":" in found:
            # a host is given a network of 2**64 addresses
            found = str(ipaddress.ip_network((found, 64), strict=False))
        now = time.monotonic()
        if len(self._due) >= MAX_NETWORKS and now - self._swept > RECENT:
            self._swept = now
            self._due = {network: due for network, due in self._due.items() if due > now - RECENT}
        return found if found in self._due or len(self._due) < MAX_NETWORKS else "the rest of all addresses"


async def _hold(seconds: float, sentence: str) -> None:
    """Hold a request that exceeds a rate, for at most `PATIENCE`.

    Raises:
        HttpProblem: With 429 and `sentence`, if it would have to wait for longer.
    """
    if seconds:
        # also before it is refused: a client would repeat at once what is refused at once
        await asyncio.sleep(min(seconds, PATIENCE))
    if seconds > PATIENCE:
        raise HttpProblem(429, "ServerUnavailable", sentence)


class FairQueue:
    """Lets principals in by turns: in each round of the event loop some requests of each, the longest waiting first."""

    def __init__(self) -> None:
        self._let_in: Counter[str] = Counter()
        """How many were, in this round."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._last = ""
        """Whose request came last."""
        self._several_until = 0.0
        """When there is one principal again, if only that one asks."""
        self._most = TOGETHER
        """Of each principal, in a round."""

    async def come(self, name: str, now: float) -> None:
        """Wait for the turn of a principal, which may be now."""
        loop = asyncio.get_running_loop()
        if name != self._last:
            self._several_until = now + RECENT if self._last else 0.0
            self._last = name
        if not self._let_in:
            loop.call_soon(self._next_round)
        self._most = 1 if now < self._several_until else TOGETHER
        if self._let_in[name] < self._most and name not in self._waiting:
            self._let_in[name] += 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(name, deque()).append(turn)
        await turn

    def _next_round(self) -> None:
        self._let_in.clear()
        for name, turns in list(self._waiting.items()):
            while turns and self._let_in[name] < self._most:
                turn = turns.popleft()
                if not turn.done():  # who waits no more has no turn
                    turn.set_result(None)
                    self._let_in[name] += 1
            if not turns:
                del self._waiting[name]
        if self._let_in:
            asyncio.get_running_loop().call_soon(self._next_round)
