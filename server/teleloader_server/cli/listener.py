"""Listening addresses of servers: authentication, TLS and ports."""

from __future__ import annotations

import logging
import socket
from typing import NamedTuple

from teleloader_server.auth.authenticator import Authenticator
from teleloader_server.auth.origins import is_loopback, refuse_unprotected
from teleloader_server.auth.tls import TlsFiles
from teleloader_server.cli.fleet import Fleet
from teleloader_server.config import ConfigError
from teleloader_server.web.app import bind
from teleloader_shared.directory import MAX_PORT, at_port, port_of

MAX_ATTEMPTS = 100
"""Attempts to find consecutive free ports."""

logger = logging.getLogger("teleloader_server")


class Listener(NamedTuple):
    """Listening socket settings: address, authentication and TLS."""

    host: str
    port: int
    insecure: bool
    """True if authentication is disabled explicitly."""
    authenticator: Authenticator
    tls: TlsFiles | None
    fleet: Fleet
    ports: tuple[int, ...] | None = None
    """Ports of all servers under the same supervisor; None for a single server."""

    def at_port(self, index: int, ports: tuple[int, ...]) -> Listener:
        """Return the settings of one of several servers.

        Raises:
            ConfigError: If its advertised URL would have an invalid port.
        """
        fleet = self.fleet
        if fleet.advertise_url is not None:
            port = port_of(fleet.advertise_url) + index
            if port > MAX_PORT:
                raise ConfigError(
                    f"cannot advertise port {port} of server {index}: the last port is {MAX_PORT}. Choose another "
                    "--advertise-url"
                )
            fleet = fleet._replace(advertise_url=at_port(fleet.advertise_url, port))
        return self._replace(port=ports[index], ports=ports, fleet=fleet)

    def bind(self) -> socket.socket:
        """Bind the listening socket.

        Raises:
            ConfigError: If the address is in use or not available.
        """
        try:
            return bind(self.host, self.port)
        except OSError as error:
            raise self.cannot_listen(error) from None

    def cannot_listen(self, error: OSError) -> ConfigError:
        """Return the error of an address on which the server cannot listen."""
        return ConfigError(
            f"cannot listen on {self.host}:{self.port}: {error.strerror}. Choose another --host or --port"
        )

    def check_protection(self, bound: socket.socket) -> None:
        """Reject a non-loopback address without tokens unless `insecure` is set; warn if it has no TLS.

        Raises:
            ConfigError: If the address is rejected.
        """
        address = bound.getsockname()[0]
        refuse_unprotected(address, has_tokens=self.authenticator.has_tokens, insecure=self.insecure)
        if self.tls is None and not is_loopback(address):
            logger.warning(
                "%s without encryption: attackers on the network path can read and modify data. Use --ssl-certfile",
                "clients send tokens, and the server sends batches,"
                if self.authenticator.has_tokens
                else "authentication is disabled, and the server sends batches",
            )


def bind_consecutive(host: str, port: int, count: int) -> list[socket.socket]:
    """Bind consecutive ports, which reserves them for servers that bind them again: the sockets do not listen.

    Args:
        host: Host name or IP address.
        port: The first port; 0 selects free ones.
        count: Number of ports.

    Raises:
        ConfigError: If a port is in use or not available.
    """
    if port + count - 1 > MAX_PORT:
        raise ConfigError(f"cannot listen on ports {port} to {port + count - 1}: the last port is {MAX_PORT}")
    for attempt in range(MAX_ATTEMPTS):
        bound: list[socket.socket] = []
        first = port
        try:
            for number in range(count):
                bound.append(bind(host, first + number if first else 0))
                first = first or bound[0].getsockname()[1]
            return bound
        except OSError as error:
            for each in bound:
                each.close()
            if port or attempt == MAX_ATTEMPTS - 1:
                raise ConfigError(
                    f"cannot listen on {host}:{first + len(bound)}: {error.strerror}. {count} servers use {count} "
                    "consecutive ports: choose another --host or --port"
                ) from None
    raise AssertionError
