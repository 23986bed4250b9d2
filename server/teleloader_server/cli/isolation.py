"""Command-line options that isolate dataset code, and the files that its processes must not read."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import click
from click.core import ParameterSource

from teleloader_server.cli.parameters import Size
from teleloader_server.config import ConfigError
from teleloader_server.fleet.announcer import TOKEN_VARIABLE
from teleloader_server.limits import Limits
from teleloader_server.workers.confine import forbid_inspection
from teleloader_server.workers.isolation import Account, Isolation, Network

_Command = TypeVar("_Command", bound=Callable[..., Any])
_OPTIONS: Final = ("worker_user", "worker_network", "worker_memory_limit", "worker_process_limit", "worker_env")


def isolation_options(command: _Command) -> _Command:
    """Add the options that isolate dataset code."""
    for option in reversed((
        click.option(
            "--worker-user", metavar="USER", help="Run dataset code as this user (a name, or UID:GID), which must not "
            "be able to read tokens and keys. Requires root, or CAP_SETUID, CAP_SETGID and CAP_KILL.",
        ),
        click.option(
            "--worker-network", default="host", show_default=True, type=click.Choice(get_args(Network)),
            help="Network of dataset code: that of the server, or a loopback interface only. The latter requires "
            "CAP_SYS_ADMIN, or a system that permits user namespaces.",
        ),
        click.option(
            "--worker-memory-limit", default=0, show_default="no limit", type=Size(), help="Maximum private memory of "
            "each process of dataset code (RLIMIT_DATA). Beyond it, memory allocations fail.",
        ),
        click.option(
            "--worker-process-limit", default=0, show_default="no limit", type=click.IntRange(0), help="Maximum number "
            "of processes and threads of --worker-user (RLIMIT_NPROC).",
        ),
        click.option(
            "--worker-env", multiple=True, metavar="NAME", help="Environment variable that dataset code receives; * "
            "matches any characters. Repeatable. Without this option: all variables except TELELOADER_*.",
        ),
    )):  # fmt: skip
        command = option(command)
    return command


def pop_isolation(options: dict[str, Any], limits: Limits) -> Isolation:
    """Remove the isolation options from a command's options, and return the isolation.

    Raises:
        ConfigError: If an option is invalid, or cannot be combined with the limits.
    """
    user, network, memory_limit, process_limit, variables = (options.pop(name) for name in _OPTIONS)
    isolation = Isolation(
        user=None if user is None else Account.find(user),
        network=network,
        memory_limit=memory_limit,
        process_limit=process_limit,
        variables=variables,
    )
    isolation.check_limits(limits)
    return isolation


def protect_process(secrets: Sequence[Path], isolation: Isolation, limits: Limits) -> None:
    """Prevent processes of the server's user, such as workers, from reading this process, if it has secrets.

    Debuggers and profilers of the same user cannot inspect the server then. With ``--debug``, it is not protected.

    Args:
        secrets: Files with secrets.
        isolation: Isolation of dataset code.
        limits: Limits of workers.
    """
    has_secrets = secrets or isolation.options or TOKEN_VARIABLE in os.environ
    if has_secrets and not limits.debug and sys.platform == "linux":
        forbid_inspection()


def secret_files(
    config: Path | None,
    isolation: Isolation,
    *,
    tokens: Path | None,
    token_file: Path | None,
    announce_token_file: Path | None,
    ssl_certfile: Path | None,
    ssl_keyfile: Path | None,
    ssl_keyfile_password: str | None,
    **_others: Any,
) -> list[Path]:
    """Return the files of the server that contain tokens, keys or passwords, given the server's options.

    Raises:
        ConfigError: If the user of the workers can read a password in the command line.
    """
    source = click.get_current_context().get_parameter_source("ssl_keyfile_password")
    has_password = ssl_keyfile_password is not None and source is ParameterSource.DEFAULT_MAP
    if isolation.user is not None and source is ParameterSource.COMMANDLINE:
        raise ConfigError(
            "cannot isolate workers (--worker-user): all users can read --ssl-keyfile-password in the command line. "
            "Set TELELOADER_SSL_KEYFILE_PASSWORD instead"
        )
    found = (tokens, token_file, announce_token_file, ssl_keyfile or ssl_certfile, config if has_password else None)
    return [path for path in found if path is not None]
