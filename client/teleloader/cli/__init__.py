"""``teleloader``: the client's tools."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command, or say what is missing to run it: trainers need none of it."""
    try:
        from teleloader.cli.commands import teleloader
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        print(
            f"teleloader: the command needs {missing}, which comes with an extra: pip install 'teleloader[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    teleloader(prog_name="teleloader")
