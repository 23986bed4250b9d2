"""``teleloader``: the client's tools."""

from __future__ import annotations

import argparse
import secrets
import sys
from typing import Any, get_args

import numpy as np

from teleloader.failures import exception_of
from teleloader.remote import RemoteDataset
from teleloader_shared.codec import Failure
from teleloader_shared.errors import EncodeError, TeleloaderError
from teleloader_shared.spec import LoaderSpec, Tail
from teleloader_shared.tree import flatten
from teleloader_shared.version import VERSION

_PEEK = """Load one batch by its address, in the server's own process, and show what it holds.

An error message says which batch failed. For a loader with a seed, or one that does not shuffle, give its arguments and
the batch's numbers: the same samples are loaded again with the same random numbers. Otherwise give the indices.

No worker process takes part, so a breakpoint() in the dataset stops in the terminal of the server, which must have been
started with --debug."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 1 when the batch is an error, 2 when it cannot be had.
    """
    options = _parser().parse_args(arguments)
    try:
        return peek(options)
    except (TeleloaderError, ValueError, TypeError) as error:
        print(f"teleloader: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="teleloader", description="The client's tools of teleloader.")
    parser.add_argument("--version", action="version", version=f"teleloader {VERSION}")
    commands = parser.add_subparsers(title="commands", required=True)
    command = commands.add_parser(
        "peek", help="show one batch, loaded in the server's own process", description=_PEEK,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    command.add_argument("url", help="the server, e.g. http://cpu-box:8000")
    command.add_argument("dataset", nargs="?", help="the dataset's name there; needed when there are several")
    command.add_argument("--batch", type=int, default=0, metavar="K", help="number of the batch (default 0)")
    command.add_argument("--epoch", type=int, default=0, metavar="E", help="number of the epoch (default 0)")
    command.add_argument(
        "--indices", type=indices, metavar="I,I,...", help="what the batch holds, in place of what the plan says"
    )
    command.add_argument("--batch-size", type=int, default=1, metavar="B", help="as the loader's (default 1)")
    command.add_argument("--shuffle", action="store_true", help="as the loader's")
    command.add_argument("--drop-last", action="store_true", help="as the loader's")
    command.add_argument("--seed", type=int, default=0, help="as the loader's (default 0)")
    command.add_argument("--rank", type=int, default=0, help="as the loader's (default 0)")
    command.add_argument("--world-size", type=int, default=1, metavar="W", help="as the loader's (default 1)")
    command.add_argument("--tail", choices=get_args(Tail), default="pad", help="as the loader's (default pad)")
    return parser


def indices(text: str) -> list[int]:
    """What ``--indices`` says; its name stands in the error message."""
    return [int(part) for part in text.split(",")]


def peek(options: argparse.Namespace) -> int:
    """What ``teleloader peek`` does."""
    dataset = RemoteDataset(options.url, options.dataset, reconnect_timeout=0)
    spec = LoaderSpec(
        dataset=dataset.name,
        batch_size=options.batch_size,
        shuffle=options.shuffle,
        drop_last=options.drop_last,
        seed=options.seed,
        rank=options.rank,
        world_size=options.world_size,
        tail=options.tail,
        session=secrets.token_hex(16),
        in_process=True,
        order="plan" if options.indices is None else "client",
    )
    frame = dataset.batch(spec, options.epoch, options.batch, options.indices)
    if isinstance(frame.content, Failure):
        error = exception_of(frame.content, frame.address, dataset.url)
        print(f"{type(error).__name__}: {error}")
        return 1
    print(f"batch {options.batch} of epoch {options.epoch} of {dataset.name} on {dataset.url}")
    for line in describe(frame.content):
        print(line)
    return 0


def describe(value: Any, path: str = "batch") -> list[str]:
    """A line for each array and plain value in a batch: path, element type, shape and range."""
    if isinstance(value, dict):
        return [line for key, item in value.items() for line in describe(item, f"{path}[{key!r}]")]
    if isinstance(value, list | tuple) and not all(isinstance(item, str | bytes | int | float) for item in value):
        return [line for i, item in enumerate(value) for line in describe(item, f"{path}[{i}]")]
    try:
        _, leaves = flatten(value)
    except EncodeError:
        leaves = []
    if len(leaves) != 1 or not hasattr(leaves[0], "array"):
        return [f"  {path:<24} {type(value).__name__:<10} {value!r:.90}"]
    leaf = leaves[0]
    array: np.ndarray[Any, Any] = leaf.array
    span = f"{array.min():.6g} to {array.max():.6g}" if array.size and array.dtype.kind in "biuf" else ""
    return [f"  {path:<24} {leaf.dtype_name:<10} {tuple(leaf.shape)!s:<20} {span}"]
