"""Where a server may listen, by which names it may be called, and which pages may call it."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final

from teleloader_server.config import ConfigError

MAX_HOST: Final = 300
"""Characters of a ``Host`` header: a DNS name has at most 253, and a port follows."""


def refuse_unprotected(address: str, *, has_tokens: bool, insecure: bool) -> None:
    """Refuse to listen where others are without asking them for a token.

    Args:
        address: The IP address that was bound.
        has_tokens: Whether there are tokens.
        insecure: Whether the user has said that it shall be so.

    Raises:
        ConfigError: When whoever reaches the address could come in.
    """
    if has_tokens or insecure or is_loopback(address):
        return
    raise ConfigError(
        f"cannot listen on {address} without tokens: every machine that reaches this address could load data. Generate "
        "a token with teleloader-server token add trainer --file tokens.toml and start with --tokens tokens.toml "
        "(serve(..., token=...)), listen on 127.0.0.1, or disable authentication with --insecure "
        "(serve(..., insecure=True))"
    )


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a server that listens on an IP address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def known_hosts(names: Iterable[str]) -> frozenset[str]:
    """What `is_known_host` goes by: names, in lower case and without their final dot."""
    return frozenset(name.lower().rstrip(".") for name in names if name)


def is_known_host(header: str, known: frozenset[str]) -> bool:
    """Whether a request that says ``Host: header`` may be meant for this server.

    A page of evil.example whose name is made to lead to this server's address has its browser say evil.example here. An
    address is not a name, so nobody can have made it lead elsewhere.

    Args:
        header: The header, with or without a port.
        known: Names, of which ``*.example.com`` is all below it and ``*`` is any.
    """
    if len(header) > MAX_HOST:
        return False  # each parent domain is looked up below, which takes time by the square of the length
    name = _without_port(header).lower().rstrip(".")
    if name in known or name == "localhost" or name.endswith(".localhost") or "*" in known:
        return True
    parts = name.split(".")
    if any(f"*.{'.'.join(parts[i:])}" in known for i in range(1, len(parts))):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _without_port(header: str) -> str:
    name, colon, port = header.rpartition(":")
    return name if colon and port.isdecimal() else header


def is_of_another_site(method: str, host: str, origin: str | None, site: str | None, mode: str | None) -> bool:
    """Whether a page of another site has caused a request, as its browser says. Other clients say nothing of it.

    A link to this server may stand anywhere, so going to it is allowed.

    Args:
        method: The request's method.
        host: Its header Host, which a proxy must leave as it is.
        origin: Its header Origin, None where it has none.
        site: Its header Sec-Fetch-Site, which browsers send to HTTPS and to their own machine only.
        mode: Its header Sec-Fetch-Mode.
    """
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return True
    if site is None or site in ("same-origin", "none"):
        return False
    return not (mode == "navigate" and method in ("GET", "HEAD"))
