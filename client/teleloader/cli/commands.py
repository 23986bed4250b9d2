"""Subcommand definitions of ``teleloader``, with arguments and options."""

from __future__ import annotations

import logging
import secrets
from typing import Any, Final

import click

from teleloader.balance import LengthBalance
from teleloader.cli import audit as audits
from teleloader.cli import inspection, options, views
from teleloader.cli import peek as peeks
from teleloader.cli import stats as statistics
from teleloader.cli import top as top_screen
from teleloader.cli import trace as tracing
from teleloader.cli import versions as versioning
from teleloader.cli.bench import BatchFailed, Bench
from teleloader.cli.bench import show as show_bench
from teleloader.dataset import RemoteDataset
from teleloader.loader import DataLoader
from teleloader.mixture import Mixture
from teleloader.packing import Packing
from teleloader_shared.command_line import CONTEXT, CommandGroup, as_json, version_option
from teleloader_shared.errors import BatchOutOfRange, InvalidSpec, TeleloaderError, UnknownDataset
from teleloader_shared.exit_codes import EXIT_FAILED, EXIT_USAGE
from teleloader_shared.orders.plan import Coverage
from teleloader_shared.registry import keeping_unrestored
from teleloader_shared.spec import LoaderSpec

_INVALID: Final = (InvalidSpec, UnknownDataset, BatchOutOfRange)
"""Errors of teleloader that result from the arguments of a command."""


class _Failed(click.ClickException):
    """Error of a command, reported in one line."""

    exit_code = EXIT_FAILED

    def show(self, file: Any = None) -> None:
        """Print the error message to stderr, or to `file`."""
        click.echo(f"teleloader: {self.message}", err=True, file=file)


class _Invalid(_Failed):
    """Error of a command with invalid arguments."""

    exit_code = EXIT_USAGE


class _Tools(CommandGroup):
    """Command group that reports expected errors in one line, without a traceback."""

    command_class = options.RemoteCommand

    def invoke(self, ctx: click.Context) -> Any:
        """Run a subcommand; convert expected errors to exit codes."""
        try:
            return super().invoke(ctx)
        except (TeleloaderError, ValueError, TypeError) as error:
            is_invalid = not isinstance(error, TeleloaderError) or isinstance(error, _INVALID)
            raise (_Invalid if is_invalid else _Failed)(str(error)) from None


class Indices(click.ParamType):  # type: ignore[type-arg] # generic since click 8.4; older versions are supported
    """click parameter type for comma-separated integers."""

    name = "I,I,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Parse comma-separated integers; exit with a usage error if they are invalid."""
        try:
            return [int(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"invalid indices {value!r}: expected integers separated by commas, such as 4,8,15", param, ctx)


class Weight(click.ParamType):  # type: ignore[type-arg] # generic since click 8.4; older versions are supported
    """click parameter type for the name and the weight of a source of a mixture."""

    name = "NAME=W"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        """Parse a name and a number; exit with a usage error if they are invalid."""
        name, _, weight = value.rpartition("=")
        try:
            return name, float(weight)
        except ValueError:
            self.fail(f"invalid weight {value!r}: expected the name of a dataset and a number, as web=0.7", param, ctx)


@click.group(
    cls=_Tools,
    sections={
        "Statistics": ("stats", "top", "datasets", "workers", "errors", "trace"),
        "Batches": ("peek", "bench", "audit"),
        "Versions": ("versions", "publish", "retire"),
    },
    context_settings=CONTEXT,
)
@version_option("teleloader")
def teleloader() -> None:
    """Inspect and measure loader servers from the client's machine.

    \b
      export TELELOADER_URL=http://cpu-box:8000
      teleloader stats            # find the bottleneck: data loading or training
      teleloader top              # show the consumers that wait longest
      teleloader peek train 17    # show the content of batch 17
      teleloader bench train      # measure the throughput
      teleloader audit train      # verify that an epoch visits each sample once

    TELELOADER_URL is the URL of a server, or several URLs separated by commas, or the address of a directory:
    file:///folder/name, dns+http://name:port or registry+http://host:port. To use other servers, pass their URL as the
    first argument of a command.

    Exit codes: 0 for success; 1 for a failure (server unreachable) or a negative result (the batch is an error, a
    sample is missing); 2 for invalid arguments; 130 after Ctrl-C. Results go to stdout, in color only if it is a
    terminal and NO_COLOR is not set; progress and errors go to stderr.
    """  # noqa: D301 - the escapes are click's
    # hides warnings: the error message of a command repeats their text
    logging.getLogger("teleloader").setLevel(logging.ERROR)


@teleloader.command()
@options.url
@click.option("-w", "--watch", is_flag=True, help="Refresh the output until Ctrl-C.")
@options.interval
@click.option(
    "-l", "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, metavar="N",
    help="Maximum number of consumers to show, the most recently active ones first.",
)  # fmt: skip
@as_json
@options.trust_directory
@options.access
def stats(url: str | list[str], watch: bool, interval: float, limit: int, as_json: bool, trust_directory: bool) -> None:
    """Show the bottleneck of each consumer, and the statistics of a server or of several servers together.

    Rates and fractions cover the last 10 seconds. A consumer is one iterator of a DataLoader; it "waits" while its
    training loop needs the next batch and the batch has not arrived.
    """
    source = statistics.Source(url, limit, trust_directory=trust_directory)
    if watch:
        statistics.watch(source, interval, as_json=as_json)
    else:
        statistics.once(source, as_json=as_json)


@teleloader.command()
@options.url
@click.argument("view", type=click.Choice([view.name for view in views.VIEWS]), default="consumers")
@options.sort("waits", "memory")
@options.reverse
@options.interval
@as_json
@options.trust_directory
@options.access
def top(
    url: str | list[str], view: str, sort: str | None, reverse: bool, interval: float, as_json: bool,
    trust_directory: bool,
) -> None:  # fmt: skip
    """Show a sorted table of consumers, workers, datasets or servers until Ctrl-C.

    The consumers that wait longest for data come first.

    \b
      c, w, d, s      show consumers, workers, datasets or servers
      <, >, arrows    sort by the previous or the next column
      r               reverse the order
      q               quit

    Without a terminal, a table or a line of JSON is appended every --interval seconds.
    """  # noqa: D301 - the escapes are click's
    source = statistics.Source(url, top_screen.MAX_CONSUMERS, trust_directory=trust_directory)
    found = next(each for each in views.VIEWS if each.name == view)
    top_screen.top(source, found, sort, interval, reverse=reverse, as_json=as_json)


@teleloader.command()
@options.url
@options.sort("samples", "samples/s")
@options.reverse
@as_json
@options.trust_directory
@options.access
def datasets(url: str | list[str], sort: str | None, reverse: bool, as_json: bool, trust_directory: bool) -> None:
    """List the datasets of a server, or of several servers together.

    For each dataset: number of samples, recent rate, and the time per batch of each loading stage.
    """
    source = statistics.Source(url, 1, trust_directory=trust_directory)
    views.once(views.DATASETS, source, sort, reverse=reverse, as_json=as_json)


@teleloader.command()
@options.url
@as_json
@options.trust_directory
@options.access
def versions(url: str | list[str], as_json: bool, trust_directory: bool) -> None:
    """List the versions of the datasets on a server or on several servers.

    For each version: fingerprint, loaders that use it, and time since its last use. New runs get the newest version. A
    previous one is retired when no loader has used it for a while (--retire-after of the server).
    """
    versioning.show(statistics.Source(url, 1, trust_directory=trust_directory), as_json=as_json)


@teleloader.command()
@options.url
@as_json
@options.trust_directory
@options.access
def publish(url: str | list[str], as_json: bool, trust_directory: bool) -> None:
    """Publish new versions of datasets while the server runs; requires scope admin.

    The server reads its configuration file (--config) again. Workers of each dataset whose version changed start in a
    new process, which imports the code again, and new runs get the new version. Running epochs, later epochs of the
    same loaders and saved states continue with their version.

    To roll back, restore the previous configuration file and run the command again.

    Several servers publish one after the other. The exit code is 1 if a server cannot publish: it and the following
    servers keep their versions.
    """
    versioning.publish(statistics.Source(url, 1, trust_directory=trust_directory), as_json=as_json)


@teleloader.command()
@options.url
@click.argument("dataset")
@click.argument("version")
@options.trust_directory
@options.access
def retire(url: str | list[str], dataset: str, version: str, trust_directory: bool) -> None:
    """Retire a previous version of a dataset, although loaders may use it; requires scope admin.

    Training loops that use the version raise DatasetChanged.
    """
    versioning.retire(statistics.Source(url, 1, trust_directory=trust_directory), dataset, version)


@teleloader.command()
@options.url
@options.sort("busy", "memory")
@options.reverse
@as_json
@options.trust_directory
@click.option(
    "--stack", type=click.IntRange(0), metavar="N",
    help="Show the stacks of worker N of one server in place of the table, also while it hangs; requires scope admin.",
)  # fmt: skip
@click.option("--loader", metavar="KEY", help="With --stack: key of the loader to which the worker is private.")
@options.access
def workers(
    url: str | list[str], sort: str | None, reverse: bool, as_json: bool, trust_directory: bool, stack: int | None,
    loader: str | None,
) -> None:  # fmt: skip
    """List the workers of a server or of several servers.

    For each worker: state, current task, busy fraction of the last 10 seconds, restarts and memory.
    """
    source = statistics.Source(url, 1, trust_directory=trust_directory)
    if stack is not None:
        inspection.show_stack(source, stack, loader, as_json=as_json)
        return
    views.once(views.WORKERS, source, sort, reverse=reverse, as_json=as_json)


@teleloader.command()
@options.url
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1, 100),
    default=20,
    show_default=True,
    metavar="N",
    help="Maximum number of errors of each server, the latest ones.",
)
@click.option("--traceback", is_flag=True, help="Show the traceback of each error.")
@click.option("--slow", is_flag=True, help="List slow samples in place of errors.")
@as_json
@options.trust_directory
@options.access
def errors(
    url: str | list[str], limit: int, traceback: bool, slow: bool, as_json: bool, trust_directory: bool
) -> None:  # fmt: skip
    """List the latest errors of datasets, or the slow samples, of a server or of several servers.

    A server keeps its last 100 errors. For each error: number, time, dataset, epoch, batch, sample, and whether the
    error was raised in the training loop, or the sample was replaced or skipped (on_error).

    \b
      teleloader peek http://cpu-box:8000 --error 12             # load the batch of error 12 again
      teleloader peek http://cpu-box:8000 --error 12 --sample    # load only the sample that failed
    """  # noqa: D301 - the escapes are click's
    source = statistics.Source(url, 1, trust_directory=trust_directory)
    if slow:
        inspection.show_slow_samples(source, limit, as_json=as_json)
    else:
        inspection.show_errors(source, limit, tracebacks=traceback, as_json=as_json)


@teleloader.command()
@options.url
@click.option(
    "-t", "--seconds", type=click.FloatRange(0.1, 600), metavar="S", help="Seconds to record.  [default: 5]",
)  # fmt: skip
@click.option(
    "-n", "--batches", type=click.IntRange(1, 100_000), metavar="N",
    help="Record until the servers have computed N batches, for at most 10 minutes.",
)  # fmt: skip
@click.option(
    "-f", "--file", type=click.Path(dir_okay=False, writable=True), default="teleloader-trace.json",
    show_default=True, metavar="FILE", help="File to write; - for stdout.",
)  # fmt: skip
@options.trust_directory
@options.access
def trace(
    url: str | list[str], seconds: float | None, batches: int | None, file: str, trust_directory: bool
) -> None:  # fmt: skip
    """Record the times of batches on servers and clients, and write a trace file for Perfetto.

    Open the file at https://ui.perfetto.dev ("Open trace file"; the file stays in the browser). It has a track for each
    worker with the loading stages, the queues and responses of the server process, and the receiving threads and the
    training loop of each client. Arrows connect the parts of a batch. All times are on the clock of the first server;
    the file states the uncertainty of the clocks.

    Clients report their part while the trace is recorded, once a second.
    """
    if seconds is not None and batches is not None:
        raise click.UsageError("--seconds excludes --batches: use one of them")
    source = statistics.Source(url, 1, trust_directory=trust_directory)
    tracing.record(source, 5.0 if seconds is None else seconds, batches, file)


@teleloader.command()
@options.of_loader(options.url, options.dataset, options.batch_size(32))
@click.option(
    "-t", "--seconds", type=click.FloatRange(0.1), default=10.0, show_default=True, metavar="S",
    help="Seconds to measure after the first batch; a diagnosis requires at least 3.",
)  # fmt: skip
@click.option(
    "--step", type=click.FloatRange(0), default=0.0, show_default=True, metavar="S",
    help="Simulated duration of a training step, in seconds.",
)  # fmt: skip
@click.option(
    "-n", "--num-workers", type=click.IntRange(0), default=0, show_default=True, metavar="N",
    help="Number of shards of an iterable-style dataset, each with its own worker; 0 uses one worker. Ignored for "
    "map-style datasets, which use all workers of the server.",
)  # fmt: skip
@click.option("--compression", type=click.Choice(["zstd", "lz4"]), help="Compression that the workers apply to arrays.")
@options.of_loader(
    options.shuffle, options.drop_last, options.collate, as_json, options.trust_directory, options.access
)  # fmt: skip
@options.of_lengths
def bench(
    url: str | list[str], dataset: str | None, batch_size: int, seconds: float, step: float, num_workers: int,
    compression: Any, shuffle: bool, drop_last: bool, collate: str | None, as_json: bool,
    trust_directory: bool, balance: LengthBalance | None, packing: Packing | None,
) -> None:  # fmt: skip
    """Load batches as a training loop does, and report the throughput.

    Without --step, the command loads at full speed and measures the maximum throughput of the server, the network and
    this machine. If --step is the duration of your training step, the diagnosis is the one for your training loop.

    If the dataset states sample_lengths, the report contains the fraction of padding in the batches. --window and
    --max-tokens measure length-balanced batches; with --max-tokens, --batch-size is ignored. --sequence-length measures
    packed sequences.
    """
    remote = RemoteDataset(url, dataset, reconnect_timeout=0, trust_directory=trust_directory)
    size = batch_size if balance is None or balance.max_tokens is None else 1
    loader = DataLoader(
        remote, size, num_workers=num_workers, drop_last=drop_last, compression=compression, output="numpy",
        collate_fn=collate,
        # with --shuffle, the loader rejects an iterable-style dataset
        shuffle=shuffle or None, seed=None if remote.iterable else secrets.randbits(63), rank=0, world_size=1,
        balance=balance, packing=packing,
    )  # fmt: skip
    try:
        with keeping_unrestored():
            measured, diagnosis = Bench(loader, remote, seconds, step).run()
    except BatchFailed as error:
        raise _Failed(str(error)) from None
    show_bench(measured, diagnosis, as_json=as_json)


@teleloader.command()
@options.of_loader(options.url, options.dataset)
@click.argument("batch", metavar="[K]", type=click.IntRange(0), default=0)
@options.epoch
@click.option("--indices", type=Indices(), help="Sample indices of the batch, in place of the seeded order.")
@click.option("--debug", is_flag=True, help="Load in the server's main process, for debugging with breakpoint().")
@click.option(
    "--error", type=click.IntRange(1), metavar="N",
    help="Load exactly the batch of error N (teleloader errors), with the arguments of its loader.",
)  # fmt: skip
@click.option("--sample", "only_sample", is_flag=True, help="With --error: load only the sample that failed.")
@options.of_loader(
    options.batch_size(1), options.shuffle, options.drop_last, options.seed, options.rank, options.world_size,
    options.tail, options.collate, as_json, options.trust_directory, options.access,
)  # fmt: skip
@options.of_lengths
@click.pass_context
def peek(
    ctx: click.Context, /, url: str | list[str], dataset: str | None, batch: int, epoch: int, indices: list[int] | None,
    debug: bool, error: int | None, only_sample: bool, as_json: bool, trust_directory: bool,
    balance: LengthBalance | None, packing: Packing | None, **loader: Any,
) -> None:  # fmt: skip
    """Show the content of batch K (0 by default) of an epoch: paths, types, shapes and values.

    To reproduce a failed batch, pass the batch and the epoch of the error message, and the arguments of the loader: for
    a loader with a seed, or without shuffling, the same samples are loaded with the same random numbers. Otherwise pass
    --indices. If the server still lists the error, --error N passes all of them.

    A worker of the server loads the batch, as for training. With --debug, the server's main process loads it, and a
    breakpoint() in the dataset stops in the server's terminal; the server must have been started with --debug, too.
    """
    if error is not None:
        source = statistics.Source(url, 1, trust_directory=trust_directory)
        frame, remote = inspection.load_again(source, error, only_sample=only_sample, debug=debug)
        if not peeks.show(frame, remote, as_json=as_json):
            ctx.exit(EXIT_FAILED)
        return
    remote = RemoteDataset(url, dataset, reconnect_timeout=0, trust_directory=trust_directory)
    own = debug or indices is not None or remote.iterable
    spec = LoaderSpec(
        dataset=remote.name,
        session=secrets.token_hex(16) if own else None,
        in_process=debug,
        order="plan" if indices is None else "client",
        **_parameters(balance, packing, remote, **loader),
        **loader,
    )
    with keeping_unrestored():
        frame = remote.batch(spec, epoch, batch, indices)
    if not peeks.show(frame, remote, as_json=as_json):
        ctx.exit(EXIT_FAILED)


def _parameters(
    balance: LengthBalance | None, packing: Packing | None, remote: RemoteDataset, batch_size: int, world_size: int,
    **_: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the parameters of length-balanced batches and of packed sequences in a loader spec."""
    return {
        "balance": None if balance is None else balance.spec(remote.info, batch_size, world_size),
        "packing": None if packing is None else packing.spec(remote.info),
    }


@teleloader.command()
@options.of_loader(
    options.url, options.dataset, options.epoch, options.batch_size(1), options.shuffle, options.drop_last,
    options.seed, options.world_size, options.tail, as_json, options.trust_directory, options.access,
)  # fmt: skip
@click.option(
    "--visits", type=click.Path(exists=True, dir_okay=False), multiple=True, metavar="FILE",
    help="Count the visits in this .npy file, an array of DataLoader.visits(). Repeat the option for each rank.",
)  # fmt: skip
@click.option(
    "--weight", "weights", type=Weight(), multiple=True, metavar="NAME=W",
    help="Audit a mixture in place of DATASET: name and weight of a source. Repeat the option for each source, in the "
    "order of the Mixture.",
)  # fmt: skip
@click.option(
    "--samples", default="first_exhausted", show_default=True, metavar="N",
    help="Samples in an epoch of the mixture: a number, first_exhausted or all_exhausted.",
)  # fmt: skip
@options.of_lengths
@click.pass_context
def audit(
    ctx: click.Context, /, url: str | list[str], dataset: str | None, epoch: int, visits: tuple[str, ...],
    weights: tuple[tuple[str, float], ...], samples: str, as_json: bool, trust_directory: bool,
    balance: LengthBalance | None, packing: Packing | None, **loader: Any,
) -> None:  # fmt: skip
    """Count the visits of all ranks to each sample in an epoch.

    The command computes the seeded order from the loader's arguments, as the server does. It loads no data, and uses 8
    bytes of memory per sample. To count what training loops received, without skipped samples and with replacements,
    save the array of DataLoader.visits() of each rank with numpy.save, and pass the files with --visits.

    With --sequence-length, the command counts the visits to each token of the documents, and uses 100 bytes of memory
    per document.

    The exit code is 0 if each sample or token is visited exactly once; of a mixture, if the visits to each source match
    its weight.
    """
    if weights:
        if balance is not None or packing is not None:
            raise ValueError("--weight excludes --window, --max-tokens, --group and --sequence-length")
        if dataset is not None:
            raise ValueError(
                f"--weight excludes DATASET, got {dataset!r}: each source of a mixture has its own --weight"
            )
        sources = {
            name: RemoteDataset(url, name, reconnect_timeout=0, trust_directory=trust_directory) for name, _ in weights
        }
        strategy: Any = int(samples) if samples.isdecimal() else samples
        mixture = Mixture(sources, dict(weights), samples=strategy)
        spec = LoaderSpec(dataset=next(iter(sources)), mixture=mixture.spec, **loader)
        counts = audits.received(visits, len(mixture)) if visits else audits.planned(spec, len(mixture), epoch)
        by_source = audits.by_source(counts, mixture.spec)
        audits.show_sources(by_source, spec, None if visits else epoch, as_json=as_json)
        if not audits.has_weights(by_source, spec):
            ctx.exit(EXIT_FAILED)
        return
    remote = RemoteDataset(url, dataset, reconnect_timeout=0, trust_directory=trust_directory)
    if remote.iterable:
        raise TypeError(
            f"cannot audit dataset {remote.name!r}: the order of an iterable-style dataset is unknown before loading"
        )
    spec = LoaderSpec(dataset=remote.name, **_parameters(balance, packing, remote, **loader), **loader)
    if packing is not None:
        if visits:
            raise ValueError("--visits excludes --sequence-length: DataLoader.visits() counts batches, not tokens")
        tokens = audits.planned_tokens(spec, remote.lengths(), epoch)
        audits.show_tokens(tokens, remote.name, spec, epoch, as_json=as_json)
        if not tokens.exact:
            ctx.exit(EXIT_FAILED)
        return
    lengths = None if balance is None else remote.lengths()
    counts = audits.received(visits, len(remote)) if visits else audits.planned(spec, len(remote), epoch, lengths)
    found = Coverage.of(counts)
    audits.show(found, remote.name, spec, None if visits else epoch, as_json=as_json)
    if not found.exact:
        ctx.exit(EXIT_FAILED)
