"""Servers of a dataset, which a thread keeps equal to those that a directory lists."""

from __future__ import annotations

import heapq
import logging
import math
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Any, Final, Protocol

from teleloader.api.credentials import Credentials
from teleloader.fleet.directory import Directory, directory_of
from teleloader.fleet.membership import Membership
from teleloader.fleet.trust import check_trust
from teleloader.transport.interface import BatchServer
from teleloader_shared.directory import MAX_PER_MACHINE, MAX_PORT, MAX_PROBLEMS, Entry, Listing, at_port, port_of
from teleloader_shared.errors import ServerUnavailable, TeleloaderError, TlsError
from teleloader_shared.forks import after_fork_in_child

MAX_USED_SERVERS: Final = 32
"""Maximum number of servers that a loader uses: the assignment of batches balances the load for up to 32."""
READ_INTERVAL_S: Final = 0.5
"""Mean time between two reads of a directory while an iterator is open."""
JITTER: Final = 0.2
"""Largest random change of the interval, as a fraction, so that clients do not read simultaneously."""

READ_TIMEOUT_S: Final = 0.5
"""Maximum wait in seconds for the directory at the start of an iteration, if servers are known."""
PROBLEM_INTERVAL_S: Final = 60.0
"""Minimum time between two warnings about a directory: the text of a problem may vary."""

logger = logging.getLogger("teleloader")


class Follower(Protocol):
    """User of the servers, such as an open iterator."""

    def follow(self, servers: Sequence[BatchServer]) -> None:
        """Use these servers from now on; called in another thread, and again with equal servers."""


class Servers:
    """Loader servers of a dataset: a fixed list, or those that a directory lists.

    Args:
        source: Server URLs, the address of a directory, or a function that returns server URLs.
        connect: Function that creates the client of a server, given the URL and optionally ``server_name=`` or
            ``timeout=``.
        credentials: Credentials of these clients.
        trust_directory: Whether the client may use any server that a directory lists.

    Raises:
        ValueError: If `source` contains no URL, or an invalid one.
    """

    _lock: threading.RLock
    """Reentrant, because a finalizer in the thread that holds it may call `unfollow`."""
    _reading: threading.Lock
    """Held while a thread reads the directory."""
    _followers: list[weakref.ref[Follower]]
    _is_watched: bool
    """True while a thread reads the directory periodically."""
    _read_at: float
    """Time at which the last read began (``time.monotonic()``)."""
    _logged_at: float
    """Time of the last warning about the directory."""

    def __init__(
        self,
        source: str | Sequence[str] | Callable[[], Iterable[str]],
        connect: Callable[..., BatchServer],
        credentials: Credentials,
        *,
        trust_directory: bool,
    ) -> None:
        self._connect = connect
        self._credentials = credentials
        self._trust_directory = trust_directory
        self._failed: deque[str] = deque()
        """URLs of servers that failed since the last read."""
        self.problems: tuple[str, ...] = ()
        """Problems of the last read of the directory, such as servers that the client must not use."""
        self._logged: tuple[str, ...] = ()
        """Problems of the last warning; empty again after a read without problems."""
        self._refused: TeleloaderError | None = None
        """Error if the directory refuses the client, or the client may use none of the listed servers."""
        self.known: tuple[BatchServer, ...] = ()
        """The servers, in the order in which they were listed; replaced when it changes."""
        self._directory: Directory | None = None
        self._reset()
        _created.add(self)
        self._directory = directory_of(source, connect)
        self._membership = Membership(0.0 if self._directory is None else self._directory.grace)
        if self._directory is not None:
            self.read()
            return
        urls: Any = source if isinstance(source, Sequence) and not isinstance(source, str) else [source]
        self.known = tuple({server.url: server for server in map(connect, urls)}.values())
        if not self.known:
            raise ValueError("empty list of server URLs: pass the URL of at least one server")

    @property
    def description(self) -> str:
        """Short description for messages: the directory, or the URL of the first server without an error."""
        if self._directory is not None:
            return self._directory.address
        return min(self.known, key=lambda server: server.last_error is not None).url

    @property
    def is_dynamic(self) -> bool:
        """True if a directory lists the servers, which may then change."""
        return self._directory is not None

    def require(self) -> tuple[BatchServer, ...]:
        """Return the servers, after reading the directory if its last read is older than `READ_INTERVAL_S`.

        Raises:
            ServerUnavailable: If the directory has listed no server yet.
            TlsError: If the client may use none of the listed servers, or cannot verify a registry.
            Unauthorized: If a registry rejects the token; Forbidden if the token lacks a permission.
        """
        if time.monotonic() - self._read_at > READ_INTERVAL_S:
            self.refresh()
        if self._directory is not None and not self.known:
            if self._refused is not None:
                raise type(self._refused)(f"no server found through {self._directory.address}: {self._refused}")
            why = "; ".join(self.problems) or "it lists no servers"
            raise ServerUnavailable(f"no server found through {self._directory.address}: {why}")
        return self.known

    def __repr__(self) -> str:
        urls = [server.url for server in self.known]
        return repr(urls[0] if len(urls) == 1 else urls) if self._directory is None else repr(self._directory.address)

    def failed(self, url: str) -> None:
        """Record that a request to a server failed. The client forgets it unless the directory lists it."""
        if self._directory is not None:
            self._failed.append(url)

    def refresh(self) -> None:
        """Read the directory; return after `READ_TIMEOUT_S` at the latest if servers are known."""
        if self._directory is not None and self.known:
            reading = threading.Thread(target=self.read, name="teleloader-read", daemon=True)
            reading.start()
            reading.join(READ_TIMEOUT_S)
        else:
            self.read()

    def read(self) -> None:
        """Read the directory and update `known`; no-op for a fixed list, or if another thread reads."""
        directory = self._directory
        if directory is None or not self._reading.acquire(blocking=False):
            return
        try:
            self._read_at = time.monotonic()
            while self._failed:
                self._membership.failed(self._failed.popleft())
            clients = {server.url: server for server in self.known}
            listing = self._usable(directory, directory.read(), clients)
            self.problems = listing.problems
            self._warn(directory)
            self._membership.observe(listing, time.monotonic())
            urls = self._membership.urls
            if tuple(server.url for server in self.known) != urls:
                # a fork may contain URLs without clients
                server_name = directory.server_name
                self.known = tuple(clients.get(url) or self._connect(url, server_name=server_name) for url in urls)
        finally:
            self._reading.release()
        for follower in self._alive():
            follower.follow(self.known)

    def learn(self, url: str, ports: Sequence[int] | None) -> None:
        """Also use the servers at other ports of a server's host, which run under the same supervisor.

        No-op if a directory lists the servers, and if a proxy or container maps the port of the URL to another one.
        """
        if self._directory is not None or ports is None or port_of(url) not in ports:
            return
        if not all(isinstance(port, int) and 0 < port <= MAX_PORT for port in ports):
            return
        with self._lock:
            known = {server.url: server for server in self.known}
            for other in (at_port(url, port) for port in ports[:MAX_PER_MACHINE]):
                if other not in known:
                    known[other] = self._connect(other)
            self.known = tuple(known.values())

    def _warn(self, directory: Directory) -> None:
        """Log the problems of the last read if they are new, and the last warning is not recent."""
        now = time.monotonic()
        if not self.problems:
            self._logged = ()
        elif self.problems != self._logged and now - self._logged_at >= PROBLEM_INTERVAL_S:
            logger.warning("%s: %s", directory.address, "; ".join(self.problems))
            self._logged, self._logged_at = self.problems, now

    def follow(self, follower: Follower) -> None:
        """Keep a follower up to date until it is garbage-collected or passed to `unfollow`."""
        if self._directory is None:
            return
        with self._lock:
            self._followers.append(weakref.ref(follower))
            if not self._is_watched:
                reference = weakref.ref(self)
                threading.Thread(target=_watch, args=(reference,), name="teleloader-directory", daemon=True).start()
                self._is_watched = True

    def unfollow(self, follower: Follower) -> None:
        """Stop updating a follower."""
        if self._directory is None:
            return
        with self._lock:
            self._followers = [each for each in self._followers if each() not in (None, follower)]

    def _reset(self) -> None:
        """Create the state of this process: threads and locks of a parent process do not exist in its children."""
        self._lock = threading.RLock()
        self._reading = threading.Lock()
        self._followers = []
        self._is_watched = False
        self._read_at = self._logged_at = -math.inf

    def _alive(self) -> list[Follower]:
        return [follower for reference in self._followers if (follower := reference()) is not None]

    def _usable(self, directory: Directory, listing: Listing, clients: dict[str, BatchServer]) -> Listing:
        """Return a listing without the servers that the client must not or cannot use; add clients of new servers."""
        entries: dict[str, Entry] = {}
        problems, refused = list(listing.problems), listing.refusal
        is_verified = directory.server_name is not None or self._credentials.ca is not None
        for entry in listing.entries:
            try:
                if not directory.is_trusted:
                    check_trust(entry.url, is_verified=is_verified, trust_directory=self._trust_directory)
                client = clients.get(entry.url) or self._connect(entry.url, server_name=directory.server_name)
            except TlsError as error:
                problems.append(str(error))
                refused = error
            except ValueError as error:
                problems.append(str(error))
            else:  # HTTP clients normalize URLs further, for example "/a/../b"
                entries.setdefault(client.url, entry._replace(url=client.url))
                clients.setdefault(client.url, client)
        self._refused = None if entries else refused
        return Listing(tuple(entries.values()), listing.is_complete, tuple(problems[:MAX_PROBLEMS]))


def nearest(servers: Sequence[BatchServer], key: str, used: Collection[str] = ()) -> tuple[BatchServer, ...]:
    """Return up to `MAX_USED_SERVERS` servers; of a larger fleet, different ones for different keys.

    Servers with a recent error are the last choice. A server that joins or leaves a larger fleet changes at most one of
    the others (rendezvous hashing).

    Args:
        servers: The servers.
        key: Key of the choice, such as that of a loader.
        used: URLs of servers in use, which listed servers do not displace before they have failed.
    """
    if len(servers) <= MAX_USED_SERVERS:
        return tuple(servers)

    def rank(server: BatchServer) -> tuple[bool, bool, bytes]:
        digest = blake2b(f"{key}/{server.url}".encode()).digest()
        return server.has_recently_failed, server.url not in used, digest

    return tuple(heapq.nsmallest(MAX_USED_SERVERS, servers, rank))


def _watch(reference: weakref.ref[Servers]) -> None:
    """Read the directory periodically while there are followers."""
    intervals = random.Random()  # noqa: S311 - not for secrets; the user's random numbers stay unchanged
    while True:
        time.sleep(READ_INTERVAL_S * intervals.uniform(1 - JITTER, 1 + JITTER))
        servers = reference()
        if servers is None:
            return
        with servers._lock:
            if not servers._alive():
                servers._is_watched = False
                return
        try:
            servers.read()
        except BaseException:  # also SystemExit in a function of the user; a later read may succeed
            logger.exception("cannot read %s", servers.description)
        del servers


_created: weakref.WeakSet[Servers] = weakref.WeakSet()


def _reset_copies() -> None:
    for servers in list(_created):
        servers._reset()


after_fork_in_child(_reset_copies)
