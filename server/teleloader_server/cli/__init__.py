"""Command-line interface of the server: the command ``teleloader-server``."""

from __future__ import annotations

import os
import sys

from teleloader_shared.exit_codes import quiet_exits
from teleloader_shared.text import missing_package


def main() -> None:
    """Run the command ``teleloader-server``; exit with an installation hint if a required package is missing."""
    _open_standard_streams()
    with quiet_exits():
        try:
            from teleloader_server.cli.group import commands
            from teleloader_shared.command_line import run
        except ModuleNotFoundError as error:
            sys.exit(missing_package("teleloader-server", error, "server"))
        run(commands, "teleloader-server")


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
