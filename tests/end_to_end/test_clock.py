"""Steps of the system clock while a training loop loads: durations are unaffected, dates are not.

`clock.c` changes the clock that a process sees. It is compiled by the tests, which are skipped without a C compiler.
"""

from __future__ import annotations

import datetime
import email.utils
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import pytest

from teleloader import DataLoader, RemoteDataset, Unauthorized
from tests.conftest import ServerProcess, eventually
from tests.end_to_end.certificates import Files
from tests.end_to_end.test_access import TokenTable

COMPILER: Final = shutil.which("cc") if sys.platform == "linux" else None
MANY: Final = "many=tests.end_to_end.hosted:many"
SAMPLES: Final = 100_000
BATCH_SIZE: Final = 400
DAY: Final = 24 * 3600

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs Linux and a C compiler")


class Clock:
    """System clock that processes see, with an offset from the true time."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock"
        self._library = folder / "clock.so"
        source = Path(__file__).with_name("clock.c")
        subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", self._library, source, "-ldl"], check=True)
        self._file.touch()
        self.step(0)

    @property
    def command(self) -> list[str]:
        """Return the beginning of the command of a process with this clock."""
        return ["env", f"LD_PRELOAD={self._library}", f"TELELOADER_TEST_CLOCK={self._file}"]

    def step(self, seconds: int) -> None:
        """Change the clock to this offset from the true time."""
        with self._file.open("r+b") as file:  # processes map the file
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    """Return a clock that shows the true time."""
    return Clock(tmp_path)


Start = Callable[..., ServerProcess]


@pytest.fixture
def start(clock: Clock) -> Iterator[Start]:
    """Start servers with this clock; they are ended with the test, and must not have logged an error."""
    servers: list[ServerProcess] = []

    def started(*arguments: str) -> ServerProcess:
        servers.append(ServerProcess("--port", "0", MANY, *arguments, prefix=clock.command))
        return servers[-1]

    yield started
    for server in servers:
        assert server.end() == 0
        log = "".join(server.log)
        assert "Traceback" not in log
        assert "ERROR" not in log


def shows(server: ServerProcess, days: int) -> bool:
    """Return True if the date in the server's responses differs from the true date by `days` days."""
    date = email.utils.parsedate_to_datetime(httpx.get(server.url).headers["date"])
    return round((date - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1)) == days


def test_an_epoch_survives_steps_of_the_clock(clock: Clock, start: Start) -> None:
    """All batches arrive once and in order, no worker is replaced, and statistics have no negative durations."""
    server = start("--num-workers", "2")
    seen: list[int] = []
    batches = iter(DataLoader(RemoteDataset(server.url, "many"), BATCH_SIZE, output="numpy"))
    for days in (-400, 400, 0):
        for _ in range(20):
            seen += next(batches).tolist()
        clock.step(days * DAY)
        eventually(partial(shows, server, days))
        stats = server.stats()
        assert 0 <= stats["server"]["uptime"] < 1000
        assert all(consumer["batches_per_second"] >= 0 for consumer in stats["consumers"])
    for batch in batches:
        seen += batch.tolist()
    assert seen == list(range(SAMPLES))
    assert server.stats()["server"]["worker_restarts"] == 0


def test_an_announced_server_stays_known_when_the_clock_steps(clock: Clock, start: Start) -> None:
    """The time after which a silent server is forgotten is a duration."""
    registry = start()
    server = start("--announce", f"registry+{registry.url}")

    def known() -> list[str]:
        return [each["url"] for each in httpx.get(f"{registry.url}/v1/servers").raise_for_status().json()["servers"]]

    eventually(known)
    for days in (-400, 400, 0):
        clock.step(days * DAY)
        assert known()
        assert len(next(iter(DataLoader(RemoteDataset(f"registry+{registry.url}", "many"), BATCH_SIZE)))) == BATCH_SIZE
    assert server.process.poll() is None


def test_a_token_expires_when_the_clock_reaches_its_date(clock: Clock, start: Start, tmp_path: Path) -> None:
    """Also in the middle of an epoch; when a wrong clock is corrected, the token is valid again."""
    table = TokenTable(tmp_path / "tokens.toml")
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    token = table.add("trainer", expires=until.isoformat(timespec="seconds"))
    server = start("--tokens", table.write())
    dataset = RemoteDataset(server.url, "many", token=token)
    batches = iter(DataLoader(dataset, BATCH_SIZE, num_workers=1, prefetch_factor=2, output="numpy"))
    next(batches)
    clock.step(2 * DAY)
    with pytest.raises(Unauthorized, match="'trainer' has expired"):
        list(batches)
    clock.step(0)
    assert len(list(DataLoader(dataset, BATCH_SIZE))) == SAMPLES / BATCH_SIZE


def test_a_session_of_the_dashboard_ends_after_a_duration(clock: Clock, start: Start, tmp_path: Path) -> None:
    """A step of the clock by more than 12 hours does not end it, but its token's date does."""
    table = TokenTable(tmp_path / "tokens.toml")
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=10)
    token = table.add("operator", "stats", expires=until.isoformat(timespec="seconds"))
    server = start("--tokens", table.write())
    with httpx.Client(base_url=server.url) as browser:
        browser.post("/session", json={"token": token}).raise_for_status()
        (cookie,) = browser.cookies.jar
        headers = {"Cookie": f"{cookie.name}={cookie.value}"}  # whatever this process takes its lifetime for
        clock.step(2 * DAY)
        assert httpx.get(f"{server.url}/stats", headers=headers).status_code == 200
        clock.step(20 * DAY)
        assert httpx.get(f"{server.url}/stats", headers=headers).status_code == 401


SCRIPT = """
import sys
from teleloader import DataLoader, RemoteDataset, Unauthorized
from teleloader import TlsError
batches = iter(DataLoader(RemoteDataset(sys.argv[1], "many", ca=sys.argv[2]), 400, output="numpy"))
next(batches)
print("started", flush=True)
sys.stdin.readline()
print(1 + sum(1 for _ in batches), flush=True)
try:
    RemoteDataset(sys.argv[1], "many", ca=sys.argv[2])
except TlsError as error:
    print(error, flush=True)
"""


def test_an_expired_certificate_ends_no_connection(clock: Clock, tmp_path: Path) -> None:
    """A running epoch keeps its connection; a new connection is refused, and the error names the reason."""
    files = Files(tmp_path)
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    certificate, key = files.make("server", "127.0.0.1", until=until)
    server = ServerProcess("--port", "0", MANY, "--ssl-certfile", certificate, "--ssl-keyfile", key)
    command = [*clock.command, sys.executable, "-c", SCRIPT, server.url, files.ca]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as trainer:
        assert trainer.stdin is not None
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "started\n"
        clock.step(2 * DAY)
        trainer.stdin.write("\n")
        trainer.stdin.close()
        count, refusal = trainer.stdout.readline(), trainer.stdout.read()
    assert trainer.returncode == 0
    assert int(count) == SAMPLES / BATCH_SIZE
    assert "expired" in refusal
    assert server.end() == 0
