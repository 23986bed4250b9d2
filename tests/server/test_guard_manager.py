"""Connections that a server closes at its limits, as a function of counts and sizes."""

from __future__ import annotations

import dataclasses

from teleloader_server.auth.authenticator import Authenticator
from teleloader_server.dispatch.quotas import Quota
from teleloader_server.limits import ClientLimits
from teleloader_server.web.guard_manager import CONNECTION_BYTES, ConnectionManager


@dataclasses.dataclass(eq=False)
class Fake:
    """Connection without a socket."""

    address: str = "192.0.2.1"
    quota: Quota | None = None
    is_responding: bool = False
    has_requested: bool = False
    closed: list[str] = dataclasses.field(default_factory=list)

    def check(self, now: float) -> None:
        """Record a check."""
        self.closed.append(f"check at {now:g}")

    def shutdown(self) -> None:
        """Record a shutdown."""
        self.closed.append("shutdown")

    def abort(self) -> None:
        """Record that the connection was aborted."""
        self.closed.append("abort")


PRINCIPAL = Quota("principal", memory=1, max_consumers=1)


def manager(**limits: int) -> ConnectionManager:
    """Return a manager without connections."""
    return ConnectionManager(dataclasses.replace(ClientLimits(), **limits), Authenticator())


def admit(connections: ConnectionManager, *admitted: Fake) -> list[str | None]:
    """Return why each connection is refused."""
    return [connections.admit(one) for one in admitted]


def test_the_oldest_unauthenticated_connection_makes_room() -> None:
    """A connection that has been authenticated since stays, however old it is."""
    connections = manager(max_connections=2)
    first, second, third = Fake(), Fake(), Fake()
    assert admit(connections, first, second) == [None, None]
    first.quota = PRINCIPAL
    assert admit(connections, third) == [None]
    assert (first.closed, second.closed) == ([], ["abort"])
    assert connections.connections == {first, third}


def test_a_connection_is_refused_when_all_are_authenticated() -> None:
    """The reason has the number and the name of the limit."""
    connections = manager(max_connections=1)
    (reason,) = admit(connections, Fake(quota=PRINCIPAL), Fake())[1:]
    assert reason == "the server has reached the limit of 1 connection (max_connections): retry later"


def test_an_ip_address_closes_its_own_connections() -> None:
    """A connection beyond `max_connections_per_address` does not close connections of other IP addresses."""
    connections = manager(max_connections_per_address=1)
    other, old, new = Fake("192.0.2.2"), Fake(), Fake()
    assert admit(connections, other, old, new) == [None, None, None]
    assert (other.closed, old.closed) == ([], ["abort"])
    new.quota = PRINCIPAL
    (reason,) = admit(connections, Fake())
    assert reason is not None
    assert reason.startswith("192.0.2.1 has reached the limit of 1 connection (max_connections_per_address)")


def test_memory_of_unauthenticated_connections_has_a_limit() -> None:
    """Beyond it the oldest is closed. Memory that was released, or of an authenticated connection, does not count."""
    limit = 2**20
    connections = manager(max_unauthenticated_bytes=limit)
    old, new, authenticated = Fake(), Fake(), Fake(quota=PRINCIPAL)
    admit(connections, old, new, authenticated)
    connections.charge(authenticated, limit)
    for _ in range(2):
        connections.charge(new, limit - 2 * CONNECTION_BYTES)
        assert not old.closed
        connections.settle(new, CONNECTION_BYTES)
    connections.charge(new, limit - 2 * CONNECTION_BYTES + 1)
    assert old.closed == ["abort"]
    assert not new.closed
    assert not authenticated.closed


def test_draining_closes_connections_that_have_had_a_request() -> None:
    """The first request of another connection may be in transit, and gets a response."""
    connections = manager()
    used, fresh = Fake(has_requested=True), Fake()
    admit(connections, used, fresh)
    connections.drain()
    assert (used.closed, fresh.closed) == (["shutdown"], [])


def test_a_left_connection_is_forgotten() -> None:
    """A closed connection is removed from all counts, once even if it is closed twice."""
    connections = manager(max_connections=1, max_connections_per_address=1)
    one = Fake(quota=PRINCIPAL)
    admit(connections, one)
    connections.leave(one)
    connections.leave(one)
    assert admit(connections, Fake()) == [None]
