"""Servers that a client knows, derived from successive listings of a directory. No I/O, no clock.

The rules:

1. A listed server joins at once.
2. Servers that are missing from an empty, unreadable or partly invalid listing stay.
3. A server leaves if a complete listing does not contain it, and no listing has contained it for the grace time of the
   directory.
4. A server that fails leaves at once if the last listing with servers does not contain it. This listing may be
   incomplete, for example while a registry does not respond. A client that knew a server always knows one.
5. Only the first `MAX_SERVERS` of a listing join. If as many are known, a listed server replaces the one that has been
   absent for the longest time.
"""

from __future__ import annotations

from teleloader_shared.directory import MAX_SERVERS, Listing


class Membership:
    """Set of servers that a client knows, updated from directory listings by the rules in the module docstring.

    Args:
        grace: Seconds without the server in listings after which it leaves.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._absent_since: dict[str, float | None] = {}
        """Time of the first listing without the server, or None if the last listing contains it, by URL."""

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs of the known servers, in the order in which they joined."""
        return tuple(self._absent_since)

    def observe(self, listing: Listing, now: float) -> None:
        """Record a listing of the directory at the time `now`, in seconds of a monotonic clock."""
        listed = dict.fromkeys(entry.url for entry in listing.entries[:MAX_SERVERS])
        for url in set(self._absent_since).difference(listed) if listed else ():
            since = self._absent_since[url]
            self._absent_since[url] = since = now if since is None else since
            if listing.is_complete and now - since >= self._grace:
                del self._absent_since[url]
        for url in listed:
            if url not in self._absent_since and len(self._absent_since) == MAX_SERVERS:
                self._forget_absent()
            self._absent_since[url] = None

    def _forget_absent(self) -> None:
        """Forget the server that has been absent for the longest time."""
        absent = {url: since for url, since in self._absent_since.items() if since is not None}
        del self._absent_since[min(absent, key=absent.__getitem__)]

    def failed(self, url: str) -> None:
        """Record that a request to a server failed."""
        if self._absent_since.get(url) is not None and len(self._absent_since) > 1:
            del self._absent_since[url]
