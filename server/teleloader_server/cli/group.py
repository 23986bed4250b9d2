"""Commands of ``teleloader-server``: each is imported only when it is used, because some imports are slow."""

from __future__ import annotations

import sys
from typing import Final

import click

from teleloader_server.cli.hosting import COMMANDS, write_usage
from teleloader_shared.command_line import CONTEXT, CommandGroup
from teleloader_shared.text import did_you_mean, missing_package

_HOST: Final = "host"
"""Name of the command that hosts datasets, which is not part of command lines."""


class ServerGroup(CommandGroup):
    """Group whose first argument is either a subcommand, or the first argument of the command that hosts datasets.

    The name of a dataset contains a colon, so it cannot be that of a command.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the subcommands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; exit with an installation hint if a package that it requires is not installed."""
        try:
            if cmd_name == "token":  # needs none of the slow imports
                from teleloader_server.cli.token_commands import token

                return token
            if cmd_name == "ray":
                from teleloader_server.ray.commands import commands

                return commands
            from teleloader_server.cli.commands import check, server
        except ModuleNotFoundError as error:
            extra = "ray" if cmd_name == "ray" else "server"
            sys.exit(missing_package("teleloader-server", error, extra))
        return {"check": check, _HOST: server}.get(cmd_name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the command that hosts datasets, unless the first argument is a subcommand.

        Raises:
            click.UsageError: If the first argument is a misspelled subcommand.
        """
        first = args[0] if args else ""
        if first in COMMANDS:
            return super().parse_args(ctx, args)
        if first.isalpha() and (hint := did_you_mean(first, COMMANDS)) and not ctx.resilient_parsing:
            raise click.UsageError(f"unknown command {first!r}. {hint}", ctx)
        return super().parse_args(ctx, [_HOST, *args])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command, its name, and the other arguments."""
        return args[0], self.get_command(ctx, args[0]), args[1:]

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the usage lines."""
        write_usage(ctx, formatter)


commands: Final = ServerGroup("teleloader-server", context_settings=CONTEXT)
