"""Command-line interface of the client: ``teleloader``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the ``teleloader`` command, or report the missing optional dependency."""
    try:
        from teleloader.cli.commands import teleloader
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        print(
            f"teleloader: the command requires {missing}, which is not installed: pip install 'teleloader[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    teleloader(prog_name="teleloader")
