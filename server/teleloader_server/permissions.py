"""Who may come in, and what they may do: decisions only, without files, sockets or clocks.

::

    scope        allows
    read         batches of all datasets
    read:NAME    batches of one dataset
    stats        /stats, /metrics and the dashboard
    admin        all of it, and what holds up others: loading in the server's own process
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
"""What an endpoint needs that is for whoever may come in, whatever for."""
OPEN: Final = "open"
"""What an endpoint needs that is for everybody, but not for pages of other sites."""
UNCHECKED: Final = "unchecked"
"""What an endpoint needs that tells nothing and does nothing: probes, and the files of the dashboard."""


_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


class Principal(NamedTuple):
    """Who asks."""

    name: str
    """What the token is called."""
    scopes: frozenset[str]
    """What its owner may do."""
    memory_share: float
    """The part of the memory for batches that its owner's consumers may fill together, in (0, 1]."""

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
            f"the token {self.name!r} has the scopes {said_scopes(self.scopes)}, and this needs {wanted[:200]!r}: ask "
            "who runs the server"
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
"""Who asks a server that has no tokens."""


# -- what an endpoint needs


def needs(scope: str) -> Callable[[_Endpoint], _Endpoint]:
    """Declare what an endpoint needs: a scope, `ANY`, `OPEN` or `UNCHECKED`; without that it is not served."""

    def declare(endpoint: _Endpoint) -> _Endpoint:
        endpoint.needs = scope  # type: ignore[attr-defined]
        return endpoint

    return declare


def need_of(endpoint: object) -> str:
    """What an endpoint has declared.

    Raises:
        LookupError: When it has declared nothing.
    """
    need = getattr(endpoint, "needs", None)
    if not isinstance(need, str):
        raise LookupError(f"{endpoint!r} does not declare who may ask for it: @needs(...)")
    return need


def allows(scopes: frozenset[str], need: str, dataset: str | None = None) -> bool:
    """Whether these scopes are enough.

    Args:
        scopes: What somebody has.
        need: What an endpoint has declared.
        dataset: Which dataset it is about; None is any.
    """
    if ADMIN in scopes or need in scopes or need in (ANY, OPEN, UNCHECKED):
        return True
    if need != READ:
        return False
    return any(s.startswith("read:") for s in scopes) if dataset is None else f"{READ}:{dataset}" in scopes


# -- where a server may stand, and what it may be called


def said_scopes(scopes: Sequence[str] | frozenset[str]) -> str:
    """Scopes as a sentence names them."""
    return ", ".join(sorted(scopes))
