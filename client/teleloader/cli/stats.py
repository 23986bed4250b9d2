"""Command ``teleloader stats``: shows the bottleneck of each consumer and the statistics of servers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from functools import partial
from operator import attrgetter
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from teleloader.api.credentials import Credentials
from teleloader.cli.aggregate import merged
from teleloader.cli.compare import ServerRow, compared, slow_servers
from teleloader.cli.showing import Column, figure, print_json, results_console, table
from teleloader.fleet.servers import Servers
from teleloader.transport.interface import BatchServer
from teleloader.transport.selection import server_at
from teleloader_shared.errors import ProtocolError, ServerUnavailable, TeleloaderError
from teleloader_shared.stats import (
    Bottleneck,
    ConsumerStats,
    DatasetStats,
    Diagnosis,
    ErrorCount,
    ServerStats,
    Stats,
    WorkerStats,
)
from teleloader_shared.text import printable, short
from teleloader_shared.units import counted, number, seconds, share, size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TIMEOUT: Final = 10.0
"""Seconds to wait for a server's response."""
FIRST_PAUSE_S: Final = 2.0
"""Seconds for which a server without a response is not read again, if there are others; doubled up to `MAX_PAUSE_S`."""
MAX_PAUSE_S: Final = 30.0
MAX_REQUESTS: Final = 32
"""Maximum number of concurrent requests."""
VERY_WIDE: Final = 140
"""Screen width, in characters, from which the durations of stages include the 99th percentile."""
MAX_SENTENCES: Final = 5
"""Maximum number of diagnoses in the output."""
MAX_STAGES: Final = 8
OF_ONE_SERVER: Final = (
    "A diagnosis counts the workers of one server: the one for whose batches the training loop waits most."
)
STYLES: Final[dict[Bottleneck, str]] = {
    "workers": "bold red",
    "io": "bold red",
    "machine": "bold red",
    "memory": "bold red",
    "prefetch": "bold red",
    "server": "bold red",
    "network": "bold magenta",
    "client": "bold magenta",
    "training": "bold cyan",
    "unknown": "dim",
    "idle": "dim",
    "finished": "dim",
}
"""Styles of bottlenecks, in the order in which diagnoses are shown. Color is never the only indication."""
_STATES: Final = {"busy": "green", "starting": "yellow"}

_SCALARS: Final[dict[Any, tuple[type, ...]]] = {bool: (bool,), int: (int,), float: (float, int), str: (str,)}
"""JSON types of the values of fields, by the type of the field."""

_Record = TypeVar("_Record", bound="DataclassInstance")


def record_of(kind: type[_Record], value: Any, url: str) -> _Record:
    """Convert a JSON object to a record of type `kind`; ignore unknown fields, which a newer server may add.

    Args:
        kind: Dataclass of the record.
        value: JSON object from a server.
        url: URL of the server, for error messages.

    Raises:
        ProtocolError: If a field is missing, or its value has another JSON type.
    """
    hints = get_type_hints(kind)
    # older servers lack them
    optional = {each.name for each in fields(kind) if not (each.default is each.default_factory is MISSING)}
    missing = hints.keys() - (optional | value.keys()) if isinstance(value, dict) else hints.keys()
    if missing:
        raise ProtocolError(
            f"invalid statistics from {url}: missing fields of {kind.__name__}: {', '.join(sorted(missing))}. Check "
            f"that {url} is the URL of a loader server, and install the same release of teleloader on both sides; "
            "--output json shows the response"
        )
    return kind(**{name: _read(hint, value[name], url) for name, hint in hints.items() if name in value})


def _read(hint: Any, value: Any, url: str) -> Any:
    container = get_origin(hint)
    if container is UnionType:
        first, *others = (each for each in get_args(hint) if each is not NoneType)
        matching = next((each for each in others if type(value) is each), first)
        return None if value is None else _read(matching, value, url)
    if container in (list, dict) and not isinstance(value, container):
        raise ProtocolError(f"invalid statistics from {url}: expected a {container.__name__}, got {short(value)}")
    if container is list:
        return [_read(get_args(hint)[0], item, url) for item in value]
    if container is dict:
        return {key: _read(get_args(hint)[1], item, url) for key, item in value.items()}
    if is_dataclass(hint) and isinstance(hint, type):
        return record_of(hint, value, url)
    if hint in _SCALARS and type(value) not in _SCALARS[hint]:
        raise ProtocolError(f"invalid statistics from {url}: expected {hint.__name__}, got {short(value)}")
    return value


class Reading(NamedTuple):
    """Response of a server to the request for its statistics."""

    url: str
    response: Any
    """JSON of the response; None if the request failed."""
    stats: Stats | TeleloaderError
    """The statistics, or the reason why there are none."""
    failed_for: float = 0.0
    """Seconds since the first failed request after the last successful one; 0 if this request was the first one."""


class _Failure(NamedTuple):
    reading: Reading
    since: float
    """Time of the first failed request."""
    retry_at: float
    """Time before which the server is not read again."""
    pause: float


class Source:
    """Server or servers whose statistics are read.

    Args:
        servers: URL of a server, several URLs, or the address of a directory.
        limit: Maximum number of consumers of each server and of the total, the latest active ones.
        trust_directory: Whether to use any server that a directory lists.
    """

    def __init__(self, servers: str | list[str], limit: int, *, trust_directory: bool) -> None:
        self._limit = limit
        credentials = Credentials()
        connect = partial(server_at, timeout=TIMEOUT, credentials=credentials)
        self._servers = Servers(servers, connect, credentials, trust_directory=trust_directory)
        self._failures: dict[str, _Failure] = {}
        """Servers whose last request failed, by URL."""

    def read(self) -> list[Reading]:
        """Request the statistics of all servers, including those that run under the same supervisor.

        Raises:
            TeleloaderError: If no server responds.
        """
        servers = self._servers.require()
        readings = self._read(servers)
        for reading in readings:
            if isinstance(reading.stats, Stats):
                self._servers.learn(reading.url, reading.stats.server.ports)
        readings += self._read([server for server in self._servers.known if server not in servers])
        if all(reading.response is None for reading in readings):
            raise _failure(readings)
        return readings

    def _read(self, servers: Sequence[BatchServer]) -> list[Reading]:
        """Request statistics; a server that failed is skipped for a while, so that it does not delay the others."""
        now = time.monotonic()
        resting = {url: found for url, found in self._failures.items() if now < found.retry_at}
        if all(server.url in resting for server in servers):
            resting = {}
        due = [server for server in servers if server.url not in resting]
        read = {reading.url: reading for reading in read_all(due, self._limit)}
        now = time.monotonic()
        readings = []
        for server in servers:
            found = read.get(server.url)
            if found is not None:
                self._note(found, now)
            failure = self._failures.get(server.url)
            if failure is not None:
                found = failure.reading._replace(failed_for=now - failure.since)
            if found is not None:
                readings.append(found)
        return readings

    def _note(self, reading: Reading, now: float) -> None:
        """Record the result of a request."""
        before = self._failures.pop(reading.url, None)
        if isinstance(reading.stats, ServerUnavailable):
            pause = FIRST_PAUSE_S if before is None else min(MAX_PAUSE_S, 2 * before.pause)
            since = now if before is None else before.since
            self._failures[reading.url] = _Failure(reading, since, now + pause, pause)

    @property
    def servers(self) -> Sequence[BatchServer]:
        """All servers; after `read`, also those that run under the same supervisors."""
        return self._servers.known

    @property
    def problems(self) -> Sequence[str]:
        """Problems of the directory that lists the servers, such as servers that the client must not use."""
        return self._servers.problems

    def as_json(self, readings: Sequence[Reading]) -> Any:
        """Return the response of a single server, or the total and the responses of several servers, as JSON values."""
        if self._is_single:
            return readings[0].response
        responses = [
            {
                "url": url,
                **(
                    {"error": str(stats), "response": response, "failed_for": failed_for}
                    if isinstance(stats, TeleloaderError)
                    else response
                ),
            }
            for url, response, stats, failed_for in readings
        ]
        return {"total": asdict(self._total(readings)), "servers": responses, "problems": self.problems}

    def shown(self, readings: Sequence[Reading], width: int) -> Group:
        """Render the statistics for a terminal of `width` characters."""
        found = self._total(readings)
        return shown(found, width) if self._is_single else shown_together(readings, self.problems, found, width)

    def _total(self, readings: Sequence[Reading]) -> Stats:
        found = total(readings)
        return replace(found, consumers=found.consumers[: self._limit])

    @property
    def _is_single(self) -> bool:
        return not self._servers.is_dynamic and len(self._servers.known) == 1


def read_all(servers: Sequence[BatchServer], limit: int) -> list[Reading]:
    """Request the statistics of servers concurrently."""
    if len(servers) == 1:  # Ctrl-C interrupts a request of this thread, but not those of others
        return [_read_one(servers[0], limit)]
    with ThreadPoolExecutor(MAX_REQUESTS) as threads:
        return list(threads.map(partial(_read_one, limit=limit), servers))


def _read_one(server: BatchServer, limit: int) -> Reading:
    response = None
    try:
        response = server.stats(limit)
        return Reading(server.url, response, record_of(Stats, response, server.url))
    except TeleloaderError as error:
        return Reading(server.url, response, error)


def total(readings: Sequence[Reading]) -> Stats:
    """Return the statistics of all servers together.

    Raises:
        TeleloaderError: If no server sent valid statistics.
    """
    found = [reading.stats for reading in readings if isinstance(reading.stats, Stats)]
    if not found:
        raise _failure(readings)
    return merged(found)


def _failure(readings: Sequence[Reading]) -> TeleloaderError:
    """Return the error of servers, none of which sent valid statistics: that of the first one."""
    error = next(reading.stats for reading in readings if isinstance(reading.stats, TeleloaderError))
    return error if len(readings) == 1 else type(error)(f"all {len(readings)} servers failed, the first one: {error}")


def once(source: Source, *, as_json: bool) -> None:
    """Request and print the statistics of servers once, as text or JSON."""
    found = source.read()
    if as_json:
        print_json(source.as_json(found))
        return
    console = results_console()
    console.print(source.shown(found, console.width))


def watch(source: Source, interval: float, *, as_json: bool) -> None:
    """Print the statistics of servers every `interval` seconds until Ctrl-C.

    In a terminal, the output is refreshed in place; in a pipe, it is appended. If no server responds, for example
    during a restart, the request is retried.
    """
    console = results_console()
    if as_json or not console.is_interactive:
        for found in every(interval, source):
            if as_json:
                print_json(error_json(found) if isinstance(found, ServerUnavailable) else source.as_json(found))
            else:
                console.print(_view(found, console, source), Text())
                sys.stdout.flush()
        return
    with Live(
        Text("connecting ..."), console=console, screen=True, auto_refresh=False, vertical_overflow="crop"
    ) as live:
        for found in every(interval, source):
            live.update(_view(found, console, source), refresh=True)


def every(interval: float, source: Source) -> Iterator[list[Reading] | ServerUnavailable]:
    """Request the statistics of servers every `interval` seconds; yield them, or the error if no server responds."""
    while True:
        began = time.monotonic()
        try:
            yield source.read()
        except ServerUnavailable as error:
            yield error
        time.sleep(max(0.0, interval - (time.monotonic() - began)))


def _view(found: list[Reading] | ServerUnavailable, console: Console, source: Source) -> RenderableType:
    return unavailable(found) if isinstance(found, ServerUnavailable) else source.shown(found, console.width)


def unavailable(error: ServerUnavailable) -> Text:
    """Return the text that is shown while no server responds."""
    return Text(f"{printable(str(error))}\nretrying", style="bold red")


def error_json(error: ServerUnavailable) -> dict[str, str]:
    """Return the JSON value that is printed while no server responds."""
    return {"error": str(error)}


# -- output


def shown(stats: Stats, width: int) -> Group:
    """Render the statistics of a server for a terminal of `width` characters."""
    return _page(stats, _headline(stats.server), workers_table(stats.workers, width), width)


def shown_together(readings: Sequence[Reading], problems: Sequence[str], stats: Stats, width: int) -> Group:
    """Render the total statistics of several servers, with one line for each of them.

    Args:
        readings: Responses of the servers.
        problems: Problems of the directory that lists the servers.
        stats: The total statistics.
        width: Width of the terminal in characters.
    """
    rows = compared_servers(readings)
    errors = [
        f"{reading.stats}{f' (for {seconds(reading.failed_for)})' if reading.failed_for else ''}"
        for reading in readings
        if isinstance(reading.stats, TeleloaderError)
    ]
    failed = f", {len(errors)} of {len(readings)} failed" if errors else ""
    headline = Text.assemble(
        (counted(len(readings), "server"), "bold"), f"{failed}, {counted(stats.server.num_workers, 'worker')}"
    )
    red = [Text(printable(error), style="bold red") for error in (*errors, *problems)]
    headlines = [headline, _figures(stats.server), *red]
    notes = [Text(printable(text), style="bold yellow") for text in slow_servers(rows)]
    if stats.consumers and len(rows) - len(errors) > 1:
        notes.append(Text(OF_ONE_SERVER, "dim"))
    return _page(stats, headlines, servers_table(rows, width), width, notes)


def _page(stats: Stats, headline: Sequence[Text], middle: Group, width: int, notes: Sequence[Text] = ()) -> Group:
    parts: list[RenderableType] = [*headline, Text(), *sentences(stats), *notes, Text()]
    if stats.consumers:
        parts += [consumers_table(stats, width), Text()]
    parts += [middle, Text(), datasets_table(stats.datasets, width), *_errors(stats)]
    return Group(*parts)


def compared_servers(readings: Sequence[Reading]) -> list[ServerRow]:
    """Compare the servers, the one that needs attention most first."""
    return compared((reading.url, reading.stats, reading.failed_for) for reading in readings)


def _of_server(show: Callable[[ServerStats], Any], unknown: Any) -> Callable[[ServerRow], Any]:
    """Return a function of a row that is `unknown` for servers without statistics."""
    return lambda row: unknown if row.stats is None else show(row.stats.server)


def _server_figure(
    title: str, value: Callable[[ServerStats], Any], show: Callable[[Any], str], rank: int = 0
) -> Column:
    """Return a column of numbers of servers."""
    return Column(title, _of_server(lambda server: show(value(server)), "-"), _of_server(value, None), rank)


def _optional(show: Callable[[Any], str], value: Any) -> str:
    return "-" if value is None else show(value)


SERVER_COLUMNS: Final = (
    Column("server", attrgetter("url"), least=26, is_name=True),
    _server_figure("batches/s", attrgetter("batches_per_second"), number),
    Column("share", lambda row: _optional(share, row.share), attrgetter("share"), rank=2),
    Column("busy", lambda row: _optional(share, row.busy), attrgetter("busy"), rank=1),
    Column("waits", lambda row: _optional(share, row.wait), attrgetter("wait"), rank=1),
    Column("bottleneck", lambda row: "-" if row.diagnosis is None else _styled(row.diagnosis), least=10, rank=1),
    Column(
        "skew",
        lambda row: "-" if row.skew is None or row.skew.work is None else f"{number(row.skew.work)}x",
        lambda row: None if row.skew is None else row.skew.work,
        rank=2,
    ),
    Column("state", lambda row: _row_state(row), least=6),
    _server_figure("bytes/s", attrgetter("bytes_per_second"), size, 5),
    _server_figure("workers", attrgetter("num_workers"), str, 6),
    _server_figure("load", attrgetter("load"), lambda load: _workers(load), 7),
    _server_figure("demand", attrgetter("demand"), lambda demand: _workers(demand), 8),
    Column(
        "CPUs",
        _of_server(lambda server: f"{server.cpu:.1f} of {server.cpus}", "-"),
        _of_server(attrgetter("cpu"), None),
        rank=4,
    ),
    _server_figure("memory", attrgetter("pss"), size, 10),
    _server_figure("restarts", attrgetter("worker_restarts"), str, 9),
    Column("version", _of_server(attrgetter("version"), "-"), least=8, rank=11),
    _server_figure("up", attrgetter("uptime"), seconds, 3),
)
"""Columns of the table of servers. The skew is the time per batch relative to the median of the other servers that
serve the same loaders."""


def servers_table(rows: Sequence[ServerRow], width: int) -> Group:
    """Create a table of servers, with their load."""
    return table(SERVER_COLUMNS, rows, width)


def _workers(count: float | None) -> str:
    return "-" if count is None else f"{count:.1f}"


def _row_state(row: ServerRow) -> Text:
    if row.stats is None:
        return Text(f"down {seconds(row.failed_for)}" if row.failed_for else "failed", "bold red")
    if row.skew is not None and row.skew.is_slow:
        return Text("slow", "bold red")
    return _state(row.stats.server)


def _state(server: ServerStats) -> Text:
    if server.draining:
        return Text("stopping", "yellow")
    return Text("saturated", "bold red") if server.saturated else Text("ready", "green")


def _headline(server: ServerStats) -> list[Text]:
    state = "STOPPING" if server.draining else f"up {seconds(server.uptime)}"
    restarts = f", {counted(server.worker_restarts, 'restart')}" if server.worker_restarts else ""
    first = Text(f"teleloader-server {printable(server.version)} on {printable(server.host)}", style="bold")
    first.append(f", {state}, {counted(server.num_workers, 'worker')}{restarts}", style="not bold")
    return [first, _figures(server)]


def _figures(server: ServerStats) -> Text:
    demand = "" if server.demand is None else f"; demand {_workers(server.demand)} workers"
    return Text(
        f"{number(server.batches_per_second)} batches/s, {size(server.bytes_per_second)}/s sent; "
        f"{server.cpu:.1f} of {counted(server.cpus, 'CPU')}; batch memory {size(server.memory_used)} of "
        f"{size(server.memory_budget)}, all processes {size(server.pss)}{demand}"
    )


def sentences(stats: Stats) -> list[Text]:
    """Format the diagnoses of all consumers as lines of text, consumers that wait for data first."""
    if not stats.consumers:
        return [Text("No client has requested batches recently.", style="dim")]
    order = list(STYLES)
    by_need = sorted(stats.consumers, key=lambda consumer: order.index(_bottleneck(consumer.diagnosis)))
    found = [sentence(printable(label(one)), one.diagnosis) for one in by_need[:MAX_SENTENCES]]
    if stats.consumers_total > len(found):
        found.append(Text(f"... and {counted(stats.consumers_total - len(found), 'more consumer')}", style="dim"))
    return found


def label(consumer: ConsumerStats) -> str:
    """Return the display name of a consumer: its run, its name, and its token name if the server requires tokens.

    Clients choose their names, so consumers with different tokens can have the same name.
    """
    return _name(consumer) if consumer.run is None else f"{consumer.run}, {_name(consumer)}"


def _name(consumer: ConsumerStats) -> str:
    return consumer.consumer if consumer.token == "anyone" else f"{consumer.consumer} ({consumer.token})"  # noqa: S105


def _styled(diagnosis: Diagnosis) -> Text:
    bottleneck = _bottleneck(diagnosis)
    return Text(bottleneck, STYLES[bottleneck])


def sentence(name: str, diagnosis: Diagnosis) -> Text:
    """Format the diagnosis of a consumer as one line: name, bottleneck, confidence and recommended change."""
    sure = f" ({share(diagnosis.confidence)} confidence)" if 0 < diagnosis.confidence < 1 else ""
    return Text.assemble(f"{name}: ", _styled(diagnosis), f"{sure}. {printable(diagnosis.advice)}")


def _bottleneck(diagnosis: Diagnosis) -> Bottleneck:
    return diagnosis.bottleneck if diagnosis.bottleneck in STYLES else "unknown"


CONSUMER_COLUMNS: Final = (
    Column("consumer", lambda found: _name(found), least=18, is_name=True),
    Column("run", lambda found: found.run or "-", least=12, rank=6, is_name=True),
    Column("dataset", attrgetter("dataset"), least=12, is_name=True),
    Column("rank", lambda found: f"{found.rank}/{found.world_size}", attrgetter("rank"), rank=7),
    figure("epoch", "epoch", rank=1),
    Column("", lambda found: _bar(found), rank=8),
    Column("progress", lambda found: _progress(found), lambda found: _fraction(found)),
    figure("batches/s", "batches_per_second", number),
    figure("bytes/s", "bytes_per_second", size, rank=5),
    Column("waits", lambda found: share(_waits(found)), lambda found: _waits(found)),
    Column(
        "bottleneck",
        lambda found: _styled(found.diagnosis),
        lambda found: list(STYLES).index(_bottleneck(found.diagnosis)),
        least=14,
    ),
    figure("sent", "bytes_sent", size, rank=9),
    figure("reconnects", "reconnects", "{:,}".format, rank=10),
    figure("hedges", "hedges", "{:,}".format, rank=11),
)
"""Columns of the table of consumers."""


def consumers_table(stats: Stats, width: int) -> Group:
    """Create a table of consumers, with their epoch progress and their bottlenecks."""
    return table(CONSUMER_COLUMNS, stats.consumers, width, _omitted(stats))


def _bar(found: ConsumerStats) -> ProgressBar | str:
    if found.batches is None:
        return ""
    return ProgressBar(total=max(1, found.batches), completed=found.position, width=10)


def _progress(found: ConsumerStats) -> str:
    fraction = _fraction(found)
    return f"{found.position:,}" if fraction is None else share(fraction)


def _fraction(found: ConsumerStats) -> float | None:
    return None if found.batches is None else found.position / max(1, found.batches)


def _waits(found: ConsumerStats) -> float:
    return found.starved_fraction if found.data_wait_fraction is None else found.data_wait_fraction


def _omitted(stats: Stats) -> list[Text]:
    more = stats.consumers_total - len(stats.consumers)
    return [Text(f"... and {more:,} more; use --limit to show more", style="dim")] if more > 0 else []


WORKER_COLUMNS: Final = (
    figure("worker", "worker"),
    figure("pid", "pid", rank=4),
    Column("state", lambda found: Text(found.state, _STATES.get(found.state, "")), least=8),
    Column("current task", lambda found: found.current_task or "-", least=20, rank=1),
    figure("for", "current_task_seconds", seconds, rank=2),
    figure("busy", "busy_fraction", share),
    figure("batches", "batches", "{:,}".format, rank=3),
    figure("restarts", "restarts", lambda count: _alarming(count)),
    figure("memory", "pss", size),
    Column("last exit", lambda found: found.last_exit or "-", least=20, rank=5, is_name=True),
)
"""Columns of the table of workers."""


def workers_table(workers: Sequence[WorkerStats], width: int) -> Group:
    """Create a table of workers, with their states and current tasks."""
    return table(WORKER_COLUMNS, workers, width)


def datasets_columns(datasets: Sequence[DatasetStats], width: int) -> tuple[Column, ...]:
    """Return the columns of the table of datasets: one per loading stage, among others."""
    wide = width >= VERY_WIDE
    return (
        Column("dataset", attrgetter("dataset"), least=18, is_name=True),
        Column("kind", attrgetter("kind"), least=8, rank=5),
        figure("samples", "length", "{:,}".format, rank=3),
        figure("samples/s", "samples_per_second", number),
        *(
            Column(stage, partial(_stage_latency, stage, wide=wide), partial(_stage_p95, stage), rank=1)
            for stage in _stages(datasets)
        ),
        figure("computed", "batches_computed", "{:,}".format, rank=4),
        figure("failed", "batches_failed", lambda count: _alarming(count)),
    )


def datasets_table(datasets: Sequence[DatasetStats], width: int) -> Group:
    """Create a table of datasets, with the durations of the loading stages."""
    return Group(table(datasets_columns(datasets, width), datasets, width), stages_legend(datasets, width))


def stages_legend(datasets: Sequence[DatasetStats], width: int) -> Text:
    """Return the explanation of the columns for the loading stages."""
    quantiles = "p50 / p95 / p99" if width >= VERY_WIDE else "p50 / p95"
    return Text(printable(f"{', '.join(_stages(datasets))}: time per batch, {quantiles}"), "dim italic")


def _stages(datasets: Sequence[DatasetStats]) -> list[str]:
    return list(datasets[0].stages)[:MAX_STAGES] if datasets else []


def _alarming(count: int) -> Text:
    return Text(f"{count:,}", "bold red" if count else "")


def _stage_p95(stage: str, dataset: DatasetStats) -> float | None:
    found = dataset.stages.get(stage)
    return found.p95 if found is not None and found.count else None


def _stage_latency(stage: str, dataset: DatasetStats, *, wide: bool) -> str:
    found = dataset.stages.get(stage)
    if found is None or not found.count:
        return "-"
    shown = (found.p50, found.p95, found.p99) if wide else (found.p50, found.p95)
    return " / ".join(map(seconds, shown))


def _errors(stats: Stats) -> list[Text]:
    lines = [_error(dataset.dataset, error) for dataset in stats.datasets for error in dataset.errors]
    return [Text(), *lines] if lines else []


def _error(dataset: str, error: ErrorCount) -> Text:
    first, *_ = [*error.last.splitlines(), ""]
    times = f" ({error.count:,}x, last {seconds(error.age)} ago): "
    return Text.assemble((printable(f"{dataset}: {error.type}"), "bold red"), times, printable(first))
