"""Per-principal quotas, which count the resources in use and enforce `limits.ClientLimits` without I/O.

A principal is the owner of a token; without tokens all clients form one principal. Resources are counted per principal,
so that requests of a principal that exceeds its share are rejected without affecting others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from teleloader_server.limits import ClientLimits
from teleloader_server.permissions import ANYONE, Principal
from teleloader_shared.errors import ServerUnavailable

PATIENCE: Final = 1.0
"""Maximum delay in seconds of a request that exceeds the rate limit; a request that needs more delay is rejected."""
MIN_SENDING: Final = 64 * 2**20
"""Minimum limit on a principal's unread response bytes; the limit is the principal's memory share if that is larger."""


UNREAD_FACTOR: Final = 2.0
"""Multiple of the limit on unread bytes above which no batches are computed for any consumer of the principal."""


class Memory:
    """Memory budget for frames, shared by all engines of a server.

    Args:
        budget: Maximum memory of all frames, in bytes.
    """

    __slots__ = ("budget", "used")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        """Memory of the frames of all engines, in bytes."""


@dataclass(slots=True, eq=False)
class Quota:
    """Resource usage and limits of one principal."""

    name: str
    """Name of the principal."""
    memory: int
    """Maximum memory of the principal's frames, in bytes."""
    max_consumers: int
    """Maximum number of the principal's consumers."""
    weight: float = 1.0
    """Share of the worker time, relative to other principals that wait for batches, too."""
    is_alone: bool = field(default=False, kw_only=True)
    """True on a server without tokens, where all clients form one principal."""
    frames: int = field(default=0, init=False)
    """Memory in bytes of the frames computed for the principal, including estimates for batches in progress."""
    sending: int = field(default=0, init=False)
    """Bytes of responses that are being sent to the principal."""
    lent_slots: int = field(default=0, init=False)
    """Shared-memory slots that are lent to the principal, or that it kept after giving them back."""
    lent_bytes: int = field(default=0, init=False)
    """Size of these slots in bytes."""
    owners: dict[str, int] = field(default_factory=dict, init=False)
    """Owner number of the principal by dataset (`LoaderSpec.content`), for the reuse of lent slots (`Lender`)."""
    due: float = field(default=0.0, init=False)
    """Earliest time of the next request at the maximum rate; see `delayed`."""
    consumers: dict[object, Sequence[object]] = field(default_factory=dict, init=False)
    """Consumers in all engines, each with its open requests."""
    loaders: set[str] = field(default_factory=set, init=False)
    """Keys of the loaders that the principal registered."""
    sessions: dict[str, int] = field(default_factory=dict, init=False)
    """Number of private workers, by loader key."""

    @property
    def unread(self) -> float:
        """Ratio of unread response bytes to their limit; above 1, stricter limits apply to slow readers."""
        return self.sending / max(self.memory, MIN_SENDING)

    def patience(self, limits: ClientLimits) -> float:
        """Return the send timeout in seconds: the server disconnects a client that reads nothing for this long.

        The timeout becomes shorter above the principal's limit on unread bytes, and again above `UNREAD_FACTOR` times
        this limit.
        """
        if self.unread <= 1:
            return limits.send_timeout
        return limits.pressure_send_timeout if self.unread <= UNREAD_FACTOR else limits.pressure_send_timeout / 4

    @property
    def has_nothing(self) -> bool:
        """True if the principal uses no resources."""
        return not (self.frames or self.sending or self.lent_slots or self.consumers or self.loaders or self.sessions)

    def delay(self, now: float, rate: float) -> float:
        """Count a request toward the rate limit; return the request's delay in seconds (see `delayed`)."""
        wait, self.due = delayed(self.due, now, rate)
        return wait


def delayed(due: float, now: float, rate: float) -> tuple[float, float]:
    """Return the delay that enforces the request rate limit `rate` (generic cell rate algorithm).

    A burst of ``rate`` requests is not delayed. A request with a delay above `PATIENCE` must be rejected and is not
    counted.

    Args:
        due: Theoretical arrival time of this request: the time at which it would arrive at exactly `rate`.
        now: Current time.
        rate: Maximum requests/s.

    Returns:
        The delay in seconds, and `due` for the next request.
    """
    due = max(due, now - 1.0)
    wait = max(0.0, due - now)
    return wait, due + 1.0 / rate if wait <= PATIENCE else due


class Quotas:
    """Registry of all principals' quotas.

    Args:
        limits: Limits of clients.
        budget: Memory budget of the server in bytes; each principal may use its share of it.
    """

    def __init__(self, limits: ClientLimits, budget: int) -> None:
        self._limits = limits
        self._budget = budget
        self._quotas: dict[str, Quota] = {}

    def of(self, principal: Principal) -> Quota:
        """Return the quota of a principal, creating it if necessary."""
        known = self._quotas.get(principal.name)
        if known is None:
            known = Quota(principal.name, 0, self._limits.max_consumers, is_alone=principal is ANYONE)
            self._quotas[principal.name] = known
        known.memory = max(1, int(principal.memory_share * self._budget))
        known.weight = principal.weight
        return known

    @property
    def sending(self) -> int:
        """Total size of all responses being sent, in bytes."""
        return sum(quota.sending for quota in self._quotas.values())

    @property
    def lent(self) -> int:
        """Total size of all loans of slots, in bytes; a slot that is lent to several clients counts for each."""
        return sum(quota.lent_bytes for quota in self._quotas.values())

    def forget_owners(self) -> None:
        """Exclude all lent slots from reuse, because their borrowers may no longer be authorized."""
        for quota in self._quotas.values():
            quota.owners.clear()

    def forget_idle(self, now: float) -> None:
        """Remove the quotas of principals without resources in use."""
        for name, quota in list(self._quotas.items()):
            if quota.has_nothing and quota.due < now - 1.0:
                del self._quotas[name]


class BodyBudget:
    """Memory budget for received data that the server stores: bodies of open requests, or loader specs.

    Args:
        limit: Maximum bytes of all principals together.
        shared: Function that returns True if there are several principals. A principal's bytes may then not exceed the
            part of the budget that remains free.
        what: Name of the content, for error messages.
        option: Name of the limit, for error messages.
    """

    def __init__(
        self, limit: int, shared: Callable[[], bool], what: str = "requests", option: str = "max_buffered_request_bytes"
    ) -> None:
        self._limit = limit
        self._shared = shared
        self._what = what
        self._option = option
        self._held: Counter[str] = Counter()
        """Held bytes by principal name."""

    def has_room(self, name: str, nbytes: int) -> bool:
        """Return True if the budget has room for `nbytes` additional bytes of the principal with the given name."""
        left = self._limit - self._held.total() - nbytes
        return left >= 0 and (self._held[name] + nbytes <= left or not self._shared())

    @contextmanager
    def hold(self, name: str, nbytes: int = 0) -> Iterator[Callable[[int], None]]:
        """Context manager that counts bytes of a principal until its exit; yields a function to count further bytes.

        Raises:
            ServerUnavailable: If the bytes exceed the budget.
        """
        held = 0

        def count(more: int) -> None:
            nonlocal held
            if not self.has_room(name, more):
                raise ServerUnavailable(
                    f"too much memory for {self._what} of {name!r}: {more:,} bytes requested, {self._held[name]:,} "
                    f"held, {self._held.total():,} held for all tokens, and the limit is {self._limit:,} "
                    f"({self._option}). With several tokens, each may hold at most half of the memory that the others "
                    "leave free. Retry later"
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
    """Return the quota of a request's principal, or None if the request is not authenticated."""
    found: Quota | None = scope.get(_KEY)
    return found


def set_quota(scope: MutableMapping[str, Any], quota: Quota) -> None:
    """Store the quota of the request's principal in the ASGI scope."""
    scope[_KEY] = quota


_KEY: Final = "teleloader.quota"


def too_many(quota: Quota, limit: int, what: str, option: str) -> ServerUnavailable:
    """Return the error for a principal that exceeds a limit on the number of sessions, loaders or other resources."""
    return ServerUnavailable(
        f"{quota.name!r} has reached the limit of {limit:,} {what}. Close other DataLoader iterators, or increase "
        f"{option} in [limits]"
    )
