"""Command that hosts datasets as part of the group of commands: its usage, its help and the names of subcommands."""

from __future__ import annotations

from typing import Any, Final

import click

from teleloader_shared.command_line import write_commands

COMMANDS: Final = {
    "check": "Check datasets before use.",
    "token": "Manage the tokens of clients.",
    "ray": "Run a fleet of servers on a Ray cluster.",
}
"""Descriptions of the subcommands by name."""


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
