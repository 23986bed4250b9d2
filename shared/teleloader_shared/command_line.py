"""Conventions of both commands: help, suggestions for typos, output format, versions and exit codes.

This is the only module of the package that imports click, an optional dependency. Only the commands import it.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from itertools import chain
from typing import Any, Final, NoReturn, TypeVar

import click

from teleloader_shared.text import did_you_mean
from teleloader_shared.version import VERSION

CONTEXT: Final[dict[str, Any]] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    # click itself considers only whether the output is a terminal
    "color": False if os.environ.get("NO_COLOR") else None,
}
"""Context settings of all commands."""

_NAME: Final = re.compile(r"[\w.-]+")
"""Name of the package in a requirement such as ``click>=8.1; extra == "cli"``."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


class CommandGroup(click.Group):
    """Command group that suggests names for misspelled commands.

    Args:
        args: Arguments of `click.Group`, as `kwargs`.
        sections: Names of all commands by heading, in the order of the help; None for a single section.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of the help."""
        return list(self.commands if self._sections is None else chain.from_iterable(self._sections.values()))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections of the help that list the commands."""
        for title, names in (self._sections or {"Commands": self.list_commands(ctx)}).items():
            write_commands(formatter, title, {name: self.commands[name].get_short_help_str(1000) for name in names})

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, and the other arguments.

        Raises:
            click.UsageError: If no command has this name; the message suggests similar names.
        """
        if args[0] not in (known := self.list_commands(ctx)) and args[0][:1] != "-" and not ctx.resilient_parsing:
            # click suggests names since version 8.4; older versions are supported
            hint = did_you_mean(args[0], known) or f"Available: {', '.join(known)}"
            raise click.UsageError(f"unknown command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)


def write_commands(formatter: click.HelpFormatter, title: str, commands: Mapping[str, str]) -> None:
    """Write a section of a help text.

    Args:
        formatter: Formatter of the help text.
        title: Heading of the section.
        commands: Descriptions of the commands, by name.
    """
    with formatter.section(title):
        formatter.write_dl([(f"{name:<8}", text) for name, text in commands.items()])


def run(command: click.Command, prog_name: str) -> NoReturn:
    """Run a command with the arguments of the process, and exit; errors of click are printed to stderr.

    In contrast to `click.Command.main`, Ctrl-C and a broken pipe raise their exceptions, for `quiet_exits`.
    """
    if f"_{prog_name.replace('-', '_').upper()}_COMPLETE" in os.environ:
        command.main(prog_name=prog_name)  # completes an argument for the shell, and exits
    try:
        with command.make_context(prog_name, sys.argv[1:]) as context:
            command.invoke(context)
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    sys.exit(0)


def as_json(command: _Command) -> _Command:
    """Add the option that selects the output format to a command, as its argument `as_json`."""
    return click.option(
        "-o", "--output", "as_json", type=click.Choice(["table", "json"]), default="table", show_default=True,
        allow_from_autoenv=False, callback=lambda context, parameter, value: value == "json",
        help="Output format: for people, or one line of JSON for programs.",
    )(command)  # fmt: skip


def version_option(program: str) -> Callable[[_Command], _Command]:
    """Return a decorator that adds the option ``--version``, with the versions of Python and the dependencies."""

    def show_versions(context: click.Context, parameter: click.Parameter, value: bool) -> None:
        if value and not context.resilient_parsing:
            click.echo(versions(program))
            context.exit()

    return click.option(
        "-V", "--version", is_flag=True, is_eager=True, expose_value=False, allow_from_autoenv=False,
        callback=show_versions, help="Show the versions of this program, Python and the dependencies, and exit.",
    )  # fmt: skip


def versions(program: str) -> str:
    """Return the versions of a program, Python, the platform and the installed dependencies, one per line."""
    names = {name[0].lower() for each in metadata.requires("teleloader") or () if (name := _NAME.match(each))}
    found = {program: VERSION, "Python": platform.python_version(), "platform": platform.platform()}
    for package in sorted(names - {"teleloader"}):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # of an extra that is not installed
    width = max(map(len, found))
    return "\n".join(f"{each:<{width}} {version}" for each, version in found.items())
