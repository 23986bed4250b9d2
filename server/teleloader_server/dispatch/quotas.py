"""Quotas of principals: plain decisions over plain numbers.

A principal is the owner of a token; without tokens all clients are one principal. The resources of each are counted
here, so that a principal that exceeds its share is refused more, and no other one is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from teleloader_server.config import ClientLimits
from teleloader_server.permissions import ANYONE, Principal
from teleloader_shared.errors import ServerUnavailable

PATIENCE: Final = 1.0
"""Seconds for which a request beyond the rate is delayed; one that would wait longer is refused after them."""
MIN_SENDING: Final = 64 * 2**20
"""Bytes of responses that a principal may always leave unread, however small its share of the memory."""


UNREAD_FACTOR: Final = 2.0
"""Multiple of the unread bytes that a principal may have, from which none of its consumers gets batches computed."""


class Memory:
    """Memory budget of a server, which its engines share.

    Args:
        budget: Bytes of all frames together.
    """

    __slots__ = ("budget", "used")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        """Bytes of the frames of all engines."""


class Quota:
    """Resources of one principal.

    Args:
        name: Name of the principal.
        memory: Limit of its frames, in bytes.
        max_consumers: Limit of its consumers.
        is_alone: True without tokens: all clients are this principal, and there are no others to share with.
    """

    __slots__ = (
        "consumers", "due", "frames", "is_alone", "loaders", "max_consumers", "memory", "name", "sending", "sessions",
    )  # fmt: skip

    def __init__(self, name: str, memory: int, max_consumers: int, *, is_alone: bool = False) -> None:
        self.name = name
        self.is_alone = is_alone
        self.memory = memory
        self.max_consumers = max_consumers
        self.frames = 0
        """Bytes of kept frames that were computed for it, and estimates of those being computed."""
        self.sending = 0
        """Bytes of responses that are being sent to it."""
        self.due = 0.0
        """Time at which all its requests would have been due, had they come evenly at the limit of the rate."""
        self.consumers: dict[object, Sequence[object]] = {}
        """Consumers of all engines, each with its open requests."""
        self.loaders: set[str] = set()
        """Keys of the loaders that it registered."""
        self.sessions: dict[str, int] = {}
        """Numbers of private workers, by key of their loader."""

    @property
    def unread(self) -> float:
        """Unread bytes of responses as a fraction of the limit; above 1 the limits for slow readers apply."""
        return self.sending / max(self.memory, MIN_SENDING)

    def patience(self, limits: ClientLimits) -> float:
        """Return the seconds in which its clients must read a part of their responses."""
        if self.unread <= 1:
            return limits.send_timeout
        return limits.pressure_send_timeout if self.unread <= UNREAD_FACTOR else limits.pressure_send_timeout / 4

    @property
    def has_nothing(self) -> bool:
        """True if the quota holds no resources."""
        return not (self.frames or self.sending or self.consumers or self.loaders or self.sessions)

    def delay(self, now: float, rate: float) -> float:
        """Count a request; return the seconds to delay it, see `delayed`."""
        wait, self.due = delayed(self.due, now, rate)
        return wait


def delayed(due: float, now: float, rate: float) -> tuple[float, float]:
    """Return the seconds to delay a request, so that there are no more than `rate` per second.

    A burst of a second's worth passes at once. A request with a delay above `PATIENCE` is to be refused and does not
    count.

    Args:
        due: Time at which the requests before it would have been due, had they come evenly.
        now: The time.
        rate: Requests/s.

    Returns:
        The delay in seconds, and `due` for the next request.
    """
    due = max(due, now - 1.0)
    wait = max(0.0, due - now)
    return wait, due + 1.0 / rate if wait <= PATIENCE else due


class Quotas:
    """Quotas of all principals.

    Args:
        limits: Limits of clients.
        budget: Bytes of memory of which principals have shares.
    """

    def __init__(self, limits: ClientLimits, budget: int) -> None:
        self._limits = limits
        self._budget = budget
        self._quotas: dict[str, Quota] = {}

    def of(self, principal: Principal) -> Quota:
        """Return the quota of a principal, which may be new."""
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
        """Forget the quotas that hold no resources."""
        for name, quota in list(self._quotas.items()):
            if quota.has_nothing and quota.due < now - 1.0:
                del self._quotas[name]


class BodyBudget:
    """Budget of bytes that clients sent and the server keeps: bodies of open requests, or specs of loaders.

    Args:
        limit: Bytes of all principals together.
        shared: Returns True if there are several principals. Then each must leave at least as much as it holds.
        what: Name of the content, for errors.
        option: Name of the limit.
    """

    def __init__(
        self, limit: int, shared: Callable[[], bool], what: str = "requests", option: str = "max_buffered_request_bytes"
    ) -> None:
        self._limit = limit
        self._shared = shared
        self._what = what
        self._option = option
        self._held: Counter[str] = Counter()
        """Bytes of each principal, by name."""

    def has_room(self, name: str, nbytes: int) -> bool:
        """Return True if the principal of that name may hold so many bytes more."""
        left = self._limit - self._held.total() - nbytes
        return left >= 0 and (self._held[name] + nbytes <= left or not self._shared())

    @contextmanager
    def hold(self, name: str, nbytes: int = 0) -> Iterator[Callable[[int], None]]:
        """Count bytes of a principal until the context ends; provide a function that counts more.

        Raises:
            ServerUnavailable: There is no room for them.
        """
        held = 0

        def count(more: int) -> None:
            nonlocal held
            if not self.has_room(name, more):
                raise ServerUnavailable(
                    f"the server holds {self._held.total():,} bytes of {self._what}, {self._held[name]:,} of them of "
                    f"{name!r}, and may hold {self._limit:,} ({self._option}); where there are several tokens, the "
                    "owner of each must leave as much as it takes: try again later"
                )
            held += more
            self._held[name] += more

        count(nbytes)
        try:
            yield count
        finally:
            self._held[name] -= held
            if not self._held[name]:
                del self._held[name]


def quota_of(scope: Mapping[str, Any]) -> Quota | None:
    """Return the quota of a request's principal; None if the request is not authenticated."""
    found: Quota | None = scope.get(_KEY)
    return found


def note(scope: MutableMapping[str, Any], quota: Quota) -> None:
    """Store the quota of a request's principal."""
    scope[_KEY] = quota


_KEY: Final = "teleloader.quota"


def too_many(quota: Quota, limit: int, what: str, option: str) -> ServerUnavailable:
    """Return the error for one more of something limited by number."""
    return ServerUnavailable(
        f"{quota.name!r} may have no more {what} than {limit:,}, its limit on this server: end some, or raise "
        f"{option} in the server's [limits]"
    )
