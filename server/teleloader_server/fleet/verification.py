"""Verification of announced servers: a request to the announced URL, to which the announced process must respond."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

import httpx

from teleloader_server.fleet.responses import NO_TLS, read_object
from teleloader_shared.directory import Entry
from teleloader_shared.messages import HEALTH_PATH

TIMEOUT_S: Final = 2.0
"""Timeout of a verification, from the DNS lookup to the end of the response."""
MAX_ADDRESSES: Final = 4
"""IP addresses of a host that are tried."""
MAX_LOOKUPS_PER_TOKEN: Final = 64
"""DNS lookups of one token that run at the same time. A lookup cannot be cancelled: without a response from the DNS
server, it runs for longer than the verification."""
METADATA: Final = frozenset(
    map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"))
)
"""Metadata services of Alibaba, Azure, Oracle, AWS and Google whose addresses are not link-local."""

logger = logging.getLogger("teleloader_server")

_lookups: dict[str, tuple[str, Future[list[str] | OSError | UnicodeError]]] = {}
"""Running DNS lookups by host name, each with the name of the token that started it."""

_IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class Unverified(Exception):
    """The announced process does not respond at the announced URL."""


def ip_address(host: str) -> _IpAddress | None:
    """Return the IP address in a text, as IPv4 if it is mapped to IPv6; None for a host name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Return True for a loopback IP address, or a name that means one on every machine."""
    address = ip_address(host)
    return host == "localhost" or host.endswith(".localhost") if address is None else address.is_loopback


def may_connect(target: str, announcer: str) -> bool:
    """Return True if the registry may connect to an IP address for an announcement.

    An announcement must not reach what its sender cannot reach: services on the loopback interface of the registry's
    machine, and metadata services of clouds, which have link-local addresses or those in `METADATA`.

    Args:
        target: IP address of the announced URL.
        announcer: IP address from which the announcement came.
    """
    address = ip_address(target)
    if address is None:
        return False
    if is_loopback(announcer):
        return True
    return not (
        address in METADATA
        or address.is_loopback
        or address.is_link_local
        or address.is_unspecified  # connects to the machine itself
        or address.is_multicast
        or address.is_reserved
    )


async def verify(entry: Entry, announcer: str, context: Callable[[], ssl.SSLContext], owner: str) -> None:
    """Check that the process at an announced URL is the announced instance.

    The request has no token, follows no redirect, and goes to the IP address that was checked: a second DNS lookup
    could return another one.

    Args:
        entry: The announced server.
        announcer: IP address from which the announcement came.
        context: Function that returns the TLS context for https URLs.
        owner: Name of the token with which it is announced.

    Raises:
        Unverified: If the process does not respond, or is another one.
    """
    try:
        async with asyncio.timeout(TIMEOUT_S):
            instance = await _instance_at(entry.url, announcer, context, owner)
    except TimeoutError:
        raise _unverified(entry.url, f"no response within {TIMEOUT_S:g} s") from None
    if instance != entry.instance:
        raise _unverified(entry.url, "another process responds, and its response is not that of the announced server")


async def _instance_at(url: str, announcer: str, context: Callable[[], ssl.SSLContext], owner: str) -> str:
    try:
        named = httpx.URL(url + HEALTH_PATH)
    except httpx.InvalidURL as error:
        raise _unverified(url, str(error)) from None
    addresses = await _addresses(named, url, announcer, owner)
    try:
        tls = context() if named.scheme == "https" else NO_TLS
    except OSError as error:
        logger.error("cannot verify https servers that announce themselves (--fleet-ca): %s", error)
        raise Unverified(
            f"cannot verify {url}: the registry cannot load its CA certificates. Check --fleet-ca on the registry, "
            "whose log contains the cause"
        ) from None
    problem = ""
    for address in addresses:
        try:
            return await _get(named, address, tls)
        except (httpx.ConnectError, OSError) as error:
            problem = str(error) or type(error).__name__
        except httpx.HTTPError:  # its text may quote what another service sent
            problem = "no HTTP response"
    raise _unverified(url, problem)


async def _addresses(named: httpx.URL, url: str, announcer: str, owner: str) -> list[str]:
    """Return the IP addresses of an announced URL to which the registry may connect, at least one."""
    found = [named.host] if ip_address(named.host) else await _lookup(named.host, owner)
    if not isinstance(found, list):
        raise _unverified(url, f"cannot resolve the host name ({found})")
    addresses = found[:MAX_ADDRESSES]
    allowed = [address for address in addresses if may_connect(address, announcer)]
    if not allowed:
        raise _unverified(
            url, f"a server at {announcer} must not announce {', '.join(addresses)}, which other machines cannot reach"
        )
    return allowed


async def _lookup(host: str, owner: str) -> list[str] | OSError | UnicodeError:
    """Return the IP addresses of a host, or the error; wait while `MAX_LOOKUPS_PER_TOKEN` lookups run.

    The lookups have threads of their own: the event loop has few, in which lookups without a response would delay those
    of all other servers, and the exit of this process.
    """
    while (running := _lookups.get(host)) is None:
        mine = [future for other, future in list(_lookups.values()) if other == owner]
        if len(mine) < MAX_LOOKUPS_PER_TOKEN:
            running = _lookups[host] = owner, Future()
            try:
                threading.Thread(target=_resolve, args=(host,), name="teleloader-lookup", daemon=True).start()
            except RuntimeError as error:  # a limit of the processes
                del _lookups[host]
                return OSError(str(error))
            break
        await asyncio.wait(map(asyncio.wrap_future, mine), return_when=asyncio.FIRST_COMPLETED)
    return await asyncio.shield(asyncio.wrap_future(running[1]))


def _resolve(host: str) -> None:
    result: list[str] | OSError | UnicodeError
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        result = list(dict.fromkeys(str(address[0]) for *_, address in found))
    except (OSError, UnicodeError) as error:
        result = error
    _, future = _lookups.pop(host)
    future.set_result(result)


async def _get(named: httpx.URL, address: str, tls: ssl.SSLContext) -> str:
    """Return the instance of the server at an IP address, or "" if the response is not that of a server.

    Raises:
        OSError: If no socket is available.
        httpx.HTTPError: If the server does not respond.
    """
    async with (
        httpx.AsyncClient(verify=tls, trust_env=False, timeout=TIMEOUT_S) as client,
        client.stream(
            "GET", named.copy_with(host=address),
            headers={"Host": named.netloc.decode(), "Accept-Encoding": "identity"},
            extensions={"sni_hostname": named.host},
        ) as response,
    ):  # fmt: skip
        return str((await read_object(response)).get("instance", ""))


def _unverified(url: str, reason: str) -> Unverified:
    return Unverified(
        f"cannot verify {url}: {reason}. Announce a URL that the registry and all clients can reach (--advertise-url)"
    )
