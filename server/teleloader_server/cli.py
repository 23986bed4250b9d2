"""``teleloader-server``: the command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command, or say what is missing to run it."""
    try:
        from teleloader_server.commands import check, server, token
    except ModuleNotFoundError as error:
        sys.exit(
            f"teleloader-server needs {error.name}, which comes with the server's extra: "
            "pip install 'teleloader[server]'"
        )
    # not a group of commands: whatever else stands there is a dataset, and those have a colon in them
    if sys.argv[1:2] == ["check"]:
        check(sys.argv[2:], prog_name="teleloader-server check", auto_envvar_prefix="TELELOADER")
    if sys.argv[1:2] == ["token"]:
        token(sys.argv[2:], prog_name="teleloader-server token")
    server(auto_envvar_prefix="TELELOADER")
