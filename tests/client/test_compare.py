"""Comparison of servers: shares, skew, and the order of the rows."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from teleloader.cli.compare import MAX_SLOW, ServerRow, compared, slow_servers
from teleloader.cli.stats import servers_table
from teleloader_shared.errors import ServerUnavailable, TeleloaderError
from teleloader_shared.stats import Stats
from tests.end_to_end.made_up import CONSUMER, FINISHED, SERVER, TRAINER, WORKER, made_up

Server = tuple[str, Stats | TeleloaderError, float]


def server(name: str, rate: float, busy: float, *, loader: str = "a", finished: bool = False) -> Server:
    """Return a server with two workers."""
    diagnosis = FINISHED if finished else TRAINER
    consumers = [dataclasses.replace(CONSUMER, loader=loader, diagnosis=diagnosis, data_wait_fraction=0.1)]
    stats = dataclasses.replace(
        made_up(),
        server=dataclasses.replace(SERVER, batches_per_second=rate),
        workers=[dataclasses.replace(WORKER, busy_fraction=busy)] * 2,
        consumers=consumers,
    )
    return f"http://{name}:8000", stats, 0.0


def by_name(rows: list[ServerRow]) -> dict[str, ServerRow]:
    """Return rows by the name of the host."""
    return {row.url.split("//")[1].split(":")[0]: row for row in rows}


def test_the_slow_server_is_named_with_its_figures() -> None:
    """It needs four times the time per batch of the median of the others, whose rates differ little."""
    rows = compared([server("a", 40, 0.4), server("b", 10, 0.4), server("c", 40, 0.4), server("d", 50, 0.5)])
    assert rows[0].url == "http://b:8000"
    assert slow_servers(rows) == [
        "http://b:8000 is slow: 80 ms of a worker's time per batch, 4 times the median of 3 other servers (20 ms); "
        "10 batches/s, 0.25 times theirs."
    ]
    shares = {name: row.share for name, row in by_name(rows).items()}
    assert shares == pytest.approx({"a": 40 / 140, "b": 10 / 140, "c": 40 / 140, "d": 50 / 140})


def test_of_two_servers_one_is_slow() -> None:
    """Each one is compared with the other one, so that the difference is not halved by its own values."""
    rows = by_name(compared([server("a", 40, 0.4), server("b", 10, 0.4)]))
    assert (rows["a"].skew, rows["b"].skew) != (None, None)
    assert [row.skew is not None and row.skew.is_slow for row in rows.values()] == [True, False]


def test_a_server_that_sends_little_is_slow_although_its_workers_are_fast() -> None:
    """Clients request fewer batches of a server with a slow network."""
    rows = compared([server("a", 40, 0.4), server("b", 4, 0.04), server("c", 40, 0.4)])
    assert rows[0].url == "http://b:8000"
    assert "4 batches/s, 0.1 times theirs." in slow_servers(rows)[0]


@pytest.mark.parametrize("more", [{"loader": "b"}, {"finished": True}], ids=["another loader", "finished"])
def test_servers_of_different_loaders_are_not_compared(more: dict[str, bool]) -> None:
    """Their batches differ, so that their times per batch say nothing about the servers."""
    rows = compared([server("a", 40, 0.4), server("b", 10, 0.4, **more)])  # type: ignore[arg-type]
    assert slow_servers(rows) == []
    assert [row.skew for row in rows] == [None, None]


def test_equal_servers_are_not_slow() -> None:
    """Differences of 20 % are usual."""
    assert slow_servers(compared([server("a", 40, 0.4), server("b", 36, 0.42), server("c", 44, 0.41)])) == []


def test_servers_that_need_attention_come_first() -> None:
    """Unreachable ones, then slow ones, then those whose consumers wait longest."""
    dead = ("http://x:8000", ServerUnavailable("cannot connect to http://x:8000"), 12.0)
    waiting = server("w", 40, 0.4)
    assert isinstance(waiting[1], Stats)
    waiting[1].consumers[0] = dataclasses.replace(waiting[1].consumers[0], data_wait_fraction=0.9)
    rows = compared([server("a", 40, 0.4), waiting, server("s", 10, 0.4), dead])
    assert [row.url for row in rows] == ["http://x:8000", "http://s:8000", "http://w:8000", "http://a:8000"]
    assert (rows[0].error, rows[0].failed_for) == ("cannot connect to http://x:8000", 12.0)


def test_few_of_many_slow_servers_are_described() -> None:
    """The others are counted."""
    fleet = [server(f"a{number}", 40, 0.4) for number in range(40)]
    fleet += [server(f"s{number}", 10, 0.4) for number in range(MAX_SLOW + 2)]
    lines = slow_servers(compared(fleet))
    assert len(lines) == MAX_SLOW + 1
    assert lines[-1] == "Slow as well: 2 more servers."


def test_a_table_of_64_servers_fits_into_80_columns() -> None:
    """URL, rate, diagnosis and state of each server are visible, and hidden columns are named."""
    fleet = [server(f"loader-{number}.example", 40, 0.4) for number in range(62)]
    fleet += [server("slow.example", 10, 0.4), ("http://dead:8000", ServerUnavailable("no response"), 75.0)]
    console = Console(width=80, file=io.StringIO())
    console.print(servers_table(compared(fleet), 80))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["server", "batches/s", "share", "busy", "waits", "bottleneck", "skew", "state"]
    assert lines[1].split()[0] == "http://dead:8000"
    assert "down" in lines[1]
    assert lines[2].split() == [
        "http://slow.example:8000",
        "10",
        "0.4",
        "%",
        "40",
        "%",
        "10",
        "%",
        "training",
        "4x",
        "slow",
    ]
    shown = {line.split()[0] for line in lines if ".example:8000" in line}
    assert len(shown) == 63, "shortened in the middle, and different nevertheless"
    assert "hidden columns: " in " ".join(lines[-2:])
