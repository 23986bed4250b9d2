"""Decisions whether a client may use a server. No I/O.

An attacker who can write to a directory (a registry, a file, DNS) could list a server that receives the token of each
client, and sends manipulated batches to training loops.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from teleloader_shared.errors import DatasetChanged, TlsError


def check_trust(url: str, *, is_verified: bool, trust_directory: bool) -> None:
    """Check that a client may use a server that was found through a directory.

    The client may if TLS verifies that the server belongs to the user, if the server is on this machine, or if the user
    trusts the directory. Public CAs do not verify this: anyone can get a certificate for a domain and list its URL.
    Only a literal loopback address counts as this machine, because resolvers may resolve ``localhost`` differently.

    Args:
        url: URL of the server, normalized.
        is_verified: Whether TLS accepts only servers of the user: certificates of the CA that the user passed, or for
            the DNS name that the user passed.
        trust_directory: Whether the user trusts the directory.

    Raises:
        TlsError: If the client must not use the server.
    """
    is_secure = url.startswith("https://")
    if trust_directory or (is_secure and is_verified) or _is_loopback(urlsplit(url).hostname or ""):
        return
    if is_secure:
        raise TlsError(
            f"{url} is not used: the CAs of the system verify only that the server belongs to the owner of this host "
            "name, who would receive the token. Pass the CA of your servers as ca= or set TELELOADER_CA, or pass "
            "trust_directory=True if only you can write to the directory"
        )
    raise TlsError(
        f"{url} is not used: without TLS, the client cannot verify the server, which would receive the token. Start "
        "servers with --ssl-certfile, list https:// URLs and pass ca=, or pass trust_directory=True if only you can "
        "write to the directory and the network is trusted"
    )


def check_environment(url: str, environment: str | None, expected: str | None) -> None:
    """Check that the libraries of a server compute the same bits as those of most servers.

    Args:
        url: URL of the server.
        environment: Versions of the server's libraries; None if unknown.
        expected: Versions on most servers; None to accept any.

    Raises:
        DatasetChanged: If the versions differ.
    """
    if None not in (environment, expected) and environment != expected:
        raise DatasetChanged(
            f"{url} runs {environment}, but most servers run {expected}: batches could differ. Install the same "
            "versions, or pass allow_mixed_environments=True to RemoteDataset"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
