"""``teleloader-server``: the command."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command, or say what is missing to run it."""
    _open_standard_streams()
    try:
        if sys.argv[1:2] == ["token"]:  # first: it is not kept waiting for what only a server needs
            from teleloader_server.cli.token_commands import token

            token(sys.argv[2:], prog_name="teleloader-server token")
        from teleloader_server.cli.commands import check, server
    except ModuleNotFoundError as error:
        sys.exit(
            f"teleloader-server needs {error.name}, which comes with the server's extra: "
            "pip install 'teleloader[server]'"
        )
    # not a group of commands: whatever else stands there is a dataset, and those have a colon in them
    if sys.argv[1:2] == ["check"]:
        check(sys.argv[2:], prog_name="teleloader-server check", auto_envvar_prefix="TELELOADER")
    server(auto_envvar_prefix="TELELOADER")


def _open_standard_streams() -> None:
    """Lead those of stdin, stdout and stderr nowhere that were closed when the command was started.

    The server's sockets would get their numbers else, and libuv aborts when it closes one of these.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free, which is this one
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
