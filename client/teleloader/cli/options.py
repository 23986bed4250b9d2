"""The arguments that several of the tools take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, get_args

import click

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
