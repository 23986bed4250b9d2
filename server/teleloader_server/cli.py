"""``teleloader-server``: the command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command, or say what is missing to run it."""
    try:
        from teleloader_server.commands import server
    except ModuleNotFoundError as error:
        sys.exit(
            f"teleloader-server needs {error.name}, which comes with the server's extra: "
            "pip install 'teleloader[server]'"
        )
    server(auto_envvar_prefix="TELELOADER")
