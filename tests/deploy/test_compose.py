"""Test of docker-compose.yml with real containers; runs if TELELOADER_TEST_COMPOSE="docker compose" is set."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT

COMPOSE = os.environ.get("TELELOADER_TEST_COMPOSE", "")
PROJECT = "teleloader-test"
URL = "http://127.0.0.1:8000"
TRAINERS = ("trainer-0", "trainer-1")
EPOCHS = 200

pytestmark = [
    pytest.mark.skipif(not COMPOSE, reason='needs TELELOADER_TEST_COMPOSE, "docker compose" say'),
    pytest.mark.timeout(600),
]


def compose(*arguments: str) -> None:
    """Run a command of docker compose."""
    environment = {**os.environ, "EPOCHS": str(EPOCHS)}
    subprocess.run([*COMPOSE.split(), "-p", PROJECT, *arguments], cwd=ROOT, check=True, env=environment)


def log_of(service: str) -> str:
    """Return the log of a service; podman-compose cannot show characters other than ASCII."""
    engine = Path(COMPOSE.split()[0]).name.removesuffix("-compose")
    labels = {"project": PROJECT, "service": service}
    filters = [f"--filter=label=com.docker.compose.{name}={value}" for name, value in labels.items()]
    found = subprocess.run([engine, "ps", "--all", "--quiet", *filters], check=True, capture_output=True, text=True)
    return subprocess.run([engine, "logs", found.stdout.strip()], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def started() -> Iterator[None]:
    """Start all services, on images that were built before."""
    subprocess.run([ROOT / "docker" / "make-secrets.sh"], check=True)
    compose("up", "--detach", "--no-build")
    try:
        yield
    finally:
        compose("down")


def sent() -> float | None:
    """Return the number of batches that the loader has sent, from /metrics; None while the server is unavailable."""
    token = (ROOT / "docker" / "secrets" / "prometheus-token").read_text()
    try:
        answer = httpx.get(f"{URL}/metrics", headers={"Authorization": f"Bearer {token}"}, trust_env=False)
    except httpx.TransportError:
        return None
    counted = re.findall(r'^teleloader_batches_sent_total\{dataset="digits-train"\} (\S+)$', answer.text, re.MULTILINE)
    return float(counted[0]) if counted else 0


def learned(trainer: str) -> list[str]:
    """Return the loss of each epoch and the result of a finished training process, without machine-dependent output."""
    while "test accuracy" not in (log := log_of(trainer)):
        time.sleep(0.5)
    return re.findall(r"epoch +\d+|loss [\d.]+|[\d,]+ batches, [\d,]+ samples|test accuracy .*", log)


def test_a_loader_that_is_killed_and_started_again_loses_nothing(started: None) -> None:
    """A restart of the loader changes no digit of either training process's results: both receive every batch once."""
    while (sent() or 0) < EPOCHS:  # in the first fifteenth of the work
        time.sleep(0.1)
    compose("kill", "loader")
    assert sent() is None
    compose("start", "loader")
    disturbed = [learned(trainer) for trainer in TRAINERS]
    restarted = sent()
    assert restarted is not None
    assert restarted > EPOCHS
    for seen in disturbed:
        assert len([line for line in seen if line.startswith("loss")]) == EPOCHS
    compose("up", "--detach", "--no-build", "--force-recreate", *TRAINERS)
    assert [learned(trainer) for trainer in TRAINERS] == disturbed
