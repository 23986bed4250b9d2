"""Selection of the transport for a server URL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from teleloader.api.credentials import Credentials
from teleloader.transport.http import HttpServer
from teleloader.transport.interface import BatchServer

fakes: Final[dict[str, Callable[[str, float, Credentials, str | None], BatchServer]]] = {}
"""Factories of the fake servers of `teleloader.testing`, by URL."""


def server_at(url: str, timeout: float, credentials: Credentials, server_name: str | None = None) -> BatchServer:
    """Create the client for a server URL, with the transport that the URL selects.

    Args:
        url: URL of the server.
        timeout: Seconds without a received byte after which the server counts as disconnected.
        credentials: Token and certificates.
        server_name: Name that the server's certificate must contain; None for the host of the URL.

    Raises:
        ValueError: If `url` is not an HTTP URL, or contains a password.
    """
    return fakes.get(str(url).rstrip("/"), HttpServer)(url, timeout, credentials, server_name)
