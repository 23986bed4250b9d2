"""What each principal takes of a server, and what it may take: plain decisions over plain numbers.

A principal is whoever a token names; without tokens all clients are one. What one takes is counted here, so that it is
refused what would be the others' share, and nobody else is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final

from teleloader_server.config import ClientLimits
from teleloader_server.permissions import ANYONE, Principal
from teleloader_shared.errors import ServerUnavailable

PATIENCE: Final = 1.0
"""Seconds for which a request beyond the rate is held; one that would wait longer is refused after them."""
MIN_SENDING: Final = 64 * 2**20
"""Bytes of answers that a principal may always have under way, however small its share of the memory."""


UNREAD_FACTOR: Final = 2.0
"""How many times what it may leave unread a principal must have left until none of its consumers is given more."""


class Memory:
    """The memory budget of a server, of which its engines take their parts.

    Args:
        budget: Bytes that frames may take together.
    """

    __slots__ = ("budget", "used")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        """Bytes of the frames of all engines."""


class Quota:
    """What one principal has taken.

    Args:
        name: The principal's.
        memory: Bytes that its frames may take.
        max_consumers: How many consumers it may be.
        is_alone: Whether it is all clients together, so that nothing need be left to others.
    """

    __slots__ = ("counts", "due", "frames", "is_alone", "max_consumers", "memory", "name", "sending")

    def __init__(self, name: str, memory: int, max_consumers: int, *, is_alone: bool = False) -> None:
        self.name = name
        self.is_alone = is_alone
        self.memory = memory
        self.max_consumers = max_consumers
        self.frames = 0
        """Bytes of the frames that were made for it and are kept, and estimates of those being made."""
        self.sending = 0
        """Bytes of the answers that it is being sent."""
        self.due = 0.0
        """When its requests so far would be answered, if they came evenly at the rate that it may have."""
        self.counts: Counter[str] = Counter()
        """How many it has of what is limited by number."""

    @property
    def unread(self) -> float:
        """What it has not taken of its answers, as a part of what it may leave; from 1 on something must be done."""
        return self.sending / max(self.memory, MIN_SENDING)

    def patience(self, limits: ClientLimits) -> float:
        """Seconds in which its clients must take something of their answers."""
        if self.unread <= 1:
            return limits.send_timeout
        return limits.pressure_send_timeout if self.unread <= UNREAD_FACTOR else limits.pressure_send_timeout / 4

    @property
    def has_nothing(self) -> bool:
        """Whether there is nothing to remember."""
        return not (self.frames or self.sending or self.counts.total())

    def delay(self, now: float, rate: float) -> float:
        """See `delayed`."""
        wait, self.due = delayed(self.due, now, rate)
        return wait


def delayed(due: float, now: float, rate: float) -> tuple[float, float]:
    """A request has come at `now`: seconds for which it is held, so that there are no more than `rate` a second.

    A burst of a second's worth passes at once. What is held longer than `PATIENCE` is not counted, and is to be
    refused then.

    Args:
        due: When the requests before it would be answered, if they came evenly.
        now: The time.
        rate: Requests a second.

    Returns:
        The seconds, and `due` for the next request.
    """
    due = max(due, now - 1.0)
    wait = max(0.0, due - now)
    return wait, due + 1.0 / rate if wait <= PATIENCE else due


class Quotas:
    """The quotas of all principals.

    Args:
        limits: What each may take.
        budget: Bytes of the memory of which principals have shares.
    """

    def __init__(self, limits: ClientLimits, budget: int) -> None:
        self._limits = limits
        self._budget = budget
        self._quotas: dict[str, Quota] = {}

    def of(self, principal: Principal) -> Quota:
        """The quota of a principal, which may be new."""
        known = self._quotas.get(principal.name)
        if known is None:
            known = Quota(principal.name, 0, self._limits.max_consumers, is_alone=principal is ANYONE)
            self._quotas[principal.name] = known
        known.memory = max(1, int(principal.memory_share * self._budget))
        return known

    @property
    def sending(self) -> int:
        """Bytes of all responses that are being sent."""
        return sum(quota.sending for quota in self._quotas.values())

    def forget_idle(self, now: float) -> None:
        """Forget those who have nothing."""
        for name, quota in list(self._quotas.items()):
            if quota.has_nothing and quota.due < now - 1.0:
                del self._quotas[name]


class BodyBudget:
    """What clients have sent and the server keeps: bodies of requests until they are answered, or specs of loaders.

    Args:
        limit: Bytes of all of it.
        shared: Says whether there are several principals. Then one may have no more than it leaves to the others.
        what: What it is, for errors.
        option: The name of the limit.
    """

    def __init__(
        self, limit: int, shared: Callable[[], bool], what: str = "requests", option: str = "max_buffered_request_bytes"
    ) -> None:
        self._limit = limit
        self._shared = shared
        self._what = what
        self._option = option
        self._held: Counter[str] = Counter()
        """Bytes of each principal."""

    def has_room(self, name: str, nbytes: int) -> bool:
        """Whether the principal of that name may have so many bytes more."""
        left = self._limit - self._held.total() - nbytes
        return left >= 0 and (self._held[name] + nbytes <= left or not self._shared())

    def take(self, name: str, nbytes: int) -> None:
        """Count so many bytes more, which are to be given back.

        Raises:
            ServerUnavailable: When there is no room for them.
        """
        if not self.has_room(name, nbytes):
            raise ServerUnavailable(
                f"the server holds {self._held.total():,} bytes of {self._what}, {self._held[name]:,} of them of "
                f"{name!r}, and may hold {self._limit:,} ({self._option}); where there are several tokens, the owner "
                "of each must leave as much as it takes: try again later"
            )
        self._held[name] += nbytes

    def give_back(self, name: str, nbytes: int) -> None:
        """They are not kept any more."""
        self._held[name] -= nbytes
        if not self._held[name]:
            del self._held[name]


def quota_of(scope: Mapping[str, Any]) -> Quota | None:
    """Whose request it is, None where that was not found out."""
    found: Quota | None = scope.get(_KEY)
    return found


def note(scope: MutableMapping[str, Any], quota: Quota) -> None:
    """Say whose request it is."""
    scope[_KEY] = quota


_KEY: Final = "teleloader.quota"


def too_many(quota: Quota, limit: int, what: str, option: str) -> ServerUnavailable:
    """The refusal of one more."""
    return ServerUnavailable(
        f"{quota.name!r} may have no more {what} than {limit:,}, its limit on this server: end some, or raise "
        f"{option} in the server's [limits]"
    )
