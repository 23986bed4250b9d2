"""Command-line options shared by several subcommands."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final, TypeVar, cast, get_args

import click

from teleloader.api.credentials import (
    CA_VARIABLE,
    CERT_VARIABLE,
    KEY_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    Credentials,
)
from teleloader.balance import LengthBalance
from teleloader.fleet.directory import SCHEMES
from teleloader.fleet.servers import Servers
from teleloader.packing import DEFAULT_WINDOW, Packing
from teleloader.transport.selection import server_at
from teleloader_shared.errors import TeleloaderError
from teleloader_shared.spec import Tail

URL_VARIABLE: Final = "TELELOADER_URL"
"""Environment variable with the default address of the commands."""
COMPLETION_TIMEOUT_S: Final = 2.0
"""Time to wait for the names of datasets while the shell completes an argument, in seconds."""

_Command = TypeVar("_Command", bound=Callable[..., Any])


class ServerAddress(click.ParamType):  # type: ignore[type-arg] # generic since click 8.4; older versions are supported
    """click parameter type for a server URL, several URLs separated by commas, or the address of a directory."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | list[str]:
        """Split several URLs; their validity is checked where they are used."""
        text = str(value)
        return text if "," not in text or text.startswith(SCHEMES) else text.split(",")


class RemoteCommand(click.Command):
    """Command whose first argument is the address of servers, and may be omitted if ``TELELOADER_URL`` contains it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; insert the default address if the first argument is not one.

        An address contains a colon or a slash, which the names of datasets do not.

        Raises:
            click.UsageError: If the address is missing.
        """
        if not ctx.resilient_parsing:
            first = self.make_parser(ctx).parse_args(list(args))[0].get("url")
            is_address = isinstance(first, str) and (not first or ":" in first or "/" in first)
            default = os.environ.get(URL_VARIABLE)
            if not is_address and default:
                args = [default, *args]
            elif not is_address and not {"-h", "--help"} & set(args):
                got = f", got {first!r}" if isinstance(first, str) else ""
                raise click.UsageError(
                    f"missing server URL{got}: pass http://host:port as the first argument, or set {URL_VARIABLE}", ctx
                )
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description of the first argument."""
        formatter.write_paragraph()
        formatter.write_text(f"URL: server, servers separated by commas, or directory. Default: {URL_VARIABLE}.")


def _complete_dataset(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of datasets that begin with `incomplete`, as the server lists them."""
    address = context.params.get("url") or os.environ.get(URL_VARIABLE)
    if not address:
        return []
    try:
        remote = Servers(
            ServerAddress().convert(address, None, None) if isinstance(address, str) else address,
            partial(server_at, timeout=COMPLETION_TIMEOUT_S, credentials=(credentials := Credentials())), credentials,
            trust_directory=bool(context.params.get("trust_directory")),
        )  # fmt: skip
        infos = remote.require()[0].datasets()
    except (TeleloaderError, ValueError):  # the command itself reports the error
        return []
    return [info.name for info in infos if info.name.startswith(incomplete)]


url: Final = click.argument("url", type=ServerAddress(), metavar="[URL]", shell_complete=_complete_dataset)
dataset: Final = click.argument("dataset", required=False, shell_complete=_complete_dataset)
trust_directory: Final = click.option(
    "--trust-directory", is_flag=True,
    help="Use all servers that a directory (file:, dns+http:, registry+http:) lists; they receive the token. By "
    "default, servers on other machines require an https:// URL and --ca.",
)  # fmt: skip
interval: Final = click.option(
    "-i", "--interval", type=click.FloatRange(0.5, 60), default=1.0, show_default=True, metavar="SECONDS",
    help="Seconds between refreshes, if the output is refreshed.",
)  # fmt: skip
reverse: Final = click.option("-r", "--reverse", is_flag=True, help="Reverse the order of the rows.")

shuffle: Final = click.option("--shuffle", is_flag=True, help="Shuffle the samples in each epoch.")
collate: Final = click.option(
    "--collate", metavar="MODULE:NAME",
    help="Collate function, among the functions that the server's configuration allows; by default, the dataset's own.",
)  # fmt: skip
drop_last: Final = click.option("--drop-last", is_flag=True, help="Omit an incomplete last batch.")
# `LoaderSpec` checks the ranges
seed: Final = click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the order and of random augmentation."
)
epoch: Final = click.option(
    "-e",
    "--epoch",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    metavar="E",
    help="Epoch number, starting at 0.",
)
rank: Final = click.option(
    "--rank", type=int, default=0, show_default=True, metavar="R", help="Rank of the training process."
)
world_size: Final = click.option(
    "--world-size", type=int, default=1, show_default=True, metavar="W", help="Number of ranks that share the epoch."
)
tail: Final = click.option(
    "--tail", type=click.Choice(get_args(Tail)), default="pad", show_default=True,
    help="Handling of the remainder if the world size does not divide the number of samples.",
)  # fmt: skip


def _set(variable: str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    """Return an option callback that sets an environment variable from which credentials are read."""

    def set_variable(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            os.environ[variable] = value
            if variable == TOKEN_FILE_VARIABLE:
                os.environ.pop(TOKEN_VARIABLE, None)

    return set_variable


def access(command: _Command) -> _Command:
    """Add the credential options to a command.

    The token itself is not an option, because other users of the machine can read command lines.
    """
    for option, variable, text in reversed((
        ("--token-file", TOKEN_FILE_VARIABLE, "File with the token that authenticates the client."),
        ("--ca", CA_VARIABLE, "File with the CA certificate of an https:// server."),
        ("--cert", CERT_VARIABLE, "File with a client certificate."),
        ("--key", KEY_VARIABLE, "File with the private key of the client certificate, if it is not in --cert."),
    )):  # fmt: skip
        command = click.option(
            option,
            metavar="FILE",
            expose_value=False,
            callback=_set(variable),
            help=f"{text} Environment variable: {variable}.",
        )(command)
    return command


def of_lengths(command: _Command) -> _Command:
    """Add the options of `LengthBalance` and `Packing` to a command, as its arguments `balance` and `packing`."""

    @wraps(command)
    def with_options(
        *args: Any, window: int | None, max_tokens: int | None, group: int | None, sequence_length: int | None,
        **others: Any,
    ) -> Any:  # fmt: skip
        if sequence_length is not None:
            if (max_tokens, group) != (None, None):
                raise ValueError("--sequence-length excludes --max-tokens and --group, which balance batches by length")
            packing = Packing(sequence_length=sequence_length, window=DEFAULT_WINDOW if window is None else window)
            return command(*args, balance=None, packing=packing, **others)
        given = (window, max_tokens, group) != (None, None, None)
        found = LengthBalance(window=window, max_tokens=max_tokens, group=group) if given else None
        return command(*args, balance=found, packing=None, **others)

    for option, metavar, text in reversed((
        ("--window", "N", "Balance batches by length, or pack sequences, in windows of N samples."),
        ("--max-tokens", "T", "Balance batches by length, with at most T tokens per batch, padding included."),
        ("--group", "G", "With --max-tokens: number of successive batches of similar length."),
        ("--sequence-length", "L", "Pack the samples into sequences of L tokens (Packing)."),
    )):  # fmt: skip
        with_options = click.option(option, type=int, metavar=metavar, help=text)(with_options)
    return cast("_Command", with_options)


def sort(*titles: str) -> Callable[[_Command], _Command]:
    """Return a decorator that adds the option ``--sort``.

    Args:
        titles: Titles of columns that the help names as examples.
    """
    return click.option(
        "-s", "--sort", metavar="COLUMN", help="Title of the column that determines the order, such as "
        f"{' or '.join(titles)}. Numbers are in descending order.",
    )  # fmt: skip


def batch_size(default: int) -> Callable[[_Command], _Command]:
    """Return a decorator that adds the ``--batch-size`` option with the given default."""
    return click.option(
        "-b", "--batch-size", type=int, default=default, show_default=True, metavar="B", help="Samples per batch."
    )


def of_loader(*options: Callable[[Any], Any]) -> Callable[[_Command], _Command]:
    """Return a decorator that adds several loader options to a command, in the given order."""

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
