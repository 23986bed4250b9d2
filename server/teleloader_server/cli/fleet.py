"""Options of ``teleloader-server`` for fleets of several servers: announcements, and exit with the parent process."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import click
import httpx

from teleloader_server.auth.tls import ClientTls, TlsFiles
from teleloader_server.auth.token_file import read_text
from teleloader_server.auth.tokens import SENT_TOKEN
from teleloader_server.config import ConfigError
from teleloader_server.fleet.announcer import TOKEN_VARIABLE, Announcer, Directory, FileDirectory, RegistryDirectory
from teleloader_server.fleet.verification import is_loopback
from teleloader_server.workers.worker import end_with_parent
from teleloader_shared.directory import DirectoryAddress, directory_address, server_url
from teleloader_shared.exit_codes import EXIT_FAILED
from teleloader_shared.secret import Secret
from teleloader_shared.server_summary import ServerSummary

logger = logging.getLogger("teleloader_server")

_Command = TypeVar("_Command", bound=Callable[..., Any])


class Fleet(NamedTuple):
    """Settings of a server that is a member of a fleet."""

    directories: tuple[DirectoryAddress, ...]
    """Directories in which the server announces itself."""
    advertise_url: str | None
    """URL of this server for clients; None for the listening address."""
    token: Callable[[], Secret | None]
    """Function that returns the token for registries; None for registries without tokens."""
    client_tls: ClientTls


def _directory(context: click.Context, parameter: click.Parameter, texts: Sequence[str]) -> list[DirectoryAddress]:
    found = []
    for text in texts:
        try:
            address = directory_address(text)
            for url in address.urls:
                _checked(url)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
        if address.kind not in ("registry", "file"):
            raise click.BadParameter(
                f"cannot announce a server in {text!r}: expected registry+http://host:port or file:///folder/name"
            )
        if address.kind == "file":
            path = Path(address.path)
            if path.is_dir() or not path.parent.is_dir():
                reason = "expected a file, not a folder" if path.is_dir() else "create the folder first"
                raise click.BadParameter(f"cannot announce a server in {text!r}: {reason}")
        found.append(address)
    return found


def _url(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    try:
        return None if text is None else _checked(server_url(text))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _checked(url: str) -> str:
    """Return a URL if HTTP clients accept its host.

    Raises:
        ValueError: If the host is neither an IP address nor a host name.
    """
    try:
        httpx.URL(url).host.encode("idna")
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"invalid server URL {url!r}: {error}. Expected an IP address or host name") from None
    return url


def _exit_with_parent(context: click.Context, parameter: click.Parameter, pid: int | None) -> None:
    """Make the kernel send SIGTERM to this process when its parent exits; exit if the parent has already exited."""
    if pid is None:
        return
    end_with_parent(signal.SIGTERM)
    if os.getppid() != pid:  # the parent exited before the call, so the kernel sends no signal
        click.echo(f"teleloader-server: the parent process {pid} has exited (--exit-with-parent)", err=True)
        context.exit(EXIT_FAILED)


def fleet_options(command: _Command) -> _Command:
    """Add the options of fleets."""
    for option in reversed((
        click.option(
            "--announce", multiple=True, metavar="DIRECTORY", callback=_directory,
            help="Directory in which clients find this server: registry+http://host:port,host:port (any "
            "teleloader-server is a registry) or file:///folder/name (on a disk that all machines share). The server "
            "announces itself when it can compute batches, and withdraws before it stops. If it can no longer compute "
            "batches, it does not withdraw: a registry removes it after 3 s, and a file keeps its line. Repeatable.",
        ),
        click.option(
            "--announce-token-file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
            help="File that contains a token with the scope announce, for registries that require tokens. "
            f"Alternatively, set {TOKEN_VARIABLE} to the token.",
        ),
        click.option(
            "--advertise-url", metavar="URL", callback=_url, help="URL of this server in directories. Default: the "
            "listening address. Required if --host is 0.0.0.0 or ::, to which clients cannot connect.",
        ),
        click.option(
            "--fleet-ca", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE",
            help="CA certificates (PEM) of the fleet's other servers: of https registries, and of https servers that "
            "announce themselves to this server. Default: the CAs of the system.",
        ),
        click.option(
            "--exit-with-parent", type=click.IntRange(1), metavar="PID", is_eager=True, expose_value=False,
            allow_from_autoenv=False, callback=_exit_with_parent,
            help="Stop as after SIGTERM when the parent process exits, also if it is killed. PID is the parent's "
            "process ID ($$ in a shell). The server uses it to detect a parent that has already exited.",
        ),
    )):  # fmt: skip
        command = option(command)
    return command


def fleet_of(
    announce: Sequence[DirectoryAddress],
    token_file: Path | None,
    advertise_url: str | None,
    fleet_ca: Path | None,
    tls: TlsFiles | None,
) -> Fleet:
    """Return the settings of a fleet, given the values of the options.

    Raises:
        ConfigError: If a file of certificates or of the token is invalid.
    """
    client_tls, token_of = ClientTls(fleet_ca, tls), partial(_token, token_file)
    try:
        if fleet_ca is not None:
            client_tls.context()
    except OSError as error:
        raise ConfigError(f"cannot use --fleet-ca {fleet_ca}: {error}. Expected certificates in PEM format") from None
    try:
        token = token_of()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for url in (url for directory in announce for url in directory.urls):
        if token is not None and url.startswith("http:") and not is_loopback(urlsplit(url).hostname or ""):
            logger.warning(
                "the token for %s is sent unencrypted: attackers on the network path can read it, and announce their "
                "servers. Use registry+https://",
                url,
            )
    return Fleet(tuple(announce), advertise_url, token_of, client_tls)


def advertised_url(fleet: Fleet, listening: str, host: str) -> str:
    """Return the URL of this server for clients.

    Args:
        fleet: Settings of the fleet.
        listening: URL of the listening socket.
        host: IP address of the listening socket, which may be a wildcard.

    Raises:
        ConfigError: If the server listens on all addresses, and --advertise-url is missing.
    """
    if fleet.advertise_url is not None:
        return fleet.advertise_url
    if fleet.directories and host in ("0.0.0.0", "::"):  # noqa: S104 - a comparison, not a bind
        raise ConfigError(
            f"cannot announce this server: clients cannot connect to --host {host}. Pass --advertise-url "
            "http://NAME:PORT with a name or IP address of this machine that clients can reach"
        )
    return listening


def announcer(
    fleet: Fleet, url: str, key: Secret, is_ready: Callable[[], bool], summary: Callable[[], ServerSummary]
) -> Announcer:
    """Start announcing a server in the directories of a fleet, as soon as the server is ready.

    Args:
        fleet: Settings of the fleet.
        url: URL of the server for clients.
        key: Secret key of the server process.
        is_ready: Function that returns True if the server can compute batches.
        summary: Function that returns the figures of the server, for registries.
    """
    return Announcer(list(_directories(fleet, url, key, summary)), is_ready)


def _directories(fleet: Fleet, url: str, key: Secret, summary: Callable[[], ServerSummary]) -> Iterator[Directory]:
    for address in fleet.directories:
        if address.kind == "file":
            yield FileDirectory(Path(address.path), url)
        for registry in address.urls:
            yield RegistryDirectory(registry, url, key, fleet.token, fleet.client_tls.context, summary)


def _token(path: Path | None) -> Secret | None:
    """Return the token for registries, from a file or the environment.

    Raises:
        ValueError: If the token is malformed, or its file is unreadable.
    """
    if path is None:
        token, where = Secret(os.environ.get(TOKEN_VARIABLE, "")), TOKEN_VARIABLE
        if not token:
            return None
    else:
        try:
            token, where = Secret(read_text(path).text.strip()), f"{path} (--announce-token-file)"
        except ConfigError as error:
            raise ValueError(str(error)) from None
    if not SENT_TOKEN.fullmatch(token):
        raise ValueError(f"invalid token in {where}: expected 16 to 16,384 letters, digits and -._~+/=")
    return token
