"""Command-line interface of the client: ``teleloader``."""

from __future__ import annotations

import sys

from teleloader_shared.exit_codes import EXIT_FAILED, quiet_exits


def main() -> None:
    """Run the ``teleloader`` command, or report the missing optional dependency."""
    with quiet_exits():
        try:
            from teleloader.cli.commands import teleloader
            from teleloader_shared.command_line import run
        except ModuleNotFoundError as error:
            missing = str(error.name).partition(".")[0]
            print(
                f"teleloader: the command requires {missing}, which is not installed: pip install 'teleloader[cli]'",
                file=sys.stderr,
            )
            sys.exit(EXIT_FAILED)
        run(teleloader, "teleloader")
