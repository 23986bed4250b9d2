"""Authorization: token scopes and the permissions they grant. Pure functions, without I/O or clocks.

::

    scope        allows
    read         batches of all datasets
    read:NAME    batches of one dataset
    stats        /stats, /metrics and the dashboard
    announce     listing a server in the registry
    admin        all of these, and loading in the server process itself, which blocks other clients
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from teleloader_shared.errors import Forbidden

READ: Final = "read"
STATS: Final = "stats"
ANNOUNCE: Final = "announce"
ADMIN: Final = "admin"
ALL_SCOPES: Final = frozenset({READ, STATS, ANNOUNCE, ADMIN})

ANY: Final = "any"
"""Requirement of an endpoint: any valid token."""
OPEN: Final = "open"
"""Requirement of an endpoint: no token, but the request must not come from a page of another site."""
UNCHECKED: Final = "unchecked"
"""Requirement of an endpoint: none, because the endpoint discloses and changes nothing (health checks, dashboard)."""


_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


class Principal(NamedTuple):
    """Authenticated identity of a client: token name, scopes, and shares of memory and worker time."""

    name: str
    """Name of the token."""
    scopes: frozenset[str]
    memory_share: float
    """Fraction of the memory budget that all consumers of the principal may use together, in (0, 1]."""
    weight: float = 1.0
    """Share of the worker time, relative to other principals that wait for batches, too."""

    def authorize(self, need: str, dataset: str | None = None) -> Principal:
        """Return this principal if its scopes permit an operation.

        With this method, a principal implements `Caller` for operations without an HTTP request.

        Args:
            need: Required scope, or `ANY`.
            dataset: Dataset that the operation uses; None if it uses none.

        Raises:
            Forbidden: If the scopes do not permit the operation.
        """
        if allows(self.scopes, need, dataset):
            return self
        wanted = f"{need}:{dataset}" if need == READ and dataset is not None else need
        raise Forbidden(
            f"insufficient scope: the request requires {wanted[:200]!r}, and token {self.name!r} has only: "
            f"{format_scopes(self.scopes)}. Ask the server's operator to add the scope"
        )


class Caller(Protocol):
    """Interface for authorizing the client that sent a request.

    Code that waits must store the caller and not the principal: a token can expire, be revoked or lose a scope
    meanwhile, and `authorize` checks the token on each call.
    """

    def authorize(self, need: str, dataset: str | None = None) -> Principal:
        """Return the caller's principal if its token is currently valid and its scopes permit an operation.

        Args:
            need: Required scope, or `ANY`.
            dataset: Dataset that the operation uses; None if it uses none.

        Raises:
            Unauthorized: If the request has no token, or its token is no longer valid.
            Forbidden: If the scopes do not permit the operation.
            ServerUnavailable: If the keys that verify a JWT are not available now.
        """


ANYONE: Final = Principal("anyone", ALL_SCOPES, 1.0)
"""The principal of all requests to a server without tokens."""


# -- requirements of endpoints


def needs(scope: str) -> Callable[[_Endpoint], _Endpoint]:
    """Declare the scope that an endpoint requires: a scope, `ANY`, `OPEN` or `UNCHECKED`.

    An endpoint without this decorator is rejected at start-up.
    """

    def declare(endpoint: _Endpoint) -> _Endpoint:
        endpoint.needs = scope  # type: ignore[attr-defined]
        return endpoint

    return declare


def need_of(endpoint: object) -> str:
    """Return the scope that an endpoint declares with `needs`.

    Raises:
        LookupError: If the endpoint was not decorated with `needs`.
    """
    need = getattr(endpoint, "needs", None)
    if not isinstance(need, str):
        raise LookupError(f"endpoint {endpoint!r} declares no required scope: decorate it with @needs(...)")
    return need


def allows(scopes: frozenset[str], need: str, dataset: str | None = None) -> bool:
    """Return True if token scopes permit an operation.

    Args:
        scopes: Scopes of a token.
        need: Required scope, `ANY`, `OPEN` or `UNCHECKED`.
        dataset: Requested dataset; None if at least one permitted dataset suffices.
    """
    if ADMIN in scopes or need in scopes or need in (ANY, OPEN, UNCHECKED):
        return True
    if need != READ:
        return False
    return any(s.startswith("read:") for s in scopes) if dataset is None else f"{READ}:{dataset}" in scopes


def format_scopes(scopes: Sequence[str] | frozenset[str]) -> str:
    """Format scopes for messages: sorted and comma-separated."""
    return ", ".join(sorted(scopes))
