"""Command-line interface of the server: the command ``teleloader-server``."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command ``teleloader-server``; exit with an installation hint if a required package is missing."""
    _open_standard_streams()
    try:
        if sys.argv[1:2] == ["token"]:  # first: this command needs none of the server's slow imports
            from teleloader_server.cli.token_commands import token

            token(sys.argv[2:], prog_name="teleloader-server token")
        if sys.argv[1:2] == ["ray"]:
            from teleloader_server.ray.commands import commands

            commands(sys.argv[2:], prog_name="teleloader-server ray")
        from teleloader_server.cli.commands import check, server
    except ModuleNotFoundError as error:
        extra = "ray" if sys.argv[1:2] == ["ray"] else "server"
        sys.exit(f"teleloader-server requires {error.name}, which is not installed: pip install 'teleloader[{extra}]'")
    # not a click group: any other first argument is a dataset, which contains a colon
    if sys.argv[1:2] == ["check"]:
        check(sys.argv[2:], prog_name="teleloader-server check", auto_envvar_prefix="TELELOADER")
    server(auto_envvar_prefix="TELELOADER")


def _open_standard_streams() -> None:
    """Open stdin, stdout and stderr on /dev/null if they were closed when the command started.

    Otherwise sockets of the server would get the descriptors 0 to 2, and libuv aborts when it closes one of these.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # returns the lowest free descriptor, which is `number`
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
