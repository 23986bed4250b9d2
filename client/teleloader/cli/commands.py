"""What ``teleloader`` can do, and its options."""

from __future__ import annotations

import logging
import secrets
from typing import Any, Final

import click

from teleloader.cli import audit as audits
from teleloader.cli import options
from teleloader.cli import peek as peeks
from teleloader.cli import stats as statistics
from teleloader.cli.bench import BatchFailed, Bench
from teleloader.cli.bench import show as show_bench
from teleloader.dataset import RemoteDataset
from teleloader.loader import DataLoader
from teleloader_shared.errors import TeleloaderError
from teleloader_shared.spec import LoaderSpec, Tail
from teleloader_shared.version import VERSION

EXIT_NO: Final = 1
"""The answer is no: the batch is an error, a sample is missing."""
EXIT_UNKNOWN: Final = 2
"""There is no answer."""
EXIT_INTERRUPTED: Final = 130
"""What a shell reports of a program that Ctrl-C ended."""


class _No(click.ClickException):
    """The answer, told in one line."""

    exit_code = EXIT_NO

    def show(self, file: Any = None) -> None:
        """Print it."""
        click.echo(f"teleloader: {self.message}", err=True, file=file)


class _NoAnswer(_No):
    """Why there is none."""

    exit_code = EXIT_UNKNOWN


class _Tools(click.Group):
    """Commands whose errors are sentences."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run one of them."""
        try:
            return super().invoke(ctx)
        except (TeleloaderError, ValueError, TypeError) as error:
            raise _NoAnswer(str(error)) from None
        except KeyboardInterrupt:
            return ctx.exit(EXIT_INTERRUPTED)


class Indices(click.ParamType):  # type: ignore[type-arg] # generic since click 8.4, and older ones do
    """Whole numbers with commas between them."""

    name = "I,I,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Read them."""
        try:
            return [int(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"indices must be whole numbers with commas between them, were {value!r}", param, ctx)


@click.group(cls=_Tools, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION, prog_name="teleloader")
def teleloader() -> None:
    """Look at loader servers from where you train.

    \b
      teleloader stats http://cpu-box:8000 --watch          is the loader or the trainer the bottleneck?
      teleloader bench http://cpu-box:8000 train            how fast could batches come?
      teleloader peek http://cpu-box:8000 train 17          what does batch 17 hold?
      teleloader audit http://cpu-box:8000 train            does an epoch visit each sample once?

    The exit code is 0 when all is well, 1 when it is not (a batch that is an error, a sample that is missing), 2 when
    there is no answer (no server, wrong arguments), and 130 after Ctrl-C. Results go to stdout, without colours when
    that is no terminal; progress and errors go to stderr.
    """  # noqa: D301 - the escapes are click's
    # what a server that does not answer is told of is the error itself
    logging.getLogger("teleloader").setLevel(logging.ERROR)


@teleloader.command()
@options.url
@click.option("--watch", is_flag=True, help="Show it again and again, in place, until Ctrl-C.")
@click.option(
    "--interval", type=click.FloatRange(0.5, 60), default=1.0, show_default=True, metavar="SECONDS",
    help="How often, with --watch.",
)  # fmt: skip
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, metavar="N",
    help="Consumers to show: those who asked last.",
)  # fmt: skip
@options.as_json
@options.access
def stats(url: str, watch: bool, interval: float, limit: int, as_json: bool) -> None:
    """Say what holds training back, and show the numbers behind it.

    What is a rate or a share is taken over the last 10 seconds. A consumer is one iterator of a DataLoader; it "waits"
    when its loop has nothing to do because the next batch is not there.
    """
    if watch:
        statistics.watch(url, limit, interval, as_json=as_json)
    else:
        statistics.once(url, limit, as_json=as_json)


@teleloader.command()
@options.of_loader(options.url, options.dataset, options.batch_size(32))
@click.option(
    "--seconds", type=click.FloatRange(0.1), default=10.0, show_default=True, metavar="S",
    help="How long, from the first batch on; a diagnosis takes 3.",
)  # fmt: skip
@click.option(
    "--step", type=click.FloatRange(0), default=0.0, show_default=True, metavar="S",
    help="Seconds that the loop spends with each batch, as training would.",
)  # fmt: skip
@click.option(
    "--num-workers", type=click.IntRange(0), default=0, show_default=True, metavar="N",
    help="As the DataLoader's: shards of an iterable-style dataset.",
)  # fmt: skip
@click.option("--compression", type=click.Choice(["zstd", "lz4"]), help="As the DataLoader's.")
@options.of_loader(options.shuffle, options.drop_last, options.as_json, options.access)
def bench(
    url: str, dataset: str | None, batch_size: int, seconds: float, step: float, num_workers: int,
    compression: Any, shuffle: bool, drop_last: bool, as_json: bool,
) -> None:  # fmt: skip
    """Load batches for some seconds, as a training loop does, and say how fast they come.

    Without --step the loop does nothing with a batch, so that this is the most that the server, the network and this
    machine can do. With the time that a step of your training takes, the diagnosis is the one that training would get.
    """
    remote = RemoteDataset(url, dataset, reconnect_timeout=0)
    loader = DataLoader(
        remote, batch_size, num_workers=num_workers, drop_last=drop_last, compression=compression, output="numpy",
        # a dataset without numbers cannot be shuffled, and says so
        shuffle=shuffle or None, seed=None if remote.iterable else secrets.randbits(63), rank=0, world_size=1,
    )  # fmt: skip
    try:
        measured, diagnosis = Bench(loader, remote.name, seconds, step).run(url)
    except BatchFailed as error:
        raise _No(str(error)) from None
    show_bench(measured, diagnosis, as_json=as_json)


@teleloader.command()
@options.of_loader(options.url, options.dataset)
@click.argument("batch", metavar="[K]", type=click.IntRange(0), default=0)
@options.epoch
@click.option("--indices", type=Indices(), help="What the batch holds, in place of what the plan says.")
@click.option("--debug", is_flag=True, help="Load it in the server's own process, where breakpoint() stops.")
@options.of_loader(
    options.batch_size(1), options.shuffle, options.drop_last, options.seed, options.rank, options.world_size,
    options.tail, options.as_json, options.access,
)  # fmt: skip
@click.pass_context
def peek(
    ctx: click.Context, /, url: str, dataset: str | None, batch: int, epoch: int, indices: list[int] | None,
    debug: bool, as_json: bool, **loader: Any,
) -> None:  # fmt: skip
    """Show batch K of an epoch: what it holds, of which types and shapes.

    An error message says which batch failed. For a loader with a seed, or one that does not shuffle, give its arguments
    and the batch's numbers: the same samples are loaded with the same random numbers. Otherwise give the indices.

    A worker of the server loads it, as it does for training. With --debug no worker takes part: a breakpoint() in the
    dataset stops in the terminal of the server, which must have been started with --debug too.
    """
    remote = RemoteDataset(url, dataset, reconnect_timeout=0)
    own = debug or indices is not None or remote.iterable
    spec = LoaderSpec(
        dataset=remote.name,
        session=secrets.token_hex(16) if own else None,
        in_process=debug,
        order="plan" if indices is None else "client",
        **loader,
    )
    frame = remote.batch(spec, epoch, batch, indices)
    if not peeks.show(frame, remote, as_json=as_json):
        ctx.exit(EXIT_NO)


@teleloader.command()
@options.of_loader(
    options.url, options.dataset, options.epoch, options.batch_size(1), options.shuffle, options.drop_last,
    options.seed, options.world_size, options.tail, options.as_json, options.access,
)  # fmt: skip
@click.pass_context
def audit(
    ctx: click.Context, /, url: str, dataset: str | None, epoch: int, batch_size: int, shuffle: bool, drop_last: bool,
    seed: int, world_size: int, tail: Tail, as_json: bool,
) -> None:  # fmt: skip
    """Count how often an epoch visits each sample, all trainers together.

    What each batch holds is a function of the loader's arguments, the same here and on the server: nothing is loaded,
    and 8 bytes a sample are needed. The exit code is 0 when each sample is visited exactly once.
    """
    remote = RemoteDataset(url, dataset, reconnect_timeout=0)
    if remote.iterable:
        raise TypeError(f"dataset {remote.name!r} is iterable-style: what an epoch visits is seen only by loading it")
    spec = LoaderSpec(
        dataset=remote.name, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed,
        world_size=world_size, tail=tail,
    )  # fmt: skip
    found = audits.coverage(spec, len(remote), epoch)
    audits.show(found, remote.name, spec, epoch, as_json=as_json)
    if not found.exact:
        ctx.exit(EXIT_NO)
