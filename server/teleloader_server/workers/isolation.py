"""Isolation of dataset code: settings for the processes that run it, which are the fork server and its workers.

This module decides; the program `confine` applies the restrictions. A restriction that the system does not permit is
an error at the start of the server, and never ignored.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from teleloader_server.config import ConfigError
from teleloader_server.limits import Limits
from teleloader_server.workers import confine
from teleloader_server.workers.procfs import Capability, capabilities
from teleloader_shared.units import size

Network = Literal["host", "none"]

MIN_MEMORY_LIMIT: Final = 64 * 2**20
"""Minimum of `Isolation.memory_limit`: with less memory, the interpreter does not start."""

SECRET_VARIABLES: Final = ("TELELOADER_*", "OTEL_EXPORTER_*HEADERS")
"""Environment variables of the server that workers do not receive: its options, tokens and passwords.

The other variables are passed by default, because they may contain the settings and credentials of datasets, such as
``AWS_SECRET_ACCESS_KEY``: their names do not show to whom they belong.
"""
BASIC_VARIABLES: Final = (
    "PATH", "LANG", "LC_*", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHON*", "VIRTUAL_ENV", "OMP_*", "MKL_*",
    "OPENBLAS_*", "HOME", "USER", "LOGNAME",
)  # fmt: skip
"""Environment variables that workers receive in addition to those of `Isolation.variables`."""

_REQUIRED: Final = (Capability.SETUID, Capability.SETGID, Capability.KILL)
"""Capabilities to run workers as another user, and to stop them."""
_IDS: Final = re.compile(r"(\d+):(\d+)")

_TRIAL: Final = """
import importlib.util, os, stat, sys
user, *paths = sys.argv[1:]
if importlib.util.find_spec("teleloader_server") is None:
    sys.exit(f"{user} cannot read the package teleloader_server. Install it in a folder that this user can read")
for path in paths:
    folder = os.path.dirname(path)
    if os.access(path, os.R_OK) or os.access(path, os.W_OK):
        sys.exit(f"{user} can read or write {path}. Change its owner and its mode (chmod 600)")
    if os.access(folder, os.W_OK) and not os.stat(folder).st_mode & stat.S_ISVTX:
        sys.exit(f"{user} can replace {path}. Change the owner and the mode of its folder (chmod 700)")
"""
"""Program that runs under the restrictions when the server starts.

Its arguments are a description of the user, and the files with secrets.
"""


class Account(NamedTuple):
    """User as which workers run."""

    name: str
    uid: int
    gid: int
    groups: Sequence[int]
    """Supplementary groups."""
    home: str

    @classmethod
    def find(cls, text: str) -> Account:
        """Return the account of a user name, or of a user ID and a group ID (``UID:GID``) without an account.

        Raises:
            ConfigError: If the user does not exist.
        """
        if match := _IDS.fullmatch(text):
            return cls(text, int(match[1]), int(match[2]), (), "/")
        try:
            found = pwd.getpwnam(text)
        except KeyError:
            raise ConfigError(
                f"invalid --worker-user {text!r}: no such user. Create the user (useradd --system {text}), or use "
                "UID:GID"
            ) from None
        groups = tuple(os.getgrouplist(found.pw_name, found.pw_gid))
        return cls(found.pw_name, found.pw_uid, found.pw_gid, groups, found.pw_dir)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """Restrictions of the fork server and its workers.

    Raises:
        ConfigError: If a field is invalid; raised at construction, with the option and its value.
    """

    user: Account | None = None
    """User as which dataset code runs; None for the server's user."""
    network: Network = "host"
    """``none`` for a loopback interface only."""
    memory_limit: int = 0
    """Maximum private memory of each process, in bytes; 0 for no limit."""
    process_limit: int = 0
    """Maximum number of processes and threads of the user; 0 for no limit."""
    variables: Sequence[str] = ()
    """Patterns of the environment variables that workers receive in addition to `BASIC_VARIABLES`; if it is empty, they
    receive all but `SECRET_VARIABLES`.
    """

    def __post_init__(self) -> None:
        """Validate the fields."""
        if self.user is not None and self.user.uid == 0:
            raise ConfigError(
                f"invalid --worker-user {self.user.name!r}: dataset code would run as root. Use an unprivileged user"
            )
        if 0 < self.memory_limit < MIN_MEMORY_LIMIT:
            raise ConfigError(
                f"invalid --worker-memory-limit {size(self.memory_limit)}: expected at least {size(MIN_MEMORY_LIMIT)}"
            )
        if self.process_limit and self.user is None:
            raise ConfigError(
                "--worker-process-limit requires --worker-user: the kernel counts all processes of a user, including "
                "the server's own, and does not limit root"
            )

    @property
    def uid(self) -> int | None:
        """User ID of workers if it differs from the server's; None otherwise."""
        return None if self.user is None else self.user.uid

    @property
    def options(self) -> list[str]:
        """Options that are set."""
        named = {
            "--worker-user": self.user, "--worker-network none": self.network == "none",
            "--worker-memory-limit": self.memory_limit, "--worker-process-limit": self.process_limit,
            "--worker-env": self.variables,
        }  # fmt: skip
        return [name for name, value in named.items() if value]

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that executes another one under the restrictions."""
        if not self.options:
            return list(command)
        user = self.user
        restrictions = confine.Restrictions(
            None if user is None else user.uid,
            -1 if user is None else user.gid,
            () if user is None else user.groups,
            self.network == "host",
            self.memory_limit,
            self.process_limit,
        )
        return [sys.executable, "-I", "-S", confine.__file__, json.dumps(restrictions._asdict()), *command]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of workers, given the environment of the server."""
        passed = {name: value for name, value in inherited.items() if self._is_passed(name)}
        if self.user is not None:
            passed |= {"HOME": self.user.home, "USER": self.user.name, "LOGNAME": self.user.name}
        return passed

    def _is_passed(self, name: str) -> bool:
        if name in self.variables:
            return True
        is_listed = not self.variables or _matches(name, (*BASIC_VARIABLES, *self.variables))
        return is_listed and not _matches(name, SECRET_VARIABLES)

    def check_limits(self, limits: Limits) -> None:
        """Check that dataset code runs in workers only.

        Raises:
            ConfigError: If it may run in the server's process.
        """
        if self.options and (limits.num_workers == 0 or limits.debug):
            other = "--debug" if limits.debug else "--num-workers 0"
            raise ConfigError(
                f"cannot isolate workers ({', '.join(self.options)}): with {other}, dataset code runs in the server's "
                "process. Omit one of the options"
            )

    def check(self, server: ServerProcess, secrets: Iterable[Path] = ()) -> None:
        """Check that the system permits the restrictions, and that another user cannot access files with secrets.

        Args:
            server: The server's process.
            secrets: Files with tokens and keys.

        Raises:
            ConfigError: If a restriction is not permitted, or the user of the workers can read a file.
        """
        if not self.options:
            return
        self.check_platform(server)
        user = "the server's user" if self.user is None else f"user {self.user.name!r}"
        paths = [] if self.user is None else [str(path.absolute()) for path in secrets]
        trial = subprocess.run(  # noqa: S603 - this program
            self.command([sys.executable, "-c", _TRIAL, user, *paths]), env=self.environment(os.environ),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        if trial.returncode:
            reason = trial.stderr.strip().rpartition("\n")[2] or f"the trial ended with code {trial.returncode}"
            raise ConfigError(f"cannot isolate workers ({', '.join(self.options)}): {reason}")

    def check_platform(self, server: ServerProcess) -> None:
        """Check the requirements that are known without a trial.

        Raises:
            ConfigError: If one is not met.
        """
        names = ", ".join(self.options)
        if server.platform != "linux":
            raise ConfigError(f"{names}: not supported on {server.platform}, only on Linux. Omit the options")
        if self.user is None:
            return
        if self.user.uid == server.uid:
            raise ConfigError(
                f"invalid --worker-user {self.user.name!r}: the server itself runs as this user. Use another user, "
                "which cannot read the server's files"
            )
        missing = [f"CAP_{one.name}" for one in _REQUIRED if one not in server.capabilities]
        if missing:
            raise ConfigError(
                f"cannot run workers as user {self.user.name!r}: the server (user ID {server.uid}) lacks "
                f"{', '.join(missing)}. Start the server as root or with these capabilities (AmbientCapabilities= of "
                "systemd, --cap-add of Docker), or omit --worker-user"
            )

    def describe(self, server_user: str) -> str:
        """Describe the isolation in one line.

        Args:
            server_user: Name of the server's user.
        """
        user = f"the server's user {server_user}" if self.user is None else f"user {self.user.name}"
        parts = [f"workers run as {user}"]
        if self.network == "none":
            parts.append("without network")
        if self.memory_limit:
            parts.append(f"with up to {size(self.memory_limit)} of private memory per process")
        if self.process_limit:
            parts.append(f"with up to {self.process_limit:,} processes and threads in total")
        return ", ".join(parts)


NO_ISOLATION: Final = Isolation()
"""Isolation without restrictions; workers do not receive `SECRET_VARIABLES`."""


class ServerProcess(NamedTuple):
    """Properties of the server's process that determine which restrictions are possible."""

    platform: str
    uid: int
    capabilities: frozenset[Capability]

    @classmethod
    def current(cls) -> ServerProcess:
        """Return the properties of this process."""
        return cls(sys.platform, os.geteuid(), capabilities())


def user_name(uid: int) -> str:
    """Return the name of a user, or the ID if the user has no account."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
