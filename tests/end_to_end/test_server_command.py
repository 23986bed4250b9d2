"""``teleloader-server``: its banner, its log, and restarts after changes of the code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from teleloader import DataLoader, RemoteDataset
from tests.conftest import ROOT, StartServer
from tests.end_to_end.terminal import SERVER, piped, terminal

HOSTED = "tests.end_to_end.hosted:"


# -- help and banner


def test_help_shows_what_to_type() -> None:
    """The help has examples for the server, for checking a dataset, and for the training process."""
    done = piped(SERVER, "--help")
    assert done.code == 0
    for example in ("teleloader-server --demo", "teleloader-server check my_package.data:train", "RemoteDataset("):
        assert example in done.out
    assert "Usage: teleloader-server check [OPTIONS] [DATASET]..." in piped(SERVER, "check", "--help").out


def test_in_a_terminal_the_banner_says_all_at_a_glance() -> None:
    """The banner has URL, datasets with sizes, workers, memory, client code and dashboard."""
    arguments = (HOSTED + "numbers", HOSTED + "stream", "--port", "0", "--num-workers", "1", "--memory-budget", "64MiB")
    with terminal(SERVER, *arguments, columns=100) as screen:
        url = screen.await_text(r"is ready at (http://127.0.0.1:\d+) \(Ctrl-C stops it\)")[1]
        screen.await_text(f"dashboard +{url}/\n")
        screen.press_ctrl_c()
        assert screen.wait() == 0
    lines = screen.text.partition(" is ready at ")[2].splitlines()
    for line in (
        "  dataset    numbers, map-style, 100 samples",
        "  dataset    stream, iterable-style, unknown length",
        f"  watch      teleloader stats {url} --watch",
        "  memory     up to 64 MiB of prefetched batches",
        f'  connect    DataLoader(RemoteDataset("{url}", "numbers"), batch_size=32)',
    ):
        assert line in lines
    assert any(line.startswith("  workers    1 process; ") for line in lines)
    assert max(len(line) for line in lines if line.startswith("  ")) <= 100


def test_in_a_pipe_the_banner_is_lines_of_the_log(start_server: StartServer) -> None:
    """In a pipe, the banner is log lines with time and level, without escape sequences."""
    server = start_server(HOSTED + "numbers", "--num-workers", "1")
    server.await_line(r"^[\d-]+ [\d:,]+ INFO +dataset: numbers, map-style, 100 samples$")
    server.await_line(rf"INFO +watch: teleloader stats {server.url} --watch")
    assert not any("\x1b" in line for line in server.log)


# -- closed streams


@pytest.mark.parametrize("closed", ["0", "1", "2", "012"])
def test_a_server_needs_no_standard_streams(closed: str, free_port: int) -> None:
    """With closed stdin, stdout and stderr, no socket uses their numbers, and the server exits normally."""
    closing = " ".join(f"{number}>&-" for number in closed)
    command = [sys.executable, "-c", SERVER, HOSTED + "numbers", "--port", str(free_port), "--num-workers", "1"]
    process = subprocess.Popen(["sh", "-c", f'exec "$@" {closing}', "sh", *command], cwd=ROOT)
    try:
        url = f"http://127.0.0.1:{free_port}"
        while length_at(url) is None:
            assert process.poll() is None
        streams = [Path(f"/proc/{process.pid}/fd/{number}").readlink() for number in closed]
        assert streams == [Path(os.devnull)] * len(closed)
        assert len(list(DataLoader(RemoteDataset(url, "numbers"), batch_size=10, output="numpy"))) == 10
    finally:
        process.terminate()
        code = process.wait(60)
    assert code == 0


# -- the log as JSON


def test_each_line_of_a_json_log_is_an_object(start_server: StartServer) -> None:
    """Each line has time, level, logger and message."""
    server = start_server(HOSTED + "numbers", "--num-workers", "1", "--log-format", "json")
    os.kill(server.worker_pids()[0], signal.SIGKILL)
    server.await_line("restarted as pid")
    assert server.end() == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in server.log]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    died = next(line for line in lines if "starting a new worker" in line["message"])
    assert (died["level"], died["logger"]) == ("warning", "teleloader_server.workers.processes")
    assert lines[-1]["message"] == "stopped"


@pytest.mark.parametrize("style", ["text", "json"])
def test_the_log_names_the_request_that_a_batch_failed_for(style: str, start_server: StartServer) -> None:
    """The line has batch, loader and the response's request ID; the log contains no secrets."""
    server = start_server(
        HOSTED + "failing", "--num-workers", "1", "--log-format", style, "--log-level", "debug"
    )  # fmt: skip
    key = httpx.post(f"{server.url}/v1/loaders", json={"dataset": "failing", "batch_size": 4}).json()["key"]
    headers = {"X-Request-ID": "job-7", "Authorization": "Bearer hidden", "Cookie": "a=hidden"}
    answer = httpx.get(f"{server.url}/v1/loaders/{key}/epochs/0/batches/4?token=hidden", headers=headers)
    assert answer.headers["x-request-id"] == "job-7"
    server.await_line("sample 17 is damaged")
    line = next(line for line in server.log if "sample 17 is damaged" in line)
    about = {"request": "job-7", "loader": key, "epoch": 0, "batch": 4, "dataset": "failing", "worker": 0}
    if style == "json":
        assert about.items() <= json.loads(line).items()
    else:
        assert line.endswith(" [" + " ".join(f"{name}={value}" for name, value in about.items()) + "]\n")
    os.kill(server.worker_pids()[0], signal.SIGKILL)
    server.await_line("restarted as pid")
    server.end()
    assert not any("hidden" in line for line in server.log)
    assert sum("job-7" in line for line in server.log) == 1, "what happens later is not because of it"


def test_a_problem_says_of_which_request_it_is(start_server: StartServer) -> None:
    """Errors for unknown, invalid and early rejected requests have the request ID."""
    server = start_server(HOSTED + "numbers", "--num-workers", "1")
    for path in ("/nothing", "/v1/loaders/none", "/stats?limit=many"):
        answer = httpx.get(server.url + path)
        assert answer.json()["request"] == answer.headers["x-request-id"]
    refused = httpx.post(f"{server.url}/v1/loaders", headers={"Content-Encoding": "gzip"}, content=b"{}")
    assert refused.status_code == 415
    assert refused.json()["request"] == refused.headers["x-request-id"]


# -- reloading


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a module that servers import and tests change."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    file = tmp_path / "changing_dataset.py"
    file.write_text("data = [0, 1, 2]\n")
    return file


def length_at(url: str) -> int | None:
    """Return the current length of the dataset; None while the server is unavailable."""
    try:
        datasets = httpx.get(f"{url}/v1/datasets").raise_for_status().json()
    except httpx.HTTPError:
        return None
    return int(datasets[0]["length"])


def test_a_change_of_the_code_starts_the_server_anew(module: Path, start_server: StartServer) -> None:
    """The new server has the same address and the changed code."""
    server = start_server("changing_dataset:data", "--reload", "--num-workers", "1")
    assert length_at(server.url) == 3
    module.write_text("data = [0, 1, 2, 3, 4]\n")
    server.await_line(r"changing_dataset\.py changed: restarting")
    while length_at(server.url) != 5:
        pass
    assert server.end() == 0


def test_code_that_is_broken_for_a_while(module: Path, start_server: StartServer) -> None:
    """The server shows the error, and waits for the next change."""
    server = start_server("changing_dataset:data", "--reload", "--num-workers", "1")
    module.write_text("data = [0, 1\n")
    server.await_line("SyntaxError")
    module.write_text("data = [0, 1]\n")
    while length_at(server.url) != 2:
        pass
    assert server.end() == 0


def test_training_continues_after_a_reload(module: Path, start_server: StartServer) -> None:
    """A reload is like any restart if the dataset's length is unchanged."""
    module.write_text("data = list(range(1000))\n")
    server = start_server("changing_dataset:data", "--reload", "--num-workers", "1")
    batches = iter(DataLoader(RemoteDataset(server.url), 10, output="numpy"))
    seen = [next(batches).tolist() for _ in range(10)]
    module.write_text("data = list(range(1000))  # a change\n")
    server.await_line("changed: restarting")
    seen += [batch.tolist() for batch in batches]
    assert [index for batch in seen for index in batch] == list(range(1000))


def test_a_change_of_the_configuration_starts_the_server_anew(
    module: Path, tmp_path: Path, start_server: StartServer
) -> None:
    """Changes of other files in its folder cause no restart."""
    config = tmp_path / "configuration" / "loader.toml"
    config.parent.mkdir()
    config.write_text('[datasets.it]\nfactory = "changing_dataset:data"\n')
    server = start_server("--config", str(config), "--reload", "--num-workers", "1")
    (config.parent / "notes.txt").write_text("unimportant")
    config.write_text('[datasets.it]\nfactory = "changing_dataset:longer"\n')
    module.write_text("data = [0]\nlonger = [0] * 9\n")
    while length_at(server.url) != 9:
        pass
    assert server.end() == 0
    assert not any("notes.txt" in line for line in server.log)


def test_ctrl_c_ends_both(module: Path) -> None:
    """The child receives SIGINT from the terminal once, and completes pending requests."""
    with terminal(SERVER, "changing_dataset:data", "--port", "0", "--num-workers", "1", "--reload") as screen:
        screen.await_text(r"watch +teleloader")
        screen.press_ctrl_c()
        assert screen.wait() == 0
    assert screen.text.count("stopping: completing") == 1
    assert "Traceback" not in screen.text
