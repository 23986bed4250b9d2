"""The commands as users run them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from teleloader import DataLoader, RemoteDataset
from tests.conftest import ROOT, StartServer

HOSTED = "tests.end_to_end.hosted:"


def run_server(*arguments: str, **environment: str) -> tuple[int, str]:
    """Return exit code and stderr of a server that does not start, on a free port by default."""
    command = [sys.executable, "-c", "from teleloader_server.cli import main; main()", *arguments]
    environment = {**os.environ, "TELELOADER_PORT": "0", **environment}
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    return done.returncode, " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no dataset: pass at least one as module:name, or --demo for the embedded dataset"),
        (["numbers"], "invalid dataset 'numbers': expected numbers:NAME"),
        (["nosuch:thing"], "module 'nosuch' not found"),
        (["json:nothing"], "module 'json' has no attribute 'nothing'"),
        ([HOSTED + "nothing"], "dataset 'nothing' must define __getitem__ and __len__, or __iter__; got int"),
        ([HOSTED + "broken"], "cannot build dataset 'broken'"),
        ([HOSTED + "broken", "--num-workers", "0"], "RuntimeError: the disk is not mounted"),
        ([HOSTED + "numbers", HOSTED + "numbers"], "duplicate dataset name 'numbers'"),
        (
            ["--demo", "--memory-budget", "3x"],
            "invalid size '3x': expected a number of bytes, or a size such as 512MiB",
        ),
        (["--demo", "--port", "70000"], "70000 is not in the range"),
        (["--demo", "--config", "/no/such/file.toml"], "cannot read /no/such/file.toml"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_a_server_that_cannot_start_says_why(arguments: list[str], words: str) -> None:
    """The exit code is 2, with an error instead of a traceback."""
    code, said = run_server(*arguments)
    assert code == 2
    assert words in said
    assert "teleloader_server/commands.py" not in said


def test_a_port_that_is_taken() -> None:
    """The error is one line with the address and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = run_server("--demo", "--port", str(port))
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use. Choose another --host or --port" in said


def test_options_come_from_the_environment_too() -> None:
    """TELELOADER_PORT sets --port, and an invalid value is rejected in the same way."""
    code, said = run_server("--demo", TELELOADER_PORT="70000")
    assert code == 2
    assert "70000 is not in the range" in said


def test_a_configuration_file(start_server: StartServer, tmp_path: Path) -> None:
    """A file configures datasets with arguments, functions and a version, and options of the server."""
    config = tmp_path / "loader.toml"
    config.write_text(
        f"""
        [server]
        num_workers = 1
        [datasets.squares]
        factory = "{HOSTED}make_squares"
        kwargs = {{ length = 7 }}
        collate = "{HOSTED}collate_sum"
        worker_init = "{HOSTED}remember_worker"
        version = "3"
        seeding = "sample"
        """
    )
    server = start_server("--config", str(config))
    dataset = RemoteDataset(server.url, "squares")
    assert (len(dataset), dataset.info.version, dataset.info.seeding) == (7, "3", "sample")
    assert list(DataLoader(dataset, 4)) == [{"sum": 0 + 1 + 4 + 9, "worker": 0}, {"sum": 16 + 25 + 36, "worker": 0}]
    assert len(server.stats()["workers"]) == 1


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("of_the_server", ["0", "2"])
def test_an_iterable_dataset(start_server: StartServer, of_the_server: str, num_workers: int) -> None:
    """Each loader has its own number of shards, whatever the server's other workers, and each epoch is complete."""
    server = start_server(f"{HOSTED}stream", "--num-workers", of_the_server)
    arguments: dict[str, Any] = {"num_workers": num_workers, "timeout": 10} if num_workers else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than CPUs
        loader = DataLoader(RemoteDataset(server.url), 4, output="numpy", **arguments)
        for _ in range(2):
            batches = [batch.tolist() for batch in loader]
            assert sorted(i for batch in batches for i in batch) == list(range(25))
            assert batches[0] == list(range(0, 4 * max(1, num_workers), max(1, num_workers)))
    assert all(worker["loader"] is None for worker in server.stats()["workers"]), "its workers ended with it"


def test_the_demo_trains() -> None:
    """The demo serves and learns the digits; exit code 0 means an accuracy above 95 %."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py", "--output", "numpy"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    accuracy = re.search(r"test accuracy ([\d.]+)%", done.stdout)
    assert accuracy
    assert float(accuracy[1]) > 95
    assert "Statistics of the server (/stats)" in done.stdout


def test_ctrl_c_ends_the_demo_and_its_server() -> None:
    """Ctrl-C leaves no process and shows no traceback."""
    demo = subprocess.Popen(
        [sys.executable, ROOT / "examples" / "demo.py", "--output", "numpy", "--epochs", "100000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # a test run in the background ignores SIGINT, and its children would inherit this
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert demo.stdout is not None
    url = demo.stdout.readline().split()[-1]
    while not _batches_sent(url):  # it trains
        pass
    family = psutil.Process(demo.pid).children(recursive=True)
    assert len(family) == 4, "server, fork server, two workers"
    errors = _press_ctrl_c(demo)
    assert demo.returncode == 130
    assert "Traceback" not in errors
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert (len(gone), alive) == (4, [])


def _batches_sent(url: str) -> int:
    """Return the number of batches that the demo's server has sent."""
    return sum(int(dataset["batches_sent"]) for dataset in httpx.get(f"{url}/stats").json()["datasets"])


def _press_ctrl_c(process: subprocess.Popen[str]) -> str:
    """Send SIGINT to the process group until it ends, as Python may drop one in a callback; return stderr."""
    for _ in range(3):
        os.killpg(process.pid, signal.SIGINT)
        try:
            return process.communicate(timeout=15)[1]
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    return process.communicate()[1]
