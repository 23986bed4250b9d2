"""Registry of the servers of a fleet: announcements and heartbeats, in memory. No I/O, no clock of its own.

A server announces itself every half second. The registry lists the server after the announced process has responded to
a request to its URL, until the server withdraws or its heartbeats end. Only the process that responds at a URL
can therefore list the URL. The registry needs no file: after a restart or a pause it publishes an empty list, which
changes nothing for clients, until it knows all servers again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from teleloader_shared.directory import MAX_SERVERS, Entry
from teleloader_shared.server_summary import ServerSummary

TTL_S: Final = 3.0
"""Seconds after its last heartbeat for which a server is listed."""
MAX_GAP_S: Final = 1.5
"""Seconds without a call after which the registry starts anew: the process was paused, and heartbeats were not read. It
is less than `TTL_S` by more than the interval of heartbeats, so that servers do not expire after a shorter pause."""
STARTUP_DELAY_S: Final = 1.0
"""Seconds after the start, and after the last server that joined or was refused since, for which no server is listed,
so that clients do not see a part of the fleet only."""
MAX_STARTUP_S: Final = 10.0
"""Seconds after the start from which the list is published, although servers join or are refused."""
MAX_SERVERS_PER_TOKEN: Final = 1024
"""Servers that are announced with one token, so that no token fills the list."""
MAX_PENDING: Final = 128
"""Servers that are verified at the same time."""
MAX_PENDING_PER_TOKEN: Final = 64
"""Servers of one token that are verified at the same time, so that URLs without a response delay no server of
another token."""

MAX_LOST: Final = 256
"""Servers without heartbeats that are remembered."""
LOST_S: Final = 600.0
"""Seconds for which they are remembered."""

Outcome = Literal["listed", "verify", "pending", "full"]
"""Outcome of an announcement: the server is listed; the caller must verify it; a verification is pending; or a limit
of the registry is reached."""


@dataclass(slots=True)
class _Announced:
    entry: Entry
    owner: str
    """Name of the token with which it was announced; no other token may withdraw it."""
    heartbeat: float
    summary: ServerSummary | None = None
    """Figures in its latest heartbeat."""


class ServerStatus(NamedTuple):
    """Server that is listed, or whose heartbeats have ended."""

    entry: Entry
    summary: ServerSummary | None
    lost_for: float | None
    """Seconds since the last heartbeat of a server that is no longer listed; None for a listed one."""


def instance_of(key: str) -> str:
    """Return the public name of a server process, given its secret key.

    A server sends the key with its announcements, and its URL responds with the name. Therefore only the process
    itself can announce its URL, although every client knows the name.
    """
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class Registry:
    """Servers that have announced themselves, see the module.

    Args:
        now: Time of the start, in seconds of a monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._started = self._called = now
        self._published_at = now + STARTUP_DELAY_S
        self._listed: OrderedDict[str, _Announced] = OrderedDict()
        """By URL, the oldest heartbeat first."""
        self._pending: OrderedDict[Entry, _Announced] = OrderedDict()
        """Servers that are being verified, the oldest announcement first."""
        self._lost: OrderedDict[str, _Announced] = OrderedDict()
        """Servers that did not withdraw and whose heartbeats have ended, by URL, in this order."""
        self._all: tuple[OrderedDict[Any, _Announced], ...] = (self._listed, self._pending)

    def announce(self, entry: Entry, owner: str, now: float, summary: ServerSummary | None = None) -> Outcome:
        """Record an announcement or heartbeat.

        Args:
            entry: The server; its instance must not be empty.
            owner: Name of the token with which it is announced.
            now: The time.
            summary: Figures of the server.

        Returns:
            The outcome. After ``"verify"``, the caller must check that the process at the URL is this instance, and
            call `verified` or `refuted`.
        """
        self._advance(now)
        outcome = self._record(entry, owner, now)
        if outcome == "listed":
            self._listed[entry.url].summary = summary
        if outcome == "full":
            self._delay_list(now)
        return outcome

    def _record(self, entry: Entry, owner: str, now: float) -> Outcome:
        listed = self._listed.get(entry.url)
        if listed is None or listed.owner != owner:
            of_owner = {known.entry.url for servers in self._all for known in servers.values() if known.owner == owner}
            if len(of_owner | {entry.url}) > MAX_SERVERS_PER_TOKEN:
                return "full"
        if listed is not None and listed.entry == entry:
            listed.owner, listed.heartbeat = owner, now
            self._listed.move_to_end(entry.url)
            return "listed"
        if entry in self._pending:
            return "pending"
        verifying = sum(announced.owner == owner for announced in self._pending.values())
        if len(self._pending) >= MAX_PENDING or verifying >= MAX_PENDING_PER_TOKEN:
            return "full"
        if listed is None and len(self._listed) >= MAX_SERVERS:
            return "full"
        self._pending[entry] = _Announced(entry, owner, now)
        return "verify"

    def verified(self, entry: Entry, now: float) -> bool:
        """List a server, because the process at its URL is the announced instance; return False if it cannot be."""
        announced = self._pending.pop(entry, None)
        if announced is None:  # withdrawn meanwhile
            return False
        if entry.url not in self._listed and len(self._listed) >= MAX_SERVERS:
            return False
        announced.heartbeat = now
        self._listed[entry.url] = announced
        self._listed.move_to_end(entry.url)
        self._lost.pop(entry.url, None)
        self._delay_list(now)
        return True

    def refuted(self, entry: Entry) -> None:
        """Drop an announcement whose URL did not respond, or belongs to another process."""
        self._pending.pop(entry, None)

    def withdraw(self, instance: str, owner: str) -> bool:
        """Remove a server that stops; return False if this instance was not announced with this token."""
        withdrawn = 0
        for servers in (*self._all, self._lost):
            mine = [key for key, known in servers.items() if known.entry.instance == instance and known.owner == owner]
            for key in mine:
                del servers[key]
            withdrawn += len(mine)
        return withdrawn > 0

    def servers(self, now: float) -> tuple[Entry, ...]:
        """Return the listed servers.

        None after the start or a pause until no server has joined or been refused for `STARTUP_DELAY_S`, at most for
        `MAX_STARTUP_S`, and none for up to `TTL_S` while the first announcements are verified.
        """
        self._advance(now)
        if now < self._published_at or (self._pending and now - self._started < TTL_S):
            return ()
        return tuple(announced.entry for announced in self._listed.values())

    def statuses(self, now: float) -> list[ServerStatus]:
        """Return the listed servers with their figures, and those whose heartbeats have ended in the last `LOST_S`."""
        self._advance(now)
        listed = [ServerStatus(found.entry, found.summary, None) for found in self._listed.values()]
        lost = [ServerStatus(found.entry, None, now - found.heartbeat) for found in self._lost.values()]
        return listed + lost

    def _delay_list(self, now: float) -> None:
        """Record that further servers probably join, if the list is not published yet."""
        if now < self._published_at:
            self._published_at = min(now + STARTUP_DELAY_S, self._started + MAX_STARTUP_S)

    def _advance(self, now: float) -> None:
        """Start anew after a pause, and remove servers without heartbeats."""
        was_paused = now - self._called > MAX_GAP_S
        if was_paused:
            self._started = now
            self._published_at = now + STARTUP_DELAY_S
        self._called = now
        for servers in self._all:
            while servers:
                key, oldest = next(iter(servers.items()))
                if now - oldest.heartbeat <= TTL_S:
                    break
                del servers[key]
                if servers is self._listed and not was_paused:  # otherwise the heartbeats were only not read
                    self._lost[oldest.entry.url] = oldest
                    self._lost.move_to_end(oldest.entry.url)
        while self._lost:
            key, oldest = next(iter(self._lost.items()))
            if len(self._lost) <= MAX_LOST and now - oldest.heartbeat <= LOST_S:
                break
            del self._lost[key]
