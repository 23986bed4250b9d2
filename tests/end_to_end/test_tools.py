"""``teleloader``: the client's tools, in pipes and in terminals."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from teleloader import DataLoader, Mixture, RemoteDataset
from teleloader.cli.bench import Measured, show
from teleloader.dataset import consumers_prefix
from teleloader_server import serve
from teleloader_shared.orders.plan import count_visits
from teleloader_shared.stats import Diagnosis
from tests.conftest import ROOT, ServerProcess, StartServer
from tests.end_to_end.made_up import CONSUMER, DATASET, NETWORK, SERVER, TRAINER, MadeUpServer, made_up, serving
from tests.end_to_end.terminal import TOOLS, Done, piped, terminal

HOSTED = "tests.end_to_end.hosted:"
CHECKED = "tests.end_to_end.checked:"
NOWHERE = "http://127.0.0.1:9"


def tool(*arguments: str) -> Done:
    """Run ``teleloader`` in a pipe."""
    return piped(TOOLS, *arguments)


@pytest.fixture
def figures() -> Iterator[tuple[MadeUpServer, str]]:
    """Run a server with fabricated statistics; yield it and its URL."""
    server = MadeUpServer()
    with serving(server):
        yield server, server.url


@pytest.fixture(scope="module")
def imaging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Run a server whose dataset has an allowed collate function that returns images."""
    config = tmp_path_factory.mktemp("images") / "loader.toml"
    config.write_text(f'[datasets.all]\nfactory = "{HOSTED}numbers"\nfunctions = ["{CHECKED}collate_images"]\n')
    server = ServerProcess("--config", str(config), "--port", "0", "--num-workers", "1")
    yield server
    server.end()


@pytest.fixture(scope="module")
def hosting() -> Iterator[ServerProcess]:
    """Run a server with datasets of many kinds."""
    names = ("numbers", "failing", "stream")
    server = ServerProcess("--port", "0", "--num-workers", "2", *(HOSTED + name for name in names[:2]),
                           CHECKED + "dicts", CHECKED + "slowly", *(HOSTED + name for name in names[2:]))  # fmt: skip
    yield server
    server.end()


# -- all of them


COMMANDS = ("stats", "datasets", "workers", "bench", "peek", "audit")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_server_is_one_line_and_exit_code_1(command: str) -> None:
    """The error is on stderr; stdout, from which programs read results, is empty."""
    done = tool(command, NOWHERE)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"teleloader: cannot connect to {NOWHERE}")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_an_invalid_url_is_reported(command: str) -> None:
    """The error has the form of a URL."""
    done = tool(command, "cpu-box:8000")
    assert (done.code, done.out) == (2, "")
    assert "invalid server URL 'cpu-box:8000': expected http://host:port" in done.err


@pytest.mark.parametrize("url", ["http://", "http://[::1", "ftp://cpu-box", "http://cpu-box:99999", "http://h:80.", ""])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_url_that_cannot_be_is_one_line(command: str, url: str) -> None:
    """The error has no traceback, whatever part of the URL is invalid."""
    done = tool(command, url)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"teleloader: invalid server URL {url!r}: expected http://host:port")
    assert done.err.count("\n") == 1


def test_a_dataset_name_is_required_if_there_are_several(hosting: ServerProcess) -> None:
    """The error lists the datasets, and states to pass a name."""
    done = tool("peek", hosting.url)
    assert done.code == 2
    assert done.err.rstrip().endswith("'stream'. Pass the name of a hosted dataset")


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_its_extra_the_command_says_what_to_install(missing: str) -> None:
    """The error is one line, as that of teleloader-server."""
    done = piped(f"import sys; sys.modules[{missing!r}] = None; {TOOLS}", "stats", NOWHERE)
    assert (done.code, done.err) == (
        1, f"teleloader requires {missing}, which is not installed: pip install 'teleloader[cli]'\n"
    )  # fmt: skip


# -- stats


def test_stats_begins_with_the_consumers_that_need_action(figures: tuple[MadeUpServer, str]) -> None:
    """Consumers that wait for workers come first, then those that wait for the network, then the others."""
    server, url = figures
    consumers = [
        dataclasses.replace(CONSUMER, consumer="slow-loop", diagnosis=TRAINER),
        dataclasses.replace(CONSUMER, consumer="far-away", diagnosis=NETWORK),
        dataclasses.replace(CONSUMER, consumer="starved"),
    ]
    server.stats = dataclasses.replace(made_up(), consumers=consumers, consumers_total=3)
    done = tool("stats", url)
    assert done.code == 0
    said = [line for line in done.out.splitlines() if "confidence). " in line or ": training. " in line]
    assert [line.partition(":")[0] for line in said] == ["starved", "far-away", "slow-loop"]
    assert said[0] == f"starved: workers (85 % confidence). {CONSUMER.diagnosis.advice}"
    assert done.out.index("starved:") < done.out.index("bytes/s ")


def test_stats_shows_what_the_server_says(figures: tuple[MadeUpServer, str]) -> None:
    """The output has the figures of the server's records, with units."""
    _, url = figures
    out = " ".join(tool("stats", url).out.split())
    for shown in (
        "teleloader-server 1.2.3 on cpu-box, up 2 h 3 min, 4 workers, 1 restart",
        "125 batches/s, 64.5 MiB/s sent; 6.5 of 16 CPUs; batch memory 512 MiB of 2 GiB, all processes 1.5 GiB",
        "trainer-0 - train 0/1 2",
        "30 % 12.5 6.25 MiB 62 % workers 480 MiB 1 0",
        "0 5000 busy batch 12 of epoch 0 of train 250 ms 93 % 1,234 0 120 MiB -",
        "train map 50,000 4,000 25 ms / 80 ms / 120 ms 2 ms / 4 ms / 6 ms 400 us / 900 us / 1 ms 4,000 3",
        "train: ValueError (3x, last 5 s ago): sample 17 is damaged",
    ):
        assert shown in out


def test_stats_shows_the_run_and_the_end_of_an_epoch(figures: tuple[MadeUpServer, str]) -> None:
    """The run is in the diagnosis and in the table; finished consumers are listed last, as finished."""
    server, url = figures
    before = server.stats
    ended = Diagnosis("finished", None, "Epoch 2 is finished.", 1.0)
    first = dataclasses.replace(CONSUMER, run="a.py", finished=True, position=400, diagnosis=ended)
    server.stats = dataclasses.replace(
        before, consumers=[first, dataclasses.replace(CONSUMER, consumer="trainer-1", run="b.py", finished=False)]
    )
    try:
        out = tool("stats", url).out
    finally:
        server.stats = before
    diagnoses = [line for line in out.splitlines() if line.startswith(("a.py, ", "b.py, "))]
    assert diagnoses[0].startswith("b.py, trainer-1: workers")
    assert diagnoses[1] == "a.py, trainer-0: finished. Epoch 2 is finished."
    assert re.search(r"^trainer-0 +a.py .*100 % .* finished ", out, re.MULTILINE)


def test_stats_as_json_is_what_the_server_says(figures: tuple[MadeUpServer, str]) -> None:
    """The output is one line with exactly the server's fields."""
    _, url = figures
    done = tool("stats", url, "--output", "json")
    assert done.out.count("\n") == 1
    assert json.loads(done.out) == httpx.get(f"{url}/stats").json()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[str, str, Path]]:
    """Run two servers with fabricated statistics; yield their URLs, and a file that lists them."""
    first, second = MadeUpServer(), MadeUpServer()
    with serving(first), serving(second):
        path = tmp_path / "servers"
        path.write_text(f"{first.url}\n{second.url}\n")
        path.chmod(0o600)
        yield first.url, second.url, path


def test_stats_of_several_servers_are_added(two: tuple[str, str, Path]) -> None:
    """A list and a directory show the same: one line per server, and the total."""
    first, second, path = two
    out = tool("stats", f"{first},{second}").out
    shown = " ".join(out.split())
    assert "2 servers, 8 workers 250 batches/s, 129 MiB/s" in shown
    assert "demand 15.0 workers" in shown
    for url in (first, second):
        row = f"{url} 125 50 % 93 % 62 % workers 1x ready 64.5 MiB 4 3.5 7.5 6.5 of 16 1.5 GiB 1 1.2.3 2 h 3 min"
        assert row in shown
    assert out.count("trainer-0: workers") == out.count("A diagnosis counts the workers of one server") == 1
    assert "train: ValueError (6x, last 5 s ago): sample 17 is damaged" in shown
    assert tool("stats", f"file://{path}").out == out


def test_stats_of_several_servers_name_one_that_does_not_respond(two: tuple[str, str, Path]) -> None:
    """The others are shown; the command fails only if none responds."""
    first, second, _ = two
    done = tool("stats", f"{first},{NOWHERE}")
    assert done.code == 0
    assert "2 servers, 1 of 2 failed, 4 workers" in done.out
    assert f"cannot connect to {NOWHERE}" in done.out
    found = json.loads(tool("stats", f"{first},{second},{NOWHERE}", "--output", "json").out)
    assert found["total"]["server"]["num_workers"] == 8
    assert [server["url"] for server in found["servers"]] == [first, second, NOWHERE]
    assert found["servers"][0] == {"url": first, **httpx.get(f"{first}/stats").json()}
    assert found["servers"][2]["error"].startswith(f"cannot connect to {NOWHERE}")
    done = tool("stats", f"{NOWHERE},{NOWHERE}2")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"teleloader: all 2 servers failed, the first one: cannot connect to {NOWHERE}")


def test_stats_of_several_servers_name_one_that_refuses_the_token(
    figures: tuple[MadeUpServer, str], start_server: StartServer, tmp_path: Path
) -> None:
    """The others are shown, as for a server with other statistics."""
    _, url = figures
    secret = tmp_path / "token"
    secret.write_text("s" * 40)
    secret.chmod(0o600)
    refusing = start_server("--port", "0", "--token-file", str(secret), HOSTED + "numbers")
    done = tool("stats", f"{url},{refusing.url},{url}/v1/datasets")
    assert done.code == 0
    assert "3 servers, 2 of 3 failed, 4 workers" in done.out
    assert f"{refusing.url} refused the request: authentication required" in done.out
    assert f"{url}/v1/datasets" in done.out
    done = tool("stats", f"{refusing.url},{NOWHERE}")
    assert (done.code, done.out) == (1, "")
    assert "all 2 servers failed, the first one: " in done.err
    assert "authentication required" in done.err


def test_stats_of_a_directory_name_the_servers_that_are_not_used(
    figures: tuple[MadeUpServer, str], tmp_path: Path
) -> None:
    """A token is not sent to them, so their statistics are missing from the total."""
    _, url = figures
    path = tmp_path / "servers"
    path.write_text(f"{url}\nhttp://10.99.0.9:8000\n")
    path.chmod(0o600)
    done = tool("stats", f"file://{path}")
    assert "1 server, 4 workers" in done.out
    assert "http://10.99.0.9:8000 is not used: without TLS" in done.out
    (problem,) = json.loads(tool("stats", f"file://{path}", "--output", "json").out)["problems"]
    assert problem.startswith("http://10.99.0.9:8000 is not used")


def test_stats_include_the_servers_of_the_same_supervisor(
    two: tuple[str, str, Path], figures: tuple[MadeUpServer, str]
) -> None:
    """A server reports their ports, so the URL of one is enough."""
    first, second, _ = two
    server, url = figures
    ports = [int(each.rpartition(":")[2]) for each in (url, first, second)]
    server.stats = dataclasses.replace(made_up(), server=dataclasses.replace(SERVER, ports=ports))
    assert tool("stats", url).out.startswith("3 servers, 12 workers")
    found = json.loads(tool("stats", url, "--output", "json").out)
    assert {each["url"] for each in found["servers"]} == {url, first, second}
    for ports[1] in (0, 65536):
        assert tool("stats", url).out.startswith("teleloader-server 1.2.3 on cpu-box")


def test_commands_accept_several_servers_and_directories(hosting: ServerProcess, tmp_path: Path) -> None:
    """A file that lists the server, and its URL twice."""
    path = tmp_path / "servers"
    path.write_text(hosting.url)
    path.chmod(0o600)
    for address in (f"{hosting.url},{hosting.url}/", f"file://{path}", f"{NOWHERE},{hosting.url}"):
        assert tool("audit", address, "numbers").code == 0
        server = address if address.startswith("file:") else hosting.url
        assert f"of numbers on {server}," in tool("peek", address, "numbers").out
        done = tool("bench", address, "numbers", "--seconds", "0.2")
        assert (done.code, done.err) == (0, "")


def test_stats_shows_a_limited_number_of_consumers_and_their_total(
    figures: tuple[MadeUpServer, str],
) -> None:
    """The number of shown consumers is limited, because a server may have a thousand."""
    server, url = figures
    server.stats = made_up(consumers=200)
    out = tool("stats", url, "--limit", "3").out
    assert "... and 197 more; use --limit to show more" in out
    assert "trainer-2" in out
    assert "trainer-3" not in out


def test_the_number_of_consumers_of_several_servers_is_limited_in_total() -> None:
    """`--limit` is not multiplied by the number of servers."""
    servers = [MadeUpServer(), MadeUpServer()]
    for name, server in zip("ab", servers, strict=True):
        consumers = [dataclasses.replace(CONSUMER, consumer=f"{name}-{number}") for number in range(3)]
        server.stats = dataclasses.replace(made_up(), consumers=consumers)
    with serving(servers[0]), serving(servers[1]):
        found = json.loads(
            tool("stats", ",".join(server.url for server in servers), "--limit", "2", "--output", "json").out
        )
    assert len(found["total"]["consumers"]) == 2


def test_a_pipe_gets_no_escapes_and_no_cut_lines(figures: tuple[MadeUpServer, str]) -> None:
    """Output to a pipe has no escape sequences and no truncated lines, whatever the consumers' names."""
    server, url = figures
    name = "a-very-long-name" * 10
    server.stats = dataclasses.replace(made_up(), consumers=[dataclasses.replace(CONSUMER, consumer=name)])
    out = tool("stats", url).out
    assert "\x1b" not in out
    assert any(name in line and "62 %" in line for line in out.splitlines())


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_is_not_too_narrow_for_the_figures(columns: int, figures: tuple[MadeUpServer, str]) -> None:
    """In narrow terminals, words are truncated, but not figures."""
    server, url = figures
    long = dataclasses.replace(CONSUMER, consumer="gpu-node-17.example.org:123456/rank17#0")
    server.stats = dataclasses.replace(made_up(), consumers=[long])
    with terminal(TOOLS, "stats", url, columns=columns) as screen:
        assert screen.wait() == 0
    lines = screen.text.splitlines()
    assert max(map(len, lines)) <= columns
    assert any("12.5 6.25 MiB  62 % workers" in line for line in lines)
    assert any("250 ms 93 %   1,234        0 120 MiB" in line for line in lines)
    assert any("rank17#0 " in line for line in lines), "the end of a name tells which it is"
    assert "25 ms / 80 ms 2 ms / 4 ms 400 us / 900 us" in " ".join(screen.text.split())
    assert "\x1b[" in screen.raw, "in colour"


def test_what_others_write_cannot_command_the_terminal(figures: tuple[MadeUpServer, str]) -> None:
    """Names of consumers and messages of exceptions, which others choose, are printed without control characters."""
    server, url = figures
    evil = "\x1b]0;owned\x07\x1b[2J[red]name"
    stages = {evil: DATASET.stages["fetch"], "[/x]": DATASET.stages["fetch"]}
    server.stats = dataclasses.replace(
        made_up(),
        consumers=[dataclasses.replace(CONSUMER, consumer=evil)],
        datasets=[dataclasses.replace(DATASET, stages=stages), DATASET],
    )
    with terminal(TOOLS, "stats", url) as screen:
        assert screen.wait() == 0
    assert "\x1b]" not in screen.raw
    assert "\x1b[2J" not in screen.raw
    assert "[red]name" in screen.text


def test_a_server_that_says_something_else_is_no_riddle() -> None:
    """The error lists the missing fields, and what to check."""
    server = MadeUpServer()

    async def other() -> dict[str, Any]:
        return {"server": {"version": "0.0.1"}, "a": 1}

    server.app.router.routes.clear()
    server.app.get("/stats")(other)
    with serving(server):
        done = tool("stats", server.url)
    assert done.code == 1
    assert "missing fields of Stats: consumers, consumers_total, datasets, workers" in done.err


def test_watching_goes_on_in_place_until_ctrl_c(figures: tuple[MadeUpServer, str]) -> None:
    """The command uses the alternate screen, restores the terminal, and exits with the code of SIGINT."""
    server, url = figures
    with terminal(TOOLS, "stats", url, "--watch", "--interval", "0.5", columns=80) as screen:
        screen.await_text("trainer-0: workers")
        server.stats = dataclasses.replace(made_up(), consumers=[dataclasses.replace(CONSUMER, consumer="another")])
        screen.await_text("another: workers")
        screen.press_ctrl_c()
        assert screen.wait() == 130
    assert screen.raw.index("\x1b[?1049h") < screen.raw.index("trainer-0")
    assert screen.raw.index("\x1b[?1049l") > screen.raw.rindex("another")
    assert "Traceback" not in screen.text


def test_watching_a_server_that_goes_away_goes_on() -> None:
    """The command continues, because the server may be restarting."""
    command = [sys.executable, "-c", TOOLS, "stats", "--watch", "--output", "json", "--interval", "0.5"]
    server = MadeUpServer()
    with serving(server):
        watching = subprocess.Popen([*command, server.url], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["server"]["host"] == "cpu-box"
    try:
        while "error" not in (said := json.loads(watching.stdout.readline())):
            pass
        assert "cannot connect to" in said["error"]
        assert "cannot connect to" in json.loads(watching.stdout.readline())["error"]
    finally:
        watching.send_signal(signal.SIGINT)
        watching.communicate()
    assert watching.returncode == 130


# -- peek


def test_peek_shows_what_a_batch_holds(hosting: ServerProcess) -> None:
    """The output has path, dtype, shape and range of each array."""
    done = tool("peek", hosting.url, "dicts", "2", "--batch-size", "4")
    assert done.code == 0
    rows = [line.split(maxsplit=2) for line in done.out.splitlines()]
    assert [row[:2] for row in rows[2:]] == [
        ["batch['image']", "uint8"], ["batch['label']", "int64"], ["batch['weight']", "float64"]
    ]  # fmt: skip
    assert rows[2][2].split() == ["(4,", "2,", "3)", "8", "to", "11"]


def test_peek_as_json_has_the_same(hosting: ServerProcess) -> None:
    """With --json the output has the same content for programs."""
    found = json.loads(tool("peek", hosting.url, "numbers", "--indices", "3,5", "--output", "json").out)
    assert (found["dataset"], found["batch"], found["epoch"]) == ("numbers", 0, 0)
    assert found["parts"] == [
        {"path": "batch[0]", "type": "int64", "shape": [2], "value": "3 to 5"},
        {"path": "batch[1]", "type": "float64", "shape": [2], "value": "9 to 25"},
    ]


def test_peek_with_a_collate_function_and_a_type_that_is_not_imported(imaging: ServerProcess) -> None:
    """A command-line user cannot import a library: values of its types are shown as plain values."""
    done = tool("peek", imaging.url, "all", "--collate", CHECKED + "collate_images", "--output", "json")
    parts = json.loads(done.out)["parts"]
    assert (done.code, parts[0]["path"], parts[0]["type"]) == (0, "batch['images'][0]", "PIL.Image.Image")
    assert parts[-1]["shape"] == [6]


def test_peek_is_the_batch_that_training_gets(hosting: ServerProcess) -> None:
    """The same arguments give the same samples as in training."""
    loader = DataLoader(RemoteDataset(hosting.url, "numbers"), 3, shuffle=True, seed=5, output="numpy")
    expected = [batch[0] for batch in loader][7]
    done = tool(
        "peek", hosting.url, "numbers", "7", "--batch-size", "3", "--shuffle", "--seed", "5", "--output", "json"
    )
    assert json.loads(done.out)["parts"][0]["value"] == f"{expected.min()} to {expected.max()}"


def test_peek_at_a_batch_that_is_an_error(hosting: ServerProcess) -> None:
    """The command shows the worker's exception as training gets it, and exits with code 1."""
    done = tool("peek", hosting.url, "failing", "17")
    assert done.code == 1
    assert "ValueError: Caught ValueError in DataLoader worker process" in done.out
    assert "sample 17 is damaged" in done.out
    failed = tool("peek", hosting.url, "failing", "17", "--output", "json")
    assert failed.code == 1
    assert json.loads(failed.out)["error"]["message"] == "sample 17 is damaged"


def test_peek_debugs_only_where_the_server_allows_it(hosting: ServerProcess, start_server: StartServer) -> None:
    """With --debug on both sides, the server's own process loads, without workers."""
    refused = tool("peek", hosting.url, "failing", "17", "--debug")
    assert (refused.code, refused.out) == (2, "")
    assert "start the server with --debug" in refused.err
    server = start_server(HOSTED + "failing", "--debug")
    assert "in the loader server" in tool("peek", server.url, "failing", "17", "--debug").out
    assert "in DataLoader worker process" in tool("peek", server.url, "failing", "17").out


def test_peek_at_an_iterable_dataset(hosting: ServerProcess) -> None:
    """The first batch is shown; after the end there is none."""
    assert json.loads(tool("peek", hosting.url, "stream", "--batch-size", "5", "--output", "json").out)["parts"] == [
        {"path": "batch", "type": "int64", "shape": [5], "value": "0 to 4"}
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["numbers", "100"], "batch 100 is out of range"),
        (["nothing"], "unknown dataset 'nothing'"),
        (["numbers", "--batch-size", "0"], "batch_size must be an integer in [1, 1048576], got 0"),
        (["numbers", "--indices", "1,b"], "invalid indices '1,b': expected integers separated by commas"),
        (["numbers", "x"], "'x' is not a valid integer"),
    ],
)
def test_peek_at_what_is_not_there(arguments: list[str], words: str, hosting: ServerProcess) -> None:
    """The exit code is 2, with the reason."""
    done = tool("peek", hosting.url, *arguments)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


def test_peeking_is_not_a_consumer(hosting: ServerProcess) -> None:
    """Statistics cover training loops; single samples of a program count as one consumer."""
    tool("peek", hosting.url, "dicts", "3")
    tool("peek", hosting.url, "dicts", "--indices", "1,2")
    samples = RemoteDataset(hosting.url, "dicts")
    assert [samples[number]["label"] for number in range(3)] == [samples[number]["label"] for number in range(3)]
    found = [one["consumer"] for one in hosting.stats()["consumers"] if one["dataset"] == "dicts"]
    assert found == [f"{consumers_prefix()}samples"]


# -- bench


def test_bench_measures_what_it_shows(hosting: ServerProcess) -> None:
    """Rates equal counts divided by time, and the data wait is a part of the time."""
    done = tool("bench", hosting.url, "numbers", "--batch-size", "10", "--seconds", "1", "--output", "json")
    assert done.code == 0
    found = json.loads(done.out)
    assert found["dataset"] == "numbers"
    assert found["seconds"] == pytest.approx(1, abs=0.5)
    assert found["batches"] > 10, "several epochs"
    assert found["samples"] == 10 * found["batches"]
    assert found["batch_bytes"] == 10 * (8 + 8)
    assert found["batches_per_second"] == pytest.approx(found["batches"] / found["seconds"])
    assert found["bytes_per_second"] == pytest.approx(160 * found["batches_per_second"])
    assert 0 < found["waited"] < found["seconds"]
    assert 0 < found["wait_p50"] <= found["wait_p95"] <= found["wait_max"]
    assert (done.err, tool("bench", hosting.url, "numbers", "--seconds", "0.2").err) == ("", ""), "no bar in a pipe"


def test_bench_with_a_collate_function_and_a_type_that_is_not_imported(imaging: ServerProcess) -> None:
    """The pixels of all images are measured."""
    function = CHECKED + "collate_images"
    done = tool(
        "bench", imaging.url, "all", "--batch-size", "4", "--collate", function, "--seconds", "0.2", "--output", "json"
    )
    assert (done.code, json.loads(done.out)["batch_bytes"]) == (0, 4 * 6)


def test_bench_shows_the_servers_diagnosis(hosting: ServerProcess) -> None:
    """The diagnosis is right for a slow dataset and for a slow loop."""
    slow = tool("bench", hosting.url, "slowly", "--batch-size", "50", "--seconds", "5")
    # a client that waits for a CPU itself consumes no batch at once; other programs may use all CPUs
    assert re.search(
        r"diagnosis: (workers|io) .*(enough for training steps of .*(need 4 workers \(--num-workers 4\)|CPUs? busy)|"
        r"workers would keep up)|diagnosis: machine .*CPU",
        slow.out,
    )
    assert re.search(r"per busy worker +[\d,.]+ samples/s", slow.out)
    assert re.search(r"2 workers keep up with steps of .*; for other steps, the number of workers needed is", slow.out)
    thinking = tool("bench", hosting.url, "slowly", "--batch-size", "5", "--step", "0.1", "--seconds", "5")
    assert "diagnosis: training" in thinking.out
    found = re.search(r"per busy worker +([\d,.]+) samples/s", thinking.out)
    assert found is not None
    assert 100 < float(found[1].replace(",", "")) <= 1000, "samples of 1 ms, not the 25 samples/s of each of 2 workers"


def test_bench_reports_a_run_that_is_too_short_for_a_diagnosis(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is too short for a diagnosis states so; a longer one shows the server's diagnosis."""
    short = Measured(
        dataset="train", step=0.1, seconds=1.0, batches=1, samples=1, batch_bytes=1, first_batch=0.1, waited=0.5,
        wait_p50=0.1, wait_p95=0.1, wait_max=0.1,
    )  # fmt: skip
    unknown = Diagnosis("unknown", None, "A diagnosis needs 2 s of loading.")
    show(short, unknown, as_json=False)
    said = capsys.readouterr().out
    assert said.startswith("train: 1 batch in 1 s\n")
    assert said.endswith("diagnosis: unavailable, the run was too short. Use --seconds 3 or more\n")
    show(dataclasses.replace(short, seconds=3.0), unknown, as_json=False)
    assert capsys.readouterr().out.endswith("diagnosis: unknown. A diagnosis needs 2 s of loading.\n")
    show(dataclasses.replace(short, seconds=3.0, servers=2), unknown, as_json=False)
    assert "A diagnosis counts the workers of one server" in capsys.readouterr().out


def test_bench_in_a_terminal_shows_how_far_it_is(hosting: ServerProcess) -> None:
    """The command shows progress, and ends by Ctrl-C without a result."""
    arguments = ("bench", hosting.url, "slowly", "--batch-size", "4", "--seconds", "600")
    with terminal(TOOLS, *arguments, columns=80) as screen:
        screen.await_text(r"loading .* batches/s, [\d.]+ [KM]iB/s")
        screen.press_ctrl_c()
        assert screen.wait() == 130
    assert "waited" not in screen.text
    assert "Traceback" not in screen.text


def test_bench_ends_at_a_batch_that_is_an_error(hosting: ServerProcess) -> None:
    """The run would not be a measurement, so the command fails with the error."""
    done = tool("bench", hosting.url, "failing", "--batch-size", "1", "--seconds", "5")
    assert (done.code, done.out) == (1, "")
    assert "ValueError" in done.err
    assert "sample 17 is damaged" in done.err


def test_bench_of_an_iterable_dataset(hosting: ServerProcess) -> None:
    """The loader has the given number of shards."""
    done = tool(
        "bench", hosting.url, "stream", "--batch-size", "5", "--num-workers", "2", "--seconds", "1", "--output", "json"
    )
    assert done.code == 0
    assert json.loads(done.out)["batches"] > 0


# -- audit


@pytest.mark.parametrize("world_size", ["1", "4"])
def test_audit_of_an_epoch_that_is_whole(world_size: str, hosting: ServerProcess) -> None:
    """A complete epoch results in exit code 0 and a sentence."""
    done = tool("audit", hosting.url, "numbers", "--shuffle", "--world-size", world_size, "--epoch", "3")
    assert done.code == 0
    assert "100 visits" in done.out
    assert "each sample is visited exactly once" in done.out


def test_audit_of_a_mixture_counts_by_source(hosting: ServerProcess, tmp_path: Path) -> None:
    """The counts of each source match its weight, as planned and as received, and not without the file of a rank."""
    options = [
        "--weight",
        "numbers=3",
        "--weight",
        "dicts=1",
        "--samples",
        "96",
        "--world-size",
        "2",
        "--output",
        "json",
    ]
    done = tool("audit", hosting.url, *options)
    found = json.loads(done.out)
    assert (done.code, found["exact"]) == (0, True)
    assert [(each["source"], each["visits"]) for each in found["sources"]] == [("numbers", 72), ("dicts", 24)]
    files = [str(tmp_path / f"{rank}.npy") for rank in range(2)]
    sources = {name: RemoteDataset(hosting.url, name) for name in ("numbers", "dicts")}
    mixture = Mixture(sources, {"numbers": 3, "dicts": 1}, samples=96)
    for rank, file in enumerate(files):
        loader = DataLoader(mixture, 4, seed=0, rank=rank, world_size=2, output="numpy")
        np.save(file, count_visits(loader.plan(0), len(mixture)))
    done = tool("audit", hosting.url, *options[:-2], "--visits", files[0], "--visits", files[1])
    assert done.code == 0
    assert "numbers: 72 visits (75.0000%, expected 72.0)" in done.out
    assert "the visits to each source match its weight" in done.out
    np.save(files[1], np.zeros(len(mixture), np.int64))
    np.save(files[0], count_visits([np.arange(20)], len(mixture)))
    assert tool("audit", hosting.url, *options, "--visits", files[0], "--visits", files[1]).code == 1


@pytest.mark.parametrize("arguments", [("numbers", "--weight", "dicts=1"), ("--weight", "dicts=1", "--samples", "all")])
def test_invalid_arguments_of_an_audited_mixture_are_refused(
    arguments: tuple[str, ...], hosting: ServerProcess
) -> None:
    """The error states the valid values."""
    done = tool("audit", hosting.url, *arguments)
    assert done.code == 2
    assert "--weight excludes DATASET" in done.err or "samples must be a number of samples" in done.err


def test_audit_counts_received_batches(hosting: ServerProcess) -> None:
    """The audit counts received batches, not planned ones."""
    ranks, seed = 3, 11
    visits = [0] * 100
    for rank in range(ranks):
        loader = DataLoader(
            RemoteDataset(hosting.url, "numbers"), 7, shuffle=True, seed=seed, rank=rank, world_size=ranks,
            output="numpy",
        )  # fmt: skip
        for indices, _ in loader:
            for index in indices.tolist():
                visits[index] += 1
    done = tool("audit", hosting.url, "numbers", "--shuffle", "--seed", str(seed), "--world-size", str(ranks),
                "--batch-size", "7", "--output", "json")  # fmt: skip
    found = json.loads(done.out)
    assert done.code == 1
    assert (found["visits"], found["missing"]) == (sum(visits), 0)
    assert found["repeated_first"] == [index for index, count in enumerate(visits) if count > 1]


def test_audit_of_received_samples(hosting: ServerProcess, tmp_path: Path) -> None:
    """Visits that training loops saved are added over the ranks."""
    files = []
    for rank in range(2):
        loader = DataLoader(RemoteDataset(hosting.url, "numbers"), 10, seed=1, rank=rank, world_size=2, output="numpy")
        assert len(list(loader)) == 5
        np.save(tmp_path / f"{rank}.npy", loader.visits())
        files += ["--visits", str(tmp_path / f"{rank}.npy")]
    done = tool("audit", hosting.url, "numbers", *files)
    assert done.code == 0
    assert done.out.startswith("numbers, as received: 100 visits to 100 samples")
    done = tool("audit", hosting.url, "numbers", *files[:2], "--output", "json")
    assert done.code == 1
    assert (json.loads(done.out)["visits"], json.loads(done.out)["missing"]) == (50, 50)


def test_audit_refuses_files_that_are_not_visits(hosting: ServerProcess, tmp_path: Path) -> None:
    """The error states what is expected, and gives no advice to load pickles."""
    negative = np.ones(100, np.int64)
    negative[7] = -1
    np.save(tmp_path / "shape.npy", np.zeros(99, np.int64))
    np.save(tmp_path / "type.npy", np.zeros(100, np.int32))
    np.save(tmp_path / "negative.npy", negative)
    np.save(tmp_path / "objects.npy", np.array([None] * 100), allow_pickle=True)
    np.savez(tmp_path / "several.npz", visits=np.ones(100, np.int64))
    for name, content in {
        "empty": b"",
        "text": b"visits",
        "zip": b"PK\x03\x04damaged",
        "pickle": b"\x80\x04K\x01.",
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "negative.npy").read_bytes()[:-1])
    for path in sorted(tmp_path.iterdir()):
        done = tool("audit", hosting.url, "numbers", "--visits", str(path))
        assert done.code == 2, path
        assert f"invalid visits in {str(path)!r}: expected an int64 array of shape (100,), one non-negative" in done.err
        assert "pickle=" not in done.err


def test_audit_says_why_samples_are_missing_or_repeated(hosting: ServerProcess) -> None:
    """The exit code is 1, and the output has the reason, which the user judges."""
    dropped = tool("audit", hosting.url, "numbers", "--batch-size", "9", "--drop-last")
    assert dropped.code == 1
    assert "never visited: 1 sample (99), omitted by --drop-last" in dropped.out
    padded = tool("audit", hosting.url, "numbers", "--world-size", "3")
    assert padded.code == 1
    assert "visited more than once: 2 samples (0, 1), for equal sample counts of all ranks (--tail pad)" in padded.out


class Sized:
    """Iterable-style dataset with a length."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_audit_of_a_dataset_without_numbers() -> None:
    """An iterable-style dataset has no plan, even if it has a length."""
    with serve(Sized(), num_workers=1) as url:
        done = tool("audit", url)
    assert done.code == 2
    assert "the order of an iterable-style dataset is unknown" in done.err
