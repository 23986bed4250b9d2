"""Directories of servers: their addresses, and the validation of their lists.

A directory is a file, a DNS name, a registry or a function that lists the servers of a fleet. Its list is untrusted
input: each part has a limit, and invalid entries are reported and ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Final, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

from teleloader_shared.errors import TeleloaderError
from teleloader_shared.text import short

MAX_SERVERS: Final = 4096
"""Limit of the servers of a directory."""
MAX_PER_MACHINE: Final = 64
"""Limit of the servers under one supervisor."""
MAX_URL: Final = 300
"""Limit of a URL, in characters: a host name has at most 253."""
MAX_INSTANCE: Final = 64
"""Limit of the name of an instance, in characters."""
MAX_PROBLEMS: Final = 5
"""Invalid entries that are reported."""
MAX_SHOWN: Final = 200
"""Characters of an invalid URL that are shown."""
MAX_PORT: Final = 65535
_PORTS: Final = {"http": 80, "https": 443}
_HOST: Final = re.compile(r"[a-z0-9._:%-]{1,253}")


class DirectoryAddress(NamedTuple):
    """Address of a directory, or of a single server."""

    kind: Literal["server", "dns", "file", "registry"]
    urls: tuple[str, ...] = ()
    """URL of the server; URL with the DNS name; URLs of the registries."""
    path: str = ""
    """Absolute path of the file."""


class Entry(NamedTuple):
    """A server in a directory."""

    url: str
    """Normalized, see `server_url`."""
    instance: str = ""
    """Random public name of the server's process, which registries verify and clients ignore; "" if unknown."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Validated list of servers from a directory."""

    entries: tuple[Entry, ...]
    """The valid entries, each URL once."""
    is_complete: bool
    """False if a part is missing or invalid: then a server that is not listed may still exist."""
    problems: tuple[str, ...] = ()
    """The first `MAX_PROBLEMS` invalid parts, for a log."""
    refusal: TeleloaderError | None = None
    """Error with which all registries refused the client, so that a retry would not help; None otherwise."""


def directory_address(text: str) -> DirectoryAddress:
    """Return the address of a directory, given one of the following forms.

    ::

        http://host:port                   a single server
        dns+http://name:port               the servers at all IP addresses of a DNS name
        file:///folder/name                the servers that a file lists
        registry+http://a:port,b:port      the servers that registries list

    Each ``http`` may be ``https``.

    Raises:
        ValueError: If the address is invalid.
    """
    scheme, separator, rest = text.partition("://")
    prefix, plus, transport = scheme.rpartition("+")
    if scheme == "file" and rest.startswith("/") and not set("?#\0") & set(unquote(rest)):
        return DirectoryAddress("file", path=unquote(rest))
    if not separator or (plus and prefix not in ("dns", "registry")) or transport not in _PORTS:
        raise ValueError(
            f"invalid server or directory {_shown(text)}: expected http://host:port, dns+http://name:port, "
            "file:///folder/name or registry+http://host:port"
        )
    if prefix == "registry":
        urls = tuple(dict.fromkeys(server_url(f"{transport}://{part}") for part in rest.split(",")))
        return DirectoryAddress("registry", urls)
    return DirectoryAddress("dns" if plus else "server", (server_url(f"{transport}://{rest}"),))


def server_url(text: object) -> str:
    """Return a server's URL in its normal form: lower case host, no default port, no slash at the end.

    Raises:
        ValueError: If it is not an HTTP URL, or contains a password, query or fragment.
    """
    invalid = f"invalid server URL {_shown(text)}: expected http://host:port"
    if not isinstance(text, str) or len(text) > MAX_URL or not _is_plain(text):
        raise ValueError(f"{invalid}, up to {MAX_URL} ASCII characters")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{invalid} ({error})") from None
    path = parts.path.rstrip("/")
    if parts.scheme not in _PORTS or not host or not _HOST.fullmatch(host) or port == 0 or "//" in path:
        raise ValueError(invalid)
    if "@" in parts.netloc or "?" in text or "#" in text:
        raise ValueError(
            "invalid server URL: a password, query or fragment is not allowed, because URLs are logged. Pass a token "
            "as token=, or set TELELOADER_TOKEN"
        )
    bracketed = f"[{host}]" if ":" in host else host
    suffix = "" if port in (None, _PORTS[parts.scheme]) else f":{port}"
    return f"{parts.scheme}://{bracketed}{suffix}{path}"


def listing(source: object) -> Listing:
    """Return the valid entries of an untrusted list of URLs, or of mappings with ``url`` and possibly ``instance``."""
    if not isinstance(source, Iterable) or isinstance(source, str | bytes | Mapping):
        return Listing((), is_complete=False, problems=(f"expected a list of server URLs, got {short(source)}",))
    entries: dict[str, Entry] = {}
    problems: list[str] = []
    for number, item in enumerate(source):
        if number == MAX_SERVERS:  # a client that used a part of the list would stop using the other servers
            return Listing((), is_complete=False, problems=(f"more than {MAX_SERVERS:,} servers",))
        try:
            entry = _entry(item)
        except ValueError as error:
            problems.append(str(error))
        else:
            entries[entry.url] = entry
    return Listing(tuple(entries.values()), not problems, tuple(problems[:MAX_PROBLEMS]))


def merged(listings: Iterable[Listing]) -> Listing:
    """Return the union of the lists of several registries, which is incomplete if one of them is."""
    found = list(listings)
    # in turn, so that no registry can fill the client's list of servers
    in_turn = chain.from_iterable(zip_longest(*(one.entries for one in found)))
    entries = {entry.url: entry for entry in in_turn if entry is not None}
    problems = [problem for one in found for problem in one.problems]
    refusals = [one.refusal for one in found]
    return Listing(
        tuple(entries.values()),
        all(one.is_complete for one in found),
        tuple(problems[:MAX_PROBLEMS]),
        refusals[0] if None not in refusals else None,
    )


def port_of(url: str) -> int:
    """Return the port of a valid http or https URL."""
    parts = urlsplit(url)
    return parts.port or _PORTS[parts.scheme]


def at_port(url: str, port: int) -> str:
    """Return a valid server URL with another port."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return parts._replace(netloc=f"{host}" if port == _PORTS[parts.scheme] else f"{host}:{port}").geturl()


def _entry(item: object) -> Entry:
    """Return the entry of an untrusted item.

    Raises:
        ValueError: If the item is invalid.
    """
    if not isinstance(item, Mapping):
        return Entry(server_url(item))
    instance = item.get("instance", "")
    if not isinstance(instance, str) or len(instance) > MAX_INSTANCE or not _is_plain(instance):
        raise ValueError(
            f"invalid instance {short(instance)}: expected up to {MAX_INSTANCE} printable ASCII characters"
        )
    return Entry(server_url(item.get("url")), instance)


def _is_plain(text: str) -> bool:
    """Return True if the text has printable ASCII characters only, and no space."""
    return text.isascii() and text.isprintable() and " " not in text


def _shown(url: object) -> str:
    """Return the part of a URL that may be logged."""
    if not isinstance(url, str):
        return short(url)
    return "(hidden: it contains '@')" if "@" in url else repr(url[:MAX_SHOWN])
