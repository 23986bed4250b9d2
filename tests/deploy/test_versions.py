"""Clients, servers and saved states of the previous release work together with those of this checkout.

``TELELOADER_TEST_PREVIOUS`` is the Python interpreter of an environment with the previous release and the same versions
of NumPy and torch; the nightly run creates it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ROOT, ServerProcess, eventually

THIS, PREVIOUS = sys.executable, os.environ.get("TELELOADER_TEST_PREVIOUS", "")
VERSIONS = {THIS: "this", PREVIOUS: "previous"}
BOTH_WAYS = [(PREVIOUS, THIS), (THIS, PREVIOUS)]

pytestmark = pytest.mark.skipif(not PREVIOUS, reason="set TELELOADER_TEST_PREVIOUS")

DATA = """
import random, time
import numpy as np

class Numbers:
    def __len__(self):
        return 2000

    def __getitem__(self, index):
        time.sleep(0.0005)
        return index, np.random.random(), random.random()

class Stream:
    def __iter__(self):
        from teleloader_server import get_worker_info
        worker = get_worker_info()
        return iter(range(worker.id, 500, worker.num_workers))

numbers, stream = Numbers(), Stream()
"""

CLIENT = """
import json, os, sys, time
from teleloader import DataLoader, RemoteDataset

urls, name, options, state, count, slow = json.loads(sys.argv[1])
loader = DataLoader(RemoteDataset(urls, name), output="numpy", **options)
if state:
    loader.load_state_dict(state)
received = []
for batch in loader:
    received.append([column.tolist() for column in (batch if isinstance(batch, tuple | list) else [batch])])
    if len(received) == count:
        break
    if slow and os.path.exists(slow):
        time.sleep(0.5)
json.dump([received, loader.state_dict()], sys.stdout)
"""

ORDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "seeded": ("numbers", {"batch_size": 5, "shuffle": True, "seed": 7}),
    "sampler": ("numbers", {"batch_size": 5, "sampler": list(range(1999, -1, -1))}),
    "compressed": ("numbers", {"batch_size": 5, "compression": "zstd", "seed": 7}),
    "iterable": ("stream", {"batch_size": 5, "num_workers": 2}),
}
"""Dataset and loader arguments for each kind of order."""

Start = Callable[..., ServerProcess]


@contextmanager
def servers_in(folder: Path) -> Iterator[Start]:
    """Yield a function that starts a server, given the interpreter; the servers are ended with the context."""
    (folder / "data.py").write_text(DATA)
    environment = {**os.environ, "PYTHONPATH": str(folder)}

    def started(python: str, port: int = 0) -> ServerProcess:
        options = ["data:numbers", "data:stream", "--num-workers", "1", "--port", str(port)]
        server = ServerProcess(*options, folder=folder, environment=environment, python=python)
        stack.callback(server.end)
        return server

    with ExitStack() as stack:
        yield started


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServerProcess]]:
    """Return a server of each release."""
    with servers_in(tmp_path_factory.mktemp("servers")) as start:
        yield {python: start(python) for python in (THIS, PREVIOUS)}


@pytest.fixture(scope="module")
def expected(servers: dict[str, ServerProcess]) -> dict[str, Any]:
    """Return the epoch of each order, as this release receives it from its own server."""
    return {order: result(client(THIS, [servers[THIS]], order))[0] for order in ORDERS}


def client(
    python: str, servers: list[ServerProcess], order: str, *, state: Any = None, count: int = 0, slow: str = ""
) -> subprocess.Popen[str]:
    """Start a client of an epoch, or of `count` batches; it pauses after each one while the file `slow` exists."""
    name, options = ORDERS[order]
    arguments = json.dumps([[server.url for server in servers], name, options, state, count, slow])
    return subprocess.Popen(
        [python, "-c", CLIENT, arguments], cwd=ROOT.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def result(process: subprocess.Popen[str]) -> Any:
    """Return the batches that a client received, and the state of its loader."""
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    return json.loads(output)


def computed(server: ServerProcess) -> int:
    """Return the number of batches that a server has computed."""
    return sum(dataset["batches_computed"] for dataset in server.stats()["datasets"])


def label(value: Any) -> str:
    """Return the versions in a parameter."""
    return "-".join(VERSIONS[one] for one in value) if isinstance(value, tuple) else str(value)


def test_the_interpreters_have_two_releases() -> None:
    """The environments differ in the installed teleloader, and not in NumPy and torch."""
    program = (
        "import teleloader, json; from importlib.metadata import version;"
        "print(json.dumps([teleloader.__file__, version('numpy'), version('torch')]))"
    )
    this, previous = (json.loads(subprocess.check_output([each, "-c", program], cwd="/")) for each in (THIS, PREVIOUS))
    assert this[0] != previous[0]
    assert this[1:] == previous[1:]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("versions", BOTH_WAYS, ids=label)
def test_an_epoch_is_the_same(servers: Any, expected: Any, versions: tuple[str, str], order: str) -> None:
    """A client receives the same bits from a server of the other release as within this release."""
    python, server = versions
    assert result(client(python, [servers[server]], order))[0] == expected[order]


@pytest.mark.parametrize("python", [THIS, PREVIOUS], ids=VERSIONS.get)
def test_servers_of_both_releases_share_an_epoch(expected: Any, tmp_path: Path, python: str) -> None:
    """The order is that of one server, and both servers compute batches."""
    with servers_in(tmp_path) as start:
        fleet = [start(PREVIOUS), start(THIS)]
        assert result(client(python, fleet, "seeded"))[0] == expected["seeded"]
        assert all(computed(server) > 10 for server in fleet)


@pytest.mark.parametrize("order", ["seeded", "sampler"])
@pytest.mark.parametrize("python", [THIS, PREVIOUS], ids=VERSIONS.get)
def test_a_fleet_is_updated_during_an_epoch(expected: Any, tmp_path: Path, python: str, order: str) -> None:
    """Two servers are replaced one after the other; the client receives each batch once and in order."""
    slow = tmp_path / "slow"
    slow.touch()
    with servers_in(tmp_path) as start:
        fleet = [start(PREVIOUS), start(PREVIOUS)]
        running = client(python, fleet, order, slow=str(slow))
        eventually(lambda: sum(map(computed, fleet)) > 5)
        for number, server in enumerate(fleet):
            port = httpx.URL(server.url).port
            assert server.end() == 0
            fleet[number] = start(THIS, port=port)
            eventually(partial(computed, fleet[number]))
        assert running.poll() is None, "the epoch ended before the update"
        slow.unlink()
        assert result(running)[0] == expected[order]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("versions", BOTH_WAYS, ids=label)
def test_a_saved_state_is_loaded(servers: Any, expected: Any, versions: tuple[str, str], order: str) -> None:
    """A run that one release saved after some batches continues in the other one with the next batch."""
    before, after = versions
    first, state = result(client(before, [servers[before]], order, count=7))
    rest, _ = result(client(after, [servers[after]], order, state=state))
    assert first + rest == expected[order]


@pytest.mark.parametrize("versions", BOTH_WAYS, ids=label)
def test_statistics_are_shown(servers: Any, versions: tuple[str, str]) -> None:
    """`teleloader stats` shows a server of the other release."""
    python, server = versions
    command = [python, "-c", "from teleloader.cli import main; main()", "stats", servers[server].url]
    done = subprocess.run(command, cwd="/", text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
