"""The arguments that several of the tools take."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, TypeVar, get_args

import click

from teleloader.api.credentials import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from teleloader_shared.spec import Tail

_Command = TypeVar("_Command", bound=Callable[..., Any])

url: Final = click.argument("url")
dataset: Final = click.argument("dataset", required=False)
as_json: Final = click.option("--json", "as_json", is_flag=True, help="Write one line of JSON, for programs.")

shuffle: Final = click.option("--shuffle", is_flag=True, help="Each epoch in an order of its own.")
drop_last: Final = click.option("--drop-last", is_flag=True, help="Leave out an incomplete last batch.")
# their ranges are checked where loaders are made
seed: Final = click.option("--seed", type=int, default=0, show_default=True, help="Decides order and augmentation.")
epoch: Final = click.option(
    "--epoch", type=click.IntRange(0), default=0, metavar="E", help="Which epoch; the default is 0, the first."
)
rank: Final = click.option(
    "--rank", type=int, default=0, show_default=True, metavar="R", help="Position among the data-parallel trainers."
)
world_size: Final = click.option(
    "--world-size", type=int, default=1, show_default=True, metavar="W", help="How many trainers share the epoch."
)
tail: Final = click.option(
    "--tail", type=click.Choice(get_args(Tail)), default="pad", show_default=True,
    help="What happens where the samples do not divide evenly among trainers.",
)  # fmt: skip


def _told(variable: str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    """Take an option as what the environment would say: that is what servers are shown."""

    def tell(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            os.environ[variable] = value
            if variable == TOKEN_FILE_VARIABLE:
                os.environ.pop(TOKEN_VARIABLE, None)

    return tell


def access(command: _Command) -> _Command:
    """What a server is shown, and by what it is known. The token itself is no option: others see command lines."""
    for option, variable, text in reversed((
        ("--token-file", TOKEN_FILE_VARIABLE, "File with the token that lets you in."),
        ("--ca", CA_VARIABLE, "File with the CA of an https:// server's certificate."),
        ("--cert", CERT_VARIABLE, "File with a client certificate."),
        ("--key", KEY_VARIABLE, "File with its key, if that is another one."),
    )):  # fmt: skip
        command = click.option(
            option, metavar="FILE", expose_value=False, callback=_told(variable), help=f"{text} Default: {variable}."
        )(command)
    return command


def batch_size(default: int) -> Callable[[_Command], _Command]:
    """The size of a batch."""
    return click.option(
        "--batch-size", type=int, default=default, show_default=True, metavar="B", help="Samples in a batch."
    )


def of_loader(*options: Callable[[Any], Any]) -> Callable[[_Command], _Command]:
    """Add several of these to a command, in this order."""

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
