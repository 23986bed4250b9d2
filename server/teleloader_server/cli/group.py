"""Commands of ``teleloader-server``: each is imported only when it is used, because some imports are slow."""

from __future__ import annotations

import sys
from typing import Any, Final

import click

from teleloader_shared.command_line import CONTEXT, CommandGroup, write_commands
from teleloader_shared.text import did_you_mean, missing_package

COMMANDS: Final = {
    "check": "Check datasets before use.",
    "token": "Manage the tokens of clients.",
    "ray": "Run a fleet of servers on a Ray cluster.",
}
"""Descriptions of the subcommands by name."""
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


class _HostingContext(click.Context):
    """Context of the command that hosts datasets, whose name is not part of command lines."""

    @property
    def command_path(self) -> str:
        return super().command_path if self.parent is None else self.parent.command_path


class HostingCommand(click.Command):
    """Command that hosts datasets; its help is that of ``teleloader-server``, and lists the subcommands."""

    context_class = _HostingContext

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the usage lines."""
        write_usage(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the subcommands and the options."""
        write_commands(formatter, "Commands", COMMANDS)
        super().format_options(ctx, formatter)


def write_usage(context: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the usage lines of ``teleloader-server``."""
    formatter.write_usage(context.command_path, "[OPTIONS] [DATASET]...")
    formatter.write_usage(context.command_path, "COMMAND [OPTIONS] [ARGS]...", prefix=" " * len("Usage: "))


def complete_command(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    """Return the subcommands that begin with `incomplete`, if it is the first argument."""
    from click.shell_completion import CompletionItem

    if not isinstance(context.command, HostingCommand) or context.params.get("datasets"):
        return []
    return [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]


commands: Final = ServerGroup("teleloader-server", context_settings=CONTEXT)
