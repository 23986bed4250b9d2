"""Command-line interface of the client: ``teleloader``."""

from __future__ import annotations

import sys

from teleloader_shared.exit_codes import quiet_exits
from teleloader_shared.text import missing_package


def main() -> None:
    """Run the ``teleloader`` command, or report the missing optional dependency."""
    with quiet_exits():
        try:
            from teleloader.cli.commands import teleloader
            from teleloader_shared.command_line import run
        except ModuleNotFoundError as error:
            sys.exit(missing_package("teleloader", error, "cli"))
        run(teleloader, "teleloader")
