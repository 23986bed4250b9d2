"""Settings and secrets of a fleet on Ray, and the command lines of its servers."""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any, Final

from teleloader_server.auth.tokens import DEFAULT_SCOPES
from teleloader_server.config import ConfigError
from teleloader_server.fleet.announcer import TOKEN_VARIABLE
from teleloader_server.permissions import ANNOUNCE
from teleloader_server.ray.authority import Certificate, FleetSecret, create_authority, issue
from teleloader_server.ray.process import SERVERS_FILE, ServerProcess
from teleloader_shared.secret import Secret

DEFAULT_REGISTRY_PORT: Final = 8266
MIN_CPUS: Final = 0.0001
"""Precision of Ray's resources."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RESERVED: Final = re.compile(
    r"--(host|port|num-workers|tokens|token-file|insecure|ssl-\w+(-\w+)*|announce|announce-token-file|advertise-url"
    r"|fleet-ca|exit-with-parent|reload)(=.*)?"
)


def _token() -> FleetSecret:
    return FleetSecret(f"tl_{secrets.token_urlsafe(32)}")


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """Settings of a fleet, with its secrets, which are created with the settings.

    Raises:
        ConfigError: If a setting is invalid; raised at construction.
    """

    name: str
    arguments: tuple[str, ...]
    """Arguments of ``teleloader-server``: datasets and options."""
    num_workers: int
    """Workers of each server."""
    num_cpus: float
    """CPUs that Ray reserves for each server."""
    memory: int | None
    """Bytes of memory that Ray reserves for each server; None for no reservation."""
    registry_port: int
    authority: Certificate = field(init=False, repr=False, default_factory=create_authority)
    """CA that signs the certificates of all servers."""
    client_token: FleetSecret = field(init=False, repr=False, default_factory=_token)
    """Token with which clients authenticate."""
    announce_token: FleetSecret = field(init=False, repr=False, default_factory=_token)
    """Token with which servers authenticate to the registry."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"invalid fleet name {self.name!r}: expected letters, digits, '.', '_' and '-'")
        for argument in self.arguments:
            if _RESERVED.fullmatch(argument):
                raise ConfigError(f"invalid argument {argument!r}: a fleet on Ray sets this option itself")
        # with 0 CPUs, Ray would regard nodes with servers as idle, and stop them
        if not MIN_CPUS <= self.num_cpus < math.inf:
            raise ConfigError(f"invalid num_cpus {self.num_cpus!r}: expected a number of at least {MIN_CPUS}")
        if self.memory is not None and self.memory < 1:
            raise ConfigError(f"invalid memory {self.memory!r}: expected a positive number of bytes")

    @property
    def resources(self) -> dict[str, Any]:
        """Options of Ray for the actor of a server."""
        return {"num_cpus": self.num_cpus, **({} if self.memory is None else {"memory": self.memory})}

    def start_registry(self, host: str) -> ServerProcess:
        """Start the registry on this machine, which has the IP address `host`."""
        # every server is a registry, but needs a dataset; the registry does not announce itself, so no client uses it
        hosted = ("--demo", "--num-workers", "0")
        return self._start(host, self.registry_port, hosted, is_retried=True)

    def start_server(self, host: str, registry: str) -> ServerProcess:
        """Start a server on this machine, which announces itself.

        Args:
            host: IP address of this machine.
            registry: URL of the registry.
        """
        hosted = (*self.arguments, "--num-workers", str(self.num_workers), "--announce", f"registry+{registry}")
        return self._start(host, 0, hosted, is_retried=False)

    def _start(self, host: str, port: int, arguments: tuple[str, ...], *, is_retried: bool) -> ServerProcess:
        own = issue(self.authority, host)
        scopes = {"client": (self.client_token, DEFAULT_SCOPES), "fleet": (self.announce_token, (ANNOUNCE,))}
        files = {
            "ca.pem": self.authority.certificate,
            "server.pem": own.certificate,
            "server.key": own.key,
            "tokens.toml": "".join(starmap(_table, scopes.items())),
        }
        options = {
            "--host": host, "--port": str(port), "--tokens": "{tokens.toml}",
            "--ssl-certfile": "{server.pem}", "--ssl-keyfile": "{server.key}",
            "--fleet-ca": "{ca.pem}", "--announce": f"file://{{folder}}/{SERVERS_FILE}",
        }  # fmt: skip
        everything = (*arguments, *(word for option in options.items() for word in option))
        return ServerProcess(everything, files, {TOKEN_VARIABLE: self.announce_token}, is_retried=is_retried)


def _table(name: str, entry: tuple[Secret, Sequence[str]]) -> str:
    """Return the entry of a token in a token file, without the token itself."""
    token, scopes = entry
    return f'[{name}]\nsha256 = "{hashlib.sha256(token.encode()).hexdigest()}"\nscopes = {list(scopes)}\n'
