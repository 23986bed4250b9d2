"""Tables of the tools in narrow terminals; ``teleloader top``, ``datasets`` and ``workers``."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product

import pytest
from rich.console import Console
from rich.text import Text

from teleloader.cli.showing import Column, figure, in_order, table
from teleloader_shared.stats import ConsumerStats
from tests.conftest import ROOT, StartServer, eventually
from tests.end_to_end.made_up import CONSUMER, DATASET, TRAINER, WORKER, MadeUpServer, made_up, serving
from tests.end_to_end.terminal import ESCAPE, TOOLS, Terminal, piped, terminal

NOWHERE = "http://127.0.0.1:9"
CONSUMERS = [
    dataclasses.replace(CONSUMER, consumer="starved", data_wait_fraction=0.9, batches_per_second=2.0),
    dataclasses.replace(
        CONSUMER, consumer="fast", data_wait_fraction=0.01, batches_per_second=500.0, diagnosis=TRAINER
    ),
    dataclasses.replace(CONSUMER, consumer="middle", data_wait_fraction=0.4, batches_per_second=20.0),
]
WORKERS = [
    dataclasses.replace(WORKER, worker=number, busy_fraction=busy, pss=(number + 1) * 2**20)
    for number, busy in enumerate((0.2, 0.9, 0.5))
]


@pytest.fixture
def figures() -> Iterator[MadeUpServer]:
    """Run a server with fabricated statistics of three consumers, workers and datasets."""
    server = MadeUpServer()
    datasets = [
        dataclasses.replace(DATASET, dataset=name, length=length)
        for name, length in (("train", 50_000), ("stream", None), ("validation", 100))
    ]
    server.stats = dataclasses.replace(
        made_up(), consumers=CONSUMERS, consumers_total=3, workers=WORKERS, datasets=datasets
    )
    with serving(server):
        yield server


# -- layout


@dataclasses.dataclass(frozen=True)
class Row:
    """Record of a table."""

    name: str
    count: int
    size: int
    note: str


COLUMNS = (
    Column("name", lambda row: row.name, least=8, is_name=True),
    figure("count", "count", "{:,}".format),
    figure("size", "size", "{:,} bytes".format, rank=2),
    Column("note", lambda row: row.note, least=10, rank=1),
)
ROWS = [Row("a-rather-long-name-of-a-consumer", 1_234_567, 89_012_345, "first words " * 5), Row("b", 0, 0, "")]


def drawn(width: int) -> list[str]:
    """Return the lines of the table on a screen of this width."""
    printed = io.StringIO()
    Console(width=width, file=printed).print(table(COLUMNS, ROWS, width))
    return printed.getvalue().splitlines()


@pytest.mark.parametrize("width", range(24, 140, 3))
def test_a_table_fits_the_screen_and_keeps_numbers_and_identity(width: int) -> None:
    """No line is too long, no number is shortened, and the columns without a rank are always shown."""
    lines = drawn(width)
    rows = lines[: 1 + len(ROWS)]
    assert max(map(len, rows)) <= width
    assert rows[0].split()[:2] == ["name", "count"]
    assert "1,234,567" in rows[1]
    assert ("size" in rows[0].split()) == ("89,012,345 bytes" in rows[1])
    hidden = [column.title for column in COLUMNS if column.title not in rows[0].split()]
    said = " ".join(" ".join(lines[1 + len(ROWS) :]).split())
    assert said == (f"hidden columns: {', '.join(hidden)} (wider terminal or -o json)" if hidden else "")


def test_columns_are_hidden_by_rank() -> None:
    """The column of the highest rank is hidden first."""
    hints = ["".join("".join(drawn(width)).split()).partition("hiddencolumns:")[2] for width in range(140, 24, -1)]
    assert list(dict.fromkeys(hint.partition("(")[0] for hint in hints)) == ["", "size", "size,note"]


def test_shortened_names_keep_their_end() -> None:
    """The ends of names differ most often."""
    assert any(re.match(r"\S+\N{HORIZONTAL ELLIPSIS}\S*consumer ", line) for line in drawn(40))


def test_unknown_values_come_last_in_any_order() -> None:
    """Records whose value is None are sorted neither as the largest nor as the smallest."""
    column = Column("length", lambda value: Text(str(value)), key=lambda value: value)
    assert in_order([2, None, 3, 1], column, descending=True) == [3, 2, 1, None]
    assert in_order([2, None, 3, 1], column, descending=False) == [1, 2, 3, None]


# -- screens of 80 columns


@pytest.mark.parametrize(("columns", "command"), [*product((80, 100, 140), ("stats", "datasets", "workers"))])
def test_a_terminal_shows_what_identifies_each_row(columns: int, command: str, figures: MadeUpServer) -> None:
    """Datasets, consumers and workers are named at any width; hidden columns are listed."""
    with terminal(TOOLS, command, figures.url, columns=columns) as screen:
        assert screen.wait() == 0
    lines = [line.rstrip() for line in screen.text.splitlines()]
    assert max(map(len, lines)) <= columns
    headers = [line.split() for line in lines]
    if command in ("stats", "datasets"):
        assert all(any(line.startswith(f"{name} ") for line in lines) for name in ("train", "stream", "validation"))
    if command in ("stats", "workers"):
        assert any({"worker", "state", "busy"} <= set(header) for header in headers)
    if command == "stats":
        header = next(header for header in headers if header[:1] == ["consumer"])
        assert {"dataset", "progress", "batches/s", "waits", "bottleneck"} <= set(header)
        for consumer in CONSUMERS:
            assert any(line.startswith(f"{consumer.consumer} ") and " train " in line for line in lines)
    if columns == 80 and command != "datasets":
        assert any(line.startswith("hidden columns: ") for line in lines)


def test_a_pipe_shows_all_columns(figures: MadeUpServer) -> None:
    """The output of a pipe has no width."""
    for command in ("stats", "datasets", "workers"):
        assert "hidden columns" not in piped(TOOLS, command, figures.url).out


# -- datasets and workers


def names(out: str) -> list[str]:
    """Return the first words of the rows of a table."""
    return [line.split()[0] for line in out.splitlines()[1:]]


def test_datasets_are_sorted_by_name_or_by_a_column(figures: MadeUpServer) -> None:
    """Numbers are sorted in descending order, unless it is reversed; unknown lengths come last."""

    def listed(*arguments: str) -> list[str]:
        done = piped(TOOLS, "datasets", figures.url, *arguments)
        assert done.code == 0, done.err
        return names(done.out)[:3]

    assert listed() == ["stream", "train", "validation"]
    assert listed("-r") == ["validation", "train", "stream"]
    assert listed("--sort", "samples") == ["train", "validation", "stream"]
    assert listed("-s", "samples", "-r") == ["validation", "train", "stream"]


def test_workers_are_sorted_by_a_column(figures: MadeUpServer) -> None:
    """By default, they are sorted by their IDs."""
    assert names(piped(TOOLS, "workers", figures.url).out) == ["0", "1", "2"]
    assert names(piped(TOOLS, "workers", figures.url, "-s", "busy").out) == ["1", "2", "0"]
    assert names(piped(TOOLS, "workers", figures.url, "-s", "memory", "-r").out) == ["0", "1", "2"]


@pytest.mark.parametrize("command", ["top", "workers"])
def test_an_unknown_column_is_an_error_with_suggestions(command: str, figures: MadeUpServer) -> None:
    """The exit code is 2; without a similar column, all are listed."""
    arguments = [command, figures.url, *(["workers"] if command == "top" else [])]
    done = piped(TOOLS, *arguments, "--sort", "memry")
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith("Error: unknown column 'memry' of workers. Did you mean 'memory'?\n")
    assert "Available: worker, pid, state," in piped(TOOLS, *arguments, "--sort", "xyz").err


def test_records_as_json(figures: MadeUpServer) -> None:
    """The output is one line with all fields of the statistics; workers have the URL of their server."""
    found = json.loads(piped(TOOLS, "workers", figures.url, "-s", "busy", "-o", "json").out)
    assert [worker["worker"] for worker in found] == [1, 2, 0]
    assert found[0] == {"server": figures.url, **dataclasses.asdict(WORKERS[1])}
    done = piped(TOOLS, "datasets", figures.url, "-o", "json")
    assert [dataset["dataset"] for dataset in json.loads(done.out)] == ["stream", "train", "validation"]
    assert done.out.count("\n") == 1


def test_records_of_several_servers(figures: MadeUpServer) -> None:
    """Datasets are added, workers name their server, and errors of servers are on stderr."""
    with serving(MadeUpServer()) as other:
        both = f"{figures.url},{other.url},{NOWHERE}"
        done = piped(TOOLS, "workers", both)
        assert done.code == 0
        assert {row.split()[0] for row in done.out.splitlines()[1:]} == {figures.url, other.url}
        assert done.err.startswith(f"teleloader: cannot connect to {NOWHERE}")
        assert done.err.count("\n") == 1
        found = json.loads(piped(TOOLS, "datasets", both, "-o", "json").out)
    train = next(dataset for dataset in found if dataset["dataset"] == "train")
    assert train["batches_computed"] == 2 * DATASET.batches_computed


def test_datasets_and_workers_of_a_real_server(start_server: StartServer) -> None:
    """All hosted datasets are listed, also before they are used."""
    server = start_server("--demo", "--num-workers", "2")
    assert names(piped(TOOLS, "datasets", server.url).out)[:2] == ["digits-test", "digits-train"]
    assert names(piped(TOOLS, "workers", server.url).out) == ["0", "1"]


def test_a_slow_and_an_unreachable_server_come_first(figures: MadeUpServer) -> None:
    """`stats` and `top servers` compare servers of the same loaders, and name the slow one and reasons of others."""
    slow = MadeUpServer()
    few = dataclasses.replace(slow.stats.server, batches_per_second=12.5)
    slow.stats = dataclasses.replace(slow.stats, server=few)
    with serving(slow):
        all_servers = f"{figures.url},{slow.url},{NOWHERE}"
        out = piped(TOOLS, "stats", all_servers).out
        with terminal(TOOLS, "top", all_servers, "servers", "--interval", "0.5") as screen:
            eventually(lambda: "is slow: " in screen.text)
            # each further request adds to the time since the first one that failed
            eventually(lambda: re.search(r"down \d", screen.text))
            screen.press("q")
        found = json.loads(piped(TOOLS, "stats", all_servers, "-o", "json").out)
    lines = out[out.index("server  ") :].splitlines()[1:4]
    assert [line.split()[0] for line in lines] == [NOWHERE, slow.url, figures.url]
    assert f"{slow.url} is slow: 298 ms of a worker's time per batch" in out
    assert f"cannot connect to {NOWHERE}" in out
    assert [server.get("failed_for") for server in found["servers"]] == [None, None, 0.0]


# -- top


def rows(screen: Terminal) -> list[str]:
    """Return the first words of the last screen's rows."""
    last = screen.text.rpartition("q quit")[2].splitlines()
    start = next((number for number, line in enumerate(last) if "▲" in line or "▼" in line), len(last))
    return [line.split()[0] for line in last[start + 1 :] if line.strip()][:3]


def test_top_is_sorted_and_refreshed_until_q(figures: MadeUpServer) -> None:
    """The consumer that waits longest comes first; keys change table, column and direction; q restores the terminal."""
    with terminal(TOOLS, "top", figures.url, "--interval", "0.5") as screen:
        eventually(lambda: rows(screen) == ["starved", "middle", "fast"])
        assert "waits▼" in screen.text
        before = termios.tcgetattr(screen.master)
        screen.press("r")
        eventually(lambda: rows(screen) == ["fast", "middle", "starved"])
        screen.press("<")
        screen.press("<")
        eventually(lambda: "batches/s▼" in screen.text)
        assert rows(screen) == ["fast", "middle", "starved"]
        screen.press("\x1b[C")
        eventually(lambda: "bytes/s▼" in screen.text)
        screen.press("w")
        eventually(lambda: rows(screen) == ["0", "1", "2"])
        screen.press("d")
        eventually(lambda: rows(screen) == ["stream", "train", "validation"])
        figures.stats = dataclasses.replace(figures.stats, datasets=[dataclasses.replace(DATASET, dataset="new")])
        eventually(lambda: rows(screen)[:1] == ["new"])
        screen.press("q")
        assert screen.wait() == 0
        assert not before[3] & termios.ECHO
        assert termios.tcgetattr(screen.master)[3] & termios.ECHO
    assert screen.raw.index("\x1b[?1049h") < screen.raw.index("starved") < screen.raw.rindex("\x1b[?1049l")
    assert "Traceback" not in screen.text


def test_top_fits_a_small_terminal(figures: MadeUpServer) -> None:
    """The rows that do not fit are counted."""
    figures.stats = made_up(consumers=200)
    with terminal(TOOLS, "top", figures.url, columns=80, rows=16) as screen:
        screen.await_text(r"\.\.\. and 19\d more")
        screen.press_ctrl_c()
        assert screen.wait() == 130
    screens = [ESCAPE.sub("", each).splitlines() for each in screen.raw.split("\x1b[H")]
    assert max(len(line.rstrip()) for lines in screens for line in lines) <= 80
    assert max(map(len, screens)) <= 16
    assert "dataset" in screen.text


def test_top_continues_while_the_server_restarts() -> None:
    """The error is shown until the server responds again."""
    server = MadeUpServer()
    with ExitStack() as stack:
        with serving(server):
            screen = stack.enter_context(terminal(TOOLS, "top", server.url, "--interval", "0.5"))
            screen.await_text("trainer-0")
        screen.await_text("cannot connect to")
        screen.await_text("retrying")
        screen.press("q")
        assert screen.wait() == 0


def test_top_reports_an_error_that_a_retry_does_not_resolve() -> None:
    """The command ends as `stats` does."""
    with terminal(TOOLS, "top", "cpu-box:8000") as screen:
        assert screen.wait() == 2
    assert "invalid server URL 'cpu-box:8000'" in screen.text


def test_top_without_a_terminal_appends_tables_or_lines(figures: MadeUpServer) -> None:
    """Each line of JSON is a list of sorted records."""
    for arguments, pattern in (([], r"^\d\d:\d\d:\d\d, 4 workers, "), (["-o", "json"], r"^\[\{.*\}\]$")):
        command = [sys.executable, "-c", TOOLS, "top", figures.url, "--interval", "0.5", *arguments]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            found: list[str] = []
            while len(found) < 2:
                line = running.stdout.readline()
                assert line, "it ended"
                found += [line] if re.search(pattern, line) else []
            running.terminate()
    records = [ConsumerStats(**record) for record in json.loads(found[1])]
    assert [record.consumer for record in records] == ["starved", "middle", "fast"]
