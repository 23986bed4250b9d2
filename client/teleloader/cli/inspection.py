"""Commands that show single events: ``teleloader errors``, ``workers --stack`` and ``peek --error``."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlencode

import click
from rich.text import Text

from teleloader.cli.showing import Column, figure, print_json, results_console, table
from teleloader.cli.stats import Source, record_of
from teleloader.dataset import RemoteDataset
from teleloader.transport.interface import BatchServer
from teleloader_shared.codec import Frame
from teleloader_shared.errors import InvalidSpec, TeleloaderError
from teleloader_shared.inspection import ErrorRecord, Errors, SlowSample, SlowSampleList, WorkerStack
from teleloader_shared.messages import ERRORS_PATH, SLOW_SAMPLES_PATH, WORKERS_PATH
from teleloader_shared.registry import keeping_unrestored
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.text import printable
from teleloader_shared.units import seconds

MAX_INSPECTION_BYTES: Final = 16 * 2**20
"""Maximum size of a response with errors or slow samples: 100 errors have up to 3 MB."""

_Record = TypeVar("_Record")


class Found(NamedTuple):
    """Record of one of several servers."""

    server: str
    """URL of the server."""
    record: Any

    def as_json(self) -> dict[str, Any]:
        """Return the record as a JSON value."""
        return {"server": self.server, **asdict(self.record)}


def read_each(source: Source, read: Callable[[BatchServer], Sequence[Any]]) -> list[Found]:
    """Return the records of all servers; report the errors of some servers to stderr.

    Raises:
        TeleloaderError: If no server responds.
    """
    source.read()  # finds servers that run under the same supervisor
    found, failures = [], []
    for server in source.servers:
        try:
            found += [Found(server.url, each) for each in read(server)]
        except TeleloaderError as error:
            failures.append(error)
    if len(failures) == len(source.servers):
        raise failures[0]
    for failure in failures:
        click.echo(f"teleloader: {printable(str(failure))}", err=True)
    return found


def errors_of(server: BatchServer) -> list[ErrorRecord]:
    """Return the last errors of a server, newest first."""
    return record_of(Errors, server.inspect(ERRORS_PATH, MAX_INSPECTION_BYTES), server.url).errors


def show_errors(source: Source, limit: int, *, tracebacks: bool, as_json: bool) -> None:
    """Print the last errors of servers.

    Args:
        source: Servers.
        limit: Maximum number of errors of each server.
        tracebacks: Whether to print the traceback of each error.
        as_json: Whether to print JSON in place of a table.
    """
    found = read_each(source, lambda server: errors_of(server)[:limit])
    if as_json:
        print_json([each.as_json() for each in found])
        return
    console = results_console()
    if not found:
        console.print("no errors since the server started")
        return
    console.print(table(_with_server(ERROR_COLUMNS, source), found, console.width))
    for each in found if tracebacks else ():
        record = each.record
        console.print(Text(printable(f"\nerror {record.number} of {each.server}: {record.type}: {record.message}")))
        shown = record.traceback or "(no traceback: the sample was replaced or skipped)"
        console.print(Text(printable(shown.rstrip())), soft_wrap=True)


def show_slow_samples(source: Source, limit: int, *, as_json: bool) -> None:
    """Print the slow samples of servers; arguments as of `show_errors`."""

    def read(server: BatchServer) -> Sequence[Any]:
        response = server.inspect(f"{SLOW_SAMPLES_PATH}?limit={limit}", MAX_INSPECTION_BYTES)
        return record_of(SlowSampleList, response, server.url).samples

    found = read_each(source, read)
    if as_json:
        print_json([each.as_json() for each in found])
        return
    console = results_console()
    console.print(table(_with_server(SLOW_COLUMNS, source), found, console.width) if found else "no slow samples")


def show_stack(source: Source, worker: int, loader: str | None, *, as_json: bool) -> None:
    """Print the current stacks of a worker's threads.

    Args:
        source: Server; of several ones, the first.
        worker: Worker ID.
        loader: Key of the loader to which the worker is private; None for the shared pool.
        as_json: Whether to print JSON in place of text.
    """
    server = source.servers[0] if source.servers else None
    if server is None:
        source.read()
        server = source.servers[0]
    query = "" if loader is None else f"?{urlencode({'loader': loader})}"
    found = record_of(WorkerStack, server.inspect(f"{WORKERS_PATH}/{worker}/stack{query}"), server.url)
    if as_json:
        print_json(asdict(found))
    else:
        print(printable(f"worker {found.worker} (pid {found.pid})\n{found.stack}"))


def load_again(source: Source, number: int, *, only_sample: bool, debug: bool) -> tuple[Frame, RemoteDataset]:
    """Load the batch of an error again.

    Args:
        source: Server; of several ones, the first that lists the error.
        number: Number of the error.
        only_sample: Whether to load only the sample that failed.
        debug: Whether to load in the server's main process.

    Raises:
        InvalidSpec: If no server lists the error, or its batch cannot be loaded again.
    """
    found = next((each for each in read_each(source, errors_of) if each.record.number == number), None)
    if found is None:
        raise InvalidSpec(f"unknown error {number}: a server keeps its last 100 errors. List them: teleloader errors")
    record: ErrorRecord = found.record
    preview = record.sample_preview if only_sample else record.batch_preview
    if preview is None:
        what = "sample" if only_sample else "batch"
        why = (
            "the index of the sample is unknown, or the dataset is a mixture"
            if only_sample
            else "the dataset is iterable-style, or the index list has over 1,000 indices or others than integers"
        )
        raise InvalidSpec(f"cannot load the {what} of error {number} again: {why}")
    fields = dict(preview.spec)
    if preview.is_private or debug:
        fields |= {"session": secrets.token_hex(16), "in_process": debug}
    spec = LoaderSpec.from_json(fields)
    remote = RemoteDataset(found.server, record.dataset, reconnect_timeout=0)
    indices: Any = preview.indices
    if indices is not None and spec.batch_size is None:
        (indices,) = indices
    with keeping_unrestored():
        return remote.batch(spec, preview.epoch, preview.batch, indices), remote


def _with_server(columns: Sequence[Column], source: Source) -> list[Column]:
    if len(source.servers) == 1:
        return list(columns)
    return [Column("server", lambda found: found.server, least=22, is_name=True), *columns]


def _text(value: object) -> str:
    return "-" if value is None else str(value)


ERROR_COLUMNS: Final = (
    figure("number", "record.number"),
    Column("time", lambda found: time.strftime("%H:%M:%S", time.localtime(found.record.time)), rank=3),
    Column("dataset", lambda found: found.record.dataset, least=10, is_name=True),
    figure("epoch", "record.epoch"),
    figure("batch", "record.batch"),
    Column("sample", lambda found: _text(found.record.sample)),
    figure("worker", "record.worker", rank=2),
    Column("run", lambda found: _text(found.record.run), rank=4, least=8, is_name=True),
    Column("handling", lambda found: found.record.handling, least=8, rank=1),
    Column("error", lambda found: f"{found.record.type}: {found.record.message}", least=20),
)
SLOW_COLUMNS: Final = (
    Column("dataset", lambda found: found.record.dataset, least=10, is_name=True),
    figure("sample", "record.index"),
    figure("time", "record.seconds", seconds),
    Column("x median", lambda found: _ratio(found.record), lambda found: found.record.seconds),
    figure("times", "record.times"),
    figure("epoch", "record.epoch", rank=1),
    figure("batch", "record.batch", rank=1),
)


def _ratio(sample: SlowSample) -> str:
    return f"{sample.seconds / sample.typical:,.0f}" if sample.typical else "-"
