"""Exhausted resources of the machine that no other module covers: full disks, and limits on processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from teleloader import DataLoader, RemoteDataset
from tests.conftest import ServerProcess, eventually

MANY = "many=tests.end_to_end.hosted:many"
SAMPLES = 100_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 64 KiB; skip the test where this process may not mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs Linux and the permission to mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(disk: Path) -> Path:
    """Fill a disk; return the file to delete."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return filler


def epoch(url: str) -> int:
    """Return the number of samples in an epoch."""
    return sum(len(batch) for batch in DataLoader(RemoteDataset(url, "many"), 1000))


def test_a_server_survives_a_full_disk_for_its_log(tmp_path: Path) -> None:
    """Log lines are lost, and batches are not."""
    program = "from teleloader_server.cli import main; main()"
    announced = tmp_path / "servers"
    command = [sys.executable, "-c", program, MANY, "--port", "0", "-n", "1", "--announce", f"file://{announced}"]
    with Path("/dev/full").open("w") as full, subprocess.Popen(command, stdout=full, stderr=full) as server:
        eventually(lambda: announced.exists() and announced.read_text())
        url = announced.read_text().split()[0]
        assert epoch(url) == SAMPLES
        os.kill(httpx.get(f"{url}/stats").json()["workers"][0]["pid"], 9)
        assert epoch(url) == SAMPLES
        server.send_signal(signal.SIGTERM)
    assert server.returncode == 0


def test_an_announcement_waits_for_a_full_disk(disk: Path) -> None:
    """The server serves clients that know its URL, logs the cause, and announces itself once there is room."""
    filler, servers = fill(disk), disk / "job.servers"
    server = ServerProcess("--port", "0", MANY, "-n", "1", "--announce", f"file://{servers}")
    server.await_line("No space left on device")
    assert epoch(server.url) == SAMPLES
    filler.unlink()
    eventually(lambda: servers.exists() and server.url in servers.read_text(), timeout=60)
    assert server.end() == 0
