"""Servers whose workers run as another user, for tests as root."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conftest import ServerProcess

SERVER_USER: Final = 54320
"""User and group of a server without privileges; the account does not exist."""
WORKER_USER: Final = 54321
"""User and group of workers; the account does not exist."""
AS_WORKER_USER: Final = ("--worker-user", f"{WORKER_USER}:{WORKER_USER}")

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="requires root, to start processes as other users"
)

_SHOW_INTERPRETER: Final = """
mount --bind "$base" "$place"
mount -t tmpfs -o mode=755 tmpfs "$closed"
mkdir -p "$base"
mount --move "$place" "$base"
exec "$@"
"""


@contextmanager
def open_folder() -> Iterator[Path]:
    """Create a temporary folder that all users can read, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="teleloader-test-") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


def readable_interpreter(place: Path) -> list[str]:
    """Return a command prefix with which other users can execute this interpreter, even in root's home directory.

    The program gets a mount namespace in which a closed folder contains the interpreter only.

    Args:
        place: Empty folder.
    """
    base = Path(sys.base_prefix).resolve()
    closed = [folder for folder in base.parents if not folder.stat().st_mode & 0o001]
    if not closed:
        return []
    settings = [f"base={base}", f"place={place}", f"closed={closed[-1]}"]
    return ["unshare", "--mount", "env", *settings, "sh", "-ec", _SHOW_INTERPRETER, "sh"]


@contextmanager
def isolated_server(
    *arguments: str, server_user: int = 0, server_privileges: Sequence[str] = (), **settings: Any
) -> Iterator[ServerProcess]:
    """Run a server on a free port whose interpreter all users can read.

    Args:
        arguments: Arguments of the server.
        server_user: User and group of the server.
        server_privileges: Further arguments of ``setpriv``, with which the server starts.
        settings: Further arguments of `ServerProcess`.
    """
    with open_folder() as place:
        prefix = readable_interpreter(place)
        if server_user:
            server_privileges = [
                f"--reuid={server_user}", f"--regid={server_user}", "--clear-groups", *server_privileges
            ]  # fmt: skip
        if server_privileges:
            prefix += ["setpriv", *server_privileges, "--"]
        server = ServerProcess("--port", "0", *arguments, prefix=prefix, **settings)
        try:
            yield server
        finally:
            server.end()
