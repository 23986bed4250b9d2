"""The command ``teleloader-server``."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command, or name the package that is missing."""
    _open_standard_streams()
    try:
        if sys.argv[1:2] == ["token"]:  # first: it must not wait for imports that only a server needs
            from teleloader_server.cli.token_commands import token

            token(sys.argv[2:], prog_name="teleloader-server token")
        from teleloader_server.cli.commands import check, server
    except ModuleNotFoundError as error:
        sys.exit(f"teleloader-server requires {error.name}, which is not installed: pip install 'teleloader[server]'")
    # not a click group: any other first argument is a dataset, whose name contains a colon
    if sys.argv[1:2] == ["check"]:
        check(sys.argv[2:], prog_name="teleloader-server check", auto_envvar_prefix="TELELOADER")
    server(auto_envvar_prefix="TELELOADER")


def _open_standard_streams() -> None:
    """Open stdin, stdout and stderr on /dev/null if they were closed when the command started.

    Otherwise the server's sockets would get their descriptor numbers, and libuv aborts when it closes one of these.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
