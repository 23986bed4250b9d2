"""Validation of the listening address, the Host header and the origin of browser requests."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final

from teleloader_server.config import ConfigError

MAX_HOST: Final = 300
"""Maximum length of a Host header in characters: a DNS name has at most 253, and a port follows."""


def refuse_unprotected(address: str, *, has_tokens: bool, insecure: bool) -> None:
    """Raise an error if a server without authentication listens on a non-loopback address.

    Args:
        address: IP address of the listening socket.
        has_tokens: Whether clients must authenticate.
        insecure: Whether the operator disabled authentication explicitly.

    Raises:
        ConfigError: If `address` is not a loopback address, and authentication is neither enabled nor explicitly
            disabled.
    """
    if has_tokens or insecure or is_loopback(address):
        return
    raise ConfigError(
        f"cannot listen on {address} without tokens: any client that reaches this address could load data. Generate "
        "a token with teleloader-server token add trainer --file tokens.toml and start with --tokens tokens.toml "
        "(serve(..., token=...)), listen on 127.0.0.1, or disable authentication with --insecure "
        "(serve(..., insecure=True))"
    )


def is_loopback(address: str) -> bool:
    """Return True if an IP address is a loopback address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def known_hosts(names: Iterable[str]) -> frozenset[str]:
    """Normalize host names for `is_known_host`: lower case, without a trailing dot."""
    return frozenset(name.lower().rstrip(".") for name in names if name)


def is_known_host(header: str, known: frozenset[str]) -> bool:
    """Return True if a Host header names this server (protection against DNS rebinding).

    If evil.example resolves to this server's IP address, its pages can send requests to this server, with the header
    ``Host: evil.example``. IP addresses are always accepted, because they are not resolved.

    Args:
        header: Value of the Host header, with or without a port.
        known: Accepted names; ``*.example.com`` matches its subdomains, and ``*`` any name.
    """
    if len(header) > MAX_HOST:
        return False  # the lookup of parent domains below takes quadratic time
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
    """Return True if the headers identify a cross-site request (CSRF protection).

    Navigation is allowed, because any page may link to this server.

    Args:
        method: HTTP method of the request.
        host: Host header, which proxies must not change.
        origin: Origin header, or None.
        site: Sec-Fetch-Site header, or None; browsers send it only over HTTPS and to localhost.
        mode: Sec-Fetch-Mode header, or None.
    """
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return True
    if site is None or site in ("same-origin", "none"):
        return False
    return not (mode == "navigate" and method in ("GET", "HEAD"))
