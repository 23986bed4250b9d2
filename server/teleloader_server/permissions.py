"""Authorization: scopes, and the decision if they suffice; no files, sockets or clocks.

::

    scope        allows
    read         batches of all datasets
    read:NAME    batches of one dataset
    stats        /stats, /metrics and the dashboard
    admin        all of these, and loading in the server's own process, which blocks other clients
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from teleloader_shared.errors import Forbidden

READ: Final = "read"
STATS: Final = "stats"
ADMIN: Final = "admin"
ALL_SCOPES: Final = frozenset({READ, STATS, ADMIN})

ANY: Final = "any"
"""Requirement of an endpoint: any valid token."""
OPEN: Final = "open"
"""Requirement of an endpoint: no token, but the request must not come from a page of another site."""
UNCHECKED: Final = "unchecked"
"""Requirement of an endpoint: none, because it discloses and changes nothing (health checks, dashboard files)."""


_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


class Principal(NamedTuple):
    """The owner of a token: identity of a client, its scopes and its share of memory."""

    name: str
    """Name of the token."""
    scopes: frozenset[str]
    memory_share: float
    """Fraction of the memory budget that all its consumers may fill together, in (0, 1]."""

    def authorize(self, need: str, dataset: str | None = None) -> Principal:
        """Return the principal itself if its scopes suffice: a principal is the `Caller` whose token never ends.

        Args:
            need: A scope, or `ANY`.
            dataset: The dataset to be used; None stands for an operation that uses none.

        Raises:
            Forbidden: The scopes do not suffice.
        """
        if allows(self.scopes, need, dataset):
            return self
        wanted = f"{need}:{dataset}" if need == READ and dataset is not None else need
        raise Forbidden(
            f"insufficient scope: the token {self.name!r} has {said_scopes(self.scopes)}, and the request requires "
            f"{wanted[:200]!r}. Ask the server's operator to add the scope"
        )


class Caller(Protocol):
    """The sender of a request.

    A caller is kept instead of its principal because a token can expire, be revoked or lose a scope while the request
    waits: `authorize` looks it up each time.
    """

    def authorize(self, need: str, dataset: str | None = None) -> Principal:
        """Return the caller's principal if its token is valid now and its scopes suffice.

        Args:
            need: A scope, or `ANY`.
            dataset: The dataset to be used; None stands for an operation that uses none.

        Raises:
            Unauthorized: The request has no token, or its token is not valid any more.
            Forbidden: The scopes do not suffice.
        """


ANYONE: Final = Principal("anyone", ALL_SCOPES, 1.0)
"""The principal of all requests to a server without tokens."""


# -- requirements of endpoints


def needs(scope: str) -> Callable[[_Endpoint], _Endpoint]:
    """Declare the requirement of an endpoint: a scope, `ANY`, `OPEN` or `UNCHECKED`; without one it is not served."""

    def declare(endpoint: _Endpoint) -> _Endpoint:
        endpoint.needs = scope  # type: ignore[attr-defined]
        return endpoint

    return declare


def need_of(endpoint: object) -> str:
    """Return the declared requirement of an endpoint.

    Raises:
        LookupError: The endpoint declares none.
    """
    need = getattr(endpoint, "needs", None)
    if not isinstance(need, str):
        raise LookupError(f"endpoint {endpoint!r} declares no required scope: decorate it with @needs(...)")
    return need


def allows(scopes: frozenset[str], need: str, dataset: str | None = None) -> bool:
    """Return True if the scopes meet a requirement.

    Args:
        scopes: Scopes of a token.
        need: Declared requirement of the endpoint.
        dataset: The requested dataset; None is any.
    """
    if ADMIN in scopes or need in scopes or need in (ANY, OPEN, UNCHECKED):
        return True
    if need != READ:
        return False
    return any(s.startswith("read:") for s in scopes) if dataset is None else f"{READ}:{dataset}" in scopes


def said_scopes(scopes: Sequence[str] | frozenset[str]) -> str:
    """Return the scopes as a sorted list for messages."""
    return ", ".join(sorted(scopes))
