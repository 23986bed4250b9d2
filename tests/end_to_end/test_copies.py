"""Loaders that are sent to child processes, against real servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from teleloader import DataLoader, RemoteDataset
from tests.conftest import ROOT, StartServer, need
from tests.end_to_end.copies import load

TOKEN = "a-token-of-24-characters"


def in_child(method: str, url: str, token: str, environment: dict[str, str] | None = None) -> object:
    """Return what a child process loads that gets the loader by `method`."""
    command = [sys.executable, "-m", "tests.end_to_end.copies", method, url, token]
    return json.loads(
        subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, timeout=100).stdout
    )


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork", "joblib", "torch"])
def test_a_child_process_loads_with_its_copy(method: str, start_server: StartServer, tmp_path: Path) -> None:
    """Each way to start processes passes the loader on, with the token if the parent gave it to the constructor.

    joblib's tasks are pickled outside of the start of a process, so the child reads the token from its environment.
    """
    if method == "torch":
        need("torch")
    if method == "joblib":
        need("joblib")
    tokens = tmp_path / "tokens.toml"
    tokens.touch(0o600)
    tokens.write_text(f'[training]\ntoken = "{TOKEN}"\nscopes = ["read"]\n')
    server = start_server("numbers=tests.end_to_end.hosted:numbers", "--num-workers", "1", "--tokens", str(tokens))
    environment = {**os.environ, **({"TELELOADER_TOKEN": TOKEN} if method == "joblib" else {})}
    expected = load(DataLoader(RemoteDataset(server.url, token=TOKEN), 4, output="numpy"))
    assert expected
    assert in_child(method, server.url, TOKEN, environment) == expected
